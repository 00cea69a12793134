"""Rows that could not be prepared: whose method raised an exception, and those refused for a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedbench.cli.console import say
from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec


@dataclass(frozen=True)
class FailedRow:
    """The runs of a row, of which preparing the first raised an exception: a fault of its method, and of no other's."""

    specs: tuple[RunSpec, ...]
    reason: str


@dataclass(frozen=True)
class RefusedRow:
    """The runs of a row that can't be prepared as they are."""

    specs: tuple[RunSpec, ...]
    reason: str

    def runs_elsewhere(self, rows: Sequence[tuple[RunSpec, ...]]) -> bool:
        """Whether one of ``rows`` is of the same method and setting on another backbone."""
        ours = self.specs[0]
        alike = [
            one for one, *_ in rows if (one.method, one.setting, one.seed) == (ours.method, ours.setting, ours.seed)
        ]
        return any(one.backbone != ours.backbone for one in alike)

    def as_error(self) -> FedbenchError:
        """What stops the command."""
        return FedbenchError(f"row {self.specs[0].title!r}: {self.reason} Nothing was run.")


def leave_out(refused: Sequence[RefusedRow], planned: Sequence[tuple[RunSpec, ...]]) -> None:
    """Say which rows are left out: their method is not for their backbone, but ``planned`` rows have it on another.

    Raises FedbenchError where none of them has.
    """
    for row in refused:
        if not row.runs_elsewhere(planned):
            raise row.as_error()
        say(f"{row.specs[0].title} is left out: {row.reason}")
