"""FedPGP: Cui et al. 2024, a shared prompt with a private low-rank addition."""

import math
from dataclasses import replace

import open_clip
import pytest
import torch
from open_clip.model import CLIP
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from fedbench.core.types import Model
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.inputs import PixelTransform
from fedbench.models.prompts.context import prompt_tower
from fedbench.rounds.loop import evaluate, rounds
from fedbench.testing import final_state, tiny_backbone, tiny_dataset, tiny_spec
from fedbench.toolkit.local_training import step_loss
from fedbench_methods.fedpgp import PersonalOutputs, contrast
from tests.equations.kit import drawn, runs, task_of

SHARED, LEFT, RIGHT = "prompt.global", "prompt.U", "prompt.V"
RECIPE = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}


run_of = runs("fedpgp")


def units(seed):
    return normalize(drawn(4, 6, seed=seed), dim=-1)


def test_the_contrast_worked_out():
    # by class: cosines to the anchor 0 and 1, between the prompts 0.6 and 0; tau = 0.5
    anchor = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    shared = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    personal = torch.tensor([[0.8, 0.6], [1.0, 0.0]])
    wanted = -(math.log(1 / (1 + math.exp(1.2))) + math.log(math.exp(2) / (math.exp(2) + 1))) / 2
    assert contrast(anchor, shared, personal, 0.5).item() == pytest.approx(wanted, rel=1e-6)


def test_of_three_equal_texts_it_is_the_logarithm_of_two():
    for tau in (0.05, 0.5, 1.0):
        assert contrast(units(0), units(0), units(0), tau).item() == pytest.approx(math.log(2), rel=1e-6)


def test_it_pulls_the_shared_text_to_the_anchor_and_pushes_the_personal_one_away():
    anchor, shared, personal = units(0), units(1).requires_grad_(), units(2).requires_grad_()
    to_shared, to_personal = torch.autograd.grad(contrast(anchor, shared, personal, 0.5), (shared, personal))
    # by class, with the share w of the push: dL/dz^s = w (z - z0) / (K tau), dL/dz = w z^s / (K tau)
    with torch.no_grad():
        pull, push = (anchor * shared).sum(1, keepdim=True), (shared * personal).sum(1, keepdim=True)
        share = torch.exp(push / 0.5) / (torch.exp(push / 0.5) + torch.exp(pull / 0.5))
        torch.testing.assert_close(to_shared, share * (personal - anchor) / (4 * 0.5))
        torch.testing.assert_close(to_personal, share * shared / (4 * 0.5))


def test_logits_are_of_the_personal_texts_and_both_texts_are_in_the_outputs():
    run, clip = run_of(params={"context_length": 4, "bottleneck": 3}), tiny_backbone("clip:embedded")
    weights = {SHARED: drawn(4, 64, scale=0.1), LEFT: drawn(4, 3, seed=1), RIGHT: drawn(3, 64, seed=2, scale=0.1)}
    inputs = run.test.read(torch.arange(5))
    outputs = run.model.forward(weights, 3 * inputs, False)
    tower = prompt_tower(clip, tiny_dataset().classnames, 4)
    addition = sum(torch.outer(weights[LEFT][:, i], weights[RIGHT][i]) for i in range(3))
    shared, own = tower.encode(weights[SHARED]), tower.encode(weights[SHARED] + addition)
    torch.testing.assert_close(outputs.shared, shared)
    torch.testing.assert_close(outputs.texts, own)
    assert (own - shared).abs().max() > 0.01
    torch.testing.assert_close(outputs.logits, clip.logit_scale * normalize(inputs, dim=1) @ own.T, rtol=0, atol=1e-4)
    torch.testing.assert_close(outputs.features, normalize(inputs, dim=1))


