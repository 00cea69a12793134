"""What the encoder can do on freshly rendered images, and the bounds that a shippable encoder must meet."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from open_clip.model import CLIP
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from fedbench_embedded.images import (
    CLASSNAMES,
    DOMAINS,
    TEN_CLASSES,
    TWENTY_CLASSES,
    Rendered,
    Sampling,
    generate,
)
from fedbench_embedded.images.captions import MISNAMED, with_article
from fedbench_embedded.pretrain.augment import normalise
from fedbench_embedded.pretrain.recipe import GateSizes
from fedbench_embedded.pretrain.student import build
from fedbench_embedded.tokens import FoldedTokenizer

NAME = "embedded"
# Logistic regression on unit features: this scale makes C = 1 a mild penalty.
PROBE_SCALE = 10.0

Bools = NDArray[np.bool_]


@torch.no_grad()
def image_features(model: CLIP, images: NDArray[np.uint8]) -> Tensor:
    """Unit embeddings of uint8 images (n, 3, 32, 32): float32 (n, dim)."""
    parts = [normalise(torch.from_numpy(images[start : start + 250])) for start in range(0, len(images), 250)]
    return torch.cat([F.normalize(model.encode_image(part), dim=-1) for part in parts])


@torch.no_grad()
def text_features(model: CLIP, tokenizer: FoldedTokenizer, classnames: tuple[str, ...]) -> Tensor:
    """Unit embeddings of "a photo of a {class}" (classes, dim)."""
    prompts = [f"a photo of {with_article(name)}" for name in classnames]
    return F.normalize(model.encode_text(tokenizer(prompts)), dim=-1)


def predict(images: Tensor, texts: Tensor) -> NDArray[np.int64]:
    """The class with the nearest text for each image (n,)."""
    nearest: NDArray[np.int64] = (images @ texts.T).argmax(dim=1).numpy()
    return nearest


def percent(right: Bools) -> float:
    """Share of True in per cent, rounded to two digits."""
    return round(100.0 * float(right.mean()), 2) if len(right) else float("nan")


def by_domain(right: Bools, domains: NDArray[np.int64]) -> dict[str, float]:
    """Accuracy in per cent for each domain."""
    return {name: percent(right[domains == index]) for index, name in enumerate(DOMAINS)}


def is_misnamed(data: Rendered) -> Bools:
    """Whether each image is of a sub-type that captions often misname (n,)."""
    kinds = {(CLASSNAMES.index(name), variant) for name, variant in MISNAMED}
    pairs = zip(data.attributes.shape.tolist(), data.attributes.variant.tolist(), strict=True)
    return np.array([pair in kinds for pair in pairs])


def load(model_dir: Path) -> tuple[CLIP, FoldedTokenizer]:
    """The stored encoder in float32, in evaluation mode, with its tokenizer."""
    model = build(json.loads((model_dir / f"{NAME}.json").read_text()))
    model.load_state_dict({k: v.float() for k, v in load_file(model_dir / f"{NAME}.safetensors").items()})
    return model.eval(), FoldedTokenizer.from_file(model_dir / f"{NAME}_tokens.json")


FULL = GateSizes()


def digest(model_dir: Path) -> str:
    """sha256 of the weights file."""
    return hashlib.sha256((model_dir / f"{NAME}.safetensors").read_bytes()).hexdigest()


def measure(model_dir: Path, seed: int, sizes: GateSizes = FULL, unrounded: CLIP | None = None) -> dict[str, Any]:
    """Accuracies in per cent on images rendered from `seed`; `unrounded`: the float32 model before it was stored."""
    model, tokenizer = load(model_dir)
    texts = text_features(model, tokenizer, CLASSNAMES)
    ten_texts = texts[: len(TEN_CLASSES)]
    balanced = Sampling(balanced=True)

    ten = generate(seed, sizes.ten_classes, TEN_CLASSES, sampling=balanced)
    features = image_features(model, ten.images)
    guessed = predict(features, ten_texts)
    right, misnamed = guessed == ten.labels, is_misnamed(ten)

    train = generate(seed + 1, sizes.probe, TEN_CLASSES, sampling=balanced)
    train_features = image_features(model, train.images).numpy() * PROBE_SCALE
    probe = LogisticRegression(C=1.0, tol=1e-3, max_iter=300).fit(train_features, train.labels)
    probe_right = probe.predict(features.numpy() * PROBE_SCALE) == ten.labels

    def twenty_way(offset: int, count: int, sampling: Sampling) -> float:
        data = generate(seed + offset, count, TWENTY_CLASSES, sampling=sampling)
        return percent(predict(image_features(model, data.images), texts) == data.labels)

    measured: dict[str, Any] = {
        "zero_shot_10": percent(right),
        "zero_shot_10_by_domain": by_domain(right, ten.domains),
        "zero_shot_10_misnamed": percent(right[misnamed]),
        "zero_shot_10_others": percent(right[~misnamed]),
        "probe_10": percent(probe_right),
        "probe_10_by_domain": by_domain(probe_right, ten.domains),
        "probe_gap": round(percent(probe_right) - percent(right), 2),
        "zero_shot_20": twenty_way(2, sizes.twenty_classes, balanced),
        "zero_shot_20_seen_pairs": twenty_way(3, sizes.pairs, Sampling(balanced=True, pairs="seen")),
        "zero_shot_20_held_out_pairs": twenty_way(4, sizes.pairs, Sampling(balanced=True, pairs="held_out")),
        "logit_scale": round(model.logit_scale.exp().item(), 2),
    }
    if unrounded is not None:
        exact_texts = text_features(unrounded, tokenizer, CLASSNAMES)[: len(TEN_CLASSES)]
        measured["fp16_agreement"] = percent(predict(image_features(unrounded, ten.images), exact_texts) == guessed)
    return measured


# (measured property, lowest, highest) that the shipped encoder keeps.
BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("zero_shot_10", 60.0, 75.0),
    ("probe_gap", 8.0, 30.0),
    ("zero_shot_20", 50.0, 80.0),
    ("zero_shot_20_held_out_pairs", 40.0, 80.0),
    ("fp16_agreement", 99.5, 100.0),
)


def check(measured: dict[str, Any]) -> list[str]:
    """One sentence for each bound that is not met; properties that were not measured are passed over."""
    return [
        f"{name} is {measured[name]}, outside {low} to {high}"
        for name, low, high in BOUNDS
        if name in measured and not low <= measured[name] <= high
    ]
