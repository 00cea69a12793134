"""A model of each client's own beside the global one is kept with the client, and is what it predicts by."""

import pytest

from fedbench.core.errors import MethodFault
from fedbench.kinds.registry import PLUGIN_FILES
from fedbench.testing import check_own_models, check_stacking, tiny_run, tiny_spec

BEGIN = '''
"""A copy of the stack's model for every client."""
from fedbench.api import Method, NoParams, hookimpl, wrapper
from fedbench.toolkit.wrapping import global_step, of_own, own_predictions, own_step, with_own

class Copy(Method[NoParams]):
    name, citation, role = "copy", "somebody", "personalisation"
    @wrapper
    def build_model(self, setup, rest):
        return with_own(rest(setup), "copy/")
    @wrapper
    def local_objective(self, step, rest):
        own = own_step(step, of_own(step.weights, "copy/"), of_own(step.buffers, "copy/"))
        return rest(global_step(step)) + rest(own)
'''
PRIVATE = """
    @hookimpl
    def private(self, model, spec):
        return {}
"""
EVALUATE = """
    @wrapper
    def evaluate(self, task, rest):
        return own_predictions(task, rest, lambda client: tuple({} for tensors in task.own_model(client)))
"""
KEPT, OWN = PRIVATE.format("model.own"), EVALUATE.format('of_own(tensors, "copy/")')


@pytest.fixture
def method(tmp_path):
    """Makes a plugin file of the begin of a method and its rest; its name."""
    tokens = []

    def made(*rest):
        file = tmp_path / "copy.py"
        file.write_text("".join([BEGIN, *rest]))
        tokens.append(PLUGIN_FILES.set((file,)))
        return "copy"

    yield made
    for token in reversed(tokens):
        PLUGIN_FILES.reset(token)


def test_one_that_is_kept_and_predicted_by_keeps_the_contract(method):
    assert check_own_models(method(KEPT, OWN)) is None


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        ((OWN,), "copy builds a model .* nobody's hook private names 'copy/.*', so it would be sent and averaged"),
        ((PRIVATE.format("[n for n in model.weights if n in model.own]"), OWN), r"names 'copy/.*(running|tracked)"),
        ((KEPT,), "copy builds a model .* nobody predicts by it: .* wrap evaluate"),
    ],
    ids=["private forgotten", "without running statistics", "evaluate forgotten"],
)
def test_one_that_is_sent_or_that_nobody_predicts_by_is_refused(method, rest, text):
    name = method(*rest)
    with pytest.raises(MethodFault, match=text):
        tiny_run(tiny_spec(name, backbone="resnet8?width=1"))
    with pytest.raises(MethodFault, match=text):
        check_own_models(name)


def test_another_method_that_predicts_does_not_excuse_it_in_the_contract(method):
    name = method(KEPT, EVALUATE.format("tensors"))  # the global ones, among which its own are not read
    with pytest.raises(AssertionError, match="whatever is in the tensors they keep"):
        check_own_models(name)


def test_what_keeps_nothing_has_no_own_models_to_check(method):
    assert check_own_models("fedprox") == "no model of the clients' own beside the global one"


def test_what_is_broken_by_itself_is_not_said_to_stack_with_nothing(method):
    with pytest.raises(MethodFault, match="would be sent and averaged"):
        check_stacking(method(OWN))
