"""Storage of clients' state between rounds: in memory up to a budget, the rest in one file a client.

Checkpoints use the same files. A checkpoint writes only the clients that have changed since the last one, and names the
files of all others, so its cost follows the cohort, not the federation. A file is never changed once it is written.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from fedbench.core.errors import FedbenchError
from fedbench.core.types import Tensors
from fedbench.plugins.guards import versions
from fedbench.rounds.state import RunState, read_saved, save_state

_FILES = "client-*.safetensors"
_V = TypeVar("_V")


class Filed(NamedTuple):
    """The file with one client's state."""

    name: str
    sha256: str
    methods: list[str]
    """Names of the methods that keep something in it."""


class _Marks:
    """A fingerprint of a client's state, to see whether it has changed: its tensors, and how often each was written
    to."""

    def __init__(self, kept: _Kept) -> None:
        names, tensors = kept.named()
        self._names = names
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._versions = versions(tensors)

    def fit(self, kept: _Kept) -> bool:
        names, tensors = kept.named()
        same = names == self._names and all(ref() is now for ref, now in zip(self._tensors, tensors, strict=True))
        return same and versions(tensors) == self._versions


@dataclass
class _Kept:
    """One client's state in memory."""

    methods: dict[str, Tensors] = field(default_factory=dict)
    own: Tensors = field(default_factory=dict)
    filed: _Marks | None = None
    """The fingerprint of the state in the newest file; None if there is no file."""
    bytes: int = 0
    """The size when it was last counted."""

    def named(self) -> tuple[list[tuple[str, ...]], list[Any]]:
        """The names, also of methods that keep nothing, and the tensors."""
        held = [*self.methods.items(), ("", self.own)]
        tensors = [tensor for _, tensors in held for tensor in tensors.values()]
        return [(method, *tensors) for method, tensors in held], tensors

    def grown(self) -> int:
        """Count the bytes, and return by how many they have grown since the last count."""
        before, self.bytes = self.bytes, sum(tensor.numel() * tensor.element_size() for tensor in self.named()[1])
        return self.bytes - before


class ClientStore:
    """The clients' state in one run; its `clients` and `own` are those of the run's `RunState`.

    State that is read through them stays in memory until `settle`, since hooks may write to it. FedbenchError if a file
    is missing or damaged, or can't be written.
    """

    def __init__(self, folder: Path, run_id: str, device: str, budget: float) -> None:
        """Files are in ``folder``; at most ``budget`` bytes stay in memory between rounds."""
        self._folder = folder
        self._run_id = run_id
        self._device = device
        self._budget = budget
        self._here: dict[int, _Kept] = {}
        """Clients in memory, the least recently used first."""
        self._files: dict[int, Filed] = {}
        """Each client's newest file; the state in memory may have changed since."""
        self._needed: frozenset[str] = frozenset()
        """Names of the files that checkpoints need."""
        self._serial = 0
        """The number of the next file, so that names are never used again."""
        self._in_use: set[int] = set()
        self.clients = KeptByClient[dict[str, Tensors]](self, "methods")
        self.own = KeptByClient[Tensors](self, "own")

    def load(self, client: int) -> _Kept:
        """The client's state, loaded into memory for writing. Evicts other clients' state if the memory budget is
        exceeded."""
        kept = self._here.pop(client, None)
        self._in_use.add(client)
        if kept is None:
            kept = self.look(client)
            self._trim(self._budget - kept.bytes)
        self._here[client] = kept
        return kept

    def look(self, client: int) -> _Kept:
        """The client's state for reading only. State read from a file does not stay in memory."""
        if client in self._here:
            return self._here[client]
        return self._read(self._files[client]) if client in self._files else _Kept()

    def methods(self, client: int) -> Collection[str]:
        """Names of the methods that keep something with ``client``, known without reading its file."""
        if client not in self._here and client in self._files:
            return self._files[client].methods
        return self.look(client).methods

    def settle(self, sent: int) -> None:
        """Free memory for a round like this one, in which clients ``sent`` so many bytes. No state may be in use any
        more."""
        added = 0
        for client in self._in_use:
            added += self._here[client].grown()
        self._in_use.clear()
        self._trim(self._budget - added - sent)
        if not self.is_unlimited:
            return_freed_memory()

    def index(self) -> dict[str, Any]:
        """Write the state of changed clients, and return the entries (JSON) that a checkpoint stores for all
        clients."""
        for client in self._here:
            self._write(client)
        return {"files": dict(self._files), "serial": self._serial, "clients": [*self.clients], "own": [*self.own]}

    def restore(self, index: Mapping[str, Any]) -> None:
        """Restore the state from what `index` returned; every file is read and checked."""
        files = {int(client): Filed(*filed) for client, filed in index["files"].items()}
        here: dict[int, _Kept] = {}
        left = self._budget
        for client, filed in files.items():
            kept = self._read(filed, is_checked=True)
            left -= kept.bytes
            if left >= 0:
                here[client] = kept
        self._files, self._here, self._serial = files, here, index["serial"]
        self.clients.begin_with(index["clients"])
        self.own.begin_with(index["own"])

    def keep_files(self, needed: Iterable[str]) -> None:
        """Delete all files but those ``needed`` by checkpoints and the clients' newest."""
        self._needed = frozenset(needed)
        newest = {filed.name for filed in self._files.values()}
        for file in self._folder.glob(_FILES):
            if file.name not in self._needed | newest:
                file.unlink(missing_ok=True)

    @property
    def is_unlimited(self) -> bool:
        return self._budget == float("inf")

    def _size(self) -> int:
        return sum(kept.bytes for kept in self._here.values())

    def _trim(self, budget: float) -> None:
        """Evict the least recently used clients until the rest fits into ``budget`` bytes."""
        if self.is_unlimited:
            return
        over = self._size() - budget
        for client in [client for client in self._here if client not in self._in_use]:
            if over <= 0:
                return
            self._write(client)
            over -= self._here.pop(client).bytes

    def _write(self, client: int) -> None:
        kept = self._here[client]
        if (kept.filed is None and not kept.methods and not kept.own) or (kept.filed and kept.filed.fit(kept)):
            return
        state = RunState(0, {}, {}, clients={client: kept.methods}, own={client: kept.own})
        name = f"client-{client:06d}-{self._serial:08d}.safetensors"
        sha256 = save_state(state, self._folder / name, self._run_id)
        self._serial += 1
        old = self._files.get(client)
        self._files[client] = Filed(name, sha256, [*kept.methods])
        kept.filed = _Marks(kept)
        if old is not None and old.name not in self._needed:
            (self._folder / old.name).unlink(missing_ok=True)

    def _read(self, filed: Filed, *, is_checked: bool = False) -> _Kept:
        saved = read_saved(self._folder / filed.name, self._device, is_checked=is_checked)
        if saved.sha256 != filed.sha256:
            raise FedbenchError(
                f"{str(self._folder / filed.name)!r} is not the file that the run has written; delete its folder, and "
                "it begins anew."
            )
        ((_, methods),) = saved.state.clients.items()
        ((_, own),) = saved.state.own.items()
        kept = _Kept(methods, own)
        kept.filed = _Marks(kept)
        kept.grown()
        return kept


