"""Faults of clients: who is averaged, what is counted, what the server rejects, and rounds from which nothing comes."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from fedbench.core.method.hooks import hookimpl
from fedbench.core.randomness import global_generators
from fedbench.core.records import FAULT_COUNTS
from fedbench.core.types import Update
from fedbench.plugins.assembly import assemble
from fedbench.rounds.executors.sequential import Sequential, train_client
from fedbench.rounds.loop import evaluate, rounds, start, train_round
from fedbench.rounds.messages import broadcast, client_task, damaged, reason_to_reject
from fedbench.rounds.state import load_state, save_state
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings
from fedbench.scenarios.participation import Schedule, schedule
from fedbench.testing import digest, final_state, tiny_dataset, tiny_run, tiny_spec
from fedbench.toolkit.fedavg import average
from fedbench.toolkit.local_training import gradient_weight, local_steps
from fedbench.tracking.listener import Tracking
from fedbench.tracking.schema import store_uri

EVERYTHING = {
    "participation": 1.0,
    "dropout": 0.2,
    "late_dropout": 0.2,
    "stragglers": 0.5,
    "straggler_work": 0.1,
    "corrupt": 0.3,
}


def spec_of(method, scenario=None, **training):
    spec = tiny_spec(method, **training)
    return spec.model_copy(update={"scenario": spec.scenario.model_copy(update=EVERYTHING | (scenario or {}))})


def run_with(plugin, scenario=None, **training):
    run = tiny_run(spec_of("fedavg", scenario, backbone="clip:embedded", **training))
    hooks = assemble("fedavg", {}, listeners=[plugin]).hooks
    return replace(run, assembly=replace(run.assembly, hooks=hooks), executor=Sequential())


@pytest.fixture
def scheduled(monkeypatch):
    """Rounds go as they are told."""

    def tell(*told):
        monkeypatch.setattr("fedbench.rounds.exchange.schedule", lambda number, *_: told[number - 1])

    return tell


def counts(*numbers):
    return dict(zip(FAULT_COUNTS, numbers, strict=True))


class Adds:
    """Client k adds k + 1 to every weight and says how much work it is given."""

    def __init__(self, exchanges=1):
        self.number = exchanges
        self.trained, self.aggregated = [], []

    @hookimpl
    def exchanges(self, round, spec, state):
        return self.number

    @hookimpl
    def local_train(self, task):
        self.trained.append((task.client, task.work))
        task.state["adds"] = {"round": torch.tensor([task.round])}
        moved = {name: weight + (task.client + 1) for name, weight in task.received.items()}
        three, metrics = {"three": torch.zeros(3)}, {"train_loss": float(task.client)}
        return Update(task.client, moved, {}, len(task.inputs), three, metrics)

    @hookimpl
    def aggregate(self, task):
        self.aggregated.append([update.client for update in task.updates])
        return average(task)


ALL_OF_IT = Schedule((0, 1, 2, 3), (0, 1, 2), late=frozenset({1}), work={2: 0.5}, corrupt=frozenset({0}))


def test_what_arrives_undamaged_is_averaged_and_what_arrives_is_counted(scheduled):
    scheduled(ALL_OF_IT)
    plugin = Adds()
    run = run_with(plugin, rounds=1)
    before = run.initial_state()
    state, record = train_round(run, before)
    # 0 arrives damaged, 1 not at all, 3 never trained: 2 alone is left, which adds 3
    assert plugin.trained == [(0, 1.0), (1, 1.0), (2, 0.5)] and plugin.aggregated == [[2]]
    assert all(torch.equal(state.weights[name], weight + 3) for name, weight in before.weights.items())
    assert record.cohort == (2,) and record.metrics == {"train_loss": 2.0}
    # all four are sent the model; 0 and 2 send it back, and three floats
    model = run.info.round_bytes
    assert (record.bytes_down, record.bytes_up) == (4 * model, 2 * (model + 12))
    assert record.faults == counts(1, 1, 1, 1)
    # what a client keeps follows what the server accepted
    assert [client for client, kept in state.clients.items() if kept] == [2]


class Reports(Adds):
    """Client k reports 10 k, and where k is odd also k squared."""

    @hookimpl
    def local_train(self, task):
        update = Adds.local_train(self, task)
        own = {"mine/drift": 10 * task.client} | ({"odd": task.client**2} if task.client % 2 else {})
        return replace(update, metrics={**update.metrics, **own})


@pytest.mark.parametrize("exchanges", [1, 2])
def test_what_clients_report_is_averaged_over_the_accepted_updates_that_have_it(scheduled, exchanges):
    everyone = (0, 1, 2, 3)
    scheduled(Schedule(everyone, everyone, corrupt=frozenset({0})))
    _, record = train_round(*(run := run_with(Reports(exchanges), rounds=1), run.initial_state()))
    # the update of client 0 is rejected. Clients count alike, as they do for the loss, though of unequal sizes: 20 is
    # the mean of 10, 20 and 30. Clients 1 and 3 report their squares: (1 + 9) / 2
    assert len({len(client.indices) for client in run.federation.clients}) > 1
    assert record.metrics == {"train_loss": 2.0}
    assert record.method_metrics == {"mine/drift": 20.0, "odd": 5.0}


def test_a_loss_that_no_client_reports_is_left_out_and_not_zero(scheduled):
    class Silent(Adds):
        @hookimpl
        def local_train(self, task):
            return replace(Adds.local_train(self, task), metrics={})

    scheduled(Schedule((0, 1), (0, 1)))
    _, record = train_round(*(run := run_with(Silent(), rounds=1), run.initial_state()))
    assert record.cohort == (0, 1) and (record.metrics, record.method_metrics) == ({}, {})


def test_faults_are_of_the_round_and_so_of_all_its_exchanges(scheduled):
    scheduled(ALL_OF_IT)
    plugin = Adds(exchanges=2)
    run = run_with(plugin, rounds=1)
    before = run.initial_state()
    state, record = train_round(run, before)
    assert plugin.aggregated == [[2], [2]]
    # 3 are added, and 3 more
    assert all(torch.equal(state.weights[name], weight + 3 + 3) for name, weight in before.weights.items())
    # clients are counted once, rejected updates by exchange
    assert record.faults == counts(1, 1, 1, 2) and record.cohort == (2,)
    assert record.bytes_up == 2 * 2 * (run.info.round_bytes + 12)


LOST = {
    "dropped": Schedule((0, 1), ()),
    "late": Schedule((0, 1), (0, 1), late=frozenset({0, 1})),
    "rejected": Schedule((0, 1), (0, 1), corrupt=frozenset({0, 1})),
    "all three": Schedule((0, 1, 2), (0, 1), late=frozenset({0}), corrupt=frozenset({1})),
}


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("exchanges", [1, 2])
def test_a_round_from_which_nothing_comes_leaves_model_and_server_as_they_were(scheduled, how, exchanges):
    empty = LOST[how]
    scheduled(Schedule((0, 3), (0, 3)), empty, Schedule((0, 3), (0, 3)))
    plugin = Adds(exchanges)
    run = run_with(plugin, rounds=3, eval_every=2)
    found = [(digest(state), record) for state, record, _ in rounds(run, run.initial_state())]
    (_, _), (first, _), (second, record), (third, last) = found
    assert first == second and third != second
    assert plugin.aggregated == [[0, 3]] * 2 * exchanges
    assert record.cohort == () and "train_loss" not in record.metrics and record.metrics["global_accuracy"] >= 0
    assert record.bytes_down == exchanges * len(empty.chosen) * run.info.round_bytes
    arrived = exchanges * len(empty.corrupt)
    assert record.bytes_up == arrived * (run.info.round_bytes + 12)
    assert record.faults == counts(len(empty.chosen) - len(empty.training), len(empty.late), 0, arrived)
    assert bool(record.executor) == bool(empty.training)
    assert last.cohort == (0, 3) and last.faults == counts(0, 0, 0, 0)


def test_nothing_comes_from_any_round_and_the_run_ends_with_the_untrained_model(scheduled, monkeypatch, tmp_path):
    monkeypatch.setattr("fedbench.runs.prepare._dataset", lambda *_: tiny_dataset())
    scheduled(LOST["dropped"], LOST["dropped"], LOST["rejected"])
    spec = spec_of("fedavg", backbone="clip:embedded", rounds=3, eval_every=5)
    result = run_spec(spec, Settings(data_dir=tmp_path, cache_dir=tmp_path))
    untrained = evaluate(tiny_run(spec), tiny_run(spec).initial_state())[0]
    assert {name: result.summary[name] for name in untrained} == untrained
    assert [record.metrics for record in result.records[1:3]] == [{}, {}]
    assert {name: result.summary[name] for name in FAULT_COUNTS} == counts(4, 0, 0, 2)


def test_without_faults_nothing_is_told_of_them(monkeypatch, tmp_path):
    monkeypatch.setattr("fedbench.runs.prepare._dataset", lambda *_: tiny_dataset())
    spec = tiny_spec("fedavg", backbone="clip:embedded", rounds=1)
    result = run_spec(spec, Settings(data_dir=tmp_path, cache_dir=tmp_path))
    assert not result.summary.keys() & set(FAULT_COUNTS)
    assert [record.faults for record in result.records] == [{}, {}]


def test_the_tracking_store_gets_the_counts_of_every_round(scheduled, tmp_path):
    scheduled(ALL_OF_IT)
    run = run_with(Adds(), rounds=1)
    _, record = train_round(run, run.initial_state())
    uri = store_uri(str(tmp_path))
    tracking = Tracking(uri, "faults")
    tracking.run_started(run.spec, run.info)
    tracking.round_finished(run.spec, record)
    tracking.interrupt()
    client = MlflowClient(uri)
    (experiment,) = client.search_experiments(filter_string="name LIKE '%faults'")
    (stored,) = client.search_runs([experiment.experiment_id], "tags.`fedbench.run_id` != ''")
    assert {name: stored.data.metrics[name] for name in FAULT_COUNTS} == counts(1, 1, 1, 1)


class Surveyed:
    """The cohort reports before round 1, everyone before round 2."""

    def __init__(self):
        self.told = []

    @hookimpl
    def survey(self, round, spec, state):
        return {1: "cohort", 2: "everyone"}.get(round, "nobody")

    @hookimpl
    def report(self, task):
        return {"one": torch.ones(1)}

    @hookimpl
    def reported(self, task):
        self.told.append((task.cohort, list(task.reports)))


def test_a_survey_that_nobody_answers_is_not_told_to_the_server(scheduled):
    scheduled(LOST["dropped"], Schedule((0, 1), ()))
    plugin = Surveyed()
    run = run_with(plugin, rounds=2)
    records = [record for _, record, _ in rounds(run, run.initial_state())]
    # in round 2 those who are not of the cohort do answer
    assert plugin.told == [((), [2, 3])]
    assert [record.bytes_up for record in records[1:]] == [0, 2 * 4]


def test_clients_whose_updates_will_not_arrive_report_all_the_same(scheduled):
    scheduled(LOST["all three"])
    plugin = Surveyed()
    run = run_with(plugin, rounds=1)
    train_round(run, run.initial_state())
    assert plugin.told == [((0, 1), [0, 1])]


def test_a_rectified_head_of_rucr_outlives_a_round_from_which_nothing_comes(scheduled):
    scheduled(Schedule((0, 1), (0, 1)), LOST["late"])
    spec = spec_of("rucr", rounds=2)
    params = {"rucr": {**spec.params["rucr"], "rectify_rounds": 2}}
    run = tiny_run(spec.model_copy(update={"params": params}))
    heads = [dict(s.server["rucr"]) for s, record, _ in rounds(run, run.initial_state()) if record.round]
    assert torch.equal(heads[0]["head.weight"], heads[1]["head.weight"])


# --- stragglers ---


def straggler(method="fedavg", work=1.0, client=0, **training):
    run = tiny_run(tiny_spec(method, **{"backbone": "clip:embedded", "rounds": 2, **training}))
    state = run.initial_state()
    start(run, state)
    return client_task(run, state, 1, 0, client, broadcast(run, state, client), work)


def test_a_straggler_takes_the_first_of_its_steps_one_at_least_and_counts_with_all_its_samples():
    full = straggler(local_epochs=2)
    steps = local_steps(full)
    assert steps > 4
    for share, taken in [(0.5, steps // 2), (0.001, 1), (0.999, steps - 1), (2 / steps, 2)]:
        task = replace(full, work=share)
        assert local_steps(task) == taken
        assert train_client(task).num_examples == len(full.inputs)


def test_half_of_two_epochs_is_one_epoch_to_the_bit():
    half, one = train_client(straggler(work=0.5, local_epochs=2)), train_client(straggler(local_epochs=1))
    assert all(torch.equal(half.weights[name], weight) for name, weight in one.weights.items())
    assert half.metrics == one.metrics


def test_methods_that_count_steps_count_those_that_were_taken():
    full = straggler("fednova", local_epochs=2, momentum=0.9)
    sent = train_client(replace(full, work=0.5)).payload
    taken = local_steps(full) // 2
    [weight] = [float(value) for value in sent.values()]
    assert weight == pytest.approx(gradient_weight(taken, 0.9)) != gradient_weight(2 * taken, 0.9)


def test_a_control_of_scaffold_is_the_mean_gradient_of_the_steps_taken():
    task = straggler("scaffold", work=0.5, local_epochs=2, momentum=0.0, lr=0.1)
    update = train_client(task)
    # option II with c = c_k = 0 and plain SGD: c_k+ = (x - y) / (K eta) over the K steps taken
    wanted = {name: (x - update.weights[name]) / (local_steps(task) * 0.1) for name, x in task.received.items()}
    for name, value in wanted.items():
        assert torch.allclose(task.state["scaffold"][name], value, atol=1e-6)


def test_running_prototypes_of_a_straggler_are_of_the_samples_it_got_to():
    spec = tiny_spec("fedproto", backbone="convnet", rounds=1)
    params = {"fedproto": {**spec.params["fedproto"], "prototypes": "running", "mean": "samples"}}
    run = tiny_run(spec.model_copy(update={"params": params}))
    state = run.initial_state()
    task = client_task(run, state, 1, 0, 0, broadcast(run, state, 0), 0.001)
    sent = train_client(task).payload
    # one step of eight samples: their classes alone, each counted as often as it occurs, no mean towards zero
    assert int(sent["counts"].sum()) == 8 and torch.equal(sent["holds"], sent["counts"] > 0)
    assert len(sent["means"]) == int(sent["holds"].sum())
    whole = train_client(replace(task, work=1.0, state={})).payload
    assert int(whole["counts"].sum()) == len(task.inputs)


@pytest.mark.parametrize("method", ["fedavg", "fednova", "scaffold", "fedprox"])
def test_executors_agree_on_stragglers(method):
    spec = spec_of(method, {"stragglers": 1.0, "dropout": 0.0}, backbone="clip:embedded", rounds=2, local_epochs=2)
    one, other = (final_state(tiny_run(spec, executor=how)) for how in ("sequential", "cohort"))
    for name, weight in one.weights.items():
        assert torch.allclose(weight, other.weights[name], rtol=1e-4, atol=1e-6)
    threads = final_state(tiny_run(spec, executor="sequential"))
    assert digest(threads) == digest(one)


# --- damage ---


def an_update(**changes):
    weights = {"w": torch.ones(2, 3), "kernel": torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)}
    buffers = {"mean": torch.zeros(2), "count": torch.tensor(3)}
    return replace(Update(0, weights, buffers, 5, {"p": torch.ones(1)}), **changes)


def test_every_kind_of_damage_occurs_and_is_rejected_and_nothing_else_is():
    sound = an_update()
    assert reason_to_reject(sound, sound.weights, sound.buffers) == ""
    reasons = [reason_to_reject(damaged(an_update(), 0, n, 0), sound.weights, sound.buffers) for n in range(200)]
    assert all(reasons)
    kinds = [sum(word in reason for reason in reasons) for word in ("is not finite", "of shape", "leaves out")]
    # NaN and infinity are half of it
    assert sum(kinds) == 200 and min(kinds[1:]) > 30 and kinds[0] > 70
    places = [name for name in ("'w'", "'kernel'", "'mean'", "'count'", "'p'") if any(name in r for r in reasons)]
    assert len(places) == 5


def test_damage_leaves_the_clients_own_tensors_alone():
    sound = an_update()
    for number in range(50):
        damaged(sound, 0, number, 0)
    assert reason_to_reject(sound, an_update().weights, an_update().buffers) == ""


def test_a_tensor_that_is_too_much_or_of_another_type_is_rejected():
    sound = an_update()
    more = replace(sound, weights={**sound.weights, "zeal": torch.ones(1)})
    assert "returns 'zeal'" in reason_to_reject(more, sound.weights, sound.buffers)
    other = replace(sound, buffers={**sound.buffers, "count": torch.tensor(3, dtype=torch.int32)})
    assert "of type torch.int32" in reason_to_reject(other, sound.weights, sound.buffers)


def test_of_a_payload_alone_values_are_damaged_and_of_nothing_nothing():
    alone = an_update(weights={}, buffers={})
    assert {reason_to_reject(damaged(alone, 0, n, 0), {}, {}) for n in range(50)} == {"'p' is not finite"}
    silent = an_update(weights={}, buffers={}, payload={"holds": torch.ones(2, dtype=torch.bool)})
    assert damaged(silent, 0, 1, 0) is silent


# --- whole runs ---


def faults_of(method, **training):
    run = tiny_run(spec_of(method, rounds=3, **training))
    return run, [record for _, record, _ in rounds(run, run.initial_state())][1:]


def drawn(spec):
    """Who arrives undamaged in each round, and how many updates of one exchange are rejected."""
    told = [schedule(number, 4, spec.scenario, spec.seed) for number in (1, 2, 3)]
    return [(tuple(c for c in s.training if c not in s.late | s.corrupt), len(s.corrupt)) for s in told]


METHODS = {
    "fedavg": {},
    "scaffold": {},
    "fednova": {},
    "fedbn": {"backbone": "resnet8?width=1"},
    "creff": {"backbone": "convnet"},
    "capt": {},
    "capt-reconstructed": {},
    "in-turn": {"backbone": "clip:embedded"},
    "fedproto": {"backbone": "convnet"},
    "promptfl": {},
    "feddf": {},
    "fedconcat": {"backbone": "convnet"},
    "rucr": {"backbone": "convnet"},
}


@pytest.mark.parametrize("method", METHODS)
def test_every_fault_at_once_ends_in_finite_numbers_and_befalls_the_clients_drawn(method):
    run, records = faults_of(method, **METHODS[method])
    wanted = drawn(run.spec)
    assert [who for who, _ in wanted] != [()] * 3 and sum(rejected for _, rejected in wanted)
    assert [record.cohort for record in records] == [who for who, _ in wanted]
    if method != "capt-reconstructed":  # has several exchanges in some rounds
        assert [record.faults["updates_rejected"] for record in records] == [rejected for _, rejected in wanted]
    for record in records:
        assert all(np.isfinite(value) for value in record.metrics.values())


def test_every_method_meets_the_same_faults():
    fedavg, scaffold = (faults_of(method)[1] for method in ("fedavg", "scaffold"))
    assert [record.faults for record in fedavg] == [record.faults for record in scaffold]
    assert [record.cohort for record in fedavg] == [record.cohort for record in scaffold]


@pytest.mark.parametrize("method", ["scaffold", "fedproto"])
def test_a_resumed_run_meets_the_same_faults_and_ends_with_the_same_bits(method, tmp_path):
    spec = spec_of(method, rounds=4)
    expected = final_state(tiny_run(spec))
    half = final_state(tiny_run(spec), until=2)
    save_state(half, tmp_path / "s.safetensors", spec.run_id)
    assert digest(final_state(tiny_run(spec), load_state(tmp_path / "s.safetensors", spec.run_id))) == digest(expected)


def test_pooled_clients_are_none_that_could_fail():
    run = tiny_run(spec_of("clip-linear-centralized", {"dropout": 0.9, "corrupt": 0.9}, rounds=3))
    records = [record for _, record, _ in rounds(run, run.initial_state())][1:]
    assert [record.cohort for record in records] == [(0,)] * 3
    assert [record.faults for record in records] == [counts(0, 0, 0, 0)] * 3


# --- global generators ---


class Draws:
    """Adds noise from all three global generators to the mean."""

    @hookimpl
    def aggregate(self, task):
        noise = torch.rand(()) + float(np.random.rand()) + random.random()
        return {name: weight + noise for name, weight in average(task).items()}


def test_draws_from_the_global_generators_are_the_same_in_every_run_and_after_a_break(tmp_path):
    run = run_with(Draws(), rounds=3)
    expected = digest(final_state(run))
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    assert digest(final_state(run)) == expected
    save_state(final_state(run, until=1), tmp_path / "s.safetensors", "id")
    torch.rand(3), np.random.rand(3), random.random()
    assert digest(final_state(run, load_state(tmp_path / "s.safetensors", "id"))) == expected
    other = replace(run, spec=run.spec.model_copy(update={"seed": 1}))
    assert digest(final_state(other)) != expected


def all_three():
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_rounds_draw_differently_and_callers_find_their_generators_as_they_left_them():
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    wanted = all_three()
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    seen = []
    for number in (1, 2, 1):
        with global_generators(0, "global", number):
            seen.append(all_three())
    with pytest.raises(ZeroDivisionError), global_generators(0, "global", 1):
        all_three()
        1 / 0  # noqa: B018
    assert all_three() == wanted
    assert seen[0] == seen[2] and not set(seen[0]) & set(seen[1])
