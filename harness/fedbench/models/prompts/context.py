"""Learnable context in the text tower of CLIP: the words around a class name become vectors that can be trained.

    end     [start][v_1 .. v_M][name][.][end]                       (CoOp, Zhou et al., IJCV 2022)
    middle  [start][v_1 .. v_{M/2}][name][v_{M/2+1} .. v_M][.][end]
    front   [start][name][v_1 .. v_M][.][end]

Class names come in with spaces for underscores and a final period. The end token stands at the same place in all three.
Everything but the context is frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError, Unworkable
from fedbench.core.randomness import torch_generator
from fedbench.models.clip.backbone import ClipBackbone, encode_embedded, encode_tokens, text_ends, truncated
from fedbench.models.prompts.causal_text import ContextBlock, PackedTexts, can_pack, pack_texts

if TYPE_CHECKING:
    from open_clip.model import CLIP

Position = Literal["end", "middle", "front"]

Init = Literal["random", "words"]

PLACEHOLDERS = ("X", "x", "o", "a")
"""Words that may hold the context's places while texts are tokenised; the first that is one token is taken."""

INITIAL_DEVIATION = 0.02
"""Standard deviation of a context drawn at random (released code of CoOp, CoCoOp, KgCoOp, MaPLe, PromptFL)."""


