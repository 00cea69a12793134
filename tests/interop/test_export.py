"""Stored runs as a Hugging Face data set and as CSV."""

from __future__ import annotations

from pathlib import Path

import datasets
import pandas as pd
import pytest
from typer.testing import CliRunner

from fedbench.cli.app import app
from fedbench.leaderboard.results import load_results, load_rounds
from fedbench.tracking.schema import store_uri


def called(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    sets = ("--set", "rounds=2", "clients=4", "dataset=embedded?train=200&test=40", "seed=0")
    code, said = called(
        *("run", "--method", "fedavg", "--method", "fedprox", "--scenario", "iid", *sets[:-1], "--seed", "0"),
        *("--store", str(folder / "store"), "--engine", "in-process", "--plain", "--cache-dir", str(folder)),
    )
    assert code == 0, said
    return folder / "store"


def test_a_folder_is_read_back_as_it_is_in_the_store(store: Path, tmp_path: Path) -> None:
    code, said = called("export", "--store", str(store), "--output", str(tmp_path / "out"))
    assert code == 0 and "2 runs and 6 rounds written" in said
    uri = store_uri(str(store))
    wanted = load_results(uri)
    runs = datasets.load_dataset(str(tmp_path / "out"), "runs", cache_dir=str(tmp_path / "c"))["train"].to_pandas()
    assert list(runs["run_id"]) == list(wanted["run_id"])
    for column in (name for name in wanted if str(name).startswith("final/")):
        assert list(runs[column]) == list(wanted[column]), column
    rounds = datasets.load_dataset(str(tmp_path / "out"), "rounds", cache_dir=str(tmp_path / "c"))["train"].to_pandas()
    recorded = load_rounds(uri, wanted, ["global_accuracy"])
    assert list(rounds["global_accuracy"]) == list(recorded["global_accuracy"])
    assert set(rounds["round"]) == {0, 1, 2} and set(rounds["run_id"]) == set(wanted["run_id"])


def test_csv_holds_the_same(store: Path, tmp_path: Path) -> None:
    assert called("export", "--store", str(store), "--output", str(tmp_path / "out"), "--format", "csv")[0] == 0
    runs = pd.read_csv(tmp_path / "out" / "runs.csv")
    wanted = load_results(store_uri(str(store)))
    assert list(runs["final/global_accuracy"]) == list(wanted["final/global_accuracy"])
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["rounds.csv", "runs.csv"]


def test_what_cannot_be_exported_is_refused(store: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    for arguments, message in (
        (("--output", str(tmp_path)), "has files in it"),
        (("--output", str(tmp_path / "o"), "--format", "xls"), "unknown format 'xls'"),
        (("--output", str(tmp_path / "o"), "--suite", "longtial"), "unknown suite in this store"),
    ):
        code, said = called("export", "--store", str(store), *arguments)
        assert code == 2 and message in said, said
    assert not (tmp_path / "o").exists()
