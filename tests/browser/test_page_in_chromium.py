"""The leaderboard's page in a real browser: sorting, filtering, values, phone, dark, paper, without JavaScript."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedbench_boards.leaderboard.page import write_page
from tests.leaderboard import frames

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
if CHROMIUM is None:
    pytest.skip("no Chromium on the PATH", allow_module_level=True)

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync"]
# pandas reads back what Python wrote only so
EXACT: dict[str, Any] = {"float_precision": "round_trip"}
READ = "rows => rows.map(r => [...r.cells].map(c => c.dataset.value))"
ROWS = "#table-1 tbody tr.main"


def board_of(methods: int) -> pd.DataFrame:
    """Two settings; accuracies to the last digit, one missing, two equal; half of the rows tuned."""
    random = np.random.default_rng(0)
    lines = []
    for block, setting in enumerate(("iid", "skewed")):
        for number in range(methods):
            mean = float(random.uniform(20, 80))
            lines.append(
                {
                    "block": block,
                    "caption": f"{setting} · toy data · 3 rounds",
                    "baseline": "m0",
                    "row": f"m{number} · clip:embedded",
                    "label": f"m{number}",
                    "method": f"m{number}",
                    "backbone": "clip:embedded",
                    "setting": setting,
                    "tuned": number % 2 == 1,
                    "headline": "global_accuracy",
                    "shown": json.dumps(["global_accuracy", "tail_accuracy"]),
                    "seeds": 2,
                    "seed_list": "0, 1",
                    "global_accuracy_mean": mean,
                    "global_accuracy_std": float(random.uniform(0, 3)),
                    "tail_accuracy_mean": np.nan if number == 2 else 33.3 if number in (3, 4) else mean / 3,
                    "tail_accuracy_std": 0.1,
                    "delta_mean": mean - 50,
                    "delta_std": 1.0,
                    "delta_seeds": 2,
                    "bytes_up_mean": float(random.integers(10**5, 10**8)),
                    "bytes_down_mean": 1e6 / 3,
                    "train_seconds_mean": float(random.uniform(1, 9)),
                    "settings": json.dumps({"lr": "0.01", f"m{number}.mu": "0.1"}),
                    "runs": json.dumps({"0": f"r{number}"}),
                    "mlflow_ids": json.dumps({"0": f"{block}-{number}-0", "1": f"{block}-{number}-1"}),
                }
            )
    board = pd.DataFrame(lines).sort_values(["block", "global_accuracy_mean"], ascending=[True, False])
    board.insert(1, "rank", board.groupby("block").cumcount() + 1)
    return board


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page, and its board as CSV."""
    made = tmp_path_factory.mktemp("page")
    board = board_of(8)
    ids = [(one, seed) for known in board["mlflow_ids"] for seed, one in json.loads(known).items()]
    points = [(one, n, 20.0 + 10 * n + int(seed), 1e6 * n) for one, seed in ids for n in range(4)]
    curves = pd.DataFrame(points, columns=["mlflow_id", "round", "global_accuracy", "bytes_total"])
    results = pd.DataFrame({"row": board["row"], "seed": 0, "run_id": "r", "commit": "c" * 40, "data_hash": "d" * 64})
    absent = dict.fromkeys(("setting", "mlflow_id", "code_hash", "harness_hash", "weights_hash"), "")
    results = results.assign(started=pd.Timestamp("2025-01-02", tz="UTC"), **absent)
    federation = {"classnames": [f"class {n}" for n in range(80)], "class_counts": np.eye(80, dtype=int).tolist()}
    board.to_csv(made / "leaderboard.csv", index=False)
    command = "fedbench leaderboard --suite toy --output " + "a-long-folder-name/" * 6
    federations = {"0-0-0": {**federation, "groups": {}}}
    read = frames.read_of(results, frames.board_of(board), curves, description="A toy suite")
    write_page(made / "index.html", read, federations, command)
    return made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield started
        started.close()


