"""What the leaderboard's web page holds: the frame's values in full, escaped names, nothing from the network."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedbench.core.errors import FedbenchError
from fedbench_boards.leaderboard.page import write_page
from fedbench_boards.leaderboard.page.charts import Series, against_cost, heat_map, pareto
from fedbench_boards.leaderboard.page.data import page_of
from fedbench_boards.leaderboard.page.sections import sentence
from fedbench_boards.leaderboard.page.svg import linear, logarithmic, polyline
from tests.leaderboard.frames import board_of, read_of

NASTY = """<script>alert("x")</script> & 'co'"""
VOID = {"meta", "link", "br", "input", "img", "hr"}


class Reader(HTMLParser):
    """Cells, addresses, ids and texts of a page; fails where tags don't match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[dict[str, str | None]] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href", "action")]
        self.ids += [str(given["id"])] if "id" in given else []
        self.scripts += tag == "script"
        if tag in ("td", "th") and "data-value" in given:
            self.cells.append(given)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            self.texts.append(data)


def line(name: str, block: int = 0, mean: float = 60.25, **more: Any) -> dict[str, Any]:
    """A board's line with the seeds 0 and 1, without tests, target, published numbers and groups."""
    return {
        "block": block,
        "caption": "toy data · 4 clients",
        "baseline": "fedavg",
        "row": f"{name} · clip:embedded",
        "seeds": 2,
        "seed_list": "0, 1",
        "global_accuracy_mean": mean,
        "global_accuracy_std": 1 / 3,
        "bytes_up_mean": 1.5e6,
        "bytes_down_mean": 0.5e6,
        "runs": json.dumps({"0": f"run-{name}-0", "1": f"run-{name}-1"}),
        "settings": json.dumps({"backbone": "clip:embedded", "lr": "0.01", f"{name}.mu": "0.1"}),
        **more,
    }


def full(name: str, block: int = 0, mean: float = 60.25, **more: Any) -> dict[str, Any]:
    """A line with all the columns."""
    newer = {
        "label": name,
        "method": name,
        "backbone": "clip:embedded",
        "setting": "",
        "dataset": "embedded",
        "scenario": "iid",
        "tuned": False,
        "headline": "global_accuracy",
        "rank": 1,
        **{
            f"{group}_accuracy_{part}": value
            for group in ("head", "mid", "tail")
            for part, value in (("mean", 100 / 3), ("std", 0.1))
        },
        "domain_accuracy/photo_mean": 70.0,
        "domain_accuracy/sketch_mean": 50.0,
        "shown": json.dumps(["global_accuracy", "head_accuracy"]),
        "delta_mean": 1.23456789,
        "delta_std": 0.5,
        "delta_seeds": 2,
        "p_value": 0.0123,
        "p_adjusted": 0.0246,
        "significance": "significant",
        "test": "paired t-test",
        "rounds_to_target_mean": 2.5,
        "rounds_to_target_std": 0.7071,
        "target": 55.0,
        "target_reached": "2/2",
        "published": 80.1,
        "published_delta": -19.85,
        "published_source": "Paper table 2",
        "comparable": "no",
        "differs": "rounds (200, here 4)",
        "differences": json.dumps([["rounds", "200", "4"]]),
        "train_seconds_mean": 3.25,
        "seconds_mean": 4.5,
        "tuning": "{}",
        "runs": json.dumps({"0": f"run-{name}-0", "1": f"run-{name}-1"}),
        "mlflow_ids": json.dumps({"0": f"{name}{block}0", "1": f"{name}{block}1"}),
    }
    return {**line(name, block, mean), **newer, **more}


def curves_of(*ids: str) -> pd.DataFrame:
    """Three evaluated rounds a run: accuracy 20, 40, 60 and a little, a MB a round."""
    points = [(one, n, 20.0 * (n + 1) + i, 1e6 * n) for i, one in enumerate(ids) for n in range(3)]
    return pd.DataFrame(points, columns=["mlflow_id", "round", "global_accuracy", "bytes_total"])


RESULTS = pd.DataFrame(
    {
        "row": ["fedavg · clip:embedded"] * 2,
        "setting": "",
        "seed": [0, 1],
        "run_id": ["r0", "r1"],
        "mlflow_id": ["fedavg00", "fedavg01"],
        "commit": "c" * 40,
        "code_hash": "d" * 64,
        "harness_hash": "d" * 64,
        "data_hash": "e" * 64,
        "weights_hash": "",
        "started": pd.to_datetime(["2025-01-02", "2025-01-03"], utc=True),
    }
)
FEDERATION = {"classnames": ["cat", NASTY], "class_counts": [[5, 0], [1, 7]], "groups": {}}


