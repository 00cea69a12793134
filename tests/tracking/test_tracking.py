"""Tracking and the store, with handmade events: what is written, when, and how runs end."""

import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import pytest

from fedbench.cli.commands.reading import ui
from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl, plugin_manager, relay
from fedbench.core.method.tasks import ClientTask
from fedbench.core.metric_names import is_reserved
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec, Training
from fedbench.core.types import Update
from fedbench.kinds.registry import Registered
from fedbench.plugins import provenance
from fedbench.plugins.provenance import Codes, MethodCode, RunCode
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings
from fedbench.testing import tiny_dataset, tiny_spec
from fedbench.toolkit.local_training import local_sgd
from fedbench.tracking import artifacts, recording, store
from fedbench.tracking import listener as tracking
from fedbench.tracking.listener import Tracking
from fedbench.tracking.read import FolderReader, Origin, open_reader, stored_runs
from fedbench.tracking.recording import Invocation, metric_name
from fedbench.tracking.schema import SEAL, check_rounds, local_artifacts, read_record, read_rounds, store_uri
from fedbench.tracking.store import ui_command
from fedbench.tracking.tags import flat_params, run_tags
from fedbench.workflow.execution import invocation
from fedbench.workflow.selection import Selection

INFO = RunInfo(
    owners={"local_loss": "fedclip, fedavg"},
    data_hash="d" * 64,
    weights_hash="w" * 64,
    num_clients=4,
    cohort_size=2,
    num_train=40,
    num_test=8,
    trainable_parameters=6,
    round_bytes=24,
)
WEIGHTS = {"head.weight": np.arange(6, dtype=np.float32).reshape(3, 2).T}
BUFFERS = {"steps": np.array(7)}


def spec(method: str = "fedprox", seed: int = 0, **training: Any) -> RunSpec:
    params = {"fedprox": {"mu": 0.5}} if method == "fedprox" else {}
    return RunSpec(method=method, params=params, seed=seed, training=Training(rounds=2, **training))


def record(number: int, accuracy: float) -> RoundRecord:
    metrics = {"global_accuracy": accuracy, "class_accuracy/don't know": 1.0}
    sent = 0 if number == 0 else 48
    return RoundRecord(number, (0, 3), metrics, bytes_up=sent, bytes_down=2 * sent, seconds=0.5)


def result(accuracy: float) -> RunResult:
    summary = {"global_accuracy": accuracy, "bytes_up": 96.0}
    records = tuple(record(number, accuracy) for number in range(3))
    server = {"creff": {"head.bias": np.ones(2, dtype=np.float32)}}
    clients = {3: {"own": {"head.bias": np.full(2, 0.5, dtype=np.float32)}}}
    return RunResult(records, summary, (2, 0, 1), WEIGHTS, 3.25, BUFFERS, server, clients)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return store_uri(str(tmp_path_factory.mktemp("a folder") / "my store"))


@pytest.fixture
def listener(uri: str, request: pytest.FixtureRequest) -> Tracking:
    """A listener with an experiment of its own."""
    return Tracking(uri, request.node.name)


@pytest.fixture
def runs(uri: str, request: pytest.FixtureRequest) -> Any:
    """The runs of the test's own experiment, by run name."""

    def read() -> dict[str, Any]:
        client = store.open_store(uri, create=False)
        assert client is not None
        return {run.info.run_name: run for _, run in store.runs_of(client, request.node.name)}

    return read


def play(listener: Tracking, spec: RunSpec, accuracy: float = 60.0) -> None:
    listener.run_started(spec, INFO)
    for number in range(3):
        listener.round_finished(spec, record(number, accuracy + number))
    listener.run_finished(spec, INFO, result(accuracy + 2))


def finished(uri: str, suite: str, code: RunCode, data: str = INFO.data_hash, weights: str = INFO.weights_hash) -> Any:
    """Ids of those runs of seeds 0 to 3 that need not run again with this code, data and weights."""
    origins = {spec(seed=seed).run_id: Origin(code, data, weights) for seed in range(4)}
    return {run_id for run_id, why in stored_runs(uri, suite, origins).items() if not why}


def history(uri: str, run: Any, metric: str) -> list[tuple[int, float]]:
    client = store.open_store(uri, create=False)
    assert client is not None
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, metric)]


