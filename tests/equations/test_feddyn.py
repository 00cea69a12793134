"""FedDyn: Acar et al. 2021; FedDC: Gao et al. 2022."""

from dataclasses import replace

import pytest
import torch

from fedbench.core.method.tasks import BroadcastTask, StartTask
from fedbench.core.spec import RunSpec
from fedbench.core.types import Broadcast, ClientReport, Model, Update
from fedbench.rounds.loop import start, train_round
from fedbench.testing import digest, final_state, tiny_run, tiny_spec
from fedbench.toolkit.fedavg import average
from fedbench_methods.feddc import GRADIENT, FedDC, FedDCParams, estimate, linear_term
from fedbench_methods.feddyn import FedDyn, FedDynParams
from fedbench_methods.shared import dynamic_regularisation as dynamic
from tests.equations.kit import aggregation, end_of, linear, run_of


def tensor(*values):
    return torch.tensor(values)


def aggregated(method, x, ends, sizes, state, *, clients=None, num_clients=2, payloads=None, weighting="samples"):
    """x after a round in which the ``clients`` end at ``ends``."""
    clients, payloads = clients or range(len(ends)), payloads or [{}] * len(ends)
    came = zip(clients, ends, sizes, payloads, strict=True)
    updates = tuple(Update(k, {"w": tensor(y)}, {}, n, payload) for k, y, n, payload in came)
    task = aggregation({"w": x}, updates, state, training={"weighting": weighting}, num_clients=num_clients)
    return method.aggregate(task, average)["w"]


def sent(method, x, client, state):
    return method.broadcast(
        BroadcastTask(client, 1, 0, {"w": x}, RunSpec(), state), lambda task: Broadcast(task.weights)
    )


def test_server_adds_the_mean_drift_of_all_clients_to_the_plain_mean_of_the_cohort():
    method, state = FedDyn(FedDynParams()), {}
    # N = 4; clients 0 and 2 go from 1 to 2 and to 5: plain mean 3.5 whatever the sizes 1 and 3; drifts 1 and 4
    x = aggregated(method, tensor(1.0), [2.0, 5.0], [1, 3], state, clients=[0, 2], num_clients=4)
    assert x.item() == 3.5 + 5 / 4
    # then 2 alone, from 4.75 to 2.75: its drift is 4 - 2; the sum of all is 1 + 2
    x = aggregated(method, x, [2.75], [3], state, clients=[2], num_clients=4)
    assert x.item() == 2.75 + 3 / 4
    held = {client: sent(method, x, client, state).held[dynamic.DRIFT + "w"].item() for client in range(4)}
    assert held == {0: 1.0, 1: 0.0, 2: 2.0, 3: 0.0}


def test_one_client_alone_overshoots_by_its_change():
    # N = m = 1: x+ = y + (y - x)
    assert aggregated(FedDyn(FedDynParams()), tensor(1.0), [3.0], [7], {}, num_clients=1).item() == 5.0


def test_the_mean_is_the_runs_or_the_stacks_where_asked():
    # (1 * 2 + 3 * 6) / 4 = 5, drifts 2 and 6 of N = 2: 4
    method = FedDyn(FedDynParams(weighting="run"))
    assert aggregated(method, tensor(0.0), [2.0, 6.0], [1, 3], {}).item() == 5 + 4
    assert aggregated(FedDyn(FedDynParams()), tensor(0.0), [2.0, 6.0], [1, 3], {}).item() == 4 + 4


def test_the_term_pulls_to_x_less_the_drift():
    w, x, h = torch.tensor([2.0, -1.0], requires_grad=True), {"w": tensor(0.5, 0.5)}, {"w": tensor(3.0, -2.0)}
    term = dynamic.dynamic_term({"w": w}, x, h)
    # (1.5, -1.5): <.., h> = 7.5, half the square 2.25
    assert term.item() == pytest.approx(9.75)
    # w - (x - h)
    assert torch.equal(torch.autograd.grad(term, w)[0], torch.tensor([4.5, -3.5]))


