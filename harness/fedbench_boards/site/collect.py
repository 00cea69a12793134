"""Reads the result folders that a site is made of."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.core.errors import FedbenchError
from fedbench.core.files import expanded, spreadsheet_text
from fedbench.core.spec import stack_names
from fedbench.core.wording import heading, megabytes, spread
from fedbench_boards.exchange.folder import BOARD, MANIFEST, RESULTS, read_manifest
from fedbench_boards.site.model import BoardLine, BoardTable, ResultsOf, is_own, number
from fedbench_boards.site.text import seeds_shown

if TYPE_CHECKING:
    from fedbench.suites.suite import Suite

Texts = dict[str, str]
COLUMNS = (
    *("block", "caption", "baseline", "rank", "tied_rank", "row", "label", "setting", "dataset", "method", "backbone"),
    *("tuned", "headline", "shown", "runs", "seed_list", "bytes_up_mean", "bytes_down_mean", "train_seconds_mean"),
    *("delta_mean", "delta_low", "delta_high", "significance", "failure"),
)
"""The columns that every leaderboard.csv has."""
_APART = ("domain_accuracy/", "class_accuracy/")
"""Prefixes of metrics of single domains and classes, which only the folder's own page shows."""
_LARGEST_CELL = 2**24


def texts(file: Path, needed: Sequence[str]) -> list[Texts]:
    """The lines of a CSV by column; FedbenchError where it can't be read or lacks one of ``needed``."""
    csv.field_size_limit(_LARGEST_CELL)
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            reader = csv.DictReader(opened, restval="")
            names = [str(spreadsheet_text(name)) for name in reader.fieldnames or ()]
            reader.fieldnames = names
            lines = [{k: str(spreadsheet_text(v)) for k, v in line.items() if k is not None} for line in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise FedbenchError(f"{str(file)!r} can't be read: {error}.") from None
    missing = [name for name in needed if name not in names]
    if missing:
        raise FedbenchError(f"{str(file)!r} has no column {', '.join(missing)}.")
    return lines


def tables_of(lines: Sequence[Texts]) -> tuple[BoardTable, ...]:
    """The tables, in the order of the file; titles are made different from one another."""
    blocks = [list(block) for _, block in groupby(lines, key=lambda line: line["block"])]
    titles = [_title(block) for block in blocks]
    called: list[str] = []
    for place, title in enumerate(titles):
        same = titles[: place + 1].count(title)
        called.append(title if same == 1 else f"{title} ({same})")
    pairs = zip(blocks, called, strict=True)
    return tuple(_table(number, title, block) for number, (block, title) in enumerate(pairs, start=1))


def _title(block: Sequence[Texts]) -> str:
    # a caption begins with the settings where the suite names some, with the data set elsewhere
    settings = dict.fromkeys(line["setting"] for line in block)
    return " / ".join(filter(None, settings)) or " · ".join(block[0]["caption"].split(" · ")[:2]).partition(" (data")[0]


def _table(place: int, title: str, block: Sequence[Texts]) -> BoardTable:
    headline = block[0]["headline"]
    shown = [name for name in json.loads(block[0]["shown"]) if not name.startswith(_APART)]
    metrics = list(dict.fromkeys([headline, *shown]))
    metrics = metrics[:1] + [name for name in metrics[1:] if any(line.get(f"{name}_mean") for line in block)]
    facts = block[0]["caption"].split(" · ")
    if facts and facts[0] == " / ".join(dict.fromkeys(line["setting"] for line in block)):
        facts = facts[1:]
    return BoardTable(
        number=place,
        title=title,
        facts=tuple(facts),
        baseline=block[0]["baseline"],
        metrics=tuple(map(heading, metrics)),
        has_ties=any(line["tied_rank"] for line in block),
        entries=tuple(_entry(line, metrics) for line in block),
    )


def _entry(line: Texts, metrics: Sequence[str]) -> BoardLine:
    rank, tied = number(line["rank"]), number(line["tied_rank"])
    is_ranked = not math.isnan(number(line.get(f"{metrics[0]}_mean", "")))
    sent = number(line["bytes_up_mean"]) + number(line["bytes_down_mean"])
    seconds = number(line["train_seconds_mean"])
    return BoardLine(
        row=line["row"],
        label=line["label"],
        methods=stack_names(line["method"]),
        backbone=line["backbone"],
        dataset=line["dataset"],
        setting=line["setting"],
        rank=None if math.isnan(rank) or not is_ranked else int(rank),
        tied_rank=None if math.isnan(tied) or not is_ranked else int(tied),
        scores=tuple(
            spread(number(line.get(f"{name}_mean", "")), number(line.get(f"{name}_std", ""))) for name in metrics
        ),
        delta=_delta(line),
        megabytes=megabytes(sent),
        seconds="–" if math.isnan(seconds) else f"{seconds:,.1f}",
        seeds=seeds_shown(line["seed_list"].split(", ")),
        runs=tuple(json.loads(line["runs"]).values()),
        tuned=line["tuned"] == "True",
        failure=line["failure"],
    )


def _delta(line: Texts) -> str:
    low, high = number(line["delta_low"]), number(line["delta_high"])
    shown = spread(number(line["delta_mean"]), (high - low) / 2, "+")
    return f"{shown} *" if line["significance"] == "significant" else shown


PICTURES = (".png", ".svg")


def read_folders(given: Path) -> list[ResultsOf]:
    """The result folders below ``given``, by name; FedbenchError where there is none, or one that can't be read."""
    folder = expanded(given, "--results")
    if not folder.is_dir():
        raise FedbenchError(f"--results {str(given)!r} is no folder; give one that `fedbench publish` wrote into.")
    folders = [one for one in sorted(folder.iterdir()) if all(is_own(one / name) for name in (RESULTS, BOARD))]
    if not folders:
        raise FedbenchError(
            f"--results {str(given)!r} has no folder with {BOARD} and {RESULTS}; "
            "write one with `fedbench publish --suite NAME`."
        )
    return [_read(one) for one in folders]


def pictures(folder: Path) -> tuple[Path, ...]:
    """The pictures in ``folder``, by name."""
    there = folder.is_dir() and not folder.is_symlink()
    return tuple(sorted(one for one in folder.iterdir() if one.suffix in PICTURES and is_own(one))) if there else ()


def _read(path: Path) -> ResultsOf:
    results = texts(path / RESULTS, ("suite", "seed", "run_id", "started"))
    board = texts(path / BOARD, COLUMNS)
    try:
        tables = tables_of(board)
    except (ValueError, AttributeError) as error:
        raise FedbenchError(f"{str(path / BOARD)!r} can't be read: {error}.") from None
    names = tuple(dict.fromkeys(line["suite"] for line in results if line["suite"]))
    findings = path / "findings.md"
    return ResultsOf(
        path=path,
        suite_names=names,
        tables=tables,
        runs=len(results),
        seeds=tuple(sorted({line["seed"] for line in results}, key=lambda text: (len(text), text))),
        date=max((line["started"][:10] for line in results), default=""),
        commits=tuple(dict.fromkeys(line["commit"][:7] for line in results if line.get("commit"))),
        commands=tuple(dict.fromkeys(command for line in results for command in _commands(line))),
        licence=_licence(path),
        findings=findings.read_text(encoding="utf-8", errors="replace") if is_own(findings) else "",
        figures=pictures(path / "figures"),
        suite=_suite(names),
    )


def _commands(line: dict[str, str]) -> list[str]:
    try:
        known = json.loads(line.get("made_by") or "[]")
    except ValueError:
        return []
    return [str(one) for one in known] if isinstance(known, list) else []


def _licence(path: Path) -> str:
    return read_manifest(path).licence if is_own(path / MANIFEST) else ""


def _suite(names: tuple[str, ...]) -> Suite | None:
    from fedbench.suites.suite import load_suite, suite_names

    return load_suite(names[0]) if len(names) == 1 and names[0] in suite_names() else None
