"""Failed runs in a leaderboard: their row and seed, their outcome, and how tables describe it.

A run failed if the store has it as FAILED; an interrupted run did not, since the same command resumes it. A seed failed
if no run of its row and seed has finished, whatever code made them: numbers count in the same way. Of several failures
of one seed the newest counts. A failure that is newer than the seed's finished run is listed beside the number, which
stays.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import pandas as pd

from fedbench_boards.leaderboard.model import FAILED, FINISHED, PARTLY, Failure, RowStatus
from fedbench_boards.leaderboard.rows import PROTOCOL, ROW, by_version, grouped, label_of, names, row_of

MARK = "†"
"""Mark behind the name of a row with a failed run."""
_CODE = 8
"""The number of digits shown of a code hash."""
_KINDS = ("backbone", "tune")
_WEIGHTS = "weights"


def attempts(results: pd.DataFrame, failed: pd.DataFrame | None) -> pd.DataFrame:
    """``results`` and the newest failure of each row and seed that has not finished since; ``failure`` is its reason.

    A run that failed before its data and weights were read has no hashes of them. It gets those of the files and of the
    weights from the newest run that agrees with it in all else: it is of that run's table. Versions of a row's code are
    kept apart (`by_version`).
    """
    return by_version(_tried(results, failed))


def _tried(results: pd.DataFrame, failed: pd.DataFrame | None) -> pd.DataFrame:
    finished = results.assign(failure="")
    if failed is None or failed.empty:
        return finished
    by_age = failed.sort_values("started", kind="stable")
    known = pd.concat([part for part in (finished, by_age[by_age["files_hash"] != ""]) if len(part)] or [by_age[:0]])
    known = known.sort_values("started", kind="stable")
    filled = pd.DataFrame([line | _unread(line, known) for line in by_age.to_dict("records")])
    filled = filled.drop_duplicates([*PROTOCOL, *ROW, "seed"], keep="last")
    key = [*PROTOCOL, *ROW, "seed"]
    done = finished.groupby(key, dropna=False)["started"].max().to_dict() if len(finished) else {}
    since = [done.get(tuple(line[name] for name in key)) for line in filled.to_dict("records")]
    kept = [when is None or when < own for when, own in zip(since, filled["started"], strict=True)]
    return pd.concat([part for part in (finished, filled[kept]) if len(part)] or [finished], ignore_index=True)


def of_tables(results: pd.DataFrame, failed: pd.DataFrame, run_ids: Collection[str]) -> tuple[pd.DataFrame, ...]:
    """The ``results`` and ``failed`` runs in tables that contain any of ``run_ids``."""
    tried = _tried(results, failed)
    tables = tried.loc[tried["run_id"].isin(run_ids), list(PROTOCOL)].drop_duplicates()
    finished, lost = split(tried.merge(tables, on=list(PROTOCOL)))
    return finished.drop(columns="failure"), lost


def split(tried: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split `attempts` into finished and failed runs."""
    has_failed = tried["failure"] != ""
    return tried[~has_failed], tried[has_failed]


def of_row(runs: pd.DataFrame, lost: pd.DataFrame) -> pd.DataFrame:
    """The failed runs of the row that ``runs`` are of, by seed."""
    return lost[(lost[list(ROW)] == runs[list(ROW)].iloc[0]).all(axis=1)].sort_values("seed")


