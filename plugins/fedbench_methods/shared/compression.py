"""Blocks of compressed uploads: a client's change as the server decodes it, and the error that the client keeps."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from fedbench.api import ClientTask, Method, Tensors, Update, hookimpl

P = TypeVar("P")


class Compressor(Method[P]):
    """Encodes changes y_k − x of a client's weights, tensor by tensor; a tensor that did not change is not sent.

    With `feedback` a client adds what was lost of its last change to the next one it sends (Karimireddy et al., "Error
    Feedback Fixes SignSGD", ICML 2019): p = y − x + e, it sends C(p), and keeps e = p − C(p).
    """

    requires = ("sent_weights",)
    feedback: ClassVar[bool] = True

    @abstractmethod
    def encoded(self, name: str, change: Tensor, kept: Tensors, draws: torch.Generator) -> tuple[Tensor, int, Tensors]:
        """What is decoded of a ``change`` of any shape, the bytes of its message, and what is kept beside the error.

        ``kept`` is what was kept of this tensor last time.
        """

    @hookimpl
    def upload(self, task: ClientTask, update: Update) -> Update:
        """x + C(p); the error is kept for the client's next round."""
        before, draws = task.state.get(self.name, {}), task.generator(self.name)
        weights: dict[str, Tensor] = {}
        kept: dict[str, Tensor] = {}
        size = 0
        for name, y in sorted(update.weights.items()):
            own = {key.removeprefix(f"{name}/"): value for key, value in before.items() if key.startswith(f"{name}/")}
            if torch.equal(y, task.received[name]):  # it was not trained in this round, so nothing is sent
                weights[name] = y
                kept |= {f"{name}/{key}": value for key, value in own.items()}
                continue
            change = y - task.received[name]
            change = change + own["error"] if "error" in own else change
            decoded, count, further = self.encoded(name, change, own, draws)
            further = {**further, "error": change - decoded} if self.feedback and decoded is not change else further
            kept |= {f"{name}/{key}": value for key, value in further.items()}
            weights[name] = task.received[name] + decoded
            size += count
        if kept:
            task.state[self.name] = kept
        return replace(update, weights=weights, encoded=size)
