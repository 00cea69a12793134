"""Bad input: one clear message with what to do, exit code 2, no traceback, nothing run and nothing left behind."""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path

import pytest

from fedbench.core.errors import FedbenchError
from fedbench.suites.suite import load_suite, parse_suite
from fedbench_boards.leaderboard.published import _NEEDED, check_published, published_folder, published_of

LONG = "9" * 5000
SMALL = "--set 'dataset=embedded?train=200&test=40' clients=2 min_client_size=1"
RUN, AVG = "run --suite longtail", "run --method fedavg"
ALONE = f"{AVG} --scenario iid {SMALL}"
CASES = [
    # names
    ("run --suite longtial", r"unknown suite 'longtial'; did you mean 'longtail'.*fedbench list suites"),
    ("run --suite mine.yaml", r"suite file 'mine.yaml' does not exist"),
    (f"run --suite {'x' * 5000}.yaml", r"too long"),
    (f"{RUN} --method fedprx", r"unknown method 'fedprx'; did you mean 'fedprox'.*fedbench list methods"),
    (f"{RUN} --method fedclip+fedporx", r"unknown method 'fedporx'"),
    ("run --method fedavg+fedavg", r"method 'fedavg\+fedavg' names 'fedavg' twice; .*so leave one out"),
    (f"{RUN} --method 'fedntd+fedprox +fedntd'", r"names 'fedntd' twice"),
    (f"run --method fedclip+clip-zs {SMALL} --scenario iid", r"clip-zs and fedclip both answer the hook build_model"),
    ("run", r"nothing to run: give --suite NAME .*longtail.* or --method NAME"),
    (f"{AVG} --scenario lable-skew", r"unknown scenario 'lable-skew'; did you mean 'label-skew'"),
    (f"{RUN} --set dataset=cifar01", r"unknown data ?set.* 'cifar01'.*did you mean 'cifar10'"),
    (f"{RUN} --set 'dataset=embedded?clases=10'", r"clases.*classes"),
    (f"{RUN} --set 'dataset=embedded?train=many'", r"train.*many"),
    (
        f"{AVG} --scenario iid --set 'dataset=embedded?train={LONG}'",
        r"option train='9+ \[.* cut.*exceeded",
    ),
    (f"{RUN} {SMALL} backbone=resnet9", r"unknown backbone 'resnet9'; did you mean 'resnet"),
    (
        f"{RUN} {SMALL} backbone=clip:ViT-B-33@openai",
        r"'ViT-B-33'; did you mean 'ViT-B-32' or '[^,]*See `fedbench list backbones`",
    ),
    (f"{RUN} {SMALL} 'backbone=resnet8?widht=1'", r"widht.*width"),
    (f"{ALONE} 'backbone=resnet8?width={LONG}'", r"option width='9+ \[.* cut.*exceeded"),
    (f"{RUN} {SMALL} device=gpu9", r"device 'gpu9' is not a torch device; use"),
    (
        f"run --suite leave-one-domain-out {SMALL} holdout_domain=skech",
        r"unknown domain 'skech'; did you mean 'sketch'",
    ),
    ("list metods", r"'metods'.*did you mean 'methods'"),
    ("describe fedprx", r"unknown method 'fedprx'; did you mean 'fedprox'"),
    ("describe fedclip+clip-zs", r"both answer the hook build_model"),
    # settings
    (f"{RUN} --set rounds=2 fedprox", r"unexpected argument 'fedprox'.*--method fedprox"),
    (f"{RUN} --set rounds=2 --set rounds=3", r"rounds is set twice, by 'rounds=2' and 'rounds=3'"),
    (f"{RUN} --set rounds=2 rounds=3", r"rounds is set twice, by 'rounds=2' and 'rounds=3'"),
    (f"{AVG} --dataset embedded --set dataset=cifar10", r"dataset is set twice, by .*; leave one out"),
    (f"{RUN} --set lr=0.1 training.lr=0.5", r"training.lr is set twice, by 'lr=0.1' and 'training.lr=0.5'"),
    (f"{RUN} --set text_encoder=none backbone.text=glove:x", r"backbone.text is set twice"),
    (f"{AVG} --scenario iid --set rounds=2 scenario=longtail", r"scenario is set twice, by 'scenario=iid' and"),
    (f"{RUN} --set rounds=2,,3", r"--set rounds=2,,3: there is an empty value"),
    (f"{RUN} --set rounds=2,2", r"rounds=2,2: a sweep's values must differ"),
    (f"{RUN} --set roudns=5", r"unknown setting 'roudns'; did you mean 'rounds'"),
    (f"{RUN} --set scenario.client=5", r"unknown scenario setting 'client'.*'clients'"),
    (f"{RUN} --set fedprox.nu=1", r"unknown hyper-parameter of fedprox 'nu'"),
    (f"{ALONE} fdprox.mu=1", r"--set fdprox.mu: unknown method 'fdprox'; did you mean 'fedprox'"),
    (f"{AVG} --set fedprox.mu=0.1", r"no row runs fedprox; rows run fedavg"),
    (f"{RUN} --set rounds", r"--set 'rounds' is not key=value"),
    (f"{RUN} --set rounds=many", r"training.rounds='many': .*integer"),
    (f"{ALONE} batch_size={'9' * 12}", r"training.batch_size='9{12}': .*1000000"),
    (f"{RUN} --set fedprox.mu=big", r"fedprox.mu='big' is not a float.*0.0001 and 1"),
    (f"{RUN} --set fedprox.mu=7", r"fedprox.mu='7' is out of range; .*0.0001 and 1.*μ"),
    (f"{RUN} --set participation=1.5", r"scenario.participation='1.5': .*less than or equal to 1"),
    (f"{RUN} --set optimizer=rmsprop", r"training.optimizer='rmsprop': .*'sgd', 'adam'"),
    (f"{RUN} --set fedprox.form=cube", r"fedprox.form='cube'.*'squared', 'sqrt'"),
    (f"{ALONE} --seed {2**70}", r"seed"),
    # what does not go together
    (
        f"{RUN} --scenario feature-skew --set within_domain=dirichlet clients_per_domain=9 "
        "'dataset=embedded?train=200&test=40'",
        r"within domain photo, whose clients are clients_per_domain: 9 clients",
    ),
    (f"{AVG} {SMALL[: -len(' min_client_size=1')]} min_client_size=5000 --scenario label-skew", r"min_client_size"),
    (f"{ALONE} backbone=convnet tune=head", r"needs a CLIP backbone, not 'convnet'"),
    (f"run --method fedclip {SMALL} backbone=convnet --scenario iid", r"fedclip needs a CLIP backbone, not 'convnet'"),
    (
        f"run --method fedclip {SMALL} tune=full --scenario iid",
        r"fedclip builds its own model and does not read tune=full",
    ),
    (f"run --method fedavg --method clip-zs {SMALL} backbone=convnet --scenario iid", r"row 'clip-zs · convnet'"),
    (
        f"run --method fedavgm {SMALL} labels=hidden --scenario iid",
        r"row 'fedavgm .*no labels\)': this scenario hides the labels .*choose a method that learns without labels",
    ),
    (
        f"run --method fst-cbdg+fedntd {SMALL} labels=hidden --scenario iid --dry-run",
        r"fedntd needs labels, which this scenario hides \(labels=hidden\); set scenario.labels=visible",
    ),
    (f"{ALONE} backbone=alexnet", r"alexnet.*resize="),
    (f"{AVG} --engine in-process --memory-limit 3", r"--memory-limit has no effect with --engine in-process"),
    (f"{AVG} --engine in-process --run-timeout 3", r"a run in this process can't be ended"),
    (f"{AVG} --run-gpus 1", r"--run-gpus are for --engine ray"),
    (f"{AVG} --engine in-process --devices cuda:0", r"--devices has no effect with --engine in-process"),
    (f"{AVG} --devices cuda:0 {SMALL}", r"--devices cuda:0 is for runs with device=cuda, and here device is cpu"),
    # files, folders and addresses
    (f"{RUN} --plugin mine.py", r"mine.py.*does not exist"),
    (f"{RUN} --plugin loop.py", r"--plugin: Symlink loop from .*loop.py"),
    (f"{RUN} --plugin broken.py", r"broken.py' cannot be imported: .*nowhere"),
    (f"{RUN} --plugin empty.py --method x", r"empty.py' defines no method"),
    (f"{RUN} --set dataset=cifar10", r"cifar.*download=true"),
    (f"{RUN} --set dataset=imagefolder:nowhere", r"nowhere.*does not exist"),
    (f"{RUN} --set dataset=imagefolder:pictures", r"pictures"),
    (f"{AVG} --scenario iid --set 'dataset=imagefolder:~nobody_here/x'", r"nobody"),
    (f"{RUN} --set dataset=hf:./nowhere", r"nowhere"),
    (f"{RUN} --set dataset=hf:./data", r"data"),
    (f"{RUN} {SMALL} backbone=clip:ViT-B-32@./nowhere.safetensors", r"nowhere.safetensors"),
    (f"{RUN} {SMALL} backbone=clip:ViT-S-32-alt@weights.safetensors", r"weights.safetensors"),
    (f"{ALONE} 'backbone=clip:ViT-B-32@~nobody_here/x.pt'", r"nobody"),
    ("run --method fedavg --data-dir '~nobodyx/y'", r"--data-dir '~nobodyx/y': there is no such user"),
    ("run --method fedavg --cache-dir '~nobodyx/y'", r"--cache-dir '~nobodyx/y': there is no such user"),
    ("leaderboard --suite longtail", r"fedbench run"),
    ("leaderboard --store nowhere", r"nowhere"),
    ("ui", r"fedbench run"),
    *((f"{verb} --output file", r"--output 'file") for verb in ("publish --suite longtail", "leaderboard", "study x")),
    ("leaderboard --output x --format csv", r"--output writes every format, so --format csv has no effect"),
    ("leaderboard --output file/below", r"--output 'file/below"),
    # numbers of options
    (f"{RUN} --seed -1", r"--seed.*greater than or equal to 0"),
    ("run --jobs 0", r"Usage: fedbench.*--jobs"),
    *(
        (words, rf"'{words.split()[-2]}'")
        for words in (
            *("run --memory-limit inf", "run --memory-limit 1e300", "run --state-memory nan", "run --run-timeout nan"),
            *("run --run-timeout 1e12", "run --patience inf", "run --run-cpus nan", "leaderboard --target nan"),
            *("tune --suite longtail --validation nan", "cache clear --older-than inf", "cache clear --older-than -1"),
        )
    ),
    ("run --siute longtail", r"No such option.*--siute"),
    ("rnu", r"No such command 'rnu'"),
    # scenario show
    ("scenario show", r"nothing to show.*longtail.*--suite NAME"),
    ("scenario show longtial", r"unknown scenario 'longtial'.*'longtail'.*fedbench list scenarios"),
    ("scenario show iid shards", r"'iid' and 'shards' are several scenarios to show; give one"),
    ("scenario show iid --suite longtail", r"two answers.*--set scenario=iid"),
    ("scenario show iid --setting two", r"--setting and --scale choose from a suite's grid; give --suite"),
    ("scenario show iid --scale paper", r"--setting and --scale choose from a suite's grid; give --suite"),
    ("scenario show --suite longtial", r"unknown suite 'longtial'.*'longtail'"),
    ("scenario show --suite grid.yaml", r"2 settings at scale 'small'.*--setting.*'two', 'four'"),
    ("scenario show --suite grid.yaml --setting fuor", r"unknown setting.*'four'"),
    ("scenario show --suite grid.yaml --scale lrge", r"unknown scale.*'large'"),
    ("scenario show --suite longtail --setting x", r"has no settings to choose from"),
    ("scenario show iid --set clients", r"is not key=value"),
    (
        "scenario show iid --set clients=2 clients=3",
        r"clients is set twice, by 'clients=2' and 'clients=3'; leave one out",
    ),
    ("scenario show iid --set cleints=3", r"unknown setting 'cleints'; did you mean 'clients'"),
    ("scenario show iid --set clients=0", r"scenario.clients='0'.*greater than or equal to 1"),
    ("scenario show iid --set fedprox.mu=1", r"--set fedprox.mu.*fedprox's own settings"),
    ("scenario show iid --set fedprx.mu=1", r"unknown method 'fedprx'.*'fedprox'"),
    ("scenario show iid --set fedprox.dataset=x", r"--set fedprox.dataset.*fedprox's own settings"),
    ("scenario show iid --set rounds=3", r"--set rounds.*doesn't depend on it"),
    ("scenario show iid --set backbone=convnet", r"--set backbone.*doesn't depend on it"),
    ("scenario show iid --set seed=3", r"give --seed"),
    ("scenario show iid --dataset cifar10 --set dataset=embedded", r"dataset is set twice"),
    ("scenario show iid --dataset embeded", r"unknown data set 'embeded'.*'embedded'"),
    # other verbs
    ("cache clear --cache-dir file", r"file' is a file, not a folder; choose another folder"),
    ("advise --counts none.csv", r"does not exist"),
    ("advise --counts clients.csv --needs both", r"neither global nor personal"),
    ("advise --counts clients.csv --participation 0", r"somebody must train"),
    ("advise --counts clients.csv --participation nan", r"'--participation'"),
    ("advise --counts clients.csv --evidence clients.csv", r"is no evidence"),
    ("map --suite toy.yaml --rates 0,1", r"give different positive factors"),
    ("map --suite toy.yaml --rates fast", r"give different positive factors"),
    ("run --suite toy.yaml --tuned none.csv", r"none.csv' can't be read"),
    ("figure pie --suite longtail --output a.png", r"pie|fedbench run"),
    ("publish", r"give --suite NAME to run a suite, or --site FOLDER"),
    ("publish --suite longtail --results x", r"--results is for --site"),
    ("new method fedprox", r"'fedprox' is a method already"),
    ("new method a+b", r"cannot be a method's name"),
    ("new method 3d", r"let it begin with a letter"),
    ("new method class", r"'class' is a word of the language"),
    ("new method torch", r"a module called 'torch', and Python has one here already"),
    ("new method fedbench-methods", r"a module called 'fedbench_methods', and Python has one"),
    ("new method mine --folder full", r"is there already and not an empty folder"),
]
GRID = """
name: grid
scenario: {preset: iid, clients: 2}
scales:
  small: {settings: [{name: two}, {name: four, set: {clients: 4}}]}
  large: {settings: [{name: five, set: {clients: 5}}]}
rows: [{method: fedprox}]
"""
TOY = """
name: toy
scenario: {preset: iid, partition: dirichlet}
rows: [{method: fedavg}]
"""


