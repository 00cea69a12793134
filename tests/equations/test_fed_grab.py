"""Fed-GraB: Xiao et al. 2023, gradients balanced class by class, and the prior analyser."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from fedbench.core.errors import FedbenchError
from fedbench.core.method.tasks import AggregationTask, BroadcastTask, StartTask
from fedbench.core.types import LinearHead, Model, Outputs, Update
from fedbench.rounds.loop import train_round
from fedbench.testing import final_state, tiny_spec
from fedbench.toolkit.local_training import loss_gradients, summed_loss
from fedbench.toolkit.losses import balanced_loss, one_versus_rest
from fedbench_methods.fed_grab import (
    Controller,
    FedGraB,
    FedGraBParams,
    batch_balance,
    controller_moved,
    estimated_shares,
    exempted,
    gradient_weights,
    tail_classes,
    weight_of,
)
from tests.equations.kit import headed, runs

EVERY = torch.tensor([True, True])
NAME = "fed-grab"


grab_run = runs(NAME, backbone="convnet")


def controller(balance, output=(0.0, 0.0), error=(0.0, 0.0), earlier=(0.0, 0.0)):
    return Controller(*(torch.tensor(values) for values in (balance, output, error, earlier)))


def model_of(weight=((0.0, 0.0), (0.0, 0.0))):
    weights = {"head.weight": torch.tensor(weight), "head.bias": torch.zeros(len(weight))}
    return Model(weights=weights, forward=headed, head=LinearHead())


# --- weights and controller ---


# 10 / (1 + 9 e^-1) = 2.3197, 10 / (1 + 9 e) = .3927
@pytest.mark.parametrize(("output", "expected"), [(2.0, 2.3197), (-2.0, 0.3927), (1e4, 10.0), (-1e4, 0.0)])
def test_weights_go_from_0_to_10(output, expected):
    assert weight_of(torch.tensor(output)).item() == pytest.approx(expected, abs=5e-5)


def test_a_controller_at_rest_weighs_exactly_one():
    assert weight_of(torch.tensor(0.0)).item() == 1.0


def test_controller_by_hand():
    # e = .2: 10 (.2) + .01 (.2) + .1 (.2) = 2.022, and the opposite for D = .2
    first = controller_moved(controller((-0.2, 0.2)), EVERY, FedGraBParams())
    torch.testing.assert_close(first.output, torch.tensor([2.022, -2.022]))
    torch.testing.assert_close(first.error, torch.tensor([0.2, -0.2]))
    assert first.earlier.tolist() == [0.0, 0.0]
    # e = .5, e1 = .2, e2 = 0: 10 (.3) + .01 (.5) + .1 (.5 - .4) = 3.015, added
    second = controller_moved(replace(first, balance=torch.tensor([-0.5, 0.5])), EVERY, FedGraBParams())
    torch.testing.assert_close(second.output, torch.tensor([5.037, -5.037]))
    # e = .4, e1 = .5, e2 = .2: 10 (-.1) + .01 (.4) + .1 (.4 - 1 + .2) = -1.036
    third = controller_moved(replace(second, balance=torch.tensor([-0.4, 0.4])), EVERY, FedGraBParams())
    torch.testing.assert_close(third.output, torch.tensor([4.001, -4.001]))


def test_a_class_with_too_little_positive_gradient_gets_more_of_it():
    moved = controller_moved(controller((-0.2, 0.2)), EVERY, FedGraBParams())
    up, down = weight_of(moved.output), weight_of(-moved.output)
    assert up[0] > 1 > down[0]
    assert up[1] < 1 < down[1]


@pytest.mark.parametrize(("clamp", "expected"), [(10.0, 10.0), (100.0, 100.0), (0.0, 1011.0)])
def test_the_clamp_bounds_what_is_kept_of_the_output(clamp, expected):
    # Kp e = 1000, Ki e = 1, Kd e = 10
    moved = controller_moved(controller((-100.0, 100.0)), EVERY, FedGraBParams(clamp=clamp))
    torch.testing.assert_close(moved.output, torch.tensor([expected, -expected]))


def test_what_is_clamped_does_not_wind_up():
    # from u = 100 at e = 20, a fall of e to 19 takes 10 off at once: 100 - 10 + .19 - .1
    state = controller((-19.0, -19.0), output=(100.0, 100.0), error=(20.0, 20.0), earlier=(20.0, 20.0))
    moved = controller_moved(state, EVERY, FedGraBParams())
    torch.testing.assert_close(moved.output, torch.tensor([90.09, 90.09]))


def test_an_uncontrolled_class_keeps_weight_one_and_its_controller_waits():
    state = controller((-0.2, -0.2), output=(3.0, 3.0), error=(0.1, 0.1), earlier=(0.3, 0.3))
    controlled = torch.tensor([True, False])
    moved = controller_moved(state, controlled, FedGraBParams())
    assert moved.output[0] != 3.0
    assert [moved.output[1].item(), moved.error[1].item(), moved.earlier[1].item()] == pytest.approx([3.0, 0.1, 0.3])
    weights = gradient_weights(moved.output, torch.eye(2), controlled)
    assert weights[:, 1].tolist() == [1.0, 1.0]
    assert weights[0, 0] == weight_of(moved.output[0])
    assert weights[1, 0] == weight_of(-moved.output[0])


# --- loss and gradient ---


def test_loss_is_the_sum_over_classes_and_the_mean_over_samples():
    # BCE of o = (0, log 3) with y = (1, 0): log 2 + log 4 = 2.079442; with y = (0, 1): log 2 + log 4/3 = .980829
    logits = torch.tensor([[0.0, 1.0986123]] * 2)
    assert one_versus_rest(logits, torch.eye(2)).item() == pytest.approx((2.079442 + 0.980829) / 2, abs=1e-6)


def test_weights_change_the_gradient_and_not_the_loss():
    logits = torch.tensor([[0.0, 1.0986123]] * 2, requires_grad=True)
    weights = torch.tensor([[2.0, 0.5], [3.0, 7.0]])
    loss = balanced_loss(logits, torch.eye(2), weights)
    assert loss.item() == one_versus_rest(logits, torch.eye(2)).item()
    loss.backward()
    # (sigma - y) / B: ((1/2 - 1), 3/4) / 2 and (1/2, (3/4 - 1)) / 2, times the weights
    torch.testing.assert_close(logits.grad, weights * torch.tensor([[-0.25, 0.375], [0.25, -0.125]]))


def test_weights_of_one_give_the_gradient_of_bce_to_the_last_bit():
    generator = torch.Generator().manual_seed(0)
    start, targets = 5 * torch.randn(7, 3, generator=generator), one_hot(torch.arange(7) % 3, 3).float()
    plain, ours = (start.clone().requires_grad_() for _ in range(2))
    (binary_cross_entropy_with_logits(plain, targets, reduction="sum") / 7).backward()
    balanced_loss(ours, targets, torch.ones(7, 3)).backward()
    assert torch.equal(ours.grad, plain.grad)


def test_balance_is_positive_minus_negative_gradient_after_the_weights():
    # |g| as above: class 0 .25 on its positive, .25 on the negative; class 1 .125 and .375
    logits = torch.tensor([[0.0, 1.0986123]] * 2)
    plain = batch_balance(logits, torch.eye(2), torch.ones(2, 2))
    torch.testing.assert_close(plain, torch.tensor([0.0, -0.25]))
    weighted = batch_balance(logits, torch.eye(2), torch.tensor([[2.0, 0.5], [3.0, 7.0]]))
    # 2 (.25) - 3 (.25), 7 (.125) - .5 (.375)
    torch.testing.assert_close(weighted, torch.tensor([-0.25, 0.6875]))


# --- a client ---


def step_of(make_step, labels, state, payload=None, number=0, **params):
    """A step on zero logits, and the gradient that reaches them."""
    logits = torch.zeros(len(labels), 2, requires_grad=True)
    inputs = torch.zeros(len(labels), 2)
    outputs = Outputs(logits, inputs)
    step = make_step(model_of(), inputs, labels, outputs=outputs, state=state, payload=payload, number=number)
    loss = FedGraB(FedGraBParams(**params)).local_loss(step)
    loss.backward()
    return loss, logits.grad


def test_two_steps_by_hand(make_step):
    state = {}
    loss, gradient = step_of(make_step, [0, 0], state, controlled="all")
    # 2 log 2, unweighted; nothing is known yet, so the first batch has the gradient of BCE
    assert loss.item() == pytest.approx(1.386294)
    torch.testing.assert_close(gradient, torch.tensor([[-0.25, 0.25]] * 2))
    assert state[NAME]["balance"].tolist() == [0.5, -0.5]
    # e = (-.5, .5): u = 10 (.5) + .01 (.5) + .1 (.5) = 5.055; h(5.055) = 5.8183, h(-5.055) = .087951:
    # class 0 has too much on positives, class 1 on negatives, and both are damped: .25 (.087951) = .0219878
    loss, gradient = step_of(make_step, [0, 0], state, number=1, controlled="all")
    assert loss.item() == pytest.approx(1.386294)
    torch.testing.assert_close(gradient, torch.tensor([[-0.0219878, 0.0219878]] * 2), atol=1e-6, rtol=0)
    # what counts is the gradient after weighting: .5 + 2 (.0219878)
    torch.testing.assert_close(state[NAME]["balance"], torch.tensor([0.5439756, -0.5439756]), atol=1e-6, rtol=0)
    torch.testing.assert_close(state[NAME]["output"], torch.tensor([-5.055, 5.055]))
    # a batch of the other class is what the controller asks for: .25 (5.8183)
    _, gradient = step_of(make_step, [1, 1], {NAME: dict(state[NAME])}, number=2, kp=0, ki=0, kd=0, controlled="all")
    torch.testing.assert_close(gradient, torch.tensor([[1.45457, -1.45457]] * 2), atol=1e-4, rtol=0)


def test_only_classes_the_server_names_are_controlled_and_the_balance_of_all_goes_on(make_step):
    state = {}
    payload = {"controlled": torch.tensor([False, True])}
    for number in range(2):
        _, gradient = step_of(make_step, [0, 0], state, payload, number)
    torch.testing.assert_close(gradient, torch.tensor([[-0.25, 0.0219878]] * 2), atol=1e-6, rtol=0)
    torch.testing.assert_close(state[NAME]["balance"], torch.tensor([1.0, -0.5439756]), atol=1e-6, rtol=0)
    assert state[NAME]["output"][0].item() == 0.0


def test_a_class_that_comes_under_control_starts_from_the_balance_it_has(make_step):
    state = {}
    step_of(make_step, [0, 0], state, {"controlled": torch.tensor([False, False])})
    step_of(make_step, [0, 0], state, {"controlled": torch.tensor([False, True])}, number=1)
    torch.testing.assert_close(state[NAME]["output"], torch.tensor([0.0, 5.055]))


def test_a_controller_goes_on_at_the_next_participation_unless_reset(make_step):
    kept, anew = {}, {}
    for state, reset in ((kept, "never"), (anew, "round")):
        for number in (0, 1):
            step_of(make_step, [0, 0], state, number=number, reset=reset, controlled="all")
        assert state[NAME]["output"][1].item() == pytest.approx(5.055)
        _, gradient = step_of(make_step, [0, 0], state, number=0, reset=reset, controlled="all")
        assert (gradient[0, 0].item() == -0.25) == (reset == "round")
    assert kept[NAME]["balance"][0] > 0.54
    assert anew[NAME]["balance"].tolist() == [0.5, -0.5]


def test_without_gains_it_is_plain_one_versus_rest_training_to_the_last_bit(make_task):
    generator = torch.Generator().manual_seed(3)
    inputs, labels = torch.randn(23, 2, generator=generator), (torch.arange(23) % 2).tolist()

    def bce(step):
        targets = one_hot(step.batch.labels, 2).float()
        summed = binary_cross_entropy_with_logits(step.outputs.logits, targets, reduction="sum")
        return summed / len(targets)

    budget = {"local_epochs": 3, "batch_size": 5, "momentum": 0.9}
    ends = []
    for gains in ({"kp": 0.0, "ki": 0.0, "kd": 0.0}, {}):
        params = {NAME: {"controlled": "all", **gains}}
        task = make_task(model_of(), inputs, labels, method=NAME, params=params, **budget)
        ends.append(task.hooks.local_train(task=task))
    hooks = SimpleNamespace(
        local_gradients=lambda step: loss_gradients(step),
        local_objective=lambda step: summed_loss(step),
        local_loss=lambda step: bce(step),
        loss_terms=lambda step: [],
    )
    task = make_task(model_of(), inputs, labels, **budget)
    plain = task.hooks.local_train(task=replace(task, hooks=hooks))
    for name, weight in plain.weights.items():
        assert torch.equal(ends[0].weights[name], weight)
        assert not torch.equal(ends[1].weights[name], weight)


@pytest.mark.parametrize("controlled", ["tail", "all"])
def test_the_classifier_is_trained_and_so_is_the_backbone(controlled):
    run = grab_run(params={"controlled": controlled})
    state = final_state(run, until=1)
    assert all(not torch.equal(state.weights[name], start) for name, start in run.model.weights.items())


def test_what_a_client_keeps_is_saved_and_moves_only_when_it_takes_part():
    run = grab_run()
    first = final_state(run, until=1)
    kept = {client: held[NAME]["balance"].clone() for client, held in first.clients.items() if NAME in held}
    assert len(kept) == 2
    second, record = train_round(run, first)
    for client, balance in kept.items():
        assert (client in record.cohort) != torch.equal(second.clients[client][NAME]["balance"], balance)


# --- the gate ---


def test_the_gate_exempts_in_index_order_with_a_probability_that_falls_with_every_exemption():
    # m = 3 controlled: probabilities 1, then .1^(1/2) = .316, then .1^(2/2) = .1; class 1 is not asked
    controlled = [True, False, True, True]
    assert exempted(controlled, 0.1, [0.99, 0.0, 0.4, 0.3]) == [True, False, False, True]
    assert exempted(controlled, 0.1, [0.99, 0.0, 0.3, 0.11]) == [True, False, True, False]
    assert exempted(controlled, 0.1, [0.99, 0.0, 0.3, 0.09]) == [True, False, True, True]
    assert exempted([False, True], 0.1, [0.0, 0.99]) == [False, True]


def test_without_the_gate_the_first_class_is_controlled_and_with_it_never(make_step):
    assert FedGraBParams().gate == 0.0
    off, on = {}, {}
    for number in range(3):
        _, free = step_of(make_step, [0, 0], off, number=number, controlled="all")
        _, gated = step_of(make_step, [0, 0], on, number=number, controlled="all", gate=0.1)
        assert gated[0, 0].item() == -0.25
        assert on[NAME]["balance"][0].item() == 0.0
    assert abs(free[0, 0].item()) < 0.1
    assert off[NAME]["balance"][0].item() > 0.5


# --- the prior analyser ---


def test_shares_are_row_lengths_above_the_shortest():
    # lengths 5, 1, 3: less 1 they are 4, 0, 2; the z-score (mean 3, deviation 1.633) shifted and normalised is the same
    weight = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, -3.0]])
    wanted = torch.tensor([2 / 3, 0.0, 1 / 3], dtype=torch.float64)
    torch.testing.assert_close(estimated_shares(weight), wanted)
    lengths = weight.double().norm(dim=1)
    scores = (lengths - lengths.mean()) / lengths.std(correction=0)
    torch.testing.assert_close((scores - scores.min()) / (scores - scores.min()).sum(), wanted)


def test_rows_of_one_length_give_equal_shares():
    assert estimated_shares(torch.eye(4)).tolist() == [0.25] * 4


@pytest.mark.parametrize(
    ("shares", "tail"),
    [
        # before each, largest first: 0, .5, .8, .96 and 1
        ([0.5, 0.04, 0.3, 0.0, 0.16], [False, True, False, True, False]),
        # the class that crosses 95 % is none of the tail: before it .9
        ([0.6, 0.3, 0.1], [False, False, False]),
        ([0.0, 1.0], [True, False]),
    ],
)
def test_the_tail_begins_at_95_percent(shares, tail):
    assert tail_classes(torch.tensor(shares, dtype=torch.float64)).tolist() == tail


def update_of(client, weight, examples):
    return Update(client, {"head.weight": torch.tensor(weight), "head.bias": torch.zeros(3)}, {}, examples)


def test_server_averages_by_each_clients_own_size_and_keeps_the_mean_of_its_estimates():
    method, spec = FedGraB(FedGraBParams()), tiny_spec(NAME)
    model, state = model_of([[0.0, 0.0]] * 3), {}
    method.start(StartTask((), model, spec, state))
    sent = method.broadcast(BroadcastTask(0, 1, 0, model.weights, spec, state))
    assert sent.payload["controlled"].tolist() == [False, False, False]
    updates = (
        update_of(0, [[8.0, 0.0], [0.0, 0.0], [0.0, 4.0]], 1),
        update_of(1, [[4.0, 0.0], [0.0, 1.0], [0.0, 4.0]], 3),
    )
    task = AggregationTask(1, model.weights, {}, updates, model, spec, state)
    # (8 + 3 * 4) / 4 = 5, 3/4, 4
    wanted = torch.tensor([[5.0, 0.0], [0.0, 0.75], [0.0, 4.0]])
    assert torch.equal(method.aggregate(task)["head.weight"], wanted)
    # 4.25, 0, 3.25 of 7.5
    torch.testing.assert_close(state[NAME]["shares"], torch.tensor([17 / 30, 0.0, 13 / 30], dtype=torch.float64))
    assert state[NAME]["controlled"].tolist() == [False, True, False]
    # then lengths 1, 2, 0: shares 1/3, 2/3, 0; the mean of both rounds is .45, .3333, .2167: no tail
    second = (update_of(2, [[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]], 5),)
    method.aggregate(replace(task, round=2, updates=second))
    torch.testing.assert_close(state[NAME]["shares"], torch.tensor([0.45, 1 / 3, 13 / 60], dtype=torch.float64))
    assert state[NAME]["controlled"].tolist() == [False, False, False]


def test_by_default_clients_are_told_the_tail_which_costs_a_byte_a_class():
    records = {}
    for controlled in ("tail", "all"):
        run = grab_run(params={"controlled": controlled})
        state = final_state(run, until=1)
        records[controlled] = train_round(run, state)[1]
        if controlled == "tail":
            told = state.server[NAME]["controlled"]
            assert 1 <= int(told.sum()) < len(told)
            assert torch.equal(told, tail_classes(estimated_shares(state.weights["head.weight"])))
    assert records["tail"].bytes_down == records["all"].bytes_down + 2 * 4
    assert records["tail"].bytes_up == records["all"].bytes_up


def test_dpa_needs_a_linear_head_and_controlling_all_does_not():
    task = StartTask((), replace(model_of(), head=None), tiny_spec(NAME), {})
    with pytest.raises(FedbenchError, match="needs a linear classifier"):
        FedGraB(FedGraBParams()).start(task)
    plugin = FedGraB(FedGraBParams(controlled="all"))
    plugin.start(task)
    assert plugin.requires == ("labels",)
    assert task.state == {}
