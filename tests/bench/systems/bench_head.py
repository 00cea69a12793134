"""A method for the benchmark: FedAvg of a linear head on features that the data set already holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedbench.core.federation import Federation, Shards
from fedbench.core.method.hooks import hookimpl
from fedbench.core.method.hyper import hyper
from fedbench.core.method.tasks import ModelSetup
from fedbench.core.randomness import torch_generator
from fedbench.core.spec import RunSpec
from fedbench.core.types import LinearHead, Model, Outputs
from fedbench.models.cnn.backbone import CnnBackbone


class Features:
    """A frozen encoder that has nothing to do: the "images" are features already."""

    key = "features as they are"

    def __call__(self, pixels: Tensor) -> Tensor:
        """(b, d) to (b, d)."""
        return pixels


@dataclass(frozen=True, kw_only=True)
class BenchHeadParams:
    """Who holds what, where the scenario's own clients are not meant."""

    clients: int = hyper(0, symbol="N", low=0, high=1_000_000, source="W5; 0: the scenario's clients")
    samples: int = hyper(50, symbol="n_k", low=1, high=50_000, source="W5")


class BenchHead:
    """A linear head from zero; on request so many clients, which may share samples."""

    name: ClassVar[str] = "bench-head"
    citation: ClassVar[str] = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"
    Params: ClassVar[type] = BenchHeadParams
    recipe: ClassVar[Mapping[str, object]] = {}

    def __init__(self, params: BenchHeadParams) -> None:
        self.params = params

    @hookimpl
    def federate(self, federation: Federation, spec: RunSpec) -> Federation:
        """Every client with samples of its own choice among all, if clients are asked for."""
        clients, samples = self.params.clients, self.params.samples
        if not clients:
            return federation
        generator = torch_generator(spec.seed, "clients of the benchmark")
        indices = torch.randint(len(federation.train), (clients * samples,), generator=generator)
        offsets = torch.arange(clients + 1) * samples
        return federation.with_clients(Shards(indices, offsets, torch.arange(clients)))

    @hookimpl
    def build_model(self, setup: ModelSetup) -> Model:
        """Logits W z + b."""
        assert isinstance(setup.backbone, CnnBackbone)
        shape = len(setup.classnames), setup.backbone.feature_dim

        def forward(tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> Outputs:
            logits = torch.nn.functional.linear(inputs, tensors["head.weight"], tensors["head.bias"])
            return Outputs(logits, inputs)

        weights = {"head.weight": torch.zeros(shape), "head.bias": torch.zeros(shape[0])}
        return Model(weights, forward, encoder=Features(), head=LinearHead())
