"""Measures that tell federations apart, from counts (clients x classes) and the share that takes part."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import pandas as pd
from pandas.api.types import is_integer_dtype

from fedbench.core.errors import FedbenchError
from fedbench.core.files import read_bytes
from fedbench.scenarios.partitions.rounding import IntArray
from fedbench.scenarios.picture import divergences, effective_classes

UNITS: Mapping[str, float] = {
    "divergence": 0.1,
    "effective": 0.15,
    "imbalance": 0.5,
    "spread": 0.5,
    "clients": 0.5,
    "samples": 0.5,
    "participation": 0.4,
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

    def steps_to(self, other: Measures) -> float:
        """The Euclidean distance in units of `UNITS`."""
        units = np.array([UNITS[field.name] for field in fields(self)])
        return float(np.linalg.norm((np.array(astuple(self)) - np.array(astuple(other))) / units))


def measures_of(counts: IntArray, participation: float) -> Measures:
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
        table = pd.read_csv(io.BytesIO(read_bytes(file)), dtype={"client": str, "label": str}, keep_default_na=False)
    except (ValueError, pd.errors.ParserError) as error:
        raise FedbenchError(f"{where} is no CSV file: {error}.") from None
    table.columns = [str(name).strip() for name in table.columns]
    shifted = not isinstance(table.index, pd.RangeIndex)  # pandas takes a first field too many for an index
    if shifted or "client" not in table or table.shape[1] < 2 or table.empty:
        columns = ", ".join(map(str, table.columns)) or "none"
        raise FedbenchError(
            f"{where}: it needs the column client and others by class, or client and label; it has {columns}."
        )
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
