"""FFA-LoRA: Sun et al. 2024: A is a constant that all share, B is trained and averaged."""

import pytest
import torch

from fedbench.testing import digest, final_state, tiny_run
from tests.equations.kit import lora_spec


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_it_is_the_learners_option_bit_for_bit(dropout):
    stacked = tiny_run(lora_spec("clip-lora+ffa-lora", {"dropout": dropout}), executor="sequential")
    option = tiny_run(lora_spec("clip-lora", {"dropout": dropout, "lora_agg": "freeze_A"}), executor="sequential")
    assert digest(final_state(stacked)) == digest(final_state(option))
    assert stacked.info.round_bytes == option.info.round_bytes == 4 * 6 * 2 * 64
    assert digest(final_state(option)) != digest(final_state(tiny_run(lora_spec("clip-lora", {"dropout": dropout}))))


def test_a_is_the_learners_own_draw_and_no_weight():
    plain, run = tiny_run(lora_spec("clip-lora")), tiny_run(lora_spec("clip-lora+ffa-lora"))
    frozen = {name for name in plain.model.weights if name.endswith(".A")}
    assert frozen and run.model.weights.keys() == plain.model.weights.keys() - frozen
    assert all(torch.equal(run.model.constants[name], plain.model.weights[name]) for name in frozen)


def test_the_mean_of_the_additions_is_the_addition_of_the_mean():
    # B_1 = (1, 0), B_2 = (3, 4), shares 1/4 and 3/4: mean (2.5, 3); A = (2, 1)
    a, b, shares = (
        torch.tensor([[2.0, 1.0]]),
        [torch.tensor([[1.0], [0.0]]), torch.tensor([[3.0], [4.0]])],
        (0.25, 0.75),
    )
    exact = sum(p * each @ a for p, each in zip(shares, b, strict=True))
    assert torch.equal(torch.tensor([[2.5], [3.0]]) @ a, exact)
    assert exact.tolist() == [[5.0, 2.5], [6.0, 3.0]]


def test_it_goes_beside_own_models_and_terms():
    run = tiny_run(lora_spec("clip-lora+ffa-lora+ditto+fedprox"))
    state = final_state(run)
    assert all(name.endswith(".B") for name in state.weights)
    assert any(
        own["ditto/" + min(run.model.weights.keys() - run.model.own)].abs().max() > 0 for own in state.own.values()
    )
