"""A leaderboard as one web page: tables, charts and how to make them again, in a single file that needs no network."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fedbench.core.files import replacing
from fedbench_boards.leaderboard.across import Map
from fedbench_boards.leaderboard.model import Board
from fedbench_boards.leaderboard.page.data import page_of

__all__ = ["write_page"]


def write_page(
    path: Path,
    suite_name: str,
    description: str,
    results: pd.DataFrame,
    board: Board,
    curves: pd.DataFrame,
    federations: dict[str, dict[str, Any]],
    command: str,
    map_: Map | None = None,
) -> None:
    """Write the page of a suite to ``path``, whole or not at all; FedbenchError where it can't be written.

    ``results`` has a line per run. ``curves`` has a line per run and round with ``mlflow_id``, ``round``, accuracies in
    % and ``bytes_total`` (up and down so far); it may be empty. ``federations`` holds ``classnames`` and
    ``class_counts`` (clients x classes) by MLflow id, for some runs, and ``clients``, the number of all, where the
    counts are those of the first ones. ``command`` is what makes the page again, ``map_`` the map of a
    suite with axes.
    """
    page = page_of(suite_name, description, results, board, curves, federations, command, map_)
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
