"""Measured settings that advice is drawn from: a line for every run, with the measures of its federation.

Measures tell federations apart. They are of counts (clients x classes) and of the share that takes part.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
from pandas.api.types import is_integer_dtype, is_numeric_dtype

from fedbench.core.errors import FedbenchError
from fedbench.core.files import csv_text, file_bytes, read_bytes, replacing
from fedbench.core.spec import untuned
from fedbench.core.wording import MEGA
from fedbench.scenarios.partitions.parts import IntArray
from fedbench.scenarios.picture import divergences, effective_classes
from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard.own_models import with_global_models
from fedbench_boards.leaderboard.results import load_federations

UNITS: Mapping[str, float] = {
    "divergence": 0.1,
    "effective": 0.15,
    "imbalance": 0.5,
    "spread": 0.5,
    "clients": 0.5,
    "samples": 0.5,
    "participation": 0.4,
    "domains": 0.5,
}
"""The difference in each measure that counts as one step."""
WORDS: Mapping[str, str] = {
    "divergence": "mean divergence of clients from the whole",
    "effective": "classes a client effectively holds, share of all",
    "imbalance": "largest over smallest class, log10",
    "spread": "spread of client sizes over their mean",
    "clients": "clients, log10",
    "samples": "samples of a client, log10",
    "participation": "share of clients in a round",
    "domains": "a domain of its own at every client",
}


@dataclass(frozen=True)
class Measures:
    """The measures of one federation; `WORDS` describes them."""

    divergence: float
    """Jensen-Shannon divergence (base 2), mean over clients weighted by their samples."""
    effective: float
    """exp of the entropy of a client's class shares over the number of classes; the same mean over clients."""
    imbalance: float
    spread: float
    """Standard deviation of client sizes over their mean."""
    clients: float
    samples: float
    participation: float
    domains: float = 0.0
    """1 where every client has samples of one of several domains, else 0."""

    def steps_to(self, other: Measures) -> float:
        """The Euclidean distance in units of `UNITS`."""
        steps = [(getattr(self, name) - getattr(other, name)) / unit for name, unit in UNITS.items()]
        return float(np.linalg.norm(steps))


def measures_of(counts: IntArray, participation: float, *, has_domains: bool = False) -> Measures:
    """The measures of ``counts`` (clients, classes), int64; ``participation`` in 0..1.

    A class that nobody holds counts as one of half a sample. FedbenchError if a client holds nothing.
    """
    sizes, totals = counts.sum(axis=1), counts.sum(axis=0)
    return Measures(
        divergence=float(np.average(divergences(counts), weights=sizes)),
        effective=float(np.average(effective_classes(counts), weights=sizes) / counts.shape[1]),
        imbalance=float(np.log10(totals.max() / max(totals.min(), 0.5))),
        spread=float(sizes.std() / sizes.mean()),
        clients=float(np.log10(len(counts))),
        samples=float(np.log10(sizes.mean())),
        participation=participation,
        domains=float(has_domains),
    )


