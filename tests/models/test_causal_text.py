"""Class texts packed by their common beginning give what the whole texts give, in values and in gradients."""

import warnings
from dataclasses import replace
from itertools import product

import open_clip
import pytest
import torch
from open_clip.model import CLIP
from torch.func import vmap
from torch.utils.flop_counter import FlopCounterMode

from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.inputs import PixelTransform
from fedbench.models.prompts import causal_text
from fedbench.models.prompts.causal_text import can_pack
from fedbench.models.prompts.context import prompt_tower, word_context
from fedbench.testing import tiny_backbone

NAMES = ("red car", "red bus", "unphotographable thing", "bird", "red")
OTHERS = {
    "scaled": {"ls_init_value": 0.5, "layers": 3},
    "eos": {"pool_type": "eos", "eos_id": 49407},
    "linear": {"proj_bias": True, "layers": 1},
    "unprojected": {"proj_type": "none", "width": 8},
}


def small_clip(**text) -> ClipBackbone:
    """A float64 CLIP whose weights are all drawn: norms, biases and scales too."""
    vision = {"image_size": 32, "layers": 1, "width": 32, "patch_size": 16, "head_width": 16}
    tower = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2, **text}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = CLIP(8, open_clip.CLIPVisionCfg(**vision), open_clip.CLIPTextCfg(**tower), quick_gelu=True)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    module.double().eval().requires_grad_(False)
    return ClipBackbone(
        "clip:small", module, open_clip.SimpleTokenizer(), PixelTransform((0.5,) * 3, (0.5,) * 3, 32), 8
    )


def drawn(tower, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, tower.width, generator=generator).to(tower.embedded.dtype) for shape in shapes]


def gradients(encode, blocks):
    blocks = [block.clone().requires_grad_() for block in blocks]
    texts = encode(*blocks)
    pull = torch.randn(texts.shape, generator=torch.Generator().manual_seed(9)).to(texts.dtype)
    return texts, *torch.autograd.grad((texts * pull).sum(), blocks)


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        tolerance = {torch.float64: 1e-11, torch.float32: 1e-5}[other.dtype]
        assert one.shape == other.shape and other.abs().max() > 1e-3
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.fixture(scope="module", params=["embedded", *OTHERS])
def clip(request):
    return tiny_backbone("clip:embedded") if request.param == "embedded" else small_clip(**OTHERS[request.param])


K = len(NAMES)
LAYOUTS = {
    "shared": [(5,)],
    "own": [(K, 5)],
    "shared before own": [(2,), (K, 3)],
    "own before shared": [(K, 3), (2,)],
    "shared, own, shared": [(1,), (K, 2), (2,)],
    "one an image": [(3, 1, 5)],
    "leading dimensions that differ": [(2,), (3, 1, 1, 1), (2, K, 2)],
}


@pytest.mark.parametrize(
    ("layout", "position"),
    [*((layout, "end") for layout in LAYOUTS), *product(list(LAYOUTS)[-3::2], ("middle", "front"))],
)
def test_packed_texts_are_the_whole_texts(clip, layout, position):
    for truncate in (True, False):
        tower = prompt_tower(clip, NAMES, 5, position, truncate=truncate)
        assert tower.packs
        blocks = drawn(tower, *LAYOUTS[layout])
        assert_same(gradients(tower.encode, blocks), gradients(replace(tower, packs=False).encode, blocks))


