"""One client with a two-weight linear model, for numbers that can be worked out by hand."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from fedbench.assemble import assemble
from fedbench.hookspecs import ClientTask
from fedbench.models.inputs import FeatureInputs
from fedbench.spec import RunSpec, Training
from fedbench.types import Model, Outputs, Update


def linear(tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> Outputs:
    """Two logits (w . x, 0): a logistic regression with weights w (2,)."""
    score = inputs @ tensors["w"]
    return Outputs(torch.stack([score, torch.zeros_like(score)], dim=1), inputs)


@pytest.fixture
def train_client() -> Callable[..., Update]:
    """Train one client on ``samples`` [(x1, x2, label), ...] from ``start`` (w1, w2) and return its update."""

    def train(
        samples: list[tuple[float, float, int]],
        start: tuple[float, float] = (0.0, 0.0),
        method: str = "fedavg",
        params: Mapping[str, Mapping[str, object]] | None = None,
        client: int = 0,
        round: int = 1,
        seed: int = 0,
        **training: object,
    ) -> Update:
        budget = {"lr": 0.5, "momentum": 0.0, "batch_size": 100, **training}
        spec = RunSpec(method=method, training=Training(**budget), seed=seed)
        table = torch.tensor(samples)
        weights = {"w": torch.tensor(start)}
        task = ClientTask(
            client=client,
            round=round,
            received=weights,
            buffers={},
            inputs=FeatureInputs(table[:, :2]),
            labels=table[:, 2].long(),
            class_counts=torch.bincount(table[:, 2].long(), minlength=2),
            model=Model(weights=weights, forward=linear),
            spec=spec,
            state={},
            hooks=assemble(method, params or {}).hooks,
        )
        return task.hooks.local_train(task=task)

    return train
