"""Which seeds the rows of a table have, as tables and page show them."""

from __future__ import annotations

from collections.abc import Sequence

from fedbench_boards.leaderboard.model import FINISHED, Line

DIFFER = (
    "rows differ in their seeds: a mean, and so the rank, is over the row's own; Δ over those shared with the baseline"
)
_MOST_PARTS = 4
"""More ranges than these are counted rather than listed."""


def seeds_differ(lines: Sequence[Line]) -> bool:
    """Whether rows of a table have other seeds, apart from those that a failed run cost them."""
    return len({line.seeds for line in lines if line.status.status == FINISHED}) > 1


def seed_cells(lines: Sequence[Line]) -> list[str]:
    """Each row's seeds, shortly; "" for a row without a finished run."""
    return [ranges(line.seeds) if line.runs else "" for line in lines]


def seed_counts(lines: Sequence[Line]) -> str:
    """``3 seeds``, ``1 to 3 seeds``; "" where no run has finished."""
    whole = {len(line.runs) for line in lines if line.status.status == FINISHED}
    counts = sorted(whole or {max(len(line.runs) for line in lines)})
    least, most = counts[0], counts[-1]
    if not most:
        return ""
    return f"{least} to {most} seeds" if least < most else f"{most} seed{'s' if most > 1 else ''}"


def seeds_named(seeds: Sequence[int]) -> str:
    """``seeds 0-4, 7``, all of them however many; they are in order."""
    return f"seed{'s' if len(seeds) != 1 else ''} {', '.join(spans(seeds))}"


def ranges(seeds: Sequence[int]) -> str:
    """``0-4, 7`` for 0, 1, 2, 3, 4, 7; the number of them where that is long. They are in order."""
    texts = spans(seeds)
    return ", ".join(texts) if len(texts) <= _MOST_PARTS else f"{len(seeds)} seeds"


def spans(seeds: Sequence[int]) -> list[str]:
    """``0-4`` and ``7`` for 0, 1, 2, 3, 4, 7."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and parts[-1][-1] == seed - 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return [f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]
