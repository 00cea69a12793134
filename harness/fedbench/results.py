"""What the tracking store holds, as one tidy table: a line a finished run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedbench.errors import FedbenchError, unknown_name
from fedbench.scenarios.scenario import Scenario
from fedbench.spec import OPTIMISER_KEYS, Training
from fedbench.store import EXPERIMENT, FINAL, open_store, runs_of
from fedbench.suite import suite_names

if TYPE_CHECKING:
    from mlflow.entities import Run

_NOT_BUDGET = OPTIMISER_KEYS | {"eval_every", "finetune_epochs"}
BUDGET = tuple(name for name in Training.model_fields if name not in _NOT_BUDGET)
"""Fields of `Training` in which runs of one table must agree."""
_ELSEWHERE = ("dataset", "method", "backbone", "tune", "seed", "training.eval_every")
"""Parameters with a column of their own, or without influence on the final model."""
_COUNTS = ("num_clients", "cohort_size", "num_train", "num_test", "trainable_parameters")


def load_results(uri: str, suite: str | None = None) -> pd.DataFrame:
    """The finished runs of ``suite`` (None: of all suites), one line each, oldest first.

    Metrics are the columns ``final/...``. Of several runs with one run id, whatever code made them, the newest counts.
    Raises FedbenchError where there is nothing to show, with the command that fills the store.
    """
    client = open_store(uri, create=False)
    if client is None:
        raise FedbenchError(f"there is no store at {uri}; name yours with --store.{_remedy(suite)}")
    lines, unfinished = [], 0
    for name, run in runs_of(client, suite):
        if run.info.status == "FINISHED":
            lines.append(_line(name, run))
        else:
            unfinished += 1
    if not lines:
        known = sorted(e.name.removeprefix(EXPERIMENT) for e in client.search_experiments() if _is_ours(e.name))
        if suite is not None and known and suite not in known:
            raise unknown_name("suite in this store", suite, known, _remedy(suite).strip())
        held = f"unfinished runs ({unfinished})" if unfinished else "no runs"
        of = f" of the suite {suite!r}" if suite is not None else ""
        raise FedbenchError(f"the store {uri} has {held}{of} and no finished one.{_remedy(suite)}")
    frame = pd.DataFrame(lines).sort_values("started", kind="stable")
    return frame.drop_duplicates("run_id", keep="last").reset_index(drop=True)


def _remedy(suite: str | None) -> str:
    """What to run to fill the store; "" for a name that no shipped suite has."""
    wanted = suite or "longtail"
    return f" Run `fedbench run --suite {wanted}` to fill it." if wanted in suite_names() else ""


def scenario_summary(scenario: Mapping[str, str]) -> str:
    """A scenario's parameters in a few words, as a caption says them; the number of clients is not among them."""
    fields = Scenario.model_fields
    value = {name: field.get_default() for name, field in fields.items()} | dict(scenario)
    partition = str(value["partition"])
    shown = {"imbalance", "partition", "participation", "dropout", "holdout_domain", "labels", "clients"}
    # a partition's own number; the fields of the others are without effect
    own = {
        "dirichlet": "dirichlet_alpha",
        "shards": "shards_per_client",
        "classes_per_client": "classes_per_client",
        "domain": "clients_per_domain",
    }
    words = []
    if value["imbalance"] == "exponential":
        words.append(f"imbalance {value['imbalance_factor']}")
    elif value["imbalance"] != "none":
        words.append(f"imbalance {value['imbalance']}")
    words.append(f"{partition}({value[own[partition]]})" if partition in own else partition)
    if value["holdout_domain"] not in (None, "none"):
        words.append(f"without {value['holdout_domain']}")
    words.append(f"{100 * float(value['participation']):g} % participating")
    if value["labels"] != "visible":
        words.append("labels hidden")
    if float(value["dropout"]):
        words.append(f"{100 * float(value['dropout']):g} % dropping out")
    without_effect = shown | set(own.values()) | {"imbalance_factor"}
    for name, field in fields.items():
        if name not in without_effect and not _same(value[name], field.get_default()):
            words.append(f"{name}={value[name]}")
    return ", ".join(words)


def _line(suite: str, run: Run) -> dict[str, Any]:
    tags, params = run.data.tags, run.data.params
    scenario = {key.removeprefix("scenario."): v for key, v in params.items() if key.startswith("scenario.")}
    # methods with and without labels meet in one table, as in the papers; the row's name and settings tell
    labels = scenario.pop("labels", "visible")
    budget = {name: params.get(f"training.{name}", "") for name in BUDGET}
    apart = {f"training.{name}" for name in BUDGET} | set(_ELSEWHERE)
    settings = {k: v for k, v in params.items() if k not in apart and not k.startswith("scenario.")}
    # other weights under the same backbone's name are another row
    settings["labels"] = labels
    settings["weights"] = tags.get("fedbench.weights_hash", "")[:8]
    return {
        "suite": suite,
        "row": tags.get("fedbench.row", ""),
        "setting": tags.get("fedbench.setting", ""),
        **{name: params.get(name, "") for name in ("method", "backbone", "tune", "dataset")},
        "scenario": scenario_summary(scenario),
        "seed": int(params["seed"]),
        **budget,
        "run_id": tags.get("fedbench.run_id", ""),
        "mlflow_id": run.info.run_id,
        "scale": tags.get("fedbench.scale", ""),
        "tuned": params.get("tuned", ""),
        "tuning": tags.get("fedbench.tuning", "{}"),
        **{name: tags.get(f"fedbench.{name}", "") for name in ("commit", "code_hash", "data_hash", "weights_hash")},
        **{name: int(tags.get(f"fedbench.{name}", 0)) for name in _COUNTS},
        "started": pd.to_datetime(run.info.start_time, unit="ms", utc=True),
        "scenario_settings": json.dumps(scenario, sort_keys=True),
        "published": tags.get("fedbench.published", "[]"),
        "row_settings": json.dumps(settings, sort_keys=True),
        **{key: v for key, v in run.data.metrics.items() if key.startswith(FINAL)},
    }


def _same(given: object, default: object) -> bool:
    return str(given).lower() == str("none" if default is None else default).lower()


def _is_ours(experiment: str) -> bool:
    return experiment.startswith(EXPERIMENT)
