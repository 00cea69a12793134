"""The CNN bodies: images (b, 3, h, w) to features (b, d), each ending where a linear head would start.

None has dropout: a local step is a pure function of its tensors, and dropout would draw from the global generator.
Each marks where its convolution blocks end; of residual networks a stage is a block. There a method can change feature
maps during training.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import count, pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from fedbench.core.types import Model, Outputs, Tensors
from fedbench.models.names import BackboneName

BlockChange = Callable[[int, Tensor, Tensors], Tensor]
"""A function ``change(position, features, tensors)``. It returns what replaces ``features`` (b, c, h, w), of the same
shape. ``position`` counts the block ends from 0 in the order of the forward pass; ``tensors`` are those of the pass."""

# of the thread's own: clients that train side by side pass through different ends with different changes
_change: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("change of feature maps", default=None)


class BlockEnd(nn.Module):
    """Marks the end of a convolution block, behind its pooling. It passes its input on unless a method changes it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, features: Tensor) -> Tensor:
        change = _change.get()
        return features if change is None else change(features)


def block_channels(body: nn.Module) -> tuple[int, ...]:
    """The channels at each block end of ``body``, in the order of the forward pass; empty where none is marked."""
    return tuple(module.channels for module in body.modules() if isinstance(module, BlockEnd))


def with_changed_blocks(model: Model, change: BlockChange) -> Model:
    """``model``, whose forward pass applies ``change`` at every block end when training, and nothing otherwise.

    ``change`` is given all tensors of the call, also those that the model itself does not know (noise, say). It may
    write to running statistics among them, as batch-norm does.
    """

    def forward(tensors: Tensors, inputs: Tensor, training: bool) -> Outputs:
        if not training:
            return model.forward(tensors, inputs, training)
        positions = count()
        with _changing(lambda features: change(next(positions), features, tensors)):
            return model.forward(tensors, inputs, training)

    return replace(model, forward=forward)


@contextmanager
def _changing(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the block, block ends apply ``change`` in this thread."""
    token = _change.set(change)
    try:
        yield
    finally:
        _change.reset(token)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch-norm; a 1x1 convolution on the shortcut where the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        """The first convolution and the shortcut have ``stride``."""
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels_out:
            self.shortcut.add_module("conv", nn.Conv2d(channels_in, channels_out, 1, stride, bias=False))
            self.shortcut.add_module("bn", nn.BatchNorm2d(channels_out))
        self.end = BlockEnd(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (b, c, h, w) to (b, c', h/stride, w/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.end(F.relu(y + self.shortcut(x)))  # type: ignore[no-any-return]


class ResNet8(nn.Module):
    """ResNet-8 of CReFF and CLIP2FL: 16, 32 and 64 channels times ``width`` (4 in the papers: 1,225,024 parameters)."""

    def __init__(self, width: int) -> None:
        """``width`` 4 is the papers' network; convolutions start at N(0, 2 / (k^2 * channels_out))."""
        super().__init__()
        base = 16 * width
        self.conv1 = nn.Conv2d(3, base, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(base)
        self.end = BlockEnd(base)
        self.block1 = ResidualBlock(base, base, stride=1)
        self.block2 = ResidualBlock(base, 2 * base, stride=2)
        self.block3 = ResidualBlock(2 * base, 4 * base, stride=2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))

    def forward(self, x: Tensor) -> Tensor:
        """Transform (b, 3, h, w) to (b, 64 width). The mean equals the papers' 8x8 pool at 32 px."""
        x = self.end(F.relu(self.bn1(self.conv1(x))))
        return self.block3(self.block2(self.block1(x))).mean(dim=(2, 3))  # type: ignore[no-any-return]


class ConvNet(nn.Module):
    """The simple CNN of NIID-Bench: two 5x5 convolutions (6, 16) and dense layers of 120 and 84."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.end1 = nn.Conv2d(3, 6, 5), BlockEnd(6)
        self.conv2, self.end2 = nn.Conv2d(6, 16, 5), BlockEnd(16)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (b, 3, h, w) to (b, 84); images of other sizes than 32 px are pooled to the same 5x5.

        ReLU behind the pool gives the same bits at a quarter of the values. If the pool is left out at 32 px, a
        training step takes 0.93 of the time.
        """
        x = self.end1(F.relu(F.max_pool2d(self.conv1(x), 2)))
        x = self.end2(F.relu(F.max_pool2d(self.conv2(x), 2)))
        x = x if x.shape[-2:] == (5, 5) else F.adaptive_avg_pool2d(x, 5)
        return F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))


class FedAvgCnn(nn.Module):
    """The CNN of McMahan et al. 2017: two 5x5 convolutions (32, 64) and a dense layer of 512."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.end1 = nn.Conv2d(3, 32, 5, padding=2), BlockEnd(32)
        self.conv2, self.end2 = nn.Conv2d(32, 64, 5, padding=2), BlockEnd(64)
        self.fc = nn.Linear(64 * 8 * 8, 512)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (b, 3, h, w) to (b, 512); the adaptive pool does nothing at 32 px."""
        x = self.end1(F.max_pool2d(F.relu(self.conv1(x)), 2))
        x = self.end2(F.max_pool2d(F.relu(self.conv2(x)), 2))
        return F.relu(self.fc(F.adaptive_avg_pool2d(x, 8).flatten(1)))


