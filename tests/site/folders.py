"""Result folders with made-up numbers, small enough to write in a test."""

import json
from pathlib import Path

import pandas as pd

from fedbench_boards.advice.evidence import Evidence, write_evidence
from tests.advice.test_advising import evidence

METRICS = ("global_accuracy", "tail_accuracy")


def write_folder(
    parent: Path,
    name: str,
    methods: list[str],
    settings: list[str],
    *,
    tied: bool = False,
    dataset: str = "embedded?train=240",
    scenario: str = "",
) -> None:
    """A folder with two seeds a row; the rows reach 70, 60, ... %, and ``tied`` ranks the second like the first."""
    folder = parent / name
    folder.mkdir()
    board, results, anchors = [], [], []
    for block, setting in enumerate(settings):
        anchors.append(f'<section id="table-{block + 1}"></section>')
        for place, method in enumerate(methods):
            anchors.append(f'<p id="table-{block + 1}-row-{place}">{place}</p>')
            runs = {str(seed): f"{name}-{block}-{place}-{seed}" for seed in (0, 1)}
            line = {
                "block": block,
                "caption": f"{setting or dataset} · 2 clients",
                "baseline": methods[0],
                "rank": place + 1,
                "row": f"{method} · clip:embedded",
                "label": method,
                "setting": setting,
                "dataset": dataset,
                "scenario": scenario,
                "method": method,
                "backbone": "clip:embedded",
                "tuned": False,
                "headline": METRICS[0],
                "shown": json.dumps(METRICS),
                "runs": json.dumps(runs),
                "seed_list": "0, 1",
                "bytes_up_mean": 1e6,
                "bytes_down_mean": 1e6,
                "train_seconds_mean": 1.5,
                **dict.fromkeys(("delta_mean", "delta_low", "delta_high", "significance", "failure", "tied_rank"), ""),
            }
            for metric in METRICS:
                line |= {f"{metric}_mean": 70.0 - 10 * place, f"{metric}_std": 1.0}
            if place:
                line |= {"delta_mean": -10.0 * place, "delta_low": -12.0 * place, "delta_high": -8.0 * place}
            if tied:
                line["tied_rank"] = 1 if place < 2 else place + 1
            board.append(line)
            for seed, run in runs.items():
                results.append(
                    {
                        "suite": name,
                        "row": line["row"],
                        "seed": seed,
                        "run_id": run,
                        "started": "2026-01-02 03:04:05+00:00",
                        "commit": "c" * 40,
                        "made_by": json.dumps([f"fedbench run --suite {name}"]),
                    }
                )
    pd.DataFrame(board).to_csv(folder / "leaderboard.csv.gz", index=False)
    pd.DataFrame(results).to_csv(folder / "results.csv.gz", index=False)
    (folder / "index.html").write_text(f"<!doctype html><title>{name}</title>{''.join(anchors)}", encoding="utf-8")


def write_map(parent: Path) -> Evidence:
    """The folder ``map`` with evidence of nine settings over two axes, ten clients each; the evidence."""
    write_folder(parent, "map", ["fedavg", "fedprox", "promptfl"], ["low", "high"])
    scores = {"fedavg": [50] * 9, "fedprox": [62, 61, 60] * 3, "promptfl": [61.5, 61, 59] * 3}
    runs = evidence(scores, [0, 0.1, 0.2, 1, 1.1, 1.2, 2, 2.1, 2.2]).runs
    names = {f"s{at}": f"skew={('low', 'mid', 'high')[at // 3]}, tail={(1, 10, 50)[at % 3]}" for at in range(9)}
    known = Evidence(runs.assign(setting=runs["setting"].map(names)))
    write_evidence(known, parent / "map" / "evidence.csv.gz")
    return known
