"""Runs in this process and in a pool give the same numbers; a run that fails leaves the others alone."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fedbench.core.method.hooks import plugin_manager, relay
from fedbench.plugins.provenance import Codes
from fedbench.runs.engines.engine import Policy, Processes, execute
from fedbench.runs.engines.events import Lost, RoundFinished, RunFailed, RunFinished, RunRetried, RunStarted, notify
from fedbench.runs.prepare import Settings
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite
from fedbench.tracking.listener import Tracking
from fedbench.tracking.schema import store_uri
from fedbench.tracking.store import open_store, runs_of

SUITE = """
name: engine
dataset: "embedded?train=240&test=40"
scenario: {preset: iid, clients: 4, participation: 0.5}
training: {rounds: 2}
seeds: [0, 1]
rows: [{method: fedavg}, {method: fedclip}]
"""

FAULTY = '''
"""Fails in round 2."""
from dataclasses import dataclass
from fedbench.core.method.hooks import hookimpl
from fedbench.toolkit.fedavg import average

@dataclass(frozen=True, kw_only=True)
class P:
    """None."""

class Faulty:
    name, citation, Params, recipe = "faulty", "nobody", P, {}
    def __init__(self, params):
        pass
    @hookimpl
    def aggregate(self, task):
        """Divides by zero in round 2."""
        return average(task) if task.round < 2 else 1 / 0
'''


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    (folder / "faulty.py").write_text(FAULTY)
    return Settings(Path(folder), folder / "cache", (folder / "faulty.py",))


def outcomes(events):
    finished = [event for event in events if isinstance(event, RunFinished)]
    drop = ("train_seconds",)
    return {e.spec.run_id: ({k: v for k, v in e.result.summary.items() if k not in drop}, e.result.predictions)
            for e in finished}  # fmt: skip


def test_a_pool_gives_the_same_numbers_as_this_process_in_any_order(settings):
    specs = expand(parse_suite(SUITE, "engine"), Overrides())
    alone = list(execute(specs, settings, workers=1))
    pooled = list(execute(specs[::-1], settings, workers=2))
    assert outcomes(alone) == outcomes(pooled)
    assert len(outcomes(alone)) == 4
    for events in (alone, pooled):
        for spec in specs:
            kinds = [type(event) for event in events if event.spec == spec]
            assert kinds == [RunStarted, RoundFinished, RoundFinished, RoundFinished, RunFinished]


def test_a_failing_run_is_reported_with_round_and_seed_and_the_others_go_on(settings):
    specs = expand(
        parse_suite(SUITE, "engine"),
        Overrides(methods=("faulty", "fedavg"), seeds=(5,), plugin_files=settings.plugin_files),
    )
    events = list(execute(specs, settings, workers=1))
    failed = [event for event in events if isinstance(event, RunFailed)]
    assert [event.spec.method for event in failed] == ["faulty"]
    assert "ZeroDivisionError" in failed[0].reason and "round 2, seed 5" in failed[0].reason
    assert "Traceback" in failed[0].details
    assert [e.spec.method for e in events if isinstance(e, RunFinished)] == ["fedavg"]


def test_a_run_that_cannot_work_fails_with_its_message_and_without_a_traceback(settings):
    specs = expand(
        parse_suite(SUITE, "engine"), Overrides(methods=("fedavg",), seeds=(0,), sets=(("labels", "hidden"),))
    )
    (failed,) = [event for event in execute(specs, settings, workers=1) if isinstance(event, RunFailed)]
    assert failed.reason.startswith("this scenario hides the labels") and failed.details == ""


DYING = FAULTY.replace("faulty", "dying").replace("1 / 0", "__import__('os')._exit(9)")


def test_a_process_that_dies_fails_its_own_run_after_its_retries_and_no_other(settings, tmp_path):
    (tmp_path / "dying.py").write_text(DYING)
    mine = replace(settings, plugin_files=(tmp_path / "dying.py",))
    specs = expand(
        parse_suite(SUITE, "engine"),
        Overrides(methods=("dying", "fedavg"), seeds=(0, 1), plugin_files=mine.plugin_files),
    )
    events = list(execute(specs, mine, workers=2, policy=Policy(retries=1, pause=0.1)))
    failed = [event for event in events if isinstance(event, RunFailed)]
    assert sorted(event.spec.seed for event in failed) == [0, 1]
    assert {event.reason for event in failed} == {"its process ended with exit code 9 (attempt 2 of 2)"}
    retried = [(event.spec.method, event.attempt) for event in events if isinstance(event, RunRetried)]
    assert retried == [("dying", 1)] * 2
    alone = outcomes(execute([s for s in specs if s.method == "fedavg"], settings, workers=1))
    assert outcomes(events) == alone and len(alone) == 2


PASSING = FAULTY.replace("faulty", "passing").replace(
    "        return average(task) if task.round < 2 else 1 / 0\n",
    """        from pathlib import Path
        tried = Path(__file__).with_suffix(".tried")
        if task.round == 2 and not tried.exists():
            import os
            tried.touch()
            os.kill(os.getpid(), 9)
        return average(task)
