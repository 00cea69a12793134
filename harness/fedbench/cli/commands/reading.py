"""Stored runs: ``leaderboard`` and ``figure`` show them, ``evaluate`` repeats their scores, ``ui`` is MLflow's view."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedbench.cli.options import (
    Baseline,
    Metric,
    Plugins,
    Store,
    SuiteName,
    finite,
    plugin_files,
    settings_of,
)
from fedbench.core.errors import FedbenchError
from fedbench.core.wording import counted
from fedbench.workflow.asking import folders
from fedbench.workflow.console import complain, console, say, show_table

if TYPE_CHECKING:
    from fedbench.tracking.evaluation import Elsewhere, Evaluation
    from fedbench_boards.leaderboard.latex import PaperOptions
    from fedbench_boards.leaderboard.reading import ReadResults

DIFFERENT = 1
_HOST = "127.0.0.1"
"""This machine alone."""
_PATIENCE = 10.0
"""Seconds the server has to end by itself."""


def leaderboard(
    suite: SuiteName = None,
    metric: Metric = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Accuracies beside it: head, domain_accuracy (every domain); repeat it."),
    ] = None,
    baseline: Baseline = None,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="%", min=0, max=100, callback=finite, help="Accuracy to count rounds to; else the baseline's last."
        ),
    ] = None,
    test: Annotated[Literal["t", "wilcoxon"], typer.Option(help="Paired test of the differences over seeds.")] = "t",
    store: Store = None,
    results: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A result folder in place of a store; the suite is its own.")
    ] = None,
    published: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Published numbers; else those that ship with it.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Write a result folder: tables and page.")
    ] = None,
    licence: Annotated[
        str, typer.Option(metavar="SPDX", help="Of the results, as --output's manifest.json names it.")
    ] = "CC-BY-4.0",
    shape: Annotated[
        Literal["table", "csv", "md", "latex", "html"], typer.Option("--format", help="How it is shown.")
    ] = "table",
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
    """Show the leaderboard of a suite, or of all that are stored, or write it to files.

    Every row is compared with the baseline over common seeds, and stands beside the numbers that its paper prints.
    """
    from fedbench.core.files import usable_folder
    from fedbench.tracking.schema import store_uri
    from fedbench_boards.leaderboard.formats import render_terminal, to_csv, to_markdown, write
    from fedbench_boards.leaderboard.latex import to_latex, to_paper
    from fedbench_boards.leaderboard.reading import ReadingOptions, made_by, read_board
    from fedbench_boards.statistics import Test

    plugin_files(plugin)
    paper = _paper_options(columns, order, group or [], across=across, caption=caption, label=label)
    if paper is not None and (shape != "latex" or output is not None):
        raise FedbenchError(
            "--columns, --order, --group, --across, --caption and --label are for --format latex, without --output."
        )
    given = ReadingOptions(
        suite=suite, metric=metric, columns=tuple(column or ()), baseline=baseline, target=target, test=test
    )
    if output is not None and shape != "table":
        raise FedbenchError(f"--output writes every format, so --format {shape} has no effect; leave one out.")
    if output is not None:
        output = usable_folder(output, "--output")
    if results is not None and (output is not None or shape == "html" or store or published or target is not None):
        raise FedbenchError(
            "a folder has no curves: --results takes no --output, --format html, --store, --published and --target."
        )
    uri, tell = store_uri(store, to_write=False), partial(complain, label="note")
    if results is None:
        read = read_board(given, uri, published=published, tell=tell)
    else:
        from fedbench_boards.exchange.checks import read_results  # which imports torch

        read = read_results(results, given)
    board = read.board
    if output is not None:
        made = made_by(read.stored, given)
        write(read.results, board, output, made)
        _write_page(output / "index.html", read, uri, made)
        from fedbench_boards.exchange.folder import write_manifest

        write_manifest(output, read, given, licence)
        say(f"written to {output}")
    elif shape == "table":
        console().print(render_terminal(board))
    elif shape == "html":
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "index.html"
            _write_page(page, read, uri, made_by(read.stored, given))
            sys.stdout.write(page.read_text(encoding="utf-8"))
    elif paper is not None:
        sys.stdout.write(to_paper(board, read.results, paper, Test(test)))
    else:
        sys.stdout.write({"csv": to_csv, "md": to_markdown, "latex": to_latex}[shape](board))


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
    write_page(path, read, federations, command)


def figure(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="sweep, rounds, gains, gap, layers, entropies, embedding or holdings; see above."
        ),
    ],
    suite: Annotated[str, typer.Option(metavar="NAME|FILE", help="Whose runs are drawn.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="A .png, .svg or .pdf file.")],
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Setting on the axis: fedglcl.tau, dirichlet_alpha; two make a grid."),
    ] = None,
    metric: Metric = None,
    setting: Annotated[str | None, typer.Option(metavar="NAME", help="Only this setting of the suite.")] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", metavar="METHOD", help="Only rows of this method; repeat it.")
    ] = None,
    baseline: Baseline = None,
    store: Store = None,
    plugin: Plugins = None,
) -> None:
    """Draw a figure of recorded runs.

    sweep: a metric over one setting's values, or over two as a grid. rounds: a metric by round, of all classes and of
    their groups. gains: by how much rows are above the baseline, by group. gap: head minus tail over a setting.
    layers: what is measured of every layer after the last round, with cka in the stack. Of each row's model, of its
    first seed: entropies of its predictions, embedding of its features (t-SNE), holdings of the clients by cluster.
    """
    from fedbench.tracking.schema import store_uri
    from fedbench_boards.leaderboard import drawing
    from fedbench_boards.leaderboard.figures import drawn
    from fedbench_boards.leaderboard.reading import suite_of
    from fedbench_boards.leaderboard.results import load_results

    _, read = suite_of(suite)
    uri = store_uri(store, to_write=False)
    settings = settings_of(*folders(None, None), plugin)
    axes, methods, results = tuple(by or ()), tuple(method or ()), load_results(uri, read.name)
    made = drawn(
        kind, uri, read, results, settings, by=axes, metric=metric, setting=setting, methods=methods, baseline=baseline
    )
    drawing.save(made, output)
    say(f"written to {output}")


def evaluate(
    run_id: Annotated[str, typer.Argument(metavar="RUN_ID", help="fedbench's or MLflow's id, or its first digits.")],
    store: Store = None,
    plugin: Plugins = None,
    dataset: Annotated[
        str | None, typer.Option(help="The test split of another data set, whose classes may be others.")
    ] = None,
) -> None:
    """Evaluate the model of a recorded run again, or on another data set.

    Exit code 0 where every number is the recorded one to the last bit, 1 where one differs.
    """
    from fedbench.tracking.evaluation import evaluate_again, evaluate_elsewhere
    from fedbench.tracking.schema import store_uri

    settings, uri = settings_of(*folders(None, None), plugin), store_uri(store, to_write=False)
    if dataset is not None:
        _show_elsewhere(evaluate_elsewhere(uri, run_id, dataset, settings), dataset)
        return
    evaluation = evaluate_again(uri, run_id, settings)
    _show(evaluation)
    if not evaluation.is_equal:
        raise typer.Exit(DIFFERENT)


def _show(evaluation: Evaluation) -> None:
    """The metrics as a table, what was left out, the verdict, and what is known to differ."""
    run, frame = evaluation.run, evaluation.metrics
    say(run.info.run_name, style="bold")
    say(f"run {run.data.tags['fedbench.run_id']}, MLflow {run.info.run_id}")
    is_folded = frame["metric"].str.startswith("class_accuracy/") & (frame["recorded"] == frame["now"])
    rows = (
        (metric, number(recorded), number(now), number(difference, signed=True))
        for metric, recorded, now, difference in frame[~is_folded].itertuples(index=False, name=None)
    )
    numbers = ("recorded", "now", "difference")
    show_table(rows, "metric", *numbers, right=numbers)
    if is_folded.any():
        folded = counted(int(is_folded.sum()), "class", "classes")
        say(f"Equal as well: the accuracies of {folded}.", style="dim")
    if evaluation.left_out:
        say(f"Left out, since the final model does not give them: {', '.join(evaluation.left_out)}.", style="dim")
    if evaluation.new_metrics:
        say(f"Not recorded then, so compared with nothing: {', '.join(evaluation.new_metrics)}.", style="dim")
    _conclude(evaluation)


def _show_elsewhere(found: Elsewhere, dataset: str) -> None:
    """What the model scores on ``dataset``."""
    say(found.title, style="bold")
    others = ", other classes than those it was trained on" if found.is_renamed else ", those it was trained on"
    say(
        f"on {counted(found.samples, 'test sample')} of {dataset}, {counted(found.classes, 'class', 'classes')}{others}"
    )
    shown = [metric for metric in found.metrics if not metric.startswith("class_accuracy/")]
    show_table(((metric, number(found.metrics[metric])) for metric in shown), "metric", "now", right=("now",))


def _conclude(evaluation: Evaluation) -> None:
    causes = "; ".join(evaluation.causes)
    if evaluation.is_equal:
        # a method without a global model has none
        predictions = f" and all {evaluation.predictions} predictions" if evaluation.predictions else ""
        say(f"equal: every metric{predictions} {'are' if predictions else 'is'} as recorded, bit for bit.")
        if causes:
            say(f"That is so although something changed: {causes}.")
        return
    metrics = f"{len(evaluation.changed_metrics)} of {len(evaluation.metrics)} metrics"
    changed = f"{evaluation.changed_predictions} of {evaluation.predictions} predictions"
    say(f"different: {metrics} and {changed} are not the recorded ones.")
    if causes:
        say(f"What changed since: {causes}.")
    else:
        say(
            "Code, versions, data and weights are the recorded ones. On the machine that made the run the numbers are "
            "equal; another processor may round otherwise."
        )


def number(value: float, *, signed: bool = False) -> str:
    """A metric with as many digits as a reader needs; a difference that rounds to zero keeps its size. NaN: a dash."""
    if value != value:
        return "–"
    sign = "+" if signed and value else ""
    if value and abs(value) < 0.005:
        return f"{value:{sign}.1e}"
    is_count = value.is_integer() and abs(value) >= 1000
    return f"{value:{sign},.0f}" if is_count else f"{value:{sign},.2f}"


def ui(
    store: Store = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on this machine.")] = 5000,
) -> None:
    """Browse all runs in MLflow's web interface.

    Curves, parameters and artifacts of everything in the store. Ctrl-C ends it.
    """
    from fedbench.tracking.databases import shown
    from fedbench.tracking.schema import store_uri
    from fedbench.tracking.store import latest_page, ui_command

    uri = store_uri(store)
    # whatever MLFLOW_HOST says: nobody logs in to the interface, and it can delete runs
    command = [*ui_command(uri), "--host", _HOST, "--port", str(port)]
    address = f"http://{_HOST}:{port}"
    say(f"{shown(uri)} at {address}, Ctrl-C ends it")
    latest = latest_page(uri)
    if latest is not None:
        suite, page = latest
        say(f"the runs of the suite {suite}: {address}{page}")
    # in a process group of its own, Ctrl-C doesn't reach the server half-way through its imports
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    try:
        code = server.wait()
    except KeyboardInterrupt:
        _end(server)
        return
    if code:
        raise FedbenchError(f"the MLflow UI ended with exit code {code}; is port {port} taken? Try --port {port + 1}.")


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server with all its workers."""
    os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
