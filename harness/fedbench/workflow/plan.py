"""What a selection comes to: its suite, its runs, and what each row costs, found out before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedbench.core.errors import FedbenchError
from fedbench.core.records import RunInfo
from fedbench.core.spec import RunSpec
from fedbench.core.wording import counted
from fedbench.datasets.catalogue import card_of
from fedbench.runs.engines.cards import require_devices
from fedbench.runs.inspection import Failed, Memory, Prepared, looks
from fedbench.runs.prepare import Settings
from fedbench.suites.expand import expand, is_added, narrowed, text_of_added
from fedbench.suites.suite import Suite, load_suite, single, suite_names
from fedbench.workflow.screens import Screen
from fedbench.workflow.selection import Selection


@dataclass(frozen=True)
class PlannedRow:
    """The runs that differ by their seed only, and what preparing the first of them shows."""

    specs: tuple[RunSpec, ...]
    info: RunInfo
    memory: Memory | None = None
    """Set by a dry run only."""
    sent: int = 0
    """Trained parameters that leave the client; its private ones do not."""

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


@dataclass(frozen=True)
class FailedRow:
    """The runs of a row, of which preparing the first raised an exception: a fault of its method, and of no other's."""

    specs: tuple[RunSpec, ...]
    reason: str


@dataclass(frozen=True)
class AbsentRow:
    """The runs of a row whose data or weights are not on this machine; of a dry run only."""

    specs: tuple[RunSpec, ...]
    lacks: Literal["data", "weights"]


@dataclass(frozen=True)
class SuitePlan:
    """What there is of each row, in the order of the suite."""

    rows: list[PlannedRow]
    failed: list[FailedRow]
    absent: list[AbsentRow]


def requested(
    selection: Selection, screen: Screen, store: str | None = None, storage: str | None = None
) -> tuple[Suite, list[RunSpec]]:
    """The suite and all its runs, every name and value checked; a run that is selected twice counts once.

    ``store`` and ``storage`` are where the values of ``selection.tuned`` are looked up.
    """
    if selection.suite is not None:
        suite = load_suite(selection.suite)
    elif selection.methods:
        suite = single()
    else:
        raise FedbenchError(
            f"nothing to run: give --suite NAME ({', '.join(suite_names())}) or --method NAME; "
            "for instance fedbench run --suite longtail."
        )
    picked = narrowed(suite, selection)
    specs = expand(suite, picked)
    if picked.settings != selection.settings:
        dataset, known = dict(selection.sets)["dataset"], len(suite.scales[picked.scale].settings)
        chosen = counted(len({spec.setting for spec in specs}), "setting")
        screen.say(f"dataset={dataset} picks {chosen} of the {known} of scale {picked.scale}")
    for line in text_of_added(suite, picked):
        screen.say(line)
    return suite, _tuned(specs, selection, store, storage, screen) if selection.tuned else specs


def _tuned(
    specs: list[RunSpec], selection: Selection, store: str | None, storage: str | None, screen: Screen
) -> list[RunSpec]:
    """The runs with the best values of the study, but for what the selection sets.

    Says which rows the study does not have, or has under other conditions.
    """
    from fedbench.tracking.schema import store_uri
    from fedbench.tuning.results import best_of, tuned_otherwise, with_best, with_listed
    from fedbench.tuning.storage import storage_url

    study, fixed = selection.tuned, [key for key, _ in selection.sets]
    if study.endswith(".csv"):
        return with_listed(specs, Path(study), fixed, selection.plugin_files)
    best = best_of(storage_url(storage, store_uri(store)), study)
    for row in rows_of(specs):
        title = row[0].title
        if title not in best:
            screen.say(f"{title}: not tuned in {study!r}, run as the suite has it")
        elif otherwise := tuned_otherwise(row[0], best[title]):
            screen.say(f"{title}: was tuned with {', '.join(otherwise)}")
        elif best[title].spent < best[title].record.budget.trials:
            result = best[title]
            screen.say(
                f"{title}: {result.spent} of {result.record.budget.trials} trials are over; the rest may find better"
            )
        elif best[title].record.budget.confirming and best[title].confirmed is None:
            screen.say(f"{title}: nothing has confirmed its values on seeds that did not choose them")
    if len({(result.spent, str(result.record.budget)) for result in best.values()}) > 1:
        screen.say(f"the studies of {study!r} had unequal budgets; the leaderboard says so too")
    return with_best(specs, best, fixed)


