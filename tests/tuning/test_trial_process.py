"""Whatever a trial does to its process, the next one starts from the same state, and the worker lives on."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
from optuna.exceptions import TrialPruned
from optuna.trial import TrialState

from fedbench.core.errors import FedbenchError, Unworkable
from fedbench.core.records import RoundRecord
from fedbench.core.spec import RunSpec
from fedbench.runs.engines.worker import Worker
from fedbench.runs.prepare import Settings
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite
from fedbench.tracking.schema import store_uri
from fedbench.tracking.store import open_store
from fedbench.tuning.space import defaults_of, space_of
from fedbench.tuning.storage import open_storage, storage_url
from fedbench.tuning.studies import RETRIES, Budget, Record, counted, open_study
from fedbench.tuning.trial import Tuned, trial_specs
from fedbench.tuning.trial_process import TrialBroke, TrialDied, TrialProcess
from fedbench.tuning.worker import Job, TrialEnded, WorkerFailed, tune

SUITE = """
name: trials
dataset: "embedded?train=240&test=40"
scenario: {preset: iid, clients: 4, participation: 0.5}
training: {rounds: 2, lr: 0.01}
rows: [{method: fedavg}]
"""
HEADER = '''
"""Each answers `aggregate` as FedAvg does, and does something to its process."""
import os, signal, time
from dataclasses import dataclass
from pathlib import Path

import torch

import fedbench.toolkit.fedavg
from fedbench.toolkit.fedavg import average
from fedbench.core.errors import FedbenchError, Unworkable
from fedbench.core.method.hooks import hookimpl

HERE = Path(__file__).parent


class Hopeless(Unworkable):
    pass


class Own(Exception):
    def __init__(self, first, second):
        pass


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
        if task.round == 2:
            self.spoil(task)
        return answer
'''
SPOILING = {
    "spoils": "fedbench.toolkit.fedavg.average = lambda task: {name: 0 * value for name, value in task.weights.items()}"
    "; torch.set_default_dtype(torch.float64); task.spec.params.setdefault('mut', {})['mu'] = task.round",
    "dies-once": "(HERE / 'died').exists() or ((HERE / 'died').touch(), os.kill(os.getpid(), signal.SIGKILL))",
    "leaves": "os._exit(0)",
    "hangs": "(HERE / 'hanging').mkdir(exist_ok=True); (HERE / 'hanging' / str(os.getpid())).touch(); time.sleep(600)",
    "kills-parent": "os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)",
    "unworkable": "raise Hopeless('too large')",
    "refused": "raise FedbenchError('the weights are gone')",
    "broken": "raise Own(1, 2)",
    "exits": "raise SystemExit(3)",
}


@pytest.fixture
def settings(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    classes = [
        f"class C{number}(Hostile):\n    name = {name!r}\n\n    def spoil(self, task):\n        {code}\n"
        for number, (name, code) in enumerate(SPOILING.items())
    ]
    (tmp_path / "hostile.py").write_text("\n\n".join([HEADER, *classes]))
    return Settings(tmp_path, tmp_path_factory.getbasetemp() / "trials-cache", (tmp_path / "hostile.py",))


def specs_of(settings: Settings, *methods: str) -> list[RunSpec]:
    return expand(parse_suite(SUITE, "trials"), Overrides(methods=methods, plugin_files=settings.plugin_files))


def job_of(folder: Path, settings: Settings, trials: int, *methods: str) -> tuple[Job, list[optuna.Study]]:
    uri = store_uri(str(folder))
    url = storage_url(None, uri)
    storage = open_storage(url, create=True)
    spent = Budget(trials=trials, seeds=(5,), objectives=("global_accuracy",), pruner="none")
    rows, studies = [], []
    for spec in specs_of(settings, *methods):
        space = space_of(spec, settings.plugin_files)
        record = Record(
            **{"name": "toy", "suite": "trials", "scale": "", "setting": "", "row": spec.row, "title": spec.title},
            **{"spec": spec.model_dump(mode="json"), "space": tuple(d.as_json() for d in space), "budget": spent},
            **{"code_hash": "c", "data_hash": "d", "weights_hash": "w", "commit": ""},
        )
        studies.append(open_study(storage, record, defaults_of(spec, space)))
        rows.append(Tuned(spec, space, record.study_name))
    return Job(url, tuple(rows), settings, "trials", uri), studies


def by_place(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [(t.state, t.params, t.values, t.intermediate_values) for t in counted(study)]


def statuses(folder: Path, study: optuna.Study) -> dict[int, str]:
    """By trial of ``study``, how its MLflow run ended."""
    client = open_store(store_uri(str(folder)), create=False)
    assert client is not None
    return {t.number: client.get_run(t.user_attrs["mlflow_run"]).info.status for t in study.trials}


@pytest.mark.slow
def test_what_trials_do_to_their_process_meets_no_other_trial_and_the_worker_lives_on(
    tmp_path: Path, settings: Settings
) -> None:
    hostile, (spoiled, once, leaving, fedavg) = job_of(
        tmp_path / "a", settings, 3, "spoils", "dies-once", "leaves", "fedavg"
    )
    events = list(tune(hostile, 1))
    assert [event for event in events if isinstance(event, WorkerFailed)] == []
    assert (tmp_path / "died").exists()
    undisturbed, (calm, alone) = job_of(tmp_path / "b", settings, 3, "dies-once", "fedavg")
    list(tune(undisturbed, 1))

    assert by_place(fedavg) == by_place(alone)
    assert len({trial.value for trial in alone.trials}) > 1
    assert [trial.state for trial in spoiled.trials] == [TrialState.COMPLETE] * 3
    # the one whose process was killed was tried again in its place
    assert by_place(once) == by_place(calm)
    assert [trial.state for trial in once.trials].count(TrialState.FAIL) == 1
    assert statuses(tmp_path / "a", once) == {0: "KILLED", 1: "FINISHED", 2: "FINISHED", 3: "FINISHED"}
    # values whose process always ends are given up
    assert [trial.state for trial in counted(leaving)] == [TrialState.PRUNED] * 3
    assert len(leaving.trials) == 3 * (RETRIES + 2)
    told = [event.reason for event in events if isinstance(event, TrialEnded) and event.row.spec.method == "leaves"]
    assert told == [trial.user_attrs["reason"] for trial in counted(leaving)]
    assert all("died 4 times" in reason for reason in told)
    failed = [trial for trial in leaving.trials if trial.state is TrialState.FAIL]
    assert {trial.user_attrs["reason"] for trial in failed} == {"its process ended with exit code 0"}
    # and all that was the work of a single worker
    tried = [trial for study in (spoiled, once, leaving, fedavg) for trial in study.trials]
    assert len({trial.user_attrs["process"] for trial in tried if "process" in trial.user_attrs}) == 1


@pytest.fixture
def process(settings: Settings) -> Iterator[TrialProcess]:
    with closing(TrialProcess(settings)) as made:
        yield made


def trial_of(settings: Settings, method: str, seeds: tuple[int, ...] = (5,)) -> list[RunSpec]:
    spent = Budget(trials=1, seeds=seeds, objectives=("global_accuracy",), pruner="none")
    return trial_specs(specs_of(settings, method)[0], {}, spent)


def ignore(spec: RunSpec, record: RoundRecord) -> None:
    pass


def test_what_a_run_raises_arrives_as_an_error_that_the_worker_knows(settings: Settings, process: TrialProcess) -> None:
    with pytest.raises(Unworkable, match="^too large$"):
        process.run(trial_of(settings, "unworkable"), ignore)
    with pytest.raises(FedbenchError, match="^the weights are gone$") as refused:
        process.run(trial_of(settings, "refused"), ignore)
    assert not isinstance(refused.value, Unworkable)
    for method, told in (("broken", "Own"), ("exits", "SystemExit: 3")):
        with pytest.raises(TrialBroke) as broken:
            process.run(trial_of(settings, method), ignore)
        assert broken.value.reason.startswith(told)
        assert "in spoil" in broken.value.details


def test_a_trial_that_kills_the_server_of_forks_has_died_and_the_next_has_a_new_one(
    settings: Settings, process: TrialProcess
) -> None:
    with pytest.raises(TrialDied, match="exit code 255"):
        process.run(trial_of(settings, "kills-parent"), ignore)
    (summary,) = process.run(trial_of(settings, "fedavg"), ignore)
    assert summary["global_accuracy"] > 0


def test_a_trial_whose_process_is_gone_before_it_begins_has_died(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(settings)
    worker._process.kill()
    worker._process.join()
    monkeypatch.setattr(Worker, "can_begin", lambda self: True)
    with closing(TrialProcess(settings, worker)) as process, pytest.raises(TrialDied, match="SIGKILL"):
        process.run(trial_of(settings, "fedavg"), ignore)


LOADING = """
import os, sys, time
from pathlib import Path
from fedbench.core.spec import RunSpec
from fedbench.runs.engines import worker
from fedbench.runs.engines.worker import Work, Worker
from fedbench.runs.prepare import Settings

