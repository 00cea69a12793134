"""Unseen classes: the last classes of a data set are left out of everything but a test of their own.

The base-to-new split of CoOp and CoCoOp (Zhou et al., IJCV and CVPR 2022): the first ceil(K / 2) classes in label order
are trained on, the others tested only, each half among its own names. FedTPG (Qiu et al., ICLR 2024) splits alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Split
from fedbench.core.scenario import Scenario
from fedbench.scenarios.partitions.feature_skew import pooled
from fedbench.scenarios.partitions.rounding import floor

FEWEST_BASE = 2


def unseen_count(classes: int, share: float) -> int:
    """The number of unseen classes: ``share`` of ``classes``, rounded, halves down, but at least one; 0 for 0.

    FedbenchError if fewer than two classes would be left to train on.
    """
    if not share:
        return 0
    # K - ceil(K / 2) for one half: an odd number of classes has one more base class, as in CoOp's code
    count = max(-floor(0.5 - share * classes), 1)
    if classes - count < FEWEST_BASE:
        raise FedbenchError(
            f"unseen_classes={share:g} leaves {classes - count} of {classes} classes to train on, and "
            f"{FEWEST_BASE} are the fewest; set it lower."
        )
    return count


def by_class(dataset: Dataset, scenario: Scenario) -> tuple[Dataset, Dataset | None]:
    """The data sets of base classes and of unseen classes, whose labels count from 0; all and None if none are unseen.

    Both select from the same images, so that features are computed and kept once.
    """
    count = unseen_count(len(dataset.classnames), scenario.unseen_classes)
    if not count:
        return dataset, None
    if scenario.holdout_domain is not None and dataset.test is not None:
        # pooled as `cut_by_domain` would pool each part, but from one source of images
        dataset = replace(dataset, train=pooled(dataset.train, dataset.test), test=None)
    base = len(dataset.classnames) - count
    return _of(dataset, 0, base), _of(dataset, base, len(dataset.classnames))


def require_tested(unseen: Split, names: tuple[str, ...]) -> None:
    """Raise FedbenchError where there is no sample to test the unseen classes on."""
    if not len(unseen):
        raise FedbenchError(
            f"the test split has no sample of the unseen classes {', '.join(names)}; set unseen_classes=0."
        )


def _of(dataset: Dataset, first: int, end: int) -> Dataset:
    """The data set restricted to the classes from ``first`` up to ``end``."""
    return replace(
        dataset,
        classnames=dataset.classnames[first:end],
        train=_split(dataset.train, first, end),
        test=None if dataset.test is None else _split(dataset.test, first, end),
        list_groups=_groups(dataset.list_groups, first, end),
    )


def _split(split: Split, first: int, end: int) -> Split:
    chosen = split.select(torch.nonzero((split.labels >= first) & (split.labels < end)).flatten())
    return replace(chosen, labels=chosen.labels - first)


def _groups(groups: Mapping[str, tuple[int, ...]], first: int, end: int) -> dict[str, tuple[int, ...]]:
    """The data set's own reporting groups; groups without classes are left out."""
    left = {name: tuple(c - first for c in classes if first <= c < end) for name, classes in groups.items()}
    return {name: classes for name, classes in left.items() if classes}
