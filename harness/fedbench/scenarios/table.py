"""A drawn federation as a table, which ``partition=table:FILE`` reads."""

from __future__ import annotations

from pathlib import Path

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Federation


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