def test_a_finished_run_holds_params_tags_metrics_and_artifacts(uri: str, listener: Tracking, runs: Any) -> None:
    ran = spec(seed=3)
    manager = plugin_manager()
    manager.register(listener)
    hooks = relay(manager)
    hooks.run_started(spec=ran, info=INFO)
    for number in range(3):
        hooks.round_finished(spec=ran, record=record(number, 60.0 + number))
    hooks.run_finished(spec=ran, info=INFO, result=result(62.0))
    run = runs()["fedprox · clip:embedded · seed 3"]
    assert run.info.status == "FINISHED"
    params = run.data.params
    assert (params["fedprox.mu"], params["training.rounds"], params["seed"]) == ("0.5", "2", "3")
    assert (params["scenario.partition"], params["head_scale"]) == ("iid", "none")
    assert params["templates"] == '["a photo of a {}"]'
    tags = run.data.tags
    assert tags["fedbench.run_id"] == ran.run_id
    assert tags["fedbench.suite"] == "test_a_finished_run_holds_params_tags_metrics_and_artifacts"
    assert (tags["fedbench.data_hash"], tags["fedbench.weights_hash"]) == ("d" * 64, "w" * 64)
    assert "fedbench.files_hash" not in tags  # data of one size
    code = Codes().of_run(ran)
    assert (tags["fedbench.code_hash"], tags["fedbench.harness_hash"]) == (code.hash, code.harness)
    assert json.loads(tags["fedbench.method_code"]) == [
        {"method": name, "hash": one.hash}
        for name, one in zip(("fedprox", "data set embedded", "backbone clip:embedded"), code.methods, strict=True)
    ]
    assert json.loads(tags["fedbench.owners"]) == {"local_loss": "fedclip, fedavg"}
    assert (tags["fedbench.row"], tags["fedbench.num_clients"]) == ("fedprox · clip:embedded", "4")
    assert tags["fedbench.version.numpy"] == np.__version__
    assert tags["fedbench.kind"] == "run"
    assert "mlflow.parentRunId" not in tags
    filters = ("method", "backbone", "seed", "setting", "scale")
    assert [tags.get(name) for name in filters] == ["fedprox", "clip:embedded", "3", None, None]
    assert tags["mlflow.note.content"] == (
        "**fedprox · clip:embedded**, seed 3, on `embedded`. After 2 rounds: accuracy **62.0 %**. "
        f"Evaluate its model again: `fedbench evaluate {ran.run_id}`"
    )
    (read,) = run.inputs.dataset_inputs
    assert (read.dataset.name, read.dataset.digest) == ("embedded", "d" * 8)
    assert history(uri, run, "global_accuracy") == [(0, 60.0), (1, 61.0), (2, 62.0)]
    assert history(uri, run, "bytes_up") == [(0, 0.0), (1, 48.0), (2, 48.0)]
    assert history(uri, run, "bytes_down_total") == [(0, 0.0), (1, 96.0), (2, 192.0)]
    assert history(uri, run, "seconds") == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert history(uri, run, "final/global_accuracy") == [(2, 62.0)]
    assert run.data.metrics["final/seconds"] == 3.25
    assert len(history(uri, run, metric_name("class_accuracy/don't know"))) == 3


