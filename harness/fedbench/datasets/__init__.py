"""Data sets by name: ``load_dataset("embedded", ...)``, ``load_dataset("imagefolder:PACS.tar", ...)``.

A name is ``source[:location][?option=value&...]``. Sources are plug-ins of the group ``fedbench.datasets``; those that
come with fedbench are in `fedbench.datasets.sources`, and import what they need when they are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from fedbench.kinds.base import taken_apart
from fedbench.kinds.registry import build, registered

if TYPE_CHECKING:
    from fedbench.core.federation import Dataset
    from fedbench.kinds.kinds import AnySource

__all__ = ["dataset_names", "load_dataset", "takes_image_size"]


def dataset_names() -> dict[str, str]:
    """Every kind of data set as it is typed, with one line on what it is."""
    sources = [plugin.load() for plugin in registered("data set").values()]
    return {source.usage(): source.description() for source in sources}


def takes_image_size(name: str) -> bool:
    """Whether ``load_dataset`` may need to know which size the images are for: its files may differ in it."""
    source = cast("AnySource", build("data set", name)[0])
    return source.scales_images and "size" not in taken_apart(name)[2]


def load_dataset(name: str, *, data_dir: Path, cache_dir: Path, image_size: int | None = None) -> Dataset:
    """The data set called ``name``, see ``dataset_names``.

    Paths in the name are taken as typed where they exist, else below ``data_dir``. What was rendered or decoded once
    is kept in ``cache_dir``. Images of differing sizes are brought to ``image_size`` pixels square (224 where it is
    None), unless the name says a size; images that share one keep it. ``?limit=N`` takes N images of each split, drawn
    at random and alike every time.
    """
    from fedbench.kinds.kinds import LIMIT, DatasetRequest
    from fedbench.kinds.options import Limited, read_options

    source, location = build("data set", name)
    options = taken_apart(name)[2]
    limited_to = {option: value for option, value in options.items() if option == LIMIT}
    limit = read_options(Limited, limited_to, f"data set {name!r}").limit
    request = DatasetRequest(name, location, data_dir, cache_dir, options, image_size)
    dataset = cast("AnySource", source).load(request)
    if limit is None:
        return dataset
    from fedbench.datasets.content import limited

    return limited(dataset, limit)
