"""SCAFFOLD: Karimireddy et al. 2020, Algorithm 1."""

from dataclasses import dataclass

import pytest
import torch

from fedbench.core.method.hooks import hookimpl
from fedbench.core.method.tasks import AggregationTask, BroadcastTask, ClientTask, StartTask
from fedbench.core.spec import RunSpec, Training
from fedbench.core.types import Model, Outputs
from fedbench.models.inputs import FeatureInputs
from fedbench.plugins.assembly import assemble
from fedbench.rounds.executors.sequential import train_client
from fedbench.rounds.loop import train_round
from fedbench.rounds.state import load_state, save_state
from fedbench.testing import digest, final_state
from fedbench_methods.scaffold import SCAFFOLD, ScaffoldParams, correction, correction_term
from tests.equations.kit import RESNET, end_of, run_of


class Quadratic:
    """Samples (a, b, g) have the loss a/2 (w - b)^2 + g w: the gradient a (w - b) + g, the curvature a."""

    @hookimpl
    def local_loss(self, step):
        a, b, g = step.batch.inputs.T
        w = step.weights["w"]
        return (a / 2 * (w - b).square() + g * w).mean()


@dataclass
class Played:
    """After a round: x, c, and c_k of every client, zero for one that has not taken part."""

    x: float
    c: float
    own: list[float]


def play(losses, cohorts, method="scaffold", params=None, start=0.0, factors=None, **training):
    """Rounds of clients whose samples have these quadratic losses, one row (a, b, g) a sample; `Played` a round."""
    budget = {"lr": 0.1, "momentum": 0.0, "local_epochs": 10, "batch_size": 100, "weighting": "uniform", **training}
    spec = RunSpec(method=method, training=Training(**budget))
    hooks = assemble(method, {method: params or {}}, listeners=[Quadratic()]).hooks
    model = Model(weights={"w": torch.tensor([start])}, forward=None, lr_factors=factors or {})
    weights, server, clients, history = model.weights, {}, [{} for _ in losses], []
    hooks.start(task=StartTask((), model, spec, server))
    for number, cohort in enumerate(cohorts, 1):
        updates = []
        for k in cohort:
            sent = hooks.broadcast(task=BroadcastTask(k, number, 0, weights, spec, server))
            task = ClientTask(
                client=k,
                round=number,
                received=sent.weights,
                buffers={},
                payload=sent.payload,
                inputs=FeatureInputs(torch.tensor(losses[k])),
                labels=None,
                class_counts=None,
                model=model,
                spec=spec,
                state=clients[k],
                hooks=hooks,
            )
            updates.append(train_client(task))
        task = AggregationTask(number, weights, {}, tuple(updates), model, spec, server, num_clients=len(losses))
        weights = hooks.aggregate(task=task)
        kept = [state[method]["w"].item() if state else 0.0 for state in clients]
        control = server[method]["w"].item() if server else 0.0
        history.append(Played(weights["w"].item(), control, kept))
    return history


# (w - 1)^2 / 2 and 2 (w + 1)^2, whose sum is least at -3/5
TWO = [[(1.0, 1.0, 0.0)], [(4.0, -1.0, 0.0)]]
BOTH = [(0, 1)]


