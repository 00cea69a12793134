"""``clip:lite0-minilm``: EfficientNet-Lite0 and all-MiniLM-L6-v2 joined by a linear map. Not a CLIP: see the card.

Both towers were trained apart from each other. The map between them (`fedbench.models.photos.fit`) was fitted on the
1000 rows of ImageNet's classifier and the names of its classes, and on nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedbench.core.errors import FedbenchError
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.photos.packages import LITE0_SIZE, LITE0_STATISTICS, MINILM, load_lite0
from fedbench.models.transform import PixelTransform

WIDTH, CONTEXT_LENGTH = 384, 32
"""The width d of the shared space, and the number of tokens of a text."""
FOLDER = Path(__file__).parent
BRIDGE, CARD = FOLDER / "bridge.safetensors", FOLDER / "card.json"


def load_lite0_minilm(name: str) -> ClipBackbone:
    """The joined towers. FedbenchError if a package is missing, or a file differs from the card's digest."""
    digest = hashlib.sha256(BRIDGE.read_bytes()).hexdigest()
    if digest != json.loads(CARD.read_text())["sha256"]:
        raise FedbenchError(f"{str(BRIDGE)!r} is damaged; reinstall fedbench.")
    module, tokenizer = joined(load_file(BRIDGE))
    return ClipBackbone(name, module, tokenizer, PixelTransform(*LITE0_STATISTICS, LITE0_SIZE), WIDTH)


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
