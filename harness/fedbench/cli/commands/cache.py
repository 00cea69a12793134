"""``fedbench cache``: what was rendered, decoded and encoded once and is kept, and removing it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbench.cli.console import cell, console, megabytes, say, table
from fedbench.cli.options import CACHE_DIR, CacheDir, finite
from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.wording import counted

if TYPE_CHECKING:
    from fedbench.cli.cache_folder import CacheEntry

KINDS = ("features", "data")

cache = typer.Typer(
    help="Show or remove rendered data and features.",
    epilog="Example: fedbench cache list",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@cache.command("list", epilog="Example: fedbench cache list")
def list_cache(cache_dir: CacheDir = CACHE_DIR) -> None:
    """List the files of the cache folder: of what they are, how large and how old."""
    from fedbench.cli.cache_folder import entries

    folder = _folder(cache_dir)
    found = entries(folder)
    if not found:
        say(f"the cache {folder} is empty; runs fill it.")
        return
    made = table("kind", "data", "encoder", "shape", "MB", "age", right=("MB", "age"), whole=("kind", "shape"))
    for entry in found:
        shape = " + ".join(" x ".join(str(side) for side in shape) for shape in entry.shapes)
        made.add_row(*map(cell, (entry.kind, entry.data, entry.encoder, shape, megabytes(entry.size), _age(entry))))
    console().print(made)
    say(f"{_counted(found)} in {folder}")


@cache.command("clear", epilog="Example: fedbench cache clear --kind features --older-than 30")
def clear(
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND", help=f"Only {' or '.join(KINDS)}.")] = None,
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", help="Only what was made longer ago.", min=0, callback=finite)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    cache_dir: CacheDir = CACHE_DIR,
) -> None:
    """Remove files of the cache folder; runs make again what they need.

    Only fedbench's own files go. Runs under way keep what they read.
    """
    from fedbench.cli.cache_folder import entries, remove, remove_leftovers

    if kind is not None and kind not in KINDS:
        raise unknown_name("kind of cache file", kind, KINDS, "Example: fedbench cache clear --kind features.")
    folder = _folder(cache_dir)
    chosen = [
        entry
        for entry in entries(folder)
        if kind in (None, entry.kind) and (older_than is None or entry.days > older_than)
    ]
    if not chosen:
        remove_leftovers(folder)
        say(f"nothing to remove in {folder}.")
        return
    if not yes and not _agreed(f"Remove {_counted(chosen)} from {folder}?"):
        say("nothing was removed.")
        return
    freed = remove(chosen) + remove_leftovers(folder)
    say(f"removed {counted(len(chosen), 'file')}, {megabytes(freed)} MB freed")


def _folder(cache_dir: Path) -> Path:
    from fedbench.core.files import usable_folder

    return usable_folder(cache_dir, "--cache-dir", to_write=False)


def _agreed(question: str) -> bool:
    if not _in_terminal():
        raise FedbenchError("a pipe can't confirm that files are to be removed; add --yes.")
    return typer.confirm(question)


def _in_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _counted(chosen: Sequence[CacheEntry]) -> str:
    return f"{counted(len(chosen), 'file')}, {megabytes(sum(entry.size for entry in chosen))} MB"


def _age(entry: CacheEntry) -> str:
    """In the largest unit that fits."""
    for unit, length in (("d", 1.0), ("h", 1 / 24)):
        if entry.days >= length:
            return f"{entry.days / length:.0f} {unit}"
    return f"{max(0.0, entry.days) * 24 * 60:.0f} min"
