"""Post-hoc fine-tuning: what it measures, on whose samples, and that it leaves the run as it was."""

import copy
from dataclasses import replace

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl
from fedbench.core.types import Broadcast, Predictions, Update
from fedbench.plugins.assembly import assemble
from fedbench.rounds.finetuning import finetuned_metrics
from fedbench.rounds.loop import evaluate
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings, prepare
from fedbench.testing import final_state, tiny_backbone, tiny_dataset, tiny_run, tiny_spec

ADDED = {"finetuned_mean_client_accuracy", "finetuned_worst_client_accuracy"}

FAKE = """
from dataclasses import dataclass

import torch

from fedbench.core.method.hooks import hookimpl
from fedbench.core.types import Model, Predictions, Update


@dataclass(frozen=True, kw_only=True)
class P:
    pass


class Fake:
    name, citation, Params, recipe = "fake", "Nobody, A method whose predictions are known, 2000", P, {}

    def __init__(self, params):
        self.params = params

    @hookimpl
    def build_model(self, setup):
        return Model({"w": torch.zeros(1)}, None, {"b": torch.zeros(1)}, transform=lambda pixels: pixels)

    @hookimpl
    def start(self, task):
        task.state["fake"] = {"asked": torch.zeros(1)}

    @hookimpl
    def local_train(self, task):
        # five epochs, which only fine-tuning has here, add the client's number
        moved = task.received["w"] + task.client * (task.training.local_epochs == 5)
        return Update(task.client, {"w": moved}, {"b": task.buffers["b"] + 1}, len(task.inputs))

    @hookimpl
    def after_training(self, task, update):
        before = task.state.get("fake", {"times": torch.zeros(1)})
        task.state["fake"] = {"times": before["times"] + 1}

    @hookimpl
    def aggregate(self, task):
        task.state["fake"] = {"asked": task.state["fake"]["asked"] + len(task.updates)}
        return task.updates[0].weights

    @hookimpl
    def evaluate(self, task):
        # w = 1 is right everywhere (sample i of the tiny test split has class (90 + i) mod 4), any other w says class 0
        right = (90 + torch.arange(len(task.inputs))) % 4
        return Predictions(right if task.weights["w"] == 1 else torch.zeros_like(right))
"""


@pytest.fixture
def fake(tmp_path):
    """A trained run of the method above, and its state, on a scenario changed as asked."""
    file = tmp_path / "fake.py"
    file.write_text(FAKE)

    def train(rounds=2, **scenario):
        spec = tiny_spec("fedavg", backbone="convnet", rounds=rounds, finetune_epochs=5)
        scenario = spec.scenario.model_copy(update={"participation": 1.0, **scenario})
        spec = spec.model_copy(update={"method": "fake", "scenario": scenario})
        settings = Settings(data_dir=tmp_path, cache_dir=tmp_path, plugin_files=(file,))
        run = prepare(spec, settings, dataset=tiny_dataset(), backbone=tiny_backbone("convnet"))
        return run, final_state(run)

    return train


def test_a_client_is_scored_on_its_own_test_samples_with_its_own_model(fake):
    # test samples 90..119, class i mod 4, domain (i // 4) mod 2. Client 0 holds the bright ones, 90 and 91 (classes 2
    # and 3) and three blocks of all four classes: its w = 0 says class 0, right on 3 of 14. Client 1 holds four blocks:
    # its w = 1 is right on 16 of 16. (Had they swapped models: 14 of 14 and 4 of 16. On all samples: 7 of 30.)
    run, state = fake(partition="domain")
    assert [len(shard.test_indices) for shard in run.federation.clients] == [14, 16]
    metrics = finetuned_metrics(run, state)
    assert metrics.keys() == ADDED
    assert metrics["finetuned_worst_client_accuracy"] == pytest.approx(100 * 3 / 14)
    assert metrics["finetuned_mean_client_accuracy"] == pytest.approx((100 * 3 / 14 + 100) / 2)


def test_a_client_without_test_samples_is_scored_by_its_class_shares(fake):
    run, state = fake(partition="shards", shards_per_client=1)
    # one class a client; client 1 is right everywhere, the others where their class is 0
    classes = [int(run.federation.class_counts(client).argmax()) for client in range(4)]
    assert sorted(classes) == [0, 1, 2, 3]
    expected = [100.0 if client == 1 or own == 0 else 0.0 for client, own in enumerate(classes)]
    metrics = finetuned_metrics(run, state)
    assert metrics["finetuned_mean_client_accuracy"] == pytest.approx(sum(expected) / 4)
    assert metrics["finetuned_worst_client_accuracy"] == min(expected)


def everything(state):
    """All tensors of ``state`` by name, and its round."""
    flat = {"round": state.round}
    for kind, tensors in (("weights", state.weights), ("buffers", state.buffers)):
        flat |= {(kind, name): value.tolist() for name, value in tensors.items()}
    for owner, methods in {"server": state.server, **state.clients}.items():
        for method, tensors in methods.items():
            flat |= {(owner, method, name): value.tolist() for name, value in tensors.items()}
    return flat


def test_nothing_of_the_runs_state_is_changed(fake):
    run, state = fake(partition="domain")
    before, spec = copy.deepcopy(everything(state)), run.spec
    # two rounds of two clients: the state does hold what hooks write
    assert before[("server", "fake", "asked")] == [4.0] and before[(1, "fake", "times")] == [2.0]
    first = finetuned_metrics(run, state)
    assert everything(state) == before
    assert run.spec is spec
    assert finetuned_metrics(run, state) == first


