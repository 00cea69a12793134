"""Tensors that never leave a client: kept, not sent, counted or averaged; and how clients' own models are scored."""

from dataclasses import replace

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import ClientShard, Federation, Split, TensorImages
from fedbench.core.method.hooks import hookimpl
from fedbench.core.method.tasks import EvaluationTask
from fedbench.core.types import Model, Outputs, Predictions
from fedbench.models.inputs import FeatureInputs
from fedbench.plugins.assembly import Assembly, assemble
from fedbench.rounds.executors.sequential import Sequential
from fedbench.rounds.finetuning import finetuned_metrics
from fedbench.rounds.loop import evaluate, rounds, train_round
from fedbench.rounds.messages import broadcast, client_task
from fedbench.rounds.metrics import score, size_in_bytes
from fedbench.rounds.run import completed, private_names, shared
from fedbench.rounds.state import load_state, save_state
from fedbench.scenarios.participation import cohort
from fedbench.testing import check_training, digest, final_state, tiny_run, tiny_spec
from fedbench.toolkit.fedavg import average, personal_predictions

SMALL = "resnet8?width=1"


class Named:
    """A listener that plays the part of a method with private tensors."""

    def __init__(self, *names):
        self.names, self.seen = names, []

    @hookimpl
    def private(self, model, spec):
        return self.names


class Keeps(Named):
    """It also remembers what the server sees."""

    @hookimpl
    def aggregate(self, task):
        self.seen.append(task)
        return average(task)


def run_with(*names, backbone="clip:embedded", **training):
    run = tiny_run(tiny_spec("fedavg", backbone=backbone, **training))
    plugin = Keeps(*names)
    assembly = replace(run.assembly, hooks=assemble("fedavg", {}, listeners=[plugin]).hooks)
    names = private_names(assembly, run.model, run.spec)
    # a plugin that is added here stands in no table of owners, by which the cohort executor goes
    return replace(run, assembly=assembly, private=names, executor=Sequential()), plugin


# a weight, a running statistic of floats and a counter; their layers' other tensors are shared
MIXED = ("head.bias", "body.bn1.running_mean", "body.bn1.num_batches_tracked")


def test_private_tensors_are_neither_sent_nor_counted():
    run, plugin = run_with(*MIXED, backbone=SMALL)
    _, record = train_round(run, run.initial_state())
    # 4 classes and 16 channels of float32, an int64
    kept = 4 * 4 + 16 * 4 + 8
    everything = size_in_bytes(run.model.weights, run.model.buffers)
    assert record.bytes_up == record.bytes_down == 2 * (everything - kept)
    [task] = plugin.seen
    for tensors in (task.weights, task.buffers, *(u.weights for u in task.updates), *(u.buffers for u in task.updates)):
        assert tensors and not set(MIXED) & set(tensors)
    assert {*task.weights, *task.buffers, *MIXED} == {*run.model.weights, *run.model.buffers}


def test_everything_may_be_private_and_then_nothing_is_sent():
    run, _ = run_with("head.weight", "head.bias")
    state, record = train_round(run, run.initial_state())
    assert record.bytes_up == record.bytes_down == 0
    assert all(torch.equal(state.weights[name], run.model.weights[name]) for name in run.model.weights)


def test_they_are_trained_kept_and_used_again_while_the_rest_is_the_servers():
    run, _ = run_with(*MIXED, backbone=SMALL)
    state, record = train_round(run, run.initial_state())
    one, other = record.cohort
    assert not torch.equal(state.own[one]["head.bias"], state.own[other]["head.bias"])
    for client in record.cohort:
        assert state.own[client].keys() == set(MIXED)
        assert not torch.equal(state.own[client]["head.bias"], run.model.weights["head.bias"])
        assert state.own[client]["body.bn1.num_batches_tracked"] > 0
        task = client_task(run, state, 2, 0, client, broadcast(run, state, client))
        assert [*task.received] == [*run.model.weights] and [*task.buffers] == [*run.model.buffers]
        for name, tensor in {**task.received, **task.buffers}.items():
            wanted = state.own[client][name] if name in MIXED else {**state.weights, **state.buffers}[name]
            assert torch.equal(tensor, wanted)
    # the server's own copies stay the initial ones, running statistics included
    assert all(torch.equal({**state.weights, **state.buffers}[n], _initial(run)[n]) for n in MIXED)


