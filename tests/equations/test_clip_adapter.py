"""CLIP-Adapter: Gao et al. 2024."""

import pytest
import torch
from torch.nn.functional import normalize

from fedbench.testing import tiny_backbone, tiny_dataset
from fedbench_methods.clip_adapter import DOWN, UP, adapted
from tests.equations.kit import all_of, run_of, runs

adapter_run = runs("clip-adapter")


def test_the_adapter_by_hand():
    # W1 f = (1*2 - 1*1, 1 - 3*2) = (1, -5), ReLU (1, 0); W2 of it (0.5, -4), ReLU (0.5, 0): the second unit's 7 and 9
    # are behind a ReLU. 0.2 (0.5, 0) + 0.8 (2, 1) = (1.7, 0.8)
    down, up = torch.tensor([[1.0, -1.0], [-3.0, 1.0]]), torch.tensor([[0.5, 7.0], [-4.0, 9.0]])
    found = adapted(torch.tensor([[2.0, 1.0]]), down, up, 0.2)
    torch.testing.assert_close(found, torch.tensor([[1.7, 0.8]]))
    # without the last ReLU the second entry would be 0.8 - 0.2 * 4; with the shares exchanged (0.8, 0.2)
    torch.testing.assert_close(adapted(torch.tensor([[2.0, 1.0]]), down, up, 1.0), torch.tensor([[0.5, 0.0]]))


def test_logits_are_scaled_cosines_of_adapted_raw_features_to_the_texts():
    run, clip = adapter_run(), tiny_backbone("clip:embedded")
    inputs, weights = run.test.read(torch.arange(9)), run.model.weights
    outputs = run.model.forward(weights, inputs, False)
    features = normalize(0.2 * ((inputs @ weights[DOWN].T).relu() @ weights[UP].T).relu() + 0.8 * inputs, dim=1)
    texts = clip.text_features(tiny_dataset().classnames, run.spec.templates)
    torch.testing.assert_close(outputs.features, features)
    torch.testing.assert_close(outputs.logits, clip.logit_scale * features @ texts.T, rtol=0, atol=1e-4)
    # the adapter has no bias, so that a feature of any length gives the same: the raw one is only scaled by it
    torch.testing.assert_close(run.model.forward(weights, 3 * inputs, False).logits, outputs.logits)


def test_alpha_zero_is_zero_shot_bit_for_bit():
    run, zero_shot = adapter_run(params={"alpha": 0.0}), run_of("clip-zs")
    inputs = all_of(run.test)
    ours = run.model.forward(run.model.weights, inputs, False).logits
    assert torch.equal(ours, zero_shot.model.forward({}, inputs, False).logits)


@pytest.mark.parametrize(("reduction", "hidden"), [(4, 32), (1, 128), (64, 2)])
def test_two_layers_without_bias_are_sent(reduction, hidden):
    run = adapter_run(params={"reduction": reduction})
    assert run.model.weights[DOWN].shape == (hidden, 128) and run.model.weights[UP].shape == (128, hidden)
    assert run.info.round_bytes == 4 * 2 * 128 * hidden
    assert run.model.weights[DOWN].abs().max() <= 128**-0.5 and run.model.weights[UP].abs().max() <= hidden**-0.5
