"""Learnable context in the text tower (CoOp, Zhou et al. 2022) and tokens in the image tower (MaPLe, layer 0)."""

from dataclasses import replace

import open_clip
import pytest
import torch
from open_clip.model import CLIP
from torch import nn
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError
from fedbench.models.clip.backbone import ClipBackbone, class_vectors
from fedbench.models.inputs import PixelTransform
from fedbench.models.prompts.context import initial_context, prompt_tower, random_context, word_context
from fedbench.models.prompts.image_tokens import encode_with_tokens, require_vision_transformer
from fedbench.testing import tiny_backbone

NAMES = ("bird", "sports_car", "Christmas tree", "unphotographable thing")


def small_clip(**text: object) -> ClipBackbone:
    """An untrained CLIP with open_clip's own tokenizer and 77 places."""
    vision = {"image_size": 32, "layers": 1, "width": 32, "patch_size": 16, "head_width": 16}
    tower = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2, **text}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = CLIP(8, open_clip.CLIPVisionCfg(**vision), open_clip.CLIPTextCfg(**tower))
        nn.init.normal_(module.positional_embedding)
    module.eval().requires_grad_(False)
    transform = PixelTransform((0.5,) * 3, (0.5,) * 3, 32)
    return ClipBackbone("clip:small", module, open_clip.SimpleTokenizer(), transform, 8)


@pytest.fixture(scope="module", params=["embedded", "77 places", "linear projection"])
def clip(request) -> ClipBackbone:
    if request.param == "embedded":
        return tiny_backbone("clip:embedded")
    return small_clip(proj_bias=request.param == "linear projection")


def zero_shot(clip: ClipBackbone, template: str) -> torch.Tensor:
    return normalize(clip.encode_text([template.format(name.replace("_", " ")) for name in NAMES]), dim=-1)


@pytest.mark.parametrize("packs", [True, False])
def test_embedded_words_as_context_are_zero_shot(clip, packs):
    words = word_context(clip, "a photo of a")
    assert words.shape == (4, clip.module.token_embedding.embedding_dim)
    texts = replace(prompt_tower(clip, NAMES, 4, truncate=False), packs=packs).encode(words)
    # texts encoded whole are the same bit for bit
    torch.testing.assert_close(texts, zero_shot(clip, "a photo of a {}."), rtol=0, atol=1e-6 if packs else 0)
    # and so are the logits
    images = normalize(torch.randn(5, clip.embed_dim, generator=torch.Generator().manual_seed(0)), dim=-1)
    zero_shot_logits = clip.logit_scale * images @ zero_shot(clip, "a photo of a {}.").T
    torch.testing.assert_close(clip.logit_scale * images @ texts.T, zero_shot_logits, rtol=0, atol=1e-4 * packs)


def test_the_period_is_part_of_the_text(clip):
    texts = prompt_tower(clip, NAMES, 4).encode(word_context(clip))
    assert (texts - zero_shot(clip, "a photo of a {}")).abs().max() > 1e-3


def test_words_stand_around_the_name_where_the_position_says(clip):
    words = word_context(clip, "green tall")
    for position, template in (("end", "green tall {}."), ("middle", "green {} tall."), ("front", "{} green tall.")):
        tower = prompt_tower(clip, NAMES, 2, position, truncate=False)
        assert torch.equal(replace(tower, packs=False).encode(words), zero_shot(clip, template)), position
        torch.testing.assert_close(tower.encode(words), zero_shot(clip, template), rtol=0, atol=1e-6)


def test_places_of_an_odd_context_by_hand():
    clip = tiny_backbone("clip:embedded")
    start, end = clip.tokenizer.sot_token_id, clip.tokenizer.eot_token_id
    red, car, dot = clip.tokenizer.encode("red car.")
    (x,) = clip.tokenizer.encode("X")
    expected = {
        "end": ([start, x, x, x, red, car, dot, end], [1, 2, 3]),
        "middle": ([start, x, red, car, x, x, dot, end], [1, 4, 5]),  # M // 2 = 1 before the name
        "front": ([start, red, car, x, x, x, dot, end], [3, 4, 5]),
    }
    for position, (tokens, slots) in expected.items():
        tower = prompt_tower(clip, ("red_car",), 3, position)
        assert tower.tokens.tolist() == [tokens] and tower.slots.tolist() == [slots]


def test_the_end_token_stands_at_the_same_place_in_all_positions(clip):
    towers = [prompt_tower(clip, NAMES, 5, position) for position in ("end", "middle", "front")]
    ends = [clip.text.ends(tower.tokens) for tower in towers]
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
    assert len(set(ends[0].tolist())) > 1


def test_truncation_changes_nothing(clip):
    context = random_context(0, "test", 6, clip.module.token_embedding.embedding_dim)
    for position in ("end", "middle", "front"):
        full = prompt_tower(clip, NAMES, 6, position, truncate=False)
        short = prompt_tower(clip, NAMES, 6, position)
        assert short.tokens.shape[1] == clip.text.ends(full.tokens).max() + 1 < full.tokens.shape[1]
        torch.testing.assert_close(short.encode(context), full.encode(context), rtol=0, atol=1e-6)