@pytest.mark.parametrize(("scaling", "alpha"), [("uniform", 0.4), ("samples", 0.2)])
def test_local_steps_by_hand(make_task, scaling, alpha):
    model = Model(weights={"w": torch.tensor([0.2, -0.1])}, forward=linear)
    h = torch.tensor([0.3, -0.5])
    payload = {dynamic.DRIFT + "w": h} | ({dynamic.SHARE: torch.tensor(2.0)} if scaling == "samples" else {})
    params = {"feddyn": {"alpha": 0.4, "scaling": scaling}}
    kwargs = {"method": "feddyn", "params": params, "payload": payload, "local_epochs": 2}
    task = make_task(model, torch.tensor([[1.0, 0.0]]), [0], **kwargs)
    found = task.hooks.local_train(task=task).weights["w"]
    # lr .5, logits (w1, 0), label 0: F's gradient is (sigmoid(w1) - 1, 0); the term's alpha (w - x + h)
    x = w = model.weights["w"]
    for _ in range(2):
        w = w - 0.5 * (torch.stack([torch.sigmoid(w[0]) - 1, torch.tensor(0.0)]) + alpha * (w - x + h))
    torch.testing.assert_close(found, w)


def test_the_first_step_of_the_first_round_is_plain(make_task):
    model = Model(weights={"w": torch.tensor([0.2, -0.1])}, forward=linear)
    payload = sent(FedDyn(FedDynParams()), model.weights["w"], 0, {}).held
    inputs = torch.tensor([[1.0, 2.0]])
    ours = make_task(model, inputs, [1], method="feddyn", params={"feddyn": {"alpha": 5.0}}, payload=payload)
    plain = make_task(model, inputs, [1])
    assert torch.equal(*(each.hooks.local_train(task=each).weights["w"] for each in (ours, plain)))


def test_sizes_are_relative_to_their_mean():
    task = StartTask([ClientReport(k, n, None) for k, n in enumerate((1, 2, 9))], Model({}, None), RunSpec(), {})
    assert torch.equal(dynamic.sizes_relative_to_the_mean(task), torch.tensor([0.25, 0.5, 2.25]))


def test_it_is_the_papers_algorithm_in_the_terms_of_the_paper():
    # one quadratic a client, F_k = a_k (w - b_k)^2 / 2, solved exactly, both in every round, against Algorithm 1
    alpha, a, b = 0.5, torch.tensor([1.0, 3.0]), torch.tensor([2.0, -1.0])
    method, state, x = FedDyn(FedDynParams(alpha=alpha)), {}, torch.tensor([0.0])
    gradients, server, theta = torch.zeros(2), torch.tensor(0.0), torch.tensor(0.0)
    for _ in range(60):
        drifts = torch.stack([sent(method, x, k, state).held[dynamic.DRIFT + "w"] for k in range(2)]).flatten()
        # a (w - b) + alpha (w - x + h) = 0
        ends = (a * b + alpha * (x - drifts)) / (a + alpha)
        x = aggregated(method, x, [[end.item()] for end in ends], [1, 5], state).flatten()
        # a (w - b) - g + alpha (w - theta) = 0; g <- g - alpha (w - theta); h <- h - alpha mean(w - theta)
        solved = (a * b + gradients + alpha * theta) / (a + alpha)
        gradients = gradients - alpha * (solved - theta)
        server = server - alpha * (solved - theta).mean()
        theta = solved.mean() - server / alpha
        assert x.item() == pytest.approx(theta.item(), abs=1e-5)
    # the minimum of the sum, whatever the sizes: (1 * 2 - 3) / 4
    assert x.item() == pytest.approx(-0.25, abs=1e-4)


def test_feddc_without_its_linear_term_is_feddyn_bit_for_bit():
    for scaling in ("uniform", "samples"):
        run = run_of("feddyn", {"feddyn": {"scaling": scaling}}, rounds=3)
        other = run_of("feddc", {"feddc": {"scaling": scaling, "correction": "off"}}, rounds=3)
        ours, theirs = final_state(run), final_state(other)
        assert digest(ours) == digest(theirs)
        assert all(torch.equal(kept, theirs.server["feddc"][name]) for name, kept in ours.server["feddyn"].items())
        assert run.info.round_bytes == other.info.round_bytes
        assert digest(end_of("feddc", rounds=3)) != digest(ours)


def test_feddcs_estimates_by_hand():
    # tilt g/omega - g_k = 1/2 - 3 = -2.5: g_k+ = 2.5 - (.4 / .8) = 2
    assert estimate(tensor(0.4), tensor(-2.5), 0.8).item() == pytest.approx(2.0)
    w = torch.tensor([2.0], requires_grad=True)
    term = linear_term({"w": w}, {"w": tensor(0.5)}, {"w": tensor(-2.5)})
    assert term.item() == pytest.approx(-3.75)
    assert torch.autograd.grad(term, w)[0].item() == -2.5


