"""FedPCL: Tan et al. 2022, prototype-wise contrast on frozen features."""

from math import exp, log

import pytest
import torch
from torch.func import vmap

from fedbench.core.errors import FedbenchError
from fedbench.core.method.tasks import AggregationTask, EvaluationTask
from fedbench.core.types import Model, Outputs, Update
from fedbench.models.inputs import FeatureInputs
from fedbench.rounds.finetuning import finetuned_metrics
from fedbench.rounds.loop import evaluate, train_round
from fedbench.testing import digest, final_state, tiny_spec
from fedbench.toolkit.prototypes import class_means
from fedbench_methods.fedpcl import (
    FedPCL,
    FedPclParams,
    contrast_to_batch,
    contrast_to_classes,
    filled_sets,
    paper_loss,
    released_loss,
)
from tests.equations.kit import runs, task_of

METHOD = FedPCL(FedPclParams())
LOSSES = (released_loss, paper_loss)


run_of = runs("fedpcl")


def drawn(clients=3, classes=4, dim=5, batch=6, seed=0):
    """Unit embeddings, labels, and prototypes sent, none of them missing."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.nn.functional.normalize(torch.rand(batch, dim, generator=generator), dim=1)
    sets = torch.rand(clients, classes, dim, generator=generator)
    labels = torch.randint(0, classes, (batch,), generator=generator)
    return z, labels, sent(sets, torch.ones(clients, classes, dtype=torch.bool))


def sent(sets, present):
    weights = present.double()
    shared = (weights[..., None] * sets).sum(0) / weights.sum(0).clamp(min=1)[:, None]
    return {"sets": sets, "present": present, "shared": shared.to(sets.dtype)}


def test_the_projector_is_a_layer_a_relu_and_unit_length():
    run = run_of()
    width = run.train.features.shape[1]
    assert {n: tuple(t.shape) for n, t in run.model.weights.items()} == {
        "projector.fc.weight": (256, width),
        "projector.fc.bias": (256,),
    }
    assert run.private == run.model.weights.keys() and not run.model.buffers
    raw = run.train.features[:9]
    out = run.model.forward(run.model.weights, raw, False)
    hidden = (raw @ run.model.weights["projector.fc.weight"].T + run.model.weights["projector.fc.bias"]).clamp(min=0)
    # the ReLU comes before the length is taken: the other way round, embeddings would be shorter than one
    torch.testing.assert_close(out.features, hidden / hidden.norm(dim=1, keepdim=True))
    assert out.logits.shape == (9, 0)


def test_a_dead_projector_gives_zero_rather_than_nan():
    run = run_of()
    weights = {name: torch.zeros_like(t) for name, t in run.model.weights.items()}
    assert not run.model.forward(weights, run.train.features[:2], True).features.any()


def test_contrast_leaves_an_anchors_own_sample_out_once():
    # two classes, one sample each, two views: i=0 sees its other view (1) and the other sample twice (0):
    # log(e + 2) - 1 = .551445. With its own sample left in: log(2 e + 2) - 1 = 1.006409
    got = contrast_to_batch(torch.eye(2), torch.tensor([0, 1]))
    assert got.tolist() == pytest.approx([log(exp(1) + 2) - 1] * 2)
    assert got[0].item() == pytest.approx(0.551445, abs=1e-6)


def test_positives_are_all_others_of_the_class_averaged():
    # labels (0, 0, 1), anchor of sample 0: similarities (3, 1, 2). Left: 3 once, 1 twice, 2 twice.
    # positives: 3, 1, 1 of mean 5/3
    similarity = torch.tensor([[3.0, 1.0, 2.0]] * 3)
    got = contrast_to_batch(similarity, torch.tensor([0, 0, 1]))[0].item()
    assert got == pytest.approx(log(exp(3) + 2 * exp(1) + 2 * exp(2)) - 5 / 3)


def test_contrast_equals_two_concatenated_views_with_the_anchor_masked():
    z, labels, prototypes = drawn()
    anchors = prototypes["sets"][1][labels]
    views, twice = torch.cat([z, z]).double(), torch.cat([labels, labels])
    total = 0.0
    for i in range(len(views)):
        others = [a for a in range(len(views)) if a != i]
        similar = {a: float(anchors[i % len(z)].double() @ views[a]) / 0.07 for a in others}
        denominator = torch.tensor(list(similar.values())).logsumexp(0).item()
        positives = [a for a in others if twice[a] == twice[i]]
        total += sum(denominator - similar[a] for a in positives) / len(positives)
    got = contrast_to_batch(anchors @ z.T / 0.07, labels).mean().item()
    assert got == pytest.approx(total / len(views), rel=1e-4)


def test_one_sample_alone_has_no_loss_and_no_nan():
    z = torch.tensor([[0.6, 0.8]], requires_grad=True)
    loss = released_loss(z, torch.tensor([1]), drawn(dim=2)[2], 0.07)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-5) and not z.grad.isnan().any()


def test_contrast_to_classes_is_over_the_usable_ones():
    similarity = torch.tensor([[1.0, 0.0, 50.0]])
    got = contrast_to_classes(similarity, torch.tensor([0]), torch.tensor([True, True, False]))
    assert got.item() == pytest.approx(log(1 + exp(-1)))


def test_paper_loss_is_the_global_term_and_the_mean_over_clients():
    # z = (1, 0) of class 0; client 0 has the axes, client 1 the axes swapped: P = (.5, .5) for both classes
    sets = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])
    prototypes = sent(sets, torch.ones(2, 2, dtype=torch.bool))
    got = paper_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), prototypes, temperature=1.0).item()
    assert got == pytest.approx(log(2) + (log(1 + exp(-1)) + log(1 + exp(1))) / 2)


def test_released_loss_is_summed_over_clients_and_the_mean_over_the_batch():
    z, labels, prototypes = drawn()
    alone = {"present": torch.ones(1, 4).bool(), "shared": prototypes["shared"]}
    each = [released_loss(z, labels, {**alone, "sets": prototypes["sets"][k : k + 1]}, 0.07) for k in range(3)]
    torch.testing.assert_close(released_loss(z, labels, prototypes, 0.07), sum(each))


def test_a_class_that_a_client_lacks_has_the_global_prototype_and_a_client_without_a_set_none():
    sets = torch.tensor([[[1.0], [2.0], [0.0]], [[3.0], [0.0], [0.0]], [[0.0], [0.0], [0.0]]])
    present = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    filled, usable = filled_sets(sets, present, torch.tensor([[2.0], [2.0], [0.0]]))
    assert filled[1].tolist() == [[3.0], [2.0], [0.0]]
    assert usable.tolist() == [[True, True, False], [True, True, False], [False, False, False]]


@pytest.mark.parametrize("loss", LOSSES)
def test_clients_without_a_set_and_samples_of_unknown_classes_add_nothing(loss):
    z, labels, prototypes = drawn()
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    known = prototypes["present"].clone()
    known[:, 3] = False
    wanted = loss(z, labels, sent(prototypes["sets"] * known[..., None], known), 0.07)
    # a fourth client that has sent nothing
    sets = torch.cat([prototypes["sets"] * known[..., None], torch.zeros(1, 4, 5)])
    more = sent(sets, torch.cat([known, torch.zeros(1, 4).bool()]))
    torch.testing.assert_close(loss(z, labels, more, 0.07), wanted)
    # the last samples are of class 3, which nobody has sent: no part as an anchor
    unknown = loss(z.requires_grad_(), torch.full((6,), 3), more, 0.07)
    unknown.backward()
    assert unknown.item() == 0 and not z.grad.any()


@pytest.mark.parametrize("loss", LOSSES)
def test_permuted_clients_have_the_same_loss(loss):
    z, labels, prototypes = drawn()
    prototypes["present"][1, 2] = False
    order = torch.tensor([2, 0, 1])
    permuted = {**prototypes, "sets": prototypes["sets"][order], "present": prototypes["present"][order]}
    torch.testing.assert_close(loss(z, labels, permuted, 0.07), loss(z, labels, prototypes, 0.07))


@pytest.mark.parametrize("loss", LOSSES)
def test_embeddings_that_are_separated_prototypes_have_the_least_loss_and_are_all_right(loss):
    labels = torch.tensor([0, 1, 2, 3, 1])
    axes = torch.eye(4)
    prototypes = sent(axes.repeat(3, 1, 1), torch.ones(3, 4, dtype=torch.bool))
    least = loss(axes[labels], labels, prototypes, 0.5)
    generator = torch.Generator().manual_seed(0)
    for spread in (0.1, 0.3, 1.0):
        other = axes[labels] + spread * torch.rand(5, 4, generator=generator)
        assert loss(torch.nn.functional.normalize(other, dim=1), labels, prototypes, 0.5) > least
    state = {"sets": axes.repeat(3, 1, 1), "present": torch.ones(3, 4).bool(), "shared": axes}
    own = {0: {"fedpcl": {"means": axes, "holds": torch.ones(4).bool()}}}
    got = METHOD.evaluate(evaluation(axes[labels], state, own))
    assert torch.equal(got.by_client[0], labels)


def identity(tensors, inputs, training):
    return Outputs(inputs.new_zeros(len(inputs), 0), inputs + tensors["shift"])


def evaluation(inputs, server, own, clients=(0,), client=None):
    weights = {"shift": torch.tensor(0.0)}
    return EvaluationTask(
        Model(weights, identity), weights, {}, FeatureInputs(inputs), 4, client, {"fedpcl": server} if server else {},
        own, clients, {}, frozenset({"shift"}),
    )  # fmt: skip


def test_a_client_predicts_by_its_own_prototypes_and_one_that_never_took_part_by_the_global_ones():
    server = {
        "sets": torch.zeros(2, 3, 1),
        "present": torch.tensor([[True, True, False], [False, False, False]]),
        "shared": torch.tensor([[0.0], [1.0], [0.0]]),
    }
    own = {0: {"fedpcl": {"means": torch.tensor([[1.0], [0.0], [0.0]]), "holds": torch.tensor([True, True, False])}}}
    got = METHOD.evaluate(evaluation(torch.tensor([[0.1], [0.9]]), server, own, clients=(0, 1)))
    assert got.labels is None
    # the local prototypes lie the other way round than the global ones; the third class, at zero, is nobody's
    assert {k: v.tolist() for k, v in got.by_client.items()} == {0: [1, 0], 1: [0, 1]}
    assert METHOD.evaluate(evaluation(torch.tensor([[0.1]]), server, own, (), 0)).labels.tolist() == [1]
    with pytest.raises(FedbenchError, match="set rounds to 1 or more"):
        METHOD.evaluate(evaluation(torch.tensor([[0.1]]), None, own))


def aggregated(updates, state, num_clients=3):
    made = tuple(
        Update(client, {}, {}, size, {"means": torch.tensor(means), "holds": torch.tensor(holds)})
        for client, size, means, holds in updates
    )
    spec = tiny_spec("fedavg", backbone="convnet")
    task = AggregationTask(1, {}, {}, made, Model({}, None), spec, state, num_clients=num_clients)
    assert METHOD.aggregate(task) == {}
    return task.state["fedpcl"]


def test_the_server_keeps_everyones_last_set_and_their_unweighted_mean():
    state = {}
    first = aggregated([(0, 1, [[1.0], [2.0]], [True, True]), (2, 99, [[5.0]], [True, False])], state)
    assert first["sets"].tolist() == [[[1.0], [2.0]], [[0.0], [0.0]], [[5.0], [0.0]]]
    assert first["present"].tolist() == [[True, True], [False, False], [True, False]]
    # 99 samples weigh no more than one
    assert first["shared"].tolist() == [[3.0], [2.0]]
    second = aggregated([(1, 1, [[6.0]], [False, True]), (2, 1, [[7.0]], [True, False])], state)
    assert second["sets"].tolist() == [[[1.0], [2.0]], [[0.0], [6.0]], [[7.0], [0.0]]]
    assert second["shared"].tolist() == [[4.0], [4.0]]
    assert first["sets"][2].tolist() == [[5.0], [0.0]]


@pytest.mark.parametrize("executor", ["sequential", "cohort"])
def test_without_prototypes_no_weight_moves_even_under_weight_decay(executor):
    run = run_of(executor=executor, weight_decay=0.1, lr=0.1, scenario={"participation": 0.75})
    after, record = train_round(run, run.initial_state())
    assert record.metrics["train_loss"] == 0 and len(after.own) == 3
    for own in after.own.values():
        assert all(torch.equal(own[name], run.model.weights[name]) for name in run.model.weights)
    after, record = train_round(run_of(executor="sequential"), after)
    for client in record.cohort:
        assert not torch.equal(after.own[client]["projector.fc.weight"], run.model.weights["projector.fc.weight"])


def test_prototypes_are_means_of_unit_embeddings_after_training():
    run = run_of()
    state, _ = train_round(run, run.initial_state())
    state, record = train_round(run, state)
    client = record.cohort[0]
    task = task_of(run, client, state=state, round=3)
    z = run.model.forward(state.own[client], task.inputs.read(torch.arange(len(task.inputs))), False).features
    expected = class_means(z, task.labels)
    kept, server = state.clients[client]["fedpcl"], state.server["fedpcl"]
    for rows in (kept["means"][kept["holds"]], server["sets"][client][server["present"][client]]):
        torch.testing.assert_close(rows, expected.means)
    # they are not brought to length one again
    assert expected.means.norm(dim=1).min() < 0.98


def test_prototypes_are_all_that_is_sent():
    run = run_of()
    state, first = train_round(run, run.initial_state())
    state, second = train_round(run, state)

    def up(cohort):
        rows = sum(int((run.federation.class_counts(client) > 0).sum()) for client in cohort)
        return 4 * 256 * rows + 4 * len(cohort)

    # N C 256 and C 256 floats and the mask N C, for N = C = 4
    assert [first.bytes_down, second.bytes_down] == [0, 2 * (4 * 256 * (4 * 4 + 4) + 4 * 4)]
    assert [first.bytes_up, second.bytes_up] == [up(first.cohort), up(second.cohort)]


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_several_clients_at_once_are_those_of_each(loss):
    drawings = [drawn(seed=seed) for seed in (1, 2)]
    for _, _, prototypes in drawings:
        prototypes["present"][0, 1] = False
    names = ("sets", "present", "shared")
    stacked = [torch.stack([d[i] for d in drawings]) for i in (0, 1)]
    held = [torch.stack([d[2][name] for d in drawings]) for name in names]
    at_once = vmap(lambda z, y, *p: loss(z, y, dict(zip(names, p, strict=True)), 0.07))(*stacked, *held)
    torch.testing.assert_close(at_once, torch.stack([loss(*d, 0.07) for d in drawings]))


def test_both_losses_learn_and_differ():
    states = {}
    for name in ("released", "paper"):
        run = run_of(scenario={"participation": 1.0}, params={"loss": name}, rounds=3, finetune_epochs=1)
        states[name] = final_state(run)
        metrics, predictions = evaluate(run, states[name])
        assert metrics["personal_mean_client_accuracy"] > 75 and predictions.labels is None
        assert all(name.startswith("personal_") for name in metrics)
    assert digest(states["released"]) != digest(states["paper"])
    assert finetuned_metrics(run, states["paper"])["finetuned_mean_client_accuracy"] > 75
