"""Class vectors from GloVe's files, written here: a word and three numbers a line."""

import hashlib
import math
import zipfile
from pathlib import Path

import pytest
import torch

from fedbench.core.errors import FedbenchError, NotHere
from fedbench.models import how_to_get
from fedbench.models.text.vectors import text_vectors
from fedbench.runs.prepare import Settings, prepare
from fedbench.testing import final_state, tiny_dataset, tiny_spec

LINES = """the 0.5 0.5 0.5
cat 1 0 0
fish 0 1 0
aquarium 0 0 1
shirt 0 3 4
t-shirt 3 0 4
. . . 7 7 7
"""


@pytest.fixture
def words(tmp_path: Path) -> Path:
    file = tmp_path / "words.txt"
    file.write_text(LINES)
    return file


def vectors(file: Path | str, *classnames: str, data_dir: Path | None = None) -> torch.Tensor:
    return text_vectors(f"glove:{file}", classnames, ("a photo of a {}",), seed=0, data_dir=data_dir)


def test_a_class_is_the_mean_of_its_words_whatever_the_template(words: Path) -> None:
    half = math.sqrt(0.5)
    found = vectors(words, "Cat", "aquarium_fish", "the cat")
    # (0.5 + 1, 0.5, 0.5) / 2 has length sqrt(2.75) / 2
    long = math.sqrt(2.75)
    expected = torch.tensor([[1, 0, 0], [0, half, half], [1.5 / long, 0.5 / long, 0.5 / long]])
    torch.testing.assert_close(found, expected)
    assert found.dtype == torch.float32
    assert torch.equal(found, text_vectors(f"glove:{words}", ("Cat", "aquarium_fish", "the cat"), ("{}",), seed=9))


def test_a_word_is_cut_further_only_where_it_is_unknown(words: Path) -> None:
    torch.testing.assert_close(vectors(words, "T-shirt"), torch.tensor([[0.6, 0.0, 0.8]]))
    # "cat-shirt" is no word: (1, 3, 4) / 2
    torch.testing.assert_close(vectors(words, "cat-shirt"), torch.tensor([[1.0, 3.0, 4.0]]) / math.sqrt(26))


def test_unknown_words_are_left_out_and_named(words: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.testing.assert_close(vectors(words, "grumpy cat"), torch.tensor([[1.0, 0.0, 0.0]]))
    assert "no vector of grumpy in class 'grumpy cat'" in caplog.text
    with pytest.raises(FedbenchError, match="class 'grumpy_dog' has no vector.*none of its words 'grumpy', 'dog'"):
        vectors(words, "cat", "grumpy_dog")


def test_words_with_spaces_hide_no_word_that_begins_like_them(tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text("the 1 1 1\ncat at home 5 5 5\ncat 1 0 0\n")
    torch.testing.assert_close(vectors(tmp_path / "w.txt", "cat"), torch.tensor([[1.0, 0.0, 0.0]]))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("400000 300\ncat 1 2 3\n", "line 1 of .* is not a word .*take off a heading"),
        ("the 1 2 3\ncat 1 2\n", "has no vector|line 2"),
        ("the 1 2 3\ncat 1 x 3\n", "line 2"),
        ("the 1 2 3\ncat 1 nan 3\n", "line 2"),
        ("", "has no vector"),
        ("x" * 100_000, "line 1"),
    ],
)
def test_a_file_of_another_format_is_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text(content)
    with pytest.raises(FedbenchError, match=said):
        vectors(tmp_path / "w.txt", "cat")


def test_the_official_archive_is_read_as_it_is(tmp_path: Path) -> None:
    name, folder = "glove.6B.50d.txt", tmp_path / "glove"
    with pytest.raises(NotHere, match=r"download https://nlp.stanford.edu/data/glove.6B.zip and put it, packed or"):
        vectors(name, "cat", data_dir=tmp_path)
    assert str(folder) in how_to_get(f"glove:{name}", tmp_path)
    assert "glove.840B.300d.zip" in how_to_get("glove:glove.840B.300d.txt", tmp_path)
    folder.mkdir()
    with zipfile.ZipFile(folder / "glove.6B.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, LINES)
    assert how_to_get(f"glove:{name}", tmp_path) == ""
    packed = vectors(name, "cat", "fish", data_dir=tmp_path)
    (folder / "glove.6B.zip").unlink()
    (folder / name).write_text(LINES)
    assert torch.equal(vectors(name, "cat", "fish", data_dir=tmp_path), packed)


@pytest.mark.parametrize("name", ["none.txt", "glove.6B.zip"])
def test_a_file_that_is_not_there_says_what_to_write(name: str) -> None:
    with pytest.raises(FedbenchError, match=r"there is no file .*write glove:glove.6B.300d.txt"):
        vectors(name, "cat")
    with pytest.raises(FedbenchError, match="'glove:' is incomplete: type glove:FILE"):
        vectors("", "cat")


def test_a_broken_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "glove.6B.zip").write_text("no archive")
    with pytest.raises(FedbenchError, match=r"glove.6B.zip' can't be read \(File is not a zip file\)"):
        vectors(tmp_path / "glove.6B.50d.txt", "cat")


def test_fedglcl_runs_on_words_and_records_the_file(tmp_path: Path) -> None:
    data = tiny_dataset()
    lines = [
        f"{word} {' '.join(str(float(i == j)) for j in range(8))}"
        for i, word in enumerate(dict.fromkeys(w for name in data.classnames for w in name.lower().split()))
    ]
    file = tmp_path / "words.txt"
    file.write_text("\n".join(lines))
    spec = tiny_spec("fedglcl", backbone="convnet", rounds=1).model_copy(update={"text_encoder": f"glove:{file}"})
    run = prepare(spec, Settings(Path(), tmp_path), dataset=data)
    assert run.model.constants["text"].shape == (len(data.classnames), 8)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert run.info.weights_hash == hashlib.sha256(f" {digest}".encode()).hexdigest()
    assert math.isfinite(sum(float(value.sum()) for value in final_state(run).weights.values()))
    trained = spec.model_copy(update={"params": {"fedglcl": {"trainable_text": True}}})
    with pytest.raises(FedbenchError, match="is a table of words, not a network, so there is nothing to train"):
        prepare(trained, Settings(Path(), tmp_path), dataset=data)
