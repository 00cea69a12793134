"""The pretraining pipeline at toy size, and the encoder that ships, measured on fresh images."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from open_clip.transformer import VisionTransformer

import fedbench_embedded
from fedbench_embedded.images import CLASSNAMES, MID, TEN_CLASSES, Sampling, generate
from fedbench_embedded.images.attributes import held_out
from fedbench_embedded.images.captions import vocabulary
from fedbench_embedded.pretrain import SMOKE, __main__, gate, pretrain
from fedbench_embedded.pretrain.augment import augment, normalise, rotate_hues
from fedbench_embedded.pretrain.contrastive import encode_short_text, learning_rate, symmetric_loss
from fedbench_embedded.pretrain.corpus import batches, easy_images, render_corpus
from fedbench_embedded.pretrain.recipe import DEFAULT, GateSizes
from fedbench_embedded.pretrain.student import GRID, WIDTH, build, grid_positions, student_config
from fedbench_embedded.tokens import FoldedTokenizer, grammar_ids

SHIPPED = Path(fedbench_embedded.__file__).parent


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


TINY = replace(
    SMOKE,
    images=120,
    teacher=replace(SMOKE.teacher, samples=64),
    gate=GateSizes(ten_classes=40, probe=60, twenty_classes=40, pairs=20),
)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pretrain")
    card = pretrain(folder, recipe=TINY, log=lambda line: None)
    return folder, card


@pytest.fixture(scope="module")
def tokenizer() -> FoldedTokenizer:
    return FoldedTokenizer(grammar_ids(vocabulary()), 32)


def test_the_pipeline_writes_a_loadable_encoder_and_its_card(smoke: tuple[Path, dict[str, Any]]) -> None:
    folder, card = smoke
    model, tokenizer = gate.load(folder)
    assert isinstance(model.visual, VisionTransformer)
    assert model.token_embedding.num_embeddings == tokenizer.vocab_size
    assert json.loads((folder / "embedded_card.json").read_text())["sha256"] == card["sha256"]
    assert card["stages"]["student"]["samples"] == TINY.student.samples
    assert math.isfinite(card["stages"]["refinement"]["final_loss"])
    # An encoder that saw a few hundred images must not pass.
    assert any("zero_shot_10" in sentence for sentence in card["violated_gates"])


def test_held_out_pairs_are_never_rendered_for_pretraining() -> None:
    corpus = render_corpus(replace(SMOKE, images=1000))
    assert not held_out(corpus.attributes).any()
    assert len(corpus.images) == 1000


def test_a_stage_starts_with_easy_images_and_counts_its_samples(tokenizer: FoldedTokenizer) -> None:
    corpus = render_corpus(SMOKE)
    easy = {corpus.images[index].tobytes() for index in easy_images(corpus.attributes)}
    stream = list(batches(corpus, tokenizer, SMOKE.teacher, SMOKE, seed=0))
    assert sum(len(batch.images) for batch in stream) == SMOKE.teacher.samples
    from_easy = [all(image.tobytes() in easy for image in batch.images.numpy()) for batch in stream]
    assert from_easy == [True, True, False, False, False]


def test_the_shortened_text_forward_is_the_librarys(tokenizer: FoldedTokenizer) -> None:
    torch.manual_seed(0)
    model = build(student_config(tokenizer.vocab_size, 32)).eval()
    tokens = tokenizer(["a photo of a red bird", "this is a tree on sand", "star"])
    with torch.no_grad():
        assert torch.allclose(encode_short_text(model, tokens), model.encode_text(tokens), atol=1e-6)


def test_the_contrastive_loss_on_two_pairs() -> None:
    # Cosines [[1, 0], [0, 1]] at scale ln 3: each softmax gives the match 3 / (3 + 1).
    eye = torch.eye(2)
    assert symmetric_loss(eye, eye, torch.tensor(math.log(3))).item() == pytest.approx(-math.log(0.75))
    swapped = symmetric_loss(eye, eye.flip(0), torch.tensor(math.log(3)))
    assert swapped.item() == pytest.approx(-math.log(0.25))


def test_the_learning_rate_warms_up_and_ends_at_zero() -> None:
    stage = replace(DEFAULT.student, learning_rate=1.0, warmup_steps=10)
    assert learning_rate(stage, 4, 0.0) == 0.5
    assert learning_rate(stage, 100, 0.5) == pytest.approx(0.5)
    assert learning_rate(stage, 1000, 1.0) == pytest.approx(0.0)


def test_a_hue_rotation_by_a_third_exchanges_the_primary_colours() -> None:
    red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    turned = rotate_hues(red, torch.tensor([2 * math.pi / 3]))
    assert torch.allclose(turned.flatten(), torch.tensor([0.0, 1.0, 0.0]), atol=1e-6)
    gray = torch.full((1, 3, 2, 2), 0.4)
    assert torch.allclose(rotate_hues(gray, torch.tensor([1.0])), gray)


def test_augmentation_at_strength_zero_only_flips() -> None:
    images = torch.from_numpy(generate(seed=1, count=20).images)
    changed = augment(images, torch.zeros(20, dtype=torch.bool), 0.0, torch.Generator().manual_seed(0))
    plain = normalise(images)
    same = [torch.allclose(new, old, atol=1e-4) for new, old in zip(changed, plain, strict=True)]
    flipped = [torch.allclose(new, old.flip(2), atol=1e-4) for new, old in zip(changed, plain, strict=True)]
    assert all(a or b for a, b in zip(same, flipped, strict=True)) and any(same) and any(flipped)


def test_patch_positions_are_all_different() -> None:
    positions = grid_positions()
    assert positions.shape == (GRID * GRID, WIDTH)
    assert torch.cdist(positions, positions)[~torch.eye(GRID * GRID, dtype=torch.bool)].min() > 0.5


def test_gate_bounds_are_reported_in_words() -> None:
    assert gate.check({"zero_shot_10": 66.0, "probe_gap": 9.0}) == []
    (sentence,) = gate.check({"zero_shot_10": 81.0, "probe_gap": 9.0})
    assert "zero_shot_10" in sentence and "81.0" in sentence


def test_shipped_weights_are_small_and_load_with_open_clip() -> None:
    assert (SHIPPED / "embedded.safetensors").stat().st_size <= 8_000_000
    open_clip.add_model_config(SHIPPED / "embedded.json")
    model = open_clip.create_model("embedded", pretrained=str(SHIPPED / "embedded.safetensors"), weights_only=True)
    ours, tokenizer = gate.load(SHIPPED)
    assert isinstance(model.visual, VisionTransformer)
    assert (model.context_length, model.vocab_size) == (tokenizer.context_length, tokenizer.vocab_size)
    theirs = model.eval().state_dict()
    assert all(torch.equal(theirs[name], value) for name, value in ours.state_dict().items())


def test_shipped_tokens_and_card_belong_to_the_shipped_weights() -> None:
    card = json.loads((SHIPPED / "embedded_card.json").read_text())
    assert card["violated_gates"] == []
    assert gate.digest(SHIPPED) == card["sha256"]


@pytest.mark.slow
def test_shipped_encoder_is_imperfect_by_the_intended_amount() -> None:
    # Fresh seed, small samples: the bounds are those of the gate, give or take two standard errors.
    measured = gate.measure(
        SHIPPED, seed=555_000, sizes=GateSizes(ten_classes=1000, probe=5000, twenty_classes=200, pairs=100)
    )
    assert 58 <= measured["zero_shot_10"] <= 77
    assert measured["probe_gap"] >= 4
    assert measured["zero_shot_10_misnamed"] < measured["zero_shot_10_others"] - 15


def test_shipped_encoder_reads_class_names_behind_sixteen_words() -> None:
    # Prompt learners put sixteen vectors in front of the class name: text positions that late must work.
    model, tokenizer = gate.load(SHIPPED)
    data = generate(556_000, 600, TEN_CLASSES, sampling=Sampling(balanced=True), difficulty=MID)
    features = gate.image_features(model, data.images)
    long = "a photo of an image of a picture of a photo of a view of a"
    assert len(tokenizer.encode(long)) == 16
    with torch.no_grad():
        texts = model.encode_text(tokenizer([f"{long} {name}" for name in CLASSNAMES[:10]]))
    right = gate.predict(features, torch.nn.functional.normalize(texts, dim=-1)) == data.labels
    assert float(np.mean(right)) > 0.55


@pytest.mark.slow
def test_shipped_encoder_passes_the_full_gate_on_fresh_images() -> None:
    measured = gate.measure(SHIPPED, seed=777_000)
    assert gate.check(measured) == []


def test_the_command_writes_to_no_file_and_never_over_the_shipped_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    for words, reason in (([], "--output"), (["--output", str(tmp_path / "file")], "--output")):
        with pytest.raises(SystemExit) as ended:
            __main__.main(words)
        assert ended.value.code == 2
        assert reason in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_the_command_shows_what_was_measured_beside_its_gates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, low, high = gate.BOUNDS[0]
    card = {"measured": {name: high + 1}, "violated_gates": [f"{name} is too high"]}
    monkeypatch.setattr(__main__, "pretrain", lambda *_, **__: card)
    assert __main__.main(["--output", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert f"{name:<40} {high + 1!s:>10}  {low:g} to {high:g}\n" in shown.out
    assert shown.err == f"gate missed: {name} is too high\n"
    assert __main__.main(["--output", str(tmp_path), "--smoke"]) == 0
