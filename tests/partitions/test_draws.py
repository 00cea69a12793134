"""Every partition and every cohort gives the samples that it gave when draws.json was recorded, seed by seed.

The file holds a digest a case; `python tests/partitions/test_draws.py` records it anew, after an intended change (or
one of numpy's generators) alone: every recorded run has its clients from these draws.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbench.core.federation import Dataset, Split, TensorImages
from fedbench.scenarios import Scenario, build_federation
from fedbench.scenarios.participation import cohort
from fedbench.scenarios.partitions.feature_skew import domain_clients
from fedbench.scenarios.partitions.label_skew import (
    classes_equal,
    classes_round_robin,
    creff_equal,
    dirichlet_capped,
    dirichlet_clientwise,
    dirichlet_uncapped,
    iid,
    recut,
    shards_deck,
    shards_sorted,
)
from fedbench.scenarios.partitions.parts import equal_parts

RECORD = Path(__file__).with_name("draws.json")
REFERENCE: dict[str, str] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
Scheme = Callable[[np.ndarray, int, np.random.Generator], Sequence[np.ndarray]]
SCHEMES: dict[str, Scheme] = {
    "iid": iid,
    "shards_sorted": lambda y, n, rng: shards_sorted(y, n, 3, rng),
    "shards_deck": lambda y, n, rng: shards_deck(y, n, 3, rng),
    "classes_round_robin": lambda y, n, rng: classes_round_robin(y, n, 3, rng),
    "classes_round_robin-1": lambda y, n, rng: classes_round_robin(y, n, 1, rng),
    "classes_equal": lambda y, n, rng: classes_equal(y, n, 3, rng),
    "recut": lambda y, n, rng: recut(dirichlet_uncapped(y, n, 0.5, 1, rng)),
    "domains": lambda y, n, rng: domain_clients(y, [2, 0, 5], lambda m: equal_parts(rng.permutation(m), n)),
}
for _alpha in (0.05, 0.5, 100.0):
    SCHEMES[f"creff-{_alpha}"] = lambda y, n, rng, a=_alpha: creff_equal(y, n, a, rng)
    SCHEMES[f"capped-{_alpha}"] = lambda y, n, rng, a=_alpha: dirichlet_capped(y, n, a, 1, rng)
    SCHEMES[f"uncapped-{_alpha}"] = lambda y, n, rng, a=_alpha: dirichlet_uncapped(y, n, a, 1, rng)
    SCHEMES[f"clientwise-{_alpha}"] = lambda y, n, rng, a=_alpha: dirichlet_clientwise(y, n, a, 1, rng)


def _labels(counts: Sequence[int]) -> np.ndarray:
    return np.random.default_rng(5).permutation(np.repeat(np.arange(len(counts)), counts))


DATA: dict[str, tuple[np.ndarray, int]] = {
    "balanced": (_labels([61] * 10), 20),
    "imbalanced": (_labels([300, 200, 150, 100, 80, 60, 50, 40, 35, 31]), 10),
    # class 3 has no sample, so that nine classes are dealt
    "gap": (_labels([90, 50, 40, 0, 30, 31, 90, 20, 11, 70]), 9),
    "many": (_labels([400] * 12), 400),
    "few-of-each": (_labels([7] * 60), 40),
}


def _digest(parts: Sequence[np.ndarray], rng: np.random.Generator) -> str:
    """Of every client's samples in their order, and of what the generator would draw next."""
    told = hashlib.sha256()
    for part in parts:
        told.update(np.asarray(part, dtype=np.int64).tobytes() + b"|")
    told.update(rng.random(2).tobytes())
    return told.hexdigest()[:16]


def _partition(name: str, data: str, seed: int) -> str:
    labels, clients = DATA[data]
    rng = np.random.default_rng([3, seed])
    try:
        return _digest(SCHEMES[name](labels, clients, rng), rng)
    except Exception as error:
        return f"refused: {error}"


def _cohorts(clients: int, participation: float, dropout: float) -> str:
    drawn = [cohort(number, clients, participation, dropout, seed) for seed in (0, 7) for number in range(40)]
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:16]


# refused only after a thousand draws each
HOPELESS = {("uncapped-100.0", "few-of-each"), ("capped-0.05", "many"), ("uncapped-0.05", "many")}
PARTITIONS = [(name, data) for name in SCHEMES for data in DATA if (name, data) not in HOPELESS]
COHORTS = [(n, p, d) for n, p in ((1, 1.0), (20, 0.4), (1000, 0.1), (30_000, 0.002)) for d in (0.0, 0.2, 0.97)]


def _split(samples: int, seed: int) -> Split:
    """Blank images with one of ten classes and one of three domains."""
    rng = np.random.default_rng(seed)
    labels, domains = (torch.from_numpy(rng.permutation(np.arange(samples) % kinds)) for kinds in (10, 3))
    return Split(TensorImages(torch.zeros(samples, 3, 1, 1, dtype=torch.uint8)), labels, domains)


def _federation(name: str) -> str:
    """Digest of every client's samples of all splits, for two seeds."""
    told = hashlib.sha256()
    data = Dataset("toy", tuple("abcdefghij"), _split(3000, 1), _split(600, 2), "hash", ("art", "photo", "toy"))
    for seed in (0, 5):
        for shard in build_federation(data, FEDERATIONS[name], seed).clients:
            for indices in (shard.indices, shard.test_indices, shard.validation_indices):
                told.update(b"|" if indices is None else indices.numpy().tobytes())
    return told.hexdigest()[:16]


FEDERATIONS = {
    "iid": Scenario(),
    "domains": Scenario(partition="domain", clients_per_domain=7),
    "held out": Scenario(partition="domain", clients_per_domain=2, domain_split="60/20/20", holdout_domain="photo"),
    "validation": Scenario(partition="domain", clients_per_domain=2, validation=0.2),
    "equal sizes": Scenario(partition="dirichlet", clients=11, equal_sizes=True),
    "long tail": Scenario(imbalance="exponential", imbalance_factor=20, partition="creff_equal", clients=13),
    "hidden shards": Scenario(partition="shards", clients=30, validation=0.1, labels="hidden", partition_seed=4),
}


def _cases() -> Iterator[tuple[str, str]]:
    for name, data in PARTITIONS:
        for seed in range(3):
            yield f"{name} {data} {seed}", _partition(name, data, seed)
    for name in FEDERATIONS:
        yield f"federation {name}", _federation(name)
    for numbers in COHORTS:
        yield " ".join(map(str, ("cohort", *numbers))), _cohorts(*numbers)


@pytest.mark.parametrize(("name", "data"), PARTITIONS)
def test_partitions_deal_what_they_dealt(name: str, data: str) -> None:
    for seed in range(3):
        assert _partition(name, data, seed) == REFERENCE[f"{name} {data} {seed}"]


@pytest.mark.parametrize("name", FEDERATIONS)
def test_federations_have_the_clients_they_had(name: str) -> None:
    assert _federation(name) == REFERENCE[f"federation {name}"]


@pytest.mark.parametrize(("clients", "participation", "dropout"), COHORTS)
def test_cohorts_are_those_they_were(clients: int, participation: float, dropout: float) -> None:
    assert _cohorts(clients, participation, dropout) == REFERENCE[f"cohort {clients} {participation} {dropout}"]


if __name__ == "__main__":
    RECORD.write_text(json.dumps(dict(_cases()), indent=0) + "\n")
