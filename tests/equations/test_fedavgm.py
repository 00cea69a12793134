"""FedAvgM: Hsu, Qi, Brown 2019."""

import pytest
import torch

from fedbench.rounds.loop import train_round
from fedbench.testing import digest
from fedbench.toolkit.fedavg import average
from fedbench_methods.fedavgm import FedAvgM, FedAvgMParams
from tests.equations.kit import aggregation, run_of, updates_of

FORMS = ("accumulating", "ema", "nesterov")


def played(changes, *, start=0.0, **params):
    """x after each round in which every client ends at x minus the round's change; and the last velocity."""
    method, state, x, path = FedAvgM(FedAvgMParams(**params)), {}, torch.tensor([start]), []
    for number, change in enumerate(changes, 1):
        task = aggregation({"w": x}, updates_of([x - change] * 2, (1, 3)), state, round=number)
        x = method.aggregate(task, average)["w"]
        path.append(x.item())
    return path, state["fedavgm"]["w"].item()


def test_a_constant_change_builds_up_to_one_minus_beta_to_the_t():
    # v: 1, 1.5, 1.75 = (1 - .5^t) / .5
    path, velocity = played([1.0, 1.0, 1.0], beta=0.5)
    assert path == [-1.0, -2.5, -4.25] and velocity == 1.75


def test_the_average_of_both_starts_with_one_minus_beta_of_the_change():
    # v: .5, .75, .875
    path, velocity = played([1.0, 1.0, 1.0], beta=0.5, form="ema")
    assert path == [-0.5, -1.25, -2.125] and velocity == 0.875


def test_nesterov_steps_by_the_change_and_the_velocity_after_it():
    # v: 1, 1.5; steps 1 + .5 * 1 = 1.5, 1 + .5 * 1.5 = 1.75
    path, velocity = played([1.0, 1.0], beta=0.5, form="nesterov")
    assert path == [-1.5, -3.25] and velocity == 1.5


@pytest.mark.parametrize(("form", "first"), [("accumulating", 1.0), ("ema", 0.25)])
def test_with_clients_that_stand_still_the_weights_coast_by_beta_to_the_t(form, first):
    # beta .75; then nothing changes but what the velocity carries on
    path, _ = played([1.0, 0.0, 0.0], beta=0.75, form=form)
    steps = [first, 0.75 * first, 0.75**2 * first]
    assert path == pytest.approx([-steps[0], -steps[0] - steps[1], -sum(steps)])


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_torchs_sgd_on_the_change_as_gradient(nesterov):
    changes, weight = [0.3, -1.2, 0.7, 2.0], torch.tensor([0.4], requires_grad=True)
    optimiser = torch.optim.SGD([weight], 0.5, momentum=0.7, nesterov=nesterov)
    for change in changes:
        weight.grad = torch.tensor([change])
        optimiser.step()
    path, _ = played(changes, start=0.4, beta=0.7, server_lr=0.5, form="nesterov" if nesterov else "accumulating")
    assert path[-1] == pytest.approx(weight.item(), abs=1e-6)


def test_server_rate_scales_the_step_and_not_the_velocity():
    # v: 2, 3; steps .25 * 2, .25 * 3
    path, velocity = played([2.0, 2.0], beta=0.5, server_lr=0.25)
    assert path == [-0.5, -1.25] and velocity == 3.0


@pytest.mark.parametrize("form", FORMS)
def test_without_momentum_the_mean_itself_comes_back_however_far_it_is(form):
    # x - (x - mean) loses a mean that is far smaller than x, even in float64: 1 - 1e-12 has no room for its digits
    method = FedAvgM(FedAvgMParams(beta=0.0, server_lr=1.0, form=form))
    value = torch.tensor([1.2345678e-12, -3.3e7, 0.1])
    for x in (torch.ones(3), torch.full((3,), -1e30)):
        task = aggregation({"w": x}, updates_of([value], [7]))
        assert torch.equal(method.aggregate(task, average)["w"], value)


def test_clients_are_weighted_by_their_samples_unless_the_run_says_uniform():
    # (1*1 + 3*5) / 4 = 4, uniform 3; x = 0, so the velocity is minus the mean
    for weighting, mean in (("samples", 4.0), ("uniform", 3.0)):
        updates = updates_of([[1.0], [5.0]], (1, 3))
        task = aggregation({"w": torch.zeros(1)}, updates, training={"weighting": weighting})
        assert FedAvgM(FedAvgMParams()).aggregate(task, average)["w"].item() == mean
        assert task.state["fedavgm"]["w"].item() == -mean


def test_running_statistics_have_no_velocity_and_are_averaged_as_under_fedavg():
    run = run_of("fedavgm", backbone="resnet8?width=1")
    plain = run_of("fedavg", backbone="resnet8?width=1")
    first, _ = train_round(run, run.initial_state())
    # in round 1 the velocity is the change alone
    assert digest(first) == digest(train_round(plain, plain.initial_state())[0])
    assert first.buffers and list(first.server["fedavgm"]) == list(run.model.weights)
    # from the same weights the clients of round 2 end alike: FedAvg's mean, less beta times the velocity
    velocity = dict(first.server["fedavgm"])
    second, _ = train_round(run, first)
    mean, _ = train_round(plain, first)
    for name, tensor in second.buffers.items():
        assert torch.equal(tensor, mean.buffers[name])
    for name, tensor in second.weights.items():
        torch.testing.assert_close(tensor, mean.weights[name] - 0.7 * velocity[name])
