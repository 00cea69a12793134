"""FedFA: Zhou and Konukoglu 2023."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fedbench.core.method.tasks import AggregationTask, LocalStep
from fedbench.core.randomness import torch_generator
from fedbench.core.types import Model, Update
from fedbench.models.cnn.nets import block_channels
from fedbench.rounds.loop import start, train_round
from fedbench.rounds.messages import broadcast, client_task
from fedbench.testing import digest, final_state, tiny_backbone, tiny_run, tiny_spec
from fedbench.toolkit.local_training import batch_at
from fedbench_methods.fedfa import (
    FedFA,
    FedFAParams,
    augmented,
    channel_statistics,
    channel_weights,
    draw_noise,
    resampled,
    tensor_name,
    variance_over_clients,
)
from tests.equations.kit import spec_of, task_of

# sample 0 is (0, 2): mean 1, deviation 1; sample 1 is (4, 10): mean 7, deviation 3. Over the samples the means have the
# variance 9 and the deviations 1
MAPS = torch.tensor([[[[0.0, 2.0]]], [[[4.0, 10.0]]]])


def given(shared=1.0, mean_noise=((0.0,), (0.0,)), std_noise=((0.0,), (0.0,)), channels=1):
    """What block 0 reads: running means as they start, S, and noise for two samples."""
    return {
        tensor_name("running", "mean", 0): torch.zeros(channels),
        tensor_name("running", "std", 0): torch.ones(channels),
        tensor_name("shared", "mean", 0): torch.full((channels,), shared),
        tensor_name("shared", "std", 0): torch.full((channels,), shared),
        tensor_name("noise", "mean", 0): torch.tensor(mean_noise),
        tensor_name("noise", "std", 0): torch.tensor(std_noise),
    }


# --- equations ---


def test_statistics_are_of_every_sample_and_channel_over_space():
    maps = torch.tensor([[[[1.0, 3.0], [5.0, 7.0]], [[2.0, 2.0], [2.0, 2.0]]], [[[0.0, 0.0], [4.0, 4.0]]] * 2])
    mean, std = channel_statistics(maps[:1])
    # mean 4, squares 9, 1, 1, 9: variance 5; the other channel is flat: only the 1e-6
    assert mean.tolist() == [[4.0, 2.0]]
    assert std[0].tolist() == pytest.approx([5**0.5, 1e-3], abs=1e-6)


@pytest.mark.parametrize(
    ("shared", "weights"),
    [
        # w = (1/2, 3/4), their mean 5/8
        ([1.0, 3.0], [0.8, 1.2]),
        # w = (1/2, 3/4, 3/4): mean 2/3
        ([1.0, 3.0, 3.0], [0.75, 1.125, 1.125]),
        ([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]),
        # one client, or none that has fired: no spread at all
        ([0.0, 0.0], [1.0, 1.0]),
    ],
)
def test_channels_that_differ_more_between_clients_weigh_more_and_one_on_average(shared, weights):
    assert channel_weights(torch.tensor(shared)).tolist() == pytest.approx(weights, abs=1e-5)


def test_weights_of_tiny_variances_are_in_proportion_to_them():
    # w = S / (1 + S): for S far below one G = c S / sum S, here 2 * (1, 3) / 4
    assert channel_weights(torch.tensor([1e-3, 3e-3])).tolist() == pytest.approx([0.5, 1.5], abs=2e-3)


def test_draws_are_around_each_sample_with_g_plus_one_times_the_variance_of_the_batch():
    # V = (1, 4) over the samples, G = (.8, 1.2): variances 1.8 and 8.8
    values = torch.tensor([[0.0, 10.0], [2.0, 14.0]])
    noise = torch.tensor([[1.0, 1.0], [0.0, -0.5]])
    drawn = resampled(values, torch.tensor([1.0, 3.0]), noise)
    expected = [[1.8**0.5, 10 + 8.8**0.5], [2.0, 14 - 0.5 * 8.8**0.5]]
    assert drawn.flatten().tolist() == pytest.approx([*expected[0], *expected[1]], abs=1e-5)


def test_equal_variances_between_clients_double_the_variance_of_the_batch():
    values = torch.tensor([[0.0, 10.0], [2.0, 14.0]])
    drawn = resampled(values, torch.tensor([5.0, 5.0]), torch.ones(2, 2))
    assert (drawn - values).flatten().tolist() == pytest.approx([2**0.5, 8**0.5] * 2, abs=1e-5)


def test_map_gets_the_new_mean_and_deviation_of_its_own_sample():
    # G = 1, variances 18 and 2: beta = 1 + sqrt 18 and gamma = 1 + sqrt 2 of sample 0, 7 and 3 - sqrt 2 of sample 1
    out = augmented(0, MAPS, given(mean_noise=((1.0,), (0.0,)), std_noise=((1.0,), (-1.0,))), 0.99)
    expected = [2.8284271, 7.6568542, 7 - 1.5857864, 7 + 1.5857864]
    assert out.flatten().tolist() == pytest.approx(expected, abs=1e-4)


def test_zero_noise_gives_the_map_back():
    maps = torch.randn(4, 3, 5, 5, generator=torch_generator(0, "maps")) * 3 + 7
    tensors = given(mean_noise=((0.0,) * 3,) * 4, std_noise=((0.0,) * 3,) * 4, channels=3)
    torch.testing.assert_close(augmented(0, maps, tensors, 0.99), maps, atol=1e-5, rtol=0)


def test_running_means_keep_99_hundredths_of_what_they_were():
    tensors = given()
    augmented(0, MAPS, tensors, 0.99)
    # the means over samples are 4 and 2: .01 * 4, .99 + .01 * 2; then .99 * .04 + .04, .99 * 1.01 + .02
    assert tensors["fedfa.running.mean.0"].item() == pytest.approx(0.04, abs=1e-6)
    assert tensors["fedfa.running.std.0"].item() == pytest.approx(1.01, abs=1e-6)
    augmented(0, MAPS, tensors, 0.99)
    assert tensors["fedfa.running.mean.0"].item() == pytest.approx(0.0796, abs=1e-6)
    assert tensors["fedfa.running.std.0"].item() == pytest.approx(1.0199, abs=1e-6)


def test_a_block_without_noise_passes_the_map_itself_and_moves_nothing():
    tensors = {name: value for name, value in given().items() if ".noise." not in name}
    assert augmented(0, MAPS, tensors, 0.99) is MAPS
    assert (tensors["fedfa.running.mean.0"].item(), tensors["fedfa.running.std.0"].item()) == (0.0, 1.0)


@pytest.mark.parametrize("shape", [(4, 2, 1, 1), (1, 2, 3, 3)])
def test_maps_of_one_pixel_and_batches_of_one_stay_close_and_have_finite_gradients(shape):
    maps = torch.randn(shape, generator=torch_generator(0, "maps"))
    maps[:, 1] = 0  # a channel that ReLU has closed
    maps.requires_grad_()
    noise = ((1.0, 1.0),) * shape[0]
    out = augmented(0, maps, given(mean_noise=noise, std_noise=noise, channels=2), 0.99)
    out.square().sum().backward()
    assert torch.isfinite(maps.grad).all()
    # where there is no variance, what is drawn has that of 2e-6: a thousandth or so
    assert (out - maps)[:, 1].abs().max() < 5e-3
    assert shape[0] > 1 or (out - maps).abs().max() < 1e-2


def test_half_precision_maps_come_back_as_such_with_running_means_in_full():
    tensors = given()
    out = augmented(0, (MAPS + 1000).bfloat16(), tensors, 0.99)
    assert out.dtype == torch.bfloat16
    assert tensors["fedfa.running.mean.0"].item() == pytest.approx(10.04, rel=1e-3)


# --- draws ---


def test_every_block_fires_on_its_own_with_the_given_probability():
    channels = (3, 5)

    def fired(probability):
        generator = torch_generator(0, "draws")
        names = [set(draw_noise(channels, 2, probability, generator)) for _ in range(400)]
        return [sum(tensor_name("noise", "mean", block) in found for found in names) for block in (0, 1)], names

    counts, names = fired(0.5)
    assert all(150 < count < 250 for count in counts)
    assert {len(found) for found in names} == {0, 2, 4}
    assert fired(1.0)[0] == [400, 400] and fired(0.0)[0] == [0, 0]
    shapes = {name: tuple(t.shape) for name, t in draw_noise(channels, 2, 1.0, torch_generator(0, "d")).items()}
    assert shapes == {
        "fedfa.noise.mean.0": (2, 3),
        "fedfa.noise.std.0": (2, 3),
        "fedfa.noise.mean.1": (2, 5),
        "fedfa.noise.std.1": (2, 5),
    }


def test_draws_are_standard_normal_and_of_each_sample():
    noise = draw_noise((50,), 200, 1.0, torch_generator(0, "d"))
    mean, std = noise["fedfa.noise.mean.0"], noise["fedfa.noise.std.0"]
    assert abs(mean.mean()) < 0.05 and abs(mean.std() - 1) < 0.05
    assert not torch.equal(mean, std) and not torch.equal(mean[0], mean[1])


# --- server ---


def test_variance_is_over_clients_for_every_channel_or_over_both_as_released():
    running = [torch.tensor([0.0, 1.0]), torch.tensor([2.0, 5.0])]
    assert variance_over_clients(running, "per_channel").tolist() == [1.0, 4.0]
    # 0, 1, 2, 5: mean 2, squares 4, 1, 0, 9
    released = variance_over_clients(running, "as_released")
    assert released.tolist() == [3.5, 3.5]
    assert channel_weights(released).tolist() == [1.0, 1.0]


def server(values, sizes, **params):
    """The server's weights and S after updates whose running means have ``values`` by client."""
    names = [tensor_name("running", statistic, 0) for statistic in ("mean", "std")]
    model = Model({}, lambda *_: None, buffers={name: torch.zeros(2) for name in names})
    updates = tuple(
        Update(k, {"w": torch.tensor([4.0 * k])}, {names[0]: torch.tensor(v), names[1]: 2 * torch.tensor(v)}, n)
        for k, (v, n) in enumerate(zip(values, sizes, strict=True))
    )
    task = AggregationTask(1, {"w": torch.zeros(1)}, {}, updates, model, tiny_spec("fedavg"), {})
    made = FedFA(FedFAParams(**params)).aggregate(task)
    return made.weights["w"].tolist(), {name: tensor.tolist() for name, tensor in task.state["fedfa"].items()}