def written(folder: Path, board: pd.DataFrame, curves: pd.DataFrame | None = None, **given: Any) -> tuple[str, Reader]:
    """The page of a board, and what stands in it."""
    file = folder / "page.html"
    federations, command = given.pop("federations", {}), given.pop("command", "fedbench x")
    curves = pd.DataFrame(columns=["mlflow_id", "run_id", "round"]) if curves is None else curves
    read = read_of(RESULTS, board_of(board), curves, **{"description": "Toys", **given})
    write_page(file, read, federations, command)
    html = file.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return html, reader


def shown(reader: Reader) -> str:
    return " ".join(" ".join(reader.texts).split())


@pytest.fixture
def board() -> pd.DataFrame:
    return pd.DataFrame(
        [full("fedprox", mean=61.1), full("fedavg", mean=np.nextafter(60.0, 61), rank=2, delta_mean=np.nan)]
    )


def test_the_values_are_the_frame_s_to_the_last_digit(tmp_path: Path, board: pd.DataFrame) -> None:
    _, reader = written(tmp_path, board)
    values = [cell["data-value"] for cell in reader.cells]
    wanted = []
    for one in board.to_dict("records"):
        numbers = [one["rank"], one["global_accuracy_mean"], one["head_accuracy_mean"], one["delta_mean"]]
        numbers += [80.1, -19.85, 2e6, 3.25, one["rounds_to_target_mean"]]
        wanted += [one["label"], *("" if np.isnan(number) else repr(float(number)) for number in numbers)]
    assert values == wanted


def test_what_is_not_a_number_is_a_dash(tmp_path: Path) -> None:
    base = full("fedavg", delta_mean=np.nan, significance="is the baseline", p_value=np.nan, p_adjusted=np.nan)
    html, reader = written(tmp_path, pd.DataFrame([base, full("fedprox")]))
    assert '<td data-value="" title="is the baseline">–</td>' in html
    assert not re.search(r"\bnan\b", shown(reader).lower())


def test_the_legend_explains_marks_and_why_there_is_none(tmp_path: Path) -> None:
    untested = {"p_value": np.nan, "p_adjusted": np.nan}
    board = [full("a"), full("b", significance="not significant"), full("c", significance="needs 3 seeds", **untested)]
    html, reader = written(tmp_path, pd.DataFrame([*board, full("fedavg", significance="is the baseline", **untested)]))
    assert "* p < 0.05, paired t-test over 2 seeds, Holm over 2 rows." in shown(reader)
    assert "n.s. not significant; p-values are under the rows' names." in shown(reader)
    assert "Significance not tested (c): needs 3 seeds." in shown(reader)
    assert re.findall(r'<span class="mark">([^<]+)', html) == ["*", "n.s."]
    assert 'title="significant, paired t-test over 2 seeds, p = 0.012, adjusted p = 0.025"' in html


def test_a_note_is_a_sentence_and_a_name_at_its_beginning_stays() -> None:
    assert sentence("paper: CAPT table 1", ["fedavg"]) == "Paper: CAPT table 1."
    assert sentence("fedavg, tail: the paper prints 1", ["fedavg"]) == "fedavg, tail: the paper prints 1."
    assert sentence("fedavg: seed 0 failed: no", ["fedavg"]) == "fedavg: seed 0 failed: no."


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    hostile = full(NASTY, backbone=NASTY, setting=NASTY, caption=NASTY, differs=NASTY, significance=NASTY, test=NASTY)
    board = pd.DataFrame([hostile, full("fedavg", backbone="other", setting="other")])
    html, reader = written(
        tmp_path,
        board,
        curves_of("fedavg00", "fedavg01"),
        name=NASTY,
        description=NASTY,
        command=NASTY,
        federations={"fedavg00": FEDERATION},
    )
    assert reader.scripts == 1
    assert html.count("<script>") == 1
    assert shown(reader).count(NASTY) > 8


