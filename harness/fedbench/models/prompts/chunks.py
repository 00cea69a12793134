"""Rows in chunks, where all at once would need too much memory for the gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def in_chunks(function: Callable[[Tensor], Tensor], rows: Tensor, size: int) -> Tensor:
    """``function`` of ``rows`` (b, ...), which takes each by itself, at most ``size`` at once.

    Of more than one chunk nothing but the result is kept for the gradient: it is computed again in the backward pass.
    """
    if len(rows) <= size:
        return function(rows)
    chunks = torch.split(rows, size)
    if not torch.is_grad_enabled():
        return torch.cat([function(chunk) for chunk in chunks])
    again = [checkpoint(function, chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.cat(again)
