"""FLoRA: Wang et al. 2024: stacked low-rank additions are merged, and every round begins with fresh ones."""

import pytest
import torch

from fedbench.core.types import Update
from fedbench.rounds.loop import predict, train_round
from fedbench.testing import tiny_run
from fedbench.toolkit.fedavg import average
from fedbench.toolkit.low_rank import stacked
from fedbench_methods.flora import FLoRA, FLoRAParams
from tests.equations.kit import aggregation, all_of, exact_mean, lora_spec, pairs


def played(a, b, sizes, residual=None, round=1, **params):
    """The server's weights and R after a round in which clients end at these factors of one pair "w"."""
    buffers = {"w.residual": torch.zeros(len(b[0]), a[0].shape[1]) if residual is None else residual}
    updates = tuple(
        Update(k, {"w.A": a[k], "w.B": b[k], "bias": torch.ones(1) * k}, buffers, n) for k, n in enumerate(sizes)
    )
    x = {"w.A": a[0], "w.B": b[0], "bias": torch.zeros(1)}
    answer = FLoRA(FLoRAParams(**params)).aggregate(aggregation(x, updates, round=round, buffers=buffers), average)
    return answer.weights, answer.buffers["w.residual"]


def test_a_stack_is_the_sum_of_the_weighted_products():
    a, b = [torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 3.0]])], [torch.eye(2)[:, :1], torch.eye(2)[:, 1:]]
    rows, columns = stacked(a, b, torch.tensor([0.25, 0.75], dtype=torch.float64))
    assert rows.tolist() == [[1, 2], [0, 3]] and columns.tolist() == [[0.25, 0], [0, 0.75]]
    assert (columns @ rows).tolist() == [[0.25, 0.5], [0.0, 2.25]]


def test_scalars_by_hand_are_merged_and_b_begins_at_zero():
    one = [torch.full((1, 1), float(value)) for value in (0, 2)]
    # (0 + 4) / 2; in the next round .25 * 0 + .75 * 4 more
    after, merged = played(one, one, (1, 1))
    assert merged.item() == 2 and after["w.B"].item() == 0
    assert after["bias"].item() == 0.5, "other weights are averaged"
    assert played(one, one, (1, 3), merged, round=2)[1].item() == 5


def test_a_is_drawn_anew_every_round_and_uniform_unless_told_to_stay():
    a, b = [torch.zeros(64, 100)], [torch.zeros(100, 64)]
    first, second = (played(a, b, (1,), round=number)[0]["w.A"] for number in (1, 2))
    assert not torch.equal(first, second) and torch.equal(first, played(a, b, (1,))[0]["w.A"])
    assert first.abs().max() <= 0.1 and first.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.03)
    assert torch.equal(played(a, b, (1,), restart="keep")[0]["w.A"], a[0])


def test_round_for_round_the_model_is_the_mean_of_the_clients_and_training_goes_on_from_it():
    run = tiny_run(lora_spec("clip-lora+flora"), executor="sequential")
    seen, aggregate = [], run.assembly.hooks.aggregate
    run.assembly.hooks.aggregate = lambda task: seen.append(task) or aggregate(task=task)
    state, total = run.initial_state(), {name: torch.zeros(64, 64) for name in pairs(run)}
    for _ in range(2):
        state, _ = train_round(run, state)
        for name in pairs(run):
            total[name] = total[name] + exact_mean(seen[-1].updates, name)
            torch.testing.assert_close(state.buffers[f"{name}.residual"], total[name], rtol=0, atol=1e-6)
            assert not state.weights[f"{name}.B"].any() and total[name].abs().max() > 0
    inputs = all_of(run.test)
    merged = {f"{name}.residual": value for name, value in total.items()}
    logits = run.model.forward({**state.weights, **merged}, inputs, False).logits
    torch.testing.assert_close(predict(run, state, run.test).scores, logits, rtol=1e-4, atol=1e-4)
    assert (logits - run.model.forward({**state.weights, **run.model.buffers}, inputs, False).logits).abs().max() > 1e-3


def test_up_go_factors_and_down_the_stack_or_the_matrix():
    run = tiny_run(lora_spec("clip-lora+flora"))
    state, first = train_round(run, run.initial_state())
    factors = 4 * 6 * 2 * 2 * 64
    assert first.bytes_up == first.bytes_down == 2 * factors
    _, second = train_round(run, state)
    again = len(set(first.cohort) & set(second.cohort))
    # of two clients the stack has 2 * 2 * 2 * 64 = 512 floats, the matrix 64^2
    assert second.bytes_up == 2 * factors
    assert second.bytes_down == 2 * factors + again * 4 * 6 * 512 + (2 - again) * 4 * 6 * 64**2
