"""All that outlives a round, in one place the harness can save and read back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedbench.errors import FedbenchError
from fedbench.files import replacing
from fedbench.types import Tensors

_FORMAT = "fedbench-state-1"
_SEPARATORS = {"weights": 1, "buffers": 1, "server": 2, "client": 3, "own": 2}
"""By the kind of tensor, the bars in its key: kind, then client, method and name as far as they apply."""


@dataclass
class RunState:
    """The run after ``round`` rounds: global tensors, and what methods keep on the server and on clients."""

    round: int
    weights: Tensors
    buffers: Tensors
    server: dict[str, Tensors] = field(default_factory=dict)
    """By method name."""
    clients: dict[int, dict[str, Tensors]] = field(default_factory=dict)
    """By client id, then method name."""
    own: dict[int, Tensors] = field(default_factory=dict)
    """The private tensors of clients that have taken part, by client id."""


def save_state(state: RunState, path: Path, run_id: str) -> None:
    """Write ``state`` as one safetensors file, atomically. ``run_id`` guards against resuming another run."""
    flat: dict[str, Tensor] = {}
    for name, tensor in state.weights.items():
        flat[f"weights|{name}"] = tensor
    for name, tensor in state.buffers.items():
        flat[f"buffers|{name}"] = tensor
    for method, tensors in state.server.items():
        flat |= {f"server|{method}|{name}": tensor for name, tensor in tensors.items()}
    for client, methods in state.clients.items():
        for method, tensors in methods.items():
            flat |= {f"client|{client}|{method}|{name}": tensor for name, tensor in tensors.items()}
    for client, tensors in state.own.items():
        flat |= {f"own|{client}|{name}": tensor for name, tensor in tensors.items()}
    wrong = [key for key in flat if key.count("|") != _SEPARATORS[key.partition("|")[0]]]
    if wrong:
        raise ValueError(f"tensor names of a run's state must not contain '|': {wrong[0]}")
    # safetensors refuses tensors that share memory, and torch views do
    flat = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in flat.items()}
    metadata = {"format": _FORMAT, "run": json.dumps({"round": state.round, "run_id": run_id})}
    with replacing(path, "run state", "choose another folder") as temporary:
        save_file(flat, temporary, metadata)


def load_state(path: Path, run_id: str, device: str = "cpu") -> RunState:
    """Read a saved state onto ``device``.

    Raises FedbenchError for a missing or damaged file, or the state of another run.
    """
    try:
        with safe_open(path, framework="pt", device=device) as file:
            metadata = file.metadata() or {}
            flat = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    except (OSError, SafetensorError) as error:
        raise FedbenchError(f"run state {str(path)!r} cannot be read: {error}; delete it and start anew.") from error
    if metadata.get("format") != _FORMAT:
        raise FedbenchError(f"{str(path)!r} is not a run state of this version; delete it and start the run anew.")
    saved = json.loads(metadata["run"])
    if saved["run_id"] != run_id:
        raise FedbenchError(f"{str(path)!r} belongs to run {saved['run_id']}, not {run_id}; use that run's own state.")
    state = RunState(saved["round"], {}, {})
    for key, tensor in flat.items():
        kind, *rest = key.split("|")
        if kind == "weights":
            state.weights[rest[0]] = tensor
        elif kind == "buffers":
            state.buffers[rest[0]] = tensor
        elif kind == "server":
            state.server.setdefault(rest[0], {})[rest[1]] = tensor
        elif kind == "own":
            state.own.setdefault(int(rest[0]), {})[rest[1]] = tensor
        else:
            state.clients.setdefault(int(rest[0]), {}).setdefault(rest[1], {})[rest[2]] = tensor
    return state
