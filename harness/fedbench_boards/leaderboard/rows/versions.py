"""Runs of a row that several versions of its methods' code made: each version is a row of its own, never averaged.

The version stands among such a row's settings (``fedprox.code=1a2b3c4d``), so whatever tells rows apart by their
settings does so by it as well: names, tables, pairs of a significance test, pages and files. Code that all methods
share makes no row of its own; captions say where it differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from fedbench_boards.leaderboard.rows.identity import PROTOCOL, ROW

CODE = ".code"
"""Suffix of the setting that names a version, behind the method's name."""
_DIGITS = 8


def by_version(tried: pd.DataFrame) -> pd.DataFrame:
    """``tried`` (of `failures.attempts`) with the version among the ``row_settings`` of rows that have several.

    A failed run is of its own version where a run of that has finished, else of the newest one that finished.
    """
    if tried.empty:
        return tried
    tried = tried.reset_index(drop=True)
    versions = pd.Series([version_of(line) for line in tried.to_dict("records")], index=tried.index)
    settings = tried["row_settings"].copy()
    for _, runs in tried.groupby([*PROTOCOL, *ROW], sort=False, dropna=False):
        finished = runs[runs["failure"] == ""].sort_values("started", kind="stable")
        known = [versions[index] for index in finished.index]
        for index in runs.index if len({json.dumps(version) for version in known}) > 1 else ():
            version = versions[index] if versions[index] in known else known[-1]
            differing = {f"{name}{CODE}": value for name, value in version.items() if _differ(known, name)}
            own = json.loads(settings[index]) | differing
            settings[index] = json.dumps(own, sort_keys=True)
    return tried.assign(row_settings=settings)


def version_of(line: Mapping[Any, Any]) -> dict[str, str]:
    """Method -> the beginning of the hash of its code."""
    return {one["method"]: one["hash"][:_DIGITS] for one in json.loads(line["method_code"] or "[]")}


def newest_version(rows: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """``rows`` reduced to the newest of those that differ only in the version of their code."""
    newest: dict[str, pd.DataFrame] = {}
    for runs in sorted(rows, key=lambda runs: runs["started"].max()):
        settings = json.loads(runs["row_settings"].iloc[0])
        known = {key: value for key, value in settings.items() if not key.endswith(CODE)}
        rest = [str(runs[name].iloc[0]) for name in ROW if name != "row_settings"]
        newest[json.dumps([rest, known], sort_keys=True)] = runs
    return list(newest.values())


def remarks(runs: pd.DataFrame) -> Iterator[str]:
    """Remarks of a table's caption on the versions of its rows, and on code that did not come with fedbench."""
    split = {key.removesuffix(CODE) for text in runs["row_settings"] for key in json.loads(text) if key.endswith(CODE)}
    if split:
        yield f"seeds by another version of {', '.join(sorted(split))} are a row of their own"
    third: dict[str, None] = {}
    for text in filter(None, runs["method_code"]):
        third |= {_named(one): None for one in json.loads(text) if "package" in one or "plugin" in one}
    yield from third


def _named(code: Mapping[str, str]) -> str:
    """A description of code: ``plugin mine.py (1a2b3c4d)``, ``median of some-package 1.0 (1a2b3c4d)``."""
    from_where = (
        f"plugin {code['plugin']}"
        if "plugin" in code
        else f"{code['method']} of {code['package']} {code.get('version', '')}".strip()
    )
    return f"{from_where} ({code['hash'][:_DIGITS]})"


def _differ(versions: Sequence[Mapping[str, str]], method: str) -> bool:
    return len({version.get(method) for version in versions}) > 1