def test_what_clients_report_is_a_metric_of_every_round_and_clashes_with_none(
    uri: str, listener: Tracking, runs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Reports:
        @hookimpl
        def local_train(self, task: ClientTask) -> Update:
            update = local_sgd(task)
            return replace(update, metrics={**update.metrics, "drift": 10.0 * task.round})

    monkeypatch.setattr("fedbench.runs.prepare.load_dataset", lambda *_, **__: tiny_dataset())
    ran = tiny_spec("fedavg", backbone="clip:embedded", rounds=2, eval_every=2)
    faulty = ran.scenario.model_copy(update={"dropout": 1e-6, "imbalance": "natural", "domain_split": "60/20/20"})
    ran = ran.model_copy(update={"scenario": faulty})
    run_spec(ran, Settings(tmp_path, tmp_path, executor="sequential"), [Reports(), listener])
    [run] = runs().values()
    assert history(uri, run, "drift") == [(1, 10.0), (2, 20.0)]
    assert len(history(uri, run, "train_loss")) == 2
    # whatever else a run records, no client may report under its name
    assert {name for name in run.data.metrics if not is_reserved(name)} == {"drift", "train_loss"}
    assert {"bytes_up_total", "clients_dropped", "final/train_seconds"} < run.data.metrics.keys()


def test_artifacts_lie_in_the_store_folder_and_give_the_run_back(uri: str, listener: Tracking, runs: Any) -> None:
    ran = spec()
    play(listener, ran)
    (run,) = runs().values()
    folder = Path(uri.removeprefix("sqlite:///")).parent / "artifacts"
    (found,) = folder.glob(f"*/{run.info.run_id}/artifacts")
    assert sorted(path.name for path in found.iterdir()) == [
        "federation.json",
        "model",
        "predictions.csv",
        "rounds.csv",
        "run.json",
    ]
    assert sorted(path.name for path in (found / "model").iterdir()) == ["spec.json", "state.safetensors"]
    assert artifacts.read_spec(found, ran.run_id) == ran
    assert (found / "predictions.csv").read_text() == "sample,predicted\n0,2\n1,0\n2,1\n"
    assert artifacts.read_predictions(found, ran.run_id) == (2, 0, 1)
    state = artifacts.read_state(found, ran.run_id, "cpu")
    assert state.round == 2
    # a transposed array is not contiguous: its values, not its memory, must be kept
    assert state.weights["head.weight"].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert {name: tensor.item() for name, tensor in state.buffers.items()} == {"steps": 7}
    assert state.server["creff"]["head.bias"].tolist() == [1.0, 1.0]
    assert state.clients[3]["own"]["head.bias"].tolist() == [0.5, 0.5]
    with pytest.raises(FedbenchError, match=f"belongs to run {ran.run_id}, not 0000"):
        artifacts.read_state(found, "0000", "cpu")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model/spec.json", None, "run 12ab has no model/spec.json among its artifacts, the file was deleted"),
        (
            "model/spec.json",
            '{"speed": 3}',
            r"is of another version of fedbench \(speed: Extra inputs are not permitted",
        ),
        ("predictions.csv", "sample\n0\n", "predictions.csv of run 12ab cannot be read: 'predicted'; repeat it with"),
    ],
)
def test_artifacts_that_cannot_be_read_are_named(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    (tmp_path / "model").mkdir()
    if content is not None:
        (tmp_path / file).write_text(content)
    read = artifacts.read_spec if file == "model/spec.json" else artifacts.read_predictions
    with pytest.raises(FedbenchError, match=message):
        read(tmp_path, "12ab")


def test_interleaved_runs_keep_apart(uri: str, listener: Tracking, runs: Any) -> None:
    first, second = spec(seed=0), spec(seed=1)
    listener.run_started(first, INFO)
    listener.run_started(second, INFO)
    for number in range(3):
        listener.round_finished(first, record(number, 10.0))
        listener.round_finished(second, record(number, 90.0))
    listener.run_finished(second, INFO, result(90.0))
    listener.run_finished(first, INFO, result(10.0))
    found = runs()
    for name, accuracy in (("fedprox · clip:embedded · seed 0", 10.0), ("fedprox · clip:embedded · seed 1", 90.0)):
        assert [value for _, value in history(uri, found[name], "global_accuracy")] == [accuracy] * 3
        assert found[name].data.metrics["bytes_up_total"] == 96
        assert found[name].data.metrics["final/global_accuracy"] == accuracy


def test_a_failed_run_keeps_its_rounds_and_the_reason(uri: str, listener: Tracking, runs: Any) -> None:
    listener.run_started(spec(), INFO)
    listener.round_finished(spec(), record(0, 50.0))
    listener.run_failed(spec(), "out of memory")
    listener.run_failed(spec(seed=1), "unknown backbone")
    found = runs()
    started, never_started = found["fedprox · clip:embedded · seed 0"], found["fedprox · clip:embedded · seed 1"]
    assert {started.info.status, never_started.info.status} == {"FAILED"}
    assert started.data.tags["fedbench.failure"] == "out of memory"
    assert never_started.data.tags["fedbench.failure"] == "unknown backbone"
    assert history(uri, started, "global_accuracy") == [(0, 50.0)]


def test_an_interrupt_kills_only_what_still_runs(listener: Tracking, runs: Any) -> None:
    play(listener, spec(seed=0))
    listener.run_started(spec(seed=1), INFO)
    listener.round_finished(spec(seed=1), record(0, 50.0))
    listener.interrupt()
    listener.interrupt()
    found = runs()
    assert found["fedprox · clip:embedded · seed 0"].info.status == "FINISHED"
    killed = found["fedprox · clip:embedded · seed 1"]
    assert killed.info.status == "KILLED"
    assert killed.data.metrics["global_accuracy"] == 50.0


def asked(runs: int = 2, **given: Any) -> Invocation:
    return Invocation(command="fedbench run --suite mine.yaml", runs=runs, **given)


def parent_of(uri: str, suite: str) -> Any:
    """The suite's only parent run, checked to be none of its runs."""
    client = store.open_store(uri, create=False)
    assert client is not None
    filed = {run.info.run_id: run for _, run in store.filed(client, suite)}
    (parent,) = filed.keys() - {run.info.run_id for _, run in store.runs_of(client, suite)}
    return filed[parent]


PLUGIN = """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Params:
    pass

class Mine:
    name, citation, Params, recipe = "mine", "nobody", Params, {}
    def __init__(self, params):
        pass
"""


def test_the_runs_of_a_command_are_filed_under_one_parent(uri: str, tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(PLUGIN)
    given = {"scale": "paper", "methods": ("fedprox",), "seeds": (0, 1), "overrides": ("rounds=2",), "skipped": 3}
    listener = Tracking(uri, "nested", asked(plugin_files=(plugin,), suite_text="name: nested\n", **given))
    client = store.open_store(uri, create=False)
    assert client is not None
    # nothing began yet: an empty parent would be left behind by whatever ends the command now
    assert list(store.filed(client, "nested")) == []
    play(listener, spec(seed=0))
    parent = parent_of(uri, "nested")
    assert parent.info.status == "RUNNING"
    play(listener, spec(seed=1))
    parent = parent_of(uri, "nested")
    assert re.fullmatch(r"nested · paper · 2 runs · \d{4}-\d\d-\d\d \d\d:\d\d", parent.info.run_name)
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics == {"runs_finished": 2, "runs_failed": 0}
    tags = parent.data.tags
    assert tags["fedbench.kind"] == "invocation"
    told = {name: tags[f"fedbench.{name}"] for name in ("command", "scale", "methods", "seeds", "overrides", "plugins")}
    assert told == {
        "command": "fedbench run --suite mine.yaml",
        "scale": "paper",
        "methods": '["fedprox"]',
        "seeds": "[0, 1]",
        "overrides": '["rounds=2"]',
        "plugins": '["mine.py"]',
    }
    assert tags["fedbench.code_hash"] == provenance.code_hash([plugin])
    assert tags["fedbench.harness_hash"] == provenance.harness_hash()
    (mine,) = Codes([plugin]).of("mine").methods
    assert json.loads(tags["fedbench.plugin_code"]) == [{"plugin": "mine.py", "hash": mine.hash}]
    assert str(tmp_path) not in json.dumps(tags)
    folder = local_artifacts(uri, parent)
    assert folder is not None and (folder / "suite.yaml").read_text() == "name: nested\n"
    assert tags["mlflow.note.content"] == (
        "`fedbench run` on the suite **nested**, 2 runs: 2 finished, 0 failed. In the store already: 3 runs.\n\n"
        "`fedbench run --suite mine.yaml`\n"
    )
    children = [run for _, run in store.runs_of(client, "nested")]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {run.data.tags["seed"] for run in children} == {"0", "1"}
    text = hashlib.sha256(b"name: nested\n").hexdigest()
    assert {run.data.tags["fedbench.suite_hash"] for run in (parent, *children)} == {text}
    assert finished(uri, "nested", Codes().of_run(spec())) == {spec(seed=0).run_id, spec(seed=1).run_id}


def test_a_parent_has_failed_if_one_of_its_runs_has(uri: str) -> None:
    listener = Tracking(uri, "one fails", asked(2))
    listener.run_failed(spec(seed=1), "out of memory")
    play(listener, spec(seed=0))
    parent = parent_of(uri, "one fails")
    assert parent.info.status == "FAILED"
    assert parent.data.metrics == {"runs_finished": 1, "runs_failed": 1}
    failure = "- failed: fedprox · clip:embedded, seed 1: out of memory"
    assert failure in parent.data.tags["mlflow.note.content"].splitlines()


def test_an_interrupt_kills_the_parent_and_says_what_was_not_carried_out(uri: str) -> None:
    listener = Tracking(uri, "interrupted", asked(4))
    play(listener, spec(seed=0))
    listener.run_started(spec(seed=1), INFO)
    listener.interrupt()
    listener.interrupt()
    parent = parent_of(uri, "interrupted")
    assert parent.info.status == "KILLED"
    assert "4 runs: 1 finished, 0 failed, 3 not carried out." in parent.data.tags["mlflow.note.content"]


def test_an_interrupt_after_the_last_run_leaves_the_parent_finished(uri: str) -> None:
    listener = Tracking(uri, "late interrupt", asked(1))
    play(listener, spec())
    listener.interrupt()
    assert parent_of(uri, "late interrupt").info.status == "FINISHED"


def test_a_request_is_recorded_without_folders_of_this_machine(tmp_path: Path) -> None:
    selection = Selection(
        suite=str(tmp_path / "my suite.yaml"),
        methods=("a+b",),
        seeds=(1, 2),
        sets=(("dataset", "cifar10"), ("fedprox.mu", "0.1")),
        plugin_files=(tmp_path / "mine.py",),
        tuned="first study",
    )
    recorded = invocation(selection, [spec().model_copy(update={"scale": "small"})], 5, is_rerun=True)
    assert recorded.command == (
        "fedbench run --suite 'my suite.yaml' --method a+b --seed 1 --seed 2 --set dataset=cifar10 "
        "--set fedprox.mu=0.1 --tuned 'first study' --plugin mine.py --rerun"
    )
    # the scale is the one that ran, also where the command left it to the suite
    assert (recorded.runs, recorded.skipped, recorded.scale) == (1, 5, "small")
    assert str(tmp_path) not in json.dumps(recorded.tags())


def test_the_web_interface_is_told_how_to_show_a_suite_and_where_it_ran_last(uri: str) -> None:
    play(Tracking(uri, "shown"), spec())
    client = store.open_store(uri, create=False)
    assert client is not None
    experiment = client.get_experiment_by_name("fedbench/shown")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    path = f"/#/experiments/{experiment.experiment_id}/runs"
    suite, page = store.latest_page(uri) or ("", "")
    assert (suite, page.partition("?")[0]) == ("shown", path)


def test_the_web_interface_says_which_page_shows_the_latest_runs(
    uri: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(Tracking(uri, "just ran"), spec())
    monkeypatch.setattr("fedbench.tracking.store.ui_command", lambda _: [sys.executable, "-c", ""])
    ui(store=uri, port=5003)
    _, page = store.latest_page(uri) or ("", "")
    assert f"the runs of the suite just ran: http://127.0.0.1:5003{page}\n" in capsys.readouterr().out


class Fixed(Codes):
    """Code that does not change with the sources."""

    def __init__(self, harness: str, **methods: str) -> None:
        super().__init__()
        self._harness, self._hashes = harness, methods

    def of(self, stack: str, plugins: Sequence[Registered] = ()) -> RunCode:
        return RunCode(self._harness, tuple(MethodCode(name, self._hashes[name]) for name in stack.split("+")))


def test_only_finished_runs_of_the_same_code_are_not_run_again(uri: str) -> None:
    suite = "resume's suite"
    first, second = Fixed("1" * 64, fedprox="p" * 64), Fixed("1" * 64, fedprox="q" * 64)
    listener = Tracking(uri, suite, codes=first)
    play(listener, spec(seed=0))
    listener.run_failed(spec(seed=1), "no")
    listener.run_started(spec(seed=2), INFO)
    play(Tracking(uri, suite, codes=second), spec(seed=3))
    assert finished(uri, suite, first.of("fedprox")) == {spec(seed=0).run_id}
    assert finished(uri, suite, second.of("fedprox")) == {spec(seed=3).run_id}
    # the same description of a run on other data or other pretrained weights has to run again
    assert finished(uri, suite, second.of("fedprox"), weights="other") == set()
    assert finished(uri, suite, second.of("fedprox"), data="other") == set()
    assert finished(uri, "never ran", first.of("fedprox")) == set()


def test_why_a_run_is_carried_out_again_is_told(uri: str) -> None:
    listener = Tracking(uri, "again", codes=Fixed("1" * 64, fedprox="p" * 64))
    play(listener, spec(seed=0))
    mine = spec(seed=0).run_id

    def why(code: RunCode, data: str = INFO.data_hash, weights: str = INFO.weights_hash) -> tuple[str, ...]:
        return stored_runs(uri, "again", {mine: Origin(code, data, weights)})[mine]

    same = MethodCode("fedprox", "p" * 64)
    plugin = MethodCode("fedprox", "q" * 64, plugin="mine.py")
    assert why(RunCode("1" * 64, (same,))) == ()
    assert why(RunCode("2" * 64, (same,))) == ("code of the harness changed",)
    assert why(RunCode("1" * 64, (MethodCode("fedprox", "q" * 64),))) == ("method fedprox changed",)
    assert why(RunCode("1" * 64, (plugin,)), "o") == ("plugin file mine.py changed", "data changed")
    assert why(RunCode("1" * 64, (same,)), weights="o") == ("pretrained weights changed",)
    # code that was changed and changed back: tables show what the newest run gave, so that decides
    other = Tracking(uri, "again", codes=Fixed("2" * 64, fedprox="p" * 64))
    play(other, spec(seed=0))
    assert why(RunCode("1" * 64, (same,))) == ("code of the harness changed",)
    assert why(RunCode("2" * 64, (same,))) == ()
    client = store.open_store(uri, create=False)
    assert client is not None
    run, older = (run for _, run in sorted(store.runs_of(client, "again"), key=lambda one: -one[1].info.start_time))
    client.delete_run(older.info.run_id)
    # what an upgrade changed is named
    folder = local_artifacts(uri, run)
    assert folder is not None
    kept = json.loads((folder / "run.json").read_text())
    kept["tags"]["fedbench.version.torch"] = "0.1"
    (folder / "run.json").write_text(json.dumps(kept))
    with pytest.raises(FedbenchError, match="is not what was recorded"):
        why(RunCode("1" * 64, (same,)))
    del kept["tags"]["fedbench.seal"]
    (folder / "run.json").write_text(json.dumps(kept))
    assert why(RunCode("1" * 64, (same,))) == (f"torch 0.1 -> {provenance.versions()['torch']}",)


class CountingClient:
    """Stands in for MlflowClient and counts calls."""

    def __init__(self) -> None:
        self.batches: list[dict[str, int]] = []
        self.run = 0

    def create_run(self, experiment: str, **given: Any) -> Any:
        self.run += 1
        return SimpleNamespace(info=SimpleNamespace(run_id=str(self.run)))

    def log_batch(self, run: str, **given: list[Any]) -> None:
        self.batches.append({name: len(values) for name, values in given.items() if values})

    def log_inputs(self, run: str, datasets: list[Any]) -> None: ...

    def log_artifacts(self, run: str, folder: str) -> None: ...

    def set_terminated(self, run: str, status: str, end_time: int) -> None: ...


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingClient]:
    client = CountingClient()
    monkeypatch.setattr(tracking, "open_store", lambda uri, create: client)
    monkeypatch.setattr(tracking, "experiment_of", lambda client, uri, suite: "1")
    monkeypatch.setattr(tracking, "run_folders", lambda client, uri, experiment: None)
    yield client


def test_a_quick_run_is_written_in_one_batch(counting: CountingClient) -> None:
    play(Tracking("", "s"), spec())
    assert counting.batches == [{"metrics": 3 * 7 + 4, "params": len(flat_params(spec()))}]


def test_a_slow_run_sends_a_batch_every_few_seconds(counting: CountingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(tracking, "time", SimpleNamespace(time=time.time, monotonic=lambda: clock[0]))
    listener = Tracking("", "s")
    listener.run_started(spec(), INFO)
    for number in range(12):
        clock[0] += 1.0
        listener.round_finished(spec(), record(number, 50.0))
    # 7 metrics a round: rounds 0 to 4 after 5 s, with which the run begins, 5 to 9 after 10 s, the others at the end
    assert counting.batches == [{"metrics": 35, "params": len(flat_params(spec()))}, {"metrics": 35}]
    listener.interrupt()
    assert counting.batches[2:] == [{"metrics": 14}]


def test_batches_keep_within_what_mlflow_takes(counting: CountingClient) -> None:
    listener = Tracking("", "s")
    listener.run_started(spec(), INFO)
    many = {f"class_accuracy/{n}": 1.0 for n in range(2100)}
    listener.round_finished(spec(), RoundRecord(0, (), many, 0, 0, 0.0))
    listener.interrupt()
    first, *others = counting.batches
    assert (first, others) == (
        {"metrics": 800, "params": len(flat_params(spec()))},
        [{"metrics": 800}, {"metrics": 505}],
    )


def test_the_files_of_a_run_hold_what_mlflow_holds(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        recording, "time", SimpleNamespace(time=lambda: 1e9, monotonic=time.monotonic)
    )  # a value twice at a time is one
    listener = Tracking(uri, "files", asked(2))
    odd = {"nan": float("nan"), "above": float("inf"), "below": -float("inf"), "x" * 300: 1.0, "tiny": 1e-300}
    for seed, way in enumerate(("held back", "begun")):
        one = spec(seed=seed)
        listener.run_started(one, INFO)
        for number in (0, 0, 1):
            values = {"global_accuracy": 100 / 3 + number, **odd}
            listener.round_finished(one, RoundRecord(number, (), values, 3, 0, 0.0))
            listener.run_warned(one, f"{number} " + "x" * 9000)
            if way == "begun":
                listener._send(listener._open[one.run_id])
        listener.run_finished(one, INFO, result(62.0))
    client = store.open_store(uri, create=False)
    assert client is not None
    runs = [run for _, run in store.runs_of(client, "files")]  # their seals are whole
    for run in runs:
        folder = local_artifacts(uri, run)
        assert folder is not None and SEAL in run.data.tags
        kept = read_record(folder / "run.json")
        assert kept.data.params == run.data.params
        assert kept.data.tags == {key: value for key, value in run.data.tags.items() if key != "mlflow.runName"}
        assert {name: value.hex() for name, value in kept.data.metrics.items()} == {
            name: value.hex() for name, value in run.data.metrics.items()
        }
        assert (kept.info.run_id, kept.info.status) == (run.info.run_id, "FINISHED")
        assert (kept.info.start_time, kept.info.end_time) == (run.info.start_time, run.info.end_time)
        names = [name for name in run.data.metrics if not name.startswith("final/")]
        points = {
            (number, name): value.hex()
            for number, name, value in read_rounds(folder / "rounds.csv", names, run.data.tags)
        }
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in names}
        assert points == {(p.step, name): p.value.hex() for name, history in histories.items() for p in history}
    assert len(runs) == 2 and len(points) == 2 * (6 + 5)
    curves = folder / "rounds.csv"
    curves.write_bytes(curves.read_bytes().replace(b"33.3", b"93.3"))
    reader = open_reader(uri)
    assert reader is not None
    with pytest.raises(FedbenchError, match="the rounds of a run .* are not what was recorded"):
        reader.values([run.info.run_id], ["global_accuracy"])
    curves.unlink()
    with pytest.raises(FedbenchError, match="are not what was recorded"):
        check_rounds(curves, run.data.tags)
    # a run of before has no such digest
    assert check_rounds(curves, {}) == b""
    for run in (parent_of(uri, "files"),):
        folder = local_artifacts(uri, run)
        assert folder is not None and read_record(folder / "run.json").data.tags.items() <= run.data.tags.items()


def test_a_store_that_was_copied_is_written_where_it_lies(tmp_path: Path) -> None:
    def command_with_a_run(seed: int) -> None:
        play(listener := Tracking(uri, "apart", replace(asked(1), suite_text=f"seed: {seed}")), spec(seed=seed))
        board.mkdir(exist_ok=True)
        (board / "index.html").write_text(f"seed {seed}")
        recording.record_board(uri, listener.command, board, {}, "")

    board, uri = tmp_path / "board", store_uri(str(tmp_path / "first"))
    command_with_a_run(0)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "first").rglob("*")}
    uri = store_uri(str(tmp_path / "second"))
    command_with_a_run(1)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "first").rglob("*")} == before
    client, reader = store.open_store(uri, create=False), open_reader(uri)
    assert client is not None and isinstance(reader, FolderReader)
    assert sorted(run.data.params["seed"] for _, run in reader.runs("apart")) == ["0", "1"]
    for seed, (_, run) in enumerate(sorted(store.runs_of(client, "apart"), key=lambda one: one[1].data.params["seed"])):
        here = tmp_path / "second" / "artifacts" / "apart"
        assert local_artifacts(uri, run) == here / run.info.run_id / "artifacts"
        command = here / run.data.tags["mlflow.parentRunId"] / "artifacts"
        assert (command / "suite.yaml").read_text() == f"seed: {seed}"
        assert (command / "leaderboard" / "index.html").read_text() == f"seed {seed}"


