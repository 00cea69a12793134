"""Suite files, overrides and their precedence."""

import pytest

from fedbench.errors import FedbenchError
from fedbench.suite import Overrides, expand, load_suite, parse_suite, suite_names

SUITE = """\
name: demo
scenario: {preset: longtail, clients: 12}
training: {rounds: 7, lr: 0.2}
seeds: [3, 4]
rows:
  - method: fedavg
  - method: fedprox
    set: {fedprox.mu: 0.3, rounds: 9}
  - method: fedclip
"""


def specs(text=SUITE, **overrides):
    return expand(parse_suite(text, "demo.yaml"), Overrides(**overrides))


def test_rows_cross_seeds_in_order():
    assert [(s.method, s.seed) for s in specs()] == [
        ("fedavg", 3), ("fedavg", 4), ("fedprox", 3), ("fedprox", 4), ("fedclip", 3), ("fedclip", 4)
    ]  # fmt: skip


def test_precedence_is_suite_then_recipe_then_row_then_command_line():
    fedavg, fedprox, fedclip = specs(seeds=(0,))
    assert (fedavg.training.lr, fedavg.training.rounds) == (0.2, 7)
    assert (fedprox.training.rounds, fedprox.params["fedprox"]["mu"]) == (9, 0.3)
    # the recipe's optimiser beats the suite's, but the budget stays the suite's
    assert (fedclip.training.optimizer, fedclip.training.lr, fedclip.training.rounds) == ("adam", 5e-5, 7)
    fedavg, fedprox, fedclip = specs(seeds=(0,), sets=(("rounds", "2"), ("lr", "0.5"), ("fedprox.mu", "0.7")))
    assert [s.training.rounds for s in (fedavg, fedprox, fedclip)] == [2, 2, 2]
    assert (fedclip.training.lr, fedprox.params["fedprox"]["mu"]) == (0.5, 0.7)


def test_a_scenario_is_a_preset_with_its_own_fields():
    spec = specs()[0]
    assert (spec.scenario.imbalance, spec.scenario.clients) == ("exponential", 12)
    changed = specs(sets=(("scenario", "iid"), ("scenario.clients", "5")))[0].scenario
    assert (changed.imbalance, changed.partition, changed.clients) == ("none", "iid", 5)


def test_a_scenarios_name_and_its_fields_may_come_in_any_order():
    pairs = (("scenario", "iid"), ("clients", "5"))
    first, second = (specs(sets=order, seeds=(0,))[0] for order in (pairs, pairs[::-1]))
    assert first == second and first.scenario.clients == 5


def test_a_row_that_sets_a_method_it_does_not_run_is_refused():
    with pytest.raises(FedbenchError, match="row 'fedprox': set names fedclip, which the row does not run"):
        specs(SUITE.replace("fedprox.mu: 0.3", "fedclip.hidden: 3"))


PLUGIN = """
from dataclasses import dataclass
from fedbench.hookspecs import hookimpl

@dataclass(frozen=True, kw_only=True)
class P:
    pass

class Other:
    name, citation, Params, recipe = "other", "nobody", P, {"lr": 0.3, "beta1": 0.9}
    def __init__(self, params):
        pass
    @hookimpl
    def aggregate(self, task):
        return task.weights
"""


def test_stacked_recipes_that_disagree_are_refused_until_the_setting_is_decided(tmp_path):
    (tmp_path / "other.py").write_text(PLUGIN)
    stack = {"methods": ("other+fedclip",), "seeds": (0,), "plugin_files": (tmp_path / "other.py",)}
    with pytest.raises(FedbenchError, match=r"disagree on lr \(5e-05 and 0.3\); use --set lr="):
        specs(**stack)
    (spec,) = specs(sets=(("training.lr", "0.02"),), **stack)
    assert (spec.training.lr, spec.training.optimizer, spec.training.beta1) == (0.02, "adam", 0.9)


def test_method_option_picks_rows_and_adds_missing_ones():
    assert {s.method for s in specs(methods=("fedprox",))} == {"fedprox"}
    assert specs(methods=("fedprox",))[0].params["fedprox"]["mu"] == 0.3
    assert {s.method for s in specs(methods=("clip-zs", "fedprox+fedclip"))} == {"clip-zs", "fedclip+fedprox"}


def test_equal_specs_have_equal_ids_and_every_setting_changes_the_id():
    base = specs()[0]
    assert base.run_id == specs()[0].run_id
    for change in (("rounds", "8"), ("lr", "0.21"), ("clients", "13"), ("templates", "a {}"), ("tune", "full")):
        assert specs(sets=(change,))[0].run_id != base.run_id, change


def test_a_stack_in_either_order_is_the_same_run():
    first, second = (specs(methods=(m,), seeds=(0,))[0] for m in ("fedclip+fedprox", "fedprox+fedclip"))
    assert first.run_id == second.run_id


def test_none_is_a_word_for_optional_settings():
    assert specs(sets=(("head_scale", "15"),))[0].head_scale == 15
    assert specs(sets=(("head_scale", "none"),))[0].head_scale is None


@pytest.mark.parametrize("name", suite_names())
def test_shipped_suites_expand_and_name_themselves(name):
    suite = load_suite(name)
    assert suite.name == name and suite.description
    assert expand(suite, Overrides())


def test_longtail_has_at_least_six_rows_and_two_seeds():
    suite = load_suite("longtail")
    assert len(suite.rows) >= 6 and len(suite.seeds) >= 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: demo", "nam: demo", r"demo.yaml, line 1, name: field required"),
        ("seeds: [3, 4]", "seeds: [3, x]", r"demo.yaml, line 4, seeds.1: input should be a valid integer"),
        ("seeds: [3, 4]", "sedes: [3, 4]", r"demo.yaml, line 4, sedes: unknown field 'sedes'; did you mean 'seeds'"),
        ("  - method: fedclip", "  - methd: fedclip", r"demo.yaml, line 9, rows.2.meth"),
        ("rounds: 7", "rounds: -7", r"training.rounds=-7: .*greater than or equal to 0 \(communication rounds\)"),
        ("rounds: 7", "round: 7", r"unknown training setting in suite 'demo' 'round'; did you mean 'rounds'"),
        ("clients: 12", "client: 12", r"unknown scenario setting .* 'client'; did you mean 'clients'"),
        ("preset: longtail", "preset: longtial", r"unknown scenario 'longtial'; did you mean 'longtail'"),
        ("fedprox.mu: 0.3", "fedprox.nu: 0.3", r"unknown hyper-parameter of fedprox 'nu'"),
        ("seeds: [3, 4]", "seeds: [3, 4", r"demo.yaml, line \d+: not valid YAML"),
    ],
)
def test_a_wrong_suite_file_names_line_field_and_what_is_allowed(old, new, message):
    with pytest.raises(FedbenchError, match=message):
        specs(SUITE.replace(old, new))
