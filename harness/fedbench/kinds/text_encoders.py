"""Text encoders: one vector a class, from its name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbench.kinds.base import P, Plugin

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TextRequest:
    """Class vectors that are asked for."""

    text: str
    """The encoder's name as it was typed."""
    location: str
    """What stands behind the colon; "" where nothing may."""
    classnames: Sequence[str]
    templates: Sequence[str]
    """Prompts, ``{}`` is the class name."""
    seed: int
    """For vectors that are drawn."""
    dim: int
    """The width of vectors that are drawn; an encoder has its own."""
    data_dir: Path
    """Where files of weights and vectors are looked up."""


class TextEncoder(Plugin[P]):
    """A text encoder. An entry point of the group ``fedbench.text_encoders`` loads such a class."""

    kind = "text encoder"

    @abstractmethod
    def vectors(self, request: TextRequest) -> Tensor:
        """One vector a class, float32 (K, V); they are brought to length one."""

    def digest(self, request: TextRequest) -> str:
        """A hash of its weights or files, part of what a stored run is recognised by; "" where it has none."""
        return ""

    def how_to_get(self, request: TextRequest) -> str:
        """What to do about published weights; "" where they are here, or it needs none."""
        return ""


AnyTextEncoder = TextEncoder[Any]
