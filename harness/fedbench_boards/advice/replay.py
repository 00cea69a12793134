"""A suite that replays a federation's counts with a shortlist of rows."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import yaml

from fedbench.core.errors import FedbenchError
from fedbench.core.files import usable_folder
from fedbench.datasets import load_dataset
from fedbench.suites.suite import Row, Suite, load_suite

_FROM_COUNTS = ("imbalance", "imbalance_factor", "partition", "dirichlet_alpha", "clients", "min_client_size")
"""Fields of the scenario that the counts replace."""
SUITE, COUNTS = "advised.yaml", "counts.csv"
_EMBEDDED_CLASSES = (10, 20)


def write_replay(
    runs: pd.DataFrame,
    rows: Collection[str],
    baseline: str,
    counts: pd.DataFrame,
    participation: float,
    dataset: str,
    folder: Path,
) -> Path:
    """Write the counts as a partition and a suite of ``rows`` and the ``baseline``; the suite's file.

    ``runs`` are the evidence, which names the suite that the rows' settings are of. The classes of another data set
    than the user's stand for theirs, the most frequent for the most frequent. FedbenchError where these are too many.
    """
    suite = load_suite(str(runs["suite"].iloc[0]))
    labels = [baseline, *(runs.loc[runs["row"] == row, "label"].iloc[0] for row in rows)]
    chosen = [_row_called(suite, label) for label in dict.fromkeys(labels)]
    scenario = {"preset": suite.scenario} if isinstance(suite.scenario, str) else dict(suite.scenario)
    scenario = {name: value for name, value in scenario.items() if name not in _FROM_COUNTS}
    data, file = dataset or _data_for(counts, suite.dataset), folder / COUNTS
    content: dict[str, Any] = {
        "name": "advised",
        "description": f"a federation's own counts, with the shortlist of suite {suite.name}",
        "dataset": data,
        "backbone": suite.backbone,
        "scenario": scenario
        | {"imbalance": "none", "partition": f"table:{file.resolve()}", "participation": participation},
        "training": dict(suite.training),
        "seeds": list(suite.seeds),
        "baseline": baseline,
        "rows": [_row(row) for row in chosen],
    }
    usable_folder(folder, "--output")
    folder.mkdir(parents=True, exist_ok=True)
    (counts if dataset else _renamed(counts)).to_csv(file, index_label="client")
    place = folder / SUITE
    place.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return place


def _row_called(suite: Suite, label: str) -> Row:
    """The row of ``suite`` called ``label``. FedbenchError unless there is exactly one, as for a tuned row."""
    name = label.removesuffix(" (no labels)")
    matches = [row for row in suite.rows if name in (row.label or row.method, "+".join(row.stack))]
    if len(matches) != 1:
        raise FedbenchError(
            f"--run can't tell which row of suite {suite.name!r} is {label!r}: it has {len(matches)} of that name; run "
            "it by fedbench run, with --set partition=table:FILE."
        )
    return matches[0]


def _row(row: Row) -> dict[str, Any]:
    return {"method": row.method} | ({"label": row.label} if row.label else {}) | ({"set": row.set} if row.set else {})


def _data_for(counts: pd.DataFrame, dataset: str) -> str:
    """The embedded data with as many classes, and enough samples of each for the largest class.

    With fewer classes than the data's, models would be tested on classes that no client holds.
    """
    name, count = dataset.partition("?")[0], counts.shape[1]
    if name != "embedded":
        raise FedbenchError(f"the evidence is on {dataset!r}; name the data to take samples of by --dataset.")
    if count not in _EMBEDDED_CLASSES:
        raise FedbenchError(
            f"the embedded data have {' or '.join(map(str, _EMBEDDED_CLASSES))} classes, these counts {count}; give "
            "data with your classes by --dataset."
        )
    return f"{name}?classes={count}&train={count * int(counts.sum().max())}"


def _renamed(counts: pd.DataFrame) -> pd.DataFrame:
    """The counts under the embedded data's class names, the largest class under the first."""
    order = counts.sum().sort_values(ascending=False, kind="stable").index
    smallest = f"embedded?classes={counts.shape[1]}&train=1&test=1"
    with TemporaryDirectory() as folder:
        names = load_dataset(smallest, data_dir=Path(folder), cache_dir=Path(folder)).classnames
    return counts[order].set_axis(list(names), axis=1)
