"""A run that is stopped goes on from its newest checkpoint and ends as if it had never stopped, bit for bit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl
from fedbench.core.spec import RunSpec
from fedbench.rounds.executors.cohort import Cohort, Plan
from fedbench.rounds.executors.sequential import Sequential
from fedbench.rounds.state import RunState, load_state, save_state
from fedbench.runs import checkpoint
from fedbench.runs.checkpoint import Checkpointing, discard
from fedbench.runs.engines.engine import execute
from fedbench.runs.engines.events import RunFailed, RunFinished, RunStarted, RunWarned
from fedbench.runs.job import checkpoints_of, run_spec
from fedbench.runs.prepare import Settings, prepare
from tests.runs.kit import Listener, Stop, everything, method_file, specs_of

SUITE = """
name: checkpoints
dataset: "embedded?train=240&test=40"
scenario: {preset: label-skew, clients: 4, participation: 0.5}
training: {rounds: 6}
seeds: [0]
rows: [{method: scaffold}]
"""
UNSEEDED = """
noise = np.random.rand() + random.random()
return {n: v + 1e-3 * (noise + torch.randn(v.shape)) for n, v in average(task).items()}

@hookimpl
def local_train(self, task):
    # trained, and noise: also where a client is fine-tuned after the last round
    update = local_sgd(task)
    return replace(update, weights={n: v + 0.05 * torch.randn(v.shape) for n, v in update.weights.items()})
"""
"""Draws from the global generators, which nobody should, and remembers nothing."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    method_file(folder, "unseeded", UNSEEDED)
    return folder


@pytest.fixture
def settings(cache, tmp_path) -> Settings:
    return Settings(cache, cache, (cache / "unseeded.py",), checkpoints=Checkpointing(tmp_path / "kept", of("code"), 2))


def of(code: str) -> defaultdict[str, str]:
    """The code of every method's runs."""
    return defaultdict(partial(str, code))


def spec_of(method: str, settings: Settings, **sets: object) -> RunSpec:
    (spec,) = specs_of(SUITE, settings.plugin_files, methods=(method,), sets=tuple(sets.items()))
    return spec


def stopped(spec: RunSpec, settings: Settings, after: int) -> None:
    with pytest.raises(Stop):
        run_spec(spec, settings, [Listener(after)])


@pytest.mark.parametrize(
    "method",
    ["scaffold", "unseeded", *(pytest.param(m, marks=pytest.mark.slow) for m in ("fedglcl+moon", "fedloge", "capt"))],
)
def test_a_run_stopped_twice_ends_as_one_that_never_stopped(settings, method):
    # of capt, breaks fall where a client's model goes on
    further = {"capt.period": 3} if method == "capt" else {}
    spec = spec_of(method, settings, eval_every=2, finetune_epochs=0 if method == "fedloge" else 1, **further)
    whole = run_spec(spec, replace(settings, checkpoints=None))
    torch.randn(7)  # what else a process has drawn is nothing to a run
    stopped(spec, settings, after=3)
    stopped(spec, settings, after=5)
    heard = Listener()
    resumed = run_spec(spec, settings, [heard])
    assert everything(resumed) == everything(whole)
    # the rounds before the break are told once more, so that whoever records them has them all, once
    assert heard.resumed == 4 and heard.rounds == list(range(7)) and heard.warnings == []
    assert resumed.seconds > sum(record.seconds for record in resumed.records)


def test_a_run_stopped_after_its_last_round_has_only_its_end_to_do(settings):
    spec = spec_of("fedavg", settings, finetune_epochs=1)
    whole = run_spec(spec, replace(settings, checkpoints=None))

    class StopAtTheEnd:
        @hookimpl
        def run_finished(self) -> None:
            raise Stop

    with pytest.raises(Stop):
        run_spec(spec, settings, [StopAtTheEnd()])
    heard = Listener()
    assert everything(run_spec(spec, settings, [heard])) == everything(whole) and heard.resumed == 6


