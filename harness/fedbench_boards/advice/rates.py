"""Each row's learning rate in each setting of a suite: the best of some on validation data, the same rule for all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import yaml

from fedbench.core.files import usable_folder
from fedbench.core.spec import untuned
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import Suite, load_suite
from fedbench.tracking.schema import FINAL
from fedbench.tuning.results import with_listed

FOLDER = "rates"
"""Beside the chosen rates, for the files of the trial."""
VALIDATION = 0.2
"""Share of the training data that chooses."""
_SCORES = ("global_accuracy", "personal_mean_client_accuracy")
"""What chooses: the first that a row has; one whose global model is never trained has the second alone."""


def name_of(suite: Suite) -> str:
    """The name of the suite of trial runs."""
    return f"{suite.name}-rates"


def write(
    suite: Suite, given: str, factors: Sequence[float], seed: int, plugin_files: tuple[Path, ...], folder: Path
) -> tuple[Path, list[Path]]:
    """Write the suite of trial runs, and for each factor the file of all rows' rates times it; these files.

    ``given`` is the suite's name or file. A rate above 100, which no run takes, is cut to it.
    """
    usable_folder(folder, "--output").mkdir(parents=True, exist_ok=True)
    base = str(Path(given).resolve()) if given.endswith((".yaml", ".yml")) else given
    trial = {"extends": base, "name": name_of(suite), "seeds": [seed], "scenario": {"validation": VALIDATION}}
    file = folder / "rates.yaml"
    file.write_text(yaml.safe_dump(trial, sort_keys=False, allow_unicode=True), encoding="utf-8")
    rows = [
        (spec.setting, spec.row, spec.training.lr)
        for spec in expand(suite, Overrides(seeds=(seed,), plugin_files=plugin_files))
    ]
    tables = []
    for factor in factors:
        lines = [(setting, row, min(rate * factor, 100.0)) for setting, row, rate in rows]
        tables.append(folder / f"times-{factor:g}.csv")
        pd.DataFrame(lines, columns=["setting", "row", "lr"]).to_csv(tables[-1], index=False)
    return file, tables


def runs_of(
    results: pd.DataFrame, suite: str, tables: Sequence[Path], seeds: tuple[int, ...], plugin_files: tuple[Path, ...]
) -> pd.DataFrame:
    """Keep those ``results`` of a suite (name or file) that ran with the values of ``tables``; without any, its own.

    The store may have others under the suite's name: of other values, seeds or settings.
    """
    specs = expand(load_suite(suite), Overrides(seeds=seeds, plugin_files=plugin_files))
    asked = [with_listed(specs, table, (), plugin_files) for table in tables] or [specs]
    return results[results["run_id"].isin({spec.run_id for each in asked for spec in each})]


def best(tried: pd.DataFrame, seed: int) -> pd.DataFrame:
    """The best rate by setting and row of the trial runs; of equals the smallest. Rows without weights are left out.

    A line each with the columns that ``fedbench run --tuned FILE`` reads.
    """
    first, second = (tried.get(FINAL + name, pd.Series(float("nan"), tried.index)) for name in _SCORES)
    scores = first.mask(tried["untrained"]).fillna(second)
    rates = tried["row_settings"].map(lambda text: json.loads(text)["training.lr"]).astype(float)
    runs = pd.DataFrame({"setting": tried["setting"], "row": tried["row"].map(untuned), "lr": rates, "score": scores})
    runs = runs[(tried["trainable_parameters"].astype(float) > 0) & scores.notna()]
    runs["trials"] = runs.groupby(["setting", "row"])["lr"].transform("size")
    ordered = runs.sort_values(["setting", "row", "score", "lr"], ascending=[True, True, False, True])
    chosen = ordered.drop_duplicates(["setting", "row"]).drop(columns="score").reset_index(drop=True)
    return chosen.assign(seeds=seed, objective=" or ".join(_SCORES), validation=VALIDATION)
