"""Whatever a run does to its process, the next one starts from the same state, and nothing of it is left running."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedbench.core.errors import DETAILS, REASON, FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.runs.engines import worker as workers
from fedbench.runs.engines.engine import Policy, Processes, execute
from fedbench.runs.engines.events import Event, RunFailed, RunFinished, failure_of
from fedbench.runs.engines.worker import Apart, Work, Worker
from fedbench.runs.prepare import Loaded, Loader, Settings
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite
from fedbench.testing import tiny_dataset, tiny_spec
from tests.runs.kit import everything

SUITE = """
name: state
dataset: "embedded?train=240&test=40"
scenario: {preset: iid, clients: 4, participation: 0.5}
training: {rounds: 2}
seeds: [0]
rows: [{method: fedavg}]
"""
HEADER = '''
"""Each answers `aggregate` as FedAvg does, and changes something that all code of a process shares."""
import ctypes, gc, json, locale, logging, os, random, signal, subprocess, sys, threading, time, warnings
from dataclasses import dataclass

import numpy as np
import torch

import fedbench.toolkit.fedavg
from fedbench.toolkit.fedavg import average
from fedbench.core.method.hooks import hookimpl


@dataclass(frozen=True, kw_only=True)
class P:
    """None."""


class Hostile:
    citation, Params, recipe = "nobody", P, {}

    def __init__(self, params):
        pass

    @hookimpl
    def aggregate(self, task):
        answer = average(task)
        self.spoil(task)
        return answer


class InPlace(Hostile):
    name = "in-place"

    def spoil(self, task):
        pass

    @hookimpl
    def local_train(self, task):
        task.inputs.features.zero_()
        if task.labels is not None:
            task.labels.zero_()
        return fedbench.toolkit.fedavg.local_sgd(task)


class Dataset(Hostile):
    """Everything that was loaded, in place."""
    name = "all-tensors"

    def spoil(self, task):
        for tensor in [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]:
            if not tensor.requires_grad and tensor.dtype in (torch.float32, torch.uint8, torch.int64):
                tensor.zero_()
'''
NO_RETRY = Policy(retries=0)
SPOILING = {
    "patched": "import fedbench.toolkit.fedavg as d; d.average = d.weighted_mean = None; d.FedAvg.aggregate = None",
    "patched-harness": "import fedbench.rounds.metrics as m; m.summarise = lambda history: {'global_accuracy': 99.9}",
    "default-dtype": "torch.set_default_dtype(torch.float64)",
    "default-device": "torch.set_default_device('meta')",
    "no-grad": "torch.set_grad_enabled(False)",
    "matmul": "torch.set_float32_matmul_precision('medium'); torch.backends.mkldnn.enabled = False",
    "deterministic": "torch.use_deterministic_algorithms(True); torch.set_flush_denormal(True)",
    "reseeded": "random.seed(1); np.random.seed(1); torch.manual_seed(1); np.seterr(all='raise')",
    "environment": "os.environ.clear(); os.environ['HOME'] = '/nowhere'; os.chdir('/'); os.umask(0o777)",
    "warnings": "warnings.simplefilter('error'); logging.disable(50); logging.getLogger().handlers.clear()",
    "imports": "sys.path.clear(); [sys.modules.pop(name) for name in list(sys.modules) if 'fedbench' in name]",
    "signals": "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT)]",
    "standard-streams": "os.close(1); os.close(2); sys.stdout = sys.stderr = None",
    "stopped-collecting": "gc.disable(); sys.setrecursionlimit(120); sys.setswitchinterval(5)",
    "cached": "import fedbench.datasets; fedbench.datasets.load_dataset = lambda *a, **k: 1 / 0; json.dumps = None",
    "own-description": "task.spec.params.setdefault('mut', {})['mu'] = task.round",
    "leaves-early": "os._exit(0)",
}


def hostile_file(folder: Path) -> Path:
    classes = [
        f"class Spoils{number}(Hostile):\n    name = {name!r}\n\n    def spoil(self, task):\n        {code}\n"
        for number, (name, code) in enumerate(SPOILING.items())
    ]
    (folder / "hostile.py").write_text("\n\n".join([HEADER, *classes]))
    return folder / "hostile.py"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("state")
    return Settings(folder, folder / "cache", (hostile_file(folder),))


def specs_of(settings: Settings, *methods: str) -> list[RunSpec]:
    return expand(parse_suite(SUITE, "state"), Overrides(methods=methods, plugin_files=settings.plugin_files))


def of_fedavg(events: Iterable[Event]) -> list[Event]:
    return [e for e in events if e.spec.method == "fedavg" and isinstance(e, RunFinished | RunFailed)]


def test_whatever_a_run_does_to_its_process_the_next_gives_the_same_numbers_bit_for_bit(settings: Settings) -> None:
    # some of what the same methods do as an installed package, below
    names = ("in-place", "all-tensors", "patched", "signals", "standard-streams", "leaves-early")
    fedavg, *hostile = specs_of(settings, "fedavg", *names)
    specs = [fedavg, *(spec for one in hostile for spec in (one, fedavg))]
    events = list(execute(specs, settings, 1, engine=Processes(settings, 1), policy=NO_RETRY))
    ends = of_fedavg(events)
    assert len(ends) == 1 + len(hostile) == 1 + len(names)
    assert [end.reason for end in ends if isinstance(end, RunFailed)] == []
    assert [everything(end.result) == everything(ends[0].result) for end in ends if isinstance(end, RunFinished)] == [
        True
    ] * len(ends)


LEAVING = (
    HEADER
    + '''
CODE = (
    "import os, sys, time\\n"
    "if os.fork(): os._exit(0)\\n"
    "os.setsid()\\n"
    "if os.fork(): os._exit(0)\\n"
    "open(sys.argv[1], 'a').write(f'{os.getpid()} ')\\n"
    "time.sleep(600)\\n"
)


class Leaves(Hostile):
    """Starts a process, one in a session of its own, and one that detaches as a daemon does."""
    name = "leaves"

    def spoil(self, task):
        if task.round < 2:
            return
        file = __file__ + ".processes"
        for is_session in (False, True):
            one = subprocess.Popen(["sleep", "600"], start_new_session=is_session)
            open(file, "a").write(f"{one.pid} ")
        subprocess.run([sys.executable, "-S", "-c", CODE, file], check=True)
        while len(open(file).read().split()) < 3:
            time.sleep(0.01)


class LeavesAndHangs(Leaves):
    name = "leaves-and-hangs"

    def spoil(self, task):
        super().spoil(task)
        while task.round == 2:
            time.sleep(60)


class Huge(Hostile):
    name = "huge"

    def spoil(self, task):
        raise ValueError("x" * 20_000_000)


class Mute(Exception):
    """Of no use to anybody who wants to know what happened."""
    __notes__ = 7

    def __str__(self):
        raise SystemExit("nothing")


class Raises(Hostile):
    name = "mute"

    def spoil(self, task):
        raise Mute
'''
)


@pytest.fixture(scope="module")
def leaving(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    file = tmp_path_factory.mktemp("leaving") / "leaving.py"
    file.write_text(LEAVING)
    return replace(settings, plugin_files=(file,))


def left_by(leaving: Settings) -> list[int]:
    """The processes that a run of the plugin has started, all of them; its next run starts others."""
    file = Path(f"{leaving.plugin_files[0]}.processes")
    processes = [int(word) for word in file.read_text().split()]
    file.unlink()
    assert len(processes) == 3
    return processes


def wait_for_the_three(leaving: Settings, engine: Processes) -> None:
    file, until = Path(f"{leaving.plugin_files[0]}.processes"), time.monotonic() + 60
    while not (file.exists() and len(file.read_text().split()) == 3) and time.monotonic() < until:
        engine.wait(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt what another has detached")
def test_what_a_run_leaves_running_ends_with_it_whether_it_finishes_is_stopped_or_its_engine_closed(
    leaving: Settings,
) -> None:
    finishing, hanging = specs_of(leaving, "leaves", "leaves-and-hangs")
    engine = Processes(leaving, 1)
    (end,) = [e for e in execute([finishing], leaving, 1, engine=engine) if isinstance(e, RunFinished | RunFailed)]
    assert isinstance(end, RunFinished)
    assert [one for one in left_by(leaving) if psutil.pid_exists(one)] == []
    for end in (lambda: engine.stop(hanging), engine.close):
        engine.begin(hanging)
        wait_for_the_three(leaving, engine)
        end()
        assert [one for one in left_by(leaving) if psutil.pid_exists(one)] == []


def test_a_failure_of_20_mb_is_cut_and_one_without_a_text_still_has_its_type(leaving: Settings) -> None:
    specs = specs_of(leaving, "huge", "mute")
    huge, mute = [e for e in execute(specs, leaving, 1, engine=Processes(leaving, 1)) if isinstance(e, RunFailed)]
    assert huge.reason.startswith("ValueError: xxx") and "20,000,012 characters" in huge.reason
    assert huge.reason.endswith(f"seed 0, run {huge.spec.run_id})")
    assert len(huge.reason) <= REASON and len(huge.details) <= DETAILS
    assert "in spoil" in huge.details and "characters in all" in huge.details
    assert mute.reason.startswith("Mute: its text can't be read: __str__ raises SystemExit (")
    assert "in spoil" in mute.details


def test_text_that_no_store_takes_is_escaped_and_a_chain_in_a_circle_has_an_end(settings: Settings) -> None:
    (spec,) = specs_of(settings, "fedavg")
    first, second = ValueError("half \ud800 a pair, zero \0"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    failed = failure_of(spec, first)
    assert failed.reason == "ValueError: half \\ud800 a pair, zero \\x00"
    (failed.reason + failed.details).encode()
    long = failure_of(spec, FedbenchError("word " * 10**6))
    assert len(long.reason) <= REASON and long.reason.startswith("word word")


@pytest.mark.slow  # each imports torch
def test_where_the_system_cannot_fork_a_worker_imports_what_it_needs_itself(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "context", lambda: multiprocessing.get_context("spawn"))
    fedavg, dying = specs_of(settings, "fedavg", "leaves-early")
    events = list(execute([fedavg, dying], settings, 1, engine=Processes(settings, 1), policy=NO_RETRY))
    finished, lost = [e for e in events if isinstance(e, RunFinished | RunFailed)]
    assert isinstance(finished, RunFinished)
    assert isinstance(lost, RunFailed) and lost.reason == "its process ended with exit code 0"


def test_a_worker_has_what_its_runs_read_and_keeps_it_for_the_next_one(settings: Settings) -> None:
    (spec,) = specs_of(settings, "fedavg")
    apart = Apart(replace(settings, plugin_files=()))
    looked: list[Any] = []
    try:
        for _ in range(2):
            assert apart.carry_out(Work(look_around, None, spec), looked.append) == 0
    finally:
        apart.close()
    assert looked[0] == looked[1] and looked[0][1:] == (240, "clip:embedded")


def look_around(_: None, settings: Settings, loaded: Loaded, emit: Callable[[Any], None]) -> bool:
    assert loaded.dataset is not None and loaded.backbone is not None
    emit(((os.getpid(), id(loaded.dataset), id(loaded.backbone)), len(loaded.dataset.train), loaded.backbone.name))
    return True


# --- runs share a worker where all their code comes with fedbench


@pytest.fixture
def package(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The hostile methods, and some that keep something from run to run, as an installed package."""
    metadata = tmp_path / "hostile_package-1.0.dist-info"
    metadata.mkdir()
    (tmp_path / "hostile_package.py").write_text(Path(settings.plugin_files[0]).read_text() + KEPT)
    names = ["in-place", "all-tensors", "unseen-by-torch", "remembers", *SPOILING]
    classes = ["InPlace", "Dataset", "Unseen", "Remembers", *(f"Spoils{number}" for number in range(len(SPOILING)))]
    points = [f"{name} = hostile_package:{cls}" for name, cls in zip(names, classes, strict=True)]
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(["[fedbench.methods]", *points]))
    monkeypatch.syspath_prepend(str(tmp_path))
    return replace(settings, plugin_files=())


