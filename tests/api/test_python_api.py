"""`fedbench.run` and its kin: the same runs, ids and numbers as the command line's, and a program's own objects."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn
from typer.testing import CliRunner

import fedbench
from fedbench.api import Method, hookimpl
from fedbench.cli.app import app
from fedbench.core.federation import Dataset, TensorImages
from fedbench.kinds.registry import own
from fedbench.plugins.provenance import digest_of_code
from fedbench.runs.prepare import Settings
from fedbench.testing import tiny_dataset
from fedbench.toolkit.fedavg import average
from fedbench_methods.fedprox import FedProx

DATA = "embedded?train=200&test=40"
SMALL = {"scenario": "iid", "clients": 2, "rounds": 2}
TIMES = ("seconds", "train_seconds")
HEAVY = ("torch", "mlflow", "pandas", "pydantic", "numpy", "optuna", "open_clip", "yaml", "matplotlib")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def results(tmp_path_factory, cache):
    store = tmp_path_factory.mktemp("python")
    return fedbench.run(
        "fedavg",
        FedProx,
        dataset=DATA,
        **SMALL,
        seeds=[0, 1],
        set={"fedprox.mu": 0.1},
        store=store,
        cache_dir=cache,
        progress=False,
    )


def command(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def commanded(tmp_path_factory, cache):
    """The store that the same runs by the command line fill, and the words that fill it."""
    words = ["run", "--method", "fedavg", "--method", "fedprox", "--dataset", DATA, "--scenario", "iid"]
    words += ["--seed", "0", "--seed", "1", "--set", "clients=2", "rounds=2", "fedprox.mu=0.1"]
    words += ["--cache-dir", str(cache)]
    store = tmp_path_factory.mktemp("command")
    command(*words, "--store", str(store))
    return SimpleNamespace(store=store, words=words)


def invocations(store: Path) -> int:
    """How many commands have carried out runs."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store}/mlflow.db")
    experiment = client.get_experiment_by_name("fedbench/adhoc")
    found = client.search_runs([experiment.experiment_id], "tags.`fedbench.kind` = 'invocation'")
    return len(found)


# --- the same as the command line


def test_ids_and_numbers_are_those_of_the_command_line(results, commanded):
    theirs = fedbench.load(commanded.store, "adhoc")
    by_run = [
        one.runs().drop(columns=list(TIMES)).sort_values("run").reset_index(drop=True) for one in (results, theirs)
    ]
    assert len(by_run[0]) == 4 and set(by_run[0]["run"]) == {spec.run_id for spec in results.specs}
    pd.testing.assert_frame_equal(*by_run)
    curves = [one.rounds().drop(columns="seconds").sort_values(["run", "round"]) for one in (results, theirs)]
    pd.testing.assert_frame_equal(*(one.reset_index(drop=True) for one in curves))
    assert {spec.run_id for spec in theirs.specs} == {spec.run_id for spec in results.specs}


def test_what_is_recorded_of_a_call_is_the_command_that_does_the_same(results, commanded):
    from mlflow import MlflowClient

    def recorded(store):
        client = MlflowClient(f"sqlite:///{store}/mlflow.db")
        experiment = client.get_experiment_by_name("fedbench/adhoc").experiment_id
        (parent,) = client.search_runs([experiment], "tags.`fedbench.kind` = 'invocation'")
        return parent.data.tags["fedbench.command"]

    assert sorted(recorded(results.store).split()) == sorted(recorded(commanded.store).split())


def test_either_finds_the_runs_of_the_other_in_the_store(results, commanded, cache):
    said = command(*commanded.words, "--store", results.store)
    assert "4 of 4 runs are in the store already and are skipped" in said
    again = fedbench.run(
        "fedavg", "fedprox", dataset=DATA, **SMALL, seeds=[0, 1], set={"fedprox.mu": 0.1},
        store=commanded.store, cache_dir=cache, progress=False,
    )  # fmt: skip
    assert invocations(commanded.store) == 1 and len(again.runs()) == 4


