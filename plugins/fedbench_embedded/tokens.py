"""A tokenizer for tiny text towers: open_clip's byte pairs, folded onto a few hundred token rows.

A full table of 49,408 rows would outweigh the rest of a small model. Here each byte pair that the pretraining
grammar uses has a row of its own and all others share hash buckets, so that any text can still be encoded.

    row 0             padding
    rows 1 .. G       the byte pairs of the grammar, in the order of the list stored beside the weights
    rows G+1 .. G+64  buckets for every other byte pair
    then              start of text, end of text (the highest, so that argmax pooling finds it)
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import LongTensor

from fedbench.models.clip.loading import byte_pairs

BUCKETS = 64


def grammar_ids(phrases: Iterable[str]) -> list[int]:
    """The sorted byte-pair ids that occur in the phrases."""
    return sorted({piece for phrase in phrases for piece in byte_pairs().encode(phrase)})


class FoldedTokenizer:
    """Text to rows of a folded token table; called like an open_clip tokenizer."""

    def __init__(self, ids: list[int], context_length: int) -> None:
        """Give the byte-pair ids `ids` rows 1, 2, ... of their own; texts are cut to `context_length` tokens."""
        self.ids = ids
        self.context_length = context_length
        self._row_of = {piece: row for row, piece in enumerate(ids, start=1)}
        self.sot_token_id = 1 + len(ids) + BUCKETS
        self.eot_token_id = self.sot_token_id + 1
        self.vocab_size = self.eot_token_id + 1
        self._word_rows: dict[str, list[int]] = {}

    @classmethod
    def from_file(cls, path: Path) -> "FoldedTokenizer":
        """Read the table that was stored beside a model's weights."""
        stored = json.loads(path.read_text())
        return cls(stored["ids"], stored["context_length"])

    def save(self, path: Path) -> None:
        """Write the table, to be read by `from_file`."""
        path.write_text(json.dumps({"context_length": self.context_length, "ids": self.ids}) + "\n")

    def encode(self, text: str) -> list[int]:
        """Rows of the text, without start, end and padding."""
        return [row for word in text.lower().split() for row in self._encode_word(word)]

    def __call__(self, texts: str | list[str], context_length: int | None = None) -> LongTensor:
        """Rows of each text between start and end, cut and padded with 0: (n, context_length)."""
        batch = [texts] if isinstance(texts, str) else texts
        width = context_length or self.context_length
        table = torch.zeros(len(batch), width, dtype=torch.long)
        for line, text in enumerate(batch):
            rows = [self.sot_token_id, *self.encode(text)[: width - 2], self.eot_token_id]
            table[line, : len(rows)] = torch.tensor(rows)
        return LongTensor(table)

    def _encode_word(self, word: str) -> list[int]:
        # A caption has few different words, and byte-pair merging is slow: remember each word's rows.
        if word not in self._word_rows:
            self._word_rows[word] = [self._fold(piece) for piece in byte_pairs().encode(word)]
        return self._word_rows[word]

    def _fold(self, piece: int) -> int:
        if piece in self._row_of:
            return self._row_of[piece]
        # Knuth's multiplicative hash: the top six of 32 bits choose one of the 64 buckets.
        return 1 + len(self.ids) + (piece * 2654435761 % 2**32 >> 26)
