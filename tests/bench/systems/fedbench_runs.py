"""FedAvg by fedbench, on the way every run takes: `prepare`, then `train_round` round by round."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import fedbench
from fedbench.core.federation import Dataset, Split, TensorImages
from fedbench.core.spec import RunSpec, Training
from fedbench.models.cnn.backbone import CnnBackbone
from fedbench.models.inputs import PixelTransform
from fedbench.rounds.executors import ExecutorName
from fedbench.rounds.loop import evaluate, start, train_round
from fedbench.rounds.run import Run
from fedbench.runs.prepare import Settings, prepare
from fedbench.scenarios import Scenario
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import load_suite
from tests.bench.systems.report import Report, parser
from tests.bench.workloads import Job

PLUGIN = Path(__file__).with_name("bench_head.py").resolve()


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """Features in the place of images."""

    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Tensor) -> Tensor:
        """float32 (b, d)."""
        return self.rows[indices]

    def content_hash(self) -> str:
        """Of the values."""
        return TensorImages(self.rows).content_hash()


def settings(folder: Path, executor: ExecutorName, cores: int) -> Settings:
    """The one place that says how fedbench executes a run."""
    return Settings(folder, folder / "cache", (PLUGIN,), threads=1, cores=cores, executor=executor)


def dataset(job: Job, data: Path) -> Dataset:
    """The job's data as fedbench takes them."""
    kind = FeatureRows if job.network == "head" else TensorImages

    def split(name: str) -> Split:
        values, labels = np.load(data / f"{name}_x.npy"), np.load(data / f"{name}_y.npy")
        return Split(kind(torch.from_numpy(values)), torch.from_numpy(labels))

    names = tuple(f"class {number}" for number in range(job.classes))
    return Dataset("bench", names, split("train"), split("test"), content_hash=data.name)


def run_of(job: Job, data: Path, where: Settings, device: str = "cpu", **training: object) -> Run:
    """The job as a run of fedbench; ``training`` is what it has besides."""
    is_cnn, shared = job.network == "cnn", job.shared_samples
    # with shared samples the method deals the clients; the share that takes part is of those
    scenario = Scenario(clients=1 if shared else job.clients, participation=job.cohort / job.clients)
    budget = {"rounds": job.rounds, "local_epochs": job.epochs, "batch_size": job.batch, "lr": job.lr, "momentum": 0.0}
    spec = RunSpec(
        dataset="bench",
        scenario=scenario,
        backbone="fedavg-cnn" if is_cnn else "features",
        method="fedavg" if is_cnn else "bench-head",
        params={"bench-head": {"clients": job.clients, "samples": job.samples}} if shared else {},
        training=Training(**{**budget, **training}),
        seed=job.seed,
        device=device,
    )
    unit = PixelTransform((0.0,) * 3, (1.0,) * 3)
    features = None if is_cnn else CnnBackbone("features", torch.nn.Identity(), 512, unit)
    return prepare(spec, where, dataset=dataset(job, data), backbone=features)


def promptfl(where: Settings, partition: str) -> Run:
    """The row of PromptFL of the suite longtail, its first seed, its samples dealt by ``partition``."""
    spec, *_ = expand(load_suite("longtail"), Overrides(methods=("promptfl",), sets=(("partition", partition),)))
    return prepare(spec, where)


def main() -> None:
    """Train, then measure the accuracy."""
    options = parser()
    options.add_argument("--executor", default="auto")
    options.add_argument("--cores", type=int, default=1)
    options.add_argument("--cache", type=Path, required=True, help="folder of fedbench's caches")
    options.add_argument("--partition", default="iid")
    given = options.parse_args()
    where = settings(given.cache, given.executor, given.cores)
    run = promptfl(where, given.partition) if given.job is None else run_of(Job.read(given.job), given.data, where)
    report = Report(version=fedbench.__version__)
    state = run.initial_state()
    start(run, state)
    report.begin()
    for _ in range(run.spec.training.rounds):
        state, record = train_round(run, state)
        report.rounds.append(record.seconds)
        report.note = record.executor
    report.accuracy = evaluate(run, state)[0]["global_accuracy"]
    report.write(given.report)


if __name__ == "__main__":
    main()
