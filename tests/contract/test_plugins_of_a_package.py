"""One third-party package with a plug-in of every kind: found, described, checked, run and recognised."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedbench.cli.app import app
from fedbench.core.errors import FedbenchError
from fedbench.core.metric_names import is_reserved
from fedbench.core.scenario import Scenario
from fedbench.core.spec import RunSpec
from fedbench.kinds.registry import GROUPS, find, plugins_everywhere, registered
from fedbench.models import load_backbone
from fedbench.plugins.provenance import Codes
from fedbench.rounds.measures import metrics_named
from fedbench.testing.plugins import CHECKS

pytestmark = pytest.mark.usefixtures("third_party")
PLUGINS = {
    "data set": "example-scans?per_hospital=16",
    "partition": "example-halving?ratio=0.8",
    "backbone": "example-mixer?width=8",
    "text encoder": "example-letters",
    "metric": "example_tail_f1",
    "suite": "example-suite",
}
BUILT_IN = {
    "data set": "embedded?train=200&test=40",
    "partition": "dirichlet",
    "backbone": "convnet",
    "text encoder": "orthogonal",
    "metric": "standard",
    "suite": "longtail",
}


def test_there_is_a_contract_and_an_example_for_every_kind() -> None:
    assert {*CHECKS, "method"} == {*PLUGINS, "method"} == set(GROUPS)


@pytest.mark.parametrize(
    ("name", "check"),
    [(names[kind], check) for names in (PLUGINS, BUILT_IN) for kind, checks in CHECKS.items() for check in checks],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_it_keeps_the_contract_of_its_kind(name: str, check) -> None:  # type: ignore[no-untyped-def]
    check(name)


def test_what_comes_with_fedbench_is_registered_in_the_same_groups() -> None:
    for kind in ("data set", "partition", "backbone", "text encoder", "metric"):
        origins = {one.origin.split()[0] for one in registered(kind).values()}
        assert origins == {"fedbench-harness", "fedbench-example-median"}, kind


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_they_are_listed_and_described_with_package_and_version() -> None:
    for what in ("datasets", "partitions", "backbones", "text-encoders", "metrics", "suites", "methods"):
        assert "fedbench-example-median 1.0" in said("list", what), what
    card = said("describe", "example-halving")
    assert "Client k has ratio^k of the first one's samples" in card
    assert "?ratio r, float, 0.01 to 1; 0.5 by default; ours" in card and "fedbench-example-median 1.0" in card
    assert "keeps the contract" in said("check", "example-halving")


def test_the_suite_runs_and_its_runs_are_of_the_code_of_all_that_it_names(tmp_path: Path) -> None:
    store, arguments = str(tmp_path / "store"), ("run", "--suite", "example-suite", "--set", "metrics=example_tail_f1")
    further = ("--store", store, "--cache-dir", str(tmp_path), "--data-dir", str(tmp_path), "--engine", "in-process")
    first = said(*arguments, *further)
    assert "example-median" in first
    assert "2 of 2 runs" in said(*arguments, *further)
    spec = RunSpec(
        dataset="example-scans",
        scenario=Scenario(partition="example-halving"),
        backbone="example-mixer?width=8",
        metrics=("example_tail_f1",),
        text_encoder="example-letters",
    )
    named = [code.method for code in Codes().of_run(spec).methods]
    assert named == [
        "data set example-scans",
        "partition example-halving",
        "backbone example-mixer",
        "text encoder example-letters",
        "metric example_tail_f1",
    ]
    assert {code.package for code in Codes().of_run(spec).methods} == {"fedbench-example-median"}
    ours = Codes().of_run(RunSpec()).methods
    assert [(code.method, code.package) for code in ours] == [("data set embedded", ""), ("backbone clip:embedded", "")]


FILE = '''
"""Plug-ins in development."""
import numpy as np
from fedbench.api import BackboneFamily, Metric, NoParams, Partition, image_network
from torch import nn


class Alternating(Partition[NoParams]):
    """Client k has every n-th sample."""
    name = "alternating"

    def clients(self, task):
        """In turn."""
        n = task.scenario.clients
        return [np.arange(k, len(task.train), n) for k in range(n)]


class Small(BackboneFamily[NoParams]):
    """A linear map of the pixels."""
    name = "small"

    def load(self, request):
        """From scratch."""
        return image_network(request.text, nn.Sequential(nn.Flatten(), nn.Linear(3072, 8)), 8, size=32)


class Loud(Metric[NoParams]):
    """Says too much."""
    name = "loud"

    def values(self, task):
        """Under a name of the harness's."""
        return {"global_accuracy": 100.0}