def without_a_run(rows: Mapping[str, pd.DataFrame], lost: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The failed runs of every row that has no finished one, by name; ``rows`` are those that have."""
    keys = {_key(runs) for runs in rows.values()}
    alone = [runs for runs in grouped(lost) if _key(runs) not in keys] if len(lost) else []
    return dict(zip(names([*rows.values(), *alone])[len(rows) :], alone, strict=True))


def status_of(lost: pd.DataFrame, finished: Sequence[int], codes: Iterable[str]) -> RowStatus:
    """The status of a row with failed runs ``lost`` and numbers of the seeds ``finished``.

    ``codes`` are the hashes of the row's finished runs or, without any, of its table's harness. A failed run of other
    code is marked with its own hash.
    """
    others = set(codes)
    failures = tuple(
        Failure(
            seed=int(line["seed"]),
            reason=line["failure"],
            run_id=line["run_id"],
            mlflow_id=line["mlflow_id"],
            code=str(line["code_hash"])[:_CODE] if _is_other(line, others) else "",
        )
        for line in lost[["seed", "failure", "run_id", "mlflow_id", "code_hash", "harness_hash"]].to_dict("records")
    )
    again = [failure for failure in failures if failure.seed in finished]
    never = [failure for failure in failures if failure.seed not in finished]
    parts = [f"{len(finished)} of {len(finished) + len(never)} seeds"] if finished and never else []
    parts += [f"{_seeds(seeds)} failed: {reason}" for reason, seeds in _by_reason(never)]
    parts += [f"{_seeds(seeds)} finished and failed when run again: {reason}" for reason, seeds in _by_reason(again)]
    status = FINISHED if not never else PARTLY if finished else FAILED
    return RowStatus(status, "; ".join(parts), failures)


def _is_other(line: Mapping[Any, Any], codes: Set[str]) -> bool:
    return bool(codes) and codes.isdisjoint((line["code_hash"], line["harness_hash"]))


def is_of_failed(baseline: str, runs: pd.DataFrame, failed: Mapping[str, pd.DataFrame]) -> bool:
    """Whether the baseline of ``runs`` is a ``failed`` row: by its full name, or by label or method if it is alike."""
    for name, lost in failed.items():
        row = row_of(lost)
        alike = all(lost[kind].iloc[0] == runs[kind].iloc[0] for kind in _KINDS)
        tuned = bool(lost["tuned"].iloc[0]) == bool(runs["tuned"].iloc[0])
        if baseline in (name, row) or (alike and tuned and baseline in (label_of(row), lost["method"].iloc[0])):
            return True
    return False


def reasons(failures: Iterable[Failure]) -> str:
    """The text ``failed: reason`` for a row without a number; several reasons follow one another."""
    return "failed: " + "; ".join(dict.fromkeys(_reason(failure) for failure in failures))


def shortened(text: str, most: int) -> str:
    """``text`` in at most ``most`` characters, cut between words if possible."""
    if len(text) <= most:
        return text
    cut = textwrap.shorten(text, most, placeholder=" …")
    return cut if len(cut) > most // 2 else f"{text[: most - 1]}…"


def _unread(line: Mapping[Any, Any], known: pd.DataFrame) -> dict[str, Any]:
    """The facts that a run would have read had it not failed before, as far as another run shows them."""
    if line["files_hash"] or known.empty:
        return {}
    alike = known[_agree(known, line, [name for name in PROTOCOL if name != "files_hash"])]
    if alike.empty:
        return {}
    settings = json.loads(line["row_settings"])
    bare = alike["row_settings"].map(lambda text: json.loads(text) | {_WEIGHTS: ""} == settings | {_WEIGHTS: ""})
    same_row = alike[bare & _agree(alike, line, ROW[:-1])]
    source = (same_row if len(same_row) else alike).iloc[-1]
    readers = same_row if len(same_row) else alike[_agree(alike, line, ("backbone",))]
    if len(readers):
        settings[_WEIGHTS] = json.loads(readers["row_settings"].iloc[-1]).get(_WEIGHTS, "")
    return {
        "files_hash": source["files_hash"],
        "num_clients": source["num_clients"],
        "row_settings": json.dumps(settings, sort_keys=True),
    }


def _agree(runs: pd.DataFrame, line: Mapping[Any, Any], columns: Iterable[str]) -> pd.Series[bool]:
    same = pd.Series(True, index=runs.index)
    for name in columns:
        same &= runs[name] == line[name]
    return same


def _key(runs: pd.DataFrame) -> tuple[str, ...]:
    return tuple(str(runs[name].iloc[0]) for name in ROW)


def _by_reason(failures: Iterable[Failure]) -> list[tuple[str, list[int]]]:
    seeds: dict[str, list[int]] = {}
    for failure in failures:
        seeds.setdefault(_reason(failure), []).append(failure.seed)
    return list(seeds.items())


def _reason(failure: Failure) -> str:
    return f"{failure.reason} (other code, {failure.code})" if failure.code else failure.reason


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(str(seed) for seed in seeds)}"
