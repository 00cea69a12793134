"""What methods answer is held against what they were handed; what the server is told of the federation."""

import re
from dataclasses import replace

import pytest
import torch

from fedbench.core.errors import FedbenchError, Unworkable
from fedbench.core.method.answers import not_finite
from fedbench.core.method.hooks import hookimpl
from fedbench.core.types import Broadcast, GlobalModel, Predictions
from fedbench.rounds.loop import train_round
from fedbench.rounds.messages import broadcast, sent_bytes
from fedbench.rounds.metrics import size_in_bytes
from fedbench.runs.prepare import Settings, prepare
from fedbench.testing import digest, final_state, tiny_backbone, tiny_dataset, tiny_run, tiny_spec
from fedbench.toolkit.fedavg import average
from fedbench.toolkit.local_training import local_sgd
from fedbench.tuning.objectives import Objective, UnknownObjective


def run_with(tmp_path, listener, method="fedavg", backbone="resnet8?width=1"):
    spec = tiny_spec(method, backbone=backbone, rounds=1)
    settings = Settings(tmp_path, tmp_path, executor="sequential")
    return prepare(spec, settings, listeners=[listener], dataset=tiny_dataset(), backbone=tiny_backbone(backbone))


class Answers:
    """Aggregates as it is told."""

    def __init__(self, answer):
        self.answer = answer

    @hookimpl
    def aggregate(self, task):
        return self.answer(task)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda task: GlobalModel(average(task), {}), "aggregate but leaves out 'body.block1.bn1.num_batches"),
        (lambda task: {"head.bias": task.weights["head.bias"]}, "aggregate but leaves out 'body.block1"),
        (lambda task: {**average(task), "zeal": torch.zeros(1)}, "returns 'zeal', which it was not handed"),
    ],
)
def test_an_aggregate_that_leaves_out_or_adds_tensors_is_refused(tmp_path, answer, said):
    with pytest.raises(FedbenchError, match=said):
        final_state(run_with(tmp_path, Answers(answer)))


def test_an_aggregate_that_returns_private_tensors_is_refused(tmp_path):
    def answer(task):
        return {**average(task), "body.bn1.weight": task.model.weights["body.bn1.weight"]}

    class Keeps(Answers):
        @hookimpl
        def private(self, model, spec):
            return {"body.bn1.weight"}

    with pytest.raises(FedbenchError, match=r"returns 'body.bn1.weight', which it was not handed"):
        final_state(run_with(tmp_path, Keeps(answer)))


def test_a_local_train_that_forgets_running_statistics_is_refused(tmp_path):
    class Forgets:
        @hookimpl
        def local_train(self, task):
            return replace(local_sgd(task), buffers={})

    with pytest.raises(FedbenchError, match=r"local_train but leaves out 'body"):
        final_state(run_with(tmp_path, Forgets()))


class Trains:
    """Trains as it is told."""

    def __init__(self, answer):
        self.answer = answer

    @hookimpl
    def local_train(self, task):
        return self.answer(task, local_sgd(task))


class Predicts:
    """Evaluates as it is told."""

    def __init__(self, answer):
        self.answer = answer

    @hookimpl
    def evaluate(self, task):
        return self.answer(task)


def with_bias(tensors, value):
    return {**tensors, "head.bias": value}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda bias: bias[:3], r"returns 'head.bias' of shape \(3,\); it was handed \(4,\)"),
        (lambda bias: bias.double(), r"'head.bias' of type torch.float64; it was handed torch.float32"),
        (lambda bias: None, "returns None as 'head.bias', which must be a tensor"),
        (lambda bias: bias.tolist(), "returns a list as 'head.bias', which must be a tensor"),
    ],
)
def test_tensors_of_another_shape_type_or_kind_are_refused_of_clients_and_of_the_server(tmp_path, change, said):
    client = Trains(lambda task, update: replace(update, weights=with_bias(update.weights, change(torch.zeros(4)))))
    with pytest.raises(FedbenchError, match=f"answers the hook local_train but .*{said}"):
        final_state(run_with(tmp_path, client, backbone="clip:embedded"))
    server = Answers(lambda task: with_bias(average(task), change(torch.zeros(4))))
    with pytest.raises(FedbenchError, match=f"answers the hook aggregate but .*{said}"):
        final_state(run_with(tmp_path, server, backbone="clip:embedded"))


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (Trains(lambda task, update: [update]), "local_train with a list; it must be an Update"),
        (Trains(lambda task, update: replace(update, weights=[1])), "local_train but returns a list in place of"),
        (Trains(lambda task, update: replace(update, payload={"x": 1})), "local_train with an int under 'x'"),
        (Trains(lambda task, update: replace(update, client=9)), "with an update of client 9"),
        (Trains(lambda task, update: replace(update, num_examples=0)), "with num_examples=0"),
        (Trains(lambda task, update: replace(update, num_examples=0.5)), r"=0.5; client \d has \d+ samples"),
        (Trains(lambda task, update: replace(update, num_examples=10**30)), "with num_examples=10000"),
        (Trains(lambda task, update: replace(update, num_examples=float(len(task.inputs)))), "with num_examples=.*0;"),
        (Trains(lambda task, update: replace(update, num_examples=len(task.inputs) + 1)), "with num_examples="),
        (Trains(lambda task, update: replace(update, num_examples=None)), "with num_examples=None"),
        (Answers(lambda task: [average(task)]), "aggregate with a list; it must be every weight by name"),
        (Answers(lambda task: GlobalModel(None, {})), "aggregate but returns None in place of tensors"),
        (Predicts(lambda task: torch.zeros(len(task.inputs))), "evaluate with a Tensor; it must be Predictions"),
        (Predicts(lambda task: Predictions(torch.zeros(3).long())), r"classes of shape \(3,\), torch.int64"),
        (Predicts(lambda task: Predictions(torch.zeros(len(task.inputs)))), r"\(30,\), torch.float32"),
        (Predicts(lambda task: Predictions(torch.full((30,), 4))), "classes from 4 to 4; they are 0 to 3"),
        (Predicts(lambda task: Predictions(None, [torch.zeros(30).long()])), "evaluate with a list; it must be Pred"),
    ],
)
def test_answers_of_another_kind_are_refused_by_name(tmp_path, plugin, said):
    with pytest.raises(FedbenchError, match=said) as caught:
        final_state(run_with(tmp_path, plugin, backbone="clip:embedded"))
    assert "\n" not in str(caught.value)


