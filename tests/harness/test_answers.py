"""What methods answer is held against what they were handed; what the server is told of the federation."""

from dataclasses import replace

import pytest
import torch

from fedbench.defaults import average
from fedbench.errors import FedbenchError, Unworkable
from fedbench.hookspecs import hookimpl
from fedbench.metrics import size_in_bytes
from fedbench.objectives import Objective, UnknownObjective
from fedbench.prepare import Settings, prepare
from fedbench.rounds import broadcast, sent_bytes, train_round
from fedbench.testing import final_state, tiny_backbone, tiny_dataset, tiny_run, tiny_spec
from fedbench.training import local_sgd
from fedbench.types import Broadcast, GlobalModel


def run_with(tmp_path, listener, method="fedavg", backbone="resnet8?width=1"):
    spec = tiny_spec(method, backbone=backbone, rounds=1)
    settings = Settings(tmp_path, tmp_path)
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


def test_pooled_clients_have_no_private_tensors():
    with pytest.raises(FedbenchError, match="clip-linear-centralized.*pools the clients, and fedbn keeps"):
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
