"""One client with a two-weight linear model, and single local steps, for numbers that can be worked out by hand."""

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from fedbench.core.method.tasks import ClientTask, LocalStep
from fedbench.core.spec import RunSpec, Training
from fedbench.core.types import LabelledBatch, Model, Outputs, Tensors, UnlabelledBatch, Update
from fedbench.models.inputs import FeatureInputs
from fedbench.plugins.assembly import assemble
from tests.equations.kit import linear


@pytest.fixture
def make_task() -> Callable[..., ClientTask]:
    """A client's task around ``model`` and its samples (n, ...); ``labels`` None are hidden."""

    def make(
        model: Model,
        inputs: Tensor,
        labels: Sequence[int] | None,
        *,
        method: str = "fedavg",
        params: Mapping[str, Mapping[str, object]] | None = None,
        received: Tensors | None = None,
        buffers: Tensors | None = None,
        payload: Tensors | None = None,
        num_classes: int = 2,
        client: int = 0,
        round: int = 1,
        seed: int = 0,
        state: dict[str, Tensors] | None = None,
        side: Tensors | None = None,
        **training: object,
    ) -> ClientTask:
        budget = {"lr": 0.5, "momentum": 0.0, "batch_size": 100, **training}
        classes = None if labels is None else torch.tensor(labels)
        return ClientTask(
            client=client,
            round=round,
            received=model.weights if received is None else received,
            buffers=model.buffers if buffers is None else buffers,
            payload=payload or {},
            inputs=FeatureInputs(inputs),
            labels=classes,
            class_counts=None if classes is None else torch.bincount(classes, minlength=num_classes),
            model=model,
            spec=RunSpec(method=method, params=dict(params or {}), training=Training(**budget), seed=seed),
            state={} if state is None else state,
            hooks=assemble(method, params or {}).hooks,
            side=side or {},
        )

    return make


@pytest.fixture
def make_step(make_task) -> Callable[..., LocalStep]:
    """One local step on all samples of a client.

    ``weights`` are the current ones (the model's by default), ``outputs`` stand in for what the model would compute;
    further arguments are those of ``make_task``.
    """

    def make(
        model: Model,
        inputs: Tensor,
        labels: Sequence[int] | None,
        *,
        weights: Tensors | None = None,
        outputs: Outputs | None = None,
        number: int = 0,
        **task: object,
    ) -> LocalStep:
        made = make_task(model, inputs, labels, **task)
        index = torch.arange(len(inputs))
        batch = (
            UnlabelledBatch(inputs, index, made.side)
            if made.labels is None
            else LabelledBatch(inputs, index, made.labels, made.side)
        )
        step = LocalStep(model.weights if weights is None else weights, made.buffers, batch, made, number)
        if outputs is not None:
            # the value of the cached property
            step.__dict__["outputs"] = outputs
        return step

    return make


@pytest.fixture
def train_client(make_task) -> Callable[..., Update]:
    """Train one client on ``samples`` [(x1, x2, label), ...] from ``start`` (w1, w2) and return its update."""

    def train(
        samples: list[tuple[float, float, int]], start: tuple[float, float] = (0.0, 0.0), **task: object
    ) -> Update:
        table = torch.tensor(samples)
        model = Model(weights={"w": torch.tensor(start)}, forward=linear)
        made = make_task(model, table[:, :2], table[:, 2].long().tolist(), **task)
        return made.hooks.local_train(task=made)

    return train
