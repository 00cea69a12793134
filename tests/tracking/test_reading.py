"""Reading a store by queries gives what MLflow gives, and needs no MLflow."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedbench.core.errors import FedbenchError
from fedbench.tracking import store
from fedbench.tracking.recorded.by_mlflow import ClientReader
from fedbench.tracking.recorded.reading import DatabaseReader, Reader, open_reader
from fedbench.tracking.recorded.seal import SEAL
from fedbench.tracking.schema import INVOCATION, KIND, store_uri

# isort: split
from mlflow.entities import Metric, Param, RunTag

NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with two suites, a deleted one, a study, an experiment of somebody else's; runs of every kind."""
    folder = tmp_path_factory.mktemp("read") / "store"
    uri = store_uri(str(folder))
    client: Any = store.open_store(uri, create=True)
    names = ("fedbench/first", "fedbench/second", "fedbench/gone", "fedbench-tuning/first", "others/fedbench/x")
    where = {name: client.create_experiment(name, artifact_location=(folder / "files").as_uri()) for name in names}
    for number, name in enumerate(["fedbench/first"] * 4 + list(names[1:])):
        run = client.create_run(where[name], start_time=1000 + number % 3).info.run_id
        tags = {KIND: INVOCATION if number == 3 else "run", "fedbench.row": f"row {number} ä'\"", "mlflow.note": ""}
        values = [Metric("loss", value, 5 + step, step) for step, value in enumerate((1.5, NAN, -INFINITE, 1e-300))]
        values += [Metric("final/accuracy", NAN if number == 1 else number / 3, 9, 0)]
        client.log_batch(run, values, [Param("seed", str(number))], [RunTag(*tag) for tag in tags.items()])
        client.set_terminated(run, ("FINISHED", "FAILED", "RUNNING")[number % 3])
        client.log_text(run, "{}", "federation.json")
        if number == 2:
            client.delete_run(run)
    client.delete_experiment(where["fedbench/gone"])
    return uri


@pytest.fixture
def readers(uri: str) -> tuple[Reader, Reader]:
    mine = open_reader(uri)
    assert isinstance(mine, DatabaseReader)
    client = store.open_store(uri, create=False)
    assert client is not None
    return mine, ClientReader(uri, client)


def shown(value: float) -> str:
    return "nan" if math.isnan(value) else float(value).hex()


def everything(reader: Reader, suite: str | None) -> list[Any]:
    return [
        (
            (name, run.info.run_id, run.info.status, run.info.start_time, run.info.artifact_uri),
            (dict(run.data.params), dict(run.data.tags), {k: shown(v) for k, v in run.data.metrics.items()}),
        )
        for name, run in reader.runs(suite)
    ]


def test_runs_are_those_that_mlflow_gives_in_its_order(readers: tuple[Reader, Reader]) -> None:
    mine, theirs = readers
    assert sorted(mine.suites()) == sorted(theirs.suites()) == ["first", "second"]
    for suite, count in ((None, 3), ("first", 2), ("second", 1), ("third", 0)):
        assert everything(mine, suite) == everything(theirs, suite)
        assert len(everything(mine, suite)) == count


def test_values_tags_and_artifacts_are_those_that_mlflow_gives(readers: tuple[Reader, Reader], tmp_path: Path) -> None:
    mine, theirs = readers
    runs = [run.info.run_id for _, run in mine.runs(None)]
    values = [
        [(*point[:3], shown(point[3])) for point in one.values(runs, ["loss", "no", "final/accuracy"])]
        for one in readers
    ]
    assert values[0] == values[1] and len(values[0]) == 15
    for run in (runs[0], "0" * 32):
        assert dict(mine.tags(run)) == dict(theirs.tags(run))
    for name in ("federation.json", "no.json"):
        assert mine.artifact(runs[0], name, tmp_path) == theirs.artifact(runs[0], name, tmp_path)
    assert mine.artifact("0" * 32, "federation.json", tmp_path) is None


def test_a_store_whose_tables_are_others_is_read_by_mlflow(uri: str, tmp_path: Path) -> None:
    changed = tmp_path / "mlflow.db"
    changed.write_bytes(Path(uri.removeprefix("sqlite:///")).read_bytes())
    with closing(sqlite3.connect(changed)) as database:
        database.execute("ALTER TABLE latest_metrics RENAME COLUMN is_nan TO is_none")
        database.commit()
    assert isinstance(open_reader(f"sqlite:///{changed}"), ClientReader)


def test_a_run_that_was_changed_is_refused(uri: str, tmp_path: Path) -> None:
    changed = tmp_path / "mlflow.db"
    changed.write_bytes(Path(uri.removeprefix("sqlite:///")).read_bytes())
    with closing(sqlite3.connect(changed)) as database:
        (run,) = database.execute("SELECT run_uuid FROM params WHERE value = '0'").fetchone()
        database.execute("INSERT INTO tags (key, value, run_uuid) VALUES (?, 'wrong', ?)", (SEAL, run))
        database.commit()
    reader = open_reader(f"sqlite:///{changed}")
    assert reader is not None
    with pytest.raises(FedbenchError, match="is not what was recorded"):
        list(reader.runs("first"))


def test_a_leaderboard_of_a_file_imports_neither_mlflow_nor_torch(uri: str) -> None:
    place = str(Path(uri.removeprefix("sqlite:///")).parent)
    code = f"import sys; from fedbench.cli.app import main; sys.argv[1:] = ['leaderboard', '--store', {place!r}]\n"
    code += "try: main()\nfinally: sys.stdout.write(str({'mlflow', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("set()"), done.stderr
