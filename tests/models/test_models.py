"""Backbones: grammar, parameter counts, seeds, functional forwards, CLIP's transform, text and weight loading."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError
from fedbench.kinds.registry import registered
from fedbench.models import load_backbone, weight_files
from fedbench.models.clip import loading
from fedbench.models.clip.backbone import ClipBackbone, activation_of, full_clip_model
from fedbench.models.cnn.backbone import CnnBackbone, cnn_model
from fedbench.models.cnn.nets import build_body
from fedbench.models.names import parse_backbone
from fedbench.models.text.vectors import text_vectors
from fedbench_embedded import weights as shipped
from fedbench_embedded.tokens import FoldedTokenizer, grammar_ids

CLASSES = ("cat", "red fire engine", "bird")
TEMPLATES = ("a photo of a {}", "a blurry drawing of the {}, seen from far away")
NOWHERE = Path("no-data-dir")


def cnn(name: str, seed: int = 0, image_size: tuple[int, int] | None = None) -> CnnBackbone:
    backbone = load_backbone(name, data_dir=NOWHERE, seed=seed, image_size=image_size)
    assert isinstance(backbone, CnnBackbone)
    return backbone


def clip(name: str = "clip:embedded", data_dir: Path = NOWHERE) -> ClipBackbone:
    backbone = load_backbone(name, data_dir=data_dir, seed=0)
    assert isinstance(backbone, ClipBackbone)
    return backbone


def smooth_images(count: int, height: int, width: int) -> Tensor:
    coarse = torch.rand(count, 3, 7, 9, generator=torch.Generator().manual_seed(0))
    return (torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear") * 255).to(torch.uint8)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like fedbench_embedded, with random weights; its config also stands alone as architecture ``fbtiny``."""
    folder = tmp_path_factory.mktemp("embedded")
    tokenizer = FoldedTokenizer(grammar_ids(["a photo of a cat", "a drawing of the bird"]), 32)
    tokenizer.save(folder / "embedded_tokens.json")
    config = {
        "embed_dim": 128,
        "vision_cfg": {
            "image_size": 32, "patch_size": 8, "width": 192, "layers": 4, "head_width": 32, "mlp_ratio": 3.0
        },
        "text_cfg": {
            "context_length": 32, "vocab_size": tokenizer.vocab_size, "width": 64, "heads": 2, "layers": 2
        },
    }  # fmt: skip
    (folder / "embedded.json").write_text(json.dumps(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = open_clip.CLIP(**config)
    save_file(module.state_dict(), folder / "embedded.safetensors")
    return folder


@pytest.fixture
def embedded(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shipped, "FOLDER", tiny_dir)
    return tiny_dir


@pytest.fixture
def tagged(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """open_clip's tables with ``fbtiny`` and ``fbtiny-quickgelu``, weights of two tags in the returned data folder."""
    config = json.loads((tiny_dir / "embedded.json").read_text())
    config["text_cfg"]["vocab_size"] = 49408  # open_clip's own tokenizer
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "fbtiny", config)
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "fbtiny-quickgelu", {**config, "quick_gelu": True})
    openai = {"url": "https://nowhere.invalid/openai.pt", "quick_gelu": True, "hf_hub": ""}
    laion = {"url": "https://nowhere.invalid/laion.safetensors", "hf_hub": "", "mean": (0.5,) * 3, "std": (0.5,) * 3}
    absent = {"url": "https://nowhere.invalid/absent.pt", "quick_gelu": True, "hf_hub": ""}
    tables = {"openai": openai, "laion": laion, "absent": absent}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "fbtiny", tables)
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "fbtiny-quickgelu", {"openai": openai, "absent": absent})
    state = open_clip.CLIP(**config).state_dict()
    (tmp_path / "clip").mkdir()
    torch.save({"state_dict": state}, tmp_path / "clip" / "openai.pt")
    save_file(state, tmp_path / "clip" / "laion.safetensors")
    return tmp_path


# Names


