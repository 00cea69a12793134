"""A causal text tower that computes the common beginning of texts once: exact, and several times as fast.

Under a causal mask a token sees only earlier tokens, so up to the first place where texts differ their hidden states
are the same. Texts are therefore packed: one sequence holds the common beginning and, behind it, the rest of several
texts, each up to its end token. A token sees the beginning and its own text, so its result is unchanged. The last block
computes only what reaches the end tokens.

Measured on one thread, forward and backward (`tests/bench/bench_prompts.py`, medians of 60 pairs): ten classes of the
embedded CLIP with 16 shared vectors take 1 / 2.2 of the time of whole texts, with 4 vectors 1 / 1.7, with 16 of each
class's own 1 / 1.4; eight clients stacked by vmap take 1 / 2.1 of the time of one after the other. A hundred classes in
the text tower of ViT-B-32 with 16 shared vectors take 1 / 4.9 (three pairs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad
from torch.nn.utils.rnn import pad_sequence

from fedbench.models.clip.blocks import Added, Block, apply_block
from fedbench.models.clip.text_towers import ClipTextEncoder

SCORE_COST = 200
"""The cost of an attention score besides its dot products (mask, softmax), in multiply-adds of a matrix product."""


@dataclass(frozen=True)
class ContextBlock:
    """A block of consecutive context vectors."""

    length: int
    """The number m of vectors."""
    is_own: bool
    """Whether each text has vectors of its own, (..., K, m, d_t), or all share them, (..., 1, m, d_t)."""


@dataclass(frozen=True, eq=False)
class PackedTexts:
    """K texts in G sequences of T places, for up to C texts each; made by ``pack_texts``. No dimension G where G = 1.

    All tensors are constants of the texts.
    """

    text: ClipTextEncoder
    blocks: Sequence[Block]
    frozen: Tensor
    """Everything that does not depend on the context, (G, T, d_t): positions, and embeddings of all other tokens."""
    places: tuple[Tensor, ...]
    """Selects the places of each block's vectors: (G, T, m), or (G, T, C m) if each text has vectors of its own."""
    outside: Tensor
    """Selects other places, (G, T, 1): 0 where a place takes a vector, else 1."""
    mask: Tensor
    """The mask added to attention scores, (G, 1, T, T) or (T, T): 0 where a token sees another, else minus infinity."""
    ends: Tensor
    """Selects end tokens, (G, C, T): 1 at the end token of each text."""
    ends_mask: Tensor
    """The rows of ``mask`` at the end tokens, (G, 1, C, T) or (C, T)."""
    count: int
    """The number K of texts. The last sequence may have room for more; features of these are dropped."""

    def encode(
        self,
        *blocks: Tensor,
        deep: Sequence[Sequence[Tensor]] = (),
        added: Callable[[int], Added | None] = lambda number: None,
    ) -> Tensor:
        """Text features (..., K, d), not normalised, from the blocks, (..., K or 1, m, d_t) each.

        ``deep``: blocks of the same shapes that replace the context's states behind the first layer, the second, and so
        on. ``added``: what is added to the projections of layer ``number``.
        """
        x = self._with_context(self.frozen, blocks)
        *layers, last = self.blocks
        for number, layer in enumerate(layers):
            x = apply_block(layer, x, layer.ln_1(x), self.mask, added=added(number))
            if number < len(deep):
                x = self._with_context(x * self.outside, deep[number])
        seen = last.ln_1(x)
        x = apply_block(last, self.ends @ x, seen, self.ends_mask, is_all=False, added=added(len(layers)))
        features = self.text.project(self.text.normed(x))
        return features if self.frozen.ndim == 2 else features.flatten(-3, -2)[..., : self.count, :]

    def _with_context(self, x: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        for place, block in zip(self.places, blocks, strict=True):
            x = x + place @ self._rows(block)
        return x

    def _rows(self, block: Tensor) -> Tensor:
        """The block's vectors by sequence: (..., 1, m, d_t) or (..., G, C m, d_t), without that dimension for G = 1."""
        if block.shape[-3] == 1:
            return block.squeeze(-3) if self.frozen.ndim == 2 else block
        if self.frozen.ndim == 2:
            return block.flatten(-3, -2)
        groups, size = self.ends.shape[:2]
        filled = pad(block, (0, 0, 0, 0, 0, groups * size - self.count))
        return filled.reshape(*block.shape[:-3], groups, size * block.shape[-2], block.shape[-1])


def can_pack(text: ClipTextEncoder) -> bool:
    """Whether texts of this tower can be packed: causal, read at their end tokens, and made of plain blocks."""
    return text.is_causal and text.blocks is not None


def pack_texts(
    tower: ClipTextEncoder, tokens: Tensor, embedded: Tensor, slots: Tensor, context: Sequence[ContextBlock]
) -> PackedTexts:
    """Pack texts (K, l), embedded without positions (K, l, d_t), whose places ``slots`` (K, M) take the context's
    vectors.

    The blocks of ``context`` add up to M and stand before the end tokens. The tower must satisfy ``can_pack``.
    """
    count, ends, device, blocks = len(tokens), tower.ends(tokens).tolist(), tokens.device, tower.blocks
    assert blocks is not None
    # what stands where: a token, or below zero the context vector -1 - j
    vectors = -1 - torch.arange(slots.shape[1], device=device)
    content = tokens.scatter(1, slots, vectors.expand_as(slots))
    is_own = torch.tensor([block.is_own for block in context for _ in range(block.length)])
    differs = (content != content[0]).any(0) | torch.isin(content[0], vectors[is_own.bool().to(device)])
    start = next((place for place, other in enumerate(differs.tolist()) if other), len(differs))
    start = min(start, *ends)
    size = _texts_in_a_sequence(
        embedded.shape[2], blocks[0].attn.num_heads, count, start, sum(ends) / count + 1 - start
    )
    owner, place, end = (table.to(device) for table in _arrangement(start, ends, size))

    text = owner.clamp(min=0)
    content, embedded = content[text, place], embedded[text, place]
    outside = (content >= 0).to(embedded.dtype)[..., None]
    frozen = embedded * outside + tower.positions.detach()[place]
    visible = (owner[:, None] == -1) | (owner[:, None] == owner[..., None])
    visible &= place[:, None] <= place[..., None]
    mask = torch.zeros_like(visible, dtype=frozen.dtype).masked_fill(~visible, -torch.inf)
    ends_mask = mask.gather(1, end[..., None].expand(-1, -1, mask.shape[-1]))
    within = text - size * torch.arange(len(end), device=device)[:, None]
    taken = _taken(content, within, context, size, frozen.dtype)
    selected = one_hot(end, mask.shape[-1]).to(frozen.dtype)
    if len(end) == 1:
        taken = tuple(each[0] for each in taken)
        return PackedTexts(tower, blocks, frozen[0], taken, outside[0], mask[0], selected[0], ends_mask[0], count)
    return PackedTexts(tower, blocks, frozen, taken, outside, mask[:, None], selected, ends_mask[:, None], count)


def _arrangement(start: int, ends: list[int], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """For every place of the sequences its text and its position there (G, T), and the places of the ends (G, C).

    The ``start`` places shared by all texts have -1 for a text, and those that fill a sequence up have -2.
    """
    owners, places, at_end = [], [], []
    for first in range(0, len(ends), size):
        texts = range(first, min(first + size, len(ends)))
        added = [(text, place) for text in texts for place in range(start, ends[text] + 1)]
        owners.append(torch.tensor([-1] * start + [text for text, _ in added]))
        places.append(torch.tensor([*range(start), *(place for _, place in added)]))
        at_end.append(torch.tensor([start + added.index((text, ends[text])) for text in texts]))
    owner = pad_sequence(owners, batch_first=True, padding_value=-2)
    return owner, pad_sequence(places, batch_first=True), pad_sequence(at_end, batch_first=True)


def _taken(
    content: Tensor, text: Tensor, context: Sequence[ContextBlock], size: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Selects the places of each block's vectors: (G, T, m), or (G, T, C m) if each text has vectors of its own.

    ``content`` (G, T) is -1 - j for the vector j, or a token; ``text`` (G, T) counts the sequence's texts from 0.
    """
    offset, taken = 0, []
    for block in context:
        vector = -1 - content - offset
        index = text * block.length + vector if block.is_own else vector
        inside = (vector >= 0) & (vector < block.length)
        width = block.length * (size if block.is_own else 1)
        taken.append((one_hot(torch.where(inside, index, 0), width) * inside[..., None]).to(dtype))
        offset += block.length
    return tuple(taken)


def _texts_in_a_sequence(width: int, heads: int, count: int, start: int, added: float) -> int:
    """The number C of texts in a sequence with the least cost.

    More texts in a sequence share its first ``start`` places, but attention scores between them are computed in vain.
    """

    def cost(size: int) -> float:
        sequences, length = -(-count // size), start + size * added
        return sequences * (12 * width**2 * length + (2 * width + SCORE_COST * heads) * length**2)

    return min(range(1, count + 1), key=cost)
