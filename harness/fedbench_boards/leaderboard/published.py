"""Numbers that papers print, to compare measured ones with.

The files lie beside the suites that replay them, so that every installation of fedbench has them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import ValidationError

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.metric_names import EACH_DOMAIN
from fedbench.core.wording import heading
from fedbench.suites.files import read_yaml
from fedbench.suites.suite import Key, Row, Setting, Suite
from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard.comparable import Difference, Paper, differences, is_same_data, not_printed
from fedbench_boards.leaderboard.model import Line, Printed, PrintedNumber

SEVERAL = "printed number"
COMPARABLE, AS_PRINTED, NOT_COMPARABLE = "yes", "yes, as far as printed", "no"
"""Values of the column ``comparable``; it is empty if nothing is printed."""


@dataclass(frozen=True, eq=False)
class Published:
    """A paper's facts, and the names that our metrics have in them."""

    paper: Paper
    facts: pd.DataFrame
    metrics: Mapping[str, Key]
    """Our metric -> the columns of its facts; ``domain_accuracy`` stands for every domain's."""

    @cached_property
    def records(self) -> Mapping[Any, dict[str, str]]:
        """The facts by the index of their lines."""
        return dict(zip(self.facts.index, self.facts.to_dict("records"), strict=True))


_NEEDED = (
    *("table", "dataset", "backbone", "scenario", "partition", "partition_value", "imbalance_factor", "clients"),
    *("participation", "rounds", "variant", "method", "metric", "group", "value"),
)


def load_published(name: str, folder: Traversable) -> pd.DataFrame:
    """The facts of one paper, a line a printed number, every column as text.

    FedbenchError for an unknown name, and for a file that lacks a column or has a value that is no number.
    """
    file = folder / f"{name}.csv"
    if not file.is_file():
        raise unknown_name(f"file of published numbers in {folder}:", name, _names(folder))
    try:
        with file.open("rb") as content:
            # as Python's strings: each is compared thousands of times, which Arrow's take ten times as long for
            facts = pd.read_csv(content, dtype=object, keep_default_na=False)
    except (OSError, ValueError) as error:  # also what pandas raises for text that is no table
        raise FedbenchError(f"the published numbers {str(file)!r} cannot be read: {error}.") from error
    lacking = [column for column in _NEEDED if column not in facts]
    if lacking:
        raise FedbenchError(f"the published numbers {str(file)!r} lack the column {', '.join(lacking)}.")
    wrong = facts[~np.isfinite(pd.to_numeric(facts["value"], errors="coerce"))]
    for line, value in wrong["value"].items():
        raise FedbenchError(f"the published numbers {str(file)!r}, line {line + 2}: value {value!r} is no number.")
    return facts


def load_paper(name: str, folder: Traversable) -> Paper:
    """Read ``NAME.paper.yaml`` beside the numbers; without it the paper has the name of the file."""
    file = folder / f"{name}.paper.yaml"
    if not file.is_file():
        return Paper(paper=name)
    content, _ = read_yaml(file.read_bytes(), str(file))
    try:
        return Paper.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise FedbenchError(f"{str(file)!r}: {where}: {first['msg']}.") from error


def _names(folder: Traversable) -> list[str]:
    return [entry.name.removesuffix(".csv") for entry in folder.iterdir() if entry.name.endswith(".csv")]


def published_folder(given: Path | None) -> Traversable:
    """The folder of published numbers: ``given``, else that which ships with fedbench.

    FedbenchError if ``given`` is no folder.
    """
    if given is not None and not given.is_dir():
        raise FedbenchError(f"--published {str(given)!r} is not a folder; give the one with the .csv files.")
    return given or resources.files("fedbench_suites") / "published"


def published_of(suite: Suite, folder: Traversable) -> Published | None:
    """The numbers of the suite's paper; None if it names no file, or the file is neither in ``folder`` nor beside the
    suite."""
    home = _home_of(suite, folder)
    if home is None:
        return None
    name = suite.published
    return Published(load_paper(name, home), load_published(name, home), suite.published_metrics)


def _home_of(suite: Suite, folder: Traversable) -> Traversable | None:
    """The folder of the suite's published numbers: ``folder``, else that of the suite; None if neither has the file."""
    places: list[Traversable] = [folder, *([Path(suite.file).parent] if suite.file else [])]
    return next((home for home in places if suite.published and (home / f"{suite.published}.csv").is_file()), None)


