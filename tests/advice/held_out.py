"""Does advice hold where nothing is measured? Settings of the map are left out in turn, and the advice for each is
compared with what was measured there.

    python -m tests.advice.held_out [EVIDENCE.csv] [--settings 10] [--seed 0]

prints a line a setting: the first choice, its tie group (1 is the best one's) and whether the interval of its margin
covers what was measured. leaderboards/map/findings.md has the result.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbench_boards.advice.advising import advise, true_margins
from fedbench_boards.advice.evidence import GLOBAL, Evidence, read_evidence
from fedbench_boards.statistics import tied_ranks


@dataclass(frozen=True)
class Outcome:
    """Of one setting left out."""

    setting: str
    choice: str
    group: int
    """The tie group of the first choice there."""
    margin: float
    half_width: float
    true: float

    @property
    def is_covered(self) -> bool:
        """Whether the interval holds the margin that was measured."""
        return abs(self.true - self.margin) <= self.half_width


def groups(evidence: Evidence, setting: str) -> dict[str, int]:
    """Row -> its tie group in a setting, 1 for those that can't be told from the best."""
    runs = evidence.runs[evidence.runs["setting"] == setting].dropna(subset=[GLOBAL])
    table = runs.pivot(index="row", columns="seed", values=GLOBAL)
    ranks = dict(zip(table.index, tied_ranks(table.to_numpy()), strict=True))
    order = sorted({rank for rank in ranks.values() if rank is not None})
    return {str(row): order.index(rank) + 1 for row, rank in ranks.items() if rank is not None}


def left_out(evidence: Evidence, setting: str, baseline: str = "fedavg") -> Outcome:
    """What is advised for a setting's federation by all other settings, and what was measured there."""
    found = advise(evidence.without(setting), evidence.places[setting], baseline)
    first = found.choices[0]
    true = true_margins(evidence, setting, baseline, GLOBAL, {first.row})[first.row]
    return Outcome(setting, first.label, groups(evidence, setting)[first.row], first.margin, first.half_width, true)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("evidence", nargs="?", type=Path)
    parser.add_argument("--settings", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    evidence = read_evidence(given.evidence)
    names = list(evidence.places)
    drawn = np.random.default_rng(given.seed).permutation(len(names))[: given.settings]
    found = [left_out(evidence, names[number]) for number in sorted(drawn)]
    for one in found:
        covers = "covered" if one.is_covered else "missed"
        print(
            f"{one.setting:<45} {one.choice:<18} group {one.group}   "
            f"{one.margin:+5.1f} ± {one.half_width:.1f}, measured {one.true:+5.1f}   {covers}"
        )
    print(
        f"first choice in the best tie group: {sum(one.group == 1 for one in found)} of {len(found)}; "
        f"within one of it: {sum(one.group <= 2 for one in found)}; covered: {sum(one.is_covered for one in found)}"
    )


if __name__ == "__main__":
    main()
