"""Files of CLIP's weights: finding and downloading those behind a tag."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import open_clip
from huggingface_hub import try_to_load_from_cache
from open_clip.pretrained import download_pretrained, get_pretrained_cfg

from fedbench.core.errors import FedbenchError, NotHere
from fedbench.models import weight_files
from fedbench.models.names import BackboneName

log = logging.getLogger(__name__)

_SHA256 = re.compile("[0-9a-f]{64}")


def how_to_get_clip(name: BackboneName, data_dir: Path) -> str:
    """How to get the weights behind a tag; "" if they are on this machine, or there is no such tag."""
    tag = get_pretrained_cfg(base_arch(name.arch), name.checkpoint) or get_pretrained_cfg(name.arch, name.checkpoint)
    if not tag or _cached(tag, data_dir / "clip") or _cached(tag, None):
        return ""
    return f"downloaded where there is a network; else {_by_hand(name, tag, data_dir / 'clip')}"


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
