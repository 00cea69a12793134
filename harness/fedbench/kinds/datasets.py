"""Kinds of data sets: what loads ``name[:location][?option=value&...]``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedbench.core.method.hyper import declared
from fedbench.kinds.base import P, Plugin

if TYPE_CHECKING:
    from fedbench.core.federation import Dataset

LIMIT = "limit"
"""The option with which every source is cut to so many samples of each split."""


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
    options: Mapping[str, str] = field(default_factory=dict)
    """What stands behind the question mark, as it was typed; parameters are in ``self.params``."""
    image_size: int | None = None
    """The side in pixels that images of differing sizes are brought to; None: the source's usual one."""


class DatasetSource(Plugin[P]):
    """A kind of data set. An entry point of the group ``fedbench.datasets`` loads such a class.

    Its parameters stand in the data set's name, and so in the run's identity. ``?limit=N`` cuts it to N samples of each
    split.
    """

    kind = "data set"
    scales_images: ClassVar[bool] = False
    """Whether what it loads may depend on `DatasetRequest.image_size`."""

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of what may be typed behind the question mark."""
        return (*declared(cls.Params), LIMIT)

    @abstractmethod
    def load(self, request: DatasetRequest) -> Dataset:
        """The data set. `fedbench.datasets.content.dataset` puts one together, with the hash of its content.

        Raises `fedbench.api.NotHere`, which says how to get the data, where they are not on this machine.
        """


AnySource = DatasetSource[Any]
