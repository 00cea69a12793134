"""Planning: a method that fails before its run fails its own row, and rows of new methods find their backbones."""

from pathlib import Path

import pytest

from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import load_suite, parse_suite
from fedbench.tracking.schema import store_uri
from fedbench.tracking.store import open_store, runs_of

FAILING = '''
"""Methods that fail before their first round."""
from dataclasses import dataclass
from fedbench.core.method.hooks import hookimpl

@dataclass(frozen=True)
class P:
    """None."""

class Bad:
    citation, Params, recipe = "nobody", P, {}
    def __init__(self, params):
        pass

class InInit(Bad):
    name = "in-init"
    def __init__(self, params):
        raise KeyError("no \\n such thing")
    @hookimpl
    def aggregate(self, task):
        return task.weights

class InFederate(Bad):
    name = "in-federate"
    @hookimpl
    def federate(self, federation):
        raise SystemExit(0)

class Interrupts(Bad):
    name = "interrupts"
    @hookimpl
    def federate(self, federation):
        raise KeyboardInterrupt

class InBuildModel(Bad):
    name = "in-build-model"
    @hookimpl
    def build_model(self, setup):
        return setup.nothing
'''
REASONS = {
    "in-init": "KeyError: 'no \\n such thing'",
    "in-federate": "SystemExit: 0",
    "in-build-model": "AttributeError: 'ModelSetup' object has no attribute 'nothing'",
}
DATASET = "embedded?train=80&test=40"
SUITE = f"""
name: planning
dataset: "{DATASET}"
backbone: convnet
scenario: {{preset: iid, clients: 2}}
training: {{rounds: 1, batch_size: 8}}
rows:
  - {{method: in-init}}
  - {{method: in-federate}}
  - {{method: in-build-model}}
  - {{method: fedavg}}
"""


@pytest.fixture
def fedbench(fedbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`fedbench ARGUMENTS` beside plugin and suite, its exit code checked: what it says."""
    monkeypatch.setenv("FEDBENCH_CACHE", "cache")
    (tmp_path / "failing.py").write_text(FAILING)
    (tmp_path / "suite.yaml").write_text(SUITE)

    def call(code: int, *arguments: str) -> str:
        ended = fedbench(*arguments)
        assert ended.code == code, ended
        return ended.out + ended.err

    return call


def test_a_method_that_fails_before_its_run_fails_its_own_row_of_a_dry_run(fedbench) -> None:
    said = fedbench(1, "run", "--suite", "suite.yaml", "--plugin", "failing.py", "--dry-run")
    lines = said.splitlines()
    assert "suite planning: 4 runs" in lines
    for method, reason in REASONS.items():
        assert any(line.split() == [method, "·", "convnet", "0", "failed"] for line in lines)
        assert any(line.startswith(f"failed: {method} · convnet: {reason} (") for line in lines), said
    (fine,) = [line for line in lines if line.startswith("fedavg")]
    assert "2 of 2" in fine and "failing.py, line 18" in said
    alone = fedbench(1, "run", "--suite", "suite.yaml", "--plugin", "failing.py", "--dry-run", "--method", "in-init")
    assert "in-init · convnet" in alone


def test_a_method_that_raises_keyboard_interrupt_in_a_process_of_its_own_fails_its_row(
    fedbench,
) -> None:
    given = ("--plugin", "failing.py", "--set", "backbone=convnet", "--scenario", "iid", "--set", f"dataset={DATASET}")
    said = fedbench(1, "run", "--method", "interrupts", *given, "clients=2", "--dry-run")
    assert "failed: interrupts · convnet: KeyboardInterrupt" in said


def test_a_method_that_fails_before_its_run_is_recorded_as_failed_and_others_finish(fedbench, tmp_path: Path) -> None:
    said = fedbench(1, "run", "--suite", "suite.yaml", "--plugin", "failing.py", "--engine", "in-process")
    client = open_store(store_uri(str(tmp_path / "fedbench-store")), create=False)
    ends = {run.data.params["method"]: run for _, run in runs_of(client, "planning")}
    assert ends["fedavg"].info.status == "FINISHED"
    for method, reason in REASONS.items():
        assert ends[method].info.status == "FAILED"
        assert ends[method].data.tags["fedbench.failure"].startswith(reason)
        assert f"failed: {method} · convnet, seed 0: {reason}" in said


def test_tuning_leaves_out_the_row_whose_method_fails(fedbench) -> None:
    arguments = ("--suite", "suite.yaml", "--plugin", "failing.py", "--dry-run")
    said = fedbench(1, "tune", *arguments, "--method", "in-build-model", "--method", "fedavg")
    assert "failed: in-build-model · convnet: AttributeError" in said and "1 study of" in said


SPOILING = """

import os, torch
import fedbench.runs.prepare
from fedbench.toolkit.fedavg import default_model, local_sgd

class Dtype(Bad):
    name = "dtype"
    def __init__(self, params):
        torch.set_default_dtype(torch.float64)
    @hookimpl
    def local_train(self, task):
        return local_sgd(task)

class Mkldnn(Bad):
    name = "mkldnn"
    @hookimpl
    def federate(self, federation):
        torch.backends.mkldnn.enabled = False
        return federation

class Patches(Bad):
    name = "patches"
    @hookimpl
    def federate(self, federation):
        fedbench.runs.prepare.build_federation = fedbench.runs.prepare.encode = None
        return federation

class Leaves(Bad):
    name = "leaves"
    @hookimpl
    def federate(self, federation):
        os._exit(3)

class InPlace(Bad):
    name = "in-place"
    @hookimpl
    def build_model(self, setup):
        with torch.no_grad():
            next(setup.backbone.module.parameters()).mul_(2)
        return default_model(setup)

class Replaces(Bad):
    name = "replaces"
    @hookimpl
    def build_model(self, setup):
        visual = setup.backbone.module.visual
        name, old = next(iter(visual.named_parameters()))
        owner = visual.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(old.detach() * 2, requires_grad=False))
        return default_model(setup)

