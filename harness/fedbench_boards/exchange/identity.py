"""The description of a run, made again of what a result folder records of it, so that its id can be."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hyper import declared
from fedbench.core.scenario import Scenario
from fedbench.core.spec import BUDGET, RunSpec, Training, stack_names
from fedbench.kinds.registry import find_method
from fedbench_boards.exchange.folder import named
from fedbench_boards.leaderboard.results import EVALUATED

_BESIDE = ("dataset", "backbone", "method", "tune", "tuned", "seed")
_NO_SETTINGS = ("labels", "weights")
"""Of the row's settings: visibility of labels is the scenario's, weights are what a backbone's name meant."""


def spec_of(line: Mapping[str, Any], plugins: tuple[Path, ...] = ()) -> RunSpec:
    """The run of a ``line`` of results.csv, with the id that the line gives.

    FedbenchError, which names the run, where recorded settings and id do not agree.
    """
    try:
        spec = _built(line, plugins)
        if spec.run_id == line["run_id"]:
            return spec
    except (ValidationError, ValueError, KeyError) as error:
        raise FedbenchError(
            f"{named(line)}: its settings are none of this version of fedbench: {_first(error)}."
        ) from None
    unknown = _unknown(stack_names(str(line["method"])), plugins)
    hint = f"; method {unknown[0]!r} is not here, give its file with --plugin" if unknown else ""
    raise FedbenchError(f"{named(line)}: run_id {line['run_id']} is not that of its recorded settings{hint}.")


def _built(line: Mapping[str, Any], plugins: tuple[Path, ...]) -> RunSpec:
    own: dict[str, str] = dict(json.loads(line["row_settings"]))
    scenario = dict(json.loads(line["scenario_settings"])) | {"labels": own["labels"]}
    run = {name: str(line[name]) for name in _BESIDE}
    training = {name: str(line[name]) for name in (*BUDGET, *EVALUATED)}
    of_methods: dict[str, dict[str, str]] = {}
    for key, text in own.items():
        head, dot, name = key.rpartition(".")
        if head == "training":
            training[name] = text
        elif dot:
            of_methods.setdefault(head, {})[name] = text
        elif key not in _NO_SETTINGS:
            run[key] = text
    return RunSpec(
        **_fields(RunSpec, run),
        scenario=Scenario(**_fields(Scenario, scenario)),
        training=Training(**_fields(Training, training)),
        params={method: _params(method, values, plugins) for method, values in of_methods.items()},
        label=str(line["row"]).partition(" · ")[0],
        setting=str(line["setting"]),
        scale=str(line["scale"]),
        published=tuple(json.loads(line.get("published") or "[]")),
        tuning=dict(json.loads(line.get("tuning") or "{}")),
    )


def _fields(model: type[BaseModel], texts: Mapping[str, str]) -> dict[str, Any]:
    """Values of the fields of ``model``; those of no field stay texts, which the model then refuses."""
    kinds = {name: field.annotation for name, field in model.model_fields.items()}
    return {name: _value(text, kinds.get(name, str)) for name, text in texts.items()}


def _params(method: str, texts: Mapping[str, str], plugins: tuple[Path, ...]) -> dict[str, Any]:
    if _unknown((method,), plugins):  # whether a text that looks like a number is one, its types would tell
        return {name: _value(text, object) for name, text in texts.items()}
    kinds = {name: one.type for name, one in declared(find_method(method, plugins).Params).items()}
    return {name: _value(text, kinds.get(name, object)) for name, text in texts.items()}


def _value(text: str, kind: Any) -> Any:
    """The value of type ``kind`` that is recorded as ``text``, see `fedbench.tracking.tags.flat_params`."""
    checked: TypeAdapter[Any] = TypeAdapter(kind)
    for value in _meanings(text):
        try:
            checked.validate_python(value)
        except ValidationError:
            continue
        return value
    return text


def _meanings(text: str) -> Iterator[Any]:
    if text == "none":
        yield None
    with suppress(ValueError):
        yield json.loads(text)
    yield text


def _unknown(methods: Iterable[str], plugins: tuple[Path, ...]) -> list[str]:
    """Those that are not installed here, nor in a plugin file."""
    found = []
    for method in methods:
        try:
            find_method(method, plugins)
        except FedbenchError:
            found.append(method)
    return found


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error) or type(error).__name__
