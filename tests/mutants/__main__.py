"""Puts small faults into fedbench, one at a time, and sees whether a test notices: `python -m tests.mutants check`."""

from __future__ import annotations

import argparse
import csv
import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from tests.mutants.faults import Place, located, places

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("killed.csv")
COLUMNS = ["function", "file", "statement", "fault", "at", "killed_by"]
SEED, LIMIT, BUDGET, TEST_FILES, TESTS_OF_A_FILE, FAULTS_OF_A_FUNCTION = 0, 120, 40.0, 3, 20, 3
SHARES = {"fedbench_methods": 110, "toolkit": 75, "rounds": 60, "core": 45, "leaderboard": 40, "scenarios": 35}
SHARES |= {"statistics": 25, "datasets": 15, "tracking": 15}
"""How many faults of each package are drawn."""
SCREENS = ("leaderboard/page/", "/formats/", "/figures/", "/draw", "captions", "leaderboard/notes", "/diagram")
SCREENS += ("/picture", "/webview", "/wording")
FOLDERS = {"fedbench_methods": ["equations"], "scenarios": ["partitions"], "toolkit": ["toolkit", "equations"]}
"""The folders of tests for a package; else the one that is called like it."""
MAPPED = {*SHARES, "partitions", "equations", "golden", "plugins"}
"""The folders of tests whose lines are measured."""
PRELOADED = (
    *(
        "torch",
        "torchvision",
        "torch.func",
        "torch._dynamo",
        "open_clip",
        "numpy",
        "pandas",
        "optuna",
        "pluggy",
        "timm",
    ),
    *("mlflow.store.tracking.sqlalchemy_store", "pydantic", "pytest", "hypothesis", "_hypothesis_pytestplugin", "yaml"),
    *(
        "transformers",
        "datasets",
        "sklearn.linear_model",
        "scipy.stats",
        "matplotlib.pyplot",
        "typer.testing",
        "jinja2",
    ),
)


def package(file: str) -> str:
    return file.split("/")[1 if file.startswith("plugins") else 2]


def files_of(tests: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.split("::")[0] for name in tests))


def prepare() -> None:
    """Import what isn't ours and takes long before any fork; no second thread, no files beside the sources."""
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    sys.dont_write_bytecode = True
    for name in PRELOADED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    assert not any(name.startswith("fedbench") for name in sys.modules), "fedbench is imported after the fork"


