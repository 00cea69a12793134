"""VPT: Jia et al. 2022, on CLIP."""

import pytest
import torch
from torch.nn.functional import normalize

from fedbench.models.clip.image_towers import image_tower
from fedbench.testing import tiny_backbone, tiny_dataset
from fedbench_methods.vpt import bound, patch_side
from tests.equations.kit import CLIP, D_V, runs
from tests.equations.test_maple import images_by_hand

vpt_run = runs("vpt")


@pytest.mark.parametrize(("depth", "layers"), [("shallow", 1), ("deep", 4)])
def test_tokens_enter_every_layer_that_has_some(depth, layers):
    run, clip = vpt_run(params={"depth": depth, "tokens": 3}), tiny_backbone(CLIP)
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.5 * torch.randn(3, D_V, generator=generator) for name in run.model.weights}
    assert len(weights) == layers
    images = run.test.read(torch.arange(5))
    outputs = run.model.forward(weights, images, True)
    features = images_by_hand([weights[f"tokens.{layer}"] for layer in range(layers)], images)
    texts = clip.text_features(tiny_dataset().classnames, run.spec.templates)
    torch.testing.assert_close(outputs.features, features, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.logits, clip.logit_scale * features @ texts.T, rtol=0, atol=1e-3)


def test_order_of_the_tokens_changes_nothing_and_each_of_them_something():
    run = vpt_run(params={"depth": "deep", "tokens": 3})
    images, weights = run.test.read(torch.arange(3)), {n: 10 * w for n, w in run.model.weights.items()}
    before = run.model.forward(weights, images, False).features
    for name, tokens in weights.items():
        flipped = run.model.forward({**weights, name: tokens.flip(0)}, images, False).features
        torch.testing.assert_close(flipped, before, rtol=0, atol=1e-5)
        other = run.model.forward({**weights, name: -tokens}, images, False).features
        assert (other - before).abs().max() > 1e-4, name


def test_the_draw_is_uniform_in_xaviers_bound_of_a_patch():
    # ViT-B/16: sqrt(6 / (3 * 256 + 768)) = sqrt(6 / 1536) = 1/16
    assert bound(16, 768) == pytest.approx(1 / 16)
    clip = tiny_backbone(CLIP)
    side = patch_side(clip, image_tower(clip.module))
    assert side == clip.module.visual.conv1.stride[0]
    run = vpt_run(params={"depth": "deep", "tokens": 50})
    for tokens in run.model.weights.values():
        assert 0.99 * bound(side, D_V) < tokens.abs().max() <= bound(side, D_V)
        assert tokens.mean().abs() < 0.01
    assert len({t[0, 0].item() for t in run.model.weights.values()}) == 4


def test_round_0_is_not_zero_shot_since_the_tokens_are_drawn():
    run, clip = vpt_run(), tiny_backbone(CLIP)
    images = run.test.read(torch.arange(3))
    alone = normalize(clip.module.encode_image(images), dim=-1)
    assert (run.model.forward(run.model.weights, images, False).features - alone).abs().max() > 1e-4
