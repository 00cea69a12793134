"""A scenario's partition as a partitioner of flwr-datasets, for use outside fedbench."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.federation import Dataset, Federation, Split
from fedbench.core.scenario import Scenario
from fedbench.scenarios import build_federation

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner


def partitioner(
    scenario: Scenario, seed: int, *, label: str = "label", domain: str | None = None, client: str | None = None
) -> Partitioner:
    """A partitioner whose partitions are the training samples of ``scenario``'s clients, drawn from ``seed``.

    ``label``, ``domain`` and ``client`` are columns of the data set that it is given: the training split, as fedbench
    reads it. Partition k has the samples, in their order, that client k has in a run on the same data and seed, where
    the test split is the data's own. It needs flwr-datasets. FedbenchError for columns that there are not.
    """
    from flwr_datasets.partitioner import Partitioner

    class ScenarioPartitioner(Partitioner):  # type: ignore[misc]
        """Deals as fedbench does."""

        _federation: Federation | None = None

        @property
        def federation(self) -> Federation:
            """Who has what, drawn once."""
            if self._federation is None:
                self._federation = build_federation(_described(self.dataset, label, domain, client), scenario, seed)
            return self._federation

        @property
        def num_partitions(self) -> int:
            """The number of clients."""
            return len(self.federation.clients)

        def load_partition(self, partition_id: int) -> Any:
            """The samples of a client."""
            if not 0 <= partition_id < self.num_partitions:
                raise FedbenchError(
                    f"there is no partition {partition_id}; there are {self.num_partitions}, from 0 on."
                )
            return self.dataset.select(_positions(self.federation, partition_id).tolist())

    return ScenarioPartitioner()


def _positions(federation: Federation, client: int) -> Tensor:
    """Positions in the data set: the images that a client has are their own positions."""
    return federation.train.images.read(federation.clients[client].indices)


class _Positions:
    """In place of images: each sample's position."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, indices: Tensor) -> Tensor:
        """``indices`` themselves."""
        return indices

    def content_hash(self) -> str:
        """Of no use here."""
        return ""


def _described(data: Any, label: str, domain: str | None, client: str | None) -> Dataset:
    """The columns of a Hugging Face data set as a fedbench one, which is its own test split."""
    for column in filter(None, (label, domain, client)):
        if column not in data.column_names:
            raise unknown_name("column of the data set", column, data.column_names)
    classes, labels = _category(data, label)
    domains, of_domain = _category(data, domain) if domain else ((), None)
    clients, of_client = _category(data, client) if client else ((), None)
    split = Split(_Positions(len(data)), labels, of_domain, of_client)
    return Dataset("data", classes, split, split, "", domains, client_names=clients)


def _category(data: Any, column: str) -> tuple[tuple[str, ...], Tensor]:
    """The names of a column's values, as fedbench orders them, and each sample's (n,)."""
    values = data[column][:]
    names = getattr(data.features[column], "names", None)
    if names is None and isinstance(values[0], str):
        names = sorted(set(values))
        values = [names.index(value) for value in values]
    elif names is None:
        names = [str(number) for number in range(max(values) + 1)]
    return tuple(names), torch.tensor(values, dtype=torch.int64)
