"""What the embedded data are for: the phenomena of the field, over three seeds. Minutes; `pytest -m slow`."""

from pathlib import Path

import pytest

from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import load_suite

pytestmark = pytest.mark.slow
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return Settings(data_dir=Path("."), cache_dir=tmp_path_factory.mktemp("cache"))


def accuracies(settings, metric="global_accuracy", method="fedavg", suite="label-skew", **sets):
    pairs = tuple((key, str(value)) for key, value in sets.items())
    specs = expand(load_suite(suite), Overrides(methods=(method,), seeds=SEEDS, sets=pairs))
    specs = [spec for spec in specs if spec.backbone == "clip:embedded" and spec.tune == "auto"]
    assert len(specs) == len(SEEDS)
    return [run_spec(spec, settings).summary[metric] for spec in specs]


def test_zero_shot_is_imperfect(settings):
    assert all(60 <= a <= 75 for a in accuracies(settings, method="clip-zs"))


def test_a_head_beats_zero_shot_on_iid_and_falls_below_it_under_two_shards(settings):
    zero_shot = accuracies(settings, method="clip-zs")
    iid = accuracies(settings, scenario="shards", partition="iid")
    shards = accuracies(settings)
    assert all(a > z + 2 for a, z in zip(iid, zero_shot, strict=True)), (iid, zero_shot)
    assert sum(shards) / len(shards) < sum(zero_shot) / len(zero_shot), (shards, zero_shot)


def test_a_long_tailed_head_is_at_least_20_points_better_on_head_than_on_tail_classes(settings):
    head = accuracies(settings, metric="head_accuracy", suite="longtail")
    tail = accuracies(settings, metric="tail_accuracy", suite="longtail")
    assert all(h - t >= 20 for h, t in zip(head, tail, strict=True)), (head, tail)
