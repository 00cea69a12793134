"""Published numbers and the suites that replay them: every key finds its number, and every number its run."""

import json
import math
from functools import cache, lru_cache
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

import fedbench_suites
from fedbench.cli.app import app
from fedbench.core.errors import FedbenchError
from fedbench.core.metric_names import EACH_DOMAIN
from fedbench.core.records import RunInfo, RunResult
from fedbench.core.scenario import Scenario
from fedbench.core.spec import RunSpec, stack_names
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import load_suite, suite_names
from fedbench.tracking import listener as tracking
from fedbench.tracking.schema import store_uri
from fedbench.tracking.tags import flat_params
from fedbench_boards.leaderboard.board import of_suite
from fedbench_boards.leaderboard.comparable import Difference
from fedbench_boards.leaderboard.formats import render_terminal, to_markdown
from fedbench_boards.leaderboard.model import Board
from fedbench_boards.leaderboard.published import (
    Published,
    beside,
    load_paper,
    load_published,
    matching,
    published_folder,
    published_of,
    unreadable_columns,
)
from fedbench_boards.leaderboard.results import load_results
from fedbench_boards.leaderboard.tables import text_tables
from tests.leaderboard.frames import board_of, leaderboard
from tests.leaderboard.published_counts import PAPERS, counts, results_of

FOLDER = published_folder(None)
REPLAYS = [name for name in suite_names() if load_suite(name).published]


def largest(suite):
    """The paper's scale, or what the suite has of it."""
    return list(suite.scales)[-1]


@cache
def at_paper_scale(name):
    """A suite, and its runs at its largest scale with one seed."""
    suite = load_suite(name)
    return suite, expand(suite, Overrides(scale=largest(suite), seeds=(0,)))


@pytest.fixture(scope="module", params=REPLAYS)
def replay(request):
    """Suite, published numbers, runs at paper scale, and which numbers a run's key picks, looked up once a key."""
    suite, specs = at_paper_scale(request.param)
    facts = load_published(suite.published, FOLDER)
    picked = lru_cache(maxsize=None)(lambda items: matching(facts, dict(items)))
    return suite, facts, specs, lambda key: picked(tuple(sorted(key.items())))


def test_the_five_papers_have_a_suite():
    assert set(PAPERS) <= set(REPLAYS)


def test_every_row_and_every_setting_joins_a_published_number(replay):
    suite, _, specs, pick = replay
    hit = [(spec, key) for spec in specs for key in spec.published if len(pick(key))]
    settings = {spec.setting for spec, _ in hit}
    wanted = {setting.name for setting in suite.scales[largest(suite)].settings if setting.published}
    assert wanted == settings, f"settings without a published number: {sorted(wanted - settings)}"
    for row in suite.rows:
        for entry in row.published:
            found = any(
                entry.items() <= key.items() and stack_names(spec.method) == stack_names(row.method)
                for spec, key in hit
            )
            assert found, f"row {row.label or row.method} with {entry} joins nothing"


def test_a_key_and_a_metric_pick_one_number(replay):
    suite, _, specs, pick = replay
    assert all(spec.setting for spec in specs)
    for key in {tuple(sorted(key.items())) for spec in specs for key in spec.published}:
        found = pick(dict(key))
        for ours, columns in suite.published_metrics.items():
            if ours in EACH_DOMAIN or any(dict(key).get(column, value) != value for column, value in columns.items()):
                continue
            values = matching(found, columns)["value"]
            assert values.astype(float).nunique() <= 1, (key, columns)


def test_both_scales_share_rows_and_the_embedded_one_carries_keys_too():
    for name in PAPERS:
        suite = load_suite(name)
        assert list(suite.scales) == ["embedded", "paper"]
        small = expand(suite, Overrides(seeds=(0,)))
        assert any(spec.published for spec in small)
        assert all(spec.dataset.startswith("embedded") for spec in small)


