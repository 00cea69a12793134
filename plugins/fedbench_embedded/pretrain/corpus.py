"""The pretraining images, and the stream of image-caption batches drawn from them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench.core.main_program import without_main
from fedbench_embedded.images import CLASSNAMES, Attributes, Rendered, Sampling, generate
from fedbench_embedded.images.captions import captions
from fedbench_embedded.pretrain.recipe import Recipe, Stage
from fedbench_embedded.tokens import FoldedTokenizer


@dataclass(frozen=True)
class Batch:
    """Image-caption pairs of one step."""

    images: Tensor
    """uint8 (batch, 3, 32, 32)"""
    tokens: Tensor
    """int64 (batch, context_length)"""
    hue_rotated: Tensor
    """Whether the image's hues are to be rotated, bool (batch,)."""
    progress: float
    """Share of the stage already done, 0 to 1."""


def class_weights(recipe: Recipe) -> tuple[float, ...]:
    """Skewed class frequencies in a fixed random order, one a class."""
    weights = [math.exp(-recipe.class_skew * rank / (len(CLASSNAMES) - 1)) for rank in range(len(CLASSNAMES))]
    order = np.random.default_rng(recipe.seed).permutation(len(weights))
    return tuple(weights[rank] for rank in order)


def _render_part(recipe: Recipe, part: int) -> Rendered:
    sampling = Sampling(class_weights=class_weights(recipe), domain_weights=recipe.domain_weights, pairs="seen")
    count = recipe.images // recipe.render_parts
    return generate(recipe.seed + part, count, sampling=sampling, difficulty=recipe.difficulty)


def render_corpus(recipe: Recipe) -> Rendered:
    """Render the pretraining images, held-out pairs excluded, in a few processes."""
    job, parts = partial(_render_part, recipe), range(recipe.render_parts)
    if recipe.render_processes == 1:
        rendered = [job(part) for part in parts]
    else:
        with without_main():
            started = get_context("spawn").Pool(recipe.render_processes)
        with started as pool:
            rendered = pool.map(job, parts, chunksize=1)
    attributes = Attributes.join([part.attributes for part in rendered])
    images = np.concatenate([part.images for part in rendered])
    return Rendered(images, attributes.shape, attributes.domain, attributes)


def easy_images(attributes: Attributes) -> NDArray[np.int64]:
    """Indices of the images with a medium or large object, no occluder and at most one distracting mark."""
    return np.flatnonzero((attributes.size >= 1) & (attributes.occluded == 0) & (attributes.distractors <= 1))


def batches(corpus: Rendered, tokenizer: FoldedTokenizer, stage: Stage, recipe: Recipe, seed: int) -> Iterator[Batch]:
    """Shuffled batches until the stage's samples are seen; captions and hues are drawn anew every epoch."""
    rng, seen, epoch = np.random.default_rng(seed), 0, 0
    easy, easy_end = easy_images(corpus.attributes), stage.easy_share * stage.samples
    everything = np.arange(len(corpus.labels))
    while seen < stage.samples:
        pool, end = (easy, easy_end) if seen < easy_end else (everything, stage.samples)
        if len(pool) < recipe.batch:
            raise ValueError(f"{len(pool)} images cannot fill a batch of {recipe.batch}")
        pool = rng.permutation(pool)
        hue_rotated = rng.random(len(pool)) < stage.hue_share
        texts = captions(seed + epoch, corpus.attributes.take(pool), stage.captions, hue_rotated.tolist())
        swapped = np.flatnonzero(rng.random(len(pool)) < recipe.swapped_captions)
        stolen = [texts[other] for other in rng.permutation(swapped)]
        for index, text in zip(swapped, stolen, strict=True):
            texts[index] = text
        tokens = tokenizer(texts)
        for start in range(0, len(pool) - recipe.batch + 1, recipe.batch):
            if seen >= end:
                break
            rows = slice(start, start + recipe.batch)
            images = torch.from_numpy(corpus.images[pool[rows]])
            yield Batch(images, tokens[rows], torch.from_numpy(hue_rotated[rows]), seen / stage.samples)
            seen += recipe.batch
        epoch += 1