def test_a_run_spec_is_run_as_it_is_and_found_again(results, cache):
    spec = next(spec for spec in results.specs if spec.method == "fedprox")
    before = invocations(results.store)
    found = fedbench.run(spec, store=results.store, cache_dir=cache, progress=False)
    assert invocations(results.store) == before and found.runs()["run"].tolist() == [spec.run_id]
    assert found.specs == (spec,)
    with pytest.raises(fedbench.FedbenchError, match="a RunSpec says all there is to say"):
        fedbench.run(spec, rounds=3)
    with pytest.raises(fedbench.FedbenchError, match="can't be written as settings of a run"):
        fedbench.run(spec.model_copy(update={"tuned": "longtail"}))


# --- results


def test_a_table_has_a_line_a_row_and_the_columns_of_the_file_if_wanted(results):
    table = results.table()
    assert list(table["row"]) == ["fedavg · clip:embedded", "fedprox · clip:embedded"] or len(table) == 2
    mean = results.runs().groupby("method")["global_accuracy"].mean()
    for _, line in table.iterrows():
        assert line["global_accuracy"] == pytest.approx(mean[line["row"].partition(" ")[0]])
    assert set(table["seeds"]) == {2} and "failure" not in table and "setting" not in table
    assert {"block", "caption", "p_value"} <= set(results.table(full=True))
    with pytest.raises(fedbench.FedbenchError, match="unknown accuracy"):
        results.table(metric="nonsense")


def test_rounds_have_every_metric_by_round_and_run(results):
    rounds = results.rounds()
    assert len(rounds) == 4 * 3 and set(rounds["round"]) == {0, 1, 2}
    assert {"global_accuracy", "train_loss", "bytes_up", "seconds"} <= set(rounds)
    last = rounds[rounds["round"] == 2].set_index("run")["global_accuracy"]
    pd.testing.assert_series_equal(
        last.sort_index(), results.runs().set_index("run")["global_accuracy"].sort_index(), check_names=False
    )


def test_predictions_against_labels_give_the_accuracy(results):
    found = results.predictions()
    assert list(found) == ["run", "sample", "label", "predicted"] and len(found) == 4 * 40
    right = found.assign(right=found["label"] == found["predicted"]).groupby("run")["right"].mean() * 100
    final = results.runs().set_index("run")["global_accuracy"]
    assert right.to_dict() == pytest.approx(final.to_dict())


def test_figures_are_those_of_the_command(results):
    drawn = results.plot()
    assert isinstance(drawn, Figure) and len(drawn.axes) == 1 and len(drawn.axes[0].lines) == 2
    assert results.plot("gains").axes
    with pytest.raises(fedbench.FedbenchError, match="unknown test 'welch'.*Known: t, wilcoxon"):
        results.table(test="welch")
    with pytest.raises(fedbench.FedbenchError, match="unknown kind of figure 'pie'"):
        results.plot("pie")
    with pytest.raises(fedbench.FedbenchError, match="unknown method of these runs 'moon'"):
        results.plot(methods="moon")


def test_results_show_themselves_as_the_leaderboard(results):
    html = results._repr_html_()
    assert html.count("<tr>") == 3 and "fedprox" in html and "<b>" in html
    assert "fedprox" in repr(results) and "accuracy" in repr(results)


def test_the_leaderboard_is_a_function_whatever_else_was_imported(results):

    table = fedbench.leaderboard("adhoc", store=results.store)
    pd.testing.assert_frame_equal(table, results.table())
    with pytest.raises(fedbench.FedbenchError, match="unknown suite in this store"):
        fedbench.leaderboard("nothing", store=results.store)


def test_nothing_is_loaded_from_a_store_that_is_not_there(tmp_path):
    with pytest.raises(fedbench.FedbenchError, match="there is no store"):
        fedbench.load(tmp_path / "nowhere")


@pytest.mark.parametrize("uri", ["sqlite:////x/runs.db", "sqlite:////x/mlflow.db", "http://ann:hush-pass@host:5000"])
def test_results_say_where_they_are(uri):
    shown = {"sqlite:////x/mlflow.db": "/x", "http://ann:hush-pass@host:5000": "http://***@host:5000"}
    assert fedbench.Results(uri, None, settings=Settings(Path(), Path())).store == shown.get(uri, uri)


