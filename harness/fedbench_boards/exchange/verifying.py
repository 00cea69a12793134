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
from fedbench.workflow.screen import Screen
from fedbench.workflow.selection import Place, Selection
from fedbench_boards.exchange.checks import Checked
from fedbench_boards.exchange.folder import environment_here, finals, named
from fedbench_boards.leaderboard.results import load_runs


@dataclass(frozen=True)
class Verified:
    """A run of the folder beside its repetition."""

    title: str
    """Setting, row and seed."""
    tolerance: float | None
    """Points by which accuracies may differ; None: every metric is the same, or is to be, to the last bit."""
    differs: tuple[str, ...] = ()
    """What made it that is not as it was, so that numbers may be others."""
    differences: tuple[str, ...] = ()
    """Sentences on the final metrics of which the repeated run gives another number."""
    failure: str = ""
    """Why it could not be repeated."""
    has_diverged: bool = False
    """As in the folder."""
    is_unsettled: bool = False
    """It diverged on one of two platforms and ended on the other, which rounding alone may decide."""

    @property
    def is_confirmed(self) -> bool:
        """Whether the folder's numbers are those of the repetition."""
        return not self.differences and not self.failure

    def __str__(self) -> str:
        why = f" ({', '.join(self.differs)})" if self.differs else ""
        if self.failure:
            return f"{self.title}{why}: {'unsettled' if self.is_unsettled else 'not repeated'}: {self.failure}"
        if self.differences:
            return f"{self.title}{why}: {'; '.join(self.differences)}"
        how = "the same to the last bit" if self.tolerance is None else f"the same within {self.tolerance:g} points"
        if self.has_diverged:
            how = "diverged again"
        return f"{self.title}: {how}{why}"


def drawn(checked: Checked, share: float, seed: int) -> list[RunSpec]:
    """A random ``share`` of the runs, at least one, and all that diverged: whoever says so is rid of a seed.

    In the order of their ids, so that of the folder has no part.
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
        storing = Storing(store, rerun=False, patience=60.0, checkpoint_every=0, state_memory=None)
        selection = Selection(checked.suite.name, plugin_files=settings.plugin_files)
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
            yield Verified(title, None, failure=failures.get(spec.run_id, "its row is not for its backbone"))
            continue
        differs = (*elsewhere, *_other_code_or_data(recorded, again))
        before, after = recorded.get("failure"), again.get("failure")
        if before or after:
            yield _ended(title, before or "", after or "", differs, is_elsewhere=bool(elsewhere))
            continue
        points = None
        differences = tuple(_differences(recorded, again, points, checked.headlines))
        # elsewhere, too, all may be the same to the last bit, which is worth more
        if differences and differs:
            points = tolerance
            differences = tuple(_differences(recorded, again, points, checked.headlines))
        yield Verified(title, points, differs, differences)


def _ended(title: str, recorded: str, now: str, differs: tuple[str, ...], *, is_elsewhere: bool) -> Verified:
    """A run that diverged, or that does now: with the same words or, where anything differs, in whatever round."""
    if recorded and (now == recorded or (differs and now.startswith(DIVERGED))):
        return Verified(title, None, differs, has_diverged=True)
    what = f"now {now or 'it ends with a number'}; in the folder {recorded or 'it ended with a number'}"
    # of the two one has a number; the other diverged, or failed otherwise
    is_unsettled = is_elsewhere and (recorded or now).startswith(DIVERGED) and not (recorded and now)
    return Verified(title, None, differs, failure=what, is_unsettled=is_unsettled)


def _results(carried: Carried, suite: str) -> dict[str, Mapping[Any, Any]]:
    try:
        stored = load_runs(carried.uri, suite)
    except FedbenchError:  # none has come so far
        return {}
    return _by_id(stored.finished, stored.failed)


def _by_id(finished: pd.DataFrame, failed: pd.DataFrame) -> dict[str, Mapping[Any, Any]]:
    """A line each; those that failed have a ``failure``."""
    return {str(line["run_id"]): line for frame in (finished, failed) for line in frame.to_dict("records")}


def _other_machine(checked: Checked) -> Iterator[str]:
    """In what this machine is not the one that the folder was written on."""
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
"""By so much the tolerance is wider where what a table is ranked by is of few images."""
_EXACT = ("bytes_up", "bytes_down", "megabytes")
"""What no platform changes."""


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
