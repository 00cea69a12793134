"""The network and the data as plain torch has them; every system but fedbench trains these."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tests.bench.workloads import Job

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
TEST_BATCH = 500


def network(job: Job, *, channels_last: bool = True) -> nn.Module:
    """The job's network, from its seed.

    With channels-last kernels, unless asked otherwise: one thread takes 1.2 times as long for the CNN's step without.
    """
    torch.manual_seed(job.seed)
    if job.network == "head":
        head = nn.Linear(512, job.classes)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head
    layers = [nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(64 * 8 * 8, 512), nn.ReLU(), nn.Linear(512, job.classes)]
    net = nn.Sequential(*layers)
    return net.to(memory_format=torch.channels_last) if channels_last else net


def as_inputs(values: np.ndarray) -> Tensor:
    """float32 tensors that the network takes: images normalised, features as they are."""
    tensor = torch.from_numpy(np.array(values))
    if tensor.dtype != torch.uint8:
        return tensor
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return tensor.float().div_(255).sub_(mean).div_(std)


def clients_data(data: Path) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels of every client, in memory."""
    # client by client from the file, so that the inputs of all are never held twice
    values, labels = np.load(data / "train_x.npy", mmap_mode="r"), np.load(data / "train_y.npy")
    return [(as_inputs(values[own]), torch.from_numpy(labels[own])) for own in np.load(data / "clients.npy")]


@torch.no_grad()
def accuracy(model: nn.Module, data: Path) -> float:
    """Per cent of the test samples."""
    model.eval()
    inputs = np.load(data / "test_x.npy", mmap_mode="r")
    labels = torch.from_numpy(np.load(data / "test_y.npy"))
    starts = range(0, len(labels), TEST_BATCH)
    predicted = [model(as_inputs(inputs[start : start + TEST_BATCH])).argmax(1) for start in starts]
    return 100 * (torch.cat(predicted) == labels).double().mean().item()
