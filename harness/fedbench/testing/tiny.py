"""A run that takes a second: a tiny data set in a tiny federation, for the contract and for tests of one's own."""

from __future__ import annotations

import hashlib
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Split, TensorImages
from fedbench.core.method.base import declares
from fedbench.core.randomness import torch_generator
from fedbench.core.scenario import Scenario
from fedbench.core.spec import RunSpec
from fedbench.core.types import Backbone
from fedbench.datasets import cache
from fedbench.kinds.registry import find_method
from fedbench.models import load_backbone
from fedbench.plugins.requirements import required_by
from fedbench.rounds.executors import ExecutorName
from fedbench.rounds.loop import rounds
from fedbench.rounds.run import Run
from fedbench.rounds.state import RunState, private_tensors
from fedbench.runs.prepare import Settings, prepare
from fedbench.suites.resolve import GridCell, Overrides, resolve
from fedbench.suites.suite import Row, Suite

TINY_ROUNDS = 4


@lru_cache
def tiny_dataset(num_classes: int = 4, per_class: int = 30, size: int = 32) -> Dataset:
    """Stripes plus noise in two domains (bright and dark), uint8 (n, 3, size, size); 3/4 of it for training."""
    generator = torch_generator(0, "tiny-dataset")
    labels = torch.arange(num_classes).repeat(per_class)
    domains = (torch.arange(len(labels)) // num_classes) % 2
    stripes = torch.sin(torch.arange(size) * (1 + labels[:, None]) * 0.4)
    pixels = 120 + 60 * stripes[:, None, None, :] + 40 * domains[:, None, None, None]
    pixels = pixels + 25 * torch.randn(len(labels), 3, size, size, generator=generator)
    images = pixels.clamp(0, 255).to(torch.uint8)
    cut = 3 * len(labels) // 4
    train = Split(TensorImages(images[:cut]), labels[:cut], domains[:cut])
    test = Split(TensorImages(images[cut:]), labels[cut:], domains[cut:])
    names = ("bird", "boat", "car", "tree", "fish", "house")[:num_classes]
    return Dataset("tiny", names, train, test, hashlib.sha256(images.numpy().tobytes()).hexdigest(), ("bright", "dark"))


@lru_cache
def tiny_backbone(name: str) -> Backbone:
    """A backbone by name, loaded once a process."""
    return load_backbone(name, data_dir=Path("."), seed=0)


def with_learner(method: str) -> str:
    """The stack ``method`` with the learners that its methods need (`Method.needs_learner`)."""
    needed = [declares(find_method(name), "needs_learner") for name in method.split("+")]
    return "+".join(dict.fromkeys([*filter(None, needed), *method.split("+")]))


@lru_cache
def contract_backbone(method: str) -> str:
    """The embedded CLIP, or a small CNN for a method that refuses to train on frozen features.

    For a stack with a method that requires CLIP it is CLIP, else the CNN as soon as one of its methods asks for it.
    """
    stack = method.split("+")
    if len(stack) > 1:
        of_clip = {"clip", "pretrained", "context", "image_layers", "patches"}
        # "convnet" sorts after "clip:embedded"
        return "clip:embedded" if required_by(stack).keys() & of_clip else max(map(contract_backbone, stack))
    try:
        final_state(tiny_run(tiny_spec(method, backbone="clip:embedded")), until=1)
    except FedbenchError as error:
        if "backbone" not in str(error):
            raise
        return "convnet"
    return "clip:embedded"


def tiny_spec(method: str, *, backbone: str = "", hidden: bool = False, **training: object) -> RunSpec:
    """``method``, `with_learner`, on four label-skewed clients, half a round; by default on its `contract_backbone`."""
    method = with_learner(method)
    backbone = backbone or contract_backbone(method)
    budget: dict[str, object] = {"rounds": TINY_ROUNDS, "batch_size": 8, "lr": 0.01}
    hidden |= any("labels" in declares(find_method(name), "provides") for name in method.split("+"))
    labels: Literal["hidden", "visible"] = "hidden" if hidden else "visible"
    scenario = Scenario(
        partition="dirichlet", dirichlet_alpha=1.0, clients=4, participation=0.5, min_client_size=4, labels=labels
    )
    if required_by(method.split("+")).keys() & {"server_data", "server_labels"}:
        scenario = scenario.model_copy(update={"server_samples": 5, "server_labels": "visible"})
    suite = Suite(name="contract", backbone=backbone, rows=(Row(method=method),), training=budget)
    spec = resolve(suite, GridCell(suite.rows[0]), 0, Overrides())
    return spec.model_copy(update={"scenario": scenario, "training": spec.training.model_copy(update=training)})


def tiny_run(spec: RunSpec, *, executor: ExecutorName = "auto", cores: int = 1, dataset: Dataset | None = None) -> Run:
    """``spec`` assembled on the tiny data set, or another, whose features are encoded once a process."""
    cache.forget()
    folder = scratch_folder()
    settings = Settings(data_dir=folder, cache_dir=folder, executor=executor, cores=cores)
    return prepare(spec, settings, dataset=dataset or tiny_dataset(), backbone=tiny_backbone(spec.backbone))


def scratch_folder() -> Path:
    """A folder that goes with the process."""
    return Path(_scratch().name)


_scratch = lru_cache(tempfile.TemporaryDirectory)


def final_state(run: Run, state: RunState | None = None, until: int | None = None) -> RunState:
    """The state after the last round, or after round ``until``."""
    state = state or run.initial_state()
    for after, *_ in rounds(run, state, until):
        state = after
    return state


def digest(state: RunState) -> str:
    """sha256 over weights and buffers, those that clients keep to themselves included: equal digests are equal bits."""
    total = hashlib.sha256()
    for name, tensor in sorted({**state.weights, **state.buffers, **private_tensors(state)}.items()):
        total.update(name.encode())
        total.update(tensor.cpu().numpy().tobytes())
    return total.hexdigest()
