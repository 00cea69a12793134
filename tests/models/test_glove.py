"""Word vectors as a text encoder, by hand."""

import pytest
import torch
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError, NotHere
from fedbench.models.text.glove import glove_file, glove_vectors, how_to_get_glove, word_vectors, words_of
from fedbench.models.text.vectors import text_vectors

LINES = "the 9 9 9\ndog 1 0 0\nbig 0 2 0\ntruck 0 0 3\n, 5 5 5\no'clock 1 1 1\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.txt"
    path.write_text(LINES, encoding="utf-8")
    return path


def test_a_class_is_the_mean_of_its_words(file):
    vectors = glove_vectors(file, ["dog", "Big_Truck", "big unknown dog"], ["{}"])
    expected = normalize(torch.tensor([[1.0, 0, 0], [0, 1.0, 1.5], [0.5, 1, 0]]), dim=1)
    torch.testing.assert_close(vectors, expected)


def test_templates_are_words_too_and_their_texts_are_averaged(file):
    by_one = glove_vectors(file, ["dog"], ["the {}"])
    torch.testing.assert_close(by_one, normalize(torch.tensor([[10.0, 9, 9]]), dim=1))
    both = glove_vectors(file, ["dog"], ["{}", "the {}"])
    torch.testing.assert_close(both, normalize(torch.tensor([[1.0, 0, 0]]) + by_one, dim=1))


def test_words_are_lower_case_and_parted_by_what_is_none(file):
    assert words_of("Big-truck, o'Clock (2nd)_dog") == ["big", "truck", "o'clock", "2nd", "dog"]
    assert word_vectors(file, ["o'clock", "none"]).keys() == {"o'clock"}


def test_by_name_below_the_data_folder_with_a_clear_error_where_it_is_not(file, tmp_path):
    name = "glove:tiny.txt"
    assert glove_file(name, tmp_path) == file and how_to_get_glove(name, tmp_path) == ""
    vectors = text_vectors(name, ["dog"], ["{}"], 0, data_dir=tmp_path)
    assert vectors.tolist() == [[1, 0, 0]]
    for missing in ("glove:", "glove:other.txt"):
        with pytest.raises(NotHere, match="there is no file"):
            text_vectors(missing, ["dog"], ["{}"], 0, data_dir=tmp_path)
        assert "glove.6B.zip" in how_to_get_glove(missing, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("400000 300\ndog 1 2\n", "line of counts"),
        ("the 1 2\ndog 1\n", "line 2: expected a word and its vector"),
        ("the 1 2\ndog 1 x\n", "line 2: expected a word and its vector"),
        ("the 1 2\n", "no vector of a word of class 'dog'"),
    ],
)
def test_a_file_of_another_kind_is_refused(text, message, tmp_path):
    path = tmp_path / "other.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FedbenchError, match=message):
        glove_vectors(path, ["dog"], ["{}"])
