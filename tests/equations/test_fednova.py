"""FedNova: Wang et al. 2020."""

from dataclasses import replace

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl
from fedbench.core.method.tasks import AggregationTask, StartTask
from fedbench.core.spec import RunSpec
from fedbench.core.types import Model, Outputs, Update
from fedbench.plugins.assembly import assemble
from fedbench.rounds.executors.sequential import train_client as completely_trained
from fedbench.rounds.loop import train_round
from fedbench.toolkit.fedavg import average, mean_over_clients
from fedbench_methods.fednova import FedNova, FedNovaParams, normalised_shares
from tests.equations.kit import aggregation, run_of


def update(client, value, num_examples, a, tau=None):
    payload = {"fednova.a": torch.tensor(a)}
    payload |= {} if tau is None else {"fednova.tau": torch.tensor(tau)}
    return Update(client, {"w": torch.tensor([value])}, {}, num_examples, payload)


def aggregated(updates, *, start=0.0, number=1, state=None, training=None, **params):
    task = aggregation({"w": torch.tensor([start])}, updates, state, round=number, training=training)
    return FedNova(FedNovaParams(**params)).aggregate(task)["w"].item()


def test_normalised_step_by_hand():
    # p = (1/4, 3/4), a = (1, 3), changes 1 and 6: tau_eff = .25 + 2.25 = 2.5; 2.5 (.25 * 1 / 1 + .75 * 6 / 3) = 4.375,
    # where FedAvg gives .25 * 1 + .75 * 6 = 4.75
    assert aggregated([update(0, -1.0, 1, 1.0), update(1, -6.0, 3, 3.0)]) == -4.375


def test_the_step_starts_at_the_received_weights():
    # all moved by two: the changes are those above, and so is the step
    assert aggregated([update(0, 1.0, 1, 1.0), update(1, -4.0, 3, 3.0)], start=2.0) == -2.375


def test_clients_are_weighted_by_their_samples_unless_the_run_says_uniform():
    # p = (1/2, 1/2): tau_eff = 2; 2 (.5 * 1 + .5 * 2) = 3
    updates = [update(0, -1.0, 1, 1.0), update(1, -6.0, 3, 3.0)]
    assert aggregated(updates, training={"weighting": "uniform"}) == -3.0


def test_the_form_with_two_sums_is_the_same():
    # x <- (1 - c1 c2) x + c1 sum p_k y_k / a_k with c1 = sum p_k a_k, c2 = sum p_k / a_k
    p, a = torch.tensor([0.2, 0.5, 0.3]).double(), torch.tensor([2.9, 41.381, 7.0]).double()
    c1, c2 = (p * a).sum(), (p / a).sum()
    parts = normalised_shares(p, a, mean_over_clients(a, p))
    torch.testing.assert_close(parts, torch.cat([(1 - c1 * c2)[None], c1 * p / a]))
    assert parts.sum().item() == pytest.approx(1.0)


def test_equal_weights_of_gradients_are_fedavg_bit_for_bit_whatever_the_shares():
    generator = torch.Generator().manual_seed(0)
    for a in (3.0, 41.38106, 0.1):
        sizes = torch.randint(1, 900, (7,), generator=generator).tolist()
        values = torch.randn(7, 50, generator=generator) * 10.0 ** torch.arange(-12, 13).repeat(2)
        x = {"w": 1e6 * torch.randn(50, generator=generator)}
        updates = tuple(
            Update(k, {"w": value}, {}, size, {"fednova.a": torch.tensor(a)})
            for k, (value, size) in enumerate(zip(values, sizes, strict=True))
        )
        task = aggregation(x, updates)
        assert torch.equal(FedNova(FedNovaParams()).aggregate(task)["w"], average(task)["w"])


@pytest.mark.parametrize(
    ("training", "params", "a"),
    [
        # 9 samples by 4 are two steps, of 4 and 5; three epochs are six
        ({}, {}, 6.0),
        # 1 + 1.5 + 1.75 + 1.875 + 1.9375 + 1.96875
        ({"momentum": 0.5}, {}, 10.03125),
        # eta mu = .5 * .2: (1 - .9^6) / .1
        ({}, {"mu": 0.2}, 4.68559),
        # the rate of round 2 is half of it: (1 - .95^6) / .05
        ({"round": 2, "lr_decay": 0.5}, {"mu": 0.2}, 5.298162),
    ],
)
def test_clients_send_the_weight_of_the_steps_they_took(make_task, training, params, a):
    model = Model(weights={"w": torch.zeros(2)}, forward=lambda t, x, _: Outputs(x * t["w"], x))
    budget = {"batch_size": 4, "local_epochs": 3, **training}
    task = make_task(model, torch.ones(9, 2), [0] * 9, method="fednova", params={"fednova": params}, **budget)
    payload = completely_trained(task).payload
    assert list(payload) == ["fednova.a"] and payload["fednova.a"].item() == pytest.approx(a, rel=1e-5)


