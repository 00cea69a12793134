"""Blocks of open_clip's transformers, written out: what they give, and what is left to open_clip."""

import copy

import pytest
import torch
from open_clip.transformer import Attention, Transformer
from torch import nn

from fedbench.models.clip.blocks import apply_block, plain_blocks

WIDTH, HEADS, PLACES = 16, 2, 5


def tower(layers=1, **options) -> Transformer:
    """In float64, all weights drawn: norms, biases and scales too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Transformer(WIDTH, layers, HEADS, **options)
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.4)
    return made.double().eval().requires_grad_(False)


def states(count=3):
    return torch.randn(count, PLACES, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def later_attention(given: nn.MultiheadAttention) -> Attention:
    """open_clip's own attention, which later versions put in every block, with the same weights."""
    other = Attention(WIDTH, HEADS).double().eval().requires_grad_(False)
    other.load_state_dict(given.state_dict())
    return other


CAUSAL = torch.full((PLACES, PLACES), -torch.inf, dtype=torch.float64).triu(1)


@pytest.mark.parametrize("mask", [None, CAUSAL])
@pytest.mark.parametrize("options", [{}, {"ls_init_value": 0.5}, {"mlp_ratio": 2.0}])
@pytest.mark.parametrize("later", [False, True])
def test_a_block_gives_what_open_clips_own_gives(mask, options, later):
    given = tower(**options)
    layer, x = given.resblocks[0], states()
    expected = layer(x, attn_mask=mask)
    if later:
        assert torch.allclose(
            later_attention(layer.attn)(layer.ln_1(x), mask), layer.attention(layer.ln_1(x), attn_mask=mask)
        )
        layer.attn = later_attention(layer.attn)
    assert plain_blocks(given)
    torch.testing.assert_close(apply_block(layer, x, layer.ln_1(x), mask), expected, rtol=0, atol=1e-12)
    some = [0, 3]
    rows = None if mask is None else mask[some]
    fewer = apply_block(layer, x[:, some], layer.ln_1(x), rows, is_all=False)
    torch.testing.assert_close(fewer, expected[:, some], rtol=0, atol=1e-12)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("names", ["q", "k", "v", "o", "qkvo"])
def test_additions_are_those_of_changed_weights(names, later):
    layer, x = tower().resblocks[0], states()
    generator = torch.Generator().manual_seed(2)
    extra = {n: torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) for n in names}
    changed = copy.deepcopy(layer)
    for place, name in enumerate("qkv"):
        if name in extra:
            changed.attn.in_proj_weight[place * WIDTH : (place + 1) * WIDTH] += extra[name]
    if "o" in extra:
        changed.attn.out_proj.weight += extra["o"]
    if later:
        layer.attn = later_attention(layer.attn)

    def added(name, seen):
        return seen @ extra[name].T if name in extra else None

    expected = changed(x)
    assert (expected - apply_block(layer, x, layer.ln_1(x))).abs().max() > 1e-2
    torch.testing.assert_close(apply_block(layer, x, layer.ln_1(x), added=added), expected, rtol=0, atol=1e-12)
    first = apply_block(layer, x[:, :1], layer.ln_1(x), is_all=False, added=added)
    torch.testing.assert_close(first, expected[:, :1], rtol=0, atol=1e-12)


def test_what_is_not_plain_is_left_to_open_clip():
    assert plain_blocks(tower(layers=2))
    assert plain_blocks(nn.Identity()) is None
    for options in ({"qk_norm": True}, {"scaled_cosine_attn": True}, {"scale_heads": True}, {"scale_attn": True}):
        assert plain_blocks(tower(**options)) is None
    checkpointed = tower()
    checkpointed.grad_checkpointing = True
    assert plain_blocks(checkpointed) is None


@pytest.mark.parametrize(
    "options",
    [{"qk_norm": True}, {"scaled_cosine": True}, {"scale_heads": True}, {"inner_norm": True}, {"qkv_bias": False},
     {"attn_drop": 0.1}, {"proj_drop": 0.1}],
)  # fmt: skip
def test_a_later_attention_with_anything_else_in_it_is_not_plain(options):
    given = tower()
    given.resblocks[0].attn = Attention(WIDTH, HEADS)
    assert plain_blocks(given)
    given.resblocks[0].attn = Attention(WIDTH, HEADS, **options)
    assert plain_blocks(given) is None


@pytest.mark.parametrize(
    "options", [{"dropout": 0.1}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 8}]
)
def test_nor_is_torchs_attention(options):
    given = tower()
    given.resblocks[0].attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    assert plain_blocks(given)
    given.resblocks[0].attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
    assert plain_blocks(given) is None
