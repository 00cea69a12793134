"""CNNs that start from weights trained on ImageNet: torchvision's files, whose tensors have other names than ours.

    alexnet?weights=imagenet                torchvision's file, looked up and fetched
    resnet18?weights=weights/mine.pth       a file with torchvision's names

The classifier of 1,000 classes is left out. What torchvision's network lacks starts as it does without weights:
AlexNet's batch-norm, which changes nothing before it is trained, and VGG-11's dense layers of 512, drawn from the seed.
There is no dropout (`fedbench.models.cnn.nets`). Nothing stays frozen unless ``tune=head``.
"""

from __future__ import annotations

import logging
import urllib.error
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedbench.core.errors import FedbenchError, NotHere
from fedbench.models import weight_files
from fedbench.models.clip.backbone import digest_of
from fedbench.models.cnn.backbone import load_cnn
from fedbench.models.cnn.pretrained import PROJECTOR, PretrainedNetwork
from fedbench.models.names import IMAGENET, BackboneName
from fedbench.models.weight_files import SUFFIXES, check_archive, check_digest, read_state_dict

log = logging.getLogger(__name__)

_SOURCE = "https://download.pytorch.org/models"
_FILES = {
    "alexnet": "alexnet-owt-7be5be79.pth",
    "vgg11": "vgg11-8a719046.pth",
    "vgg11_bn": "vgg11_bn-6002323d.pth",
    "resnet18": "resnet18-f37072fd.pth",
    "resnet50": "resnet50-0676ba61.pth",
}
"""Files of torchvision's ``IMAGENET1K_V1``. A name ends with the beginning of the file's sha256."""
_KIND = "ImageNet weights"

_ALEXNET = {
    **{f"features.conv{i}": f"features.{at}" for i, at in enumerate((0, 3, 6, 8, 10), start=1)},
    "fc1": "classifier.1",
    "fc2": "classifier.4",
}
_VGG11 = {f"conv{i}": f"features.{at}" for i, at in enumerate((0, 3, 6, 8, 11, 13, 16, 18), start=1)}
_VGG11_BN = {
    f"{layer}{i}": f"features.{at + behind}"
    for i, at in enumerate((0, 4, 8, 11, 15, 18, 22, 25), start=1)
    for behind, layer in enumerate(("conv", "bn"))
}
_LAYERS: Mapping[str, Mapping[str, str]] = {"alexnet": _ALEXNET, "vgg11": _VGG11, "vgg11_bn": _VGG11_BN}
"""Our layer -> torchvision's layer, for networks that are written out here; ResNets are torchvision's own."""
_SEEDED = ("fc1.", "fc2.")
"""Prefixes of VGG-11's dense layers, which are drawn from the seed."""


def load_started(
    name: BackboneName, seed: int, image_size: tuple[int, int] | None, data_dir: Path
) -> PretrainedNetwork:
    """The network that ``name`` describes, started from its ``weights``; what these lack is initialised from ``seed``.

    ``image_size`` (height, width) is the data set's. Files behind ``weights=imagenet`` are looked up in
    ``data_dir/torchvision`` and torch hub's cache, and downloaded to the former. Raises FedbenchError for files that
    are missing, damaged or of another network, NotHere where there is no network to fetch them.
    """
    from_scratch = load_cnn(name, seed, image_size)
    whole = from_scratch.module
    body = whole if name.projector is None else whole.get_submodule("net")
    file = _published_file(name, data_dir) if name.weights == IMAGENET else _given_file(name)
    _fill(body, name, file)
    drawn = "dense layers have" if name.family == "vgg11" else ""
    return PretrainedNetwork(
        name=name.text,
        module=whole.eval(),
        feature_dim=from_scratch.feature_dim,
        transform=from_scratch.transform,
        weights_hash=digest_of({key: body.state_dict()[key] for key in _unseeded(body, name)}),
        drawn=PROJECTOR if name.projector is not None else drawn,
    )


def how_to_get_imagenet(name: BackboneName, data_dir: Path) -> str:
    """How to get the file behind ``weights=imagenet``; "" if it is on this machine, or a file is named."""
    if name.weights != IMAGENET or _cached(name, data_dir):
        return ""
    return f"downloaded where there is a network; else {_by_hand(name, data_dir)}"


def _network(name: BackboneName) -> str:
    return f"{name.family}_bn" if name.bn else name.family


