"""Numbers that papers print, as facts to set measured ones beside.

The files stand beside the suites that replay them, so that every installation of fedbench has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.leaderboard.comparable import Difference, Paper, differences, not_printed
from fedbench.leaderboard.model import Line, Printed
from fedbench.suites.safe_yaml import read_yaml
from fedbench.suites.suite import Key, Row, Setting, Suite

SEVERAL = "printed number"
COMPARABLE, AS_PRINTED, NOT_COMPARABLE = "yes", "yes, as far as printed", "no"
"""The column ``comparable``; it is empty where nothing is printed."""


@dataclass(frozen=True, eq=False)
class Published:
    """A paper's facts, and how our metrics are called in them."""

    paper: Paper
    facts: pd.DataFrame
    metrics: Mapping[str, str]


def load_published(name: str, folder: Traversable) -> pd.DataFrame:
    """The facts of one paper, a line a printed number, every column as text. FedbenchError for an unknown name."""
    file = folder / f"{name}.csv"
    if not file.is_file():
        raise unknown_name(f"file of published numbers in {folder}:", name, _names(folder))
    try:
        with file.open("rb") as content:
            return pd.read_csv(content, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:  # also what pandas raises for text that is no table
        raise FedbenchError(f"the published numbers {str(file)!r} cannot be read: {error}.") from error


def load_paper(name: str, folder: Traversable) -> Paper:
    """What ``NAME.paper.yaml`` beside the numbers says of the paper; without it the paper is called like the file."""
    file = folder / f"{name}.paper.yaml"
    if not file.is_file():
        return Paper(paper=name)
    _, content = read_yaml(file.read_bytes(), str(file))
    try:
        return Paper.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise FedbenchError(f"{str(file)!r}: {where}: {first['msg']}.") from error


def _names(folder: Traversable) -> list[str]:
    return [entry.name.removesuffix(".csv") for entry in folder.iterdir() if entry.name.endswith(".csv")]


def published_folder(given: Path | None) -> Traversable:
    """Where published numbers are: the folder given, else those that ship with fedbench.

    FedbenchError where ``given`` is no folder.
    """
    if given is not None and not given.is_dir():
        raise FedbenchError(f"--published {str(given)!r} is not a folder; give the one with the .csv files.")
    return given or resources.files("fedbench_suites") / "published"


def published_of(suite: Suite, folder: Traversable) -> Published | None:
    """What the suite's paper prints; None where it names no file, or there is none in ``folder``, nor beside it."""
    place = _place(suite, folder)
    if place is None:
        return None
    name = suite.published
    return Published(load_paper(name, place), load_published(name, place), suite.published_metrics)


def _place(suite: Suite, folder: Traversable) -> Traversable | None:
    """Where the suite's file of published numbers is: in ``folder``, else beside the suite; None where it is not."""
    places: list[Traversable] = [folder, *([Path(suite.file).parent] if suite.file else [])]
    return next((place for place in places if suite.published and (place / f"{suite.published}.csv").is_file()), None)


def check_published(suite: Suite, folder: Traversable) -> None:
    """FedbenchError, by file and line, for published numbers that the suite names and that there are not.

    They are the files in ``folder`` and one beside the suite. Nothing is checked where there is no such folder.
    """
    if not suite.published or not folder.is_dir():
        return
    place = _place(suite, folder)
    if place is None:
        known = _names(folder)
        hint = f"For numbers of your own, put {suite.published}.csv beside the suite."
        unknown = unknown_name("file of published numbers", suite.published, known, hint)
        raise FedbenchError(f"{suite.place('published')}{unknown}")
    facts = load_published(suite.published, place)
    parts: list[Row | Setting] = [setting for scale in suite.scales.values() for setting in scale.settings]
    for part in [*parts, *suite.rows]:
        for position, key in enumerate(part.published):
            for column in (column for column in key if column not in facts):
                unknown = unknown_name("column of published numbers", column, map(str, facts.columns))
                raise FedbenchError(f"{part.place('published', position, column)}{unknown}")


def matching(facts: pd.DataFrame, key: Key) -> pd.DataFrame:
    """The lines of ``facts`` that ``key`` picks: all its columns agree. FedbenchError for a column they don't have."""
    lines = facts
    for column, value in key.items():
        if column not in facts:
            raise unknown_name("column of published numbers", column, [str(c) for c in facts.columns])
        lines = lines[lines[column] == value]
    return lines


def beside(published: Published, runs: pd.DataFrame, headline: str, mean: float) -> Printed:
    """What the paper prints for a row's ``runs``; ``mean`` is their headline's."""
    keys = list(dict.fromkeys(text for run in runs["published"] for text in _keys(run)))
    run = {str(name): entry for name, entry in runs.iloc[0].items()}
    lines = _picked(published, keys, headline, run)
    value, several = _one(lines)
    found = list(dict.fromkeys(d for fact in lines for d in differences(fact, run, published.paper, headline)))
    lacking = tuple(dict.fromkeys(name for fact in lines for name in not_printed(fact)))
    name = published.paper.paper
    if several:
        values = ", ".join(dict.fromkeys(f"{fact['value']} in table {fact['table']}" for fact in several))
        found.append(Difference(SEVERAL, values, "one"))
    agreed = AS_PRINTED if lacking else COMPARABLE
    words = [str(difference) for difference in found] or [f"{name} not printed" for name in lacking]
    return Printed(
        value=value,
        delta=mean - value,
        source=_source(name, lines),
        keys=tuple(json.loads(text) for text in keys),
        several=tuple((_source(name, [fact]), float(fact["value"])) for fact in several),
        comparable=(NOT_COMPARABLE if found else agreed) if lines else "",
        differs=", ".join(words),
        differences=tuple(found),
        not_printed=lacking,
        metrics={metric: _one(_picked(published, keys, metric, run))[0] for metric in published.metrics},
    )


def unreadable_columns(published: Published, results: pd.DataFrame) -> list[str]:
    """Columns in the runs' keys that the facts don't have: such keys pick nothing."""
    keys = [json.loads(text) for run in results["published"].unique() for text in _keys(run)]
    return sorted({column for key in keys for column in key if column not in published.facts})


def published_notes(rows: Sequence[Line]) -> Iterator[str]:
    """Where a table's printed numbers stand, and once for the table in what its runs differ from theirs."""
    printed = [row.printed for row in rows if row.printed is not None]
    if not any(one.comparable for one in printed):
        return
    papers: dict[str, set[str]] = {}
    for one in printed:
        paper, _, listed = one.source.partition(" table")
        papers.setdefault(paper, set()).update(listed.removeprefix("s").strip().split(", "))
    sources = [
        f"{paper} table{'s' if len(listed) > 1 else ''} {', '.join(in_order(listed))}"
        for paper, listed in papers.items()
        if paper
    ]
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for difference in (difference for one in printed for difference in one.differences):
        theirs, ours = found.setdefault(difference.aspect, ({}, {}))
        theirs[difference.printed] = ours[difference.here] = None
    aspects = ", ".join(
        f"{name} ({' / '.join(theirs)}, here {' / '.join(ours)})" for name, (theirs, ours) in found.items()
    )
    lacking = list(dict.fromkeys(name for one in printed if one.comparable == AS_PRINTED for name in one.not_printed))
    known = f"; ≈ comparable as far as printed, which {', '.join(lacking)} are not" if lacking else ""
    yield f"paper: {', '.join(sources)}" + (f"; ≠ not comparable, differs in {aspects}" if aspects else "") + known


def in_order(tables: Iterable[str]) -> list[str]:
    """Numbers of tables as they follow in the paper."""
    return sorted(tables, key=lambda table: (not table.isdigit(), int(table) if table.isdigit() else 0, table))


def _keys(run: str) -> list[str]:
    return [json.dumps(key, sort_keys=True, ensure_ascii=False) for key in json.loads(run)]


def _picked(published: Published, keys: Iterable[str], metric: str, run: Mapping[str, Any]) -> list[dict[str, str]]:
    """The facts for our ``metric`` that any of the keys picks; of these those that print what ``run`` is, if any do."""
    if metric not in published.metrics:
        return []
    columns = set(published.facts.columns)
    picked: dict[Any, dict[str, str]] = {}
    for key in (json.loads(text) for text in keys):
        if columns >= set(key):
            lines = matching(published.facts, {**key, "metric": published.metrics[metric]})
            picked |= dict(zip(lines.index, lines.to_dict("records"), strict=True))
    same = [fact for fact in picked.values() if not differences(fact, run, published.paper, metric)]
    return same or list(picked.values())


def _one(lines: list[dict[str, str]]) -> tuple[float, list[dict[str, str]]]:
    """The number that all ``lines`` print; NaN where they print several, and these."""
    values = {float(fact["value"]) for fact in lines}
    return (values.pop(), []) if len(values) == 1 else (float("nan"), lines)


def _source(paper: str, lines: list[dict[str, str]]) -> str:
    """``FedGLCL table 2``; empty without lines."""
    tables = in_order({fact["table"] for fact in lines})
    return f"{paper} table{'s' if len(tables) > 1 else ''} {', '.join(tables)}" if tables else ""
