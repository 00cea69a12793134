"""Runs in this process and in a pool give the same numbers; a run that fails leaves the others alone."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fedbench.runs.engines.engine import Policy, Processes, execute
from fedbench.runs.engines.events import Lost, RoundFinished, RunFailed, RunFinished, RunRetried, RunStarted
from fedbench.runs.prepare import Settings
from tests.runs.kit import method_file, outcomes, specs_of

BODIES = {
    "faulty": "return average(task) if task.round < 2 else 1 / 0",
    "dying": "return average(task) if task.round < 2 else os._exit(9)",
    "killed-once": """
tried = Path(__file__).with_suffix(".tried")
if task.round == 2 and not tried.exists():
    tried.touch()
    os.kill(os.getpid(), 9)
return average(task)
""",
    "orphaning": """
if child := os.fork():
    Path(__file__).with_suffix(".child").write_text(str(child))
    os._exit(9)
time.sleep(90)
""",
    "waiting": """
Path(__file__).with_suffix(".mlflow").write_text(str("mlflow" in sys.modules))
return average(task) if task.round < 2 else time.sleep(60)
""",
    "flushing": """
sys.stdout = types.SimpleNamespace(flush=lambda: time.sleep(600))
return average(task)
""",
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    return Settings(folder, folder / "cache")


def runs_of(settings, folder, *methods, seeds=(0,)):
    """Runs of these methods, those of the test from files in ``folder``, and the settings for them."""
    files = tuple(method_file(folder, name, BODIES[name]) for name in methods if name in BODIES)
    return specs_of(plugins=files, methods=methods, seeds=seeds), replace(settings, plugin_files=files)


def ends(events, kind):
    return [event for event in events if isinstance(event, kind)]


def test_a_pool_gives_the_same_numbers_as_this_process_in_any_order(settings):
    specs = specs_of()
    alone = list(execute(specs, settings, workers=1))
    pooled = list(execute(specs[::-1], settings, workers=2))
    assert outcomes(alone) == outcomes(pooled)
    assert len(outcomes(alone)) == 4
    for events in (alone, pooled):
        for spec in specs:
            kinds = [type(event) for event in events if event.spec == spec]
            assert kinds == [RunStarted, RoundFinished, RoundFinished, RoundFinished, RunFinished]


def test_a_failing_run_is_reported_with_round_and_seed_and_the_others_go_on_unless_failing_fast(settings, tmp_path):
    specs, mine = runs_of(settings, tmp_path, "faulty", "fedavg", seeds=(5,))
    events = list(execute(specs, mine, workers=1))
    (failed,) = ends(events, RunFailed)
    assert failed.spec.method == "faulty"
    assert "ZeroDivisionError" in failed.reason and "round 2, seed 5" in failed.reason
    assert "Traceback" in failed.details
    assert [event.spec.method for event in ends(events, RunFinished)] == ["fedavg"]
    events = list(execute(specs, mine, workers=1, policy=Policy(fail_fast=True)))
    assert isinstance(events[-1], RunFailed) and {event.spec.method for event in events} == {"faulty"}


def test_a_run_that_cannot_work_fails_with_its_message_and_without_a_traceback(settings):
    specs = specs_of(methods=("fedavg",), seeds=(0,), sets=(("labels", "hidden"),))
    (failed,) = ends(execute(specs, settings, workers=1), RunFailed)
    assert failed.reason.startswith("this scenario hides the labels") and failed.details == ""


def test_a_process_that_dies_fails_its_own_run_after_its_retries_and_no_other(settings, tmp_path):
    specs, mine = runs_of(settings, tmp_path, "dying", "fedavg", seeds=(0, 1))
    events = list(execute(specs, mine, workers=2, policy=Policy(retries=1, pause=0.1)))
    failed = ends(events, RunFailed)
    assert sorted(event.spec.seed for event in failed) == [0, 1]
    assert {event.reason for event in failed} == {"its process ended with exit code 9 (attempt 2 of 2)"}
    assert [(event.spec.method, event.attempt) for event in ends(events, RunRetried)] == [("dying", 1)] * 2
    alone = outcomes(execute([s for s in specs if s.method == "fedavg"], settings, workers=1))
    assert outcomes(events) == alone and len(alone) == 2


def test_a_run_whose_process_is_killed_is_tried_again_and_ends_as_if_nothing_had_been(settings, tmp_path):
    specs, mine = runs_of(settings, tmp_path, "killed-once", seeds=(0, 1))
    events = list(execute(specs, mine, workers=2, policy=Policy(pause=0.1)))
    reasons = [event.reason for event in ends(events, RunRetried)]
    assert reasons == ["its process was killed by SIGKILL; is there too little memory? try fewer --jobs"]
    assert outcomes(events) == outcomes(execute(specs, mine, workers=1)) and len(outcomes(events)) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_dies_is_noticed_though_its_child_holds_its_end_of_the_pipe(settings, tmp_path):
    (spec,), mine = runs_of(settings, tmp_path, "orphaning")
    began = time.monotonic()
    events = list(execute([spec], mine, 1, engine=Processes(mine, 1), policy=Policy(retries=0)))
    assert events[-1].reason == "its process ended with exit code 9" and time.monotonic() - began < 60
    orphan = int((tmp_path / "orphaning.child").read_text())
    assert sys.platform != "linux" or not _is_running(orphan)


def test_a_process_that_cannot_be_started_costs_its_run_an_attempt_and_no_other_run(settings, monkeypatch):
    (spec,) = specs_of(methods=("fedavg",), seeds=(0,))
    engine, tries = Processes(settings, 1), []
    start = engine._new

    def unwilling(*place):
        tries.append(True)
        if len(tries) == 1:
            raise BlockingIOError(11, "no more processes")
        return start(*place)

    monkeypatch.setattr(engine, "_new", unwilling)
    events = list(execute([spec], settings, 1, engine=engine, policy=Policy(pause=0.1)))
    assert "no process could be started" in events[0].reason and isinstance(events[0], RunRetried)
    assert isinstance(events[-1], RunFinished)


def test_a_run_that_takes_too_long_is_ended_and_one_whose_process_takes_long_to_end_is_not(settings, tmp_path):
    specs, mine = runs_of(settings, tmp_path, "waiting", "flushing", "fedavg")
    began = time.monotonic()
    events = list(execute(specs, mine, workers=1, engine=Processes(mine, 3), policy=Policy(timeout=8)))
    assert time.monotonic() - began < 50
    (failed,) = ends(events, RunFailed)
    assert (failed.spec.method, failed.reason) == ("waiting", "timed out: took more than 8 s (--run-timeout)")
    assert {event.spec.method for event in ends(events, RunFinished)} == {"flushing", "fedavg"}
    flushed = [type(event) for event in events if event.spec.method == "flushing"]
    assert flushed == [RunStarted, *[RoundFinished] * 3, RunFinished]


class TwoSlots:
    """An engine of two slots whose runs end at once, the first attempt at the second by a full memory."""

    is_one_machine = True

    def __init__(self) -> None:
        self.calls, self.under_way = [], []

    def slots(self) -> int:
        return 2

    def has_room(self, spec, *, alone=False):
        return True

    def begin(self, spec, *, alone=False):
        self.calls.append(spec.seed)
        self.under_way.append(spec)

    def wait(self, seconds):
        specs, self.under_way = self.under_way, []
        lost = [spec for spec in specs if spec.seed == 1 and self.calls.count(1) == 1]
        return [Lost(spec, "no memory") if spec in lost else RunFinished(spec, None, None) for spec in specs]

    def has_begun(self, spec):
        return True

    def stop(self, spec):
        return []

    def clear(self):
        self.calls.append("clear")

    def close(self):
        self.calls.append("close")


def test_what_is_tried_again_has_the_machine_alone_without_idle_processes(settings):
    specs = specs_of(methods=("fedavg",), seeds=(0, 1, 2))
    engine = TwoSlots()
    list(execute(specs, settings, 2, engine=engine, policy=Policy(pause=0.0)))
    assert engine.calls == [0, 1, 2, "clear", 1, "close"]
    pool = Processes(replace(settings, plugin_files=()), 1)
    pool.begin(specs[0])
    while not any(isinstance(event, RunFinished) for event in pool.wait(1.0)):
        pass
    (idle,) = pool._workers
    pool.clear()
    assert not idle.process.can_begin() and pool._workers == []
    pool.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the process table of Linux")
def test_no_process_of_a_pool_imports_mlflow_or_outlives_a_killed_parent(settings, tmp_path):
    method_file(tmp_path, "waiting", BODIES["waiting"])
    script = tmp_path / "parent.py"
    script.write_text(
        "from pathlib import Path\n"
        "from fedbench.runs.engines.engine import execute\n"
        "from fedbench.runs.engines.events import RoundFinished\n"
        "from fedbench.runs.prepare import Settings\n"
        "from tests.runs.kit import specs_of\n"
        "if __name__ == '__main__':\n"
        f"    plugins = (Path({str(tmp_path)!r}) / 'waiting.py',)\n"
        f"    settings = Settings(Path({str(tmp_path)!r}), Path({str(settings.cache_dir)!r}), plugins)\n"
        "    for event in execute(specs_of(plugins=plugins, methods=('waiting',)), settings, workers=2):\n"
        "        if isinstance(event, RoundFinished) and event.record.round == 1:\n"
        "            print('round 1', flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        assert parent.stdout.readline() == "round 1\n"
        # besides the parent at least tracker, server of forks and a worker
        assert len(_running_in(parent.pid)) >= 4
        assert (tmp_path / "waiting.mlflow").read_text() == "False"
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 20
        while _running_in(parent.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert _running_in(parent.pid) == []
    finally:
        if _running_in(parent.pid):
            os.killpg(parent.pid, signal.SIGKILL)


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _running_in(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def test_workers_import_from_where_their_parent_does_and_not_from_the_current_folder(tmp_path):
    # the server of forks imports this module before it receives the parent's path: let it be the probe
    for name in ("first", "current"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fedbench_probe_xyz.py").write_text(f"WHERE = {name!r}\n")
    (tmp_path / "current" / "fedbench_planted_xyz.py").touch()
    installed = Path(sys.modules["fedbench"].__file__).parent
    for package in ("", "runs", "runs/engines"):
        folder = tmp_path / "first" / "fedbench" / package
        folder.mkdir(parents=True)
        own = (installed / package / "__init__.py").read_text() if package == "runs/engines" else ""
        (folder / "__init__.py").write_text(f"{own}\n__path__.append({str(installed / package)!r})\n")
    (tmp_path / "first" / "fedbench" / "runs" / "engines" / "preload.py").write_text(
        "import importlib.util, fedbench_probe_xyz\n"
        "FOUND = fedbench_probe_xyz.WHERE, importlib.util.find_spec('fedbench_planted_xyz') is None\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(tmp_path / 'first')!r})\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from fedbench.runs.engines import context\n"
        "def found():\n"
        "    return sys.modules['fedbench.runs.engines.preload'].FOUND\n"
        "if __name__ == '__main__':\n"
        "    before = dict(os.environ)\n"
        "    with ProcessPoolExecutor(1, mp_context=context()) as pool:\n"
        "        print(*pool.submit(found).result(), dict(os.environ) == before)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path / "current", capture_output=True, text=True, check=False
    )
    assert done.stdout == "first True True\n", done.stderr
