"""Suites by name: the YAML files of the packages that are registered in the group ``fedbench.suites``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from importlib.metadata import EntryPoint
from pathlib import Path

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.kinds.registry import importing, installed


@dataclass(frozen=True)
class SuiteFile:
    """A suite of a package; an entry point names the package."""

    name: str
    point: EntryPoint

    @property
    def origin(self) -> str:
        """The package with its version."""
        return "unknown" if self.point.dist is None else f"{self.point.dist.name} {self.point.dist.version}"

    def read(self) -> bytes:
        """The file."""
        return resources.files(self.point.value).joinpath(f"{self.name}.yaml").read_bytes()


def suite_files() -> dict[str, SuiteFile]:
    """All suites by name, in alphabetical order. FedbenchError for a name that two packages have."""
    found: dict[str, SuiteFile] = {}
    for point in installed("suite"):
        for name in _names(point):
            other = found.setdefault(name, SuiteFile(name, point))
            if other.point.value != point.value:
                raise FedbenchError(
                    f"two packages have a suite called {name!r}: {other.origin} and {SuiteFile(name, point).origin}; "
                    "uninstall one."
                )
    return dict(sorted(found.items()))


def suite_bytes(name: str) -> tuple[bytes, str]:
    """Content and file name of a suite, by name, or by the path of a ``.yaml`` file."""
    if name.endswith((".yaml", ".yml")):
        try:
            content = Path(name).read_bytes() if Path(name).is_file() else None
        except OSError as error:
            raise FedbenchError(f"suite file {name!r} cannot be read: {error.strerror}.") from None
        if content is None:
            raise FedbenchError(f"suite file {name!r} does not exist; see `fedbench list suites` for names.")
        return content, name
    known = suite_files()
    if name not in known:
        raise unknown_name("suite", name, known, "See `fedbench list suites`, or give the path of a .yaml file.")
    return known[name].read(), f"{name}.yaml"


def _names(point: EntryPoint) -> list[str]:
    with importing(f"the suites of {point.value!r}", "reinstall it"):
        files = [entry.name for entry in resources.files(point.value).iterdir()]
    return [file.removesuffix(".yaml") for file in files if file.endswith(".yaml")]