""",
)


def test_a_run_whose_process_is_killed_is_tried_again_and_ends_as_if_nothing_had_been(settings, tmp_path):
    (tmp_path / "passing.py").write_text(PASSING)
    mine = replace(settings, plugin_files=(tmp_path / "passing.py",))
    specs = expand(
        parse_suite(SUITE, "engine"), Overrides(methods=("passing",), seeds=(0, 1), plugin_files=mine.plugin_files)
    )
    events = list(execute(specs, mine, workers=2, policy=Policy(pause=0.1)))
    reasons = [event.reason for event in events if isinstance(event, RunRetried)]
    assert reasons == ["its process was killed by SIGKILL; is there too little memory? try fewer --jobs"]
    assert outcomes(events) == outcomes(execute(specs, mine, workers=1)) and len(outcomes(events)) == 2


ORPHANING = DYING.replace("dying", "orphaning").replace(
    "__import__('os')._exit(9)",
    "(child := __import__('os').fork())"
    " and __import__('pathlib').Path(__file__).with_suffix('.child').write_text(str(child))"
    " and __import__('os')._exit(9) or __import__('time').sleep(90)",
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_dies_is_noticed_though_its_child_holds_its_end_of_the_pipe(settings, tmp_path):
    (tmp_path / "orphaning.py").write_text(ORPHANING)
    mine = replace(settings, plugin_files=(tmp_path / "orphaning.py",))
    (spec,) = expand(
        parse_suite(SUITE, "engine"), Overrides(methods=("orphaning",), seeds=(0,), plugin_files=mine.plugin_files)
    )
    began = time.monotonic()
    events = list(execute([spec], mine, 1, engine=Processes(mine, 1), policy=Policy(retries=0)))
    assert events[-1].reason == "its process ended with exit code 9" and time.monotonic() - began < 60
    orphan = int((tmp_path / "orphaning.child").read_text())
    assert sys.platform != "linux" or not _is_running(orphan)


def test_a_process_that_cannot_be_started_costs_its_run_an_attempt_and_no_other_run(settings, monkeypatch):
    (spec,) = expand(parse_suite(SUITE, "engine"), Overrides(methods=("fedavg",), seeds=(0,)))
    engine, tries = Processes(settings, 1), []
    start = engine._new

    def unwilling():
        tries.append(True)
        if len(tries) == 1:
            raise BlockingIOError(11, "no more processes")
        return start()

    monkeypatch.setattr(engine, "_new", unwilling)
    events = list(execute([spec], settings, 1, engine=engine, policy=Policy(pause=0.1)))
    assert "no process could be started" in events[0].reason and isinstance(events[0], RunRetried)
    assert isinstance(events[-1], RunFinished)


WAITING = FAULTY.replace("faulty", "waiting").replace("1 / 0", "__import__('time').sleep(60)")


def test_a_run_that_takes_too_long_is_ended_and_the_others_go_on(settings, tmp_path):
    (tmp_path / "waiting.py").write_text(WAITING)
    mine = replace(settings, plugin_files=(tmp_path / "waiting.py",))
    specs = expand(
        parse_suite(SUITE, "engine"),
        Overrides(methods=("waiting", "fedavg"), seeds=(0,), plugin_files=mine.plugin_files),
    )
    began = time.monotonic()
    events = list(execute(specs, mine, workers=1, engine=Processes(mine, 1), policy=Policy(timeout=6)))
    assert time.monotonic() - began < 50
    (failed,) = [event for event in events if isinstance(event, RunFailed)]
    assert (failed.spec.method, failed.reason) == ("waiting", "timed out: took more than 6 s (--run-timeout)")
    assert [e.spec.method for e in events if isinstance(e, RunFinished)] == ["fedavg"]


FLUSHING = FAULTY.replace("faulty", "flushing").replace(
    "        return average(task) if task.round < 2 else 1 / 0\n",
    """        import sys, time, types
        sys.stdout = types.SimpleNamespace(flush=lambda: time.sleep(600))
        return average(task)
