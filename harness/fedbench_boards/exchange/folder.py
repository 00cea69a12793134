"""A result folder: its runs, its board, and its manifest, which says what made it.

A run that diverged is an outcome of its values, which a board shows and its runs have no line of. Whatever else ended
a run, such as too little memory, says nothing of its values: a folder with such a run is refused.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import platform
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fedbench.core.errors import DIVERGED, FedbenchError
from fedbench.core.files import expanded, read_bytes, replacing, spreadsheet_text
from fedbench.core.method.hyper import declared
from fedbench.core.scenario import Scenario
from fedbench.core.spec import BUDGET, RunSpec, Training, stack_names
from fedbench.core.version import __version__
from fedbench.kinds.registry import find_method
from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard.reading import ReadingOptions, ReadResults
from fedbench_boards.leaderboard.results import EVALUATED

_TIMINGS = "seconds"
"""Part of the names of metrics that describe how fast a machine was."""


def finals(values: Mapping[Any, Any]) -> dict[str, float]:
    """The final metrics among ``values`` by their whole names, timings aside."""
    return {
        str(name): value for name, value in values.items() if str(name).startswith(FINAL) and _TIMINGS not in str(name)
    }


def differing(first: Mapping[str, float], other: Mapping[str, float]) -> Iterator[str]:
    """The metrics, in order, whose values differ, or that only one of them has; NaN equals NaN."""
    for name in sorted({*first, *other}):
        values = first.get(name), other.get(name)
        if values[0] != values[1] and not all(value is not None and value != value for value in values):
            yield name


MANIFEST = "manifest.json"
RESULTS, BOARD = "results.csv.gz", "leaderboard.csv.gz"
FILES = (RESULTS, BOARD, "leaderboard.md", "index.html")
"""The files that a leaderboard is written as."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Environment(_Record):
    """The environment in which the folder was written. Runs on equal ones give equal numbers, to the last bit."""

    platform: str = ""
    """System, processor and the instructions that torch uses of it."""
    python: str = ""
    torch: str = ""


class SuiteNamed(_Record):
    """The suite of the results; of several, or of runs without a suite file, nothing is said."""

    name: str = ""
    version: int = 1


class Manifest(_Record):
    """The content of manifest.json."""

    fedbench: str = ""
    """The version that wrote the folder."""
    suite: SuiteNamed = SuiteNamed()
    licence: str = ""
    environment: Environment = Environment()
    reading: dict[str, Any] = Field(default_factory=dict)
    """Options of `fedbench leaderboard` that were given, see `ReadingOptions`."""
    files: dict[str, str] = Field(default_factory=dict)
    """Name -> sha256."""

    @property
    def options(self) -> ReadingOptions:
        """The options with which the results were read."""
        known = {name: value for name, value in self.reading.items() if name in ReadingOptions.__dataclass_fields__}
        return ReadingOptions(**{**known, "columns": tuple(known.get("columns", ()))})


def environment_here() -> Environment:
    """The environment of this machine."""
    import torch

    # the same system on a processor with other vector instructions sums in another order
    of_cpu = torch.backends.cpu.get_cpu_capability()
    system = f"{platform.system()} {platform.machine()} {of_cpu}"
    return Environment(platform=system, python=platform.python_version(), torch=torch.__version__)


def write_manifest(
    folder: Path, read: ReadResults, given: ReadingOptions, licence: str, environment: Environment | None = None
) -> None:
    """Write manifest.json about the leaderboard that was written into ``folder``; FedbenchError where it can't be.

    ``environment`` is by default this machine's.
    """
    suites = set(read.results["suite"]) if len(read.results) else set()
    named = (
        SuiteNamed(name=read.suite.name, version=read.suite.version) if suites == {read.suite.name} else SuiteNamed()
    )
    # the suite's file has a place on this machine, its name is above
    options = {name: value for name, value in asdict(given).items() if value not in (None, ()) and name != "suite"}
    made = Manifest(
        fedbench=__version__,
        suite=named,
        licence=licence.strip(),
        environment=environment or environment_here(),
        reading=options,
        files=digests(folder, FILES),
    )
    _write(folder, made)