def test_a_key_picks_lines_and_unknown_columns_and_files_are_refused():
    facts = load_published("clip2fl", FOLDER)
    key = {"table": "1", "dataset": "CIFAR-10-LT", "imbalance_factor": "100", "method": "clip2fl"}
    assert matching(facts, {**key, "metric": "accuracy"})["value"].tolist() == ["73.37"]
    assert matching(facts, {**key, "metric": "accuracy_tail"}).empty
    with pytest.raises(FedbenchError, match="imbalance_factor"):
        matching(facts, {"imbalance": "100"})
    with pytest.raises(FedbenchError, match="clip2fl"):
        load_published("clip2f", FOLDER)


def test_a_file_of_ones_own_has_all_columns_and_numbers(tmp_path):
    facts = load_published("clip2fl", FOLDER).head(2)
    facts.assign(value=["1.5", "n/a"]).to_csv(tmp_path / "mine.csv", index=False)
    with pytest.raises(FedbenchError, match=r"mine.csv', line 3: value 'n/a' is no number"):
        load_published("mine", tmp_path)
    facts.drop(columns=["backbone", "group"]).to_csv(tmp_path / "mine.csv", index=False)
    with pytest.raises(FedbenchError, match=r"mine.csv' lack the column backbone, group"):
        load_published("mine", tmp_path)


@pytest.mark.slow
def test_all_but_14_of_the_papers_1831_numbers_are_joined_and_shown():
    found = {name: counts(name) for name in PAPERS}
    assert sum(facts for facts, _, _ in found.values()) == 1831
    for _, joined, shown in found.values():
        assert shown == joined
    missing = {name: facts - len(joined) for name, (facts, joined, _) in found.items()}
    # segmentation
    assert missing == dict.fromkeys(PAPERS, 0) | {"fedglcl": 14}


def printed_in(name, setting, row, **changes):
    """What the paper prints for a row of a suite at paper scale, in the table of its setting."""
    suite, specs = at_paper_scale(name)
    specs = [s for s in specs if s.setting == setting and s.row.partition(" · ")[0] in (row, suite.baseline)]
    results = results_of(specs).assign(**changes)
    curves = pd.DataFrame(columns=["mlflow_id", "round", "global_accuracy"])
    board = of_suite(suite, results, curves, published_of(suite, FOLDER))
    named = [(table, line) for table in board.tables for line in table.lines if line.label.partition(" · ")[0] == row]
    return named[0][0], named[0][1].printed


@pytest.mark.parametrize(
    ("setting", "value"),
    [("CIFAR-10-LT IF 50, 0.05", 94.69), ("CIFAR-10-LT IF 100, 0.5", 94.04), ("CIFAR-100-LT IF 100, 0.5", 73.77)],
)
def test_capts_own_row_has_the_papers_headline_in_every_setting(setting, value):
    assert printed_in("capt", setting, "capt")[1].value == value
    table, printed = printed_in("capt", setting, "capt-reconstructed")
    assert (printed.value, printed.several, printed.comparable) == (value, (), "yes")
    also = dict(printed.also)
    assert "CAPT table 5" not in also  # it is of imbalance 100, where it prints the same
    (text,) = text_tables(Board((table,)))
    if "IF 100" in setting:  # the arm that is CAPT itself has another number in the tables of its ablations
        assert {"CAPT table 8", "CAPT table 9"} & set(also)
        assert any(note.startswith("capt-reconstructed, accuracy: the paper prints") for note in text.notes)
    assert any(column.heading == "paper tail" for column in text.further)


def test_a_number_stands_beside_own_models_only_where_there_is_no_global_one():
    setting = "Office-Caltech-10, ImageNet"
    names = ("domain_mean_accuracy", "personal_mean_client_accuracy")
    _, of_fedbn = printed_in("fedglcl", setting, "fedbn")
    assert of_fedbn.value == 71.87 and names[1] not in of_fedbn.metrics
    suite, specs = at_paper_scale("fedglcl")
    specs = [s for s in specs if (s.setting, s.method) == (setting, "fedpcl")]
    runs, published = results_of(specs), published_of(suite, FOLDER)
    own = beside(published, runs, names[0], {names[0]: float("nan"), names[1]: 70.0})
    assert math.isnan(own.value) and names[0] not in own.metrics
    number = own.metrics[names[1]]
    assert number.value == 72.46 and number.delta == pytest.approx(-2.46)
    assert number.comparable == "yes, as far as printed" and number.source == "FedGLCL table 18"


