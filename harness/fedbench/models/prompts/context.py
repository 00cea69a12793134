"""Learnable context in a dual encoder's text tower: the words around a class name become vectors that can be trained.

    end     [start][v_1 .. v_M][name][.][end]                       (CoOp, Zhou et al., IJCV 2022)
    middle  [start][v_1 .. v_{M/2}][name][v_{M/2+1} .. v_M][.][end]
    front   [start][name][v_1 .. v_M][.][end]

Class names come in with spaces for underscores and a final period. The end token stands at the same place in all three.
Everything but the context is frozen. SigLIP's texts have no start token; the context then comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError, Unworkable
from fedbench.core.randomness import torch_generator
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.clip.blocks import Block
from fedbench.models.clip.text_towers import NO_CONTEXT, ClipTextEncoder
from fedbench.models.prompts.causal_text import ContextBlock, PackedTexts, can_pack, pack_texts

Position = Literal["end", "middle", "front"]

Init = Literal["random", "words"]

PLACEHOLDERS = ("X", "x", "o", "a")
"""Words that may hold the context's places while texts are tokenised; the first that is a single token is used."""

INITIAL_DEVIATION = 0.02
"""Standard deviation of a context drawn at random (released code of CoOp, CoCoOp, KgCoOp, MaPLe, PromptFL)."""


@dataclass(frozen=True, eq=False)
class PromptTower:
    """The text tower around M context vectors, for K class names; made by ``prompt_tower``."""

    text: ClipTextEncoder
    tokens: Tensor
    """Token ids (K, l) with placeholders for the context; they show where each text ends."""
    embedded: Tensor
    """Frozen embeddings of ``tokens``, without positions, (K, l, d_t)."""
    slots: Tensor
    """Positions of the context's vectors, in their order, (K, M)."""
    packs: bool
    """Whether the common beginning of texts is encoded once (`fedbench.models.prompts.causal_text`), or every text
    whole."""

    @property
    def num_classes(self) -> int:
        """K, the number of classes."""
        return int(self.slots.shape[0])

    @property
    def context_length(self) -> int:
        """M, the number of context vectors."""
        return int(self.slots.shape[1])

    @property
    def width(self) -> int:
        """d_t, the width of a context vector."""
        return int(self.embedded.shape[2])

    @torch.no_grad()
    def placeholder_texts(self) -> Tensor:
        """Unit text features (K, d) of the texts with placeholders: "X X ... X name."."""
        return normalize(self.text.encode_truncated(self.tokens), dim=-1)

    def encode(self, *blocks: Tensor, deep: Sequence[Sequence[Tensor]] = ()) -> Tensor:
        """Unit text features (K, d) for a context of one or several blocks, placed one behind the other.

        A block is (m, d_t), shared by all classes, or (..., K, m, d_t) with K or 1 classes; the m add up to M. Leading
        dimensions (one context an image, say) are kept: (..., K, d). ``deep``: blocks of the same shapes that replace
        the context's states behind the first layer, the second, and so on (MaPLe, Khattak et al., CVPR 2023);
        FedbenchError if the tower does not pack. The result is differentiable in all blocks. If the tower ``packs``, it
        works under ``torch.func.vmap``, also with the warnings of missing batching rules as errors.
        """
        if deep and not self.packs:
            raise FedbenchError(
                "prompts in deeper layers need a text tower of plain blocks under a causal mask, without "
                "checkpointed activations; use another backbone, or a depth of 1."
            )
        per_class = _per_class(blocks)
        shapes = (block.shape[:-2] for block in per_class)
        lead: torch.Size = torch.broadcast_shapes(*shapes, (self.num_classes,))  # type: ignore[no-untyped-call]
        given = sum(block.shape[-2] for block in per_class)
        if any(block.shape[-1] != self.width for block in per_class) or given != self.context_length:
            raise FedbenchError(
                f"the context has shape {(given, per_class[0].shape[-1])}, but the prompt tower was built for "
                f"{(self.context_length, self.width)}; give blocks that add up to it."
            )
        if self.packs:
            features = self._encode_packed(per_class, [_per_class(layer) for layer in deep])
        else:
            features = self._encode_whole(per_class, lead)
        return normalize(features, dim=-1)

    def _encode_packed(self, blocks: list[Tensor], deep: list[list[Tensor]]) -> Tensor:
        layout, text = tuple(ContextBlock(block.shape[-2], block.shape[-3] > 1) for block in blocks), self.text
        if layout not in self._packed:
            with torch.inference_mode(False):  # else a first call without gradients would leave none to later ones
                self._packed[layout] = pack_texts(text, self.tokens, self.embedded, self.slots, layout)
        return self._packed[layout].encode(*blocks, deep=deep)

    def _encode_whole(self, blocks: list[Tensor], lead: torch.Size) -> Tensor:
        """Every class text from its first token to its last, by the tower's own blocks."""
        context = torch.cat([block.expand(*lead, *block.shape[-2:]) for block in blocks], dim=-2)
        length = self.tokens.shape[1]
        slots = self.slots[..., None].expand(context.shape)
        x = self.embedded.expand(*lead, length, self.width).scatter(-2, slots, context)
        tokens = self.tokens.expand(*lead, length)
        features = self.text.encode_embedded(x.reshape(-1, length, self.width), tokens.reshape(-1, length))
        return features.reshape(*lead, -1)

    @cached_property
    def _packed(self) -> dict[tuple[ContextBlock, ...], PackedTexts]:
        return {}


