"""CNNs that start from files with torchvision's names: random ones, written here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import models

from fedbench.core.errors import FedbenchError, NotHere
from fedbench.models import how_to_get, image_size_of, load_backbone, weight_files
from fedbench.models.cnn import pretrained
from fedbench.models.cnn.pretrained import PretrainedNetwork
from fedbench.runs.prepare import Settings, prepare
from fedbench.testing import final_state, tiny_dataset, tiny_spec

NETWORKS = ("alexnet", "vgg11", "vgg11_bn", "resnet18", "resnet50")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of one of torchvision's networks, with random weights and statistics, written once."""
    folder = tmp_path_factory.mktemp("torchvision")

    def file_of(network: str) -> Path:
        file = folder / f"{network}.pth"
        if not file.exists():
            torch.save(state_of(network), file)
        return file

    return file_of


def state_of(network: str) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        net = models.get_model(network, weights=None, init_weights=False) if "vgg" in network else plain(network)
        state: dict[str, Tensor] = net.state_dict()
        for name, value in state.items():
            if name.endswith("running_mean"):
                value.uniform_(-0.3, 0.3)
            elif name.endswith("running_var"):
                value.uniform_(0.5, 1.5)
            elif value.ndim > 1 and "resnet" not in network:
                value *= 6**0.5  # from torch's own start to He's, so that images still matter in the last layer
    return state


def plain(network: str) -> nn.Module:
    net: nn.Module = models.get_model(network, weights=None)
    return net


def loaded(name: str, seed: int = 0) -> PretrainedNetwork:
    network = load_backbone(name, data_dir=Path("nowhere"), seed=seed)
    assert isinstance(network, PretrainedNetwork)
    return network


def reference(network: str, file: Path) -> Any:
    net = plain(network)
    net.load_state_dict(torch.load(file, weights_only=True))
    return net.eval()


def require_same(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    """Relative, since features of random networks can be small."""
    assert ours.shape == theirs.shape and theirs.norm() > 0
    assert (ours - theirs).norm() <= tolerance * theirs.norm()
    assert (ours - ours[:1]).norm() > 100 * tolerance * theirs.norm()  # they depend on the image


def pixels(side: int = 224) -> Tensor:
    return torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("network", ["resnet18", "resnet50"])
def test_a_resnet_is_torchvisions_without_its_classifier(network: str, files: Callable[[str], Path]) -> None:
    found, theirs = loaded(f"{network}?weights={files(network)}"), reference(network, files(network))
    theirs.fc = nn.Identity()
    images = found.transform(pixels())
    require_same(found.module(images), theirs(images))
    assert found.transform.mean == (0.485, 0.456, 0.406)


@torch.no_grad()
def test_alexnet_is_torchvisions_until_its_batch_norm_is_trained(files: Callable[[str], Path]) -> None:
    found, theirs = loaded(f"alexnet?weights={files('alexnet')}"), reference("alexnet", files("alexnet"))
    theirs.classifier = theirs.classifier[:-1]
    images = found.transform(pixels())
    # fresh batch-norm divides by sqrt(1 + 1e-5), seven times over
    require_same(found.module(images), theirs(images), 1e-4)
    theirs.classifier = theirs.classifier[:3]  # behind the first dense layer
    short = loaded(f"alexnet?dense=1&weights={files('alexnet')}")
    require_same(short.module(images), theirs(images), 1e-4)
    assert short.weights_hash != found.weights_hash
    assert not any(isinstance(layer, nn.Dropout) for layer in found.module.modules())


@torch.no_grad()
@pytest.mark.parametrize(("option", "network"), [("", "vgg11"), ("bn=1&", "vgg11_bn")])
def test_vggs_convolutions_are_torchvisions(option: str, network: str, files: Callable[[str], Path]) -> None:
    name = f"vgg11?{option}weights={files(network)}"
    found, theirs = loaded(name), reference(network, files(network))
    images = found.transform(pixels(96))
    body = found.module
    assert isinstance(body, nn.Sequential)
    before_pool = list(dict(body.named_children())).index("pool")
    require_same(body[:before_pool](images), theirs.features(images))
    # the dense layers are drawn, and not what the digest is of
    other = loaded(name, seed=1)
    assert not torch.equal(other.module.get_submodule("fc1").weight, body.get_submodule("fc1").weight)  # type: ignore[arg-type]
    assert other.weights_hash == found.weights_hash
    with pytest.raises(FedbenchError, match="its dense layers have no pretrained weights.*set tune=full"):
        found.image_encoder()
    assert image_size_of(name) == 224 and image_size_of("vgg11") == 32


def test_what_the_file_lacks_starts_as_ever(files: Callable[[str], Path]) -> None:
    name = f"resnet18?weights={files('resnet18')}&projector=8"
    found, scratch = loaded(name), load_backbone("resnet18?projector=8", data_dir=Path(), seed=0)
    projector = found.module.get_submodule("projector")
    assert torch.equal(projector.weight, scratch.module.get_submodule("projector").weight)  # type: ignore[arg-type]
    assert found.weights_hash == loaded(f"resnet18?weights={files('resnet18')}").weights_hash
    with pytest.raises(FedbenchError, match="its projector has no pretrained weights"):
        found.image_encoder()


def test_safetensors_and_files_without_counts_of_batches_are_read(files: Callable[[str], Path], tmp_path: Path) -> None:
    state = torch.load(files("resnet18"), weights_only=True)
    old = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    save_file(old, tmp_path / "old.safetensors")
    again = loaded(f"resnet18?weights={tmp_path / 'old.safetensors'}")
    assert again.weights_hash == loaded(f"resnet18?weights={files('resnet18')}").weights_hash


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: s.pop("features.3.bias"),
            r"have no tensor 'features.3.bias' \(192,\) \(needed: .*torchvision's alex",
        ),
        (
            lambda s: s.update({"classifier.1.weight": torch.zeros(2, 2)}),
            r"'classifier.1.weight' is \(2, 2\), not \(40",
        ),
        (lambda s: s["features.0.bias"].fill_(torch.nan), "'features.0.bias' is not finite, so the file is damaged"),
        (lambda s: s.update({"features.0.bias": "a word"}), "have no tensor 'features.0.bias'"),
    ],
)
def test_a_file_of_another_network_is_refused(
    change: Callable[[dict[str, Any]], object], said: str, files: Callable[[str], Path], tmp_path: Path
) -> None:
    state = torch.load(files("alexnet"), weights_only=True)
    change(state)
    torch.save(state, tmp_path / "changed.pth")
    with pytest.raises(FedbenchError, match=said):
        loaded(f"alexnet?weights={tmp_path / 'changed.pth'}")


