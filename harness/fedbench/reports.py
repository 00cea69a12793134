"""What the clients of a federation report before the first round, each made when a method reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from fedbench.types import ClientReport, Federation


@dataclass(frozen=True, eq=False)
class Reports(Sequence[ClientReport]):
    """One report a client, in the order of the federation; without class counts where labels are hidden."""

    federation: Federation

    def __len__(self) -> int:
        return len(self.federation.clients)

    @overload
    def __getitem__(self, position: int) -> ClientReport: ...
    @overload
    def __getitem__(self, position: slice) -> tuple[ClientReport, ...]: ...
    def __getitem__(self, position: int | slice) -> ClientReport | tuple[ClientReport, ...]:
        if isinstance(position, slice):
            return tuple(self[one] for one in range(*position.indices(len(self))))
        at = range(len(self))[position]
        size = int(self.federation.shards.sizes[at])
        return ClientReport(at, size, self.federation.class_counts(at) if self.federation.labels_visible else None)
