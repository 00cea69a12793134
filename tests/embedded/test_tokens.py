"""The folded tokenizer: grammar words have rows of their own, others share buckets, the end is the highest row."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedbench_embedded.images import MID, UNBALANCED
from fedbench_embedded.images.attributes import sample_attributes
from fedbench_embedded.images.captions import CaptionMix, captions, vocabulary
from fedbench_embedded.tokens import BUCKETS, FoldedTokenizer, grammar_ids


@pytest.fixture(scope="module")
def tokenizer() -> FoldedTokenizer:
    return FoldedTokenizer(grammar_ids(vocabulary()), context_length=32)


def test_rows_are_padding_grammar_buckets_start_end(tokenizer: FoldedTokenizer) -> None:
    assert tokenizer.sot_token_id == 1 + len(tokenizer.ids) + BUCKETS
    assert tokenizer.eot_token_id == tokenizer.sot_token_id + 1 == tokenizer.vocab_size - 1


def test_a_text_is_wrapped_and_padded(tokenizer: FoldedTokenizer) -> None:
    table = tokenizer("a photo of a bird")
    assert table.shape == (1, 32) and table.dtype == torch.long
    rows = table[0].tolist()
    assert rows[0] == tokenizer.sot_token_id and rows[6] == tokenizer.eot_token_id and rows[7:] == [0] * 25
    assert rows[1:6] == tokenizer.encode("a photo of a bird")
    assert rows[1] == rows[4]


def test_every_caption_uses_rows_of_its_own_only(tokenizer: FoldedTokenizer) -> None:
    first_bucket = 1 + len(tokenizer.ids)
    texts = captions(
        0,
        sample_attributes(np.random.default_rng(1), np.arange(2000), range(20), UNBALANCED, MID),
        CaptionMix(chain=0.5),
    )
    assert all(row < first_bucket for text in texts for row in tokenizer.encode(text))


def test_a_word_outside_the_grammar_falls_into_buckets(tokenizer: FoldedTokenizer) -> None:
    first_bucket = 1 + len(tokenizer.ids)
    rows = tokenizer.encode("zyzzyva")
    assert rows and all(first_bucket <= row < tokenizer.sot_token_id for row in rows)


def test_a_long_text_keeps_its_end(tokenizer: FoldedTokenizer) -> None:
    rows = tokenizer("bird " * 100)[0]
    assert rows[-1] == tokenizer.eot_token_id and int(rows.argmax()) == 31


def test_case_and_spaces_do_not_matter(tokenizer: FoldedTokenizer) -> None:
    assert tokenizer.encode(" A  Photo of a BIRD ") == tokenizer.encode("a photo of a bird")


def test_a_list_gives_one_row_a_text(tokenizer: FoldedTokenizer) -> None:
    both = tokenizer(["a bird", "a red fish"])
    assert torch.equal(both[1], tokenizer("a red fish")[0])
    assert tokenizer([]).shape == (0, 32)


def test_a_stored_table_reads_back(tokenizer: FoldedTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokens.json")
    again = FoldedTokenizer.from_file(tmp_path / "tokens.json")
    assert (again.ids, again.context_length) == (tokenizer.ids, tokenizer.context_length)
    assert again.encode("an oil painting of a zebra") == tokenizer.encode("an oil painting of a zebra")