def test_what_can_not_be_read_is_said_and_nothing_is_unpickled(tmp_path: Path) -> None:
    (tmp_path / "text.pth").write_text("no weights")
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save(nn.Linear(2, 2), tmp_path / "pickled.pth")
    for file in ("text.pth", "list.pth", "pickled.pth"):
        with pytest.raises(FedbenchError, match=f"can't load ImageNet weights .*{file}.*torchvision's resnet18"):
            loaded(f"resnet18?weights={tmp_path / file}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("resnet18?weights=none.pth", "there is no file 'none.pth' ending in .*or write weights=imagenet"),
        ("resnet18?weights=", "'weights=' is not option=value; type resnet18"),
        ("resnet18?weights=imagenet&stem=cifar", "weights of ImageNet are for its stem of 7x7 .*leave one of them out"),
        ("convnet?weights=imagenet", "unknown option of backbone 'convnet' 'weights'"),
        ("alexnet?weights=imagenet&resize=32", "63 px or more"),
    ],
)
def test_a_name_that_can_not_be_says_so(name: str, said: str) -> None:
    with pytest.raises(FedbenchError, match=said):
        loaded(name)


def test_the_published_files_are_torchvisions() -> None:
    for network in NETWORKS:
        weights: Any = models.get_model_weights(network)
        assert weights.IMAGENET1K_V1.url == f"{pretrained._SOURCE}/{pretrained._FILES[network]}"


def test_a_published_file_is_looked_up_and_checked(
    files: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "can_reach", lambda url: False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    name, file = "resnet18?weights=imagenet", "resnet18-f37072fd.pth"
    told = (
        f"download it from https://download.pytorch.org/models/{file} elsewhere and put it at '{tmp_path}/torchvision/"
    )
    with pytest.raises(NotHere) as error:
        load_backbone(name, data_dir=tmp_path, seed=0)
    assert "there is no network: " + told in str(error.value)
    assert told in how_to_get(name, tmp_path) and how_to_get("resnet18", tmp_path) == ""
    for folder in (tmp_path / "hub" / "hub" / "checkpoints", tmp_path / "torchvision"):
        folder.mkdir(parents=True)
        (folder / file).write_bytes(files("resnet18").read_bytes())
        assert how_to_get(name, tmp_path) == ""
        with pytest.raises(FedbenchError, match=f"ImageNet weights '{folder / file}' are damaged.*published: f37072fd"):
            load_backbone(name, data_dir=tmp_path, seed=0)
    monkeypatch.setattr(pretrained, "check_digest", lambda *_: None)
    found = load_backbone(name, data_dir=tmp_path, seed=0)
    assert found.weights_hash == loaded(f"resnet18?weights={files('resnet18')}").weights_hash


@pytest.mark.parametrize("method", ["fedavg", "fedglcl"])
def test_a_started_network_is_trained(method: str, files: Callable[[str], Path], tmp_path: Path) -> None:
    name = f"resnet18?weights={files('resnet18')}&resize=32"
    run = prepare(tiny_spec(method, backbone=name, rounds=1), Settings(Path(), tmp_path), dataset=tiny_dataset())
    assert run.model.encoder is None and not loaded(name).is_pretrained
    given = torch.load(files("resnet18"), weights_only=True)["conv1.weight"]
    (stem,) = (key for key in run.model.weights if key.endswith("conv1.weight") and "layer" not in key)
    assert torch.equal(run.model.weights[stem], given)
    assert not torch.equal(final_state(run).weights[stem], given)
    if method == "fedavg":
        assert run.info.weights_hash == loaded(name).weights_hash


@pytest.mark.parametrize("method", ["fedpcl", "fedavg"])
def test_its_features_can_stay_frozen(method: str, files: Callable[[str], Path], tmp_path: Path) -> None:
    spec = tiny_spec(method, backbone=f"resnet18?weights={files('resnet18')}&resize=32", rounds=2)
    if method == "fedavg":
        spec = spec.model_copy(update={"tune": "head"})
    run = prepare(spec, Settings(Path(), tmp_path), dataset=tiny_dataset())
    assert run.model.encoder is not None and not any("conv" in name for name in run.model.weights)
    before = {name: value.clone() for name, value in run.model.weights.items()}
    after = final_state(run)
    if method == "fedavg":
        assert any(not torch.equal(after.weights[name], value) for name, value in before.items())