@pytest.fixture
def refused(fedbench, monkeypatch, tmp_path, tmp_path_factory):
    """`fedbench ARGUMENTS` beside some files; its message as one line, after checking how it ended."""
    monkeypatch.setenv("FEDBENCH_CACHE", str(tmp_path_factory.getbasetemp() / "rendered"))
    monkeypatch.setenv("COLUMNS", "100")
    for folder in ("full", "data", "pictures"):
        Path(folder).mkdir()
    files = {
        "file": "mine",
        f"full/{'0' * 64}.safetensors": "",
        "grid.yaml": GRID,
        "toy.yaml": TOY,
        "weights.safetensors": "no weights",
    }
    files |= {"broken.py": "import nowhere\n", "empty.py": "x = 1\n", "clients.csv": "client,cat,dog\na,20,3\nb,5,9\n"}
    for name, text in files.items():
        Path(name).write_text(text)
    Path("loop.py").symlink_to("loop.py")
    Path("data/train-00000-of-00001.parquet").write_bytes(b"PAR1" + bytes(100))

    def call(*arguments):
        before = {path: path.is_file() and path.read_bytes() for path in Path.cwd().rglob("*")}
        ended = fedbench(*arguments)
        assert ended.code == 2, ended
        assert len(re.findall(r"\berror: |╭─ Error", ended.err)) == 1, ended.err
        after = {path: path.is_file() and path.read_bytes() for path in Path.cwd().rglob("*")}
        assert {path for path in after if "__pycache__" not in path.parts} == {*before}
        assert all(after[path] == held for path, held in before.items())
        return re.sub(r"[\s│]+", " ", ended.err).strip()

    return call


