"""Methods around methods: chains, their order, what they may wrap, and who can't be in one stack."""

from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import fedbench.api as fb
from fedbench import testing
from fedbench.core.errors import FedbenchError, MethodFault
from fedbench.kinds.registry import find_method, plugins_everywhere
from fedbench.plugins.assembly import assemble, role_of
from fedbench.rounds.loop import rounds
from fedbench.rounds.run import shared
from fedbench.testing import check_executors, check_training, digest, final_state, tiny_run, tiny_spec
from fedbench.toolkit.layers import last_layers, layers
from fedbench.toolkit.wrapping import without_value

FILE = '''
"""Two methods around others."""
from dataclasses import dataclass, replace
import fedbench.api as fb

@dataclass(frozen=True, kw_only=True)
class P:
    """None."""

class Outer:
    name, citation, Params, recipe = "aa-outer", "somebody", P, {{}}
    def __init__(self, params):
        pass
    {outer}

class Inner:
    name, citation, Params, recipe = "zz-inner", "somebody", P, {{}}
    def __init__(self, params):
        pass
    {inner}
'''
NOTHING = "@fb.hookimpl\n    def measure(self, task):\n        return None"


def written(tmp_path, outer, inner=NOTHING):
    file = tmp_path / "around.py"
    file.write_text(dedent(FILE.format(outer=outer, inner=inner)))
    return [file]


def gradients(factor):
    return (
        f"@fb.wrapper\n    def local_gradients(self, step, rest):\n        found = rest(step)\n"
        f"        return replace(found, by_name={{n: g {factor} for n, g in found.by_name.items()}})"
    )


def test_wrappers_are_called_around_one_another_in_name_order(tmp_path):
    files = written(tmp_path, gradients("* 2"), gradients("+ 1"))
    hooks = assemble("zz-inner+aa-outer", {}, files)
    assert hooks.owners["local_gradients"] == ("aa-outer", "zz-inner", "fedavg")
    assert hooks.answers_first("local_gradients") == "aa-outer"
    assert hooks.answerer("local_gradients") == "fedavg"
    step = stand_in(torch.tensor(3.0))
    # the loss is w², its gradient 6, one more by the inner and twice that by the outer
    assert hooks.hooks.local_gradients(step=step).by_name["w"].item() == 14


def stand_in(value):
    from types import SimpleNamespace

    weight = value.clone().requires_grad_()
    around = SimpleNamespace(local_objective=lambda step: step.weights["w"].square())
    training = SimpleNamespace(precision="float32")
    task = SimpleNamespace(hooks=around, training=training, spec=SimpleNamespace(method="stand-in"))
    batch = SimpleNamespace(inputs=torch.zeros(1))
    return SimpleNamespace(weights={"w": weight}, task=task, batch=batch, number=1)


def test_a_wrapper_may_hand_on_another_task(tmp_path):
    outer = "@fb.wrapper\n    def local_objective(self, step, rest):\n        return rest(replace(step, number=7))"
    inner = "@fb.wrapper\n    def local_objective(self, step, rest):\n        return step.number"
    hooks = assemble("zz-inner+aa-outer", {}, written(tmp_path, outer, inner)).hooks

    @dataclass(frozen=True)
    class Step:
        number: int

    assert hooks.local_objective(step=Step(1)) == 7


def test_a_wrapper_that_returns_nothing_is_to_blame(tmp_path):
    outer = "@fb.wrapper\n    def evaluate(self, task, rest):\n        rest(task)"
    inner = "@fb.wrapper\n    def evaluate(self, task, rest):\n        return 1"
    hooks = assemble("zz-inner+aa-outer", {}, written(tmp_path, outer, inner)).hooks
    with pytest.raises(MethodFault, match="aa-outer wraps the hook evaluate but returned None; return rest\\(task\\)"):
        hooks.evaluate(task=object())


@pytest.mark.parametrize(
    ("outer", "text"),
    [
        ("@fb.wrapper\n    def survey(self, task, rest):\n        return 1", "what can be wrapped is build_model, "),
        (
            "@fb.wrapper\n    def aggregate(self, task):\n        return 1",
            "is to be def aggregate\\(self, task, rest\\)",
        ),
        ("role = 'boss'\n    " + NOTHING, "role='boss' is none that a method has; choose of learner, "),
    ],
)
def test_what_can_be_no_wrapper_is_refused_when_it_is_loaded(tmp_path, outer, text):
    with pytest.raises(FedbenchError, match=text):
        assemble("aa-outer", {}, written(tmp_path, outer))


def test_a_method_that_only_wraps_is_no_silent_fedavg(tmp_path):
    files = written(tmp_path, gradients("* 2"))
    assert assemble("aa-outer", {}, files).wrappers == {"local_gradients": ("aa-outer",)}


