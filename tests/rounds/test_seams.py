"""The seams for methods that send more than weights: start, exchanges, broadcast, after_training, side encoders."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl
from fedbench.core.types import Broadcast
from fedbench.models.inputs import FeatureInputs
from fedbench.plugins.assembly import assemble
from fedbench.rounds.executors.sequential import Sequential
from fedbench.rounds.loop import rounds, start, train_round
from fedbench.testing import digest, final_state, tiny_run, tiny_spec
from fedbench.toolkit.fedavg import average
from fedbench.toolkit.local_training import build_optimiser


class Extra:
    """A listener that plays the part of a method."""

    def __init__(self, exchanges=1):
        self.count = exchanges
        self.seen = []

    @hookimpl
    def start(self, task):
        counts = torch.stack([report.class_counts for report in task.clients])
        task.state["extra"] = {"prior": counts.sum(0) / counts.sum()}
        return {"class_counts": counts}

    @hookimpl
    def exchanges(self, round, spec, state):
        return self.count

    @hookimpl
    def broadcast(self, task):
        return Broadcast(task.weights, {"prior": task.state["extra"]["prior"]})

    @hookimpl
    def after_training(self, task, update):
        self.seen.append((task.round, task.exchange, task.client, task.payload["prior"]))
        task.state["extra"] = {"round": torch.tensor(task.round)}
        return {"mean": torch.stack([w.mean() for w in update.weights.values()])}


def run_with(plugin, **training):
    run = tiny_run(tiny_spec("fedavg", **training))
    hooks = assemble("fedavg", {}, listeners=[plugin]).hooks
    # a plugin that is added here stands in no table of owners, by which the cohort executor goes
    return replace(run, assembly=replace(run.assembly, hooks=hooks), executor=Sequential())


def test_start_fills_the_servers_state_and_what_it_answers_is_counted_as_sent_up_in_round_zero():
    run = run_with(Extra())
    state = run.initial_state()
    (_, record, _), *_ = list(rounds(run, state, until=0))
    # four clients, four classes, int64
    assert record.bytes_up == 4 * 4 * 8
    counts = run.federation.class_counts().double()
    torch.testing.assert_close(state.server["extra"]["prior"].double(), counts / counts.sum(), rtol=1e-6, atol=0)


def test_start_is_not_asked_again_when_a_run_goes_on():
    plugin = Extra()
    run = run_with(plugin)
    half = final_state(run, until=1)
    half.server["extra"]["prior"] = torch.full((4,), 7.0)
    for after, record, _ in rounds(run, half, until=2):
        assert record.round == 2
        assert torch.equal(after.server["extra"]["prior"], torch.full((4,), 7.0))


def test_payloads_up_and_down_reach_their_goal_and_are_counted():
    plugin = Extra()
    run = run_with(plugin)
    state = run.initial_state()
    start(run, state)
    after, record = train_round(run, state)
    model = run.info.round_bytes
    # two of four clients take part; the prior is 4 float32 down, the means of weight and bias 2 float32 up
    assert record.bytes_down == 2 * (model + 4 * 4)
    assert record.bytes_up == 2 * (model + 2 * 4)
    assert all(torch.equal(prior, state.server["extra"]["prior"]) for *_, prior in plugin.seen)
    assert {client: kept["extra"]["round"].item() for client, kept in after.clients.items()} == dict.fromkeys(
        record.cohort, 1
    )


def test_two_exchanges_are_two_rounds_of_the_same_cohort_with_their_own_batches_and_twice_the_bytes():
    plugin = Extra(exchanges=2)
    run = run_with(plugin)
    state = run.initial_state()
    start(run, state)
    after, record = train_round(run, state)
    assert after.round == 1
    assert [(exchange, client) for _, exchange, client, _ in plugin.seen] == [
        (e, c) for e in (0, 1) for c in record.cohort
    ]
    assert record.bytes_up == 2 * 2 * (run.info.round_bytes + 8)
    single = run_with(Extra(exchanges=1))
    alone = single.initial_state()
    start(single, alone)
    once, _ = train_round(single, alone)
    assert digest(after) != digest(once)


def test_one_exchange_gives_what_the_default_gives():
    with_hooks = final_state(run_with(Extra()))
    assert digest(with_hooks) == digest(final_state(tiny_run(tiny_spec("fedavg"), executor="sequential")))


def test_two_plugins_that_send_under_one_name_are_refused():
    class Second:
        @hookimpl
        def after_training(self, task, update):
            return {"mean": torch.zeros(1)}

    run = run_with(Extra())
    hooks = assemble("fedavg", {}, listeners=[Second(), Extra()]).hooks
    with pytest.raises(FedbenchError, match="both send 'mean'"):
        final_state(replace(run, assembly=replace(run.assembly, hooks=hooks)), until=1)


def test_side_features_follow_the_samples_of_the_batch():
    run = tiny_run(tiny_spec("fedavg"))
    seen = []

    class Reader:
        @hookimpl
        def loss_terms(self, step):
            seen.append((step.task.client, step.batch))

    # the side encoder gives every training sample its own number
    numbers = torch.arange(len(run.train)).float().unsqueeze(1)
    hooks = assemble("fedavg", {}, listeners=[Reader()]).hooks
    run = replace(run, side={"number": FeatureInputs(numbers)}, assembly=replace(run.assembly, hooks=hooks))
    final_state(run, until=1)
    assert seen
    for client, batch in seen:
        own = run.federation.clients[client].indices
        assert torch.equal(batch.side["number"].flatten().long(), own[batch.index])
        assert torch.equal(batch.labels, run.federation.train.labels[batch.side["number"].flatten().long()])


def test_learning_rate_factors_apply_by_name():
    training = tiny_spec("fedavg", optimizer="sgd", lr=0.5, momentum=0.0, weight_decay=0.0).training
    weights = {name: torch.ones(1, requires_grad=True) for name in ("head", "text.a", "text.b")}
    optimiser = build_optimiser(training, weights, 1, {"text.a": 0.1, "text.b": 0.1})
    sum(w.sum() for w in weights.values()).backward()
    optimiser.step()
    # gradient 1: one minus lr times factor
    got = {name: round(w.item(), 6) for name, w in weights.items()}
    assert got == {"head": 0.5, "text.a": 0.95, "text.b": 0.95}


def test_received_outputs_are_the_received_models_without_gradient(make_linear_step):
    step = make_linear_step()
    assert step.received_outputs.logits.tolist() == [[1.0, 0.0]]
    assert step.outputs.logits.tolist() == [[3.0, 0.0]]
    assert step.outputs.logits.requires_grad and not step.received_outputs.logits.requires_grad


@pytest.fixture
def make_linear_step():
    from fedbench.core.method.tasks import LocalStep
    from fedbench.core.types import LabelledBatch, Model, Outputs

    def forward(tensors, inputs, training):
        score = inputs @ tensors["w"]
        return Outputs(torch.stack([score, torch.zeros_like(score)], dim=1), inputs)

    def make():
        model = Model({"w": torch.zeros(2)}, forward)
        task = SimpleNamespace(model=model, received={"w": torch.tensor([1.0, 0.0])}, buffers={})
        weights = {"w": torch.tensor([3.0, 0.0], requires_grad=True)}
        batch = LabelledBatch(torch.tensor([[1.0, 5.0]]), torch.arange(1), torch.zeros(1, dtype=torch.int64))
        return LocalStep(weights, {}, batch, task, 0)

    return make


class Watcher:
    """Notes what the hooks are told of exchanges, and each client's order of samples."""

    def __init__(self):
        self.told, self.orders = [], {}

    @hookimpl
    def exchanges(self, round, spec, state):
        return 2

    @hookimpl
    def broadcast(self, task):
        self.told.append(("broadcast", task.exchange))
        return Broadcast(task.weights)

    @hookimpl
    def loss_terms(self, step):
        key = (step.task.client, step.task.exchange)
        self.orders.setdefault(key, []).extend(step.batch.index.tolist())

    @hookimpl
    def aggregate(self, task):
        self.told.append(("aggregate", task.exchange, task.exchanges))
        return average(task)


