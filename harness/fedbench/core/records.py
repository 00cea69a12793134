"""What is recorded of a run: what it was made of, its rounds, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedbench.core.frozen import ReadOnly

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
    client_metrics: Mapping[str, float] = field(default_factory=dict)
    """What else the clients' updates report (`Update.metrics`): means over those aggregated updates that have it."""


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
