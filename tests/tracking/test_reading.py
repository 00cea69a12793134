"""A store that is a folder is read from the files of its runs: what MLflow gives, mostly without MLflow."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedbench.core.errors import FedbenchError
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec
from fedbench.tracking import read, store
from fedbench.tracking.listener import Tracking
from fedbench.tracking.read import FolderReader, Reader, open_reader
from fedbench.tracking.recording import Invocation
from fedbench.tracking.schema import database_of, read_rounds, store_uri

# isort: split
from mlflow.entities import Metric, Param, RunTag

NAN, INFINITE = float("nan"), float("inf")
INFO = RunInfo({}, "d" * 64, "w" * 64, 4, 2, 40, 8, 6, 24)


def record(listener: Tracking, seed: int, end: str = "FINISHED") -> None:
    one = RunSpec(seed=seed)
    listener.run_started(one, INFO)
    for number, value in enumerate((1.5, NAN, -INFINITE, 1e-300)):
        listener.round_finished(one, RoundRecord(number, (), {"loss": value, "a/b": 2.0 * number}, 3, 4, 0.5))
    if end == "FINISHED":
        summary = {"global_accuracy": 100 / 3 + seed, "undefined": NAN}
        listener.run_finished(one, INFO, RunResult((), summary, (), {}, 1.0))
    elif end == "FAILED":
        listener.run_failed(one, "no ä'\"")
    elif end == "RUNNING":
        listener._send(listener._open[one.run_id])
    else:
        listener.interrupt()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two suites, a deleted one, a study, an experiment of somebody else's; runs of every kind."""
    folder = tmp_path_factory.mktemp("read") / "store"
    uri = store_uri(str(folder))
    first = Tracking(uri, "first", Invocation(command="fedbench run", runs=9))
    for seed, end in enumerate(("FINISHED", "FAILED", "KILLED", "RUNNING", "FINISHED")):
        record(first, seed, end)
    record(Tracking(uri, "adhoc"), 5)
    record(Tracking(uri, "gone"), 6)
    client = client_of(uri)
    for name in ("fedbench-tuning/first", "others/fedbench/x"):
        client.create_run(client.create_experiment(name))
    client.delete_experiment(client.get_experiment_by_name("fedbench/gone").experiment_id)
    client.delete_run(id_of(uri, "4"))
    return folder


@pytest.fixture
def copied(filled: Path, tmp_path: Path) -> Path:
    """The same, to be changed: a copy, beside the store that it was copied from."""
    return Path(shutil.copytree(filled, tmp_path / "copy"))


def client_of(uri: str) -> Any:
    client = store.open_store(uri, create=False)
    assert client is not None
    return client


def id_of(uri: str, seed: str) -> str:
    """MLflow's of the run in the suite "first"."""
    (run,) = [run for _, run in store.runs_of(client_of(uri), "first") if run.data.params.get("seed") == seed]
    return str(run.info.run_id)


def shown(value: float) -> str:
    return "nan" if math.isnan(value) else float(value).hex()


def everything(reader: Reader, suite: str | None) -> list[Any]:
    """Of the runs that have ended."""
    return [
        (
            (name, run.info.run_id, run.info.status, run.info.start_time, run.info.end_time),
            (
                dict(run.data.params),
                {key: value for key, value in run.data.tags.items() if key != "mlflow.runName"},
                {key: shown(value) for key, value in run.data.metrics.items()},
            ),
        )
        for name, run in reader.runs(suite)
        if run.info.status != "RUNNING"
    ]


def mine(folder: Path) -> Reader:
    reader = open_reader(store_uri(str(folder)))
    assert isinstance(reader, FolderReader)
    return reader


def theirs(folder: Path) -> Reader:
    return Reader(store_uri(str(folder)))


