"""ProDA: Lu et al. 2022."""

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fedbench.models.prompts.context import prompt_tower
from fedbench.testing import tiny_backbone, tiny_dataset
from fedbench_methods.proda import CONTEXTS, closeness, positions, variances
from tests.equations.kit import coop_texts, drawn, runs

proda_run = runs("proda", context_length=4, prompts=8)


def test_variance_by_hand():
    # two draws of two classes in two dimensions: δ_0 = ±(1, 0), δ_1 = ±(3, 2); f = (0.6, 0.8), f² = (0.36, 0.64).
    # δ_0 - δ_1 = ∓(2, 2): 2 (0.36 * 4 + 0.64 * 4) / 3 = 8/3 against the other class, 0 against itself
    deviations = torch.tensor([[[1.0, 0.0], [3.0, 2.0]], [[-1.0, 0.0], [-3.0, -2.0]]])
    features = torch.tensor([[0.6, 0.8], [1.0, 0.0]])
    found = variances(features, deviations, torch.tensor([0, 1]))
    # f = (1, 0): 2 * 4 / 3
    torch.testing.assert_close(found, torch.tensor([[0.0, 8 / 3], [8 / 3, 0.0]]))


def test_variance_is_that_of_differences_dimension_by_dimension():
    deviations, features, labels = drawn(5, 3, 6, scale=0.5), drawn(4, 6, seed=1, scale=0.5), torch.tensor([2, 0, 1, 2])
    for sample in range(4):
        apart = deviations[:, labels[sample], None] - deviations
        wanted = (features[sample] ** 2 * apart**2).sum((0, 2)) / 6
        torch.testing.assert_close(variances(features, deviations, labels)[sample], wanted)


def test_closeness_by_hand():
    # cosines 0, -1 and 0 of three pairs; the sign and a text with itself have no say
    texts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    assert closeness(texts).item() == pytest.approx(1 / 3)


def test_a_quarter_stands_behind_the_name_and_a_quarter_around_it():
    assert positions(32) == [("front", 8), ("middle", 8), ("end", 16)]
    assert positions(6) == [("front", 1), ("middle", 1), ("end", 4)]
    assert positions(2) == [("front", 0), ("middle", 0), ("end", 2)]


def texts_of(contexts):
    clip, names, found = tiny_backbone("clip:embedded"), tiny_dataset().classnames, []
    for position, count in positions(len(contexts)):
        tower = prompt_tower(clip, names, contexts.shape[1], position)
        start = sum(len(each) for each in found)
        found.append(torch.stack([tower.encode(each) for each in contexts[start : start + count]]))
    return torch.cat(found)


def test_predictions_are_by_the_mean_text_at_its_own_length():
    run, clip = proda_run(), tiny_backbone("clip:embedded")
    contexts, inputs = drawn(8, 4, 64, scale=0.5), run.test.read(torch.arange(5))
    outputs = run.model.forward({CONTEXTS: contexts}, 3 * inputs, False)
    mean = texts_of(contexts).mean(0)
    assert mean.norm(dim=1).max() < 0.999
    wanted = clip.logit_scale * normalize(inputs, dim=1) @ mean.T
    torch.testing.assert_close(outputs.logits, wanted, rtol=0, atol=1e-4)
    # the last of them stand before the name, as CoOp's do
    texts = torch.stack([coop_texts(each, tiny_dataset().classnames) for each in contexts[4:]])
    torch.testing.assert_close(texts_of(contexts)[4:], texts, rtol=0, atol=1e-5)


def test_the_whole_loss_is_that_of_the_equations(make_step):
    params = {"context_length": 4, "prompts": 8, "alpha": 2.0}
    run, clip = proda_run(params=params), tiny_backbone("clip:embedded")
    inputs, labels = run.train.read(torch.arange(6)), torch.tensor([0, 1, 2, 3, 0, 1])
    contexts = drawn(8, 4, 64, scale=0.5).requires_grad_()
    step = make_step(
        run.model,
        inputs,
        labels.tolist(),
        weights={CONTEXTS: contexts},
        method="proda",
        params={"proda": params},
        num_classes=4,
    )
    found = step.task.hooks.local_objective(step=step)
    texts, features, scale = texts_of(contexts), normalize(inputs, dim=1), clip.logit_scale
    centred = texts - texts.mean(0)
    apart = centred[:, labels][:, :, None] - centred[:, None]
    spread = (features.square()[:, None] * apart.square()).sum((0, 3)) / 9
    alone = coop_texts_without_names(contexts)
    cosines = (alone @ alone.T)[~torch.eye(8, dtype=torch.bool)]
    wanted = cross_entropy(scale * features @ texts.mean(0).T + scale**2 / 2 * spread, labels)
    assert found.item() == pytest.approx((wanted + 2.0 * cosines.abs().mean()).item(), rel=1e-4)


def coop_texts_without_names(contexts):
    clip = tiny_backbone("clip:embedded")
    module = clip.module
    tokens = clip.tokenizer([" ".join(["X"] * contexts.shape[1]) + "."]).expand(len(contexts), -1)
    x = module.token_embedding(tokens).clone()
    x[:, 1 : 1 + contexts.shape[1]] = contexts
    x = module.ln_final(module.transformer(x + module.positional_embedding, attn_mask=module.attn_mask))
    return normalize(x[torch.arange(len(contexts)), tokens.argmax(1)] @ module.text_projection, dim=-1)


def test_equal_contexts_have_a_variance_only_by_their_places():
    run = proda_run(params={"prompts": 4})
    inputs = run.train.read(torch.arange(4))
    one = drawn(1, 4, 64, scale=0.5)
    contexts = torch.cat([one, one, one, one])
    made = run.model.forward({CONTEXTS: contexts}, inputs, True)
    assert made.deviations.abs().max() > 1e-3
    only_end = variances(made.features, made.deviations[2:] - made.deviations[2:].mean(0), torch.arange(4))
    assert only_end.abs().max() < 1e-6
