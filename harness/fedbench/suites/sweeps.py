"""Sweeps: a setting with several values makes a row of each, and two such settings a row of every pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from fedbench.core.errors import FedbenchError
from fedbench.suites.suite import Row

_ONE_VALUE = ("dataset", "backbone", "text_encoder", "teacher", "templates", "device", "scenario", "metrics")
"""Settings whose value may hold a comma, or is itself a list."""
MOST = 1000
"""Combinations of one sweep; more is a slip of the keyboard."""


def combinations(sets: Sequence[tuple[str, str]]) -> list[tuple[tuple[tuple[str, str], ...], dict[str, str]]]:
    """Every choice of one value a key from ``sets``, whose values are separated by commas: ``fedprox.mu=0.1,0.01``.

    With each the part of it that has several values. FedbenchError for an empty value, one that stands twice, and too
    many combinations.
    """
    values = {key: _values(key, text) for key, text in sets}
    several = [key for key, given in values.items() if len(given) > 1]
    return [(tuple(choice.items()), {key: choice[key] for key in several}) for choice in _choices(values)]


def swept(rows: Sequence[Row]) -> Iterator[Row]:
    """``rows``, of those whose ``set`` has lists a row for every combination of their values, named by them."""
    for row in rows:
        lists = {key: value for key, value in row.set.items() if isinstance(value, list) and _may_sweep(key)}
        try:
            choices = _choices(lists)
        except FedbenchError as error:
            raise FedbenchError(f"{row.place('set')}{error}") from None
        yield from (named(row.model_copy(update={"set": row.set | choice}), choice) for choice in choices)


def named(row: Row, values: Mapping[str, Any]) -> Row:
    """``row``, whose label says which of a sweep's ``values`` it has: ``fedprox, mu=0.1``."""
    heads = {"training", "scenario", *row.stack}
    own = [(key, value) for key, value in values.items() if "." not in key or key.partition(".")[0] in heads]
    words = [f"{key.rpartition('.')[2]}={value}" for key, value in own]
    return row.model_copy(update={"label": ", ".join([row.label or row.method, *words])}) if words else row


def _choices(values: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    for key, given in values.items():
        if not given or any(given.count(value) > 1 for value in given):
            raise FedbenchError(
                f"{key}={','.join(map(str, given))}: a sweep's values must differ, and there must be some."
            )
    count = 1
    for given in values.values():
        count *= len(given)
    if count > MOST:
        raise FedbenchError(f"the sweeps over {', '.join(values)} have {count} combinations; at most {MOST} are run.")
    return [dict(zip(values, choice, strict=True)) for choice in product(*values.values())]


def _values(key: str, text: Any) -> list[Any]:
    # code may set a value itself; what is typed is text
    if not _may_sweep(key) or not isinstance(text, str):
        return [text]
    parts = [part.strip() for part in text.split(",")]
    if "" in parts and len(parts) > 1:
        raise FedbenchError(f"--set {key}={text}: there is an empty value between its commas.")
    return parts


def _may_sweep(key: str) -> bool:
    return key.rpartition(".")[2] not in _ONE_VALUE and not key.startswith("backbone.")
