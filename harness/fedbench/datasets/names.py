"""The grammar of data set names, ``scheme[:location][?option=value&...]``, and reading the options' values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedbench.core.errors import FedbenchError, NotHere, unknown_name

LISTING = "See fedbench list datasets."


@dataclass(frozen=True)
class Source:
    """One scheme: the module that loads it, its description for the user, what can be typed after its name."""

    module: str
    description: str
    options: tuple[str, ...]
    location: str | None = None
    """What stands after the colon, as shown in usage lines; None where nothing may stand there."""

    def usage(self, scheme: str) -> str:
        """``scheme`` with its location, as it is typed."""
        return scheme if self.location is None else f"{scheme}:{self.location}"


@dataclass(frozen=True)
class DatasetName:
    """A data set name taken apart."""

    text: str
    scheme: str
    location: str
    options: Mapping[str, str]
    module: str
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
        # Python refuses to convert thousands of digits
        if not (value.isascii() and value.isdigit() and len(value) <= 20) or not low <= int(value) <= high:
            raise FedbenchError(
                f"data set {self.text!r}: option {option}={value!r} is not a whole number from {low} to {high}."
            )
        return int(value)

    def size(self) -> int | None:
        """The option ``size``, the side in pixels that images are brought to."""
        return self.integer("size", 8, 4096)


def parse_name(name: str, sources: Mapping[str, Source]) -> DatasetName:
    """``name`` taken apart and held against the schemes that exist."""
    head, question, tail = name.partition("?")
    scheme, colon, location = head.partition(":")
    if scheme not in sources:
        raise unknown_name("data set", scheme, sources, LISTING)
    source = sources[scheme]
    if source.location is None and colon:
        raise FedbenchError(f"data set {name!r}: nothing can follow the colon; type {scheme!r}. {LISTING}")
    if source.location is not None and not location:
        raise FedbenchError(f"data set {name!r} doesn't say where the data are; type {source.usage(scheme)}. {LISTING}")
    options: dict[str, str] = {}
    for part in tail.split("&") if question else ():
        option, _, value = part.partition("=")
        if not option or not value:
            raise FedbenchError(f"data set {name!r}: {part!r} is not option=value; type {scheme}?option=value&...")
        if option not in source.options:
            raise unknown_name(f"option of data set {scheme!r}", option, source.options)
        if option in options:
            raise FedbenchError(f"data set {name!r}: option {option!r} is given twice; keep one of them.")
        options[option] = value
    return DatasetName(name, scheme, location, options, source.module)


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
