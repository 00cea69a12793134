"""Captions of tables: data, scenario, budget, seeds and code of their runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pandas as pd

from fedbench.core.wording import counted
from fedbench.suites.single import ADHOC, is_read_as
from fedbench_boards.leaderboard.rows import versions as row_versions
from fedbench_boards.leaderboard.rows.seeds import seeds_named

_UNUSUAL = {"weighting": "samples", "augment": "none"}
"""Budget fields that a caption names only if they differ from these values."""
_SIZES = "images are decoded at the size that each row's backbone or teacher takes"
_SPENT = ("trials", "seeds", "run-off seeds", "pruner", "objective")
"""Parts of the tuning budget that must be equal for tuned rows to be compared."""


def caption(runs: pd.DataFrame, seeds: tuple[int, ...], remarks: Sequence[str] = ()) -> str:
    """The protocol that all ``runs`` of a table share, and ``remarks`` on how the table was made."""
    first = runs.iloc[0]
    # a run that failed before it read its data has no hash of them, but may have its table's of the files
    data = sorted({text[:8] for text in runs["data_hash"] if text}) or [first["files_hash"][:8] or "unknown"]
    epochs, steps = counted(int(first["local_epochs"]), "local epoch"), first["local_steps"]
    local = epochs if steps == "none" else counted(int(steps), "local step")
    parts = [
        *filter(None, [" / ".join(dict.fromkeys(runs["setting"])), _group(runs)]),
        f"{first['dataset']} (data {', '.join(data)})",
        *([_SIZES] if len(data) > 1 else []),
        str(first["scenario"]),
        # a run that failed before its data were partitioned knows no number of clients
        counted(clients, "client") if (clients := int(runs["num_clients"].max())) else "an unknown number of clients",
        f"{counted(int(first['rounds']), 'round')} of {local}, batch {first['batch_size']}",
        *(f"{name} {first[name]}" for name, usual in _UNUSUAL.items() if first[name] != usual),
        seeds_named(seeds),
        "commit " + ", ".join(sorted(set(_code(runs)))),
        *(["several code states"] if runs["harness_hash"].nunique() > 1 else []),
        *row_versions.remarks(runs),
        *_suite(runs),
        *(["tuned with unequal budgets"] if _unequal(runs) else []),
        *remarks,
    ]
    return " · ".join(parts)


def _unequal(runs: pd.DataFrame) -> bool:
    tunings = [json.loads(text) for text in runs.loc[runs["tuned"] != "", "tuning"].unique()]
    return len({tuple(tuning.get(name, "") for name in _SPENT) for tuning in tunings}) > 1


def _group(runs: pd.DataFrame) -> str:
    """The name under which runs without a suite file are filed; "" for those of a suite."""
    return " / ".join(name for name in dict.fromkeys(runs["suite"]) if is_read_as(name, ADHOC) and name != ADHOC)


def _suite(runs: pd.DataFrame) -> Iterator[str]:
    """The suite's version if it is not the first, and the hash of its text, which tells files of one name apart."""
    versions = sorted(runs["suite_version"].unique()) if "suite_version" in runs else []
    if any(version > 1 for version in versions):
        yield f"suite version {', '.join(map(str, versions))}"
    hashes = sorted({text[:8] for text in runs["suite_hash"] if text})
    if hashes:
        yield f"suite {', '.join(hashes)}"


def _code(runs: pd.DataFrame) -> Iterator[str]:
    for commit, code in zip(runs["commit"], runs["harness_hash"], strict=True):
        revision, dirty, _ = str(commit).partition("+dirty")
        # two states of a work tree with changes are distinguished by their code
        yield revision[:7] if revision and not dirty else f"{revision[:7] or 'none'}{dirty} (code {str(code)[:8]})"
