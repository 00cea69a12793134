"""Bad input: one clear message with what to do, exit code 2, no traceback, nothing run and nothing lost."""

import os
import re
import sys
from pathlib import Path

import pytest

from fedbench.cli.app import main
from fedbench.core.errors import FedbenchError
from fedbench.suites.suite import load_suite, parse_suite
from fedbench_boards.leaderboard.published import check_published, published_folder, published_of

RUN = ["run", "--suite", "longtail"]
SMALL = ["--set", "dataset=embedded?train=200&test=40", "--set", "clients=2", "--set", "min_client_size=1"]


@pytest.fixture
def command(monkeypatch, capsys, tmp_path, tmp_path_factory):
    """Run `fedbench ARGS` in an empty folder; its message on stderr as one line, after checking how it ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDBENCH_CACHE", str(tmp_path_factory.getbasetemp() / "rendered"))
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
    "set twice by two options": (
        [*RUN, "--set", "rounds=2", "--set", "rounds=3"],
        r"rounds is set twice, by 'rounds=2' and 'rounds=3'",
    ),
    "set twice, by --dataset as well": (
        ["run", "--method", "fedavg", "--dataset", "embedded", "--set", "dataset=cifar10"],
        r"dataset is set twice, by 'dataset=embedded' and 'dataset=cifar10'; leave one out",
    ),
    "set twice, by --scenario as well": (
        ["run", "--method", "fedavg", "--scenario", "iid", "--set", "rounds=2", "scenario=longtail"],
        r"scenario is set twice, by 'scenario=iid' and 'scenario=longtail'",
    ),
    "set twice, by --backbone as well": (
        [*RUN, "--backbone", "convnet", "--set", "backbone=resnet8"],
        r"backbone is set twice, by 'backbone=convnet' and 'backbone=resnet8'",
    ),
    "a method twice in a stack": (
        ["run", "--method", "fedavg+fedavg"],
        r"method 'fedavg\+fedavg' names 'fedavg' twice; a stack has each method once, so leave one out",
    ),
    "a method twice in a stack of three": ([*RUN, "--method", "fedntd+fedprox +fedntd"], r"names 'fedntd' twice"),
    "a sweep with a hole": ([*RUN, "--set", "rounds=2,,3"], r"--set rounds=2,,3: there is an empty value"),
    "a sweep over one value": ([*RUN, "--set", "rounds=2,2"], r"rounds=2,2: a sweep's values must differ"),
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
    "unknown backbone": (
        [*RUN, *SMALL, "--set", "backbone=resnet9"],
        r"unknown backbone 'resnet9'; did you mean 'resnet",
    ),
    "unknown clip architecture": (
        [*RUN, *SMALL, "--set", "backbone=clip:ViT-B-33@openai"],
        r"'ViT-B-33'.*did you mean.*ViT-B-32",
    ),
    "unknown backbone option": ([*RUN, *SMALL, "--set", "backbone=resnet8?widht=1"], r"widht.*width"),
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
    "missing weights file": (
        [*RUN, *SMALL, "--set", "backbone=clip:ViT-B-32@./nowhere.safetensors"],
        r"nowhere.safetensors",
    ),
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
    "labels that the default loss needs": (
        ["run", "--method", "fedavgm", *SMALL, "--scenario", "iid", "--set", "labels=hidden"],
        r"row 'fedavgm .*no labels\)': this scenario hides the labels .*choose a method that learns without labels",
    ),
    "labels that a method needs beside one that needs none": (
        ["run", "--method", "fst-cbdg+fedntd", *SMALL, "--scenario", "iid", "--set", "labels=hidden", "--dry-run"],
        r"fedntd needs labels, which this scenario hides \(labels=hidden\); set scenario.labels=visible",
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


SUITE = """name: mine
scenario: {preset: iid, clients: 2}
dataset: embedded?train=200&test=40
training: {rounds: 1}
seeds: [0]
rows:
  - method: fedavg
  - {method: fedprox, set: {fedprox.mu: 0.1}}
