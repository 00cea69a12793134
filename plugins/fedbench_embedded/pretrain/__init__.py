"""Pretraining of the embedded dual encoder: render, train a teacher, distil the student, refine it, measure it."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from open_clip.model import CLIP
from safetensors.torch import save_file

from fedbench_embedded.images import CLASSNAMES, GENERATOR_VERSION, TEN_CLASSES, Sampling, generate
from fedbench_embedded.images.captions import MISNAMED, vocabulary
from fedbench_embedded.pretrain import gate
from fedbench_embedded.pretrain.contrastive import StageSetting, TrainingProgress
from fedbench_embedded.pretrain.corpus import render_corpus
from fedbench_embedded.pretrain.recipe import DEFAULT, SMOKE, Recipe
from fedbench_embedded.pretrain.student import distil_student, refine_student, student_config
from fedbench_embedded.pretrain.teacher import train_teacher
from fedbench_embedded.tokens import FoldedTokenizer, grammar_ids

__all__ = ["DEFAULT", "SMOKE", "Recipe", "pretrain"]

Log = Callable[[str], None]


def _examiner(tokenizer: FoldedTokenizer, recipe: Recipe) -> Callable[[CLIP], str]:
    """A cheap zero-shot accuracy for the log, on images that nothing else uses."""
    data = generate(recipe.seed - 1, min(1000, recipe.images), TEN_CLASSES, sampling=Sampling(balanced=True))
    names = CLASSNAMES[: len(TEN_CLASSES)]

    def examine(model: CLIP) -> str:
        guessed = gate.predict(gate.image_features(model, data.images), gate.text_features(model, tokenizer, names))
        return f"zero-shot {gate.percent(guessed == data.labels)}"

    return examine


def _train_all(setting: StageSetting, log: Log) -> tuple[CLIP, dict[str, TrainingProgress]]:
    recipe = setting.recipe
    log(f"teacher: {recipe.teacher.samples} samples")
    teacher, teacher_progress = train_teacher(setting)
    log(f"student: {recipe.student.samples} samples")
    student, student_progress = distil_student(teacher, setting)
    log(f"refinement: {recipe.refinement.samples} samples")
    refinement_progress = refine_student(student, setting)
    return student, {"teacher": teacher_progress, "student": student_progress, "refinement": refinement_progress}


def _store(model: CLIP, tokenizer: FoldedTokenizer, output_dir: Path) -> None:
    """Write weights (fp16), configuration and token table."""
    weights = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, output_dir / f"{gate.NAME}.safetensors")
    (output_dir / f"{gate.NAME}.safetensors").chmod(0o644)  # safetensors writes private files
    config = student_config(tokenizer.vocab_size, tokenizer.context_length)
    (output_dir / f"{gate.NAME}.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save(output_dir / f"{gate.NAME}_tokens.json")


def pretrain(output_dir: Path, *, recipe: Recipe = DEFAULT, log: Log = print) -> dict[str, Any]:
    """Run the whole pretraining on one thread and write the encoder; returns its card, which is also stored.

    Writes `embedded.safetensors`, `embedded.json`, `embedded_tokens.json` and `embedded_card.json` into `output_dir`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _pretrain(output_dir, recipe, log)
    finally:
        torch.set_num_threads(threads)


def _pretrain(output_dir: Path, recipe: Recipe, log: Log) -> dict[str, Any]:
    output_dir.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    tokenizer = FoldedTokenizer(grammar_ids(vocabulary()), recipe.context_length)
    log(f"rendering {recipe.images} images")
    corpus = render_corpus(recipe)
    render_seconds = time.perf_counter() - start
    setting = StageSetting(corpus, tokenizer, recipe, log, _examiner(tokenizer, recipe))
    model, progress = _train_all(setting, log)
    _store(model, tokenizer, output_dir)
    log("measuring")
    measured = gate.measure(output_dir, recipe.gate_seed, recipe.gate, unrounded=model)
    factor = recipe.refinement.captions.misnaming
    card: dict[str, Any] = {
        "sha256": gate.digest(output_dir),
        "generator_version": GENERATOR_VERSION,
        "measured": measured,
        "violated_gates": gate.check(measured),
        "misnamed_sub_types": [
            {"class": name, "variant": variant, "called": wrong, "rate": round(rate * factor, 3)}
            for (name, variant), (wrong, rate) in MISNAMED.items()
        ],
        "render_wall_seconds": round(render_seconds, 1),
        "stages": {name: asdict(done) for name, done in progress.items()},
        "recipe": asdict(recipe),
    }
    (output_dir / f"{gate.NAME}_card.json").write_text(json.dumps(card, indent=2) + "\n")
    log(f"{measured}")
    return card
