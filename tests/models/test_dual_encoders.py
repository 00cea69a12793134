"""Every kind of dual encoder, tiny and with random weights: features, prompts, cohorts, what each is refused for."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip.coca_model import CoCa, MultimodalCfg
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP
from torch import nn
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError
from fedbench.kinds.registry import find_method
from fedbench.models import image_size_of, load_backbone
from fedbench.models.clip.backbone import ClipBackbone, full_clip_model, image_features, tower_tensors
from fedbench.models.clip.image_towers import lacking
from fedbench.models.clip.transformers_models import PaddedTexts, transform_of
from fedbench.models.inputs import CroppedTransform, PixelTransform
from fedbench.models.prompts.context import prompt_tower, random_context, word_context
from fedbench.models.prompts.image_tokens import encode_with_tokens, require_vision_transformer
from fedbench.plugins.requirements import refuse_towers
from fedbench.rounds.loop import evaluate
from fedbench.runs.prepare import Settings, prepare
from fedbench.testing import final_state, tiny_dataset, tiny_spec
from fedbench_methods.shared.patches import ClipPatchEncoder, all_tokens

NAMES = ("red car", "ship", "big blue ship")
WORDS = ["a", "photo", "of", "red", "car", "ship", "big", "blue", "X", "x", ".", "an", "it"]
SIZE, PLACES = 16, 12
HALF = PixelTransform((0.5,) * 3, (0.5,) * 3, SIZE)
PIXELS = torch.randint(0, 256, (3, 3, 20, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
TEXT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": PLACES, "vocab_size": 20,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "image_size": SIZE,
    "patch_size": 8,
}  # fmt: skip


def drawn(make: Callable[[], Any]) -> Any:
    """A model of random weights large enough to differ in every direction."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = make()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        for part in model.modules():
            if isinstance(part, nn.LayerNorm | nn.BatchNorm2d):
                nn.init.ones_(part.weight)
    return model.eval().requires_grad_(False)


