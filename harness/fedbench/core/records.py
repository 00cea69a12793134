"""What is recorded of a run: what it was made of, its rounds, and its result; read-only for whoever is notified."""

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
"""Of a round: clients that failed before training, trained for nothing, were stragglers; and updates rejected."""


RECORDED_CLIENTS = 1000
"""Of more clients a run records the class counts of the first; the run's description deals all of them again."""


@dataclass(frozen=True)
class RunInfo(ReadOnly):
    """What is known once a run is assembled; recorded with it."""

    owners: Mapping[str, str]
    """Hook name -> the plugins that answer it, in call order."""
    data_hash: str
    weights_hash: str
    """Of the pretrained backbone; empty for one trained from scratch."""
    num_clients: int
    cohort_size: int
    num_train: int
    num_test: int
    trainable_parameters: int
    round_bytes: int
    """Bytes of the model, one way, one client."""
    classnames: tuple[str, ...] = ()
    class_counts: tuple[tuple[int, ...], ...] = ()
    """Training samples by class of the scenario's first `RECORDED_CLIENTS` clients, also where labels are hidden."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Class indices by reporting group; empty where the scenario has none."""
    scenario_clients: int = 0
    """All clients of the scenario, of whom ``class_counts`` may have the first only."""
    server_data: str = ""
    """What the method reads of the server's own samples: unlabelled, labelled, or nothing (empty)."""
    not_on_unseen: str = ""
    """Why the run is not scored on the scenario's unseen classes; empty where it is, or where there are none."""
    resumed_round: int = 0
    """The round of the checkpoint that the run goes on from; 0 where it begins anew."""
    files_hash: str = ""
    """Of the data's files, where images are decoded at the size that a run asks for (`Dataset.files_hash`), so that
    runs on the same files differ in ``data_hash``; else empty."""


@dataclass(frozen=True)
class RoundRecord(ReadOnly):
    """What one round gave. Round 0 is the model before any training."""

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
    """Which executor trained the cohort; empty in round 0, and where nobody trained."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """How often which of `FAULT_COUNTS` occurred; empty in round 0, and where the scenario has no faults."""
    method_metrics: Mapping[str, float] = field(default_factory=dict)
    """What else the clients' updates report (`Update.metrics`): means over those aggregated updates that have it. And
    what the server's step gives (`AggregationTask.metrics`)."""

    measured: Mapping[str, float] = field(default_factory=dict)
    """What methods measure of the round (hook `measure`); empty for most."""


@dataclass(frozen=True)
class RunResult(ReadOnly):
    """What a finished run gave."""

    records: tuple[RoundRecord, ...]
    summary: Mapping[str, float]
    predictions: tuple[int, ...]
    """Predicted classes of the test split after the last round; empty for a method without a global model."""
    weights: Mapping[str, Any]
    """Final weights as numpy arrays, by name."""
    seconds: float
    """Wall-clock time of the whole run, loading and evaluation included."""
    buffers: Mapping[str, Any] = field(default_factory=dict)
    """Final running statistics, likewise."""
    server: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the methods that answer ``evaluate`` themselves keep on the server: numpy arrays by method, then name."""
    clients: Mapping[int, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """What they keep on clients, by client id."""
    own: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """The private tensors of clients, by client id, then name."""
    executor: str = ""
    """Which executor trained the last round and, where it fell back, why; empty where nothing was trained."""
    labels: tuple[int, ...] = ()
    """The right classes of what is predicted, in the order of ``predictions``."""