KEPT = """

class Unseen(Hostile):
    '''Everything that was loaded, in place and past torch's counting of changes.'''
    name = "unseen-by-torch"

    def spoil(self, task):
        for tensor in [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]:
            if not tensor.requires_grad and tensor.dtype in (torch.float32, torch.uint8, torch.int64):
                tensor.data.zero_()


COUNT, SEEN = 0, {}


class Remembers(Hostile):
    '''Its module keeps what it has seen, as a careless method does.'''
    name = "remembers"

    @hookimpl
    def aggregate(self, task):
        global COUNT
        COUNT += 1
        SEEN[COUNT] = True
        return {name: tensor + 0.01 * (COUNT + len(SEEN)) for name, tensor in average(task).items()}
"""


def test_whatever_a_run_of_an_installed_method_does_the_next_gives_the_same_numbers(package: Settings) -> None:
    names = ("in-place", "all-tensors", "unseen-by-torch", *SPOILING)
    fedavg, *hostile = specs_of(package, "fedavg", *names)
    specs = [fedavg, *(spec for one in hostile for spec in (one, fedavg))]
    events = list(execute(specs, package, 1, engine=Processes(package, 1), policy=NO_RETRY))
    ends = of_fedavg(events)
    assert len(ends) == 1 + len(hostile)
    assert [end.reason for end in ends if isinstance(end, RunFailed)] == []
    assert [everything(end.result) == everything(ends[0].result) for end in ends if isinstance(end, RunFinished)] == [
        True
    ] * len(ends)


