"""Seconds and memory of every partition at 1 M samples x 100,000 clients x 100 classes.

Run: python tests/bench/bench_partitions.py [NAME ...]. Each partition is made in a fresh process; the memory is the
growth of that process's peak over what data and libraries take.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time

import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Split, TensorImages
from fedbench.scenarios import Scenario, build_federation

SAMPLES, CLIENTS, CLASSES = 1_000_000, 100_000, 100
SCENARIOS = {
    "iid": Scenario(partition="iid", clients=CLIENTS),
    "dirichlet capped": Scenario(partition="dirichlet", clients=CLIENTS, min_client_size=1),
    "dirichlet uncapped, 40,000 clients": Scenario(
        partition="dirichlet", dirichlet_scheme="uncapped", clients=40_000, min_client_size=1
    ),
    "dirichlet clientwise": Scenario(
        partition="dirichlet", dirichlet_scheme="clientwise", clients=CLIENTS, min_client_size=1
    ),
    "creff_equal": Scenario(partition="creff_equal", clients=CLIENTS),
    "shards sorted": Scenario(partition="shards", shard_scheme="sorted", clients=CLIENTS),
    "shards deck": Scenario(partition="shards", shard_scheme="deck", clients=CLIENTS),
    "classes equal": Scenario(partition="classes_per_client", class_scheme="equal", clients=CLIENTS),
    "classes round robin": Scenario(partition="classes_per_client", class_scheme="round_robin", clients=CLIENTS),
    # ten samples for each of 100,000 clients out of a million: no draw gives everybody exactly ten
    "dirichlet uncapped, impossible": Scenario(partition="dirichlet", dirichlet_scheme="uncapped", clients=CLIENTS),
    "dirichlet capped, impossible": Scenario(partition="dirichlet", clients=CLIENTS),
}


def labels_only(samples: int, classes: int) -> Dataset:
    """A data set of blank images, every class as large; the labels are what partitions read."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples).remainder(classes)[torch.randperm(samples, generator=generator)]
    blank = TensorImages(torch.zeros(1, 3, 1, 1, dtype=torch.uint8).expand(samples, 3, 1, 1))
    test = Split(TensorImages(torch.zeros(classes, 3, 1, 1, dtype=torch.uint8)), torch.arange(classes))
    names = tuple(f"class {number}" for number in range(classes))
    return Dataset("labels", names, Split(blank, labels), test, "0" * 64)


def measure(name: str) -> str:
    """One line on the partition called ``name``."""
    dataset = labels_only(SAMPLES, CLASSES)
    build_federation(labels_only(1000, 10), SCENARIOS[name].model_copy(update={"clients": 10}), 0)  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    try:
        federation = build_federation(dataset, SCENARIOS[name], 0)
        said = f"{len(federation.clients):,} clients"
    except FedbenchError as error:
        said = f"refused: {error}"
    seconds = time.perf_counter() - started
    megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return f"{name:36s}{seconds:8.2f} s{megabytes:8.0f} MB   {said}"


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for chosen in sys.argv[1:] or SCENARIOS:
        with context.Pool(1) as pool:
            print(pool.apply(measure, (chosen,)), flush=True)
