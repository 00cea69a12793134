"""The files of a finished run: its model with all that evaluating needs, its federation, its predictions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pydantic import ValidationError

from fedbench.core.errors import FedbenchError
from fedbench.core.records import RunInfo, RunResult
from fedbench.core.spec import RunSpec
from fedbench.core.types import Tensors
from fedbench.rounds.state import RunState, load_state, save_state

MODEL = "model"
"""The folder of ``state.safetensors`` and ``spec.json``."""
_STATE, SPEC = f"{MODEL}/state.safetensors", f"{MODEL}/spec.json"
PREDICTIONS = "predictions.csv"
"""The predicted class and the right one of every test sample."""


def write_artifacts(folder: Path, spec: RunSpec, info: RunInfo, result: RunResult) -> None:
    """Fill ``folder`` with the run's files; what a method keeps beside the weights is in ``model`` as well."""
    (folder / MODEL).mkdir()
    (folder / SPEC).write_text(spec.model_dump_json(indent=2) + "\n", encoding="utf-8")
    save_state(state_of(result), folder / _STATE, spec.run_id)
    federation: dict[str, object] = {
        "classnames": info.classnames,
        "class_counts": info.class_counts,
        "groups": {group: list(classes) for group, classes in info.groups.items()},
    }
    if info.scenario_clients > len(info.class_counts):
        federation["clients"] = info.scenario_clients
    (folder / "federation.json").write_text(json.dumps(federation) + "\n", encoding="utf-8")
    columns = {"sample": range(len(result.predictions)), "predicted": result.predictions}
    columns |= {"label": result.labels} if result.labels else {}
    lines = [",".join(columns), *(",".join(map(str, line)) for line in zip(*columns.values(), strict=True))]
    (folder / PREDICTIONS).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_spec(folder: Path, run_id: str) -> RunSpec:
    """The description of the run whose files, as `write_artifacts` left them, are in ``folder``.

    Raises FedbenchError where it is missing, or of a version of fedbench that describes runs otherwise.
    """
    try:
        return RunSpec.model_validate_json((folder / SPEC).read_bytes())
    except FileNotFoundError:
        raise FedbenchError(
            f"run {run_id} has no {SPEC} among its artifacts, the file was deleted; repeat it with "
            "`fedbench run --rerun`."
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise FedbenchError(
            f"{SPEC} of run {run_id} is of another version of fedbench ({where}: {first['msg']}); evaluate it with "
            "that version, which is in the run's tags."
        ) from error


def read_state(folder: Path, run_id: str, device: str) -> RunState:
    """The final state of that run on ``device``; FedbenchError for a missing or damaged file, or another run's."""
    return load_state(folder / _STATE, run_id, device)


def read_predictions(folder: Path, run_id: str) -> tuple[int, ...]:
    """The classes that run predicted for the test split; FedbenchError where they cannot be read."""
    try:
        return tuple(int(label) for label in pd.read_csv(folder / PREDICTIONS)["predicted"])
    except (OSError, ValueError, KeyError) as error:
        raise FedbenchError(
            f"{PREDICTIONS} of run {run_id} cannot be read: {error}; repeat it with --rerun."
        ) from error


def state_of(result: RunResult) -> RunState:
    """The final state of a run, from numpy arrays back to tensors."""
    return RunState(
        round=max((record.round for record in result.records), default=0),
        weights=_tensors(result.weights),
        buffers=_tensors(result.buffers),
        server={method: _tensors(arrays) for method, arrays in result.server.items()},
        clients={
            client: {method: _tensors(arrays) for method, arrays in methods.items()}
            for client, methods in result.clients.items()
        },
        own={client: _tensors(arrays) for client, arrays in result.own.items()},
    )


def _tensors(arrays: Mapping[str, Any]) -> Tensors:
    """Copies that lie in memory as the arrays do: these are read-only, which no tensor is."""
    return {name: torch.from_numpy(array.copy(order="K")) for name, array in arrays.items()}