def test_the_newest_two_are_kept_and_a_stored_run_lets_go_of_them(settings):
    spec = spec_of("fedavg", settings)
    run_spec(spec, settings)
    folder = settings.checkpoints.folder / spec.run_id
    assert sorted(file.name for file in folder.iterdir()) == ["round-000004.safetensors", "round-000006.safetensors"]
    discard(settings.checkpoints.folder, spec.run_id)
    assert not folder.exists()


def test_damaged_checkpoints_are_passed_over_with_a_warning_and_never_gone_on_with(settings):
    spec = spec_of("fedavg", settings)
    whole = run_spec(spec, replace(settings, checkpoints=None))
    stopped(spec, settings, after=5)
    newest, older = (settings.checkpoints.folder / spec.run_id / f"round-00000{n}.safetensors" for n in (4, 2))
    damaged = bytearray(newest.read_bytes())
    damaged[-9] ^= 16
    newest.write_bytes(bytes(damaged))
    heard = Listener()
    assert everything(run_spec(spec, settings, [heard])) == everything(whole)
    assert heard.resumed == 2 and "round-000004.safetensors is passed over" in heard.warnings[0]
    discard(settings.checkpoints.folder, spec.run_id)
    stopped(spec, settings, after=5)
    for file in (newest, older):
        file.write_bytes(file.read_bytes()[:100])
    heard = Listener()
    assert everything(run_spec(spec, settings, [heard])) == everything(whole)
    assert heard.resumed == 0 and len(heard.warnings) == 2


@pytest.mark.parametrize("change", ["code", "executor"])
def test_what_other_code_or_another_executor_left_is_not_gone_on_with(settings, change):
    spec = spec_of("fedavg", settings)
    stopped(spec, settings, after=3)
    other = {
        "code": replace(settings, checkpoints=replace(settings.checkpoints, codes=of("other"))),
        "executor": replace(settings, executor="sequential"),
    }[change]
    info = prepare(spec, settings).info
    assert checkpoints_of(spec, info.data_hash, info.weights_hash, settings).round() == 2
    assert checkpoints_of(spec, info.data_hash, info.weights_hash, other).round() == 0
    assert checkpoints_of(spec, "other data", info.weights_hash, settings).round() == 0
    # what is left of it does not crowd out the run's own, even if it had got further
    stopped(spec, settings, after=5)
    heard = Listener()
    with pytest.raises(Stop):
        run_spec(spec, other, [heard, Listener(3)])
    assert heard.resumed == 0 and "is of other code, data or weights" in heard.warnings[0]
    heard = Listener()
    run_spec(spec, other, [heard])
    assert heard.resumed == 2 and heard.warnings == []


def test_halves_of_checkpoints_that_a_killed_process_left_are_deleted(settings):
    spec = spec_of("fedavg", settings)
    folder = settings.checkpoints.folder / spec.run_id
    folder.mkdir(parents=True)
    (folder / ".round-000002.safetensors.77.ab.tmp").write_bytes(b"half")
    stopped(spec, settings, after=1)
    assert list(folder.iterdir()) == []


