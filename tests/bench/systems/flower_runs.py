"""FedAvg by Flower: its simulation engine with the Ray backend, one core a client, as many actors as cores."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from importlib.metadata import version

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from tests.bench.systems.flower_client import app as client_app
from tests.bench.systems.networks import accuracy, network
from tests.bench.systems.report import Report, asked


class Timed(FedAvg):
    """Flower's FedAvg, which takes the time from sampling the clients to the aggregated weights."""

    def __init__(self, report: Report, fraction: float) -> None:
        super().__init__(fraction_train=fraction, fraction_evaluate=0.0)
        self.report = report
        self.started = 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A round begins."""
        if server_round == 1:
            self.report.begin()
        self.started = time.perf_counter()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """A round is done."""
        aggregated = super().aggregate_train(server_round, replies)
        self.report.rounds.append(time.perf_counter() - self.started)
        return aggregated


def main() -> None:
    """Train, then measure the accuracy."""
    job, data, file = asked()
    torch.set_num_threads(1)
    report = Report(version=version("flwr"))
    model = network(job)
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        told = ConfigRecord({"job": str(file.with_name("job.json").resolve()), "data": str(data.resolve())})
        result = Timed(report, job.cohort / job.clients).start(
            grid, ArrayRecord(model.state_dict()), num_rounds=job.rounds, train_config=told
        )
        model.load_state_dict(result.arrays.to_torch_state_dict())

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    run_simulation(
        server_app,
        client_app,
        num_supernodes=job.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": cores},
        },
    )
    report.accuracy = accuracy(model, data)
    report.write(file)


if __name__ == "__main__":
    main()