def test_a_database_that_left_its_files_keeps_their_runs_when_it_is_written(tmp_path: Path) -> None:
    play(Tracking(store_uri(str(tmp_path / "first")), "left"), spec(seed=0))
    (tmp_path / "second").mkdir()
    for name in ("mlflow.db", "other.db"):
        shutil.copy(tmp_path / "first" / "mlflow.db", tmp_path / "second" / name)
        uri = f"sqlite:///{tmp_path / 'second' / name}"
        listener = Tracking(uri, "left", asked(1))
        play(listener, spec(seed=1))
        reader, client = open_reader(uri), store.open_store(uri, create=False)
        assert reader is not None and client is not None
        assert sorted(run.data.params["seed"] for _, run in reader.runs("left")) == ["0", "1"]
        origin = Origin(Codes().of_run(spec(seed=0)), INFO.data_hash, INFO.weights_hash)
        assert all(Tracking(uri, "left", asked(1)).has_finished(spec(seed=seed), origin) for seed in (0, 1))
        folders = {run.data.params["seed"]: local_artifacts(uri, run) for _, run in store.runs_of(client, "left")}
        assert {seed: place is not None and "second" in place.parts for seed, place in folders.items()} == {
            "0": False,
            "1": True,
        }


@pytest.mark.parametrize("name", ["class_accuracy/cat", "domain_accuracy/real photo", "head_accuracy", "a/b/c.d-e"])
def test_metric_names_that_are_valid_stay(name: str) -> None:
    assert metric_name(name) == name


