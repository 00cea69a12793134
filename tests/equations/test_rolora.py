"""RoLoRA: Chen et al. 2025: B and A of low-rank additions are trained in turns."""

import pytest
import torch

from fedbench.rounds.loop import train_round
from fedbench.testing import tiny_run
from fedbench_methods.rolora import held_factor
from tests.equations.kit import lora_spec


def moved(before, after, factor):
    names = [name for name in before if name.endswith("." + factor)]
    assert names
    return {not torch.equal(before[name], after[name]) for name in names}


def test_turns():
    assert [held_factor(t, "B") for t in (1, 2, 3, 4)] == ["A", "B", "A", "B"]
    assert [held_factor(t, "A") for t in (1, 2, 3, 4)] == ["B", "A", "B", "A"]


@pytest.mark.parametrize("executor", ["sequential", "auto"])
def test_odd_rounds_move_b_and_even_rounds_a_whatever_decays(executor):
    # adamw with decay, which would move a factor with a gradient of zero
    run = tiny_run(lora_spec("clip-lora+rolora", rounds=3, weight_decay=0.1), executor=executor)
    assert run.spec.training.optimizer == "adamw"
    state = run.initial_state()
    for number in (1, 2, 3):
        before = state.weights
        state, _ = train_round(run, state)
        trained, held = ("B", "A") if number % 2 else ("A", "B")
        assert moved(before, state.weights, trained) == {True} and moved(before, state.weights, held) == {False}


def test_a_first_loses_a_round_since_b_is_zero():
    run = tiny_run(lora_spec("clip-lora+rolora", others={"rolora": {"first": "A"}}, rounds=3, weight_decay=0.0))
    first, _ = train_round(run, run.initial_state())
    # the gradient of A is B^T times something: zero
    assert moved(run.model.weights, first.weights, "A") == {False}
    second, _ = train_round(run, first)
    assert moved(first.weights, second.weights, "B") == {True}


def test_the_mean_of_the_products_is_the_product_of_the_means_in_both_kinds_of_round():
    # shares 1/4, 3/4; B of (4, 8) with A = 2: .25 * 8 + .75 * 16 = 14 = 7 * 2
    a, b = torch.tensor([2.0]), torch.tensor([4.0, 8.0])
    shares = torch.tensor([0.25, 0.75])
    assert (shares @ b) * a == shares @ (b * a) == 14
    # with both moved, (1, 3) and (4, 8): mean product 1 + 18 = 19, product of means 2.5 * 7 = 17.5
    both = torch.tensor([1.0, 3.0])
    assert shares @ (both * b) == 19 and (shares @ both) * (shares @ b) == 17.5


def test_terms_see_the_held_factor_and_leave_it():
    run = tiny_run(lora_spec("clip-lora+rolora+fedprox", rounds=3))
    state, _ = train_round(run, run.initial_state())
    assert moved(run.model.weights, state.weights, "A") == {False}
    assert moved(run.model.weights, state.weights, "B") == {True}
