"""What tuning is for: metrics of the validation split, and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedbench.core.errors import FedbenchError, Unworkable, unknown_name
from fedbench.core.metric_names import COSTS
from fedbench.kinds.measured import lower_is_better
from fedbench.rounds.metrics import summarise

_PERSONAL = "personal_"


class UnknownObjective(FedbenchError):
    """A metric to tune for that runs don't have."""


@dataclass(frozen=True)
class Objective:
    """A metric of the validation split, or a cost."""

    metric: str

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """``minimize`` for costs and errors, ``maximize`` for the rest."""
        less = self.is_cost or any(map(lower_is_better, (self.metric, f"{self.metric}_accuracy")))
        return "minimize" if less else "maximize"

    @property
    def is_cost(self) -> bool:
        """Whether it is bytes or seconds, of which less is better."""
        return self.metric in COSTS

    def of(self, summary: Mapping[str, float]) -> float:
        """Its value in the summary of a run."""
        if self.metric == "bytes":
            return summary["bytes_up"] + summary["bytes_down"]
        if self.metric in ("seconds", "train_seconds"):
            return summary["train_seconds"]
        name = self.name_in(summary)
        if name is None:
            raise self._unknown(summary)
        return summary[name]

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raise UnknownObjective unless a run whose round 0 gave ``metrics`` will have the metric in its summary.

        Metrics of clients' own models are none of round 0's. Of a run without a global model it has no metrics:
        Unworkable, so that other rows are tuned all the same.
        """
        if self.is_cost or self.metric.startswith(_PERSONAL):
            return
        if not metrics:
            raise Unworkable(
                f"there is no global model and so no {self.metric}; tune this row alone, with --objective "
                f"{_PERSONAL}mean_client_accuracy."
            )
        summary = summarise({0: metrics})
        if self.name_in(summary) is None:
            raise self._unknown(summary)

    def _unknown(self, summary: Mapping[str, float]) -> UnknownObjective:
        known = sorted({name for name in summary if "/" not in name} | set(COSTS))
        return UnknownObjective(str(unknown_name("objective", self.metric, known, "Measured on validation data.")))

    def name_in(self, metrics: Mapping[str, float]) -> str | None:
        """What the metric is called there: ``tail`` is short for ``tail_accuracy``; None where it is absent."""
        return next((name for name in (self.metric, f"{self.metric}_accuracy") if name in metrics), None)