class Trains(Bad):
    name = "trains"
    @hookimpl
    def build_model(self, setup):
        setup.backbone.module.train()
        return default_model(setup)

class Hooks(Bad):
    name = "hooks"
    @hookimpl
    def build_model(self, setup):
        setup.backbone.module.visual.register_forward_hook(lambda module, inputs, output: output * 0)
        return default_model(setup)

class Answers(Bad):
    name = "answers"
    @hookimpl
    def federate(self, federation):
        return 7
"""
SPOILED = {
    "dtype": "dtype · clip:embedded changes what torch.set_default_dtype sets, and features are encoded",
    "mkldnn": "mkldnn · clip:embedded changes what torch.backends.mkldnn sets, and features are encoded",
    "patches": "TypeError: 'NoneType' object is not callable",
    "leaves": "its process ended with exit code 3",
    "in-place": "in-place changes setup.backbone.module.",
    "replaces": "replaces · clip:embedded changes the weights of the backbone in place, and features are encoded",
    "trains": "trains · clip:embedded puts clip:embedded into training mode or adds hooks to it",
    "hooks": "hooks · clip:embedded puts clip:embedded into training mode or adds hooks to it",
    "answers": "answers answers the hook federate with an int; it must be a Federation.",
}


def of_fedavg(suite: str, folder: Path) -> tuple[object, dict[str, bytes]]:
    """The metrics of FedAvg's finished run, and the files of features, in which no number may differ."""
    client = open_store(store_uri(str(folder / "store")), create=False)
    (run,) = [run for _, run in runs_of(client, suite) if run.data.params["method"] == "fedavg"]
    assert run.info.status == "FINISHED"
    files = {file.name: file.read_bytes() for file in (folder / "cache").glob("*.safetensors")}
    return {name: value for name, value in run.data.metrics.items() if "seconds" not in name}, files


@pytest.mark.slow
def test_what_methods_do_to_their_process_while_planned_fails_their_own_rows_and_no_other(
    fedbench, tmp_path: Path
) -> None:
    (tmp_path / "spoiling.py").write_text(FAILING.partition("class InInit")[0] + SPOILING)
    rows = ", ".join(f"{{method: {name}}}" for name in (*SPOILED, "fedavg"))
    text = SUITE.partition("rows:")[0].replace("convnet", "clip:embedded").replace("planning", "spoiled")
    found = []
    for folder, chosen, code in (("beside", (), 1), ("alone", ("--method", "fedavg"), 0)):
        (tmp_path / folder).mkdir()
        (tmp_path / "spoiled.yaml").write_text(f"{text}rows: [{rows}]")
        command = ("run", "--suite", "spoiled.yaml", "--plugin", "spoiling.py", "--jobs", "1", "--retries", "0")
        said = fedbench(code, *command, *chosen, "--store", f"{folder}/store", "--cache-dir", f"{folder}/cache")
        found.append(of_fedavg("spoiled", tmp_path / folder))
        for name, reason in SPOILED.items():
            line = f"failed: {name} · clip:embedded, seed 0: {reason}"
            assert (" ".join(line.split()) in " ".join(said.split())) == (folder == "beside"), said
    assert found[0] == found[1]
    # where nothing is cached yet, nor read, a dry run says the same of all who fail before
    said = fedbench(1, *command, "--dry-run", "--method", "leaves", "--method", "answers", "--method", "fedavg")
    for name in ("leaves", "answers"):
        assert f"failed: {name} · clip:embedded: {SPOILED[name]}" in said
    assert "2 of 2" in next(line for line in said.splitlines() if line.startswith("fedavg"))


def test_data_that_cannot_be_loaded_stop_every_row(fedbench) -> None:
    arguments = ("run", "--suite", "suite.yaml", "--plugin", "failing.py", "--dry-run")
    for more in ((), ("--engine", "in-process")):
        said = fedbench(2, *arguments, *more, "--dataset", "imagefolder:missing")
        assert "row 'in-init · convnet': " in said and "missing" in said and "Nothing was run." in said


