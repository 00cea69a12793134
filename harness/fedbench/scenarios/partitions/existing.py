"""Existing federations: clients from the data's own column, or from a table.

A table is a CSV file in one of two forms. ``split,sample,client`` lists the client of every sample: ``split`` is train,
test or validation, and ``sample`` the position in it as in `write_table`, which ``fedbench scenario show --output
FILE`` calls. A column ``stretch`` gives clients other training samples in each stretch of the run, and other test
samples if it has some. ``client`` with a column by class name gives the number of training samples of each class by
client; the samples are drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.files import looked_up, read_bytes
from fedbench.core.method.base import NoParams
from fedbench.core.method.hyper import hyper
from fedbench.kinds.kinds import ClientSamples, Indices, Partition, PartitionTask, Samples
from fedbench.scenarios.partitions.parts import IntArray, Parts, deal_out

if TYPE_CHECKING:
    import pandas as pd

    from fedbench.core.federation import Federation

SPLITS = ("train", "test", "validation")


@dataclass(frozen=True, kw_only=True)
class NaturalParams:
    """The smallest client that is kept."""

    min_samples: int = hyper(
        1,
        symbol="n_min",
        source="LEAF (Caldas et al. 2018) drops users with fewer samples",
        low=1,
        high=1_000_000,
        search=False,
    )


class Natural(Partition[NaturalParams]):
    """The clients that the data name (hospitals, writers, phones), each with its own training and test samples.

    Clients with fewer than ``min_samples`` training samples are left out; their test samples stay in the test split.
    """

    name = "natural"

    def clients(self, task: PartitionTask) -> ClientSamples:
        """Clients in the data's order. If the test split names no clients, all share it."""
        owners = task.train.clients
        if owners is None:
            raise FedbenchError(
                "partition 'natural' needs data that name the client of every sample; name their column "
                "(?client=COLUMN), or choose another partition."
            )
        sizes = np.bincount(owners, minlength=len(task.client_names))
        kept = np.flatnonzero(sizes >= self.params.min_samples)
        if not len(kept):
            raise FedbenchError(
                f"none of the {len(task.client_names)} clients has {self.params.min_samples} training samples, the "
                f"largest has {int(sizes.max(initial=0))}; lower natural?min_samples."
            )
        names = [task.client_names[client] for client in kept.tolist()]
        train, test, validation = (_owned(split, kept) for split in (task.train, task.test, task.validation))
        assert train is not None
        return ClientSamples(train, test, validation, names=names)


def _owned(split: Samples | None, clients: Indices) -> Parts | None:
    """The samples of each of ``clients``; None where the split names none."""
    if split is None or split.clients is None:
        return None
    place = np.full(int(max(clients.max(), split.clients.max(initial=0))) + 1, len(clients))
    place[clients] = np.arange(len(clients))
    # those of others are dealt to one client too many, which is cut off
    return Parts(*_first(deal_out(np.arange(len(split)), place[split.clients], len(clients) + 1), len(clients)))


def _first(parts: Parts, count: int) -> tuple[IntArray, IntArray]:
    return parts.flat[: parts.offsets[count]], parts.offsets[: count + 1]


class FromTable(Partition[NoParams]):
    """A partition read from a CSV file: which client has which sample, or how many of each class."""

    name = "table"
    location = "FILE"

    def clients(self, task: PartitionTask) -> ClientSamples:
        """Clients in the order in which the table names them first."""
        table = _read(task.location)
        if {"split", "sample", "client"} <= set(table.columns):
            return _of_samples(table, task)
        if "client" in table.columns:
            return _of_counts(table, task)
        raise FedbenchError(
            f"partition table {task.location!r}: its columns are {', '.join(map(str, table.columns))}; it needs "
            "split, sample and client, or client and a column by class."
        )

    def digest(self, location: str) -> str:
        return hashlib.sha256(_content(location)).hexdigest()


def _content(location: str) -> bytes:
    file = looked_up(location, "partition table")
    if not file.is_file():
        raise FedbenchError(f"partition table {location!r} does not exist; give the path of a CSV file.")
    return read_bytes(file)


def _read(location: str) -> pd.DataFrame:
    import io

    import pandas as pd  # takes half a second

    try:
        # a client may be called NA
        table = pd.read_csv(io.BytesIO(_content(location)), dtype={"client": str, "split": str}, keep_default_na=False)
        if not isinstance(table.index, pd.RangeIndex):  # pandas takes a first cell too many for an index
            raise ValueError("its rows have more cells than its first line names")
        return table
    except (ValueError, pd.errors.ParserError) as error:  # UnicodeDecodeError is a ValueError
        raise FedbenchError(f"partition table {location!r} is no CSV file: {error}.") from None


def _lacks_client(table: pd.DataFrame) -> bool:
    return bool((table["client"].str.strip() == "").any())


def _names(column: pd.Series) -> list[str]:
    """Clients in the order of their first rows."""
    return [str(name) for name in dict.fromkeys(column)]


