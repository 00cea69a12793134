"""What runs share and no method may change: torch's switches for a whole process, frozen weights, data loaded once.

Features go into a cache that all methods read, under a name that tells of images and weights only. A method that
changes what they are computed with is refused (`Untouched`).

Runs whose plug-ins all come with fedbench share a process (`fedbench.runs.engines.worker`). Before each of them random
generators and warning filters are set back. After each, torch's switches, the environment and the tensors that are kept
for other runs are compared with what they were (`Traces`). A difference ends the process.
"""

from __future__ import annotations

import gc
import os
import random
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.core.arithmetic import float32_products
from fedbench.core.errors import MethodFault
from fedbench.core.types import FrozenEncoder
from fedbench.models.clip.backbone import ClipBackbone, digest_of_weights
from fedbench.models.cnn.pretrained import PretrainedNetwork

_FROZEN = (ClipBackbone, PretrainedNetwork)


def switches() -> dict[str, object]:
    """What any code of a process can set for all the rest, by what it is called in messages."""
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    kinds = [
        getattr(place, name, None) for place in (mkldnn, torch.backends.cuda, cudnn) for name in ("matmul", "conv")
    ]
    places = [torch.backends, mkldnn, cudnn, *kinds]
    return {
        "torch.set_default_dtype": torch.get_default_dtype(),
        "torch.set_default_device": torch.get_default_device(),
        "torch.set_grad_enabled": torch.is_grad_enabled(),
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "torch.autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "torch.backends.mkldnn": (mkldnn.enabled, mkldnn.deterministic),
        "torch.backends.cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        "torch.set_float32_matmul_precision": _read(torch.get_float32_matmul_precision),
        "torch.backends.*.fp32_precision": [_read(partial(getattr, place, "fp32_precision", "")) for place in places],
        "torch.use_deterministic_algorithms": torch.get_deterministic_debug_mode(),
        "torch.set_num_threads": torch.get_num_threads(),
    }


def _read(switch: Callable[[], object]) -> object:
    """The value of a switch; where newer and older names of one switch contradict each other, torch's complaint."""
    try:
        return switch()
    except RuntimeError as error:
        return str(error)


class Untouched:
    """The `switches`, as they were before any code of a method ran, and a backbone's weights."""

    def __init__(self, who: str) -> None:
        """``who`` is to blame for what changes."""
        self._who = who
        self._switches = switches()
        self._weights: nn.Module | None = None
        self._marks: list[tuple[Tensor, int, int]] = []

    def keep(self, module: nn.Module) -> None:
        """Note the weights of the backbone's ``module``."""
        self._weights, self._marks = module, _marks(module)

    def require(self) -> None:
        """Raise MethodFault where a switch or the weights are not what they were; cheap."""
        now = switches()
        changed = [name for name, value in self._switches.items() if now[name] != value]
        if changed:
            raise MethodFault(
                f"{self._who} changes what {changed[0]} sets, and features are encoded that other methods read as "
                "well; set it inside the hook that needs it, and set it back before the hook returns."
            )
        after = [] if self._weights is None else _marks(self._weights)
        same = [a is b and rest == others for (a, *rest), (b, *others) in zip(self._marks, after, strict=False)]
        if len(after) != len(self._marks) or not all(same):
            raise MethodFault(self._weights_text("the backbone"))

    def require_modes(self, encoder: FrozenEncoder) -> None:
        """Raise MethodFault where the ``encoder`` is in training mode or has hooks; cheap."""
        backbone = getattr(encoder, "backbone", None)
        if isinstance(backbone, _FROZEN) and computes_otherwise(backbone.module):
            raise MethodFault(
                f"{self._who} puts {backbone.name} into training mode or adds hooks to it, and features are encoded "
                "that other methods read as well; change a copy (copy.deepcopy)."
            )

    def require_weights(self, encoder: FrozenEncoder) -> None:
        """Raise MethodFault where the ``encoder``'s weights are not those of its key; reads all of them."""
        backbone = getattr(encoder, "backbone", None)
        if isinstance(backbone, _FROZEN) and backbone.weights_hash != digest_of_weights(backbone.module):
            raise MethodFault(self._weights_text(backbone.name))

    def _weights_text(self, whose: str) -> str:
        return (
            f"{self._who} changes the weights of {whose} in place, and features are encoded that other methods read "
            "as well; change a copy (copy.deepcopy). In one process with others (--engine in-process) it may have been "
            "a row before it."
        )


def _marks(module: nn.Module) -> list[tuple[Tensor, int, int]]:
    """Each tensor, how often it was changed, and where its values are; changes through ``.data`` are not counted."""
    tensors = list(module.state_dict(keep_vars=True).values())
    return [(tensor, tensor._version, tensor.data_ptr()) for tensor in tensors]


def computes_otherwise(module: nn.Module) -> bool:
    """Whether a part of a frozen encoder is in training mode, or has hooks or a forward pass of somebody's own."""
    return any(
        part.training or part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part)
        for part in module.modules()
    )


_SAMPLE = 256
"""Values of a kept tensor that are compared."""
_ATOMS = (type, types.ModuleType, types.FunctionType, types.CodeType, types.FrameType, types.MethodType, property)
"""What a search for tensors does not enter."""


class Traces:
    """What this process was like before a run, and whether it still is."""

    def __init__(self) -> None:
        self._generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self._filters = list(warnings.filters)
        self._state: Mapping[str, object] = {}
        self._kept: list[object] = []
        self._tensors: list[tuple[Tensor, int, int, Tensor]] = []

    def begin(self, kept: Iterable[object]) -> None:
        """A run begins, which reads what is ``kept`` for others."""
        random.setstate(self._generators[0])
        np.random.set_state(self._generators[1])
        torch.set_rng_state(self._generators[2])
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(torch.initial_seed())
        if torch.backends.mps.is_available():
            torch.mps.manual_seed(torch.initial_seed())
        warnings.filters[:] = self._filters  # type: ignore[index]
        self._kept = [thing for thing in kept if thing is not None]
        with float32_products("float32"):
            pass  # torch has two names for its default, and now has the one that a run leaves
        self._state = _state()
        self._tensors = [(t, t._version, t.data_ptr(), _sample(t)) for t in _tensors_of(self._kept)]

    def changed(self) -> str:
        """What the run has changed for those after it, in words; "" where nothing."""
        try:
            now = _state()
            for name, value in self._state.items():
                if now[name] != value:
                    return name
            for tensor, version, where, sample in self._tensors:
                if (tensor._version, tensor.data_ptr()) != (version, where) or not torch.equal(_sample(tensor), sample):
                    return "a tensor that other runs read"
        except Exception as error:  # the switches that it left may forbid any computation
            return f"something that can't be compared ({type(error).__name__})"
        modules = (getattr(thing, "module", None) for thing in self._kept)
        if any(isinstance(module, nn.Module) and computes_otherwise(module) for module in modules):
            return "a network that other runs read"
        return ""


def _state() -> Mapping[str, object]:
    return {**switches(), "environment": dict(os.environ), "current folder": os.getcwd(), "numpy.seterr": np.geterr()}


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(len(flat) // _SAMPLE, 1)].clone()


def _tensors_of(roots: Iterable[object]) -> list[Tensor]:
    seen: set[int] = set()
    tensors: list[Tensor] = []
    waiting = list(roots)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, _ATOMS):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            tensors.append(thing)
        else:
            waiting += filter(gc.is_tracked, gc.get_referents(thing))
    return tensors