def test_server_takes_the_plain_mean_of_weights_and_the_variance_of_both_statistics():
    weights, shared = server([[0.0, 1.0], [2.0, 5.0]], [1, 3])
    assert weights == [2.0]
    assert shared == {"fedfa.shared.mean.0": [1.0, 4.0], "fedfa.shared.std.0": [4.0, 16.0]}
    assert server([[0.0, 1.0], [2.0, 5.0]], [1, 3], weighting="samples")[0] == [3.0]
    assert server([[0.0, 1.0], [2.0, 5.0]], [1, 3], sharing="as_released")[1]["fedfa.shared.std.0"] == [14.0, 14.0]


def test_a_single_participant_tells_of_no_variance():
    assert server([[3.0, 1.0]], [5])[1]["fedfa.shared.mean.0"] == [0.0, 0.0]


# --- the network ---


def fedfa(backbone="convnet", params=None, **training):
    training = {"rounds": 2, "weighting": "uniform", **training}
    return spec_of("fedfa", {"fedfa": params or {}}, backbone=backbone, **training)


def plain(spec):
    return spec.model_copy(update={"method": "fedavg", "params": {}})


@pytest.fixture
def step_of():
    """A local step of ``client`` in ``round``, on its first six samples."""

    def make(spec, client=0, round=1, number=0, shared=None):
        run = tiny_run(spec)
        state = replace(run.initial_state(), round=round - 1)
        start(run, state)
        task = task_of(run, client, state=state, round=round)
        task = replace(task, payload=shared or task.payload)
        weights = {name: value.clone().requires_grad_() for name, value in task.received.items()}
        buffers = {name: value.clone() for name, value in task.buffers.items()}
        return LocalStep(weights, buffers, batch_at(task, torch.arange(6), torch.Generator()), task, number)

    return make


