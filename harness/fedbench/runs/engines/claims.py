"""Who carries out a run: of several processes that share a store, one, and the others leave it alone.

A claim is a file lock in a folder that they share. The system frees the locks of a process that dies, so nothing has
to be tidied up, and a claim that can be taken means that nobody else is at the run.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from fedbench.core.errors import FedbenchError
from fedbench.core.files import LOCK_MODE, read_bytes, replacing
from fedbench.core.spec import RunSpec

Taken = Literal["ours", "elsewhere", "finished"]


class Claims:
    """The claims of this process on runs, by their ids; ``folder`` is the same for all who share the store."""

    def __init__(self, folder: Path, is_finished: Callable[[RunSpec], bool]) -> None:
        """``is_finished`` looks into the store. Raises FedbenchError where the folder can't be written."""
        self._folder = folder
        self._is_finished = is_finished
        self._held: dict[str, FileLock] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.shared_by = _identity(folder)
            """Names the folder: processes that have the same one see each other's claims."""
        except OSError as error:
            raise FedbenchError(
                f"runs can't be claimed in the folder {str(folder)!r}: {error.strerror or error}; make it writable, or "
                "choose another --store or --cache-dir (FEDBENCH_CACHE)."
            ) from error

    def take(self, spec: RunSpec) -> Taken:
        """Claim a run that is not finished yet, at once or not at all."""
        if not self.hold(spec.run_id):
            return "elsewhere"
        # who had the claim before may have finished the run since this process last looked
        if self._is_finished(spec):
            self.release(spec.run_id)
            return "finished"
        return "ours"

    def hold(self, name: str) -> bool:
        """Whether this process has, from now on, what is called ``name`` to itself."""
        if name in self._held:
            return True
        lock = FileLock(self._file(name), timeout=0, thread_local=False, mode=LOCK_MODE)
        try:
            lock.acquire()
        except Timeout:
            return False
        except OSError as error:
            raise FedbenchError(f"a run can't be claimed by {lock.lock_file!r}: {error.strerror or error}.") from error
        self._held[name] = lock
        return True

    def release(self, name: str) -> None:
        lock = self._held.pop(name, None)
        if lock is not None:
            with suppress(OSError):  # at worst an empty file stays
                self._file(name).unlink(missing_ok=True)
            lock.release()

    def close(self) -> None:
        for name in list(self._held):
            self.release(name)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.lock"


def work_folder(uri: str, suite: str, cache_dir: Path) -> Path:
    """The folder of a suite's unfinished runs: beside a store on this disk, else in the cache.

    ``uri`` is the store's tracking URI. The same folder for every process with the same store, suite and cache.
    """
    if uri.startswith("sqlite:///"):
        at = Path(uri.removeprefix("sqlite:///")).parent
    else:
        at = cache_dir / "stores" / hashlib.sha256(uri.encode()).hexdigest()[:16]
    name = re.sub(r"[^\w\-]", "_", suite)
    if name != suite:  # two suites may come out alike
        name += "-" + hashlib.sha256(suite.encode()).hexdigest()[:8]
    return at / "unfinished" / name


def _identity(folder: Path) -> str:
    """A name of the folder that no other has, and that says nothing of the machine."""
    file = folder / "id"
    with FileLock(folder / "id.lock", mode=LOCK_MODE):
        known = read_bytes(file).decode("ascii") if file.exists() else ""
        if not known:
            known = uuid.uuid4().hex
            with replacing(file, "identity of claims", "choose another --store") as temporary:
                temporary.write_text(known, encoding="ascii")
        return known
