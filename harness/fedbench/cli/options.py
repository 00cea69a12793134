"""Options that several verbs share."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fedbench.core.errors import FedbenchError


def finite(number: float | None) -> float | None:
    """A number of an option, unless it is infinite or none at all, which the bounds of an option let pass."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number.")
    return number


Store = Annotated[
    str | None,
    typer.Option(metavar="FOLDER|URI", help="Where runs are kept."),
]
Storage = Annotated[
    str | None,
    typer.Option("--storage", metavar="FILE|URL", help="Database of the studies; by default beside the runs."),
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE", help="File with a method in development; repeat it."),
]
DataDir = Annotated[
    Path,
    typer.Option(metavar="FOLDER", help="Data sets and weights.", envvar="FEDBENCH_DATA"),
]
CacheDir = Annotated[
    Path,
    typer.Option(metavar="FOLDER", help="Rendered data and features.", envvar="FEDBENCH_CACHE"),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--jobs", "-j", metavar="INT", help="Runs at the same time; by default one a core, on Ray what fits.", min=1
    ),
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Where: processes (one a run), in-process (for debuggers, isolates nothing), ray (a cluster).",
    ),
]
RayAddress = Annotated[
    str,
    typer.Option(metavar="ADDRESS", help="Ray cluster to join: auto, or host:port; else one is started here."),
]
RunCpus = Annotated[
    float, typer.Option(metavar="NUMBER", help="CPUs that Ray sets aside for a run.", min=0, callback=finite)
]
RunGpus = Annotated[
    float, typer.Option(metavar="NUMBER", help="GPUs that Ray sets aside for a run.", min=0, callback=finite)
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting: rounds=50, fedprox.mu=0.1; repeat it."),
]
Further = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Further settings behind the first --set.", show_default=False),
]
MOST = 1e9
"""Seconds or GB: the system's clocks and limits take no more."""
DATA_DIR, CACHE_DIR = Path("data"), Path("~/.cache/fedbench")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asked for."""

    suite: str | None = None
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    assignments: tuple[str, ...] = ()
    dataset: str | None = None
    scenario: str | None = None
    backbone: str | None = None
    plugin_files: tuple[Path, ...] = ()
    store: str | None = None
    data_dir: Path = DATA_DIR
    cache_dir: Path = CACHE_DIR
    scale: str = ""
    settings: tuple[str, ...] = ()
    workers: int | None = None
    rerun: bool = False
    plain: bool = False
    engine: str = "processes"
    ray_address: str = ""
    run_cpus: float = 1.0
    run_gpus: float = 0.0
    run_timeout: float | None = None
    memory_limit: float | None = None
    retries: int = 2
    patience: float = 120.0
    fail_fast: bool = False
    checkpoint_every: int = 0
    tuned: str = ""
    storage: str | None = None

    @property
    def overrides(self) -> tuple[str, ...]:
        """Everything given as ``--set``, or by an option that stands for one."""
        shorthands = {"dataset": self.dataset, "scenario": self.scenario, "backbone": self.backbone}
        return (*(f"{key}={value}" for key, value in shorthands.items() if value is not None), *self.assignments)


def command_line(verb: str, request: Request, *further: str, paths: bool = False) -> str:
    """The command that asks for the same again: FILEs by their names, and no folder of this machine.

    With ``paths`` FILEs are where they are, so that it works here.
    """
    is_file = request.suite is not None and request.suite.endswith((".yaml", ".yml"))
    suite = Path(request.suite).name if request.suite is not None and is_file and not paths else request.suite
    options = {
        "--suite": [suite] if suite is not None else [],
        "--scale": [request.scale] if request.scale else [],
        "--setting": request.settings,
        "--method": request.methods,
        "--seed": [str(seed) for seed in request.seeds],
        "--set": request.overrides,
        "--tuned": [request.tuned] if request.tuned else [],
        "--plugin": [str(path) if paths else path.name for path in request.plugin_files],
    }
    words = [word for option, values in options.items() for value in values for word in (option, value)]
    return shlex.join(["fedbench", verb, *words, *further])


def all_assignments(given: Sequence[str] | None, further: Sequence[str] | None) -> tuple[str, ...]:
    """The settings ``given`` by ``--set`` and those behind it, which need no ``--set`` of their own.

    FedbenchError for a word that is none, and for a setting that is set twice.
    """
    texts = {text.partition("=")[0].strip(): text for text in given or ()}
    for word in further or ():
        key, sign, _ = word.partition("=")
        if not sign:
            raise FedbenchError(
                f"unexpected argument {word!r}: settings are KEY=VALUE, a suite is --suite {word}, a method --method "
                f"{word}."
            )
        if texts.setdefault(key.strip(), word) != word:
            raise FedbenchError(f"{key.strip()} is set twice, by {texts[key.strip()]!r} and {word!r}; leave one out.")
    return (*(given or ()), *(further or ()))


def plugin_files(given: list[Path] | None) -> tuple[Path, ...]:
    """The plugin files as absolute paths, which is how loaded modules are recognised."""
    return tuple(path.resolve() for path in given or ())