def noise_of(step):
    """The draws of both of convnet's blocks for six samples."""
    keys = (step.task.round, step.task.client, step.task.exchange, step.number)
    return draw_noise((6, 16), 6, 1.0, torch_generator(0, "feature-augmentation", *keys))


def by_definition(maps, block, shared, noise):
    """The augmented map in double precision, one sample and channel after the other."""
    out = maps.double().clone()
    mean, std = maps.double().mean((2, 3)), (maps.double().var((2, 3), correction=0) + 1e-6).sqrt()
    for c in range(maps.shape[1]):
        new = []
        for statistic, values in (("mean", mean), ("std", std)):
            spread = shared[tensor_name("shared", statistic, block)].double() + 1e-6
            w = spread / (1 + spread)
            g = len(w) * w[c] / w.sum()
            variance = ((values[:, c] - values[:, c].mean()) ** 2).mean() + 1e-6
            new.append(values[:, c] + noise[tensor_name("noise", statistic, block)][:, c] * ((g + 1) * variance).sqrt())
        normal = (maps[:, c] - mean[:, c, None, None]) / std[:, c, None, None]
        out[:, c] = new[1][:, None, None] * normal + new[0][:, None, None]
    return out.float()


def test_loss_and_gradients_are_those_of_the_network_with_both_blocks_changed_by_definition(step_of):
    generator = torch_generator(0, "shared")
    names = [(statistic, block, width) for block, width in enumerate((6, 16)) for statistic in ("mean", "std")]
    shared = {tensor_name("shared", s, b): 4 * torch.rand(width, generator=generator) for s, b, width in names}
    step = step_of(fedfa(params={"probability": 1.0}), shared=shared)
    loss = step.task.hooks.local_loss(step=step)
    w, noise = step.weights, noise_of(step)
    x = F.relu(F.max_pool2d(F.conv2d(step.batch.inputs, w["body.conv1.weight"], w["body.conv1.bias"]), 2))
    x = by_definition(x, 0, shared, noise)
    x = F.relu(F.max_pool2d(F.conv2d(x, w["body.conv2.weight"], w["body.conv2.bias"]), 2))
    x = by_definition(x, 1, shared, noise).flatten(1)
    for layer in ("fc1", "fc2"):
        x = F.relu(F.linear(x, w[f"body.{layer}.weight"], w[f"body.{layer}.bias"]))
    expected = F.cross_entropy(F.linear(x, w["head.weight"], w["head.bias"]), step.batch.labels)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    found, wanted = (torch.autograd.grad(value, list(w.values())) for value in (loss, expected))
    for name, one, other in zip(w, found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * other.abs().max().item(), rtol=1e-3, msg=name)


