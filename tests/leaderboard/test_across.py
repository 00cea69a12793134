"""A board over its settings: the table of mean ranks and the diagram of critical differences."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedbench.suites.suite import parse_suite
from fedbench_boards.leaderboard import model
from fedbench_boards.leaderboard.across import across_settings, across_table, critical_differences, labels_of
from fedbench_boards.leaderboard.formats import markdown_page, to_markdown
from fedbench_boards.leaderboard.model import Board, Line, ScoreCell, Table
from fedbench_boards.leaderboard.page import write_page
from fedbench_boards.leaderboard.reading import ReadResults
from fedbench_boards.leaderboard.results import StoredResults
from fedbench_boards.leaderboard.rows import compared
from fedbench_boards.statistics import Test

METRIC = "global_accuracy"
SUITE = parse_suite(
    """
name: toy
rows: [{method: fedavg}, {method: clip-zs}, {method: other}]
""",
    "toy.yaml",
)
NOISE = {"fedavg": (0.0, 1.0, 2.0, 0.5), "clip-zs": (0.0, 0.0, 0.0, 0.0), "other": (0.1, 0.9, 2.2, 0.4)}
MEANS = {
    "skew=low, tail=1": {"fedavg": 60, "clip-zs": 50, "other": 60.05},
    "skew=low, tail=10": {"fedavg": 55, "clip-zs": 50, "other": 65},
    "skew=high, tail=1": {"fedavg": 40, "clip-zs": 50, "other": 60},
    "skew=high, tail=10": {"fedavg": 30, "clip-zs": 50, "other": 20},
}


def line(row, setting, mean):
    scores = {seed: mean + noise for seed, noise in enumerate(NOISE[row])}
    values = list(scores.values())
    size = 0.0 if row == "clip-zs" else 1e6
    return Line(
        row=f"{row} · b",
        label=row,
        backbone="b",
        method=row,
        setting=setting,
        scores=scores,
        runs={seed: f"{row}{setting}{seed}" for seed in scores},
        mlflow_ids={seed: f"{row}/{setting}/{seed}" for seed in scores},
        seeds=tuple(scores),
        cells={METRIC: ScoreCell(float(np.mean(values)), float(np.std(values, ddof=1)))},
        costs={"bytes_up": size, "bytes_down": size},
    )


@pytest.fixture(scope="module")
def board():
    tables = tuple(
        Table(
            setting, "fedavg", METRIC, (METRIC,), compared([line(row, setting, m) for row, m in rows.items()], METRIC)
        )
        for setting, rows in MEANS.items()
    )
    return Board(tables, across_settings(tables, (), Test.t))


@pytest.fixture(scope="module")
def curves(board):
    """Round 1 has half of the traffic and all of the accuracy, but for "other", which gets there in round 2."""
    rows = []
    for one in board.lines:
        for seed, score in one.scores.items():
            for number in (0, 1, 2):
                late = number < (2 if one.label == "other" else 1) and one.label != "clip-zs"
                rows.append(
                    {"mlflow_id": one.mlflow_ids[seed], "round": number, METRIC: 0.0 if late else score}
                    | {"bytes_total": one.sent * number / 2, "seconds_total": 1.0 * number}
                )
    return pd.DataFrame(rows)


def test_rows_over_all_settings_in_the_order_of_their_mean_ranks(board):
    table = across_table(board)
    assert table.names[0].texts == ["other", "fedavg", "clip-zs"]
    columns = {column.heading: column.texts for column in table.scores}
    assert columns["mean rank"] == ["1.50", "2.25", "2.25"]
    assert columns["wins"][0] == "5" and columns["losses"][0] == "2" and columns["ties"][0] == "1"
    text = to_markdown(board)
    assert "all 4 settings · 3 rows that each of them has · 4 seeds that all of them have" in text
    assert "| 1-3 | other | 1.50 |" in text and "Friedman's test: p = 0.47, no difference is shown" in text


def test_settings_ranked_by_other_metrics_or_means_of_settings_are_not_compared(board):
    first, *others = board.tables
    assert across_settings([Table("", "fedavg", "tail_accuracy", (), first.lines), *others], (), Test.t) is None
    assert len(across_settings(board.tables, ("skew=low, tail=1",), Test.t).ranks) == 3


def test_the_diagram_of_critical_differences_is_drawn(board):
    diagram = critical_differences(board.across, labels_of(board)).axes[0]
    assert any("other" in text.get_text() for text in diagram.texts)
    # a bar's points are in their order, not in that of a set
    bars = [line.get_xdata() for line in diagram.lines if line.get_linewidth() == 2.5]
    assert bars and all(list(bar) == sorted(bar) for bar in bars)


def runs_of(board):
    """The results of the board's runs, as far as a page reads them."""
    return pd.DataFrame(
        [
            {"row": one.row, "setting": one.setting, "seed": seed, "run_id": run, "mlflow_id": one.mlflow_ids[seed]}
            | dict.fromkeys(("commit", "code_hash", "data_hash", "weights_hash", "harness_hash"), "abc")
            | {"started": pd.Timestamp("2026-01-01")}
            for one in board.lines
            for seed, run in one.runs.items()
        ]
    )


def test_of_many_tables_a_folder_shows_what_they_come_to(tmp_path, board, curves, monkeypatch):
    whole = markdown_page(board, "fedbench leaderboard")
    assert whole.count("\n| # |") == len(MEANS) + 1
    monkeypatch.setattr(model, "MOST_TABLES", len(MEANS) - 1)
    short = markdown_page(board, "fedbench leaderboard")
    assert short.count("\n| # |") == 1 and "The 4 tables of single settings are in leaderboard.csv.gz." in short
    assert "$ fedbench leaderboard" in short and "mean rank" in short
    page = tmp_path / "page.html"
    read = ReadResults(SUITE, StoredResults(runs_of(board), runs_of(board)[:0]), runs_of(board), curves, board)
    write_page(page, read, {}, "")
    html = page.read_text("utf-8")
    assert 'class="board"' not in html and 'class="filters"' not in html
    assert 'id="ranking"' in html and html.count('data-key="table-') == len(MEANS)


def test_rows_go_by_their_labels_where_settings_have_backbones_of_their_own(board):
    first, *others = board.tables
    lines = [replace(line, backbone="c", row=f"{line.label} · c") for line in first.lines]
    tables = [replace(first, lines=tuple(lines)), *others]
    mixed = across_settings(tables, (), Test.t)
    assert mixed is not None and sorted(mixed.ranks) == ["clip-zs", "fedavg", "other"]
    assert len(mixed.ranks) == len(MEANS)
    # not where one setting has two backbones: then rows are told apart by them
    both = [replace(first, lines=(*first.lines, *lines)), *others]
    found = across_settings(both, (), Test.t)
    assert found is not None and sorted(found.ranks) == ["clip-zs · b", "fedavg · b", "other · b"]


def test_the_page_has_the_ranking(tmp_path, board, curves):
    suite, results = SUITE.model_copy(update={"name": "toy", "description": "a toy"}), runs_of(board)
    read = ReadResults(suite, StoredResults(results, results[:0]), results, curves, board)
    write_page(tmp_path / "index.html", read, {}, "x")
    html = (tmp_path / "index.html").read_text("utf-8")
    assert "Critical differences" in html and "currentColor" in html
    head, *rows = html[html.index('id="ranking"') :].partition("</table>")[0].split("<tbody>")
    assert [row.count("<td") for row in rows] == [head.count('<th scope="col"') - 1] * 3
