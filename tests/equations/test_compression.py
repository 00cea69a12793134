"""Compressed uploads: int8 (after QSGD, Alistarh et al. 2017), top-k (Stich et al. 2018), signs with error feedback
(Karimireddy et al. 2019), PowerSGD (Vogels et al. 2019)."""

import pytest
import torch

from fedbench.core.types import Update
from fedbench.rounds.loop import rounds
from fedbench_methods.int8 import quantised
from fedbench_methods.powersgd import PowerSGD, PowerSGDParams, factors
from fedbench_methods.signsgd import SignSGD, scaled_signs
from fedbench_methods.topk import TopK, TopKParams, largest, message_bytes
from tests.equations.kit import drawn, end_of, generator, run_of


class Task:
    """What `upload` reads of a client's task."""

    def __init__(self, received):
        self.received, self.state = received, {}

    def generator(self, purpose):
        return generator()


def sent(method, received, ends):
    """What arrives of one client that trains to each of ``ends`` in turn, always from ``received``."""
    task = Task({"w": torch.as_tensor(received)})
    return [method.upload(task, Update(0, {"w": torch.as_tensor(end)}, {}, 1)) for end in ends]


def test_levels_are_of_one_width_and_right_in_the_mean():
    values = torch.tensor([127.0, -63.5, 0.25, 0.0])
    # the scale is 1: only 0.25 and -63.5 are between levels
    drawn_often = torch.stack([quantised(values, generator(seed)) for seed in range(4000)])
    assert set(drawn_often[:, 2].tolist()) == {0.0, 1.0} and set(drawn_often[:, 1].tolist()) == {-64.0, -63.0}
    torch.testing.assert_close(drawn_often.mean(0), values, atol=0.03, rtol=0)
    assert torch.equal(quantised(torch.zeros(3), generator()), torch.zeros(3))
    assert quantised(drawn(1000), generator()).unique().numel() <= 255


def test_the_largest_entries_are_sent_and_what_is_left_comes_later():
    found, count = largest(torch.tensor([[3.0, -5.0], [0.5, 4.0]]), 0.3)
    assert count == 2 and found.tolist() == [[0.0, -5.0], [0.0, 4.0]]
    # of changes (1, 3) and then (1, 1) one entry each: 3; then 1 + 1 and 1 + 0
    first, second = sent(TopK(TopKParams(share=0.5)), [10.0, 20.0], [[11.0, 23.0], [11.0, 21.0]])
    assert first.weights["w"].tolist() == [10.0, 23.0] and second.weights["w"].tolist() == [12.0, 20.0]
    # places as int32 where few are kept, as a bit an entry where many are
    assert message_bytes(1000, 10) == 4 * 10 + 4 * 10 and message_bytes(1000, 500) == 4 * 500 + 125
    assert first.encoded == 4 + 1


def test_signs_have_the_mean_size_and_what_is_lost_comes_later():
    assert scaled_signs(torch.tensor([3.0, -1.0, 0.0, 0.0])).tolist() == [1.0, -1.0, 1.0, 1.0]
    # p = (3, -1) is sent as (2, -2), e = (1, 1); then p = (1, 1) + e
    first, second = sent(SignSGD(SignSGD.Params()), [0.0, 0.0], [[3.0, -1.0], [1.0, 1.0]])
    assert first.weights["w"].tolist() == [2.0, -2.0] and second.weights["w"].tolist() == [2.0, 2.0]
    assert first.encoded == 1 + 4


def test_a_matrix_of_low_rank_arrives_whole_and_another_in_parts():
    whole = drawn(8, 2) @ drawn(2, 6, seed=1)
    [first] = sent(PowerSGD(PowerSGDParams(rank=2)), torch.zeros(8, 6), [whole])
    torch.testing.assert_close(first.weights["w"], whole, atol=1e-5, rtol=1e-5)
    assert first.encoded == 4 * 2 * (8 + 6)
    # by hand: p Q = (3, 4), of length 5; Q = pᵀ (.6, .8)
    left, right = factors(torch.tensor([[3.0, 0.0], [4.0, 1.0]]), torch.tensor([[1.0], [0.0]]))
    sign = left[0, 0].sign()
    torch.testing.assert_close(sign * left, torch.tensor([[0.6], [0.8]]))
    torch.testing.assert_close(sign * right, torch.tensor([[5.0], [0.8]]))
    # the power method goes on from its last Q: the error of one unchanging change falls to what rank 1 can do
    change = torch.diag(torch.tensor([5.0, 3.0, 1.0, 1.0]))
    method, task = PowerSGD(PowerSGDParams(rank=1)), Task({"w": torch.zeros(4, 4)})
    for _ in range(30):
        task.state = {method.name: {k: v for k, v in task.state.get(method.name, {}).items() if "basis" in k}}
        arrived = method.upload(task, Update(0, {"w": change}, {}, 1)).weights["w"]
    torch.testing.assert_close(arrived, torch.diag(torch.tensor([5.0, 0, 0, 0])), atol=1e-4, rtol=0)


def test_vectors_and_small_matrices_are_sent_as_they_are_by_powersgd():
    [vector] = sent(PowerSGD(PowerSGDParams()), [1.0, 2.0], [[1.5, 3.0]])
    assert vector.weights["w"].tolist() == [1.5, 3.0] and vector.encoded == 8


@pytest.mark.parametrize("method", [TopK(TopKParams(share=0.1)), SignSGD(SignSGD.Params()), PowerSGD(PowerSGDParams())])
def test_with_feedback_nothing_is_lost_in_the_long_run(method):
    change, task, total = drawn(12, 10), Task({"w": torch.zeros(12, 10)}), torch.zeros(12, 10)
    for _ in range(50):
        total += method.upload(task, Update(0, {"w": change}, {}, 1)).weights["w"]
    left = task.state[method.name]["w/error"]
    torch.testing.assert_close(total + left, 50 * change, atol=1e-3, rtol=1e-4)
    assert left.norm() < 0.5 * 50 * change.norm()


@pytest.mark.parametrize(("name", "most"), [("int8", 0.27), ("topk", 0.2), ("signsgd", 0.05)])
def test_the_bytes_sent_up_are_those_of_the_message(name, most):
    def sent_up(stack):
        run = run_of(stack, rounds=1)
        return [record for _, record, _ in rounds(run, run.initial_state())][-1]

    plain, ours = sent_up("fedavg"), sent_up(name)
    assert 0 < ours.bytes_up < most * plain.bytes_up and ours.bytes_down == plain.bytes_down


def test_a_tensor_that_was_not_trained_is_not_sent_and_its_error_stays():
    method, task = TopK(TopKParams(share=0.5)), Task({"w": torch.tensor([0.0, 0.0])})
    method.upload(task, Update(0, {"w": torch.tensor([1.0, 3.0])}, {}, 1))
    idle = method.upload(task, Update(0, {"w": torch.tensor([0.0, 0.0])}, {}, 1))
    assert idle.weights["w"].tolist() == [0.0, 0.0] and idle.encoded == 0
    assert task.state["topk"]["w/error"].tolist() == [1.0, 0.0]


def test_the_error_of_a_lost_update_is_that_from_before_it():
    def errors(**faults):
        scenario = {"participation": 1.0, **faults}
        return end_of("topk", {"topk": {"share": 0.2}}, scenario=scenario, rounds=1).clients

    assert all("topk" in kept for kept in errors().values())
    assert not any("topk" in kept for kept in errors(late_dropout=0.999).values())
