"""ProGrad: Zhu et al. 2023, around whatever a stack trains on CLIP."""

from math import log

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, normalize

from fedbench.testing import final_state, tiny_backbone, tiny_dataset
from fedbench_methods.prograd import aligned, divergence
from tests.equations.kit import CLIP, run_of, step_of, task_of


def prograd_run(stack="promptfl+prograd", params=None, **training):
    return run_of(stack, {"prograd": params or {}}, backbone=CLIP, executor="sequential", **training)


def test_what_works_against_h_is_taken_out_by_hand():
    # <g, h> = -2 * 3 + 1 * 4 = -2, |h|^2 = 25: g' = (-2, 1) + (2/25) (3, 4) = (-1.76, 1.32)
    g, h = {"w": torch.tensor([-2.0, 1.0])}, {"w": torch.tensor([3.0, 4.0])}
    torch.testing.assert_close(aligned(g, h, 1.0)["w"], torch.tensor([-1.76, 1.32]))
    assert (aligned(g, h, 1.0)["w"] * h["w"]).sum().abs() < 1e-6
    # half of it: (-2, 1) + (1/25) (3, 4)
    torch.testing.assert_close(aligned(g, h, 0.5)["w"], torch.tensor([-1.88, 1.16]))
    # |h| has no say
    torch.testing.assert_close(aligned(g, {"w": 7 * h["w"]}, 1.0)["w"], torch.tensor([-1.76, 1.32]))


@pytest.mark.parametrize("h", [[0.0, 0.0], [1.0, 2.0], [-3.0, 4.0]])
def test_what_does_not_work_against_h_is_kept_to_the_bit(h):
    # <g, h> = 0, 0 and 10
    g = {"w": torch.tensor([-2.0, 1.0])}
    assert torch.equal(aligned(g, {"w": torch.tensor(h)}, 1.0)["w"], g["w"])


def test_several_tensors_are_one_vector_and_others_keep_their_gradient():
    # <g, h> = 2 * 1 - 4 * 1 = -2, |h|^2 = 2: g' = g + h, although the first tensors agree
    g = {"a": torch.tensor([2.0]), "b": torch.tensor([-4.0]), "own": torch.tensor([5.0])}
    h = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0]), "frozen": torch.tensor([9.0])}
    assert {name: t.item() for name, t in aligned(g, h, 1.0).items()} == {"a": 3.0, "b": -3.0, "own": 5.0}


def test_divergence_by_hand():
    # p0 = (3/4, 1/4), p = (1/2, 1/2): 3/4 log(3/2) + 1/4 log(1/2), the mean with a sample whose p is its p0
    known = torch.tensor([[log(3.0), 0.0], [1.0, 2.0]])
    found = divergence(torch.tensor([[5.0, 5.0], [1.0, 2.0]]), known, 1.0)
    assert found.item() == pytest.approx((0.75 * log(1.5) + 0.25 * log(0.5)) / 2)
    # at T = 2 of twice the logits it is T^2 times that
    twice = divergence(2 * torch.tensor([[5.0, 5.0], [1.0, 2.0]]), 2 * known, 2.0)
    assert twice.item() == pytest.approx(4 * found.item())


def test_a_step_of_promptfl_by_the_definition():
    run, clip = prograd_run(), tiny_backbone(CLIP)
    texts = clip.text_features(tiny_dataset().classnames, run.spec.templates)
    changed = 0
    for client in range(4):
        step = step_of(task_of(run, client))
        images, labels = step.batch.inputs, step.labels
        (context,) = step.weights.values()
        logits = run.model.forward(step.weights, images, True).logits
        known = clip.logit_scale * normalize(images, dim=1) @ texts.T
        away = kl_div(logits.log_softmax(1), known.softmax(1), reduction="batchmean")
        (h,) = torch.autograd.grad(away, context, retain_graph=True)
        (g,) = torch.autograd.grad(cross_entropy(logits, labels), context)
        along = (g * h).sum()
        wanted = g - along / h.square().sum() * h if along < 0 else g
        changed += int(along < 0)
        found = step.task.hooks.local_gradients(step=step_of(task_of(run, client)))
        torch.testing.assert_close(found.by_name["prompt.context"], wanted, rtol=1e-4, atol=1e-6)
        assert found.loss.item() == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-5)
    assert changed, "no client's gradients disagree, so that the projection was not seen"


def test_a_model_of_a_clients_own_keeps_its_gradient():
    one, both = prograd_run(rounds=1, lr=0.05), prograd_run("promptfl+prograd+ditto", rounds=1, lr=0.05)
    assert torch.equal(final_state(one).weights["prompt.context"], final_state(both).weights["prompt.context"])
    step = step_of(task_of(both))
    found = both.assembly.hooks.local_gradients(step=step)
    plain = run_of("promptfl+ditto", backbone=CLIP, rounds=1, lr=0.05, executor="sequential")
    wanted = plain.assembly.hooks.local_gradients(step=step_of(task_of(plain)))
    name = "ditto/prompt.context"
    torch.testing.assert_close(found.by_name[name], wanted.by_name[name])
