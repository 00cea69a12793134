"""Checkpoints of a run: all that it needs to go on after a round and end as if it had never stopped.

A run's folder holds the newest few, each one file that is written whole or not at all and carries a checksum. What is
damaged, or was made by other code or from other data, is passed over: the run goes on from an older one, or anew.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.records import RoundRecord
from fedbench.rounds.clients import ClientStore
from fedbench.rounds.state import RunState, read_facts, read_saved, save_state

SECONDS = 30.0
"""Between two checkpoints where no number of rounds is given: what a run that is killed may lose."""
KEEP = 2
"""Checkpoints of a run that are kept: the one before the last serves where the last is damaged."""
_PATTERN = "round-*.safetensors"


@dataclass(frozen=True)
class Checkpointing:
    """The folder of checkpoints, and when a run writes one."""

    folder: Path
    """A run's own is in it, under its run id."""
    codes: Mapping[str, str]
    """Run id -> hash of the code of the run: what other code left is not gone on with."""
    every: int = 0
    """Rounds between two; 0: after the first round that ends `SECONDS` after the last one."""
    state_memory: float = math.inf
    """Bytes of what clients keep that stay in memory between rounds; the rest is in files beside the checkpoints."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run after ``state.round`` rounds."""

    state: RunState
    records: tuple[RoundRecord, ...]
    """Metrics, traffic and times of round 0 and all that followed."""
    predictions: Tensor | None
    """(n,) int64 on the test split, of the last evaluated round; None for a method without a global model."""
    executor: Mapping[str, str]
    """What the executor has found out about the run's clients; see `Cohort.known`."""
    seconds: float
    """That the run has taken."""


class Checkpoints:
    """The checkpoints of one run, for the one process that carries it out."""

    def __init__(self, checkpointing: Checkpointing | None, run_id: str, inputs: Iterable[str]) -> None:
        """``inputs`` is what a run's numbers depend on besides its description: hashes of code, data and weights.

        With None ``checkpointing`` there are none, and none are written.
        """
        self._checkpointing = checkpointing
        self._run_id = run_id
        self._made_by = hashlib.sha256("|".join(inputs).encode()).hexdigest()
        self._written = time.monotonic()
        self._clients: ClientStore | None = None

    def begin(self, state: RunState, device: str) -> RunState:
        """The state of a run that begins, with what clients will keep where checkpoints are made of it."""
        if self._checkpointing is None:
            return state
        store = self._clients = self._store(device)
        store.keep_files(self._needed())
        return replace(state, clients=store.clients, own=store.own)

    def latest(self, device: str, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest that this run can go on from; ``warn`` hears of damaged ones, halves of files are deleted."""
        if self._checkpointing is not None:
            for half in self._folder.glob(".*.tmp"):
                half.unlink(missing_ok=True)  # of a process that was killed while it wrote
        for file in reversed(self._files()):
            try:
                saved = self._read(file, device)
            except (FedbenchError, KeyError, TypeError, ValueError) as error:
                warn(f"the checkpoint {file.name} is passed over: {error}")
                continue
            if saved is not None:
                return saved
            warn(f"the checkpoint {file.name} is of other code, data or weights, and is passed over")
        return None

    def round(self) -> int:
        """The round that `latest` would go on from, by the files' headers; 0 where it begins anew."""
        for file in reversed(self._files()):
            with suppress(FedbenchError, KeyError, TypeError, ValueError):
                if self._is_ours(read_facts(file)):
                    return _round_of(file)
        return 0

    def are_due(self, number: int, seconds: float, *, is_last: bool) -> bool:
        """Whether one is to be written after round ``number`` of a run that has taken ``seconds``."""
        if self._checkpointing is None or number == 0:
            return False
        if self._checkpointing.every:
            return number % self._checkpointing.every == 0 or is_last
        return time.monotonic() - self._written >= SECONDS or (is_last and seconds >= SECONDS)

    def save(self, checkpoint: Checkpoint, *, warn: Callable[[str], None]) -> None:
        """Write ``checkpoint``, and let go of the oldest. A full disk costs the checkpoint, not the run: ``warn`` hears
        of it.
        """
        assert self._clients is not None
        number, state = checkpoint.state.round, checkpoint.state
        progress = {
            "made_by": self._made_by,
            "records": [asdict(record) for record in checkpoint.records],
            "executor": dict(checkpoint.executor),
            "seconds": checkpoint.seconds,
        }
        beside = {} if checkpoint.predictions is None else {"predictions": checkpoint.predictions}
        try:
            progress["clients"] = self._clients.index()
            file = self._folder / f"round-{number:06d}.safetensors"
            save_state(replace(state, clients={}, own={}), file, self._run_id, beside=beside, progress=progress)
        except FedbenchError as error:
            warn(f"no checkpoint after round {number}: {error}")
        else:
            files = self._files()
            # beyond this round lies what other code or data left
            ours = [file for file in files if _round_of(file) <= number][-KEEP:]
            for old in set(files) - set(ours):
                old.unlink(missing_ok=True)
            self._clients.keep_files(self._needed())
        # also after a failure: the disk is not tried in every round
        self._written = time.monotonic()

    @property
    def _folder(self) -> Path:
        assert self._checkpointing is not None
        return self._checkpointing.folder / self._run_id

    def _store(self, device: str) -> ClientStore:
        assert self._checkpointing is not None
        return ClientStore(self._folder, self._run_id, device, self._checkpointing.state_memory)

    def _files(self) -> list[Path]:
        return [] if self._checkpointing is None else sorted(self._folder.glob(_PATTERN))

    def _needed(self) -> set[str]:
        """The names of the clients' files that checkpoints have."""
        names: set[str] = set()
        for file in self._files():
            with suppress(FedbenchError, KeyError, TypeError, ValueError):
                names |= {name for name, *_ in read_facts(file)["progress"]["clients"]["files"].values()}
        return names

    def _is_ours(self, header: Mapping[str, Any]) -> bool:
        return bool(header["run_id"] == self._run_id and header["progress"]["made_by"] == self._made_by)

    def _read(self, file: Path, device: str) -> Checkpoint | None:
        saved = read_saved(file, device)
        progress = saved.progress
        if not self._is_ours({"run_id": saved.run_id, "progress": progress}):
            return None
        records = [RoundRecord(**{**record, "cohort": tuple(record["cohort"])}) for record in progress["records"]]
        predictions = saved.beside.get("predictions")
        store = self._store(device)
        store.restore(progress["clients"])
        store.keep_files(self._needed())
        self._clients = store
        return Checkpoint(
            replace(saved.state, clients=store.clients, own=store.own),
            tuple(records),
            None if predictions is None else predictions.cpu(),
            progress["executor"],
            progress["seconds"],
        )


def discard(folder: Path, run_id: str) -> None:
    """Delete a run's checkpoints: its result is stored."""
    shutil.rmtree(folder / run_id, ignore_errors=True)


def _round_of(file: Path) -> int:
    return int(file.stem.removeprefix("round-"))