def test_feddcs_client_keeps_its_estimate_and_sends_its_change(make_task):
    model = Model(weights={"w": torch.tensor([0.2, -0.1])}, forward=linear)
    g, own = torch.tensor([0.5, 1.0]), torch.tensor([-0.25, 0.125])
    zero = torch.zeros(2)
    payload = {dynamic.DRIFT + "w": zero, GRADIENT + "w": g, dynamic.SHARE: torch.tensor(2.0)}
    kwargs = {"method": "feddc", "payload": payload, "local_epochs": 2, "state": {"feddc": {"w": own}}}
    task = make_task(model, torch.tensor([[1.0, 0.0]]), [0], params={"feddc": {"alpha": 0.4}}, **kwargs)
    update = task.hooks.local_train(task=task)
    x = w = model.weights["w"]
    tilt = g / 2 - own
    for _ in range(2):
        w = w - 0.5 * (torch.stack([torch.sigmoid(w[0]) - 1, torch.tensor(0.0)]) + 0.4 * (w - x) + tilt)
    torch.testing.assert_close(update.weights["w"], w)
    [payload] = task.hooks.after_training(task=task, update=update)
    # two steps of .5
    torch.testing.assert_close(task.state["feddc"]["w"], -tilt - (w - x) / 1.0)
    torch.testing.assert_close(payload[GRADIENT + "w"], -tilt - (w - x) - own)


def test_feddcs_server_moves_g_by_the_mean_over_all_clients_weighted_by_their_size():
    method, state = FedDC(FedDCParams()), {}
    reports = [ClientReport(k, n, None) for k, n in enumerate((1, 2, 3, 6))]
    method.start(StartTask(reports, Model({}, None), RunSpec(), state))
    # omega: 1/3, 2/3, 1, 2; clients 1 and 3 send 3 and -1: (2 - 2) / 4 = 0, then 6 and -1: (4 - 2) / 4
    for changes, g in ((3.0, -1.0), 0.0), ((6.0, -1.0), 0.5):
        payloads = [{GRADIENT + "w": tensor(change)} for change in changes]
        aggregated(method, tensor(1.0), [1.0, 1.0], [2, 6], state, clients=[1, 3], num_clients=4, payloads=payloads)
        assert sent(method, tensor(1.0), 0, state).payload[GRADIENT + "w"].item() == pytest.approx(g)
    assert sent(method, tensor(1.0), 3, state).payload[dynamic.SHARE].item() == 2.0


@pytest.mark.parametrize("name", ["feddyn", "feddc"])
def test_own_models_and_private_tensors_have_no_drift(name):
    spec = tiny_spec(f"{name}+ditto", rounds=3)
    run = tiny_run(spec, executor="sequential")
    state = final_state(run)
    plain = end_of(name, rounds=3, executor="sequential")
    assert all(torch.equal(value, state.weights[key]) for key, value in plain.weights.items())
    assert not any("ditto/" in key for key in state.server[name])
    batch_norm = run_of(f"{name}+fedbn", backbone="resnet8?width=1", rounds=2)
    kept = final_state(batch_norm).server[name]
    assert batch_norm.private and kept
    assert not any(key.split("/", 1)[-1] in batch_norm.private for key in kept)


def test_bytes_are_fedavgs_and_feddcs_about_twice_that():
    plain, dyn, dc = (run_of(name, rounds=1) for name in ("fedavg", "feddyn", "feddc"))
    up = {}
    for name, run in (("fedavg", plain), ("feddyn", dyn), ("feddc", dc)):
        state = run.initial_state()
        start(run, state)
        record = train_round(run, state)[1]
        up[name] = (record.bytes_up, record.bytes_down)
    assert up["feddyn"] == up["fedavg"]
    # with omega, four bytes a client
    assert up["feddc"] == (2 * up["fedavg"][0], 2 * up["fedavg"][1] + 4 * 2)


def test_what_is_held_is_beside_what_the_stack_holds():
    held = {"x": tensor(1.0)}
    task = BroadcastTask(0, 1, 0, {"w": tensor(1.0)}, RunSpec(), {})
    answer = FedDyn(FedDynParams()).broadcast(task, lambda task: replace(Broadcast(task.weights), held=held))
    assert set(answer.held) == {"x", dynamic.DRIFT + "w"}