class ConstantGradient:
    """A loss with the same gradient everywhere: the mean of the inputs."""

    @hookimpl
    def local_loss(self, step):
        return step.weights["w"] * step.batch.inputs.mean()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_constant_gradients_are_followed_by_their_weighted_mean_however_many_steps_are_taken(make_task, momentum):
    # 3 and 30 samples, one a step or two: 3/33 * 1.0 + 30/33 * -2.0 is the direction, and the length tau_eff
    model = Model(weights={"w": torch.tensor(0.0)}, forward=None)
    hooks = assemble("fednova", {}, listeners=[ConstantGradient()]).hooks
    tasks = [
        make_task(model, torch.full((n, 1), g), None, client=k, batch_size=6, lr=0.01, momentum=momentum)
        for k, (n, g) in enumerate(((3, 1.0), (30, -2.0)))
    ]
    updates = tuple(completely_trained(replace(task, hooks=hooks)) for task in tasks)
    weight = [u.payload["fednova.a"].item() for u in updates]
    assert weight == pytest.approx([1.0, 5.0 if momentum == 0 else 13.1441])
    task = AggregationTask(1, model.weights, {}, updates, model, tasks[0].spec, {})
    tau_eff = (3 * weight[0] + 30 * weight[1]) / 33
    moved = FedNova(FedNovaParams()).aggregate(task)["w"].item()
    assert moved == pytest.approx(-0.01 * tau_eff * (3 * 1.0 + 30 * -2.0) / 33, rel=1e-5)


def test_with_the_proximal_term_the_released_code_counts_raw_steps_in_tau_eff():
    updates = [update(0, -1.0, 1, 1.0, 2.0), update(1, -6.0, 3, 3.0, 4.0)]
    # tau_eff = .25 * 2 + .75 * 4 = 3.5, times .25 * 1 + .75 * 2 = 1.75
    assert aggregated(updates, mu=0.1, tau_eff="steps") == -6.125
    assert aggregated(updates, mu=0.1) == -4.375
    # without the term it takes the weights, as everybody
    assert aggregated(updates, tau_eff="steps") == -4.375


def test_raw_steps_are_sent_where_they_are_asked_for(make_task):
    model = Model(weights={"w": torch.zeros(2)}, forward=lambda t, x, _: Outputs(x * t["w"], x))
    params = {"fednova": {"mu": 0.2, "tau_eff": "steps"}}
    task = make_task(model, torch.ones(9, 2), [0] * 9, method="fednova", params=params, batch_size=4)
    payload = {name: tensor.item() for name, tensor in completely_trained(task).payload.items()}
    assert payload == pytest.approx({"fednova.a": 1.9, "fednova.tau": 2.0})


def test_proximal_term_is_fedproxs_and_none_without_mu(train_client):
    samples = [(1.0, 0.3, 0), (-0.7, 2.0, 1), (0.1, 0.1, 0)]
    kwargs = {"start": (0.2, -0.1), "local_epochs": 3, "batch_size": 2, "momentum": 0.9}
    prox = train_client(samples, method="fedprox", params={"fedprox": {"mu": 0.3}}, **kwargs).weights["w"]
    ours = train_client(samples, method="fednova", params={"fednova": {"mu": 0.3}}, **kwargs).weights["w"]
    plain = train_client(samples, method="fednova", **kwargs).weights["w"]
    assert torch.equal(ours, prox) and not torch.equal(plain, prox)
    assert torch.equal(plain, train_client(samples, **kwargs).weights["w"])


def test_server_momentum_is_kept_in_units_of_gradients_as_the_rate_decays():
    # rate 1/2, then 1/4; every round the clients move by one. u = 1 / .5 = 2, x = -1;
    # u = .5 * 2 + 1 / .25 = 5, x = -1 - .25 * 5 (without the rates, u = 1.5 and x = -2.5)
    state, training = {}, {"lr": 0.5, "lr_decay": 0.5}
    first = aggregated([update(0, -1.0, 1, 2.0)], state=state, training=training, gmf=0.5)
    assert first == -1.0 and state["fednova"]["w"].item() == 2.0
    moved = [update(0, -2.0, 1, 2.0)]
    assert aggregated(moved, start=first, number=2, state=state, training=training, gmf=0.5) == -2.25
    assert state["fednova"]["w"].item() == 5.0


def test_without_server_momentum_nothing_is_kept():
    state = {}
    aggregated([update(0, -1.0, 1, 2.0)], state=state)
    assert state == {}


def test_four_bytes_a_client_are_sent_up_and_nothing_more_down():
    run = run_of("fednova")
    _, record = train_round(run, run.initial_state())
    clients = len(record.cohort)
    assert record.bytes_up == clients * (run.info.round_bytes + 4)
    assert record.bytes_down == clients * run.info.round_bytes


def test_running_statistics_are_averaged_and_not_normalised():
    states = {}
    for method in ("fednova", "fedavg"):
        run = run_of(method, backbone="resnet8?width=1")
        states[method], _ = train_round(run, run.initial_state())
    nova, plain = states["fednova"], states["fedavg"]
    assert nova.buffers and all(torch.equal(nova.buffers[name], plain.buffers[name]) for name in plain.buffers)
    # the clients took different numbers of steps, so everything else is normalised
    assert not any(torch.equal(nova.weights[name], plain.weights[name]) for name in plain.weights)


def test_the_proximal_term_is_refused_where_weights_have_rates_of_their_own():
    model = Model(weights={"a": torch.zeros(1), "b": torch.zeros(1)}, forward=None, lr_factors={"b": 0.1})
    task = StartTask((), model, RunSpec(), {})
    FedNova(FedNovaParams()).start(task)
    with pytest.raises(FedbenchError, match="needs one learning rate"):
        FedNova(FedNovaParams(mu=0.1)).start(task)