def test_loss_reads_the_variances_the_server_sent(step_of):
    spec = fedfa(params={"probability": 1.0})
    first = step_of(spec)
    uneven = {name: tensor * torch.arange(len(tensor)) for name, tensor in first.task.payload.items()}
    losses = [step.task.hooks.local_loss(step=step).item() for step in (first, step_of(spec, shared=uneven))]
    assert losses[0] != losses[1]


def test_draws_differ_by_step_round_client_and_seed_and_come_back_with_the_same_keys(step_of):
    spec = fedfa(params={"probability": 1.0})
    other_seed = spec.model_copy(update={"seed": 1})
    same_weights = step_of(spec).weights

    def loss(spec=spec, **keys):
        step = step_of(spec, **keys)
        batch = step_of(fedfa(params={"probability": 1.0})).batch
        step = replace(step, weights=same_weights, batch=batch)
        return step.task.hooks.local_loss(step=step).item()

    assert loss() == loss()
    assert len({loss(), loss(number=1), loss(round=2), loss(client=1), loss(other_seed)}) == 5


def test_other_methods_terms_read_the_same_pass_and_batch_norm_moves_once(step_of):
    step = step_of(fedfa("resnet8?width=1", params={"probability": 1.0}))
    step.task.hooks.local_loss(step=step)
    assert step.buffers["body.bn1.num_batches_tracked"].item() == 1
    after = {name: value.clone() for name, value in step.buffers.items()}
    likelihoods = step.outputs.logits.log_softmax(1)[torch.arange(6), step.batch.labels]
    assert (-likelihoods.mean()).item() == step.task.hooks.local_loss(step=step_like(step)).item()
    assert all(torch.equal(step.buffers[name], value) for name, value in after.items())


def step_like(step):
    """The same step from fresh running statistics."""
    return replace(step, buffers={name: value.clone() for name, value in step.task.buffers.items()})


