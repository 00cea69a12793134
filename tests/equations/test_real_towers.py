"""Methods on the real architectures of CLIP with random weights: sizes, what has a gradient, what is left alone."""

import copy
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.transformer import Attention
from torch import nn
from torch.nn.functional import cross_entropy

from fedbench.core.errors import FedbenchError
from fedbench.core.method.tasks import ModelSetup
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.inputs import FeatureInputs, PixelTransform
from fedbench.plugins.assembly import assemble
from fedbench.rounds.loop import evaluate
from fedbench.rounds.run import shared
from fedbench.runs.prepare import Settings, prepare
from fedbench.testing import final_state, tiny_dataset, tiny_spec

pytestmark = pytest.mark.slow

K = 4
SENT = {
    # floats up for ViT-B/16 and K classes
    "fedclip": 525_312,
    "promptfl": 8_192,
    "cocoop": 35_360,
    "kgcoop": 2_048,
    "maple": 3_555_072,
    "clip-lora": 184_320,
    "fedtpg": 4_206_080,
    "fedotp": 8_192,
    "fedpgp": 8_192,
    "clip-adapter": 131_072,
    "taskres": K * 512,
    "promptfolio": 4_096,
    "vpt": 5 * 768,
    "fedpha": 8_192,
    "plot": 4 * 8_192,
    "promptsrc": 9 * 4 * (512 + 768),
    "capt": 512 + K * 3 * 512 + 512 * 768 + 768,
    "capt-reconstructed": 4 * 512 + K * 4 * 512 + 512 * 768 + 768,
}
OWN = {"fedotp": 8_192, "fedpgp": 4_224, "promptfolio": 4_096, "fedpha": 8_192}
"""Floats that stay with a client."""


def random_clip(arch: str) -> ClipBackbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = open_clip.create_model(arch).eval().requires_grad_(False)
    transform = PixelTransform((0.5,) * 3, (0.5,) * 3, module.visual.image_size[0])
    return ClipBackbone(f"clip:{arch}", module, open_clip.get_tokenizer(arch), transform, 512)


@pytest.fixture(scope="module")
def backbone():
    return random_clip("ViT-B-16")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches")
    return Settings(data_dir=Path("."), cache_dir=folder, threads=2)


def spec_of(method: str, **scenario: object):
    spec = tiny_spec(method, backbone="clip:embedded", rounds=1, batch_size=16)
    scenario = {"clients": 2, "participation": 1.0, "partition": "iid", **scenario}
    return spec.model_copy(update={"scenario": spec.scenario.model_copy(update=scenario)})


@pytest.mark.parametrize("method", SENT)
def test_one_round_on_64_images(method, backbone, settings):
    data = tiny_dataset(num_classes=K, per_class=16)  # 48 images to train on, 16 to test
    before = backbone.weights_hash
    run = prepare(spec_of(method), settings, dataset=data, backbone=backbone)
    sent = shared(run.model.weights, run.private)
    assert sum(t.numel() for t in sent.values()) == SENT[method]
    assert run.info.round_bytes == 4 * SENT[method]
    kept = [t for name, t in run.model.weights.items() if name in run.private]
    assert sum(t.numel() for t in kept) == OWN.get(method, 0)
    state = final_state(run)
    metrics, predictions = evaluate(run, state)
    assert len(predictions.labels) == 16 and 0 <= metrics["global_accuracy"] <= 100
    assert ("personal_mean_client_accuracy" in metrics) == (method in OWN)
    for name, tensor in shared(state.weights, run.private).items():
        assert tensor.isfinite().all() and not torch.equal(tensor, run.model.weights[name]), name
    for own in state.own.values():
        assert all(not torch.equal(tensor, run.model.weights[name]) for name, tensor in own.items())
    # the tower as it was, in its weights and as a module
    fresh = ClipBackbone(backbone.name, backbone.module, backbone.tokenizer, backbone.transform, 512)
    assert fresh.weights_hash == before
    assert all(p.grad is None and not p.requires_grad for p in backbone.module.parameters())
    assert not backbone.module.training


class LaterAttention(Attention):
    """The attention of open_clip's later versions, to be called as that of this version is."""

    def forward(self, x, *_: object, attn_mask=None, need_weights=False):
        return (super().forward(x, attn_mask),)


def with_later_attention(backbone: ClipBackbone) -> ClipBackbone:
    module = copy.deepcopy(backbone.module)
    for layer in (*module.transformer.resblocks, *module.visual.transformer.resblocks):
        given = layer.attn
        assert isinstance(given, nn.MultiheadAttention)
        layer.attn = LaterAttention(given.embed_dim, given.num_heads).eval().requires_grad_(False)
        layer.attn.load_state_dict(given.state_dict())
    return ClipBackbone(backbone.name, module, backbone.tokenizer, backbone.transform, 512)


@pytest.fixture(scope="module")
def both_attentions():
    given = random_clip("ViT-B-32-quickgelu")
    return given, with_later_attention(given)


@pytest.mark.parametrize("method", [name for name in SENT if name != "fedclip"])
def test_both_attentions_of_open_clip_give_the_same(method, both_attentions):
    pixels = torch.randint(0, 256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    found = []
    for backbone in both_attentions:
        model = built(method, backbone)
        weights = {name: value.clone().requires_grad_() for name, value in model.weights.items()}
        inputs = model.encoder(pixels).float() if model.encoder else model.transform(pixels)
        constants = {name: t for name, t in model.constants.items() if name not in weights}
        logits = model.forward({**constants, **weights}, inputs, True).logits
        assert logits.shape == (2, K)
        gradients = torch.autograd.grad(
            cross_entropy(logits, torch.tensor([0, 1])), [*weights.values()], allow_unused=True
        )
        found.append((logits, [g for g in gradients if g is not None]))
        assert found[-1][1]
    (one, first), (other, second) = found
    torch.testing.assert_close(one, other, rtol=0, atol=1e-3)
    for a, b in zip(first, second, strict=True):
        assert (a - b).abs().max() <= 1e-3 * a.abs().max() + 1e-6


def built(method: str, backbone: ClipBackbone):
    spec = spec_of(method)
    setup = ModelSetup(backbone, tiny_dataset(num_classes=K).classnames, spec, Path("."))
    return assemble(method, spec.params).hooks.build_model(setup=setup)


@pytest.mark.parametrize("method", SENT)
def test_a_resnet_tower_trains_or_is_refused_by_name(method):
    config = dict(open_clip.get_model_config("RN50"), embed_dim=512)
    config["vision_cfg"] = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = open_clip.model.CLIP(**{k: v for k, v in config.items() if k != "custom_text"})
    module.eval().requires_grad_(False)
    backbone = ClipBackbone(
        "clip:small-resnet", module, open_clip.get_tokenizer("RN50"), PixelTransform((0.5,) * 3, (0.5,) * 3, 64), 512
    )
    if method in ("maple", "clip-lora", "capt", "capt-reconstructed"):
        with pytest.raises(FedbenchError, match=f"{method}.*image tower.*clip:small-resnet"):
            built(method, backbone)
        return
    model = built(method, backbone)
    inputs = FeatureInputs(model.encoder(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)))
    outputs = model.forward({**model.constants, **model.weights}, inputs.read(torch.arange(2)), True)
    assert outputs.logits.shape == (2, K)
