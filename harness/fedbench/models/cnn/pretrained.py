"""Image networks pretrained on ImageNet: EfficientNet-Lite0 from a package, any architecture of timm from a file."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.models.clip.backbone import digest_of_weights
from fedbench.models.cnn.backbone import CnnBackbone, default_generator_from
from fedbench.models.names import LIST_HINT, BackboneName
from fedbench.models.photos.packages import LITE0_SIZE, LITE0_STATISTICS, load_lite0
from fedbench.models.transform import CroppedTransform, PixelTransform
from fedbench.models.weight_files import SUFFIXES, read_state_dict

PROJECTOR = "projector has"
"""The text of `PretrainedNetwork.drawn` for a projector."""


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

    @property
    def name(self) -> str:
        return self.backbone.name

    @cached_property
    def key(self) -> str:
        """Digest of weights, layers and transform."""
        kind = f"network {self.backbone.weights_hash} {self.backbone.transform} {self.backbone.module!r}"
        return hashlib.sha256(kind.encode()).hexdigest()

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.backbone.module(self.backbone.transform(pixels))
        return features


def load_pretrained_network(name: BackboneName, seed: int) -> PretrainedNetwork:
    """The network that ``name`` describes; a projector is initialised from ``seed``."""
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
    with default_generator_from(seed, "backbone"):
        projector = nn.Linear(width, name.projector)
    whole = nn.Sequential(OrderedDict(net=body, projector=projector))
    return PretrainedNetwork(name.text, whole.eval(), name.projector, transform, True, digest, drawn=PROJECTOR)


def pretrained_image_size(name: BackboneName) -> int | None:
    """The side in pixels of the images that the network takes, without its weights; None where it is unknown."""
    if name.resize or name.family == "lite0":
        return name.resize or LITE0_SIZE
    from timm.models import get_pretrained_cfg, is_model

    known = get_pretrained_cfg(name.arch) if is_model(name.arch) else None
    return None if known is None else int(known.input_size[-1])


def _fill(body: nn.Module, name: BackboneName) -> None:
    """Load the file into all layers but the classifier, which ``body`` does not have."""
    file = Path(name.checkpoint).expanduser()
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

    known: Any = resolve_model_data_config(body)  # type: ignore[no-untyped-call]
    mean, std = tuple(known["mean"]), tuple(known["std"])
    interpolation: Literal["bilinear", "bicubic"] = "bilinear" if known["interpolation"] == "bilinear" else "bicubic"
    if name.resize:
        return PixelTransform(mean, std, name.resize, "squash", interpolation)
    size = int(known["input_size"][-1])
    return CroppedTransform(mean, std, size, "shortest", interpolation, edge=int(size / known["crop_pct"]))