'''


def test_a_plugin_file_brings_any_kind(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert "alternating" in said("list", "partitions", "--plugin", str(file))
    assert "mine.py" in said("describe", "alternating", "--plugin", str(file))
    shown = said("scenario", "show", "iid", "--set", "partition=alternating", "--plugin", str(file))
    assert "alternating" in shown
    with pytest.raises(FedbenchError, match="unknown partition 'alternating'"):
        find("partition", "alternating")
    result = CliRunner().invoke(app, ["check", "loud", "--plugin", str(file)])
    assert result.exit_code == 1 and "a number called 'global_accuracy'" in " ".join(result.output.split())
    with plugins_everywhere([file]):
        *ours, code = Codes([file]).of_run(RunSpec(metrics=("loud",))).methods
        assert [one.method for one in ours] == ["data set embedded", "backbone clip:embedded"]
        assert json.loads(json.dumps(code.as_json()))["plugin"] == "mine.py"
        assert len(metrics_named(["loud"])) == 2


OF_FAMILY = '''
from torch import nn
from fedbench.api import BackboneFamily, NoParams, image_network


class Flat(BackboneFamily[NoParams]):
    """An image's mean colour."""

    name = "{name}"

    def load(self, request):
        """Untrained."""
        return image_network(request.text, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), 3)
'''


def test_a_backbone_may_be_called_like_one_of_another_family(tmp_path: Path) -> None:
    file = tmp_path / "flat.py"
    file.write_text(OF_FAMILY.format(name="convnet:flat"))
    with plugins_everywhere([file]):
        assert load_backbone("convnet:flat", data_dir=tmp_path, seed=0).feature_dim == 3
        assert load_backbone("convnet", data_dir=tmp_path, seed=0).feature_dim > 3
        for further, said in {":x": "nothing can follow its name", "?a=1": "takes no options"}.items():
            with pytest.raises(FedbenchError, match=said):
                load_backbone(f"convnet:flat{further}", data_dir=tmp_path, seed=0)
        (code,) = (one for one in Codes([file]).of_run(RunSpec(backbone="convnet:flat")).methods if one.plugin)
        assert code.method == "backbone convnet:flat"
    other = tmp_path / "other.py"
    other.write_text(OF_FAMILY.format(name="a:b:c"))
    with plugins_everywhere([other]), pytest.raises(FedbenchError, match="name='a:b:c' cannot be a name"):
        registered("backbone")


def test_runs_in_processes_of_their_own_know_a_plugin_files_backbone(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    sets = ("--set", "rounds=1", "backbone=small", "partition=alternating", "dataset=embedded?train=100&test=20")
    places = ("--store", str(tmp_path / "store"), "--cache-dir", str(tmp_path))
    words = ("run", "--method", "fedavg", "--scenario", "iid", "--plugin", str(file), *sets)
    assert "alternating" in said(*words, "clients=3", *places)


def test_a_wrong_name_is_answered_where_it_is_given() -> None:
    for arguments, message in (
        (("run", "--method", "fedavg", "--set", "partition=example-halfing"), "did you mean 'example-halving'"),
        (("run", "--method", "fedavg", "--set", "partition=example-halving?ratio=7"), "between 0.01 and 1"),
        (("run", "--method", "fedavg", "--set", "metrics=tail_f2"), "unknown metric 'tail_f2'"),
        (("run", "--method", "fedavg", "--set", "backbone=example-mixer?depth=2"), "unknown option of backbone"),
        (("run", "--method", "fedavg", "--set", "dataset=example-scans:here"), "nothing can follow the colon"),
        (("check", "example-nothing"), "unknown method 'example-nothing'"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output


def test_the_readmes_partition_and_metric_run_as_written(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "plugins" / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Plug-ins of every kind")[2]
    file = tmp_path / "mine.py"
    file.write_text(section.partition("```python\n")[2].partition("```")[0])
    commands = [line[2:] for line in section.partition("```console\n")[2].partition("```")[0].splitlines()]
    store = ("--store", str(tmp_path / "store"))
    small = ("rounds=1", "clients=4", "imbalance=none", "dataset=embedded?train=200&test=40")
    run, board = (shlex.split(line)[1:] for line in commands)
    words = [str(file) if word == "mine.py" else word for word in run]
    places = ("--cache-dir", str(tmp_path), "--engine", "in-process")
    assert "fedavg" in said(*words, *small, *store, *places)
    words = [str(file) if word == "mine.py" else word for word in board]
    assert "sure errors" in said(*words, *store)
    assert "keeps the contract" in said("check", "halving", "--plugin", str(file))
    assert "keeps the contract" in said("check", "sure_errors", "--plugin", str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('    name = "mine"\n\n    def values(self, task):\n        return 1.0\n', "no docstring"),
        ('    """Mine."""\n\n    name = "mine"\n', "no values; define it"),
    ],
)
def test_a_class_without_docstring_or_body_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"from fedbench.api import Metric, NoParams\n\n\nclass Mine(Metric[NoParams]):\n{text}")
    with plugins_everywhere([file]), pytest.raises(FedbenchError, match=message):
        find("metric", "mine")


def test_no_metric_may_be_called_as_what_is_sent() -> None:
    assert is_reserved("bytes") and is_reserved("bytes_up") and not is_reserved("tail_f1")