def test_listing_backbones_imports_neither_torch_nor_open_clip() -> None:
    code = (
        "import sys; from fedbench.kinds.registry import registered\n"
        "for one in registered('backbone').values(): one.load()\n"
        "sys.exit('torch' in sys.modules)"
    )
    # without the third party's package, whose modules import what they like
    own = [entry for entry in sys.path if not list(Path(entry).glob("fedbench_example_*"))]
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(own)}).returncode == 0
    assert {"resnet8", "clip:embedded"} <= registered("backbone").keys()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("resnet9", "unknown backbone 'resnet9'; did you mean 'resnet8'"),
        ("clip:ViT-B-33@openai", "unknown CLIP architecture 'ViT-B-33'; did you mean 'ViT-B-32'"),
        (
            "clip:ViT-B-16@laion2b_s34b",
            "unknown checkpoint of ViT-B-16: 'laion2b_s34b'; did you mean 'laion2b_s34b_b88k'",
        ),
        ("clip:ViT-B-16", "names no weights: write 'clip:ViT-B-16@CHECKPOINT'"),
        ("clip:ViT-B-16-SigLIP@web", "unknown checkpoint of ViT-B-16-SigLIP: 'web'; did you mean 'webli'"),
        ("clip:", "is incomplete: type clip:ARCH@CHECKPOINT"),
        ("clip:ViT-B-16:", "is incomplete: write 'clip:embedded' or 'clip:ARCH@CHECKPOINT'"),
        ("clip::openai", "is incomplete: write 'clip:embedded' or 'clip:ARCH@CHECKPOINT'"),
        ("clip:embedded?width=2", "takes no options, got 'width=2'"),
        ("clip:embedded@openai", "nothing can follow its name; type 'clip:embedded'"),
        ("clip:embeded", "unknown CLIP architecture 'embeded'; did you mean 'embedded'"),
        ("clip:ViT-B-32@/nowhere/weights.pt", "there is no file '/nowhere/weights.pt'"),
        ("resnet8?widht=2", "unknown option of backbone 'resnet8' 'widht'; did you mean 'width'"),
        ("resnet8?width=wide", "backbone 'resnet8?width=wide': option width='wide': input should be a valid integer"),
        ("resnet8?width=0", "option width='0'"),
        ("resnet8?width=1&width=2", "'resnet8?width=1&width=2': option 'width' is given twice"),
        ("resnet50?stem=tiny", "option stem='tiny': input should be 'cifar' or 'imagenet'"),
        ("resnet50?projector_layers=2", "projector_layers needs a projector; add '&projector=WIDTH'"),
        ("resnet8:small", "nothing can follow the colon; type 'resnet8'"),
        ("alexnet?resize=32", "alexnet needs images of 63 px or more, got resize=32"),
    ],
)
def test_wrong_name_says_what_to_write(name: str, said: str) -> None:
    with pytest.raises(FedbenchError) as error:
        load_backbone(name, data_dir=NOWHERE, seed=0)
    assert said in str(error.value)


def test_too_small_images_are_refused_with_the_resize_to_write() -> None:
    with pytest.raises(FedbenchError, match=r"63 px or more, the data set has 32x32: write 'alexnet\?resize=63'"):
        cnn("alexnet", image_size=(32, 32))


# CNNs


