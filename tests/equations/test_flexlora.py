"""FlexLoRA: Bai et al. 2024: products of low-rank additions are averaged and cut to their rank."""

import pytest
import torch

from fedbench.core.types import Update
from fedbench.rounds.loop import train_round
from fedbench.testing import tiny_run
from fedbench.toolkit.fedavg import average
from fedbench_methods.flexlora import FlexLoRA, FlexLoRAParams
from tests.equations.kit import aggregation, exact_mean, lora_spec, pairs


def played(a, b, sizes, split="left"):
    updates = tuple(
        Update(k, {"w.A": a[k], "w.B": b[k], "bias": torch.ones(1) * k}, {}, n) for k, n in enumerate(sizes)
    )
    x = {"w.A": a[0], "w.B": b[0], "bias": torch.zeros(1)}
    return FlexLoRA(FlexLoRAParams(split=split)).aggregate(aggregation(x, updates), average)


def drawn(rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = [torch.randn(rank, 7, generator=generator) for _ in range(2)]
    return a, [torch.randn(7, rank, generator=generator) for _ in range(2)]


def test_of_scalars_the_product_is_the_mean_product():
    one = [torch.full((1, 1), float(value)) for value in (0, 2)]
    after = played(one, one, (1, 1))
    # (0 + 4) / 2 = 2; the means of the factors would give 1
    assert (after["w.B"] * after["w.A"]).item() == pytest.approx(2.0) and after["bias"].item() == 0.5
    assert after["w.A"].abs().item() == pytest.approx(1.0), "all of S is in B"
    root = played(one, one, (1, 1), "root")
    assert root["w.A"].abs().item() == pytest.approx(2**0.5) and root["w.B"].abs().item() == pytest.approx(2**0.5)


@pytest.mark.parametrize("split", ["left", "root"])
def test_it_is_the_best_approximation_of_the_rank_whichever_factor_has_the_singular_values(split):
    a, b = drawn(2)
    exact = 0.25 * b[0] @ a[0] + 0.75 * b[1] @ a[1]
    u, s, v = torch.linalg.svd(exact)
    after = played(a, b, (1, 3), split)
    assert s[2] > 0.1, "the mean has twice the rank"
    torch.testing.assert_close(after["w.B"] @ after["w.A"], u[:, :2] * s[:2] @ v[:2], rtol=0, atol=1e-5)
    gram = after["w.A"] @ after["w.A"].T
    wanted = torch.eye(2) if split == "left" else torch.diag(s[:2])
    torch.testing.assert_close(gram, wanted, rtol=0, atol=1e-4)


def test_a_mean_of_the_rank_itself_comes_back():
    a, b = drawn(1)
    # rank two holds two clients' additions of rank one
    wide_a, wide_b = [torch.cat([each, 0 * each]) for each in a], [torch.cat([each, 0 * each], 1) for each in b]
    after = played(wide_a, wide_b, (1, 3))
    exact = 0.25 * b[0] @ a[0] + 0.75 * b[1] @ a[1]
    torch.testing.assert_close(after["w.B"] @ after["w.A"], exact, rtol=0, atol=1e-5)


def test_what_it_cuts_off_goes_into_the_frozen_weights_beside_fedex():
    run = tiny_run(lora_spec("clip-lora+flexlora+fedex-lora", rounds=1), executor="sequential")
    seen, aggregate = [], run.assembly.hooks.aggregate
    run.assembly.hooks.aggregate = lambda task: seen.append(task) or aggregate(task=task)
    state, _ = train_round(run, run.initial_state())
    for name in pairs(run):
        a, b, rest = (
            state.weights[f"{name}.A"],
            state.weights[f"{name}.B"],
            state.buffers[f"{name}.residual"],
        )
        torch.testing.assert_close(a @ a.T, torch.eye(2), rtol=0, atol=1e-4)
        torch.testing.assert_close(b @ a + rest, exact_mean(seen[-1].updates, name), rtol=0, atol=1e-6)
