"""Memory of clients that train at once: bytes a client, and bytes available."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbench.core.method.tasks import ClientTask
from fedbench.rounds.executors.gradients import ClosedForm, Vectorised
from fedbench.rounds.executors.stack import Stack, flat_of
from fedbench.rounds.metrics import size_in_bytes
from fedbench.toolkit.local_training import batches_of

MEMORY = 2 * 2**30
"""The approximate limit of bytes for clients that train at once on a CPU; a larger cohort is trained in parts."""


def bytes_of_a_client(gradients: Vectorised | ClosedForm, tasks: Sequence[ClientTask]) -> int:
    """The approximate bytes of one client: what autograd saves for it in a step, the step's samples and logits, the
    tables of its samples, and its weights, gradients and moments."""
    saved = []
    for clients in (tasks[:1], tasks[:2]):
        stack, seen = Stack(clients), dict[int, int]()

        def pack(tensor: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            gradients(stack, {name: value.clone() for name, value in stack.weights.items()}, stack.batch(0))
        saved.append(sum(seen.values()))
    stack = Stack(tasks[:1])
    step, classes = stack.samples(stack.batch(0)), max(t.shape[0] for t in tasks[0].received.values() if t.ndim)
    samples = sum(t.numel() * t.element_size() for t in flat_of(step)) + 12 * int(step["index"].numel()) * classes
    tables = 3 * 8 * sum(len(batch) for batch in batches_of(tasks[0]))
    return max(saved[1] - saved[0], 0) + samples + tables + 4 * size_in_bytes(tasks[0].received)


def budget(task: ClientTask) -> int:
    """Bytes for the clients who train at once: ``MEMORY``, or half of an accelerator's own."""
    device = next(iter(task.received.values())).device
    return torch.cuda.get_device_properties(device).total_memory // 2 if device.type == "cuda" else MEMORY
