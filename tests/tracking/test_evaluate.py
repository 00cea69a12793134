"""A recorded model gives its metrics back, and says what changed where it does not; which run an id means."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from fedbench.cli.app import main
from fedbench.cli.commands.reading import number
from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings
from fedbench.testing import tiny_dataset, tiny_spec
from fedbench.tracking import artifacts, store
from fedbench.tracking.evaluation import Evaluation, beside, evaluate_again, find_run, is_history
from fedbench.tracking.listener import Tracking
from fedbench.tracking.recording import Invocation
from fedbench.tracking.schema import store_uri

PERSONAL = '''
"""A model of each client's own."""

from dataclasses import dataclass

from fedbench.toolkit.fedavg import largest_logit
from fedbench.core.method.hooks import hookimpl
from fedbench.core.types import Predictions


@dataclass(frozen=True, kw_only=True)
class P:
    """None."""


class Personal:
    """Clients keep their weights and are scored by them."""

    name, citation, Params, recipe = "personal", "nobody", P, {}

    def __init__(self, params):
        self.params = params

    @hookimpl
    def after_training(self, task, update):
        """Keep."""
        task.state["personal"] = dict(update.weights)
        return {}

    @hookimpl
    def evaluate(self, task):
        """The global model, and each client's own where it has one."""
        alone = {}
        for client, held in task.client_state.items():
            if "personal" in held and client in task.clients:
                own = type(task)(task.model, held["personal"], task.buffers, task.inputs, task.num_classes)
                alone[client] = largest_logit(own).labels
        return Predictions(largest_logit(task).labels, alone)
