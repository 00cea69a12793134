"""Is a result folder in order? What follows from its numbers is looked at first, what it says of itself last.

Whoever changes a number can write the manifest anew, but then the board is not that of the runs: it is computed again
from its runs and compared. Rounds to a target are counted in curves, which no folder has, so they are taken as they
stand. A number that is changed wherever it stands is found by repeating the run alone, see
`fedbench_boards.exchange.verifying`.
"""

from __future__ import annotations

import io
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.core.wording import counted
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import Suite, load_suite, suite_names
from fedbench_boards.exchange.folder import (
    BOARD,
    FILES,
    RESULTS,
    ResultFolder,
    digest,
    diverged_runs,
    named,
    read_folder,
    spec_of,
    table_file,
)
from fedbench_boards.leaderboard.formats import markdown_page, to_csv
from fedbench_boards.leaderboard.model import Board, Line, Milestone, ScoreCell
from fedbench_boards.leaderboard.reading import ReadingOptions, ReadResults, board_of_runs, made_by
from fedbench_boards.leaderboard.results import StoredResults
from fedbench_boards.leaderboard.rows import PROTOCOL, ROW


@dataclass(frozen=True)
class Checked:
    """A folder that is in order."""

    folder: ResultFolder
    suite: Suite
    specs: tuple[RunSpec, ...]
    """The specs of its runs, in the order of results.csv.gz, then those of the runs that diverged."""
    diverged: pd.DataFrame
    """The runs that diverged, see `diverged_runs`."""
    notes: tuple[str, ...] = ()
    """Remarks that are no reason to refuse it."""

    @property
    def headlines(self) -> frozenset[str]:
        """The metrics that its tables are ranked by."""
        return frozenset(map(str, self.folder.board["headline"]))

    @property
    def summary(self) -> str:
        """The content of the folder in one line."""
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
    with _readable(given):
        return _checked(given, suite, plugins)