def word_tokenizer(start: str = "", end: str = "", pad: str = "[PAD]") -> Any:
    """A tokenizer of transformers with a token a word, and what it puts around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = [pad, "[UNK]", *(one for one in (start, end) if one and one != pad)]
    ids = {word: number for number, word in enumerate([*special, *WORDS])}
    words = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [(one, ids[one]) for one in (start, end) if one]
    words.post_processor = processors.TemplateProcessing(single=f"{start} $A {end}".strip(), special_tokens=around)
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=pad,
        eos_token=end or None,
        bos_token=start or None,
        unk_token="[UNK]",
        padding_side="right",
    )


def tiny_vision(**more: object) -> CLIPVisionCfg:
    return CLIPVisionCfg(**{"image_size": SIZE, "patch_size": 8, "width": 16, "head_width": 8, "layers": 2, **more})


def tiny_text(**more: object) -> CLIPTextCfg:
    return CLIPTextCfg(**{"context_length": 77, "width": 16, "heads": 2, "layers": 2, **more})


def of_open_clip(make: Callable[[], nn.Module], tokenizer: Any = None) -> ClipBackbone:
    module = drawn(make)
    return ClipBackbone("clip:tiny", module, tokenizer or open_clip.SimpleTokenizer(), HALF, 8)


def custom(**text: object) -> ClipBackbone:
    return of_open_clip(lambda: CustomTextCLIP(8, tiny_vision(), tiny_text(**text)))


def siglip_like(network: str = "resnet10t", size: int = SIZE, pool: str = "avg") -> ClipBackbone:
    tokens = PaddedTexts(word_tokenizer(end="</s>", pad="</s>"), PLACES, masks=False)
    text = {"context_length": PLACES, "vocab_size": 20, "no_causal_mask": True, "pool_type": "last"}
    timm = CLIPVisionCfg(timm_model_name=network, timm_pool=pool, timm_proj="linear", image_size=size)
    made = of_open_clip(lambda: CustomTextCLIP(8, timm, tiny_text(**text), init_logit_bias=-10), tokens)
    return replace(made, transform=replace(HALF, size=size))


def coca() -> ClipBackbone:
    text = tiny_text(embed_cls=True, output_tokens=True, context_length=76)
    vision = tiny_vision(attentional_pool=True, attn_pooler_heads=2, output_tokens=True)
    decoder = MultimodalCfg(width=16, heads=2, layers=1, context_length=76, vocab_size=49408)
    tokenizer = open_clip.SimpleTokenizer(context_length=76)
    return of_open_clip(lambda: CoCa(8, decoder, text, vision), tokenizer)


def bert_inside(folder: Path, pooler: str = "mean_pooler") -> ClipBackbone:
    from open_clip.tokenizer import HFTokenizer
    from transformers import BertConfig

    word_tokenizer("[CLS]", "[SEP]").save_pretrained(folder)
    BertConfig(**TEXT, pad_token_id=0).save_pretrained(folder)
    text = tiny_text(hf_model_name=str(folder), hf_model_pretrained=False, hf_proj_type="linear", hf_pooler_type=pooler)
    made = of_open_clip(lambda: CustomTextCLIP(8, tiny_vision(), text), HFTokenizer(str(folder), context_length=PLACES))
    made.module.text.transformer.set_attn_implementation("eager")
    return made


def transformers_folder(kind: str, folder: Path) -> Path:
    """A model of transformers as ``save_pretrained`` leaves it, with tokenizer and preprocessor."""
    import transformers as hf

    given: dict[str, Any] = {
        "image_mean": [0.4] * 3,
        "image_std": [0.3] * 3,
        "resample": 3,
        "size": {"height": SIZE, "width": SIZE},
    }
    if kind == "clip":
        given |= {"size": {"shortest_edge": SIZE}, "do_center_crop": True, "crop_size": {"height": SIZE, "width": SIZE}}
        tokenizer = word_tokenizer(end="</s>", start="<s>")
        text = {**TEXT, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
        make = lambda: hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8))  # noqa: E731
    elif kind.startswith("siglip"):
        tokenizer = word_tokenizer(end="</s>", pad="</s>")
        of = {"siglip": (hf.SiglipModel, hf.SiglipConfig), "siglip2": (hf.Siglip2Model, hf.Siglip2Config)}[kind]
        text = {**TEXT, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "projection_size": 16}
        vision = {**VISION, "num_patches": 4} if kind == "siglip2" else VISION
        make = lambda: of[0](of[1](text_config=text, vision_config=vision))  # noqa: E731
    elif kind == "align":
        tokenizer = word_tokenizer("[CLS]", "[SEP]")
        given |= {"rescale_factor": 2 / 255, "rescale_offset": True, "do_normalize": False, "resample": 2}
        given |= {
            "size": {"height": 24, "width": 24},
            "do_center_crop": True,
            "crop_size": {"height": SIZE, "width": SIZE},
        }
        vision = {
            "image_size": SIZE, "hidden_dim": 16, "depth_divisor": 8, "kernel_sizes": [3], "in_channels": [32],
            "out_channels": [32], "depthwise_padding": [], "strides": [1], "num_block_repeats": [1],
            "expand_ratios": [1], "width_coefficient": 0.5, "depth_coefficient": 1.0,
        }  # fmt: skip
        both = hf.AlignConfig(text_config={**TEXT, "pad_token_id": 0}, vision_config=vision, projection_dim=16)
        make = lambda: hf.AlignModel(both)  # noqa: E731
    else:
        tokenizer = word_tokenizer("[CLS]", "[SEP]")
        joined = hf.VisionTextDualEncoderConfig.from_vision_text_configs(
            hf.ViTConfig(**VISION), hf.BertConfig(**TEXT, pad_token_id=0), projection_dim=8
        )
        make = lambda: hf.VisionTextDualEncoderModel(joined)  # noqa: E731
    tokenizer.save_pretrained(folder)
    drawn(make).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(given))
    return folder


LACK = {
    "causal": set(), "causal eos": set(), "bidirectional": {"text_layers"},
    "siglip": {"text_layers", "image_layers", "patches"},
    "coca": {"context", "text_layers", "image_layers", "patches"},
    "bert mean": {"text_layers"}, "bert cls": {"text_layers"},
    "hf clip": set(),
    **dict.fromkeys(("hf siglip", "hf siglip2", "timm vit", "timm vit map"), {"text_layers", "patches"}),
    **dict.fromkeys(("hf align", "hf joined"), {"text_layers", "image_layers", "patches"}),
}  # fmt: skip
"""What towers of each kind lack."""
KINDS = tuple(LACK)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def backbone(kind: str, tmp_path_factory: pytest.TempPathFactory) -> ClipBackbone:
    folder = tmp_path_factory.mktemp("model")
    if kind.startswith("hf "):
        name = {"hf joined": "vision-text-dual-encoder"}.get(kind, kind[3:])
        loaded = load_backbone(f"hf-clip:{transformers_folder(name, folder)}", data_dir=folder, seed=0)
        assert isinstance(loaded, ClipBackbone)
        return loaded
    if kind.startswith("bert"):
        return bert_inside(folder, f"{kind[5:]}_pooler")
    return {
        "causal": custom,
        "causal eos": lambda: custom(pool_type="eos", eos_id=49407),
        "bidirectional": lambda: custom(no_causal_mask=True),
        "siglip": siglip_like,
        "timm vit": lambda: siglip_like("test_vit", 160, "token"),
        "timm vit map": lambda: siglip_like("test_vit3", 160, "map"),
        "coca": coca,
    }[kind]()


def own_features(backbone: ClipBackbone, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of images and texts as the library itself gives them, from its own tables."""
    module: Any = backbone.module
    images, tokens = backbone.transform(PIXELS), backbone.tokenizer(texts)
    if not hasattr(module, "get_text_features"):
        return module.encode_image(images, normalize=False), module.encode_text(tokens, normalize=False)
    kind = module.config.model_type
    mask = {} if kind.startswith(("clip", "siglip")) else {"attention_mask": (tokens != 0).long()}
    if kind == "siglip2":
        return image_features(module, images), module.get_text_features(input_ids=tokens).pooler_output
    of_text = module.get_text_features(input_ids=tokens, **mask).pooler_output
    return module.get_image_features(pixel_values=images).pooler_output, of_text


