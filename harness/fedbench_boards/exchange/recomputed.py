"""The board that results.csv gives, beside the one that a folder shows.

Rounds to a target are counted in curves, which no folder has: those are taken as they stand.
"""

from __future__ import annotations

import io
import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from fedbench.core.errors import FedbenchError
from fedbench.suites.suite import Suite
from fedbench_boards.exchange.folder import BOARD, RESULTS, ResultFolder, named
from fedbench_boards.leaderboard.formats import markdown_page, to_csv
from fedbench_boards.leaderboard.latex import to_latex
from fedbench_boards.leaderboard.model import Board, Line, Milestone, ScoreCell
from fedbench_boards.leaderboard.reading import board_of_runs, made_by
from fedbench_boards.leaderboard.results import StoredResults

_OF_CURVES = ("rounds_to_", "bytes_to_", "seconds_to_", "target")
_TARGET = " · target "
"""Behind it a caption says which target rounds were counted to."""
_DRAWN = {"p_best": 0.02}
"""Columns that are drawn, and by how much they may be another number elsewhere."""
_RELATIVE = 1e-9
"""Sums of the same numbers in another order differ by less."""
_MARKDOWN, _LATEX = "leaderboard.md", "leaderboard.tex"
Key = tuple[str, str]
"""Block and row."""


def check_board(folder: ResultFolder, suite: Suite, stored: StoredResults) -> None:
    """FedbenchError, which names row and column, where leaderboard.csv, .md or .tex is not what results.csv gives.

    ``stored`` are its runs, and those that diverged.
    """
    board = board_of_runs(suite, folder.manifest.options, stored)
    text = pd.read_csv(io.StringIO(to_csv(board)), dtype=str, keep_default_na=False)
    given, shown = _by_row(text), _by_row(folder.board)
    for key, line in given.items():
        if key not in shown:
            raise FedbenchError(f"{named(_of(line))} is in {RESULTS} and not in {BOARD}.")
        _compare(line, shown[key])
    for key, line in shown.items():
        if key not in given:
            raise FedbenchError(f"{named(_of(line))} is in {BOARD}, and {RESULTS} has no run of it.")
    _compare_texts(folder, stored, _with_milestones(board, shown))


def _reading(shown: str, expected: str) -> str:
    """The command ``shown`` above a board, if but for the suite's name or file it is the ``expected`` one."""
    words = shlex.split(shown)
    at = words.index("--suite") if "--suite" in words[:-1] else len(words)
    return shown if words[:at] + words[at + 2 :] == shlex.split(expected) else expected


def _by_row(frame: pd.DataFrame) -> dict[Key, dict[str, str]]:
    found: dict[Key, dict[str, str]] = {}
    lines: list[dict[str, str]] = frame.to_dict("records")  # type: ignore[assignment]
    for line in lines:
        key = (line["block"], line["row"])
        if key in found:
            raise FedbenchError(f"{named(_of(line))} has two lines in {BOARD}.")
        found[key] = line
    return found


def _of(line: Mapping[str, str]) -> dict[str, str]:
    return {"setting": line["setting"], "row": line["row"]}


def _compare(given: Mapping[str, str], shown: Mapping[str, str]) -> None:
    for column, value in given.items():
        if column.startswith(_OF_CURVES):
            continue
        found = shown.get(column, "")
        if column == "caption":
            found = found.partition(_TARGET)[0]
        if not _alike(value, found, _DRAWN.get(column, 0.0)):
            raise FedbenchError(
                f"{named(_of(given))}: {column} is {found or 'empty'} in {BOARD}, and {value or 'empty'} by {RESULTS}."
            )


def _alike(value: str, found: str, by: float) -> bool:
    if value == found:
        return True
    try:
        return math.isclose(float(value), float(found), rel_tol=_RELATIVE, abs_tol=max(by, _RELATIVE))
    except ValueError:
        return False


def _with_milestones(board: Board, shown: Mapping[Key, Mapping[str, str]]) -> Board:
    """``board`` with the rounds to a target that the folder shows."""
    tables = []
    for block, table in enumerate(board.tables):
        lines = tuple(_with_milestone(line, shown[str(block), line.row]) for line in table.lines)
        caption = next((shown[str(block), line.row]["caption"] for line in table.lines), table.caption)
        tables.append(replace(table, lines=lines, caption=caption))
    return replace(board, tables=tuple(tables))


def _with_milestone(line: Line, shown: Mapping[str, Any]) -> Line:
    reached, _, seeds = shown.get("target_reached", "").partition("/")

    def number(name: str) -> float:
        return float(shown.get(name) or "nan")

    return replace(
        line,
        p_best=number("p_best"),
        milestone=Milestone(
            ScoreCell(number("rounds_to_target_mean"), number("rounds_to_target_std")),
            number("target"),
            shown.get("target_metric", ""),
            int(reached or 0),
            int(seeds or 0),
            number("bytes_to_target_mean"),
            number("seconds_to_target_mean"),
        ),
    )


def _compare_texts(folder: ResultFolder, stored: StoredResults, board: Board) -> None:
    """FedbenchError for a line that ``board`` and the commands of the runs do not give, or that is missing."""
    files = {name: folder.path / name for name in (_MARKDOWN, _LATEX)}
    shown = {name: file.read_text(encoding="utf-8").splitlines() for name, file in files.items() if file.is_file()}
    *commands, last = made_by(stored, folder.manifest.options).splitlines()
    prompts = [line.removeprefix("$ ") for line in shown[_MARKDOWN] if line.startswith("$ fedbench ")]
    reading = next((line for line in prompts if line.startswith("fedbench leaderboard")), "")
    # which command a run that diverged is of, no file of the folder says
    if len(stored.failed):
        commands = [line for line in prompts if line != reading] if set(commands) <= set(prompts) else commands
    commands.append(_reading(reading, last))
    given = {_MARKDOWN: markdown_page(board, "\n".join(commands)).splitlines(), _LATEX: to_latex(board).splitlines()}
    for name, lines in shown.items():
        for has, lacks, what in ((given[name], set(lines), "lacks"), (lines, set(given[name]), "has")):
            wrong = next((line for line in has if line not in lacks), "")
            if wrong:
                raise FedbenchError(f"{name} is not what {BOARD} gives: it {what} the line {wrong[:200]!r}.")
        if lines != given[name]:
            raise FedbenchError(f"{name} is not what {BOARD} gives: its lines are in another order.")
