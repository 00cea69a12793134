"""What clients keep, beyond the memory budget in files: no number changes, and a checkpoint writes what has changed."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.rounds.clients import ClientStore, of_methods, settle, to_read
from fedbench.rounds.state import RunState, read_facts
from fedbench.runs.checkpoint import Checkpointing
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings
from tests.runs.kit import Listener, Stop, everything, specs_of

SUITE = """
name: clients
dataset: "embedded?train=120&test=40"
scenario: {preset: label-skew, clients: 6, participation: 0.5, dropout: 0.3, late_dropout: 0.3}
training: {rounds: 5, local_epochs: 1}
seeds: [0]
rows: [{method: scaffold}]
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def settings(cache, tmp_path) -> Settings:
    codes = defaultdict(lambda: "code")
    return Settings(cache, cache, checkpoints=Checkpointing(tmp_path / "kept", codes, 2, state_memory=0))


def spec_of(method: str, **sets: object) -> RunSpec:
    (spec,) = specs_of(SUITE, methods=(method,), sets=tuple(sets.items()))
    return spec


@pytest.mark.parametrize(
    ("method", "budget"),
    [
        ("scaffold", 0),  # keeps a control
        ("fedproto", 5e4),  # reads what clients keep when it evaluates; all its tensors are private
        *(
            pytest.param(name, budget, marks=pytest.mark.slow)
            for name in ("scaffold", "fedproto", "fedbn", "fedpcl", "fedloge", "rucr", "fedpgp", "moon+fedbn")
            for budget in (0, 5e4, 1e9)
        ),
    ],
)
def test_no_number_changes_with_the_budget_nor_where_a_run_is_stopped(settings, method, budget):
    alone = method in ("fedloge", "fedproto", "fedpcl")
    on_images = {
        "fedbn": "resnet8",
        "moon+fedbn": "resnet8",
        "fedproto": "convnet",
        "fedloge": "convnet",
        "rucr": "convnet",
    }
    sets = {"backbone": on_images[method]} if method in on_images else {}
    spec = spec_of(method, finetune_epochs=0 if alone else 1, **sets)
    whole = run_spec(spec, replace(settings, checkpoints=None))
    settings = replace(settings, checkpoints=replace(settings.checkpoints, state_memory=budget))
    with pytest.raises(Stop):
        run_spec(spec, settings, [Listener(3)])
    assert everything(run_spec(spec, settings)) == everything(whole)


def test_a_damaged_file_of_a_client_is_as_a_damaged_checkpoint(settings):
    spec = spec_of("scaffold")
    whole = run_spec(spec, replace(settings, checkpoints=None))
    with pytest.raises(Stop):
        run_spec(spec, settings, [Listener(5)])
    folder = settings.checkpoints.folder / spec.run_id
    older, newer = (
        {
            name
            for name, *_ in read_facts(folder / f"round-00000{n}.safetensors")["progress"]["clients"]["files"].values()
        }
        for n in (2, 4)
    )
    damaged = folder / min(newer - older)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    listener = Listener(-1)
    assert everything(run_spec(spec, settings, [listener])) == everything(whole)
    assert listener.resumed == 2 and "round-000004.safetensors is passed over" in listener.warnings[0]


def kept(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"m": {"c": torch.full((100,), value)}}


def begun(folder: Path, budget: float, clients: int = 4) -> tuple[ClientStore, RunState]:
    """The store and a state of so many clients, each with 400 bytes."""
    store = ClientStore(folder, "run", "cpu", budget)
    state = RunState(1, {}, {}, clients=store.clients, own=store.own)
    for client in range(clients):
        state.clients[client] = kept(float(client))
    settle(state)
    return store, state


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.glob("client-*")}


def test_the_least_recently_used_make_room_when_nothing_is_in_use(tmp_path):
    store, state = begun(tmp_path, 800)
    # all four were new, so there is to be room for four more
    assert len(files(tmp_path)) == 4 and store._size() == 0
    for client in (2, 0, 1):
        assert state.clients[client]["m"]["c"][0] == client
    assert store._size() == 1200, "what was handed out stays until it is settled: hooks may write to it"
    settle(state)
    assert [*store._here] == [0, 1]
    state.clients[2], state.clients[0]
    settle(state)
    assert [*store._here] == [2, 0]
    state.clients[3]
    assert [*store._here] == [0, 3], "a client that comes in takes the place of the one used longest ago"


def test_the_order_in_which_clients_came_stays(tmp_path):
    _, state = begun(tmp_path, 0, clients=0)
    for client in (5, 1, 3):
        state.own[client] = {"w": torch.ones(1) * client}
    settle(state)
    del state.own[5]
    state.own[5] = {}
    settle(state)
    assert [*state.own] == [*to_read(state.own)] == [1, 3, 5] and len(state.own) == 3
    assert 5 in to_read(state.own) and 5 not in state.clients and to_read(state.own)[5] == {}
    with pytest.raises(KeyError):
        to_read(state.clients)[5]
    with pytest.raises(KeyError):
        state.clients[5]


def test_a_checkpoint_writes_what_has_changed_and_names_the_rest(tmp_path):
    store, state = begun(tmp_path, math.inf)
    assert files(tmp_path) == set()
    first = store.index()
    assert len(files(tmp_path)) == 4
    assert store.index() == first
    store.keep_files([name for name, *_ in first["files"].values()])
    state.clients[1]["m"] = kept(7)["m"]
    state.clients[2]["m"]["c"].add_(1)
    state.clients[3]["other"] = {}
    state.clients[9] = {}
    second = store.index()
    same = {client for client in range(4) if first["files"][client] == second["files"][client]}
    assert same == {0} and 9 not in second["files"] and second["clients"] == [0, 1, 2, 3, 9]
    assert len(files(tmp_path)) == 4 + 3
    store.keep_files([])
    assert files(tmp_path) == {name for name, *_ in second["files"].values()}
    again = ClientStore(tmp_path, "run", "cpu", 0)
    again.restore(second)
    assert repr(dict(to_read(again.clients))) == repr(dict(state.clients))


def test_a_file_that_a_checkpoint_names_is_never_written_again(tmp_path):
    store, state = begun(tmp_path, 0, clients=1)
    index = store.index()
    store.keep_files([name for name, *_ in index["files"].values()])
    for value in (5, 6):
        # as when clients report before a round, and train in it
        state.clients[0] = kept(value)
        settle(state)
    assert len(files(tmp_path)) == 2, "the one in between is gone"
    again = ClientStore(tmp_path, "run", "cpu", 0)
    again.restore(index)
    assert again.clients[0]["m"]["c"][0] == 0 and state.clients[0]["m"]["c"][0] == 6


def test_reading_keeps_nothing_in_memory_and_opens_no_file_without_need(tmp_path):
    store, state = begun(tmp_path, 0)
    assert [client["m"]["c"][0] for client in to_read(state.clients).values()] == [0, 1, 2, 3]
    assert store._size() == 0
    for file in tmp_path.iterdir():
        file.unlink()
    assert [*of_methods(state.clients, {"others"})] == []
    with pytest.raises(FedbenchError, match="cannot be read"):
        [*of_methods(state.clients, {"m"})]


def test_a_file_of_another_time_is_refused(tmp_path):
    store, state = begun(tmp_path, 0, clients=2)
    one, other = sorted(tmp_path.iterdir())
    other.write_bytes(one.read_bytes())
    with pytest.raises(FedbenchError, match="is not the file that the run has written"):
        state.clients[1]
