"""The Dirichlet partitions against flwr-datasets, in distribution: the oracle was not written by us.

Its counts over 300 seeds are kept in flwr_dirichlet.json; where flwr-datasets can be imported, the file is checked
against it. Two-sample Kolmogorov-Smirnov statistics between its 1,800 clients and ours stay below 0.07; twice or half
the concentration, or the other scheme, exceed it. flwr-datasets pins an older `datasets`, so to record the file again
install it where it can't displace ours:

    pip install --no-deps --target oracle flwr-datasets seaborn
    PYTHONPATH=harness:oracle python tests/partitions/test_dirichlet_oracle.py
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ks_2samp

from fedbench.scenarios.partitions.label_skew import dirichlet_capped, dirichlet_uncapped

THRESHOLD = 0.07
CLASSES, PER_CLASS, CLIENTS, DIRICHLET_ALPHA, MIN_CLIENT_SIZE, SEEDS = 5, 60, 6, 0.5, 5, 300
LABELS = np.repeat(np.arange(CLASSES), PER_CLASS)
RECORD = Path(__file__).with_name("flwr_dirichlet.json")
REFERENCE = json.loads(RECORD.read_text()) if RECORD.exists() else {}
SCHEMES: dict[str, Callable[..., list[np.ndarray]]] = {"capped": dirichlet_capped, "uncapped": dirichlet_uncapped}


def flwr_counts(scheme: str, seeds: int) -> list[list[list[int]]]:
    """Class counts (seeds, CLIENTS, CLASSES) as flwr-datasets deals them; its ``self_balancing`` is the cap."""
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner

    dealt = []
    for seed in range(seeds):
        partitioner = DirichletPartitioner(
            CLIENTS, "label", DIRICHLET_ALPHA, MIN_CLIENT_SIZE, self_balancing=scheme == "capped", seed=seed
        )
        partitioner.dataset = Dataset.from_dict({"label": LABELS.tolist()})
        parts = [partitioner.load_partition(client)["label"] for client in range(CLIENTS)]
        dealt.append([np.bincount(part, minlength=CLASSES).tolist() for part in parts])
    return dealt


def our_counts(scheme: str, dirichlet_alpha: float) -> np.ndarray:
    dealt = [
        SCHEMES[scheme](LABELS, CLIENTS, dirichlet_alpha, MIN_CLIENT_SIZE, np.random.default_rng([11, seed]))
        for seed in range(SEEDS)
    ]
    return np.array([[np.bincount(LABELS[part], minlength=CLASSES) for part in parts] for parts in dealt])


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest KS statistic of: client size, largest class share, classes held, share of the last class."""

    def views(counts: np.ndarray) -> list[np.ndarray]:
        size = counts.sum(axis=2)
        return [size, counts.max(axis=2) / size, (counts > 0).sum(axis=2), counts[..., -1] / size]

    pairs = zip(views(ours), views(theirs), strict=True)
    return max(float(ks_2samp(a.ravel(), b.ravel(), method="asymp").statistic) for a, b in pairs)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dirichlet_agrees_with_flwr_datasets(scheme: str) -> None:
    assert distance(our_counts(scheme, DIRICHLET_ALPHA), np.array(REFERENCE[scheme])) < THRESHOLD


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("factor", [2.0, 0.5, 1.4])
def test_a_wrong_concentration_would_be_noticed(scheme: str, factor: float) -> None:
    wrong = our_counts(scheme, factor * DIRICHLET_ALPHA)
    assert distance(wrong, np.array(REFERENCE[scheme])) > 1.5 * THRESHOLD


@pytest.mark.parametrize(("scheme", "other"), [("capped", "uncapped"), ("uncapped", "capped")])
def test_a_forgotten_or_added_cap_would_be_noticed(scheme: str, other: str) -> None:
    assert distance(our_counts(scheme, DIRICHLET_ALPHA), np.array(REFERENCE[other])) > 2 * THRESHOLD


@pytest.mark.filterwarnings("ignore:The specified min_partition_size")
@pytest.mark.skipif(importlib.util.find_spec("flwr_datasets") is None, reason="flwr-datasets is not installed")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_recorded_reference_is_what_flwr_datasets_deals(scheme: str) -> None:
    assert flwr_counts(scheme, seeds=20) == REFERENCE[scheme][:20]


if __name__ == "__main__":
    counts = {scheme: flwr_counts(scheme, SEEDS) for scheme in SCHEMES}
    RECORD.write_text(json.dumps({"flwr-datasets": version("flwr-datasets"), **counts}, separators=(",", ":")))
