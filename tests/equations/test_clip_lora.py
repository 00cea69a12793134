"""CLIP-LoRA: Zanella and Ben Ayed 2024."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fedbench.core.method.tasks import AggregationTask
from fedbench.core.types import Update
from fedbench.models.clip.backbone import fill_templates
from fedbench.testing import tiny_backbone, tiny_dataset
from fedbench_methods.clip_lora import ClipLoRA, ClipLoraParams, dropped, low_rank, product_mean
from tests.equations.kit import CLIP, drawn_like, runs

WIDTHS, LAYERS = {"text": 64, "image": 192}, {"text": 2, "image": 4}


lora_run = runs("clip-lora")


def zero_shot_logits(images):
    clip = tiny_backbone(CLIP)
    texts = clip.text_features(tiny_dataset().classnames, ("a photo of a {}",))
    return clip.logit_scale * normalize(clip.module.encode_image(images), dim=-1) @ texts.T


def merged(weights, scale, projections="qkv"):
    """A copy of CLIP whose weights have taken in γ B A."""
    module = copy.deepcopy(tiny_backbone(CLIP).module)
    for tower, transformer in (("text", module.transformer), ("image", module.visual.transformer)):
        for number, layer in enumerate(transformer.resblocks):
            for name in projections:
                key = f"lora.{tower}.{number}.{name}"
                if f"{key}.A" not in weights:
                    continue
                product = scale * weights[f"{key}.B"] @ weights[f"{key}.A"]
                if name == "o":
                    layer.attn.out_proj.weight += product
                else:
                    rows = "qkv".index(name) * len(product)
                    layer.attn.in_proj_weight[rows : rows + len(product)] += product
    return module


def test_the_addition_by_hand():
    a, b = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[1.0], [0.0], [-2.0]])
    # A x = 3; B (A x) = (3, 0, -6)
    assert low_rank(torch.tensor([[1.0, 1.0, 5.0]]), a, b, 0.5).tolist() == [[1.5, 0.0, -3.0]]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("encoders", ["both", "image", "text"])
def test_b_zero_is_zero_shot_clip_with_dropout_too(encoders, training):
    run = lora_run(params={"encoders": encoders})
    inputs = run.test.read(torch.arange(6))
    further = {"lora.noise": torch.tensor(5)} if training else {}
    logits = run.model.forward({**run.model.weights, **further}, inputs, training).logits
    # bit for bit what the same pass gives without additions
    assert torch.equal(logits, run.model.forward(run.model.weights, inputs, False).logits)
    other = {name: torch.rand_like(v) if name.endswith(".A") else v for name, v in run.model.weights.items()}
    assert torch.equal(logits, run.model.forward(other, inputs, False).logits)
    # and zero-shot CLIP by open_clip's own towers, but for the order of sums
    pixels = lora_run().test.read(torch.arange(6))
    torch.testing.assert_close(logits, zero_shot_logits(pixels), rtol=0, atol=2e-4)
    assert torch.equal(logits.argmax(1), zero_shot_logits(pixels).argmax(1))


@pytest.mark.parametrize(
    ("params", "scale", "projections"),
    [({}, 2**-0.5, "qkv"), ({"rank": 4, "alpha": 8.0, "scaling": "linear"}, 2.0, "qkv"),
     ({"rank": 4, "alpha": 8.0}, 4.0, "qkv"), ({"projections": "qkvo"}, 2**-0.5, "qkvo"),
     ({"projections": "v"}, 2**-0.5, "v"), ({"encoders": "image"}, 2**-0.5, "qkv")],
)  # fmt: skip
def test_merged_into_the_weights_it_gives_the_same(params, scale, projections):
    run, clip, names = lora_run(params=params), tiny_backbone(CLIP), tiny_dataset().classnames
    weights, images = drawn_like(run, 0.2), run.test.read(torch.arange(5))
    outputs = run.model.forward(weights, images, False)
    changed = replace(clip, module=merged(weights, scale, projections))
    features = normalize(changed.module.encode_image(images), dim=-1)
    torch.testing.assert_close(outputs.features, features, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.texts, changed.text_features(names, ("a photo of a {}",)), rtol=0, atol=1e-5)
    assert (outputs.logits - zero_shot_logits(images)).abs().max() > 0.1


def test_templates_are_the_runs_and_averaged_as_for_zero_shot():
    run, clip = lora_run(templates=("a {}", "one {} here")), tiny_backbone(CLIP)
    texts = run.model.forward(run.model.weights, run.test.read(torch.arange(1)), False).texts
    expected = clip.text_features(tiny_dataset().classnames, run.spec.templates)
    torch.testing.assert_close(texts, expected, rtol=0, atol=1e-6)
    assert len(fill_templates(tiny_dataset().classnames, run.spec.templates)) == 8


def test_sizes_are_those_of_the_formula():
    # 2 r w a projection; r = 2, queries, keys, values of 12 + 12 layers of ViT-B/16: 73,728 + 110,592
    count = {t: 3 * 2 * 2 * width * 12 for t, width in (("text", 512), ("image", 768))}
    assert count == {"text": 73_728, "image": 110_592}
    for params, towers, each, projections in [
        ({}, ("text", "image"), 2 * 2, 3), ({"encoders": "text"}, ("text",), 2 * 2, 3),
        ({"encoders": "image", "rank": 8}, ("image",), 2 * 8, 3), ({"projections": "qkvo"}, ("text", "image"), 4, 4),
        ({"lora_agg": "freeze_A"}, ("text", "image"), 2, 3),
    ]:  # fmt: skip
        expected = sum(each * projections * WIDTHS[tower] * LAYERS[tower] for tower in towers)
        run = lora_run(params=params)
        assert run.info.trainable_parameters == expected and run.info.round_bytes == 4 * expected


def test_a_is_drawn_uniformly_and_apart_for_every_projection():
    weights = lora_run(params={"rank": 64}).model.weights
    factors = [weights[f"lora.image.{layer}.{name}.A"] for layer in range(4) for name in "qkv"]
    bound = 192**-0.5
    for a in factors:
        assert a.shape == (64, 192) and a.abs().max() <= bound
        assert a.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
    assert len({a[0, 0].item() for a in factors}) == 12


def test_text_alone_reads_cached_features_and_image_alone_encodes_texts_once():
    assert not lora_run(params={"encoders": "text"}).test.is_image
    assert lora_run().test.is_image
    run, calls = lora_run(params={"encoders": "image"}), []
    handle = tiny_backbone(CLIP).module.ln_final.register_forward_hook(lambda *_: calls.append(1))
    run.model.forward(run.model.weights, run.test.read(torch.arange(2)), True)
    handle.remove()
    assert not calls


def test_dropout_keeps_the_mean_and_zeroes_the_share():
    x = torch.ones(200, 500)
    kept = dropped(x, 0.25, torch.Generator().manual_seed(0))
    assert kept.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert (kept == 0).float().mean().item() == pytest.approx(0.25, abs=0.005)


def test_dropout_is_new_in_every_step_and_absent_from_evaluation(make_step):
    run = lora_run()
    weights, images = drawn_like(run, 0.2), run.test.read(torch.arange(4))

    def loss(**where):
        step = make_step(run.model, images, [0, 1, 2, 3], weights=weights, method="clip-lora", num_classes=4, **where)
        return ClipLoRA(ClipLoraParams()).local_loss(step).item()

    first = loss(number=0)
    assert loss(number=0) == first
    others = [loss(number=1), loss(client=1), loss(round=2), loss(seed=1)]
    assert len({first, *others}) == 5
    step = make_step(run.model, images, [0, 1, 2, 3], weights=weights, method="clip-lora", num_classes=4)
    later = replace(step, task=replace(step.task, exchange=1))
    assert ClipLoRA(ClipLoraParams()).local_loss(later).item() not in (first, *others)
    # in both towers
    noisy = [run.model.forward({**weights, "lora.noise": torch.tensor(seed)}, images, True) for seed in (1, 2)]
    assert (noisy[0].features - noisy[1].features).abs().max() > 1e-4
    assert (noisy[0].texts - noisy[1].texts).abs().max() > 1e-4
    plain = run.model.forward(weights, images, True).logits
    assert torch.equal(plain, run.model.forward(weights, images, False).logits)
    step = make_step(run.model, images, [0, 1, 2, 3], weights=weights, method="clip-lora", num_classes=4)
    without = ClipLoRA(ClipLoraParams(dropout=0.0)).local_loss(step)
    torch.testing.assert_close(without, cross_entropy(plain, torch.arange(4)))
    assert abs(without.item() - first) > 1e-4


def aggregated(how, a, b, sizes=(1, 3)):
    """The server's product B A of two clients' factors."""
    updates = tuple(
        Update(client, {"w.A": one, "w.B": two}, {}, size)
        for client, (one, two, size) in enumerate(zip(a, b, sizes, strict=True))
    )
    run = lora_run()
    task = AggregationTask(1, {"w.A": a[0], "w.B": b[0]}, {}, updates, run.model, run.spec, {})
    mean = ClipLoRA(ClipLoraParams(lora_agg=how)).aggregate(task)
    return mean["w.B"] @ mean["w.A"]


def test_the_mean_of_factors_is_not_the_mean_of_products_unless_a_is_shared():
    a, b = [torch.eye(1, 2), torch.eye(2)[1:]], [torch.ones(2, 1), torch.full((2, 1), 5.0)]
    # shares 1/4 and 3/4: mean(B) = 4, mean(A) = (.25, .75), against .25 (1, 0) + .75 (0, 5)
    assert aggregated("factors", a, b)[0].tolist() == [1.0, 3.0]
    exact = 0.25 * b[0] @ a[0] + 0.75 * b[1] @ a[1]
    assert exact[0].tolist() == [0.25, 3.75]
    shared = aggregated("factors", [a[0], a[0]], b)
    assert torch.equal(shared, 0.25 * b[0] @ a[0] + 0.75 * b[1] @ a[0])


def test_product_svd_is_the_best_approximation_of_the_mean_product():
    generator = torch.Generator().manual_seed(0)
    a = [torch.randn(2, 7, generator=generator) for _ in range(2)]
    b = [torch.randn(7, 2, generator=generator) for _ in range(2)]
    exact = 0.25 * b[0] @ a[0] + 0.75 * b[1] @ a[1]
    u, s, v = torch.linalg.svd(exact)
    best = u[:, :2] * s[:2] @ v[:2]
    assert s[2] > 0.1
    torch.testing.assert_close(aggregated("product_svd", a, b), best, rtol=0, atol=1e-5)
    # of one client it is that client's product
    one, other = product_mean(a[:1], b[:1], torch.ones(1))
    assert one.shape == (2, 7) and other.shape == (7, 2)
    torch.testing.assert_close(other @ one, b[0] @ a[0], rtol=0, atol=1e-5)


def test_only_the_factors_have_a_gradient():
    run, clip = lora_run(), tiny_backbone(CLIP)
    weights = {name: value.requires_grad_() for name, value in drawn_like(run, 0.2).items()}
    outputs = run.model.forward(weights, run.test.read(torch.arange(8)), True)
    cross_entropy(outputs.logits, torch.arange(8) % 4).backward()
    assert all(value.grad.abs().max() > 0 for value in weights.values())
    assert all(p.grad is None and not p.requires_grad for p in clip.module.parameters())
