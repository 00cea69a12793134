"""Everything that outlives a round, in one object that can be saved and read back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedbench.core.errors import FedbenchError, MethodFault
from fedbench.core.files import regular, replacing
from fedbench.core.types import Tensors

_FORMAT = "fedbench-state-3"
_SEPARATORS = {"weights": 1, "buffers": 1, "server": 2, "client": 3, "own": 2, "beside": 1}
"""Number of bars in a tensor's key by its kind. A key is kind, client, method and name, as far as they apply."""


@dataclass(frozen=True)
class ClientState:
    """One client's state: tensors by method name, and its private tensors; None if it has not taken part."""

    methods: dict[str, Tensors]
    own: Tensors | None


@dataclass
class RunState:
    """The run after ``round`` rounds: global tensors, and what methods keep on the server and on clients."""

    round: int
    weights: Tensors
    buffers: Tensors
    server: dict[str, Tensors] = field(default_factory=dict)
    """The methods' tensors on the server, by method name."""
    clients: MutableMapping[int, dict[str, Tensors]] = field(default_factory=dict)
    """The methods' tensors on clients, by client id, then method name."""
    own: MutableMapping[int, Tensors] = field(default_factory=dict)
    """The private tensors of clients that have taken part, by client id."""

    def kept_by(self, client: int) -> ClientState:
        """A snapshot of the state of ``client``; later changes of this state or its mappings do not affect it."""
        methods = {name: dict(tensors) for name, tensors in self.clients.get(client, {}).items()}
        return ClientState(methods, None if client not in self.own else dict(self.own[client]))


@dataclass(frozen=True)
class Saved:
    """The content of a file written by `save_state`."""

    run_id: str
    state: RunState
    beside: Tensors
    progress: Mapping[str, Any]
    """Further content, as read from JSON."""
    sha256: str
    """The checksum over the whole content."""


def save_state(
    state: RunState,
    path: Path,
    run_id: str,
    *,
    beside: Tensors | None = None,
    progress: Mapping[str, Any] | None = None,
) -> str:
    """Write ``state`` atomically as one safetensors file, and return the checksum of its content.

    ``run_id`` guards against resuming another run; ``beside`` (tensors) and ``progress`` (JSON) are read back
    unchanged. Raises FedbenchError if the file can't be written.
    """
    flat = {f"beside|{name}": tensor for name, tensor in (beside or {}).items()}
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
        raise MethodFault(f"the tensor {wrong[0]!r} of the run's state can't be saved: names must not contain '|'.")
    # what the file does not keep, but methods meet: names in their order, those that hold nothing, how tensors lie
    facts = json.dumps(
        {
            "round": state.round,
            "run_id": run_id,
            "progress": progress or {},
            "names": list(flat),
            "server": list(state.server),
            "clients": [[client, list(methods)] for client, methods in state.clients.items()],
            "own": list(state.own),
            "strides": {name: tensor.stride() for name, tensor in flat.items() if _order(tensor)},
            "shapes": {name: tensor.shape for name, tensor in flat.items() if _order(tensor)},
        }
    )
    flat = _written(flat)
    sha256 = _checksum(flat, facts)
    with replacing(path, "run state", "choose another folder") as temporary:
        save_file(flat, temporary, {"format": _FORMAT, "run": facts, "sha256": sha256})
    return sha256


def load_state(path: Path, run_id: str, device: str = "cpu") -> RunState:
    """Read a saved state onto ``device``.

    Raises FedbenchError for a missing or damaged file, or the state of another run.
    """
    saved = read_saved(path, device)
    if saved.run_id != run_id:
        raise FedbenchError(f"{str(path)!r} belongs to run {saved.run_id}, not {run_id}; use that run's own state.")
    return saved.state