def prompt_tower(
    backbone: ClipBackbone,
    classnames: Sequence[str],
    context_length: int,
    position: Position = "end",
    *,
    truncate: bool = True,
) -> PromptTower:
    """The tower for ``context_length`` (M >= 1) vectors at ``position`` in "<context> <name>.".

    ``truncate`` cuts the table after the longest text, where that is exact. Raises FedbenchError for a context that
    does not fit beside a class name, and for text towers that take no embedded tokens.
    """
    text = backbone.text
    if text.lacks:
        raise FedbenchError(
            f"backbone {backbone.name!r} takes no {NO_CONTEXT}: {text.lacks}; use another, such as clip:embedded."
        )
    names = [f"{name.replace('_', ' ').strip()}." for name in classnames]
    frame = _frame(backbone)
    lengths = _count_tokens(backbone, names, frame)
    longest, places = int(lengths.max()), backbone.context_length
    room = places - frame.around - longest
    if not 1 <= context_length <= room:
        worst = classnames[int(lengths.argmax())]
        raise Unworkable(
            f"a context of {context_length} tokens does not fit: the text tower of {backbone.name!r} has "
            f"{places} places and {worst!r} with start, period and end takes {longest + frame.around}; "
            f"take a context of at most {max(room, 0)}, and of at least 1."
        )
    words = " ".join([frame.placeholder] * context_length)
    tokens = backbone.tokenizer([f"{words} {name}" for name in names])
    assert torch.equal(text.ends(tokens), frame.end_of(context_length + lengths)), "a placeholder is not one token"
    order, slots = _placement(lengths, context_length, int(tokens.shape[1]), position, frame.start)
    tokens = tokens.gather(1, order).to(backbone.device)
    if truncate:
        tokens = text.truncated(tokens)
    with torch.no_grad():
        embedded = text.embed(tokens).detach()
    return PromptTower(text, tokens, embedded, slots.to(backbone.device), can_pack(text))


def text_layers(backbone: ClipBackbone, what: str) -> Sequence[Block]:
    """The layers of the text tower, for a method that changes them; ``what`` says what it does, for the error.

    FedbenchError where they are not plain blocks under a causal mask.
    """
    text, blocks = backbone.text, backbone.text.blocks
    if blocks is None or not text.is_causal:
        raise FedbenchError(
            f"{what} the layers of the text tower, and those of backbone {backbone.name!r} are not plain blocks under "
            "a causal mask (text_layers); use another, such as clip:embedded."
        )
    return blocks


def fixed_texts(backbone: ClipBackbone, texts: Sequence[str], what: str) -> PackedTexts:
    """Whole ``texts``, packed, for a method that changes the layers; ``what`` as in `text_layers`."""
    text_layers(backbone, what)
    text = backbone.text
    tokens = text.truncated(backbone.tokenizer(list(texts))).to(backbone.device)
    with torch.no_grad():
        embedded = text.embed(tokens).detach()
    return pack_texts(text, tokens, embedded, tokens.new_zeros(len(tokens), 0), ())


