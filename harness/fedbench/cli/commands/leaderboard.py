"""``fedbench leaderboard``: stored results as a table, in the terminal or as files."""

from __future__ import annotations

import enum
import json
import shlex
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbench.cli.console import complain, console, say
from fedbench.cli.options import Store, finite

if TYPE_CHECKING:
    import pandas as pd

    from fedbench.leaderboard.model import Board
    from fedbench.leaderboard.published import Published
    from fedbench.leaderboard.results import StoredResults
    from fedbench.suites.suite import Suite


class Format(enum.StrEnum):
    """How a leaderboard is shown."""

    table = "table"
    csv = "csv"
    md = "md"
    latex = "latex"
    html = "html"


class TestName(enum.StrEnum):
    """A paired test; `fedbench.leaderboard.rows.significance.Test` without what it imports."""

    __test__ = False  # pytest would take it for a class of tests

    t = "t"
    wilcoxon = "wilcoxon"


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How results are to be read by the command line; the suite decides what is None."""

    suite: str | None = None
    metric: str | None = None
    columns: tuple[str, ...] = ()
    baseline: str | None = None
    target: float | None = None
    test: str = TestName.t


def leaderboard(
    suite: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="Only this suite's results.")] = None,
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="Accuracy to rank by and take Δ of: tail, worst_client, ...")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Accuracies beside it: head, domain_accuracy (every domain); repeat it."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="ROW", help="Row, or method, that the others are compared with.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="%", min=0, max=100, callback=finite, help="Accuracy to count rounds to; else the baseline's last."
        ),
    ] = None,
    test: Annotated[TestName, typer.Option(help="Paired test of the differences over seeds.")] = TestName.t,
    network: Annotated[
        str | None, typer.Option(metavar="MBIT[,MS]", help="Also show the seconds of sending at this rate and latency.")
    ] = None,
    store: Store = None,
    published: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Published numbers; else those that ship with it.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Write every format into this folder.")
    ] = None,
    shape: Annotated[Format, typer.Option("--format", help="How it is shown.")] = Format.table,
) -> None:
    """Show the leaderboard, or write it to files.

    Every row is compared with the baseline over common seeds, and stands beside the numbers that its paper prints.
    """
    from fedbench.core.files import usable_folder
    from fedbench.leaderboard.board import of_suite
    from fedbench.leaderboard.formats.files import to_csv, write
    from fedbench.leaderboard.formats.latex import to_latex
    from fedbench.leaderboard.formats.markdown import to_markdown
    from fedbench.leaderboard.formats.terminal import render_terminal
    from fedbench.leaderboard.network import Link
    from fedbench.leaderboard.results import load_curves, load_runs
    from fedbench.leaderboard.rows.significance import Test
    from fedbench.tracking.schema import store_uri

    given = ReadingOptions(
        suite=suite, metric=metric, columns=tuple(column or ()), baseline=baseline, target=target, test=test.value
    )
    if output is not None:
        usable_folder(output, "--output")
    uri = store_uri(store, to_write=False)
    name, read = _reading(suite)
    stored = load_runs(uri, name)
    results = stored.finished if network is None else Link.parse(network).column(stored.finished)
    read = _overruled(read, given, stored)
    curves = load_curves(uri, results, *read.headlines)
    board = of_suite(read, results, curves, _published(read, results, published), Test(given.test), stored.failed)
    if given.metric is not None:
        _say_ranked_otherwise(board, given.metric, read.headline)
    if output is not None:
        made = _made_by(stored, given)
        write(results, board, output, made)
        _write_page(output / "index.html", read, uri, results, board, curves, made)
        say(f"written to {output}")
    elif shape is Format.table:
        console().print(render_terminal(board))
    elif shape is Format.html:
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "index.html"
            _write_page(page, read, uri, results, board, curves, _made_by(stored, given))
            sys.stdout.write(page.read_text(encoding="utf-8"))
    else:
        text = {Format.csv: to_csv, Format.md: to_markdown, Format.latex: to_latex}
        sys.stdout.write(text[shape](board))


def _overruled(read: Suite, given: ReadingOptions, stored: StoredResults) -> Suite:
    """The suite's way of reading, with what the command line says; FedbenchError for what no run has."""
    from fedbench.core.metric_names import EACH_DOMAIN
    from fedbench.leaderboard.named import baseline_named, metric_named

    results = stored.finished
    changes: dict[str, object] = {}
    if given.metric is not None:
        read = read.ranked_by(metric_named(results, given.metric))
    if given.columns:
        changes["columns"] = tuple(c if c in EACH_DOMAIN else metric_named(results, c) for c in given.columns)
    if given.baseline is not None:
        changes["baseline"] = baseline_named(results, given.baseline, stored.failed)
    if given.target is not None:
        changes["target"] = given.target
    return read.model_copy(update=changes)


