"""SCAFFOLD on ResNet-18 by fedbench, a checkpoint after every round: what clients keep grows with their number.

A round's seconds are from one's end to the next one's: the checkpoint, and what goes to files, are in them.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import fedbench
from fedbench.core.method.hooks import hookimpl
from fedbench.core.spec import RunSpec, Training
from fedbench.runs.checkpoint import Checkpointing
from fedbench.runs.job import run_rounds
from fedbench.runs.prepare import Loaded
from fedbench.scenarios import Scenario
from tests.bench.systems.fedbench_runs import dataset, settings
from tests.bench.systems.report import Report, parser
from tests.bench.workloads import Job


class Written:
    """A listener that adds up the files of the run's folder that are new after a round."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: set[str] = set()
        self.bytes: list[int] = []

    @hookimpl
    def round_finished(self) -> None:
        """What the round before has left: this one's checkpoint is about to be written."""
        files = {file.name: file.stat().st_size for file in self._folder.glob("*.safetensors")}
        self.bytes.append(sum(size for name, size in files.items() if name not in self._known))
        self._known |= files.keys()


def main() -> None:
    """Train, and say what checkpoints cost."""
    options = parser()
    options.add_argument("--state-memory", type=float, default=float("inf"), help="GB")
    given = options.parse_args()
    job = Job.read(given.job)
    spec = RunSpec(
        dataset="bench",
        scenario=Scenario(clients=job.clients, participation=job.cohort / job.clients, partition="iid"),
        backbone="resnet18",
        method="scaffold",
        training=Training(
            rounds=job.rounds,
            local_epochs=job.epochs,
            batch_size=job.batch,
            lr=job.lr,
            momentum=0.0,
            eval_every=job.rounds,
        ),
        seed=job.seed,
    )
    report = Report(version=fedbench.__version__)
    with tempfile.TemporaryDirectory(dir=given.report.parent) as folder:
        kept = Checkpointing(Path(folder), defaultdict(str), every=1, state_memory=given.state_memory * 1e9)
        where = replace(settings(Path(folder), "auto", 1), checkpoints=kept)
        written = Written(kept.folder / spec.run_id)
        steps = run_rounds(spec, where, [written], Loaded(dataset=dataset(job, given.data)))
        next(steps)
        report.begin()
        began = time.perf_counter()
        for record in steps:
            report.rounds.append(time.perf_counter() - began)
            began = time.perf_counter()
            report.accuracy = record.metrics.get("global_accuracy")
            update = record.bytes_up // job.cohort
    # half of an update is the change of the control, which is as large as what the client keeps, and as the model
    per_round = sorted(written.bytes[2:])[len(written.bytes) // 2 - 1]
    state = (job.cohort + 1) * update / 2
    report.note = f"a checkpoint writes {per_round / 1e6:.0f} MB, {per_round / state:.2f} of cohort's state and model"
    report.write(given.report)


if __name__ == "__main__":
    main()