def check_published(suite: Suite, folder: Traversable) -> None:
    """Raise FedbenchError, with file and line, for published numbers that the suite names and that do not exist.

    They are the files in ``folder`` and one beside the suite. Nothing is checked if there is no such folder.
    """
    if not suite.published or not folder.is_dir():
        return
    home = _home_of(suite, folder)
    if home is None:
        known = _names(folder)
        hint = f"For numbers of your own, put {suite.published}.csv beside the suite."
        unknown = unknown_name("file of published numbers", suite.published, known, hint)
        raise FedbenchError(f"{suite.place('published')}{unknown}")
    facts = load_published(suite.published, home)
    parts: list[Row | Setting] = [setting for scale in suite.scales.values() for setting in scale.settings]
    for part in [*parts, *suite.rows]:
        for position, key in enumerate(part.published):
            for column in (column for column in key if column not in facts):
                unknown = unknown_name("column of published numbers", column, map(str, facts.columns))
                raise FedbenchError(f"{part.place('published', position, column)}{unknown}")


def matching(facts: pd.DataFrame, key: Key) -> pd.DataFrame:
    """The lines of ``facts`` that agree with all columns of ``key``. FedbenchError for a column that they lack."""
    agrees = np.ones(len(facts), dtype=bool)
    for column, value in key.items():
        if column not in facts:
            raise unknown_name("column of published numbers", column, [str(c) for c in facts.columns])
        agrees &= facts[column].to_numpy() == value
    return facts[agrees]


def beside(published: Published, runs: pd.DataFrame, headline: str, measured: Mapping[str, float]) -> Printed:
    """The paper's numbers for a row's ``runs``; ``measured`` are the runs' means by metric, NaN where they have
    none."""
    keys = list(dict.fromkeys(text for run in runs["published"] for text in _keys(run)))
    run = {str(name): entry for name, entry in runs.iloc[0].items()}
    names = [headline, *(name for name in _metrics(published, runs) if name != headline)]
    names = _each_once(published, names, measured)
    numbers = {name: _number(published, keys, name, run, measured.get(name, float("nan"))) for name in names}
    return Printed(
        **vars(numbers.get(headline, PrintedNumber())),
        keys=tuple(json.loads(text) for text in keys),
        metrics={name: number for name, number in numbers.items() if number.comparable},
    )


def _each_once(published: Published, names: Sequence[str], measured: Mapping[str, float]) -> list[str]:
    """``names`` reduced to one for each printed number: the first that was measured of those with the same columns."""
    chosen: dict[tuple[str, str], str] = {}
    for name in names:
        metric, _, domain = name.partition("/")
        number = (json.dumps(published.metrics.get(metric), sort_keys=True), domain)
        other = chosen.setdefault(number, name)
        if math.isnan(measured.get(other, math.nan)) and not math.isnan(measured.get(name, math.nan)):
            chosen[number] = name
    return list(chosen.values())


def _metrics(published: Published, runs: pd.DataFrame) -> list[str]:
    """Our metrics that the paper may print; for ``runs`` with domains also those of every domain."""
    names = []
    for name in published.metrics:
        domains = [str(c).removeprefix(FINAL) for c in runs if str(c).startswith(f"{FINAL}{name}/")]
        names += domains if name in EACH_DOMAIN else [name]
    return names


def _number(
    published: Published, keys: Sequence[str], metric: str, run: Mapping[str, Any], measured: float
) -> PrintedNumber:
    """The paper's number for one metric of a run that replays the cells with these ``keys``."""
    paper = published.paper
    lines, also = _headline_first(_picked(published, keys, metric, run))
    value, several = _one(lines)
    differing = list(dict.fromkeys(d for fact in lines for d in differences(fact, run, paper, metric)))
    lacking = tuple(dict.fromkeys(name for fact in lines for name in not_printed(fact, run)))
    if several:
        values = ", ".join(dict.fromkeys(f"{fact['value']} in table {fact['table']}" for fact in several))
        differing.append(Difference(SEVERAL, values, "one"))
    agreed = AS_PRINTED if lacking else COMPARABLE
    words = [str(difference) for difference in differing] or [f"{name} not printed" for name in lacking]
    return PrintedNumber(
        value=value,
        delta=measured - value,
        source=_source(paper.paper, lines),
        several=_listed(paper.paper, several),
        also=_listed(paper.paper, also),
        comparable=(NOT_COMPARABLE if differing else agreed) if lines else "",
        differs=", ".join(words),
        differences=tuple(differing),
        not_printed=lacking,
    )


