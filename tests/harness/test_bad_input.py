"""Bad input: one clear message with what to do, exit code 2, no traceback, nothing run and nothing lost."""

import os
import re
import sys
from pathlib import Path

import pytest

from fedbench.cli.app import main

RUN = ["run", "--suite", "longtail"]
SMALL = ["--set", "dataset=embedded?train=200&test=40", "--set", "clients=2", "--set", "min_client_size=1"]


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run `fedbench ARGS` in an empty folder; its message on stderr as one line, after checking how it ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def run(*arguments, error=True):
        monkeypatch.setattr(sys, "argv", ["fedbench", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        message = re.sub(r"\s+", " ", captured.err)
        assert end.value.code == 2, captured.out + captured.err
        assert "Traceback" not in captured.err
        assert not (tmp_path / "fedbench-store").exists(), "a store was created for nothing"
        if error:
            assert message.count("error:") == 1
        return message

    return run


CASES = {
    "unknown suite": (["run", "--suite", "longtial"], r"unknown suite 'longtial'; did you mean 'longtail'"),
    "missing suite file": (["run", "--suite", "mine.yaml"], r"suite file 'mine.yaml' does not exist"),
    "unknown method": ([*RUN, "--method", "fedprx"], r"unknown method 'fedprx'; did you mean 'fedprox'.*list methods"),
    "unknown method in a stack": ([*RUN, "--method", "fedclip+fedporx"], r"unknown method 'fedporx'"),
    "a word without a value": (
        [*RUN, "--set", "rounds=2", "fedprox"],
        r"unexpected argument 'fedprox'.*--method fedprox",
    ),
    "set twice": ([*RUN, "--set", "rounds=2", "rounds=3"], r"rounds is set twice, by 'rounds=2' and 'rounds=3'"),
    "domain too small for its clients": (
        [
            *RUN,
            "--scenario",
            "feature-skew",
            "--set",
            "within_domain=dirichlet",
            "clients_per_domain=9",
            "dataset=embedded?train=200&test=40",
        ],
        r"within domain photo, whose clients are clients_per_domain: 9 clients",
    ),
    "nothing to run": (["run"], r"nothing to run: give --suite NAME .*longtail.* or --method"),
    "unknown dataset": ([*RUN, "--set", "dataset=cifar01"], r"unknown data ?set.* 'cifar01'.*did you mean 'cifar10'"),
    "unknown dataset option": ([*RUN, "--set", "dataset=embedded?clases=10"], r"clases.*classes"),
    "dataset option of a wrong type": ([*RUN, "--set", "dataset=embedded?train=many"], r"train.*many"),
    "unknown backbone": ([*RUN, "--set", "backbone=resnet9"], r"unknown backbone 'resnet9'; did you mean 'resnet"),
    "unknown clip architecture": (
        [*RUN, "--set", "backbone=clip:ViT-B-33@openai"],
        r"'ViT-B-33'.*did you mean.*ViT-B-32",
    ),
    "unknown backbone option": ([*RUN, "--set", "backbone=resnet8?widht=1"], r"widht.*width"),
    "unknown scenario": (
        ["run", "--method", "fedavg", "--scenario", "lable-skew"],
        r"'lable-skew'; did you mean 'label-skew'",
    ),
    "unknown key": ([*RUN, "--set", "roudns=5"], r"unknown setting 'roudns'; did you mean 'rounds'"),
    "unknown scenario key": ([*RUN, "--set", "scenario.client=5"], r"unknown scenario setting 'client'.*'clients'"),
    "unknown hyper-parameter": ([*RUN, "--set", "fedprox.nu=1"], r"unknown hyper-parameter of fedprox 'nu'"),
    "hyper-parameter of a method that does not run": (
        ["run", "--method", "fedavg", "--set", "fedprox.mu=0.1"],
        r"no row runs fedprox; rows run fedavg",
    ),
    "not key=value": ([*RUN, "--set", "rounds"], r"'rounds' is not key=value"),
    "wrong type": ([*RUN, "--set", "rounds=many"], r"training.rounds='many': .*integer"),
    "wrong type of a hyper-parameter": (
        [*RUN, "--set", "fedprox.mu=big"],
        r"fedprox.mu='big' is not a float.*0.0001 and 1",
    ),
    "out of range": ([*RUN, "--set", "participation=1.5"], r"scenario.participation='1.5': .*less than or equal to 1"),
    "hyper-parameter out of range": (
        [*RUN, "--set", "fedprox.mu=7"],
        r"fedprox.mu='7' is out of range; .*0.0001 and 1",
    ),
    "not one of the choices": ([*RUN, "--set", "optimizer=rmsprop"], r"training.optimizer='rmsprop': .*'sgd', 'adam'"),
    "hyper-parameter not one of the choices": (
        [*RUN, "--set", "fedprox.form=cube"],
        r"fedprox.form='cube'.*'squared', 'sqrt'",
    ),
    "negative seed": ([*RUN, "--seed", "-1"], r"--seed.*greater than or equal to 0"),
    "unknown option": (["run", "--siute", "longtail"], r"No such option.*--siute"),
    "unknown command": (["rnu"], r"No such command 'rnu'"),
    "unknown thing to list": (["list", "method"], r"'method'.*methods"),
    "unknown method to describe": (["describe", "fedprx"], r"unknown method 'fedprx'; did you mean 'fedprox'"),
    "missing plugin file": ([*RUN, "--plugin", "mine.py"], r"mine.py.*does not exist"),
    "missing cifar folder": ([*RUN, "--set", "dataset=cifar10"], r"cifar.*download=true"),
    "missing image folder": ([*RUN, "--set", "dataset=imagefolder:nowhere"], r"nowhere.*does not exist"),
    "missing local parquet folder": ([*RUN, "--set", "dataset=hf:./nowhere"], r"nowhere"),
    "missing weights file": ([*RUN, "--set", "backbone=clip:ViT-B-32@./nowhere.safetensors"], r"nowhere.safetensors"),
    "unknown device": ([*RUN, *SMALL, "--set", "device=gpu9"], r"device 'gpu9' is not a torch device; use"),
    "unknown held-out domain": (
        ["run", "--suite", "leave-one-domain-out", *SMALL, "--set", "holdout_domain=skech"],
        r"unknown domain 'skech'; did you mean 'sketch'",
    ),
    "impossible partition": (
        ["run", "--method", "fedavg", *SMALL, "--scenario", "label-skew", "--set", "min_client_size=5000"],
        r"min_client_size",
    ),
    "head on a network without pretraining": (
        ["run", "--method", "fedavg", *SMALL, "--scenario", "iid", "--backbone", "convnet", "--set", "tune=head"],
        r"needs a CLIP backbone, not 'convnet'",
    ),
    "a method that needs CLIP": (
        ["run", "--method", "fedclip", *SMALL, "--scenario", "iid", "--backbone", "convnet"],
        r"fedclip needs a CLIP backbone, not 'convnet'",
    ),
    "images too small for the network": (
        ["run", "--method", "fedavg", *SMALL, "--scenario", "iid", "--backbone", "alexnet"],
        r"alexnet.*resize=",
    ),
    "a setting the method does not read": (
        ["run", "--method", "fedclip", *SMALL, "--scenario", "iid", "--set", "tune=full"],
        r"fedclip builds its own model and does not read tune=full",
    ),
    "leaderboard without a store": (["leaderboard", "--suite", "longtail"], r"fedbench run"),
    "ui without a store": (["ui"], r"fedbench run"),
}


@pytest.mark.parametrize("case", CASES)
def test_message_says_what_where_and_what_to_do(case, command):
    arguments, expected = CASES[case]
    usage = case in ("negative seed", "unknown option", "unknown command")
    message = command(*arguments, error=not usage)
    assert re.search(expected, message), message


def test_plugin_files_that_do_not_work(command, tmp_path):
    (tmp_path / "broken.py").write_text("import nowhere\n")
    assert re.search(r"broken.py' cannot be imported: .*nowhere", command(*RUN, "--plugin", "broken.py"))
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert re.search(r"empty.py' defines no method", command(*RUN, "--plugin", "empty.py", "--method", "x"))


def test_a_stack_that_clashes(command):
    message = command("run", "--method", "fedclip+clip-zs", *SMALL, "--scenario", "iid")
    assert re.search(r"clip-zs and fedclip both answer the hook build_model", message)


def test_truncated_parquet(command, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-00000-of-00001.parquet").write_bytes(b"PAR1" + bytes(100))
    assert re.search(r"data", command(*RUN, "--set", "dataset=hf:./data"))


def test_corrupt_cache_of_the_embedded_data(command, tmp_path):
    from fedbench.datasets import load_dataset

    load_dataset("embedded?train=200&test=40", data_dir=tmp_path, cache_dir=tmp_path / "cache")
    damaged = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    for file in damaged:
        file.write_bytes(file.read_bytes()[:-100])
    assert re.search(r"delete", command(*RUN, *SMALL))
    assert all(file.exists() for file in damaged)


def test_unreadable_weights(command, tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"no weights")
    message = command(*RUN, *SMALL, "--set", "backbone=clip:ViT-B-32@weights.safetensors")
    assert re.search(r"weights.safetensors", message)


def test_image_folder_without_classes(command, tmp_path):
    (tmp_path / "pictures").mkdir()
    assert re.search(r"pictures", command(*RUN, "--set", "dataset=imagefolder:pictures"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_store_that_cannot_be_written(command, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert re.search(r"locked", command(*RUN, *SMALL, "--store", str(Path("locked") / "store")))


def test_there_are_at_least_25_cases():
    assert len(CASES) >= 25
