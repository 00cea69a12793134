"""Options that several verbs share."""

from __future__ import annotations

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


def plugin_files(given: list[Path] | None) -> tuple[Path, ...]:
    """The plugin files as absolute paths, which is how loaded modules are recognised."""
    return tuple(path.resolve() for path in given or ())