class Visit:
    """A page with what it asked for and complained about."""

    def __init__(self, browser: Any, file: Path, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(file.as_uri())

    def rows(self) -> list[list[str]]:
        """The values of the first table's rows, in the order they are in."""
        read: list[list[str]] = self.page.eval_on_selector_all(ROWS, READ)
        return read


@pytest.fixture
def visit(browser: Any, folder: Path) -> Iterator[Any]:
    """Opens the page; afterwards nothing may have been asked of a network or complained about."""
    visits = []

    def opened(**context: Any) -> Visit:
        visits.append(Visit(browser, folder / "index.html", **context))
        return visits[-1]

    yield opened
    for one in visits:
        one.context.close()
        assert [url for url in one.requests if not url.startswith(("file://", "data:"))] == []
        assert one.complaints == []


@pytest.fixture
def first(folder: Path) -> pd.DataFrame:
    """The first table's lines of the CSV."""
    board = pd.read_csv(folder / "leaderboard.csv", **EXACT)
    return board[board["block"] == 0].assign(bytes=board["bytes_up_mean"] + board["bytes_down_mean"])


def test_every_value_is_that_of_the_csv_in_full_precision(visit: Any, first: pd.DataFrame) -> None:
    names = ["rank", "global_accuracy_mean", "tail_accuracy_mean", "delta_mean", "bytes", "train_seconds_mean"]
    read = visit().rows()
    assert [row[0] for row in read] == list(first["label"])
    numbers = np.array([[float(value or "nan") for value in row[1:]] for row in read])
    np.testing.assert_array_equal(numbers, first[names].to_numpy(dtype=float))


@pytest.mark.parametrize("by", ["click", "Enter", "Space"])
def test_headers_sort_as_pandas_does(visit: Any, first: pd.DataFrame, by: str) -> None:
    opened = visit()
    order = first
    for key, column, directions in (
        ("tail_accuracy", "tail_accuracy_mean", ("descending", "ascending")),
        ("bytes", "bytes", ("ascending", "descending")),
        ("row", "label", ("ascending", "descending")),
    ):
        head = opened.page.locator(f'#table-1 th[data-key="{key}"]')
        for direction in directions:
            button = head.locator("button")
            button.click() if by == "click" else button.press(by)
            order = order.sort_values(column, ascending=direction == "ascending", kind="stable", na_position="last")
            assert [row[0] for row in opened.rows()] == list(order["label"])
            assert head.get_attribute("aria-sort") == direction
        assert opened.page.locator("#table-1 th[aria-sort]").count() == 1


def test_filters_by_text_tuning_and_setting(visit: Any) -> None:
    page = visit().page
    shown = page.locator(".board tbody:visible")
    status = page.locator(".filters output")
    assert (shown.count(), status.inner_text()) == (16, "16 of 16 rows")
    page.get_by_label("Parameters").select_option("tuned")
    assert shown.count() == 8
    page.get_by_label("Setting").select_option("skewed")
    assert shown.count() == 4
    assert not page.locator("#table-1").is_visible()
    page.get_by_label("Rows with").fill("M3 clip")
    assert (shown.count(), status.inner_text()) == (1, "1 of 16 rows")
    page.get_by_label("Rows with").fill("nothing like it")
    assert (shown.count(), status.inner_text()) == (0, "0 of 16 rows")


def test_a_row_opens_its_details_and_the_legend_hides_its_curve(visit: Any) -> None:
    page = visit().page
    name = page.locator(f"{ROWS} .name button").first
    details = page.locator("#table-1 tr.more").first
    assert not details.is_visible()
    name.press("Enter")
    assert details.is_visible() and name.get_attribute("aria-expanded") == "true"
    curve = page.locator("#table-1 .plot").first.locator('.series[data-series="0"]')
    entry = page.locator('#table-1 .legend li[data-series="0"] button')
    assert curve.is_visible()
    entry.press("Space")
    assert not curve.is_visible() and entry.get_attribute("aria-pressed") == "false"


def test_a_phone_scrolls_the_table_not_the_page(visit: Any) -> None:
    page = visit(viewport={"width": 375, "height": 800}).page
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    page.locator(f"{ROWS} .name button").first.click()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    table = page.locator("#table-1 .scroll").first
    table.evaluate("one => { one.scrollLeft = 200 }")
    assert table.evaluate("one => one.scrollLeft") == 200
    assert abs(page.locator(f"{ROWS} th").first.bounding_box()["x"] - table.bounding_box()["x"]) < 1


def luminance(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)``, as WCAG defines it."""
    channels = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_both_themes_are_readable(visit: Any, scheme: str) -> None:
    page = visit(color_scheme=scheme).page
    style = "one => [getComputedStyle(one).color, getComputedStyle(document.body).backgroundColor]"
    for place in ("body", ".note", "td b", "td i", "nav a"):
        text, ground = (luminance(colour) for colour in page.locator(place).first.evaluate(style))
        assert (ground < 0.05) == (scheme == "dark")
        assert (max(text, ground) + 0.05) / (min(text, ground) + 0.05) >= 4.5


def test_paper_has_all_rows_and_no_controls(visit: Any) -> None:
    page = visit(color_scheme="dark").page
    page.get_by_label("Rows with").fill("m3")
    page.emulate_media(media="print")
    assert page.locator(".board .main:visible").count() == 16
    assert page.locator(".more:visible").count() == 16
    for control in (".filters", "nav", ".command button"):
        assert not page.locator(control).first.is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_without_javascript_the_page_is_whole(visit: Any, first: pd.DataFrame) -> None:
    page = visit(java_script_enabled=False).page
    assert page.locator(f"{ROWS}:visible").count() == len(first)
    assert page.locator("#table-1 tr.more:visible").count() == len(first)
    assert page.locator("button:visible, input:visible").count() == 0
    assert page.locator("#table-1 svg.chart:visible").count() == 2


def test_the_keyboard_reaches_the_tables_at_once(visit: Any) -> None:
    page = visit().page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.name") == "text"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
