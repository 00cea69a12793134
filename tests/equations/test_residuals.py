"""The residuals of low-rank additions in every pass: what clients report, what they train on, what others compare."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedbench.core.method.tasks import LocalStep
from fedbench.rounds.finetuning import finetuned_metrics
from fedbench.rounds.loop import evaluate, predict
from fedbench.testing import tiny_run
from fedbench.toolkit.local_training import batch_at
from fedbench.toolkit.prototypes import client_features
from fedbench_methods import prograd
from fedbench_methods.shared.reweighting import loss_and_accuracy
from tests.equations.kit import lora_spec, task_of


def with_large_residuals(run):
    """The state before training, but for residuals that turn the predictions round."""
    generator, state = torch.Generator().manual_seed(1), run.initial_state()
    drawn = {name: 0.3 * torch.randn(zero.shape, generator=generator) for name, zero in state.buffers.items()}
    return replace(state, buffers=drawn)


@pytest.mark.parametrize("method", ["flora", "fedex-lora"])
def test_a_client_sees_the_model_that_is_evaluated_whatever_it_does_with_it(method):
    run = tiny_run(lora_spec(f"clip-lora+{method}"))
    state = with_large_residuals(run)
    task = task_of(run, state=state, round=2)
    wanted = predict(run, state, task.inputs).scores
    plain = predict(run, run.initial_state(), task.inputs).scores
    assert (wanted - plain).abs().max() > 0.1
    loss, _ = loss_and_accuracy(task, task.received, task.buffers)
    assert loss == pytest.approx(float(cross_entropy(wanted, task.labels)), rel=1e-4)
    index = torch.arange(len(task.inputs))
    step = LocalStep(task.received, task.buffers, batch_at(task, index, torch.Generator()), task, 0)
    for outputs in (step.outputs, step.received_outputs):
        torch.testing.assert_close(outputs.logits, wanted, rtol=1e-4, atol=1e-4)


def test_features_of_images_are_those_with_the_residual():
    run = tiny_run(lora_spec("clip-lora+flora", {"encoders": "image"}))
    state = with_large_residuals(run)
    task = task_of(run, state=state, round=2)
    features = client_features(task, task.received, task.buffers)
    inputs = task.inputs.read(torch.arange(len(task.inputs)))
    wanted = run.model.forward({**state.weights, **state.buffers}, inputs, False).features
    torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-4)
    assert (features - run.model.forward(state.weights, inputs, False).features).abs().max() > 0.01


def test_new_clients_are_tuned_from_the_merged_weights():
    scenario = {"holdout_clients": 0.3}
    run = tiny_run(lora_spec("clip-lora+flora", scenario=scenario, lr=1e-12, finetune_epochs=1))
    state = replace(with_large_residuals(run), round=2)
    metrics = evaluate(run, state)[0]
    tuned = finetuned_metrics(run, state)
    assert tuned["finetuned_heldout_mean_client_accuracy"] == metrics["heldout_mean_client_accuracy"]
    other = evaluate(run, replace(run.initial_state(), round=2))[0]
    assert metrics["heldout_mean_client_accuracy"] != other["heldout_mean_client_accuracy"]


def test_gradients_that_a_method_takes_itself_are_of_the_merged_weights(monkeypatch):
    run = tiny_run(lora_spec("clip-lora+flora+prograd"))
    state = with_large_residuals(run)
    task = task_of(run, state=state, round=2)
    weights = {name: value.clone().requires_grad_() for name, value in task.received.items()}
    batch = batch_at(task, torch.arange(len(task.inputs)), torch.Generator())
    measured, plain = [], prograd.divergence
    monkeypatch.setattr(prograd, "divergence", lambda *args: measured.append(plain(*args)) or measured[-1])
    run.assembly.hooks.local_gradients(step=LocalStep(weights, task.buffers, batch, task, 0))
    run.assembly.hooks.local_gradients(step=LocalStep(weights, run.model.buffers, batch, task, 0))
    # B = 0: without residuals the model is zero-shot CLIP, from which nothing diverges
    assert measured[0].item() > 0.1 > 1e-5 > abs(measured[1].item())


def test_models_of_clients_own_add_to_the_merged_weights_and_have_no_residual_apart():
    run = tiny_run(lora_spec("clip-lora+flora+ditto"))
    assert not any(name.endswith(".residual") for name in run.private)
    state = with_large_residuals(run)
    answer = predict(run, state, run.test, clients=(0,))
    # its own factors are those of the beginning, B = 0
    assert torch.equal(answer.by_client[0], answer.labels)
    assert not torch.equal(answer.labels, predict(run, run.initial_state(), run.test).labels)
