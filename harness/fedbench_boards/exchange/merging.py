"""Runs of several stores in one store, and result folders of one suite in one folder: every run once.

It is refused where two of them tell different numbers of a run. Folders have no curves, so rounds to a target and what
is drawn of single rounds are those of stores alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.core.errors import FedbenchError
from fedbench.core.files import usable_folder
from fedbench.tracking.databases import shown
from fedbench.tracking.recording import PARENT, begin_run, log
from fedbench.tracking.schema import (
    EXPERIMENT,
    FINAL,
    INVOCATION,
    KIND,
    RECORD,
    ROUNDS,
    SEAL,
    check_rounds,
    database_of,
    local_artifacts,
    require_seal,
    store_uri,
    write_record,
)
from fedbench.tracking.store import experiment_of, open_store, put_files, run_folders, runs_of
from fedbench.tracking.tags import RunTags
from fedbench_boards.exchange.checks import Checked, check_alike
from fedbench_boards.exchange.folder import Environment, differing, finals, named, write_manifest
from fedbench_boards.leaderboard.formats import write
from fedbench_boards.leaderboard.page import write_page
from fedbench_boards.leaderboard.reading import ReadResults, board_of_runs, made_by
from fedbench_boards.leaderboard.results import StoredResults

# isort: split
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

_ENDED = ("FINISHED", "FAILED")
Key = tuple[str, str]
"""Id of a run, hash of its code."""


@dataclass
class Merged:
    """Counts of a store's runs by what became of them."""

    source: str
    copied: int = 0
    skipped: int = 0
    """Runs that the target has already."""
    unfinished: int = 0
    """Runs that have not ended, which are left where they are."""


@dataclass(frozen=True)
class _OpenStore:
    uri: str
    client: MlflowClient
    runs: list[Run]


def merge(sources: Sequence[str], into: str, tell: Callable[[str], None] = lambda _: None) -> list[Merged]:
    """Copy the ended runs of the stores ``sources`` into the store ``into``, with curves, files and commands.

    A run of the same id and code is copied once; ``tell`` hears of every run that is. FedbenchError, before anything is
    copied, where two of them have different numbers, and for a store that does not exist.
    """
    opened = [_opened(source) for source in sources]
    uri = store_uri(into)
    client = open_store(uri, create=True)
    assert client is not None
    ended = [run for _, run in runs_of(client, None) if run.info.status in _ENDED]
    target = _OpenStore(uri, client, ended)
    _refuse_clashes([target, *opened])
    # of several runs of one key the status of one that finished
    known = {_key(run): run.info.status for run in sorted(ended, key=lambda run: run.info.status == "FINISHED")}
    return [_copy_all(source, target, known, tell) for source in opened]


def _opened(given: str) -> _OpenStore:
    uri = store_uri(given, to_write=False)
    client = open_store(uri, create=False)
    if client is None:
        raise FedbenchError(f"there is no store at {shown(uri)}; give a folder of `fedbench run --store`, or a URI.")
    runs = [run for _, run in runs_of(client, None) if RunTags(run.data.tags).run_id]
    for run in runs:
        require_seal(run)
    return _OpenStore(uri, client, runs)


def _key(run: Run) -> Key:
    tags = RunTags(run.data.tags)
    return tags.run_id, tags.text("code_hash")


def _refuse_clashes(stores: Sequence[_OpenStore]) -> None:
    seen: dict[Key, Run] = {}
    for run in (run for store in stores for run in store.runs if run.info.status == "FINISHED"):
        other = seen.setdefault(_key(run), run)
        metric = next(differing(finals(other.data.metrics), finals(run.data.metrics)), None)
        if metric is not None:
            tags = RunTags(run.data.tags)
            first, second = (each.data.metrics.get(metric) for each in (other, run))
            raise FedbenchError(
                f"{run.info.run_name} (run {tags.run_id}): two stores have it by the same code with different numbers, "
                f"{metric.removeprefix(FINAL)} {first!r} and {second!r}; delete the wrong one, in the page of "
                "`fedbench ui`."
            )


def _copy_all(source: _OpenStore, target: _OpenStore, known: dict[Key, str], tell: Callable[[str], None]) -> Merged:
    merged = Merged(shown(source.uri))
    parents: dict[str, str] = {}
    for run in sorted(source.runs, key=lambda run: int(run.info.start_time)):
        if run.info.status not in _ENDED:
            merged.unfinished += 1
        elif known.get(_key(run)) in ("FINISHED", run.info.status):
            merged.skipped += 1
        else:
            _copy(source, run, target, _parent(source, run, target, parents))
            known[_key(run)] = run.info.status
            merged.copied += 1
            tell(str(run.info.run_name))
    return merged


def _parent(source: _OpenStore, run: Run, target: _OpenStore, parents: dict[str, str]) -> str:
    """The id of the command that made ``run`` in the target, copied with its first run; "" where there is none."""
    before = run.data.tags.get(PARENT, "")
    if before and before not in parents:
        try:
            parents[before] = _copy(source, source.client.get_run(before), target, "")
        except MlflowException:  # it was purged
            parents[before] = ""
    return parents.get(before, "")