def test_a_federation_is_that_of_a_run(results, cache):
    held = fedbench.federation("iid", dataset=DATA, clients=2, cache_dir=cache)
    assert held.index.name == "client" and held.to_numpy().sum() > 0
    from fedbench_boards.leaderboard.results import load_federations, load_results

    uri = f"sqlite:///{results.store}/mlflow.db"
    runs = load_results(uri)
    recorded = load_federations(uri, runs[runs["seed"] == 0])
    assert [one["class_counts"] for one in recorded.values()] == [held.to_numpy().tolist()] * 2
    with pytest.raises(fedbench.FedbenchError, match="a partition doesn't depend on it"):
        fedbench.federation("iid", dataset=DATA, rounds=5)
    with pytest.raises(fedbench.FedbenchError, match="two answers"):
        fedbench.federation("iid", suite="longtail")
    with pytest.raises(fedbench.FedbenchError, match="give one value"):
        fedbench.federation("label-skew", dirichlet_alpha=[0.1, 1.0])
    with pytest.raises(fedbench.FedbenchError, match="dataset is set twice"):
        fedbench.federation("iid", dataset="cifar10", set={"dataset": DATA})
    with pytest.raises(fedbench.FedbenchError, match="seeds are whole numbers"):
        fedbench.federation("iid", seed=1.5)


def test_a_federation_names_its_clients():
    tiny = tiny_dataset()
    owners = torch.arange(len(tiny.train)) % 2
    data = replace(tiny, train=replace(tiny.train, clients=owners), client_names=("Kraków", "Zürich"))
    assert list(fedbench.federation("natural", dataset=data).index) == ["Kraków", "Zürich"]


def test_studies_without_trials_are_refused_and_nothing_is_stored(tmp_path):
    for wrong, message in (
        ({"trials": "x"}, "trials"),
        ({"trials": 0}, "trials"),
        ({"validation": 2.0}, "share"),
        ({"jobs": 0}, "jobs"),
    ):
        with pytest.raises(fedbench.FedbenchError, match=message):
            fedbench.tune("longtail", "fedavg", **wrong, store=tmp_path / "store", progress=False)
    with pytest.raises(fedbench.FedbenchError, match="names are texts"):
        fedbench.tune("longtail", HalfWay, store=tmp_path / "store", progress=False)
    assert not (tmp_path / "store").exists()


def test_a_study_gives_a_line_a_row_and_its_values_are_run(tmp_path, cache):
    suite = tmp_path / "mine.yaml"
    suite.write_text(
        f"name: mine\ndataset: {DATA}\nscenario: {{preset: iid, clients: 2}}\ntraining: {{rounds: 1}}\n"
        "rows:\n  - method: fedavg\n  - method: fedprox\n"
    )
    places = {"store": tmp_path / "store", "cache_dir": cache, "progress": False}
    found = fedbench.tune(str(suite), "fedprox", trials=2, params="fedprox.mu", **places)
    (line,) = found.to_dict("records")
    assert (line["study"], line["row"], line["complete"] + line["pruned"]) == ("mine", "fedprox · clip:embedded", 2)
    assert 0 <= line["global_accuracy_confirmed"] <= 100 and "fedprox.mu" in line
    (tuned,) = fedbench.run("fedprox", suite=str(suite), tuned="mine", **places).specs
    assert tuned.params["fedprox"]["mu"] == pytest.approx(line["fedprox.mu"])


# --- a program's own objects


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())

    def forward(self, images):
        return self.body(images)


class HalfWay(Method):
    """The server goes half the way."""

    name = "half-way"
    citation = "None"

    @hookimpl
    def aggregate(self, task):
        return {name: (task.weights[name] + mean) / 2 for name, mean in average(task).items()}


class Impostor(HalfWay):
    name = "fedprox"


