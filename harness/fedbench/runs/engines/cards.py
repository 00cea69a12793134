"""The CUDA cards of this machine: which of them a run may go to, and whether it fits beside those that are there.

Nothing here uses a card. Their number is asked of the driver, and workers tell what is free and what runs take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.runs.prepare import Settings

Cards = Mapping[str, tuple[int, ...]]
"""The cards that runs may go to, by their setting ``device``; none for those that run on none."""
NO_CARD = -1
"""In place of a card, for runs on the CPU."""
CONTEXT = 2**30
"""Bytes of a card that a worker is reckoned to take beside torch's tensors: CUDA's context, kernels, workspaces."""


def visible_cards() -> int:
    """How many cards torch sees."""
    return torch.cuda.device_count()


def require_devices(specs: Sequence[RunSpec], devices: Sequence[str]) -> None:
    """Raise FedbenchError for ``devices`` that are not there, and for some that no run would use."""
    wanted = sorted({spec.device for spec in specs})
    there = _there() if devices else []
    if devices and "cuda" not in wanted:
        raise FedbenchError(
            f"--devices {','.join(devices)} is for runs with device=cuda, and here device is {' and '.join(wanted)}; "
            "leave it out, or add --set device=cuda."
        )
    for device in devices:
        if device not in there:
            has = ", ".join(there) or "no CUDA device"
            raise FedbenchError(f"--devices: {device!r} is not there; torch sees {has} here.")


def cards_for(specs: Sequence[RunSpec], devices: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    """`Cards` of these runs: with ``device=cuda`` the ``devices``, by default all, with ``device=cuda:1`` that one."""
    wanted = sorted({spec.device for spec in specs})
    there = _there() if "cuda" in wanted else []
    shared = [there.index(device) for device in devices or there] if there else []
    return {device: tuple(dict.fromkeys(shared)) if device == "cuda" else _named(device) for device in wanted}


def _there() -> list[str]:
    return [f"cuda:{number}" for number in range(visible_cards())]


def places_of(cards: Cards) -> int:
    """How many cards there are; without any all runs are in one place."""
    return len({card for several in cards.values() for card in several}) or 1


def first_card(spec: RunSpec, settings: Settings) -> int | None:
    """The card for a look at a run with ``device=cuda``, where some are given; None: torch's own choice."""
    return _named(settings.devices[0])[0] if settings.devices and spec.device == "cuda" else None


def _named(device: str) -> tuple[int, ...]:
    kind, _, index = device.partition(":")
    return (int(index),) if kind == "cuda" and index.isdigit() else ()


class Forecast:
    """How much of a card's memory runs will take: as much as those of their row have, or else the most that any has."""

    def __init__(self) -> None:
        self._room: dict[int, int] = {}
        """Bytes by card, for all workers on it."""
        self._peaks: dict[str, int] = {}
        """Bytes by row."""

    def learn_free(self, card: int, free: int) -> None:
        """So much was left when a worker came to the card; the first one counts, which finds no other."""
        self._room.setdefault(card, free + CONTEXT)

    def learn_peak(self, spec: RunSpec, peak: int) -> None:
        """The run has trained, and has taken so much."""
        self._peaks[spec.title] = max(peak, self._peaks.get(spec.title, 0))

    def fits(self, card: int, specs: Sequence[RunSpec], workers: int) -> bool:
        """Whether the runs fit on the card together, with so many workers there; not before a run has trained."""
        if card not in self._room or not self._peaks:
            return False
        most = max(self._peaks.values())
        peaks = sum(self._peaks.get(spec.title, most) for spec in specs)
        return peaks + workers * CONTEXT <= self._room[card]