def _say_ranked_otherwise(board: Board, given: str, headline: str) -> None:
    otherwise = sum(table.headline != headline for table in board.tables)
    if otherwise:
        complain(
            f"{otherwise} of {len(board.tables)} tables have no row with a mean of {given!r} and are ranked by "
            "the overall accuracy.",
            label="note",
        )


def _published(read: Suite, results: pd.DataFrame, folder: Path | None) -> Published | None:
    """What the suite's paper prints; None, and a line on stderr, where its file is not found."""
    from fedbench.leaderboard.published import published_folder, published_of, unreadable_columns

    place = published_folder(folder)
    facts = published_of(read, place)
    if read.published and facts is None:
        complain(
            f"published numbers are not shown: there is no {read.published}.csv in {place}; name its folder with "
            "--published.",
            label="note",
        )
    unread = [] if facts is None else unreadable_columns(facts, results)
    if unread:
        complain(f"{read.published}.csv has no column {', '.join(unread)}; keys with it pick no number.", label="note")
    return facts


def _write_page(
    path: Path, read: Suite, uri: str, results: pd.DataFrame, board: Board, curves: pd.DataFrame, command: str
) -> None:
    from fedbench.leaderboard.page import write_page
    from fedbench.leaderboard.results import load_federations

    federations = load_federations(uri, results)
    unknown = len(results) - len(federations)
    if unknown:
        complain(
            f"{unknown} of {len(results)} runs have no federation.json (of an older version, deleted, or not brought "
            "along with the store); the page shows clients and classes of the others.",
            label="note",
        )
    write_page(path, read.name, read.description, results, board, curves, federations, command)


def _made_by(stored: StoredResults, given: ReadingOptions) -> str:
    """All commands behind the results and failures, oldest first, then this one; a line each."""
    runs = [run for frame in (stored.finished, stored.failed) for run in frame.to_dict("records")]
    runs.sort(key=lambda run: run["started"])
    commands = [command for run in runs for command in json.loads(run["made_by"])]
    return "\n".join([*dict.fromkeys(commands), _command(given, Format.table)])


def _command(given: ReadingOptions, shape: Format) -> str:
    """The command without paths of this machine, since the file it is written to is for others; FILE by its name."""
    is_file = given.suite is not None and given.suite.endswith((".yaml", ".yml"))
    shown = replace(given, suite=Path(given.suite).name) if given.suite is not None and is_file else given
    values_of = {
        "--suite": [shown.suite],
        "--metric": [shown.metric],
        "--column": shown.columns,
        "--baseline": [shown.baseline],
        "--target": [None if shown.target is None else f"{shown.target:g}"],
        "--test": [shown.test if shown.test != TestName.t else None],
        "--format": [shape.value if shape is not Format.table else None],
    }
    options = [
        part for name, values in values_of.items() for value in values if value is not None for part in (name, value)
    ]
    return shlex.join(["fedbench", "leaderboard", *options])


def _reading(suite: str | None) -> tuple[str | None, Suite]:
    """What results are filed under, and how they are read: a name without a suite file (``adhoc``) is read as usual."""
    from fedbench.suites.suite import load_suite, suite_names

    if suite is None or not (suite in suite_names() or suite.endswith((".yaml", ".yml"))):
        from fedbench.suites.single import single

        return suite, single(None, None, None)
    read = load_suite(suite)
    return read.name, read