@pytest.mark.parametrize("name", ["c/what?", "c/a:b", "c//b", "c/..", "/c", "c/", "c/" + "x" * 300, "../c", "c/ü!"])
def test_other_metric_names_become_valid(name: str) -> None:
    from mlflow.utils.validation import _validate_metric

    _validate_metric(metric_name(name), 1.0, 0, 0)


def test_a_tag_that_is_read_again_is_never_cut_off() -> None:
    spent = {"trials": "20", "command": "x" * 8000}
    one = spec().model_copy(update={"tuning": spent})
    assert json.loads(run_tags(one)["fedbench.tuning"]) == {"trials": "20"}
    fitting = {**spent, "command": "x" * 100}
    assert json.loads(run_tags(one.model_copy(update={"tuning": fitting}))["fedbench.tuning"]) == fitting
    for field, value in (("tuning", {"study": "x" * 8000}), ("published", ({"variant": "x" * 8000},))):
        with pytest.raises(FedbenchError, match=rf"fedbench\.{field} of a run has 80\d\d characters.* 8000;"):
            run_tags(one.model_copy(update={field: value}))


def test_class_names_that_differ_in_odd_characters_stay_apart() -> None:
    assert metric_name("c/a?") != metric_name("c/a!")
    assert metric_name("c/a?").startswith("c/a_-")