def test_augmentation_is_never_active_in_evaluation():
    run = tiny_run(fedfa(params={"probability": 1.0}))
    other = tiny_run(plain(run.spec))
    inputs = run.test.read(torch.arange(6))
    tensors = {**run.model.weights, **run.model.buffers, **given_for((6, 16), 6)}
    before = {name: value.clone() for name, value in tensors.items()}
    logits = run.model.forward(tensors, inputs, False).logits
    assert torch.equal(logits, other.model.forward(other.model.weights, inputs, False).logits)
    assert all(torch.equal(tensors[name], value) for name, value in before.items())
    assert not torch.equal(logits, run.model.forward(tensors, inputs, True).logits)


def given_for(channels, batch):
    """S and noise of all blocks."""
    names = [(statistic, block, width) for block, width in enumerate(channels) for statistic in ("mean", "std")]
    shared = {tensor_name("shared", s, b): torch.ones(width) for s, b, width in names}
    return {**shared, **draw_noise(channels, batch, 1.0, torch_generator(0, "noise"))}


@pytest.mark.parametrize("backbone", ["convnet", "resnet8?width=1"])
def test_probability_zero_is_fedavg_bit_for_bit_under_uniform_weighting_and_half_is_not(backbone):
    spec = fedfa(backbone, params={"probability": 0.0})
    wanted = final_state(tiny_run(plain(spec)))

    def common(state):
        buffers = {name: value for name, value in state.buffers.items() if name in wanted.buffers}
        return digest(replace(state, buffers=buffers))

    state = final_state(tiny_run(spec))
    assert common(state) == digest(wanted)
    assert set(state.buffers) - set(wanted.buffers) == {
        tensor_name("running", s, b) for s in ("mean", "std") for b in range(2 if backbone == "convnet" else 4)
    }
    assert common(final_state(tiny_run(fedfa(backbone)))) != digest(wanted)


@pytest.mark.parametrize(("own", "of_run"), [("uniform", "samples"), ("samples", "uniform")])
def test_weights_and_batch_norm_are_averaged_by_its_own_weighting_not_by_the_runs(own, of_run):
    backbone, params = "resnet8?width=1", {"probability": 0.0, "weighting": own}
    state = final_state(tiny_run(fedfa(backbone, params=params, weighting=of_run)))
    wanted, other = (final_state(tiny_run(plain(fedfa(backbone, weighting=each)))) for each in (own, of_run))
    ours = replace(state, buffers={name: state.buffers[name] for name in wanted.buffers})
    assert "body.bn1.running_mean" in wanted.buffers
    assert digest(ours) == digest(wanted) != digest(other)


def test_as_released_is_the_constant_factor_two_whatever_the_clients_tell():
    spec = fedfa(params={"probability": 1.0, "sharing": "as_released"}, rounds=3)
    run = tiny_run(spec)
    released = final_state(run)
    assert all(torch.allclose(channel_weights(s), torch.ones(1)) for s in released.server["fedfa"].values())
    per_channel = final_state(tiny_run(fedfa(params={"probability": 1.0}, rounds=3)))
    assert digest(replace(per_channel, buffers={})) != digest(replace(released, buffers={}))
    assert not any(torch.allclose(channel_weights(s), torch.ones(1)) for s in per_channel.server["fedfa"].values())


def first_round(run):
    """State and record after round 1."""
    state = run.initial_state()
    start(run, state)
    return train_round(run, state)


def test_running_means_are_averaged_and_go_on_from_the_average():
    run = tiny_run(fedfa(params={"probability": 1.0}))
    first, record = first_round(run)
    name = tensor_name("running", "std", 0)
    assert not torch.equal(first.buffers[name], run.model.buffers[name])
    sent = broadcast(run, first, record.cohort[0])
    task = client_task(run, first, 2, 0, record.cohort[0], sent)
    assert torch.equal(task.buffers[name], first.buffers[name])
    assert torch.equal(task.payload["fedfa.shared.std.0"], first.server["fedfa"]["fedfa.shared.std.0"])
    assert first.server["fedfa"]["fedfa.shared.std.0"].max() > 0


def test_sent_are_four_vectors_of_every_block_down_and_two_up():
    run, other = tiny_run(fedfa()), tiny_run(plain(fedfa()))
    _, record = first_round(run)
    assert sum(block_channels(tiny_backbone("convnet").module)) == 22
    model, vectors = other.info.round_bytes, 2 * 4 * 22
    assert record.bytes_down == 2 * (model + 2 * vectors)
    assert record.bytes_up == 2 * (model + vectors)
