"""Features of single patches: what they are, their order, their precision in the cache, and what has none."""

from __future__ import annotations

import math
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.model import CLIP
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError
from fedbench.core.method.tasks import ClientTask
from fedbench.core.types import LinearHead, Model, Outputs
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.inputs import FeatureInputs, PixelTransform, encode
from fedbench.rounds.executors.gradients import head_features
from fedbench.rounds.executors.stack import rows_of
from fedbench.testing import tiny_backbone, tiny_dataset, tiny_run, tiny_spec
from fedbench_methods.shared.patches import ClipPatchEncoder, all_tokens, attend_everywhere

PIXELS = tiny_dataset().test.images.read(torch.arange(5))


def small_clip(**vision: object) -> ClipBackbone:
    """An untrained CLIP of width 8 on images of 32 x 32, two patches a side in a transformer."""
    tower = {"image_size": 32, "layers": 1, "width": 32, "patch_size": 16, "head_width": 16, **vision}
    text = {"context_length": 8, "vocab_size": 16, "width": 16, "heads": 2, "layers": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = CLIP(8, open_clip.CLIPVisionCfg(**tower), open_clip.CLIPTextCfg(**text))
        for layer in module.modules():
            # as built, the last norm of a ResNet's block is zero, and a layer norm's weight is the same everywhere
            if isinstance(layer, (nn.BatchNorm2d, nn.LayerNorm)):
                nn.init.uniform_(layer.weight, 0.5, 1.5)
                nn.init.normal_(layer.bias)
    transform = PixelTransform((0.5,) * 3, (0.5,) * 3, int(tower["image_size"]))
    return ClipBackbone("clip:small", module.eval().requires_grad_(False), lambda texts: Tensor(), transform, 8)


def resnet() -> ClipBackbone:
    # 64 pixels: two positions a side at the end
    return small_clip(image_size=64, layers=(1, 1, 1, 1), width=8, head_width=8)


def test_patches_are_the_tokens_behind_the_class_token_normed_projected_and_of_unit_length() -> None:
    clip = tiny_backbone("clip:embedded")
    assert isinstance(clip, ClipBackbone)
    visual = clip.module.visual
    found = ClipPatchEncoder(clip)(PIXELS)
    assert found.shape == (5, 16, 128) and found.dtype == torch.float16
    with torch.no_grad():
        x = visual.transformer(visual._embeds(clip.transform(PIXELS)))
    for patch in range(16):
        feature = visual.ln_post(x[:, 1 + patch]) @ visual.proj
        wanted = feature / feature.square().sum(1, keepdim=True).sqrt()
        # half precision is off by 2^-11 of an entry at most
        torch.testing.assert_close(found[:, patch].float(), wanted, rtol=2**-11, atol=1e-6)


@pytest.mark.parametrize("vision", [{}, {"final_ln_after_pool": True}, {"no_ln_pre": True}, {"layers": 3}])
def test_the_token_before_the_patches_is_the_pooled_feature(vision: dict[str, object]) -> None:
    clip = small_clip(**vision)
    images = clip.transform(PIXELS)
    torch.testing.assert_close(all_tokens(clip.module, images)[:, 0], clip.module.encode_image(images))


def test_of_a_resnet_every_position_is_a_query_of_the_attention_pool() -> None:
    clip = resnet()
    images = clip.transform(PIXELS)
    tokens = all_tokens(clip.module, images)
    assert tokens.shape == (5, 1 + 4, 8)
    torch.testing.assert_close(tokens[:, 0], clip.module.encode_image(images))
    encoded = ClipPatchEncoder(clip)(PIXELS)
    assert encoded.dtype == torch.float16
    torch.testing.assert_close(encoded, normalize(tokens[:, 1:], dim=-1).half())


@torch.no_grad()
def test_attention_by_every_query_written_out() -> None:
    pool = open_clip.modified_resnet.AttentionPool2d(2, 6, num_heads=3, output_dim=4)
    for layer in (pool.k_proj, pool.q_proj, pool.v_proj, pool.c_proj):
        nn.init.normal_(layer.bias)
    maps = torch.randn(2, 6, 2, 2, generator=torch.Generator().manual_seed(1))
    found = attend_everywhere(pool, maps)
    torch.testing.assert_close(found[:, 0], pool(maps))
    for image, (row, column) in ((0, (0, 1)), (1, (1, 0)), (1, (1, 1))):
        at = 1 + 2 * row + column
        own = [maps[image].flatten(1).mean(1), *(maps[image, :, r, c] for r in (0, 1) for c in (0, 1))]
        x = torch.stack(own) + pool.positional_embedding
        query, keys, values = pool.q_proj(x[at]), pool.k_proj(x), pool.v_proj(x)
        heads = []
        for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
            shares = torch.softmax(keys[:, part] @ query[part] / math.sqrt(2), dim=0)
            heads.append(shares @ values[:, part])
        torch.testing.assert_close(found[image, at], pool.c_proj(torch.cat(heads)))


def test_patches_come_row_by_row() -> None:
    clip = small_clip(layers=0)  # without attention a token knows of its own patch only
    pixels = torch.full((1, 3, 32, 32), 100, dtype=torch.uint8)
    changed = pixels.clone()
    changed[..., :16, 16:] += 50  # right of the first row
    before, after = (ClipPatchEncoder(clip)(each)[0] for each in (pixels, changed))
    assert (before != after).any(dim=1).tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    "vision", [{"pool_type": "avg"}, {"attentional_pool": True, "attn_pooler_heads": 2}, {"pool_type": "none"}]
)
def test_towers_without_a_class_token_are_refused_in_one_sentence(vision: dict[str, object]) -> None:
    with pytest.raises(FedbenchError, match="backbone 'clip:small' has no features of single patches.*; use") as error:
        ClipPatchEncoder(small_clip(**vision))
    assert "\n" not in str(error.value)


