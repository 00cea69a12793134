"""Ratio Loss: Wang et al., AAAI 2021."""

from dataclasses import replace

import pytest
import torch

from fedbench.core.method.tasks import AggregationTask, ServerData
from fedbench.core.spec import RunSpec, Training
from fedbench.core.types import LinearHead, Model, Outputs, Update
from fedbench.models.inputs import FeatureInputs
from fedbench.rounds.loop import rounds, train_round
from fedbench.toolkit.fedavg import average
from fedbench_methods.ratio_loss import (
    RatioLoss,
    RatioLossParams,
    climb_ratios,
    released_ratios,
    weighted_cross_entropy,
)
from tests.equations.kit import headed, run_of


def scaled_head(tensors, inputs, training):
    outputs = headed(tensors, inputs, training)
    return Outputs(16.0 * outputs.logits, outputs.features)


def end_of_round(received, *, updated=None, inputs=None, labels=(0, 1, 2), **training):
    """The end of a round that began with ``received`` (C, d), one client having answered ``updated``."""
    start = {"head.weight": received, "head.bias": torch.zeros(len(received))}
    sent = {**start, "head.weight": received if updated is None else updated}
    data = ServerData(FeatureInputs(torch.eye(3) if inputs is None else inputs), torch.tensor(labels))
    spec = RunSpec(method="ratio-loss", training=Training(**{"lr": 0.5, "momentum": 0.0, **training}))
    model = Model(start, headed, head=LinearHead())
    return AggregationTask(2, start, {}, (Update(0, sent, {}, 5),), model, spec, {}, server_data=data)


def kept(task, **params):
    RatioLoss(RatioLossParams(**params)).aggregate(task)
    return task.state["ratio-loss"]["class_weights"]


def test_ratios_by_hand_and_ten_where_the_others_sum_to_nothing():
    changes = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.1, 0.0], [0.0, 1.0]]])
    assert released_ratios(changes, 5000.0).tolist() == [10.0, 10.0]
    changes[0, 1, 1] = 0.25
    assert released_ratios(changes, 5000.0).tolist() == [10.0, 4.0]


def test_a_position_that_another_class_reaches_to_80_percent_in_absolute_value_does_not_count():
    # (0,0): 1 against .5 and 0 counts; (0,1): -.9 reaches .8 of 1; (1,0): .79 does not; (1,1): the largest is negative
    first = torch.tensor([[1.0, 1.0], [1.0, -0.1]])
    second = torch.tensor([[0.5, -0.9], [0.79, -0.5]])
    third = torch.zeros(2, 2)
    third[1, 1] = -0.2
    ratio = released_ratios(torch.stack([first, second, third]), 5000.0)[0].item()
    assert ratio == pytest.approx((1 + 1) / ((0.5 + 0.79) / 2))


def test_a_class_stands_out_only_where_its_change_is_the_largest_with_its_sign():
    # at (0,1) class 0 changes by -1 and class 1 by .1, the largest, whose 80 % the other reaches: nobody's
    changes = torch.tensor([[[1.0, -1.0], [0.0, 0.0]], [[0.5, 0.1], [0.0, 0.0]]])
    assert released_ratios(changes, 5000.0).tolist() == [2.0, 10.0]


def test_ratios_are_of_sums_not_means_of_ratios_and_capped():
    changes = torch.tensor([[[1.0, 1.0], [0.0, 0.0]], [[0.5, 0.0], [0.0, 0.0]]])
    assert released_ratios(changes, 5000.0)[0].item() == 4.0
    assert released_ratios(changes, 3.0)[0].item() == 3.0
    changes[1, 0] = torch.tensor([1e-6, 0.0])
    assert released_ratios(changes, 5000.0)[0].item() == 5000.0


def test_permuting_classes_permutes_ratios():
    changes, order = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 0, 3, 1])
    for ratios in (released_ratios, climb_ratios):
        torch.testing.assert_close(ratios(changes[order][:, order], 50.0), ratios(changes, 50.0)[order])


def test_climbs_ratio_by_hand():
    changes = torch.zeros(3, 3, 2)
    changes[0, 0], changes[1, 0], changes[2, 0] = torch.tensor([[-2.0, -1.0], [0.5, 0.25], [0.5, 0.0]])
    # row 0: 2 * (-2 / 1, -1 / .25) = (-4, -8), mean -6; row 1 has no others
    assert climb_ratios(changes, 50.0).tolist() == [6.0, 10.0, 10.0]


def test_changes_are_what_training_on_one_class_adds_to_the_received_model():
    received = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    task = end_of_round(received, updated=received + 7)
    plugin = RatioLoss(RatioLossParams())
    samples = [task.server_data.inputs.select(torch.tensor([k])) for k in range(3)]
    changes = plugin.trained_changes(task, LinearHead(), samples)
    # class 1: x = (0, 1, 0), logits (0, 2, 0), one step of lr .5: -.5 (p - e_1) x^T, with the sign of the update
    p = torch.softmax(torch.tensor([0.0, 2.0, 0.0]), dim=0)
    torch.testing.assert_close(changes[1][:, 1], -0.5 * (p - torch.tensor([0.0, 1.0, 0.0])))
    assert not changes[1][:, [0, 2]].any()
    gradients = plugin.gradients(task, LinearHead(), samples)
    torch.testing.assert_close(gradients * -0.5, changes)
    twice = plugin.trained_changes(end_of_round(received, local_epochs=2), LinearHead(), samples)
    assert twice[1, 1, 1] > 1.5 * changes[1, 1, 1]


