"""The interface of a dual encoder's text tower, whichever library built it.

Every kind encodes whole texts from their tokens. Most also take embedded tokens, some of which can be learned vectors;
``lacks`` says why a kind does not. An encoder holds no tensors of its own: it reads those of its module when it is
called, so that it also works inside `torch.func.functional_call`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedbench.core.errors import FedbenchError
from fedbench.models.clip.plain_blocks import Block

NO_CONTEXT = "context of learned vectors"
"""Name of the capability to take embedded tokens, in error messages."""


class ClipTextEncoder:
    """A text tower of open_clip that only encodes whole texts; ``lacks`` says why it takes no embedded tokens."""

    def __init__(self, module: nn.Module, lacks: str = "") -> None:
        self.module: Any = module
        self.lacks = lacks

    def encode(self, tokens: Tensor) -> Tensor:
        """Features (n, d), not normalised, of ``tokens`` (n, l), as the library computes them."""
        features: Tensor = self.module.encode_text(tokens, normalize=False)
        return features

    def truncated(self, tokens: Tensor) -> Tensor:
        """``tokens`` (n, l) without columns at the end that no feature depends on."""
        return tokens

    def encode_truncated(self, tokens: Tensor) -> Tensor:
        """Encode tokens that `truncated` returned."""
        return self.encode(tokens)

    # what follows is of towers that lack nothing

    @property
    def width(self) -> int:
        """The width d_t of an embedded token."""
        raise self._refusal()

    def ends(self, tokens: Tensor) -> Tensor:
        """The position of each text's end token in ``tokens`` (n, l), (n,) int64."""
        raise self._refusal()

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens (n, l) to (n, l, d_t), without positions."""
        raise self._refusal()

    def encode_embedded(self, embedded: Tensor, tokens: Tensor) -> Tensor:
        """Features (n, d), not normalised, of ``embedded`` tokens (n, l, d_t), which may differ from the table's.

        Positions are added here, once. ``tokens`` (n, l) only say where a text ends and what is padding.
        """
        raise self._refusal()

    # and what follows of towers with blocks

    @property
    def blocks(self) -> list[Block] | None:
        """The layers if they are plain blocks; else None, and only their library can run them."""
        return None

    @property
    def is_causal(self) -> bool:
        """Whether a token sees only tokens before it and the feature is read at the end token."""
        return False

    @property
    def positions(self) -> Tensor:
        """Position embeddings (L, d_t), which are added to embedded tokens."""
        raise self._refusal()

    def normed(self, x: Tensor) -> Tensor:
        """The tower's last norm, applied to (..., d_t)."""
        raise self._refusal()

    def project(self, pooled: Tensor) -> Tensor:
        """Project pooled states (..., d_t) behind the last norm into the space shared with images, (..., d)."""
        raise self._refusal()

    def _refusal(self) -> FedbenchError:
        return FedbenchError(f"this text tower takes no {NO_CONTEXT}: {self.lacks}.")
