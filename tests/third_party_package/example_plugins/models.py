"""A backbone, a small MLP-Mixer, and a text encoder that counts letters."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedbench.api import (
    Backbone,
    BackboneFamily,
    BackboneRequest,
    NoParams,
    TextEncoder,
    TextRequest,
    hyper,
    image_network,
)


@dataclass(frozen=True, kw_only=True)
class MixerParams:
    """Its size."""

    width: int = hyper(16, symbol="C", source="Tolstikhin et al. 2021, smaller", low=4, high=1024)


class Mixer(BackboneFamily[MixerParams]):
    """An MLP-Mixer of one block on 4 x 4 patches, for 32 px."""

    name = "example-mixer"

    def load(self, request: BackboneRequest) -> Backbone:
        """It starts at random."""
        return image_network(request.text, MixerBlock(self.params.width), self.params.width, size=32)

    def image_size(self, request: BackboneRequest) -> int:
        """Others are resized."""
        return 32


class MixerBlock(nn.Module):
    """Images (b, 3, 32, 32) to features (b, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.tokens = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))
        self.channels = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, images: Tensor) -> Tensor:
        """Tokens are mixed, then channels."""
        tokens = self.patches(images).flatten(2)
        tokens = (tokens + self.tokens(tokens)).transpose(1, 2)
        return (tokens + self.channels(tokens)).mean(dim=1)


class Letters(TextEncoder[NoParams]):
    """How often each letter occurs in a class's name."""

    name = "example-letters"

    def vectors(self, request: TextRequest) -> Tensor:
        """(K, 26)."""
        letters = "abcdefghijklmnopqrstuvwxyz"
        return torch.tensor([[float(name.lower().count(letter)) for letter in letters] for name in request.classnames])