def load(self, spec):
    print(os.getpid(), flush=True)
    time.sleep(120)

if __name__ == "__main__":
    worker.Loader.load = load
    warm = Worker(Settings(Path("."), None), fork_without=())
    warm.begin(Work(print, None, RunSpec()))
    time.sleep(120)
"""


@pytest.mark.slow
def test_a_warm_process_ends_with_its_worker_while_it_loads() -> None:
    with subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        warm = psutil.Process(int(worker.stdout.readline()))
        worker.kill()
        warm.wait(30)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_trial_that_is_given_up_hears_no_more_and_the_next_goes_on_in_the_same_warm_process(
    settings: Settings, is_over: bool
) -> None:
    settings = replace(settings, plugin_files=())
    warm = Worker(settings)
    heard: list[tuple[int, int]] = []

    def give_up(spec: RunSpec, record: RoundRecord) -> None:
        heard.append((spec.seed, record.round))
        if heard[-1] == (9, 1):
            time.sleep(3 if is_over else 0)  # the trial goes on meanwhile
            raise TrialPruned

    with closing(TrialProcess(settings, warm)) as process:
        with pytest.raises(TrialPruned):
            process.run(trial_of(settings, "fedavg", (5, 9)), give_up)
        assert heard == [(5, 0), (9, 0), (5, 1), (9, 1)]
        assert warm.can_begin()
        heard.clear()
        both = process.run(trial_of(settings, "fedavg", (5, 8)), give_up)
        assert heard == [(5, 0), (8, 0), (5, 1), (8, 1), (5, 2), (8, 2)]
        alone = [process.run(trial_of(settings, "fedavg", (seed,)), ignore)[0] for seed in (5, 8)]
    assert [one["global_accuracy"] for one in both] == [one["global_accuracy"] for one in alone]


PARENT = """
import pickle, sys
from fedbench.tuning.worker import tune
if __name__ == "__main__":
    began = [tune(job, 1) for job in pickle.load(open(sys.argv[1], "rb"))]
    print([next(events).number for events in began], flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the process table of Linux")
@pytest.mark.parametrize("ending", ["by itself", "killed"])
def test_processes_of_trials_end_with_their_worker_and_workers_with_their_parent(
    tmp_path: Path, settings: Settings, ending: str
) -> None:
    jobs = [job_of(tmp_path / name, settings, 1, "hangs")[0] for name in (("a",) if ending == "killed" else ("a", "b"))]
    (tmp_path / "jobs").write_bytes(pickle.dumps(jobs))
    (tmp_path / "parent.py").write_text(PARENT)
    line = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "jobs")]
    parent = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.readline() == f"{[0] * len(jobs)}\n"
        until = time.monotonic() + 60
        while len(hanging := list(tmp_path.glob("hanging/*"))) < len(jobs) and time.monotonic() < until:
            time.sleep(0.05)
        trials = [psutil.Process(int(file.name)) for file in hanging]
        trees = [[trial, *trial.parents()[:1]] for trial in trials]  # the process of trials and its worker
        if ending == "killed":
            parent.kill()
        else:
            first = trees.pop()
            first[-1].kill()
            assert psutil.wait_procs(first, timeout=20)[1] == []
            assert all(process.is_running() for process in trees[0])
            parent.stdin.close()
            assert parent.wait(20) == 0
        assert psutil.wait_procs(trees[0], timeout=20)[1] == []
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