@pytest.mark.parametrize(("words", "expected"), CASES, ids=[words[:60] for words, _ in CASES])
def test_message_says_what_where_and_what_to_do(words, expected, refused):
    message = refused(*shlex.split(words))
    assert re.search(expected, message), message


@pytest.mark.parametrize("verb", ["leaderboard", "run --method fedavg", "evaluate 0123"])
@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9", "https://127.0.0.1:9/x", "http://127.0.0.1:99999", "http://[::1"]
)
def test_a_server_that_is_not_there_is_told_at_once(verb, address, refused, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    began = time.monotonic()
    said = refused(*verb.split(), "--store", address)
    assert time.monotonic() - began < 10
    assert f"no server answers at the store '{address}' within 4 s; start it, or choose another" in said


def test_corrupt_cache_of_the_embedded_data(refused, tmp_path, monkeypatch):
    from fedbench.datasets import load_dataset

    monkeypatch.setenv("FEDBENCH_CACHE", str(tmp_path / "cache"))
    load_dataset("embedded?train=200&test=40", data_dir=tmp_path, cache_dir=tmp_path / "cache")
    for file in (tmp_path / "cache").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-100])
    assert "delete" in refused(*shlex.split(f"{RUN} {SMALL}"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_store_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "locked" in refused(*shlex.split(f"{RUN} {SMALL} --store locked/store"))


# --- suite files

SUITE = """name: mine
scenario: {preset: iid, clients: 2}
dataset: embedded?train=200&test=40
training: {rounds: 1}
seeds: [0]
rows:
  - method: fedavg
  - {method: fedprox, set: {fedprox.mu: 0.1}}
"""
BOMB = "".join(f"{new}: &{new} [{','.join(9 * ['*' + old])}]\n" for old, new in zip("abcdef", "bcdefg", strict=True))
ADDED = [
    # a line at the end
    ("name: yours\n", r"mine.yaml, line 9: 'name' is given twice, first in line 1"),
    (b"description: caf\xe9\n", r"mine.yaml, line 9: not UTF-8 text \(byte 0xe9\)"),
    ("description: !!python/object/apply:os.getcwd []\n", r"line 9: .*python/object"),
    ("target: !!int many\n", r"line 9: not valid YAML: 'many' cannot be read as int"),
    ("target: !!bool many\n", r"line 9: not valid YAML: 'many' cannot be read as bool"),
    ("description: 2001-99-99\n", r"line 9: not valid YAML: '2001-99-99' .* timestamp"),
    (f"target: {LONG}\n", r"line 9: not valid YAML: '9{40}' cannot be read as int"),
    ("target: !!int ''\n", r"line 9: not valid YAML: '' cannot be read as int"),
    ("target: 1:30\n", r"line 9: .*1:30 is another value in YAML 1.1 than in"),
    ("target: 1:30.5\n", r"line 9: .*1:30.5 is another value"),
    ("description: yes\n", r"line 9: .*yes is another value.*text in quotes"),
    ("columns: " + "[" * 20_000, r"line 9: .*exceeded maximum nesting depth"),
    (f"columns: {'[' * 50}{']' * 50}", r"line 9: nested more than 40 levels deep"),
    ("columns: &a [*a]\n", r"mine.yaml, line 9: .*an alias stands for itself"),
    ("headline: tial\n", r"line 9, headline: unknown accuracy 'tial'; .* 'tail'"),
    ("columns: [head, worst_clint]\n", r"line 9, columns.1: .*mean 'worst_client'"),
    ("columns: [bytes]\n", r"line 9, columns.0: unknown accuracy 'bytes'"),
    ("objective: byts\n", r"line 9, objective: unknown .* 'byts'.*tail"),
    (
        "published_metrics:\n  globl_accuracy: accuracy\n",
        r"line 10, published_metrics.globl_accuracy.*: unknown .*'global'",
    ),
    ("published: captt\n", r"line 9, published: unknown file of published numbers 'captt'; .* put captt.csv beside"),
    ("baseline: fedprx\n", r"line 9, baseline: unknown row 'fedprx'; .*'fedprox'"),
]
REPLACED = [
    # a part, and what is there instead
    ("{fedprox.mu: 0.1}", "{fedprox.mu: 0.1, fedprox.mu: 0.2}", r"line 8: 'fedprox.mu' is given twice"),
    ("rounds: 1", "rounds: 010", r"line 4: .*010 is another value .*without leading"),
    ("[0]", "[0b11]", r"line 5: .*0b11 is another value"),
    ("[0]", "[1_000]", r"line 5: .*1_000 is another value.*underscores"),
    ("fedprox.mu:", "on:", r"line 8: .*on is another value"),
    ("name: mine", r'name: "a\e[2J"', r"line 1, name: it must be printable"),
    ("name: mine", "name: ..", r"line 1, name: it must have a letter"),
    ("name: mine", "name: " + 300 * "x", r"line 1, name: .*at most 100 char"),
    ("[0]", f"[{2**70}]", r"line 5, seeds.0: .*less than or equal to 9223"),
    ("[0]", "[true]", r"line 5, seeds.0: it is a number, not true"),
    ("rounds: 1", "rounds: true", r"line 4, training.rounds: .*it is a number"),
    ("mu: 0.1", "mu: true", r"mine.yaml, line 8, rows.1.set.fedprox.mu: fedprox.mu=True is not a float"),
    ("mu: 0.1", "mu: .nan", r"mine.yaml, line 8, rows.1.set.fedprox.mu: fedprox.mu=nan is out of range"),
    ("fedprox.mu: 0.1", "roudns: 3", r"line 8, rows.1.set.roudns: unknown setting 'roudns'; did you mean 'rounds'"),
    ("clients: 2", "clients: two", r"mine.yaml, line 2, scenario.clients: scenario.clients='two': .*integer"),
    ("clients: 2", "clents: 2", r"mine.yaml, line 2.*'clents'.*'clients'"),
    ("rounds: 1", "rounds: 1e400", r"mine.yaml, line 4, training.rounds: training.rounds="),
    ("method: fedavg", "method: fedp%rox", r"line 7, rows.0.method: unknown method 'fedp%rox'; did you mean 'fedprox'"),
]
WHOLE = [
    (SUITE.encode("utf-16"), r"mine.yaml, line 1: not UTF-8 text"),
    (b"", r"mine.yaml, line 1: a suite is a mapping with name, scenario and rows"),
    (
        f"{SUITE.replace('method: fedavg', '{method: fedavg, published: [{}, {varaint: x}]}')}published: capt".encode(),
        r"line 7, rows.0.published.1.varaint: unknown column of published numbers 'varaint'; .* 'variant'",
    ),
    (f"a: &a [{','.join('x' * 9)}]\n{BOMB}".encode(), r"line \d: its aliases stand for more than 200,000 values"),
]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        *((SUITE.encode() + (line if isinstance(line, bytes) else line.encode()), said) for line, said in ADDED),
        *((SUITE.replace(old, new).encode(), said) for old, new, said in REPLACED),
        *WHOLE,
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_a_wrong_suite_file_is_refused_by_file_line_and_field(content, expected, refused, tmp_path):
    (tmp_path / "mine.yaml").write_bytes(content)
    message = refused("run", "--suite", "mine.yaml")
    assert re.search(expected, message), message


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
    with pytest.raises(FedbenchError, match="mine.csv' lack the column table, dataset, "):
        check_published(suite, published_folder(None))
    (tmp_path / "mine.csv").write_text(",".join(_NEEDED) + "\n")
    check_published(suite, published_folder(None))
    found = published_of(suite, published_folder(None))
    assert found is not None and list(found.facts) == list(_NEEDED)


def test_values_that_every_yaml_reads_alike_are_read():
    assert parse_suite(SUITE + "description: 'yes'\n", "s").description == "yes"
    assert parse_suite(SUITE + 'description: "1:30"\n', "s").description == "1:30"
    assert parse_suite(SUITE + "target: .5e+1\n", "s").target == 5
    assert parse_suite(SUITE.replace("[0]", "[0x1F, 30]"), "s").seeds == (31, 30)


def test_a_number_too_long_to_be_shown_is_refused_by_its_line():
    with pytest.raises(FedbenchError, match=r"line 2: .*cannot be read as int"):
        parse_suite("name: s\ntraining: {rounds: 0x" + "f" * 5000 + "}\nrows: [{method: fedavg}]\n", "s")
