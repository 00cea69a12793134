"""Printed numbers at the papers' own scale, one run after another: ``python -m tests.gpu.paper --minutes 9``.

What runs is nothing special: ``fedbench run`` at the scale ``paper`` of a suite. Store, checkpoints and log lie in one
folder. It may leave the machine and come back, and a run that the time cut short goes on after its last whole round.
QUEUE.md has the list; ``--dry-run`` prints it as it stands, with the commands that are left.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch

from fedbench.cli.commands.run import INTERRUPTED
from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.suites.expand import expand
from fedbench.suites.suite import load_suite
from fedbench.tracking.schema import FINAL, store_uri
from fedbench.workflow.selection import Selection, command_line
from fedbench_boards.leaderboard.results import load_runs

SECONDS_TO_STOP = 60.0
"""Till a command that is told to stop is killed."""


@dataclass(frozen=True)
class Item:
    """A number of a paper's table: the runs of a row in a suite's setting, one a seed."""

    suite: str
    setting: str
    method: str
    on: str
    """The row's backbone, since a method may have rows on several."""
    printed: float
    scale: str = "paper"

    def selection(self, seed: int, sets: tuple[tuple[str, str], ...]) -> Selection:
        """The run of ``seed``, with ``sets`` besides."""
        return Selection((self.method,), (seed,), sets, (), self.scale, (self.setting,), (self.on,), suite=self.suite)


def _tail(imbalance: int, printed: dict[str, float]) -> tuple[Item, ...]:
    setting = f"CIFAR-10-LT, IF {imbalance}"
    # CLIP2FL is the row with the teacher at hand, whose text features have 384 numbers
    networks = {"clip2fl": "resnet8?projector=384"}
    return tuple(Item("clip2fl", setting, name, networks.get(name, "resnet8"), it) for name, it in printed.items())


# fmt: off
BLOCKS: tuple[tuple[Item, ...], ...] = (
    _tail(100, {"fedavg": 56.17, "creff": 70.55, "fedprox": 56.92, "ccvr": 69.53, "tau-norm": 49.95,
                "ratio-loss": 59.75, "fed-focal": 53.83, "clip2fl": 73.37}),
    _tail(50, {"fedavg": 59.36, "creff": 73.08, "fedprox": 60.89, "ccvr": 71.89, "tau-norm": 51.41,
               "ratio-loss": 64.77, "fed-focal": 57.42, "clip2fl": 75.35}),
    _tail(10, {"fedavg": 77.45, "creff": 80.71, "fedprox": 76.53, "ccvr": 78.48, "tau-norm": 72.08,
               "ratio-loss": 78.14, "fed-focal": 73.74, "clip2fl": 81.18}),
    tuple(Item("fedclip", f"PACS {domain}", method, "alexnet", printed) for domain, method, printed in (
        ("A", "fedavg", 31.54), ("C", "fedavg", 43.69), ("P", "fedavg", 44.55), ("S", "fedavg", 36.29),
        ("A", "fedprox", 29.79), ("C", "fedprox", 46.80), ("P", "fedprox", 44.67), ("S", "fedprox", 35.12))),
    tuple(Item("fedglcl", f"Fashion-MNIST, {name}", method, "alexnet?resize=64", printed) for name, method, printed in (
        ("0.5", "fedavg", 92.35), ("0.3", "fedavg", 89.46), ("c=3", "fedavg", 74.50), ("c=2", "fedavg", 42.69),
        ("0.5", "fedprox", 92.11), ("0.3", "fedprox", 87.84), ("c=3", "fedprox", 74.04), ("c=2", "fedprox", 38.98))),
)
# fmt: on
"""In order of worth: of a block the first seed of every item comes first."""
SEEDS = (0, 1, 2)


