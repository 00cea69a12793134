"""Discovery, stacks, clashes and the owner table."""

from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.method.hooks import hookimpl
from fedbench.core.spec import RunSpec, stack_names
from fedbench.kinds.registry import find_method
from fedbench.plugins.assembly import assemble

PLUGIN = '''
"""A method."""
from dataclasses import dataclass
from fedbench.core.method.hooks import hookimpl

@dataclass(frozen=True, kw_only=True)
class P:
    """None."""

class {cls}:
    name, citation, Params, recipe = "{name}", "somebody", P, {{}}
    def __init__(self, params):
        pass
    {mark}
    def {hook}(self, {argument}):
        """A hook."""
        return {answer}
'''


@pytest.fixture
def plugin(tmp_path):
    def write(name, hook="aggregate", argument="task", mark="@hookimpl", answer="{}"):
        file = tmp_path / f"{name}.py"
        cls = name.replace("-", "_").title()
        text = PLUGIN.format(cls=cls, name=name, hook=hook, argument=argument, mark=mark, answer=answer)
        file.write_text(dedent(text))
        return file

    return write


def test_owner_table_names_methods_before_the_defaults():
    owners = assemble("fedclip+fedprox", {}).owners
    assert owners["local_loss"] == ("fedclip", "fedavg")
    assert owners["loss_terms"] == ("fedprox",)
    assert owners["aggregate"] == ("fedavg",)
    assert "run_started" not in owners


def test_stack_order_does_not_matter():
    assert stack_names("fedprox+fedclip") == stack_names(" fedclip + fedprox") == ("fedclip", "fedprox")
    assert stack_names("fedavg+fedprox") == ("fedprox",)
    assert RunSpec(method="a+b").stack == RunSpec(method="b+a").stack


def test_two_runs_in_one_process_keep_apart():
    first, second = assemble("fedprox", {"fedprox": {"mu": 0.1}}), assemble("fedprox", {"fedprox": {"mu": 0.2}})
    one, zero = torch.ones(1, requires_grad=True), torch.zeros(1)
    step = SimpleNamespace(weights={"w": one}, received={"w": zero}, number=0, is_own=False)
    terms = [a.hooks.loss_terms(step=step)[0].item() for a in (first, second)]
    # mu/2 (1 - 0)^2
    assert terms == pytest.approx([0.05, 0.1])


def test_two_methods_on_one_first_result_hook_are_refused_naming_both(plugin):
    files = [plugin("first-one"), plugin("second-one")]
    with pytest.raises(FedbenchError, match="first-one and second-one both answer the hook aggregate"):
        assemble("second-one+first-one", {}, files)


def test_a_method_that_forgets_to_return_is_not_a_silent_fedavg(plugin):
    hooks = assemble("forgetful", {}, [plugin("forgetful", answer="None")]).hooks
    with pytest.raises(FedbenchError, match="forgetful answers the hook aggregate but returned None"):
        hooks.aggregate(task=None)


def test_a_method_marked_trylast_still_comes_before_the_defaults(plugin):
    file = plugin("late", mark="@__import__('pluggy').HookimplMarker('fedbench')(trylast=True)", answer="{'w': 1}")
    assert assemble("late", {}, [file]).hooks.aggregate(task=None) == {"w": 1}


def test_a_misspelt_hook_is_refused_with_the_valid_names(plugin):
    with pytest.raises(FedbenchError, match=r"agregate.*hooks are federate, build_model"):
        assemble("misspelt", {}, [plugin("misspelt", hook="agregate")])


def test_an_answer_without_its_mark_is_no_silent_fedavg(plugin):
    with pytest.raises(FedbenchError, match="forgetful has a function aggregate, .*without @hookimpl.*mark it with"):
        assemble("forgetful", {}, [plugin("forgetful", mark="")])


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        ("", "around has a function aggregate, .* never be called; what is to call the rest .* @wrapper"),
        ("@hookimpl", r"hook aggregate asks for rest; .* marked with @wrapper: def aggregate\(self, task, rest\)"),
    ],
)
def test_what_takes_the_rest_of_its_stack_is_told_to_be_a_wrapper(plugin, mark, text):
    with pytest.raises(FedbenchError, match=text) as caught:
        assemble("around", {}, [plugin("around", argument="task, rest", mark=mark)])
    assert "mark it with @hookimpl" not in str(caught.value)


@pytest.mark.parametrize("marked", ["broadcast", "aggregate"])
def test_an_inherited_hook_whose_override_has_no_mark_is_refused(mine, marked):
    @hookimpl
    def answer(self, task): ...

    parent = type("Parent", (), {marked: answer})
    name = mine(aggregate=lambda self, task: None, **{"broadcast": parent.broadcast} if marked == "broadcast" else {})
    with pytest.raises(FedbenchError, match="mine has a function aggregate"):
        assemble(name, {})
    assert mine(aggregate=answer) and assemble("mine", {}).answers("aggregate") == ("mine", "fedavg")


def test_what_bears_a_hooks_name_and_is_no_function_is_none_of_a_hook(mine):
    name = mine(private=("head.bias",), report="a text", start=hookimpl(lambda self, task: None))
    assert assemble(name, {}).answers("start") == ("mine",)


def test_a_method_that_answers_no_hook_is_no_silent_fedavg(mine):
    with pytest.raises(FedbenchError, match="mine answers no hook, so it would run as FedAvg; mark a .*: federate, "):
        assemble(mine(), {})


def test_a_method_under_another_name_is_refused(monkeypatch):
    import fedbench.kinds.registry as module

    fedprox = find_method("fedprox")

    class Point:
        name, value = "other", "x:Y"

        def load(self):
            return fedprox

    monkeypatch.setattr(module, "installed", lambda kind: [Point()])
    with pytest.raises(FedbenchError, match="calls itself 'fedprox' but is registered as 'other'"):
        module.find_method("other")


def test_a_plugin_file_may_not_call_itself_fedavg(plugin):
    with pytest.raises(FedbenchError, match="'fedavg', the defaults' own name"):
        assemble("fedprox", {}, [plugin("fedavg")])


def test_a_plugin_that_cannot_be_imported_is_named(monkeypatch):
    import fedbench.kinds.registry as module

    class Point:
        name, value = "broken", "nowhere:Broken"

        def load(self):
            raise ModuleNotFoundError("No module named 'nowhere'")

    monkeypatch.setattr(module, "installed", lambda kind: [Point()])
    with pytest.raises(FedbenchError, match="'broken' .*nowhere:Broken.* cannot be imported"):
        module.find_method("broken")


def test_near_names_are_told_of_many_methods_and_all_of_few_other_things():
    with pytest.raises(FedbenchError) as caught:
        find_method("fedprx")
    said = str(caught.value)
    assert said.startswith("unknown method 'fedprx'; did you mean 'fedprox'") and "fedbench list methods" in said
    assert "Known" not in said and "promptfl" not in said
    with pytest.raises(FedbenchError, match="Known: .*promptfl"):
        find_method("quite-another-word")
    assert "Known: one, two." in str(unknown_name("thing", "ona", ["one", "two"], "See `list`.", hint_lists=True))
