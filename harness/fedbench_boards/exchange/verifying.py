"""Some runs of a result folder, carried out once more: do they give the numbers that the folder shows?"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedbench.core.errors import DIVERGED, FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.runs.engines.engine import Policy
from fedbench.runs.prepare import Settings
from fedbench.tracking.schema import FINAL
from fedbench.workflow.execution import Carried, Storing, carry_out
from fedbench.workflow.screens import Screen
from fedbench.workflow.selection import Place, Selection
from fedbench_boards.exchange.checks import Checked
from fedbench_boards.exchange.folder import environment_here, finals, named
from fedbench_boards.leaderboard.results import load_runs


@dataclass(frozen=True)
class Verified:
    """What repeating a run of the folder told, in a line."""

    text: str
    is_confirmed: bool
    """Whether the folder's numbers are those of the repetition."""
    is_unsettled: bool = False
    """Whether the run diverged on one of two platforms and ended on the other, which rounding alone may decide."""

    def __str__(self) -> str:
        return self.text


def drawn(checked: Checked, share: float, seed: int) -> list[RunSpec]:
    """A random ``share`` of the runs, at least one, and all that diverged: whoever says so is rid of a seed.

    Runs are drawn in the order of their ids, so the order of the folder has no part in it.
    """
    by_id = sorted(checked.specs, key=lambda spec: spec.run_id)
    count = min(len(by_id), max(1, math.ceil(share * len(by_id))))
    picked = {spec.run_id for spec in random.Random(seed).sample(by_id, count)} | set(checked.diverged["run_id"])
    return [spec for spec in by_id if spec.run_id in picked]


def verify(
    checked: Checked, chosen: Sequence[RunSpec], settings: Settings, place: Place, screen: Screen, tolerance: float
) -> Iterator[Verified]:
    """Repeat the ``chosen`` runs in a store that goes afterwards, and compare final metrics but timings.

    They are compared to the last bit where platform, torch and code are those of the folder, else accuracies within
    ``tolerance`` points.
    """
    with tempfile.TemporaryDirectory() as store:
        storing = Storing(store, patience=60.0)
        selection = Selection(suite=checked.suite.name, plugin_files=settings.plugin_files)
        carried = carry_out(selection, checked.suite, chosen, settings, place, Policy(), storing, screen)
        if carried.stopped is not None:
            raise carried.stopped
        now = _results(carried, checked.suite.name)
    failures = {failed.spec.run_id: failed.reason for failed in carried.failures}
    recorded_runs = _by_id(checked.folder.results, checked.diverged)
    elsewhere = tuple(_other_machine(checked))
    for spec in chosen:
        recorded, again = recorded_runs[spec.run_id], now.get(spec.run_id)
        title = named(recorded)
        if again is None:
            why = failures.get(spec.run_id, "its row is not for its backbone")
            yield Verified(f"{title}: not repeated: {why}", is_confirmed=False)
            continue
        changes = (*elsewhere, *_other_code_or_data(recorded, again))
        before, after = recorded.get("failure") or "", again.get("failure") or ""
        if before or after:
            yield _ended(title, before, after, changes, is_elsewhere=bool(elsewhere))
        else:
            yield _compared(title, recorded, again, changes, tolerance, checked.headlines)


def _compared(
    title: str,
    recorded: Mapping[Any, Any],
    now: Mapping[Any, Any],
    changes: Sequence[str],
    tolerance: float,
    headlines: Collection[str],
) -> Verified:
    """Compare two runs that ended; ``changes`` are those of machine, code and data."""
    why = f" ({', '.join(changes)})" if changes else ""
    differences = list(_differences(recorded, now, None, headlines))
    if not differences:
        return Verified(f"{title}: the same to the last bit{why}", is_confirmed=True)
    differences = list(_differences(recorded, now, tolerance, headlines)) if changes else differences
    if not differences:
        return Verified(f"{title}: the same within {tolerance:g} points{why}", is_confirmed=True)
    return Verified(f"{title}{why}: {'; '.join(differences)}", is_confirmed=False)


def _ended(title: str, recorded: str, now: str, changes: Sequence[str], *, is_elsewhere: bool) -> Verified:
    """Compare the failures of two runs, of which one may have ended with a number.

    A run diverges again with the same words or, where anything has changed, in whatever round.
    """
    why = f" ({', '.join(changes)})" if changes else ""
    if recorded and (now == recorded or (changes and now.startswith(DIVERGED))):
        return Verified(f"{title}: diverged again{why}", is_confirmed=True)
    # of the two one has a number; the other diverged, or failed otherwise
    is_unsettled = is_elsewhere and (recorded or now).startswith(DIVERGED) and not (recorded and now)
    what = f"now {now or 'it ends with a number'}; in the folder {recorded or 'it ended with a number'}"
    text = f"{title}{why}: {'unsettled' if is_unsettled else 'not repeated'}: {what}"
    return Verified(text, is_confirmed=False, is_unsettled=is_unsettled)


def _results(carried: Carried, suite: str) -> dict[str, Mapping[Any, Any]]:
    try:
        stored = load_runs(carried.uri, suite)
    except FedbenchError:  # none has come so far
        return {}
    return _by_id(stored.finished, stored.failed)


def _by_id(finished: pd.DataFrame, failed: pd.DataFrame) -> dict[str, Mapping[Any, Any]]:
    """Run id -> its line; those that failed have a ``failure``."""
    return {str(line["run_id"]): line for frame in (finished, failed) for line in frame.to_dict("records")}


def _other_machine(checked: Checked) -> Iterator[str]:
    """Tell how this machine differs from the one that the folder was written on."""
    before, now = checked.folder.manifest.environment, environment_here()
    for name, was, here in (("platform", before.platform, now.platform), ("torch", before.torch, now.torch)):
        if was != here:
            yield f"{name} {was} then, {here} now"


def _other_code_or_data(recorded: Mapping[Any, Any], now: Mapping[Any, Any]) -> Iterator[str]:
    for name in ("code", "data", "weights"):
        was, here = (str(run[f"{name}_hash"]) for run in (recorded, now))
        if was != here:
            yield f"{name} {was[:8]} then, {here[:8]} now"


_OF_FEW = 10
"""The factor by which the tolerance is wider for accuracies of few images that a table is ranked by."""
_EXACT = ("bytes_up", "bytes_down", "megabytes")
"""Metrics that no platform changes."""


def _differences(
    recorded: Mapping[Any, Any], now: Mapping[Any, Any], tolerance: float | None, headlines: Collection[str]
) -> Iterator[str]:
    """A sentence on each of the folder's metrics that is another number now."""
    for name, value in finals(recorded).items():
        metric = name.removeprefix(FINAL)
        again = float(now.get(name, math.nan))
        if math.isnan(value):
            is_same = math.isnan(again)
        elif tolerance is None or metric in _EXACT:
            is_same = again == value
        else:
            # of a class, a domain or the worst client a single image is more than the tolerance
            is_of_few = "/" in metric or "worst" in metric
            points = tolerance * _OF_FEW if is_of_few else tolerance
            is_loose = metric not in headlines and (is_of_few or "accuracy" not in metric)
            is_same = is_loose or abs(again - value) <= points
        if not is_same:
            yield f"{metric} is {value!r} in the folder and {again!r} now"
