"""A site from two small result folders: what is on its pages, that every link leads somewhere, what it refuses."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pandas as pd
import pytest

from fedbench.cli.app import main
from fedbench.core.errors import FedbenchError
from fedbench_boards.site.pages import LISTING, write_site
from fedbench_boards.site.text import findings, laid_out, seeds_shown, slug, told
from tests.site.folders import write_folder


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
    write_folder(made, "few-shot", ["fedavg", "fedprox", "fedprox+promptfl"], ["1 shot", "2 shots"], tied=True)
    write_folder(made, "odd", ["fedavg", "fedprox", "../../Über <b>"], [""], dataset="imagefolder:/home/me/PACS")
    (made / "no-results").mkdir()
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
    assert "suites/odd/winners.svg" in index.links
    text = (site / "index.html").read_text("utf-8")
    entries = json.loads(text.partition('id="entries">')[2].partition("</script>")[0])
    assert {("suite", "few-shot"), ("method", "fedprox"), ("data set", "PACS")} <= {
        (one["kind"], one["name"]) for one in entries
    }
    assert all((site / one["url"]).is_file() for one in entries)


def test_a_method_has_its_ranks_and_equations(site: Path) -> None:
    page = Read(site / "methods" / "fedprox.html")
    for known in ("MLSys 2020", "Hyper-parameters", "plugins/fedbench_methods/fedprox.py", "1 shot", "0, 1"):
        assert known in page.text
    assert "../suites/few-shot/board.html#table-1-row-1" in page.links and "../suites/odd.html" in page.links
    assert "No suite with results has it." in Read(site / "methods" / "fedproto.html").text


def test_a_stack_is_on_the_pages_of_both_methods(site: Path) -> None:
    for name in ("fedprox", "promptfl"):
        page = Read(site / "methods" / f"{name}.html")
        assert {"../methods/promptfl.html", "../suites/few-shot/board.html#table-2-row-2"} <= set(page.links)


def test_a_tied_rank_is_shown_where_the_folder_has_one(site: Path) -> None:
    text = Read(site / "methods" / "fedprox.html").text
    assert "1 shot fedprox clip:embedded 1 of 3 60.0 ± 1.0 accuracy -10.0 ± 2.0 fedavg" in text
    assert "fedprox clip:embedded 2 of 3 60.0 ± 1.0" in text
    assert "accuracy 3 1 " in Read(site / "suites" / "few-shot.html").text


def test_names_stay_in_the_folder_and_are_no_html(site: Path, results: Path) -> None:
    written = [file.relative_to(site) for file in site.rglob("*") if file.is_file()]
    assert {file.parts[0] for file in written} == {"index.html", "site.css", "methods", "suites", "data", LISTING}
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
    with pytest.raises(FedbenchError, match="is no address"):
        write_site(tmp_path / "site", results, "javascript:alert(1)//")
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
        (["--suite", "few-shot", "--results", "x"], "are for --site"),
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


def test_the_command_links_code(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--site", str(tmp_path / "s"), "--results", str(results), "--code-url", "https://example.org/blob/main/"]
    monkeypatch.setattr(sys, "argv", ["fedbench", "publish", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None), capsys.readouterr()
    links = Read(tmp_path / "s" / "methods" / "fedprox.html").links
    assert "https://example.org/blob/main/plugins/fedbench_methods/fedprox.py" in links


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
