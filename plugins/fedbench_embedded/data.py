"""``embedded``: the procedural data set, rendered once from a seed and kept; balanced over class x domain.

Options: ``classes`` 10 (default) or 20; ``train`` and ``test``, the numbers of images (10000, 2000); ``seed`` (0);
``look`` mixed (default: four styles, all sizes, clutter) or plain (large cartoons without clutter, one domain).
"""

from __future__ import annotations

import logging
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedbench.core.federation import Dataset, Split
from fedbench.core.main_program import without_main
from fedbench.core.types import Tensors
from fedbench.datasets.cache import stored
from fedbench.datasets.content import dataset
from fedbench_embedded.images import (
    CARTOON,
    CLASSNAMES,
    DOMAINS,
    GENERATOR_VERSION,
    MID,
    PLAIN,
    TEN_CLASSES,
    TWENTY_CLASSES,
    Rendered,
    Sampling,
    generate,
)

if TYPE_CHECKING:
    from fedbench_embedded.registered import EmbeddedOptions

log = logging.getLogger(__name__)

PART = 2000
"""Images rendered from one seed. A multiple of the 40 or 80 class x domain pairs, so that parts are balanced; part of
the data set's identity, unlike the number of processes."""
PROCESSES = 2
TRAIN, TEST = 0, 1


def load(name: str, options: EmbeddedOptions, cache_dir: Path) -> Dataset:
    """The procedural data set of the options' size; rendered where ``cache_dir`` doesn't hold it yet."""
    classes = TWENTY_CLASSES if options.classes == "20" else TEN_CLASSES
    train, test, seed, is_plain = options.train, options.test, options.seed, options.look == "plain"
    size = f"classes{len(classes)}-train{train}-test{test}-seed{seed}{'-plain' if is_plain else ''}"
    file = f"embedded-v{GENERATOR_VERSION}-{size}.safetensors"
    kept = stored(cache_dir / "datasets" / file, partial(_render, classes, seed, train, test, is_plain), name)
    splits = [
        Split(kept.images(f"{split}.images"), kept.tensors[f"{split}.labels"], kept.tensors[f"{split}.domains"])
        for split in ("train", "test")
    ]
    domains = (DOMAINS[CARTOON],) if is_plain else tuple(DOMAINS)
    return dataset(name, tuple(CLASSNAMES[index] for index in classes), splits[0], splits[1], domains)


def _render(classes: tuple[int, ...], seed: int, train: int, test: int, is_plain: bool = False) -> Tensors:
    parts = [(split, part) for split, count in ((TRAIN, train), (TEST, test)) for part in range(-(-count // PART))]
    # Derived seeds: train, test and every part differ, and none is a small number that pretraining may have used.
    seeds = [int(np.random.SeedSequence([seed, *part]).generate_state(1, np.uint64)[0]) for part in parts]
    counts = [min(PART, (train, test)[split] - part * PART) for split, part in parts]
    log.info("rendering %s images once", f"{train + test:,}")
    sampling = Sampling(balanced=True, domains=(CARTOON,)) if is_plain else Sampling(balanced=True)
    draw = partial(generate, classes=classes, sampling=sampling, difficulty=PLAIN if is_plain else MID)
    rendered = _map_parts(draw, seeds, counts)
    tensors: Tensors = {}
    for split, name in ((TRAIN, "train"), (TEST, "test")):
        mine = [data for (of, _), data in zip(parts, rendered, strict=True) if of == split]
        tensors[f"{name}.images"] = torch.from_numpy(np.concatenate([data.images for data in mine]))
        tensors[f"{name}.labels"] = torch.from_numpy(np.concatenate([data.labels for data in mine]))
        domains = torch.from_numpy(np.concatenate([data.domains for data in mine]))
        tensors[f"{name}.domains"] = torch.zeros_like(domains) if is_plain else domains
    return tensors


def _map_parts(render: partial[Rendered], seeds: list[int], counts: list[int]) -> list[Rendered]:
    """``render`` over all parts, in two processes where that is worth it and allowed."""
    # A daemonic process (a worker of multiprocessing.Pool) may not have children.
    if len(seeds) > 1 and sum(counts) > PART and not multiprocessing.current_process().daemon:
        try:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
                with without_main():  # its processes begin in `map`
                    parts = pool.map(render, seeds, counts)
                return list(parts)
        except (BrokenProcessPool, ImportError, OSError) as error:
            log.info("rendering in this process, since a second one couldn't be started: %s", error)
    return [render(seed, count) for seed, count in zip(seeds, counts, strict=True)]
