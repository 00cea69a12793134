"""The seeds of a table's rows, as tables and the page show them."""

from __future__ import annotations

from collections.abc import Sequence

from fedbench_boards.leaderboard.model import FINISHED, Line

DIFFER = (
    "rows differ in their seeds: a mean, and so the rank, is over the row's own; Δ over those shared with the baseline"
)
_MOST_PARTS = 4
"""The most ranges that are listed; more are counted."""


def seeds_differ(lines: Sequence[Line]) -> bool:
    """Whether rows of a table differ in their seeds, apart from those lost to failed runs."""
    return len({line.seeds for line in lines if line.status.status == FINISHED}) > 1


def seed_cells(lines: Sequence[Line]) -> list[str]:
    """Each row's seeds in short form; "" for a row without a finished run."""
    return [ranges(line.seeds) if line.runs else "" for line in lines]


def seed_counts(lines: Sequence[Line]) -> str:
    """The number of seeds: ``3 seeds``, ``1 to 3 seeds``; "" if no run has finished."""
    whole = {len(line.runs) for line in lines if line.status.status == FINISHED}
    counts = sorted(whole or {max(len(line.runs) for line in lines)})
    least, most = counts[0], counts[-1]
    if not most:
        return ""
    return f"{least} to {most} seeds" if least < most else f"{most} seed{'s' if most > 1 else ''}"


def seeds_named(seeds: Sequence[int]) -> str:
    """All seeds, which are in order, as ``seeds 0-4, 7``."""
    return f"seed{'s' if len(seeds) != 1 else ''} {', '.join(spans(seeds))}"


def ranges(seeds: Sequence[int]) -> str:
    """Seeds, which are in order, as ``0-4, 7``; their number if that is too long."""
    texts = spans(seeds)
    return ", ".join(texts) if len(texts) <= _MOST_PARTS else f"{len(seeds)} seeds"


def spans(seeds: Sequence[int]) -> list[str]:
    """Ranges of seeds: ``0-4`` and ``7`` for 0, 1, 2, 3, 4, 7."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and parts[-1][-1] == seed - 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return [f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]
