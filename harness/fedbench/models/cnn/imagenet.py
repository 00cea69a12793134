"""AlexNet and ResNets that start from torchvision's weights of ImageNet, by name or from a file in its format.

    alexnet?weights=imagenet        torchvision's IMAGENET1K_V1: from the data folder, torch's cache, or downloaded
    resnet50?weights=FILE           a state dict with torchvision's names (.pth, .pt, .bin, .safetensors)

The classifier is left out: a head takes its place. AlexNet has batch-norm here, as in FedBN, and the weights have none:
its convolutions and dense layers are theirs, its batch-norm starts as it does from scratch, which at first changes
nothing in eval mode. So round 0 sees torchvision's own features.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbench.core.errors import FedbenchError, NotHere
from fedbench.models.clip.backbone import digest_of_weights
from fedbench.models.clip.weights import can_reach
from fedbench.models.cnn.backbone import load_cnn
from fedbench.models.cnn.pretrained import PretrainedNetwork
from fedbench.models.names import BackboneName

_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
_CONVOLUTIONS = {f"features.conv{i}": f"features.{at}" for i, at in enumerate((0, 3, 6, 8, 10), start=1)}
_OF_ALEXNET = {**_CONVOLUTIONS, "fc1": "classifier.1", "fc2": "classifier.4"}
"""Our layers -> torchvision's. Those of ResNets have the same names."""


def load_imagenet_cnn(name: BackboneName, data_dir: Path, seed: int, size: tuple[int, int] | None) -> PretrainedNetwork:
    """The network that ``name`` describes with pretrained weights; what they lack is initialised from ``seed``.

    ``size`` is the images' (height, width). Raises FedbenchError for a file that is not that network's, NotHere where
    published weights are neither on this machine nor to be had.
    """
    made = load_cnn(name, seed, size)
    body = made.module.get_submodule("net") if name.projector else made.module
    _fill(body, name, _file(name, data_dir))
    module, has_projector = made.module.eval(), name.projector is not None
    digest = digest_of_weights(body)
    if not has_projector:
        module.requires_grad_(False)
    return PretrainedNetwork(name.text, module, made.feature_dim, made.transform, True, digest, has_projector)


def how_to_get_imagenet(name: BackboneName, data_dir: Path) -> str:
    """What to do about published weights; "" where they are on this machine."""
    url, found = _published(name, data_dir)
    return "" if found else f"downloaded where there is a network; else {_by_hand(url, data_dir)}"


def _published(name: BackboneName, data_dir: Path) -> tuple[str, Path | None]:
    """The address of the published weights, and their file, if it is here."""
    from torchvision.models import get_model_weights

    url = str(get_model_weights(name.family)["IMAGENET1K_V1"].url)
    file = url.rpartition("/")[2]
    places = (data_dir / "imagenet" / file, Path(torch.hub.get_dir()) / "checkpoints" / file)
    return url, next((place for place in places if place.is_file()), None)


def _by_hand(url: str, data_dir: Path) -> str:
    return f"download {url} elsewhere and put it into {str(data_dir / 'imagenet')!r}"


def _file(name: BackboneName, data_dir: Path) -> Path:
    if name.weights != "imagenet":
        file = Path(name.weights).expanduser()
        if file.suffix not in _SUFFIXES or not file.is_file():
            raise FedbenchError(
                f"backbone {name.text!r}: there is no file {str(file)!r} ending in {', '.join(_SUFFIXES)}; "
                "weights=imagenet takes the published ones."
            )
        return file
    url, found = _published(name, data_dir)
    if found is not None:
        return found
    todo = _by_hand(url, data_dir)
    if not can_reach(url):
        raise NotHere(f"the weights of {name.text!r} are not on this machine and there is no network: {todo}.")
    target = data_dir / "imagenet" / url.rpartition("/")[2]
    target.parent.mkdir(parents=True, exist_ok=True)
    # the digest at the end of its name is checked
    prefix = target.stem.rpartition("-")[2]
    try:
        torch.hub.download_url_to_file(url, str(target), hash_prefix=prefix, progress=False)
    except (OSError, RuntimeError) as error:
        raise FedbenchError(f"downloading the weights of {name.text!r} failed ({error}): {todo}.") from error
    return target


def _fill(body: nn.Module, name: BackboneName, file: Path) -> None:
    """Every layer of ``body`` from the file, but AlexNet's batch-norm, which it has none of."""
    try:
        given: Any = load_file(file) if file.suffix == ".safetensors" else _unpickled(file)
    except Exception as error:  # of damaged files safetensors and torch raise nearly anything
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise FedbenchError(f"can't read the weights {str(file)!r}: {type(error).__name__} {reason}.") from error
    own = body.state_dict()
    wanted = {ours: theirs for ours in own if (theirs := _theirs(ours, name, body))}
    wrong = [theirs for ours, theirs in wanted.items() if not _fits(given, theirs, own[ours])]
    if wrong:
        raise FedbenchError(
            f"{str(file)!r} holds no weights of torchvision's {name.family}: {wrong[0]!r} is missing or of another "
            f"shape, one of {len(wrong)}; give a state dict of that network."
        )
    body.load_state_dict({**own, **{ours: given[theirs] for ours, theirs in wanted.items()}})


def _unpickled(file: Path) -> Any:
    return torch.load(file, weights_only=True, map_location="cpu")


def _fits(given: Any, key: str, own: Tensor) -> bool:
    found = given.get(key) if isinstance(given, dict) else None
    return isinstance(found, Tensor) and found.shape == own.shape


def _theirs(ours: str, name: BackboneName, body: nn.Module) -> str:
    """torchvision's name of our tensor; "" for what its network has not."""
    if name.family != "alexnet":
        return ours
    layer, _, tensor = ours.rpartition(".")
    return "" if isinstance(body.get_submodule(layer), _BatchNorm) else f"{_OF_ALEXNET[layer]}.{tensor}"
