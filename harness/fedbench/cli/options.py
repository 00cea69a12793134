"""Options that several verbs share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbench.core.files import expanded
from fedbench.kinds.registry import PLUGIN_FILES
from fedbench.workflow.asking import CACHE_DIR as CACHE_DIR
from fedbench.workflow.asking import DATA_DIR as DATA_DIR
from fedbench.workflow.asking import all_assignments as all_assignments
from fedbench.workflow.asking import files

if TYPE_CHECKING:
    from fedbench.runs.prepare import Settings

MOST = 1e9
"""Seconds or GB: the system's clocks and limits take no more."""


def finite(number: float | None) -> float | None:
    """A number of an option, unless it is infinite or none at all, which the bounds of an option let pass."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number.")
    return number


SuiteName = Annotated[str | None, typer.Option("--suite", metavar="NAME|FILE", help="A suite by name, or a YAML file.")]
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
    typer.Option("--plugin", metavar="FILE", help="File with a method, or another plug-in, in development; repeat it."),
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
        "--jobs",
        "-j",
        metavar="INT",
        help="Runs at the same time, with device=cuda on each card; by default one a core, on Ray what fits.",
        min=1,
    ),
]
Devices = Annotated[
    str,
    typer.Option(metavar="cuda:N,...", help="The cards for runs with device=cuda; by default all that are visible."),
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
Dataset = Annotated[
    str | None, typer.Option(metavar="NAME", help="Same as --set dataset=NAME; picks a grid's settings.")
]
Method = Annotated[
    list[str] | None, typer.Option("--method", metavar="METHOD", help="Only these rows, or others (a+b); repeat it.")
]
On = Annotated[list[str] | None, typer.Option(metavar="BACKBONE", help="Only rows on this backbone; repeat it.")]
Seed = Annotated[list[int] | None, typer.Option(metavar="INT", help="These seeds, not the suite's; repeat it.", min=0)]
Scale = Annotated[str, typer.Option(metavar="NAME", help="The suite's grid at this scale; else its first.")]
Setting = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only these settings of the grid; repeat it.")]
Baseline = Annotated[str | None, typer.Option(metavar="ROW", help="Row, or method, that others are compared with.")]
Metric = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What is ranked or drawn: tail, worst_client, ...; else the headline."),
]
OutputFolder = Annotated[
    Path, typer.Option("--output", "-o", metavar="FOLDER", help="A folder of the suite's name is written there.")
]


def plugin_files(given: list[Path] | None) -> tuple[Path, ...]:
    """The plugin files as absolute paths, which is how loaded modules are recognised.

    From here on what they define is known to the whole command.
    """
    absolute = files(given)
    PLUGIN_FILES.set(absolute)
    return absolute


def devices_of(given: str) -> tuple[str, ...]:
    """The cards of ``--devices``."""
    return tuple(device.strip() for device in given.split(",")) if given else ()


def settings_of(data_dir: Path, cache_dir: Path, plugin: list[Path] | None) -> Settings:
    """The folders and plugin files that the runs of a command read."""
    from fedbench.runs.prepare import Settings

    return Settings(expanded(data_dir, "--data-dir"), expanded(cache_dir, "--cache-dir"), plugin_files(plugin))