class AlexNet(nn.Module):
    """AlexNet as in FedBN and FedCLIP: batch-norm after every convolution and dense layer (57.02 M parameters).

    With ``dense=1`` it ends after the first dense layer (40.23 M), for a projector in place of the second.
    """

    def __init__(self, dense: int = 2) -> None:
        """``dense`` layers of 4096, one or two; start from torch's default initialisation."""
        super().__init__()
        channels, kernels = (3, 64, 192, 384, 256, 256), (11, 5, 3, 3, 3)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, ((c_in, c_out), kernel) in enumerate(zip(pairwise(channels), kernels, strict=True), start=1):
            stride, padding = (4, 2) if i == 1 else (1, kernel // 2)
            layers[f"conv{i}"] = nn.Conv2d(c_in, c_out, kernel, stride, padding)
            layers[f"bn{i}"] = nn.BatchNorm2d(c_out)
            layers[f"relu{i}"] = nn.ReLU(inplace=True)
            if i in (1, 2, 5):
                layers[f"pool{i}"] = nn.MaxPool2d(3, 2)
            layers[f"end{i}"] = BlockEnd(c_out)
        layers["pool"] = nn.AdaptiveAvgPool2d(6)
        self.features = nn.Sequential(layers)
        self.fc1, self.bn6 = nn.Linear(256 * 6 * 6, 4096), nn.BatchNorm1d(4096)
        self.dense = dense
        if dense == 2:
            self.fc2, self.bn7 = nn.Linear(4096, 4096), nn.BatchNorm1d(4096)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (b, 3, h, w) to (b, 4096)."""
        x = F.relu(self.bn6(self.fc1(self.features(x).flatten(1))))
        return F.relu(self.bn7(self.fc2(x))) if self.dense == 2 else x


def vgg11(*, has_norms: bool = False) -> nn.Module:
    """The convolutions of VGG-11 and two dense layers of 512, as usual on 32 px, where the convolutions leave 1x1.

    ``has_norms`` puts batch-norm behind every convolution, without which FedBN has nothing to keep.
    """
    channels, pooled = (3, 64, 128, 256, 256, 512, 512, 512, 512), (1, 2, 4, 6, 8)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (c_in, c_out) in enumerate(pairwise(channels), start=1):
        convolution = nn.Conv2d(c_in, c_out, 3, padding=1)
        # torchvision's start; its own vgg11() would also draw a classifier of 100 M values only to be dropped.
        nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
        layers[f"conv{i}"] = convolution
        if has_norms:
            layers[f"bn{i}"] = nn.BatchNorm2d(c_out)
        layers[f"relu{i}"] = nn.ReLU(inplace=True)
        if i in pooled:
            layers[f"pool{i}"], layers[f"end{i}"] = nn.MaxPool2d(2), BlockEnd(c_out)
    layers["pool"], layers["flatten"] = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    for i in (1, 2):
        layers[f"fc{i}"], layers[f"fc{i}_relu"] = nn.Linear(512, 512), nn.ReLU(inplace=True)
    return nn.Sequential(layers)


def torchvision_resnet(depth: int, stem: str) -> nn.Module:
    """torchvision's ResNet without its classifier; ``stem="cifar"`` keeps small images at full resolution."""
    from torchvision import models

    net: nn.Module = getattr(models, f"resnet{depth}")(weights=None)
    net.fc = nn.Identity()
    if stem == "cifar":
        net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        net.maxpool = nn.Identity()
    # inside modules that are there already, so that no parameter changes its name
    net.maxpool = nn.Sequential(OrderedDict(pool=net.get_submodule("maxpool"), end=BlockEnd(64)))
    for number, channels in enumerate((64, 128, 256, 512), start=1):
        net.get_submodule(f"layer{number}").add_module("end", BlockEnd(4 * channels if depth == 50 else channels))
    return net


def build_body(name: BackboneName) -> tuple[nn.Module, int]:
    """The body that a name describes, with its feature width; initialised from torch's default generator."""
    body: nn.Module
    match name.family:
        case "resnet8":
            body, width = ResNet8(name.width), 64 * name.width
        case "convnet":
            body, width = ConvNet(), 84
        case "fedavg-cnn":
            body, width = FedAvgCnn(), 512
        case "alexnet":
            body, width = AlexNet(name.dense), 4096
        case "vgg11":
            body, width = vgg11(has_norms=bool(name.bn)), 512
        case "resnet18":
            body, width = torchvision_resnet(18, name.stem), 512
        case "resnet50":
            body, width = torchvision_resnet(50, name.stem), 2048
        case _:
            raise AssertionError(f"no CNN is called {name.family}")
    if name.projector is None:
        return body, width
    projector: nn.Module = nn.Linear(width, name.projector)
    if name.projector_layers == 2:
        projector = nn.Sequential(OrderedDict(fc1=nn.Linear(width, width), relu=nn.ReLU(), fc2=projector))
    return nn.Sequential(OrderedDict(net=body, projector=projector)), name.projector
