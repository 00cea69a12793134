"""MaPLe: Khattak et al. 2023."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear, normalize

from fedbench.core.errors import FedbenchError
from fedbench.models.prompts.context import random_context
from fedbench.testing import tiny_backbone, tiny_dataset, tiny_spec
from fedbench_methods.maple import couplings, initial_words
from tests.equations.kit import CLIP, D_T, D_V, drawn_like, runs

maple_run = runs("maple")


def texts_by_hand(prompts, names, kept):
    """Text features through all places of the tower by open_clip's own blocks."""
    clip, length = tiny_backbone(CLIP), len(prompts[0])
    module = clip.module
    tokens = clip.tokenizer([" ".join(["X"] * length) + f" {kept} {name}." for name in names])
    x = module.token_embedding(tokens)
    x[:, 1 : 1 + length] = prompts[0]
    x = x + module.positional_embedding
    for number, layer in enumerate(module.transformer.resblocks):
        if 0 < number < len(prompts):
            x = torch.cat([x[:, :1], prompts[number].expand(len(names), -1, -1), x[:, 1 + length :]], dim=1)
        x = layer(x, attn_mask=module.attn_mask)
    x = module.ln_final(x)[torch.arange(len(names)), tokens.argmax(1)]
    return normalize(x @ module.text_projection, dim=-1)


def images_by_hand(tokens, images):
    """Image features by open_clip's own blocks, tokens behind the patches."""
    visual, length = tiny_backbone(CLIP).module.visual, len(tokens[0])
    seen = []
    handle = visual.ln_pre.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    visual(images)
    handle.remove()
    x = visual.ln_pre(torch.cat([seen[0], tokens[0].expand(len(images), -1, -1)], dim=1))
    for number, layer in enumerate(visual.transformer.resblocks):
        if 0 < number < len(tokens):
            x = torch.cat([x[:, :-length], tokens[number].expand(len(images), -1, -1)], dim=1)
        x = layer(x)
    return normalize(visual.ln_post(x)[:, 0] @ visual.proj, dim=-1)


@pytest.mark.parametrize(
    ("params", "kept"), [({}, "of a"), ({"context_length": 4}, ""), ({"context_length": 3, "init": "random"}, "")]
)
@pytest.mark.parametrize("depth", [1, 2])
def test_both_towers_take_the_prompts_of_every_layer(params, kept, depth):
    run, clip = maple_run(params={**params, "depth": depth}), tiny_backbone(CLIP)
    weights, images = drawn_like(run, 0.5), run.test.read(torch.arange(5))
    prompts = [weights[f"prompt.{j}"] for j in range(depth)]
    tokens = [linear(p, weights[f"coupling.{j}.weight"], weights[f"coupling.{j}.bias"]) for j, p in enumerate(prompts)]
    outputs = run.model.forward(weights, images, True)
    texts, features = texts_by_hand(prompts, tiny_dataset().classnames, kept), images_by_hand(tokens, images)
    torch.testing.assert_close(outputs.texts, texts, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.features, features, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.logits, clip.logit_scale * features @ texts.T, rtol=0, atol=1e-3)


def test_deeper_prompts_and_their_own_maps_count():
    run = maple_run()
    weights, images = drawn_like(run, 0.5), run.test.read(torch.arange(3))
    before = run.model.forward(weights, images, False)
    for name, features_change, texts_change in [
        ("prompt.1", True, True), ("coupling.1.weight", True, False), ("coupling.0.bias", True, False)
    ]:  # fmt: skip
        after = run.model.forward({**weights, name: weights[name].flip(-1)}, images, False)
        assert bool((after.features - before.features).abs().max() > 1e-4) == features_change, name
        assert bool((after.texts - before.texts).abs().max() > 1e-4) == texts_change, name


@pytest.mark.parametrize("length", [2, 4])
def test_at_depth_one_the_words_give_zero_shot_texts(length):
    run, clip = maple_run(params={"depth": 1, "context_length": length}), tiny_backbone(CLIP)
    names = tiny_dataset().classnames
    expected = normalize(clip.encode_text([f"a photo of a {name}." for name in names]), dim=-1)
    texts = run.model.forward(run.model.weights, run.test.read(torch.arange(1)), False).texts
    torch.testing.assert_close(texts, expected, rtol=0, atol=1e-6)


def test_round_0_is_not_zero_shot_since_the_tokens_are_drawn():
    run, clip = maple_run(), tiny_backbone(CLIP)
    images = run.test.read(torch.arange(4))
    features = run.model.forward(run.model.weights, images, False).features
    assert (features - normalize(clip.module.encode_image(images), dim=-1)).abs().max() > 1e-3


def test_sizes_are_those_of_the_formula():
    # J M d_t + J (d_t d_v + d_v): ViT-B/16 with M = 2 and J = 9
    drawn = couplings(9, 512, 768, 0)
    assert sum(t.numel() for t in drawn.values()) + 9 * 2 * 512 == 3_555_072
    assert len({tuple(t.flatten()[:3].tolist()) for t in drawn.values()}) == 18  # each its own draw
    assert all(t.abs().max() <= 512**-0.5 for t in drawn.values())
    # the embedded text tower has two layers, the image tower four; CAPT's M
    run = maple_run(params={"context_length": 4})
    count = 2 * 4 * D_T + 2 * (D_T * D_V + D_V)
    assert run.info.trainable_parameters == count and run.info.round_bytes == 4 * count
    assert maple_run(params={"depth": 1}).info.trainable_parameters == 2 * D_T + D_T * D_V + D_V


def test_all_prompts_and_maps_have_a_gradient_and_the_towers_none():
    run, clip = maple_run(), tiny_backbone(CLIP)
    weights = {name: value.clone().requires_grad_() for name, value in run.model.weights.items()}
    outputs = run.model.forward(weights, run.test.read(torch.arange(8)), True)
    cross_entropy(outputs.logits, torch.arange(8) % 4).backward()
    assert all(value.grad.abs().max() > 0 for value in weights.values())
    assert all(p.grad is None and not p.requires_grad for p in clip.module.parameters())


def test_the_same_draws_start_the_text_side_as_that_of_other_prompt_methods():
    run = maple_run(params={"init": "random", "context_length": 4})
    assert torch.equal(run.model.weights["prompt.0"], random_context(0, "context", 4, D_T))
    assert not torch.equal(run.model.weights["prompt.1"], run.model.weights["prompt.0"])


def test_the_recipe_is_the_released_codes_and_words_have_their_limit():
    chosen = tiny_spec("maple", backbone=CLIP).training
    assert (chosen.optimizer, chosen.lr, chosen.momentum, chosen.weight_decay) == ("sgd", 3.5e-3, 0.9, 5e-4)
    with pytest.raises(FedbenchError, match=r"maple\.init=random"):
        maple_run(params={"context_length": 5})
    context, kept = initial_words(tiny_backbone(CLIP), 3)
    assert kept == "a" and context.shape == (3, D_T)