def plan(
    suite: Suite,
    specs: Sequence[RunSpec],
    settings: Settings,
    screen: Screen,
    *,
    every_seed: bool = False,
    dry: bool = False,
    in_process: bool = False,
) -> SuitePlan:
    """Prepare the first run of every row, so that whatever is missing or does not fit shows before anything trains.

    With ``every_seed`` every run is a row of its own. Rows whose method raises an exception have failed. Rows that
    ``suite`` does not have are left out, and named, where their method is not for their backbone, but for another.
    It also fills the caches of data and features once, where workers would all do it at the same time. A ``dry`` plan
    encodes no more images than it takes to tell what memory a run needs, and fills no cache of features; rows whose
    data the catalogue has, or whose weights are published, may be absent from this machine. Each run is prepared in a
    worker process, unless ``in_process``.
    """
    require_devices(specs, settings.devices)
    datasets = dict.fromkeys(spec.dataset for spec in specs)
    backbones = dict.fromkeys(spec.backbone for spec in specs)
    rows = [(spec,) for spec in {s.run_id: s for s in specs}.values()] if every_seed else rows_of(specs)
    of = {row[0].run_id: row for row in rows}
    found: dict[str, PlannedRow | FailedRow | AbsentRow] = {}
    refused: dict[str, str] = {}
    doing = screen.doing(f"preparing data {', '.join(datasets)} and backbones {', '.join(backbones)}")
    firsts = [row[0] for row in rows]
    with doing, closing(looks(firsts, settings, is_dry=dry, in_process=in_process, tell=screen.say)) as seen:
        for spec, one in seen:
            row = of[spec.run_id]
            if isinstance(one, Prepared):
                found[spec.run_id] = PlannedRow(row, one.info, one.memory, one.sent)
            elif isinstance(one, Failed):
                found[spec.run_id] = FailedRow(row, one.reason)
            elif dry and (one.absent == "weights" or (one.absent == "data" and card_of(spec.dataset))):
                found[spec.run_id] = AbsentRow(row, one.absent)
            elif one.is_of_loading or not is_added(suite, spec.method) or not _runs_elsewhere(spec, firsts):
                raise _refusal(spec, one.text)
            else:
                refused[spec.run_id] = one.text
    every = [found[spec.run_id] for spec in firsts if spec.run_id in found]
    planned = [row for row in every if isinstance(row, PlannedRow)]
    left_out = [spec for spec in firsts if spec.run_id in refused]
    for spec in left_out:
        if not _runs_elsewhere(spec, [row.specs[0] for row in planned]):
            raise _refusal(spec, refused[spec.run_id])
    # once, however many seeds stand for the row
    for line in dict.fromkeys(f"{spec.title} is left out: {refused[spec.run_id]}" for spec in left_out):
        screen.say(line)
    return SuitePlan(
        planned,
        [row for row in every if isinstance(row, FailedRow)],
        [row for row in every if isinstance(row, AbsentRow)],
    )


def _runs_elsewhere(spec: RunSpec, others: Sequence[RunSpec]) -> bool:
    """Whether one of ``others`` is of the same method and setting on another backbone."""
    ours = (spec.method, spec.setting, spec.seed)
    alike = [one for one in others if (one.method, one.setting, one.seed) == ours]
    return any(one.backbone != spec.backbone for one in alike)


def _refusal(spec: RunSpec, reason: str) -> FedbenchError:
    return FedbenchError(f"row {spec.title!r}: {reason} Nothing was run.")


def rows_of(specs: Sequence[RunSpec]) -> list[tuple[RunSpec, ...]]:
    """The specs grouped into rows: those that differ in nothing but the seed."""
    rows: dict[str, list[RunSpec]] = {}
    for spec in specs:
        rows.setdefault(spec.model_copy(update={"seed": 0}).run_id, []).append(spec)
    return [tuple(row) for row in rows.values()]
