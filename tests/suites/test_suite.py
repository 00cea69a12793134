"""Suite files, overrides and their precedence."""

from collections import Counter

import pytest

import fedbench.suites.expand
import fedbench.suites.resolve
from fedbench.core.errors import FedbenchError
from fedbench.scenarios.groups import BY_COUNT, BY_POSITION
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import load_suite, parse_suite, suite_names

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
from fedbench.core.method.hooks import hookimpl

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
    third = (
        PLUGIN.replace('"other"', '"third"')
        .replace("0.3", "0.4")
        .replace("aggregate(self, task)", "measure(self, task)")
    )
    (tmp_path / "third.py").write_text(third.replace("return task.weights", "return None"))
    files = (tmp_path / "other.py", tmp_path / "third.py")
    stack = {"methods": ("other+third",), "seeds": (0,), "plugin_files": files}
    with pytest.raises(FedbenchError, match=r"disagree on lr \(0.3 and 0.4\); use --set lr="):
        specs(**stack)
    (spec,) = specs(sets=(("training.lr", "0.02"),), **stack)
    assert (spec.training.lr, spec.training.beta1) == (0.02, 0.9)


def test_a_learners_recipe_comes_before_those_of_methods_around_it(tmp_path):
    (tmp_path / "other.py").write_text(PLUGIN)
    (spec,) = specs(methods=("other+fedclip",), seeds=(0,), plugin_files=(tmp_path / "other.py",))
    assert (spec.training.lr, spec.training.optimizer, spec.training.beta1) == (5e-5, "adam", 0.9)


def test_method_option_picks_rows_and_adds_missing_ones():
    assert {s.method for s in specs(methods=("fedprox",))} == {"fedprox"}
    assert specs(methods=("fedprox",))[0].params["fedprox"]["mu"] == 0.3
    assert {s.method for s in specs(methods=("clip-zs", "fedprox+fedclip"))} == {"clip-zs", "fedclip+fedprox"}


def test_equal_specs_have_equal_ids_and_every_setting_changes_the_id():
    base = specs()[0]
    assert base.run_id == specs()[0].run_id
    for change in (("rounds", "8"), ("lr", "0.21"), ("clients", "13"), ("templates", "a {}"), ("tune", "full")):
        assert specs(sets=(change,))[0].run_id != base.run_id, change


def test_several_templates_are_a_list_as_in_a_suite_file():
    of_a_file = specs(
        SUITE.replace(
            "training:",
            'scales: {one: {set: {templates: ["a {}, small", "the {}"]}, settings: [{name: x}]}}\ntraining:',
        )
    )
    assert of_a_file[0].templates == ("a {}, small", "the {}")
    for text in ('["a {}, small", "the {}"]', "['a {}, small', 'the {}']"):
        assert specs(sets=(("templates", text),))[0].templates == ("a {}, small", "the {}")
    assert specs(sets=(("templates", "a {}, [small]"),))[0].templates == ("a {}, [small]",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[a {}, the {}]",
            r"--set templates='\[a \{\}, the \{\}\]' is not a list; write for instance --set 'templates=",
        ),
        ('["a {}"', "is not a list"),
        ('["a {}", {}]', r"templates.1=\{\}: input should be a valid string"),
        ("[]", r"templates=\[\]: "),
    ],
)
def test_templates_that_are_no_list_of_texts_are_refused(text, message):
    with pytest.raises(FedbenchError, match=message):
        specs(sets=(("templates", text),))


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


@pytest.mark.parametrize("name", suite_names())
def test_columns_of_class_groups_are_groups_that_some_setting_has(name):
    """Columns that no run has are left out of tables without a word."""
    if name == "cifar10-lt":
        pytest.skip("its columns are head, mid and tail, its groups many and medium; its runs are of this text")
    suite = load_suite(name)
    scales = list(suite.scales) or [None]
    rules = {spec.scenario.groups for scale in scales for spec in expand(suite, Overrides(scale=scale))}
    there = {group for rule in rules for group in (BY_COUNT if rule in ("shots", "clip2fl") else BY_POSITION)}
    assert {column for column in suite.columns if column in (*BY_COUNT, *BY_POSITION)} <= there


