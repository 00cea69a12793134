"""Published numbers and the suites that replay them: every key finds its number, and every number its run."""

from pathlib import Path

import pytest

from fedbench.assemble import method_names
from fedbench.errors import FedbenchError
from fedbench.expand import expand
from fedbench.published import load_published, matching, published_value
from fedbench.resolve import Overrides
from fedbench.spec import stack_names
from fedbench.suite import load_suite, suite_names

FOLDER = Path(__file__).parents[2] / "leaderboards" / "published"
REPLAYS = [name for name in suite_names() if load_suite(name).published]


@pytest.fixture(scope="module", params=REPLAYS)
def replay(request):
    suite = load_suite(request.param)
    return suite, load_published(suite.published, FOLDER), expand(suite, Overrides(scale="paper", seeds=(0,)))


def test_the_five_papers_have_a_suite():
    assert {"clip2fl", "fedclip", "fedglcl", "capt", "fst-cbdg"} <= set(REPLAYS)


def test_every_row_and_every_setting_joins_a_published_number(replay):
    suite, facts, specs = replay
    hit = [(spec, key) for spec in specs for key in spec.published if len(matching(facts, key))]
    settings = {spec.setting for spec, _ in hit}
    wanted = {setting.name for setting in suite.scales["paper"].settings if setting.published}
    assert wanted == settings, f"settings without a published number: {sorted(wanted - settings)}"
    for row in suite.rows:
        for entry in row.published:
            found = any(
                entry.items() <= key.items() and stack_names(spec.method) == stack_names(row.method)
                for spec, key in hit
            )
            assert found, f"row {row.label or row.method} with {entry} joins nothing"


def test_a_key_and_a_metric_pick_one_number(replay):
    suite, facts, specs = replay
    for spec in specs:
        for key in spec.published:
            for metric in suite.published_metrics:
                published_value(facts, key, metric, suite.published_metrics)  # raises where there are two
            assert spec.setting


def test_both_scales_share_rows_and_the_embedded_one_carries_keys_too():
    for name in REPLAYS:
        suite = load_suite(name)
        assert list(suite.scales) == ["embedded", "paper"]
        small = expand(suite, Overrides(seeds=(0,)))
        assert any(spec.published for spec in small)
        assert all(spec.dataset.startswith("embedded") for spec in small)


def test_published_value_refuses_ambiguity_and_unknown_columns_and_knows_what_is_not_printed():
    facts = load_published("clip2fl", FOLDER)
    key = {"table": "1", "dataset": "CIFAR-10-LT", "imbalance_factor": "100", "method": "clip2fl"}
    metrics = {"global_accuracy": "accuracy", "tail_accuracy": "accuracy_tail"}
    assert published_value(facts, key, "global_accuracy", metrics) == 73.37
    assert published_value(facts, key, "tail_accuracy", metrics) is None
    assert published_value(facts, key, "worst_client_accuracy", metrics) is None
    with pytest.raises(FedbenchError, match="picks 3 numbers"):
        published_value(facts, {k: v for k, v in key.items() if k != "imbalance_factor"}, "global_accuracy", metrics)
    with pytest.raises(FedbenchError, match="imbalance_factor"):
        matching(facts, {"imbalance": "100"})
    with pytest.raises(FedbenchError, match="clip2fl"):
        load_published("clip2f", FOLDER)


LEFT_OUT = {
    # what no run of a suite can be joined to, by (table or None, why)
    "capt": {},
    "clip2fl": {},
    "fedclip": {},
    "fedglcl": {"15": "seconds on the authors' machine", "17": "spread of three seeds", "18": "pretrained AlexNet",
                "19": "segmentation"},
    "fst_cbdg": {},
}  # fmt: skip


def test_every_published_accuracy_of_a_registered_method_is_replayed(replay):
    suite, facts, specs = replay
    known = set(method_names())
    joined = set()
    for spec in specs:
        for key in spec.published:
            joined |= set(matching(facts, key).index)
    wanted = facts[facts["metric"].isin(suite.published_metrics.values())]
    wanted = wanted[~wanted["table"].isin(LEFT_OUT[suite.published])]
    wanted = wanted[wanted["variant"] != "text encoder=GloVe"]  # word vectors, for which no loader is built
    wanted = wanted[[set(stack_names(m)) <= known for m in wanted["method"]]]
    if suite.name == "fedclip":
        # a target's own accuracies are joined; means over targets, and table 11's single domains, are derived from them
        wanted = wanted[(wanted["group"] != "avg") | (wanted["table"] == "11")]
        wanted = wanted[(wanted["group"] == "avg") | (wanted["table"] != "11")]
    missed = wanted[~wanted.index.isin(joined)]
    columns = ["table", "dataset", "partition_value", "imbalance_factor", "clients", "variant", "method", "metric"]
    assert missed.empty, f"{len(missed)} of {len(wanted)}:\n{missed[columns].to_string()}"
