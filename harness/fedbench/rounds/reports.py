"""What the clients of a federation report before the first round, each made when a method reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from fedbench.core.types import ClientReport, Federation


class Reports(Sequence[ClientReport]):
    """One report a client, in the order of the federation; without class counts where labels are hidden."""

    def __init__(self, federation: Federation) -> None:
        # not the federation itself, whose test labels are no method's
        self._sizes = federation.shards.sizes
        self._counts = federation.class_table if federation.labels_visible else None

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, position: int) -> ClientReport: ...
    @overload
    def __getitem__(self, position: slice) -> tuple[ClientReport, ...]: ...
    def __getitem__(self, position: int | slice) -> ClientReport | tuple[ClientReport, ...]:
        if isinstance(position, slice):
            return tuple(self[one] for one in range(*position.indices(len(self))))
        at = range(len(self))[position]
        counts = None if self._counts is None else self._counts.rows(at, at + 1)[0]
        return ClientReport(at, int(self._sizes[at]), counts)