TWO = """
name: two
dataset: "embedded?train=80&test=40"
backbone: clip:embedded
scenario: {preset: iid, clients: 2}
training: {rounds: 1, batch_size: 8, lr: 0.01}
rows:
  - {method: fedavg}
  - {method: clip-zs}
  - {method: fedavg, set: {backbone: convnet, lr: 0.05, labels: visible}}
  - {method: fedprox, label: prox, set: {backbone: convnet, lr: 0.07, fedprox.mu: 0.1}}
  - {method: fedprox, set: {backbone: resnet8, lr: 0.09}}
"""


def rates(text: str, *methods: str, **overrides: object) -> dict[str, float]:
    """The learning rate of the runs of ``methods``, by row."""
    chosen = Overrides(methods=methods, seeds=(0,), **overrides)  # type: ignore[arg-type]
    return {spec.title: spec.training.lr for spec in expand(parse_suite(text, "two.yaml"), chosen)}


def test_a_new_method_runs_where_the_baseline_does_with_its_settings_there() -> None:
    assert rates(TWO, "moon") == {"moon · clip:embedded": 0.01, "moon · convnet": 0.05}
    # a method of the suite has its own rows only
    assert rates(TWO, "clip-zs") == {"clip-zs · clip:embedded": 0.01}
    assert rates(TWO.replace("training:", "baseline: prox\ntraining:"), "moon") == {
        "moon · clip:embedded": 0.01,
        "moon · convnet": 0.07,
    }


def test_what_the_recipe_or_the_command_line_sets_comes_before_what_is_inherited() -> None:
    on_convnet = rates(TWO, "fedclip")["fedclip · convnet"]
    assert on_convnet == rates(TWO, "fedclip")["fedclip · clip:embedded"] == 5e-5
    assert set(rates(TWO, "moon", sets=(("lr", "0.3"),)).values()) == {0.3}


def test_a_backbone_on_the_command_line_picks_one_row_with_its_settings() -> None:
    assert rates(TWO, "moon", sets=(("backbone", "convnet"),)) == {"moon · convnet": 0.05}
    assert rates(TWO, "moon", sets=(("backbone", "alexnet"),)) == {"moon · alexnet": 0.01}


def test_where_no_row_runs_on_the_suites_own_backbone_a_new_method_does_not_either() -> None:
    rows = "rows:\n  - {method: fedprox, set: {backbone: convnet, lr: 0.05}}\n"
    assert rates(TWO.partition("rows:")[0] + rows, "moon") == {"moon · convnet": 0.05}


GRID = """
name: grid
backbone: clip:embedded
scenario: {preset: iid, clients: 2}
training: {rounds: 1, lr: 0.01}
scales:
  small:
    settings: [{name: a}, {name: b, set: {clients: 3}}, {name: c, set: {backbone: convnet, lr: 0.02}}]
  large:
    settings: [{name: a}]
rows:
  - {method: fedavg}
  - {method: fedavg, set: {backbone: convnet, lr: 0.05}, only: [a]}
  - {method: fedavg, label: other, set: {backbone: convnet, lr: 0.06}, at: {large: {lr: 0.08}}}
"""


def test_in_a_grid_every_setting_has_each_backbone_once() -> None:
    assert rates(GRID, "moon") == {
        "a · moon · clip:embedded": 0.01,
        "a · moon · convnet": 0.05,
        "b · moon · clip:embedded": 0.01,
        "b · moon · convnet": 0.06,
        "c · moon · convnet": 0.02,
    }
    assert rates(GRID.replace("only: [a]", "only: [b]"), "moon", scale="large")["a · moon · convnet"] == 0.08


def test_rows_of_new_methods_on_the_suites_own_backbone_are_the_runs_they_always_were() -> None:
    then = Overrides(("moon",), (0,), sets=(("local_epochs", "5"),))
    (spec,) = [s for s in expand(load_suite("longtail"), then) if s.backbone == "clip:embedded"]
    assert spec.run_id == "f17e8ab0376bfd3f"


def test_the_plan_says_on_which_backbones_a_new_method_runs_and_leaves_out_those_it_is_not_for(
    fedbench, tmp_path: Path
) -> None:
    (tmp_path / "two.yaml").write_text(TWO)
    arguments = ("run", "--suite", "two.yaml", "--dry-run")
    said = fedbench(0, *arguments, "--method", "fedclip")
    assert (
        "fedclip has no row in suite two; it runs on clip:embedded with the suite's settings and on convnet with "
        "labels=visible from the row fedavg; not on resnet8 (--set backbone=NAME chooses one)" in said
    )
    assert "fedclip · convnet is left out: fedclip needs a CLIP backbone, not 'convnet'" in said
    assert "suite two: 1 run\n" in said
    # whoever asks for that backbone is refused
    assert "fedclip needs a CLIP backbone" in fedbench(
        2, *arguments, "--method", "fedclip", "--set", "backbone=convnet"
    )
    assert "has no row" not in fedbench(0, *arguments, "--method", "clip-zs")
    tuned = fedbench(0, "tune", "--suite", "two.yaml", "--dry-run", "--method", "fedclip")
    assert "fedclip · convnet is left out" in tuned and "fedclip · clip:embedded" in tuned
