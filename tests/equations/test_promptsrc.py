"""PromptSRC: Khattak et al. 2023."""

from math import exp, log

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, normalize

from fedbench.models.prompts.context import word_context
from fedbench.rounds.loop import evaluate, predict, train_round
from fedbench.testing import final_state, tiny_backbone, tiny_dataset
from fedbench.toolkit.losses import mean_divergence
from fedbench_methods.promptsrc import MEAN, NEXT, WEIGHT, joined, log_weight
from tests.equations.kit import CLIP, D_T, D_V, all_of, drawn_like, runs
from tests.equations.test_maple import images_by_hand, texts_by_hand

src_run = runs("promptsrc")


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_each_tower_takes_its_own_prompts_in_as_many_layers_as_it_has(depth):
    run, clip = src_run(params={"depth": depth, "tokens": 3}), tiny_backbone(CLIP)
    weights, images = drawn_like(run, 0.5), run.test.read(torch.arange(4))
    prompts = [weights[f"text.{layer}"] for layer in range(min(depth, 2))]
    tokens = [weights[f"image.{layer}"] for layer in range(min(depth, 4))]
    assert len(weights) == len(prompts) + len(tokens)
    outputs = run.model.forward(weights, images, False)
    texts, features = texts_by_hand(prompts, tiny_dataset().classnames, ""), images_by_hand(tokens, images)
    torch.testing.assert_close(outputs.texts, texts, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.features, features, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.logits, clip.logit_scale * features @ texts.T, rtol=0, atol=1e-3)


def test_divergence_by_hand():
    # q0 = (3/4, 1/4), q = (1/2, 1/2): 3/4 log(3/2) + 1/4 log(1/2); the other way round it would be another number
    found = mean_divergence(torch.tensor([[1.0, 1.0]]), torch.tensor([[log(3.0), 0.0]]))
    assert found.item() == pytest.approx(0.75 * log(1.5) + 0.25 * log(0.5))


def test_the_whole_loss_is_that_of_the_equations(make_step):
    params = {"text_weight": 7.0, "image_weight": 5.0, "logit_weight": 3.0}
    run, clip = src_run(params=params), tiny_backbone(CLIP)
    weights = {name: value.requires_grad_() for name, value in drawn_like(run, 0.5).items()}
    images, labels = run.train.read(torch.arange(6)), [0, 1, 2, 3, 0, 1]
    step = make_step(
        run.model, images, labels, weights=weights, method="promptsrc", params={"promptsrc": params}, num_classes=4
    )
    found = step.task.hooks.local_objective(step=step)
    made = run.model.forward(weights, images, False)
    texts = clip.text_features(tiny_dataset().classnames, run.spec.templates)
    frozen = normalize(clip.module.encode_image(images), dim=-1)
    known = clip.logit_scale * frozen @ texts.T
    wanted = cross_entropy(made.logits, torch.tensor(labels))
    wanted = (
        wanted + 7 * (made.texts - texts).abs().sum() / (4 * 128) + 5 * (made.features - frozen).abs().sum() / (6 * 128)
    )
    wanted = wanted + 3 * kl_div(made.logits.log_softmax(1), known.softmax(1), reduction="sum") / (6 * 4)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4)


def test_without_terms_it_is_cross_entropy(make_step):
    off = {"text_weight": 0.0, "image_weight": 0.0, "logit_weight": 0.0}
    run = src_run(params=off)
    images = run.train.read(torch.arange(4))
    weights = {name: value.clone().requires_grad_() for name, value in run.model.weights.items()}
    step = make_step(
        run.model, images, [0, 1, 2, 3], weights=weights, method="promptsrc", params={"promptsrc": off}, num_classes=4
    )
    wanted = cross_entropy(run.model.forward(weights, images, False).logits, torch.arange(4))
    assert step.task.hooks.local_objective(step=step).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_weights_of_rounds_by_hand():
    # of 20 rounds μ = 15 and σ = 1: round 13 has e^-2 of round 15's
    assert log_weight(13, 15.0, 1.0) == pytest.approx(-2.0) and log_weight(15, 15.0, 1.0) == 0.0
    # weights 3 so far and 1 to come: 3/4 of the mean and 1/4 of the new
    kept = {MEAN + "p": torch.tensor([0.0, 4.0]), WEIGHT: torch.tensor(log(3.0)), NEXT: torch.tensor(0.0)}
    means, total = joined(kept, {"p": torch.tensor([8.0, 4.0])})
    torch.testing.assert_close(means["p"], torch.tensor([2.0, 4.0]))
    assert total.exp().item() == pytest.approx(4.0)


def test_predictions_are_by_the_gaussian_mean_over_the_rounds_so_far():
    # R = 4, μ = 0.5 R = 2, σ = 0.25 R = 1: w = e^-1/2, 1, e^-1/2 for rounds 1 to 3
    run = src_run(params={"mean": 0.5, "deviation": 0.25}, lr=0.5)
    state, rounds = run.initial_state(), []
    for _ in range(3):
        state, _ = train_round(run, state)
        rounds.append(state.weights)
    shares = torch.tensor([exp(-0.5), 1.0, exp(-0.5)])
    shares = shares / shares.sum()
    wanted = {name: sum(s * w[name] for s, w in zip(shares, rounds, strict=True)) for name in state.weights}
    found = predict(run, state, run.test)
    logits = run.model.forward(wanted, all_of(run.test), False).logits
    torch.testing.assert_close(found.scores, logits, rtol=0, atol=1e-3)
    alone = run.model.forward(state.weights, all_of(run.test), False).logits
    assert (alone - logits).abs().max() > 1e-2


def test_training_goes_on_from_the_last_round_and_weights_too_small_for_floats_are_no_division_by_zero():
    plain, narrow = (
        src_run(params={"gaussian": False}, lr=0.5),
        src_run(params={"deviation": 0.01, "mean": 1.0}, lr=0.5),
    )
    one, other = final_state(plain), final_state(narrow)
    assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())
    assert "promptsrc" not in one.server
    # after round 1 of 4, three rounds or 75 deviations from the mean
    state, _ = train_round(narrow, narrow.initial_state())
    assert torch.equal(predict(narrow, state, narrow.test).scores, predict(plain, state, plain.test).scores)


def test_words_start_it_and_all_prompts_are_sent_and_learn():
    run, clip = src_run(lr=0.05, rounds=2), tiny_backbone(CLIP)
    assert torch.equal(run.model.weights["text.0"], word_context(clip))
    assert run.info.round_bytes == 4 * (2 * 4 * D_T + 4 * 4 * D_V)
    after = final_state(run).weights
    assert all(not torch.equal(after[name], value) for name, value in run.model.weights.items())


def test_own_models_beside_it_are_those_of_one_round():
    run = src_run("promptsrc+ditto+fedavgm", rounds=2)
    state = final_state(run)
    metrics, predictions = evaluate(run, state)
    assert metrics["personal_mean_client_accuracy"] >= 0
    inputs = all_of(run.test)
    for client, labels in predictions.by_client.items():
        own = state.own.get(client, {})
        weights = {name: own.get(f"ditto/{name}", run.model.weights[name]) for name in src_run().model.weights}
        assert torch.equal(labels, run.model.forward(weights, inputs, False).logits.argmax(1))
