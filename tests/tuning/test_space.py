"""What tuning searches, and how drawn values become a run."""

from dataclasses import dataclass

import optuna
import pytest

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hyper import declared, hyper
from fedbench.core.spec import RunSpec
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite
from fedbench.tuning.space import Dimension, defaults_of, draw, restricted, space_of, values_of, with_values


def spec(method: str, **given: object) -> RunSpec:
    text = f"name: s\nrows:\n  - method: {method}\n    set: {dict(given)}\n"
    return expand(parse_suite(text, "s.yaml"), Overrides())[0]


def by_key(given: RunSpec) -> dict[str, Dimension]:
    return {dimension.key: dimension for dimension in space_of(given)}


def test_the_learning_rate_is_searched_on_a_log_scale_by_optimiser_alike_for_all_methods() -> None:
    assert by_key(spec("fedavg")) == {"lr": Dimension("lr", "lr", 1e-3, 0.3, log=True)}
    assert by_key(spec("fedavg", optimizer="adam", lr=1e-3))["lr"] == Dimension("lr", "lr", 1e-5, 1e-2, log=True)
    assert by_key(spec("fedprox"))["lr"] == by_key(spec("fedavg"))["lr"]


def test_a_range_is_widened_to_the_rows_own_value_which_is_the_first_trial() -> None:
    assert by_key(spec("fedavg", lr=0.5))["lr"].high == 0.5
    assert by_key(spec("fedavg", lr=1e-4))["lr"].low == 1e-4


def test_weight_decay_is_searched_where_there_is_one() -> None:
    assert "weight_decay" not in by_key(spec("fedavg"))
    assert by_key(spec("fedavg", weight_decay=1e-5))["weight_decay"].log
    assert set(by_key(spec("fedclip"))) == {"lr", "weight_decay"}  # its recipe has one


def test_a_method_is_searched_over_what_it_declares() -> None:
    found = by_key(spec("clip2fl", backbone="convnet"))
    assert {"clip2fl.beta", "clip2fl.eta", "clip2fl.features", "clip2fl.tau", "clip2fl.temperature"} < set(found)
    assert found["clip2fl.features"] == Dimension("clip2fl.features", "m", 2, 50, log=True, whole=True)
    assert "clip2fl.variant" not in found  # a choice is another method
    assert "clip2fl.retrain_epochs" not in found  # so would be another budget
    assert {"fedglcl.tau", "lr", "weight_decay"} == set(by_key(spec("fedglcl", backbone="convnet")))
    assert {"fst-cbdg.text_weight", "fst-cbdg.gamma", "fst-cbdg.sigma"} < set(by_key(spec("fst-cbdg")))


def test_what_the_row_has_switched_off_stays_off() -> None:
    assert "fedprox.mu" in by_key(spec("fedprox"))
    assert "fedprox.mu" not in by_key(spec("fedprox", **{"fedprox.mu": 0}))
    assert "fst-cbdg.text_weight" not in by_key(spec("fst-cbdg", **{"fst-cbdg.text_weight": 0}))


def test_a_hyper_parameter_is_searched_only_where_it_has_an_effect() -> None:
    assert "fedglcl.text_lr_factor" not in by_key(spec("fedglcl", backbone="convnet"))
    trained = spec("fedglcl", **{"backbone": "convnet", "fedglcl.trainable_text": True})
    assert "fedglcl.text_lr_factor" in by_key(trained)
    assert "promptfl.context_length" not in by_key(spec("promptfl", **{"promptfl.init": "words"}))


def test_what_belongs_to_a_term_that_is_off_is_not_searched() -> None:
    without_text = by_key(spec("fst-cbdg", **{"fst-cbdg.text_weight": 0}))
    assert not {"fst-cbdg.sigma", "fst-cbdg.gamma"} & set(without_text)
    assert {"fst-cbdg.sigma", "fst-cbdg.gamma"} < set(by_key(spec("fst-cbdg")))
    assert "fedntd.tau" not in by_key(spec("fedntd", **{"fedntd.beta": 0}))
    assert "clip2fl.tau" not in by_key(spec("clip2fl", **{"backbone": "convnet", "clip2fl.eta": 0}))
    general = by_key(spec("capt-reconstructed", **{"capt-reconstructed.prompts": "general"}))
    assert "capt-reconstructed.context_length" in general
    assert "capt-reconstructed.class_length" not in general