@contextmanager
def _readable(given: Path) -> Iterator[None]:
    """FedbenchError in place of whatever is raised where the folder ``given`` has other contents than it should."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise FedbenchError(f"{str(given)!r} can't be read as a result folder: {why}.") from None


def _checked(given: Path, suite: str | None, plugins: tuple[Path, ...]) -> Checked:
    folder = read_folder(given)
    read = _suite(folder, suite)
    diverged = diverged_runs(folder)
    every = pd.concat([folder.results, diverged]) if len(diverged) else folder.results
    specs = tuple(_checked_spec(line, read, plugins) for line in _lines(every))
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


def _checked_spec(line: Mapping[str, Any], suite: Suite, plugins: tuple[Path, ...]) -> RunSpec:
    """The spec of a run; FedbenchError for another version of the suite, code or data not known, or another id."""
    if line["suite_version"] != suite.version:
        raise FedbenchError(
            f"{named(line)}: it is of version {line['suite_version']} of suite {suite.name!r}, which is at version "
            f"{suite.version} here."
        )
    for name in ("code_hash", "data_hash"):
        if not line[name]:
            raise FedbenchError(f"{named(line)}: no {name} is recorded, so what made it is not known.")
    spec = spec_of(line, plugins)
    if spec.row != line["row"]:
        raise FedbenchError(f"{named(line)}: by its settings the row is called {spec.row!r}.")
    return spec


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
    for name in (table_file(folder.path, name).name for name in FILES):
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
    own = {
        spec.run_id: spec
        for scale in sorted({spec.scale for spec in specs})
        for spec in expand(suite, Overrides(seeds=seeds, scale=scale if suite.scales else "", plugin_files=plugins))
    }
    ids = {spec.run_id for spec in specs}
    run = {(spec.setting, spec.row) for spec in own.values() if spec.run_id in ids}
    for rows, what in (
        ({(spec.setting, spec.row) for spec in specs if spec.run_id not in own}, "not as in the suite"),
        ({(spec.setting, spec.row) for spec in own.values()} - run, "of the suite not run"),
    ):
        if rows:
            setting, row = min(rows)
            yield f"{counted(len(rows), 'row')} {what}, such as {named({'setting': setting, 'row': row})}"
    known: dict[tuple[str, str, str], set[int]] = {}
    for spec in specs:
        known.setdefault((spec.scale, spec.backbone, spec.tune), set()).add(spec.seed)
    for (scale, backbone, tune), seeds_there in sorted(known.items()):
        few = set(suite.seeds_of(suite.scales.get(scale))) - seeds_there
        if few:
            which = backbone if tune == "auto" else f"{backbone}, tune={tune},"
            yield f"rows on {which} are without seed {', '.join(map(str, sorted(few)))} of the suite"


def _notes(results: pd.DataFrame, suite: Suite) -> Iterator[str]:
    # a board grows by a row without running the others again: their ids say what they are
    earlier = int((results["suite_hash"] != suite.text_hash).sum())
    if earlier:
        yield f"{counted(earlier, 'run')} made with another text of the suite"
    # commits that do not say which code it was, though its hash does
    dirty, none = results["commit"].str.endswith("+dirty").sum(), (results["commit"] == "").sum()
    for count, what in ((dirty, "from a work tree with changes (+dirty)"), (none, "without a git commit")):
        if count:
            yield f"{counted(int(count), 'run')} made {what}"
    seeds = [(row, runs["seed"].nunique(), len(others)) for row, runs, others in _beside_others(results)]
    fewer = [(row, has, of) for row, has, of in seeds if has < of]
    if fewer:
        row, has, of = fewer[0]
        rows = counted(len(fewer), "row")
        yield f"{rows} with fewer seeds than others of their backbone, such as {row} with {has} of {of}"


def _lines(results: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in line.items()} for line in results.to_dict("records")]


_OF_CURVES = ("rounds_to_", "bytes_to_", "seconds_to_", "target")
_TARGET = " · target "
"""Behind it a caption says which target rounds were counted to."""
_DRAWN = {"p_best": 0.02}
"""Columns that are drawn, and by how much they may be another number elsewhere."""
_RELATIVE = 1e-9
"""Sums of the same numbers in another order differ by less."""
_MARKDOWN = "leaderboard.md"
Key = tuple[str, str]
"""Block and row."""


def check_board(folder: ResultFolder, suite: Suite, stored: StoredResults) -> None:
    """FedbenchError, which names row and column, where leaderboard.csv.gz or .md is not what results.csv.gz gives.

    ``stored`` are its runs, and those that diverged.
    """
    board = board_of_runs(suite, folder.manifest.options, stored)
    text = pd.read_csv(io.StringIO(to_csv(board)), dtype=str, keep_default_na=False)
    given, shown = _by_row(text), _by_row(folder.board)
    for key, line in given.items():
        if key not in shown:
            raise FedbenchError(f"{_name(line)} is in {RESULTS} and not in {BOARD}.")
        _compare(line, shown[key])
    for key, line in shown.items():
        if key not in given:
            raise FedbenchError(f"{_name(line)} is in {BOARD}, and {RESULTS} has no run of it.")
    _compare_text(folder, stored, _with_milestones(board, shown))


def read_results(given: Path, options: ReadingOptions) -> ReadResults:
    """The board of the result folder ``given``, without a store; it is not checked.

    ``options`` go before the folder's own; without any, rounds to a target are those that the folder shows.
    """
    folder = read_folder(given)
    asked = {name: value for name, value in asdict(options).items() if value != getattr(ReadingOptions(), name)}
    with _readable(given):
        suite, stored = _suite(folder, options.suite), StoredResults(folder.results, diverged_runs(folder))
        board = board_of_runs(suite, replace(folder.manifest.options, **asked), stored)
        if not asked.keys() - {"suite", "test"}:
            board = _with_milestones(board, _by_row(folder.board))
    return ReadResults(suite, stored, folder.results, pd.DataFrame(), board)


def _reading(shown: str, expected: str) -> str:
    """The command ``shown`` above a board, if but for the suite's name or file it is the ``expected`` one."""
    words = shlex.split(shown)
    at = words.index("--suite") if "--suite" in words[:-1] else len(words)
    return shown if words[:at] + words[at + 2 :] == shlex.split(expected) else expected


