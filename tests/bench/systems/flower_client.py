"""The client of the Flower benchmark; a module of its own, since Ray's actors import it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.bench.systems.networks import as_inputs, network
from tests.bench.workloads import Job

app = ClientApp()


@cache
def kept(job_file: Path) -> tuple[Job, nn.Module]:
    """Job and network, once in every actor."""
    torch.set_num_threads(1)
    job = Job.read(job_file)
    return job, network(job)


@cache
def own_data(data: Path, client: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a client, read when it first takes part in an actor."""
    index = np.load(data / "clients.npy")[client]
    inputs = as_inputs(np.load(data / "train_x.npy", mmap_mode="r")[index])
    return inputs, torch.from_numpy(np.load(data / "train_y.npy")[index])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Local SGD from the received weights."""
    config = message.content["config"]
    job, model = kept(Path(str(config["job"])))
    inputs, labels = own_data(Path(str(config["data"])), int(context.node_config["partition-id"]))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), job.lr)
    for _ in range(job.epochs):
        for index in torch.randperm(len(labels)).split(job.batch):
            loss = cross_entropy(model(inputs[index]), labels[index])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(labels)})}
    return Message(content=RecordDict(content), reply_to=message)
