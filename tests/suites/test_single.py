"""Runs without a suite file: the groups that they are filed under."""

import pytest

from fedbench.core.spec import RunSpec, Training
from fedbench.scenarios.presets import PRESETS
from fedbench.suites.suite import asked_for, group_of, is_read_as


def spec(scenario: str, training: Training | None = None, dataset: str = "embedded", **fields: object) -> RunSpec:
    made = PRESETS[scenario].model_copy(update=fields)
    return RunSpec(scenario=made, dataset=dataset, training=training or Training())


@pytest.mark.parametrize("name", PRESETS)
def test_a_scenario_as_it_is_gives_its_name(name: str) -> None:
    assert group_of(spec(name)) == f"adhoc/{name}/embedded"


@pytest.mark.parametrize(
    ("given", "group"),
    [
        (spec("label-skew", dirichlet_alpha=0.1), "label-skew/embedded/dirichlet_alpha=0.1"),
        (spec("longtail", Training(rounds=5, lr=0.5), "cifar10", clients=5), "longtail/cifar10/clients=5,rounds=5"),
        # other numbers of what a scenario is about are not another scenario
        (spec("noisy-labels", label_noise=0.2), "noisy-labels/embedded/label_noise=0.2"),
        (spec("few-labels", labelled_samples=0.05), "few-labels/embedded/labelled_samples=0.05"),
        (spec("label-skew", participation=1.0), "label-skew/embedded/participation=1.0"),
        (
            spec("quantity-skew", partition="lognormal?sigma=2"),
            "quantity-skew/embedded/partition=lognormal?sigma=2",
        ),
        # a partition that no scenario has
        (spec("iid", partition="pachinko", equal_sizes=True), "iid/embedded/partition=pachinko,equal_sizes=true"),
        (spec("leave-one-domain-out", holdout_domain="sketch"), "leave-one-domain-out/embedded/holdout_domain=sketch"),
    ],
)
def test_what_differs_from_the_nearest_scenario_and_the_usual_budget_stands_behind(given: RunSpec, group: str) -> None:
    assert group_of(given) == f"adhoc/{group}"


def test_methods_backbones_optimisers_and_seeds_are_of_one_group() -> None:
    one = spec("label-skew")
    others = {"method": "fedprox", "params": {"fedprox": {"mu": 0.1}}, "backbone": "convnet", "seed": 3, "tuned": "s"}
    assert group_of(one.model_copy(update={**others, "training": Training(lr=0.3, momentum=0.0)})) == group_of(one)


def test_what_is_asked_for_at_once_is_read_by_what_its_groups_share() -> None:
    sweep = [spec("label-skew", dirichlet_alpha=alpha) for alpha in (0.1, 1.0)]
    assert asked_for("adhoc", sweep[:1]) == "adhoc/label-skew/embedded/dirichlet_alpha=0.1"
    assert asked_for("adhoc", sweep) == "adhoc/label-skew/embedded"
    assert asked_for("adhoc", [*sweep, spec("iid")]) == asked_for("adhoc", []) == "adhoc"
    assert asked_for("longtail", sweep) == "longtail"
    assert all(is_read_as(group_of(one), asked_for("adhoc", sweep)) for one in sweep)


def test_a_group_is_read_with_those_in_it_and_a_suite_alone() -> None:
    group = "adhoc/label-skew/embedded/rounds=5"
    for name in (None, "adhoc", "adhoc/label-skew", "adhoc/label-skew/embedded", group):
        assert is_read_as(group, name)
    for name in ("adhoc/label", "adhoc/label-skew/embedded/rounds=50", "label-skew", "longtail"):
        assert not is_read_as(group, name)
    assert is_read_as("mine/a", "mine/a") and not is_read_as("mine/a", "mine")