class KeptByClient(MutableMapping[int, _V]):
    """One part of the clients' state, by client, in the order in which clients were added."""

    def __init__(self, store: ClientStore, part: str) -> None:
        self.store = store
        self.part = part
        self._clients: dict[int, None] = {}

    def begin_with(self, clients: Iterable[int]) -> None:
        self._clients = dict.fromkeys(clients)

    def __getitem__(self, client: int) -> _V:
        if client not in self._clients:
            raise KeyError(client)
        return cast(_V, getattr(self.store.load(client), self.part))

    def __setitem__(self, client: int, value: _V) -> None:
        self._clients[client] = None
        setattr(self.store.load(client), self.part, value)

    def __delitem__(self, client: int) -> None:
        del self._clients[client]
        setattr(self.store.load(client), self.part, {})

    def __contains__(self, client: object) -> bool:
        return client in self._clients

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


class _ToRead(Mapping[int, _V]):
    """A read-only view of a `KeptByClient` that loads nothing into memory for good."""

    def __init__(self, kept: KeptByClient[_V]) -> None:
        self._kept = kept

    def __getitem__(self, client: int) -> _V:
        if client not in self._kept:
            raise KeyError(client)
        return cast(_V, getattr(self._kept.store.look(client), self._kept.part))

    def __contains__(self, client: object) -> bool:
        return client in self._kept

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def settle(state: RunState, sent: int = 0) -> None:
    """Evict clients' state beyond the memory budget, leaving room for a round in which clients ``sent`` so many bytes.

    Hooks must not use any of the state any more.
    """
    if isinstance(state.clients, KeptByClient):
        state.clients.store.settle(sent)


def to_read(kept: Mapping[int, _V]) -> Mapping[int, _V]:
    """A read-only view that loads nothing into memory for good; the mapping itself if all of it is in memory."""
    if not isinstance(kept, KeptByClient):
        return kept
    # one that is all in memory is handed out as it is, so that a method that changes it is noticed
    return {client: kept[client] for client in kept} if kept.store.is_unlimited else _ToRead(kept)


def of_methods(
    clients: Mapping[int, dict[str, Tensors]], methods: Collection[str]
) -> Iterator[tuple[int, dict[str, Tensors]]]:
    """The state of clients with whom any of ``methods`` keeps something; the files of others are not read."""
    held = to_read(clients)
    for client in clients:
        names = clients.store.methods(client) if isinstance(clients, KeptByClient) else clients[client]
        if not set(methods).isdisjoint(names):
            yield client, held[client]


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Numbers of the parameters of glibc's mallopt."""


@lru_cache(maxsize=1)
def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "gnu_get_libc_version") else None


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory a thread, instead of returning every large tensor's memory at once.

    Otherwise the next step faults it in anew, page by page. A round of fedavg-cnn in two threads takes 0.86 of the
    time, one of creff on convnet 0.95 (medians of interleaved runs). Does nothing where there is no glibc.
    """
    library = _glibc()
    if library is None:
        return
    library.mallopt(_MMAP_THRESHOLD, 32 * 2**20)  # the largest that glibc takes
    library.mallopt(_TRIM_THRESHOLD, 64 * 2**20)
    library.mallopt(_TOP_PAD, 16 * 2**20)


def return_freed_memory() -> None:
    """Return freed memory between live tensors to the system; does nothing where there is no glibc."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