def test_roles_follow_from_hooks():
    roles = {
        name: role_of(find_method(name)) for name in ("promptfl", "fedprox", "fedbn", "fedavgm", "scaffold", "cka")
    }
    assert roles == {
        "promptfl": "learner",
        "fedprox": "local objective",
        "fedbn": "personalisation",
        "fedavgm": "server step",
        "scaffold": "local objective",
        "cka": "measure",
    }
    assert role_of(find_method("pseudo-labels")) == "label provider"
    assert role_of(find_method("fedconcat")) == "personalisation", "declared"


def test_a_stack_has_one_personalisation():
    with pytest.raises(
        FedbenchError, match="ditto and fedpgp are both a personalisation, and each gives clients models"
    ):
        assemble("fedpgp+ditto", {})


@pytest.mark.parametrize(
    ("needing", "preventing", "requirement"),
    [
        ("scaffold", "pfedme", "plain_steps"),
        ("fednova", "fedala", "plain_steps"),
        ("fednova", "fedrep", "plain_steps"),  # its steps on the head count, and move nothing that is sent
        ("scaffold", "fedspeed", "plain_steps"),
        ("feddyn", "fedamp", "sent_start"),  # h_k is of y_k - x, and the client began elsewhere
        ("feddc", "fedala", "sent_start"),
        ("fedspeed", "capt", "sent_start"),
        ("fedprox", "local", "sent_steps"),
        ("moon", "pfedme", "sent_steps"),
        ("fedavgm", "fedconcat", "global_model"),
        ("fedadam", "capt", "global_model"),
        ("fedsam", "fedasam", "own_ascent"),
        ("fedspeed", "fedasam", "own_ascent"),
        ("fedspeed", "fedsam", "own_ascent"),
    ],
)
def test_what_a_method_needs_and_another_prevents_is_no_stack(needing, preventing, requirement):
    needed, prevented = find_method(needing), find_method(preventing)
    assert requirement in needed.requires and requirement in prevented.prevents
    with pytest.raises(FedbenchError, match=f"{needing} needs .*, which {preventing} prevents"):
        assemble(f"{needing}+{preventing}", {})


@pytest.mark.parametrize("corrected", ["scaffold", "fednova"])
def test_steps_on_a_model_beside_the_sent_one_prevent_nothing(corrected):
    assemble(f"{corrected}+fedsam+ditto", {})


def test_own_models_wrap_a_server_step_and_that_what_others_aggregate():
    assert assemble("climb+ditto+feddyn", {}).wrappers["aggregate"] == ("feddyn", "climb")
    assert assemble("climb+ditto+feddyn", {}).wrappers["local_objective"][0] == "ditto"


@pytest.mark.parametrize("personal", ["ditto", "apfl"])
def test_a_model_beside_the_global_one_is_none_of_its_layers_and_no_part_of_its_loss(personal):
    spec = tiny_spec("clip-adapter", rounds=1).model_copy(update={"method": "clip-adapter+fedbabu"})
    alone, run = tiny_run(spec), tiny_run(spec.model_copy(update={"method": f"{spec.method}+{personal}"}))
    assert layers(run.model) == layers(alone.model) and run.model.own
    [(before, lone), (after, beside)] = [_last(one) for one in (alone, run)]
    for name, value in before.weights.items():
        assert torch.equal(value, after.weights[name]), name
    head = last_layers(run.model, 1)
    assert head and all(torch.equal(after.weights[name], run.model.weights[name]) for name in head), "fedbabu's"
    assert lone.metrics["train_loss"] == beside.metrics["train_loss"]


def _last(run):
    """The state after the last round, and that round's record."""
    return [(state, record) for state, record, *_ in rounds(run, run.initial_state())][-1]


def test_a_gradient_without_a_value_is_that_of_the_loss():
    weight = torch.tensor(3.0, requires_grad=True)
    found = without_value(weight**2)
    found.backward()
    assert found.item() == 0 and weight.grad == 6


def test_a_loss_that_keeps_something_is_refused_where_it_is_taken_elsewhere():
    spec = tiny_spec("fed-grab", rounds=1).model_copy(update={"method": "fed-grab+pfedme"})
    with pytest.raises(FedbenchError, match="the loss of fed-grab keeps something from step to step"):
        final_state(tiny_run(spec))


def test_a_term_of_weights_that_another_method_holds_still_is_no_fault():
    spec = tiny_spec("feddyn", rounds=2, lr=0.01).model_copy(update={"method": "feddyn+fedrep+promptfl"})
    final_state(tiny_run(spec))


