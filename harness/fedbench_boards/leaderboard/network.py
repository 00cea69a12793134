"""The time that a run's traffic takes on a network given by the reader: a column of a leaderboard."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedbench.core.errors import FedbenchError
from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard.rows.identity import ON_NETWORK

_LINK = re.compile(r"(\d+(?:\.\d+)?)(?:,(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Link:
    """Every client's connection to the server: megabits (10^6) a second each way, and milliseconds one way."""

    megabits: float
    milliseconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Link:
        """Parse ``10`` or ``10,50``. FedbenchError for anything else, and for a link without bandwidth."""
        match = _LINK.fullmatch(text.replace(" ", ""))
        if match is None or not float(match[1]):
            raise FedbenchError(f"--network {text!r} is no link; write Mbit/s, or Mbit/s,ms: for instance 10,50.")
        return cls(float(match[1]), float(match[2] or 0))

    @property
    def cost(self) -> str:
        """The column's name among a row's costs."""
        latency = f", {self.milliseconds:g} ms" if self.milliseconds else ""
        return f"{ON_NETWORK}{self.megabits:g} Mbit/s{latency}"

    def column(self, results: pd.DataFrame) -> pd.DataFrame:
        """``results`` with a column of the seconds that each run spends sending.

        All clients of a cohort send at the same time, the same amount each; a round has one exchange, with two
        latencies. Traffic outside of rounds counts like the rest. Training and aggregation are left out: simulated
        clients share a machine, so ``train_seconds`` are no client's. A run that sends nothing needs no time.
        """
        sent = results[f"{FINAL}bytes_up"] + results[f"{FINAL}bytes_down"]
        of_a_client = sent / results["cohort_size"].clip(lower=1)
        waited = results["rounds"].astype(float) * 2 * self.milliseconds / 1000
        seconds = of_a_client * 8 / (self.megabits * 1e6) + np.where(sent > 0, waited, 0.0)
        return results.assign(**{FINAL + self.cost: seconds})
