"""FedProto: Tan et al. 2022, prototypes that travel in place of weights."""

from dataclasses import replace

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import ClientShard, Federation, Split, TensorImages
from fedbench.core.method.tasks import AggregationTask, EvaluationTask
from fedbench.core.types import Broadcast, Model, Outputs, Predictions, Update
from fedbench.models.inputs import FeatureInputs
from fedbench.plugins.assembly import assemble
from fedbench.rounds.finetuning import finetuned_metrics
from fedbench.rounds.loop import evaluate, train_round
from fedbench.rounds.messages import client_task
from fedbench.rounds.metrics import score, size_in_bytes
from fedbench.testing import digest, final_state, tiny_spec
from fedbench.toolkit.prototypes import mean_over_holders, nearest_class, spread
from fedbench_methods.fedproto import FedProto, FedProtoParams, prototype_distance
from tests.equations.kit import runs

run_of = runs("fedproto", backbone="")


def test_distance_is_the_mean_over_batch_and_coordinates():
    features = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    prototypes = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    # (1 + 4 + 0 + 4) / (2 samples x 2 coordinates); a sum over coordinates would be twice that
    got = prototype_distance(features, torch.tensor([0, 1]), prototypes, torch.tensor([True, True]))
    assert got.item() == pytest.approx(9 / 4)


def test_a_class_without_prototype_adds_zero_and_has_no_gradient_but_counts_in_the_mean():
    features = torch.tensor([[1.0, 2.0], [7.0, -3.0]], requires_grad=True)
    loss = prototype_distance(features, torch.tensor([0, 1]), torch.zeros(2, 2), torch.tensor([True, False]))
    loss.backward()
    assert loss.item() == pytest.approx(5 / 4)
    # 2 h / (2 x 2)
    assert features.grad.tolist() == [[0.5, 1.0], [0.0, 0.0]]


def test_a_feature_that_is_its_prototype_has_zero_loss_and_gradient():
    features = torch.tensor([[1.0, 2.0]], requires_grad=True)
    loss = prototype_distance(features, torch.tensor([1]), torch.tensor([[9.0, 9.0], [1.0, 2.0]]), torch.ones(2).bool())
    loss.backward()
    assert loss.item() == 0 and not features.grad.any()


def payload(means, holds, counts):
    return {"means": torch.tensor(means), "holds": torch.tensor(holds), "counts": torch.tensor(counts)}


def aggregated(mean, sent, state=None):
    """The server's state after a round in which clients sent ``sent``."""
    updates = tuple(Update(client, {}, {}, 1, each) for client, each in enumerate(sent))
    spec = tiny_spec("fedavg", backbone="convnet")
    task = AggregationTask(1, {}, {}, updates, Model({}, None), spec, {} if state is None else state)
    assert FedProto(FedProtoParams(mean=mean)).aggregate(task) == {}
    return task.state["fedproto"]


# class 0: client 0 has (1, 0) from 3 samples, client 1 (0, 1) from 1; class 1: client 1 alone; class 2: nobody
TWO = (
    payload([[1.0, 0.0]], [True, False, False], [3, 0, 0]),
    payload([[0.0, 1.0], [5.0, 6.0]], [True, True, False], [1, 2, 0]),
)


@pytest.mark.parametrize(("mean", "expected"), [("clients", [0.5, 0.5]), ("samples", [0.75, 0.25])])
def test_global_prototypes_are_a_mean_over_holders_with_one_factor_never_both(mean, expected):
    # both factors, as the paper prints them, would give (.375, .125)
    state = aggregated(mean, TWO)
    assert state["prototypes"].tolist() == [expected, [5.0, 6.0], [0.0, 0.0]]
    assert state["known"].tolist() == [True, True, False]


def test_a_class_that_nobody_of_the_round_holds_keeps_its_prototype():
    held = {
        "prototypes": torch.tensor([[9.0, 9.0], [8.0, 8.0], [7.0, 7.0]]),
        "known": torch.tensor([True, False, True]),
    }
    state = aggregated("clients", TWO, {"fedproto": held})
    assert state["prototypes"].tolist() == [[0.5, 0.5], [5.0, 6.0], [7.0, 7.0]]
    assert state["known"].tolist() == [True, True, True]
    assert held["prototypes"][0].tolist() == [9.0, 9.0]


