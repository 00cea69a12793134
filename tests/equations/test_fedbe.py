"""FedBE: Chen and Chao, ICLR 2021."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from fedbench.core.method.tasks import AggregationTask, ServerData
from fedbench.core.spec import RunSpec
from fedbench.core.types import GlobalModel, Model, Update
from fedbench.models.inputs import FeatureInputs
from fedbench.testing import final_state
from fedbench.toolkit.fedavg import mean_model
from fedbench.toolkit.server_training import statistics_of
from fedbench_methods.fedbe import FedBE, FedBeParams, draw_models, sharpened, unit_gaussian, weighted_gaussian
from fedbench_methods.feddf import FedDF, FedDfParams
from tests.equations.kit import RESNET, product, run_of

POINT = torch.tensor([[1.0, 0.0]])


def fusion(clients, sizes=None, received=None, inputs=POINT, clients_of=None):
    """An aggregation of these weights ``w``, with ``inputs`` at the server; received are zeros."""
    sizes, ids = sizes or [1] * len(clients), clients_of or range(len(clients))
    updates = tuple(Update(k, {"w": w}, {}, n) for k, w, n in zip(ids, clients, sizes, strict=True))
    start = {"w": torch.zeros_like(clients[0]) if received is None else received}
    data = ServerData(FeatureInputs(inputs), None)
    return AggregationTask(
        1, start, {}, updates, Model(start, product), RunSpec(method="fedbe"), {}, server_data=data, num_clients=9
    )


def head(*logits):
    """Weights that answer ``POINT`` with these logits."""
    return torch.tensor([logits, [0.0] * len(logits)])


def drawn(task, **params):
    return [weights["w"] for weights in draw_models(task, FedBeParams(**params))]


def test_directions_are_of_unit_length_and_their_variance_is_over_all_clients():
    mean, variance, norm = unit_gaussian([torch.tensor([3.0, 1.0]), torch.tensor([0.0, 5.0])], torch.tensor([0.0, 1.0]))
    # moves (3, 0) and (0, 4): directions (1, 0), (0, 1); the variance is not the unbiased one, 1/2
    assert mean.tolist() == [0.5, 0.5] and variance.tolist() == [0.25, 0.25] and norm.item() == 3.5


def test_a_client_that_did_not_move_has_no_direction_and_no_part():
    received = torch.tensor([1.0, 1.0])
    mean, variance, norm = unit_gaussian([received, torch.tensor([1.0, 3.0])], received)
    assert mean.tolist() == [0.0, 1.0] and variance.tolist() == [0.0, 0.0] and norm.item() == 2.0
    assert all(torch.equal(w, received) for w in drawn(fusion([received] * 2, received=received), samples=2))


def test_samples_are_received_plus_the_mean_norm_times_mean_and_scaled_deviation():
    received, clients = torch.tensor([0.0, 1.0]), [torch.tensor([3.0, 1.0]), torch.tensor([0.0, 5.0])]
    task = fusion(clients, received=received)
    draws = torch.stack(drawn(task, samples=100, var_scale=0.1, step_length=2.0))
    # 2 * 3.5 * (.5 + .1 * .5 * eps): mean 3.5, deviation .35
    torch.testing.assert_close(draws.mean(dim=0), received + 3.5, atol=0.12, rtol=0)
    torch.testing.assert_close(draws.std(dim=0), torch.full((2,), 0.35), atol=0.1, rtol=0)
    floored = torch.stack(drawn(task, samples=100, var_scale=0.1, step_length=2.0, variance_floor=1.0))
    torch.testing.assert_close(floored.std(dim=0), torch.full((2,), 0.7), atol=0.2, rtol=0)


def test_without_spread_a_single_client_is_every_sample():
    client = torch.tensor([[0.3, -0.7], [0.1, 0.2]])
    task = fusion([client], received=torch.tensor([[0.1, 0.1], [0.0, 0.4]]))
    for weights in drawn(task, samples=3, var_scale=0.0):
        torch.testing.assert_close(weights, client)
    # a single client has no variance either, only the floor of the released code spreads
    for weights in drawn(task, samples=3):
        torch.testing.assert_close(weights, client)
    assert not torch.allclose(drawn(task, samples=1, variance_floor=1e-5)[0], client, atol=1e-5)


def test_noise_does_not_depend_on_the_order_of_the_weights():
    moved = {"a": torch.ones(2), "b": torch.tensor([2.0, -1.0])}
    found = []
    for names in (["a", "b"], ["b", "a"]):
        start = {name: torch.zeros(2) for name in names}
        updates = tuple(Update(k, {n: (k + 1) ** 2 * moved[n] + k for n in names}, {}, 1) for k in (0, 1))
        made = AggregationTask(1, start, {}, updates, Model(start, product), RunSpec(method="fedbe"), {})
        found.append(next(draw_models(made, FedBeParams())))
    assert all(torch.equal(found[0][name], found[1][name]) for name in moved)


def test_the_papers_gaussian_is_weighted_by_samples():
    mean, variance = weighted_gaussian([torch.tensor([0.0]), torch.tensor([4.0])], torch.tensor([0.75, 0.25]))
    # 1, and .75 * 1 + .25 * 9
    assert mean.item() == 1.0 and variance.item() == 3.0
    task = fusion([torch.tensor([0.0]), torch.tensor([4.0])], sizes=[3, 1])
    draws = torch.cat(drawn(task, samples=100, teacher_mix="gaussian_paper", var_scale=0.0))
    assert draws.mean().item() == pytest.approx(1.0, abs=0.5) and draws.std().item() == pytest.approx(3**0.5, abs=0.4)


def test_dirichlet_samples_are_mixtures_of_the_clients_sharper_for_a_small_concentration():
    corners = list(torch.eye(3))
    draws = torch.stack(drawn(fusion(corners), samples=50, teacher_mix="dirichlet"))
    torch.testing.assert_close(draws.sum(dim=1), torch.ones(50))
    assert (draws >= 0).all() and (draws.max(dim=1).values < 0.99).any()
    sharp = torch.stack(drawn(fusion(corners), samples=50, teacher_mix="dirichlet", concentration=0.01))
    assert (sharp.max(dim=1).values > 0.99).float().mean() > 0.8


def test_sharpening_by_hand_and_none_at_one():
    rows = torch.tensor([[0.8, 0.2]])
    # .64 / .68, .04 / .68
    assert sharpened(rows, 0.5)[0].tolist() == pytest.approx([0.941176, 0.058824], abs=1e-6)
    torch.testing.assert_close(sharpened(rows, 1.0), rows)


def test_teachers_are_fedavgs_model_the_samples_and_the_clients():
    task = fusion([head(1.0, 0.0), head(0.0, 3.0)], sizes=[3, 1])
    mean = mean_model(task, "samples")
    teachers = list(FedBE(FedBeParams(samples=4)).teachers(task, mean))
    assert len(teachers) == 1 + 4 + 2
    assert torch.equal(teachers[0].weights["w"], mean.weights["w"])
    assert torch.equal(teachers[-1].weights["w"], head(0.0, 3.0))
    q = FedBE(FedBeParams(samples=0)).targets(task, task.server_data.inputs, mean)
    logits = torch.tensor([[0.75, 0.75], [1.0, 0.0], [0.0, 3.0]])
    torch.testing.assert_close(q[0], sharpened(torch.softmax(logits, 1).mean(0, keepdim=True), 0.5)[0])


def test_no_samples_clients_only_and_no_sharpening_is_feddf_with_averaged_probabilities():
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    clients = [torch.randn(6, 3, generator=torch.Generator().manual_seed(k)) for k in (1, 2, 3)]
    task = fusion(clients, inputs=inputs)
    fedbe = FedBE(FedBeParams(samples=0, use_mean=False, sharpening=1.0, steps=6, weight_decay=0.0, swa_start=1.0))
    feddf = FedDF(FedDfParams(scheme="avg_probs", steps=6, clip=100.0))
    wanted = feddf.targets(task, task.server_data.inputs)
    torch.testing.assert_close(fedbe.targets(task, task.server_data.inputs, mean_model(task, "samples")), wanted)
    sgd = torch.optim.SGD
    with pytest.MonkeyPatch.context() as patch:
        # one optimiser at a constant rate for both
        patch.setattr(torch.optim, "Adam", lambda weights, lr: sgd(weights, lr=lr, momentum=0.9))
        patch.setattr("fedbench.toolkit.server_training.CosineAnnealingLR", lambda o, _: LambdaLR(o, lambda step: 1.0))
        found = [method.aggregate(task).weights["w"] for method in (fedbe, feddf)]
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0], mean_model(task, "samples").weights["w"])


def test_the_loss_is_the_batchs_divergence_and_c_times_smaller_as_released():
    # one step of plain SGD: lr (q - p) x; teachers (4, 0, 0) twice, the student starts at their mean
    task = fusion([head(4.0, 0.0, 0.0), head(4.0, 0.0, 0.0)])
    moved = []
    for reduction in ("batch", "mean"):
        params = FedBeParams(samples=0, steps=1, lr=0.1, momentum=0.0, weight_decay=0.0, reduction=reduction)
        moved.append(FedBE(params).aggregate(task).weights["w"][0, 0].item() - 4.0)
    p = torch.softmax(torch.tensor([[4.0, 0.0, 0.0]]), dim=1)
    assert moved[0] == pytest.approx(0.1 * (sharpened(p, 0.5) - p)[0, 0].item(), abs=1e-6)
    assert moved[0] / moved[1] == pytest.approx(3.0, rel=1e-3)


def test_every_participant_is_weighed_by_its_own_samples_whatever_its_number():
    task = fusion([head(4.0, 0.0), head(0.0, 0.0)], sizes=[3, 1], clients_of=[5, 7])
    assert FedBE(FedBeParams(steps=0)).aggregate(task).weights["w"][0, 0].item() == 3.0


def test_weights_are_averaged_from_a_third_of_the_steps_on():
    task = fusion([head(4.0, 0.0), head(0.0, 1.0)])
    params = {"samples": 0, "momentum": 0.0, "weight_decay": 0.0, "lr": 0.1}
    path = [FedBE(FedBeParams(steps=n, swa_start=1.0, **params)).aggregate(task).weights["w"] for n in (3, 5, 7, 9, 10)]
    averaged = FedBE(FedBeParams(steps=10, **params)).aggregate(task).weights["w"]
    torch.testing.assert_close(averaged, sum(path[:4]) / 4)
    assert not torch.allclose(averaged, path[4])


def test_samples_have_fedavgs_running_statistics_and_the_average_the_servers():
    run = run_of("fedbe", {"fedbe": {"steps": 2, "samples": 2}}, backbone=RESNET, rounds=1)
    state = final_state(run)
    wanted = statistics_of(run.model, GlobalModel(state.weights, state.buffers), run.server.inputs)
    for name, value in state.buffers.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-4)
    buffers = {"var": torch.tensor([0.1])}
    task = fusion([head(1.0, 0.0), head(0.0, 1.0)])
    teachers = FedBE(FedBeParams(samples=3, use_clients=False)).teachers(task, GlobalModel(task.weights, buffers))
    assert all(teacher.buffers is buffers for teacher in teachers)
