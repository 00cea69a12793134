"""Is a result folder in order? What follows from its numbers is looked at first, what it says of itself last.

Whoever changes a number can write the manifest anew, but then the board is not that of the runs. A number that is
changed wherever it stands is found by repeating the run alone, see `fedbench_boards.exchange.verifying`.

A run that diverged is an outcome of its values, which a board shows and results.csv has no line of. Whatever else ended
a run, such as too little memory, says nothing of its values: a folder with such a run is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, TypeAdapter, ValidationError

from fedbench.core.errors import DIVERGED, FedbenchError
from fedbench.core.method.hyper import declared
from fedbench.core.scenario import Scenario
from fedbench.core.spec import BUDGET, RunSpec, Training, stack_names
from fedbench.core.wording import counted
from fedbench.kinds.registry import find_method
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import Suite, load_suite, suite_names
from fedbench.tracking.schema import FINAL
from fedbench_boards.exchange.folder import ResultFolder, digest, named, read_folder
from fedbench_boards.exchange.recomputed import check_board
from fedbench_boards.leaderboard.results import EVALUATED, StoredResults
from fedbench_boards.leaderboard.rows import PROTOCOL, ROW

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


def diverged_runs(folder: ResultFolder) -> pd.DataFrame:
    """A line each, as `fedbench_boards.leaderboard.results.StoredResults.failed` has them.

    What such a run does not record is taken from its row's finished runs.

    FedbenchError, which names the row, where a run failed otherwise or was run with other code, where none of its row
    has finished, and where a seed has both finished and failed.
    """
    results = folder.results
    metrics = [name for name in results if str(name).startswith(FINAL)]
    lines = [line for row in folder.board.to_dict("records") for line in _of_row(row, results)]
    found = pd.DataFrame(lines).astype(results.dtypes) if lines else results.iloc[:0].assign(failure="")
    return found.drop(columns=metrics)


def _of_row(row: dict[Any, Any], results: pd.DataFrame) -> Iterator[dict[Any, Any]]:
    failures = json.loads(row["failures"] or "[]")
    if not failures:
        return
    finished = results[results["run_id"].isin(json.loads(row["runs"]).values())]
    for one in failures:
        title = f"{named(row)}: seed {one['seed']}"
        if one["seed"] in set(finished["seed"]):
            raise FedbenchError(f"{title} has finished and failed; keep one of the two runs.")
        if not one["reason"].startswith(DIVERGED):
            raise FedbenchError(f"{title} failed: {one['reason'].removesuffix('.')}; run it again.")
        if one["code"]:
            raise FedbenchError(f"{title} diverged with other code ({one['code']}) than the row's; run it again.")
        if finished.empty:
            raise FedbenchError(f"{title} diverged, as all of its row; there is no run to tell its values by.")
        of_run = {name: one[name] for name in ("seed", "run_id", "mlflow_id")}
        yield finished.iloc[0].to_dict() | of_run | {"failure": one["reason"]}


_DIRTY = "+dirty"


@dataclass(frozen=True)
class Checked:
    """A folder that is in order."""

    folder: ResultFolder
    suite: Suite
    specs: tuple[RunSpec, ...]
    """Of its runs, in the order of results.csv, and then of those that diverged."""
    diverged: pd.DataFrame
    """See `diverged_runs`."""
    notes: tuple[str, ...] = ()
    """What is no reason to refuse it."""

    @property
    def headlines(self) -> frozenset[str]:
        """The metrics that its tables are ranked by."""
        return frozenset(map(str, self.folder.board["headline"]))

    @property
    def summary(self) -> str:
        """What it holds, in one line."""
        results, lost = self.folder.results, len(self.diverged)
        rows = len(results.drop_duplicates([*PROTOCOL, *ROW]))
        diverged = f" ({counted(lost, 'further one')} diverged)" if lost else ""
        return (
            f"{counted(len(results), 'run')}{diverged} of {counted(rows, 'row')}, suite {self.suite.name} version "
            f"{self.suite.version}, {self.folder.manifest.licence}"
        )


def check_folder(given: Path, suite: str | None = None, plugins: tuple[Path, ...] = ()) -> Checked:
    """The folder ``given``, in order; FedbenchError names the row and the reason in one sentence where it is not.

    ``suite`` is the name or file of its suite, by default the registered one of the name that the runs recorded.
    """
    try:
        return _checked(given, suite, plugins)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        # whatever else somebody may have written there
        why = " ".join(str(error).split())
        raise FedbenchError(f"{str(given)!r} can't be read as a result folder: {why}.") from None


def _checked(given: Path, suite: str | None, plugins: tuple[Path, ...]) -> Checked:
    folder = read_folder(given)
    read = _suite(folder, suite)
    _check_suite(folder, read)
    _check_code(folder)
    diverged = diverged_runs(folder)
    every = pd.concat([folder.results, diverged]) if len(diverged) else folder.results
    specs = _check_ids(every, plugins)
    check_alike(every, read)
    check_board(folder, read, StoredResults(folder.results, diverged))
    _check_manifest(folder, read)
    return Checked(folder, read, specs, diverged, (*_notes(folder.results, read), *_beside_suite(specs, read, plugins)))


def _suite(folder: ResultFolder, given: str | None) -> Suite:
    """The suite of the runs, which is all of theirs."""
    names = sorted(folder.results["suite"].unique())
    if len(names) > 1:
        raise FedbenchError(f"the runs are of {len(names)} suites ({', '.join(names)}); submit a folder for each.")
    if given is None and names[0] not in suite_names():
        raise FedbenchError(f"suite {names[0]!r} is none that is installed here; give its file with --suite.")
    suite = load_suite(given or names[0])
    if suite.name != names[0]:
        raise FedbenchError(f"the runs are of suite {names[0]!r}, not of {suite.name!r}; leave --suite out.")
    return suite


def _check_suite(folder: ResultFolder, suite: Suite) -> None:
    for line in _lines(folder.results):
        if line["suite_version"] != suite.version:
            raise FedbenchError(
                f"{named(line)}: it is of version {line['suite_version']} of suite {suite.name!r}, which is at version "
                f"{suite.version} here."
            )


def _check_code(folder: ResultFolder) -> None:
    for line in _lines(folder.results):
        for name in ("code_hash", "data_hash"):
            if not line[name]:
                raise FedbenchError(f"{named(line)}: no {name} is recorded, so what made it is not known.")


def check_alike(results: pd.DataFrame, suite: Suite) -> None:
    """FedbenchError, which names the run or row, where rows of ``results`` lack seeds or have other data."""
    _check_seeds(results, suite)
    _check_data(results)


def _check_seeds(results: pd.DataFrame, suite: Suite) -> None:
    """A row has the suite's seeds that others have, and the first of the further ones, none skipped, each once.

    Others are those of its scale, backbone and ``tune``: a network from scratch costs more than a head.
    """
    for row, runs, others in _beside_others(results):
        there, own = set(runs["seed"]), suite.seeds_of(suite.scales.get(str(runs["scale"].iloc[0])))
        # whoever skips a seed may have picked the others
        last = max(there.difference(own), default=-1)
        missing = [seed for seed in others if seed not in there and (seed in own or seed < last)]
        if missing:
            which = ", ".join(map(str, missing))
            raise FedbenchError(
                f"{row}: seed {which} is missing, which other rows of its backbone and tune have; a row may stop after "
                "the suite's own seeds, but skips none."
            )
        twice = runs[runs.duplicated(["seed"])]
        if len(twice):
            raise FedbenchError(f"{row}: seed {twice['seed'].iloc[0]} has two runs; keep one.")


def _beside_others(results: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, list[int]]]:
    """Every row by name, its runs, and the seeds of all rows of its scale, backbone and ``tune``."""
    for _, alike in results.groupby(["scale", "backbone", "tune"], sort=False, dropna=False):
        seeds = sorted(set(alike["seed"]))
        for _, runs in alike.groupby(["setting", *PROTOCOL, *ROW], sort=False, dropna=False):
            yield named(runs.iloc[0][["setting", "row"]].to_dict()), runs, seeds


def _check_data(results: pd.DataFrame) -> None:
    """The files are those of the setting, and what becomes of them those of the size that a network takes."""
    teachers = results["row_settings"].map(lambda text: json.loads(text).get("teacher", ""))
    frame = results.assign(teacher=teachers)
    for column, alike in (("files_hash", []), ("data_hash", ["backbone", "teacher"])):
        for _, runs in frame.groupby(["setting", "dataset", *alike], sort=False):
            counts = runs[column].value_counts()
            if len(counts) > 1:
                usual = counts.index[0]
                odd = runs[runs[column] != usual].iloc[0]
                raise FedbenchError(
                    f"{named(odd.to_dict())}: its data are not those of the other runs of {odd['dataset']} ({column} "
                    f"{str(odd[column])[:8]}, theirs {str(usual)[:8]})."
                )


def _check_ids(results: pd.DataFrame, plugins: tuple[Path, ...]) -> tuple[RunSpec, ...]:
    lines = _lines(results)
    specs = tuple(spec_of(line, plugins) for line in lines)
    for line, spec in zip(lines, specs, strict=True):
        if spec.row != line["row"]:
            raise FedbenchError(f"{named(line)}: by its settings the row is called {spec.row!r}.")
    return specs


def _check_manifest(folder: ResultFolder, suite: Suite) -> None:
    manifest = folder.manifest
    if not manifest.licence.strip():
        raise FedbenchError("manifest.json names no licence of the results; write the folder with --licence.")
    missing = [name for name, value in manifest.environment.model_dump().items() if not value]
    if missing or not manifest.fedbench:
        raise FedbenchError(f"manifest.json does not say on which {missing[0] if missing else 'fedbench'} it was made.")
    said = (manifest.suite.name, manifest.suite.version)
    if said != (suite.name, suite.version):
        raise FedbenchError(f"manifest.json is of suite {said[0]!r} version {said[1]}, the runs are of {suite.name!r}.")
    for name in ("results.csv", "leaderboard.csv", "leaderboard.md", "index.html"):
        if name not in manifest.files:
            raise FedbenchError(f"manifest.json has no digest of {name}.")
    for name, recorded in manifest.files.items():
        file = folder.path / name
        # a name that leads elsewhere is no file of the folder
        if Path(name).name != name or not file.is_file():
            raise FedbenchError(f"manifest.json has the digest of {name!r}, which the folder has not.")
        if digest(file) != recorded:
            raise FedbenchError(
                f"{name} is not the file that was written: its digest is another than in manifest.json."
            )


def _beside_suite(specs: Sequence[RunSpec], suite: Suite, plugins: tuple[Path, ...]) -> Iterator[str]:
    """What the suite has and the folder lacks, and the other way round: a part of it, further rows or values."""
    seeds = tuple(sorted({spec.seed for spec in specs}))
    scales = sorted({spec.scale for spec in specs})
    own = {
        spec.run_id: spec
        for scale in scales
        for spec in expand(suite, Overrides(seeds=seeds, scale=scale if suite.scales else "", plugin_files=plugins))
    }
    added = {(spec.setting, spec.row) for spec in specs if spec.run_id not in own}
    if added:
        setting, row = min(added)
        yield f"{counted(len(added), 'row')} not as in the suite, such as {named({'setting': setting, 'row': row})}"
    found = {spec.run_id for spec in specs}
    there = {(own[one].setting, own[one].row) for one in found & own.keys()}
    lacking = {(spec.setting, spec.row) for spec in own.values()} - there
    if lacking:
        setting, row = min(lacking)
        yield f"{counted(len(lacking), 'row')} of the suite not run, such as {named({'setting': setting, 'row': row})}"
    found_seeds: dict[tuple[str, str, str], set[int]] = {}
    for spec in specs:
        found_seeds.setdefault((spec.scale, spec.backbone, spec.tune), set()).add(spec.seed)
    for (scale, backbone, tune), seeds_there in sorted(found_seeds.items()):
        few = set(suite.seeds_of(suite.scales.get(scale))) - seeds_there
        if few:
            which = backbone if tune == "auto" else f"{backbone}, tune={tune},"
            yield f"rows on {which} are without seed {', '.join(map(str, sorted(few)))} of the suite"


def _notes(results: pd.DataFrame, suite: Suite) -> Iterator[str]:
    # a board grows by a row without running the others again: their ids say what they are
    earlier = int((results["suite_hash"] != suite.text_hash).sum())
    if earlier:
        yield f"{counted(earlier, 'run')} made with another text of the suite"
    for is_odd, what in _ODD:
        count = int(results["commit"].map(is_odd).sum())
        if count:
            yield f"{counted(count, 'run')} {what}"
    seeds = [(row, runs["seed"].nunique(), len(others)) for row, runs, others in _beside_others(results)]
    fewer = [(row, has, of) for row, has, of in seeds if has < of]
    if fewer:
        row, has, of = fewer[0]
        rows = counted(len(fewer), "row")
        yield f"{rows} with fewer seeds than others of their backbone, such as {row} with {has} of {of}"


_ODD: tuple[tuple[Callable[[str], bool], str], ...] = (
    (lambda commit: commit.endswith(_DIRTY), "made from a work tree with changes (+dirty)"),
    (lambda commit: not commit, "made without a git commit"),
)
"""Commits that do not say which code it was, though its hash does."""


def _lines(results: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in line.items()} for line in results.to_dict("records")]
