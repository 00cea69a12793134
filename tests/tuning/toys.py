"""Small studies: what is written down of a row, opening its studies, and carrying them out as one command does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna

from fedbench.core.spec import RunSpec
from fedbench.runs.engines import Engine
from fedbench.runs.engines.engine import InProcess
from fedbench.runs.prepare import Settings
from fedbench.tracking.schema import store_uri
from fedbench.tracking.store import open_store
from fedbench.tuning.search import Search, TrialEvent
from fedbench.tuning.space import defaults_of, space_of
from fedbench.tuning.storage import open_storage, storage_url
from fedbench.tuning.studies import Budget, Record, counted, open_study
from fedbench.tuning.tracking import TrialTracking
from fedbench.tuning.trial import Tuned

Studied = tuple[Tuned, Record]


def budget(trials: int = 6, **given: Any) -> Budget:
    return Budget(**{"trials": trials, "seeds": (5,), "objectives": ("global_accuracy",), "pruner": "none", **given})


def recorded(row: RunSpec, spent: Budget, name: str = "toy", plugins: Sequence[Path] = (), **given: Any) -> Studied:
    space = space_of(row, plugins)
    record = Record(
        **{
            **{"name": name, "suite": "toy", "scale": "", "setting": "", "row": row.row, "title": row.title},
            **{"spec": row.model_dump(mode="json"), "space": tuple(d.as_json() for d in space), "budget": spent},
            **{"code_hash": "c", "data_hash": "d", "weights_hash": "w", "commit": "", "method_code": '[{"hash": "m"}]'},
            **given,
        }
    )
    return Tuned(row, space, record.study_name), record


def url_of(folder: Path) -> str:
    return storage_url(None, store_uri(str(folder)))


def opened(folder: Path, *studied: Studied) -> list[optuna.Study]:
    storage = open_storage(url_of(folder), create=True)
    return [open_study(storage, record, defaults_of(row.spec, row.space)) for row, record in studied]


def search(folder: Path, settings: Settings, *studied: Studied, engine: Engine | None = None) -> list[TrialEvent]:
    """The events of one command that carries out the studies, which are there."""
    events: list[TrialEvent] = []
    search_telling(events.append, folder, settings, *studied, engine=engine)
    return events


def search_telling(
    emit: Any, folder: Path, settings: Settings, *studied: Studied, engine: Engine | None = None
) -> None:
    tracking = TrialTracking(store_uri(str(folder)), "toy", print)
    rows = [row for row, _ in studied]
    Search(url_of(folder), rows, engine or InProcess(settings), tracking, emit).carry_out()


def by_place(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [(t.state, t.params, t.values, t.intermediate_values) for t in counted(study)]


def children(folder: Path) -> list[tuple[str, str]]:
    """Trial and status of the trials' MLflow runs."""
    client = open_store(store_uri(str(folder)), create=False)
    assert client is not None
    runs = client.search_runs([client.get_experiment_by_name("fedbench-tuning/toy").experiment_id])
    return sorted((r.data.tags["fedbench.trial"], r.info.status) for r in runs if "fedbench.trial" in r.data.tags)
