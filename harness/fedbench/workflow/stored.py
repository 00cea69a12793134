"""What is said of the runs that the store has already: which are skipped, which are repeated and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlflow.exceptions import MlflowException

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.plugins.provenance import Codes
from fedbench.runs.job import checkpoints_of
from fedbench.runs.prepare import Settings
from fedbench.suites.suite import Suite
from fedbench.tracking.read import Origin, stored_runs
from fedbench.tracking.schema import store_uri
from fedbench.workflow.plan import PlannedRow, rows_of
from fedbench.workflow.screen import Screen


def origins_of(planned: Sequence[PlannedRow], codes: Codes, suite: Suite) -> dict[str, Origin]:
    """Run id -> what the run is made from, for all runs of the plan."""
    return {
        spec.run_id: Origin(codes.of_run(spec), row.info.data_hash, row.info.weights_hash, suite.version)
        for row in planned
        for spec in row.specs
    }


def show_stored(
    store: str | None,
    suite: Suite,
    planned: Sequence[PlannedRow],
    plugin_files: tuple[Path, ...],
    screen: Screen,
    *,
    is_rerun: bool,
) -> None:
    """`say_stored` of a dry run; one that cannot read the store warns, since it needs none."""
    origins = origins_of(planned, Codes(plugin_files), suite)
    try:
        stored = stored_runs(store_uri(store, to_write=False), suite.name, origins)
    except (FedbenchError, MlflowException) as error:
        screen.complain(f"which runs are in the store already is not known: {error}", label="warning")
        return
    say_stored([spec for row in planned for spec in row.specs], {} if is_rerun else stored, screen)


def say_stored(specs: Sequence[RunSpec], stored: Mapping[str, tuple[str, ...]], screen: Screen) -> None:
    """How many runs are skipped and, where some run again, a line for the rows that stand alike.

    ``stored``: run id -> why a run is repeated, nothing for one that is skipped. An empty store gives no line.
    """
    skipped = sum(stored.get(spec.run_id) == () for spec in specs)
    if skipped:
        screen.say(f"{skipped} of {len(specs)} runs are in the store already and are skipped; --rerun repeats them.")
    if not stored or skipped == len(specs):
        return
    alike: dict[str, list[str]] = {}
    rows = rows_of(specs)
    for row in rows:
        alike.setdefault(_standing(row, stored), []).append(row[0].title)
    for standing, titles in alike.items():
        which = "every row" if len(titles) == len(rows) > 1 else ", ".join(titles)
        screen.say(f"{standing}: {which}", style="dim")


def _standing(row: Sequence[RunSpec], stored: Mapping[str, tuple[str, ...]]) -> str:
    """``1 of 3 in the store, 2 again (data changed)``."""
    skipped = sum(stored.get(spec.run_id) == () for spec in row)
    repeated = Counter("; ".join(why) for spec in row if (why := stored.get(spec.run_id)))
    parts = [f"{skipped} of {len(row)} in the store", *(f"{number} again ({why})" for why, number in repeated.items())]
    return ", ".join(parts)


def say_resumed(pending: Sequence[RunSpec], origins: Mapping[str, Origin], settings: Settings, screen: Screen) -> None:
    """Which runs go on from a checkpoint."""
    for spec in pending:
        origin = origins.get(spec.run_id)
        if origin is None:  # its row could not be planned: it will fail, and has no checkpoint
            continue
        number = checkpoints_of(spec, origin.data_hash, origin.weights_hash, settings).round()
        if number:
            after = f"round {number} of {spec.training.rounds}"
            screen.say(f"{spec.title}, seed {spec.seed}: goes on from its checkpoint after {after}.")
