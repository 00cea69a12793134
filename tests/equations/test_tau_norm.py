"""FedAvg + tau-norm: Kang et al. 2020, the classifier's rows divided by the tau-th power of their length."""

from dataclasses import replace

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.method.tasks import EvaluationTask
from fedbench.core.types import LinearHead, Model, Outputs
from fedbench.models.inputs import FeatureInputs
from fedbench.rounds.loop import evaluate, predict
from fedbench.testing import digest, final_state
from fedbench_methods.tau_norm import TauNorm, TauNormParams, normalised_rows
from tests.equations.kit import end_of, headed, run_of


def task_of(weight, bias, features, client=None, head=True):
    weights = {"head.weight": torch.tensor(weight), "head.bias": torch.tensor(bias)}
    model = Model(weights=weights, forward=headed, head=LinearHead() if head else None)
    return EvaluationTask(model, weights, {}, FeatureInputs(torch.tensor(features)), len(bias), client)


def predicted(task, **params):
    return TauNorm(TauNormParams(**params)).evaluate(task).labels.tolist()


def test_rows_are_divided_by_the_tau_th_power_of_their_length():
    weight = torch.tensor([[3.0, 4.0], [0.0, 0.25]])
    # lengths 5 and 1/4; their roots sqrt 5 = 2.236068 and 1/2
    half = torch.tensor([[3 / 2.236068, 4 / 2.236068], [0.0, 0.5]])
    torch.testing.assert_close(normalised_rows(weight, 0.5), half)
    torch.testing.assert_close(normalised_rows(weight, 1.0), torch.tensor([[0.6, 0.8], [0.0, 1.0]]))
    # beyond one the shorter row becomes the longer: 1/5 and 4
    torch.testing.assert_close(normalised_rows(weight, 2.0).norm(dim=1), torch.tensor([0.2, 4.0]))


def test_tau_zero_leaves_every_bit_and_tau_one_makes_all_rows_one_long():
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(normalised_rows(weight, 0.0), weight)
    torch.testing.assert_close(normalised_rows(weight, 1.0).norm(dim=1), torch.ones(6))


@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0, 2.0])
def test_a_row_of_zeros_stays_one(tau):
    got = normalised_rows(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), tau)
    assert got[0].tolist() == [0.0, 0.0]
    assert torch.isfinite(got).all()


# z = (.6, .9), W = diag(2, 1): (1.2, .9) at tau 0, (.6, .9) at tau 1
@pytest.mark.parametrize(("tau", "expected"), [(0.0, [0]), (1.0, [1])])
def test_prediction_by_hand(tau, expected):
    assert predicted(task_of([[2.0, 0.0], [0.0, 1.0]], [0.0, 0.0], [[0.6, 0.9]]), tau=tau) == expected


def test_tau_one_does_not_see_the_lengths_of_the_rows():
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    features = torch.randn(50, 3, generator=torch.Generator().manual_seed(2)).tolist()
    scaled = weight * torch.tensor([[0.01], [3.0], [1.0], [70.0]])
    one, other = (task_of(w.tolist(), [0.0] * 4, features) for w in (weight, scaled))
    assert predicted(one) == predicted(other)
    assert predicted(one, tau=0.0) != predicted(other, tau=0.0)


def test_the_bias_is_dropped_unless_asked_for():
    # tau 1: scores (.6, .9); with the bias (.6 + 1, .9), which is added as it is
    task = task_of([[2.0, 0.0], [0.0, 1.0]], [1.0, 0.0], [[0.6, 0.9]])
    assert predicted(task) == [1]
    assert predicted(task, use_bias=True) == [0]
    # a bias divided by its row's length too would be .5: (1.1, 1.2)
    task = task_of([[2.0, 0.0], [0.0, 1.0]], [1.0, 0.0], [[0.6, 1.2]])
    assert predicted(task, use_bias=True) == [0]


def test_evaluation_writes_nothing_back():
    task = task_of([[2.0, 0.0], [0.0, 1.0]], [1.0, 0.0], [[0.6, 0.9]])
    before = {name: tensor.clone() for name, tensor in task.weights.items()}
    predicted(task)
    assert set(task.weights) == set(before)
    assert all(torch.equal(task.weights[name], tensor) for name, tensor in before.items())


def test_a_clients_fine_tuned_model_keeps_its_head_and_bias():
    weight, features = [[2.0, 0.0], [0.0, 1.0]], [[0.6, 0.9]]
    assert predicted(task_of(weight, [0.0, 0.0], features, client=3)) == [0]
    assert predicted(task_of([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0], features, client=3)) == [0]


def test_own_models_with_private_tensors_have_the_rescaled_global_head():
    def forward(tensors, inputs, training):
        return Outputs((inputs * tensors["gain"]) @ tensors["head.weight"].T + tensors["head.bias"], inputs)

    task = task_of([[2.0, 0.0], [0.0, 1.0]], [0.0, 0.0], [[0.6, 0.9]])
    weights = {**task.weights, "gain": torch.ones(2)}
    task = replace(task, model=replace(task.model, weights=weights, forward=forward), weights=weights)
    # client 0: (.6, .9); client 1 halves the second feature: (.6, .45), and (1.2, .45) without rescaling
    own = {1: {"gain": torch.tensor([1.0, 0.5])}, 0: {"gain": torch.ones(2)}}
    got = TauNorm(TauNormParams()).evaluate(replace(task, clients=(0, 1), own=own, private=frozenset({"gain"})))
    assert got.labels.tolist() == [1]
    assert {client: labels.tolist() for client, labels in got.by_client.items()} == {0: [1], 1: [0]}


@pytest.mark.parametrize("backbone", ["clip:embedded", "convnet"])
def test_training_is_fedavgs_bit_for_bit_whatever_tau(backbone):
    one, other = (("tau-norm", {"tau-norm": {"tau": 1.5}}), ("fedavg", {}))
    states = [end_of(*each, backbone=backbone, rounds=2) for each in (one, other)]
    assert digest(states[0]) == digest(states[1])
    # and the weights that are kept are not the re-scaled ones, even after many evaluations
    assert states[0].weights["head.weight"].norm(dim=1).std() > 1e-4


@pytest.mark.parametrize("backbone", ["clip:embedded", "convnet"])
def test_tau_zero_with_the_bias_predicts_what_fedavg_does(backbone):
    neutral = run_of("tau-norm", {"tau-norm": {"tau": 0.0, "use_bias": True}}, backbone=backbone, rounds=2)
    plain, default = (run_of(name, backbone=backbone) for name in ("fedavg", "tau-norm"))
    state = final_state(plain, until=1)
    # a head whose rows differ in length, so that re-scaling has something to change
    head = state.weights["head.weight"]
    lengths = torch.linspace(0.2, 3, len(head))[:, None]
    state = replace(state, weights={**state.weights, "head.weight": head * lengths})
    wanted = predict(plain, state, plain.test).labels
    assert torch.equal(predict(neutral, state, neutral.test).labels, wanted)
    assert not torch.equal(predict(default, state, default.test).labels, wanted)
    assert evaluate(neutral, state)[0] == evaluate(plain, state)[0]


def test_a_model_without_a_linear_head_is_refused():
    with pytest.raises(FedbenchError, match="needs a linear classifier"):
        predicted(task_of([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0], [[1.0, 1.0]], head=False))