def darker(data: Dataset) -> Dataset:
    pixels = data.train.images.pixels
    return replace(data, train=replace(data.train, images=TensorImages(pixels // 2)))


def test_own_objects_are_run_without_registration_and_found_again(tmp_path, cache):
    def made(**others):
        given = {"dataset": tiny_dataset(), "backbone": Net} | others
        return fedbench.run(
            HalfWay, "fedavg", **given, **SMALL, store=tmp_path, cache_dir=cache, progress=False, seeds=[0, 1]
        )

    threads = torch.get_num_threads()
    first = made()
    assert torch.get_num_threads() == threads
    assert len(first.runs()) == 4 and "failure" not in first.table()
    spec = first.specs[0]
    assert (
        spec.method == "half-way"
        and spec.dataset.startswith("object:tiny-")
        and spec.backbone.startswith("object:Net-")
    )
    assert own("method") == own("data set") == own("backbone") == {}
    assert len(first.plot().axes[0].lines) == 2
    made()
    assert invocations(tmp_path) == 1
    # other images, other weights: other runs
    brighter, instance = made(dataset=darker(tiny_dataset())), made(backbone=Net())
    names = {one.specs[0].dataset for one in (first, brighter)}, {one.specs[0].backbone for one in (first, instance)}
    assert [len(of) for of in names] == [2, 2] and invocations(tmp_path) == 3
    # a claimed hash is not believed
    assert made(dataset=replace(tiny_dataset(), content_hash="0" * 64)).specs[0].dataset == spec.dataset
    said = CliRunner().invoke(app, ["run", "--method", "fedavg", "--dataset", spec.dataset, "--store", str(tmp_path)])
    assert said.exit_code == 2 and "was an object of a Python program" in said.output


def test_the_weights_of_a_class_follow_the_seed_and_those_of_an_object_do_not():
    from fedbench.kinds.registry import own_plugins
    from fedbench.models import load_backbone
    from fedbench.workflow.own import OwnObjects

    def weights(given, seed):
        objects = OwnObjects()
        name = objects.backbone(given)
        with own_plugins(objects.plugins):
            loaded = load_backbone(name, data_dir=Path(), seed=seed, image_size=(32, 32))
        assert loaded.feature_dim == 16 and loaded.weights_hash
        return loaded.module.body[0].weight

    assert torch.equal(weights(Net, 1), weights(Net, 1)) and not torch.equal(weights(Net, 1), weights(Net, 2))
    net = Net()
    assert torch.equal(weights(net, 1), weights(net, 2)) and weights(net, 1) is not net.body[0].weight


def test_a_run_that_fails_is_a_row_with_its_reason(tmp_path, cache, capfd):
    class Broken(HalfWay):
        name = "broken"

        @hookimpl
        def aggregate(self, task):
            raise ValueError("no mean today")

    places = {"store": tmp_path, "cache_dir": cache, "progress": False}
    table = fedbench.run(Broken, "fedavg", dataset=tiny_dataset(), **SMALL, **places).table()
    (reason,) = filter(None, table["failure"])
    assert len(table) == 2 and "no mean today" in reason
    assert "no mean today" in capfd.readouterr().err and "no mean today" in (tmp_path / "failures.log").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": [Impostor]}, "calls itself 'fedprox', as an installed method"),
        ({"methods": [Net]}, "lacks name, citation"),
        ({"methods": ["fedprxo"]}, "did you mean 'fedprox'"),
        ({"methods": ["fedprox+fedprox"]}, "names 'fedprox' twice"),
        ({"methods": []}, "nothing to run"),
        ({"roundz": 5}, "did you mean 'rounds'"),
        ({"rounds": 2, "set": {"rounds": 3}}, "rounds is set twice"),
        ({"rounds": {1, 2}}, "settings are numbers, texts, or lists of them"),
        ({"lr": -1.0}, "lr=.*greater than 0"),
        ({"backbone": nn.Conv2d(3, 4, 3)}, r"gives \(2, 4, 30, 30\) of 2 images"),
        ({"backbone": nn.Linear(7, 4)}, "can't read images"),
        ({"backbone": lambda: Net()}, "a class or function with a name"),
        ({"backbone": Net, "engine": "processes"}, "can't be sent to other processes"),
        ({"methods": [HalfWay], "jobs": 2}, "can't be sent to other processes"),
        ({"engine": "ray", "dataset": DATA}, "unknown engine 'ray'"),
        ({"executor": "fast"}, "unknown executor 'fast'"),
        ({"seeds": 1.5}, "1.5 is a float; seeds are whole numbers"),
        ({"seeds": "12"}, "'12' is a str; seeds are whole numbers"),
        ({"set": ["fedprox.mu=1"]}, "give a dict"),
        ({"plugins": 5}, "5 is a int; plug-in files are paths"),
        ({"setting": 5}, "5 is a int; names are texts"),
        ({"dataset": DATA, "jobs": 0}, "0 jobs at the same time can't be"),
        ({"methods": [HalfWay], "jobs": "2"}, "'2' jobs at the same time can't be"),
        ({"plugins": ["~nobody_here/x.py"]}, "there is no such user"),
    ],
    # two processes of a test run must call it the same
    ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", str(value)),
)
def test_bad_input_is_refused_and_nothing_is_stored(tmp_path, given, message):
    given = {"methods": ["fedavg"], "dataset": tiny_dataset(), **given}
    methods = given.pop("methods")
    with pytest.raises(fedbench.FedbenchError, match=message):
        fedbench.run(*methods, scenario="iid", clients=2, **given, store=tmp_path / "store", progress=False)
    assert not (tmp_path / "store").exists()


# --- the code of a class in a notebook

CELL = '''
class Mine(HalfWay):
    """A method of a cell."""
    name = "mine"
'''


def test_runs_of_a_class_that_is_in_no_file_are_never_skipped(tmp_path, cache, monkeypatch, capsys):
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(CELL, vars(main) | {"HalfWay": HalfWay}, vars(main))
    assert digest_of_code([main.Mine]) != digest_of_code([main.Mine])
    assert digest_of_code([HalfWay]) == digest_of_code([HalfWay, Net])  # of one file

    def made():
        given = {"dataset": tiny_dataset(), **SMALL, "store": tmp_path, "cache_dir": cache}
        return fedbench.run(main.Mine, "fedavg", **given)

    made()
    capsys.readouterr()
    assert len(made().runs()) == 2 and invocations(tmp_path) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "1 again (whether object:Mine (in no file) changed can't be told): mine" in said
    assert "1 of 2 runs are in the store already" in said


# --- as a process of its own


def test_the_api_is_imported_when_it_is_used_and_a_script_needs_no_main_guard(tmp_path, cache):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, fedbench\n"
        f"print('begins', [name for name in {HEAVY!r} if name in sys.modules])\n"
        "print(*dir(fedbench))\n"
        f"found = fedbench.run('clip-zs', 'fedavg', dataset={DATA!r}, scenario='iid', clients=2, rounds=1, jobs=2,\n"
        f"    cache_dir={str(cache)!r})\n"
        "print('ends', len(found.runs()))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0] == "begins []", done.stderr
    assert lines[1] == "FedbenchError Results RunSpec __version__ federation leaderboard load run tune"
    assert [line for line in lines if line.startswith(("begins", "ends"))] == ["begins []", "ends 2"]


NO_GUARD = {
    "embedded data": "import fedbench\nfedbench.federation('iid', dataset='embedded?train=2400&test=40', "
    "cache_dir='new')",
    "embedded data of a run": "import fedbench\nfedbench.run('clip-zs', dataset='embedded?train=2400&test=40', "
    "scenario='iid', clients=2, cache_dir='new')",
    "trials": "import fedbench\nfedbench.tune('own.yaml', trials=1, confirm=0, seeds=0, jobs=1, cache_dir='new')",
    "pretraining images": "from dataclasses import replace\nfrom fedbench_embedded import pretrain\n"
    "from fedbench_embedded.pretrain.corpus import render_corpus\n"
    "render_corpus(replace(pretrain.SMOKE, render_parts=2, render_processes=2))",
}
OWN_SUITE = """
name: own
dataset: embedded?train=200&test=40
backbone: convnet
scenario: {preset: iid, clients: 2}
training: {rounds: 1}
rows: [{method: fedprox}]
"""


@pytest.mark.parametrize("what", NO_GUARD)
def test_what_starts_processes_does_not_begin_a_script_without_a_main_guard_again(what, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"print('begins', flush=True)\n{NO_GUARD[what]}\nprint('ends')\n")
    (tmp_path / "own.yaml").write_text(OWN_SUITE)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line in ("begins", "ends")]
    assert lines == ["begins", "ends"], done.stderr
    assert "freeze_support" not in done.stderr


def test_the_package_is_the_command():
    done = subprocess.run([sys.executable, "-m", "fedbench", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"fedbench {fedbench.__version__}\n")
