"""The records of a run: its setup, its rounds, and its result. Listeners can only read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import numpy as np

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict that refuses to be changed; unlike `types.MappingProxyType` it can be sent to another process."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("what a run gave is read-only; change a copy of it: dict(...)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict[K, V]], tuple[dict[K, V]]]:
        return FrozenDict, (dict(self),)


@dataclass(frozen=True)
class ReadOnly:
    """A frozen dataclass whose mappings and arrays are read-only as well, those inside of mappings included."""

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            object.__setattr__(self, name, frozen(value))


def frozen(value: Any) -> Any:
    """A read-only copy of a mapping, a read-only view of an array, and anything else as it is."""
    if isinstance(value, Mapping):
        return FrozenDict({key: frozen(each) for key, each in value.items()})
    if isinstance(value, np.ndarray):
        view = value.view()
        view.flags.writeable = False
        return view
    return value


FAULT_COUNTS = ("clients_dropped", "clients_late", "clients_partial", "updates_rejected")
"""Counts of a round: clients that failed before training, clients that trained for nothing, stragglers, and rejected
updates."""


RECORDED_CLIENTS = 1000
"""A run records the class counts of this many clients; those of further clients follow from the run's description."""


@dataclass(frozen=True)
class RunInfo(ReadOnly):
    """The facts known when a run is assembled, recorded with it."""

    owners: Mapping[str, str]
    """Hook name -> the plugins that answer it, in call order."""
    data_hash: str
    weights_hash: str
    """Hash of the pretrained backbone's weights; empty for one trained from scratch."""
    num_clients: int
    cohort_size: int
    num_train: int
    num_test: int
    trainable_parameters: int
    round_bytes: int
    """Bytes of the model, sent once to or from one client."""
    classnames: tuple[str, ...] = ()
    class_counts: tuple[tuple[int, ...], ...] = ()
    """Training samples by class, of the scenario's first `RECORDED_CLIENTS` clients; also recorded where labels are
    hidden."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Class indices by reporting group; empty where the scenario has none."""
    scenario_clients: int = 0
    """The number of all clients of the scenario; ``class_counts`` may list only the first of them."""
    server_data: str = ""
    """Kind of the server's own samples that the method reads: "unlabelled", "labelled", or empty for none."""
    not_on_unseen: str = ""
    """The reason why the run is not scored on the scenario's unseen classes; empty if it is, or if there are none."""
    resumed_round: int = 0
    """The round of the checkpoint that the run goes on from; 0 where it begins anew."""
    files_hash: str = ""
    """Hash of the data's files (`Dataset.files_hash`), for images that are decoded at the size that a run asks for;
    else empty. Runs on the same files may then differ in ``data_hash``."""


@dataclass(frozen=True)
class RoundRecord(ReadOnly):
    """The results of one round. Round 0 is the model before any training."""

    round: int
    cohort: tuple[int, ...]
    """The clients whose updates were aggregated, ascending; where there are none the model stays as it was."""
    metrics: Mapping[str, float]
    """The cohort's mean ``train_loss``, where clients report it, and in evaluated rounds what an evaluation gives."""
    bytes_up: int
    bytes_down: int
    seconds: float
    """Local training and aggregation, evaluation left out."""
    executor: str = ""
    """The executor that trained the cohort; empty in round 0, and where nobody trained."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Number of faults by kind (`FAULT_COUNTS`); empty in round 0, and in scenarios without faults."""
    method_metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics: means of `Update.metrics` over the aggregated updates that report them, and the server's own
    `AggregationTask.metrics`."""

    measured: Mapping[str, float] = field(default_factory=dict)
    """Measurements by methods that answer the hook `measure`; usually empty."""


@dataclass(frozen=True)
class RunResult(ReadOnly):
    """The results of a finished run."""

    records: tuple[RoundRecord, ...]
    summary: Mapping[str, float]
    predictions: tuple[int, ...]
    """Predicted classes of the test split after the last round; empty for a method without a global model."""
    weights: Mapping[str, Any]
    """Final weights as numpy arrays, by name."""
    seconds: float
    """Wall-clock time of the whole run, loading and evaluation included."""
    buffers: Mapping[str, Any] = field(default_factory=dict)
    """Final running statistics as numpy arrays, by name."""
    server: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Server state of methods that answer ``evaluate`` themselves: numpy arrays by method, then name."""
    clients: Mapping[int, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Client state of these methods: numpy arrays by client id, method, then name."""
    own: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """The clients' private tensors, by client id, then name."""
    executor: str = ""
    """The executor that trained the last round, and the reason if it fell back; empty where nothing was trained."""
    labels: tuple[int, ...] = ()
    """The true classes of the test split, in the order of ``predictions``."""