def test_a_state_comes_back_with_its_order_its_empty_parts_and_the_layout_of_its_tensors(tmp_path):
    kernels = torch.randn(8, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    state = RunState(
        3,
        {
            "z": kernels,
            "a": torch.randn(4, 6).T,
            "1x1": torch.randn(5, 3, 1, 1).to(memory_format=torch.channels_last),
        },
        {"n": torch.tensor(5), "same": torch.ones(1).expand(4)},
        {"empty": {}, "m": {"v": kernels.clone()}},
        {7: {}, 2: {"m": {}}, 5: {"m": {"h": torch.randn(2).bfloat16()}}},
        {3: {}, 1: {"q": torch.zeros(0, 3)}},
    )
    save_state(state, tmp_path / "state", "run")
    again = load_state(tmp_path / "state", "run")
    assert repr(again) == repr(state) and list(again.clients) == [7, 2, 5] and again.clients[2] == {"m": {}}
    for one, other in ((state.weights, again.weights), (state.server["m"], again.server["m"])):
        assert [tensor.stride() for tensor in other.values()] == [tensor.stride() for tensor in one.values()]


def test_a_file_has_the_memory_of_its_tensors_in_their_order_and_copies_what_they_share(tmp_path):
    table = torch.randn(3, 4)
    kernels = torch.randn(8, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    weights = {"row": table[1], "same": table[1], "column": table[:, 1], "kernels": kernels, "table": table}
    save_state(RunState(0, weights, {}), tmp_path / "state", "run")
    assert (tmp_path / "state").read_bytes().find(kernels.permute(0, 2, 3, 1).contiguous().numpy().tobytes()) > 0
    found = load_state(tmp_path / "state", "run").weights
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    found["row"].zero_()
    assert torch.equal(found["same"], table[1]) and torch.equal(
        load_state(tmp_path / "state", "run").weights["row"], table[1]
    )


def test_without_a_number_of_rounds_one_is_written_after_so_many_seconds(settings, monkeypatch):
    settings = replace(settings, checkpoints=replace(settings.checkpoints, every=0))
    spec = spec_of("fedavg", settings)
    run_spec(spec, settings)
    assert not settings.checkpoints.folder.exists()
    monkeypatch.setattr(checkpoint, "SECONDS", 0.0)
    stopped(spec, settings, after=3)
    kept = sorted(file.name for file in (settings.checkpoints.folder / spec.run_id).iterdir())
    assert kept == ["round-000001.safetensors", "round-000002.safetensors"]


def test_a_checkpoint_that_cannot_be_written_costs_the_run_nothing_but_a_warning(settings, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise FedbenchError("can't write the run state: No space left on device; free space.")

    spec = spec_of("fedavg", settings)
    monkeypatch.setattr(checkpoint, "save_state", full)
    events = list(execute([spec], settings, 1))
    assert [type(event) for event in events if isinstance(event, RunStarted | RunFinished | RunFailed)] == [
        RunStarted,
        RunFinished,
    ]
    warnings = [event.warning for event in events if isinstance(event, RunWarned)]
    assert [warning.partition(":")[0] for warning in warnings] == [f"no checkpoint after round {n}" for n in (2, 4, 6)]


def test_an_executor_goes_by_what_it_had_found_out_before_the_break(settings):
    run = prepare(spec_of("fedprox", settings), settings)
    assert isinstance(run.executor, Cohort)
    first = Cohort(run.assembly, Sequential(), strict=False)
    first._plans[("shapes", (), 1, (False, False))] = Plan(None, reason="its loss is not what it was")
    again = Cohort(run.assembly, Sequential(), strict=False)
    again.recall(first.known())
    kind_with_other_addresses = ("shapes", (), 2, (False, False))
    found = again._recalled(kind_with_other_addresses, None)
    assert found == Plan(None, reason="its loss is not what it was")
    assert again.known() == first.known() and again._recalled(("others", (), 1, (False, False)), None) is None


def test_a_plan_to_train_at_once_is_recalled_as_it_was(settings):
    from fedbench.rounds.messages import broadcast, client_task

    run = prepare(spec_of("fedprox", settings), settings)
    state = run.initial_state()
    tasks = [client_task(run, state, 1, 0, client, broadcast(run, state, client)) for client in range(3)]
    trained = run.executor.train(tasks)
    again = Cohort(run.assembly, Sequential(), strict=False)
    again.recall(run.executor.known())
    again._planned = None  # type: ignore[assignment,method-assign] - it must not try anything out
    for one, other in zip(trained, again.train(tasks), strict=True):
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    assert again.description == run.executor.description and again.description.startswith("cohort")