def _initial(run):
    return {**run.model.weights, **run.model.buffers}


def test_a_client_that_has_not_taken_part_starts_from_the_initial_ones():
    run, _ = run_with(*MIXED, backbone=SMALL)
    state, record = train_round(run, run.initial_state())
    stranger = next(client for client in range(4) if client not in record.cohort)
    assert stranger not in state.own
    task = client_task(run, state, 2, 0, stranger, broadcast(run, state, stranger))
    for name, tensor in {**task.received, **task.buffers}.items():
        wanted = _initial(run)[name] if name in MIXED else {**state.weights, **state.buffers}[name]
        assert torch.equal(tensor, wanted)


def test_they_survive_rounds_without_participation():
    run, _ = run_with("head.bias")
    held, idle = {}, 0
    for state, record, _ in rounds(run, run.initial_state()):
        for client, own in held.items():
            if client not in record.cohort:
                assert torch.equal(state.own[client]["head.bias"], own)
                idle += 1
            elif record.round:
                assert not torch.equal(state.own[client]["head.bias"], own)
        held = {client: own["head.bias"].clone() for client, own in state.own.items()}
    assert idle >= 2


def test_they_survive_saving_and_loading(tmp_path):
    run, _ = run_with(*MIXED, backbone=SMALL)
    half = final_state(run, until=2)
    save_state(half, tmp_path / "half.safetensors", "an id")
    again = load_state(tmp_path / "half.safetensors", "an id")
    assert again.own.keys() == half.own.keys()
    for client, own in half.own.items():
        assert all(torch.equal(again.own[client][name], tensor) for name, tensor in own.items())
        assert again.own[client]["body.bn1.num_batches_tracked"].dtype == torch.int64
    assert digest(final_state(run, again)) == digest(final_state(run_with(*MIXED, backbone=SMALL)[0]))


def test_a_digest_tells_private_tensors_apart():
    run, _ = run_with("head.weight", "head.bias")
    state = final_state(run, until=1)
    before = digest(state)
    next(iter(state.own.values()))["head.bias"] += 1
    assert digest(state) != before


def test_nothing_private_is_as_without_the_hook():
    run, _ = run_with()
    plain = tiny_run(tiny_spec("fedavg", backbone="clip:embedded"), executor="sequential")
    one, other = final_state(run), final_state(plain)
    assert digest(one) == digest(other) and one.own == {}
    assert evaluate(run, one)[0] == evaluate(plain, other)[0]


def test_own_models_are_scored_apart_from_the_global_one():
    run, _ = run_with("head.bias")
    state = final_state(run)
    # every client's own bias makes it say one class only; the global model does not know of them
    for client in range(4):
        state.own[client] = {"head.bias": torch.nn.functional.one_hot(torch.tensor(client), 4) * 1e4}
    metrics, predictions = evaluate(run, state)
    assert {client: set(found.tolist()) for client, found in predictions.by_client.items()} == {
        k: {k} for k in range(4)
    }
    plain = tiny_run(tiny_spec("fedavg", backbone="clip:embedded"))
    globally = evaluate(plain, replace(state, own={}))[0]
    assert {name: metrics[name] for name in globally} == globally
    # class k is right everywhere and no other, so client k's accuracy is its share of class k
    shares = [float(c[k] / c.sum()) for k in range(4) for c in [run.federation.class_counts(k).double()]]
    assert metrics["personal_mean_client_accuracy"] == pytest.approx(100 * sum(shares) / 4)
    assert metrics["personal_worst_client_accuracy"] == pytest.approx(100 * min(shares))
    # on the whole test split client k is right on class k, so that together they are right on all of it once
    assert metrics["personal_mean_global_accuracy"] == pytest.approx(25)
    added = metrics.keys() - globally.keys()
    assert "personal_std_client_accuracy" in added and all(name.startswith("personal_") for name in added)


