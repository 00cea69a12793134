"""Families of backbones: what loads ``name[:location][?option=value&...]``."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedbench.kinds.base import P, Plugin

if TYPE_CHECKING:
    from fedbench.core.types import Backbone


@dataclass(frozen=True)
class BackboneRequest:
    """A backbone that is asked for."""

    text: str
    """The name as it was typed; the `Backbone` is called so."""
    location: str
    """What stands behind the colon; "" where nothing may."""
    data_dir: Path
    """Where pretrained weights are looked up and kept."""
    seed: int
    """Initialises what starts at random."""
    image_size: tuple[int, int] | None = None
    """Height and width of the data set's images, for a clear error where a network needs more; None: unknown."""


@dataclass(frozen=True)
class Pretraining:
    """What a backbone's weights learned from before any federation."""

    text: str
    """In words; where it is not known, that."""
    datasets: tuple[str, ...] = ()
    """Data sets with images of the same source, by the title of their card or else their name: results on them are
    marked."""


class BackboneFamily(Plugin[P]):
    """A family of backbones. An entry point of the group ``fedbench.backbones`` loads such a class."""

    kind = "backbone"
    is_pretrained: ClassVar[bool] = False
    """Whether its networks have weights from elsewhere, on which ``tune=auto`` trains a head alone."""
    is_dual_encoder: ClassVar[bool] = False
    """Whether its networks have a text tower."""

    @abstractmethod
    def load(self, request: BackboneRequest) -> Backbone:
        """The backbone: `fedbench.models.image_network` makes one of any ``nn.Module`` from images to features."""

    def image_size(self, request: BackboneRequest) -> int | None:
        """The side in pixels of the images it is made for; None: of any. Nothing is loaded for it."""
        return None

    def how_to_get(self, request: BackboneRequest) -> str:
        """What to do about published weights; "" where they are here, or it needs none."""
        return ""

    def pretrained_on(self, request: BackboneRequest) -> Pretraining | None:
        """What its weights were trained on, off its name alone; None where it starts at random, or says nothing."""
        return None


AnyFamily = BackboneFamily[Any]
