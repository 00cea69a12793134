"""Train the embedded CLIP from scratch, or one of your own, and measure it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedbench.core.errors import FedbenchError
from fedbench.core.files import usable_folder
from fedbench_embedded.pretrain import DEFAULT, SMOKE, pretrain
from fedbench_embedded.pretrain.gate import BOUNDS

_MISSED = 1


def main(words: Sequence[str] | None = None) -> int:
    """Render images and captions, train a teacher and the student, measure it; the exit code.

    Takes about 30 minutes of one core.
    """
    parser = argparse.ArgumentParser(prog="python -m fedbench_embedded.pretrain", description=__doc__)
    parser.add_argument("--output", "-o", type=Path, required=True, help="folder for weights, tokens and card")
    parser.add_argument("--smoke", action="store_true", help="the same steps at a size for tests; useless weights")
    options = parser.parse_args(words)
    try:
        output = usable_folder(options.output, "--output")
    except FedbenchError as error:
        parser.error(str(error))
    card = pretrain(output, recipe=SMOKE if options.smoke else DEFAULT)
    print(_table(card["measured"]), f"written to {output}", sep="\n")
    for violated in card["violated_gates"]:
        print(f"gate missed: {violated}", file=sys.stderr)
    return _MISSED if card["violated_gates"] and not options.smoke else 0


def _table(measured: dict[str, Any]) -> str:
    """A line per measurement: its name, its value and the bounds of its gate."""
    bounds = {name: f"{low:g} to {high:g}" for name, low, high in BOUNDS}
    lines = []
    for name, value in measured.items():
        parts = {f"{name} {part}": v for part, v in value.items()} if isinstance(value, dict) else {name: value}
        lines += [f"{shown:<40} {number!s:>10}  {bounds.get(shown, '')}" for shown, number in parts.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