@pytest.mark.parametrize("size", range(1, K + 1))
def test_any_number_of_texts_in_a_sequence_gives_the_same(size, monkeypatch):
    # 2, 3 and 4 do not divide the five texts: the last sequence is filled up
    tower = prompt_tower(small_clip(), NAMES, 4)
    blocks = drawn(tower, (3, 1, 2), (3, K, 2))
    expected = gradients(replace(tower, packs=False).encode, blocks)
    monkeypatch.setattr(causal_text, "_texts_in_a_sequence", lambda *_: size)
    assert_same(gradients(tower.encode, blocks), expected)
    (packed,) = tower._packed.values()
    assert packed.mask.shape[0] == -(-K // size) or size == K


def test_what_texts_share_is_there_once():
    clip = tiny_backbone("clip:embedded")

    def places(names, *blocks, position="end"):
        tower = prompt_tower(clip, names, sum(block[-1] for block in blocks), position)
        tower.encode(*drawn(tower, *blocks))
        return next(iter(tower._packed.values())).frozen.shape[:-1].numel()

    # start, three vectors, red | car . end | bird . end
    assert places(("red car", "red bird"), (3,)) == 5 + 3 + 3
    # the vectors of each class's own follow the shared one: start, v | v w red car . end | v w red bird . end
    assert places(("red car", "red bird"), (1,), (2, 2)) == 2 + 6 + 6
    # start, v, red | car v v . end | bird v v . end
    assert places(("red car", "red bird"), (3,), position="middle") == 3 + 5 + 5
    # names of different lengths: start, three vectors | car . end | red car . end
    assert places(("car", "red car"), (3,)) == 4 + 3 + 4
    # equal texts, and a single one, have their own end
    assert places(("car", "car"), (3,)) == 6 + 1 + 1
    assert places(("car",), (3,)) == 7


def test_the_places_of_a_sequence_are_chosen_at_the_least_cost():
    text = tiny_backbone("clip:embedded").text
    sizes = (text.width, text.blocks[0].attn.num_heads)
    # 16 shared vectors and short names: one sequence; all but the start of its own: none shares enough to see more
    assert causal_text._texts_in_a_sequence(*sizes, 10, 17, 3.0) == 10
    assert causal_text._texts_in_a_sequence(*sizes, 10, 1, 19.0) == 1
    # a thousand texts do not all look at each other
    assert 10 < causal_text._texts_in_a_sequence(*sizes, 1000, 17, 3.0) < 100


@pytest.mark.parametrize("layout", ["shared", "own", "shared before own"])
def test_clients_stacked_by_vmap_get_what_each_gets_alone(clip, layout):
    tower = prompt_tower(clip, NAMES, 5)
    clients = [drawn(tower, *LAYOUTS[layout], seed=seed) for seed in range(3)]
    stacked = [torch.stack(blocks) for blocks in zip(*clients, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = gradients(vmap(tower.encode), stacked)
    pull = torch.randn(got[0].shape, generator=torch.Generator().manual_seed(9)).to(got[0].dtype)
    for number, blocks in enumerate(clients):
        blocks = [block.clone().requires_grad_() for block in blocks]
        texts = tower.encode(*blocks)
        alone = (texts, *torch.autograd.grad((texts * pull[number]).sum(), blocks))
        assert_same([each[number] for each in got], alone)


def test_a_first_call_without_gradients_or_inside_a_transform_leaves_a_tower_that_trains():
    clip = tiny_backbone("clip:embedded")
    (context,) = drawn(prompt_tower(clip, NAMES, 5), (5,))
    expected = gradients(prompt_tower(clip, NAMES, 5).encode, [context])

    def first_number(context):
        return tower.encode(context)[0, 0]

    for first in (torch.inference_mode()(first_number), torch.no_grad()(first_number), torch.func.grad(first_number)):
        tower = prompt_tower(clip, NAMES, 5)
        first(context)
        assert_same(gradients(tower.encode, [context]), expected)


def test_texts_are_not_computed_again_for_every_sample():
    tower = prompt_tower(tiny_backbone("clip:embedded"), NAMES, 5)
    stacked = torch.stack([drawn(tower, (5,), seed=seed)[0] for seed in range(3)])
    images = torch.randn(3, 7, 128, generator=torch.Generator().manual_seed(0))

    def logits(context, samples):
        return vmap(lambda image: tower.encode(context) @ image)(samples)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = vmap(tower.encode)(stacked) @ images.mT
        torch.testing.assert_close(vmap(logits)(stacked, images).mT, expected, rtol=1e-5, atol=1e-5)
    counts = []
    for samples in (images[:, :1], images):
        with FlopCounterMode(display=False) as counter:
            vmap(logits)(stacked, samples)
        counts.append(counter.get_total_flops())
    # six more samples of three clients: cosines to five texts of 128 numbers, nothing else
    assert counts[1] - counts[0] == 2 * 6 * 3 * 5 * 128


def test_weights_that_nobody_trains_get_no_gradient_computed():
    tower = prompt_tower(tiny_backbone("clip:embedded"), NAMES, 5)
    (context,) = drawn(tower, (5,))
    with FlopCounterMode(display=False) as forward:
        tower.encode(context)
    with FlopCounterMode(display=False) as both:
        gradients(tower.encode, [context])
    # a product has two factors, and only attention differentiates both: less than the forward pass again, and that
    assert both.get_total_flops() < 2.2 * forward.get_total_flops()


@pytest.mark.parametrize(
    "text", [{"no_causal_mask": True}, {"qk_norm": True}, {"scale_heads": True}, {"scale_attn": True}]
)
def test_towers_of_other_kinds_are_left_to_open_clip(text):
    clip = small_clip(**text)
    assert not can_pack(clip.text) and can_pack(small_clip().text)
    tower = prompt_tower(clip, NAMES, 2, truncate=False)
    texts = torch.nn.functional.normalize(clip.encode_text([f"green tall {name}." for name in NAMES]), dim=-1)
    assert torch.equal(tower.encode(word_context(clip, "green tall")), texts)


def test_a_tower_with_other_attention_or_mask_is_left_to_open_clip():
    text, clip = (given := small_clip()).text, given.module
    clip.set_grad_checkpointing(True)
    assert not can_pack(text)
    clip.set_grad_checkpointing(False)
    assert can_pack(text)
    clip.transformer.resblocks[1].attn.dropout = 0.1
    assert not can_pack(text)
    clip.transformer.resblocks[1].attn.dropout = 0.0
    clip.attn_mask[0, 1] = 0  # a look ahead
    assert not can_pack(text)


def test_a_block_that_attends_across_is_left_to_open_clip():
    clip = small_clip()
    clip.module.transformer.resblocks[0].ln_1_kv = torch.nn.LayerNorm(16)
    assert not can_pack(clip.text)