def test_table_18s_row_of_fedglcl_is_not_taken_for_the_ablations_of_other_tables():
    _, printed = printed_in("fedglcl", "Office-Caltech-10, ImageNet", "fedglcl")
    assert (printed.value, printed.several, printed.also) == (81.81, (), ())


def test_data_with_domains_are_ranked_by_the_mean_that_the_paper_prints():
    table, printed = printed_in("fedglcl", "Office-Caltech-10", "fedavg")
    assert table.headline == "domain_mean_accuracy"
    assert printed.value == 60.25 and printed.comparable == "yes, as far as printed"
    assert printed.metrics["domain_accuracy/amazon"].value == 50.00
    assert (printed.metrics["std"].value, printed.metrics["p_value"].value) == (0.85, 0.0003)
    assert "global_accuracy" not in printed.metrics
    # a domain of other data is not the paper's, whatever its first letter
    _, embedded = printed_in("fedglcl", "Office-Caltech-10", "fedavg", dataset="embedded")
    assert not [name for name in embedded.metrics if "/" in name]


@pytest.mark.parametrize("setting", ["Fashion-MNIST, 0.5", "DomainNet"])
def test_fashion_mnist_and_domainnet_can_be_comparable(setting):
    assert printed_in("fedglcl", setting, "fedavg")[1].comparable == "yes, as far as printed"


def test_vgg_11_has_its_own_numbers_beside_it():
    suite = load_suite("fedglcl")
    specs = expand(suite, Overrides(scale="paper", seeds=(0,), settings=("Office-Caltech-10 VGG-11",)))
    facts = load_published("fedglcl", FOLDER)
    tables = {table for spec in specs for key in spec.published for table in matching(facts, key)["table"]}
    assert tables == {"12"}


def test_the_suites_description_names_the_tables_it_replays():
    suite, specs = at_paper_scale("fedglcl")
    facts = load_published("fedglcl", FOLDER)
    tables = {int(table) for spec in specs for key in spec.published for table in matching(facts, key)["table"]}
    assert tables == {1, 2, 3, 4, *range(9, 19)} and "tables 1-4 and 9-18" in suite.description


def test_a_mean_over_settings_is_a_table_beside_the_papers_average():
    suite = load_suite("fedclip")
    specs = [s for s in expand(suite, Overrides(scale="paper", seeds=(0, 1))) if s.dataset == "imagefolder:PACS"]
    specs = [s for s in specs if s.row.startswith(("fedclip · ", "fedavg AlexNet"))]
    results = results_of(specs)
    name = "final/selected_unseen_domain_accuracy"
    results[name] = [80.0 + 4 * (s.setting[-1] == "A") + s.seed for s in specs]
    curves = pd.DataFrame(columns=["mlflow_id", "round", "global_accuracy"])
    board = of_suite(suite, results, curves, published_of(suite, FOLDER))
    table = board.tables[-1]
    assert "PACS AVG" in table.caption and "mean over PACS A, PACS C, PACS P, PACS S" in table.caption
    line = next(line for line in table.lines if line.method == "fedclip")
    # (84 + 3 * 80) / 4 = 81, and one more for the second seed
    assert line.cell("selected_unseen_domain_accuracy").mean == 81.5 and line.seeds == (0, 1)
    facts = load_published("fedclip", FOLDER)
    key = {"table": "10", "dataset": "PACS", "group": "avg", "method": "fedclip"}
    assert line.printed.value == float(matching(facts, key)["value"].item())
    # one target short, no mean
    short = results[results["setting"] != "PACS S"]
    assert "AVG" not in "".join(t.caption for t in of_suite(suite, short, curves, None).tables)


SCENARIO = {
    key.removeprefix("scenario."): value
    for key, value in flat_params(
        RunSpec(scenario=Scenario(imbalance="exponential", partition="creff_equal", participation=0.4))
    ).items()
    if key.startswith("scenario.")
}
LABELS = json.dumps({"labels": SCENARIO.pop("labels")})
CLIP2FL = Published(
    load_paper("clip2fl", FOLDER),
    load_published("clip2fl", FOLDER),
    {"global_accuracy": {"metric": "accuracy"}, "tail_accuracy": {"metric": "accuracy_tail"}},
)
KEY = {"dataset": "CIFAR-10-LT", "imbalance_factor": "100", "method": "clip2fl", "variant": ""}


