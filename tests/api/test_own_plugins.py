"""A program's own partitions and metrics in `fedbench.run`: names, parameters, and what makes their runs others."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedbench
from fedbench.api import Metric, NoParams, Partition, hyper
from fedbench.cli.app import app
from fedbench.kinds.registry import own, own_plugins
from fedbench.plugins.provenance import Codes
from fedbench.scenarios.partitions.built_in import Iid
from fedbench.testing import tiny_dataset
from fedbench.workflow.own import OwnObjects

SMALL = {"scenario": "iid", "clients": 2, "rounds": 1}


@dataclass(frozen=True, kw_only=True)
class FirstParams:
    """How much the first client has."""

    share: float = hyper(0.75, symbol="s", source="ours", low=0.1, high=0.9)


class First(Partition[FirstParams]):
    """The first client has a share of the samples, the second one the rest."""

    name = "first"

    def clients(self, task):
        return np.split(task.rng.permutation(len(task.train)), [int(self.params.share * len(task.train))])


class Second(First):
    """The same under another name."""

    name = "second"


class Wrong(Metric[NoParams]):
    """Share of the test samples that the global model gets wrong, in percent."""

    name = "wrong"
    higher_is_better = False

    def values(self, task):
        return 100 * float((~task.right).double().mean())


class OtherWrong(Wrong):
    """Of the same name."""

    name = "wrong"


class Reading(First):
    """Reads something."""

    location = "FILE"


class Impostor(Metric[NoParams]):
    """An installed metric's name."""

    name = "standard"

    def values(self, task):
        return 0.0


def held(partition, **more) -> list[int]:
    frame = fedbench.federation("iid", dataset=tiny_dataset(), clients=2, partition=partition, **more)
    return frame.sum(axis=1).tolist()


def test_own_partitions_and_metrics_are_run_shown_and_found_again(tmp_path: Path) -> None:
    def made(**others):
        given = {"dataset": tiny_dataset(), "partition": First, "metrics": [Wrong, "standard"]} | others
        places = {"store": tmp_path / "store", "cache_dir": tmp_path / "cache"}
        return fedbench.run("fedavg", "fedprox", **SMALL, **given, **places, progress=False)

    results = made()
    spec = results.specs[0]
    assert spec.scenario.partition.startswith("object:first-") and spec.metrics == ("wrong", "standard")
    runs = results.runs()
    assert (runs["wrong"] + runs["global_accuracy"]).tolist() == pytest.approx([100.0, 100.0])
    # the fewer the better, here and wherever the results are shown
    table = results.table(metric="wrong")
    assert table["wrong"].tolist() == sorted(table["wrong"])
    assert "object:first-" in repr(results) and "object:first-" in results._repr_html_()
    assert own("partition") == own("metric") == {}
    # the class, or its name in other words, asks for the same runs
    again = made(partition=First(FirstParams()), metrics=(Wrong(NoParams()), "standard"))
    assert again.specs == results.specs
    assert [one.status for one in commands(tmp_path / "store")] == ["FINISHED"]
    less = made(partition=First(FirstParams(share=0.5)), metrics=Wrong).specs[0]
    assert less.scenario.partition == f"{spec.scenario.partition}?share=0.5" and less.metrics == ("wrong",)
    assert len(commands(tmp_path / "store")) == 2
    words = ["run", "--method", "fedavg", "--store", str(tmp_path / "store"), "partition=" + spec.scenario.partition]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 2 and "was an object of a Python program" in said.output


def commands(store: Path):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store}/mlflow.db")
    experiment = client.get_experiment_by_name("fedbench/adhoc").experiment_id
    return [run.info for run in client.search_runs([experiment], "tags.`fedbench.kind` = 'invocation'")]


def test_a_federation_is_drawn_by_an_own_partition() -> None:
    everything = sum(held("iid"))
    assert held(First)[0] == int(0.75 * everything) and held(First(FirstParams(share=0.25)))[0] == everything // 4
    assert held(None, set={"scenario.partition": First}) == held(First)


def test_a_changed_class_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(digest: str):
        monkeypatch.setattr("fedbench.workflow.own.digest_of_code", lambda _: digest)
        monkeypatch.setattr("fedbench.plugins.provenance.digest_of_code", lambda _: digest)
        objects = OwnObjects()
        settings = objects.settings({"scenario.partition": First, "metrics": [Wrong], "rounds": 2})
        spec = fedbench.RunSpec(metrics=tuple(settings["metrics"]))
        spec = spec.model_copy(
            update={"scenario": spec.scenario.model_copy(update={"partition": settings["scenario.partition"]})}
        )
        with own_plugins(objects.plugins):
            return settings, spec, Codes().of_run(spec)

    (settings, spec, code), (_, changed, other) = named("a" * 64), named("b" * 64)
    assert settings == {"scenario.partition": "object:first-aaaaaaaa", "metrics": ["wrong"], "rounds": 2}
    assert spec.run_id != changed.run_id
    # the partition's code is in its name, that of the metric beside the methods'
    assert [(one.method, one.plugin) for one in code.methods] == [
        *(("data set embedded", ""), ("backbone clip:embedded", ""), ("metric wrong", "object:Wrong"))
    ]
    assert code.hash != other.hash and replace(code, methods=()) == replace(other, methods=())


def test_what_is_installed_is_called_as_ever() -> None:
    objects = OwnObjects()
    assert objects.settings({"partition": Iid}) == {"partition": "iid"} and not objects.plugins
    assert objects.settings({"partition": "iid", "metrics": "standard", "lr": 0.1})["metrics"] == "standard"
    assert objects.settings(None) == {}


def test_a_metric_is_not_called_as_those_of_the_harness_and_a_number_is_no_method() -> None:
    for name in ("tail_accuracy", "megabytes", "train_loss"):
        named = type("Named", (Wrong,), {"name": name, "__doc__": "A metric."})
        with pytest.raises(fedbench.FedbenchError, match=f"'{name}' is as the harness calls metrics of its own"):
            OwnObjects().settings({"metrics": [named]})
    with pytest.raises(fedbench.FedbenchError, match="5 is no method; give its name"):
        fedbench.run(5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"partition": Wrong}, "is no partition; derive it from fedbench.api.Partition"),
        ({"metrics": [First]}, "is no metric; derive it from fedbench.api.Metric"),
        ({"metrics": [3]}, "is no metric"),
        ({"metrics": [Wrong, OtherWrong]}, "two metrics are called 'wrong'"),
        ({"metrics": [Impostor]}, "two metrics are called 'standard'"),
        ({"partition": Reading}, "partition 'first:FILE' reads a location"),
        ({"partition": [First, Second]}, "there are two partitions of this program"),
        ({"partition": First(FirstParams(share=2.0))}, "share='2.0' is out of range"),
        ({"partition": First, "engine": "processes"}, "can't be sent to other processes"),
        ({"metrics": [Wrong], "jobs": 2}, "can't be sent to other processes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "given",
)
def test_what_is_no_partition_or_metric_is_refused_and_nothing_is_stored(tmp_path: Path, given, message) -> None:
    with pytest.raises(fedbench.FedbenchError, match=message):
        fedbench.run("fedavg", **SMALL, dataset=tiny_dataset(), **given, store=tmp_path / "store", progress=False)
    assert not (tmp_path / "store").exists()
