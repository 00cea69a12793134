"""Load CLIP: by open_clip's pretrained tag, or from a file or folder; find and download the files behind a tag."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import open_clip
import torch
from huggingface_hub import try_to_load_from_cache
from open_clip.model import CLIPVisionCfg
from open_clip.pretrained import download_pretrained, get_pretrained_cfg, list_pretrained_tags_by_model
from open_clip.tokenizer import SimpleTokenizer

from fedbench.core.errors import FedbenchError, NotHere, unknown_name
from fedbench.core.files import looked_up
from fedbench.kinds.kinds import BackboneRequest
from fedbench.kinds.registry import registered
from fedbench.models import weight_files
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.clip.text_towers import HuggingFaceText, text_encoder
from fedbench.models.inputs import PixelTransform
from fedbench.models.names import FOLDERS, LIST_HINT, BackboneName
from fedbench.models.weight_files import check_archive, check_digest

log = logging.getLogger(__name__)

_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_MASKS = ("attn_mask", "text.attn_mask")
"""Buffers that hold minus infinity by design."""


_SHA256 = re.compile("[0-9a-f]{64}")


@lru_cache(maxsize=1)
def byte_pairs() -> SimpleTokenizer:
    """open_clip's byte-pair tokenizer, built once."""
    return SimpleTokenizer()


def load(name: BackboneName, request: BackboneRequest) -> ClipBackbone:
    """The CLIP that ``name`` describes, ready to encode.

    Weights behind a tag are looked up in Hugging Face's cache and in ``data_dir/clip``, and downloaded to the latter.
    """
    if name.arch in FOLDERS:
        return _from_folder(name)
    known = open_clip.list_models()
    if name.arch not in known:
        own = {one.removeprefix("clip:") for one in registered("backbone") if one.startswith("clip:")}
        near = difflib.get_close_matches(name.arch, sorted({*known, *own}), cutoff=0.0)
        raise FedbenchError(
            f"unknown CLIP architecture {name.arch!r}; did you mean {' or '.join(map(repr, near))}? {LIST_HINT}"
        )
    tags = sorted({*list_pretrained_tags_by_model(name.arch), *list_pretrained_tags_by_model(base_arch(name.arch))})
    if not name.checkpoint:
        raise FedbenchError(
            f"backbone {name.text!r} names no weights: write 'clip:{name.arch}@CHECKPOINT', CHECKPOINT a file or one "
            f"of {', '.join(tags) or '(no tag known)'}."
        )
    if name.checkpoint.endswith(_SUFFIXES) or os.sep in name.checkpoint:
        file = looked_up(name.checkpoint, _called(name))
        if not file.is_file():
            raise FedbenchError(f"backbone {name.text!r}: there is no file {str(file)!r}.")
        return load_weights(name, file, {}, quick_gelu=None)
    tag = get_pretrained_cfg(base_arch(name.arch), name.checkpoint) or get_pretrained_cfg(name.arch, name.checkpoint)
    if not tag:
        raise unknown_name(f"checkpoint of {name.arch}:", name.checkpoint, tags, "Or give a file's path.")
    file = fetch(name, tag, request.data_dir)
    check_digest(file, published_digest(file, tag), "delete it and run again, and it is downloaded anew")
    return load_weights(name, file, tag, quick_gelu=quick_gelu_for(name.arch, tag))