""",
)


def test_a_run_that_ended_before_its_deadline_has_finished_however_long_its_process_takes_to_end(settings, tmp_path):
    (tmp_path / "flushing.py").write_text(FLUSHING)
    mine = replace(settings, plugin_files=(tmp_path / "flushing.py",))
    (spec,) = expand(
        parse_suite(SUITE, "engine"), Overrides(methods=("flushing",), seeds=(0,), plugin_files=mine.plugin_files)
    )
    events = list(execute([spec], mine, 1, engine=Processes(mine, 1), policy=Policy(timeout=8)))
    assert [type(event) for event in events] == [RunStarted, *[RoundFinished] * 3, RunFinished]


class TwoSlots:
    """An engine of two slots whose runs end at once, the first attempt at the second by a full memory."""

    is_one_machine = True

    def __init__(self) -> None:
        self.calls, self.under_way = [], []

    def slots(self) -> int:
        return 2

    def begin(self, spec):
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
    specs = expand(parse_suite(SUITE, "engine"), Overrides(methods=("fedavg",), seeds=(0, 1, 2)))
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


def test_fail_fast_ends_everything_at_the_first_failure(settings):
    specs = expand(
        parse_suite(SUITE, "engine"),
        Overrides(methods=("faulty", "fedavg"), seeds=(0, 1), plugin_files=settings.plugin_files),
    )
    specs = sorted(specs, key=lambda spec: spec.method != "faulty")
    events = list(execute(specs, settings, workers=1, policy=Policy(fail_fast=True)))
    assert isinstance(events[-1], RunFailed)
    assert {event.spec.run_id for event in events} == {specs[0].run_id}


def test_what_a_run_measured_before_it_failed_is_in_the_store(settings, tmp_path):
    uri = store_uri(str(tmp_path / "store"))
    (spec,) = expand(
        parse_suite(SUITE, "engine"),
        Overrides(methods=("faulty",), seeds=(5,), plugin_files=settings.plugin_files),
    )
    manager = plugin_manager()
    manager.register(Tracking(uri, "engine", codes=Codes(settings.plugin_files)))
    measured = []
    for event in execute([spec], settings, workers=1):
        notify(relay(manager), event)
        if isinstance(event, RoundFinished):
            measured.append((event.record.round, event.record.metrics["global_accuracy"]))
    client = open_store(uri, create=False)
    ((_, run),) = runs_of(client, "engine")
    assert run.info.status == "FAILED" and "round 2" in run.data.tags["fedbench.failure"]
    history = client.get_metric_history(run.info.run_id, "global_accuracy")
    assert [(metric.step, metric.value) for metric in history] == measured and len(measured) == 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the process table of Linux")
def test_workers_import_no_mlflow_and_end_when_their_parent_is_killed(tmp_path):
    # a parent that starts a worker with a long job, says what the worker has imported and its process id, and waits
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from fedbench.runs import engines as workers\n"
        "from fedbench.runs.engines.worker import quiet_worker\n"
        "def imported():\n"
        "    import sys\n"
        "    return [name in sys.modules for name in ('fedbench.models.clip.backbone', 'mlflow')]\n"
        "if __name__ == '__main__':\n"
        "    workers.warm_up()\n"
        "    pool = ProcessPoolExecutor(1, mp_context=workers.context(), initializer=quiet_worker)\n"
        "    print(pool.submit(imported).result(), flush=True)\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    pool.submit(time.sleep, 60).result()\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "[True, False]\n"
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while _is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _is_running(worker)


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the process table of Linux")
def test_no_process_of_a_pool_outlives_a_killed_parent(settings, tmp_path):
    (tmp_path / "waiting.py").write_text(WAITING)
    (tmp_path / "suite.yaml").write_text(SUITE)
    script = tmp_path / "parent.py"
    script.write_text(
        "from pathlib import Path\n"
        "from fedbench.runs.engines.engine import execute\n"
        "from fedbench.runs.engines.events import RoundFinished\n"
        "from fedbench.suites.expand import expand\n"
        "from fedbench.runs.prepare import Settings\n"
        "from fedbench.suites.resolve import Overrides\n"
        "from fedbench.suites.suite import parse_suite\n"
        "if __name__ == '__main__':\n"
        f"    folder, cache = Path({str(tmp_path)!r}), Path({str(settings.cache_dir)!r})\n"
        "    plugins = (folder / 'waiting.py',)\n"
        "    suite = parse_suite((folder / 'suite.yaml').read_text(), 'engine')\n"
        "    specs = expand(suite, Overrides(methods=('waiting',), seeds=(0, 1), plugin_files=plugins))\n"
        "    for event in execute(specs, Settings(folder, cache, plugins), workers=2):\n"
        "        if isinstance(event, RoundFinished) and event.record.round == 1:\n"
        "            print('round 1', flush=True)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert parent.stdout.readline() == "round 1\n"
        # besides the parent at least tracker, server of forks and a worker
        assert len(_running_in(parent.pid)) >= 4
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 20
        while _running_in(parent.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert _running_in(parent.pid) == []
    finally:
        if _running_in(parent.pid):
            os.killpg(parent.pid, signal.SIGKILL)


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