def test_without_the_causal_mask_the_result_is_another(clip, monkeypatch):
    words = word_context(clip)
    masked = prompt_tower(clip, NAMES, 4).encode(words)
    monkeypatch.setitem(clip.module._buffers, "attn_mask", None)
    assert (prompt_tower(clip, NAMES, 4).encode(words) - masked).abs().max() > 1e-3


def test_positions_are_added_to_the_context_once(clip):
    # a context vector that takes the position of its place away leaves none in the input of the first block
    tower, seen = prompt_tower(clip, NAMES, 2), []
    first = clip.module.transformer.resblocks[0].ln_1
    handle = first.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tower.encode(-clip.module.positional_embedding[1:3])
    replace(tower, packs=False).encode(-clip.module.positional_embedding[1:3])
    handle.remove()
    packed, whole = seen
    assert not packed[..., 1:3, :].any() and not whole[:, 1:3].any()


def test_context_may_differ_by_class_and_come_in_blocks(clip):
    width = clip.module.token_embedding.embedding_dim
    shared, own = random_context(0, "a", 2, width), random_context(0, "b", len(NAMES), 3, width)
    tower = prompt_tower(clip, NAMES, 5)
    texts = tower.encode(shared, own)
    together = tower.encode(torch.cat([shared.expand(len(NAMES), 2, width), own], dim=1))
    torch.testing.assert_close(texts, together, rtol=0, atol=1e-6)
    other = own.clone()
    other[2] = 5 * other[2].flip(-1)  # not a constant added to a vector, which the norm would take away
    moved = (tower.encode(shared, other) - texts).abs().amax(1) > 1e-4
    assert moved.tolist() == [False, False, True, False]
    assert (tower.encode(own, shared) - texts).abs().max() > 1e-4  # the order counts


def test_one_context_an_image_gives_one_set_of_texts_an_image(clip):
    tower = prompt_tower(clip, NAMES, 2)
    contexts = random_context(0, "test", 3, 2, tower.width)
    texts = tower.encode(contexts[:, None])
    assert texts.shape == (3, len(NAMES), clip.embed_dim)
    for i in range(3):
        torch.testing.assert_close(texts[i], tower.encode(contexts[i]), rtol=0, atol=1e-6)


def test_only_the_context_has_a_gradient_and_the_tower_never_changes(clip):
    assert not clip.module.training
    before = {name: value.clone() for name, value in clip.module.state_dict().items()}
    tower = prompt_tower(clip, NAMES, 3)
    context = random_context(0, "test", 3, tower.width).requires_grad_()
    (tower.encode(context) @ torch.arange(1.0, clip.embed_dim + 1)).sum().backward()
    assert (context.grad.abs().amax(1) > 0).all()
    assert all(p.grad is None and not p.requires_grad for p in clip.module.parameters())
    assert not tower.embedded.requires_grad
    assert all(torch.equal(before[name], value) for name, value in clip.module.state_dict().items())


def test_gradient_is_that_of_finite_differences():
    clip = tiny_backbone("clip:embedded")
    tower = prompt_tower(clip, NAMES, 3, "middle")
    context, target = random_context(0, "test", 3, tower.width), random_context(1, "test", 4, clip.embed_dim)
    direction = 50 * random_context(2, "test", 3, tower.width)
    moving = context.clone().requires_grad_()
    (tower.encode(moving) * target).sum().backward()
    step = 1e-3
    ahead, behind = ((tower.encode(context + sign * step * direction) * target).sum() for sign in (1, -1))
    assert ((ahead - behind) / (2 * step)).item() == pytest.approx((moving.grad * direction).sum().item(), rel=0.02)


def test_word_context_counts_tokens_not_words():
    clip = small_clip()
    pieces = clip.tokenizer.encode("unphotographable thing")
    assert len(pieces) > 2
    context = word_context(clip, "unphotographable thing")
    assert torch.equal(context, clip.module.token_embedding(torch.tensor(pieces)))


def test_a_drawn_context_is_the_same_for_all_methods_of_a_seed():
    clip = tiny_backbone("clip:embedded")
    context = initial_context(clip, 7, 500, "random")
    assert torch.equal(context, initial_context(clip, 7, 500, "random"))
    assert not torch.equal(context, initial_context(clip, 8, 500, "random"))
    # N(0, 0.02^2): 32,000 draws
    assert context.std().item() == pytest.approx(0.02, rel=0.02) and abs(context.mean().item()) < 5e-4
    by_class = initial_context(clip, 7, 3, "random", classes=4)
    assert by_class.shape == (4, 3, 64) and not torch.equal(by_class[0], by_class[1])
    assert torch.equal(initial_context(clip, 7, 9, "words", classes=4)[3], word_context(clip))