def runs_of(*keys, **given):
    """Two seeds of a row that replays the cells with these keys, under the paper's conditions unless ``given``."""
    line = {"dataset": "cifar10", "backbone": "resnet8", "num_clients": 20, "rounds": "200", "tuned": ""}
    line |= {"published": json.dumps(keys), "scenario_settings": json.dumps(SCENARIO), "row_settings": LABELS, **given}
    return pd.DataFrame([line, line])


def test_a_printed_number_stands_beside_ours_with_its_source_and_the_difference():
    printed = beside(CLIP2FL, runs_of(KEY), "global_accuracy", {"global_accuracy": 74.0})
    # table 1: 73.37, so ours is 0.63 above
    assert (printed.value, printed.source, printed.comparable) == (73.37, "CLIP2FL table 1", "yes")
    assert printed.delta == pytest.approx(0.63)
    assert printed.keys == (KEY,)
    assert (printed.differs, printed.several) == ("", ())
    assert printed.metrics["global_accuracy"].value == 73.37 and "tail_accuracy" not in printed.metrics


def test_what_the_paper_does_not_print_is_told_and_never_a_silent_yes():
    facts = CLIP2FL.facts.assign(rounds="", participation="")
    printed = beside(
        Published(CLIP2FL.paper, facts, CLIP2FL.metrics), runs_of(KEY), "global_accuracy", {"global_accuracy": 74.0}
    )
    assert printed.comparable == "yes, as far as printed"
    assert printed.differs == "participation not printed, rounds not printed"
    assert (printed.differences, printed.not_printed) == ((), ("participation", "rounds"))
    other = beside(
        Published(CLIP2FL.paper, facts, CLIP2FL.metrics), runs_of(KEY, dataset="embedded"), "global_accuracy", {}
    )
    assert (other.comparable, other.differs) == ("no", "data (CIFAR-10-LT, here embedded)")


def test_what_differs_is_named_and_is_not_comparable():
    other = runs_of(KEY, dataset="embedded", backbone="convnet", rounds="20")
    printed = beside(CLIP2FL, other, "global_accuracy", {"global_accuracy": 20.0})
    assert printed.comparable == "no"
    assert printed.differs == (
        "data (CIFAR-10-LT, here embedded), backbone (ResNet-8, here convnet), rounds (200, here 20)"
    )
    assert printed.differences[2] == Difference("rounds", "200", "20")
    assert printed.delta == pytest.approx(20 - 73.37)


def test_several_printed_numbers_are_all_listed_and_none_is_compared_with():
    keys = [{**KEY, "imbalance_factor": factor} for factor in ("100", "50")]
    printed = beside(CLIP2FL, runs_of(*keys, rounds="20"), "global_accuracy", {"global_accuracy": 74.0})
    assert pd.isna(printed.value) and pd.isna(printed.delta)
    assert printed.several == (("CLIP2FL table 1", 73.37), ("CLIP2FL table 1", 75.35))
    assert printed.comparable == "no"
    assert printed.differs.endswith("printed number (73.37 in table 1, 75.35 in table 1, here one)")


def test_of_several_printed_numbers_the_one_of_the_runs_own_conditions_counts():
    keys = [{**KEY, "imbalance_factor": factor} for factor in ("100", "50")]
    printed = beside(CLIP2FL, runs_of(*keys), "global_accuracy", {"global_accuracy": 74.0})
    assert (printed.value, printed.comparable, printed.several) == (73.37, "yes", ())


def test_one_number_printed_in_several_tables_is_one_number():
    ablation = {**KEY, "table": "3", "variant": "full (KL + L_pcl)"}
    printed = beside(CLIP2FL, runs_of(ablation, KEY), "global_accuracy", {"global_accuracy": 74.0})
    assert (printed.value, printed.source) == (73.37, "CLIP2FL tables 1, 3")


