"""``fedbench export``: stored runs as a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbench.cli.console import say
from fedbench.cli.options import Store
from fedbench.core.errors import unknown_name

FORMATS = ("parquet", "csv")


def export(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="An empty or a new folder.")],
    suite: Annotated[str | None, typer.Option(metavar="NAME", help="Of this suite alone.")] = None,
    how: Annotated[
        str, typer.Option("--format", metavar="NAME", help="parquet (a Hugging Face data set folder) or csv.")
    ] = "parquet",
    store: Store = None,
) -> None:
    """Write stored runs and their rounds as a data set that other programs read."""
    from fedbench.core.files import usable_folder
    from fedbench.leaderboard.formats import dataset_folder
    from fedbench.tracking.schema import store_uri

    if how not in FORMATS:
        raise unknown_name("format", how, FORMATS)
    usable_folder(output, "--output")
    written = dataset_folder.export(store_uri(store), suite, output, "csv" if how == "csv" else "parquet")
    say(f"{written} written to {output}")
    if how == "parquet":
        say(f'read them with datasets.load_dataset("{output}", "runs"), or "rounds"', style="dim")
