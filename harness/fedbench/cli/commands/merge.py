"""``fedbench merge``: runs of several stores in one."""

from __future__ import annotations

from typing import Annotated

import typer

from fedbench.cli.console import say
from fedbench.core.wording import counted


def merge(
    stores: Annotated[list[str], typer.Argument(metavar="STORE...", help="Folders or URIs of stores.")],
    into: Annotated[str, typer.Option("--into", metavar="STORE", help="Where they go; made where it is missing.")],
) -> None:
    """Copy the runs of stores into one, with curves and models; a run of the same id and code is copied once.

    Two such runs with different numbers are refused, before anything is copied.
    """
    from fedbench.exchange.merging import merge as merged

    for one in merged(stores, into, lambda run: say(f"copied {run}", style="dim")):
        left = f", {one.unfinished} not ended and left" if one.unfinished else ""
        say(f"{one.source}: {counted(one.copied, 'run')} copied, {one.skipped} in {into} already and skipped{left}")
