"""FedDF: Lin et al., NeurIPS 2020."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

from fedbench.core.method.tasks import AggregationTask, ServerData
from fedbench.core.spec import RunSpec, Training
from fedbench.core.types import Model, Outputs, Update
from fedbench.models.inputs import FeatureInputs
from fedbench.testing import final_state
from fedbench_methods.feddf import FedDF, FedDfParams, soften, student_gradient
from tests.equations.kit import RESNET, end_of, product, run_of

POINT = torch.tensor([[1.0, 0.0]])


@pytest.fixture(autouse=True)
def seeded():
    """Random weights of these tests are the same in every order of the tests."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def hidden_layer(tensors, inputs, training):
    return Outputs(torch.relu(inputs @ tensors["u"]) @ tensors["w"], inputs)


def fusion(clients, inputs=POINT, forward=product, sizes=None, weighting="samples"):
    """An aggregation of ``clients``' weights, one sample each unless ``sizes``, with ``inputs`` at the server."""
    updates = tuple(
        Update(k, w, {}, n) for k, (w, n) in enumerate(zip(clients, sizes or [1] * len(clients), strict=True))
    )
    model = Model(weights=clients[0], forward=forward)
    spec = RunSpec(method="feddf", training=Training(weighting=weighting))
    return AggregationTask(
        1, clients[0], {}, updates, model, spec, {}, server_data=ServerData(FeatureInputs(inputs), None)
    )


def head(*logits):
    """Weights that answer ``POINT`` with these logits."""
    return {"w": torch.tensor([logits, [0.0] * len(logits)])}


def targets(task, **params):
    return FedDF(FedDfParams(**params)).targets(task, task.server_data.inputs)