def read_counts(file: Path) -> pd.DataFrame:
    """Read counts of samples by client (index) and class (columns).

    The CSV file has the column client and a column of counts by class, or the columns client and label and a line a
    sample. FedbenchError for other files.
    """
    where = f"--counts {str(file)!r}"
    if not file.is_file():
        raise FedbenchError(f"{where} does not exist; give a CSV file: client and a column by class, a line a client.")
    try:
        content = read_bytes(file)
        table = pd.read_csv(io.BytesIO(content), dtype={"client": str, "label": str}, keep_default_na=False)
        # pandas gives the second of two columns of one name another name
        header = pd.read_csv(io.BytesIO(content), header=None, nrows=1, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise FedbenchError(f"{where} is no CSV file: {error}.") from None
    table.columns = [str(name).strip() for name in table.columns]
    shifted = not isinstance(table.index, pd.RangeIndex)  # pandas takes a first field too many for an index
    if shifted or "client" not in table or table.shape[1] < 2 or table.empty:
        columns = ", ".join(map(str, table.columns)) or "none"
        raise FedbenchError(
            f"{where}: it needs the column client and others by class, or client and label; it has {columns}."
        )
    twice = header.iloc[0].str.strip().duplicated()
    if twice.any():
        raise FedbenchError(f"{where} has several columns called {header.iloc[0][twice].iloc[0].strip()!r}.")
    for name in {"client", "label"} & set(table.columns):
        table[name] = table[name].fillna("").astype(str).str.strip()
        if (table[name] == "").any():
            raise FedbenchError(f"{where}: a line lacks its {name}.")
    if set(table.columns) == {"client", "label"}:
        counts = pd.crosstab(table["client"], table["label"])
    else:
        counts = table.set_index("client")
    whole = all(map(is_integer_dtype, counts.dtypes))
    if not whole or (counts.to_numpy() < 0).any() or counts.index.duplicated().any():
        raise FedbenchError(f"{where}: a line a client, with whole numbers from 0 on below every class.")
    if counts.shape[1] < 2 or not counts.to_numpy().sum(axis=1).all():
        raise FedbenchError(f"{where}: there must be two classes, and every client must hold a sample.")
    return counts


GLOBAL, PERSONAL = "global", "personal"
"""The models that the user needs: one for all clients, or each client's own."""
_SCORES = {GLOBAL: "global_accuracy", PERSONAL: "personal_mean_client_accuracy"}
_COLUMNS = ("suite", "setting", "seed", "row", "label", "method", "backbone", "dataset", "run_id", "commit")
_NUMBERS = ("megabytes", "seconds", *_SCORES)
_WHAT = ("server_data",)
"""Column: the server data that a method reads."""
SHIPPED = "evidence.csv.gz"


@dataclass(frozen=True, eq=False)
class Evidence:
    """Runs with columns `_COLUMNS`, `_NUMBERS`, `_WHAT` and those of `Measures`."""

    runs: pd.DataFrame

    @cached_property
    def places(self) -> dict[str, Measures]:
        """Setting -> the means of its federations' measures over seeds."""
        names = [field.name for field in fields(Measures)]
        means = self.runs.drop_duplicates(["setting", "seed"]).groupby("setting", sort=False)[names].mean()
        return {str(setting): Measures(**dict(row)) for setting, row in means.iterrows()}

    @cached_property
    def to_nearest(self) -> list[float]:
        """The distance of every setting to the nearest other one."""
        places = self.places.items()
        return [min(here.steps_to(there) for other, there in places if other != name) for name, here in places]


def evidence_of(uri: str, results: pd.DataFrame) -> Evidence:
    """The evidence of finished runs in the store at ``uri``. FedbenchError where no federation is recorded."""
    results = with_global_models(results, (_SCORES[PERSONAL],))
    first = results.drop_duplicates(["setting", "seed"])
    federations = load_federations(uri, first)
    measures = {}
    for run in first.to_dict("records"):
        if run["mlflow_id"] in federations:
            federation = federations[run["mlflow_id"]]
            counts = np.asarray(federation["class_counts"], dtype=np.int64)
            counts = counts[counts.sum(axis=1) > 0]
            partition = json.loads(run["scenario_settings"]).get("partition", "")
            share = run["cohort_size"] / run["num_clients"]
            measured = measures_of(counts, share, has_domains=partition.partition("?")[0] == "domain")
            # the counts are those of the first clients only where the number of all stands beside them
            clients = float(np.log10(federation.get("clients", len(counts))))
            measures[run["setting"], run["seed"]] = replace(measured, clients=clients)
    if not measures:
        raise FedbenchError("no run of these results has its federation recorded; run the suite again.")
    lines = []
    for run in results.to_dict("records"):
        if (run["setting"], run["seed"]) not in measures:
            continue
        sent = run.get(f"{FINAL}bytes_up", np.nan) + run.get(f"{FINAL}bytes_down", np.nan)
        scores = {name: run.get(FINAL + metric, np.nan) for name, metric in _SCORES.items()}
        if run["untrained"]:
            scores[GLOBAL] = np.nan
        what = {"server_data": run["server_data"] or ""}
        line = {name: run[name] for name in _COLUMNS if name != "label"}
        line["label"] = untuned(run["row"]).replace(f" · {run['backbone']}", "", 1)
        costs = {"megabytes": sent / MEGA, "seconds": run.get(f"{FINAL}train_seconds", np.nan)}
        lines.append(line | scores | what | costs | asdict(measures[run["setting"], run["seed"]]))
    order = [*_COLUMNS, *_NUMBERS, *_WHAT, *(field.name for field in fields(Measures))]
    return Evidence(pd.DataFrame(lines)[order])


def write_evidence(evidence: Evidence, file: Path) -> None:
    """Write the evidence atomically as CSV."""
    with replacing(file, "evidence", "choose another --output") as temporary:
        temporary.write_bytes(file_bytes(file.name, csv_text(evidence.runs)))


def read_evidence(file: Path | None) -> Evidence:
    """Read the evidence that `write_evidence` wrote; None: that which ships with the suites. FedbenchError for other
    files."""
    source = Path(str(resources.files("fedbench_suites"))) / SHIPPED if file is None else file
    try:
        runs = pd.read_csv(source, dtype={"run_id": str}, float_precision="round_trip")
    except (OSError, ValueError, EOFError, zlib.error):
        raise FedbenchError(f"there is no evidence in {str(source)!r}; fedbench map writes {SHIPPED}.") from None
    lacking = [name for name in (*_COLUMNS, *_NUMBERS, *_WHAT, *(f.name for f in fields(Measures))) if name not in runs]
    if lacking:
        raise FedbenchError(f"{str(source)!r} is no evidence: it lacks the columns {', '.join(lacking)}.")
    runs["server_data"] = runs["server_data"].fillna("")
    measured = runs[["megabytes", "seconds", *(field.name for field in fields(Measures))]]
    numbers = [*measured.dtypes, *runs[list(_SCORES)].dtypes]
    if runs.empty or not all(map(is_numeric_dtype, numbers)) or measured.isna().to_numpy().any():
        needed = ", ".join([*map(str, measured), *_SCORES])
        raise FedbenchError(f"{str(source)!r} is no evidence: every run needs numbers for {needed}.")
    return Evidence(runs)
