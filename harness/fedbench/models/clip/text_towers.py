"""The text towers of dual encoders in one interface, whichever library built them.

Every kind encodes whole texts from their tokens. Most also take embedded tokens, some of which can be learned vectors;
``lacks`` says why a kind does not. A tower holds no tensors of its own: it reads those of its module when it is called,
so that it also works inside `torch.func.functional_call`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedbench.core.errors import FedbenchError
from fedbench.models.clip.blocks import Block, plain_blocks

if TYPE_CHECKING:
    from open_clip.model import CLIP, CustomTextCLIP

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


class OpenClipText(ClipTextEncoder):
    """open_clip's own text transformer, whose parts are CLIP's own or those of ``module.text``.

    Causal or bidirectional; pools at the end token or, trained on texts of full length, at the last place.
    """

    def __init__(self, module: CLIP | CustomTextCLIP) -> None:
        super().__init__(module)
        own: Any = module if hasattr(module, "text_pool_type") else module.text
        self._own = own
        self.pool_type: str = own.text_pool_type if own is module else own.pool_type
        self._eos_id: int | None = own.text_eos_id if own is module else own.eos_id
        if self.pool_type not in ("argmax", "eos", "last"):
            self.lacks = f"it pools at {self.pool_type!r}"

    @property
    def blocks(self) -> list[Block] | None:
        return plain_blocks(self._own.transformer)

    @property
    def is_causal(self) -> bool:
        mask = self.attn_mask
        if mask is None or self.pool_type not in ("argmax", "eos"):
            return False
        # on no device there are no values to compare
        return mask.is_meta or torch.equal(mask, torch.full_like(mask, -torch.inf).triu(1))

    @property
    def attn_mask(self) -> Tensor | None:
        """The mask (L, L) added to attention scores; None where every token sees every other."""
        mask: Tensor | None = self._own.attn_mask
        return mask

    @property
    def positions(self) -> Tensor:
        table: Tensor = self._own.positional_embedding
        return table

    @property
    def width(self) -> int:
        return int(self._own.token_embedding.embedding_dim)

    def truncated(self, tokens: Tensor) -> Tensor:
        """Cut behind the longest text's end token; under a causal mask no later token reaches it."""
        if self.attn_mask is None or self.pool_type == "last":
            return tokens
        return tokens[:, : int(self.ends(tokens).max()) + 1]

    def encode_truncated(self, tokens: Tensor) -> Tensor:
        """Encode truncated tokens, also for CLIP, whose own ``encode_text`` only takes tokens of full length."""
        return self.encode_embedded(self.embed(tokens), tokens)

    def ends(self, tokens: Tensor) -> Tensor:
        """Positions of the end tokens. A tower that pools at its last place pads with the end token, whose first copy
        counts."""
        if self.pool_type == "last":
            return _count(tokens != tokens[:, -1:])
        ends = tokens if self.pool_type == "argmax" else torch.eq(tokens, int(self._eos_id or 0)).int()
        return ends.argmax(dim=-1)

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._own.token_embedding(tokens)
        return embedded

    def encode_embedded(self, embedded: Tensor, tokens: Tensor) -> Tensor:
        from open_clip.transformer import text_global_pool

        length, mask = tokens.shape[1], self.attn_mask
        mask = None if mask is None else mask[:length, :length].to(tokens.device)
        x = self.normed(self._own.transformer(embedded + self.positions[:length], attn_mask=mask))
        return self.project(text_global_pool(x, tokens, self.pool_type, eos_token_id=self._eos_id))

    def normed(self, x: Tensor) -> Tensor:
        result: Tensor = self._own.ln_final(x)
        return result

    def project(self, pooled: Tensor) -> Tensor:
        projection: nn.Linear | Tensor | None = self._own.text_projection
        if projection is None:
            return pooled
        return projection(pooled) if isinstance(projection, nn.Linear) else pooled @ projection


class HuggingFaceText(ClipTextEncoder):
    """open_clip's adapter around an encoder of transformers (BERT and its like): padding is masked, pooling its own."""

    @property
    def width(self) -> int:
        return int(self.module.text.transformer.get_input_embeddings().embedding_dim)

    def encode(self, tokens: Tensor) -> Tensor:
        """Encode texts without the columns that are padding in every text."""
        return super().encode(self.truncated(tokens))

    def truncated(self, tokens: Tensor) -> Tensor:
        """Cut behind the longest text; the rest is masked."""
        return tokens[:, : int(self.ends(tokens).max()) + 1]

    def ends(self, tokens: Tensor) -> Tensor:
        """Positions of the last token that is not padding."""
        return _count(self._mask(tokens)) - 1

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.module.text.transformer.get_input_embeddings()(tokens)
        return embedded

    def encode_embedded(self, embedded: Tensor, tokens: Tensor) -> Tensor:
        text, mask = self.module.text, self._mask(tokens)
        features: Tensor = text.proj(text.pooler(text.transformer(inputs_embeds=embedded, attention_mask=mask), mask))
        return features

    def _mask(self, tokens: Tensor) -> Tensor:
        return torch.ne(tokens, int(self.module.text.config.pad_token_id)).long()


