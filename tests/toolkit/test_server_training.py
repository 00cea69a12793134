"""Training on the server's own samples, on models small enough to follow by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

from fedbench.core.errors import Unworkable
from fedbench.core.method.tasks import ServerData
from fedbench.core.randomness import torch_generator
from fedbench.core.types import GlobalModel, Model, Outputs, Update
from fedbench.models.inputs import FeatureInputs
from fedbench.toolkit.fedavg import mean_model
from fedbench.toolkit.server_training import (
    ROUNDING,
    Course,
    client_models,
    divergence_gradient,
    ensemble,
    granted,
    server_batches,
    statistics_of,
    trained_copy,
)


def linear(tensors, inputs, training):
    return Outputs(inputs @ tensors["w"], inputs)


MODEL = Model(weights={"w": torch.eye(2)}, forward=linear)
ONE = FeatureInputs(torch.tensor([[1.0, 0.0]]))
START = GlobalModel({"w": torch.zeros(2, 2)}, {})


def sgd(lr):
    return lambda weights: torch.optim.SGD(weights.values(), lr=lr)


def push(logits, index):
    return torch.tensor([[-1.0, 0.0]]).expand(len(logits), 2) / len(logits)


def test_gradient_is_that_of_the_divergence_and_exactly_zero_where_both_agree():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.3, 0.2, 0.1]], requires_grad=True)
    targets = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]])
    (wanted,) = torch.autograd.grad(kl_div(log_softmax(logits / 3, 1), targets, reduction="batchmean"), logits)
    torch.testing.assert_close(divergence_gradient(logits.detach(), targets, 3.0), wanted)
    agreed = torch.softmax(logits.detach() / 3, dim=1)
    assert not divergence_gradient(logits.detach(), agreed * (1 + ROUNDING / 4), 3.0).any()
    assert divergence_gradient(logits.detach(), agreed * (1 + 4 * ROUNDING), 3.0).all()


def test_teachers_are_averaged_in_eval_mode_and_one_alone_comes_back_bit_for_bit():
    modes = []

    def forward(tensors, inputs, training):
        modes.append(training)
        return linear(tensors, inputs, training)

    model, inputs = Model(weights={}, forward=forward), FeatureInputs(torch.rand(3, 2))
    teachers = [GlobalModel({"w": torch.full((2, 2), value)}, {}) for value in (0.1, 0.3)]
    one = ensemble(model, teachers[:1] * 7, inputs, lambda logits: logits)
    assert torch.equal(one, inputs.features @ teachers[0].weights["w"])
    both = ensemble(model, teachers, inputs, lambda logits: logits)
    torch.testing.assert_close(both, inputs.features @ torch.full((2, 2), 0.2))
    assert not any(modes)


def test_batches_pass_over_all_samples_in_new_orders_for_as_many_steps_as_asked():
    batches = server_batches(5, 3, 3, torch_generator(0, "test"))
    assert [len(batch) for batch in batches] == [3, 2, 3]
    assert sorted(torch.cat(batches[:2]).tolist()) == [0, 1, 2, 3, 4]
    assert server_batches(5, 3, 0, torch_generator(0, "test")) == []


def test_a_step_moves_a_copy_against_the_gradient_and_no_step_moves_nothing():
    course = Course([torch.tensor([0])] * 3, sgd(0.5))
    moved = trained_copy(MODEL, START, ONE, push, course)
    # x = (1, 0): three steps of 0.5 along the first logit's weight of the first input
    assert moved.weights["w"].tolist() == [[1.5, 0.0], [0.0, 0.0]]
    assert not START.weights["w"].any() and not moved.weights["w"].requires_grad
    still = trained_copy(MODEL, START, ONE, push, Course([], sgd(0.5)))
    assert torch.equal(still.weights["w"], START.weights["w"])


def test_gradients_are_clipped_and_the_rate_falls_by_half_a_cosine():
    clipped = trained_copy(MODEL, START, ONE, push, Course([torch.tensor([0])], sgd(1.0), clip=0.25))
    assert clipped.weights["w"][0, 0].item() == pytest.approx(0.25, abs=1e-5)
    falling = trained_copy(MODEL, START, ONE, push, Course([torch.tensor([0])] * 2, sgd(1.0), cosine=True))
    # rates 1 and (1 + cos(pi / 2)) / 2
    assert falling.weights["w"][0, 0].item() == pytest.approx(1.5)


def test_averaged_weights_are_the_mean_from_the_first_named_step_on():
    batches = [torch.tensor([0])] * 6
    course = Course(batches, sgd(1.0), averaged_from=2, averaged_every=2)
    # after steps 2, 4, 6 the weight is 2, 4, 6
    assert trained_copy(MODEL, START, ONE, push, course).weights["w"][0, 0].item() == pytest.approx(4.0)
    late = Course(batches, sgd(1.0), averaged_from=7)
    assert trained_copy(MODEL, START, ONE, push, late).weights["w"][0, 0].item() == 6.0


def test_what_is_no_longer_finite_is_unworkable():
    with pytest.raises(Unworkable, match="training diverged: weights trained on the server"):
        trained_copy(MODEL, START, ONE, lambda logits, index: logits + torch.inf, Course([torch.tensor([0])], sgd(1.0)))


def batch_norm_model(momentum):
    def forward(tensors, inputs, training):
        mean, variance = tensors["n.mean"], tensors["n.var"]
        out = torch.nn.functional.batch_norm(inputs, mean, variance, training=training, momentum=momentum)
        return Outputs(out @ tensors["w"], out)

    buffers = {"n.mean": torch.tensor([9.0, 9.0]), "n.var": torch.ones(2), "n.count": torch.tensor(3)}
    return Model(weights={"w": torch.eye(2)}, forward=forward, buffers=buffers, batch_norm=frozenset(buffers))


@pytest.mark.parametrize("momentum", [0.1, 0.5])
def test_statistics_are_the_samples_own_whatever_they_were_and_whatever_the_momentum(momentum):
    model, data = batch_norm_model(momentum), torch.randn(400, 2, generator=torch_generator(0, "test")) * 5 + 3
    found = statistics_of(model, GlobalModel(model.weights, model.buffers), FeatureInputs(data))
    torch.testing.assert_close(found["n.mean"], data.mean(dim=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["n.var"], data.var(dim=0), rtol=1e-4, atol=1e-5)
    assert found["n.count"] == 3 and model.buffers["n.mean"].tolist() == [9.0, 9.0]


def test_training_moves_running_statistics_of_the_copy_only():
    model = batch_norm_model(0.5)
    inputs = FeatureInputs(torch.tensor([[1.0, 0.0], [3.0, 2.0]]))
    course = Course([torch.tensor([0, 1])], sgd(0.0))
    moved = trained_copy(model, GlobalModel(model.weights, model.buffers), inputs, push, course)
    assert moved.buffers["n.mean"].tolist() == [5.5, 5.0]
    assert model.buffers["n.mean"].tolist() == [9.0, 9.0]


def task(weights, **more):
    return SimpleNamespace(model=MODEL, weights=weights, buffers={}, **more)


def test_mean_models_weigh_by_samples_or_alike_and_statistics_with_them():
    updates = tuple(
        Update(client, {"w": torch.tensor([value])}, {"m": torch.tensor([value]), "n": torch.tensor(client)}, size)
        for client, value, size in ((3, 0.0, 3), (5, 4.0, 1))
    )
    buffers = {"m": torch.zeros(1), "n": torch.tensor(0)}
    made = SimpleNamespace(updates=updates, weights={"w": torch.zeros(1)}, buffers=buffers)
    for weighting, wanted in (("samples", 1.0), ("uniform", 2.0)):
        mean = mean_model(made, weighting)
        assert mean.weights["w"].item() == mean.buffers["m"].item() == wanted and mean.buffers["n"] == 3
    assert [model.weights["w"].item() for model in client_models(made)] == [0.0, 4.0]


def test_the_servers_samples_are_those_granted():
    assert len(granted(task(MODEL.weights, server_data=ServerData(ONE, None))).inputs) == 1