def summary_of(monkeypatch, folder, method="fedavg", **training):
    monkeypatch.setattr("fedbench.runs.prepare._dataset", lambda *_: tiny_dataset())
    result = run_spec(tiny_spec(method, rounds=2, **training), Settings(data_dir=folder, cache_dir=folder))
    return {k: v for k, v in result.summary.items() if not k.endswith("seconds")}, result


def test_no_epochs_add_no_metric_and_some_add_two_and_change_nothing_else(monkeypatch, tmp_path):
    plain, first = summary_of(monkeypatch, tmp_path)
    tuned, second = summary_of(monkeypatch, tmp_path, finetune_epochs=1)
    assert not ADDED & plain.keys()
    assert {k: v for k, v in tuned.items() if k not in ADDED} == plain
    assert tuned.keys() - plain.keys() == ADDED
    assert first.predictions == second.predictions
    assert all((first.weights[name] == second.weights[name]).all() for name in first.weights)


def test_a_model_without_weights_has_nothing_to_fine_tune(monkeypatch, tmp_path):
    summary, _ = summary_of(monkeypatch, tmp_path, method="clip-zs", finetune_epochs=3)
    assert not ADDED & summary.keys()


def test_a_method_that_pools_the_clients_is_refused(monkeypatch, tmp_path):
    with pytest.raises(FedbenchError, match="clip-linear-centralized pools the clients; finetune_epochs needs clients"):
        summary_of(monkeypatch, tmp_path, method="clip-linear-centralized", finetune_epochs=1)


def test_fine_tuning_is_training_from_the_global_model_on_the_clients_own_samples():
    # one client holding everything: fine-tuning for two epochs is the next round, had it two epochs
    spec = tiny_spec("fedavg", rounds=1, finetune_epochs=2)
    spec = spec.model_copy(update={"scenario": spec.scenario.model_copy(update={"partition": "iid", "clients": 1})})
    run = tiny_run(spec)
    state = final_state(run)
    tuned = finetuned_metrics(run, state)
    longer = spec.training.model_copy(update={"rounds": 2, "local_epochs": 2})
    ahead = tiny_run(spec.model_copy(update={"training": longer}))
    metrics, _ = evaluate(ahead, final_state(ahead, copy.deepcopy(state)))
    assert tuned["finetuned_mean_client_accuracy"] == metrics["mean_client_accuracy"]


def test_personal_accuracy_rises_where_every_client_has_one_class():
    spec = tiny_spec("fedavg", rounds=1, finetune_epochs=5)
    skewed = spec.scenario.model_copy(update={"partition": "shards", "shards_per_client": 1})
    run = tiny_run(spec.model_copy(update={"scenario": skewed}))
    state = final_state(run)
    shared, _ = evaluate(run, state)
    tuned = finetuned_metrics(run, state)
    # a client of one class is right about it as soon as it always says so
    assert shared["mean_client_accuracy"] < 90
    assert tuned["finetuned_mean_client_accuracy"] > shared["mean_client_accuracy"] + 10
    assert tuned["finetuned_worst_client_accuracy"] > shared["worst_client_accuracy"]


def test_methods_with_state_on_clients_are_fine_tuned_with_it_and_keep_it():
    run = tiny_run(tiny_spec("fst-cbdg", hidden=True, rounds=2, finetune_epochs=2))
    state = final_state(run)
    before = copy.deepcopy(everything(state))
    metrics = finetuned_metrics(run, state)
    assert everything(state) == before
    assert torch.isfinite(torch.tensor(list(metrics.values()))).all()


class Personal:
    """Sends every client its own weights, writes the server's state as it does, and notes what is evaluated."""

    def __init__(self):
        self.evaluated = []

    @hookimpl
    def broadcast(self, task):
        """The global weights plus the client's number; counted on the server."""
        kept = task.state.setdefault("personal", {"sent": torch.zeros(1)})
        kept["sent"] = kept["sent"] + 1
        return Broadcast({name: value + task.client for name, value in task.weights.items()})

    @hookimpl
    def local_train(self, task):
        moved = {name: value + 1 for name, value in task.buffers.items()}
        return Update(task.client, dict(task.received), moved, len(task.inputs))

    @hookimpl
    def evaluate(self, task):
        self.evaluated.append((task.client, task.weights["head.bias"].mean().item(), list(task.buffers.values())))
        return Predictions(torch.zeros(len(task.inputs), dtype=torch.int64))


def test_each_client_tunes_what_it_is_sent_is_told_apart_and_writes_to_a_copy():
    plugin = Personal()
    run = tiny_run(tiny_spec("fedavg", backbone="resnet8?width=1", finetune_epochs=1))
    hooks = assemble("fedavg", {}, listeners=[plugin]).hooks
    run = replace(run, assembly=replace(run.assembly, hooks=hooks))
    state = run.initial_state()
    state.server["personal"] = {"sent": torch.full((1,), 7.0)}
    finetuned_metrics(run, state)
    assert [client for client, *_ in plugin.evaluated] == [0, 1, 2, 3]
    start = state.weights["head.bias"].mean().item()
    assert [bias for _, bias, _ in plugin.evaluated] == pytest.approx([start + client for client in range(4)], abs=1e-5)
    for _, _, buffers in plugin.evaluated:
        assert all(torch.equal(got, before + 1) for got, before in zip(buffers, state.buffers.values(), strict=True))
    assert state.server["personal"]["sent"].item() == 7.0
