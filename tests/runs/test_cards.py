"""Runs on several CUDA cards: who goes where, what fits there, and what had too little memory has a card to itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.runs.engines import cards, engine, worker
from fedbench.runs.engines.cards import CONTEXT, cards_for, require_devices
from fedbench.runs.engines.engine import Policy, Processes, default_workers, execute
from fedbench.runs.engines.events import RoundFinished, RunFailed, RunFinished, RunRetried, failure_of
from fedbench.runs.engines.worker import Apart, OnCard, Seen, Work
from fedbench.runs.prepare import Loaded, Settings
from tests.runs.kit import outcomes, specs_of

GB = 2**30
SETTINGS = Settings(Path("data"), Path("cache"))


class FakeWorker:
    """A worker that a test moves: what it tells is seen at the next look."""

    def __init__(self, settings: Settings, memory: int | None, card: int | None) -> None:
        self.card, self.on_card, self.is_closed = card, None, False
        self._pipe, self._there = Pipe()
        self._seen = Seen()

    def begin(self, work: Work) -> None:
        self.spec, self.is_well = work.spec, True

    def tell(self, *events: Any, is_over: bool = False, **on_card: int) -> None:
        self._seen, self.on_card = Seen(events, is_over, 0), OnCard(**on_card) if on_card else self.on_card
        self.is_well = not any(isinstance(event, RunFailed) for event in events)
        self._there.send(None)

    def trained(self, free: int, peak: int) -> None:
        self.tell(RoundFinished(self.spec, SimpleNamespace(round=1)), free=free, peak=peak)

    def finished(self) -> None:
        self.tell(RunFinished(self.spec, None, None), is_over=True)

    def signs(self) -> list[Any]:
        return [self._pipe]

    def look(self) -> Seen:
        while self._pipe.poll():
            self._pipe.recv()
        seen, self._seen = self._seen, Seen()
        return seen

    def can_begin(self) -> bool:
        return self.is_well and not self.is_closed

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "visible_cards", lambda: 2)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    """Those that a `Processes` has started, in order."""
    made: list[FakeWorker] = []
    monkeypatch.setattr(engine, "Worker", lambda *given: made.append(FakeWorker(*given)) or made[-1])
    return made


def runs(number: int, device: str = "cuda", label: str = "a") -> list[RunSpec]:
    return [RunSpec(seed=seed, device=device, label=label) for seed in range(number)]


def pool(jobs: int, *devices: str) -> Processes:
    return Processes(SETTINGS, jobs, cards=cards_for(runs(1), devices))


def test_runs_fill_the_cards_evenly_once_one_has_trained(workers):
    there, specs = pool(3), runs(7)
    assert there.slots() == 6
    there.begin(specs[0])
    there.begin(specs[1])
    assert [one.card for one in workers] == [0, 1] and not there.has_room(specs[2])
    workers[0].tell(RoundFinished(specs[0], SimpleNamespace(round=0)), free=20 * GB, peak=GB)
    there.wait(1)
    assert not there.has_room(specs[2])  # nothing was trained yet
    for one in workers[:2]:
        one.trained(free=20 * GB, peak=2 * GB)
    there.wait(1)
    there.wait(0)
    for spec in specs[2:6]:
        assert there.has_room(spec)
        there.begin(spec)
    assert [one.card for one in workers] == [0, 1, 0, 1, 0, 1] and not there.has_room(specs[6])
    workers[3].finished()
    there.wait(1)
    there.begin(specs[6])
    assert workers[3].spec == specs[6] and len(workers) == 6  # the worker goes on, on its card


def test_runs_begin_only_where_the_forecast_fits(workers):
    there, (first, second, third), (other,) = pool(9, "cuda:1"), runs(3), runs(1, label="b")
    there.begin(first)
    workers[0].trained(free=10 * GB, peak=9 * GB // 2)  # its own context apart, so 11 for all
    there.wait(1)
    there.begin(second)
    assert not there.has_room(third) and not there.has_room(other)  # 3 x (4.5 + 1 for CUDA); a new row counts as much
    workers[1].tell(RunFinished(second, None, None), is_over=True, free=GB, peak=5 * GB)
    there.wait(1)
    assert not there.has_room(third)  # a row takes what its largest run took
    workers[0].finished()
    there.wait(1)
    there.begin(other)
    workers[0].trained(free=GB, peak=GB // 2)
    there.wait(1)
    assert there.has_room(third) and CONTEXT == GB
    assert {one.card for one in workers} == {1}


def test_a_run_alone_has_its_card_and_no_other(workers):
    there, specs = pool(3), runs(5)
    for number in range(2):
        there.begin(specs[number])
        workers[number].trained(free=20 * GB, peak=GB)
        there.wait(1)
    assert there.has_room(specs[2]) and not there.has_room(specs[2], alone=True)
    workers[1].finished()
    there.wait(1)
    there.begin(specs[2], alone=True)
    assert workers[1].is_closed and workers[2].card == 1  # what was idle there holds memory
    there.begin(specs[3])
    there.begin(specs[4])
    assert [one.card for one in workers[3:]] == [0, 0] and not there.has_room(specs[1])
    workers[2].finished()
    there.wait(1)
    assert there.has_room(specs[1])


def test_a_run_keeps_to_the_card_that_it_names_and_runs_on_the_cpu_to_none(workers):
    mixed = [*runs(1), *runs(1, "cuda:1"), *runs(2, "cpu")]
    there = Processes(SETTINGS, 1, cards=cards_for(mixed, ["cuda:0"]))
    for spec in mixed[:3]:
        there.begin(spec)
    assert [(one.card, one.spec.device) for one in workers] == [(0, "cuda"), (None, "cuda:1"), (None, "cpu")]
    assert there.slots() == 2 and not any(map(there.has_room, mixed))
    workers[1].finished()
    there.wait(1)
    assert there.has_room(mixed[1]) and not there.has_room(mixed[0]) and not there.has_room(mixed[3])


def test_cores_are_shared_out_among_cards(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)), raising=False)
    assert default_workers() == default_workers({"cuda": (3,), "cpu": ()}) == 9
    assert default_workers({"cuda": (0, 1)}) == 4


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def with_full_card(monkeypatch: pytest.MonkeyPatch, times: int, retries: int) -> tuple[list[int], list[Any]]:
    """Seeds as they begin, and events, of runs of which seed 1 finds its card full so often."""
    begun: list[int] = []

    class Quick(FakeWorker):
        def begin(self, work: Work) -> None:
            super().begin(work)
            begun.append(work.spec.seed)
            is_full = work.spec.seed == 1 and begun.count(1) <= times
            end = failure_of(work.spec, FULL) if is_full else RunFinished(work.spec, None, None)
            self.tell(end, is_over=True, free=20 * GB, peak=GB)

    monkeypatch.setattr(engine, "Worker", Quick)
    policy = Policy(retries=retries, pause=60)
    return begun, list(execute(runs(4), SETTINGS, 1, engine=pool(2, "cuda:0"), policy=policy))


def test_a_run_that_finds_its_card_full_is_repeated_with_one_to_itself(monkeypatch):
    begun, events = with_full_card(monkeypatch, 1, retries=2)
    (again,) = [event for event in events if isinstance(event, RunRetried)]
    assert again.reason.startswith("its card was full, so it is repeated with one to itself: out of memory: OutOf")
    assert begun == [0, 1, 2, 3, 1] and isinstance(events[-1], RunFinished) and events[-1].spec.seed == 1


@pytest.mark.parametrize(("retries", "attempts", "told"), [(2, 2, " (with a card to itself)"), (0, 1, "2.00 GiB.")])
def test_a_run_for_which_a_card_is_too_small_has_failed(retries, attempts, told, monkeypatch):
    begun, events = with_full_card(monkeypatch, 9, retries)
    (failed,) = [event for event in events if isinstance(event, RunFailed)]
    assert failed.reason.startswith("out of memory: ") and failed.reason.endswith(told)
    assert begun.count(1) == attempts and failed.is_unworkable == (attempts == 2)


def test_a_full_card_is_told_from_a_full_memory():
    for text in ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"):
        assert failure_of(RunSpec(), RuntimeError(text)).is_card_full
    wrapped = FedbenchError("it can't be encoded")
    wrapped.__cause__ = FULL
    assert failure_of(RunSpec(), wrapped).is_card_full and failure_of(RunSpec(), wrapped).may_pass
    assert not failure_of(RunSpec(), MemoryError()).is_card_full


@pytest.mark.parametrize(
    ("device", "devices", "message"),
    [
        ("cuda", ["cuda:0", "cuda:7"], r"--devices: 'cuda:7' is not there; torch sees cuda:0, cuda:1 here\."),
        ("cuda", ["cuda"], r"'cuda' is not there"),
        ("cuda:1", ["cuda:1"], r"--devices cuda:1 is for runs with device=cuda, and here device is cuda:1; leave it"),
    ],
)
def test_cards_that_are_not_there_or_for_no_run_are_refused(device, devices, message):
    with pytest.raises(FedbenchError, match=message):
        require_devices(runs(1, device), devices)


def test_without_devices_all_cards_are_shared():
    assert cards_for([*runs(1), *runs(1, "cuda:5"), *runs(1, "cpu")]) == {"cuda": (0, 1), "cuda:5": (5,), "cpu": ()}
    assert cards_for(runs(1), ["cuda:1", "cuda:1"]) == {"cuda": (1,)}


def look_around(_: None, settings: Settings, loaded: Loaded, emit: Callable[[Any], None]) -> bool:
    emit((os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")))
    return True


def test_a_worker_sees_its_card_alone_and_stays_there(tmp_path):
    apart = Apart(Settings(tmp_path, tmp_path, devices=("cuda:1",)))
    seen: list[Any] = []
    try:
        for spec in (*runs(2), *runs(1, "cpu")):
            assert apart.carry_out(Work(look_around, None, spec), seen.append) == 0
    finally:
        apart.close()
    (one, card), (same, _), (other, none) = seen
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    assert one == same != other and none == visible and card == (visible.split(",")[1] if visible else "1")


def test_cards_are_numbered_among_those_that_are_visible():
    assert [worker._name_of(1, ""), worker._name_of(1, "3, GPU-5c"), worker._name_of(0, "3,5")] == ["1", "GPU-5c", "3"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_runs_on_a_card_share_a_worker_and_its_context(tmp_path, monkeypatch):
    monkeypatch.undo()
    specs = specs_of(methods=("fedavg",), sets=(("device", "cuda"),))
    settings = Settings(tmp_path, tmp_path / "cache")
    there = Processes(settings, 1, cards={"cuda": (0,)})
    started: list[Any] = []
    new = there._new
    monkeypatch.setattr(there, "_new", lambda *place: started.append(new(*place)) or started[-1])
    assert len(outcomes(execute(specs, settings, 1, engine=there))) == 2 and len(started) == 1
    assert started[0].process.on_card.peak > 0