def test_runs_are_those_that_mlflow_gives_in_its_order(filled: Path) -> None:
    one, other = mine(filled), theirs(filled)
    assert sorted(one.suites()) == sorted(other.suites()) == ["adhoc", "first"]
    for suite, count in ((None, 4), ("first", 3), ("adhoc", 1), ("adhoc/iid", 1), ("third", 0), ("gone", 0)):
        assert everything(one, suite) == everything(other, suite)
        assert len(everything(one, suite)) == count


def test_values_tags_and_artifacts_are_those_that_mlflow_gives(filled: Path, tmp_path: Path) -> None:
    one, other = mine(filled), theirs(filled)
    runs = [run.info.run_id for _, run in one.runs(None)]
    names = ["loss", "no", "a/b", "seconds"]
    values = [sorted((*point[:3], shown(point[3])) for point in reader.values(runs, names)) for reader in (one, other)]
    # a run that did not finish has no file of them, MLflow is asked
    assert values[0] == values[1] and len(values[0]) == len(runs) * 3 * 4
    for run in (runs[0], "0" * 32):
        for key in ("fedbench.run_id", "mlflow.parentRunId", "fedbench.command"):
            assert one.tags(run).get(key) == other.tags(run).get(key)
    finished = next(run.info.run_id for _, run in one.runs("first") if run.info.status == "FINISHED")
    assert one.tags(one.tags(finished)["mlflow.parentRunId"])["fedbench.command"] == "fedbench run"
    for name in ("federation.json", "no.json"):
        assert one.artifact(finished, name, tmp_path) == other.artifact(finished, name, tmp_path)
    for reader in (one, other):
        assert reader.artifact("0" * 32, "federation.json", tmp_path) is None
    assert one.artifact("..", "listing.json", tmp_path) is None