'''


@dataclass(frozen=True)
class Recorded:
    """A store with finished runs."""

    uri: str
    settings: Settings
    specs: dict[str, RunSpec]

    def run(self, method: str) -> Any:
        return find_run(client_of(self.uri), self.specs[method].run_id)

    def files(self, method: str) -> Path:
        """Its artifacts, read in place: the store is a folder."""
        return Path(self.run(method).info.artifact_uri.removeprefix("file://"))


def client_of(uri: str) -> Any:
    client = store.open_store(uri, create=False)
    assert client is not None
    return client


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Iterator[None]:
    """Every data set is the tiny one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedbench.runs.prepare.load_dataset", lambda *_, **__: tiny_dataset())
        yield


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny: None) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    plugin = folder / "personal.py"
    plugin.write_text(PERSONAL)
    settings = Settings(folder, folder / "cache", (plugin,))
    uri = store_uri(str(folder / "store"))
    base = tiny_spec("fedavg", backbone="convnet", rounds=2, lr=0.05)
    specs = {
        "creff": tiny_spec("creff", backbone="convnet", rounds=1, finetune_epochs=1),
        "personal": base.model_copy(update={"method": "personal"}),
        "moon": tiny_spec("moon", backbone="convnet", rounds=1),
        "clip-zs": tiny_spec("clip-zs", backbone="clip:embedded"),
    }
    tracking = Tracking(uri, "tests", Invocation(command="fedbench run", runs=4, plugin_files=(plugin,)))
    for spec in specs.values():
        run_spec(spec, settings, [tracking])
    return Recorded(uri, settings, specs)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def fedbench(recorded: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`fedbench evaluate RUN_ID` on the recorded runs."""

    def call(asked: str, *options: str) -> Ended:
        where = ("--store", recorded.uri)
        monkeypatch.setenv("FEDBENCH_CACHE", str(recorded.settings.cache_dir))
        plugin = ("--plugin", str(recorded.settings.plugin_files[0]))
        monkeypatch.setattr(sys, "argv", ["fedbench", "evaluate", asked, *where, *plugin, *options])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return Ended(code, *capsys.readouterr())

    return call


Command = Callable[..., Ended]


@pytest.mark.parametrize("method", ["creff", "personal", "moon", "clip-zs"])
def test_a_recorded_model_gives_its_metrics_back(recorded: Recorded, method: str) -> None:
    again = evaluate_again(recorded.uri, recorded.specs[method].run_id, recorded.settings)
    assert again.is_equal
    assert again.causes == ()
    assert (again.predictions, again.changed_predictions) == (30, 0)
    frame = again.metrics.set_index("metric")
    assert {"global_accuracy", "balanced_accuracy", "worst_client_accuracy", "class_accuracy/bird"} <= set(frame.index)
    assert (frame["difference"] == 0).all()
    assert frame.loc["global_accuracy", "now"] == recorded.run(method).data.metrics["final/global_accuracy"]


def test_what_only_the_rounds_give_is_left_out_and_named(recorded: Recorded) -> None:
    again = evaluate_again(recorded.uri, recorded.specs["creff"].run_id, recorded.settings)
    assert again.left_out == (
        "bytes_down",
        "bytes_up",
        "finetuned_mean_client_accuracy",
        "finetuned_worst_client_accuracy",
        "last10_accuracy",
        "oracle_accuracy",
        "oracle_round",
        "seconds",
        "train_loss",
        "train_seconds",
    )
    assert is_history("selected_round") and is_history("selected_accuracy")
    assert not is_history("validation_accuracy") and not is_history("class_accuracy/seconds")


def test_only_methods_that_evaluate_themselves_leave_their_state(recorded: Recorded) -> None:
    def state(method: str) -> Any:
        return artifacts.read_state(recorded.files(method), recorded.specs[method].run_id, "cpu")

    assert {"head.weight", "head.bias"} <= set(state("creff").server["creff"])
    kept = state("personal").clients
    assert kept and all(set(held) == {"personal"} for held in kept.values())
    # moon keeps every client's weights, but evaluates as fedavg does
    assert state("moon").clients == {} and state("moon").server == {}
    assert state("clip-zs").weights == {} and state("clip-zs").round == 0


def test_the_clients_own_models_count(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the clients would be scored by the global model, which another number shows."""
    read = artifacts.read_state

    def without(folder: Path, run_id: str, device: str) -> Any:
        state = read(folder, run_id, device)
        state.clients.clear()
        return state

    monkeypatch.setattr("fedbench.tracking.evaluation.read_state", without)
    again = evaluate_again(recorded.uri, recorded.specs["personal"].run_id, recorded.settings)
    changed = set(again.metrics.loc[again.metrics["difference"] != 0, "metric"])
    assert changed and all(name.startswith("personal_") for name in changed)
    assert not again.is_equal and again.changed_predictions == 0


def test_predictions_that_are_missing_have_changed(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    read = artifacts.read_predictions
    monkeypatch.setattr("fedbench.tracking.evaluation.read_predictions", lambda *given: read(*given)[:-2])
    again = evaluate_again(recorded.uri, recorded.specs["moon"].run_id, recorded.settings)
    assert again.changed_predictions == 2 and not again.is_equal


def test_a_store_that_was_moved_still_has_its_models(recorded: Recorded, tmp_path: Path) -> None:
    old = Path(recorded.uri.removeprefix("sqlite:///")).parent
    away = tmp_path / "another name"
    old.rename(away)
    try:
        moved = store_uri(str(away))
        assert evaluate_again(moved, recorded.specs["moon"].run_id, recorded.settings).is_equal
        (away / "artifacts").rename(tmp_path / "lost")
        with pytest.raises(FedbenchError, match=f"are not in '{old}.*', where they were written, nor in '{away}"):
            evaluate_again(moved, recorded.specs["moon"].run_id, recorded.settings)
        (tmp_path / "lost").rename(away / "artifacts")
    finally:
        away.rename(old)


def test_evaluate_shows_both_numbers_and_ends_with_0(fedbench: Command, recorded: Recorded) -> None:
    run = recorded.run("creff")
    ended = fedbench(recorded.specs["creff"].run_id[:6])
    assert (ended.code, ended.err) == (0, "")
    assert f"run {recorded.specs['creff'].run_id}, MLflow {run.info.run_id}" in ended.out
    accuracy = f"{run.data.metrics['final/global_accuracy']:.2f}"
    line = next(line for line in ended.out.splitlines() if line.startswith("global_accuracy"))
    assert line.split() == ["global_accuracy", accuracy, accuracy, "0.00"]
    assert "class_accuracy/" not in ended.out
    assert "Equal as well: the accuracies of 4 classes." in ended.out
    assert "equal: every metric and all 30 predictions are as recorded, bit for bit." in ended.out
    assert max(map(len, ended.out.splitlines()[:5])) <= 100


def test_evaluate_ends_with_1_and_says_what_changed(
    fedbench: Command, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = artifacts.read_state
    run_id = recorded.specs["moon"].run_id
    another = (artifacts.read_predictions(recorded.files("moon"), run_id)[0] + 1) % 4

    def decided(folder: Path, run_id: str, device: str) -> Any:
        state = read(folder, run_id, device)
        state.weights["head.bias"][another] = 1e9
        return state

    monkeypatch.setattr("fedbench.tracking.evaluation.read_state", decided)
    ended = fedbench(run_id)
    assert ended.code == 1
    assert re.search(
        r"different: \d+ of \d+ metrics and [1-9]\d* of 30 predictions are not the recorded ones", ended.out
    )
    # whichever class every sample is now taken for, all of its samples are right
    assert re.search(r"class_accuracy/\w+ +\d+\.\d\d +100\.00 +\+\d+", ended.out)
    assert "Code, versions, data and weights are the recorded ones." in ended.out
    monkeypatch.setattr("fedbench.plugins.provenance.RunCode.hash", "c0de" * 16)
    monkeypatch.setattr("fedbench.tracking.evaluation.versions", lambda: {"torch": "0.1"})
    ended = fedbench(run_id)
    recorded_code = recorded.run("moon").data.tags["fedbench.code_hash"][:16]
    assert f"What changed since: code {recorded_code} then, c0dec0dec0dec0de now; torch " in ended.out
    assert "then, 0.1 now." in ended.out


def test_a_metric_that_is_gone_differs_and_one_that_is_new_does_not(recorded: Recorded) -> None:
    def evaluation(before: dict[str, float], now: dict[str, float], changed: int = 0) -> Evaluation:
        return Evaluation(recorded.run("moon"), beside(before, now), (), 3, changed, ())

    assert evaluation({"a": 1.0}, {"a": 1.0, "new": 3.0}).is_equal
    assert evaluation({"a": 1.0}, {"a": 1.0, "new": 3.0}).new_metrics == ["new"]
    gone = evaluation({"a": 1.0, "gone": 2.0}, {"a": 1.0})
    assert gone.changed_metrics == ["gone"] and not gone.is_equal
    assert evaluation({"a": 1.0}, {"a": 1.0 + 2**-52}).changed_metrics == ["a"]
    assert not evaluation({"a": 1.0}, {"a": 1.0}, changed=1).is_equal


def test_metrics_on_one_side_only_are_shown() -> None:
    frame = beside({"a": 1.0, "gone": 2.0}, {"new": 3.0, "a": 1.5})
    assert frame["metric"].tolist() == ["new", "a", "gone"]
    assert frame["difference"].tolist()[1] == 0.5
    assert frame["difference"].isna().tolist() == [True, False, True]
    assert frame["recorded"].isna().tolist() == [True, False, False]
    pd.testing.assert_series_equal(beside({}, {})["now"], pd.Series([], dtype=float, name="now"))


@pytest.mark.parametrize(
    ("value", "signed", "shown"),
    [
        (61.5, False, "61.50"),
        (0.0, True, "0.00"),
        (-1.25, True, "-1.25"),
        (0.5, True, "+0.50"),
        (1e-13, True, "+1.0e-13"),
        (1193856.0, False, "1,193,856"),
        (float("nan"), True, "–"),
    ],
)
def test_numbers_keep_what_a_reader_needs(value: float, signed: bool, shown: str) -> None:
    assert number(value, signed=signed) == shown


INFO = RunInfo({}, "data", "weights", 2, 1, 10, 4, 6, 24)


def record(tracking: Tracking, spec: RunSpec, accuracy: float | None) -> None:
    """A run that ended with this accuracy; without one, a run that goes on."""
    tracking.run_started(spec, INFO)
    tracking.round_finished(spec, RoundRecord(0, (), {"global_accuracy": 1.0}, 0, 0, 0.0))
    if accuracy is not None:
        tracking.run_finished(spec, INFO, RunResult((), {"global_accuracy": accuracy}, (), {}, 1.0))


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunSpec, RunSpec]:
    """A store with a run recorded twice, then begun a third time, and with another run."""
    uri = store_uri(str(tmp_path_factory.mktemp("ids") / "store"))
    twice, other = RunSpec(), RunSpec(seed=1)
    record(Tracking(uri, "first"), twice, 10.0)
    record(Tracking(uri, "second", Invocation(command="fedbench run", runs=2)), twice, 20.0)
    for run in (twice, other):
        record(listener := Tracking(uri, "first"), run, None)
        listener._send(listener._open[run.run_id])
    return uri, twice, other


def test_an_id_or_its_first_digits_mean_the_newest_finished_recording(ids: tuple[str, RunSpec, RunSpec]) -> None:
    uri, twice, other = ids
    client = client_of(uri)
    assert find_run(client, twice.run_id).data.metrics["final/global_accuracy"] == 20.0
    assert find_run(client, twice.run_id[:4].upper()).data.metrics["final/global_accuracy"] == 20.0
    earlier = next(run for _, run in store.runs_of(client, "first", "metrics.`final/global_accuracy` = 10"))
    assert find_run(client, earlier.info.run_id).info.run_id == earlier.info.run_id
    assert find_run(client, earlier.info.run_id[:12]).info.run_id == earlier.info.run_id
    assert find_run(client, other.run_id).info.status == "RUNNING"


def test_an_id_that_means_no_run_or_several_is_refused(
    ids: tuple[str, RunSpec, RunSpec], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uri, twice, other = ids
    client = client_of(uri)
    for wrong in ("abc", "not-hex!", "", "a' OR 1=1", "a" * 33):
        with pytest.raises(FedbenchError, match="is no run id: give 4 to 32 hexadecimal digits"):
            find_run(client, wrong)
    near = twice.run_id[:7] + ("0" if twice.run_id[7] != "0" else "1")
    with pytest.raises(FedbenchError, match=f"no run's id begins with '{near}'; did you mean {twice.run_id} "):
        find_run(client, near)
    (parent,) = [run for _, run in store.filed(client, "second") if run.data.tags["fedbench.kind"] == "invocation"]
    with pytest.raises(FedbenchError, match=f"is a whole command, .*; give one of its runs: {twice.run_id} "):
        find_run(client, parent.info.run_id)
    monkeypatch.setattr(RunSpec, "run_id", property(lambda self: f"abcdef{self.seed:010x}"))
    for seed in range(2, 4):
        record(Tracking(uri, "alike"), RunSpec(seed=seed), 1.0)
    with pytest.raises(FedbenchError, match=r"abcd is the beginning of several runs' ids; .*abcdef0000000002 .*seed 2"):
        find_run(client, "abcd")
    assert find_run(client, "abcdef0000000003").data.tags["seed"] == "3"
    empty = store.open_store(store_uri(str(tmp_path / "empty")), create=True)
    with pytest.raises(FedbenchError, match="the store has no runs; fill it with"):
        find_run(empty, "abcd")


def test_a_run_without_a_model_cannot_be_evaluated(
    ids: tuple[str, RunSpec, RunSpec], recorded: Recorded, tmp_path: Path
) -> None:
    uri, _, other = ids
    with pytest.raises(FedbenchError, match=f"run {other.run_id} .* is RUNNING; only a finished run has a model"):
        evaluate_again(uri, other.run_id, recorded.settings)
    with pytest.raises(FedbenchError, match="there is no store at .*missing.*; name yours with --store"):
        evaluate_again(store_uri(str(tmp_path / "missing")), "abcd", recorded.settings)


def test_a_listener_sees_numpy_arrays_only(recorded: Recorded) -> None:
    """A result crosses to the process that writes it; arrays do so by value, tensors by shared memory."""
    seen: list[RunResult] = []

    class Listener:
        @hookimpl
        def run_finished(self, result: RunResult) -> None:
            seen.append(result)

    run_spec(recorded.specs["personal"], recorded.settings, [Listener()])
    (result,) = seen
    nested = [*result.server.values(), *(held for methods in result.clients.values() for held in methods.values())]
    arrays = [array for named in (result.weights, result.buffers, *nested) for array in named.values()]
    assert arrays and not any(isinstance(array, torch.Tensor) for array in arrays)
    assert result.clients
