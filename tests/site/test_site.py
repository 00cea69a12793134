"""A site from two small result folders: what is on its pages, that every link leads somewhere, what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pandas as pd
import pytest

from fedbench.cli.app import main
from fedbench.core.errors import FedbenchError
from fedbench_boards.advice.advising import RATE, Forecaster, caveats
from fedbench_boards.advice.evidence import Evidence, measures_of, read_evidence, write_evidence
from fedbench_boards.site.answers import worth
from fedbench_boards.site.folders import BoardLine, BoardTable, read_folders
from fedbench_boards.site.pages import LISTING, write_site
from fedbench_boards.site.text import findings, laid_out, seeds_shown, slug, told
from tests.site.folders import write_folder, write_map


class Read(HTMLParser):
    """Links, anchors and text of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: list[str] = []
        self.words: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.links += [value for name in ("href", "src") if (value := known.get(name))]
        self.anchors += [value for name in ("id",) if (value := known.get(name))]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("leaderboards")
    stacks = ["fedavg", "fedprox", "fedprox+promptfl"]
    write_folder(made, "few-shot", stacks, ["1 shot", "2 shots"], tied=True, scenario="domain(2), 40 % participating")
    odd = ["fedavg", "fedprox", "../../Über <b>"]
    write_folder(made, "odd", odd, [""], dataset="imagefolder:/home/me/PACS", scenario="imbalance 50.0, shards(2)")
    write_map(made)
    (made / "no-results").mkdir()
    (made / "front.png").write_bytes(b"first")
    (made / "link.png").symlink_to(made / "odd" / "results.csv")
    shown = "![who <b>leads</b>](front.png) ![no](link.png) ![no](none.png) ![no](odd/own.png) ![no](README.md)"
    (made / "README.md").write_text(shown)
    (made / "odd" / "index.html").unlink()
    (made / "odd" / "figures").mkdir()
    (made / "odd" / "figures" / "winners.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (made / "odd" / "figures" / "winners.png").write_bytes(b"never copied")
    (made / "odd" / "figures" / "link.png").symlink_to(made / "odd" / "results.csv.gz")
    text = (
        "# Odd\n\nSee [few](../few-shot/findings.md), [all](leaderboard.md), [none](../gone), [x](javascript:alert(1))"
    )
    (made / "odd" / "findings.md").write_text(f"{text} <script>bad()</script>\n\n![who](figures/winners.svg)\n")
    return made


@pytest.fixture(scope="module")
def site(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "site"
    write_site(folder, results)
    return folder


def test_every_link_leads_to_a_file_and_an_anchor(site: Path) -> None:
    assert _checked_links(site, site) > 50


def test_a_suites_page_leads_to_the_tables_of_the_folders_own_page_if_it_has_one(site: Path) -> None:
    few, odd = (Read(site / "suites" / f"{name}.html") for name in ("few-shot", "odd"))
    assert {"../suites/few-shot/board.html#table-1", "../suites/few-shot/board.html#table-2"} <= set(few.links)
    assert not [link for link in odd.links if "board.html" in link] and "it has no page of its own" in odd.text


def test_a_site_among_the_folders_links_to_their_pages(results: Path) -> None:
    write_site(results / "site", results)
    assert not list(results.glob("site/suites/*/*"))
    assert "../../odd/figures/winners.svg" in Read(results / "site" / "suites" / "odd.html").links
    assert _checked_links(results / "site", results) > 50
    assert "../../few-shot/index.html#" in (results / "site" / "suites" / "few-shot.html").read_text("utf-8")


def _checked_links(site: Path, within: Path) -> int:
    """How many links of the pages lead to an anchor; they all lead somewhere ``within``."""
    pages = {file.resolve(): Read(file) for file in within.rglob("*.html")}
    seen = 0
    for file, page in pages.items():
        if not file.is_relative_to(site.resolve()):
            continue
        assert len(page.anchors) == len(set(page.anchors)), file
        for link in page.links:
            parts = urlsplit(link)
            assert (parts.scheme, parts.netloc) == ("", ""), (file, link)
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert target.is_file() and target.is_relative_to(within.resolve()), (file, link)
            if parts.fragment:
                seen += 1
                assert parts.fragment in pages[target].anchors, (file, link)
    return seen


def test_the_index_lists_suites_methods_and_data(site: Path) -> None:
    index = Read(site / "index.html")
    for link in ("suites/few-shot.html", "suites/odd.html", "methods/fedprox.html", "data/embedded.html"):
        assert link in index.links
    text = (site / "index.html").read_text("utf-8")
    entries = json.loads(text.partition('id="entries">')[2].partition("</script>")[0])
    assert {("suite", "few-shot"), ("method", "fedprox"), ("data set", "PACS")} <= {
        (one["kind"], one["name"]) for one in entries
    }
    assert all((site / one["url"]).is_file() for one in entries)


def embedded(site: Path) -> dict[str, Any]:
    text = (site / "index.html").read_text("utf-8")
    return dict(json.loads(text.partition('id="answers">')[2].partition("</script>")[0]))


def test_the_pictures_of_the_readme_come_first(site: Path, results: Path) -> None:
    text = (site / "index.html").read_text("utf-8")
    assert 'src="pictures/front.png" alt="who &lt;b&gt;leads' in text and text.index("front.png") < text.index(
        'id="try"'
    )
    assert (site / "pictures" / "front.png").read_bytes() == b"first"
    assert [file.name for file in (site / "pictures").iterdir()] == ["front.png"]
    write_site(results / "beside", results)
    assert (
        "../front.png" in Read(results / "beside" / "index.html").links and not (results / "beside/pictures").exists()
    )
    shutil.rmtree(results / "beside")


def test_what_to_try_is_what_advise_says(site: Path, results: Path) -> None:
    known, answers = read_evidence(results / "map" / "evidence.csv.gz"), embedded(site)["answers"]
    assert len(answers) == 5 * 3 * 4 * 3
    # a thousand samples of each of ten classes, dealt evenly
    even = measures_of(np.full((20, 10), 50), 0.4)
    for key, measures in (("none|1|20|40 %", even), ("none|1|20|all", replace(even, participation=1.0))):
        advice = Forecaster(known, "fedavg").advise(measures)
        rows = answers[key]["rows"]
        assert [row[0] for row in rows] == [one.row for one in advice.choices]
        # those on the page are dealt by chance, and so not quite as even
        assert float(rows[0][1]) == pytest.approx(advice.choices[0].margin, abs=0.2) and " to +" in rows[0][2]
        assert rows[0][3] == f"{advice.choices[0].megabytes:.3g}"
        assert answers[key]["said"].startswith(next(caveats(advice)))
    # shards of classes that have too few samples
    assert answers["two classes a client|100|1000|all"] == {
        "rows": [],
        "said": "So many clients can't be dealt so few samples.",
    }
    assert "Far from all that is measured" in answers["none|1|1000|all"]["said"]


def test_without_a_script_the_choice_in_the_middle_is_shown(site: Path) -> None:
    index, answer = Read(site / "index.html"), embedded(site)["answers"]["strong (Dirichlet 0.1)|10|20|40 %"]
    assert "Without JavaScript one choice is shown: Label skew strong (Dirichlet 0.1), " in index.text
    assert f"{RATE:.0%} interval".replace("%", " %") in index.text.replace("\u00a0", " ")
    assert answer["said"] in index.text and " ".join(answer["rows"][0]).replace("  ", " ") in index.text
    assert "methods/fedprox.html" in index.links


def test_without_a_map_or_with_one_too_small_nothing_is_advised(tmp_path: Path) -> None:
    write_folder(tmp_path, "few-shot", ["fedavg", "fedprox"], [""])
    write_site(tmp_path / "site", tmp_path)
    assert "What to try" not in Read(tmp_path / "site" / "index.html").text
    known = write_map(tmp_path)
    few = known.runs["setting"].isin(list(known.places)[:2])
    write_evidence(Evidence(known.runs[few]), tmp_path / "map" / "evidence.csv.gz")
    write_site(tmp_path / "site", tmp_path)
    assert "What to try" not in Read(tmp_path / "site" / "index.html").text


def test_a_method_says_when_it_is_worth_trying(site: Path) -> None:
    said = {
        name: Read(site / "methods" / f"{name}.html").text for name in ("fedavg", "fedprox", "promptfl", "fedproto")
    }
    # first in all tables: of few-shot by rank, of odd and map as well
    assert "Best mean in 5 of 5 tables. " in said["fedavg"] and "FedAvg wherever" not in said["fedavg"]
    # alone: second in all five, 10 behind; few-shot ties it with the first
    assert "Best mean in none of 5 tables, not told from the best in 2 more. Behind FedAvg wherever" in said["fedprox"]
    assert "both were tried, in 5 comparisons; mean difference in points: -10.0 under" in said["fedprox"]
    # alone in the two of map only, which say nothing of their clients
    behind = (
        "Behind FedAvg wherever both were tried, in 2 comparisons; mean difference in points: -20.0 under other kinds"
    )
    assert (
        f"Best mean in none of 2 tables. {behind} (2). Not tried under label skew or under feature" in said["promptfl"]
    )
    assert "Not tried in any of these results." in said["fedproto"]


def table(scenario: str, *entries: BoardLine) -> BoardTable:
    return BoardTable(1, "t", "fedavg", "accuracy", scenario, entries)


def line(label: str, mean: float, rank: int, low: int, high: int, **other: Any) -> BoardLine:
    known = {"methods": (label.split(" ")[0],), "backbone": "b", "tuned": False} | other
    empty = dict.fromkeys(("dataset", "setting", "score", "delta", "seeds", "failure"), "")
    return BoardLine(**known, **empty, row=label, label=label, mean=mean, rank=rank, rank_low=low, rank_high=high)


def test_worth_compares_alike_with_alike_by_kind() -> None:
    tables = [
        table("imbalance 100.0, iid", line("ccvr", 70, 1, 1, 1), line("fedavg", 60, 2, 2, 2)),
        table("imbalance 100.0, iid", line("ccvr", 66, 1, 1, 2), line("fedavg", 60, 2, 1, 2)),
        table("imbalance 1.0, iid", line("fedavg", 60, 1, 1, 2), line("ccvr", 59, 2, 1, 2)),
        # another backbone, another tuning and another form of it say nothing
        table(
            "dirichlet(0.1)", line("ccvr", 90, 1, 1, 1, backbone="c"), line("fedavg (tuned)", 50, 2, 2, 2, tuned=True)
        ),
        table("dirichlet(0.1)", line("ccvr at 2", 90, 1, 1, 1), line("fedavg", 50, 2, 2, 2)),
        table("domain(1)", line("fst-cbdg (no labels)", 50, 2, 2, 2), line("clip-zs (no labels)", 52, 1, 1, 1)),
        table("domain(1), 40 % symmetric label noise", line("fedavg", 50, 1, 1, 1)),
    ]
    assert worth("ccvr", tables) == (
        "Best mean in 3 of 4 tables, not told from the best in 1 more. Ahead of FedAvg by mean in 2 of 3 comparisons, "
        "by rank in 1; mean difference in points: +8.0 under a long tail (2) to -1.0 under no heterogeneity (1). "
        "Not tried under few or wrong labels or under feature skew."
    )
    unlabelled = (
        "Behind CLIP without training wherever both were tried, in 1 comparison; mean difference in points: -2.0"
    )
    assert f"{unlabelled} under feature skew (1)." in worth("fst-cbdg", tables)
    both = line("ccvr", 1, 1, 1, 2, methods=("ccvr", "cka")), line("fedavg", 1, 2, 1, 2, methods=("cka",))
    assert worth("cka", [table("iid", *both)]) == (
        "Tried only with others or changed. Best mean in 1 of 1 table. Ahead of FedAvg by mean in 0 of 1 comparison, "
        "by rank in 0; mean difference in points: +0.0 under no heterogeneity (1)."
    )


def test_a_method_has_its_ranks_and_equations(site: Path) -> None:
    page = Read(site / "methods" / "fedprox.html")
    for known in ("MLSys 2020", "Hyper-parameters", "fedbench_methods/fedprox.py", "1 shot", "0, 1"):
        assert known in page.text
    assert "../suites/few-shot/board.html#table-1-row-1" in page.links and "../suites/odd.html" in page.links
    assert "No suite with results has it." in Read(site / "methods" / "fedproto.html").text


def test_a_method_on_two_backbones_is_two_rows_that_lead(tmp_path: Path) -> None:
    write_folder(tmp_path, "two", ["fedavg", "fedprox"], ["a", "b"])
    file = tmp_path / "two" / "leaderboard.csv.gz"
    board = pd.read_csv(file, dtype=str, keep_default_na=False)
    (results,) = read_folders(tmp_path)
    assert results.led() == (["fedavg"], 2)
    board.loc[board["block"] == "1", ["row", "backbone"]] = "fedavg · resnet8", "resnet8"
    board.to_csv(file, index=False)
    (results,) = read_folders(tmp_path)
    assert results.led() == (["fedavg · clip:embedded", "fedavg · resnet8"], 1)


def test_a_stack_is_on_the_pages_of_both_methods(site: Path) -> None:
    for name in ("fedprox", "promptfl"):
        page = Read(site / "methods" / f"{name}.html")
        assert {"../methods/promptfl.html", "../suites/few-shot/board.html#table-2-row-2"} <= set(page.links)


def test_an_interval_of_ranks_is_shown_where_the_folder_has_one(site: Path) -> None:
    text = Read(site / "methods" / "fedprox.html").text
    assert "1 shot fedprox clip:embedded 1-2 of 3 60.0 ± 1.0 accuracy -10.0 ± 2.0 fedavg" in text
    assert "fedprox clip:embedded 2 of 3 60.0 ± 1.0" in text
    assert "accuracy 3 1 " in Read(site / "suites" / "few-shot.html").text


def test_names_stay_in_the_folder_and_are_no_html(site: Path, results: Path) -> None:
    written = [file.relative_to(site) for file in site.rglob("*") if file.is_file()]
    assert {file.parts[0] for file in written} == {
        *("index.html", "site.css", "methods", "suites", "data", "pictures", LISTING)
    }
    assert not list(site.parent.glob("*.html"))
    odd = site / "methods" / f"{slug('../../Über <b>')}.html"
    assert "isn't installed" in Read(odd).text and "<b>" not in odd.read_text("utf-8")
    assert not [file for file in written if file.name in ("link.png", "winners.png")]
    assert "/home/me" not in (site / "data" / f"{slug('PACS')}.html").read_text("utf-8").partition("typed as")[0]


def test_findings_are_text_with_links_of_the_site(site: Path) -> None:
    page = site / "suites" / "odd.html"
    read, text = Read(page), page.read_text("utf-8")
    assert {"few-shot.html", "#tables", "../suites/odd/winners.svg"} <= set(read.links)
    assert "<script>" not in text and "bad()" in read.text and "javascript:" not in "".join(read.links)
    assert read.links.count("../suites/odd/winners.svg") == 1


@pytest.mark.parametrize("name", ["Fed", "a/b", "..", "", "x" * 300, ".hidden", "fed avg"])
def test_a_slug_is_one_file_name_and_nobody_elses(name: str) -> None:
    made = slug(name)
    assert made == slug(name) and made != slug(name + "2")
    assert made and "/" not in made and not made.startswith(".") and len(made) < 100 and made == made.lower()


def test_again_removes_what_is_gone_and_only_that(results: Path, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    write_site(folder, results)
    (folder / "CNAME").write_text("example.org")
    fewer = tmp_path / "fewer"
    fewer.mkdir()
    (fewer / "few-shot").symlink_to(results / "few-shot", target_is_directory=True)
    write_site(folder, fewer)
    assert (folder / "CNAME").is_file() and not (folder / "suites" / "odd.html").exists()
    (folder / LISTING).unlink()
    with pytest.raises(FedbenchError, match="no page of a site"):
        write_site(folder, results)


def test_what_cannot_be_a_site_is_refused(tmp_path: Path, results: Path) -> None:
    with pytest.raises(FedbenchError, match="has no folder with leaderboard.csv.gz"):
        write_site(tmp_path / "site", tmp_path)
    broken = tmp_path / "broken" / "one"
    broken.mkdir(parents=True)
    for name in ("results.csv", "leaderboard.csv"):
        (broken / name).write_text("a,b\n1,2\n")
    with pytest.raises(FedbenchError, match="has no column suite"):
        write_site(tmp_path / "site", tmp_path / "broken")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --suite NAME to run a suite, or --site FOLDER"),
        (["--suite", "few-shot", "--site", "site"], "--suite is for running a suite"),
        (["--jobs", "2", "--site", "site"], "--jobs is for running a suite"),
        (["--suite", "few-shot", "--results", "x"], "is for --site"),
    ],
)
def test_the_command_says_which_option_is_missing(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedbench", "publish", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_prose_flows_and_equations_keep_their_layout() -> None:
    lines = [
        "Prose that goes on",
        "over a line with `code`:",
        "    a  = b <c>",
        "    dd = e",
        "- one",
        "  more",
        "- two",
    ]
    assert laid_out(lines) == (
        "<p>Prose that goes on over a line with <code>code</code>:</p>\n"
        '<pre tabindex="0">a  = b &lt;c&gt;\ndd = e</pre>\n<ul>\n<li>one more</li>\n<li>two</li>\n</ul>'
    )


def test_notes_on_the_paper_stand_apart_also_where_they_begin_in_a_line() -> None:
    parts = told("A - Me, 2020.\n\nIt does. Left open: all\nof it.\nCost: none.")
    assert parts.reference == "A - Me, 2020."
    assert (parts.what, parts.notes) == ("<p>It does.</p>\n<p>Cost: none.</p>", "<p>Left open: all of it.</p>")


def test_tables_of_findings_scroll_by_themselves() -> None:
    html = findings("# Title\n\n## Part\n\n| a | b |\n|---|---|\n| 1 | 2 |\n", str)
    assert "Title" not in html and "<h3>Part</h3>" in html and html.count('class="scroll"') == 1


def test_the_committed_folders_are_read() -> None:
    from fedbench_boards.exchange.folder import BOARD, RESULTS, table_file
    from fedbench_boards.site.folders import read_folders

    folders = {one.name: one for one in read_folders(Path(__file__).parents[2] / "leaderboards")}
    few = folders["few-shot"]
    board = pd.read_csv(table_file(few.path, BOARD))
    assert sum(len(table.entries) for table in few.tables) == len(board)
    runs = pd.read_csv(table_file(few.path, RESULTS), low_memory=False)
    assert few.runs == len(runs) and few.suite is not None
    assert few.seeds == tuple(str(seed) for seed in sorted(runs["seed"].unique()))
    assert all(entry.seeds for table in few.tables for entry in table.entries)


def test_a_backbone_that_saw_data_of_this_kind_is_marked(site: Path) -> None:
    said = "clip:embedded saw data of this kind in pretraining: 90,000 images"
    assert said in Read(site / "suites" / "few-shot.html").text
    assert said not in Read(site / "suites" / "odd.html").text


@pytest.mark.parametrize(
    ("backbone", "said"),
    [
        ("clip:embedded", ("embedded",)),
        ("clip:lite0-minilm", ("ImageNet", "ImageNet-LT", "Tiny-ImageNet", "CINIC-10")),
        ("resnet18?weights=imagenet", ("ImageNet", "ImageNet-LT", "Tiny-ImageNet", "CINIC-10")),
        ("clip:ViT-B-32-quickgelu@openai", ()),
        ("convnet", None),
    ],
)
def test_backbones_say_what_they_were_pretrained_on(backbone: str, said: tuple[str, ...] | None) -> None:
    from fedbench.datasets.catalogue import CARDS
    from fedbench.models import pretraining_of

    known = pretraining_of(backbone)
    assert (known.datasets if known else None) == said
    assert set(said or ()) <= {"embedded", *(card.title for card in CARDS)}


@pytest.mark.parametrize(
    ("seeds", "shown"), [(["0", "1", "2", "7"], "0-2, 7"), (["3"], "3"), (["0", "<b>"], "0, <b>"), ([""], "")]
)
def test_seeds_are_shown_in_ranges(seeds: list[str], shown: str) -> None:
    assert seeds_shown(seeds) == shown