def test_the_page_needs_no_network(tmp_path: Path, board: pd.DataFrame) -> None:
    ids = ["fedavg00", "fedavg01", "fedprox00", "fedprox01"]
    html, reader = written(tmp_path, board, curves_of(*ids), federations={"fedavg00": FEDERATION})
    assert [a for a in reader.addresses if not a.startswith(("#", "data:"))] == []
    assert "http:" not in html and "https:" not in html and "url(#" in html and "url(http" not in html
    assert "default-src 'none'" in html
    assert len(reader.ids) == len(set(reader.ids))
    assert {a[1:] for a in reader.addresses if a.startswith("#")} <= set(reader.ids)


def test_a_page_leaves_out_what_no_row_has(tmp_path: Path) -> None:
    html, reader = written(tmp_path, pd.DataFrame([line("fedavg"), line("fedprox")]))
    keys = re.findall(r'data-key="([^"]+)"', html)
    assert keys == ["row", "rank", "global_accuracy", "bytes"]
    assert "By round" not in html and "Clients and classes" not in html and "Published" not in html
    assert "60.2 ± 0.3" in shown(reader)


def test_charts_appear_with_their_data(tmp_path: Path, board: pd.DataFrame) -> None:
    def headings(**given: Any) -> list[str]:
        html, _ = written(tmp_path, board, **given)
        return re.findall(r"<figure[^>]*><h3>([^<]+)", html)

    plain = ["Against what is sent", "Head, mid and tail classes", "By domain"]
    assert headings() == plain
    assert headings(curves=curves_of("fedavg00", "fedavg01")) == ["By round", *plain]
    assert headings(federations={"fedprox01": FEDERATION}) == [*plain, "Clients and classes"]
    _, reader = written(tmp_path, board, federations={"fedprox01": FEDERATION})
    assert "seed 1" in shown(reader)


def test_a_curve_is_the_mean_over_the_rounds_all_seeds_have(board: pd.DataFrame) -> None:
    from fedbench_boards.leaderboard.page.sections import _rounds

    curves = curves_of("a", "b")
    table = _rounds(curves[~((curves["mlflow_id"] == "b") & (curves["round"] == 1))], ["a", "b"], "global_accuracy")
    assert list(table.index) == [0, 2]
    assert list(table["mean"]) == [20.5, 60.5]
    assert table["std"].iloc[0] == pytest.approx(0.5**0.5)
    assert list(table["bytes"]) == [0.0, 2e6]


def test_a_chart_by_round_is_named_by_what_it_draws(tmp_path: Path) -> None:
    chosen = "selected_unseen_domain_accuracy"
    ranked = {"headline": chosen, f"{chosen}_mean": 71.5, "global_accuracy_mean": np.nan, "global_accuracy_std": np.nan}
    ranked["shown"] = json.dumps([chosen])
    curves = curves_of("fedavg00", "fedavg01")
    once = curves.assign(**{chosen: curves["global_accuracy"].where(curves["round"] == 2)})
    for given, by_round, name, way in [
        (ranked, curves, "unseen (selected)", False),
        (ranked, once, "unseen (selected)", False),
        ({}, once, "accuracy", True),
    ]:
        board = pd.DataFrame([full(row, **given) for row in ("fedavg", "fedprox")])
        html, reader = written(tmp_path, board, by_round)
        assert "Test accuracy after every evaluated round. A band is" in shown(reader)
        assert "A band is" not in shown(written(tmp_path, board, by_round[:3])[1])
        assert "fedavg: –" not in html and (way or "fedavg: 60.5 ± 0.7" in html)
        assert ("%; columns unseen (selected): of the round" in shown(reader)) is not way
        assert re.findall(r">([^<>]+) by round</title>", html) == ["accuracy"]
        assert re.findall(r">([^<>]+) against MB sent</title>", html) == [name]
        assert ("the way there" in shown(reader)) is way


def test_what_is_evaluated_once_is_level_from_the_start_or_a_point_at_the_end(tmp_path: Path) -> None:
    curves = curves_of("fedavg00", "fedavg01")
    board = pd.DataFrame([full("fedavg"), full("b", runs='{"0": "b"}', mlflow_ids='{"0": "b00"}')])
    for when, level in [(0, 1), (2, 0)]:
        once = pd.DataFrame([["b00", when, 50.0, 0.0]], columns=curves.columns)
        html, _ = written(tmp_path, board, pd.concat([curves, once]))
        chart = html[html.index(" by round</title>") :].partition("</svg>")[0]
        assert len(re.findall(r'class="line"[^>]* d="M[\d.]+ [\d.]+H[\d.]+"', chart)) == level
        assert chart.count("b: 60.2 ± 0.3") == 1
        place = re.search(r'<title>b: 60.2[^>]*>(?:<path [^>]*>)?<use href="#mark-1" x="(\d+)" y="[\d.]+" />', chart)
        assert place is not None and int(place[1]) == (290 if level else 526)