def sign_task(client=None, clients=(0, 1)):
    """Class 0 where x + shared + own exceeds 0; ``own`` is private: 2 initially, -3 at client 0."""

    def forward(tensors, inputs, training):
        score = inputs[:, 0] + tensors["shared"] + tensors["own"]
        return Outputs(torch.stack([score, torch.zeros_like(score)], 1), inputs)

    weights = {"shared": torch.tensor(1.0), "own": torch.tensor(2.0)}
    inputs = FeatureInputs(torch.tensor([[-4.0], [-2.0], [0.0], [4.0]]))
    held = {0: {"own": torch.tensor(-3.0)}}
    private = frozenset({"own"})
    return EvaluationTask(
        Model(weights, forward), weights, {}, inputs, 2, client, clients=clients, own=held, private=private
    )


def test_personal_predictions_have_other_tensors_in_the_global_model_alone():
    got = personal_predictions(sign_task(), {"own": torch.tensor(0.0)})
    # shifts: globally 1 + 0; client 0 1 - 3; client 1, which has not taken part, 1 + 2
    assert got.labels.tolist() == [1, 1, 0, 0]
    assert {client: found.tolist() for client, found in got.by_client.items()} == {0: [1, 1, 1, 0], 1: [1, 0, 0, 0]}
    assert personal_predictions(sign_task(clients=()), {"own": torch.tensor(0.0)}).by_client == {}


def test_personal_predictions_leave_a_fine_tuned_model_as_it_is():
    got = personal_predictions(sign_task(client=0, clients=()), {"own": torch.tensor(0.0)})
    assert got.labels.tolist() == [1, 0, 0, 0] and got.by_client == {}


def test_own_models_are_asked_for_after_the_last_round_only():
    run, _ = run_with("head.bias")
    for state, _, predictions in rounds(run, run.initial_state()):
        assert predictions.by_client.keys() == ({0, 1, 2, 3} if state.round == 4 else set())


def test_fine_tuning_starts_from_the_clients_own_and_leaves_them_as_they_are():
    run, _ = run_with("head.bias", finetune_epochs=1)
    state = final_state(run)
    for client in range(4):
        state.own[client] = {"head.bias": torch.nn.functional.one_hot(torch.tensor(client), 4) * 1e4}
    before = digest(state)
    shares = [float(c[k] / c.sum()) for k in range(4) for c in [run.federation.class_counts(k).double()]]
    # an epoch at this learning rate does not undo such a bias
    assert finetuned_metrics(run, state)["finetuned_mean_client_accuracy"] == pytest.approx(100 * sum(shares) / 4)
    assert digest(state) == before


@pytest.mark.parametrize("name", ["head.wieght", "bn"])
def test_a_name_the_model_has_not_is_refused_in_one_sentence(name):
    run, _ = run_with()
    hooks = assemble("fedavg", {}, listeners=[Keeps("head.bias", name)]).hooks
    with pytest.raises(FedbenchError) as refused:
        private_names(Assembly(hooks, {"private": ("keeps",)}, hooks), run.model, run.spec)
    assert str(refused.value).startswith(f"keeps answers the hook private with '{name}'")
    assert "\n" not in str(refused.value)


def test_several_methods_names_are_joined():
    run, _ = run_with()
    hooks = assemble("fedavg", {}, listeners=[Named("head.bias"), Named("head.weight")]).hooks
    assert private_names(Assembly(hooks, {}, hooks), run.model, run.spec) == {"head.bias", "head.weight"}


A, B, C = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)


