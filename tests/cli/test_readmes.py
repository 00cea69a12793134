"""What the READMEs tell a reader to type or follow is there: commands parse, links lead to files and headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fedbench.cli.app import app
from fedbench.suites.suite import suite_names

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name
    for name in (
        *(
            "README.md",
            "CONTRIBUTING.md",
            "harness/README.md",
            "harness/fedbench/models/README.md",
            "plugins/README.md",
        ),
        *("plugins/fedbench_embedded/README.md", "suites/README.md", "tests/README.md", "leaderboards/README.md"),
        "harness/fedbench/models/photos/README.md",
    )
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every ``fedbench`` in the page's consoles; lines that end in a backslash go on."""
    consoles = "\n".join(re.findall(r"^```console\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL))
    for line in consoles.replace("\\\n", " ").splitlines():
        if not line.startswith("$ "):
            continue
        lexer = shlex.shlex(line[2:], posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        words = list(lexer)
        while "fedbench" in words:
            words = words[words.index("fedbench") + 1 :]
            ends = [at for at, word in enumerate(words) if set(word) <= set("&|;<>")]
            if words and words[0] not in ("&&", "|", ";"):  # `git clone ... fedbench && cd` names a folder
                yield words[: ends[0]] if ends else words


def anchors(page: Path) -> set[str]:
    """What a forge calls the page's headings."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def parsed(words: list[str]) -> None:
    """Parse the command line and run nothing; click's error where it is none."""
    command: Any = get_command(app)
    context, left = None, words
    while True:
        context = command.make_context("fedbench", list(left), parent=context)
        if not hasattr(command, "commands"):
            return
        _, command, left = command.resolve_command(context, [*context._protected_args, *context.args])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_is_one_that_fedbench_has(page: Path) -> None:
    for words in commands(page):
        parsed(words)
        for option, name in pairwise(words):
            if option == "--suite" and re.fullmatch(r"[a-z0-9-]+", name):
                assert name in {*suite_names(), "adhoc"}, name


@pytest.mark.parametrize("wrong", ["rnu", "run --siute x", "leaderboard --format latexx", "cache clera"])
def test_a_command_that_fedbench_lacks_would_be_noticed(wrong: str) -> None:
    with pytest.raises(Exception, match=r"No such|latexx"):
        parsed(wrong.split())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), target


def test_the_main_job_is_among_the_commands_that_are_checked() -> None:
    assert ["run", "--suite", "longtail"] in commands(ROOT / "README.md")
