"""`fedbench map`, `advise` and `publish`: what they run, write and say."""

import gzip
import json

import pandas as pd
import pytest

from fedbench.cli.commands import mapping
from fedbench.tracking.schema import store_uri
from fedbench.workflow.console import clock
from fedbench_boards.advice.evidence import write_evidence
from fedbench_boards.leaderboard.results import load_results
from tests.advice.test_advising import evidence

SUITE = """
name: toy
dataset: "embedded?train=240&test=80"
scenario: {preset: iid, partition: dirichlet, clients: 3, participation: 1.0, min_client_size: 1}
training: {rounds: 1, local_epochs: 1, batch_size: 32, lr: 0.01, eval_every: 1}
seeds: [0, 1]
rows: [{method: clip-zs}, {method: fedavg}, {method: local, set: {lr: 20}}]
scales:
  all:
    settings:
      - {name: strong, set: {dirichlet_alpha: 0.05}}
      - {name: weak, set: {dirichlet_alpha: 0.3}}
      - {name: none, set: {dirichlet_alpha: 100}}
"""
COUNTS = "client,cat,dog,fox\na,20,3,0\nb,5,9,4\n"


@pytest.fixture(autouse=True)
def cache(elsewhere, monkeypatch):
    monkeypatch.setenv("FEDBENCH_CACHE", "cache")


@pytest.fixture
def files(tmp_path):
    known = evidence({"fedavg": [50] * 3, "best": [60, 61, 62], "third": [55] * 3}, [0, 0.1, 0.2])
    write_evidence(known, tmp_path / "evidence.csv")
    (tmp_path / "clients.csv").write_text(COUNTS)
    (tmp_path / "toy.yaml").write_text(SUITE)
    return tmp_path


def test_advice_names_rows_intervals_costs_and_what_it_does_not_know(fedbench, files):
    code, out, _ = fedbench("advise", "--counts", "clients.csv", "--evidence", "evidence.csv")
    assert code == 0
    assert "nearest measured settings" in out and "s2" in out
    assert "best" in out and "+1" in out and "neither your data nor your backbone" in " ".join(out.split())
    assert "Far from all that is measured" in out and "too few measured settings" in out


def test_an_interval_stays_within_what_an_accuracy_can_be(fedbench, files):
    write_evidence(evidence({"fedavg": [50] * 9, "best": [-90] + [90] * 8}, list(range(9))), files / "wide.csv")
    _, out, _ = fedbench("advise", "--counts", "clients.csv", "--evidence", "wide.csv")
    assert "-100.0 to +100.0" in out


def test_limits_on_costs_and_domains_count(fedbench, files):
    options = ["--counts", "clients.csv", "--evidence", "evidence.csv"]
    code, _, err = fedbench("advise", *options, "--max-seconds", "1")
    assert code == 2 and "raise --max-mb or --max-seconds" in err
    near, far = (" ".join(fedbench("advise", *options, *more)[1].split()) for more in ([], ["--domains"]))
    assert "a domain of its own at every client 0.00" in near and "at every client 1.00" in far


@pytest.mark.slow
def test_a_map_is_run_at_the_best_rates_and_advises_and_its_advice_is_replayed(fedbench, files):
    places = ["--store", "store"]
    words = ("map", "--suite", "toy.yaml", "--output", "boards", "--jobs", "1", *places)
    code, out, _ = fedbench(*words)
    assert code == 0, out
    folder = files / "boards" / "toy"
    rates = pd.read_csv(folder / "rates.csv")
    assert sorted(set(rates["row"])) == ["fedavg · clip:embedded", "local · clip:embedded"] and len(rates) == 6
    assert set(rates["seeds"]) == {2} and set(rates["trials"]) == {3} and set(rates["validation"]) == {0.2}
    assert set(rates["lr"]) <= {0.001, 0.01, 0.1, 2, 20, 100}  # cut to what a run takes
    # each is the best on validation data
    tried = load_results(store_uri("store"), "toy-rates")
    assert len(tried) == 3 * 3 * 3
    assert f"runs take about {clock(tried['final/seconds'].sum() / 3 * 2)}, divided by --jobs" in " ".join(out.split())
    one = tried[(tried["setting"] == "weak") & (tried["method"] == "fedavg")]
    one = one[one["final/global_accuracy"] == one["final/global_accuracy"].max()]
    best = min(float(json.loads(settings)["training.lr"]) for settings in one["row_settings"])
    assert rates.set_index(["setting", "row"])["lr"]["weak", "fedavg · clip:embedded"] == best
    board = pd.read_csv(folder / "leaderboard.csv.gz")
    assert set(board.loc[board["method"] != "clip-zs", "tuned"]) == {True}
    # a row that has nothing to tune is compared with the tuned baseline
    assert board.loc[board["method"] == "clip-zs", "delta_mean"].notna().all()
    written = gzip.decompress((folder / "evidence.csv.gz").read_bytes()).decode()
    assert len(written.splitlines()) == 1 + 3 * 3 * 2
    # runs of other values in the same store choose nothing, and are no evidence
    fedbench("run", "--suite", "toy.yaml", "--set", "lr=0.2", "--method", "fedavg", *places)
    more = ["--set", "lr=0.2", "--method", "fedavg"]
    fedbench("run", "--suite", str(folder / "rates" / "rates.yaml"), *more, *places)
    code, out, _ = fedbench(*words)
    assert code == 0 and "start " not in out
    assert pd.read_csv(folder / "rates.csv").equals(rates)
    assert gzip.decompress((folder / "evidence.csv.gz").read_bytes()).decode() == written
    # the evidence names its suite, which a replay reads
    known = written.replace("\ntoy,", "\ntoy.yaml,")
    (files / "known.csv").write_text(known)
    code, _, err = fedbench("advise", "--counts", "clients.csv", "--evidence", "known.csv", "--run")
    assert code == 2 and "10 or 20 classes, these counts 3" in " ".join(err.split())
    classes = ",".join(f"c{number}" for number in range(10))
    (files / "ten.csv").write_text(f"client,{classes}\na{',9' * 10}\nb{',2' * 10}\n")
    code, out, _ = fedbench("advise", "--counts", "ten.csv", "--evidence", "known.csv", "--run", "--seed", "0")
    assert code == 0, out
    assert "advised.yaml" in out and "table" in (files / "advice" / "advised.yaml").read_text("utf-8")


