"""The site in a real browser: search, keyboard, phone, dark, and nothing asked of a network."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbench_boards.site.pages import write_site
from tests.site.folders import write_folder, write_map

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
if CHROMIUM is None:
    pytest.skip("no Chromium on the PATH", allow_module_level=True)

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="1200" height="40"><rect width="1200" height="40"/></svg>'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    write_folder(made, "few-shot", ["fedavg", "fedprox", "fedprox+promptfl"], ["1 shot", "2 shots"], tied=True)
    write_folder(made, "a-long-name-without-a-place-to-break", ["fedavg", "x" * 60], [""])
    write_map(made)
    (made / "front.svg").write_text(PICTURE, encoding="utf-8")
    (made / "README.md").write_text("![who leads](front.svg)", encoding="utf-8")
    figures = made / "few-shot" / "figures"
    figures.mkdir()
    (figures / "winners.svg").write_text(PICTURE, encoding="utf-8")
    table = "|a|b|c|d|e|f|\n|-|-|-|-|-|-|\n|" + "a long cell|" * 6
    (made / "few-shot" / "findings.md").write_text(f"# Few\n\n{table}\n\n`{'y' * 90}`\n", encoding="utf-8")
    write_site(made / "out", made)
    return made / "out"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield started
        started.close()


@pytest.fixture
def visit(browser: Any, site: Path) -> Iterator[Any]:
    """Opens a page; afterwards nothing may have been asked of a network or complained about."""
    contexts: list[Any] = []
    asked: list[str] = []
    complaints: list[str] = []

    def opened(name: str, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto((site / name).as_uri())
        return page

    yield opened
    for one in contexts:
        one.close()
    assert [url for url in asked if not url.startswith(("file://", "data:"))] == []
    assert complaints == []


def test_the_search_finds_names_first_and_leads_there(visit: Any) -> None:
    page = visit("index.html")
    found = page.locator(".found li")
    page.get_by_role("searchbox").fill("fedprox")
    assert found.first.locator("a").inner_text() == "fedprox"
    assert page.locator("#search output").inner_text() == f"{found.count()} found"
    page.get_by_role("searchbox").fill("1 SHOT suite")
    assert found.locator("a").all_inner_texts() == ["few-shot"]
    page.get_by_role("searchbox").fill("qqq")
    assert not page.locator(".found").is_visible()
    assert page.locator("#search output").inner_text() == "0 found"
    page.get_by_role("searchbox").fill("fedprox")
    page.keyboard.press("Enter")
    page.wait_for_url("**/methods/fedprox.html")
    assert page.get_by_role("heading", level=1).inner_text() == "fedprox"


def test_the_keyboard_reaches_content_search_and_links(visit: Any) -> None:
    page = visit("index.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "query":
            break
    assert page.evaluate("document.activeElement.id") == "query"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.type("few-shot")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "few-shot"
    page.keyboard.press("Enter")
    page.wait_for_url("**/suites/few-shot.html")


def test_what_to_try_follows_the_choice_by_keyboard_too(visit: Any, site: Path) -> None:
    text = (site / "index.html").read_text("utf-8").partition('id="answers">')[2].partition("</script>")[0]
    answers = json.loads(text)["answers"]
    page = visit("index.html")
    part = page.locator("#try")

    def is_shown(key: str) -> bool:
        cells = [row.split() for row in part.locator("tbody tr").all_inner_texts()]
        rows = [" ".join(row).split() for row in answers[key]["rows"]]
        return rows == cells and part.locator(".said").inner_text() == answers[key]["said"]

    assert is_shown("strong (Dirichlet 0.1)|10|20|40 %")
    page.get_by_label("Label skew").focus()
    page.keyboard.press("ArrowDown")
    assert is_shown("very strong (Dirichlet 0.02)|10|20|40 %")
    assert part.locator("tbody a").first.get_attribute("href").startswith("methods/")
    page.get_by_label("Largest class").select_option("1")
    page.get_by_label("Clients").select_option("1000")
    page.get_by_label("Of them in a round").select_option("all")
    last = "very strong (Dirichlet 0.02)|1|1000|all"
    assert is_shown(last) and "Far from all that is measured" in answers[last]["said"]


def test_a_phone_scrolls_tables_not_pages(visit: Any, site: Path) -> None:
    names = [str(file.relative_to(site)) for file in sorted((site / "suites").glob("*.html"))]
    names += ["index.html", "data/embedded.html", "methods/fedavg.html", "methods/fedprox.html"]
    for name in names:
        page = visit(name, viewport={"width": 375, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 375, name
        widths = page.eval_on_selector_all("th.first", "all => all.map(one => one.getBoundingClientRect().width)")
        assert all(120 < width < 220 for width in widths), (name, widths)
    table = page.locator(".scroll").last
    table.evaluate("one => { one.scrollLeft = 100 }")
    assert table.evaluate("one => one.scrollLeft") == 100


def luminance(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)``, as WCAG defines it."""
    channels = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_both_themes_are_readable(visit: Any, scheme: str) -> None:
    style = "one => [getComputedStyle(one).color, getComputedStyle(document.body).backgroundColor]"
    pages = {
        "suites/few-shot.html": ("body", ".note", "td a", "dt"),
        "index.html": ("#try label", "select", "#try .note"),
    }
    for page, place in ((visit(name, color_scheme=scheme), place) for name in pages for place in pages[name]):
        text, ground = (luminance(colour) for colour in page.locator(place).first.evaluate(style))
        assert (ground < 0.05) == (scheme == "dark")
        assert (max(text, ground) + 0.05) / (min(text, ground) + 0.05) >= 4.5


def test_pictures_are_shown_and_without_javascript_nothing_is_missing(visit: Any) -> None:
    page = visit("index.html", java_script_enabled=False)
    assert not page.locator("#search form").is_visible()
    assert page.locator("#methods li:visible").count() > 50
    assert page.locator("#try tbody tr:visible").count() == 3 and not page.locator("#try form").is_visible()
    front = visit("index.html").locator("figure img").first
    assert front.evaluate("one => one.decode().then(() => one.naturalWidth)") == 1200
    picture = visit("suites/few-shot.html").locator("figure img")
    picture.scroll_into_view_if_needed()
    picture.evaluate("one => one.decode()")
    assert picture.evaluate("one => one.naturalWidth") == 1200