def test_copies_are_trained_at_the_rate_that_clients_had_in_the_round():
    samples = [FeatureInputs(row[None]) for row in torch.eye(3)]
    first, decayed = (
        RatioLoss(RatioLossParams()).trained_changes(task, LinearHead(), samples)
        for task in (end_of_round(torch.zeros(3, 3)), end_of_round(torch.zeros(3, 3), lr_decay=0.5))
    )
    torch.testing.assert_close(decayed, 0.5 * first)  # the task's round is 2


def test_climbs_gradients_are_autograds_with_a_scaled_head_and_a_bias():
    generator = torch.Generator().manual_seed(0)
    received, bias = (0.1 * torch.randn(shape, generator=generator) for shape in ((3, 4), (3,)))
    inputs, labels = torch.randn(6, 4, generator=generator), torch.tensor([0, 1, 2, 0, 1, 0])
    task = end_of_round(received, inputs=inputs, labels=labels.tolist())
    weights, place = {"head.weight": received, "head.bias": bias}, LinearHead(scale=16.0)
    task = replace(task, weights=weights, model=Model(weights, scaled_head, head=place))
    wanted = []
    for label in range(3):
        weight = received.clone().requires_grad_()
        logits = scaled_head({**weights, "head.weight": weight}, inputs[labels == label], True).logits
        loss = torch.nn.functional.cross_entropy(logits, labels[labels == label])
        wanted.append(torch.autograd.grad(loss, weight)[0])
    samples = [task.server_data.inputs.select(torch.nonzero(labels == k).flatten()) for k in range(3)]
    torch.testing.assert_close(RatioLoss(RatioLossParams()).gradients(task, place, samples), torch.stack(wanted))
    ratios = 0.1 * climb_ratios(torch.stack(wanted), 50.0)
    torch.testing.assert_close(kept(task, ratio="climb", normalise=False), 1 + ratios)


def test_weights_come_from_the_model_before_the_round_and_aggregation_is_fedavgs():
    # all server samples alike: a class the received head hardly knows changes it most, others little
    inputs = torch.ones(3, 3)
    received = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    one = end_of_round(received, inputs=inputs)
    other = end_of_round(received, updated=received.flip(0), inputs=inputs)
    torch.testing.assert_close(kept(one), kept(other))
    found = RatioLoss(RatioLossParams()).aggregate(other)
    assert all(torch.equal(found[name], value) for name, value in average(other).items())
    assert not torch.allclose(kept(one), kept(end_of_round(received.flip(0), inputs=inputs)))


def test_class_weights_are_alpha_plus_beta_r_divided_by_their_mean_unless_told_otherwise():
    # three orthogonal samples: nobody else changes at a class's own position but by its own row, R = |.33 / .17| ...
    task = end_of_round(torch.zeros(3, 3), inputs=torch.ones(3, 3))
    # every row p: class p changes it by .5 * 2/3, the other two by -.5 * 1/3 each, which is half: R = 2
    assert kept(task, normalise=False).tolist() == pytest.approx([1.2] * 3)
    assert kept(task, normalise=False, alpha=0.5, beta=1.0).tolist() == pytest.approx([2.5] * 3)
    assert kept(task, normalise=False, cap=1.0).tolist() == pytest.approx([1.1] * 3)
    assert kept(task, normalise=False, ratio="climb").tolist() == pytest.approx([1.2] * 3)
    assert kept(task).tolist() == pytest.approx([1.0] * 3)
    skewed = end_of_round(torch.tensor([[3.0, 0, 0], [0, 0, 0], [0, 0, 0]]), inputs=torch.ones(3, 3))
    plain = kept(skewed, normalise=False)
    assert plain.std() > 0.1
    torch.testing.assert_close(kept(skewed), plain / plain.mean())


def test_loss_is_divided_by_the_samples_and_survives_an_underflow():
    logits = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    # (3 * .287682 + 1 * .693147) / 2, not / 4
    got = weighted_cross_entropy(logits, torch.tensor([1, 0]), torch.tensor([1.0, 3.0]))
    assert got.item() == pytest.approx((3 * 0.287682 + 0.693147) / 2, abs=1e-6)
    far = weighted_cross_entropy(torch.tensor([[0.0, 200.0]]), torch.tensor([0]), torch.ones(2))
    assert far.item() == 200.0


def test_first_round_is_fedavgs_and_later_ones_send_c_floats_more():
    run, plain = run_of("ratio-loss", rounds=2), run_of("fedavg", rounds=2)
    plain = replace(plain, federation=run.federation, train=run.train)
    (one, sent), (other, usual) = (train_round(r, r.initial_state()) for r in (run, plain))
    torch.testing.assert_close(one.weights, other.weights)
    assert sent.bytes_down == usual.bytes_down
    again = train_round(run, one)[1]
    assert again.bytes_down == sent.bytes_down + len(again.cohort) * 4 * 4
    assert again.bytes_up == usual.bytes_up


@pytest.mark.parametrize("ratio", ["released", "climb"])
def test_class_weights_are_kept_by_the_server_and_used_by_the_clients(ratio):
    run = run_of("ratio-loss", {"ratio-loss": {"ratio": ratio}}, rounds=3)
    seen = [
        state.server["ratio-loss"]["class_weights"] for state, *_ in rounds(run, run.initial_state()) if state.round
    ]
    assert all(w.shape == (4,) and torch.isfinite(w).all() and (w > 0).all() for w in seen)
    assert not torch.equal(seen[0], seen[1])
