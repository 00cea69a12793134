"""CNNs that start from torchvision's weights: the same features as torchvision's network, and clear errors."""

import pytest
import torch
from safetensors.torch import save_file
from torchvision import models as theirs

from fedbench.core.errors import FedbenchError, NotHere
from fedbench.models import how_to_get, load_backbone
from fedbench.models.cnn import imagenet
from fedbench.models.cnn.pretrained import PretrainedNetwork
from fedbench.models.names import is_pretrained


def network(family):
    torch.manual_seed(3)
    net = getattr(theirs, family)(weights=None).eval()
    with torch.no_grad():  # statistics of a trained network are not those of a new one
        for name, buffer in net.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(std=0.1)
    return net


@pytest.mark.parametrize(("family", "suffix"), [("alexnet", ".safetensors"), ("resnet18", ".pth")])
def test_features_are_those_that_torchvisions_classifier_reads(family, suffix, tmp_path):
    net, file = network(family), tmp_path / f"weights{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(net.state_dict(), file)
    ours = load_backbone(f"{family}?weights={file}", data_dir=tmp_path, seed=0)
    assert isinstance(ours, PretrainedNetwork) and ours.is_pretrained and len(ours.weights_hash) >= 32
    pixels = torch.randint(0, 256, (2, 3, 96, 80), generator=torch.manual_seed(0), dtype=torch.uint8)
    inputs, seen = ours.transform(pixels), []
    last = net.classifier[6] if family == "alexnet" else net.fc
    last.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        net(inputs)
        # AlexNet's batch-norm is new: it divides by sqrt(1 + eps) seven times
        torch.testing.assert_close(ours.module(inputs), seen[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(ours.image_encoder()(pixels), ours.module(inputs))


def test_the_hash_is_of_the_weights_and_a_projector_is_new(tmp_path):
    net, file, other = network("resnet18"), tmp_path / "a.pth", tmp_path / "b.pth"
    torch.save(net.state_dict(), file)
    torch.save({**net.state_dict(), "layer1.0.conv1.weight": net.state_dict()["layer1.0.conv1.weight"] + 1}, other)
    first, second, projected, seeded = (
        load_backbone(f"resnet18?weights={name}", data_dir=tmp_path, seed=seed)
        for name, seed in ((file, 0), (other, 0), (f"{file}&projector=8", 0), (file, 1))
    )
    assert first.weights_hash == seeded.weights_hash == projected.weights_hash != second.weights_hash
    assert projected.feature_dim == 8
    with pytest.raises(FedbenchError, match="projector has no pretrained weights"):
        projected.image_encoder()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"features.0.weight": torch.zeros(1)}, "holds no weights of torchvision's alexnet: 'features.0.weight'"),
        (None, "can't read the weights"),
        ([1], "holds no weights"),
    ],
)
def test_a_file_that_is_no_such_network_is_refused(content, message, tmp_path):
    file = tmp_path / "weights.pth"
    file.write_bytes(b"no") if content is None else torch.save(content, file)
    with pytest.raises(FedbenchError, match=message):
        load_backbone(f"alexnet?weights={file}", data_dir=tmp_path, seed=0)


def test_names_that_cannot_be(tmp_path):
    with pytest.raises(FedbenchError, match="there is no file"):
        load_backbone("alexnet?weights=nowhere.pth", data_dir=tmp_path, seed=0)
    with pytest.raises(FedbenchError, match="of the stem for large images"):
        load_backbone("resnet50?weights=imagenet&stem=cifar", data_dir=tmp_path, seed=0)
    with pytest.raises(FedbenchError, match="weights is imagenet, or a file"):
        load_backbone("resnet50?weights=", data_dir=tmp_path, seed=0)
    assert is_pretrained("alexnet?weights=imagenet") and not is_pretrained("alexnet") and is_pretrained("lite0")


def test_published_weights_are_found_below_the_data_or_said_how_to_get(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(imagenet, "can_reach", lambda url: False)
    name = "resnet18?weights=imagenet"
    assert "resnet18-f37072fd.pth" in how_to_get(name, tmp_path)
    with pytest.raises(NotHere, match=r"there is no network: download .*resnet18-f37072fd\.pth elsewhere"):
        load_backbone(name, data_dir=tmp_path, seed=0)
    for folder in (tmp_path / "imagenet", tmp_path / "hub" / "checkpoints"):
        folder.mkdir(parents=True)
        torch.save(network("resnet18").state_dict(), folder / "resnet18-f37072fd.pth")
        assert how_to_get(name, tmp_path) == "" and load_backbone(name, data_dir=tmp_path, seed=0).is_pretrained
        (folder / "resnet18-f37072fd.pth").unlink()