def _by_row(frame: pd.DataFrame) -> dict[Key, dict[str, str]]:
    rows: dict[Key, dict[str, str]] = {}
    lines: list[dict[str, str]] = frame.to_dict("records")  # type: ignore[assignment]
    for line in lines:
        key = (line["block"], line["row"])
        if key in rows:
            raise FedbenchError(f"{_name(line)} has two lines in {BOARD}.")
        rows[key] = line
    return rows


def _name(line: Mapping[str, str]) -> str:
    return named({"setting": line["setting"], "row": line["row"]})


def _compare(given: Mapping[str, str], shown: Mapping[str, str]) -> None:
    for column, value in given.items():
        if column.startswith(_OF_CURVES):
            continue
        there = shown.get(column, "")
        if column == "caption":
            there = there.partition(_TARGET)[0]
        if not _alike(value, there, _DRAWN.get(column, 0.0)):
            raise FedbenchError(
                f"{_name(given)}: {column} is {there or 'empty'} in {BOARD}, and {value or 'empty'} by {RESULTS}."
            )


def _alike(value: str, other: str, by: float) -> bool:
    if value == other:
        return True
    try:
        return math.isclose(float(value), float(other), rel_tol=_RELATIVE, abs_tol=max(by, _RELATIVE))
    except ValueError:
        return False


def _with_milestones(board: Board, shown: Mapping[Key, Mapping[str, str]]) -> Board:
    """``board`` with the rounds to a target that the folder shows."""
    tables = []
    for block, table in enumerate(board.tables):
        lines = tuple(_with_milestone(line, shown[str(block), line.row]) for line in table.lines)
        caption = next((shown[str(block), line.row]["caption"] for line in table.lines), table.caption)
        tables.append(replace(table, lines=lines, caption=caption))
    return replace(board, tables=tuple(tables))


def _with_milestone(line: Line, shown: Mapping[str, Any]) -> Line:
    reached, _, seeds = shown.get("target_reached", "").partition("/")

    def number(name: str) -> float:
        return float(shown.get(name) or "nan")

    return replace(
        line,
        p_best=number("p_best"),
        milestone=Milestone(
            ScoreCell(number("rounds_to_target_mean"), number("rounds_to_target_std")),
            number("target"),
            shown.get("target_metric", ""),
            int(reached or 0),
            int(seeds or 0),
            number("bytes_to_target_mean"),
            number("seconds_to_target_mean"),
        ),
    )


def _compare_text(folder: ResultFolder, stored: StoredResults, board: Board) -> None:
    """FedbenchError for a line that ``board`` and the commands of the runs do not give, or that is missing."""
    shown = (folder.path / _MARKDOWN).read_text(encoding="utf-8").splitlines()
    *commands, last = made_by(stored, folder.manifest.options).splitlines()
    prompts = [line.removeprefix("$ ") for line in shown if line.startswith("$ fedbench ")]
    reading = next((line for line in prompts if line.startswith("fedbench leaderboard")), "")
    # which command a run that diverged is of, no file of the folder says
    if len(stored.failed):
        commands = [line for line in prompts if line != reading] if set(commands) <= set(prompts) else commands
    commands.append(_reading(reading, last))
    given = markdown_page(board, "\n".join(commands)).splitlines()
    for has, lacks, what in ((given, set(shown), "lacks"), (shown, set(given), "has")):
        wrong = next((line for line in has if line not in lacks), "")
        if wrong:
            raise FedbenchError(f"{_MARKDOWN} is not what {BOARD} gives: it {what} the line {wrong[:200]!r}.")
    if shown != given:
        raise FedbenchError(f"{_MARKDOWN} is not what {BOARD} gives: its lines are in another order.")
