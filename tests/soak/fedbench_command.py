"""The command ``fedbench`` as a process that is watched and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

_CODE = "from fedbench.cli.app import command; command()"
PATIENCE = 1200.0
"""Seconds after which a command that doesn't end counts as hung."""


class Command:
    """Starts of ``fedbench`` in ``folder``, all with one cache and one output file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._starts = 0

    def start(self, *arguments: str) -> Started:
        """A process group of its own."""
        self._starts += 1
        line = [sys.executable, "-c", _CODE, *arguments, "--cache-dir", str(self.folder / "cache")]
        return Started(line, self.folder, self.folder / f"output-{self._starts:03d}.txt")

    def text(self, *arguments: str) -> str:
        """The output of one that is left alone. Raises RuntimeError where it fails."""
        line = [sys.executable, "-c", _CODE, *arguments]
        done = subprocess.run(line, cwd=self.folder, capture_output=True, text=True, env=_environment(), check=False)
        if done.returncode:
            raise RuntimeError(
                f"fedbench {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout


class Started:
    """A running ``fedbench`` and its processes."""

    def __init__(self, line: list[str], folder: Path, output: Path) -> None:
        self.output = output
        self.began = time.monotonic()
        self.lines: list[str] = []
        """Of its output so far, without their ends."""
        with output.open("w") as errors:
            self._process = subprocess.Popen(
                line, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env=_environment(),
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def age(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.began

    def ended(self) -> int | None:
        """Its exit code; None while it runs. Raises RuntimeError where it hangs."""
        code = self._process.poll()
        if code is None and self.age() > PATIENCE:
            self.kill("group")
            raise RuntimeError(f"it hung: no end after {PATIENCE:g} s, see {self.output}")
        return code

    def kill(self, target: str) -> str:
        """SIGKILL to the whole ``group``, the ``parent``, a ``worker`` or the fork ``server``; what was hit."""
        below = self._below()
        servers = [each for each in below if "forkserver" in _line(each) and _parent(each) == self._process.pid]
        workers = [each for each in below if any(_parent(each) == server.pid for server in servers)]
        if target == "worker" and workers:
            with suppress(psutil.NoSuchProcess):
                workers[len(self.lines) % len(workers)].kill()
            return target
        if target == "server" and servers:
            with suppress(psutil.NoSuchProcess):
                servers[0].kill()
            return target
        if target == "parent":
            self._process.kill()
        else:
            target = "group"
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # a worker that survives its parent leaves by itself; one that does not would go on beside the next start
        left = [process for process in below if process.is_running()]
        _, alive = psutil.wait_procs(left, timeout=30)
        if alive:
            raise RuntimeError(f"processes {[process.pid for process in alive]} outlived their command by 30 s")
        return target

    def close(self) -> None:
        """Nothing of it runs any longer."""
        self._process.wait()
        self._reader.join(10)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _below(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            with self.output.open("a") as file:
                file.write(line)


def _environment() -> dict[str, str]:
    # one thread a process: the numbers of two runs are compared bit for bit
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:
        return 0
