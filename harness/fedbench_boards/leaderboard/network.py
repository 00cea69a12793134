"""How long what a run sends takes on a network that the reader states: a column of a leaderboard."""

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
        """From ``10`` or ``10,50``. FedbenchError for anything else, and for a link without bandwidth."""
        found = _LINK.fullmatch(text.replace(" ", ""))
        if found is None or not float(found[1]):
            raise FedbenchError(f"--network {text!r} is no link; write Mbit/s, or Mbit/s,ms: for instance 10,50.")
        return cls(float(found[1]), float(found[2] or 0))

    @property
    def cost(self) -> str:
        """What the column is called among a row's costs."""
        latency = f", {self.milliseconds:g} ms" if self.milliseconds else ""
        return f"{ON_NETWORK}{self.megabits:g} Mbit/s{latency}"

    def column(self, results: pd.DataFrame) -> pd.DataFrame:
        """``results`` with the seconds that each run spends sending.

        A cohort sends at the same time, its clients as much each; a round has one exchange, of two latencies. What is
        sent aside from rounds counts like the rest. Training and aggregating are left out: simulated clients share a
        machine, so ``train_seconds`` are no client's. A run that sends nothing needs no time.
        """
        sent = results[f"{FINAL}bytes_up"] + results[f"{FINAL}bytes_down"]
        of_a_client = sent / results["cohort_size"].clip(lower=1)
        waited = results["rounds"].astype(float) * 2 * self.milliseconds / 1000
        seconds = of_a_client * 8 / (self.megabits * 1e6) + np.where(sent > 0, waited, 0.0)
        return results.assign(**{FINAL + self.cost: seconds})
