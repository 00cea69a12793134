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
                **dict.fromkeys(("delta_mean", "delta_low", "delta_high", "significance", "failure"), ""),
                **dict.fromkeys(("rank_low", "rank_high"), ""),
            }
            for metric in METRICS:
                line |= {f"{metric}_mean": 70.0 - 10 * place, f"{metric}_std": 1.0}
            if place:
                line |= {"delta_mean": -10.0 * place, "delta_low": -12.0 * place, "delta_high": -8.0 * place}
            if tied:
                low, high = (1, 2) if place < 2 else (place + 1, place + 1)
                line |= {"rank_low": low, "rank_high": high}
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
    """The folder ``map`` with evidence of eighteen settings on two data sets; the evidence."""
    write_folder(parent, "map", ["fedavg", "fedprox", "promptfl"], ["low", "high"])
    scores = {"fedavg": [50] * 18, "fedprox": [62, 61, 60] * 6, "promptfl": [61.5, 63, 59] * 6}
    runs = evidence(scores, [0, 0.1, 0.2, 0.3, 0.4, 0.5] * 3).runs
    known = Evidence(runs.assign(dataset=runs["setting"].str[1:].astype(int) % 2))
    write_evidence(known, parent / "map" / "evidence.csv.gz")
    return known
