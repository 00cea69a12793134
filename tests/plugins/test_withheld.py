"""Methods are handed no labels that they are scored on, and none that a scenario hides, by whatever name."""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import replace

import pluggy
import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Split, TensorImages
from fedbench.core.method.hooks import STEPS, HookSpecs, hookimpl
from fedbench.core.method.notifications import PROJECT
from fedbench.plugins.guards import withheld
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings, prepare
from fedbench.scenarios import build_federation
from fedbench.testing import final_state, tiny_backbone, tiny_dataset, tiny_run, tiny_spec

wrapper = functools.partial(pluggy.HookimplMarker(PROJECT), wrapper=True)


class Rows:
    """Images whose source knows their labels, as a table of a hub's does."""

    def __init__(self, split):
        self.pixels, self.column = split.images, split.labels

    def __len__(self):
        return len(self.column)

    def read(self, indices):
        return self.pixels.read(indices)

    def content_hash(self):
        return self.pixels.content_hash()


def dataset():
    tiny = tiny_dataset()
    train, test = (replace(split, images=Rows(split)) for split in (tiny.train, tiny.test))
    return replace(tiny, train=train, test=test)


def reached(value, depth=8, seen=None):
    """Every object that public attributes, keys and positions lead to from ``value``."""
    seen = {} if seen is None else seen
    if depth == 0 or id(value) in seen or isinstance(value, str | int | float | bool | None):
        return seen
    seen[id(value)] = value
    parts = []
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif not isinstance(value, torch.Tensor | torch.nn.Module | type):
        for name in dir(value):
            if not name.startswith("_"):
                try:
                    parts.append(getattr(value, name))
                except (FedbenchError, AttributeError):
                    continue
    for part in parts:
        reached(part, depth - 1, seen)
    return seen


@pytest.fixture
def handed(mine, tmp_path):
    """What every hook of a run with all kinds of splits is handed, by hook."""

    def run(backbone, **scenario):
        found = {hook: [] for hook in STEPS}

        def watching(hook):
            names = ", ".join(name for name in inspect.signature(getattr(HookSpecs, hook)).parameters if name != "self")
            look = found[hook].extend
            return wrapper(eval(f"lambda self, {names}: (look([{names}]), (yield))[1]", {"look": look}))

        name = mine(requires=("server_data",), **{hook: watching(hook) for hook in STEPS})
        spec = tiny_spec(name, backbone=backbone, rounds=1)
        granted = {"server_samples": 3, "server_labels": "hidden", "unseen_classes": 0.5, **scenario}
        spec = spec.model_copy(update={"scenario": spec.scenario.model_copy(update=granted)})
        assembled = prepare(spec, Settings(tmp_path, tmp_path), dataset=dataset(), backbone=tiny_backbone(backbone))
        if spec.scenario.labels == "visible":
            final_state(assembled)
        return assembled, {hook: list(reached(arguments).values()) for hook, arguments in found.items() if arguments}

    return run


def is_part_of(found, labels):
    """Whether ``found`` are these labels, or share their memory."""
    if found.dtype != torch.int64 or not found.numel():
        return False
    return found.untyped_storage().data_ptr() == labels.untyped_storage().data_ptr() or torch.equal(found, labels)


@pytest.mark.parametrize("backbone", ["clip:embedded", "convnet"])
def test_no_hook_is_handed_labels_that_it_is_scored_on(handed, backbone):
    run, found = handed(backbone)
    assert found.keys() >= {"federate", "build_model", "start", "broadcast", "local_train", "aggregate", "evaluate"}
    secret = [run.scored.test.labels, run.scored.unseen.test.labels, run.scored.server.labels, dataset().test.labels]
    for hook, values in found.items():
        assert not [value for value in values if isinstance(value, Rows)], hook
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        assert not [t for t in tensors if any(is_part_of(t, labels) for labels in secret)], hook
    # the walk does find what is there: a client's own labels
    own = [run.federation.train.labels[shard.indices] for shard in run.federation.clients]
    assert any(isinstance(t, torch.Tensor) and torch.equal(t, o) for t in found["local_train"] for o in own)