@pytest.mark.parametrize(("stack", "needing"), [("fed-grab+fedper", "fed-grab"), ("fedbabu+fedper", "fedbabu")])
def test_a_head_that_clients_keep_is_refused_to_those_that_need_it_sent(stack, needing):
    spec = tiny_spec("fedavg", backbone="convnet").model_copy(update={"method": stack})
    with pytest.raises(FedbenchError, match=f"{needing} needs a linear classifier that clients send"):
        tiny_run(spec)


def test_gradients_are_wrapped_for_one_client_after_another(tmp_path, monkeypatch):
    from fedbench.kinds.registry import PLUGIN_FILES

    token = PLUGIN_FILES.set(tuple(written(tmp_path, gradients("* 1"))))
    try:
        run = tiny_run(tiny_spec("fedavg", rounds=1).model_copy(update={"method": "aa-outer"}))
        same = final_state(run)
    finally:
        PLUGIN_FILES.reset(token)
    assert run.executor.description == "sequential: aa-outer looks at the gradients of each client"
    plain = final_state(tiny_run(tiny_spec("fedavg", rounds=1), executor="sequential"))
    assert digest(same) == digest(plain)


def test_gradients_of_another_shape_are_refused(tmp_path):
    from fedbench.core.method.answers import require_gradients

    step = stand_in(torch.zeros(2))
    good = fb.StepGradients({"w": torch.zeros(2)}, torch.zeros(()))
    assert require_gradients(good, step) is good
    for wrong in ({"w": torch.zeros(3)}, {"v": torch.zeros(2)}, {"w": 1.0}):
        with pytest.raises(MethodFault, match="for '[vw]'; it must be a tensor shaped as that weight"):
            require_gradients(replace(good, by_name=wrong), step)


@pytest.fixture
def of_the_readme(tmp_path):
    """The examples of plugins/README.md as plugin files."""
    section = (Path(__file__).parents[2] / "plugins" / "README.md").read_text(encoding="utf-8")
    section = section.partition("## Wrap what others build")[2].partition("\n## ")[0]
    blocks = [block.partition("```")[0] for block in section.split("```python\n")[1:]]
    files = [tmp_path / name for name in ("mine.py", "blend.py")]
    for file, block in zip(files, blocks, strict=True):
        file.write_text(block, encoding="utf-8")
    with plugins_everywhere(files):
        yield


@pytest.mark.usefixtures("of_the_readme")
@pytest.mark.parametrize(
    "stack", ["unit-steps", "own-temperature", "promptfl+own-temperature+unit-steps", "own-temperature+scaffold"]
)
def test_the_readmes_wrappers_run_as_written(stack):
    check_training(stack)
    check_executors(stack)


@pytest.mark.usefixtures("of_the_readme")
@pytest.mark.parametrize("name", ["unit-steps", "own-temperature", "own-blend"])
def test_the_readmes_wrappers_are_declared_as_the_contract_wants_it(name):
    for check in (testing.check_declaration, testing.check_hooks, testing.check_own_models, testing.check_stacking):
        check(name)


@pytest.mark.usefixtures("of_the_readme")
@pytest.mark.parametrize("stack", ["own-blend", "own-blend+promptfl"])
def test_the_readmes_personalisation_runs_as_written(stack):
    check_training(stack)
    assert role_of(find_method("own-blend")) == "personalisation"


@pytest.mark.usefixtures("of_the_readme")
@pytest.mark.parametrize(
    ("stack", "personal"), [("unit-steps", "ditto"), ("fedprox", "own-blend"), ("unit-steps", "own-blend")]
)
def test_a_model_of_clients_own_leaves_the_global_one_of_the_readmes_wrappers_bit_for_bit(stack, personal):
    states = []
    for method in (stack, f"{stack}+{personal}"):
        run = tiny_run(tiny_spec(method, backbone="resnet8?width=1", rounds=2), executor="sequential")
        states.append(final_state(run))
    plain, both = states
    for ours, alone in ((both.weights, plain.weights), (both.buffers, plain.buffers)):
        assert alone and all(torch.equal(ours[name], value) for name, value in alone.items())


@pytest.mark.usefixtures("of_the_readme")
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_readmes_own_models_begin_every_round_at_the_global_one_where_they_move_all_the_way(share):
    spec = tiny_spec("own-blend", rounds=2)
    everyone = spec.scenario.model_copy(update={"participation": 1.0})
    spec = spec.model_copy(update={"params": {"own-blend": {"share": share}}, "scenario": everyone})
    run = tiny_run(spec)
    state = final_state(run)
    sizes = torch.tensor([float(len(shard.indices)) for shard in run.federation.clients], dtype=torch.float64)
    for name, value in shared(state.weights, run.private).items():
        own = torch.stack([state.own[client]["own-blend/" + name].double() for client in range(len(sizes))])
        mean = torch.tensordot(sizes / sizes.sum(), own, 1).float()
        assert torch.allclose(mean, value, atol=1e-6) == (share == 1)