def in_child(job: Callable[[], object], limit: float) -> Any:
    """What ``job`` returns in a fork of this process; None when it takes longer than ``limit`` seconds or dies."""
    reading, writing = os.pipe()
    scratch = tempfile.mkdtemp(prefix="mutants-")
    child = os.fork()
    if child == 0:
        try:
            gc.freeze()  # what came before is never looked through again
            os.setsid()
            quiet = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(quiet, stream)
            os.environ |= {"HOME": scratch, "TMPDIR": scratch, "HYPOTHESIS_STORAGE_DIRECTORY": f"{scratch}/examples"}
            tempfile.tempdir = None
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(json.dumps(job()).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(writing)
    received, until = b"", time.monotonic() + limit
    while not received.endswith(b"\n") and select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
        if not (part := os.read(reading, 1 << 20)):
            break
        received += part
    os.close(reading)
    os.killpg(child, signal.SIGKILL)  # with the processes its tests started
    os.waitpid(child, 0)
    shutil.rmtree(scratch, ignore_errors=True)
    return json.loads(received) if received.endswith(b"\n") else None


class Tests:
    """A plug-in of pytest that runs the tests ``wanted`` (None: all) and keeps what came of them."""

    def __init__(self, wanted: Sequence[str] | None = None, coverage: Any = None) -> None:
        self.wanted, self.coverage = None if wanted is None else set(wanted), coverage
        self.collected: list[str] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.passed: set[str] = set()
        self.failed: list[str] = []

    def run(self, files: Sequence[str], *options: str) -> Tests:
        import pytest

        usual = ["-q", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin", "--hypothesis-seed=0"]
        pytest.main([*usual, f"--basetemp={tempfile.mkdtemp()}/tests", *options, *files], plugins=[self])
        self.passed -= set(self.failed)
        return self

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.collected = [item.nodeid for item in items]
        items[:] = [item for item in items if self.wanted is None or item.nodeid in self.wanted]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.coverage is not None:
            self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: Any) -> None:
        """The report of a test or of a file, which fails when it can't be imported."""
        if report.failed:
            self.failed.append(report.nodeid)


def noticed(place: Place, fault: str, tests: Sequence[str], limit: float = LIMIT) -> str:
    """The test that fails with the fault, "time" where they hang or die of it, nothing where all pass."""
    path = str(ROOT / place.file)
    code, as_usual = place.compiled(fault, path), SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        return code if os.path.realpath(loader.path) == path else as_usual(loader, name)

    def job() -> list[str]:
        SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
        return Tests(tests).run(files_of(tests), "-x").failed[:1]

    failed = in_child(job, limit)
    return "time" if failed is None else "".join(failed)


def measured(file: str) -> dict[str, Any]:
    """Per line of fedbench the quickest tests in ``file`` that execute it, and each test's seconds."""
    import coverage

    roots = [str(ROOT / "harness"), str(ROOT / "plugins")]
    meter = coverage.Coverage(data_file=None, config_file=False, source=roots)
    meter.start()
    tests = Tests(coverage=meter).run([file])
    meter.stop()
    data, lines = meter.get_data(), {}
    for source in data.measured_files():
        by_line = {}
        for line, names in data.contexts_by_lineno(source).items():
            if quickest := sorted(tests.passed.intersection(names), key=tests.seconds.__getitem__)[:TESTS_OF_A_FILE]:
                by_line[line] = quickest
        lines[str(Path(source).relative_to(ROOT))] = by_line
    return {"seconds": tests.seconds, "failed": tests.failed, "lines": lines}


def all_measured(kept: Path) -> dict[str, Any]:
    """`measured` of each file of tests, added to the file ``kept`` one by one."""
    kept.touch()
    known = {one["of"]: one for one in map(json.loads, kept.read_text().splitlines())}
    for path in sorted(path for folder in MAPPED for path in ROOT.glob(f"tests/{folder}/test_*.py")):
        file, began = str(path.relative_to(ROOT)), time.monotonic()
        if file not in known:
            result = in_child(lambda file=file: measured(file), 900) or {"seconds": {}, "failed": [], "lines": {}}
            known[file] = {"of": file, **result, "whole": time.monotonic() - began}
            print(file, len(result["seconds"]), "tests", *result["failed"], flush=True)
            with kept.open("a") as lines:
                lines.write(json.dumps(known[file]) + "\n")
    return known


def tests_for(place: Place, known: dict[str, Any]) -> list[list[str]]:
    """Quick tests that execute the statement: of up to three files, rather those that are called alike; of others."""
    costs = []
    for file, result in known.items():
        lines, seconds = result["lines"].get(place.file, {}), result["seconds"]
        names = {name for line in place.lines for name in lines.get(str(line), ())}
        if quickest := sorted(names, key=seconds.__getitem__)[:TESTS_OF_A_FILE]:
            alike = Path(place.file).stem in file or package(place.file) in file
            start = result["whole"] - sum(seconds.values())
            costs.append((not alike, start + sum(seconds[name] for name in quickest), quickest))
    tries: list[list[str]] = [[], []]
    spent = [0.0, 0.0]
    for at, (_, cost, names) in enumerate(sorted(costs)):
        which = int(at >= TEST_FILES)
        if at == 0 or spent[which] + cost < BUDGET:
            tries[which] += names
            spent[which] += cost
    return tries


def all_places() -> list[Place]:
    files = [*ROOT.glob("harness/**/*.py"), *ROOT.glob("plugins/**/*.py")]
    return [place for file in sorted(files) for place in places(file.read_text(), str(file.relative_to(ROOT)))]


def drawn(known: dict[str, Any]) -> Iterator[tuple[Place, str, list[list[str]]]]:
    """Faults at random, one in a statement and few in a function, where some test executes it."""
    possible = [place for place in all_places() if not any(screen in place.file for screen in SCREENS)]
    for name, share in SHARES.items():
        chance = random.Random(f"{SEED} {name}")
        faults = [(place, fault) for place in possible if package(place.file) == name for fault in place.faults()]
        chance.shuffle(faults)
        had: Counter[tuple[object, ...]] = Counter()
        for place, fault in faults:
            function = (place.file, place.function)
            statement = (*function, place.statement, place.at)
            if share == 0 or had[function] == FAULTS_OF_A_FUNCTION or had[statement]:
                continue
            tries = tests_for(place, known)
            if tries[0]:
                had.update([function, statement])
                share -= 1
                yield place, fault, tries


def make(kept: Path) -> None:
    """Draw the faults, try each and write the list."""
    faults = list(drawn(all_measured(kept)))
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    counts: Counter[str] = Counter()
    with LIST.open("w", newline="") as file:
        file.write(f"# made at {commit}; a fault without killed_by is noticed by none of the tests it was tried on\n")
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for place, fault, tries in faults:
            by = next(filter(None, (noticed(place, fault, tests) for tests in tries if tests)), "")
            by = f"time {tries[0][0]}" if by == "time" else by
            rows.writerow([place.function, place.file, place.statement, fault, place.at, by])
            file.flush()
            counts[f"{package(place.file)} {'killed' if by else 'survived'}"] += 1
            print(by or "SURVIVED", place.file, place.function, fault, sep=" | ", flush=True)
    print(*sorted(counts.items()), sep="\n")


class Baseline:
    """The tests there are today, and which of them pass without a fault."""

    def __init__(self) -> None:
        self.all: list[str] = in_child(lambda: Tests().run(["tests"], "--collect-only").collected, 600) or []
        self.known: dict[str, bool] = {}

    def passing(self, names: Sequence[str]) -> list[str]:
        """Those of the names that pass; the new ones are run."""
        new = [name for name in names if name not in self.known]
        for file in files_of(new):
            wanted = [name for name in new if name.split("::")[0] == file]
            passed = in_child(lambda file=file, wanted=wanted: list(Tests(wanted).run([file]).passed), 600) or []
            self.known |= {name: name in passed for name in wanted}
        return [name for name in names if self.known[name]]

    def today(self, recorded: str) -> list[str]:
        """The recorded test; else the one called alike elsewhere, that function with other parameters, or its file."""
        if recorded in self.all:
            return [recorded]
        file, _, name = recorded.partition("::")
        function = name.split("[")[0].rpartition("::")[2]
        moved = [one for one in self.all if one.partition("::")[2] == name]
        other = [one for one in self.all if one.split("[")[0].rpartition("::")[2] == function]
        beside = [one for one in self.all if one.split("::")[0] == file]
        return moved or [one for one in other if one in beside] or other or beside

    def fallback(self, files: Sequence[str]) -> list[str]:
        """What the folders for these sources hold, first the files that are called like them."""
        folders = {folder for file in files for folder in FOLDERS.get(package(file), [package(file)])}
        names = [one for one in self.all if one.split("/")[1] in folders]
        return sorted(names, key=lambda one: not any(Path(file).stem in one.split("::")[0] for file in files))


def check(about: str) -> int:
    """Try every fault that was killed; 1 where one lives now or its statement is gone."""
    with LIST.open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    rows = [row for row in rows if row["killed_by"] and about in row["file"]]
    everywhere, baseline, killed = all_places(), Baseline(), 0
    for row in rows:
        said = f"{row['file']} {row['function']}: {row['statement']}  ->  {row['fault']}"
        if (where := located(row, everywhere)) is None:
            print("GONE    ", said, flush=True)
            continue
        tests = baseline.passing(baseline.today(row["killed_by"].removeprefix("time ")))
        by = noticed(*where, tests) if tests else ""
        if not by or (by == "time" and not row["killed_by"].startswith("time")):
            tests = baseline.passing(baseline.fallback([row["file"], where[0].file]))
            if not tests or noticed(*where, tests, 900) in ("", "time"):
                print("SURVIVED", said, "was killed by", row["killed_by"], flush=True)
                continue
        killed += 1
        if killed % 50 == 0:
            print(killed, "killed so far", flush=True)
    print(killed, "of", len(rows), "faults are killed")
    print(*(f"fails without a fault: {name}" for name, passed in baseline.known.items() if not passed), sep="\n")
    return int(killed < len(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("command", choices=["make", "check"])
    parser.add_argument(
        "about", nargs="?", default="", help="check only faults recorded in files with this in their path"
    )
    parser.add_argument("--lines", type=Path, default=Path(tempfile.gettempdir(), "mutants-lines.jsonl"))
    given = parser.parse_args()
    prepare()
    sys.exit(check(given.about) if given.command == "check" else make(given.lines))