def test_a_folder_becomes_a_sqlite_store_and_a_uri_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert store_uri(None) == f"sqlite:///{tmp_path}/fedbench-store/mlflow.db"
    assert store_uri("two words") == f"sqlite:///{tmp_path}/two words/mlflow.db"
    assert store_uri("https://mlflow.example:5000") == "https://mlflow.example:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://db/mlflow")
    assert store_uri(None) == "postgresql://db/mlflow"
    assert store_uri("here") == f"sqlite:///{tmp_path}/here/mlflow.db"
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_a_store_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FedbenchError, match=r"file' is a file, not a folder; choose another folder"):
        store_uri(str(tmp_path / "file" / "store"))
    with pytest.raises(FedbenchError, match=r"cannot hold \?, # or %"):
        store_uri(str(tmp_path / "50% done"))
    with pytest.raises(FedbenchError, match="--store '' is empty"):
        store_uri("")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(FedbenchError, match="is not writable; choose another folder"):
        store_uri(str(tmp_path / "new"))
    assert store_uri(str(tmp_path / "new"), to_write=False) == f"sqlite:///{tmp_path}/new/mlflow.db"


def test_a_uri_that_mlflow_does_not_know_is_an_error() -> None:
    with pytest.raises(FedbenchError, match=r"the store 'gopher://x' cannot be used: .* Choose another with --store"):
        Tracking("gopher://x", "s")