def _write(folder: Path, manifest: Manifest) -> None:
    with replacing(folder / MANIFEST, "manifest", "choose another --output") as temporary:
        temporary.write_text(json.dumps(manifest.model_dump(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def digests(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Name -> sha256 of those of the files ``names`` that ``folder`` has."""
    return {name: digest(folder / name) for name in names if (folder / name).is_file()}


def digest(file: Path) -> str:
    """The sha256 of the file as hexadecimal digits."""
    return hashlib.sha256(read_bytes(file)).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of ``folder``; FedbenchError where it has none, or one that can't be read."""
    file = folder / MANIFEST
    try:
        content: Mapping[str, Any] = json.loads(read_bytes(file))
        return Manifest.model_validate(content)
    except FileNotFoundError:
        raise FedbenchError(
            f"{str(folder)!r} has no {MANIFEST}; write it with `fedbench leaderboard --suite NAME --output FOLDER`."
        ) from None
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise FedbenchError(f"{str(file)!r} is no manifest: {where}: {error.errors()[0]['msg']}.") from None
    except (OSError, ValueError) as error:
        raise FedbenchError(f"{str(file)!r} can't be read: {error}.") from None


def table_file(folder: Path, name: str) -> Path:
    """The file of ``folder`` that has the table ``name``, compressed or, where only that is there, plain."""
    plain = folder / name.removesuffix(".gz")
    return plain if plain.is_file() and not (folder / name).is_file() else folder / name


_WHOLE = ("seed", "num_clients", "cohort_size", "num_train", "num_test", "trainable_parameters", "suite_version")
_OF_RUN = (
    *("suite", "row", "setting", "scale", "method", "backbone", "tune", "dataset", "seed", "rounds", "run_id", "tuned"),
    *("commit", "code_hash", "data_hash", "files_hash", "weights_hash", "suite_hash", "suite_version", "harness_hash"),
    *("scenario_settings", "row_settings", "method_code", "started", "untrained", "made_by", "final/global_accuracy"),
)
_OF_BOARD = ("block", "caption", "rank", "row", "setting", "headline", "seeds", "runs", "failures", "delta_mean")


@dataclass(frozen=True)
class ResultFolder:
    """A folder that `fedbench leaderboard --output` wrote."""

    path: Path
    manifest: Manifest

    @cached_property
    def results(self) -> pd.DataFrame:
        """A line a run, as `fedbench_boards.leaderboard.results.load_results` has them, numbers to the last bit."""
        frame = texts(table_file(self.path, RESULTS), _OF_RUN)
        if frame.empty:
            raise FedbenchError(f"{RESULTS} of {str(self.path)!r} has no run.")
        try:
            for name in frame:
                if name in _WHOLE:
                    frame[name] = frame[name].map(int)
                elif str(name).startswith(FINAL):
                    frame[name] = [float(text or "nan") for text in frame[name]]
            frame["started"] = pd.to_datetime(frame["started"], utc=True, format="ISO8601")
        except ValueError as error:
            raise FedbenchError(f"{RESULTS} of {str(self.path)!r}, column {name}: {error}.") from None
        return frame.assign(untrained=frame["untrained"] == "True")

    @cached_property
    def board(self) -> pd.DataFrame:
        """A line a row of a table, all of them texts."""
        return texts(table_file(self.path, BOARD), _OF_BOARD)


def read_folder(given: Path) -> ResultFolder:
    """The folder; FedbenchError where one of its files or columns is missing."""
    path = expanded(given, "FOLDER")
    if not path.is_dir():
        raise FedbenchError(f"{str(given)!r} is no folder; give one that `fedbench leaderboard --output` wrote.")
    for name in (*FILES, MANIFEST):
        if not table_file(path, name).is_file():
            raise FedbenchError(
                f"{str(given)!r} has no {name}; write it with `fedbench leaderboard --suite NAME --output FOLDER`."
            )
    return ResultFolder(path, read_manifest(path))


def compress_tables(folder: ResultFolder) -> bool:
    """Compress the tables of a folder that has them plain alone, and say so in its manifest; whether there were any."""
    plain = [table_file(folder.path, name) for name in (RESULTS, BOARD) if not (folder.path / name).is_file()]
    for file in plain:
        with replacing(file.with_suffix(".csv.gz"), "table", "copy the folder elsewhere") as temporary:
            temporary.write_bytes(gzip.compress(read_bytes(file), mtime=0))
    if plain:
        _write(folder.path, folder.manifest.model_copy(update={"files": digests(folder.path, FILES)}))
    for file in plain:
        file.unlink()
    return bool(plain)


def is_result_folder(place: str) -> bool:
    """Whether results were written to ``place``, and it is no store besides."""
    folder = expanded(place, "PLACE")
    return table_file(folder, RESULTS).is_file() and not (folder / "mlflow.db").exists()


def named(line: Any) -> str:
    """The name of a run or a row in messages: setting, row and, for a run, its seed."""
    title = f"{line['setting']} · {line['row']}" if line["setting"] else str(line["row"])
    return f"{title}, seed {line['seed']}" if "seed" in line else title


def texts(file: Path, needed: tuple[str, ...]) -> pd.DataFrame:
    """The CSV ``file``, every value a text; FedbenchError where it lacks one of the columns ``needed``."""
    try:
        frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise FedbenchError(f"{str(file)!r} can't be read: {error}.") from None
    missing = [name for name in needed if name not in frame]
    if missing:
        raise FedbenchError(f"{str(file)!r} has no column {', '.join(missing)}.")
    texts = frame.map(spreadsheet_text)
    return texts.rename(columns=lambda name: str(spreadsheet_text(name)))


_BESIDE = ("dataset", "backbone", "method", "tune", "tuned", "seed")
_NO_SETTINGS = ("labels", "weights")
"""Row settings that are not passed to `RunSpec`: labels belong to the scenario, weights document the backbone."""


def spec_of(line: Mapping[str, Any], plugins: tuple[Path, ...] = ()) -> RunSpec:
    """The run of a ``line`` of results.csv.gz, with the id that the line gives.

    FedbenchError, which names the run, where recorded settings and id do not agree.
    """
    try:
        spec = _built(line, plugins)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise _no_settings(line, f"{where}: {error.errors()[0]['msg']}") from None
    except (ValueError, KeyError) as error:
        raise _no_settings(line, str(error)) from None
    if spec.run_id != line["run_id"]:
        unknown = [method for method in stack_names(str(line["method"])) if not _is_known(method, plugins)]
        hint = f"; method {unknown[0]!r} is not here, give its file with --plugin" if unknown else ""
        raise FedbenchError(f"{named(line)}: run_id {line['run_id']} is not that of its recorded settings{hint}.")
    return spec


def _no_settings(line: Mapping[str, Any], why: str) -> FedbenchError:
    return FedbenchError(f"{named(line)}: its settings are none of this version of fedbench: {why}.")


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
    # of an unknown method nothing tells whether a text that looks like a number is one
    known = declared(find_method(method, plugins).Params) if _is_known(method, plugins) else {}
    return {name: _value(text, known[name].type if name in known else object) for name, text in texts.items()}


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


def _is_known(method: str, plugins: tuple[Path, ...]) -> bool:
    """Whether the method is installed here, or in a plugin file."""
    try:
        find_method(method, plugins)
    except FedbenchError:
        return False
    return True


def diverged_runs(folder: ResultFolder) -> pd.DataFrame:
    """A line each, as `fedbench_boards.leaderboard.results.StoredResults.failed` has them.

    What such a run does not record is taken from its row's finished runs.

    FedbenchError, which names the row, where a run failed otherwise or was run with other code, where none of its row
    has finished, and where a seed has both finished and failed.
    """
    results = folder.results
    metrics = [name for name in results if str(name).startswith(FINAL)]
    lines = [line for row in folder.board.to_dict("records") for line in _of_row(row, results)]
    frame = pd.DataFrame(lines).astype(results.dtypes) if lines else results.iloc[:0].assign(failure="")
    return frame.drop(columns=metrics)


def _of_row(row: dict[Any, Any], results: pd.DataFrame) -> Iterator[dict[Any, Any]]:
    failures = json.loads(row["failures"] or "[]")
    if not failures:
        return
    finished = results[results["run_id"].isin(json.loads(row["runs"]).values())]
    for failure in failures:
        title = f"{named(row)}: seed {failure['seed']}"
        if failure["seed"] in set(finished["seed"]):
            raise FedbenchError(f"{title} has finished and failed; keep one of the two runs.")
        if not failure["reason"].startswith(DIVERGED):
            raise FedbenchError(f"{title} failed: {failure['reason'].removesuffix('.')}; run it again.")
        if failure["code"]:
            raise FedbenchError(f"{title} diverged with other code ({failure['code']}) than the row's; run it again.")
        if finished.empty:
            raise FedbenchError(f"{title} diverged, as all of its row; there is no run to tell its values by.")
        of_run = {name: failure[name] for name in ("seed", "run_id", "mlflow_id")}
        yield finished.iloc[0].to_dict() | of_run | {"failure": failure["reason"]}
