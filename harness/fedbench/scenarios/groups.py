"""Reporting groups of a long tail: which classes are head, mid and tail, or many, medium and few.

The rules disagree, also on the same data, so a table always says which one it uses. A group without classes is left
out of the answer: its accuracy is absent, not 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedbench.core.scenario import GroupRule
from fedbench.scenarios.partitions.parts import IntArray, floor

Groups = dict[str, tuple[int, ...]]
HEAD_PERCENT, MID_PERCENT = 75, 95
BY_POSITION = ("head", "mid", "tail")
BY_COUNT = ("many", "medium", "few")


def reporting_groups(counts: IntArray, rule: GroupRule) -> Groups:
    """Classes by group, from training samples per class (C,); classes within a group in label order."""
    if rule == "cumulative_exclusive":
        return cumulative_exclusive(counts)
    if rule == "cumulative_inclusive":
        return cumulative_inclusive(counts)
    if rule == "shots":
        return by_count(counts, few_below=20, many_above=100)
    if rule == "clip2fl":
        return by_count(counts, few_below=200, many_above=1500)
    return thirds(counts)


def cumulative_exclusive(counts: IntArray) -> Groups:
    """Head while the cumulative share of samples is <= 75 %, mid while <= 95 %, tail the rest.

    The class that crosses a threshold belongs to the next group. This is the rule the published tables of CAPT fit.
    """
    order = _largest_first(counts)
    reached = np.cumsum(counts[order])  # integers: shares in floats would move a class that lands on a threshold
    group = (100 * reached > HEAD_PERCENT * reached[-1]).astype(int) + (100 * reached > MID_PERCENT * reached[-1])
    return _named(order, group, BY_POSITION)


def cumulative_inclusive(counts: IntArray) -> Groups:
    """The rule ``cumulative_exclusive``, except that the class that crosses a threshold stays in the earlier group
    (FedLoGe)."""
    order = _largest_first(counts)
    reached = np.cumsum(counts[order])
    before = reached - counts[order]
    group = (100 * before >= HEAD_PERCENT * reached[-1]).astype(int) + (100 * before >= MID_PERCENT * reached[-1])
    return _named(order, group, BY_POSITION)


def by_count(counts: IntArray, few_below: int, many_above: int) -> Groups:
    """Many above one count, few below another, medium between, both ends included.

    100 and 20: Kang et al., "Decoupling Representation and Classifier" (ImageNet-LT). 1500 and 200: CLIP2FL, Fig. 4.
    """
    group = (counts <= many_above).astype(int) + (counts < few_below)
    return _named(np.arange(len(counts)), group, BY_COUNT)


def thirds(counts: IntArray) -> Groups:
    """The first and the last 30 % of the classes by count, rounded down, and those between."""
    edge = floor(0.3 * len(counts))
    group = np.ones(len(counts), dtype=int)
    group[:edge], group[len(counts) - edge :] = 0, 2
    return _named(_largest_first(counts), group, BY_POSITION)


def _largest_first(counts: IntArray) -> IntArray:
    return np.argsort(-counts, kind="stable")


def _named(classes: IntArray, group: IntArray, names: Sequence[str]) -> Groups:
    members = {name: sorted(classes[group == g].tolist()) for g, name in enumerate(names)}
    return {name: tuple(classes) for name, classes in members.items() if classes}
