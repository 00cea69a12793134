"""`fedbench publish`: one command from nothing to a leaderboard at own and tuned values."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from fedbench.cli.app import main

SUITE = """
name: toy
dataset: "embedded?train=240&test=80"
scenario: {imbalance: exponential, imbalance_factor: 4, partition: iid, clients: 2, participation: 1.0}
training: {rounds: 2, local_epochs: 1, batch_size: 32, lr: 0.01}
rows:
  - method: clip-zs
  - method: fedavg
"""


@pytest.mark.slow
def test_one_command_runs_tunes_and_writes_and_again_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "toy.yaml").write_text(SUITE, encoding="utf-8")
    options = ["--suite", "toy.yaml", "--trials", "2", "--seed", "0", "--seed", "3", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", ["fedbench", "publish", *options, "--cache-dir", "cache", "--output", "boards"])
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out
    assert ended.value.code == 0, out
    folder = tmp_path / "boards" / "toy"
    written = {path.name for path in folder.iterdir()}
    board_files = {"results.csv", "leaderboard.csv", "leaderboard.md", "leaderboard.tex", "index.html", "manifest.json"}
    assert written == {*board_files, "tuning"}
    board = pd.read_csv(folder / "leaderboard.csv")
    assert sorted(board["row"]) == [
        "clip-zs · clip:embedded",
        "fedavg · clip:embedded",
        "fedavg · clip:embedded (tuned)",
    ]
    # tuned on seeds that no run has
    tuning = json.loads(board.loc[board["tuned"], "tuning"].iloc[0])
    assert [tuning[name] for name in ("seeds", "run-off seeds", "confirming seeds")] == ["4 5 6", "7", "8"]
    gap = pd.read_csv(folder / "tuning" / "gap.csv")
    assert gap["seeds"].tolist() == ["0 3"] and gap["gap"].notna().all()
    assert set(json.loads(board["runs"].iloc[0])) == {"0", "3"}
    text = (folder / "leaderboard.md").read_text("utf-8")
    for command in (
        "$ fedbench run --suite toy.yaml --seed 0 --seed 3\n",
        "$ fedbench tune --suite toy.yaml",
        "--tuned toy",
    ):
        assert command in text
    assert str(tmp_path) not in text + (folder / "index.html").read_text("utf-8")

    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out
    assert ended.value.code == 0, out
    assert "4 of 4 runs are in the store already" in out
    assert "start " not in out


def test_a_suite_with_nothing_to_tune_still_gets_its_leaderboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "toy.yaml").write_text(SUITE.replace("  - method: fedavg\n", ""), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["fedbench", "publish", "--suite", "toy.yaml", "--cache-dir", "cache"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "none of these rows has anything to tune" in capsys.readouterr().err
    assert (tmp_path / "leaderboards" / "toy" / "index.html").is_file()