def test_a_line_in_steps_ends_where_its_points_are() -> None:
    points = [(54.04, 10.0), (55.06, 9.96), (60.0, 12.34), (60.04, 12.25), (0.0, -3.1)]
    start, *steps = polyline(points).removeprefix("M").split("l")
    places = [tuple(map(float, start.split()))]
    numbers = [float(text) for text in re.findall(r"-?[\d.]+", steps[0])]
    for dx, dy in zip(numbers[::2], numbers[1::2], strict=True):
        places.append((places[-1][0] + dx, places[-1][1] + dy))
    # rounding is not added up
    np.testing.assert_allclose(places, points, atol=0.051)
    assert polyline(points[:1]) == "M54 10"


def test_bars_stand_for_the_means_and_say_them(tmp_path: Path, board: pd.DataFrame) -> None:
    html, _ = written(tmp_path, board)
    chart = html[html.index('class="chart bars"') :].partition("</svg>")[0]
    told = re.findall(r'<path d="M170 [\d.]+h([\d.]+)v9.5H170z"><title>([^<]+)', chart)
    # 330 units are 100 %
    assert all(
        float(wide) == pytest.approx(3.3 * float(title.split(": ")[1].split()[0]), abs=0.2) for wide, title in told
    )
    assert [title.split(":")[0] for _, title in told] == [
        f"{row}, {group}" for group in ("head", "mid", "tail") for row in ("fedprox", "fedavg")
    ]


def test_runs_of_the_same_code_and_data_are_one_line(tmp_path: Path, board: pd.DataFrame) -> None:
    of_a_row = {"row": "fedavg", "setting": "s", "harness_hash": "h" * 9, "data_hash": "d" * 9, "weights_hash": ""}
    runs = [(seed, "c" * 40 if seed < 7 else "e" * 40 + "+dirty-1") for seed in (2, 0, 1, 7)]
    results = pd.DataFrame(
        [
            {**of_a_row, "seed": s, "run_id": f"r{s}", "mlflow_id": "", "commit": c, "code_hash": "k" * 9}
            for s, c in runs
        ]
    ).assign(started=pd.Timestamp("2025-01-02", tz="UTC"))
    page = tmp_path / "own.html"
    write_page(page, read_of(results, board_of(board)), {}, "")
    table = page.read_text("utf-8").partition('class="runs"')[2].partition("</table>")[0]
    cells = [re.findall(r"<t[hd][^>]*>([^<]*)", line) for line in table.splitlines() if line.startswith("<tr><th")]
    assert cells == [
        ["fedavg", "s", "0-2", "ccccccc", "kkkkkkkk", "dddddddd", ""],
        ["fedavg", "s", "7", "eeeeeee+dirty", "kkkkkkkk", "dddddddd", ""],
    ]
    assert "seed 0: run-fedavg-0 (fedavg00)" in page.read_text("utf-8")


def test_every_table_has_a_section_and_the_overview_compares_them(tmp_path: Path) -> None:
    board = pd.DataFrame([full(row, n, 60.0 + n, setting=f"c={n}") for n in range(3) for row in ("fedavg", "moon")])
    board = board.drop(5)  # moon misses the last setting
    html, reader = written(tmp_path, board)
    assert [i for i in reader.ids if re.fullmatch(r"table-\d", i)] == ["table-1", "table-2", "table-3"]
    assert html.count("<style>") == html.count("<script>") == 1
    overview = html.split('id="overview"')[1].split("</section>")[0]
    values = re.findall(r'data-value="([^"]*)"', overview)
    assert values == ["fedavg", "60.0", "61.0", "62.0", "moon", "60.0", "61.0", ""]
    assert "<option>c=2</option>" in html and "Marks are explained" not in html


