"""``fedbench advise``: what to try on a federation that exists."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbench.cli.console import console, say
from fedbench.cli.options import finite
from fedbench.cli.steps import step, words_of
from fedbench.core.errors import FedbenchError

if TYPE_CHECKING:
    import pandas as pd

    from fedbench_boards.advice.advising import Advice


def advise(
    ctx: typer.Context,
    counts: Annotated[
        Path,
        typer.Option(metavar="FILE", help="CSV: client and a column by class, a line a client; or client and label."),
    ],
    participation: Annotated[
        float, typer.Option(metavar="SHARE", help="Of the clients that train in a round.", min=0.0, max=1.0)
    ] = 1.0,
    needs: Annotated[str, typer.Option(metavar="MODEL", help="global: one for all; personal: each client's own.")] = "",
    max_mb: Annotated[
        float | None, typer.Option(metavar="MB", help="Sent both ways by all clients in the run.", callback=finite)
    ] = None,
    no_labels: Annotated[bool, typer.Option("--no-labels", help="Clients have none.")] = False,
    server_data: Annotated[bool, typer.Option("--server-data", help="The server has samples of its own.")] = False,
    evidence: Annotated[
        Path | None, typer.Option(metavar="FILE", help="evidence.csv of fedbench map; else that which ships with it.")
    ] = None,
    baseline: Annotated[str, typer.Option(metavar="ROW", help="What margins are over.")] = "fedavg",
    run: Annotated[
        bool, typer.Option("--run", help="Run the shortlist and the baseline on exactly these counts.")
    ] = False,
    dataset: Annotated[str, typer.Option(metavar="NAME", help="What --run takes samples of.")] = "",
    seed: Annotated[list[int] | None, typer.Option(metavar="INT", help="Of --run; repeat it.", min=0)] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where --run writes the suite and the counts.")
    ] = Path("advice"),
) -> None:
    """Advise which methods to try: what led in the nearest measured settings, by how much, and how far that carries.

    The federation is measured (skew, imbalance, sizes, participation) and placed among the settings of fedbench map.
    """
    from fedbench_boards.advice.advising import Constraints
    from fedbench_boards.advice.advising import advise as advised
    from fedbench_boards.advice.evidence import GLOBAL, PERSONAL, measures_of, read_counts, read_evidence

    if needs not in ("", GLOBAL, PERSONAL):
        raise FedbenchError(f"--needs {needs!r} is neither {GLOBAL} nor {PERSONAL}.")
    if participation == 0:
        raise FedbenchError("--participation 0: somebody must train.")
    table, known = read_counts(counts), read_evidence(evidence)
    wanted = Constraints(needs or GLOBAL, math.inf if max_mb is None else max_mb, not no_labels, server_data)
    found = advised(known, measures_of(table.to_numpy(), participation), baseline, wanted)
    _show(found, known.runs, wanted.needs)
    if run:
        from fedbench_boards.advice.advising import write_replay

        rows = [choice.row for choice in found.choices]
        suite = write_replay(known.runs, rows, baseline, table, participation, dataset, output)
        say(f"the suite {suite} has these counts and the shortlist")
        raise typer.Exit(step(ctx, ["run", "--suite", str(suite), *words_of({"--seed": seed or []})]))


def _show(found: Advice, runs: pd.DataFrame, needs: str) -> None:
    from dataclasses import asdict

    from rich import box
    from rich.table import Table

    from fedbench_boards.advice.advising import LEVEL
    from fedbench_boards.advice.evidence import WORDS

    def table(*headings: str) -> Table:
        made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", collapse_padding=True)
        for number, heading in enumerate(headings):
            made.add_column(heading, justify="right" if number else "left", overflow="fold")
        return made

    places = asdict(found.measures)
    measured = table("this federation", "")
    for name, value in places.items():
        measured.add_row(WORDS[name], f"{value:.2f}")
    near = table("nearest measured settings", "steps away")
    for setting, distance in found.nearest.items():
        near.add_row(setting, f"{distance:.2f}")
    listed = table("try", "expected %", f"over {found.baseline}", f"{LEVEL:.0%} of errors", "MB", "runs")
    for choice in found.choices:
        low = max(choice.margin - choice.half_width, -100.0)
        high = min(choice.margin + choice.half_width, 100.0)
        is_known = choice is found.choices[0] and math.isfinite(choice.half_width)  # others' are of another margin
        listed.add_row(
            choice.label,
            f"{choice.score:.1f}",
            f"{choice.margin:+.1f}",
            f"{low:+.1f} to {high:+.1f}" if is_known else "–",
            f"{choice.megabytes:.3g}",
            str(len(choice.runs)),
        )
    for one in (measured, near, listed):
        console().print(one)
        console().print()
    for sentence in _caveats(found, runs, needs):
        console().print(sentence)


def _caveats(found: Advice, runs: pd.DataFrame, needs: str) -> list[str]:
    """How the advice knows, and what it does not know."""
    from fedbench_boards.advice.advising import LEVEL

    first, *others = found.choices
    data, backbones = sorted(set(runs["dataset"])), sorted(set(runs["backbone"]))
    said = [
        f"How it knows: {len(runs):,} runs of suite {', '.join(sorted(set(runs['suite'])))} on {', '.join(data)} with "
        f"{', '.join(backbones)}; the first choice rests on runs {', '.join(first.runs[:6])}"
        f"{' and others' if len(first.runs) > 6 else ''}.",
        f"Errors: left out in turn, {LEVEL:.0%} of the measured settings were missed by no more than this, scaled "
        "to how far seeds and neighbouring settings disagree here. So it was on the map; here it is no guarantee."
        if math.isfinite(first.half_width)
        else "There are too few measured settings, or seeds in common, to say how far this is off.",
        "What it does not know: your data and your backbone. Accuracies will differ; margins may.",
    ]
    close = [other.label for other in others if first.score - other.score <= other.half_width]
    if close:
        said.append(f"{first.label} can't be told from {' and '.join(close)} by this evidence.")
    if math.isfinite(first.half_width) and first.margin - first.half_width <= 0:
        said.append(f"That {first.label} beats {found.baseline} here is not certain: the interval holds zero.")
    if found.is_far:
        least = min(found.nearest.values())
        said.append(
            f"Far from all that is measured: the nearest setting is {least:.1f} steps away, and no two neighbours on "
            f"the map are further apart than {found.usual:.1f}. The interval does not cover this: measure it by --run."
        )
    if needs == "personal":
        said.append("Scores are means over clients by their own models, or by the global one where a row has none.")
    return said
