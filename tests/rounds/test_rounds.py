"""The round loop: bytes, cohorts, statistics, states, and the same numbers however a suite is run."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fedbench.core.errors import FedbenchError, MethodFault
from fedbench.core.federation import ClientShard
from fedbench.core.method.tasks import LocalStep
from fedbench.core.spec import RunSpec
from fedbench.core.types import UnlabelledBatch
from fedbench.rounds.loop import evaluate, rounds, train_round
from fedbench.rounds.state import RunState, load_state, save_state
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings, prepare
from fedbench.testing import digest, final_state, tiny_backbone, tiny_dataset, tiny_run, tiny_spec
from fedbench.toolkit.fedavg import cross_entropy


def records(spec):
    run = tiny_run(spec)
    return [record for _, record, _ in rounds(run, run.initial_state())]


def test_bytes_are_the_tensors_of_every_client_of_the_cohort():
    run = tiny_run(tiny_spec("fedavg", rounds=1))
    dim = run.model.weights["head.weight"].shape[1]
    record = records(run.spec)[1]
    assert len(record.cohort) == 2
    assert record.bytes_down == record.bytes_up == 2 * 4 * (4 * dim + 4)


def test_clients_that_drop_out_have_received_the_model_but_send_nothing():
    spec = tiny_spec("fedavg", rounds=1)
    scenario = spec.scenario.model_copy(update={"participation": 1.0, "dropout": 0.5})
    record = records(spec.model_copy(update={"scenario": scenario}))[1]
    survivors = len(record.cohort)
    assert survivors == 2
    assert record.bytes_up * 4 == record.bytes_down * survivors


def test_pooled_training_is_scored_on_the_scenarios_clients():
    run = tiny_run(tiny_spec("clip-linear-centralized", rounds=1))
    assert (len(run.federation.clients), len(run.scored.clients)) == (1, 4)
    metrics, predictions = evaluate(run, run.initial_state())
    federated = tiny_run(tiny_spec("fedavg", rounds=1))
    assert metrics == evaluate(federated, federated.initial_state())[0]


@pytest.mark.parametrize(("setting", "value"), [("tune", "full"), ("tune", "head"), ("head_scale", 3.0)])
def test_settings_of_the_default_model_are_refused_where_a_method_builds_its_own(setting, value):
    spec = tiny_spec("fedclip").model_copy(update={setting: value})
    with pytest.raises(FedbenchError, match=f"fedclip builds its own model and does not read {setting}={value}"):
        tiny_run(spec)


def test_running_statistics_are_sent_and_counted():
    run = tiny_run(tiny_spec("fedavg", backbone="resnet8?width=1", rounds=1))
    buffers = sum(t.numel() * t.element_size() for t in run.model.buffers.values())
    weights = sum(t.numel() * 4 for t in run.model.weights.values())
    assert buffers > 0
    record = records(run.spec)[1]
    assert record.bytes_up == record.bytes_down == 2 * (weights + buffers)


KNOWN = """
from dataclasses import dataclass

import torch

from fedbench.core.method.hooks import hookimpl
from fedbench.core.types import Model, Update


@dataclass(frozen=True, kw_only=True)
class P:
    pass


class Known:
    name, citation, Params, recipe = "known", "Nobody, A method whose every tensor is known, 2000", P, {}

    def __init__(self, params):
        self.params = params

    @hookimpl
    def build_model(self, setup):
        statistics = {"mean": torch.zeros(1), "count": torch.tensor(0)}
        return Model({"w": torch.zeros(2)}, None, statistics, transform=lambda pixels: pixels)

    @hookimpl
    def local_train(self, task):
        k = task.client
        statistics = {"mean": task.buffers["mean"] + 4 * k, "count": torch.tensor(5 + 4 * k)}
        payload = {"extra": torch.zeros(k + 1, dtype=torch.float64)}
        return Update(k, {"w": torch.zeros(2)}, statistics, len(task.inputs), payload)
