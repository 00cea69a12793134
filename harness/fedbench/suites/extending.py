"""Suites that extend another: ``extends: NAME|FILE`` takes its content over, and what the file says goes on top.

``training`` and ``scenario`` are laid over the other's, field by field. Rows are added behind the other's; one of the
same name (label, else method) takes its place, and ``without: [NAME, ...]`` leaves rows out. A scale takes the place of
the other's of that name. All else replaces what the other says. Name and version are a suite's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.suites.registered import suite_bytes
from fedbench.suites.safe_yaml import read_yaml

_MOST = 10
"""Suites that may stand on one another."""
_NOT_TAKEN = ("name", "version", "changes")
"""Fields that are a suite's own."""
_LAID_OVER = ("training", "scales", "published_metrics")
OWN = ("extends", "without")
"""Fields of the file that are none of the suite."""


def extended(content: Mapping[str, Any], where: str, depth: int = 0) -> tuple[dict[str, Any], dict[int, int]]:
    """``content`` of the file ``where`` with that of the suite that it extends, and its rows' places in the whole.

    FedbenchError for a suite that does not exist, extends itself, or has no such rows.
    """
    given = dict(content)
    own = given.pop("rows", None)
    if "extends" not in given:
        if "without" in given:
            raise FedbenchError(f"{where}: `without` leaves out rows of another suite; say which one with `extends`.")
        return dict(content), {}
    if depth == _MOST:
        raise FedbenchError(f"{where}: more than {_MOST} suites extend one another; does one extend itself?")
    base = _base(given["extends"], where, depth)
    rows = _left(base.pop("rows", []), given.get("without", []), where)
    places: dict[int, int] = {}
    for number, row in enumerate(own if isinstance(own, list) else []):
        same = [place for place, other in enumerate(rows) if _name(other) == _name(row) != ""]
        if len(same) > 1:
            raise FedbenchError(
                f"{where}, rows.{number}: {given['extends']!r} has {len(same)} rows called {_name(row)!r}; give yours "
                f"a label, or leave those out with `without: [{_name(row)}]`."
            )
        places[number] = same[0] if same else len(rows)
        rows[places[number] : places[number] + 1] = [row]
    if own is not None and not isinstance(own, list):
        return {**base, **_without_own(given), "rows": own}, {}
    merged = {**base, **_without_own(given), "rows": rows}
    for field in _LAID_OVER:
        if isinstance(base.get(field), Mapping) and isinstance(given.get(field), Mapping):
            merged[field] = {**base[field], **given[field]}
    if isinstance(given.get("scenario"), Mapping) and "scenario" in base:
        below = base["scenario"] if isinstance(base["scenario"], Mapping) else {"preset": base["scenario"]}
        merged["scenario"] = given["scenario"] if "preset" in given["scenario"] else {**below, **given["scenario"]}
    return merged, places


def _base(name: object, where: str, depth: int) -> dict[str, Any]:
    if not isinstance(name, str):
        raise FedbenchError(f"{where}, extends: {name!r} is no suite's name or file.")
    beside = Path(where).parent / name
    file = str(beside) if name.endswith((".yaml", ".yml")) and not Path(name).is_absolute() else name
    try:
        content, called = suite_bytes(file)
    except FedbenchError as error:
        raise FedbenchError(f"{where}, extends: {error}") from None
    _, found = read_yaml(content, called)
    if not isinstance(found, dict):
        raise FedbenchError(f"{where}, extends: {name!r} is no suite.")
    merged, _ = extended(found, called, depth + 1)
    return {field: value for field, value in merged.items() if field not in _NOT_TAKEN}


def _left(rows: object, without: object, where: str) -> list[Any]:
    """A copy of ``rows`` less those that are named."""
    rows = list(rows) if isinstance(rows, list) else []
    names = [_name(row) for row in rows]
    without = without if isinstance(without, list) else [without]
    for name in without:
        if name not in names:
            raise FedbenchError(f"{where}, without: {unknown_name('row', str(name), filter(None, names))}")
    return [row for row, name in zip(rows, names, strict=True) if name not in without]


def _name(row: object) -> str:
    """What a row is called: its label, else its method."""
    return str(row.get("label") or row.get("method") or "") if isinstance(row, Mapping) else ""


def _without_own(given: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in given.items() if field not in OWN}
