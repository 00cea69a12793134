"""Texts as HTML, and file names of pages.

What docstrings and findings say is escaped, never taken for HTML.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup, escape

from fedbench_boards.leaderboard.rows import spans

_LONGEST = 80


def slug(name: str) -> str:
    """``name`` as a file name without suffix: lower-case letters, digits, ``.``, ``_``, ``-`` and ``+``.

    A name that has to change for it gets a digest, so that two names never share a page, also where the file system
    does not tell capital letters.
    """
    plain = re.sub(r"[^a-z0-9._+-]+", "-", name.lower()).lstrip(".-")[:_LONGEST]
    return plain if plain == name and name else f"{plain or 'page'}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


_NOTES = re.compile(
    r"(?:^|(?<=\. ))(?:Left open|Left out|(?:Paper|Equations) against|Where paper and (?:released )?code disagree"
    r"|The released code, which|The (?:paper's|published) equations were not at hand)"
)
"""Beginnings of the notes on paper against code, at the start of a line or of a sentence in it."""
_LABEL = re.compile(r"^(Answers|Wraps|Cost|Recipe|Sent|Trained and sent|Stacks|Privacy|Needs)\b[^.]{0,40}?:")
_SLACK = 12
"""A line that ends so many characters before the widest could have taken the next word: its end is deliberate."""


@dataclass(frozen=True)
class Told:
    """A method's docstring in parts."""

    reference: str
    """The first paragraph of the docstring."""
    what: Markup
    notes: Markup
    """Paper against code, and what was left open; empty where the docstring has no such part."""


def told(docstring: str) -> Told:
    """The parts of a docstring."""
    reference, _, rest = docstring.partition("\n\n")
    what: list[str] = []
    notes: list[str] = []
    into = what
    for line in rest.splitlines():
        begins = _NOTES.search(line)
        if begins:
            into.append(line[: begins.start()].rstrip())
            into, line = notes, line[begins.start() :]
        elif _LABEL.match(line):
            into = what
            into.append("")
        into.append(line)
    return Told(" ".join(reference.split()), laid_out(what), laid_out(notes))


def seeds_shown(seeds: Sequence[str]) -> str:
    """Seeds, which a folder has as texts, in ranges: ``0-4, 7``; as they stand where one is no number."""
    return ", ".join(spans([int(seed) for seed in seeds]) if all(seed.isdecimal() for seed in seeds) else seeds)


def laid_out(lines: list[str]) -> Markup:
    """Lines as paragraphs and lists; indented ones, which are equations, keep their layout."""
    width = max(map(len, lines), default=0)
    parts: list[tuple[str, list[str]]] = []
    meant_end = True
    for position, line in enumerate(lines):
        kind = parts[-1][0] if parts else ""
        if not line.strip():
            parts.append(("", []))
        elif line.startswith("- "):
            parts.append(("li", [line[2:]]))
        elif line.startswith("  ") and kind == "li":
            parts[-1][1].append(line.strip())
        elif line[0].isspace():
            parts[-1][1].append(line) if kind == "pre" else parts.append(("pre", [line]))
        elif kind == "p" and not meant_end:
            parts[-1][1].append(line)
        else:
            parts.append(("p", [line]))
        following = lines[position + 1].split() if position + 1 < len(lines) else []
        meant_end = bool(following) and len(line) + 1 + len(following[0]) <= width - _SLACK
    return Markup("\n").join(_blocks(parts))


def _blocks(parts: list[tuple[str, list[str]]]) -> Iterator[Markup]:
    is_list = False
    for kind, lines in parts:
        if (kind == "li") != is_list:
            is_list = kind == "li"
            yield Markup("<ul>") if is_list else Markup("</ul>")
        if kind == "pre":
            text = "\n".join(line[4:] if line.startswith("    ") else line.strip() for line in lines)
            yield Markup('<pre tabindex="0">{}</pre>').format(text)
        elif kind:
            yield Markup("<{0}>{1}</{0}>").format(Markup(kind), with_code(" ".join(lines)))
    if is_list:
        yield Markup("</ul>")


def with_code(text: str) -> Markup:
    """A text in which what stands between backticks is code."""
    pieces = re.split(r"``?([^`]+)``?", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if number % 2 else escape(piece) for number, piece in enumerate(pieces)
    )


def findings(text: str, target: Callable[[str], str]) -> Markup:
    """Markdown as HTML. ``target`` gives where a link or picture leads on the site, "" to leave it out.

    The first heading goes: the page has its own. Headings sink by one level, tables scroll by themselves.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    if tokens and tokens[0].type == "heading_open" and tokens[0].tag == "h1":
        tokens = tokens[3:]
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1]) + 1, 6)}"
        elif token.children:
            token.children = _retargeted(token.children, target)
    html = str(parser.renderer.render(tokens, parser.options, {}))
    scroll = '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>'
    # the parser escapes every angle bracket of the text, so these are its own
    html = html.replace("<table>", scroll).replace("</table>", "</table></div>")
    return Markup(html.replace("<pre>", '<pre tabindex="0">'))


def _retargeted(tokens: list[Token], target: Callable[[str], str]) -> list[Token]:
    result: list[Token] = []
    closing: list[bool] = []
    for token in tokens:
        if token.type == "link_open":
            url = target(str(token.attrGet("href") or ""))
            closing.append(bool(url))
            if not url:
                continue
            token.attrSet("href", url)
        elif token.type == "link_close" and not closing.pop():
            continue
        elif token.type == "image":
            url = target(str(token.attrGet("src") or ""))
            if not url:
                result += token.children or []
                continue
            token.attrSet("src", url)
        result.append(token)
    return result