@pytest.mark.parametrize("name", suite_names())
def test_shipped_suites_say_the_scenario_of_every_setting(name):
    """The default scenario has a long tail, so that a setting called label skew would have one unsaid."""
    suite = load_suite(name)
    if "scenario" not in suite.model_fields_set:
        for scale in suite.scales.values():
            for setting in scale.settings:
                assert "scenario" in {**scale.set, **setting.set}, setting.name


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


GRID = """
name: grid
published: clip2fl
training: {rounds: 5, lr: 0.01}
seeds: [0]
scales:
  small:
    set: {rounds: 3, dirichlet_alpha: 0.2}
    seeds: [1, 2]
    settings:
      - {name: mild, set: {imbalance_factor: 10}, published: {dataset: CIFAR-10-LT, imbalance_factor: 10}}
      - {name: steep, set: {imbalance_factor: 100}, published: [{table: 1}, {table: 3}]}
  paper:
    set: {backbone: "resnet8?width=1", lr: 0.1, fedprox.mu: 0.5}
    settings:
      - {name: steep, set: {imbalance_factor: 100, rounds: 200}}
rows:
  - {method: fedavg, published: {}}
  - {method: fedprox, label: prox, only: [steep], set: {fedprox.mu: 0.1}, at: {paper: {lr: 0.2}},
     published: {variant: x}}
  - {method: fedclip, only: [mild]}
"""


def grid(**overrides):
    return expand(parse_suite(GRID, "grid.yaml"), Overrides(**overrides))


def test_a_setting_is_ranked_by_its_own_metric_where_it_names_one():
    suite = parse_suite(GRID.replace("{name: mild, ", "{name: mild, headline: tail_accuracy, "), "grid.yaml")
    assert [suite.headline_of(name) for name in ("mild", "steep")] == ["tail_accuracy", "global_accuracy"]
    assert suite.headlines == ("global_accuracy", "tail_accuracy")


def test_first_scale_is_the_default_and_every_row_meets_every_setting_it_runs_in():
    cells = [(s.setting, s.row.partition(" ·")[0], s.seed) for s in grid()]
    mild = [("mild", name, seed) for name in ("fedavg", "fedclip") for seed in (1, 2)]
    steep = [("steep", name, seed) for name in ("fedavg", "prox") for seed in (1, 2)]
    assert cells == mild + steep


def test_scale_setting_row_and_command_line_overrule_one_another_in_that_order():
    first = grid()[0]
    assert (first.training.rounds, first.scenario.dirichlet_alpha, first.scenario.imbalance_factor) == (3, 0.2, 10)
    fedavg, prox = grid(scale="paper")
    assert (fedavg.training.lr, fedavg.training.rounds, fedavg.backbone) == (0.1, 200, "resnet8?width=1")
    assert (prox.training.lr, prox.params["fedprox"]["mu"]) == (0.2, 0.1)
    assert [s.training.lr for s in grid(scale="paper", sets=(("lr", "0.7"),))] == [0.7, 0.7]


def test_recipe_beats_the_scale_but_not_the_row():
    text = GRID.replace("rounds: 3,", "rounds: 3, lr: 0.3,")
    fedclip = next(s for s in expand(parse_suite(text, "grid.yaml"), Overrides()) if s.method == "fedclip")
    assert fedclip.training.lr == 5e-5
    fedavg = expand(parse_suite(text, "grid.yaml"), Overrides())[0]
    assert fedavg.training.lr == 0.3


def test_what_a_scale_says_of_a_method_beats_its_recipe_and_reaches_only_its_rows():
    text = GRID.replace("set: {rounds: 3,", "of: {fedclip: {lr: 0.3}}\n    set: {rounds: 3,")
    by_method = {s.method: s.training.lr for s in expand(parse_suite(text, "grid.yaml"), Overrides())}
    assert by_method == {"fedavg": 0.01, "fedclip": 0.3, "fedprox": 0.01}
    with pytest.raises(FedbenchError, match="under `of`.*fedclp"):
        parse_suite(text.replace("of: {fedclip", "of: {fedclp"), "grid.yaml")


