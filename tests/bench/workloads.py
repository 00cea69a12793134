"""The workloads: how large they are, and the synthetic data that every system trains on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

CHUNK = 5_000
"""Samples made at once."""


@dataclass(frozen=True)
class Job:
    """One FedAvg training that any system can carry out; sent to it as JSON."""

    network: Literal["cnn", "head", "resnet18"]
    classes: int
    clients: int
    samples: int
    """Of one client."""
    cohort: int
    batch: int
    rounds: int
    train: int = 50_000
    test: int = 10_000
    epochs: int = 1
    lr: float = 0.1
    seed: int = 0
    shared_samples: bool = False
    """Every client draws its samples from all of them, so that clients may outnumber samples."""

    def write(self, file: Path) -> None:
        """As JSON."""
        file.write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, file: Path) -> Job:
        """What `write` wrote."""
        return cls(**json.loads(file.read_text("utf-8")))


CNN = Job(network="cnn", classes=10, clients=100, samples=500, cohort=10, batch=50, rounds=10)
HEAD = Job(network="head", classes=100, clients=100, samples=500, cohort=10, batch=32, rounds=50)
PFL = Job(network="cnn", classes=10, clients=1000, samples=50, cohort=50, batch=10, rounds=1500)
"""The CIFAR-10 workload of pfl's own benchmark."""
TINY_HEAD = Job(network="head", classes=5, clients=10, samples=40, cohort=5, batch=10, rounds=8, train=400, test=400)


def many_clients(clients: int) -> Job:
    """W2's head with so many clients; the data and the work of a round don't depend on their number."""
    return Job(
        network="head", classes=100, clients=clients, samples=50, cohort=100, batch=32, rounds=30, shared_samples=True
    )


def keeping_clients(clients: int) -> Job:
    """SCAFFOLD on ResNet-18, of which every client keeps 45 MB."""
    sizes = {"samples": 32, "train": 32 * clients, "test": 500}
    return Job(network="resnet18", classes=10, clients=clients, cohort=10, batch=32, rounds=10, lr=0.05, **sizes)


def make_data(job: Job, folder: Path) -> Path:
    """Class means plus noise, from the job's seed, as ``{train,test}_{x,y}.npy`` in a folder of its own; its path.

    Images are uint8 (n, 3, 32, 32), features float32 (n, 512). ``clients.npy`` (clients, samples) says who holds what;
    there is none where clients share samples.
    """
    # every number that the content depends on, so that only jobs with the same one share a folder
    dealt = "shared" if job.shared_samples else f"{job.clients}x{job.samples}"
    target = folder / f"{job.network}-{job.classes}-{job.train}-{job.test}-{dealt}-{job.seed}"
    if not target.exists():
        target.mkdir(parents=True)
        rng = np.random.default_rng(job.seed)
        make, shape = (_features, (512,)) if job.network == "head" else (_images, (3, 8, 8))
        means = rng.standard_normal((job.classes, *shape), np.float32)
        for split, count in (("train", job.train), ("test", job.test)):
            labels = rng.integers(0, job.classes, count)
            parts = [make(means[labels[start : start + CHUNK]], rng) for start in range(0, count, CHUNK)]
            np.save(target / f"{split}_x.npy", np.concatenate(parts))
            np.save(target / f"{split}_y.npy", labels)
        if not job.shared_samples:
            order = rng.permutation(job.train)[: job.clients * job.samples]
            np.save(target / "clients.npy", order.reshape(job.clients, job.samples))
    return target


def _images(means: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    patterns = means.repeat(4, axis=2).repeat(4, axis=3)
    noise = rng.standard_normal(patterns.shape, np.float32)
    return np.clip(128 + 8 * patterns + 64 * noise, 0, 255).astype(np.uint8)


def _features(means: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    # about as long as six: of unit length the head would hardly move at this learning rate
    return (0.035 * means + 0.25 * rng.standard_normal(means.shape, np.float32)).astype(np.float32)
