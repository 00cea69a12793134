"""The queue of paper-scale runs: its page, its order, and runs that the time cuts short."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedbench.tracking.schema import FINAL, store_uri
from fedbench_boards.leaderboard.results import load_runs
from tests.gpu import paper
from tests.gpu.paper import BLOCKS, Item, Queue

PAGE = Path(paper.__file__).with_name("QUEUE.md")
SUITE = """
name: queued
scenario: label-skew
training: {rounds: 4, local_epochs: 20, batch_size: 32, lr: 0.01}
scales:
  paper:
    settings:
      - {name: small, set: {dataset: "embedded?train=1000"}}
      - {name: smaller, set: {dataset: "embedded?train=500"}}
rows: [{method: fedavg, set: {backbone: convnet}}, {method: fedprox, set: {backbone: convnet}}]
"""


@pytest.fixture
def blocks(tmp_path: Path) -> list[list[Item]]:
    file = tmp_path / "queued.yaml"
    file.write_text(SUITE)
    names = [("small", "fedavg"), ("small", "fedprox")], [("smaller", "fedavg")]
    return [[Item(str(file), setting, method, "convnet", 50.0) for setting, method in block] for block in names]


def test_the_page_has_all_items_in_order(tmp_path):
    queue, page = Queue(tmp_path, tmp_path, "cuda"), PAGE.read_text(encoding="utf-8")
    places = [page.find(f"`{queue.command(item, 0)}` | {item.printed:.2f} |") for block in BLOCKS for item in block]
    assert -1 not in places and places == sorted(places)


def test_a_dry_run_shows_the_first_seed_of_a_block_before_the_next(blocks, tmp_path, capsys):
    assert paper.main(["--dry-run", "--device", "cpu", "--folder", str(tmp_path)], blocks) == 0
    commands, table = capsys.readouterr().out.split("\n\n", 1)
    lines = [line.split("--setting ")[1] for line in commands.splitlines()]
    assert [(line.split()[0], line.split()[2], line.split()[6]) for line in lines] == [
        *[("small", method, seed) for seed in "012" for method in ("fedavg", "fedprox")],
        *[("smaller", "fedavg", seed) for seed in "012"],
    ]
    assert table.count("| never run |") == 3 and "9 runs are left." in table


@pytest.mark.slow
def test_runs_that_the_time_cuts_short_go_on_to_the_same_numbers(blocks, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paper, "SEEDS", (0,))

    def scores(queue, folder):
        assert queue.carry_out(lambda: False, jobs=2) and not queue.left()
        runs = load_runs(store_uri(str(folder / "store"))).finished.set_index("run_id").sort_index()
        return runs[[name for name in runs if name.startswith(FINAL) and "seconds" not in name]]

    cut, whole = tmp_path / "cut", tmp_path / "whole"
    cut.mkdir()
    whole.mkdir()
    queue = Queue(cut, tmp_path, "cpu", blocks[:1])
    assert queue.carry_out(lambda: len(list(cut.glob("store/unfinished/**/round-000002.*"))) == 2, jobs=2)
    assert len(queue.left()) == len(list(cut.glob("store/unfinished/**/round-*"))) == 2
    stopped = scores(queue, cut)
    assert stopped.equals(scores(Queue(whole, tmp_path, "cpu", blocks[:1]), whole))
    assert (cut / "commands.log").read_text().count("goes on from its checkpoint after round") == 2
    assert capsys.readouterr().out.count("exit code 130") == 2
    assert "never run" not in queue.table() and "| CPU |" in queue.table()
    assert not list(cut.glob("**/model"))