"""
FILES = {
    "a key twice": (SUITE + "name: yours\n", r"mine.yaml, line 9: 'name' is given twice, first in line 1"),
    "a key twice in a row": (
        SUITE.replace("{fedprox.mu: 0.1}", "{fedprox.mu: 0.1, fedprox.mu: 0.2}"),
        r"line 8: 'fedprox.mu' is given twice",
    ),
    "no UTF-8": (SUITE.encode() + b"description: caf\xe9\n", r"mine.yaml, line 9: not UTF-8 text \(byte 0xe9\)"),
    "UTF-16": (SUITE.encode("utf-16"), r"mine.yaml, line 1: not UTF-8 text"),
    "empty": ("", r"mine.yaml, line 1: a suite is a mapping with name, scenario and rows"),
    "an object of Python": (SUITE + "description: !!python/object/apply:os.getcwd []\n", r"line 9: .*python/object"),
    "no integer": (SUITE + "target: !!int many\n", r"line 9: not valid YAML: 'many' cannot be read as int"),
    "no truth": (SUITE + "target: !!bool many\n", r"line 9: not valid YAML: 'many' cannot be read as bool"),
    "no date": (SUITE + "description: 2001-99-99\n", r"line 9: not valid YAML: '2001-99-99' .* timestamp"),
    "too long a number": (SUITE + f"target: {'9' * 5000}\n", r"line 9: not valid YAML: '9{40}' cannot be read as int"),
    "no value for a number": (SUITE + "target: !!int ''\n", r"line 9: not valid YAML: '' cannot be read as int"),
    "an octal number": (SUITE.replace("rounds: 1", "rounds: 010"), r"line 4: .*010 is another value .*without leading"),
    "a number to the base 60": (SUITE + "target: 1:30\n", r"line 9: .*1:30 is another value in YAML 1.1 than in"),
    "a fraction to the base 60": (SUITE + "target: 1:30.5\n", r"line 9: .*1:30.5 is another value"),
    "a binary number": (SUITE.replace("[0]", "[0b11]"), r"line 5: .*0b11 is another value"),
    "a number with underscores": (SUITE.replace("[0]", "[1_000]"), r"line 5: .*1_000 is another value.*underscores"),
    "a truth of YAML 1.1": (SUITE + "description: yes\n", r"line 9: .*yes is another value.*text in quotes"),
    "a truth of YAML 1.1 as a key": (SUITE.replace("fedprox.mu:", "on:"), r"line 8: .*on is another value"),
    "brackets without end": (SUITE + "columns: " + "[" * 20_000, r"line 9: .*exceeded maximum nesting depth"),
    "too many brackets": (SUITE + f"columns: {'[' * 50}{']' * 50}", r"line 9: nested more than 40 levels deep"),
    "an alias of itself": (SUITE + "columns: &a [*a]\n", r"mine.yaml, line 9: .*an alias stands for itself"),
    "aliases of aliases": (
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{new}: &{new} [{','.join(9 * ['*' + old])}]\n" for old, new in zip("abcdef", "bcdefg", strict=True)
        ),
        r"mine.yaml, line \d: its aliases stand for more than 200,000 values",
    ),
    "a name that moves the cursor": (
        SUITE.replace("name: mine", r'name: "a\e[2J"'),
        r"line 1, name: it must be printable",
    ),
    "a name that is a folder": (SUITE.replace("name: mine", "name: .."), r"line 1, name: it must have a letter"),
    "a name without end": (SUITE.replace("name: mine", "name: " + 300 * "x"), r"line 1, name: .*at most 100 char"),
    "a seed of 70 bits": (SUITE.replace("[0]", f"[{2**70}]"), r"line 5, seeds.0: .*less than or equal to 9223"),
    "a truth for a seed": (SUITE.replace("[0]", "[true]"), r"line 5, seeds.0: it is a number, not true"),
    "a truth for rounds": (SUITE.replace("rounds: 1", "rounds: true"), r"line 4, training.rounds: .*it is a number"),
    "a truth for a hyper-parameter": (
        SUITE.replace("mu: 0.1", "mu: true"),
        r"mine.yaml, line 8, rows.1.set.fedprox.mu: fedprox.mu=True is not a float",
    ),
    "a hyper-parameter out of range": (
        SUITE.replace("mu: 0.1", "mu: .nan"),
        r"mine.yaml, line 8, rows.1.set.fedprox.mu: fedprox.mu=nan is out of range",
    ),
    "a wrong key of a row": (
        SUITE.replace("fedprox.mu: 0.1", "roudns: 3"),
        r"mine.yaml, line 8, rows.1.set.roudns: unknown setting 'roudns'; did you mean 'rounds'",
    ),
    "a wrong value of the scenario": (
        SUITE.replace("clients: 2", "clients: two"),
        r"mine.yaml, line 2, scenario.clients: scenario.clients='two': .*integer",
    ),
    "a wrong key of the scenario": (
        SUITE.replace("clients: 2", "clents: 2"),
        r"mine.yaml, line 2.*'clents'.*'clients'",
    ),
    "a wrong value of training": (
        SUITE.replace("rounds: 1", "rounds: 1e400"),
        r"mine.yaml, line 4, training.rounds: training.rounds=",
    ),
    "an unknown headline": (SUITE + "headline: tial\n", r"line 9, headline: unknown accuracy 'tial'; .* 'tail'"),
    "an unknown column": (SUITE + "columns: [head, worst_clint]\n", r"line 9, columns.1: .*mean 'worst_client'"),
    "a cost as a column": (SUITE + "columns: [bytes]\n", r"line 9, columns.0: unknown accuracy 'bytes'"),
    "an unknown objective": (SUITE + "objective: byts\n", r"line 9, objective: unknown .* 'byts'.*tail"),
    "an unknown metric of the paper": (
        SUITE + "published_metrics:\n  globl_accuracy: accuracy\n",
        r"line 10, published_metrics.globl_accuracy.*: unknown accuracy 'globl_accuracy'; .* 'global'",
    ),
    "unknown published numbers": (
        SUITE + "published: captt\n",
        r"line 9, published: unknown file of published numbers 'captt'; .* 'capt'.* put captt.csv beside the suite",
    ),
    "an unknown column of published numbers": (
        SUITE.replace("method: fedavg", "{method: fedavg, published: [{}, {varaint: x}]}") + "published: capt\n",
        r"line 7, rows.0.published.1.varaint: unknown column of published numbers 'varaint'; .* 'variant'",
    ),
    "an unknown baseline": (SUITE + "baseline: fedprx\n", r"line 9, baseline: unknown row 'fedprx'; .*'fedprox'"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_wrong_suite_file_is_refused_by_file_line_and_field(case, command, tmp_path):
    content, expected = FILES[case]
    (tmp_path / "mine.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    message = command("run", "--suite", "mine.yaml")
    assert re.search(expected, message), message


def test_wrong_settings_on_the_command_line_name_what_was_typed(command):
    alone = ["run", "--method", "fedavg", "--scenario", "iid", *SMALL]
    assert "seed" in command(*alone, "--seed", str(2**70))
    assert re.search(
        r"--set fdprox.mu: unknown method 'fdprox'; did you mean 'fedprox'", command(*alone, "--set", "fdprox.mu=1")
    )
    assert re.search(r"training.batch_size='9{12}': .*1000000", command(*alone, "--set", f"batch_size={'9' * 12}"))
    long = "9" * 5000
    own = ["run", "--method", "fedavg", "--scenario", "iid", "--set"]
    assert re.search(r"train='9+'.* whole number", command(*own, f"dataset=embedded?train={long}"))
    assert re.search(r"width='9+'.* whole number", command(*alone, "--set", f"backbone=resnet8?width={long}"))
    assert "nobody" in command(*own, "dataset=imagefolder:~nobody_here/x")
    assert "nobody" in command(*alone, "--set", "backbone=clip:ViT-B-32@~nobody_here/x.pt")
    assert "too long" in command("run", "--suite", "x" * 5000 + ".yaml").lower()


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


def test_corrupt_cache_of_the_embedded_data(command, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBENCH_CACHE", str(tmp_path / "cache"))
    from fedbench.datasets import load_dataset

    load_dataset("embedded?train=200&test=40", data_dir=tmp_path, cache_dir=tmp_path / "cache")
    damaged = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    for file in damaged:
        file.write_bytes(file.read_bytes()[:-100])
    assert re.search(r"delete", command(*RUN, *SMALL))
    assert all(file.exists() for file in damaged)


def test_unreadable_weights(command, tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"no weights")
    message = command(*RUN, *SMALL, "--set", "backbone=clip:ViT-S-32-alt@weights.safetensors")
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


def test_names_of_metrics_are_taken_in_full_and_in_short():
    known = "headline: tail\nobjective: bytes\ncolumns: [head, tail_accuracy, domain_accuracy, class_accuracy/a/b]\n"
    suite = parse_suite(SUITE + known, "s")
    assert (suite.headline, suite.objective) == ("tail_accuracy", "bytes")


def test_published_numbers_of_ones_own_lie_beside_the_suite(tmp_path):
    (tmp_path / "mine.yaml").write_text(SUITE + "published: mine\n")
    suite = load_suite(str(tmp_path / "mine.yaml"))
    with pytest.raises(FedbenchError, match="line 9, published: unknown file of published numbers 'mine'"):
        check_published(suite, published_folder(None))
    (tmp_path / "mine.csv").write_text("method,metric,value\n")
    check_published(suite, published_folder(None))
    found = published_of(suite, published_folder(None))
    assert found is not None and list(found.facts) == ["method", "metric", "value"]


def test_values_that_every_yaml_reads_alike_are_read():
    assert parse_suite(SUITE + "description: 'yes'\n", "s").description == "yes"
    assert parse_suite(SUITE + 'description: "1:30"\n', "s").description == "1:30"
    assert parse_suite(SUITE + "target: .5e+1\n", "s").target == 5
    assert parse_suite(SUITE.replace("[0]", "[0x1F, 30]"), "s").seeds == (31, 30)


def test_a_number_too_long_to_be_shown_is_refused_by_its_line():
    with pytest.raises(FedbenchError, match=r"line 2: .*cannot be read as int"):
        parse_suite("name: s\ntraining: {rounds: 0x" + "f" * 5000 + "}\nrows: [{method: fedavg}]\n", "s")


def test_an_unknown_method_of_a_suite_is_told_by_its_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("name: mine\nrows:\n- method: fedavg\n- method: fedp%rox\n")
    monkeypatch.setattr(sys, "argv", ["fedbench", "run", "--suite", "mine.yaml", "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert (
        "mine.yaml, line 4, rows.1.method: unknown method 'fedp%rox'; did you mean 'fedprox'" in capsys.readouterr().err
    )