PUBLISHED = """
name: toy
dataset: "embedded?train=240&test=80"
scenario: {imbalance: exponential, imbalance_factor: 4, partition: iid, clients: 2, participation: 1.0}
training: {rounds: 2, local_epochs: 1, batch_size: 32, lr: 0.01}
rows:
  - method: clip-zs
  - method: fedavg
"""


@pytest.mark.slow
def test_one_command_runs_tunes_and_writes_and_again_repeats_nothing(fedbench, tmp_path):
    (tmp_path / "toy.yaml").write_text(PUBLISHED, encoding="utf-8")
    options = ["--suite", "toy.yaml", "--trials", "2", "--seed", "0", "--seed", "3", "--jobs", "1"]
    words = ("publish", *options, "--output", "boards")
    code, out, _ = fedbench(*words)
    assert code == 0, out
    folder = tmp_path / "boards" / "toy"
    written = {path.name for path in folder.iterdir()}
    board_files = {"results.csv.gz", "leaderboard.csv.gz", "leaderboard.md", "index.html", "manifest.json"}
    assert written == {*board_files, "tuning"}
    board = pd.read_csv(folder / "leaderboard.csv.gz")
    assert sorted(board["row"]) == [
        "clip-zs · clip:embedded",
        "fedavg · clip:embedded",
        "fedavg · clip:embedded (tuned)",
    ]
    # tuned on seeds that no run has
    tuning = json.loads(board.loc[board["tuned"], "tuning"].iloc[0])
    assert [tuning[name] for name in ("seeds", "run-off seeds", "confirming seeds")] == ["4 5 6", "7", "8"]
    gap = pd.read_csv(folder / "tuning" / "gap.csv")
    assert gap["seeds"].tolist() == ["0 3"] and gap["gap"].notna().all()
    assert set(json.loads(board["runs"].iloc[0])) == {"0", "3"}
    text = (folder / "leaderboard.md").read_text("utf-8")
    for command in (
        "$ fedbench run --suite toy.yaml --seed 0 --seed 3\n",
        "$ fedbench tune --suite toy.yaml",
        "--tuned toy",
    ):
        assert command in text
    assert str(tmp_path) not in text + (folder / "index.html").read_text("utf-8")

    code, out, _ = fedbench(*words)
    assert code == 0, out
    assert "4 of 4 runs are in the store already" in out
    assert "start " not in out


def test_a_suite_with_nothing_to_tune_still_gets_its_leaderboard(fedbench, tmp_path):
    (tmp_path / "toy.yaml").write_text(PUBLISHED.replace("  - method: fedavg\n", ""), encoding="utf-8")
    code, _, err = fedbench("publish", "--suite", "toy.yaml")
    assert code == 2 and "none of these rows has anything to tune" in " ".join(err.split())
    assert (tmp_path / "leaderboards" / "toy" / "index.html").is_file()


METRIC = '''
from fedbench.api import Metric, NoParams


class Mine(Metric[NoParams]):
    """Nothing."""

    name = "mine"

    def values(self, task):
        return 1.0
'''


@pytest.mark.parametrize(("verb", "steps"), [("publish", 5), ("map", 2)])
def test_plugins_are_known_to_every_step(fedbench, tmp_path, monkeypatch, verb, steps):
    (tmp_path / "mine.py").write_text(METRIC)
    (tmp_path / "toy.yaml").write_text(SUITE + "headline: mine\n")
    shown = []
    monkeypatch.setattr(mapping, "step", lambda ctx, *words: shown.append(words) or 0)
    nothing = pd.DataFrame({"run_id": []})
    monkeypatch.setattr("fedbench_boards.leaderboard.results.load_results", lambda *_: nothing)
    for name in ("evidence_of", "write_evidence"):
        monkeypatch.setattr(f"fedbench_boards.advice.evidence.{name}", lambda *_: None)
    rates = ["--rates", "1"] if verb == "map" else []
    code, _, err = fedbench(verb, "--suite", "toy.yaml", "--plugin", "mine.py", *rates)
    assert code == 0, err
    assert len(shown) == steps
    assert all("--plugin" in words for words in shown if words[0] != "study")
