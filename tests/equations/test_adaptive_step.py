"""FedAdam, FedYogi, FedAdagrad: Reddi et al. 2021, Algorithm 2."""

from dataclasses import replace

import pytest
import torch

from fedbench.core.types import GlobalModel
from fedbench.rounds.loop import train_round
from fedbench.testing import digest
from fedbench.toolkit.fedavg import average
from fedbench_methods.fedadagrad import FedAdagrad, FedAdagradParams
from fedbench_methods.fedadam import FedAdam, FedAdamParams
from fedbench_methods.fedavgm import FedAvgM, FedAvgMParams
from fedbench_methods.fedyogi import FedYogi, FedYogiParams
from tests.equations.kit import aggregation, end_of, run_of, updates_of

NAMES = ("fedadam", "fedyogi", "fedadagrad")
ADAM, YOGI, ADAGRAD = (FedAdam, FedAdamParams), (FedYogi, FedYogiParams), (FedAdagrad, FedAdagradParams)


def played(method, changes, *, start=0.0, **params):
    """x after each round whose mean change is ``changes``, y - x; m and v after the last."""
    cls, values = method
    server, state, x, path = cls(values(**params)), {}, torch.tensor([start], dtype=torch.float64), []
    for number, change in enumerate(changes, 1):
        # sizes 1 and 3: the mean change is (1 * 4c + 3 * 0) / 4 = c
        task = aggregation({"w": x}, updates_of((x + 4 * change, x), (1, 3)), state, round=number)
        x = server.aggregate(task, average)["w"]
        path.append(x.item())
    return path, state[server.name]["m/w"].item(), state[server.name]["v/w"].item()


# D = 1, beta1 = .9, tau = .1, v = .01 at first, eta_g = 1: m = .1 and the step is .1 / (sqrt(v) + .1)
@pytest.mark.parametrize(
    ("method", "params", "v", "step"),
    [
        # .99 * .01 + .01 * 1 = .0199; .1 / (.141067 + .1)
        (ADAM, {"beta2": 0.99}, 0.0199, 0.41482),
        # .01 < 1, so v + .01 * 1 = .02; .1 / (.141421 + .1)
        (YOGI, {"beta2": 0.99}, 0.02, 0.41421),
        # .01 + 1; .1 / (1.004988 + .1)
        (ADAGRAD, {}, 1.01, 0.090498),
    ],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_first_step_by_hand(method, params, v, step, sign):
    path, m, scale = played(method, [sign], server_lr=1.0, beta1=0.9, tau=0.1, **params)
    assert m == pytest.approx(sign * 0.1)
    assert scale == pytest.approx(v)
    assert path[0] == pytest.approx(sign * step, abs=1e-5)


def test_second_step_of_adam_by_hand_and_without_bias_correction():
    # D = 1, then -2: m = .9 * .1 - .1 * 2 = -.11, v = .99 * .0199 + .01 * 4 = .059701; eta_g = .5
    path, m, v = played(ADAM, [1.0, -2.0], server_lr=0.5, beta1=0.9, beta2=0.99, tau=0.1)
    assert m == pytest.approx(-0.11)
    assert v == pytest.approx(0.059701)
    assert path[1] - path[0] == pytest.approx(-0.5 * 0.11 / (0.0597010**0.5 + 0.1))


def test_yogi_forgets_a_large_change_slower_than_adam():
    # D = 10, then 1. Adam: v = .0001 * .99 + 1 = 1.000099, then .99 * that + .01. Yogi: 1.0001, then 1.0001 - .01
    adam, yogi = (played(each, [10.0, 1.0], beta2=0.99, tau=0.01)[2] for each in (ADAM, YOGI))
    assert adam == pytest.approx(0.99 * 1.000099 + 0.01)
    assert yogi == pytest.approx(1.0001 - 0.01)


def test_yogi_stays_where_the_square_of_the_change_is_v():
    # sign(0) = 0: D = tau
    assert played(YOGI, [0.5], tau=0.5)[2] == 0.25


def test_adagrad_sums_squares_and_has_no_momentum_unless_asked():
    # v: .01 + 4, + 9; the second step is by the second change alone
    path, m, v = played(ADAGRAD, [2.0, -3.0], server_lr=1.0, tau=0.1)
    assert v == pytest.approx(13.01)
    assert m == -3.0
    assert path[1] - path[0] == pytest.approx(-3 / (13.01**0.5 + 0.1))


@pytest.mark.parametrize("method", [ADAM, YOGI])
def test_with_a_large_tau_it_is_fedavgm_with_the_average_of_both(method):
    # with beta2 near 1 v stays near tau^2, so that the step is eta_g m / (2 tau): eta_g = 2 tau gives m
    tau, changes = 1e6, [0.3, -1.2, 0.7]
    path, _, _ = played(method, changes, start=0.4, server_lr=2 * tau, beta1=0.6, beta2=0.9999, tau=tau)
    other, state, x = FedAvgM(FedAvgMParams(beta=0.6, server_lr=1.0, form="ema")), {}, torch.tensor([0.4])
    for number, change in enumerate(changes, 1):
        task = aggregation({"w": x}, updates_of([x + change], [1]), state, round=number)
        x = other.aggregate(task, average)["w"]
        assert path[number - 1] == pytest.approx(x.item(), abs=2e-4)


@pytest.mark.parametrize("method", [ADAM, YOGI, ADAGRAD])
def test_running_statistics_of_the_answer_stay_as_they_are(method):
    x, server = torch.zeros(2), method[0](method[1]())
    task = aggregation({"w": x}, (), buffers={"b": x})
    answer = server.aggregate(task, lambda _: GlobalModel({"w": torch.ones(2)}, {"b": torch.tensor([5.0, 7.0])}))
    assert torch.equal(answer.buffers["b"], torch.tensor([5.0, 7.0]))
    assert set(task.state[server.name]) == {"m/w", "v/w"}


@pytest.mark.parametrize("name", NAMES)
def test_it_steps_from_the_mean_of_whatever_the_stack_answers(name):
    stack = run_of(f"{name}+fedprox", backbone="resnet8?width=1", rounds=1)
    plain = run_of("fedprox", backbone="resnet8?width=1", rounds=1)
    start = stack.initial_state()
    ours, theirs = train_round(stack, start)[0], train_round(plain, plain.initial_state())[0]
    assert ours.buffers and all(torch.equal(value, theirs.buffers[key]) for key, value in ours.buffers.items())
    beta1, tau = (0.0 if name == "fedadagrad" else 0.9), 1e-3
    for key, x in start.weights.items():
        change = (theirs.weights[key] - x).double()
        square = change.square()
        v = {
            "fedadam": 0.99 * tau**2 + 0.01 * square,
            "fedyogi": tau**2 + 0.01 * square * (square - tau**2).sign(),
            "fedadagrad": tau**2 + square,
        }[name]
        expected = x + 0.01 * (1 - beta1) * change / (v.sqrt() + tau)
        torch.testing.assert_close(ours.weights[key].double(), expected, atol=1e-6, rtol=1e-4)


def test_the_three_differ_and_an_empty_model_of_weights_is_fine():
    states = {name: digest(end_of(name, rounds=2)) for name in NAMES}
    assert len(set(states.values())) == 3
    task = aggregation({}, ())
    assert FedAdam(FedAdamParams()).aggregate(replace(task), lambda _: {}) == {}