def test_a_method_of_another_package_keeps_nothing_from_run_to_run(package: Settings) -> None:
    (spec,) = specs_of(package, "remembers")
    again = spec.model_copy(update={"setting": "again"})
    events = list(execute([spec, again], package, 1, engine=Processes(package, 1), policy=NO_RETRY))
    first, second = [event for event in events if isinstance(event, RunFinished)]
    assert everything(first.result) == everything(second.result)


def test_runs_of_fedbench_share_a_worker(package: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Worker] = []
    begin = Worker.__init__
    monkeypatch.setattr(Worker, "__init__", lambda self, *rest: (started.append(self), begin(self, *rest))[1])
    specs = specs_of(package, "fedavg", "fedprox", "promptfl", "scaffold", "fedclip", "ccvr")
    events = list(execute([*specs, *specs], package, 1, engine=Processes(package, 1), policy=NO_RETRY))
    ends = [event for event in events if isinstance(event, RunFinished)]
    assert len(ends) == 2 * len(specs) and len(started) == 1
    assert [everything(end.result) for end in ends[: len(specs)]] == [
        everything(end.result) for end in ends[len(specs) :]
    ]


@pytest.mark.parametrize("is_given", [True, False])
def test_runs_share_a_dual_encoder_unless_its_weights_are_drawn_from_their_seeds(tmp_path, monkeypatch, is_given):
    monkeypatch.setattr("fedbench.runs.prepare.load_dataset", lambda *_, **__: tiny_dataset())
    monkeypatch.setattr("fedbench.runs.prepare.is_pretrained", lambda _: is_given)
    loaded = Loader(Settings(tmp_path, tmp_path)).load(tiny_spec("fedavg", backbone="clip:embedded"))
    assert loaded.dataset is not None and (loaded.backbone is not None) == is_given