def test_published_keys_join_the_settings_columns_with_the_rows():
    specs = grid(seeds=(1,))
    by_cell = {(s.setting, s.method): s.published for s in specs}
    assert by_cell["mild", "fedavg"] == (
        {"dataset": "CIFAR-10-LT", "imbalance_factor": "10", "method": "fedavg", "variant": ""},
    )
    assert [key["table"] for key in by_cell["steep", "fedprox"]] == ["1", "3"]
    assert {key["variant"] for key in by_cell["steep", "fedprox"]} == {"x"}
    assert by_cell["mild", "fedclip"] == ()


def test_what_a_suite_calls_a_run_is_no_part_of_its_identity():
    spec = grid()[0]
    assert spec.published and spec.setting
    bare = spec.model_copy(update={"published": (), "setting": "", "label": "other"})
    assert bare.run_id == spec.run_id
    assert "published" not in spec.model_dump()


def test_cells_that_come_to_the_same_run_are_one_with_all_keys():
    text = GRID.replace("imbalance_factor: 100}, published", "imbalance_factor: 10}, published")
    specs = expand(parse_suite(text, "grid.yaml"), Overrides(seeds=(1,)))
    assert len({s.run_id for s in specs}) == len(specs)
    fedavg = next(s for s in specs if s.method == "fedavg")
    assert len(fedavg.published) == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"scale": "papr"}, r"scale of suite 'grid': 'papr'|unknown scale of suite 'grid'"),
        ({"settings": ("mild", "step")}, "steep"),
    ],
)
def test_unknown_scale_and_setting_name_the_nearest(overrides, message):
    with pytest.raises(FedbenchError, match=message):
        grid(**overrides)


def test_suites_without_a_grid_refuse_scale_and_setting():
    with pytest.raises(FedbenchError, match="leave --scale out"):
        expand(load_suite("longtail"), Overrides(scale="paper"))
    with pytest.raises(FedbenchError, match="leave --setting out"):
        expand(load_suite("longtail"), Overrides(settings=("x",)))


@pytest.mark.parametrize("wrong", ["only: [stepe]", "at: {papr: {}}"])
def test_a_row_that_names_no_setting_or_scale_of_the_suite_is_refused(wrong):
    with pytest.raises(FedbenchError, match=r"grid\.yaml, line 21, rows\.2\.(only|at)"):
        parse_suite(GRID.replace("only: [mild]", wrong), "grid.yaml")


def test_text_encoder_reaches_only_rows_that_read_it_and_is_refused_where_none_does():
    with pytest.raises(FedbenchError, match=r"--set backbone\.text: none of the methods reads it \(fedavg\)"):
        expand(parse_suite(GRID, "grid.yaml"), Overrides(methods=("fedavg",), sets=(("backbone.text", "minilm"),)))


LAYERS = """
name: layers
training: {lr: 0.01}
scales:
  a:
    set: {lr: 0.02}
    of: {fedprox: {lr: 0.04}}
    settings: [{name: s, set: {lr: 0.03}, of: {fedprox: {lr: 0.05}}}]
rows: [{method: fedprox, set: {lr: 0.06}, at: {a: {lr: 0.07}}}]
"""


STRONGEST_FIRST = (
    ", at: {a: {lr: 0.07}}",
    ", set: {lr: 0.06}",
    ", of: {fedprox: {lr: 0.05}}",
    "    of: {fedprox: {lr: 0.04}}\n",
    ", set: {lr: 0.03}",
)


@pytest.mark.parametrize(("removed", "lr"), [(0, 0.07), (1, 0.06), (2, 0.05), (3, 0.04), (4, 0.03), (5, 0.02)])
def test_every_layer_beats_the_one_before(removed, lr):
    text = LAYERS
    for part in STRONGEST_FIRST[:removed]:
        assert part in text
        text = text.replace(part, "", 1)
    (spec,) = expand(parse_suite(text, "layers.yaml"), Overrides())
    assert spec.training.lr == lr