def test_what_was_sent_is_completed_in_the_models_order():
    initial = {"a": A, "b": B, "c": C}
    got = completed({"c": torch.tensor(30.0), "b": torch.tensor(20.0)}, {}, initial, {"a"})
    assert [(name, tensor.item()) for name, tensor in got.items()] == [("a", 1.0), ("b", 20.0), ("c", 30.0)]
    got = completed({"c": torch.tensor(30.0)}, {"a": torch.tensor(10.0)}, initial, {"a"})
    # what the server did not send is not there: a method may send a part
    assert {name: tensor.item() for name, tensor in got.items()} == {"a": 10.0, "c": 30.0}
    # and what it sends beside the model's tensors stays
    assert list(completed({"b": B, "extra": C}, {}, {"a": A, "b": B}, {"a"})) == ["a", "b", "extra"]


def test_initial_ones_are_where_the_runs_tensors_are():
    run, _ = run_with(*MIXED, backbone=SMALL)
    state = run.initial_state()
    # the model's own tensors stay where it was built
    moved = [{name: tensor.to("meta") for name, tensor in held.items()} for held in (state.weights, state.buffers)]
    state = replace(state, weights=moved[0], buffers=moved[1])
    task = client_task(run, state, 1, 0, 0, broadcast(run, state, 0))
    assert {tensor.device.type for tensor in (*task.received.values(), *task.buffers.values())} == {"meta"}


def test_without_private_names_nothing_is_copied():
    tensors = {"a": A}
    assert shared(tensors, frozenset()) is tensors
    assert completed(tensors, {}, {}, frozenset()) is tensors


def federation_of(test_labels):
    images = TensorImages(torch.zeros(2, 3, 1, 1, dtype=torch.uint8))
    shards = [ClientShard(0, torch.tensor([0])), ClientShard(1, torch.tensor([1]))]
    return Federation(
        shards, Split(images, torch.tensor([0, 1])), Split(images, torch.tensor(test_labels)), ("a", "b", "c")
    )


def test_where_no_client_holds_a_tested_class_there_are_no_personal_columns():
    # 2 is all that is tested, and nobody has it
    assert score(Predictions(None, {0: torch.zeros(2), 1: torch.zeros(2)}), federation_of([2, 2])) == {}


def test_a_client_without_predictions_of_its_own_is_refused_without_a_global_model():
    with pytest.raises(FedbenchError, match="client 1 has no predictions of its own"):
        score(Predictions(None, {0: torch.zeros(2)}), federation_of([0, 1]))


@hookimpl
def by_class_0(self, task):
    """Every client's predictions, without a global model."""
    zeros = torch.zeros(len(task.inputs), dtype=torch.int64)
    return Predictions(None, dict.fromkeys(task.clients, zeros) if self.answers else {})


PERSONAL = {
    "names": ("head.weight", "head.bias"),
    "answers": True,
    "private": hookimpl(lambda self, model, spec: self.names),
    "evaluate": by_class_0,
}
"""A method whose models are the clients' own: private is the whole model."""


@hookimpl
def nothing_to_learn(self, step):
    """A loss of no weight."""
    return torch.zeros((), requires_grad=True)


def test_the_contract_admits_a_method_without_a_global_model(mine):
    check_training(mine(**PERSONAL))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"local_loss": nothing_to_learn}, "every client's private weights as they were"),
        ({"answers": False}, "neither a global model nor models"),
        ({"names": ("head.bias",)}, "weights are shared, so there is a global model"),
    ],
)
def test_the_contract_catches_what_is_no_personal_method(mine, fault, said):
    with pytest.raises(AssertionError, match=said):
        check_training(mine(**PERSONAL | fault))


def test_the_tiny_federations_cohorts_leave_clients_idle():
    # what the tests of rounds without participation rest on
    drawn = [set(cohort(number, 4, 0.5, 0.0, 0)) for number in range(1, 5)]
    assert any(one != other for one, other in zip(drawn, drawn[1:], strict=False))