def test_mlflow_is_asked_again_only_after_its_database_was_written(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    plain = FolderReader._ask
    monkeypatch.setattr(FolderReader, "_ask", lambda self, stamp: asked.append("") or plain(self, stamp))
    before = everything(mine(copied), None)
    assert everything(mine(copied), None) == before and len(asked) <= 1
    asked.clear()
    uri = store_uri(str(copied))
    run = id_of(uri, "0")
    client_of(uri).delete_run(run)
    assert [found for found in everything(mine(copied), None) if found[0][1] == run] == []
    client_of(uri).restore_run(run)
    assert everything(mine(copied), None) == everything(mine(copied), None) == before and len(asked) == 2
    client_of(uri).delete_experiment(client_of(uri).get_experiment_by_name("fedbench/first").experiment_id)
    assert [found[0][0].partition("/")[0] for found in everything(mine(copied), None)] == ["adhoc"]
    # a listing that cannot be read, or is of another database, is none
    (copied / "listing.json").write_text("{")
    assert len(everything(mine(copied), None)) == 1


def test_a_folder_with_a_log_of_changes_and_one_that_cannot_be_written_ask_mlflow(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = database_of(store_uri(str(copied)))
    assert database is not None and read._stamp(database)
    content = bytearray(database.read_bytes())
    content[18] = content[19] = 2
    database.with_name("log.db").write_bytes(content)
    assert read._stamp(database.with_name("log.db")) == []
    (copied / "listing.json").unlink(missing_ok=True)

    def refuse(*_: object) -> None:
        raise FedbenchError("can't write")

    monkeypatch.setattr(read, "replacing", refuse)
    assert len(everything(mine(copied), None)) == 4
    assert not (copied / "listing.json").exists()


def test_a_copy_that_is_written_keeps_its_runs_apart_from_those_of_the_store_it_was_copied_from(
    filled: Path, copied: Path
) -> None:
    before = everything(mine(filled), None)
    assert everything(mine(copied), None) == before
    record(Tracking(store_uri(str(copied)), "first"), 7)
    assert everything(mine(filled), None) == before
    after = everything(mine(copied), None)
    assert len(after) == len(before) + 1 and after == everything(theirs(copied), None)


def test_suites_that_share_a_folder_keep_their_runs_apart(copied: Path) -> None:
    uri = store_uri(str(copied))
    for seed, suite in enumerate(("é b", "é_b")):
        record(Tracking(uri, suite), seed)
    assert len(list(copied.glob("artifacts/é_b/*/artifacts/run.json"))) == 2
    for seed, suite in enumerate(("é b", "é_b")):
        ((name, run),) = mine(copied).runs(suite)
        assert (name, run.data.params["seed"]) == (suite, str(seed))
    assert everything(mine(copied), None) == everything(theirs(copied), None)


def test_a_database_that_was_copied_alone_is_read_by_mlflow(filled: Path, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    shutil.copy(filled / "mlflow.db", tmp_path / "alone")
    assert everything(mine(tmp_path / "alone"), None) == everything(mine(filled), None)


def test_runs_of_an_experiment_without_such_files_are_read_by_mlflow(copied: Path) -> None:
    client = client_of(store_uri(str(copied)))
    experiment = client.create_experiment("fedbench/old", artifact_location=(copied / "artifacts" / "old").as_uri())
    run = client.create_run(experiment, tags={"fedbench.kind": "run"}).info.run_id
    client.log_batch(run, [Metric("loss", 1.0, 5, 2)], [Param("seed", "1")], [RunTag("fedbench.row", "r")])
    client.set_terminated(run)
    assert [found[0][:2] for found in everything(mine(copied), "old")] == [("old", run)]
    assert mine(copied).values([run], ["loss"]) == [(run, 2, "loss", 1.0)]
    assert everything(mine(copied), None) == everything(theirs(copied), None)


def test_a_run_that_was_changed_or_damaged_is_refused_and_a_folder_that_was_copied_is_no_run(copied: Path) -> None:
    run = id_of(store_uri(str(copied)), "0")
    (file,) = copied.glob(f"artifacts/first/{run}/artifacts/run.json")
    shutil.copytree(file.parents[1], file.parents[2] / ("0" * 32))
    assert len(everything(mine(copied), "first")) == 3
    whole = file.read_text()
    content = json.loads(whole)
    content["metrics"]["final/global_accuracy"] += 1e-9
    file.write_text(json.dumps(content))
    with pytest.raises(FedbenchError, match="is not what was recorded"):
        mine(copied).runs("first")
    for damaged in ("", whole[:-9], "[]", "{}", '{"metrics": 3}', whole.replace('"started": ', '"started": "x", "": ')):
        file.write_text(damaged)
        with pytest.raises(FedbenchError, match=rf"the record of a run '.*{run}/artifacts/run.json' cannot be read"):
            mine(copied).runs("first")
    file.write_text(whole)
    for damaged in ("", "round,loss\nx,1", "round,loss\n1"):
        file.with_name("rounds.csv").write_text(damaged)
        with pytest.raises(FedbenchError, match=rf"rounds of a run '.*{run}/artifacts/rounds.csv' are not what was re"):
            mine(copied).values([run], ["loss"])
        with pytest.raises(FedbenchError, match="the rounds of a run .* cannot be read"):
            read_rounds(file.with_name("rounds.csv"), ["loss"], {})


def test_a_leaderboard_of_a_folder_imports_neither_mlflow_nor_torch(filled: Path) -> None:
    everything(mine(filled), None)
    code = (
        f"import sys; from fedbench.cli.app import main; sys.argv[1:] = ['leaderboard', '--store', {str(filled)!r}]\n"
    )
    code += "try: main()\nfinally: sys.stdout.write(str({'mlflow', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("set()"), done.stderr


def test_two_databases_in_one_folder_have_files_of_their_own(tmp_path: Path) -> None:
    uris = [f"sqlite:///{tmp_path}/{name}" for name in ("a.db", "b.db")]
    for seed, uri in enumerate(uris):
        record(Tracking(uri, "first"), seed)
    for seed, uri in enumerate(uris):
        for reader in (open_reader(uri), Reader(uri)):
            assert reader is not None
            ((_, run),) = reader.runs("first")
            assert run.data.params["seed"] == str(seed)
            assert reader.artifact(run.info.run_id, "federation.json", tmp_path) is not None