def test_a_scenario_at_the_scale_beats_the_rows_own_fields():
    row = "{method: fedprox, set: {dirichlet_alpha: 0.3}, at: {a: {scenario: label-skew}}}"
    text = LAYERS[: LAYERS.index("rows:")] + f"rows: [{row}]"
    (spec,) = expand(parse_suite(text, "layers.yaml"), Overrides())
    assert spec.scenario.dirichlet_alpha == 0.5


def test_hidden_labels_of_a_row_survive_another_scenario():
    specs = expand(load_suite("fst-cbdg"), Overrides(methods=("fst-cbdg",), seeds=(0,), sets=(("scenario", "iid"),)))
    assert {s.scenario.labels for s in specs} == {"hidden"}
    assert all("(no labels)" in s.row for s in specs)
    assert {s.scenario.partition for s in specs if s.setting != "iid"} <= {"iid"}


def test_keys_are_dropped_where_the_command_line_changes_the_cell():
    changed = grid(sets=(("imbalance_factor", "5"),))
    assert all(s.published == () for s in changed)


DATA = """
name: data
published: capt
training: {rounds: 5}
scales:
  small:
    settings: [{name: here}]
  paper:
    set: {dataset: cifar10}
    settings:
      - {name: ten, published: {dataset: CIFAR-10-LT}}
      - {name: hundred, set: {dataset: cifar100}, published: {dataset: CIFAR-100-LT}}
      - {name: hundred again, set: {dataset: cifar100, dirichlet_alpha: 0.1}, published: {dataset: CIFAR-100-LT}}
  last:
    settings: [{name: hundred, set: {dataset: cifar100}}]
rows: [{method: fedavg, published: {}}]
"""


@pytest.mark.parametrize(
    ("asked", "chosen", "cells"),
    [
        # the first scale that has the data, and only its settings on them
        ("cifar100", {}, [("paper", "hundred", "cifar100"), ("paper", "hundred again", "cifar100")]),
        ("cifar10", {}, [("paper", "ten", "cifar10")]),
        ("embedded", {}, [("small", "here", "embedded")]),
        # another way to name the same images
        ("cifar10?download=true", {}, [("paper", "ten", "cifar10?download=true")]),
        # a scale asked for is kept, and so are settings asked for
        ("cifar100", {"scale": "last"}, [("last", "hundred", "cifar100")]),
        ("cifar100", {"scale": "small"}, [("small", "here", "cifar100")]),
        ("cifar100", {"settings": ("hundred again",)}, [("paper", "hundred again", "cifar100")]),
        ("cifar100", {"settings": ("here",)}, [("small", "here", "cifar100")]),
        # nobody has them: all run on them, and cells that come to the same run are one
        ("embedded?train=200", {}, [("small", "here", "embedded?train=200")]),
        ("fashion-mnist", {"scale": "paper"}, [("paper", name, "fashion-mnist") for name in ("ten", "hundred again")]),
    ],
)
def test_a_data_set_picks_the_settings_on_it_or_takes_the_place_of_theirs(asked, chosen, cells):
    suite = parse_suite(DATA, "data.yaml")
    specs = expand(suite, Overrides(sets=(("dataset", asked),), **chosen))
    assert [(s.scale, s.setting, s.dataset) for s in specs] == cells


def test_picked_runs_are_those_of_their_settings_and_keep_their_keys():
    suite = parse_suite(DATA, "data.yaml")
    named = expand(suite, Overrides(scale="paper", settings=("hundred", "hundred again")))
    picked = expand(suite, Overrides(sets=(("dataset", "cifar100"),)))
    assert picked == named and all(s.published for s in picked)


@pytest.mark.parametrize(
    ("sets", "kept"),
    [
        ((("dataset", "cifar100"), ("backbone", "clip:ViT-B-16:/w/openai.safetensors")), True),
        ((("backbone", "convnet"),), True),
        ((("dataset", "cifar100"), ("lr", "0.5")), False),
        ((("dataset", "fashion-mnist"),), False),
        ((("rounds", "5"),), False),
        ((("backbone", "convnet"), ("clients", "7")), False),
        ((("scenario", "iid"),), False),
    ],
)
def test_keys_stay_where_the_cell_is_the_same_but_for_its_backbone(sets, kept):
    specs = expand(parse_suite(DATA, "data.yaml"), Overrides(sets=sets, scale="paper"))
    assert all(bool(s.published) == kept for s in specs)


