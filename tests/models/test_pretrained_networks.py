"""Image networks with pretrained weights: loaded as they are, frozen under a head, trained further, as students."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from fedbench.core.errors import FedbenchError
from fedbench.models import image_size_of, load_backbone
from fedbench.models.cnn.pretrained import PretrainedNetwork, _transform_of
from fedbench.models.names import parse_backbone
from fedbench.models.photos.lite0_minilm import LITE0
from fedbench.rounds.loop import evaluate
from fedbench.runs.prepare import Settings, prepare
from fedbench.testing import final_state, tiny_dataset, tiny_spec


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with random weights of a small ResNet, classifier and all."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        network = timm.create_model("resnet10t", pretrained=False)
    file = tmp_path_factory.mktemp("weights") / "resnet10t.safetensors"
    save_file(network.state_dict(), file)
    return file


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(Path(), tmp_path_factory.mktemp("caches"))


def loaded(name: str) -> PretrainedNetwork:
    network = load_backbone(name, data_dir=Path(), seed=0)
    assert isinstance(network, PretrainedNetwork)
    return network


@torch.no_grad()
def test_a_file_of_timm_is_loaded_as_timm_does(weights: Path) -> None:
    found, reference = loaded(f"timm:resnet10t@{weights}"), timm.create_model("resnet10t", num_classes=0)
    from safetensors.torch import load_file

    given = load_file(weights)
    reference.load_state_dict({name: given[name] for name in reference.state_dict()})
    pixels = torch.randint(0, 256, (2, 3, 200, 180), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    config: Any = timm.data.resolve_model_data_config(reference)
    size = config["input_size"][-1]
    assert (found.transform.size, image_size_of(f"timm:resnet10t@{weights}")) == (size, size)
    assert found.transform.mean == tuple(config["mean"]) and found.feature_dim == reference.num_features
    images = found.transform(pixels)
    assert images.shape == (2, 3, size, size)
    torch.testing.assert_close(found.image_encoder()(pixels), reference.eval()(images))
    smaller = loaded(f"timm:resnet10t@{weights}?resize=64")
    assert smaller.transform.size == 64 and smaller.weights_hash == found.weights_hash
    assert smaller.image_encoder().key != found.image_encoder().key


@torch.no_grad()
@pytest.mark.parametrize("crop", ["center", "squash"])
def test_images_are_cut_as_timm_does(crop: str) -> None:
    network = timm.create_model("resnet10t", num_classes=0)
    network.pretrained_cfg = {**network.pretrained_cfg, "crop_mode": crop, "crop_pct": 0.9}
    made = _transform_of(network, parse_backbone("timm:resnet10t@FILE"))
    pixels = torch.randint(0, 256, (3, 300, 200), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    config = timm.data.resolve_model_data_config(network)
    expected = timm.data.create_transform(**config)(Image.fromarray(pixels.permute(1, 2, 0).numpy()))
    assert (made(pixels[None])[0] - expected).abs().mean() < 0.02
    network.pretrained_cfg["crop_mode"] = "border"
    with pytest.raises(FedbenchError, match=r"timm pads its images, .* add \?resize=SIZE"):
        _transform_of(network, parse_backbone("timm:resnet10t@FILE"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm:resnet10t", "is incomplete: write 'timm:ARCH@FILE'"),
        ("timm:resnet10@{}", "unknown architecture of timm 'resnet10'"),
        ("timm:resnet18@{}", "can't load .* as resnet18: .*a state dict with timm's names"),
        ("timm:resnet10t@none.safetensors", "there is no file 'none.safetensors'"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_said(name: str, message: str, weights: Path) -> None:
    with pytest.raises(FedbenchError, match=message):
        loaded(name.format(weights))


def test_a_head_on_frozen_features(weights: Path, settings: Settings) -> None:
    name = f"timm:resnet10t@{weights}?resize=64"
    data = tiny_dataset()
    run = prepare(tiny_spec("fedavg", backbone=name, rounds=1), settings, dataset=data)
    assert set(run.model.weights) == {"head.weight", "head.bias"} and run.model.encoder is not None
    assert run.info.weights_hash == loaded(name).weights_hash
    rows = loaded(name).image_encoder()(data.test.images.read(torch.arange(3)))
    torch.testing.assert_close(run.test.read(torch.arange(3)), rows)
    outputs = run.model.forward(run.model.weights, rows, False)
    torch.testing.assert_close(outputs.logits, rows @ run.model.weights["head.weight"].T)
    assert 0 <= evaluate(run, final_state(run))[0]["global_accuracy"] <= 100


@pytest.mark.parametrize("method", ["fedavg", "creff", "clip2fl", "fedglcl"])
def test_a_pretrained_student_is_trained_further(method: str, weights: Path, settings: Settings) -> None:
    name = f"timm:resnet10t@{weights}?resize=32" + ("&projector=128" if method == "clip2fl" else "")
    spec = tiny_spec(method, backbone=name, rounds=1)
    if method != "fedglcl":  # which always trains the network below its projector
        spec = spec.model_copy(update={"tune": "full"})
    if method in ("creff", "clip2fl"):
        spec = spec.model_copy(update={"params": {method: {"match_steps": 1, "retrain_epochs": 1}}})
    run = prepare(spec, settings, dataset=tiny_dataset())
    before, after = run.model.weights, final_state(run).weights
    stem = next(name for name in before if name.endswith("conv1.0.weight"))
    body = loaded(f"timm:resnet10t@{weights}").module.state_dict()["conv1.0.weight"]
    assert torch.equal(before[stem], body) and not torch.equal(after[stem], body)


def test_a_projector_has_no_pretrained_weights(weights: Path, settings: Settings) -> None:
    name = f"timm:resnet10t@{weights}?projector=8&resize=32"
    with pytest.raises(FedbenchError, match="its projector has no pretrained weights.*tune=full"):
        prepare(tiny_spec("fedavg", backbone=name), settings, dataset=tiny_dataset())


def test_lite0_is_the_image_tower_of_the_joined_model() -> None:
    pytest.importorskip(LITE0.package, reason=f"{LITE0.package}, a package with weights, is not installed")
    network = loaded("lite0")
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert network.image_encoder()(pixels).shape == (2, 1280) == (2, network.feature_dim)
    assert image_size_of("lite0") == 128 and image_size_of("lite0?resize=64") == 64
