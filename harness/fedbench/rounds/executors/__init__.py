"""Executors train the clients of a cohort: one after another, or all at once. Methods do not depend on which.

`sequential` trains any method; `cohort` stacks the clients along a client axis and takes every local step for all of
them together, which pays if the trained part is small. Both read the same order of samples, so their weights agree to
float tolerance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.rounds.executors.cohort import Cohort
from fedbench.rounds.executors.sequential import Sequential

if TYPE_CHECKING:
    from fedbench.core.spec import Training
    from fedbench.core.types import Model
    from fedbench.plugins.assembly import Assembly

SMALL = 5_000_000
"""The most trained weights of a model on images that is stacked unasked: fedavg-cnn has fewer, ResNet-18 more. What a
tower has frozen is not stacked."""
ExecutorName = Literal["auto", "cohort", "sequential"]
EXECUTORS: tuple[ExecutorName, ...] = ("auto", "cohort", "sequential")


def executor_named(name: str) -> ExecutorName:
    """``name``, if it is that of an executor; FedbenchError otherwise."""
    for known in EXECUTORS:
        if name == known:
            return known
    raise unknown_name("executor", name, EXECUTORS)


Executor = Sequential | Cohort
"""Trains the clients of one exchange."""


def executor_for(name: ExecutorName, training: Training, assembly: Assembly, model: Model, cores: int = 1) -> Executor:
    """The executor of a run: the cohort's wherever it can be, unless ``name`` says otherwise.

    The cohort executor falls back to the sequential one client group by client group, and says so, unless ``name``
    is ``cohort``: then what it cannot do is a FedbenchError.
    """
    if name == "sequential":
        return Sequential(cores)
    obstacle = _obstacle(name, training, assembly, model)
    if obstacle is None:
        return Cohort(assembly, Sequential(cores), strict=name == "cohort")
    if name == "cohort":
        raise FedbenchError(f"the cohort executor cannot train this run: {obstacle}; use executor=auto.")
    return Sequential(cores, obstacle)


def _obstacle(name: ExecutorName, training: Training, assembly: Assembly, model: Model) -> str | None:
    """The reason why clients cannot be trained at once, whatever the loss; None if they may be.

    On CUDA models on images are stacked that train little, since they wait for launches; a CPU is busy with one client.
    """
    trainer = assembly.answers_first("local_train")
    if trainer != "fedavg":
        return f"{trainer} trains its clients itself"
    if assembly.answers_first("local_gradients") != "fedavg":
        return f"{assembly.answers_first('local_gradients')} looks at the gradients of each client"
    if model.encoder is None:
        is_small = sum(weight.numel() for weight in model.weights.values()) <= SMALL
        is_quick = is_small and any(weight.is_cuda for weight in model.weights.values())
        return None if is_quick or name == "cohort" else "the model is trained on images"
    if model.buffers.keys() - model.of_server:
        return "the model keeps running statistics"
    return None