def test_one_backbone_has_one_name_however_it_is_written():
    written = ("clip:ViT-B-16-quickgelu@openai", "clip:ViT-B-16-quickgelu:openai", "clip:ViT-B/16-quickgelu@openai")
    runs = [expand(parse_suite(DATA, "data.yaml"), Overrides(sets=(("backbone", name),))) for name in written]
    assert runs[0] == runs[1] == runs[2] and runs[0][0].backbone == written[0]
    (file,) = expand(parse_suite(DATA, "data.yaml"), Overrides(sets=(("backbone", "clip:ViT-B-32:/a/b:c@d.pt"),)))
    assert file.backbone == "clip:ViT-B-32@/a/b:c@d.pt"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("set: {rounds: 3,", "set: {fedprxo.mu: 0.5, rounds: 3,", "fedprxo"),
        ("set: {rounds: 3,", "set: {fedclip.hiden: 5, rounds: 3,", "hiden"),
        (
            "set: {rounds: 3,",
            "of: {fedprox: {fedclip.hidden: 5}}\n    set: {rounds: 3,",
            "names fedclip, which the row",
        ),
        ("set: {rounds: 3,", "of: {fedprox: {text_encoder: minilm}}\n    set: {rounds: 3,", "don't read text_encoder"),
        ("set: {rounds: 3,", "set: {teacher: nonsense, rounds: 3,", "none of the methods reads it"),
        ("name: mild", "name: steep", "is the name of two settings"),
        ("seeds: [0]", "seeds: [-1]", "greater than or equal to 0"),
    ],
)
def test_what_nobody_would_read_in_a_grid_is_refused(old, new, message):
    with pytest.raises(FedbenchError, match=message):
        expand(parse_suite(GRID.replace(old, new, 1), "grid.yaml"), Overrides())


def test_a_request_that_no_setting_meets_is_refused():
    with pytest.raises(FedbenchError, match="fedclip runs in none of the chosen settings"):
        grid(methods=("fedclip",), settings=("steep",))


def test_a_backbone_picks_the_rows_on_it():
    longtail = load_suite("longtail")
    on_clip = expand(longtail, Overrides(on=("clip:embedded",)))
    assert {spec.backbone for spec in on_clip} == {"clip:embedded"}
    assert on_clip == [spec for spec in expand(longtail, Overrides()) if spec.backbone == "clip:embedded"]
    with pytest.raises(FedbenchError, match="unknown backbone of the chosen rows 'clip:embeded'; did you mean 'clip:"):
        expand(longtail, Overrides(on=("clip:embeded",)))


def test_seeds_of_the_command_line_beat_those_of_the_scale():
    assert {s.seed for s in grid(seeds=(7,))} == {7}


@pytest.mark.parametrize(("seeds", "rows", "cells"), [(60, 1, 1), (1, 60, 60)])
def test_planning_looks_through_what_is_installed_once_per_method_and_resolves_once_per_cell(
    monkeypatch, seeds, rows, cells
):
    calls = Counter()

    def counted(module, name):
        whole = getattr(module, name)

        def call(*arguments, **named):
            calls[name] += 1
            return whole(*arguments, **named)

        monkeypatch.setattr(module, name, call)

    suite = parse_suite(
        f"name: many\nseeds: {list(range(seeds))}\nrows:\n" + rows * "- {method: fedprox+fedavgm}\n", "many.yaml"
    )
    counted(fedbench.suites.resolve, "find_method")
    counted(fedbench.suites.expand, "resolve")
    specs = expand(suite, Overrides(sets=(("fedprox.mu", "0.1"),)))
    assert [spec.seed for spec in specs] == list(range(seeds))
    assert len({spec.run_id for spec in specs}) == len(specs) == seeds
    assert calls == {"find_method": 2, "resolve": cells}


def test_every_seed_is_checked():
    with pytest.raises(FedbenchError, match="seed -1 is out of range"):
        specs(seeds=(0, -1))
