"""Dual encoders of transformers as backbones: CLIP, SigLIP, SigLIP 2, ALIGN, or any two encoders joined.

``hf-clip:NAME_OR_FOLDER`` is a model of the hub, or a folder as ``save_pretrained`` writes it, with its tokenizer and
``preprocessor_config.json``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.kinds.kinds import BackboneRequest
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.inputs import CroppedTransform, PixelTransform
from fedbench.models.names import BackboneName

KINDS = ("clip", "siglip", "siglip2", "align", "vision-text-dual-encoder")
"""The supported model types. Others have two towers as well, but give no single vector for an image or a text."""
_INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
"""Interpolation by PIL's number, as preprocessor configurations have it."""


def load(name: BackboneName, request: BackboneRequest) -> ClipBackbone:
    """The dual encoder that ``name`` describes; FedbenchError for what is missing, damaged or of another kind."""
    source = name.checkpoint
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads of a tokenizer don't survive a fork
    # attention written out is the only kind with a batching rule for vmap
    tokenizer, model = load_pretrained(source, f"backbone {name.text!r}", "hf-clip:", attn_implementation="eager")
    kind = model.config.model_type
    if kind not in KINDS:
        raise FedbenchError(f"backbone {name.text!r} is a {kind!r} model of transformers, none of {', '.join(KINDS)}.")
    transform = transform_of(_preprocessor(source, name.text), model.config, name.text)
    masks = not kind.startswith("siglip")
    if masks and tokenizer.padding_side != "right":
        raise FedbenchError(
            f"backbone {name.text!r}: its tokenizer pads texts in front; they are read as padded behind."
        )
    texts = PaddedTexts(tokenizer, _places(tokenizer, model.config), masks=masks)
    backbone = ClipBackbone(name.text, model, texts, transform, 0)
    with torch.no_grad():
        width = backbone.text.encode(texts(["a"])).shape[1]
    return ClipBackbone(name.text, model, texts, transform, width)


class PaddedTexts:
    """A tokenizer of transformers, called as open_clip's are: (n, l) token ids, cut and padded to one length."""

    def __init__(self, tokenizer: Any, length: int, *, masks: bool) -> None:
        """With ``masks`` the padding token must differ from all others; SigLIP's is also its end token."""
        self._tokenizer = tokenizer
        self._length = length
        if masks and tokenizer.pad_token_id is None:
            raise FedbenchError("a tokenizer without a padding token has no tables of texts of one length.")

    def __call__(self, texts: list[str]) -> Tensor:
        made = self._tokenizer(
            list(texts), padding="max_length", max_length=self._length, truncation=True, return_tensors="pt"
        )
        table: Tensor = made["input_ids"]
        return table


def transform_of(given: Mapping[str, Any], config: Any, name: str) -> PixelTransform:
    """The transform that a preprocessor configuration describes, with its own resizing, scale and normalisation.

    FedbenchError where it leaves images of no fixed square size, or lacks a value.
    """
    try:
        return _transform_of(given, config, name)
    except (LookupError, TypeError, ValueError) as error:
        raise FedbenchError(
            f"backbone {name!r}: its preprocessor_config.json can't be used ({type(error).__name__}: {error}); get it "
            "again."
        ) from error


def _transform_of(given: Mapping[str, Any], config: Any, name: str) -> PixelTransform:
    # values are p f - o, then (v - m) / s, of p from 0 to 255; here (p / 255 - m') / s'
    factor = 255 * float(given.get("rescale_factor", 1 / 255))
    offset = 1.0 if given.get("rescale_offset", False) else 0.0
    normal = given.get("do_normalize", True)
    mean, std = (given[key] if normal else [default] * 3 for key, default in (("image_mean", 0.0), ("image_std", 1.0)))
    mean, std = tuple((offset + m) / factor for m in mean), tuple(s / factor for s in std)
    interpolation: Any = _INTERPOLATIONS.get(int(given.get("resample", 3)))
    if config.model_type == "siglip2":  # which takes any number of patches; here the number it was trained with
        side = int(config.vision_config.patch_size * config.vision_config.num_patches**0.5)
        return PixelTransform(mean, std, side, "squash", "bilinear")
    edge, mode = _edge(given.get("size"))
    crop = _edge(given.get("crop_size"))[0] if given.get("do_center_crop") else None
    size = crop or (edge if mode == "squash" else None)
    if edge is None or size is None or interpolation is None or not given.get("do_resize", True):
        raise FedbenchError(f"backbone {name!r}: its preprocessor_config.json leaves images of no fixed square size.")
    if edge == size:
        return PixelTransform(mean, std, size, mode, interpolation)
    return CroppedTransform(mean, std, size, mode, interpolation, edge=edge)


def _edge(size: Any) -> tuple[int | None, Literal["shortest", "squash"]]:
    """The side that images are scaled to, and the mode of scaling."""
    if isinstance(size, int):
        return size, "shortest"
    if size and "shortest_edge" in size:
        return int(size["shortest_edge"]), "shortest"
    if size and size.get("height") == size.get("width"):
        return int(size["height"]), "squash"
    return None, "squash"


def _preprocessor(source: str, name: str) -> dict[str, Any]:
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        given, _ = ImageProcessingMixin.get_image_processor_dict(source)
    except (OSError, ValueError) as error:
        raise FedbenchError(
            f"backbone {name!r}: its preprocessor_config.json can't be read ({_first_line(error)}); it says how "
            "images are prepared."
        ) from error
    return dict(given)


def image_size(name: BackboneName, request: BackboneRequest) -> int | None:
    """The side of the images that the model takes, without its weights; None where there is no such model."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name.checkpoint, trust_remote_code=False)
        return transform_of(_preprocessor(name.checkpoint, name.text), config, name.text).size
    except (FedbenchError, OSError, ValueError, LookupError, TypeError):  # loading says what is wrong with it
        return None


def _places(tokenizer: Any, config: Any) -> int:
    """The most tokens of a text. The tokenizer's own limit may be a huge number without meaning."""
    most = int(config.text_config.max_position_embeddings)
    return min(int(tokenizer.model_max_length), most)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]


def load_pretrained(source: str, what: str, name_it: str, **options: Any) -> tuple[Any, Any]:
    """Tokenizer and frozen model (eval mode, float32, CPU) from a folder, the hub's cache or, failing these, the hub.

    Raises FedbenchError where that can't be: ``what`` was to be loaded, and how a folder is written (``name_it``).
    ``options`` go to the model.
    """
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from fedbench.models import weight_files

    disable_progress_bar()  # type: ignore[no-untyped-call]

    def read(offline: bool) -> tuple[Any, Any]:
        # a model may bring code of its own: it is neither run nor offered
        given: dict[str, Any] = {"local_files_only": offline, "trust_remote_code": False}
        with torch.random.fork_rng(devices=[]):  # heads that the files lack are initialised at random
            tokenizer = AutoTokenizer.from_pretrained(source, **given)
            model = AutoModel.from_pretrained(source, weights_only=True, **given, **options)
        return tokenizer, model.float().eval().requires_grad_(False)

    try:
        return read(offline=True)
    # On damaged files transformers raises what its readers do: safetensors', torch's and json's errors.
    except Exception as missing:
        if Path(source).exists() or not weight_files.can_reach("https://huggingface.co"):
            raise FedbenchError(
                f"{what}: no complete transformers model in that folder or in the cache, and no download possible; "
                f"put one on this machine and write '{name_it}FOLDER' ({_first_line(missing)})."
            ) from missing
    try:
        return read(offline=False)
    except Exception as error:
        raise FedbenchError(f"{what} can't be downloaded ({_first_line(error)}).") from error