def server_steps(task, params):
    """The learning rate and the gradient at every step of the server, by a spy in Adam's place."""
    seen = []

    class Spy(torch.optim.SGD):
        def step(self):
            [group] = self.param_groups
            seen.append((group["lr"], group["params"][0].grad.clone()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "Adam", Spy)
        FedDF(params).aggregate(task)
    return seen


def test_mean_logits_of_opposite_teachers_are_an_even_target():
    assert targets(fusion([head(2.0, 0.0), head(0.0, 2.0)]))[0].tolist() == [0.5, 0.5]


def test_schemes_differ_where_one_teacher_is_surer():
    task = fusion([head(4.0, 0.0), head(0.0, 2.0)])
    # softmax((2, 1)) = .731059; (softmax(4, 0) + softmax(0, 2)) / 2 = (.982014 + .119203) / 2
    assert targets(task)[0, 0].item() == pytest.approx(0.731059, abs=1e-6)
    for scheme in ("avg_probs", "avg_losses"):
        assert targets(task, scheme=scheme)[0, 0].item() == pytest.approx(0.550608, abs=1e-6)
    # at T = 2: softmax((1, .5)) = .622459; (.880797 + .268941) / 2
    assert targets(task, temperature=2.0)[0, 0].item() == pytest.approx(0.622459, abs=1e-6)
    assert targets(task, temperature=2.0, scheme="avg_probs")[0, 0].item() == pytest.approx(0.574869, abs=1e-6)


def test_averaged_losses_have_the_gradient_of_averaged_probabilities():
    student = torch.tensor([[0.5, -0.2, 0.1]], requires_grad=True)
    teachers = [torch.tensor([[3.0, 0.0, 1.0]]), torch.tensor([[0.0, 1.0, -1.0]])]
    losses = [kl_div(log_softmax(student, 1), soften(o, 1.0), reduction="batchmean") for o in teachers]
    (wanted,) = torch.autograd.grad(sum(losses) / 2, student)
    mean = sum(soften(o, 1.0) for o in teachers) / 2
    torch.testing.assert_close(student_gradient(student.detach(), mean, 1.0, True), wanted)


def test_t_squared_keeps_the_size_of_the_gradient_and_is_one_at_t_one():
    logits, target = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    # (1/2 - 1) / T, times T^2
    assert student_gradient(logits, target, 4.0, False)[0, 0].item() == pytest.approx(-0.125)
    assert student_gradient(logits, target, 4.0, True)[0, 0].item() == pytest.approx(-2.0)
    assert torch.equal(student_gradient(logits, target, 1.0, True), student_gradient(logits, target, 1.0, False))
    batch = student_gradient(logits.expand(4, 2), target.expand(4, 2), 1.0, True)
    assert batch[0, 0].item() == pytest.approx(-0.125)


@pytest.mark.parametrize("t_squared", [True, False])
def test_aggregate_takes_the_factor_it_is_told(t_squared):
    # seen before Adam, which does away with the factor, and below the clip
    task = fusion([head(9.0, 0.0), head(0.0, 1.0)])
    params = FedDfParams(steps=1, temperature=4.0, t_squared=t_squared, scheme="avg_probs")
    [(_, gradient)] = server_steps(task, params)
    q = (1 / (1 + torch.tensor(-9 / 4).exp()) + 1 / (1 + torch.tensor(1 / 4).exp())) / 2
    p = 1 / (1 + torch.tensor(-(4.5 - 0.5) / 4).exp())
    assert gradient[0, 0].item() == pytest.approx(float(p - q) / 4 * (16 if t_squared else 1), rel=1e-4)


def test_servers_rate_falls_to_zero_by_half_a_cosine():
    task = fusion([head(9.0, 0.0), head(0.0, 1.0)])
    rates = [rate for rate, _ in server_steps(task, FedDfParams(steps=4, lr=0.08, scheme="avg_probs"))]
    # .04 (1 + cos(pi i / 4))
    assert rates == pytest.approx([0.08, 0.068284, 0.04, 0.011716], abs=1e-6)


def test_servers_gradients_are_clipped_at_a_norm_of_five():
    task = fusion([head(9.0, 0.0), head(0.0, 1.0)], 100 * POINT)
    free, five, one = (
        server_steps(task, FedDfParams(steps=1, scheme="avg_probs", **clip))[0][1].norm().item()
        for clip in ({"clip": 100.0}, {}, {"clip": 1.0})
    )
    assert 5 < free < 100
    assert (five, one) == pytest.approx((5.0, 1.0), rel=1e-4)


def test_student_starts_from_the_plain_mean_unless_told_fedavgs():
    task = fusion([head(4.0, 0.0), head(0.0, 0.0)], sizes=[3, 1])
    for start, wanted in (("uniform", 2.0), ("fedavg", 3.0)):
        found = FedDF(FedDfParams(steps=0, student_start=start)).aggregate(task)
        assert found.weights["w"][0, 0].item() == wanted


@pytest.mark.parametrize("scheme", ["avg_logits", "avg_probs"])
def test_teachers_that_are_the_student_leave_it_as_it_is(scheme):
    # three hundred samples in batches of 7: batches of other sizes may round otherwise
    own = {"u": torch.randn(6, 8), "w": torch.randn(8, 3)}
    task = fusion([own, own, own], torch.randn(300, 6), hidden_layer)
    found = FedDF(FedDfParams(steps=5, batch_size=7, scheme=scheme)).aggregate(task)
    assert all(torch.equal(found.weights[name], own[name]) for name in own)


def test_on_a_linear_head_the_mean_logits_are_the_mean_heads_own():
    clients = [{"w": torch.randn(6, 3)} for _ in range(3)]
    task = fusion(clients, torch.randn(40, 6))
    mean = FedDF(FedDfParams(steps=0)).aggregate(task).weights["w"]
    assert torch.equal(FedDF(FedDfParams(steps=5)).aggregate(task).weights["w"], mean)
    assert not torch.equal(FedDF(FedDfParams(steps=5, scheme="avg_probs")).aggregate(task).weights["w"], mean)


def test_student_comes_closer_to_the_ensemble():
    task = fusion(
        [{"u": torch.randn(6, 8), "w": torch.randn(8, 3)} for _ in range(3)], torch.randn(64, 6), hidden_layer
    )
    wanted = targets(task)
    left = []
    for steps in (0, 50):
        found = FedDF(FedDfParams(steps=steps, lr=1e-2)).aggregate(task)
        logits = hidden_layer(found.weights, task.server_data.inputs.features, False).logits
        left.append(kl_div(log_softmax(logits, 1), wanted, reduction="batchmean").item())
    assert left[1] < 0.5 * left[0]


def test_order_of_clients_does_not_matter():
    clients = [{"u": torch.randn(6, 8), "w": torch.randn(8, 3)} for _ in range(3)]
    one = fusion(clients, torch.randn(20, 6), hidden_layer)
    other = replace(one, updates=one.updates[::-1])
    found = [FedDF(FedDfParams(steps=3)).aggregate(task).weights["w"] for task in (one, other)]
    torch.testing.assert_close(*found)


def test_running_statistics_move_with_the_student_and_labels_are_out_of_reach():
    run = run_of("feddf", {"feddf": {"steps": 2}}, backbone=RESNET, rounds=1)
    assert run.server.labels is None
    moved, still = final_state(run), end_of("feddf", {"feddf": {"steps": 0}}, backbone=RESNET, rounds=1)
    assert not torch.equal(moved.buffers["body.bn1.running_mean"], still.buffers["body.bn1.running_mean"])
