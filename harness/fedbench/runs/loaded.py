"""What a run reads and no method has a say in: loaded once, for all runs of a worker that read the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedbench.core.federation import Dataset
from fedbench.core.spec import RunSpec
from fedbench.datasets import load_dataset
from fedbench.models import load_backbone
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.names import is_dual_encoder
from fedbench.runs.prepare import Settings, image_size_for

if TYPE_CHECKING:
    from fedbench.core.types import Backbone


@dataclass(frozen=True)
class Loaded:
    """What is None, the run loads itself."""

    dataset: Dataset | None = None
    backbone: Backbone | None = None


NOTHING = Loaded()
_NO_NAMES: tuple[tuple[str, int | None], tuple[str, str]] = (("", None), ("", ""))


class Loader:
    """Loads what runs read, and keeps it until another run reads something else."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._names = _NO_NAMES
        self._loaded = NOTHING

    def load(self, spec: RunSpec) -> Loaded:
        """The run's data set, and its backbone unless that is drawn from the run's seed.

        Where they can't be loaded, the run is left to load them, and fails as if it had been alone.
        """
        try:
            image_size = image_size_for(spec)
            backbone_name = spec.backbone if is_dual_encoder(spec.backbone) else ""
            names = ((spec.dataset, image_size), (backbone_name, spec.device))
            dataset = self._loaded.dataset if names[0] == self._names[0] else None
            backbone = self._loaded.backbone if names[1] == self._names[1] else None
            # the others are let go before anything is loaded: a run's memory must not depend on the runs before it
            self._names, self._loaded = _NO_NAMES, NOTHING
            data_dir, cache_dir = self._settings.data_dir, self._settings.cache_dir
            if dataset is None:
                dataset = load_dataset(spec.dataset, data_dir=data_dir, cache_dir=cache_dir, image_size=image_size)
                _ = dataset.content_hash  # computed once for all runs
            if backbone is None and backbone_name:
                backbone = load_backbone(spec.backbone, data_dir=data_dir, seed=spec.seed)
                _ = backbone.weights_hash
                backbone.module.to(spec.device)
            if isinstance(backbone, ClipBackbone):
                backbone.text_features(dataset.classnames, spec.templates)  # which it keeps
            self._names, self._loaded = names, Loaded(dataset, backbone)
        except Exception:  # the run meets it again, and says so
            return NOTHING
        return self._loaded
