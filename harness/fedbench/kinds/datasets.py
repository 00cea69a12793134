"""Kinds of data sets: what loads ``name[:location][?option=value&...]``."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedbench.core.federation import Dataset
from fedbench.kinds.base import P, Plugin


@dataclass(frozen=True)
class DatasetRequest:
    """A data set that is asked for."""

    text: str
    """The name as it was typed; a `Dataset` is called so."""
    location: str
    """What stands behind the colon; "" where nothing may."""
    data_dir: Path
    """Where data are looked up (``--data-dir``)."""
    cache_dir: Path
    """Where decoded data may be kept (``--cache-dir``)."""
    image_size: int | None = None
    """The side in pixels that images of differing sizes are brought to; None: the source's usual one."""


class DatasetSource(Plugin[P]):
    """A kind of data set. An entry point of the group ``fedbench.datasets`` loads such a class.

    Its parameters are read-only facts of the run's identity, as they stand in the data set's name. Every source also
    takes ``?limit=N``: N samples of each split.
    """

    kind = "dataset"
    scales_images: ClassVar[bool] = False
    """Whether what it loads may depend on `DatasetRequest.image_size`."""

    @abstractmethod
    def load(self, request: DatasetRequest) -> Dataset:
        """The data set: `fedbench.toolkit.datasets.dataset` puts one together, with the hash of its content.

        Raises `fedbench.api.NotHere`, which says how to get the data, where they are not on this machine.
        """
