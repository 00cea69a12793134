"""`fedbench tune`, `fedbench study` and `fedbench run --tuned` as a user meets them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from fedbench.cli import tuning
from fedbench.cli.app import main
from fedbench.cli.commands import mapping, run
from fedbench.suites.suite import single
from fedbench.tracking.schema import store_uri
from fedbench.tracking.store import open_store
from fedbench.tuning.search import Search, SearchFailed
from fedbench.workflow.selection import Selection
from fedbench_boards.leaderboard.results import load_results

SUITE = """
name: toy
dataset: "embedded?train=240&test=80"
scenario: {imbalance: exponential, imbalance_factor: 4, partition: iid, clients: 2, participation: 1.0}
training: {rounds: 2, local_epochs: 1, batch_size: 32, lr: 0.01}
seeds: [0, 1]
rows:
  - method: clip-zs
  - method: fedavg
  - method: fedprox
"""
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a suite, a store that has a study of two trials a row, and the caches."""
    made = tmp_path_factory.mktemp("tune")
    (made / "toy.yaml").write_text(SUITE, encoding="utf-8")
    return made


@pytest.fixture
def fedbench(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`fedbench ARGUMENTS` in that folder: exit code, stdout, stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FEDBENCH_CACHE", str(folder / "cache"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedbench", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code if isinstance(ended.value.code, int) else 0, captured.out, captured.err

    return call


def test_a_dry_run_shows_what_would_be_searched_and_stores_nothing(fedbench: Command, folder: Path) -> None:
    code, out, _ = fedbench("tune", "--suite", "toy.yaml", "--dry-run")
    assert code == 0
    assert "clip-zs · clip:embedded: nothing to tune" in out
    assert "2 studies of 20 trials: global_accuracy on 20 % of the training data, seeds 2, 3, 4, " in out
    assert "run-off on seed 5, confirmation on seed 6" in " ".join(out.split())
    assert "fedprox.mu" in out
    assert not (folder / "fedbench-store").exists()


def test_several_settings_follow_one_set_as_in_run(fedbench: Command) -> None:
    code, out, err = fedbench(
        "tune", "--suite", "toy.yaml", "--dry-run", "--method", "fedavg", "--trials", "1", "--set", "lr=0.3", "rounds=1"
    )
    assert code == 0, err
    assert "\n1 study of 1 trial: " in out
    [row] = [line for line in out.splitlines() if line.startswith("fedavg · ")]
    assert row.split()[-1] == "0.3"
    code, _, err = fedbench("tune", "--suite", "toy.yaml", "--dry-run", "--set", "rounds=2", "rounds=3")
    assert (code, err) == (2, "error: rounds is set twice, by 'rounds=2' and 'rounds=3'; leave one out.\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--pruner", "hope"), "--pruner 'hope' is not one of median, halving, none"),
        (("--param", "fedprox.nu"), "unknown hyper-parameter that these rows can tune 'fedprox.nu'"),
        (("--method", "clip-zs"), "none of these rows has anything to tune"),
        (("--method", "fedprx"), "fedprx"),
        (("--set", "rouns=3"), "rouns"),
        (("--set", "scenario.validation=0.5"), "--set scenario.validation has no effect on trials"),
        (("--set", "lr=0.1", "scenario.validation=0.5"), "--set scenario.validation has no effect on trials"),
        (("--set", "rounds=0"), "no rounds to tune"),
        (("--objective", "worst_domian"), "worst_domain_accuracy"),
        (("--objective", "worst_domian", "--dry-run"), "worst_domain_accuracy"),
        (("--objective", "tail", "--objective", "tail_accuracy"), "stand once"),
        (("--seed", "2", "--set", "clients=500"), "client"),
        (("--store", "http://127.0.0.1:9"), "--storage"),
    ],
)
def test_bad_input_is_told_and_nothing_is_stored(
    fedbench: Command, folder: Path, given: tuple[str, ...], message: str
) -> None:
    code, _, err = fedbench("tune", "--suite", "toy.yaml", *given)
    assert code == 2
    assert message in err
    assert not (folder / "fedbench-store").exists()


def test_tune_then_run_then_read(fedbench: Command, folder: Path) -> None:
    code, out, _ = fedbench("tune", "--suite", "toy.yaml", "--trials", "2", "--jobs", "1")
    assert code == 0, out
    assert out.count("(2/2)") == 2
    assert "run it       fedbench run --suite toy.yaml --tuned toy" in out
    told = "improved" if "no trial was better" not in out else "not improved"

    code, out, _ = fedbench("run", "--suite", "toy.yaml", "--seed", "0", "--jobs", "1")
    assert code == 0
    code, out, _ = fedbench("run", "--suite", "toy.yaml", "--seed", "0", "--jobs", "1", "--tuned", "toy")
    assert code == 0
    assert "clip-zs · clip:embedded: not tuned in 'toy', run as the suite has it" in out
    results = load_results(store_uri("fedbench-store"), "toy")
    assert sorted(results["row"]) == [
        "clip-zs · clip:embedded",
        "fedavg · clip:embedded",
        "fedavg · clip:embedded (tuned)",
        "fedprox · clip:embedded",
        "fedprox · clip:embedded (tuned)",
    ]
    of_study = results[results["row"].str.endswith("(tuned)")]
    assert set(of_study["tuned"]) == {"toy"}

    code, out, _ = fedbench("study", "toy", "--output", "figures")
    assert code == 0
    assert ("no trial was better" in out) == (told == "not improved")
    assert "budget       2 trials: global_accuracy" in out
    for row in ("fedavg-clip-embedded", "fedprox-clip-embedded"):
        assert {path.name for path in (folder / "figures" / row).iterdir()} >= {"trials.csv", "slices.png"}
        assert len(pd.read_csv(folder / "figures" / row / "trials.csv")) == 2
    gap = pd.read_csv(folder / "figures" / "gap.csv")
    assert gap["test"].tolist() == pytest.approx(of_study.sort_values("row")["final/global_accuracy"].tolist())
    assert gap["gap"].tolist() == pytest.approx((gap["validation"] - gap["test"]).tolist())
    assert gap["confirmation"].notna().all() and set(gap["seeds"]) == {0}
    assert "gap: validation - test" in " ".join(out.split())