def test_no_hook_before_training_is_handed_hidden_labels(handed):
    run, found = handed("clip:embedded", labels="hidden")
    secret = [run.scored.train.labels, *(run.scored.train.labels[shard.indices] for shard in run.scored.clients)]
    counts = [run.scored.class_counts(client) for client in range(4)]
    for hook in ("federate", "build_model"):
        tensors = [value for value in found[hook] if isinstance(value, torch.Tensor)]
        assert not [t for t in tensors if any(is_part_of(t, one) for one in (*secret, *counts))], hook


@pytest.mark.parametrize(
    ("name", "said"), [("test", "the test split"), ("validation", "the valid"), ("server", "the server's samples")]
)
def test_reading_withheld_labels_says_that_they_are(name, said):
    federation = build_federation(tiny_dataset(), tiny_spec("fedavg").scenario, 0)
    handed = withheld(replace(federation, **{name: federation.test}))
    split = getattr(handed, name)
    assert len(split) == 30 and split.images.read(torch.arange(2)).shape == (2, 3, 32, 32)
    with pytest.raises(FedbenchError, match=f"the labels of {said}.* are withheld from methods"):
        split.labels  # noqa: B018
    assert torch.equal(handed.train.labels, federation.train.labels)


def test_hidden_labels_are_withheld_from_federate_and_so_are_counts():
    spec = tiny_spec("fedavg", hidden=True)
    handed = withheld(build_federation(tiny_dataset(), spec.scenario, 0))
    assert len(handed.train) == sum(len(shard.indices) for shard in handed.clients) and "hides" in repr(handed.train)
    for read in (lambda: handed.train.labels, lambda: handed.class_counts(0), lambda: handed.class_table):
        with pytest.raises(FedbenchError, match="the labels of the training split, which the scenario hides"):
            read()


def test_a_federation_dealt_anew_is_scored_on_the_scenarios_own_splits(mine):
    def federate(self, federation, spec):
        return federation.with_clients(tuple(federation.clients)[::-1])

    run = tiny_run(tiny_spec(mine(federate=hookimpl(federate))))
    assert run.federation.test is run.scored.test and run.federation.test.labels.dtype == torch.int64
    assert [shard.id for shard in run.federation.clients] == [3, 2, 1, 0]
    pooled = tiny_run(tiny_spec("clip-linear-centralized+fst-cbdg", hidden=True))
    assert pooled.federation.train is pooled.scored.train and not pooled.federation.labels_visible


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels_visible": True}, "federate with another labels_visible; it may deal the training samples to other"),
        (
            {"test": Split(TensorImages(torch.zeros(1, 3, 1, 1, dtype=torch.uint8)), torch.zeros(1))},
            "federate with another test",
        ),
        ({"classnames": ("a",)}, "federate with another classnames"),
        (None, "federate with a list; it must be a Federation"),
    ],
)
def test_federate_may_deal_samples_to_clients_and_nothing_else(mine, change, said):
    def federate(self, federation, spec):
        return [] if change is None else replace(federation, **change)

    with pytest.raises(FedbenchError, match=f"mine answers the hook {said}"):
        tiny_run(tiny_spec(mine(federate=hookimpl(federate)), hidden=True))


def test_a_listener_is_told_the_counts_of_hidden_labels_and_a_method_is_not(mine, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("fedbench.runs.prepare._dataset", lambda *_: tiny_dataset())
    listener = type("Listener", (), {"run_started": hookimpl(lambda self, spec, info: told.append(info))})()
    name = mine(
        run_started=hookimpl(lambda self, spec, info: told.append(info)),
        local_loss=hookimpl(lambda self, step: step.outputs.logits.square().mean()),
    )
    run_spec(tiny_spec(name, hidden=True, rounds=1), Settings(tmp_path, tmp_path), [listener])
    assert [len(info.class_counts) for info in told] == [4, 0]