@pytest.mark.parametrize(
    ("name", "parameters", "buffer_values", "width"),
    [
        ("resnet8?width=4", 1_225_024, 2_697, 256),
        ("convnet", 62_006 - 850, 0, 84),  # LeNet-5 without its last layer
        ("fedavg-cnn", (75 + 1) * 32 + (800 + 1) * 64 + (4096 + 1) * 512, 0, 512),
        ("alexnet", 57_022_528, 2 * 9_344 + 7, 4096),  # the paper's 57.02 M
        # without a layer of 4096 x 4096 and its batch-norm
        ("alexnet?dense=1", 57_022_528 - 4096 * 4099, 2 * 9_344 + 7 - (2 * 4096 + 1), 4096),
        ("vgg11", 9_220_480 + 2 * (512 * 512 + 512), 0, 512),
        ("vgg11?bn=1", 9_220_480 + 2 * (512 * 512 + 512) + 2 * 2752, 2 * 2752 + 8, 512),
        ("resnet50", 23_508_032, 53_173, 2048),
        ("resnet50?projector=640", 23_508_032 + 2049 * 640, 53_173, 640),
        ("resnet50?projector=256&projector_layers=2", 23_508_032 + 2049 * 2048 + 2049 * 256, 53_173, 256),
        ("resnet18?stem=cifar", 11_176_512 - 7 * 7 * 3 * 64 + 3 * 3 * 3 * 64, 9_620, 512),
    ],
)
def test_body_has_the_known_number_of_parameters(name: str, parameters: int, buffer_values: int, width: int) -> None:
    with torch.device("meta"):
        body, feature_dim = build_body(parse_backbone(name))
    assert sum(value.numel() for value in body.parameters()) == parameters
    assert sum(value.numel() for value in body.buffers()) == buffer_values
    assert feature_dim == width


def test_resnet8_convolutions_start_with_variance_two_over_fan_out() -> None:
    weight = cnn("resnet8").module.get_parameter("block3.conv2.weight").detach()  # 3x3, 256 channels out
    assert float(weight.var()) == pytest.approx(2 / (9 * 256), rel=0.01)


@pytest.mark.parametrize("name", ["resnet8?width=1", "convnet", "resnet18?stem=cifar", "resnet8?width=1&projector=5"])
def test_seed_alone_decides_and_the_global_generator_stays(name: str) -> None:
    before = torch.random.get_rng_state()
    first, again, other = (cnn_model(cnn(name, seed), 4, seed)[0] for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    changed = [key for key in first if key.startswith("body.") and not torch.equal(first[key], other[key])]
    assert changed


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet8?width=1", 28),
        ("convnet", 32),
        ("convnet", 28),
        ("fedavg-cnn", 32),
        ("fedavg-cnn", 4),
        ("vgg11", 32),
        ("resnet18?stem=cifar", 32),
    ],
)
def test_functional_forward_equals_the_module(name: str, size: int) -> None:
    backbone = cnn(name, image_size=(size, size))
    weights, buffers, forward = cnn_model(backbone, 4, seed=0)
    inputs = backbone.transform(smooth_images(3, size, size))
    out = forward({**weights, **buffers}, inputs, False)
    features = backbone.module.eval()(inputs)
    assert out.features.shape == (3, backbone.feature_dim)
    torch.testing.assert_close(out.features, features)
    torch.testing.assert_close(out.logits, features @ weights["head.weight"].T + weights["head.bias"])


def test_buffers_move_in_training_only_and_the_module_never() -> None:
    backbone = cnn("resnet8?width=1")
    weights, buffers, forward = cnn_model(backbone, 4, seed=0)
    inputs = backbone.transform(smooth_images(4, 32, 32))
    received = {name: value.clone() for name, value in buffers.items()}
    forward({**weights, **buffers}, inputs, False)
    assert all(torch.equal(buffers[name], received[name]) for name in buffers)
    forward({**weights, **buffers}, inputs, True)
    assert int(buffers["body.bn1.num_batches_tracked"]) == 1
    assert not torch.equal(buffers["body.bn1.running_mean"], received["body.bn1.running_mean"])
    assert all(torch.equal(value, received[f"body.{name}"]) for name, value in backbone.module.named_buffers())


def test_gradients_reach_the_given_tensors_and_missing_ones_are_refused() -> None:
    weights, buffers, forward = cnn_model(cnn("resnet8?width=1"), 4, seed=0)
    trained = {name: value.requires_grad_() for name, value in weights.items()}
    forward({**trained, **buffers}, torch.rand(2, 3, 32, 32), True).logits.sum().backward()
    assert all(value.grad is not None for value in trained.values())
    with pytest.raises(KeyError, match="body.bn1.running_mean"):
        forward(trained, torch.rand(2, 3, 32, 32), False)