@torch.no_grad()
def test_features_are_the_librarys_own(backbone: ClipBackbone) -> None:
    texts = [f"a photo of a {name}." for name in NAMES]
    images, expected = own_features(backbone, texts)
    torch.testing.assert_close(backbone.encode_images(PIXELS), images, rtol=0, atol=1e-6)
    found = backbone.encode_text(texts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found.shape == (3, backbone.embed_dim) == images.shape
    assert not torch.allclose(found[0], found[1], atol=1e-3)
    alone = backbone.encode_text([texts[0]])
    torch.testing.assert_close(found[:1], alone, rtol=1e-5, atol=1e-5)
    short = backbone.text.truncated(backbone.tokenizer(texts))
    torch.testing.assert_close(backbone.text.encode_truncated(short), expected, rtol=1e-5, atol=1e-5)


def test_what_a_tower_lacks_is_refused_by_name(kind: str, backbone: ClipBackbone) -> None:
    missing = lacking(backbone.module)
    assert set(missing) == LACK[kind]
    for name in ("context", "image_layers", "patches"):
        if name in missing:
            with pytest.raises(FedbenchError, match=rf"mine needs .* \({name}\), and backbone .* has none: .*; use"):
                refuse_towers({name: "mine"}, backbone)
    refuse_towers({"labels": "mine"}, backbone)


def test_prompts_of_the_words_are_zero_shot(kind: str, backbone: ClipBackbone) -> None:
    if "context" in LACK[kind]:
        with pytest.raises(FedbenchError, match="takes no context of learned vectors: it has a class embedding"):
            prompt_tower(backbone, NAMES, 4)
        return
    if kind == "hf siglip2":
        with pytest.raises(FedbenchError, match="or pads texts in front"):  # as transformers' tokenizer of it does
            prompt_tower(backbone, NAMES, 4)
        return
    words = word_context(backbone, "a photo of a")
    assert words.shape == (4, backbone.text.width)
    texts = normalize(backbone.encode_text([f"a photo of a {name}." for name in NAMES]), dim=-1)
    tower = prompt_tower(backbone, NAMES, 4)
    torch.testing.assert_close(tower.encode(words), texts, rtol=0, atol=1e-5)
    # behind the name, and as one context a class
    behind = normalize(backbone.encode_text([f"{name} a photo of a ." for name in NAMES]), dim=-1)
    front = prompt_tower(backbone, NAMES, 4, position="front")
    torch.testing.assert_close(front.encode(words.expand(3, -1, -1)), behind, rtol=0, atol=1e-5)
    with pytest.raises(FedbenchError, match="does not fit"):
        prompt_tower(backbone, NAMES, 90)


@torch.no_grad()
def test_image_towers_written_out_give_the_librarys_features(kind: str, backbone: ClipBackbone) -> None:
    if "image_layers" in LACK[kind]:
        with pytest.raises(FedbenchError, match=r"test, and the image tower .* \(image_layers\); use one"):
            require_vision_transformer(backbone, "test")
        return
    tower, images = require_vision_transformer(backbone, "test"), backbone.transform(PIXELS)
    expected = backbone.encode_images(PIXELS)
    torch.testing.assert_close(encode_with_tokens(tower, images), expected, rtol=1e-4, atol=1e-5)
    tokens = random_context(0, "tokens", 3, 2, tower.width)
    prompted = encode_with_tokens(tower, images, tokens)
    assert prompted.shape == expected.shape and (prompted - expected).abs().max() > 1e-3
    deeper = encode_with_tokens(tower, images, tokens, deep=[10 * tokens])
    assert (deeper - prompted).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("kind", ["hf clip", "hf siglip", "timm vit"], indirect=True)
@pytest.mark.parametrize("projection", ["q", "v", "o"])
def test_additions_to_projections_are_those_of_changed_weights(
    projection: str, kind: str, backbone: ClipBackbone
) -> None:
    changed = ClipBackbone("changed", deepcopy(backbone.module), backbone.tokenizer, backbone.transform, 8)
    tower, images = require_vision_transformer(backbone, "test"), backbone.transform(PIXELS)
    extra = random_context(0, "extra", tower.width, tower.width)

    def added(name: str, x: torch.Tensor) -> torch.Tensor | None:
        return x @ extra.T if name == projection else None

    found = encode_with_tokens(tower, images, added=lambda layer: added if layer == 1 else None)
    if kind.startswith("hf"):
        own = changed.module.vision_model.encoder.layers[1].self_attn
        {"q": own.q_proj, "v": own.v_proj, "o": own.out_proj}[projection].weight += extra
    else:
        own, width = changed.module.visual.trunk.blocks[1].attn, tower.width
        rows = {"q": slice(width), "v": slice(2 * width, None), "o": slice(None)}[projection]
        (own.proj if projection == "o" else own.qkv).weight[rows] += extra
    expected = changed.encode_images(PIXELS)
    assert (expected - backbone.encode_images(PIXELS)).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_patches_of_transformers_clip_are_its_tokens_in_the_space_of_texts(tmp_path: Path) -> None:
    loaded = load_backbone(f"hf-clip:{transformers_folder('clip', tmp_path)}", data_dir=tmp_path, seed=0)
    assert isinstance(loaded, ClipBackbone)
    images, module = loaded.transform(PIXELS), loaded.module
    tokens = all_tokens(module, images)
    torch.testing.assert_close(tokens[:, 0], loaded.encode_images(PIXELS), rtol=1e-4, atol=1e-5)
    vision = module.vision_model
    states = vision(pixel_values=images).last_hidden_state[:, 3]
    torch.testing.assert_close(tokens[:, 3], module.visual_projection(vision.post_layernorm(states)))
    assert ClipPatchEncoder(loaded)(PIXELS).shape == (3, 4, 8)


# open_clip's own bidirectional attention has no batching rule: clients train in turn
@pytest.mark.parametrize(
    "kind", [k for k in KINDS if k.startswith(("causal", "bert", "hf")) and k != "hf siglip2"], indirect=True
)
def test_gradients_of_a_cohort_are_those_of_its_clients(kind: str, backbone: ClipBackbone) -> None:
    tower = prompt_tower(backbone, NAMES, 2)
    contexts = torch.randn(3, 2, tower.width, generator=torch.Generator().manual_seed(1))

    def gradient(context: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.grad(lambda given: tower.encode(given)[0].cumsum(0).sum())(context)
        return found

    alone = torch.stack([gradient(context) for context in contexts])
    torch.testing.assert_close(torch.func.vmap(gradient)(contexts), alone, rtol=1e-3, atol=1e-4)
    assert alone.abs().max() > 1e-3


def test_both_towers_train_and_nothing_else(backbone: ClipBackbone) -> None:
    weights, _, forward = full_clip_model(backbone, NAMES, ("a photo of a {}",))
    assert not [name for name in weights if name.startswith(("text_decoder", "logit_bias"))]
    _, buffers = tower_tensors(backbone.module)
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    outputs = forward({**leaves, **buffers}, backbone.transform(PIXELS), False)
    texts = backbone.text_features(NAMES, ("a photo of a {}",))
    expected = backbone.logit_scale * normalize(backbone.encode_images(PIXELS), dim=-1) @ texts.T
    torch.testing.assert_close(outputs.logits.detach(), expected, rtol=1e-4, atol=1e-3)
    outputs.logits.square().sum().backward()
    assert sum(leaf.grad is not None for leaf in leaves.values()) > 0.6 * len(leaves)


USES = {
    "fedclip": ({}, None),
    "promptfl": ({"context_length": 2}, "context"),
    "maple": ({"context_length": 2, "depth": 2}, "text_layers"),
    "clip-lora": ({"encoders": "image"}, "image_layers"),
    "fedotp": ({"context_length": 2}, "patches"),
}
"""Methods with small values, and which capability of theirs fewest kinds have."""


@pytest.mark.parametrize("method", USES)
def test_methods_run_on_every_kind(method: str, kind: str, backbone: ClipBackbone, tmp_path: Path) -> None:
    params, needs = USES[method]
    spec = tiny_spec(method, backbone="clip:embedded", rounds=1)
    spec = spec.model_copy(update={"params": {method: params}})
    data = replace(tiny_dataset(), classnames=("car", "ship", "big ship", "blue car"))
    settings = Settings(tmp_path, tmp_path)
    if needs in LACK[kind] or (kind == "hf siglip2" and "context" in find_method(method).requires):
        with pytest.raises(FedbenchError, match=r"needs .* \(\w+\)|\((image|text)_layers\)|or pads texts in front"):
            prepare(spec, settings, dataset=data, backbone=backbone)
        return
    run = prepare(spec, settings, dataset=data, backbone=backbone)
    start = evaluate(run, run.initial_state())[1].labels
    assert len(start) == len(data.test.labels)
    after = final_state(run).weights
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert any(not torch.equal(tensor, run.model.weights[name]) for name, tensor in after.items())


def test_a_folder_of_open_clip_is_a_backbone(tmp_path: Path) -> None:
    given = custom()
    text = {"context_length": 77, "width": 16, "heads": 2, "layers": 2}
    vision = {"image_size": SIZE, "patch_size": 8, "width": 16, "head_width": 8, "layers": 2}
    model = {"embed_dim": 8, "custom_text": True, "vision_cfg": vision, "text_cfg": text}
    shown = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "squash"}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": model, "preprocess_cfg": shown}))
    from safetensors.torch import save_file

    save_file(given.module.state_dict(), tmp_path / "open_clip_model.safetensors")
    name = f"clip:local-dir:{tmp_path}"
    loaded = load_backbone(name, data_dir=tmp_path, seed=0)
    assert isinstance(loaded, ClipBackbone)
    assert loaded.weights_hash == given.weights_hash and loaded.embed_dim == 8
    assert (loaded.transform.mode, loaded.image_size, image_size_of(name)) == ("squash", SIZE, SIZE)
    torch.testing.assert_close(loaded.encode_text(["a ship"]), given.encode_text(["a ship"]))
    with pytest.raises(FedbenchError, match="write 'clip:local-dir:FOLDER'"):
        load_backbone(f"clip:local-dir:{tmp_path / 'none'}", data_dir=tmp_path, seed=0)
    wrong = {"model_cfg": model, "preprocess_cfg": {**shown, "resize_mode": "longest"}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(wrong))
    with pytest.raises(FedbenchError, match="its resize_mode 'longest' pads images"):
        load_backbone(name, data_dir=tmp_path, seed=0)
    oblong = {**model, "vision_cfg": {**vision, "image_size": [SIZE, 8]}}
    for damaged in ("{", "[]", "{}", json.dumps({"model_cfg": oblong, "preprocess_cfg": shown})):
        (tmp_path / "open_clip_config.json").write_text(damaged)
        assert image_size_of(name) is None
        with pytest.raises(FedbenchError, match=r"backbone '.*' (can't be loaded|takes images of)"):
            load_backbone(name, data_dir=tmp_path, seed=0)
    assert image_size_of("clip:hf-hub:a/b/c") is None


def test_images_are_prepared_as_transformers_says(tmp_path: Path) -> None:
    import transformers as hf

    kinds = {"siglip": hf.SiglipConfig(), "clip": hf.CLIPConfig(), "align": hf.AlignConfig()}
    square = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "size": {"height": 8, "width": 8}, "resample": 2}
    assert transform_of(square, kinds["siglip"], "b") == PixelTransform(
        (0.5,) * 3, (0.25,) * 3, 8, "squash", "bilinear"
    )
    offset = {**square, "rescale_factor": 2 / 255, "rescale_offset": True, "do_normalize": False}
    made = transform_of(offset, kinds["align"], "b")
    torch.testing.assert_close(made(torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)), torch.ones(1, 3, 8, 8))
    torch.testing.assert_close(made(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)), -torch.ones(1, 3, 8, 8))
    cut = transform_of(
        {**square, "size": {"shortest_edge": 8}, "do_center_crop": True, "crop_size": 6}, kinds["clip"], "b"
    )
    assert isinstance(cut, CroppedTransform) and (cut.edge, cut.size, cut.mode) == (8, 6, "shortest")
    image = torch.arange(8 * 16, dtype=torch.uint8).view(1, 1, 8, 16).expand(1, 3, 8, 16)
    expected = (image[..., 1:7, 5:11].float() / 255 - 0.5) / 0.25
    torch.testing.assert_close(cut(image), expected)
    for wrong in ({"size": {"shortest_edge": 8}}, {**square, "do_resize": False}, {**square, "resample": 0}):
        with pytest.raises(FedbenchError, match="no fixed square size"):
            transform_of({**square, **wrong}, kinds["clip"], "b")
    for wrong in ({"image_mean": None}, {"resample": None}, {"rescale_factor": "x"}):
        with pytest.raises(FedbenchError, match="its preprocessor_config.json can't be used"):
            transform_of({**square, **wrong}, kinds["clip"], "b")


def test_other_models_of_transformers_are_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    word_tokenizer("[CLS]", "[SEP]").save_pretrained(tmp_path)
    drawn(lambda: BertModel(BertConfig(**TEXT))).save_pretrained(tmp_path)
    for name, message in (
        (f"hf-clip:{tmp_path}", "is a 'bert' model of transformers, none of clip, siglip"),
        (f"hf-clip:{tmp_path / 'none'}", "write 'hf-clip:FOLDER'"),
        ("hf-clip:", "is incomplete"),
    ):
        with pytest.raises(FedbenchError, match=message):
            load_backbone(name, data_dir=tmp_path, seed=0)


def test_clip_itself_lacks_nothing() -> None:
    assert lacking(drawn(lambda: CLIP(8, tiny_vision(), tiny_text()))) == {}