def test_rows_that_are_equal_as_trials_are_two_rows_all_the_same(fedbench: Command, folder: Path) -> None:
    twins = SUITE + "  - {method: fedavg, label: fine-tuned, set: {finetune_epochs: 2}}\n"
    (folder / "twins.yaml").write_text(twins, encoding="utf-8")
    code, out, err = fedbench("tune", "--suite", "twins.yaml", "--dry-run")
    assert code == 0, err
    assert "3 studies" in out
    (folder / "namesakes.yaml").write_text(SUITE + "  - {method: fedavg, set: {lr: 0.1}}\n", encoding="utf-8")
    code, _, err = fedbench("tune", "--suite", "namesakes.yaml", "--dry-run")
    assert (code, "two rows are called 'fedavg" in err) == (2, True)


@pytest.mark.slow
def test_several_objectives_are_tuned_without_pruner_and_give_a_front(fedbench: Command) -> None:
    code, out, _ = fedbench("tune", "--suite", "toy.yaml", "--method", "fedavg", "--study", "front", "--trials", "2",
                            "--objective", "tail", "--objective", "bytes", "--jobs", "1")  # fmt: skip
    assert code == 0
    assert "pruner none" in out
    assert "the Pareto front; --tuned takes trial" in out


def test_a_study_cut_short_says_so_and_is_recorded_as_what_it_was(fedbench: Command, folder: Path) -> None:
    import json

    from fedbench.tuning.storage import open_storage
    from fedbench.tuning.studies import record_of, studies_named

    storage = open_storage(f"sqlite:///{folder / 'fedbench-store' / 'studies.db'}", create=False)
    study = next(study for study in studies_named(storage, "toy") if "fedprox" in study.study_name)
    longer = json.loads(record_of(study).dumped())
    codes = [code["method"] for code in json.loads(longer["method_code"])]
    assert codes == ["fedprox", "data set embedded", "backbone clip:embedded"]
    longer["budget"]["trials"] = 50
    study.set_user_attr("fedbench", json.dumps(longer))
    code, out, _ = fedbench("run", "--suite", "toy.yaml", "--tuned", "toy", "--dry-run")
    assert code == 0
    assert "fedprox · clip:embedded: 2 of 50 trials are over" in out
    assert "had unequal budgets" in out


def test_a_longer_run_with_tuned_values_says_how_they_were_tuned(fedbench: Command) -> None:
    code, out, _ = fedbench("run", "--suite", "toy.yaml", "--tuned", "toy", "--set", "rounds=5", "--dry-run")
    assert code == 0
    assert "fedavg · clip:embedded: was tuned with rounds=2" in out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--tuned", "tuy"), "unknown study 'tuy'"),
        (("--tuned", "toy", "--set", "lr=0.1"), "--set lr: the study 'toy' has tuned it"),
        (("--tuned", "toy", "--method", "clip-zs"), "none of these rows was tuned"),
        (("--tuned", "toy", "--storage", "missing.db"), "there are no studies"),
    ],
)
def test_tuned_values_that_cannot_be_had_are_an_error(fedbench: Command, given: tuple[str, ...], message: str) -> None:
    code, _, err = fedbench("run", "--suite", "toy.yaml", *given)
    assert code == 2
    assert message in err


def test_a_study_whose_search_was_stopped_is_told_and_has_failed_in_mlflow(
    fedbench: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(search: Search) -> None:
        search._tracking._client._patience._tell("the store can't be written")
        raise SearchFailed("it is full")

    monkeypatch.setattr(Search, "carry_out", stopped)
    chosen = ("--suite", "toy.yaml", "--method", "fedavg", "--trials", "1", "--store", "stopped", "--jobs", "1")
    code, _, err = fedbench("tune", *chosen)
    assert code == 2 and "warning: the store can't be written" in err and "error: it is full" in err
    client = open_store(store_uri(str(folder / "stopped")), create=False)
    assert client is not None
    (run,) = client.search_runs([client.get_experiment_by_name("fedbench-tuning/toy").experiment_id])
    assert run.info.status == "FAILED"


def test_no_command_that_is_shown_has_a_password(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    store = "postgresql://ann:hush-pass@host/db"
    tuning.show_next_steps("toy", Selection(suite="toy"), store, store)
    monkeypatch.setattr("fedbench.cli.commands.run._page", lambda *_: "")
    run.show_next_steps(single(), None, "adhoc", store, store, has_others=True)
    context = SimpleNamespace(find_root=lambda: SimpleNamespace(command=lambda *_, **__: 0))
    mapping.step(context, "run", "--store", store)
    out = capsys.readouterr().out
    assert "hush" not in out and out.count("ann:***@host") >= 6
