"""What a store has of the requested runs: which are finished, and why the others are carried out again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedbench.kinds.registry import IN_NO_FILE
from fedbench.plugins.provenance import versions
from fedbench.tracking.store import open_store, runs_of
from fedbench.tracking.tags import RunTags

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from fedbench.plugins.run_code import RunCode

_HASHES = {"data_hash": "data changed", "weights_hash": "pretrained weights changed"}


@dataclass(frozen=True)
class Origin:
    """What the numbers of a run come from, beside its description."""

    code: RunCode
    data_hash: str
    weights_hash: str
    suite_version: int = 1


def stored_runs(uri: str, suite: str, origins: Mapping[str, Origin]) -> dict[str, tuple[str, ...]]:
    """Run id -> why the run is carried out again; nothing for one that the store has finished as it would be now.

    Of the runs that ``origins`` names those that the suite has a finished run of; of several the newest decides.
    """
    client = open_store(uri, create=False)
    return {} if client is None else stored_in(client, suite, origins)


def stored_in(
    client: MlflowClient, suite: str, origins: Mapping[str, Origin], run_id: str = ""
) -> dict[str, tuple[str, ...]]:
    """`stored_runs` of a store that is open; with ``run_id`` no other run is looked for."""
    condition = "attributes.status = 'FINISHED'" + (f" and tags.`fedbench.run_id` = '{run_id}'" if run_id else "")
    found: dict[str, tuple[str, ...]] = {}
    installed = versions()
    # the newest last: it is the one that tables show
    for _, run in sorted(runs_of(client, suite, condition), key=lambda one: int(one[1].info.start_time)):
        tags = RunTags(run.data.tags)
        if tags.run_id in origins:
            found[tags.run_id] = tuple(_differences(tags, origins[tags.run_id], installed))
    return found


def _differences(tags: RunTags, origin: Origin, installed: Mapping[str, str]) -> Iterator[str]:
    """What is not as it was when the run with these tags was made, a phrase each."""
    yield from _changed_code(tags, origin.code, installed)
    if tags.suite_version != origin.suite_version:
        yield f"suite version {tags.suite_version} -> {origin.suite_version}"
    for name, phrase in _HASHES.items():
        if tags.text(name) != getattr(origin, name):
            yield phrase


def _changed_code(tags: RunTags, code: RunCode, installed: Mapping[str, str]) -> Iterator[str]:
    if tags.harness_hash != code.harness:
        before = dict.fromkeys(installed, "none") | tags.versions
        newer = [f"{name} {before[name]} -> {now}" for name, now in installed.items() if before[name] != now]
        yield ", ".join(newer) or "code of the harness changed"
    for method in code.methods:
        if tags.methods.get(method.method) != method.hash:
            if method.plugin.endswith(IN_NO_FILE):
                yield f"whether {method.plugin} changed can't be told"
            else:
                yield f"plugin file {method.plugin} changed" if method.plugin else f"method {method.method} changed"