def test_a_context_that_does_not_fit_is_refused():
    clip = tiny_backbone("clip:embedded")
    # 32 places: start, "bird", ".", end leave 28
    assert prompt_tower(clip, ("bird",), 28).context_length == 28
    with pytest.raises(FedbenchError, match="29 tokens does not fit.*at most 28"):
        prompt_tower(clip, ("bird",), 29)
    with pytest.raises(FedbenchError, match="does not fit"):
        prompt_tower(clip, ("bird",), 0)
    with pytest.raises(FedbenchError, match="does not fit"):
        prompt_tower(clip, ("bird", "a very long name " * 8), 4)


def test_blocks_that_do_not_add_up_are_refused():
    tower = prompt_tower(tiny_backbone("clip:embedded"), NAMES, 4)
    with pytest.raises(FedbenchError, match="add up"):
        tower.encode(torch.zeros(3, tower.width))


def test_a_tower_that_pools_elsewhere_is_refused():
    with pytest.raises(FedbenchError, match="takes no context of learned vectors: it pools at 'first'"):
        prompt_tower(small_clip(pool_type="first"), NAMES, 4)


def test_a_tokenizer_without_one_token_placeholder_is_refused():
    clip = small_clip()
    double = replace(clip, tokenizer=lambda texts: clip.tokenizer([t.replace("X", "x x") + " " + t for t in texts]))
    with pytest.raises(FedbenchError, match="placeholder|one token of none"):
        prompt_tower(double, NAMES, 4)


def test_classes_come_in_the_order_of_their_names(clip):
    texts = prompt_tower(clip, NAMES, 4).encode(word_context(clip))
    for i, name in enumerate(NAMES):
        alone = clip.encode_text([f"a photo of a {name.replace('_', ' ')}."])
        torch.testing.assert_close(texts[i], class_vectors(alone, 1)[0], rtol=0, atol=1e-6)


def images(clip: ClipBackbone, count: int = 3) -> torch.Tensor:
    size = clip.image_size
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_without_tokens_the_image_tower_is_encode_image(clip):
    visual, batch = require_vision_transformer(clip, "test"), images(clip)
    plain, none = clip.module.encode_image(batch), torch.zeros(0, visual.width)
    assert plain.abs().max() > 0.1
    # only the order of sums differs
    torch.testing.assert_close(encode_with_tokens(visual, batch, none), plain, rtol=0, atol=2e-5)
    torch.testing.assert_close(encode_with_tokens(visual, batch), plain, rtol=0, atol=2e-5)


def test_tokens_change_the_image_feature_even_when_they_are_zero(clip):
    visual, batch = require_vision_transformer(clip, "test"), images(clip)
    plain = clip.module.encode_image(batch)
    zeros = torch.zeros(2, visual.width)
    assert (encode_with_tokens(visual, batch, zeros) - plain).abs().max() > 1e-4
    drawn = torch.randn(3, 2, visual.width, generator=torch.Generator().manual_seed(1))
    features = encode_with_tokens(visual, batch, drawn)
    assert (features - encode_with_tokens(visual, batch, zeros)).abs().max() > 1e-4
    # tokens of each image's own
    alone = encode_with_tokens(visual, batch[1:2], drawn[1])
    torch.testing.assert_close(features[1:2], alone, rtol=0, atol=1e-5)


def test_tokens_enter_behind_the_patches_before_the_first_norm_and_without_position(clip):
    visual, batch, seen = require_vision_transformer(clip, "test"), images(clip), []
    tokens = torch.randn(2, visual.width, generator=torch.Generator().manual_seed(1))
    handle = visual.module.visual.ln_pre.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    encode_with_tokens(visual, batch, tokens)
    handle.remove()
    assert seen[0].shape[1] == visual.module.visual.positional_embedding.shape[0] + 2
    assert torch.equal(seen[0][:, -2:], tokens.expand(3, -1, -1))


def test_tokens_have_a_gradient_and_the_image_tower_has_none(clip):
    visual = require_vision_transformer(clip, "test")
    tokens = torch.randn(2, visual.width, generator=torch.Generator().manual_seed(1)).requires_grad_()
    encode_with_tokens(visual, images(clip), tokens).sum().backward()
    assert (tokens.grad.abs().amax(1) > 0).all()
    assert all(p.grad is None for p in visual.module.visual.parameters())


def test_a_residual_network_has_no_place_for_tokens():
    with torch.random.fork_rng(devices=[]):
        resnet = CLIP(
            8,
            open_clip.CLIPVisionCfg(image_size=32, layers=(1, 1, 1, 1), width=8, head_width=8),
            open_clip.CLIPTextCfg(context_length=8, vocab_size=10, width=8, heads=1, layers=1),
        )
    with pytest.raises(FedbenchError, match="backbone"):
        require_vision_transformer(replace(small_clip(), module=resnet), "test")
