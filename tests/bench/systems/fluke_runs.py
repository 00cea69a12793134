"""FedAvg by fluke: its own clients, server and fast data loader, everything in memory."""

from __future__ import annotations

import time
from collections.abc import Collection
from importlib.metadata import version
from typing import Any

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.utils import FederationObserver, ServerObserver

from tests.bench.systems.networks import accuracy, clients_data, network
from tests.bench.systems.report import Report, asked


class Clock(ServerObserver, FederationObserver):
    """Takes the time of every round, from what fluke announces."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.started = 0.0

    def start_round(self, round: int, global_model: Any) -> None:
        """A round begins."""
        if round == 1:
            self.report.begin()
        self.started = time.perf_counter()

    def end_round(self, round: int) -> None:
        """A round is done."""
        self.report.rounds.append(time.perf_counter() - self.started)

    def selected_clients(self, round: int, clients: Collection[Any]) -> None:
        """Nothing to do."""


def main() -> None:
    """Train, then measure the accuracy."""
    job, data, file = asked()
    torch.set_num_threads(1)
    report = Report(version=version("fluke-fl"))
    environment = FlukeENV()
    environment.set_seed(job.seed)
    environment.set_eval_cfg(server=False)
    environment.set_evaluator(ClassificationEval(1, job.classes))
    loaders = [
        FastDataLoader(*own, num_labels=job.classes, batch_size=job.batch, shuffle=True) for own in clients_data(data)
    ]
    splitter = DataSplitter(DummyDataContainer(loaders, [None] * job.clients, None, job.classes))
    client = DDict(
        batch_size=job.batch,
        local_epochs=job.epochs,
        loss=torch.nn.CrossEntropyLoss,
        optimizer=DDict(name="SGD", lr=job.lr),
        scheduler=DDict(name="StepLR", step_size=1, gamma=1),
    )
    model = network(job)
    algorithm = FedAVG(job.clients, splitter, DDict(model=model, client=client, server=DDict(weighted=True)))
    algorithm.set_callbacks(Clock(report))
    algorithm.run(job.rounds, job.cohort / job.clients)
    report.accuracy = accuracy(algorithm.server.model, data)
    report.write(file)


if __name__ == "__main__":
    main()