def test_every_hook_of_an_exchange_knows_its_number_and_batches_are_drawn_anew():
    plugin = Watcher()
    run = run_with(plugin)
    _, record = train_round(run, run.initial_state())
    assert [told for told in plugin.told if told[0] == "aggregate"] == [("aggregate", 0, 2), ("aggregate", 1, 2)]
    assert [told[1] for told in plugin.told if told[0] == "broadcast"] == [0, 0, 1, 1]
    for client in record.cohort:
        first, second = plugin.orders[client, 0], plugin.orders[client, 1]
        assert first != second and sorted(first) == sorted(second)


@pytest.mark.parametrize("answer", [0, -1, 2.0])
def test_an_impossible_number_of_exchanges_is_refused(answer):
    run = run_with(Extra(exchanges=answer))
    with pytest.raises(FedbenchError, match="answers the hook exchanges with"):
        train_round(run, run.initial_state())


def test_learning_rate_factors_reach_local_training():
    run = tiny_run(tiny_spec("fedavg", rounds=1))
    frozen = replace(run, model=replace(run.model, lr_factors={"head.bias": 0.0}))
    state = final_state(frozen)
    assert torch.equal(state.weights["head.bias"], run.model.weights["head.bias"])
    assert not torch.equal(state.weights["head.weight"], run.model.weights["head.weight"])
