"""``fedbench evaluate``: a recorded run's model, evaluated again beside the recorded numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedbench.cli.console import cell, console, say, table
from fedbench.cli.options import CACHE_DIR, DATA_DIR, CacheDir, DataDir, Plugins, Store, plugin_files
from fedbench.core.files import expanded
from fedbench.core.wording import counted

if TYPE_CHECKING:
    from fedbench.tracking.evaluation import Elsewhere, Evaluation

DIFFERENT = 1


def evaluate(
    run_id: Annotated[str, typer.Argument(metavar="RUN_ID", help="fedbench's or MLflow's id, or its first digits.")],
    store: Store = None,
    data_dir: DataDir = DATA_DIR,
    cache_dir: CacheDir = CACHE_DIR,
    plugin: Plugins = None,
    dataset: Annotated[
        str | None, typer.Option(help="The test split of another data set, whose classes may be others.")
    ] = None,
    classes: Annotated[bool, typer.Option("--classes", help="Show the accuracy of every class.")] = False,
) -> None:
    """Evaluate the model of a recorded run again, or on another data set.

    Exit code 0 where every number is the recorded one to the last bit, 1 where one differs.
    """
    from fedbench.runs.prepare import Settings
    from fedbench.tracking.evaluation import evaluate_again
    from fedbench.tracking.schema import store_uri

    settings = Settings(expanded(data_dir, "--data-dir"), expanded(cache_dir, "--cache-dir"), plugin_files(plugin))
    if dataset is not None:
        from fedbench.tracking.evaluation import evaluate_elsewhere

        _show_elsewhere(
            evaluate_elsewhere(store_uri(store, to_write=False), run_id, dataset, settings), dataset, classes
        )
        return
    evaluation = evaluate_again(store_uri(store, to_write=False), run_id, settings)
    _show(evaluation, classes)
    if not evaluation.is_equal:
        raise typer.Exit(DIFFERENT)


def _show(evaluation: Evaluation, classes: bool) -> None:
    """The metrics as a table, what was left out, the verdict, and what is known to differ."""
    run, frame = evaluation.run, evaluation.metrics
    say(run.info.run_name, style="bold")
    say(f"run {run.data.tags['fedbench.run_id']}, MLflow {run.info.run_id}")
    is_folded = frame["metric"].str.startswith("class_accuracy/") & (frame["recorded"] == frame["now"])
    if classes:
        is_folded &= False
    made = table("metric", "recorded", "now", "difference", right=("recorded", "now", "difference"))
    for metric, recorded, now, difference in frame[~is_folded].itertuples(index=False, name=None):
        made.add_row(cell(metric), number(recorded), number(now), number(difference, signed=True))
    console().print(made)
    if is_folded.any():
        folded = counted(int(is_folded.sum()), "class", "classes")
        say(f"Equal as well: the accuracies of {folded}; --classes shows them.", style="dim")
    if evaluation.left_out:
        say(f"Left out, since the final model does not give them: {', '.join(evaluation.left_out)}.", style="dim")
    if evaluation.new_metrics:
        say(f"Not recorded then, so compared with nothing: {', '.join(evaluation.new_metrics)}.", style="dim")
    _conclude(evaluation)


def _show_elsewhere(found: Elsewhere, dataset: str, classes: bool) -> None:
    """What the model scores on ``dataset``."""
    say(found.title, style="bold")
    others = ", other classes than those it was trained on" if found.is_renamed else ", those it was trained on"
    say(
        f"on {counted(found.samples, 'test sample')} of {dataset}, {counted(found.classes, 'class', 'classes')}{others}"
    )
    made = table("metric", "now", right=("now",))
    for metric, value in found.metrics.items():
        if classes or not metric.startswith("class_accuracy/"):
            made.add_row(cell(metric), number(value))
    console().print(made)


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
