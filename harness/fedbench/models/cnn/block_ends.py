"""Marks at the ends of a CNN's convolution blocks, where a method can change feature maps during training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import count

from torch import Tensor, nn

from fedbench.core.types import Model, Outputs, Tensors

BlockChange = Callable[[int, Tensor, Tensors], Tensor]
"""A function ``change(position, features, tensors)``. It returns what replaces ``features`` (b, c, h, w), of the same
shape. ``position`` counts the block ends from 0 in the order of the forward pass; ``tensors`` are those of the pass."""

# of the thread's own: clients that train side by side pass through different ends with different changes
_change: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("change of feature maps", default=None)


class BlockEnd(nn.Module):
    """Marks the end of a convolution block, behind its pooling. It passes its input on unless a method changes it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, features: Tensor) -> Tensor:
        change = _change.get()
        return features if change is None else change(features)


def block_channels(body: nn.Module) -> tuple[int, ...]:
    """The channels at each block end of ``body``, in the order of the forward pass; empty where none is marked."""
    return tuple(module.channels for module in body.modules() if isinstance(module, BlockEnd))


def with_changed_blocks(model: Model, change: BlockChange) -> Model:
    """``model``, whose forward pass applies ``change`` at every block end when training, and nothing otherwise.

    ``change`` is given all tensors of the call, also those that the model itself does not know (noise, say). It may
    write to running statistics among them, as batch-norm does.
    """

    def forward(tensors: Tensors, inputs: Tensor, training: bool) -> Outputs:
        if not training:
            return model.forward(tensors, inputs, training)
        positions = count()
        with _changing(lambda features: change(next(positions), features, tensors)):
            return model.forward(tensors, inputs, training)

    return replace(model, forward=forward)


@contextmanager
def _changing(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the block, block ends apply ``change`` in this thread."""
    token = _change.set(change)
    try:
        yield
    finally:
        _change.reset(token)
