"""What a result folder says of itself: digests of its files, the environment, the suite, the licence."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedbench.core.errors import FedbenchError
from fedbench.core.files import read_bytes, replacing
from fedbench.core.version import __version__
from fedbench_boards.leaderboard.reading import ReadingOptions, ReadResults

MANIFEST = "manifest.json"
LICENCE = "CC-BY-4.0"
"""Of results where nothing else is said; by its identifier in the SPDX list."""
FILES = ("results.csv", "leaderboard.csv", "leaderboard.md", "leaderboard.tex", "index.html")
"""What a leaderboard is written as."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Environment(_Record):
    """Where the folder was written. Runs on equal ones give equal numbers, to the last bit."""

    platform: str = ""
    """System, processor and the instructions that torch uses of it."""
    python: str = ""
    torch: str = ""


class SuiteNamed(_Record):
    """Which suite the results are of; of several, or of runs without a suite file, nothing is said."""

    name: str = ""
    version: int = 1


class Manifest(_Record):
    """The content of manifest.json."""

    fedbench: str = ""
    """The version that wrote the folder."""
    suite: SuiteNamed = SuiteNamed()
    licence: str = ""
    environment: Environment = Environment()
    reading: dict[str, Any] = Field(default_factory=dict)
    """Options of `fedbench leaderboard` that were given, see `ReadingOptions`."""
    files: dict[str, str] = Field(default_factory=dict)
    """Name -> sha256."""

    @property
    def options(self) -> ReadingOptions:
        """How the results were read."""
        known = {name: value for name, value in self.reading.items() if name in ReadingOptions.__dataclass_fields__}
        return ReadingOptions(**{**known, "columns": tuple(known.get("columns", ()))})


def environment_here() -> Environment:
    """Of this machine."""
    import torch

    # the same system on a processor with other vector instructions sums in another order
    of_cpu = torch.backends.cpu.get_cpu_capability()
    system = f"{platform.system()} {platform.machine()} {of_cpu}"
    return Environment(platform=system, python=platform.python_version(), torch=torch.__version__)


def write_manifest(
    folder: Path, read: ReadResults, given: ReadingOptions, licence: str, environment: Environment | None = None
) -> None:
    """Write manifest.json about the leaderboard that was written into ``folder``; FedbenchError where it can't be.

    ``environment`` is by default this machine's.
    """
    suites = set(read.results["suite"]) if len(read.results) else set()
    named = (
        SuiteNamed(name=read.suite.name, version=read.suite.version) if suites == {read.suite.name} else SuiteNamed()
    )
    # the suite's file has a place on this machine, its name is above
    options = {name: value for name, value in asdict(given).items() if value not in (None, ()) and name != "suite"}
    made = Manifest(
        fedbench=__version__,
        suite=named,
        licence=licence.strip(),
        environment=environment or environment_here(),
        reading=options,
        files=digests(folder, FILES),
    )
    with replacing(folder / MANIFEST, "manifest", "choose another --output") as temporary:
        temporary.write_text(json.dumps(made.model_dump(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def digests(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Name -> sha256 of those of the files ``names`` that ``folder`` has."""
    return {name: digest(folder / name) for name in names if (folder / name).is_file()}


def digest(file: Path) -> str:
    """sha256 of the file."""
    return hashlib.sha256(read_bytes(file)).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of ``folder``; FedbenchError where it has none, or one that can't be read."""
    file = folder / MANIFEST
    try:
        found: Mapping[str, Any] = json.loads(read_bytes(file))
        return Manifest.model_validate(found)
    except FileNotFoundError:
        raise FedbenchError(
            f"{str(folder)!r} has no {MANIFEST}; write it with `fedbench leaderboard --suite NAME --output FOLDER`."
        ) from None
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise FedbenchError(f"{str(file)!r} is no manifest: {where}: {error.errors()[0]['msg']}.") from None
    except (OSError, ValueError) as error:
        raise FedbenchError(f"{str(file)!r} can't be read: {error}.") from None