def test_means_are_spread_over_the_classes_they_are_of():
    got = spread(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([False, True, False, True]))
    assert got.tolist() == [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]


def test_a_class_without_any_weight_has_a_zero_mean():
    got = mean_over_holders(torch.full((2, 1, 3), 5.0), torch.zeros(2, 1))
    assert got.tolist() == [[0.0, 0.0, 0.0]]


def moving(tensors, inputs, training):
    """Features w x, one hundred more in training mode, as batch statistics would; logits (w x, 0, 0)."""
    features = inputs * tensors["w"] + (100.0 if training else 0.0)
    seen.append((features.detach().clone(), inputs.clone(), training))
    return Outputs(torch.nn.functional.pad(inputs * tensors["w"], (0, 2)), features)


seen = []
SAMPLES, LABELS = torch.tensor([[1.0], [2.0], [4.0], [8.0]]), [0, 0, 2, 2]


def trained_client(make_task, **params):
    seen.clear()
    model = Model({"w": torch.tensor(1.0)}, moving)
    every = {"fedproto": {"lam": 0.1, **params}}
    # prototypes as of an earlier round, so that the loss has its second term
    sent = {"prototypes": torch.full((3, 1), 90.0), "known": torch.tensor([True, False, True])}
    task = make_task(
        model, SAMPLES, LABELS, method="fedproto", params=every, payload=sent, num_classes=3, round=2,
        lr=1e-4, batch_size=2, local_epochs=2,
    )  # fmt: skip
    task.state["fedproto"] = {"holds": torch.tensor([True, False, True])}
    update = task.hooks.local_train(task=task)
    steps = [entry for entry in seen if entry[2]]
    [sent] = task.hooks.after_training(task=task, update=update)
    return task, update, sent, steps


def test_prototypes_are_those_of_the_trained_model_in_eval_mode(make_task):
    task, update, sent, _ = trained_client(make_task)
    w = update.weights["w"]
    assert w.item() != 1.0
    # means of x: 1.5 and 6. From weights that still move, or in training mode (+ 100), they would differ
    torch.testing.assert_close(sent["means"], torch.tensor([[1.5], [6.0]]) * w)
    assert sent["holds"].tolist() == [True, False, True] and sent.keys() == {"means", "holds"}
    assert task.state["fedproto"].keys() == {"holds"}


def test_running_prototypes_are_those_the_last_epoch_saw_while_weights_moved(make_task):
    task, update, sent, steps = trained_client(make_task, prototypes="running")
    assert len(steps) == 4
    by_sample = {x.item(): h.item() for features, inputs, _ in steps[2:] for h, x in zip(features, inputs, strict=True)}
    expected = [[(by_sample[1.0] + by_sample[2.0]) / 2], [(by_sample[4.0] + by_sample[8.0]) / 2]]
    torch.testing.assert_close(sent["means"], torch.tensor(expected))
    # nothing of the epoch is kept
    assert task.state["fedproto"].keys() == {"holds"}


def test_running_prototypes_train_as_the_others_do(make_task):
    one, other = (trained_client(make_task, prototypes=how)[1] for how in ("recomputed", "running"))
    assert torch.equal(one.weights["w"], other.weights["w"])


def test_counts_are_sent_where_the_mean_needs_them(make_task):
    assert trained_client(make_task, mean="samples")[2]["counts"].tolist() == [2, 0, 2]