@pytest.mark.parametrize(("method", "end"), [("scaffold", -0.6), ("fedavg", -0.2083)])
def test_on_two_quadratics_it_ends_at_the_true_optimum_and_fedavg_does_not(method, end):
    # round 1: clients end at 1 - .9^10 = .651322 and -1 + .6^10 = -.993953, their mean is -.171316
    path = play(TWO, BOTH * 30, method)
    assert path[0].x == pytest.approx(-0.17132, abs=1e-5)
    assert path[-1].x == pytest.approx(end, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"params": {"option": "I"}},
        {"momentum": 0.5, "lr": 0.05},
        {"params": {"server_lr": 0.5}},
        {"lr_decay": 0.995},
    ],
)
def test_it_ends_there_with_either_option_with_momentum_and_as_the_rate_decays(options):
    assert play(TWO, BOTH * 30, **options)[-1].x == pytest.approx(-0.6, abs=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("option", ["I", "II"])
def test_on_constant_gradients_the_controls_are_these_gradients_after_one_round(option, momentum):
    # Option II divides by eta a(10), 10 or 41.381 times eta; by eta K it would be 4.138 times the gradients
    linear = [[(0.0, 0.0, 3.0)], [(0.0, 0.0, -1.0)]]
    first, second = play(linear, BOTH * 2, params={"option": option}, momentum=momentum)
    assert first.own == pytest.approx([3.0, -1.0], rel=1e-5) and first.c == pytest.approx(1.0, rel=1e-5)
    # now every client follows c = 1: 10 steps of .1, or 41.381 with momentum; the controls stay
    length = 1.0 if momentum == 0 else 4.1381
    assert second.x - first.x == pytest.approx(-length, rel=1e-4)
    assert second.own == pytest.approx([3.0, -1.0], rel=1e-4) and second.c == pytest.approx(1.0, rel=1e-4)


def test_two_rounds_by_hand():
    # one step each, rate .1, clients 1 and 2 of TWO. Round 1 from 0: gradients -1 and 4, y = .1, -.4; x = -.15,
    # c_k = -1, 4 and c = 1.5. Round 2: gradients -1.15 and 3.4, corrected by 1.5 + 1 and 1.5 - 4: 1.35 and .9;
    # y = -.285, -.24, x = -.2625; c_k = c_k - c + (x - y) / .1 = -1.15, 3.4, and c = 1.125
    first, second = play(TWO, BOTH * 2, local_epochs=1)
    assert [first.x, first.c, *first.own] == pytest.approx([-0.15, 1.5, -1.0, 4.0])
    assert [second.x, second.c, *second.own] == pytest.approx([-0.2625, 1.125, -1.15, 3.4])


def test_the_correction_passes_through_the_momentum():
    # two steps, rate .1, momentum .5, constant gradients 3 and -1; round 2 of the first client alone: c = 1, c_k = 3,
    # so both steps see 3 - 2 = 1: velocities 1 and 1.5, moved by -.25. Corrected after the step it were
    # .1 (3 + 4.5) - .2 * 2 = .35
    linear = [[(0.0, 0.0, 3.0)], [(0.0, 0.0, -1.0)]]
    first, second = play(linear, [(0, 1), (0,)], momentum=0.5, local_epochs=2)
    assert second.x - first.x == pytest.approx(-0.25)


@pytest.mark.parametrize("option", ["I", "II"])
def test_c_is_the_mean_of_all_controls_whoever_takes_part(option):
    # dividing by the cohort's size instead of N would double it at once
    losses = [[(1.0, float(k), 0.5)] for k in range(4)]
    cohorts = [(0, 1), (2, 3), (0, 3), (1,), (0, 1, 2, 3), (2,)]
    for after in play(losses, cohorts, params={"option": option}):
        assert after.c == pytest.approx(sum(after.own) / 4, abs=1e-5)
    assert after.c != 0


def test_a_client_that_takes_no_part_keeps_its_control():
    losses = [[(1.0, float(k), 0.5)] for k in range(3)]
    history = play(losses, [(0, 1, 2), (1,), (2,), (0,)])
    assert [h.own[0] for h in history[:3]] == [history[0].own[0]] * 3
    assert history[3].own[0] != history[0].own[0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_for_a_single_step_both_options_are_the_gradient_at_x_with_weight_decay(momentum):
    # with one step x - y is eta times the corrected gradient; from x = 2: 1 (2 - 1) + .1 * 2 and 4 (2 + 1) + .1 * 2
    budget = {"local_epochs": 1, "momentum": momentum, "weight_decay": 0.1, "start": 2.0}
    one, two = (play(TWO, BOTH * 3, params={"option": option}, **budget) for option in ("I", "II"))
    assert one[0].own == pytest.approx([1.2, 12.2]) and two[0].own == pytest.approx([1.2, 12.2], rel=1e-5)
    for first, second in zip(one, two, strict=True):
        assert first.x == pytest.approx(second.x, rel=1e-5) and first.own == pytest.approx(second.own, rel=1e-4)


def test_option_i_is_the_mean_over_all_samples_however_they_are_batched():
    # gradients at 0: -1, -4, 6, 2, 7, mean 2; by 2 they are batches of 2 and 3, whose means' mean is something else
    samples = [(1.0, 1.0, 0.0), (2.0, 2.0, 0.0), (3.0, -2.0, 0.0), (0.0, 0.0, 2.0), (0.0, 0.0, 7.0)]
    for size in (2, 3, 4, 100):
        [after] = play([samples], [(0,)], params={"option": "I"}, batch_size=size)
        assert after.own == pytest.approx([2.0])


def test_unequal_numbers_of_steps_each_divide_by_their_own():
    # one batch and three batches an epoch; on constant gradients the controls are exact for both
    losses = [[(0.0, 0.0, 3.0)] * 2, [(0.0, 0.0, -1.0)] * 6]
    [after] = play(losses, BOTH, batch_size=2, momentum=0.9)
    assert after.own == pytest.approx([3.0, -1.0], rel=1e-4)


def test_option_ii_divides_by_the_rate_of_the_round_and_of_the_weight():
    linear = [[(0.0, 0.0, 3.0)], [(0.0, 0.0, -1.0)]]
    for after in play(linear, BOTH * 3, lr_decay=0.5, factors={"w": 0.1}):
        assert after.own == pytest.approx([3.0, -1.0], rel=1e-3)


def test_x_is_the_plain_mean_unless_samples_are_to_count_and_moves_by_the_server_rate():
    # one step of .1 on gradients 3 and -1 from 1: y = .7, 1.1; samples 1 and 3
    losses = [[(0.0, 0.0, 3.0)], [(0.0, 0.0, -1.0)] * 3]
    for params, x in (({}, 0.9), ({"weighting": "samples"}, 1.0), ({"server_lr": 0.5}, 0.95)):
        [after] = play(losses, BOTH, params=params, start=1.0, local_epochs=1, weighting="samples")
        assert after.x == pytest.approx(x)
        assert after.c == pytest.approx(1.0)


def test_term_is_zero_at_the_received_weights_and_its_gradient_is_the_correction():
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    received, c = {"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([0.5, 3.0])}
    drift = correction(c, {"w": torch.tensor([2.0, -1.0])})
    term = correction_term({"w": w}, received, drift)
    term.backward()
    assert term.item() == 0.0 and torch.equal(w.grad, torch.tensor([-1.5, 4.0]))
    # (3 - 1) * -1.5 + (0 + 2) * 4 = 5
    assert correction_term({"w": torch.tensor([3.0, 0.0])}, received, drift).item() == 5.0
    assert torch.equal(correction(c, {})["w"], c["w"])


@pytest.mark.parametrize("backbone", ["clip:embedded", "resnet8?width=1"])
def test_controls_start_at_zero_and_round_1_is_uniform_fedavg_bit_for_bit(backbone):
    run = run_of("scaffold", backbone=backbone, weighting="uniform")
    before = final_state(run, until=0).server["scaffold"]
    assert list(before) == list(run.model.weights) and not any(control.any() for control in before.values())
    plain = run_of("fedavg", backbone=backbone, weighting="uniform")
    assert digest(final_state(run, until=1)) == digest(final_state(plain, until=1))


def test_weights_have_controls_and_running_statistics_have_none(tmp_path):
    run = run_of("scaffold", backbone="resnet8?width=1")
    state = final_state(run, until=1)
    state, record = train_round(run, state)
    sent = sum(4 * t.numel() for t in run.model.weights.values())
    assert run.model.buffers and record.bytes_up == record.bytes_down == 2 * (run.info.round_bytes + sent)
    for kept in (state.server, *state.clients.values()):
        assert list(kept["scaffold"]) == list(run.model.weights)
    save_state(state, tmp_path / "state.safetensors", run.spec.run_id)
    loaded = load_state(tmp_path / "state.safetensors", run.spec.run_id)
    for client, kept in state.clients.items():
        assert all(torch.equal(loaded.clients[client]["scaffold"][n], t) for n, t in kept["scaffold"].items())


def test_c_is_the_mean_of_the_controls_in_a_run_with_half_of_the_clients_a_round():
    state = end_of("scaffold")
    for name, control in state.server["scaffold"].items():
        total = sum(kept["scaffold"][name] for kept in state.clients.values())
        torch.testing.assert_close(control, total / 4, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("option", ["I", "II"])
def test_a_pass_for_the_control_changes_no_running_statistics_and_clients_train_alike(option):
    state = end_of("scaffold", {"scaffold": {"option": option}}, backbone=RESNET, rounds=1)
    plain = end_of("fedavg", backbone=RESNET, rounds=1)
    assert all(torch.equal(state.buffers[name], plain.buffers[name]) for name in plain.buffers)


def test_weights_that_the_server_does_not_send_have_no_control(make_task):
    # another method keeps "own" with each client: it is trained without correction, and nothing of it is sent
    def forward(tensors, inputs, training):
        return Outputs(inputs * tensors["w"] + tensors["own"], inputs)

    model = Model(weights={"w": torch.zeros(2), "own": torch.zeros(2)}, forward=forward)
    server = {}
    method = SCAFFOLD(ScaffoldParams())
    method.start(StartTask((), model, RunSpec(), server))
    sent = method.broadcast(BroadcastTask(0, 1, 0, {"w": model.weights["w"]}, RunSpec(), server))
    assert list(sent.payload) == ["control/w"]
    kept = {"scaffold": {"w": torch.ones(2), "own": torch.ones(2)}}
    task = make_task(model, torch.ones(1, 2), [0], method="scaffold", payload=sent.payload, state=kept)
    update = train_client(task)
    plain = train_client(make_task(model, torch.ones(1, 2), [0])).weights
    assert list(update.payload) == ["control/w"] and list(task.state["scaffold"]) == ["w"]
    assert torch.equal(update.weights["own"], plain["own"])
    torch.testing.assert_close(update.weights["w"], plain["w"] + 0.5)