class TransformersText(ClipTextEncoder):
    """The text side of a two-tower model of transformers: CLIP, SigLIP, ALIGN, or any two encoders joined."""

    def encode(self, tokens: Tensor) -> Tensor:
        """Encode texts without the columns that no feature depends on."""
        tokens = self.truncated(tokens)
        output = self.module.get_text_features(input_ids=tokens, attention_mask=self._mask(tokens))
        features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
        return features

    @property
    def width(self) -> int:
        return int(self.module.text_model.get_input_embeddings().embedding_dim)

    @property
    def _kind(self) -> str:
        return str(self.module.config.text_config.model_type) if hasattr(self.module.config, "text_config") else ""

    def _mask(self, tokens: Tensor) -> Tensor | None:
        """The mask of padding (n, l); None where padding is not masked: behind a causal mask, and in SigLIP."""
        if self._kind.startswith(("clip", "siglip")):
            return None
        return torch.ne(tokens, int(self.module.config.text_config.pad_token_id)).long()

    def truncated(self, tokens: Tensor) -> Tensor:
        """Cut behind the longest text, except for SigLIP, which pools at the last place."""
        return tokens if self._kind.startswith("siglip") else tokens[:, : int(self.ends(tokens).max()) + 1]

    def ends(self, tokens: Tensor) -> Tensor:
        """Positions of the end tokens: CLIP's largest or first, SigLIP's first padding, else the last that is not
        padding."""
        config = self.module.config.text_config
        if self._kind.startswith("siglip"):
            return _count(tokens != tokens[:, -1:])
        if self._kind.startswith("clip"):  # configs from before transformers 4.30 have 2 for an end token
            is_end = tokens if config.eos_token_id == 2 else torch.eq(tokens, int(config.eos_token_id)).int()
            return is_end.argmax(dim=-1)
        return _count(torch.ne(tokens, int(config.pad_token_id))) - 1

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.module.text_model.get_input_embeddings()(tokens)
        return embedded

    def encode_embedded(self, embedded: Tensor, tokens: Tensor) -> Tensor:
        # CLIP's and SigLIP's text models only take token ids, so their parts are called here
        text = self.module.text_model
        if not self._kind.startswith(("clip", "siglip")):
            output = text(inputs_embeds=embedded, attention_mask=self._mask(tokens))
            # ALIGN pools its text otherwise than its text model does
            is_align = self.module.config.model_type == "align"
            return self.project(output.last_hidden_state[:, 0] if is_align else output.pooler_output)
        length, mask = tokens.shape[1], None
        if self.is_causal:
            mask = torch.full((1, 1, length, length), -torch.inf, device=tokens.device).triu(1)
        x = text.embeddings(inputs_embeds=embedded)
        x = self.normed(text.encoder(inputs_embeds=x, attention_mask=mask).last_hidden_state)
        if not self.is_causal:
            return self.project(text.head(x[:, -1]))
        return self.project(x[torch.arange(len(x), device=x.device), self.ends(tokens)])

    @property
    def blocks(self) -> list[Block] | None:
        return plain_blocks(self.module.text_model.encoder) if self.is_causal else None

    @property
    def is_causal(self) -> bool:
        return self._kind.startswith("clip")

    @property
    def positions(self) -> Tensor:
        table: Tensor = self.module.text_model.embeddings.position_embedding.weight
        return table

    def normed(self, x: Tensor) -> Tensor:
        result: Tensor = self.module.text_model.final_layer_norm(x)
        return result

    def project(self, pooled: Tensor) -> Tensor:
        projection = getattr(self.module, "text_projection", None)
        return pooled if projection is None else projection(pooled)


def text_encoder(module: nn.Module) -> ClipTextEncoder:
    """The text tower of a dual encoder of open_clip or transformers; FedbenchError for a model of another kind."""
    if hasattr(module, "get_text_features"):
        return TransformersText(module)
    from open_clip.hf_model import HFTextEncoder
    from open_clip.model import CLIP
    from open_clip.transformer import TextTransformer

    own: Any = module if isinstance(module, CLIP) else getattr(module, "text", None)
    if isinstance(own, HFTextEncoder):
        return HuggingFaceText(module)
    if isinstance(own, TextTransformer) and (own.cls_emb is not None or own.use_pad_mask):
        what = "a class embedding behind the text" if own.cls_emb is not None else "a mask of the padding"
        return ClipTextEncoder(module, f"it has {what}, which embedded tokens don't have")
    if isinstance(own, CLIP | TextTransformer):
        return OpenClipText(module)
    raise FedbenchError(f"{type(module).__name__} is no dual encoder that fedbench knows.")


def _count(where: Tensor) -> Tensor:
    """The number of true values in each row of (n, l), (n,) int64."""
    return where.long().sum(dim=-1)