def test_loss_has_lambda_times_the_distance_and_none_of_it_in_round_1(make_step):
    method = FedProto(FedProtoParams(lam=3.0))
    model = Model({"w": torch.tensor(1.0)}, moving)
    sent = {"prototypes": torch.full((3, 1), 104.0), "known": torch.tensor([True, False, True])}
    features = torch.tensor([[101.0], [102.0], [104.0], [108.0]], requires_grad=True)
    outputs = Outputs(torch.zeros(4, 3), features)
    step = make_step(model, SAMPLES, LABELS, payload=sent, num_classes=3, outputs=outputs)
    assert method.loss_terms(step).item() == pytest.approx(3 * (9 + 4 + 0 + 16) / 4)
    step = make_step(model, SAMPLES, LABELS, payload={}, num_classes=3, outputs=outputs)
    assert method.loss_terms(step) is None


def test_round_1_is_local_training_and_round_2_is_not():
    with_term, without = run_of(params={"lam": 1.0}), run_of(params={"lam": 0.0})
    first = [final_state(run, until=1) for run in (with_term, without)]
    assert digest(first[0]) == digest(first[1])
    assert digest(final_state(with_term, first[0], until=2)) != digest(final_state(without, first[1], until=2))


def test_lambda_zero_is_training_alone_whatever_the_prototypes():
    run = run_of(params={"lam": 0.0}, scenario={"participation": 1.0}, rounds=2)
    state = final_state(run)
    plain = replace(run, assembly=assemble("fedavg", {}), private=frozenset())
    for client in range(4):
        weights = run.model.weights
        for number in (1, 2):
            task = client_task(plain, run.initial_state(), number, 0, client, Broadcast(weights))
            weights = plain.executor.train([task])[0].weights
        assert all(torch.equal(state.own[client][name], weights[name]) for name in weights)
    assert not torch.equal(state.own[0]["head.weight"], state.own[1]["head.weight"])
    assert digest(
        final_state(run_of(params={"lam": 0.0, "mean": "samples"}, scenario={"participation": 1.0}, rounds=2))
    ) == digest(state)


def test_averaged_weights_are_sent_beside_the_prototypes_and_the_term_moves_them():
    run = run_of(params={"aggregate_weights": True})
    state, first = train_round(run, run.initial_state())
    state, second = train_round(run, state)
    model, d = run.info.round_bytes, 84
    assert first.bytes_down == 2 * model and second.bytes_down == 2 * (model + 4 * 4 * d + 4)
    assert second.bytes_up == 2 * (model + 4) + 4 * d * classes_of(run, second.cohort)
    assert evaluate(run, state)[0].keys() >= {"global_accuracy", "mean_client_accuracy"}
    assert digest(state) != digest(final_state(run_of(params={"lam": 0.0, "aggregate_weights": True}), until=2))


def classes_of(run, cohort):
    return sum(int((run.federation.class_counts(client) > 0).sum()) for client in cohort)


def test_prototypes_are_all_that_is_sent():
    run = run_of()
    state, first = train_round(run, run.initial_state())
    # 84 features, four classes: k rows and a mask of 4 bytes up; nothing down in round 1, then C rows and the mask
    assert first.bytes_down == 0
    assert first.bytes_up == 4 * 84 * classes_of(run, first.cohort) + 2 * 4
    _, second = train_round(run, state)
    assert second.bytes_down == 2 * (4 * 4 * 84 + 4)
    assert run.info.round_bytes == 0
    assert size_in_bytes(state.own[first.cohort[0]]) == size_in_bytes(run.model.weights, run.model.buffers)


def test_running_statistics_are_private_too():
    run = run_of(backbone="resnet8?width=1", rounds=1)
    state, record = train_round(run, run.initial_state())
    # 64 features: k rows and a mask of 4 bytes each
    assert record.bytes_up == 4 * 64 * classes_of(run, record.cohort) + 2 * 4 and record.bytes_down == 0
    one, other = (state.own[client]["body.bn1.running_mean"] for client in record.cohort)
    assert not torch.equal(one, other)
    assert torch.equal(state.buffers["body.bn1.running_mean"], run.model.buffers["body.bn1.running_mean"])


def scored_by_distance(tensors, inputs, training):
    """Features are the inputs, moved by the client's own weight; the classifier says class 2 always."""
    logits = torch.tensor([0.0, 0.0, 1.0]).expand(len(inputs), 3)
    return Outputs(logits, inputs + tensors["shift"])


