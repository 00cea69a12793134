"""``fedbench leaderboard``: stored results as a table, in the terminal or as files."""

from __future__ import annotations

import enum
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbench.cli.console import complain, console, say
from fedbench.cli.options import Plugins, Store, finite, plugin_files
from fedbench.core.errors import FedbenchError

if TYPE_CHECKING:
    from fedbench_boards.leaderboard.latex import PaperOptions
    from fedbench_boards.leaderboard.reading import ReadResults


class Format(enum.StrEnum):
    """How a leaderboard is shown."""

    table = "table"
    csv = "csv"
    md = "md"
    latex = "latex"
    html = "html"


class TestName(enum.StrEnum):
    """A paired test; `fedbench_boards.statistics.Test` without what it imports."""

    __test__ = False  # pytest would take it for a class of tests

    t = "t"
    wilcoxon = "wilcoxon"


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
    licence: Annotated[
        str, typer.Option(metavar="SPDX", help="Of the results, as --output's manifest.json names it.")
    ] = "CC-BY-4.0",
    shape: Annotated[Format, typer.Option("--format", help="How it is shown.")] = Format.table,
    columns: Annotated[
        str, typer.Option(metavar="A,B", help="LaTeX: these columns, in this order: accuracy,tail,mb,delta.")
    ] = "",
    order: Annotated[str, typer.Option(metavar="ROW,ROW", help="LaTeX: rows in this order.")] = "",
    group: Annotated[
        list[str] | None, typer.Option(metavar="NAME=ROW,ROW", help="LaTeX: rows below a heading; repeat it.")
    ] = None,
    across: Annotated[bool, typer.Option("--across", help="LaTeX: the settings side by side in one table.")] = False,
    caption: Annotated[str, typer.Option(metavar="TEXT", help="LaTeX: the caption.")] = "",
    label: Annotated[str, typer.Option(metavar="NAME", help="LaTeX: the label, tab:results.")] = "",
    plugin: Plugins = None,
) -> None:
    """Show the leaderboard, or write it to files.

    Every row is compared with the baseline over common seeds, and stands beside the numbers that its paper prints.
    """
    from fedbench.core.files import usable_folder
    from fedbench.tracking.schema import store_uri
    from fedbench_boards.leaderboard.formats import render_terminal, to_csv, to_markdown, write
    from fedbench_boards.leaderboard.latex import to_latex
    from fedbench_boards.leaderboard.reading import ReadingOptions, made_by, read_board

    plugin_files(plugin)
    paper = _paper_options(columns, order, group or [], across=across, caption=caption, label=label)
    if paper is not None and (shape is not Format.latex or output is not None):
        raise FedbenchError(
            "--columns, --order, --group, --across, --caption and --label are for --format latex, without --output."
        )
    given = ReadingOptions(
        suite=suite, metric=metric, columns=tuple(column or ()), baseline=baseline, target=target, test=test.value
    )
    if output is not None:
        usable_folder(output, "--output")
    uri = store_uri(store, to_write=False)
    read = read_board(given, uri, network=network, published=published, tell=partial(complain, label="note"))
    board = read.board
    if output is not None:
        made = made_by(read.stored, given)
        write(read.results, board, output, made)
        _write_page(output / "index.html", read, uri, made)
        from fedbench_boards.exchange.folder import write_manifest

        write_manifest(output, read, given, licence)
        say(f"written to {output}")
    elif shape is Format.table:
        console().print(render_terminal(board))
    elif shape is Format.html:
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "index.html"
            _write_page(page, read, uri, made_by(read.stored, given))
            sys.stdout.write(page.read_text(encoding="utf-8"))
    elif paper is not None:
        from fedbench_boards.leaderboard.latex import to_paper
        from fedbench_boards.statistics import Test

        sys.stdout.write(to_paper(board, read.results, paper, Test(test.value)))
    else:
        text = {Format.csv: to_csv, Format.md: to_markdown, Format.latex: to_latex}
        sys.stdout.write(text[shape](board))


def _paper_options(
    columns: str, order: str, groups: list[str], *, across: bool, caption: str, label: str
) -> PaperOptions | None:
    """How a paper's table is to look; None where nothing is said of it."""
    if not (columns or order or groups or across or caption or label):
        return None
    from fedbench_boards.leaderboard.latex import PaperOptions, parse_group

    return PaperOptions(
        columns=tuple(word.strip() for word in columns.split(",") if word.strip()),
        order=tuple(word.strip() for word in order.split(",") if word.strip()),
        groups=tuple(map(parse_group, groups)),
        across=across,
        caption=caption,
        label=label,
    )


def _write_page(path: Path, read: ReadResults, uri: str, command: str) -> None:
    from fedbench_boards.leaderboard.across import map_on_page
    from fedbench_boards.leaderboard.page import write_page
    from fedbench_boards.leaderboard.results import load_federations

    results = read.results
    federations = load_federations(uri, results)
    unknown = len(results) - len(federations)
    if unknown:
        complain(
            f"{unknown} of {len(results)} runs have no federation.json (deleted, or not brought along with the store); "
            "the page shows clients and classes of the others.",
            label="note",
        )
    suite = read.suite
    found = map_on_page(suite, read.board, read.curves)
    write_page(path, suite.name, suite.description, results, read.board, read.curves, federations, command, found)