def test_a_dependency_on_a_name_that_is_not_there_is_an_error() -> None:
    @dataclass(frozen=True)
    class Params:
        mu: float = hyper(0.5, symbol="μ", low=0.1, high=1.0, source="Eq. 1", needs="nu")

    with pytest.raises(FedbenchError, match="'nu'.*none of its own"):
        declared(Params)


def test_a_stack_is_searched_over_all_its_methods() -> None:
    assert set(by_key(spec("fedglcl+fedprox", backbone="convnet"))) == {
        "lr",
        "weight_decay",
        "fedglcl.tau",
        "fedprox.mu",
    }


def test_only_named_dimensions_and_a_name_that_no_row_has_is_an_error() -> None:
    spaces = [space_of(spec("fedavg")), space_of(spec("fedprox"))]
    assert [[d.key for d in space] for space in restricted(spaces, ["fedprox.mu"])] == [[], ["fedprox.mu"]]
    assert restricted(spaces, []) == spaces
    with pytest.raises(FedbenchError, match=r"'fedprox.nu'.*fedprox.mu"):
        restricted(spaces, ["fedprox.nu"])


def test_values_reach_the_run_and_nothing_else_changes() -> None:
    before = spec("fedprox")
    after = with_values(before, {"lr": 0.2, "fedprox.mu": 0.5})
    assert (after.training.lr, after.params["fedprox"]["mu"]) == (0.2, 0.5)
    assert values_of(after) == {**values_of(before), "lr": 0.2, "fedprox.mu": 0.5}
    assert after.run_id != before.run_id == with_values(before, {}).run_id
    with pytest.raises(FedbenchError, match="fedprox.nu"):
        with_values(before, {"fedprox.nu": 1})


def test_dependent_values_are_drawn_after_what_they_depend_on_and_only_under_it() -> None:
    given = spec("fedglcl", **{"backbone": "convnet", "fedglcl.trainable_text": True})
    space = (
        Dimension("fedglcl.trainable_text", "L", choices=(False, True)),
        Dimension("fedglcl.text_lr_factor", "η", 0.1, 1.0, when={"fedglcl.trainable_text": (True,)}),
    )
    seen = set()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(20):
        drawn = draw(study.ask(), space, given)
        seen.add((drawn["fedglcl.trainable_text"], "fedglcl.text_lr_factor" in drawn))
    assert seen == {(True, True), (False, False)}
    assert defaults_of(given, space) == {"fedglcl.trainable_text": True, "fedglcl.text_lr_factor": 0.1}
    off = with_values(given, {"fedglcl.trainable_text": False})
    assert defaults_of(off, space) == {"fedglcl.trainable_text": False}


def test_draws_keep_to_range_scale_and_whole_numbers() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    space = (Dimension("lr", "lr", 1e-3, 1.0, log=True), Dimension("fedprox.mu", "m", 2, 5, whole=True))
    drawn = [draw(study.ask(), space, spec("fedprox")) for _ in range(200)]
    rates = sorted(values["lr"] for values in drawn)
    assert 0.02 < rates[100] < 0.05  # the median of a log scale: 10^-1.5 = 0.032
    assert {values["fedprox.mu"] for values in drawn} == {2, 3, 4, 5}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"default": 0.5, "low": 0.1, "high": 1.0, "search": (0.05, 1.0)}, "search .* is not between 0.1 and 1"),
        ({"default": 1.0, "low": 0.0, "high": 1.0, "log": True}, "must lie above 0"),
        ({"default": 0.5, "low": 0.1, "high": 1.0, "search": (0.9, 0.2)}, "from low to high"),
        ({"default": "a", "choices": ("a", "b"), "search": (0, 1)}, "search"),
    ],
)
def test_a_wrong_declaration_fails_at_import(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hyper(**given, symbol="x", source="Eq. 1")


def test_off_is_allowed_beside_the_range_and_told() -> None:
    declared = hyper(1.0, symbol="λ", source="Eq. 8", low=0.01, high=10.0, log=True, off=0.0).metadata["hyper"]
    assert declared.admits(0.0)
    assert not declared.admits(0.005)
    assert declared.allowed() == "between 0.01 and 10, or 0.0"
    assert declared.searched == (0.01, 10.0)
