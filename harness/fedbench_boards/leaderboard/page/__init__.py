"""A leaderboard as one web page: tables, charts and how to make them again, in a single file that needs no network."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fedbench.core.files import replacing
from fedbench_boards.leaderboard.page.data import page_of
from fedbench_boards.leaderboard.reading import ReadResults

__all__ = ["write_page"]


def write_page(path: Path, read: ReadResults, federations: dict[str, dict[str, Any]], command: str) -> None:
    """Write the page of a suite's results to ``path``, whole or not at all; FedbenchError where it can't be written.

    The curves may be empty. ``federations`` are those of some runs by MLflow id, see `results.load_federations`.
    ``command`` is what makes the page again.
    """
    page = page_of(read, federations, command)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["in_full"] = _in_full
    template = environment.from_string(_shipped("template.html.j2"))
    # the two are part of the package; autoescape would break their quotes
    html = template.render(page=page, css=Markup(_shipped("page.css")), js=Markup(_shipped("page.js")))
    with replacing(path, "leaderboard page", "choose another --output") as temporary:
        temporary.write_text(html, encoding="utf-8")


def _shipped(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _in_full(value: float) -> str:
    return "" if math.isnan(value) else repr(float(value))