def test_an_untrained_global_model_is_marked_and_never_the_best(tmp_path: Path) -> None:
    names = json.dumps(["global_accuracy", "personal_mean_client_accuracy"])
    own = {"personal_mean_client_accuracy_mean": 90.0, "shown": names}
    lines = [full("fedavg", whole=True, untrained=False, shown=own["shown"])]
    lines += [full("alone", mean=95.0, rank=np.nan, whole=True, untrained=True, **own)]
    lines += [full("fedavg", 1, setting="other", whole=True, untrained=False)]
    html, reader = written(tmp_path, pd.DataFrame(lines))
    assert "‡ the global model is never trained" in shown(reader)
    overview, table = html.split("<table")[1:3]
    assert "<span>alone ‡" in table and '<span class="mark">‡</span>' in overview
    assert "Marks are explained below the tables" in html.split("<table")[0]
    bold = re.findall(r'data-value="([\d.]+)"[^>]*><b>', table)
    assert "60.25" in bold and "95.0" not in bold and "90.0" in bold


def test_rows_of_other_seeds_say_theirs(tmp_path: Path) -> None:
    board = pd.DataFrame([full("fedavg"), full("fedprox", seed_list="7", runs=json.dumps({"7": "r"}))])
    html, reader = written(tmp_path, board)
    assert "over 1 to 2 seeds" in shown(reader) and "Rows differ in their seeds" in shown(reader)
    assert re.search(r'data-value="2.0">0, 1<', html) and re.search(r'data-value="1.0">7<', html)
    html, reader = written(tmp_path, board[:1])
    assert 'data-key="seeds"' not in html and "differ in their seeds" not in shown(reader)


def test_how_far_a_printed_number_is_comparable_is_told(tmp_path: Path) -> None:
    partly = {"comparable": "yes, as far as printed", "differs": "rounds not printed", "differences": "[]"}
    board = [full("a"), full("b", comparable="yes", differs="", differences="[]"), full("c", **partly)]
    text = shown(written(tmp_path, pd.DataFrame(board))[1])
    assert "≠ 80.1 not comparable: rounds" in text and " 80.1 comparable " in text
    assert "not comparable: rounds (200, here 4)" in text and "≈ 80.1 comparable as far as printed" in text
    assert "Paper table 2; comparable as far as printed: rounds not printed" in text


def test_only_rows_in_which_every_seed_got_there_can_be_the_fastest(tmp_path: Path) -> None:
    counts = {"a": (2.0, "1/2"), "b": (3.0, "2/2"), "c": (3.04, "2/2"), "d": (9.0, "2/2"), "e": (np.nan, "0/2")}
    counts["f"] = (3.01, "1/2")
    board = [full(n, rounds_to_target_mean=mean, target_reached=of) for n, (mean, of) in counts.items()]
    html, reader = written(tmp_path, pd.DataFrame(board))
    bold = re.findall(r'data-value="([\d.]+)" title="to 55.0 %"><b>', html)
    assert bold == ["3.0", "3.04"]
    assert shown(reader).count("1 of 2 seeds") == 2 and "0 of 2 seeds" in shown(reader)
    assert "2 of 2 seeds" not in shown(reader)
    none = written(tmp_path, pd.DataFrame([full(n, target_reached="1/2") for n in "ab"]))[0]
    assert not re.findall(r'title="to 55.0 %"><b>', none)


def test_the_heading_of_rounds_names_a_metric_that_rows_are_not_ranked_by(tmp_path: Path) -> None:
    def headings(**given: Any) -> str:
        return shown(written(tmp_path, pd.DataFrame([full("a", **given)]))[1])

    assert "rounds to 55 % tail" in headings(target_metric="tail_accuracy")
    assert "rounds to 55 % accuracy" not in headings(target_metric="global_accuracy")
    ranked = {"headline": "tail_accuracy", "target_metric": "global_accuracy"}
    assert "rounds to 55 % accuracy" in headings(**ranked)


def test_the_clients_are_those_of_the_lowest_seed_that_is_known(tmp_path: Path) -> None:
    other = {**FEDERATION, "class_counts": [[900, 0], [1, 7]]}
    board = pd.DataFrame([full("fedavg")])
    _, reader = written(tmp_path, board, federations={"fedavg01": other, "fedavg00": FEDERATION})
    assert "every client holds of every class, seed 0;" in shown(reader) and "13 training samples" in shown(reader)
    _, reader = written(tmp_path, board, federations={"fedavg01": other})
    assert "every class, seed 1;" in shown(reader) and "908 training samples" in shown(reader)


