"""``fedbench pretrain``: make the embedded CLIP again, or one of your own, and measure it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedbench.cli.console import cell, complain, console, say, table
from fedbench.core.errors import FedbenchError

_MISSED = 1


def pretrain(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Where weights, tokens and card are written."),
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="The same steps at a size for tests; useless weights.")
    ] = False,
) -> None:
    """Train the embedded CLIP from scratch.

    Renders images and captions, trains a teacher and the student, and measures it. About 30 minutes of one core.
    """
    if output is None:
        raise FedbenchError(
            "pretrain would overwrite the weights that ship with fedbench; say where to with --output FOLDER, "
            "for instance fedbench pretrain --output my-clip."
        )
    from fedbench.core.files import usable_folder

    usable_folder(output, "--output")
    from fedbench.models.embedded.pretrain import DEFAULT, SMOKE
    from fedbench.models.embedded.pretrain import pretrain as make

    card = make(output, recipe=SMOKE if smoke else DEFAULT, log=lambda line: say(line, style="dim"))
    _show(card)
    say(f"written to {output}")
    for violated in card["violated_gates"]:
        complain(violated, label="gate missed")
    if card["violated_gates"] and not smoke:
        raise typer.Exit(_MISSED)


def _show(card: dict[str, Any]) -> None:
    from fedbench.models.embedded.pretrain.gate import BOUNDS

    bounds = {name: f"{low:g} to {high:g}" for name, low, high in BOUNDS}
    made = table("measured", "value", "gate", right=("value",), whole=("measured", "gate"))
    for name, value in card["measured"].items():
        parts = {f"{name} {part}": v for part, v in value.items()} if isinstance(value, dict) else {name: value}
        for shown, number in parts.items():
            made.add_row(cell(shown), cell(number), cell(bounds.get(shown, "")))
    console().print(made)
