"""Files of published weights: whether they can be downloaded, whether they are intact, and reading them."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from fedbench.core.errors import FedbenchError
from fedbench.core.files import opened

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


def check_digest(file: Path, expected: str, remedy: str, kind: str = "CLIP weights") -> None:
    """Raise FedbenchError if the file's sha256 does not begin with ``expected``; ``remedy`` says what to do then.

    ``kind`` describes the file's content.
    """
    try:
        with opened(file) as whole:
            digest = hashlib.file_digest(whole, "sha256").hexdigest()
    except OSError as error:
        raise FedbenchError(f"{kind} {str(file)!r} can't be read ({error.strerror}); {remedy}.") from error
    if not digest.startswith(expected):
        raise FedbenchError(
            f"{kind} {str(file.resolve())!r} are damaged (sha256 {digest[:12]}..., published: "
            f"{expected[:12]}...); {remedy}."
        )


def check_archive(file: Path, kind: str = "CLIP weights") -> None:
    """Raise FedbenchError if a member of a torch file differs from its checksum, which torch itself does not check."""
    if file.suffix == ".safetensors" or not zipfile.is_zipfile(file):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        damaged = str(error)
    if damaged is not None:
        raise FedbenchError(f"{kind} {str(file)!r} are damaged ({damaged}); get the file again.")


def can_reach(url: str) -> bool:
    """Whether an address answers within seconds; the hub's own clients would retry for minutes."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError as error:
        return error.code in (401, 404, 405)  # it answered; a proxy that refuses says 403 or 407
    except OSError:
        return False
    return True


def read_state_dict(file: Path) -> dict[str, Any]:
    """Read the tensors of a ``.safetensors`` or torch file by name, onto the CPU; only tensors are unpickled.

    For damaged files it raises whatever safetensors, torch and json raise.
    """
    import torch
    from safetensors.torch import load_file

    if file.suffix == ".safetensors":
        return load_file(file)
    held = torch.load(file, weights_only=True, map_location="cpu")
    if not isinstance(held, dict):
        raise ValueError(f"it holds a {type(held).__name__}, not tensors by name")
    return held
