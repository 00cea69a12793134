"""Runs without a suite file are read by what was asked for: ``fedbench leaderboard --suite adhoc/iid/embedded``."""

from __future__ import annotations

import csv
import io
import re
import shlex
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

import fedbench
from fedbench.cli.app import app
from fedbench.tracking.read import Reader, open_reader
from fedbench.tracking.schema import store_uri

DATA = "embedded?train=200&test=40"
GROUP = f"adhoc/iid/{DATA}/clients=4,rounds=1"
LONGER = f"adhoc/iid/{DATA}/clients=4,rounds=2"


def called(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def run(folder: Path, *methods: str, rounds: str = "1") -> str:
    chosen = [word for method in methods for word in ("--method", method)]
    place = ("--store", str(folder / "store"), "--cache-dir", str(folder), "--engine", "in-process")
    settings = ("--set", f"rounds={rounds}", "clients=4", f"dataset={DATA}")
    return called("run", *chosen, "--scenario", "iid", *settings, *place)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two comparisons, and what the first command said."""
    folder = tmp_path_factory.mktemp("groups")
    said = run(folder, "fedavg", "fedprox")
    run(folder, "fedavg", rounds="2")
    return folder, said


@pytest.fixture
def folder(filled: tuple[Path, str], tmp_path: Path) -> Path:
    shutil.copytree(filled[0], tmp_path / "own")
    return tmp_path / "own"


def labels(*arguments: str) -> list[tuple[str, str]]:
    lines = csv.DictReader(io.StringIO(called("leaderboard", *arguments, "--format", "csv")))
    return sorted((line["label"], re.search(r"(\d+) rounds? of", line["caption"])[1]) for line in lines)


def hint(said: str, name: str) -> list[str]:
    [line] = [line for line in said.splitlines() if line.startswith(name)]
    return shlex.split(line.removeprefix(name))[1:]


def test_the_names_that_a_run_prints_read_it_as_typed(filled: tuple[Path, str], tmp_path: Path, monkeypatch) -> None:
    folder, said = filled
    again = hint(said, "these again")
    assert again[:3] == ["leaderboard", "--suite", GROUP]
    assert labels(*again[1:]) == [("fedavg", "1"), ("fedprox", "1")]
    monkeypatch.chdir(tmp_path)
    called(*hint(said, "as files"))
    page = tmp_path / "leaderboards" / "adhoc" / "iid" / "embedded_train=200&test=40" / "clients=4,rounds=1"
    assert "fedprox" in (page / "leaderboard.md").read_text("utf-8")
    assert f"<title>{GROUP}".replace("&", "&amp;") in (page / "index.html").read_text("utf-8")
    assert f"leaderboard --suite '{GROUP}'" in (page / "leaderboard.md").read_text("utf-8")


def test_all_of_them_are_still_read_at_once_and_their_tables_say_which_they_are(filled: tuple[Path, str]) -> None:
    store = ("--store", str(filled[0] / "store"))
    for suite in (("--suite", "adhoc"), ("--suite", f"adhoc/iid/{DATA}"), ()):
        assert labels(*suite, *store) == [("fedavg", "1"), ("fedavg", "2"), ("fedprox", "1")]
    shown = called("leaderboard", "--suite", "adhoc", "--format", "md", *store)
    assert GROUP in shown and LONGER in shown
    error = CliRunner().invoke(app, ["leaderboard", "--suite", "adhoc/idd", *store])
    assert error.exit_code == 2 and "unknown suite in this store" in error.output


def test_figures_are_of_one_group(filled: tuple[Path, str], tmp_path: Path) -> None:
    store = ("--store", str(filled[0] / "store"))
    figure = ("figure", "rounds", "--metric", "global_accuracy", "--output", str(tmp_path / "a.svg"), *store)
    assert CliRunner().invoke(app, [*figure, "--suite", LONGER, "--method", "fedprox"]).exit_code == 2
    called(*figure, "--suite", GROUP, "--method", "fedprox")


def test_a_method_that_is_added_joins_its_group_and_the_rest_is_skipped(folder: Path) -> None:
    said = run(folder, "fedavg", "fedprox", "fedavgm")
    assert "2 of 3 runs are in the store already and are skipped" in said
    assert labels(*hint(said, "these again")[1:]) == [("fedavg", "1"), ("fedavgm", "1"), ("fedprox", "1")]
    assert hint(said, "all tables")[:3] == ["leaderboard", "--suite", "adhoc"]
    # a sweep over the groups finds their runs, and is read by what they share
    sweep = run(folder, "fedavg", rounds="1,2")
    assert "2 of 2 runs are in the store already" in sweep and hint(sweep, "these again")[2] == f"adhoc/iid/{DATA}"


def test_python_has_the_same_names(folder: Path) -> None:
    given = {"dataset": DATA, "scenario": "iid", "clients": 4, "progress": False, "cache_dir": folder}
    results = fedbench.run("fedavg", **given, rounds=1, store=folder / "store")
    assert results.suite == GROUP
    loaded = fedbench.load(folder / "store", results.suite)
    assert loaded.suite == GROUP and loaded.runs()["method"].tolist() == ["fedavg", "fedprox"]
    assert set(fedbench.load(folder / "store").runs()["suite"]) == {GROUP, LONGER}
    assert len(fedbench.leaderboard(LONGER, store=folder / "store")) == 1


def test_mlflow_shows_what_was_asked_for(filled: tuple[Path, str]) -> None:
    uri = store_uri(str(filled[0] / "store"))
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("fedbench/adhoc").experiment_id
    found = client.search_runs([experiment], f"tags.setting = '{GROUP}'")
    assert sorted(run.data.tags["method"] for run in found) == ["fedavg", "fedprox"]
    parents = client.search_runs([experiment], "tags.`fedbench.kind` = 'invocation'")
    assert sorted(run.info.run_name.partition(" · ")[0] for run in parents) == [GROUP, LONGER]
    # MLflow gives what their files have
    for name in (None, "adhoc", GROUP, "adhoc/iid"):
        read = [sorted((of, run.info.run_id) for of, run in one.runs(name)) for one in (open_reader(uri), Reader(uri))]
        assert read[0] == read[1] and len(read[0]) == (2 if name == GROUP else 3)