def image_size(name: BackboneName, request: BackboneRequest) -> int | None:
    """The side in pixels of the images that a model takes, without its weights; None where it is unknown."""
    try:
        own = _own_config(name)
        config = open_clip.get_model_config(name.arch) if own is None else json.loads(own.read_text())
        config = None if config is None else config.get("model_cfg", config)
        if config is None:
            return None
        return _square(config["vision_cfg"].get("image_size", CLIPVisionCfg.image_size), name)
    # whatever is wrong with the configuration, loading says it
    except (FedbenchError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _own_config(name: BackboneName) -> Path | None:
    """The configuration file of an architecture that open_clip does not list; None where there is none."""
    if name.arch == "local-dir":
        config: Path | str | None = looked_up(name.checkpoint, _called(name)) / "open_clip_config.json"
    else:
        config = try_to_load_from_cache(name.checkpoint, "open_clip_config.json") if name.arch == "hf-hub" else None
    return Path(config) if isinstance(config, str | Path) and Path(config).is_file() else None


def load_weights(
    name: BackboneName, file: Path, tag: dict[str, Any], quick_gelu: bool | None, tokenizer: Any = None
) -> ClipBackbone:
    """Load the weights in ``file`` into open_clip's architecture ``name.arch``.

    ``tag`` is open_clip's record of published weights. ``quick_gelu`` is the activation that they were trained with;
    None: the architecture's. Without a ``tokenizer`` the architecture's is used.
    """
    if file.suffix not in _SUFFIXES:  # open_clip would unpickle .npz of big_vision without checks
        raise FedbenchError(f"CLIP weights {str(file)!r}: expected a file ending in {', '.join(_SUFFIXES)}.")
    overrides: dict[str, Any] = {}
    if quick_gelu is not None:
        overrides["quick_gelu"] = quick_gelu
        if quick_gelu != bool(open_clip.get_model_config(name.arch).get("quick_gelu", False)):
            used = "QuickGELU" if quick_gelu else "GELU"
            log.info("%s: these weights were trained with %s, so it is used whatever the name says", name.text, used)
    preprocess = {key: tag[key] for key in ("mean", "std", "interpolation", "resize_mode") if key in tag}
    check_archive(file)
    try:
        with torch.random.fork_rng(devices=[]):  # open_clip initialises at random before it loads
            module = open_clip.create_model(
                name.arch, pretrained=str(file), force_preprocess_cfg=preprocess, weights_only=True, **overrides
            )
    # On damaged files open_clip and torch raise nearly anything.
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FedbenchError(
            f"can't load CLIP weights {str(file)!r} as {name.arch}: {' '.join(reason[:2])[:300]} "
            "(needed: a complete safetensors file or state dict of this architecture)."
        ) from error
    embed_dim = int(open_clip.get_model_config(name.arch)["embed_dim"])
    return _frozen(name, str(file), module, tokenizer or _tokenizer(name.arch, name), embed_dim)


def _called(name: BackboneName) -> str:
    return f"backbone {name.text[:200]!r}: file or folder"


def _from_folder(name: BackboneName) -> ClipBackbone:
    """A model with a configuration of its own, in open_clip's format, from a folder or the hub."""
    folder = looked_up(name.checkpoint, _called(name)) if name.arch == "local-dir" else None
    whole = f"{name.arch}:{folder or name.checkpoint}"
    if not name.checkpoint or (folder is not None and not folder.is_dir()):
        raise FedbenchError(f"backbone {name.text!r}: write 'clip:local-dir:FOLDER' or 'clip:hf-hub:NAME'.")
    try:
        with torch.random.fork_rng(devices=[]):
            module = open_clip.create_model(whole, weights_only=True)
    except Exception as error:  # as in `load_weights`
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FedbenchError(f"backbone {name.text!r} can't be loaded: {' '.join(reason[:2])[:300]}") from error
    tokenizer = _tokenizer(whole, name)
    with torch.no_grad():
        width = int(text_encoder(module.eval()).encode(tokenizer(["a"])).shape[1])
    return _frozen(name, name.checkpoint, module, tokenizer, width)


def _frozen(name: BackboneName, source: str, module: Any, tokenizer: Any, embed_dim: int) -> ClipBackbone:
    """The loaded model as a backbone. Raises FedbenchError for weights that are not finite."""
    for key, tensor in module.state_dict().items():
        if tensor.is_floating_point() and key not in _MASKS and not tensor.isfinite().all():
            raise FedbenchError(f"CLIP weights {source!r}: {key} is not finite, so the file is damaged; replace it.")
    module.eval().requires_grad_(False)
    if isinstance(text_encoder(module), HuggingFaceText):  # other attention has no batching rule for vmap
        module.text.transformer.set_attn_implementation("eager")
    seen = module.visual.preprocess_cfg
    if seen["resize_mode"] == "longest":
        raise FedbenchError(
            f"backbone {name.text!r}: its resize_mode 'longest' pads images, which isn't done here; choose another."
        )
    transform = PixelTransform(
        mean=tuple(seen["mean"]),
        std=tuple(seen["std"]),
        size=_square(seen["size"], name),
        mode=seen["resize_mode"],
        interpolation=seen["interpolation"],
    )
    return ClipBackbone(name.text, module, tokenizer, transform, embed_dim)


def _square(size: int | tuple[int, int], name: BackboneName) -> int:
    side, other = (size, size) if isinstance(size, int) else size
    if side != other:
        raise FedbenchError(f"backbone {name.text!r} takes images of {side} x {other}; choose one of square images.")
    return side


def _tokenizer(model: str, name: BackboneName) -> Any:
    try:
        return open_clip.get_tokenizer(model)
    except Exception as error:  # of the hub, or of a library that a tokenizer needs
        reason = str(error).strip().split("\n")[0][:200]
        raise FedbenchError(f"backbone {name.text!r}: its tokenizer can't be loaded ({reason}).") from error


def how_to_get(name: BackboneName, request: BackboneRequest) -> str:
    """How to get the weights behind a tag; "" if they are on this machine, or there is no such tag."""
    tag = get_pretrained_cfg(base_arch(name.arch), name.checkpoint) or get_pretrained_cfg(name.arch, name.checkpoint)
    own = request.data_dir / "clip"
    if not tag or _cached(tag, own) or _cached(tag, None):
        return ""
    return f"downloaded where there is a network; else {_by_hand(name, tag, own)}"


def fetch(name: BackboneName, tag: dict[str, Any], data_dir: Path | None) -> Path:
    """The file behind a tag: from a cache, else downloaded; FedbenchError at once where there is no network."""
    own = None if data_dir is None else data_dir / "clip"
    cached = _cached(tag, own) or _cached(tag, None)
    if cached is not None:
        return cached
    source, manual = _source(tag), _by_hand(name, tag, own)
    host = "https://huggingface.co" if tag.get("hf_hub") else str(tag["url"])
    if not weight_files.can_reach(os.environ.get("HF_ENDPOINT", host) if tag.get("hf_hub") else host):
        raise NotHere(f"the weights of {name.text!r} are not on this machine and there is no network: {manual}")
    log.info("downloading the weights of %s from %s", name.text, source)
    try:
        return Path(download_pretrained(tag, cache_dir=None if own is None else str(own)))
    except (OSError, RuntimeError, ValueError) as error:
        raise FedbenchError(f"downloading the weights of {name.text!r} failed ({error}): {manual}") from error


def quick_gelu_for(arch: str, tag: dict[str, Any]) -> bool:
    """Whether a tag's weights were trained with QuickGELU. The tag decides, whatever the architecture's suffix.

    open_clip only warns when the two differ and goes on with the wrong activation: ``ViT-B-32`` with OpenAI's weights
    then loses accuracy silently, and so does ``ViT-B-32-quickgelu`` with LAION's. An architecture whose own config asks
    for QuickGELU without a suffix in its name (roberta-ViT-B-32) keeps it.
    """
    own = open_clip.get_model_config(base_arch(arch)) or {}
    return bool(tag.get("quick_gelu", False) or own.get("quick_gelu", False))


def base_arch(arch: str) -> str:
    """The architecture's name without ``-quickgelu``, where open_clip lists it so."""
    base = arch.removesuffix("-quickgelu")
    return base if open_clip.get_model_config(base) else arch


def published_digest(file: Path, tag: dict[str, Any]) -> str:
    """The published sha256 of the weights, or its beginning; "" if none was published."""
    # the Hub's cache calls a large file by its sha256 and links to it
    blob = file.resolve().name
    if _SHA256.fullmatch(blob):
        return blob
    url = str(tag.get("url", ""))
    # a tag may name a file of the Hub as well, which is another one
    if file.name != url.rpartition("/")[2]:
        return ""
    if "openaipublic" in url:
        return url.split("/")[-2]
    return Path(url).stem.split("-")[-1] if "mlfoundations" in url else ""


def _source(tag: dict[str, Any]) -> str:
    return f"huggingface.co/{tag['hf_hub'].rstrip('/')}" if tag.get("hf_hub") else str(tag.get("url", ""))


def _by_hand(name: BackboneName, tag: dict[str, Any], own: Path | None) -> str:
    # A file has no tag to say which activation it was trained with: the name must.
    arch = base_arch(name.arch) + ("-quickgelu" if quick_gelu_for(name.arch, tag) else "")
    target = (own or Path("weights")) / f"{arch}-{name.checkpoint}.safetensors"
    return f"download it from {_source(tag)} elsewhere, put it at {str(target)!r} and write 'clip:{arch}@{target}'."


def _cached(tag: dict[str, Any], folder: Path | None) -> Path | None:
    if tag.get("hf_hub"):
        repo, file = os.path.split(tag["hf_hub"])
        for candidate in (file,) if file else ("open_clip_model.safetensors", "open_clip_pytorch_model.bin"):
            path_in_cache = try_to_load_from_cache(repo, candidate, cache_dir=folder)
            if isinstance(path_in_cache, str):
                return Path(path_in_cache)
        return None
    path = (folder or Path("~/.cache/clip").expanduser()) / os.path.basename(tag["url"])
    return path if path.is_file() else None
