"""Which seeds the rows of a table have, and how tables and page say it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from fedbench.leaderboard.failures import FINISHED

DIFFER = (
    "rows differ in their seeds: a mean, and so the rank, is over the row's own; Δ over those shared with the baseline"
)
_MOST_PARTS = 4
"""More ranges than these are counted rather than listed."""


def seeds_differ(block: pd.DataFrame) -> bool:
    """Whether rows of a table have other seeds, apart from those that a failed run cost them."""
    known = block["seed_list"] if "seed_list" in block else pd.Series(dtype=str)
    return bool(known[_whole(block)].nunique() > 1)


def seed_cells(block: pd.DataFrame) -> list[str]:
    """Each row's seeds, shortly; "" for a row without a finished run."""
    return [
        ranges([int(seed) for seed in text.split(", ")]) if count else ""
        for text, count in zip(block["seed_list"].astype(str), block["seeds"], strict=True)
    ]


def seed_counts(block: pd.DataFrame) -> str:
    """``3 seeds``, ``1 to 3 seeds``; "" where no run has finished."""
    counts = sorted({int(count) for count in block["seeds"][_whole(block)]} or {int(max(block["seeds"]))})
    least, most = counts[0], counts[-1]
    if not most:
        return ""
    return f"{least} to {most} seeds" if least < most else f"{most} seed{'s' if most > 1 else ''}"


def ranges(seeds: Sequence[int]) -> str:
    """``0-4, 7`` for 0, 1, 2, 3, 4, 7; the number of them where that is long. They are in order."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and parts[-1][-1] == seed - 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    told = [f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]
    return ", ".join(told) if len(parts) <= _MOST_PARTS else f"{len(seeds)} seeds"


def _whole(block: pd.DataFrame) -> pd.Series[bool]:
    """Rows of which no seed is missing since its run failed."""
    return block["status"] == FINISHED if "status" in block else pd.Series(True, index=block.index)
