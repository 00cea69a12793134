"""The data set ``embedded`` and the backbone ``clip:embedded``, as plug-ins that import what they need when used."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fedbench.core.method.base import NoParams
from fedbench.kinds.kinds import BackboneFamily, BackboneRequest, DatasetRequest, DatasetSource, Pretraining
from fedbench.kinds.options import Options

if TYPE_CHECKING:
    from fedbench.core.federation import Dataset
    from fedbench.core.types import Backbone


class EmbeddedOptions(Options):
    classes: Literal["10", "20"] = Field("10", description="number of classes")
    train: int = Field(10_000, ge=1, le=10_000_000, description="number of training images")
    test: int = Field(2_000, ge=1, le=10_000_000, description="number of test images")
    seed: int = Field(0, ge=0, le=2**31, description="seed of what is rendered")
    look: Literal["mixed", "plain"] = Field("mixed", description="plain for large cartoons without clutter, one domain")


class Embedded(DatasetSource[EmbeddedOptions]):
    """32 x 32 images of 10 or 20 shapes in four styles, rendered here; needs no files and no network."""

    name = "embedded"

    def load(self, request: DatasetRequest) -> Dataset:
        """Rendered, or read from the cache."""
        from fedbench_embedded.data import load

        return load(request.text, self.params, request.cache_dir)


class EmbeddedClip(BackboneFamily[NoParams]):
    """The tiny CLIP that ships with fedbench, for the embedded data; needs no files and no network."""

    name = "clip:embedded"
    is_pretrained = is_dual_encoder = True

    def load(self, request: BackboneRequest) -> Backbone:
        """With the weights of this package."""
        from fedbench_embedded.weights import load

        return load(request.text)

    def image_size(self, request: BackboneRequest) -> int | None:
        """As its configuration says."""
        from fedbench_embedded.weights import FOLDER

        size: int = json.loads((FOLDER / "embedded.json").read_text())["vision_cfg"]["image_size"]
        return size

    def pretrained_on(self, request: BackboneRequest) -> Pretraining | None:
        """The generator of the data set."""
        return Pretraining(
            "90,000 images of the embedded data's generator with captions, none of which a task uses", ("embedded",)
        )