def _copy(source: _OpenStore, run: Run, store: _OpenStore, parent: str) -> str:
    """Copy a run into ``store``; MLflow's id of the copy. The seal holds for it, since it is over what is copied."""
    target, uri = store.client, store.uri
    name = source.client.get_experiment(run.info.experiment_id).name.removeprefix(EXPERIMENT)
    tags = {key: value for key, value in run.data.tags.items() if key != PARENT}
    # whoever reads meanwhile sees a run that has not ended
    seal = {key: tags.pop(key) for key in list(tags) if key == SEAL}
    experiment = experiment_of(target, uri, name)
    made = begin_run(target, experiment, run.info.run_name, tags, parent, run.info.start_time)
    try:
        histories = (source.client.get_metric_history(run.info.run_id, metric) for metric in run.data.metrics)
        log(target, made, [point for history in histories for point in history], run.data.params)
        if run.inputs is not None and run.inputs.dataset_inputs:
            target.log_inputs(made, datasets=run.inputs.dataset_inputs)
        folders = run_folders(target, uri, experiment)
        _copy_files(source, run, target, folders, made)
        log(target, made, tags=seal)
        target.set_terminated(made, run.info.status, run.info.end_time)
        _write_record(target, uri, made, folders)
    except BaseException:
        target.delete_run(made)
        raise
    return made


def _write_record(target: MlflowClient, uri: str, made: str, folders: Path | None) -> None:
    """The record of a copy, in place of the one that was copied, which is of the other run."""
    if folders is not None:
        write_record(folders / made / "artifacts", target.get_run(made))
    elif database_of(uri) is None:
        with tempfile.TemporaryDirectory() as temporary:
            write_record(Path(temporary), target.get_run(made))
            target.log_artifact(made, str(Path(temporary) / RECORD))


def _copy_files(source: _OpenStore, run: Run, target: MlflowClient, folders: Path | None, made: str) -> None:
    if database_of(source.uri) is not None:
        try:
            folder = local_artifacts(source.uri, run)
        except FedbenchError:
            if run.info.status == "FINISHED" and run.data.tags.get(KIND) != INVOCATION:
                raise
            return  # a command, or a run that failed, may have none
        if folder is not None:
            check_rounds(folder / ROUNDS, run.data.tags)
            put_files(target, folders, made, folder)
            return
    with tempfile.TemporaryDirectory() as temporary:
        downloaded = source.client.download_artifacts(run.info.run_id, "", temporary)
        check_rounds(Path(downloaded) / ROUNDS, run.data.tags)
        put_files(target, folders, made, Path(downloaded))


def join(folders: Sequence[Checked], into: Path) -> int:
    """Write the board of all runs of ``folders`` into the folder ``into``; how many runs it has.

    FedbenchError where suite, licence or way of reading differ, where two folders have a run with other numbers or an
    other end, and where rows would lack seeds or have other data than the others.
    """
    into, first = usable_folder(into, "--into"), folders[0]
    for other in folders[1:]:
        _refuse_others(first, other)
    suite, given = first.suite, first.folder.manifest.options
    results = _joined(folders)
    stored = StoredResults(results, _diverged(folders, results))
    check_alike(pd.concat([results, stored.failed]), suite)
    board = board_of_runs(suite, given, stored)
    read = ReadResults(suite, stored, results, pd.DataFrame(), board)
    command = made_by(stored, replace(given, suite=suite.name))
    write(results, board, into, command)
    write_page(into / "index.html", read, {}, command)
    write_manifest(into, read, given, first.folder.manifest.licence, _environment(folders))
    return len(results)


def _refuse_others(first: Checked, other: Checked) -> None:
    one, two = first.folder.manifest, other.folder.manifest
    for what, values in {
        "suite": (first.suite.name, other.suite.name),
        "licence": (one.licence, two.licence),
        "way of reading": (one.options.command, two.options.command),
    }.items():
        if values[0] != values[1]:
            raise FedbenchError(
                f"the {what} of {str(first.folder.path)!r} is {values[0]}, that of {str(other.folder.path)!r} "
                f"{values[1]}; merge folders that have it in common."
            )


def _joined(folders: Sequence[Checked]) -> pd.DataFrame:
    """The runs of all folders, oldest first; of a run that several have, the first one's line."""
    kept: dict[str, Mapping[Any, Any]] = {}
    for folder in folders:
        for line in folder.folder.results.to_dict("records"):
            before = kept.setdefault(str(line["run_id"]), line)
            # a folder has columns for the metrics of its own runs
            both = before.keys() & line.keys()
            metric = next(differing(*(finals({name: each[name] for name in both}) for each in (before, line))), None)
            if metric is not None:
                raise FedbenchError(
                    f"{named(line)}: two folders have it with different numbers, {metric.removeprefix(FINAL)} "
                    f"{before[metric]!r} and {line[metric]!r}; fedbench verify tells which comes out again."
                )
    frame = pd.DataFrame(list(kept.values())).sort_values("started", kind="stable", ignore_index=True)
    # a text that one of the folders has no column of
    lacking = [str(name) for name in frame if not str(name).startswith(FINAL) and frame[name].isna().any()]
    return frame.assign(**{name: frame[name].fillna("") for name in lacking})


def _diverged(folders: Sequence[Checked], results: pd.DataFrame) -> pd.DataFrame:
    """The runs that diverged, each once. FedbenchError for one that ended with a number in another folder."""
    every = pd.concat([folder.diverged for folder in folders], ignore_index=True).drop_duplicates("run_id")
    both = every[every["run_id"].isin(results["run_id"])]
    if len(both):
        raise FedbenchError(
            f"{named(both.iloc[0].to_dict())}: it diverged in one folder and ended with a number in another; fedbench "
            "verify tells which comes out again."
        )
    return every


def _environment(folders: Sequence[Checked]) -> Environment:
    """The environment of all folders; where they differ it names all of them, and no machine equals it."""
    each = [folder.folder.manifest.environment.model_dump() for folder in folders]
    return Environment(**{name: ", ".join(dict.fromkeys(made[name] for made in each)) for name in each[0]})
