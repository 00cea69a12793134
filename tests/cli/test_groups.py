"""What runs are read by again: the scales and settings of a suite, or without one what was asked for."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pandas as pd
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


GRID = """
name: grid
dataset: "embedded?train=200&test=100"
training: {rounds: 1, batch_size: 8}
scenario: {preset: iid, clients: 2}
scales:
  first: {settings: [{name: even}]}
  second:
    set: {lr: 0.02}
    settings:
      - {name: even, published: {table: 1}}
      - name: skewed
        set: {scenario: label-skew, clients: 2, participation: 1.0, min_client_size: 2}
        published: {table: 2}
rows:
  - {method: fedavg, label: plain, published: {}}
  - {method: fst-cbdg, set: {labels: hidden}, only: [skewed]}
"""


def test_scale_and_setting_choose_the_cells(fedbench, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    shown = fedbench("run", "--suite", "grid.yaml", "--dry-run", "--cache-dir", "cache").out
    assert "plain · clip:embedded" in shown and "even" in shown and "skewed" not in shown
    chosen = ("--scale", "second", "--setting", "skewed")
    shown = fedbench("run", "--suite", "grid.yaml", *chosen, "--dry-run", "--cache-dir", "cache").out
    assert "skewed" in shown and "even" not in shown and "fst-cbdg · clip:embedded (no labels)" in shown
    none = fedbench("run", "--suite", "grid.yaml", "--method", "fst-cbdg", "--setting", "even", "--dry-run")
    assert none.code == 2 and "fst-cbdg runs in none of the chosen settings" in none.err


def test_results_keep_settings_keys_and_labels_and_tables_come_in_the_suites_order(fedbench, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    run = ("run", "--suite", "grid.yaml", "--scale", "second", "--store", "store", "--cache-dir", "cache")
    assert fedbench(*run, "--setting", "skewed").code == 0
    again = fedbench(*run)
    assert "2 of 3 runs are in the store already" in again.out + again.err
    fedbench("leaderboard", "--suite", "grid.yaml", "--store", "store", "--output", "out")
    results = pd.read_csv(tmp_path / "out" / "results.csv.gz").set_index(["setting", "method"])
    assert set(results.index) == {("even", "fedavg"), ("skewed", "fedavg"), ("skewed", "fst-cbdg")}
    assert set(results["suite_hash"]) == {hashlib.sha256(GRID.encode()).hexdigest()}
    key = json.loads(results.loc[("skewed", "fedavg"), "published"])
    assert key == [{"method": "fedavg", "table": "2", "variant": ""}]
    assert results.loc[("skewed", "fst-cbdg"), "row"] == "fst-cbdg · clip:embedded (no labels)"
    assert results.loc[("skewed", "fedavg"), "row"] == "plain · clip:embedded"
    # one table for rows with and without labels, the grid's first setting first though it ran last
    tables = (tmp_path / "out" / "leaderboard.md").read_text()
    assert tables.index("even · ") < tables.index("skewed · ")
    assert tables.count("2 clients · ") == 2
