"""The grammar of data set names, ``scheme[:location][?option=value&...]``, and reading the options' values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedbench.core.errors import FedbenchError, NotHere
from fedbench.kinds.base import taken_apart, whole_number
from fedbench.kinds.registry import build


@dataclass(frozen=True)
class DatasetName:
    """A data set name taken apart."""

    text: str
    scheme: str
    location: str
    options: Mapping[str, str]
    image_size: int | None = None
    """The side in pixels that images of differing sizes are brought to where no option says it; None: the usual one."""

    def choice(self, option: str, choices: Sequence[str]) -> str | None:
        """The value of ``option``, one of ``choices``; None where it is not given."""
        value = self.options.get(option)
        if value is not None and value not in choices:
            raise FedbenchError(
                f"data set {self.text!r}: option {option}={value!r} is not one of {', '.join(choices)}."
            )
        return value

    def integer(self, option: str, low: int, high: int) -> int | None:
        """The value of ``option``, an integer from ``low`` to ``high``; None where it is not given."""
        value = self.options.get(option)
        if value is None:
            return None
        number = whole_number(value, low, high)
        if number is None:
            raise FedbenchError(
                f"data set {self.text!r}: option {option}={value!r} is not a whole number from {low} to {high}."
            )
        return number

    def size(self) -> int | None:
        """The option ``size``, the side in pixels that images are brought to."""
        return self.integer("size", 8, 4096)


def parse_name(name: str) -> DatasetName:
    """``name`` taken apart and held against the sources that are registered."""
    source, location = build("data set", name)
    return DatasetName(name, source.name, location, taken_apart(name)[2])


def find(path: str, data_dir: Path, what: str) -> Path:
    """``path`` as typed where it exists, else below ``data_dir``; ``what`` names the thing in the error."""
    try:
        typed = Path(path).expanduser()
        for candidate in (typed, data_dir / typed):
            if candidate.exists():
                return candidate
    except (RuntimeError, OSError) as error:  # no such user's home, or a name longer than the file system takes
        raise FedbenchError(f"{what} {path[:200]!r} cannot be looked up: {error}.") from None
    below = "" if typed.is_absolute() else f", here or below {str(data_dir)!r}"
    raise NotHere(f"{what} {path!r} does not exist{below}; check the path or put the data there.")
