"""The embedded data set: same seed, same bytes; balanced; some pairs kept out of pretraining; honest captions."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbench_embedded import images as embedded
from fedbench_embedded.data import load
from fedbench_embedded.images import (
    CARTOON,
    CLASSNAMES,
    DOMAINS,
    GENERATOR_VERSION,
    MID,
    PLAIN,
    TEN_CLASSES,
    TWENTY_CLASSES,
    UNBALANCED,
    Attributes,
    Difficulty,
    Sampling,
    generate,
)
from fedbench_embedded.images.attributes import COLOURS, HELD_OUT_COLOUR, SKETCH, held_out, sample_attributes
from fedbench_embedded.images.captions import COLOUR_SYNONYMS, MISNAMED, CaptionMix, captions
from fedbench_embedded.images.geometry import disc, ellipse, polygon
from fedbench_embedded.images.render import render
from fedbench_embedded.images.scene import CANVAS, GRID_X, GRID_Y, place, uniform
from fedbench_embedded.images.shapes import SHAPES
from fedbench_embedded.registered import EmbeddedOptions

BALANCED = Sampling(balanced=True)


def test_pixels_of_a_seed_never_change() -> None:
    # If this fails after an intended change of the images, raise GENERATOR_VERSION and pretrain the encoder anew.
    data = generate(seed=7, count=200, sampling=BALANCED)
    digest = hashlib.sha256(data.images.tobytes() + data.labels.tobytes() + data.domains.tobytes())
    assert (GENERATOR_VERSION, digest.hexdigest()) == (
        1,
        "d7a260e08a45f09b682d898d853b1650f9d73709d5d27c04c5af4068ca589e8f",
    )


def test_plain_images_are_large_cartoons_with_nothing_else_in_them(tmp_path: Path) -> None:
    plain = Sampling(balanced=True, domains=(CARTOON,))
    data = generate(seed=7, count=200, classes=TEN_CLASSES, sampling=plain, difficulty=PLAIN)
    shown = data.attributes
    assert set(data.domains) == {CARTOON} and set(shown.size) == {2} and not shown.distractors.any()
    assert not shown.occluded.any() and set(np.bincount(data.labels)) == {20}
    loaded = load("embedded?look=plain", EmbeddedOptions(train=200, test=40, look="plain"), tmp_path)
    assert loaded.domain_names == ("cartoon",) and set(loaded.train.domains.tolist()) == {0}
    digest = hashlib.sha256(loaded.train.images.read(torch.arange(200)).numpy().tobytes()).hexdigest()
    assert digest == "7af70b6634fc8cfabec6fcfd7d6f91a11f822e25fbbbe17076a3d76ca1debc2c"


def test_images_are_bytes_with_channels_first() -> None:
    data = generate(seed=1, count=30)
    assert data.images.dtype == np.uint8 and data.images.shape == (30, 3, 32, 32)
    assert data.labels.dtype == np.int64 and data.domains.dtype == np.int64


def test_balanced_classes_and_domains_are_exactly_equal_in_number() -> None:
    data = generate(seed=3, count=400, classes=TEN_CLASSES, sampling=BALANCED)
    for label in range(10):
        for domain in range(len(DOMAINS)):
            assert ((data.labels == label) & (data.domains == domain)).sum() == 10


def test_a_longer_data_set_starts_with_the_shorter_one() -> None:
    # 130 is not a multiple of the chunk of 50: the last chunk is rendered whole and cut.
    short, long = generate(seed=5, count=130), generate(seed=5, count=180)
    assert np.array_equal(short.images, long.images[:130])
    assert np.array_equal(short.attributes.colour, long.attributes.colour[:130])


def test_another_seed_gives_other_images() -> None:
    assert not np.array_equal(generate(seed=5, count=50).images, generate(seed=6, count=50).images)


def test_only_requested_classes_appear() -> None:
    assert set(generate(seed=2, count=100, classes=(4, 17)).labels) == {4, 17}


def test_each_shape_has_one_colour_held_out() -> None:
    pairs = {(shape, int(colour)) for shape, colour in enumerate(HELD_OUT_COLOUR)}
    assert len(pairs) == 20
    assert np.bincount(HELD_OUT_COLOUR, minlength=len(COLOURS)).tolist() == [2] * 10


def drawn(
    seed: int, count: int, classes: tuple[int, ...] = TWENTY_CLASSES, sampling: Sampling = UNBALANCED
) -> Attributes:
    """Attributes without their images, for tests of rates."""
    return sample_attributes(np.random.default_rng(seed), np.arange(count), classes, sampling, MID)


def test_seen_and_held_out_pairs_never_mix() -> None:
    assert held_out(generate(seed=4, count=50, sampling=Sampling(pairs="held_out")).attributes).all()
    seen = drawn(4, 5000, sampling=Sampling(pairs="seen"))
    assert not held_out(seen).any()
    assert len(set(zip(seen.shape.tolist(), seen.colour.tolist(), strict=True))) == 180
    assert held_out(drawn(4, 500, sampling=Sampling(pairs="held_out"))).all()


def test_difficulty_sets_the_rates() -> None:
    hard = Difficulty(sizes=(1.0, 0.0, 0.0), distractors=(0.0, 0.0, 1.0), occluder=1.0)
    attributes = generate(seed=1, count=100, difficulty=hard).attributes
    assert (attributes.size == 0).all() and (attributes.distractors == 2).all() and (attributes.occluded == 1).all()


def test_planes_stay_in_single_precision() -> None:
    # A double on the way would be slower and would round differently where compilers fuse operations.
    rng = np.random.default_rng(0)
    attributes = sample_attributes(rng, np.arange(80), range(20), BALANCED, Difficulty())
    scene = place(rng, attributes)
    assert {scene.u.dtype, scene.v.dtype, scene.distance.dtype, scene.inside.dtype} == {np.dtype(np.float32)}
    assert render(rng, attributes).dtype == np.uint8


@pytest.mark.parametrize("name", CLASSNAMES)
def test_both_variants_of_a_shape_fill_part_of_the_canvas_and_differ(name: str) -> None:
    # Five proportions between the extremes of the knob.
    knob = np.linspace(0, 1, 5, dtype=np.float32)[:, None, None]
    x, y = np.repeat(GRID_X * 1.1, 5, axis=0), np.repeat(GRID_Y * 1.1, 5, axis=0)
    masks = [SHAPES[name](x, y, knob, variant) < 0 for variant in (0, 1)]
    for mask in masks:
        share = mask.mean(axis=(1, 2))
        assert (share > 0.07).all() and (share < 0.75).all(), share
    assert (masks[0] != masks[1]).mean() > 0.003


def test_distances_of_simple_figures() -> None:
    x, y = np.array([[[0.0, 2.0]]], np.float32), np.array([[[0.0, 0.0]]], np.float32)
    assert disc(x, y, (0.0, 0.0), 0.5).ravel().tolist() == [-0.5, 1.5]
    # Outline at x = 2 when the half width is 2.
    assert ellipse(x, y, (0.0, 0.0), 2.0, 1.0).ravel().tolist() == [-1.0, 0.0]
    square = [(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)]
    assert polygon(x, y, square).ravel().tolist() == [-1.0, 1.0]
    assert polygon(x, y, square[::-1]).ravel().tolist() == [-1.0, 1.0]


def test_uniform_numbers_keep_their_bounds() -> None:
    numbers = uniform(np.random.default_rng(0), 1000, -0.5, 0.25)
    assert numbers.shape == (1000, 1, 1) and numbers.min() >= -0.5 and numbers.max() < 0.25
    assert GRID_X.shape == (1, CANVAS, CANVAS)


def test_sketches_have_no_colour() -> None:
    data = generate(seed=8, count=200, sampling=BALANCED)
    means = data.images[data.domains == SKETCH].astype(np.float64).mean(axis=(2, 3))
    assert np.abs(means - means.mean(axis=1, keepdims=True)).max() < 3


def test_captions_of_colourless_images_name_no_colour() -> None:
    attributes = drawn(9, 1000)
    words = {*COLOURS, *(word for options in COLOUR_SYNONYMS.values() for word in options)}
    mix = CaptionMix(colour=1.0)
    assert any(words & set(text.split()) for text in captions(0, attributes, mix))
    assert not any(words & set(text.split()) for text in captions(0, attributes, mix, [True] * 1000))


def test_sub_types_are_misnamed_at_the_stated_rate() -> None:
    attributes = drawn(10, 8000, classes=(CLASSNAMES.index("bird"),))
    flying = attributes.take(attributes.variant == 1)
    wrong, rate = MISNAMED["bird", 1]
    for factor in (0.0, 0.5, 1.3):
        texts = captions(1, flying, CaptionMix(misnaming=factor))
        share = np.mean([wrong in text for text in texts])
        assert share == pytest.approx(rate * factor, abs=0.025)
    standing = captions(1, attributes.take(attributes.variant == 0), CaptionMix())
    assert not any(wrong in text for text in standing)


def test_captions_depend_on_their_seed_alone() -> None:
    attributes = drawn(11, 100)
    assert captions(3, attributes, CaptionMix()) == captions(3, attributes, CaptionMix())
    assert captions(3, attributes, CaptionMix()) != captions(4, attributes, CaptionMix())


def test_the_package_needs_no_torch() -> None:
    for path in Path(embedded.__file__).parent.glob("*.py"):
        assert "torch" not in path.read_text(), path.name