def read_saved(path: Path, device: str = "cpu", *, is_checked: bool = True) -> Saved:
    """The content of a file of `save_state`, with tensors on ``device``; FedbenchError for a missing or damaged file.

    On the CPU tensors use the memory of the file, which is read on demand. Unless ``is_checked`` the checksum is not
    compared.
    """
    metadata, flat = _opened(path, with_tensors=True)
    if metadata.get("format") != _FORMAT:
        raise FedbenchError(f"{str(path)!r} is not a run state of this version; delete it and start the run anew.")
    if is_checked and metadata.get("sha256") != _checksum(flat, metadata.get("run", "")):
        raise FedbenchError(f"run state {str(path)!r} is damaged; delete it and start the run anew.")
    facts = json.loads(metadata["run"])
    state, beside = RunState(facts["round"], {}, {}), Tensors()
    state.server = {method: {} for method in facts["server"]}
    state.clients = {client: {method: {} for method in methods} for client, methods in facts["clients"]}
    state.own = {client: {} for client in facts["own"]}
    for key in facts["names"]:
        kind, *rest = key.split("|")
        tensor = flat[key].to(device)
        # sums over a tensor are taken in the order in which it lies
        if key in facts["shapes"]:
            tensor = tensor.as_strided(facts["shapes"][key], facts["strides"][key])
        if kind == "weights":
            state.weights[rest[0]] = tensor
        elif kind == "buffers":
            state.buffers[rest[0]] = tensor
        elif kind == "beside":
            beside[rest[0]] = tensor
        elif kind == "server":
            state.server[rest[0]][rest[1]] = tensor
        elif kind == "own":
            state.own[int(rest[0])][rest[1]] = tensor
        else:
            state.clients[int(rest[0])][rest[1]][rest[2]] = tensor
    return Saved(facts["run_id"], state, beside, facts["progress"], metadata["sha256"])


def read_facts(path: Path) -> dict[str, Any]:
    """``run_id``, ``round`` and ``progress`` of a file of `save_state`, without reading or checking its tensors.

    Raises FedbenchError for a missing or damaged file.
    """
    metadata, _ = _opened(path, with_tensors=False)
    if metadata.get("format") != _FORMAT:
        raise FedbenchError(f"{str(path)!r} is not a run state of this version; delete it and start the run anew.")
    return cast("dict[str, Any]", json.loads(metadata["run"]))


def _opened(path: Path, *, with_tensors: bool) -> tuple[Mapping[str, str], Tensors]:
    try:
        regular(path)
        with safe_open(path, framework="pt") as file:
            names = file.keys() if with_tensors else ()
            return file.metadata() or {}, {key: file.get_tensor(key) for key in names}
    except (OSError, SafetensorError) as error:
        raise FedbenchError(f"run state {str(path)!r} cannot be read: {error}; delete it and start anew.") from error


def _order(tensor: Tensor) -> list[int]:
    """The axes in the order in which the tensor fills its memory (kernels in channels-last); empty for the usual
    order."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: (-strides[axis], -tensor.shape[axis]))
    plain = torch.empty(tensor.shape, device="meta").stride()
    return order if strides != plain and tensor.permute(order).is_contiguous() else []


def _written(flat: Tensors) -> Tensors:
    """The tensors on the CPU in their memory order. Tensors that share memory, which safetensors refuses, are
    copied."""
    written: Tensors = {}
    seen: set[int] = set()
    for name, tensor in flat.items():
        order = _order(tensor)
        tensor = tensor.detach().cpu()
        tensor = (tensor.permute(order) if order else tensor).contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.numel() * tensor.element_size() or storage.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        written[name] = tensor
    return written


def _checksum(flat: Tensors, facts: str) -> str:
    """sha256 over names, types, shapes and bytes of all tensors, and their description."""
    digest = hashlib.sha256(facts.encode())
    for name, tensor in sorted(flat.items()):
        digest.update(f"|{name} {tensor.dtype} {tuple(tensor.shape)}|".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def private_tensors(state: RunState) -> Tensors:
    """The clients' private tensors, by client and name."""
    return {f"own {client} {name}": t for client, own in state.own.items() for name, t in own.items()}


def all_tensors(state: RunState) -> Tensors:
    """All tensors of a state as float64, without empty ones: of the model, the server and the clients."""
    kept = {f"server {method}": tensors for method, tensors in state.server.items()}
    kept |= {f"client {k} {method}": tensors for k, own in state.clients.items() for method, tensors in own.items()}
    named = {f"{where} {name}": t for where, tensors in kept.items() for name, t in tensors.items()}
    named |= {**state.weights, **state.buffers, **private_tensors(state)}
    return {name: t.double() for name, t in named.items() if t.numel()}
