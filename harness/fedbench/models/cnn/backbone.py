"""CNN backbones that are trained (`cnn.pretrained` fills them), and the model a body makes with a linear head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fedbench.core.errors import FedbenchError
from fedbench.core.randomness import torch_generator
from fedbench.core.types import Backbone, ForwardPass, Outputs, Tensors
from fedbench.kinds.kinds import BackboneRequest
from fedbench.models.cnn.nets import build_body
from fedbench.models.inputs import PixelTransform
from fedbench.models.names import BackboneName
from fedbench.models.per_thread import per_thread

CIFAR_STATISTICS = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
"""Mean and deviation by channel of CIFAR-10 and CIFAR-100 in the CReFF family."""
IMAGENET_STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# Below these sizes a convolution or pool of the network has nothing left to read.
_SMALLEST = {"resnet8": 8, "convnet": 16, "fedavg-cnn": 4, "alexnet": 63, "vgg11": 32, "resnet18": 32, "resnet50": 32}

_OF_IMAGENET = ("alexnet", "resnet18", "resnet50")
"""Families made for images of 224 px; the others are made for 32 px. All take other sizes too."""


@dataclass(frozen=True, eq=False)
class CnnBackbone:
    """A body to be trained: ``module`` maps the float batch that ``transform`` makes to features (b, feature_dim)."""

    name: str
    module: nn.Module
    feature_dim: int
    transform: PixelTransform
    is_pretrained: bool = False
    weights_hash: str = ""


@contextmanager
def default_generator_from(seed: int, purpose: str) -> Iterator[None]:
    """Inside the block torch's default CPU generator follows a child seed; afterwards its state is restored."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the accelerators' generators too.
        torch.default_generator.manual_seed(torch_generator(seed, purpose).initial_seed())
        yield


def image_size(name: BackboneName, request: BackboneRequest) -> int:
    """The side in pixels of the images that the network is made for: its ``resize``, else the size in its papers."""
    is_large = name.weights or (name.family in _OF_IMAGENET and name.stem != "cifar")
    return name.resize or (224 if is_large else 32)


def load(name: BackboneName, request: BackboneRequest) -> CnnBackbone:
    """The network that ``name`` describes, initialised from the seed, for images of the data set's size."""
    smallest = _SMALLEST[name.family]
    if name.resize is not None and name.resize < smallest:
        raise FedbenchError(f"{name.family} needs images of {smallest} px or more, got resize={name.resize}.")
    if name.resize is None and request.image_size is not None and min(request.image_size) < smallest:
        height, width = request.image_size
        raise FedbenchError(
            f"{name.family} needs images of {smallest} px or more, the data set has {height}x{width}: "
            f"write '{name.text}{'&' if '?' in name.text else '?'}resize={smallest}', or choose resnet8."
        )
    with default_generator_from(request.seed, "backbone"):
        module, feature_dim = build_body(name)
    mean, std = CIFAR_STATISTICS if name.family in ("resnet8", "convnet", "fedavg-cnn") else IMAGENET_STATISTICS
    transform = PixelTransform(mean, std, name.resize, mode="squash", interpolation="bilinear")
    return CnnBackbone(name.text, module, feature_dim, transform)


class _Classifier(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(pixels)
        return self.head(features), features


def cnn_model(backbone: Backbone, num_classes: int, seed: int) -> tuple[Tensors, Tensors, ForwardPass]:
    """Weights and buffers of body and linear head (``body.*``, ``head.*``) and the forward pass that reads them.

    ``forward`` takes the float batch (b, 3, h, w). It updates the batch-norm statistics among the buffers in place
    when training; it raises KeyError when a tensor is missing, and ignores tensors it doesn't know.
    """
    with default_generator_from(seed, "head"):
        head = nn.Linear(backbone.feature_dim, num_classes)
    # a copy, since train and eval mode are kept on the modules and two models may share a backbone
    weights, buffers, run = as_function(_Classifier(copy.deepcopy(backbone.module), head))

    def forward(tensors: Tensors, inputs: Tensor, training: bool) -> Outputs:
        logits, features = run(tensors, inputs, training)
        return Outputs(logits, features)

    return weights, buffers, forward


def batch_norm_names(net: nn.Module, prefix: str = "") -> frozenset[str]:
    """The names of all weights and buffers of the batch-norm layers in ``net``, by type rather than by name."""
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, _BatchNorm)}
    return frozenset(f"{prefix}{name}.{tensor}" for name, layer in layers.items() for tensor in layer.state_dict())


def as_function(net: nn.Module) -> tuple[Tensors, Tensors, Callable[[Mapping[str, Tensor], Tensor, bool], Any]]:
    """Copies of the weights and buffers of ``net``, and ``run(tensors, inputs, training)`` that reads such tensors.

    ``run`` sets the mode of ``net``, so nothing else may use the module. Threads may call it side by side.
    """
    weights = {name: value.detach().clone() for name, value in net.named_parameters()}
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    names, own_net = (*weights, *buffers), per_thread(net)
    # looking for tied weights at every call takes a tenth of a millisecond
    has_ties = len(list(net.named_parameters(remove_duplicate=False))) > len(weights)

    def run(tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> Any:
        own = own_net()
        if own.training != training:
            own.train(training)
        return functional_call(own, {name: tensors[name] for name in names}, (inputs,), tie_weights=has_ties)

    return weights, buffers, run