def test_all_three_are_drawn_alike_small_and_apart():
    weights = run_of().model.weights
    assert {name: tuple(t.shape) for name, t in weights.items()} == {SHARED: (16, 64), LEFT: (16, 8), RIGHT: (8, 64)}
    for tensor in weights.values():
        assert tensor.std().item() == pytest.approx(0.02, rel=0.2) and abs(tensor.mean().item()) < 0.005
    first = [tensor.flatten()[:100] for tensor in weights.values()]
    assert not any(torch.equal(first[i], first[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_a_step_is_cross_entropy_and_mu_times_the_contrast(make_step):
    texts, shared, anchor, logits = units(0), units(1), units(2), drawn(3, 4)
    model = Model({}, None, constants={"anchor": anchor})
    outputs = PersonalOutputs(logits, drawn(3, 6), texts, shared)
    labels = [0, 3, 1]
    base = cross_entropy(logits, torch.tensor(labels))
    for mu, tau in ((0.5, 0.5), (2.0, 0.1), (0.0, 0.5)):
        params = {"fedpgp": {"mu": mu, "tau": tau}}
        step = make_step(model, drawn(3, 6), labels, outputs=outputs, method="fedpgp", params=params, num_classes=4)
        torch.testing.assert_close(step_loss(step), base + mu * contrast(anchor, shared, texts, tau))
        assert (step.task.hooks.loss_terms(step=step) == []) == (mu == 0)


def test_the_anchor_is_of_the_runs_templates_or_of_placeholders():
    names, clip = tiny_dataset().classnames, tiny_backbone("clip:embedded")
    templates = ("a photo of a {}.", "{}")
    by_template = [normalize(clip.encode_text([t.format(name) for name in names]), dim=-1) for t in templates]
    wanted = normalize(sum(by_template), dim=-1)
    torch.testing.assert_close(run_of(templates=templates).model.constants["anchor"], wanted)
    found = run_of(params={"anchor": "placeholder", "context_length": 3}, templates=templates).model.constants["anchor"]
    wanted = normalize(clip.encode_text([f"X X X {name}." for name in names]), dim=-1)
    torch.testing.assert_close(found, wanted)
    assert not found.requires_grad


def without_addition(run):
    """The run with U = V = 0, which have no gradient then and stay."""
    weights = {name: torch.zeros_like(t) if name in run.private else t for name, t in run.model.weights.items()}
    return replace(run, model=replace(run.model, weights=weights))


def test_without_addition_and_contrast_it_is_promptfl():
    ours = without_addition(run_of(params={"mu": 0.0}, rounds=2, **RECIPE))
    theirs = run_of("promptfl", rounds=2, **RECIPE)
    assert torch.equal(ours.model.weights[SHARED], theirs.model.weights["prompt.context"])
    one, other = final_state(ours), final_state(theirs)
    assert (other.weights["prompt.context"] - theirs.model.weights["prompt.context"]).abs().max() > 1e-3
    torch.testing.assert_close(one.weights[SHARED], other.weights["prompt.context"], rtol=0, atol=1e-5)
    assert all(not own[name].any() for own in one.own.values() for name in (LEFT, RIGHT))
    metrics, wanted = evaluate(ours, one)[0], evaluate(theirs, other)[0]
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    assert metrics["personal_mean_global_accuracy"] == pytest.approx(wanted["global_accuracy"])
    # the contrast moves the shared prompt elsewhere
    moved = final_state(without_addition(run_of(rounds=2, **RECIPE)))
    assert (moved.weights[SHARED] - one.weights[SHARED]).abs().max() > 1e-3


def test_the_server_changes_the_shared_prompt_alone():
    run = run_of(rounds=3)
    assert run.private == {LEFT, RIGHT} and run.info.round_bytes == 4 * 16 * 64
    held, shared = {}, run.model.weights[SHARED]
    for state, record, _ in rounds(run, run.initial_state()):
        for client, own in held.items():
            if client not in record.cohort:
                assert all(torch.equal(state.own[client][name], own[name]) for name in (LEFT, RIGHT))
        if record.round:
            assert record.bytes_up == record.bytes_down == 2 * 4 * 16 * 64
            assert not torch.equal(state.weights[SHARED], shared)
        shared, held = state.weights[SHARED], {k: dict(own) for k, own in state.own.items()}
    assert len({own[LEFT].sum().item() for own in held.values()} | {run.model.weights[LEFT].sum().item()}) >= 3
    # what a client trains from in the next round is what it had
    for client, own in held.items():
        received = task_of(run, client, state=state, round=4).received
        assert all(torch.equal(received[name], own[name]) for name in (LEFT, RIGHT))
        assert torch.equal(received[SHARED], state.weights[SHARED])


def test_the_global_model_is_the_shared_prompt_and_own_models_have_the_clients_addition():
    run = run_of(scenario={"participation": 1.0})
    state = run.initial_state()
    weights = {SHARED: drawn(16, 64, scale=0.5), LEFT: drawn(16, 8, seed=1), RIGHT: drawn(8, 64, seed=2, scale=0.2)}
    own = {k: {LEFT: drawn(16, 8, seed=3 + k), RIGHT: drawn(8, 64, seed=6 + k, scale=0.2)} for k in range(3)}
    final = replace(state, weights=weights, round=run.spec.training.rounds)
    final.own.update(own)
    predictions = evaluate(run, final)[1]
    tower = prompt_tower(tiny_backbone("clip:embedded"), tiny_dataset().classnames, 16)
    images = normalize(run.test.read(torch.arange(len(run.test))), dim=-1)

    def labels(context):
        return (images @ tower.encode(context).T).argmax(1)

    assert torch.equal(predictions.labels, labels(weights[SHARED]))
    for client in range(4):
        added = own.get(client, weights)
        assert torch.equal(predictions.by_client[client], labels(weights[SHARED] + added[LEFT] @ added[RIGHT]))
    answers = [predictions.labels, *predictions.by_client.values()]
    assert len({tuple(each.tolist()) for each in answers}) == 5


def test_recipe_and_training_lowers_the_loss():
    chosen = tiny_spec("fedpgp").training
    assert (chosen.optimizer, chosen.lr, chosen.momentum, chosen.weight_decay) == ("sgd", 1e-3, 0.9, 5e-4)
    run = run_of(scenario={"participation": 1.0}, lr=0.05)
    state = final_state(run)
    task = task_of(run, 0, state=state, round=5)
    inputs = task.inputs.read(torch.arange(len(task.inputs)))

    def loss(weights):
        outputs = run.model.forward(weights, inputs, False)
        term = contrast(run.model.constants["anchor"], outputs.shared, outputs.texts, 0.5)
        return (cross_entropy(outputs.logits, task.labels) + 0.5 * term).item()

    assert loss(task.received) < loss(run.model.weights) - 0.05


def test_it_trains_on_a_resnet(monkeypatch):
    vision = {"image_size": 64, "layers": (1, 1, 1, 1), "width": 8, "head_width": 8}
    text = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = CLIP(8, open_clip.CLIPVisionCfg(**vision), open_clip.CLIPTextCfg(**text))
        for layer in module.visual.modules():
            if isinstance(layer, nn.BatchNorm2d):
                nn.init.uniform_(layer.weight, 0.5, 1.5)
    transform = PixelTransform((0.5,) * 3, (0.5,) * 3, 64)
    module.eval().requires_grad_(False)
    clip = ClipBackbone("clip:small", module, open_clip.SimpleTokenizer(), transform, 8)
    monkeypatch.setattr("fedbench.testing.tiny.tiny_backbone", lambda name: clip)
    run = run_of(params={"anchor": "placeholder"}, rounds=1)
    state = final_state(run)
    assert not torch.equal(state.weights[SHARED], run.model.weights[SHARED])
    assert all(torch.isfinite(tensor).all() for own in state.own.values() for tensor in own.values())
