"""FedAPT: Su et al. 2024: a meta prompt read through the keys of clients, mixed for every test image."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fedbench.core.errors import FedbenchError
from fedbench.core.method.tasks import StartTask
from fedbench.rounds.loop import train_round
from fedbench.testing import final_state
from fedbench_methods.fedapt import CONTEXT, KEY, NUMBER, QUERY, FedAPT, FedAPTParams, key_weights
from tests.equations.kit import runs

apt_run = runs("fedapt", context_length=2)


promptfl_run = runs("promptfl", context_length=2, per_class=True)
"""PromptFL with a context for every class."""


def keys(run, client):
    """The keys that the run's clients hold, and what a client is told."""
    from fedbench.rounds.messages import broadcast

    return broadcast(run, run.initial_state(), client).held


def test_weights_are_a_softmax_of_z_scores():
    # (0, 2, 4): mean 2, unbiased deviation 2: (-1, 0, 1) / tau
    weights = key_weights(torch.tensor([[0.0, 2.0, 4.0]]), 0.5)[0]
    total = math.exp(-2) + 1 + math.exp(2)
    assert weights.tolist() == pytest.approx([math.exp(-2) / total, 1 / total, math.exp(2) / total])
    # neither shift nor size of the answers counts
    torch.testing.assert_close(key_weights(torch.tensor([[10.0, 10.2, 10.4]]), 0.5)[0], weights, rtol=1e-4, atol=0)
    assert key_weights(torch.tensor([[0.0, 2.0, 4.0]]), 0.01)[0].tolist() == pytest.approx([0, 0, 1])
    assert key_weights(torch.tensor([[3.0], [-1.0]]), 0.01).tolist() == [[1.0], [1.0]]
    assert key_weights(torch.tensor([[2.0, 2.0]]), 0.01).tolist() == [[0.5, 0.5]]


def test_keys_are_uniform_of_the_seed_apart_for_every_client_and_not_sent():
    run = apt_run()
    held = [keys(run, client) for client in range(4)]
    assert [int(each[NUMBER]) for each in held] == [0, 1, 2, 3]
    values = torch.stack([each[KEY] for each in held])
    assert values.shape == (4, 2, 64) and values.min() >= 0 and values.max() < 1
    assert values.mean().item() == pytest.approx(0.5, abs=0.05) and not torch.equal(values[0], values[1])
    _, record = train_round(run, run.initial_state())
    # C M d_t + N d floats for each of two clients
    assert record.bytes_down == record.bytes_up == 2 * 4 * (4 * 2 * 64 + 4 * 128)


def test_loss_is_of_the_keyed_prompt_and_of_whose_images_these_are(make_step):
    run = apt_run()
    inputs, key = run.test.read(torch.arange(6)), keys(run, 2)[KEY]
    weights = {name: value.clone().requires_grad_() for name, value in run.model.weights.items()}
    told = {KEY: key, NUMBER: torch.tensor(2)}
    step = make_step(run.model, inputs, [0, 1, 2, 3, 0, 1], num_classes=4, weights=weights, payload=told)
    plain = promptfl_run()
    logits = plain.model.forward({CONTEXT: weights[CONTEXT] * (1 + key)}, inputs, True).logits
    answers = inputs @ weights[QUERY].T
    wanted = cross_entropy(logits, step.labels) + cross_entropy(answers, torch.full((6,), 2))
    loss = FedAPT(FedAPTParams(context_length=2)).local_loss(step)
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    assert all(weight.grad.abs().max() > 0 for weight in weights.values())


@pytest.mark.parametrize("tau", [0.01, 1.0])
def test_each_image_is_tested_by_its_own_mixture_of_keys(tau):
    run = apt_run(params={"tau": tau})
    inputs, all_keys = run.test.read(torch.arange(5)), torch.stack([keys(run, client)[KEY] for client in range(4)])
    weights = key_weights(inputs @ run.model.weights[QUERY].T, tau)
    logits = run.model.forward(run.model.weights, inputs, False).logits
    for image in range(5):
        mixed = sum(w * key for w, key in zip(weights[image], all_keys, strict=True))
        alone = run.model.forward({**run.model.weights, KEY: mixed}, inputs[image : image + 1], False).logits
        torch.testing.assert_close(logits[image], alone[0], rtol=1e-4, atol=1e-4)


def test_the_nearest_key_is_the_limit_of_a_small_tau():
    run, hard = apt_run(params={"tau": 1e-3}), apt_run(params={"inference": "nearest"})
    inputs = run.test.read(torch.arange(12))
    soft = run.model.forward(run.model.weights, inputs, False).logits
    torch.testing.assert_close(hard.model.forward(run.model.weights, inputs, False).logits, soft, rtol=1e-3, atol=1e-3)


def test_without_keys_it_is_class_specific_promptfl():
    run = apt_run(params={"key_scale": 0.0}, rounds=2, executor="sequential")
    budget = {name: getattr(run.spec.training, name) for name in ("lr", "momentum", "weight_decay")}
    plain = promptfl_run(executor="sequential", rounds=2, **budget)
    one, other = final_state(run), final_state(plain)
    assert torch.equal(one.weights[CONTEXT], other.weights[CONTEXT])
    inputs = run.test.read(torch.arange(8))
    torch.testing.assert_close(
        run.model.forward(one.weights, inputs, False).logits, plain.model.forward(other.weights, inputs, False).logits,
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    assert normalize(inputs).shape == (8, 128)


def test_more_clients_than_keys_are_refused():
    run = apt_run()
    task = StartTask([None] * 5, run.model, run.spec, {})
    with pytest.raises(FedbenchError, match="scenario.clients"):
        FedAPT(FedAPTParams()).start(task)