def test_they_have_a_key_of_their_own() -> None:
    clip, other = small_clip(), resnet()
    keys = [clip.image_encoder().key, ClipPatchEncoder(clip).key, ClipPatchEncoder(other).key]
    assert len(set(keys)) == 3 and ClipPatchEncoder(small_clip()).key == keys[1]


def test_the_cache_and_the_table_hold_halves_and_whoever_reads_gets_float32(tmp_path: Path) -> None:
    encoder, images = ClipPatchEncoder(small_clip()), tiny_dataset().test.images
    made, read = encode(images, encoder, tmp_path, batch_size=7), encode(images, encoder, tmp_path)
    assert made.dtype == read.dtype == torch.float16 and torch.equal(made, read)
    assert torch.equal(made[:5], encoder(PIXELS))
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        assert opened.get_slice("features").get_dtype() == "F16"
    inputs, index = FeatureInputs(read).select(torch.tensor([4, 0, 2])), torch.tensor([2, 1])
    assert inputs.features.dtype == torch.float16
    assert inputs.read(index).dtype == torch.float32 and torch.equal(inputs.read(index), made[[2, 0]].float())
    rows = torch.tensor([[2, 0], [1, 1]])
    assert rows_of(read, rows).dtype == torch.float32 and torch.equal(rows_of(read, rows), made[rows].float())


def test_a_head_on_a_table_of_halves_reads_float32(make_task_on: type[ClientTask]) -> None:
    table = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).half()
    found = head_features(make_task_on(table))
    assert found is not None and found.dtype == torch.float32 and torch.equal(found, table.float())
    same = table.float()
    whole = head_features(make_task_on(same))
    assert whole is not None and whole.data_ptr() == same.data_ptr()


@pytest.fixture
def make_task_on() -> object:
    """A function from a table of features to the task of a client with a linear head on them."""

    def forward(tensors: dict[str, Tensor], inputs: Tensor, training: bool) -> Outputs:
        return Outputs(inputs @ tensors["head.weight"].T + tensors["head.bias"], inputs)

    def make(table: Tensor) -> ClientTask:
        weights = {"head.weight": torch.zeros(2, 4), "head.bias": torch.zeros(2)}
        model = Model(weights, forward, head=LinearHead())  # type: ignore[arg-type]
        spec = tiny_spec("fedavg", backbone="clip:embedded")
        return ClientTask(0, 1, weights, {}, {}, FeatureInputs(table), None, None, model, spec, {}, None)  # type: ignore[arg-type]

    return make


def test_a_run_keeps_patches_as_halves() -> None:
    run = tiny_run(tiny_spec("fedotp", backbone="clip:embedded"))
    assert isinstance(run.train, FeatureInputs) and run.train.features.dtype == torch.float16
    first = run.train.read(torch.arange(2))
    assert first.shape == (2, 16, 128) and first.dtype == torch.float32