def test_reading_creates_no_store(tmp_path: Path) -> None:
    missing = store_uri(str(tmp_path / "none"))
    assert stored_runs(missing, "longtail", {}) == {}
    with pytest.raises(FedbenchError, match="there is no store at .*none; fill one with `fedbench run"):
        ui_command(missing)
    assert list(tmp_path.iterdir()) == []


def test_a_new_store_leaves_nothing_beside_its_database(tmp_path: Path) -> None:
    Tracking(store_uri(str(tmp_path / "new")), "s")
    assert {path.name for path in (tmp_path / "new").iterdir()} <= {"mlflow.db", "artifacts"}


def test_a_deleted_experiment_is_not_filled_behind_the_users_back(uri: str) -> None:
    client = store.open_store(uri, create=True)
    assert client is not None
    client.delete_experiment(store.experiment_of(client, uri, "gone"))
    with pytest.raises(FedbenchError, match="'fedbench/gone' was deleted from .*mlflow experiments restore"):
        Tracking(uri, "gone")


def test_the_ui_opens_on_the_store(uri: str, listener: Tracking) -> None:
    command = ui_command(uri)
    assert command[1:6] == ["-m", "mlflow", "ui", "--backend-store-uri", uri]
    assert command[-2] == "--default-artifact-root"
    assert command[-1].endswith("/my%20store/artifacts")
    with pytest.raises(FedbenchError, match="is an MLflow server already; open that address in a browser"):
        ui_command("http://localhost:5000")