def test_own_predictions_outside_the_classes_are_refused(tmp_path):
    def answer(task):
        return Predictions(torch.zeros(30).long(), {client: torch.full((30,), -1) for client in task.clients})

    with pytest.raises(FedbenchError, match="classes from -1 to -1"):
        final_state(run_with(tmp_path, Predicts(answer), backbone="clip:embedded"))


@pytest.mark.parametrize("stranger", [4, 99, -1, "0"])
def test_predictions_of_clients_that_were_not_asked_for_are_refused(tmp_path, stranger):
    def answer(task):
        zeros = torch.zeros(30).long()
        return Predictions(zeros, {client: zeros for client in (*task.clients, stranger) if task.clients})

    run = run_with(tmp_path, Predicts(answer), backbone="clip:embedded")
    with pytest.raises(FedbenchError, match=f"predictions of client {stranger!r}, none of task.clients; answer for"):
        final_state(run)


def test_own_predictions_before_the_last_round_are_refused(tmp_path):
    run = run_with(tmp_path, Predicts(lambda task: Predictions(None, {0: torch.zeros(30).long()})))
    with pytest.raises(FedbenchError, match="predictions of client 0, none of task.clients"):
        final_state(run)


@pytest.mark.parametrize(
    "name",
    ["bytes_up", "seconds", "updates_rejected", "tail_accuracy", "class_accuracy/bird", "final/drift", "", " ", 3],
)
def test_a_clients_metric_must_not_have_a_name_of_the_harness(tmp_path, name):
    class Plugin:
        @hookimpl
        def local_train(self, task):
            return replace(local_sgd(task), metrics={name: 1.0})

    said = f"fedavg answers the hook local_train with a metric called {name!r}; choose another name"
    with pytest.raises(FedbenchError, match=re.escape(said)) as caught:
        final_state(run_with(tmp_path, Plugin(), backbone="clip:embedded"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("hook", "answer", "said"),
    [
        ("after_training", lambda self, task, update: [torch.zeros(1)], "with a list; it must be tensors by name"),
        ("start", lambda self, task: {"counts": 3}, "with an int under 'counts'"),
        ("broadcast", lambda self, task: task.weights, "with a dict; it must be a Broadcast"),
    ],
)
def test_what_is_sent_must_be_tensors_by_name(tmp_path, hook, answer, said):
    plugin = type("Plugin", (), {hook: hookimpl(answer)})()
    with pytest.raises(FedbenchError, match=f"answers the hook {hook} {said}"):
        final_state(run_with(tmp_path, plugin, backbone="clip:embedded"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["weights", "payload"])
def test_a_client_whose_update_is_not_finite_has_diverged(tmp_path, value, part):
    def answer(task, update):
        broken = torch.full((4,), value) if task.client == seen.setdefault("first", task.client) else torch.zeros(4)
        return replace(update, **{part: with_bias(getattr(update, part), broken)})

    seen = {}
    with pytest.raises(
        Unworkable, match=r"diverged: 'head.bias' of client \d is not finite in round 1; .*lr="
    ) as caught:
        final_state(run_with(tmp_path, Trains(answer), backbone="clip:embedded"))
    assert f"client {seen['first']} " in str(caught.value)


def test_a_server_whose_step_is_not_finite_has_diverged(tmp_path):
    def answer(task):
        return {name: tensor * 1e38 * 1e38 for name, tensor in average(task).items()}

    with pytest.raises(Unworkable, match=r"'head.\w+' of the global model is not finite after round 1"):
        final_state(run_with(tmp_path, Answers(answer), backbone="clip:embedded"))


def test_finite_values_whose_sum_overflows_are_finite():
    large = torch.full((10,), 3e38)
    assert not_finite({"large": large, "count": torch.tensor([2**62])}) == ""
    assert (
        not_finite({"fine": torch.ones(2)}, {"large": large, "opposite": torch.tensor([float("inf"), -float("inf")])})
        == "opposite"
    )


def test_the_server_is_told_how_many_clients_there_are_not_how_many_took_part(tmp_path):
    seen = []

    def answer(task):
        seen.append((task.num_clients, len(task.updates)))
        return average(task)

    final_state(run_with(tmp_path, Answers(answer), backbone="clip:embedded"))
    assert seen == [(4, 2)]


def test_running_statistics_sent_in_place_of_the_global_ones_are_what_is_counted_and_received(tmp_path):
    got = []

    class Sends:
        @hookimpl
        def broadcast(self, task):
            some = {"body.bn1.running_mean": torch.full((16,), 3.0)}
            return Broadcast(task.weights, {"word": torch.zeros(2)}, buffers=some, held={"old": torch.ones(5)})

        @hookimpl
        def local_train(self, task):
            got.append((task.buffers, dict(task.payload)))
            raise Unworkable("enough")

    run = run_with(tmp_path, Sends())
    state = run.initial_state()
    with pytest.raises(Unworkable):
        train_round(run, state)
    buffers, payload = got[0]
    assert list(buffers) == ["body.bn1.running_mean"] and set(payload) == {"word", "old"}
    # 16 statistics and two numbers beside the weights; what the client holds already is free
    assert sent_bytes(run, state, broadcast(run, state, 0)) == size_in_bytes(state.weights) + 4 * 16 + 4 * 2


@pytest.mark.parametrize(
    "term",
    [
        lambda step: (step.weights["head.bias"] - step.received["head.bias"]).square().sum().detach(),
        lambda step: torch.zeros(()),
        lambda step: step.outputs.logits.detach().square().mean() if step.number == 1 else None,
    ],
    ids=["detached", "a constant", "in a later step"],
)
@pytest.mark.parametrize("executor", ["sequential", "auto"])
def test_a_term_without_gradient_is_no_silent_fedavg(mine, term, executor):
    name = mine(loss_terms=hookimpl(lambda self, step: term(step)))
    with pytest.raises(FedbenchError, match="mine answers the hook loss_terms with a loss without gradient.* None in"):
        final_state(tiny_run(tiny_spec(name, rounds=1), executor=executor))


def test_a_base_loss_without_gradient_is_refused(mine):
    name = mine(local_loss=hookimpl(lambda self, step: step.outputs.logits.detach().mean()))
    with pytest.raises(FedbenchError, match="mine answers the hook local_loss with a loss without gradient, by which"):
        final_state(tiny_run(tiny_spec(name, rounds=1)))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda step: 0.5, "loss_terms with a float; it must be a scalar tensor"),
        (lambda step: step.weights["head.bias"], r"loss_terms with a tensor of shape \(4,\), not a scalar"),
    ],
)
def test_a_term_that_is_no_scalar_tensor_is_refused(mine, answer, said):
    name = mine(loss_terms=hookimpl(lambda self, step: answer(step)))
    with pytest.raises(FedbenchError, match=said):
        final_state(tiny_run(tiny_spec(name, rounds=1)))