def _headline_first(lines: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Split facts into those of the paper's own tables, with all that agree with them, and the rest from its
    ablations."""
    own = {float(fact["value"]) for fact in lines if not fact.get("variant")}
    if not own:
        return lines, []
    return (
        [fact for fact in lines if not fact.get("variant") or float(fact["value"]) in own],
        [fact for fact in lines if fact.get("variant") and float(fact["value"]) not in own],
    )


def _listed(paper: str, lines: Sequence[dict[str, str]]) -> tuple[tuple[str, float], ...]:
    return tuple((_source(paper, [fact]), float(fact["value"])) for fact in lines)


def unreadable_columns(published: Published, results: pd.DataFrame) -> list[str]:
    """Columns in the runs' keys that the facts don't have: such keys pick nothing."""
    keys = [json.loads(text) for run in results["published"].unique() for text in _keys(run)]
    return sorted({column for key in keys for column in key if column not in published.facts})


def published_notes(rows: Sequence[Line]) -> Iterator[str]:
    """Notes on a table's printed numbers: their sources, and the differences between these and the table's runs."""
    printed = [number for row in rows if row.printed is not None for number in row.printed.metrics.values()]
    if not printed:
        return
    papers: dict[str, set[str]] = {}
    for number in printed:
        paper, _, listed = number.source.partition(" table")
        papers.setdefault(paper, set()).update(listed.removeprefix("s").strip().split(", "))
    sources = [
        f"{paper} table{'s' if len(listed) > 1 else ''} {', '.join(in_order(listed))}"
        for paper, listed in papers.items()
        if paper
    ]
    by_aspect: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for difference in (difference for number in printed for difference in number.differences):
        theirs, ours = by_aspect.setdefault(difference.aspect, ({}, {}))
        theirs[difference.printed] = ours[difference.here] = None
    aspects = ", ".join(
        f"{name} ({' / '.join(theirs)}, here {' / '.join(ours)})" for name, (theirs, ours) in by_aspect.items()
    )
    lacking = list(
        dict.fromkeys(name for number in printed if number.comparable == AS_PRINTED for name in number.not_printed)
    )
    known = f"; ≈ comparable as far as printed, which {', '.join(lacking)} are not" if lacking else ""
    yield f"paper: {', '.join(sources)}" + (f"; ≠ not comparable, differs in {aspects}" if aspects else "") + known
    for row in rows:
        for name, number in ({} if row.printed is None else row.printed.metrics).items():
            elsewhere = ", ".join(f"{value:g} in {source}" for source, value in number.also)
            if elsewhere:
                yield f"{row.label}, {heading(name)}: the paper prints {elsewhere} as well"


def in_order(tables: Iterable[str]) -> list[str]:
    """Numbers of tables in the paper's order."""
    return sorted(tables, key=lambda table: (not table.isdigit(), int(table) if table.isdigit() else 0, table))


def _keys(run: str) -> list[str]:
    return [json.dumps(key, sort_keys=True, ensure_ascii=False) for key in json.loads(run)]


def _picked(
    published: Published, keys: Iterable[str], metric: str, run: Mapping[str, Any], *, every: bool = False
) -> list[dict[str, str]]:
    """The facts for our ``metric`` that any of the keys picks, preferably those without a difference to ``run``.

    ``every``: all of them. For a domain there are none if the data have other domains than the paper's.
    """
    name, _, domain = metric.partition("/")
    if name not in published.metrics:
        return []
    wanted = dict(published.metrics[name]) | ({"group": published.paper.letter_of(domain)} if domain else {})
    columns = set(published.facts.columns)
    picked: dict[Any, dict[str, str]] = {}
    for key in (json.loads(text) for text in keys):
        if columns >= set(key) and all(key.get(column, value) == value for column, value in wanted.items()):
            lines = matching(published.facts, {**key, **wanted})
            picked |= {line: published.records[line] for line in lines.index}
    facts = [fact for fact in picked.values() if not domain or is_same_data(fact, run)]
    same = [] if every else [fact for fact in facts if not differences(fact, run, published.paper, metric)]
    return same or facts


def _one(lines: list[dict[str, str]]) -> tuple[float, list[dict[str, str]]]:
    """The number that all ``lines`` print; if they print several, NaN and the lines."""
    values = {float(fact["value"]) for fact in lines}
    return (values.pop(), []) if len(values) == 1 else (float("nan"), lines)


def _source(paper: str, lines: list[dict[str, str]]) -> str:
    """The source of ``lines``, as ``FedGLCL table 2``; empty without lines."""
    tables = in_order({fact["table"] for fact in lines})
    return f"{paper} table{'s' if len(tables) > 1 else ''} {', '.join(tables)}" if tables else ""