def test_fedavg_cnn_is_two_padded_convolutions_each_halved_and_a_dense_layer() -> None:
    backbone = cnn("fedavg-cnn")
    convolutions = [torch.nn.Conv2d(3, 32, 5, padding=2), torch.nn.Conv2d(32, 64, 5, padding=2)]
    halving = [torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    dense = [torch.nn.Flatten(), torch.nn.Linear(64 * 8 * 8, 512), torch.nn.ReLU()]
    reference = torch.nn.Sequential(convolutions[0], *halving, convolutions[1], *halving, *dense)
    reference.load_state_dict(dict(zip(reference.state_dict(), backbone.module.state_dict().values(), strict=True)))
    pixels = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(backbone.module(pixels), reference(pixels))


@pytest.mark.parametrize("name", ["resnet8?width=1", "fedavg-cnn"])
def test_cnn_transform_normalises_with_cifar_statistics_and_resizes(name: str) -> None:
    pixels = torch.full((1, 3, 32, 32), 51, dtype=torch.uint8)  # 0.2
    value = cnn(name).transform(pixels)[0, :, 0, 0]
    expected = torch.tensor([(0.2 - 0.4914) / 0.2023, (0.2 - 0.4822) / 0.1994, (0.2 - 0.4465) / 0.2010])
    torch.testing.assert_close(value, expected)
    assert cnn("resnet8?width=1&resize=48").transform(pixels).shape == (1, 3, 48, 48)


# CLIP


@pytest.mark.parametrize("height,width", [(32, 32), (48, 64), (71, 40), (20, 28), (32, 45)])
def test_transform_agrees_with_open_clip(embedded: Path, height: int, width: int) -> None:
    backbone = clip()
    pixels = smooth_images(2, height, width)
    reference = image_transform_v2(PreprocessCfg(**backbone.module.visual.preprocess_cfg), is_train=False)
    expected = torch.stack([reference(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in pixels])
    # One grey level of 255: PIL and torch round their bicubic filters differently.
    torch.testing.assert_close(backbone.transform(pixels), expected, rtol=0, atol=1.01 / 255 / 0.26)


def test_embedded_loads_frozen_and_leaves_the_global_generator(embedded: Path) -> None:
    before = torch.random.get_rng_state()
    backbone = clip()
    assert torch.equal(before, torch.random.get_rng_state())
    assert isinstance(backbone.module, open_clip.CLIP) and not backbone.module.training
    assert not any(value.requires_grad for value in backbone.module.parameters())
    stored = load_file(embedded / "embedded.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in backbone.module.state_dict().items())
    assert (backbone.embed_dim, backbone.image_size, backbone.is_pretrained) == (128, 32, True)
    assert backbone.logit_scale == pytest.approx(1 / 0.07, rel=1e-5)
    assert backbone.weights_hash == clip().weights_hash
    assert len(backbone.weights_hash) == 64


def test_text_features_are_the_renormalised_mean_of_unit_features(embedded: Path) -> None:
    backbone = clip()
    features = backbone.text_features(CLASSES, TEMPLATES)
    by_hand = torch.stack(
        [
            normalize(backbone.encode_text([t.replace("{}", name) for t in TEMPLATES]), dim=-1).mean(0)
            for name in CLASSES
        ]
    )
    torch.testing.assert_close(features, normalize(by_hand, dim=-1))
    torch.testing.assert_close(features.norm(dim=-1), torch.ones(3))
    with pytest.raises(FedbenchError, match="'a photo' must contain {} once"):
        backbone.text_features(CLASSES, ("a photo",))


def test_truncated_text_is_exact(embedded: Path) -> None:
    backbone = clip()
    tokens = backbone.tokenizer(["a photo of a cat", "a drawing of the bird in the evening"])
    short = backbone.text.truncated(tokens)
    assert short.shape[1] < tokens.shape[1]
    with torch.no_grad():
        expected = backbone.module.encode_text(tokens)
        torch.testing.assert_close(backbone.text.encode_truncated(short), expected, rtol=0, atol=1e-5)


def test_full_clip_forward_is_zero_shot_and_trains_both_towers(embedded: Path) -> None:
    backbone = clip()
    weights, buffers, forward = full_clip_model(backbone, CLASSES, TEMPLATES)
    pixels = smooth_images(3, 32, 32)
    trained = {name: value.requires_grad_() for name, value in weights.items()}
    out = forward({**trained, **buffers}, backbone.transform(pixels), True)
    image = normalize(backbone.encode_images(pixels), dim=-1)
    torch.testing.assert_close(out.features, image, rtol=0, atol=1e-5)
    expected = backbone.logit_scale * image @ backbone.text_features(CLASSES, TEMPLATES).T
    torch.testing.assert_close(out.logits, expected, rtol=0, atol=1e-4)
    out.logits.square().sum().backward()
    assert all(value.grad is not None for value in trained.values())
    assert not backbone.module.training and not backbone.module.logit_scale.requires_grad
    assert sum(value.numel() for value in weights.values()) == sum(p.numel() for p in backbone.module.parameters())


def test_image_encoder_key_follows_the_weights(embedded: Path) -> None:
    first, second, changed = clip().image_encoder(), clip().image_encoder(), clip()
    changed.module.visual.proj.add_(1)
    assert first.key == second.key != changed.image_encoder().key
    pixels = smooth_images(2, 40, 40)
    assert torch.equal(first(pixels), clip().encode_images(pixels))


@pytest.mark.parametrize(
    ("name", "activation", "is_said"),
    [
        ("clip:fbtiny@openai", "QuickGELU", True),
        ("clip:fbtiny-quickgelu@openai", "QuickGELU", False),
        ("clip:fbtiny-quickgelu@laion", "GELU", True),
        ("clip:fbtiny@laion", "GELU", False),
    ],
)
def test_activation_follows_the_weights_not_the_name(
    tagged: Path, caplog: pytest.LogCaptureFixture, name: str, activation: str, is_said: bool
) -> None:
    with caplog.at_level(logging.INFO, logger="fedbench"):
        backbone = clip(name, tagged)
    assert activation_of(backbone.module) == activation
    assert type(backbone.module.visual.transformer.resblocks[0].mlp.gelu).__name__ == activation
    said = [record.message for record in caplog.records if "were trained with" in record.message]
    assert len(said) == is_said and all(f"trained with {activation}" in line for line in said)


def test_open_clips_tables_say_quickgelu_where_we_rely_on_it() -> None:
    openai = open_clip.get_pretrained_cfg("ViT-B-32", "openai")
    laion = open_clip.get_pretrained_cfg("ViT-B-32", "laion2b_s34b_b79k")
    assert loading.quick_gelu_for("ViT-B-32", openai)
    assert not loading.quick_gelu_for("ViT-B-32-quickgelu", laion)


def test_tag_brings_its_own_normalisation(tagged: Path) -> None:
    assert clip("clip:fbtiny@laion", tagged).transform.mean == (0.5, 0.5, 0.5)
    assert clip("clip:fbtiny@openai", tagged).transform.mean == open_clip.OPENAI_DATASET_MEAN


def test_weights_without_network_say_where_to_put_the_file(tagged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "can_reach", lambda url: False)
    with pytest.raises(FedbenchError) as error:
        clip("clip:fbtiny@absent", tagged)
    target = tagged / "clip" / "fbtiny-quickgelu-absent.safetensors"
    assert "no network: download it from https://nowhere.invalid/absent.pt" in str(error.value)
    assert f"write 'clip:fbtiny-quickgelu@{target}'" in str(error.value)


@pytest.mark.parametrize(
    ("rest", "arch", "checkpoint"),
    [
        ("ViT-B-16@openai", "ViT-B-16", "openai"),
        ("ViT-B-16:openai", "ViT-B-16", "openai"),
        ("ViT-B-16:/w@home/v:1.pt", "ViT-B-16", "/w@home/v:1.pt"),
        ("ViT-B/16@/w@home/v:1.pt", "ViT-B-16", "/w@home/v:1.pt"),
    ],
)
def test_a_checkpoint_follows_the_first_at_sign_or_colon(rest: str, arch: str, checkpoint: str) -> None:
    parsed = parse_backbone(f"clip:{rest}")
    assert (parsed.text, parsed.arch, parsed.checkpoint) == (f"clip:{rest}", arch, checkpoint)


def test_files_of_both_kinds_give_the_same_model(tagged: Path) -> None:
    one = clip(f"clip:fbtiny@{tagged / 'clip' / 'openai.pt'}")
    two = clip(f"clip:fbtiny@{tagged / 'clip' / 'laion.safetensors'}")
    assert one.weights_hash == two.weights_hash
    assert activation_of(one.module) == "GELU"  # a file has no tag, so the name decides


class Payload:
    """What a hostile checkpoint would bring: something only an unrestricted unpickler restores."""


def test_bad_weight_files_are_refused_by_name(tagged: Path) -> None:
    whole = (tagged / "clip" / "laion.safetensors").read_bytes()
    zipped = (tagged / "clip" / "openai.pt").read_bytes()
    state = load_file(tagged / "clip" / "laion.safetensors")
    (tagged / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (tagged / "cut.pt").write_bytes(zipped[: len(zipped) // 2])
    (tagged / "empty.pt").write_bytes(b"")
    (tagged / "text.bin").write_text("not weights")
    torch.save({"state_dict": Payload()}, tagged / "pickled.pt")
    torch.save([1, 2], tagged / "list.pt")
    save_file({**state, "ln_final.weight": torch.zeros(7)}, tagged / "shape.safetensors")
    save_file({name: v for name, v in state.items() if name != "visual.proj"}, tagged / "missing.safetensors")
    (tagged / "weights.npz").write_bytes(b"")
    names = ("cut.safetensors", "cut.pt", "empty.pt", "text.bin", "pickled.pt", "list.pt")
    for name in (*names, "shape.safetensors", "missing.safetensors", "weights.npz"):
        with pytest.raises(FedbenchError) as error:
            clip(f"clip:fbtiny@{tagged / name}")
        assert name in str(error.value), name
        if name == "shape.safetensors":
            assert "ln_final.weight" in str(error.value)


def test_half_precision_weights_run_in_float32(embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(embedded, tmp_path, dirs_exist_ok=True)
    half = {name: value.half() for name, value in load_file(embedded / "embedded.safetensors").items()}
    save_file(half, tmp_path / "embedded.safetensors")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    state = clip().module.state_dict()
    assert all(value.dtype == torch.float32 for value in state.values())
    assert all(torch.equal(value, half[name].float()) for name, value in state.items())


def test_embedded_without_its_files_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    with pytest.raises(FedbenchError, match=r"embedded\.safetensors' is missing"):
        clip()


# Text


def test_random_and_orthogonal_vectors_come_from_the_seed() -> None:
    random = text_vectors("random", CLASSES, TEMPLATES, seed=1, dim=16)
    assert torch.equal(random, text_vectors("random", CLASSES, TEMPLATES, seed=1, dim=16))
    assert not torch.equal(random, text_vectors("random", CLASSES, TEMPLATES, seed=2, dim=16))
    torch.testing.assert_close(random.norm(dim=-1), torch.ones(3))
    orthogonal = text_vectors("orthogonal", CLASSES, TEMPLATES, seed=1, dim=16)
    torch.testing.assert_close(orthogonal @ orthogonal.T, torch.eye(3), rtol=0, atol=1e-6)
    with pytest.raises(FedbenchError, match="3 orthogonal vectors don't fit into 2 dimensions"):
        text_vectors("orthogonal", CLASSES, TEMPLATES, seed=1, dim=2)


def test_clip_text_vectors_are_the_backbones(embedded: Path) -> None:
    assert torch.equal(text_vectors("clip:embedded", CLASSES, TEMPLATES, 0), clip().text_features(CLASSES, TEMPLATES))