def test_rows_of_one_name_on_two_backbones_are_told_apart(tmp_path: Path) -> None:
    board = pd.DataFrame([full("fedavg"), full("fedavg", row="fedavg · convnet", backbone="convnet")])
    _, reader = written(tmp_path, board)
    names = [cell["data-value"] for cell in reader.cells if cell.get("scope") == "row"]
    assert names == ["fedavg · clip:embedded", "fedavg · convnet"]


def test_only_the_first_twelve_rows_are_drawn_at_first(tmp_path: Path) -> None:
    board = pd.DataFrame([full(f"m{n}", row=f"m{n}", rank=n + 1, mean=80.0 - n) for n in range(14)])
    html, _ = written(tmp_path, board)
    assert html.count('<li data-series="') == 14
    assert re.findall(r'<li data-series="(\d+)" class="off"', html) == ["12", "13"]


def test_an_empty_board_says_so(tmp_path: Path) -> None:
    _, reader = written(tmp_path, pd.DataFrame([full("a")]).iloc[:0])
    assert "No finished runs." in shown(reader)


def test_a_page_that_cannot_be_written_is_one_message(tmp_path: Path, board: pd.DataFrame) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FedbenchError, match="can't write the leaderboard page"):
        written(tmp_path / "file", board)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_the_header_counts_what_was_compared(board: pd.DataFrame) -> None:
    page = page_of(read_of(RESULTS, board_of(board), pd.DataFrame()), {}, "")
    facts = dict(page.facts)
    assert facts["methods"] == "2" and facts["runs"] == "2" and facts["seeds"] == "0, 1"
    assert facts["run on"] == "2025-01-02 to 2025-01-03" and facts["commit"] == "ccccccc"


def test_the_pareto_front_is_what_none_beats_in_both() -> None:
    # (MB, accuracy): the third costs more and is worse than the second, the fourth ties in cost and is worse
    assert pareto([(0.0, 50.0), (2.0, 70.0), (3.0, 60.0), (2.0, 65.0), (9.0, 71.0)]) == [0, 1, 4]
    # as accurate for more
    assert pareto([(5.0, 70.0), (2.0, 70.0)]) == [1]


def test_of_a_metric_of_which_less_is_better_the_front_is_below() -> None:
    none = pd.DataFrame({"mean": [], "std": [], "bytes": []}, dtype=float)
    rows = {"cheap": (9.0, 1e6), "dear": (4.0, 2e6), "beaten": (12.0, 3e6)}
    series = [Series(0, name, none, value, 1.0, sent) for name, (value, sent) in rows.items()]
    for less, front in ((True, "cheap, dear"), (False, "cheap, beaten")):
        assert f"Not beaten in both spread and MB: {front}<" in str(against_cost(series, "k", "spread", less))


def test_scales_end_on_round_numbers() -> None:
    scale = linear([12.0, 68.0], 300.0, 0.0)
    assert (scale.low, scale.high, scale(scale.low), scale(scale.high)) == (10.0, 70.0, 300.0, 0.0)
    log = logarithmic([1.0, 1000.0], 0.0, 100.0)
    assert log.ticks == (1.0, 10.0, 100.0, 1000.0)
    assert log(10.0) - log(1.0) == pytest.approx(log(100.0) - log(10.0))


def test_a_heat_map_names_its_clients_and_stays_small_when_there_are_many() -> None:
    small = heat_map([[5, 0], [1, 7]], ["cat", "dog"], "k")
    assert small is not None and "2 clients, 2 classes, 13 training samples" in small.summary
    numbers = str(small.picture).split('class="counts"')[1].split("</g>")[0]
    assert re.findall(r">(\d+)</text>", numbers) == ["5", "1", "7"]
    large = heat_map(np.eye(200, dtype=int).tolist(), [f"class {n}" for n in range(200)], "k")
    assert large is not None and len(large.picture) < 40_000 and large.width > 1500
    assert heat_map([[0, 0]], ["cat", "dog"], "k") is None


def test_a_heat_map_says_a_range_only_where_counts_differ() -> None:
    differ, alike = heat_map([[5, 0], [1, 6]], ["cat", "dog"], "k"), heat_map([[3, 3], [3, 3]], ["cat", "dog"], "k")
    assert differ is not None and alike is not None
    text = "A client has 5 to 7 samples (median 6) of 1 to 2 classes (median 1.5); a class has 6 samples."
    assert differ.summary.endswith(text)
    assert alike.summary.endswith("A client has 6 samples of 2 classes; a class has 6 samples.")
