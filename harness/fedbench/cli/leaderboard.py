"""``fedbench leaderboard``: stored results as a table, in the terminal or as files."""

from __future__ import annotations

import enum
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbench.cli.console import console, say
from fedbench.cli.options import Store

if TYPE_CHECKING:
    from fedbench.suite import Suite


class Format(enum.StrEnum):
    """How a leaderboard is shown."""

    terminal = "terminal"
    markdown = "markdown"
    csv = "csv"


def leaderboard(
    suite: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="Only this suite's results.")] = None,
    store: Store = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Write every format into this folder.")
    ] = None,
    shape: Annotated[Format, typer.Option("--format", help="How it is shown.")] = Format.terminal,
) -> None:
    """Show the leaderboard, or write it to files."""
    from fedbench.leaderboard import leaderboard as rank
    from fedbench.leaderboard import load_results, render_terminal, to_markdown, write
    from fedbench.tracking import store_uri

    uri = store_uri(store)
    name, read = _reading(suite)
    results = load_results(uri, name)
    board = rank(results, read.columns, read.baseline, read.headline, read.setting_names)
    if output is not None:
        write(results, board, output, _command(suite, shape))
        say(f"written to {output}")
        return
    if shape is Format.terminal:
        console().print(render_terminal(board))
    else:
        sys.stdout.write(to_markdown(board) if shape is Format.markdown else board.to_csv(index=False))


def _command(suite: str | None, shape: Format) -> str:
    """The command without paths of this machine, since the file it is written to is for others; FILE by its name."""
    is_file = suite is not None and suite.endswith((".yaml", ".yml"))
    named = [] if suite is None else ["--suite", Path(suite).name if is_file else suite]
    formatted = [] if shape is Format.terminal else ["--format", shape.value]
    return shlex.join(["fedbench", "leaderboard", *named, *formatted])


def _reading(suite: str | None) -> tuple[str | None, Suite]:
    """What results are filed under, and how they are read: a name without a suite file (``adhoc``) is read as usual."""
    from fedbench.expand import single
    from fedbench.suite import load_suite, suite_names

    if suite is None or not (suite in suite_names() or suite.endswith((".yaml", ".yml"))):
        return suite, single(None, None, None)
    read = load_suite(suite)
    return read.name, read
