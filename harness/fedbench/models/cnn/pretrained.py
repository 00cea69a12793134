"""Image networks with pretrained weights: EfficientNet-Lite0, any of timm, and CNNs that start from torchvision's.

    alexnet?weights=imagenet                torchvision's file, looked up and fetched
    resnet18?weights=weights/mine.pth       a file with torchvision's names

torchvision's tensors have other names than ours, and its classifier of 1,000 classes is left out. What its network
lacks starts as it does without weights: AlexNet's batch-norm, which changes nothing before it is trained, and VGG-11's
dense layers of 512, drawn from the seed. There is no dropout (`fedbench.models.cnn.nets`). Nothing stays frozen unless
``tune=head``.
"""

from __future__ import annotations

import hashlib
import logging
import urllib.error
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedbench.core.errors import FedbenchError, NotHere, unknown_name
from fedbench.core.files import looked_up
from fedbench.kinds.kinds import BackboneRequest
from fedbench.models import weight_files
from fedbench.models.clip.backbone import digest_of, digest_of_weights
from fedbench.models.cnn.backbone import CnnBackbone, default_generator_from
from fedbench.models.cnn.backbone import load as load_cnn
from fedbench.models.inputs import CroppedTransform, PixelTransform
from fedbench.models.names import IMAGENET, LIST_HINT, BackboneName
from fedbench.models.photos.lite0_minilm import LITE0_SIZE, LITE0_STATISTICS, load_lite0
from fedbench.models.weight_files import SUFFIXES, check_archive, check_digest, read_state_dict

PROJECTOR = "projector has"
"""The text of `PretrainedNetwork.drawn` for a projector."""

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


@dataclass(frozen=True, eq=False)
class PretrainedNetwork(CnnBackbone):
    """A network whose features can be frozen for a linear head, or trained further.

    ``tune=auto`` freezes it if ``is_pretrained``. Otherwise the network only starts from weights and is trained.
    """

    drawn: str = ""
    """The part without pretrained weights, in words; empty for none. Features of such a network can't stay frozen."""

    def image_encoder(self) -> NetworkEncoder:
        """The encoder of frozen features. FedbenchError if a part of the network has no pretrained weights."""
        if self.drawn:
            remedy = ", or leave projector= out" if self.drawn == PROJECTOR else ""
            raise FedbenchError(
                f"backbone {self.name!r}: its {self.drawn} no pretrained weights, so its features can't stay frozen; "
                f"set tune=full{remedy}."
            )
        return NetworkEncoder(self)


@dataclass(frozen=True, eq=False)
class NetworkEncoder:
    """A ``FrozenEncoder``: pooled features, not normalised."""

    backbone: PretrainedNetwork

    @cached_property
    def key(self) -> str:
        """Digest of weights, layers and transform."""
        kind = f"network {self.backbone.weights_hash} {self.backbone.transform} {self.backbone.module!r}"
        return hashlib.sha256(kind.encode()).hexdigest()

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.backbone.module(self.backbone.transform(pixels))
        return features


def load(name: BackboneName, request: BackboneRequest) -> PretrainedNetwork:
    """The network that ``name`` describes; a projector is initialised from the seed."""
    import timm

    if name.family == "lite0":
        body: Any = timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=0)
        load_lite0(body)
        transform = PixelTransform(*LITE0_STATISTICS, name.resize or LITE0_SIZE)
    else:
        if name.arch not in timm.list_models():
            raise unknown_name("architecture of timm", name.arch, timm.list_models(), LIST_HINT)
        body = timm.create_model(name.arch, pretrained=False, num_classes=0)
        _fill(body, name)
        transform = _transform_of(body, name)
    body.eval()
    width, digest = int(body.num_features), digest_of_weights(body)
    if name.projector is None:
        return PretrainedNetwork(name.text, body.requires_grad_(False), width, transform, True, digest)
    with default_generator_from(request.seed, "backbone"):
        projector = nn.Linear(width, name.projector)
    whole = nn.Sequential(OrderedDict(net=body, projector=projector))
    return PretrainedNetwork(name.text, whole.eval(), name.projector, transform, True, digest, drawn=PROJECTOR)


def image_size(name: BackboneName, request: BackboneRequest) -> int | None:
    """The side in pixels of the images that the network takes, without its weights; None where it is unknown."""
    if name.resize or name.family == "lite0":
        return name.resize or LITE0_SIZE
    from timm.models import get_pretrained_cfg, is_model

    config = get_pretrained_cfg(name.arch) if is_model(name.arch) else None
    return None if config is None else int(config.input_size[-1])


def _fill(body: nn.Module, name: BackboneName) -> None:
    """Load the file into all layers but the classifier, which ``body`` does not have."""
    file = looked_up(name.checkpoint, f"backbone {name.text[:200]!r}: file of weights")
    if file.suffix not in SUFFIXES or not file.is_file():
        raise FedbenchError(f"backbone {name.text!r}: there is no file {str(file)!r} ending in {', '.join(SUFFIXES)}.")
    try:
        given = read_state_dict(file)
        own = body.state_dict()
        body.load_state_dict({key: given[key] for key in own})
    except Exception as error:  # of damaged files safetensors, torch and json raise nearly anything
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise FedbenchError(
            f"can't load {str(file)!r} as {name.arch}: {type(error).__name__} {reason} (needed: a state dict with "
            "timm's names, which are torchvision's for ResNets)."
        ) from error


def _transform_of(body: nn.Module, name: BackboneName) -> PixelTransform:
    """timm's transform for this network, or ``resize=`` in place of its size."""
    from timm.data.config import resolve_model_data_config

    config: Any = resolve_model_data_config(body)  # type: ignore[no-untyped-call]
    mean, std = tuple(config["mean"]), tuple(config["std"])
    interpolation: Literal["bilinear", "bicubic"] = "bilinear" if config["interpolation"] == "bilinear" else "bicubic"
    if name.resize:
        return PixelTransform(mean, std, name.resize, "squash", interpolation)
    if config["crop_mode"] == "border":
        raise FedbenchError(f"backbone {name.text!r}: timm pads its images, which isn't done here; add ?resize=SIZE.")
    size = int(config["input_size"][-1])
    mode: Literal["shortest", "squash"] = "squash" if config["crop_mode"] == "squash" else "shortest"
    return CroppedTransform(mean, std, size, mode, interpolation, edge=int(size / config["crop_pct"]))


def load_started(name: BackboneName, request: BackboneRequest) -> PretrainedNetwork:
    """The network that ``name`` describes, started from its ``weights``; what these lack is drawn from the seed.

    Files behind ``weights=imagenet`` are looked up in ``data_dir/torchvision`` and torch hub's cache, and downloaded to
    the former. Raises FedbenchError for files that are missing, damaged or of another network, NotHere where there is
    no network to fetch them.
    """
    from_scratch = load_cnn(name, request)
    whole = from_scratch.module
    body = whole if name.projector is None else whole.get_submodule("net")
    file = _published_file(name, request.data_dir) if name.weights == IMAGENET else _given_file(name)
    _copy_torchvision(body, name, file)
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
    file = looked_up(name.weights, f"backbone {name.text[:200]!r}: file of weights")
    if file.suffix not in SUFFIXES or not file.is_file():
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


def _copy_torchvision(body: nn.Module, name: BackboneName, file: Path) -> None:
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