def word_context(backbone: ClipBackbone, words: str = "a photo of a") -> Tensor:
    """The embedded words, (M, d_t) on the CPU; M is the number of their tokens, not of the words."""
    tokens, frame = backbone.tokenizer([words]), _frame(backbone)
    count = int(_count_tokens(backbone, [words], frame)[0])
    with torch.no_grad():
        embedded = backbone.text.embed(tokens[0, frame.start : frame.start + count].to(backbone.device))
    return embedded.cpu().clone()


def random_context(seed: int, purpose: str, *shape: int) -> Tensor:
    """Draw N(0, 0.02^2) of ``shape`` on the CPU, from a generator of its own for ``purpose``."""
    return INITIAL_DEVIATION * torch.randn(*shape, generator=torch_generator(seed, purpose))


def initial_context(
    backbone: ClipBackbone, seed: int, length: int, init: Init, *, classes: int | None = None
) -> Tensor:
    """The context that training starts from, (M, d_t), or one a class (K, M, d_t) where ``classes`` (K) is given.

    ``init`` random: ``length`` (M) vectors, the same for all methods of a seed; words: "a photo of a", which sets M.
    """
    lead = () if classes is None else (classes,)
    if init == "words":
        words = word_context(backbone)
        return words.expand(*lead, *words.shape).clone()
    purpose = "context" if classes is None else "contexts of classes"
    return random_context(seed, purpose, *lead, length, backbone.text.width)


def _per_class(blocks: Sequence[Tensor]) -> list[Tensor]:
    return [block if block.ndim > 2 else block[None] for block in blocks]


@dataclass(frozen=True)
class _Frame:
    """The tokens that a tokenizer puts around a text."""

    start: int
    """The number of tokens before the text: one in CLIP, none in SigLIP."""
    behind: int
    """The number of tokens between the text and the place that `ClipTextEncoder.ends` gives; 0 if that is the end
    token's."""
    placeholder: str
    """A word that is one token, to hold the context's places."""

    @property
    def around(self) -> int:
        """The number of tokens that are not the text's, including the end token."""
        return self.start + self.behind + 1

    def end_of(self, length: Tensor) -> Tensor:
        """The end of texts of ``length`` tokens, as `ClipTextEncoder.ends` gives it."""
        return self.start + length + self.behind


def _frame(backbone: ClipBackbone) -> _Frame:
    """The frame, derived by tokenising a word once and three times; FedbenchError if no placeholder is one token."""
    for word in PLACEHOLDERS:
        tokens = backbone.tokenizer([word, f"{word} {word} {word}"])
        once, thrice = backbone.text.ends(tokens).tolist()
        same = (tokens[1, :-2] == tokens[1, 1:-1]) & (tokens[1, 1:-1] == tokens[1, 2:])
        start = int(same.int().argmax())
        if thrice - once == 2 and bool(same.any()) and start < once:
            return _Frame(start, once - start - 1, word)
    raise FedbenchError(
        f"backbone {backbone.name!r}: its tokenizer makes one token of none of {', '.join(PLACEHOLDERS)}, or pads "
        "texts in front, so that no word can hold the places of a learnable context; use another backbone."
    )


def _count_tokens(backbone: ClipBackbone, texts: list[str], frame: _Frame) -> Tensor:
    """The number of tokens of each text itself, (n,) int64; a text that is cut counts as all that fits."""
    return backbone.text.ends(backbone.tokenizer(texts)) - frame.start - frame.behind


def _placement(lengths: Tensor, context: int, width: int, position: Position, start: int) -> tuple[Tensor, Tensor]:
    """The token of "[start][context][name][.][end]..." that goes to each place (K, width), and the slots (K, M).

    ``lengths`` (K,) counts name and period; the last token of a name, which holds the period, stays behind the context.
    """
    before = {"end": context, "middle": context // 2, "front": 0}[position]
    orders, slots = [], []
    for length in lengths.tolist():
        name = [start + place for place in range(context, context + length - 1)]
        first, second = range(start, start + before), range(start + before, start + context)
        orders.append([*range(start), *first, *name, *second, *range(start + context + length - 1, width)])
        slots.append([*first, *(place + len(name) for place in second)])
    return torch.tensor(orders), torch.tensor(slots)