def _of_samples(table: pd.DataFrame, task: PartitionTask) -> ClientSamples:
    where = f"partition table {task.location!r}"
    for split in sorted(set(table["split"].astype(str)) - set(SPLITS)):
        raise unknown_name(f"split in {where}:", split, SPLITS)
    if _lacks_client(table) or not str(table["sample"].dtype).startswith("int"):
        raise FedbenchError(f"{where}: every row needs a client and the whole number of a sample.")
    names: Sequence[str] = _names(table.loc[table["split"] == "train", "client"])
    place = {name: number for number, name in enumerate(names)}
    stretch = table.get("stretch")
    if stretch is not None and (
        not str(stretch.dtype).startswith("int") or stretch.min() != 0 or stretch.nunique() - 1 != stretch.max()
    ):
        raise FedbenchError(f"{where}: stretches are whole numbers from 0 on, without a gap.")
    first = table if stretch is None else table[stretch == 0]
    rows = {split: first[first["split"] == split] for split in SPLITS}
    for split in SPLITS:
        for stranger in sorted(set(table.loc[table["split"] == split, "client"]) - set(names)):
            raise FedbenchError(f"{where}: client {stranger!r} has {split} samples, but no training sample.")

    def partitioned(split: str, count: int, part: pd.DataFrame | None = None) -> Parts | None:
        part = rows[split] if part is None else part
        if not len(part):
            return None
        samples: IntArray = part["sample"].to_numpy(dtype=np.int64)
        owners: IntArray = np.array([place[name] for name in part["client"]], dtype=np.int64)
        for wrong in samples[(samples < 0) | (samples >= count)]:
            raise FedbenchError(
                f"{where}: there is no {split} sample {wrong}, the scenario gives out {count}; the table must be of "
                "the same data, long tail, shots, splits and seed."
            )
        return deal_out(samples, owners, len(names))

    train = partitioned("train", len(task.train))
    if train is None:
        raise FedbenchError(f"{where} has no row of the split train.")
    validation = None if task.validation is None else partitioned("validation", len(task.validation))
    test = partitioned("test", len(task.test))
    later, later_test = [], []
    for number in range(1, 1 if stretch is None else int(stretch.max()) + 1):
        of = {split: table[(stretch == number) & (table["split"] == split)] for split in ("train", "test")}
        later.append(partitioned("train", len(task.train), of["train"]) or train)
        later_test.append(partitioned("test", len(task.test), of["test"]) or test)
    # a stretch without rows is as the first
    moves = any(part is not test for part in later_test)
    return ClientSamples(train, test, validation, later, _worth_telling(names), later_test if moves else ())


def _of_counts(table: pd.DataFrame, task: PartitionTask) -> ClientSamples:
    where = f"partition table {task.location!r}"
    classes = [column for column in table.columns if column != "client"]
    for column in classes:
        if column not in task.classnames:
            raise unknown_name(f"class in {where}:", str(column), task.classnames)
    if _lacks_client(table) or table["client"].duplicated().any():
        raise FedbenchError(f"{where}: every row needs a client of its own.")
    counts = table[classes].to_numpy()
    if not np.issubdtype(counts.dtype, np.integer) or counts.min(initial=0) < 0:
        raise FedbenchError(f"{where}: counts are whole numbers from 0 on.")
    names = [str(name) for name in table["client"]]
    samples: list[IntArray] = []
    owners: list[IntArray] = []
    for column, wanted in zip(classes, counts.T, strict=True):
        of_class = np.flatnonzero(task.train.labels == task.classnames.index(column))
        if wanted.sum() > len(of_class):
            raise FedbenchError(
                f"{where}: {int(wanted.sum())} samples of {column!r}, but the data have {len(of_class)}."
            )
        samples.append(task.rng.permutation(of_class)[: int(wanted.sum())])
        owners.append(np.repeat(np.arange(len(names)), wanted).astype(np.int64))
    dealt = deal_out(np.concatenate(samples), np.concatenate(owners), len(names))
    return ClientSamples(dealt, names=_worth_telling(names))


def _worth_telling(names: Sequence[str]) -> Sequence[str]:
    """``names``, unless they are the clients' numbers."""
    return () if list(names) == [str(number) for number in range(len(names))] else names


def write_table(federation: Federation, file: Path) -> None:
    """Write the client of every sample as CSV with the columns split, sample and client, and stretch if data drift.

    ``sample`` is the position in the split as the scenario leaves it: without the samples that its long tail, shots of
    the federation, the server or a validation split take from the training samples. If they take none, that is the data
    set's own order. FedbenchError if the file can't be written.
    """
    import pandas as pd  # takes half a second

    names = federation.client_names or tuple(map(str, range(len(federation.clients))))
    rows = []
    for name, client in zip(names, federation.clients, strict=True):
        held = {
            "train": client.indices,
            "test": client.test_indices,
            "validation": client.validation_indices,
        }
        for split, samples in held.items():
            if samples is not None:
                rows.append(pd.DataFrame({"split": split, "sample": samples.numpy(), "client": name}))
    for stretch, shards in enumerate(federation.later, start=1):
        for name, client, first in zip(names, shards, federation.clients, strict=True):
            now = {"train": client.indices}
            if client.test_indices is not None and client.test_indices is not first.test_indices:
                now["test"] = client.test_indices
            for split, own in now.items():
                rows.append(pd.DataFrame({"split": split, "sample": own.numpy(), "client": name, "stretch": stretch}))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = pd.concat(rows)
        if "stretch" in whole:
            whole["stretch"] = whole["stretch"].fillna(0).astype(int)
        whole.to_csv(file, index=False)
    except OSError as error:
        raise FedbenchError(f"the table can't be written to {str(file)!r}: {error.strerror}.") from None
