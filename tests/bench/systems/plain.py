"""FedAvg as a plain torch loop: one process, one thread, tensors in memory, no data loader."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.bench.systems.networks import accuracy, clients_data, network
from tests.bench.systems.report import Report, parser
from tests.bench.workloads import Job


def train_client(model: nn.Module, inputs: Tensor, labels: Tensor, job: Job) -> None:
    """Local SGD, in place."""
    optimiser = torch.optim.SGD(model.parameters(), job.lr)
    for _ in range(job.epochs):
        for index in torch.randperm(len(labels)).split(job.batch):
            loss = cross_entropy(model(inputs[index]), labels[index])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()


def train_round(model: nn.Module, cohort: list[tuple[Tensor, Tensor]], job: Job) -> None:
    """One round of FedAvg, in place: the mean of the clients' weights by their numbers of samples."""
    parameters = list(model.parameters())
    received = [value.detach().clone() for value in parameters]
    totals = [torch.zeros_like(value) for value in parameters]
    samples = sum(len(labels) for _, labels in cohort)
    for inputs, labels in cohort:
        with torch.no_grad():
            for value, start in zip(parameters, received, strict=True):
                value.copy_(start)
        train_client(model, inputs, labels, job)
        with torch.no_grad():
            for total, value in zip(totals, parameters, strict=True):
                total.add_(value, alpha=len(labels) / samples)
    with torch.no_grad():
        for value, total in zip(parameters, totals, strict=True):
            value.copy_(total)


def main() -> None:
    """Train, then measure the accuracy."""
    options = parser()
    options.add_argument("--default-layout", action="store_true", help="no channels-last kernels")
    given = options.parse_args()
    job, data, file = Job.read(given.job), given.data, given.report
    torch.set_num_threads(1)
    report = Report(version=torch.__version__)
    model, clients = network(job, channels_last=not given.default_layout), clients_data(data)
    rng = np.random.default_rng(job.seed)
    model.train()
    report.begin()
    for _ in range(job.rounds):
        started = time.perf_counter()
        cohort = [clients[client] for client in rng.choice(job.clients, job.cohort, replace=False)]
        train_round(model, cohort, job)
        report.rounds.append(time.perf_counter() - started)
    report.accuracy = accuracy(model, data)
    report.write(file)


if __name__ == "__main__":
    main()
