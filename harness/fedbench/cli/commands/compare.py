"""``fedbench compare``: two recorded runs side by side."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fedbench.cli.commands.evaluate import number
from fedbench.cli.console import cell, console, say, table
from fedbench.cli.options import Store

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.entities import Run

    from fedbench.tracking.recorded.comparison import Comparison

_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 10
_SPARKS = 60
"""Rounds in the table and in a sparkline at most."""


class ComparisonFormat(enum.StrEnum):
    """How a comparison is shown."""

    terminal = "terminal"
    json = "json"


def compare(
    left: Annotated[str, typer.Argument(metavar="RUN", help="fedbench's or MLflow's id, or its first digits.")],
    right: Annotated[str, typer.Argument(metavar="RUN", help="The run beside it.")],
    store: Store = None,
    classes: Annotated[bool, typer.Option("--classes", help="Show the accuracy of every class.")] = False,
    shape: Annotated[ComparisonFormat, typer.Option("--format", help="How it is shown.")] = ComparisonFormat.terminal,
) -> None:
    """Compare two recorded runs: settings, provenance, final metrics and curves."""
    from fedbench.tracking.recorded.comparison import compare as beside
    from fedbench.tracking.schema import store_uri

    comparison = beside(store_uri(store, to_write=False), left, right)
    if shape is ComparisonFormat.json:
        sys.stdout.write(_as_json(comparison))
    else:
        _show(comparison, classes)


def _show(comparison: Comparison, classes: bool) -> None:
    for side, run in (("left ", comparison.left), ("right", comparison.right)):
        say(f"{side}  {run.info.run_name}  {_ids(run)}", style="bold")
    _show_differences("settings", comparison.spec, comparison.equal_settings)
    _show_differences("provenance", comparison.provenance, comparison.equal_provenance)
    _show_metrics(comparison.metrics, classes)
    _show_curves(comparison.curves)


def _ids(run: Run) -> str:
    from fedbench.leaderboard.results import reason_of
    from fedbench.tracking.schema import FAILURE

    unfinished = "" if run.info.status == "FINISHED" else f", {run.info.status}"
    unfinished += f": {reason_of(run.data.tags[FAILURE])}" if FAILURE in run.data.tags else ""
    return f"run {run.data.tags.get('fedbench.run_id', '?')}, MLflow {run.info.run_id[:8]}{unfinished}"


def _show_differences(what: str, frame: pd.DataFrame, equal: int) -> None:
    say("")
    if frame.empty:
        say(f"{what}: all {equal} are equal")
        return
    say(f"{what}: {len(frame)} of {len(frame) + equal} differ")
    made = table("", "left", "right")
    for key, left, right in frame.itertuples(index=False, name=None):
        made.add_row(cell(key), cell(shortened(left)), cell(shortened(right)))
    console().print(made)


def _show_metrics(frame: pd.DataFrame, classes: bool) -> None:
    say("")
    if frame.empty:
        say("final metrics: neither run finished")
        return
    of_classes = frame["metric"].str.startswith("class_accuracy/")
    is_folded = bool(of_classes.any()) and not classes
    say("final metrics" + (" (--classes shows the accuracy of every class)" if is_folded else ""))
    made = table("", "left", "right", "difference", right=("left", "right", "difference"))
    shown = frame if classes else frame[~of_classes]
    for metric, left, right, difference in shown.itertuples(index=False, name=None):
        made.add_row(cell(metric), number(left), number(right), number(difference, signed=True))
    console().print(made)


def _show_curves(frame: pd.DataFrame) -> None:
    say("")
    if frame.empty:
        say("global accuracy by round: no round that both runs evaluated")
        return
    values = [*frame["left"], *frame["right"]]
    low, high = min(values), max(values)
    say(f"global accuracy by round, {low:.1f} to {high:.1f} %")
    chosen = frame.iloc[spread(len(frame), _POINTS)]
    rounds = [str(number) for number in chosen["round"]]
    made = table("round", *rounds, right=tuple(rounds))
    for side in ("left", "right"):
        made.add_row(side, *(f"{value:.1f}" for value in chosen[side]))
    console().print(made)
    for side in ("left", "right"):
        thinned = frame[side].iloc[spread(len(frame), _SPARKS)].tolist()
        say(f"{side:<5}  {sparkline(thinned, low, high)}")


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of the positions 0 to ``count`` - 1, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(step * (count - 1) / (most - 1)) for step in range(most)]


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """A bar for every value, from the lowest at ``low`` to the highest at ``high``."""
    top = len(_BARS) - 1
    return "".join(_BARS[round(top * (value - low) / (high - low)) if high > low else 0] for value in values)


def shortened(value: str) -> str:
    """A hash or commit by its beginning; other text as it is."""
    head, plus, mark = value.partition("+")
    is_hash = len(head) >= 40 and all(character in "0123456789abcdef" for character in head)
    return f"{head[:12]}{plus}{mark}" if is_hash else value or "–"


def _as_json(comparison: Comparison) -> str:
    frames = {name: getattr(comparison, name) for name in ("spec", "provenance", "metrics", "curves")}
    content = {
        "left": comparison.left.info.run_id,
        "right": comparison.right.info.run_id,
        # by way of pandas, which writes NaN as null
        **{name: json.loads(frame.to_json(orient="records")) for name, frame in frames.items()},
        "equal_settings": comparison.equal_settings,
        "equal_provenance": comparison.equal_provenance,
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