@dataclass(frozen=True, eq=False)
class PromptTower:
    """The text tower around M context vectors, for K class names; made by ``prompt_tower``."""

    clip: CLIP
    tokens: Tensor
    """(K, l) token ids, placeholders where the context goes; they say where each text ends."""
    embedded: Tensor
    """(K, l, d_t) frozen embeddings of ``tokens``, without positions."""
    slots: Tensor
    """(K, M) the positions of the context, in its order."""
    packs: bool
    """Whether what texts share is encoded once (`fedbench.models.prompts.causal_text`), or every text whole."""

    @property
    def num_classes(self) -> int:
        """K."""
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
        """Unit text features (K, d) of what the context stands in place of: "X X ... X name."."""
        return normalize(encode_tokens(self.clip, self.tokens), dim=-1)

    def encode(self, *blocks: Tensor, deep: Sequence[Sequence[Tensor]] = ()) -> Tensor:
        """Unit text features (K, d) for a context of one or several blocks, placed one behind the other.

        A block is (m, d_t), shared by all classes, or (..., K, m, d_t) with K or 1 classes; the m add up to M. Leading
        dimensions (one context an image, say) are kept: (..., K, d). ``deep``: blocks of the same shapes, which take
        the places of the context behind the first layer, the second, and so on (MaPLe, Khattak et al., CVPR 2023);
        FedbenchError where the tower does not pack. Differentiable in all blocks. Where the tower ``packs`` it works
        under ``torch.func.vmap``, also with the warnings of missing batching rules as errors.
        """
        if deep and not self.packs:
            raise FedbenchError(
                "prompts in deeper layers need a text tower of open_clip's plain blocks under a causal mask, without "
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
        layout = tuple(ContextBlock(block.shape[-2], block.shape[-3] > 1) for block in blocks)
        if layout not in self._packed:
            with torch.inference_mode(False):  # else a first call without gradients would leave none to later ones
                self._packed[layout] = pack_texts(self.clip, self.tokens, self.embedded, self.slots, layout)
        return self._packed[layout].encode(*blocks, deep=deep)

    def _encode_whole(self, blocks: list[Tensor], lead: torch.Size) -> Tensor:
        """Every class text from its first token to its last, by open_clip's own blocks."""
        context = torch.cat([block.expand(*lead, *block.shape[-2:]) for block in blocks], dim=-2)
        length = self.tokens.shape[1]
        slots = self.slots[..., None].expand(context.shape)
        x = self.embedded.expand(*lead, length, self.width).scatter(-2, slots, context)
        tokens = self.tokens.expand(*lead, length)
        features = encode_embedded(self.clip, x.reshape(-1, length, self.width), tokens.reshape(-1, length))
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

    ``truncate`` cuts the table after the longest text, which is exact under the causal mask. Raises FedbenchError for
    a context that does not fit beside a class name, and for towers that do not pool at the end token.
    """
    clip = backbone.module
    if clip.text_pool_type not in ("argmax", "eos"):
        raise FedbenchError(
            f"backbone {backbone.name!r} pools its text at {clip.text_pool_type!r}; a learnable context needs a text "
            "tower that pools at the end token, such as clip:openai/ViT-B-32."
        )
    names = [f"{name.replace('_', ' ').strip()}." for name in classnames]
    lengths = _count_tokens(backbone, names)
    longest = int(lengths.max())
    room = int(clip.context_length) - 2 - longest
    if not 1 <= context_length <= room:
        worst = classnames[int(lengths.argmax())]
        raise Unworkable(
            f"a context of {context_length} tokens does not fit: the text tower of {backbone.name!r} has "
            f"{clip.context_length} places and {worst!r} with start, period and end takes {longest + 2}; "
            f"take a context of at most {max(room, 0)}, and of at least 1."
        )
    words = " ".join([_placeholder(backbone)] * context_length)
    tokens = backbone.tokenizer([f"{words} {name}" for name in names])
    assert torch.equal(text_ends(tokens, clip), 1 + context_length + lengths), "a placeholder is not one token"
    order, slots = _placement(lengths, context_length, int(tokens.shape[1]), position)
    tokens = tokens.gather(1, order).to(backbone.device)
    if truncate:
        tokens = truncated(tokens, clip)
    with torch.no_grad():
        embedded = clip.token_embedding(tokens).detach()
    return PromptTower(clip, tokens, embedded, slots.to(backbone.device), can_pack(clip))


def fixed_texts(backbone: ClipBackbone, texts: Sequence[str], method: str) -> PackedTexts:
    """Whole ``texts`` for a ``method`` that reaches into the layers they pass through.

    FedbenchError where the text tower is not made of open_clip's plain blocks under a causal mask.
    """
    clip = backbone.module
    if not can_pack(clip):
        raise FedbenchError(
            f"{method} reaches into the text tower, and that of backbone {backbone.name!r} is not made of open_clip's "
            "plain blocks under a causal mask; use another, such as clip:embedded."
        )
    tokens = truncated(backbone.tokenizer(list(texts)), clip).to(backbone.device)
    with torch.no_grad():
        embedded = clip.token_embedding(tokens).detach()
    return pack_texts(clip, tokens, embedded, tokens.new_zeros(len(tokens), 0), ())


def word_context(backbone: ClipBackbone, words: str = "a photo of a") -> Tensor:
    """The embedded words, (M, d_t) on the CPU; M is the number of their tokens, not of the words."""
    tokens = backbone.tokenizer([words])
    count = int(_count_tokens(backbone, [words])[0])
    with torch.no_grad():
        embedded: Tensor = backbone.module.token_embedding(tokens[0, 1 : 1 + count].to(backbone.device))
    return embedded.cpu().clone()


def random_context(seed: int, purpose: str, *shape: int) -> Tensor:
    """N(0, 0.02^2) of ``shape``, from a generator of its own for ``purpose``; on the CPU."""
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
    return random_context(seed, purpose, *lead, length, backbone.module.token_embedding.embedding_dim)


def _per_class(blocks: Sequence[Tensor]) -> list[Tensor]:
    return [block if block.ndim > 2 else block[None] for block in blocks]


def _count_tokens(backbone: ClipBackbone, texts: list[str]) -> Tensor:
    """Tokens of each text without start and end, (n,) int64; a text that is cut counts as all there is room for."""
    return text_ends(backbone.tokenizer(texts), backbone.module) - 1


def _placeholder(backbone: ClipBackbone) -> str:
    for word in PLACEHOLDERS:
        if _count_tokens(backbone, [word, f"{word} {word} {word}"]).tolist() == [1, 3]:
            return word
    raise FedbenchError(
        f"backbone {backbone.name!r}: its tokenizer makes one token of none of {', '.join(PLACEHOLDERS)}, so that no "
        "word can hold the places of a learnable context; use another backbone."
    )


def _placement(lengths: Tensor, context: int, width: int, position: Position) -> tuple[Tensor, Tensor]:
    """Which token of "[start][context][name][.][end]..." stands at each place (K, width), and the slots (K, M).

    ``lengths`` (K,) counts name and period; the last token of a name, which holds the period, stays behind the context.
    """
    before = {"end": context, "middle": context // 2, "front": 0}[position]
    orders, slots = [], []
    for length in lengths.tolist():
        name = list(range(1 + context, context + length))
        order = [0, *range(1, 1 + before), *name, *range(1 + before, 1 + context), *range(context + length, width)]
        orders.append(order)
        slots.append([*range(1, 1 + before), *range(1 + before + len(name), 1 + context + len(name))])
    return torch.tensor(orders), torch.tensor(slots)
