"""Options that several verbs share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

Store = Annotated[
    str | None,
    typer.Option(metavar="FOLDER|URI", help="Where runs are kept."),
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE", help="File with a method in development; repeat it."),
]


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
    data_dir: Path = Path("data")
    cache_dir: Path = Path("~/.cache/fedbench")
    scale: str = ""
    settings: tuple[str, ...] = ()
    workers: int | None = None
    rerun: bool = False
    plain: bool = False


def plugin_files(given: list[Path] | None) -> tuple[Path, ...]:
    """The plugin files as absolute paths, which is how loaded modules are recognised."""
    return tuple(path.resolve() for path in given or ())
