"""FedAvg by pfl: its simulated backend in one process, users' tensors in memory."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.bench.systems.networks import accuracy, clients_data, network
from tests.bench.systems.report import Report, asked


class Network(nn.Module):
    """The job's network with the two methods that pfl calls."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """What is minimised."""
        return cross_entropy(self.net(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        """None, so that the evaluation of the first iteration, which pfl always does, costs nothing."""
        return {}


class Clock(TrainingProcessCallback):
    """Takes the time of every central iteration."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.started = 0.0

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Round 1 begins."""
        self.report.begin()
        self.started = time.perf_counter()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """A round is done."""
        now = time.perf_counter()
        self.report.rounds.append(now - self.started)
        self.started = now
        return False, Metrics()


def main() -> None:
    """Train, then measure the accuracy."""
    job, data, file = asked()
    torch.set_num_threads(1)
    np.random.seed(job.seed)
    report = Report(version=version("pfl"))
    users = {str(number): own for number, own in enumerate(clients_data(data))}
    federation = FederatedDataset(
        lambda user: PyTorchTensorDataset(users[user], user_id=user), get_user_sampler("random", list(users))
    )
    net = Network(network(job)).train()
    model = PyTorchModel(
        net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), 1.0)
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=job.rounds,
            train_cohort_size=job.cohort,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=federation, val_data=federation),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_batch_size=job.batch, local_num_epochs=job.epochs, local_learning_rate=job.lr
        ),
        callbacks=[Clock(report)],
    )
    report.accuracy = accuracy(net.net, data)
    report.write(file)


if __name__ == "__main__":
    main()
