"""The client of the Flower benchmark; a module of its own, since Ray's actors import it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.bench.systems.networks import clients_data, network
from tests.bench.workloads import Job

app = ClientApp()


@cache
def kept(job_file: Path, data: Path) -> tuple[Job, nn.Module, list[tuple[Tensor, Tensor]]]:
    """Job, network and the data of all clients, made by every actor at its first message: in round 1, the warm-up."""
    torch.set_num_threads(1)
    job = Job.read(job_file)
    return job, network(job), clients_data(data)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Local SGD from the received weights."""
    config = message.content["config"]
    job, model, clients = kept(Path(str(config["job"])), Path(str(config["data"])))
    inputs, labels = clients[int(context.node_config["partition-id"])]
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
