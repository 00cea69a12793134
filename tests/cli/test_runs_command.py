"""``fedbench runs``: what a store has, and dropping some of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedbench.cli.app import app
from fedbench.leaderboard.results import load_results
from fedbench.tracking.schema import store_uri


def called(*arguments: str, answer: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, input=answer)
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two commands: fedavg and fedprox, then fedavg with another seed."""
    folder = tmp_path_factory.mktemp("runs")
    data = ("--set", "rounds=1", "clients=4", "dataset=embedded?train=200&test=40")
    for methods, seed in ((("fedavg", "fedprox"), "0"), (("fedavg",), "1")):
        chosen = [word for method in methods for word in ("--method", method)]
        place = ("--store", str(folder / "store"), "--cache-dir", str(folder), "--engine", "in-process", "--plain")
        code, said = called("run", *chosen, "--scenario", "iid", "--seed", seed, *data, *place)
        assert code == 0, said
    return folder / "store"


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> str:
    shutil.copytree(filled, tmp_path / "store")
    return str(tmp_path / "store")


def ids(store: str) -> list[str]:
    return list(load_results(store_uri(store))["run_id"])


def test_runs_are_listed_and_narrowed(store: str) -> None:
    code, said = called("runs", "list", "--store", store)
    assert code == 0 and "3 runs" in said and said.count("finished") == 3
    assert all(run_id in said for run_id in ids(store))
    assert "1 run" in called("runs", "list", "--store", store, "--method", "fedprox")[1]
    assert "0 runs" in called("runs", "list", "--store", store, "--status", "failed")[1]


def test_dropped_runs_and_their_command_are_gone_and_nothing_else(store: str) -> None:
    first, prox, second = ids(store)
    code, said = called("runs", "drop", prox[:6], "--store", store, "--yes")
    assert code == 0 and "dropped 1 run;" in said and "mlflow gc" in said
    assert ids(store) == [first, second]
    # the second command had one run
    assert "dropped 1 run and 1 command" in called("runs", "drop", second, "--store", store, "--yes")[1]
    assert ids(store) == [first]
    assert "dropped 1 run and 1 command" in called("runs", "drop", "--method", "fedavg", "--store", store, "--yes")[1]


def test_it_asks_first(store: str) -> None:
    before = ids(store)
    assert "nothing is dropped" in called("runs", "drop", "--suite", "adhoc", "--store", store, answer="n\n")[1]
    assert ids(store) == before


def test_wrong_input_is_refused(store: str) -> None:
    before = ids(store)
    for arguments, message in (
        (("drop", "--store", store), "nothing to drop"),
        (("drop", "zzzz", "--store", store, "--yes"), "no run's id begins with 'zzzz'"),
        (("list", "--status", "fialed", "--store", store), "did you mean 'failed'"),
        (("list", "--store", f"{store}/none"), "there is no store"),
    ):
        code, said = called("runs", *arguments)
        assert code == 2 and message in said, said
    assert ids(store) == before
