"""TaskRes: Yu et al. 2023."""

import torch
from torch.nn.functional import normalize

from fedbench.testing import tiny_backbone, tiny_dataset
from fedbench_methods.taskres import RESIDUAL, with_residual
from tests.equations.kit import all_of, run_of, runs

TEMPLATES = ("a photo of a {}.", "{}", "a bad drawing of the {}.")


taskres_run = runs("taskres")


def test_the_residual_by_hand():
    # t = (3, 0), x = (2, 8), α = 0.5: (4, 4) / |·|; and t = (0, 2), x = (6, 4): (3, 4) / 5
    base, residual = torch.tensor([[3.0, 0.0], [0.0, 2.0]]), torch.tensor([[2.0, 8.0], [6.0, 4.0]])
    wanted = torch.tensor([[0.5**0.5, 0.5**0.5], [0.6, 0.8]])
    torch.testing.assert_close(with_residual(base, residual, 0.5), wanted)


def test_logits_are_scaled_cosines_to_the_moved_texts_of_raw_length():
    run, clip = taskres_run(params={"alpha": 0.7}, templates=TEMPLATES), tiny_backbone("clip:embedded")
    names, inputs = tiny_dataset().classnames, run.test.read(torch.arange(9))
    raw = [clip.encode_text([template.format(name) for name in names]) for template in TEMPLATES]
    residual = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    outputs = run.model.forward({RESIDUAL: residual}, inputs, False)
    texts = normalize(sum(raw) / 3 + 0.7 * residual, dim=1)
    torch.testing.assert_close(outputs.texts, texts)
    wanted = clip.logit_scale * normalize(inputs, dim=1) @ texts.T
    torch.testing.assert_close(outputs.logits, wanted, rtol=0, atol=1e-4)
    # how far it moves depends on the length of the base
    other = taskres_run(params={"alpha": 0.7, "base": "unit"}, templates=TEMPLATES)
    unit = normalize(clip.text_features(names, TEMPLATES) + 0.7 * residual, dim=1)
    torch.testing.assert_close(other.model.forward({RESIDUAL: residual}, inputs, False).texts, unit)
    assert (unit - texts).abs().max() > 1e-3


def test_round_0_is_zero_shot():
    zero_shot = run_of("clip-zs", templates=TEMPLATES)
    inputs = all_of(zero_shot.test)
    theirs = zero_shot.model.forward({}, inputs, False).logits
    run = taskres_run(params={"base": "unit"}, templates=TEMPLATES)
    assert not run.model.weights[RESIDUAL].any()
    torch.testing.assert_close(run.model.forward(run.model.weights, inputs, False).logits, theirs, rtol=0, atol=1e-5)
    # of one template the length of the base has no say
    theirs = run_of("clip-zs", templates=TEMPLATES[:1]).model.forward({}, inputs, False).logits
    run = taskres_run(templates=TEMPLATES[:1])
    torch.testing.assert_close(run.model.forward(run.model.weights, inputs, False).logits, theirs, rtol=0, atol=1e-4)
