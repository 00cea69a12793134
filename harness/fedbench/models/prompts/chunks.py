"""Functions applied to rows in chunks, to save memory for the gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def in_chunks(function: Callable[[Tensor], Tensor], rows: Tensor, size: int) -> Tensor:
    """Apply ``function``, which treats each row by itself, to ``rows`` (b, ...), at most ``size`` at once.

    With more than one chunk only the result is kept for the gradient, and the backward pass computes the rest again.
    """
    if len(rows) <= size:
        return function(rows)
    chunks = torch.split(rows, size)
    if not torch.is_grad_enabled():
        return torch.cat([function(chunk) for chunk in chunks])
    again = [checkpoint(function, chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.cat(again)
