"""``fedbench.Results``: the runs of a call, or of a store, as tables, curves, predictions and figures."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from rich.console import Console

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.kinds.registry import own_plugins
from fedbench.runs.prepare import Settings
from fedbench.suites.suite import asked_for
from fedbench.tracking.artifacts import PREDICTIONS, SPEC, read_spec
from fedbench.tracking.databases import shown
from fedbench.tracking.read import open_reader
from fedbench.tracking.schema import DATABASE, FINAL, database_of, store_uri
from fedbench.workflow.asking import Folder, Names, files, folders, names, text_or_none
from fedbench.workflow.screens import let_figures_be_seen
from fedbench_boards.leaderboard.formats import render_terminal, to_html
from fedbench_boards.leaderboard.reading import ReadingOptions, ReadResults, frame_of, read_board, suite_of
from fedbench_boards.leaderboard.results import load_measured, load_rounds, load_runs
from fedbench_boards.leaderboard.rows import label_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 160
"""Columns of the table as text."""


class Results:
    """Runs in a store. Every call reads the store as it is now, but for `specs`, which stay as first read.

    In a notebook it shows itself as the leaderboard, and as text wherever it is printed.
    """

    def __init__(
        self,
        uri: str,
        suite: str | None,
        *,
        specs: Sequence[RunSpec] | None = None,
        settings: Settings,
        plugins: Mapping[tuple[str, str], type] | None = None,
    ) -> None:
        """The runs ``specs`` of the suite (a name or a file); where they are None, all of it, and of all suites where
        that is None."""
        self._uri, self._suite, self._specs = uri, suite, specs
        self._settings = settings
        self._plugins = plugins or {}

    @property
    def store(self) -> str:
        """The folder or URI of the store, as ``store=`` takes it, but that ``***`` is in place of passwords."""
        database = database_of(self._uri)
        is_folder = database is not None and database.name == DATABASE
        return str(database.parent) if database is not None and is_folder else shown(self._uri)

    @property
    def suite(self) -> str | None:
        """The name by which `fedbench.load` and ``--suite`` read these again: that of the suite, or of runs without one
        what they have in common, ``adhoc/label-skew/embedded``; None for all of a store."""
        return self._suite if self._specs is None or self._suite is None else asked_for(self._suite, self._specs)

    @cached_property
    def specs(self) -> tuple[RunSpec, ...]:
        """What was run: the full description of every run."""
        if self._specs is not None:
            return tuple(self._specs)
        # the folder that `read_spec` reads is two above the file
        return tuple(read_spec(file.parents[1], run) for run, file in self._files(SPEC))

    def table(
        self,
        *,
        metric: str | None = None,
        columns: Names | None = None,
        baseline: str | None = None,
        target: float | None = None,
        test: str = "t",
        full: bool = False,
    ) -> pd.DataFrame:
        """The leaderboard of these runs; options and columns are those of `fedbench.leaderboard`."""
        given = ReadingOptions(
            suite=self._suite, metric=metric, columns=names(columns), baseline=baseline, target=target, test=test
        )
        with own_plugins(self._plugins):
            return frame_of(self._read(given).board, full=full)

    def runs(self) -> pd.DataFrame:
        """A line a finished run: ``run`` (its id), ``suite`` (or the group, as `suite` has it), ``row``, ``setting``,
        ``method``, ``seed``, its final metrics.
        """
        results = self._read().results
        # in the order of their names: that of the store is any
        names = sorted(name for name in map(str, results) if name.startswith(FINAL))
        final = results[names].dropna(axis=1, how="all")
        return pd.concat([_who(results), final.rename(columns=lambda name: str(name).removeprefix(FINAL))], axis=1)

    def rounds(self) -> pd.DataFrame:
        """A line a run and round: whose it is, as in `runs`, ``round``, and every metric that any run has by round."""
        results = self._read().results
        last = load_measured(self._uri, results, "")
        metrics = [str(name) for name in last if not str(name).startswith(FINAL)]
        found = load_rounds(self._uri, results, metrics)
        who = _who(results).assign(mlflow_id=results["mlflow_id"])
        return who.merge(found, on="mlflow_id").drop(columns="mlflow_id")

    def predictions(self) -> pd.DataFrame:
        """What each run predicts of every test sample after its last round: ``run``, ``sample``, ``label``,
        ``predicted``. A method without a global model predicts nothing.
        """
        columns = ["sample", "label", "predicted"]
        frames = {
            run: pd.read_csv(file).reindex(columns=columns).astype("Int64") for run, file in self._files(PREDICTIONS)
        }
        if not frames:
            return pd.DataFrame(columns=["run", *columns])
        return pd.concat(frames, names=["run", None]).reset_index("run").reset_index(drop=True)

    def plot(
        self,
        kind: str = "accuracy",
        *,
        metric: str | None = None,
        by: Names | None = None,
        setting: str | None = None,
        methods: Names | None = None,
        baseline: str | None = None,
    ) -> Figure:
        """A figure of these runs: an accuracy by round, or another ``kind`` that ``fedbench figure`` draws.

        The kinds: accuracy, rounds (with groups of classes, or what a method reports), sweep and gap over the settings
        ``by``, gains above the ``baseline``, layers, entropies, embedding, holdings. Options are the command's.
        """
        from fedbench_boards.leaderboard.figures import drawn

        let_figures_be_seen()
        read = self._read()
        with own_plugins(self._plugins):
            return drawn(
                kind,
                self._uri,
                read.suite,
                read.results,
                self._settings,
                by=names(by),
                metric=metric,
                setting=setting,
                methods=names(methods),
                baseline=baseline,
            )

    def _read(self, given: ReadingOptions | None = None) -> ReadResults:
        only = None if self._specs is None else {spec.run_id for spec in self._specs}
        given = given or ReadingOptions(suite=self._suite)
        with own_plugins(self._plugins):
            return read_board(given, self._uri, only=only, tell=_note)

    def _files(self, name: str) -> Iterator[tuple[str, Path]]:
        """Id and artifact ``name`` of each finished run; the file may be gone with the next one."""
        results, reader = self._read().results, open_reader(self._uri)
        for run, stored in zip(results["run_id"], results["mlflow_id"], strict=True):
            with tempfile.TemporaryDirectory() as folder:
                file = None if reader is None else reader.artifact(stored, name, Path(folder))
                if file is None:
                    raise FedbenchError(f"run {run} has no {name} among its artifacts; repeat it with rerun=True.")
                yield run, file

    def _repr_html_(self) -> str:
        with own_plugins(self._plugins):
            return to_html(self._read().board)

    def __repr__(self) -> str:
        console = Console(width=_WIDTH, color_system=None, force_jupyter=False)
        with own_plugins(self._plugins), console.capture() as captured:
            console.print(render_terminal(self._read().board))
        return captured.get().rstrip()


def load(
    store: Folder | None = None,
    suite: str | None = None,
    *,
    plugins: Folder | Iterable[Folder] | None = None,
    data_dir: Folder | None = None,
    cache_dir: Folder | None = None,
) -> Results:
    """What is stored: of a suite, of runs without one (``adhoc``, or a group of them, ``adhoc/label-skew/embedded``),
    or of all where ``suite`` is None.

    ``plugins`` and the folders are for figures of models. Raises FedbenchError where there is nothing.
    """
    uri = store_uri(text_or_none(store), to_write=False)
    load_runs(uri, suite_of(suite)[0])
    return Results(uri, suite, settings=Settings(*folders(data_dir, cache_dir), files(plugins)))


def _who(results: pd.DataFrame) -> pd.DataFrame:
    found = results[["run_id", "suite", "row", "setting", "method", "seed"]].rename(columns={"run_id": "run"})
    return found.assign(row=[label_of(str(row)) for row in found["row"]])


def _note(text: str) -> None:
    warnings.warn(text, stacklevel=2)
