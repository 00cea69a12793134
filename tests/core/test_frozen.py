"""Whoever is notified of a run can read what it gave; nothing they do to it reaches what is recorded."""

import json
import pickle
from copy import deepcopy
from dataclasses import asdict, replace

import numpy as np
import pytest

from fedbench.core.method.hooks import hookimpl
from fedbench.core.records import FrozenDict, RoundRecord, RunInfo, RunResult
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings
from fedbench.testing import tiny_dataset, tiny_spec
from fedbench.tuning.objectives import Objective

RECORD = RoundRecord(1, (0,), {"global_accuracy": 50.0}, 1, 1, 1.0, faults={"clients_late": 1})
RESULT = RunResult(
    (RECORD,),
    {"global_accuracy": 50.0},
    (0, 1),
    {"w": np.zeros(2)},
    1.0,
    server={"mine": {"s": np.zeros(1)}},
    clients={3: {"mine": {"c": np.ones(1)}}},
    own={3: {"w": np.ones(1)}},
)
INFO = RunInfo({"aggregate": "mine"}, "", "", 1, 1, 1, 1, 1, 1, groups={"head": (0,)})
WRITES = [
    lambda m: m.__setitem__("global_accuracy", 99.9),
    lambda m: m.__delitem__(next(iter(m))),
    lambda m: m.update(global_accuracy=99.9),
    lambda m: m.pop(next(iter(m))),
    lambda m: m.popitem(),
    lambda m: m.clear(),
    lambda m: m.setdefault("new", 1.0),
    lambda m: m.__ior__({"global_accuracy": 99.9}),
]


@pytest.mark.parametrize("copy", [lambda one: one, lambda one: pickle.loads(pickle.dumps(one)), deepcopy, replace])
def test_mappings_of_records_cannot_be_written_to_in_this_process_and_in_the_next(copy):
    record, result, info = (copy(one) for one in (RECORD, RESULT, INFO))
    mappings = [record.metrics, record.faults, result.summary, result.weights, result.server, result.server["mine"]]
    mappings += [result.clients, result.clients[3]["mine"], result.own[3], info.owners, info.groups]
    for mapping in mappings:
        before = dict(mapping)
        for write in WRITES:
            with pytest.raises(TypeError, match="read-only; change a copy"):
                write(mapping)
        assert mapping == before and isinstance(mapping, FrozenDict)
    assert record == RECORD and info == INFO


def test_arrays_of_a_result_cannot_be_written_to_and_the_ones_given_can():
    given = np.zeros(2)
    result = replace(RESULT, weights={"w": given})
    for array in (result.weights["w"], result.server["mine"]["s"], result.clients[3]["mine"]["c"], result.own[3]["w"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0
    given[0] = 1.0
    assert np.shares_memory(given, result.weights["w"])


def test_records_are_still_plain_data():
    assert json.loads(json.dumps(asdict(RECORD)))["metrics"] == {"global_accuracy": 50.0}
    assert RECORD.metrics | {"more": 1.0} == {"global_accuracy": 50.0, "more": 1.0}
    assert dict(RECORD.metrics) == {**RECORD.metrics} == RECORD.metrics


class Listener:
    """What a store would be told."""

    def __init__(self):
        self.heard = []

    @hookimpl
    def run_started(self, spec, info):
        self.heard.append(info)

    @hookimpl
    def round_finished(self, spec, record):
        self.heard.append(record)

    @hookimpl
    def run_finished(self, spec, info, result):
        self.heard += [info, result]


def ran(tmp_path, monkeypatch, name):
    """What a listener heard of a run of the method, and its result; without what takes time."""
    monkeypatch.setattr("fedbench.runs.prepare._dataset", lambda *_: tiny_dataset())
    listener = Listener()
    result = run_spec(tiny_spec(name, rounds=1), Settings(data_dir=tmp_path, cache_dir=tmp_path), [listener])
    return [*map(timeless, [*listener.heard, result])]


def timeless(one):
    if isinstance(one, RoundRecord):
        return replace(one, seconds=0.0)
    if isinstance(one, RunInfo):
        return replace(one, owners={})
    records = tuple(map(timeless, one.records))
    summary = {name: value for name, value in one.summary.items() if name != "train_seconds"}
    weights = {name: array.tolist() for name, array in one.weights.items()}
    return replace(one, records=records, summary=summary, weights=weights, seconds=0.0)


def forge(one):
    """Write to everything there is, past every guard."""
    forged = {"global_accuracy": 99.9, "personal_mean_client_accuracy": 99.9}
    for name, value in list(vars(one).items()):
        if isinstance(value, dict):
            for array in value.values():
                if isinstance(array, np.ndarray):
                    array.flags.writeable = True
                    array.fill(99.9)
            dict.update(value, forged)
            object.__setattr__(one, name, forged)
        elif isinstance(value, tuple | str | int | float):
            object.__setattr__(one, name, type(value)())


def test_nothing_a_method_does_to_what_it_is_told_reaches_what_is_recorded(mine, tmp_path, monkeypatch):
    def told_of_a_round(self, spec, record):
        forge(record)

    def told_of_the_start(self, spec, info):
        forge(info)

    def told_of_the_end(self, spec, info, result):
        for record in result.records:
            forge(record)
        forge(result)
        forge(info)

    answers = {"run_started": told_of_the_start, "round_finished": told_of_a_round, "run_finished": told_of_the_end}
    expected = ran(tmp_path, monkeypatch, "fedavg")
    assert len(expected) == 6  # the start, rounds 0 and 1, the end with its information, the result
    assert ran(tmp_path, monkeypatch, mine(**{name: hookimpl(answer) for name, answer in answers.items()})) == expected
    # what tuning goes by
    assert Objective("global_accuracy").of(expected[-1].summary) != 99.9


@pytest.mark.parametrize("write", WRITES)
def test_a_method_that_writes_to_a_record_fails_its_run(mine, tmp_path, monkeypatch, write):
    name = mine(round_finished=hookimpl(lambda self, spec, record: write(record.metrics)))
    with pytest.raises(TypeError, match="what a run gave is read-only"):
        ran(tmp_path, monkeypatch, name)


def test_a_method_cannot_tell_of_rounds_that_were_not(mine, tmp_path, monkeypatch):
    seen = []

    def look(self, task):
        seen.append([name for name in dir(task.hooks) if name.startswith("r")])

    ran(tmp_path, monkeypatch, mine(after_training=hookimpl(look)))
    assert seen[0] == ["relabel", "report", "reported"]