"""


@pytest.fixture
def known_round(tmp_path):
    """The last of some rounds of two clients, n = (1, 3).

    They add 0 and 4 to the mean they receive, and return counts 5 and 9, and 1 and 2 float64 more.
    """
    file = tmp_path / "known.py"
    file.write_text(KNOWN)

    def train(rounds=1, **training):
        spec = tiny_spec("fedavg", backbone="convnet", rounds=rounds, **training)
        scenario = spec.scenario.model_copy(update={"clients": 2, "participation": 1.0})
        spec = spec.model_copy(update={"method": "known", "scenario": scenario})
        settings = Settings(data_dir=tmp_path, cache_dir=tmp_path, plugin_files=(file,))
        run = prepare(spec, settings, dataset=tiny_dataset(), backbone=tiny_backbone("convnet"))
        shards = (ClientShard(0, torch.arange(1)), ClientShard(1, torch.arange(1, 4)))
        run = replace(run, federation=run.federation.with_clients(shards))
        state = run.initial_state()
        for _ in range(rounds):
            state, record = train_round(run, state)
        return state, record

    return train


# n_k: (1*0 + 3*4) / 4 = 3; uniform: (0 + 4) / 2 = 2. A count is the first client's, 5
@pytest.mark.parametrize(("weighting", "mean"), [("samples", 3.0), ("uniform", 2.0)])
def test_running_statistics_are_averaged_with_the_weights_shares_and_counters_copied(known_round, weighting, mean):
    state, _ = known_round(weighting=weighting)
    assert state.buffers["mean"].tolist() == [mean]
    assert (state.buffers["count"].item(), state.buffers["count"].dtype) == (5, torch.int64)


def test_clients_start_from_the_averaged_statistics_of_the_round_before(known_round):
    # 3 after round 1 (above); round 2: (1 * (3 + 0) + 3 * (3 + 4)) / 4 = 6
    assert known_round(rounds=2)[0].buffers["mean"].tolist() == [6.0]


def test_bytes_count_statistics_both_ways_and_the_payload_upwards(known_round):
    # weights 2 * 4, mean 4, count 8: 20 down to each of two clients; up, 20 + 1 * 8 from one, 20 + 2 * 8 from the other
    _, record = known_round()
    assert (record.bytes_down, record.bytes_up) == (40, 64)


def test_a_runs_bytes_are_the_sum_over_its_rounds(monkeypatch, tmp_path):
    monkeypatch.setattr("fedbench.runs.prepare._dataset", lambda *_: tiny_dataset())
    spec = tiny_spec("fedavg", rounds=3, eval_every=2)
    dim = tiny_run(spec).model.weights["head.weight"].shape[1]
    summary = run_spec(spec, Settings(data_dir=tmp_path, cache_dir=tmp_path)).summary
    # 3 rounds, one of them not evaluated, of 2 clients: 4 classes of dim weights and a bias, 4 bytes each
    assert summary["bytes_up"] == summary["bytes_down"] == 3 * 2 * 4 * (4 * dim + 4)


def test_round_zero_is_the_untrained_model_and_sends_nothing():
    first = records(tiny_spec("fedavg", rounds=1))[0]
    assert (first.round, first.bytes_up, first.bytes_down, first.cohort) == (0, 0, 0, ())


def test_every_method_meets_the_same_cohorts():
    assert [r.cohort for r in records(tiny_spec("fedavg"))] == [r.cohort for r in records(tiny_spec("fedprox"))]


def test_eval_every_skips_evaluations_but_never_the_last_round():
    evaluated = [
        r.round for r in records(tiny_spec("fedavg", rounds=4, eval_every=3)) if "global_accuracy" in r.metrics
    ]
    assert evaluated == [0, 3, 4]


def test_running_statistics_of_a_real_network_stay_finite_and_counters_whole():
    run = tiny_run(tiny_spec("fedavg", backbone="resnet8?width=1", rounds=1))
    state, _ = train_round(run, run.initial_state())
    for name, value in state.buffers.items():
        if name.endswith("num_batches_tracked"):
            assert value.dtype == torch.int64 and value > 0
        else:
            assert torch.isfinite(value).all()
        if name.endswith("running_var"):
            assert (value > 0).all()


def test_received_weights_are_never_changed_in_place():
    run = tiny_run(tiny_spec("fedavg", backbone="resnet8?width=1", rounds=1))
    state = run.initial_state()
    before = digest(state)
    train_round(run, state)
    evaluate(run, state)
    assert digest(state) == before


def test_hidden_labels_leave_no_label_in_the_batch():
    assert not hasattr(UnlabelledBatch(torch.zeros(1), torch.zeros(1)), "labels")
    with pytest.raises(FedbenchError, match="needs labels, which this scenario hides"):
        model = SimpleNamespace(forward=lambda *given: SimpleNamespace(logits=torch.zeros(1, 2)))
        task = SimpleNamespace(spec=RunSpec(method="fedavg"), model=model)
        cross_entropy(LocalStep({}, {}, UnlabelledBatch(torch.zeros(1), torch.zeros(1)), task, 0))


def test_a_diverging_run_says_so_and_what_to_lower():
    with pytest.raises(FedbenchError, match=r"training diverged: the loss of client \d in round \d is .*lr=100"):
        final_state(tiny_run(tiny_spec("fedavg", backbone="convnet", lr=100.0, rounds=3)))


def test_state_keeps_everything_under_its_owner(tmp_path):
    state = RunState(
        3,
        {"w": torch.tensor([1.0])},
        {"b": torch.tensor([2])},
        {"scaffold": {"c": torch.tensor([3.0])}},
        {7: {"scaffold": {"c": torch.tensor([4.0])}}, 9: {"moon": {"z|z": torch.tensor([5.0])}}},
    )
    with pytest.raises(MethodFault, match=r"z\|z"):
        save_state(state, tmp_path / "s.safetensors", "id")
    state.clients[9] = {"moon": {"z": torch.tensor([5.0])}}
    save_state(state, tmp_path / "s.safetensors", "id")
    back = load_state(tmp_path / "s.safetensors", "id")
    assert back == state
    with pytest.raises(FedbenchError, match="belongs to run id, not other"):
        load_state(tmp_path / "s.safetensors", "other")


def test_a_damaged_state_is_named(tmp_path):
    save_state(RunState(0, {"w": torch.zeros(9)}, {}), tmp_path / "s.safetensors", "id")
    raw = (tmp_path / "s.safetensors").read_bytes()
    (tmp_path / "s.safetensors").write_bytes(raw[:-5])
    with pytest.raises(FedbenchError, match=r"s\.safetensors' cannot be read.*delete it"):
        load_state(tmp_path / "s.safetensors", "id")


def test_a_resumed_cnn_ends_with_the_same_weights_and_statistics_bit_for_bit(tmp_path):
    spec = tiny_spec("fedavg", backbone="resnet8?width=1", rounds=2, augment="sample")
    expected = final_state(tiny_run(spec))
    half = final_state(tiny_run(spec), until=1)
    save_state(half, tmp_path / "s.safetensors", spec.run_id)
    resumed = final_state(tiny_run(spec), load_state(tmp_path / "s.safetensors", spec.run_id))
    assert resumed.round == expected.round == 2
    assert any(name.endswith("running_mean") for name in expected.buffers)
    for got, wanted in ((resumed.weights, expected.weights), (resumed.buffers, expected.buffers)):
        assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


CHILD = """
import json, sys
from fedbench.testing import digest, tiny_run, tiny_spec
from fedbench.rounds.loop import rounds
out = {}
for name in sys.argv[1:]:
    method, _, backbone = name.partition("@")
    cnn = {"backbone": backbone, "augment": "sample", "rounds": 2}
    run = tiny_run(tiny_spec(method, **(cnn if backbone else {})))
    for state, record, _ in rounds(run, run.initial_state()):
        pass
    out[name] = [digest(state), dict(record.metrics)]
print(json.dumps(out))
"""


@pytest.mark.slow
def test_two_processes_and_any_order_of_runs_give_identical_metrics():
    def child(*methods):
        environment = {**os.environ, "PYTHONHASHSEED": str(len(methods[0]))}
        command = [sys.executable, "-c", CHILD, *methods]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)

    cnn = "fedavg@resnet8?width=1"
    assert child("fedavg", cnn, "fedclip", "fedprox") == child("fedprox", "fedavg", "fedclip", cnn)