def evaluation(state=None, client=None, clients=(0, 1, 2)):
    held = {"prototypes": torch.tensor([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]]), "known": torch.tensor([True, True, True])}
    # client 0 holds classes 0 and 2, client 1 holds 1; client 2 has not taken part
    own = {0: {"shift": torch.tensor(0.0)}, 1: {"shift": torch.tensor(0.0)}}
    states = {
        k: {"fedproto": {"holds": torch.tensor(h)}} for k, h in ((0, [True, False, True]), (1, [False, True, False]))
    }
    weights = {"shift": torch.tensor(0.0)}
    return EvaluationTask(
        Model(weights, scored_by_distance), weights, {}, FeatureInputs(torch.tensor([[1.0, 1.0], [4.0, 4.0]])), 3,
        client, {"fedproto": held} if state is None else state, states, clients, own, frozenset({"shift"}),
    )  # fmt: skip


def test_a_client_predicts_by_the_nearest_prototype_among_its_own_classes():
    got = FedProto(FedProtoParams()).evaluate(evaluation())
    assert got.labels is None
    assert {client: found.tolist() for client, found in got.by_client.items()} == {0: [0, 2], 1: [1, 1], 2: [1, 2]}


def test_a_client_predicts_by_its_own_classifier_where_asked():
    got = FedProto(FedProtoParams(evaluation="classifier")).evaluate(evaluation())
    assert {client: found.tolist() for client, found in got.by_client.items()} == {k: [2, 2] for k in range(3)}


def test_own_weights_move_the_features_that_are_compared():
    task = evaluation()
    task.own[0]["shift"] = torch.tensor(3.0)
    # (4, 4) and (7, 7) are nearest to class 2's (5, 5)
    assert FedProto(FedProtoParams()).evaluate(task).by_client[0].tolist() == [2, 2]


def test_a_fine_tuned_client_is_scored_by_its_weights():
    got = FedProto(FedProtoParams()).evaluate(evaluation(client=0, clients=()))
    assert got.labels.tolist() == [0, 2] and not got.by_client


def test_before_any_prototype_it_cannot_predict():
    with pytest.raises(FedbenchError, match="set rounds to 1 or more"):
        FedProto(FedProtoParams()).evaluate(evaluation(state={}))


def test_nearest_class_is_by_distance_not_by_product():
    # (3, 0) is nearest to (2, 0), though its product with (9, 0) is larger
    means = torch.tensor([[2.0, 0.0], [9.0, 0.0], [3.0, 0.0]])
    got = nearest_class(torch.tensor([[3.0, 0.0]]), means, torch.tensor([True, True, False]))
    assert got.tolist() == [0]


def test_every_client_is_scored_alone_and_not_by_counters_that_run_on():
    images = TensorImages(torch.zeros(4, 3, 1, 1, dtype=torch.uint8))
    shards = [ClientShard(k, torch.tensor([k]), torch.tensor(own)) for k, own in enumerate(([0, 1], [2, 3]))]
    split = Split(images, torch.tensor([0, 0, 1, 1]))
    federation = Federation(shards, split, split, ("cat", "dog"))
    always_cat = {0: torch.zeros(4, dtype=torch.int64), 1: torch.zeros(4, dtype=torch.int64)}
    got = score(Predictions(None, always_cat), federation)
    # 100 and 0; counters that go on from client to client would say 100 and 50
    assert (got["personal_mean_client_accuracy"], got["personal_worst_client_accuracy"]) == (50.0, 0.0)


def test_a_run_has_own_models_columns_and_no_global_ones():
    run = run_of(rounds=2, finetune_epochs=1)
    state = final_state(run)
    metrics, predictions = evaluate(run, state)
    assert predictions.labels is None and predictions.by_client.keys() == {0, 1, 2, 3}
    assert metrics and all(name.startswith("personal_") for name in metrics)
    assert evaluate(run, final_state(run, until=1))[0] == {}
    assert finetuned_metrics(run, state)["finetuned_mean_client_accuracy"] > 0