class Queue:
    """The items, and what the store in ``folder`` has of them."""

    def __init__(self, folder: Path, data: Path, device: str, blocks: Sequence[Sequence[Item]] = BLOCKS) -> None:
        self._folder, self._data, self._blocks = folder, data, blocks
        self._sets: tuple[tuple[str, str], ...] = (("device", device),)
        self._specs: dict[tuple[Item, int], RunSpec] = {}
        for block in blocks:
            for seed in SEEDS:
                for item in block:
                    (self._specs[item, seed],) = expand(load_suite(item.suite), self._selection(item, seed))

    def _selection(self, item: Item, seed: int) -> Selection:
        # the Hub's parquet files, where torchvision's are not there
        is_parquet = item.suite == "clip2fl" and not (self._data / "cifar-10-batches-py").is_dir()
        return item.selection(seed, self._sets + ((("dataset", "hf:cifar10"),) if is_parquet else ()))

    def command(self, item: Item, seed: int) -> str:
        """As it is typed, but for the folders."""
        return command_line("run", self._selection(item, seed), paths=True)

    def left(self) -> list[tuple[Item, int]]:
        """What the store lacks, in order."""
        stored = self._stored()
        return [which for which, spec in self._specs.items() if spec.run_id not in stored.index]

    def _stored(self) -> pd.DataFrame:
        """The finished runs, whatever code made them, by run id."""
        try:
            return load_runs(store_uri(str(self._folder / "store"), to_write=False)).finished.set_index("run_id")
        except FedbenchError:
            return pd.DataFrame()  # there is no store yet, or no run in it has ended

    def table(self) -> str:
        """The items and their results, in Markdown."""
        stored, log = self._stored(), self._folder / "log.jsonl"
        entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        lines = ["| item | command | printed | seeds done | ours | commit | card |", "|---|---|---:|---|---|---|---|"]
        for item in dict.fromkeys(item for item, _ in self._specs):
            specs = [self._specs[item, seed] for seed in SEEDS]
            runs = stored.loc[[spec.run_id for spec in specs if spec.run_id in stored.index]]
            title, command = f"{item.setting}: {specs[0].label or item.method}", self.command(item, SEEDS[0])
            cells = [title, f"`{command}`", f"{item.printed:.2f}", "", "never run", "", ""]
            if len(runs):
                cells[3] = ", ".join(map(str, runs["seed"]))
                cells[4] = _scores(runs, load_suite(item.suite).headline_of(item.setting))
                cells[5] = ", ".join(sorted({commit[:7] for commit in runs["commit"]}))
                cells[6] = ", ".join(sorted({entry["card"] for entry in entries if entry["item"] == command}))
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def carry_out(self, is_over: Callable[[], bool], jobs: int) -> bool:
        """Run what is left, ``jobs`` commands at once, and stop them when the time is over; whether none failed."""
        waiting, fine = self.left(), True
        running: list[_Command] = []
        try:
            while (waiting or running) and not is_over():
                while waiting and len(running) < jobs:
                    running.append(self._begun(*waiting.pop(0)))
                time.sleep(0.2)
                for command in [command for command in running if command.process.poll() is not None]:
                    running.remove(command)
                    fine &= self._ended(command)
        finally:
            for command in running:
                command.process.send_signal(signal.SIGINT)
            for command in running:
                fine &= self._ended(command)
            self._shrink()
        return fine

    def _shrink(self) -> None:
        """Delete what tables and resumed runs do without: models of finished runs, and checkpoints but the last."""
        for model in self._folder.glob("store/artifacts/*/*/artifacts/model"):
            shutil.rmtree(model)
        for run in self._folder.glob("store/unfinished/*/checkpoints/*"):
            for older in sorted(run.glob("round-*"))[:-1]:
                older.unlink()

    def _begun(self, item: Item, seed: int) -> _Command:
        """The item's run, in a process of its own, which says what it does in ``commands.log``."""
        words = [*shlex.split(self.command(item, seed))[1:], "--data-dir", str(self._data), "--jobs", "1"]
        words += ["--store", str(self._folder / "store"), "--checkpoint-every", "1"]
        with (self._folder / "commands.log").open("a") as log:
            # a background job of a script ignores Ctrl-C, which its children would inherit
            unignored = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
            command = [sys.executable, "-m", "fedbench", *words]
            process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=unignored)
        return _Command(process, item, seed, time.monotonic())

    def _ended(self, command: _Command) -> bool:
        """Wait for its end and write it down; whether it did its work or was stopped."""
        try:
            code = command.process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            command.process.kill()
            code = command.process.wait()
        seconds = round(time.monotonic() - command.began)
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        item = self.command(command.item, SEEDS[0])
        entry = {"item": item, "seed": command.seed, "card": card, "seconds": seconds, "exit": code}
        with (self._folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")
        print(f"{seconds} s, exit code {code}: {self.command(command.item, command.seed)}", flush=True)
        return code in (0, INTERRUPTED)


@dataclass(frozen=True)
class _Command:
    process: subprocess.Popen[bytes]
    item: Item
    seed: int
    began: float


def _scores(runs: pd.DataFrame, headline: str) -> str:
    """Mean and deviation of the headline over seeds; of CNNs' accuracies also the means of the other two readings."""
    scores = runs[FINAL + headline]
    found = f"{scores.mean():.2f}" + (f" ± {scores.std():.2f}" if len(runs) > 1 else "")
    if headline != "global_accuracy":
        return found
    last, best = (runs[f"{FINAL}{name}_accuracy"].mean() for name in ("last10", "oracle"))
    return f"{found} (last ten rounds {last:.2f}, best round {best:.2f})"


def main(arguments: Sequence[str] | None = None, blocks: Sequence[Sequence[Item]] = BLOCKS) -> int:
    """Run what there is time for; 1 where a command fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.paper", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, metavar="M", help="then stop what runs (default 9)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="commands at once (default 1)")
    parser.add_argument("--folder", type=Path, default=Path("paper-runs"), help="store, checkpoints and log")
    parser.add_argument("--data", type=Path, default=Path("data"), metavar="FOLDER", help="as fedbench's --data-dir")
    parser.add_argument("--device", default="cuda", help="a torch device (default cuda)")
    parser.add_argument("--dry-run", action="store_true", help="run nothing: the list, and the commands that are left")
    given = parser.parse_args(arguments)
    ends = time.monotonic() + 60 * given.minutes
    queue, fine = Queue(given.folder, given.data, given.device, blocks), True
    if given.dry_run:
        print("\n".join(queue.command(item, seed) for item, seed in queue.left()))
    else:
        given.folder.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the commands, too
        with suppress(KeyboardInterrupt):
            fine = queue.carry_out(lambda: time.monotonic() >= ends, given.jobs)
    print(f"\n{queue.table()}\n\n{len(queue.left())} runs are left.")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
