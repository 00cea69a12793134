"""Metrics: numbers of a round, from predictions on the test split."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.core.federation import Federation
from fedbench.core.metric_names import is_of_harness
from fedbench.core.types import Predictions
from fedbench.kinds.base import P, Plugin


@dataclass(frozen=True, eq=False)
class MetricTask:
    """What a metric is computed of. n are the samples of the test split, C the classes."""

    predictions: Predictions
    """Classes (n,) of the global model, its ``scores`` (n, C) where it has some, classes (n,) of clients' own models
    ``by_client`` where they are due."""
    federation: Federation
    """Classes, groups of classes, domains and clients; tensors are not to be changed in place."""

    @property
    def predicted(self) -> Tensor:
        """Classes that the global model predicts, (n,) int64. Only where there is one: see `Metric.needs_model`."""
        assert self.predictions.labels is not None
        return self.predictions.labels

    @property
    def labels(self) -> Tensor:
        """The right classes, (n,) int64."""
        return self.federation.test.labels

    @property
    def classnames(self) -> Sequence[str]:
        """Of the C classes."""
        return self.federation.classnames

    @property
    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """Classes by reporting group (head, mid, tail); empty where the scenario has no long tail."""
        return self.federation.groups

    @cached_property
    def right(self) -> Tensor:
        """Where the global model is right, (n,) bool."""
        return self.predicted == self.labels

    def test_samples(self, client: int) -> Tensor:
        """What the client is measured on, (m,) int64 into the test split; all of it where it has none of its own."""
        own = self.federation.clients[client].test_indices
        return torch.arange(len(self.labels)) if own is None else own


class Metric(Plugin[P]):
    """A metric. An entry point of the group ``fedbench.metrics`` loads such a class.

    A run has it where ``metrics`` names it (``--set metrics=tail_f1``, in a suite ``metrics: [tail_f1]``).
    """

    kind = "metric"
    higher_is_better: ClassVar[bool | None] = True
    """None for a number that says how predictions are, not how good."""
    at_the_end: ClassVar[bool] = False
    """Whether it is computed after the last round alone."""
    needs_model: ClassVar[bool] = True
    """Whether it is of the global model; then it is left out for a method that has none."""

    @classmethod
    def _is_of_harness(cls) -> bool:
        return is_of_harness(cls.name)

    @abstractmethod
    def values(self, task: MetricTask) -> float | Mapping[str, float] | None:
        """The number under the metric's name, or several under names that begin with it (``name/part``).

        None, or a name left out, where there is nothing to measure.
        """


AnyMetric = Metric[Any]