def test_a_term_of_no_weight_of_its_own_may_be_zero(mine):
    zero = mine(loss_terms=hookimpl(lambda self, step: 0.0 * step.weights["head.bias"].sum()))
    runs = (tiny_run(tiny_spec(name, rounds=1), executor="sequential") for name in (zero, "fedavg"))
    assert len({digest(final_state(run)) for run in runs}) == 1


def test_pooled_clients_have_no_private_tensors():
    with pytest.raises(FedbenchError, match="clip-linear-centralized.*pools the clients, and fedbn has something"):
        tiny_run(tiny_spec("clip-linear-centralized+fedbn", backbone="resnet8?width=1", rounds=1))


def test_a_row_without_a_global_model_is_a_trial_given_up_and_a_wrong_name_an_error():
    with pytest.raises(Unworkable, match="no global model.*--objective personal_mean_client_accuracy"):
        Objective("global_accuracy").check({})
    with pytest.raises(UnknownObjective):
        Objective("gobal_accuracy").check({"global_accuracy": 10.0})
    own = Objective("personal_mean_client")
    own.check({"global_accuracy": 10.0})  # it comes with the last round
    assert own.of({"personal_mean_client_accuracy": 4.0}) == 4.0
    with pytest.raises(UnknownObjective):
        own.of({"global_accuracy": 1.0})
