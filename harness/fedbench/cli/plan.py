"""What a request comes to: its suite, its runs, and what each row costs, found out before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedbench.cli.console import cell, console, megabytes, say, table
from fedbench.cli.options import Request
from fedbench.datasets import load_dataset
from fedbench.errors import FedbenchError
from fedbench.expand import expand, single
from fedbench.hookspecs import RunInfo
from fedbench.prepare import Settings, backbone_for, prepare
from fedbench.resolve import Overrides, parse_assignment
from fedbench.spec import RunSpec
from fedbench.suite import Suite, load_suite, suite_names

if TYPE_CHECKING:
    from fedbench.models import Backbone
    from fedbench.types import Dataset


@dataclass(frozen=True)
class PlannedRow:
    """The runs that differ by their seed only, and what preparing the first of them told."""

    specs: tuple[RunSpec, ...]
    info: RunInfo

    @property
    def rounds(self) -> int:
        """Rounds a run trains; zero for a method without weights."""
        return self.specs[0].training.rounds if self.info.trainable_parameters else 0

    @property
    def bytes_per_client(self) -> int:
        """Model down and up, for a client in a round. What a method sends besides is counted when it runs."""
        return 2 * self.info.round_bytes

    @property
    def run_bytes(self) -> int:
        """Traffic of one run."""
        return self.rounds * self.info.cohort_size * self.bytes_per_client


def requested(request: Request) -> tuple[Suite, list[RunSpec]]:
    """The suite and all its runs, every name and value checked; a run asked for twice counts once."""
    shorthands = {"dataset": request.dataset, "scenario": request.scenario, "backbone": request.backbone}
    sets = [parse_assignment(text) for text in request.assignments]
    if request.suite is not None:
        suite = load_suite(request.suite)
        sets = [(key, value) for key, value in shorthands.items() if value is not None] + sets
    elif request.methods:
        suite = single(request.scenario, request.dataset, request.backbone)
    else:
        raise FedbenchError(
            f"nothing to run: give --suite NAME ({', '.join(suite_names())}) or --method NAME; "
            "for instance fedbench run --suite longtail."
        )
    overrides = Overrides(
        methods=request.methods,
        seeds=request.seeds,
        sets=tuple(sets),
        plugin_files=request.plugin_files,
        scale=request.scale,
        settings=request.settings,
    )
    specs = expand(suite, overrides)
    return suite, _tuned(specs, request) if request.tuned else specs


def _tuned(specs: list[RunSpec], request: Request) -> list[RunSpec]:
    """The runs with the best values of the study asked for; says which rows it does not have, or has under others."""
    from fedbench.store import store_uri
    from fedbench.study_storage import storage_url
    from fedbench.tuned import best_of, tuned_otherwise, with_best

    best = best_of(storage_url(request.storage, store_uri(request.store)), request.tuned)
    for row in rows_of(specs):
        title = row[0].title
        if title not in best:
            say(f"{title}: not tuned in {request.tuned!r}, run as the suite has it")
        elif otherwise := tuned_otherwise(row[0], best[title]):
            say(f"{title}: was tuned with {', '.join(otherwise)}")
        elif best[title].spent < best[title].record.budget.trials:
            result = best[title]
            say(f"{title}: {result.spent} of {result.record.budget.trials} trials are over; the rest may find better")
    if len({(result.spent, str(result.record.budget)) for result in best.values()}) > 1:
        say(f"the studies of {request.tuned!r} had unequal budgets; the leaderboard says so too")
    return with_best(specs, best, [key for key, _ in map(parse_assignment, request.assignments)])


def plan(specs: Sequence[RunSpec], settings: Settings, *, every_seed: bool = False) -> list[PlannedRow]:
    """Prepare the first run of every row, so that whatever is missing or does not fit shows before anything trains.

    With ``every_seed`` every run is a row of its own.
    It also fills the caches of data and features once, where workers would all do it at the same time.
    """
    datasets = dict.fromkeys(spec.dataset for spec in specs)
    backbones = dict.fromkeys(spec.backbone for spec in specs)
    rows = [(spec,) for spec in {s.run_id: s for s in specs}.values()] if every_seed else rows_of(specs)
    doing = f"preparing data {', '.join(datasets)} and backbones {', '.join(backbones)}"
    out = console()
    if out.is_terminal:
        with out.status(cell(doing)):
            return list(_planned(rows, settings))
    say(doing)
    return list(_planned(rows, settings))


def _planned(rows: Sequence[tuple[RunSpec, ...]], settings: Settings) -> Iterator[PlannedRow]:
    datasets: dict[str, Dataset] = {}
    backbones: dict[tuple[str, str, int], Backbone] = {}
    for row in rows:
        spec = row[0]
        name, key = spec.dataset, (spec.dataset, spec.backbone, spec.seed)
        try:
            if name not in datasets:
                datasets[name] = load_dataset(name, data_dir=settings.data_dir, cache_dir=settings.cache_dir)
            if key not in backbones:
                backbones[key] = backbone_for(spec, datasets[spec.dataset], settings)
            run = prepare(spec, settings, dataset=datasets[name], backbone=backbones[key])
        except FedbenchError as error:
            raise FedbenchError(f"row {spec.title!r}: {error} Nothing was run.") from error
        except Exception as error:
            error.add_note(f"while preparing row {spec.title!r}; nothing was run")
            raise
        yield PlannedRow(row, run.info)


def rows_of(specs: Sequence[RunSpec]) -> list[tuple[RunSpec, ...]]:
    """The specs grouped into rows: those that differ in nothing but the seed."""
    rows: dict[str, list[RunSpec]] = {}
    for spec in specs:
        rows.setdefault(spec.model_copy(update={"seed": 0}).run_id, []).append(spec)
    return [tuple(row) for row in rows.values()]


def show(suite: Suite, rows: Sequence[PlannedRow]) -> None:
    """The table of ``--dry-run``."""
    runs = sum(len(row.specs) for row in rows)
    say(f"suite {suite.name}: {runs} runs")
    numbers = ("rounds", "parameters", "MB/client", "MB/run")
    grid = any(row.specs[0].setting for row in rows)
    made = table(*(["setting"] if grid else []), "row", "seeds", "rounds", "clients", *numbers[1:], right=numbers)
    for row in rows:
        made.add_row(
            *([cell(row.specs[0].setting)] if grid else []),
            cell(row.specs[0].row),
            cell(" ".join(str(spec.seed) for spec in row.specs)),
            cell(row.rounds),
            cell(f"{row.info.cohort_size} of {row.info.num_clients}"),
            cell(f"{row.info.trainable_parameters:,}"),
            cell(megabytes(row.bytes_per_client)),
            cell(megabytes(row.run_bytes)),
        )
    console().print(made)
    total = megabytes(sum(row.run_bytes * len(row.specs) for row in rows))
    say(f"MB/client: the model down and up, in a round. All runs together: {total} MB or more:", style="dim")
    say("what a method sends besides (payloads, further exchanges) is counted when it runs.", style="dim")
    say("Nothing was run or stored.", style="dim")