def _cached(name: BackboneName, data_dir: Path) -> Path | None:
    folders = (data_dir / "torchvision", Path(torch.hub.get_dir()) / "checkpoints")
    return next(
        (folder / _FILES[_network(name)] for folder in folders if (folder / _FILES[_network(name)]).is_file()), None
    )


def _by_hand(name: BackboneName, data_dir: Path) -> str:
    file = _FILES[_network(name)]
    return f"download it from {_SOURCE}/{file} elsewhere and put it at {str(data_dir / 'torchvision' / file)!r}."


def _published_file(name: BackboneName, data_dir: Path) -> Path:
    """torchvision's file: from a cache, else downloaded; its digest is checked."""
    file = _cached(name, data_dir) or _fetch(name, data_dir)
    check_digest(file, file.stem.rpartition("-")[2], "delete it and run again, and it is downloaded anew", _KIND)
    return file


def _fetch(name: BackboneName, data_dir: Path) -> Path:
    target = data_dir / "torchvision" / _FILES[_network(name)]
    url, manual = f"{_SOURCE}/{target.name}", _by_hand(name, data_dir)
    if not weight_files.can_reach(url):
        raise NotHere(f"the weights of {name.text!r} are not on this machine and there is no network: {manual}")
    log.info("downloading the weights of %s from %s", name.text, url)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(target), hash_prefix=target.stem.rpartition("-")[2], progress=False)
    except (OSError, RuntimeError, ValueError, urllib.error.URLError) as error:
        raise FedbenchError(f"downloading the weights of {name.text!r} failed ({error}): {manual}") from error
    return target


def _given_file(name: BackboneName) -> Path:
    try:
        file = Path(name.weights).expanduser()
        is_there = file.suffix in SUFFIXES and file.is_file()
    except (RuntimeError, OSError, ValueError) as error:  # no such user's home, or a name that can't be one
        raise FedbenchError(f"backbone {name.text[:200]!r} cannot be looked up: {error}.") from None
    if not is_there:
        raise FedbenchError(
            f"backbone {name.text!r}: there is no file {str(file)!r} ending in {', '.join(SUFFIXES)}; give one, or "
            f"write weights={IMAGENET}."
        )
    return file


def _unseeded(body: nn.Module, name: BackboneName) -> list[str]:
    """Names of the tensors of ``body`` that do not depend on the run's seed once the weights are loaded."""
    return [key for key in body.state_dict() if name.family != "vgg11" or not key.startswith(_SEEDED)]


def _sources(body: nn.Module, name: BackboneName) -> dict[str, str]:
    """Our tensor -> torchvision's tensor, for all tensors of ``body`` that the file has."""
    layers = _LAYERS.get(_network(name))
    sources = {}
    for key in body.state_dict():
        layer, _, kind = key.rpartition(".")
        if kind == "num_batches_tracked":  # which nothing is computed from, and files of old versions lack
            continue
        if layers is None:
            sources[key] = key
        elif layer in layers:
            sources[key] = f"{layers[layer]}.{kind}"
    return sources


def _fill(body: nn.Module, name: BackboneName, file: Path) -> None:
    """Copy the file's tensors into ``body``. Raises FedbenchError for one that is missing, misshapen or not finite."""
    wanted = f"needed: the state dict of torchvision's {_network(name)}"
    check_archive(file, _KIND)
    try:
        given = read_state_dict(file)
    except Exception as error:  # of damaged files safetensors, torch and json raise nearly anything
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise FedbenchError(f"can't load {_KIND} {str(file)!r}: {type(error).__name__} {reason} ({wanted}).") from error
    own = body.state_dict()
    for ours, theirs in _sources(body, name).items():
        tensor, shape = given.get(theirs), tuple(own[ours].shape)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise FedbenchError(f"{_KIND} {str(file)!r} have no tensor {theirs!r} {shape} ({wanted}).")
        if tuple(tensor.shape) != shape:
            raise FedbenchError(f"{_KIND} {str(file)!r}: {theirs!r} is {tuple(tensor.shape)}, not {shape} ({wanted}).")
        if not tensor.isfinite().all():
            raise FedbenchError(f"{_KIND} {str(file)!r}: {theirs!r} is not finite, so the file is damaged; replace it.")
        own[ours].copy_(tensor)