def test_telemetry_is_off_and_logs_are_quiet() -> None:
    from mlflow.telemetry.utils import is_telemetry_disabled

    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert is_telemetry_disabled()
    assert logging.getLogger("alembic.runtime.migration").getEffectiveLevel() == logging.WARNING


def test_a_copy_inside_somebody_elses_repository_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        assert provenance._git(tmp_path, "-c", "user.name=n", "-c", "user.email=e", *arguments) is not None

    package = tmp_path / "site" / "fedbench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "readme").write_text("")
    git("init", "--quiet")
    git("add", "readme")
    git("commit", "--quiet", "-m", "m")
    monkeypatch.setattr(provenance, "PACKAGE", package)
    assert provenance.commit() == ""
    git("add", ".")
    git("commit", "--quiet", "-m", "m")
    assert len(provenance.commit()) == 40
    (package / "__init__.py").write_text("x = 1\n")
    assert provenance.commit().endswith("+dirty")


def test_versions_name_what_can_change_a_number() -> None:
    assert {"fedbench", "python", "torch", "open_clip", "numpy"} <= set(provenance.versions())


def test_a_commands_run_has_the_leaderboard_and_its_best_row(tmp_path: Path) -> None:
    from mlflow import MlflowClient
    from typer.testing import CliRunner

    from fedbench.cli.app import app
    from fedbench_boards.leaderboard.results import load_results

    sets = ("--set", "rounds=1", "clients=4", "dataset=embedded?train=200&test=40")
    words = ("run", "--method", "fedavg", "--scenario", "iid", "--engine", "in-process", *sets)
    done = CliRunner().invoke(app, [*words, "--store", str(tmp_path / "store"), "--cache-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    uri = store_uri(str(tmp_path / "store"))
    client = MlflowClient(uri)
    (experiment,) = (one for one in client.search_experiments() if one.name.startswith("fedbench"))
    # what the printed link opens has the runs alone, best first
    view = dict(parse_qsl(store.page(experiment.experiment_id).partition("?")[2]))
    assert (view["orderByKey"], view["orderByAsc"]) == ("metrics.`final/global_accuracy`", "false")
    (run,) = client.search_runs([experiment.experiment_id], view["searchFilter"])
    every = client.search_runs([experiment.experiment_id])
    (command,) = (one for one in every if one.info.run_id != run.info.run_id)
    assert command.data.metrics["final/global_accuracy"] == run.data.metrics["final/global_accuracy"]
    assert command.data.tags["fedbench.best"] == "fedavg · clip:embedded"
    sent = run.data.metrics["final/bytes_up"] + run.data.metrics["final/bytes_down"]
    assert sent > 0 and run.data.metrics["final/megabytes"] == command.data.metrics["final/megabytes"] == sent / 1e6
    files = {Path(file.path).name for file in client.list_artifacts(command.info.run_id, "leaderboard")}
    assert files == {"index.html", "leaderboard.csv", "leaderboard.md"}
    # and no leaderboard takes it for a run
    assert list(load_results(uri)["mlflow_id"]) == [run.info.run_id]