@pytest.mark.parametrize("keys", [[], [{**KEY, "method": "moon"}]])
def test_where_nothing_is_printed_nothing_is_said(keys):
    printed = beside(CLIP2FL, runs_of(*keys), "global_accuracy", {"global_accuracy": 74.0})
    assert pd.isna(printed.value)
    assert (printed.comparable, printed.differs, printed.source) == ("", "", "")
    assert beside(CLIP2FL, runs_of(KEY), "worst_client_accuracy", {"worst_client_accuracy": 1.0}).comparable == ""


def test_a_key_with_a_column_that_the_file_lacks_picks_nothing_and_is_reported():
    runs = runs_of({**KEY, "imbalance": "100"})
    assert beside(CLIP2FL, runs, "global_accuracy", {"global_accuracy": 74.0}).comparable == ""
    assert unreadable_columns(CLIP2FL, runs) == ["imbalance"]
    assert unreadable_columns(CLIP2FL, runs_of(KEY)) == []


def test_the_numbers_that_ship_with_fedbench_are_found_and_a_missing_file_is_none(tmp_path):
    assert published_folder(None) == Path(fedbench_suites.__file__).parent / "published"
    assert published_folder(tmp_path) == tmp_path
    with pytest.raises(FedbenchError, match="is not a folder"):
        published_folder(tmp_path / "none")
    suite = load_suite("clip2fl")
    found = published_of(suite, FOLDER)
    assert found is not None and (found.paper, len(found.facts)) == (CLIP2FL.paper, len(CLIP2FL.facts))
    assert published_of(suite, tmp_path) is None
    assert published_of(load_suite("longtail"), FOLDER) is None


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """A store with one seed of four rows of the embedded CLIP2FL suite; the first of them is in no table of it."""
    uri = store_uri(str(tmp_path_factory.mktemp("store")))
    listener = tracking.Tracking(uri, "clip2fl")
    chosen = ("clip-zs", "fedavg", "fedprox", "creff")
    specs = expand(load_suite("clip2fl"), Overrides(methods=chosen, seeds=(0,)))
    specs = [s for s in specs if s.setting == "IF 100"]
    info = RunInfo({}, "d" * 64, "", 20, 8, 400, 80, 6, 24)
    for number, spec in enumerate(specs):
        listener.run_started(spec, info)
        summary = {"global_accuracy": 20.0 + number, "bytes_up": 1e6, "bytes_down": 1e6, "train_seconds": 1.0}
        listener.run_finished(spec, info, RunResult((), summary, (0,), {}, 1.0))
    return uri


def test_tables_show_published_numbers_their_sign_and_the_reason_once(uri):
    results = load_results(uri, "clip2fl")
    board = leaderboard(results, published=CLIP2FL)
    assert board.set_index("label")["comparable"].to_dict() == {
        "creff": "no",
        "fedprox": "no",
        "fedavg": "no",
        "clip-zs": "",
    }
    text = to_markdown(board_of(board))
    # table 1 prints 56.17 for FedAvg: 21 - 56.17
    assert "| ≠ 56.2 | -35.2 |" in text and "| – | – |" in text
    why = "data (CIFAR-10-LT, here embedded), backbone (ResNet-8, here convnet?projector=128), rounds (200, here 30)"
    assert text.count(f"paper: CLIP2FL tables 1, 3; ≠ not comparable, differs in {why}") == 1
    assert " paper " not in to_markdown(board_of(leaderboard(results)))
    assert render_terminal(board_of(board)) is not None


def test_a_missing_file_of_published_numbers_is_one_line_on_stderr(uri, tmp_path):
    ask = ["leaderboard", "--suite", "clip2fl", "--store", uri]
    found = CliRunner().invoke(app, ask)
    assert (found.exit_code, found.stderr) == (0, "") and "≠ 56.2" in found.stdout
    missing = CliRunner().invoke(app, [*ask, "--published", str(tmp_path)])
    assert missing.exit_code == 0 and "≠" not in missing.stdout
    assert missing.stderr.count("\n") == 1 and "there is no clip2fl.csv in" in missing.stderr
    wrong = CliRunner().invoke(app, [*ask, "--published", str(tmp_path / "none")])
    assert wrong.exit_code == 2
