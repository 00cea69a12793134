"""FedPuReL: Hou et al. 2026."""

from dataclasses import replace
from math import log

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, normalize

from fedbench.rounds.loop import evaluate
from fedbench.testing import final_state, tiny_backbone, tiny_dataset
from fedbench_methods.fedpurel import GLOBAL, LOCAL, divergence, entropy, purified, residual_loss, temperature
from tests.equations.kit import CLIP, all_of, drawn_context, run_of, runs, step_of, task_of

purel_run = runs("fedpurel", executor="sequential")


def received_step(run, exchange, received):
    """A step of client 0, whose private prompt is another than the initial one."""
    state = run.initial_state()
    task = task_of(run, state=replace(state, weights={**state.weights, **received}), exchange=exchange)
    return step_of(replace(task, received={**task.received, **received}))


def test_entropy_by_hand():
    found = entropy(torch.tensor([[log(3.0), 0.0], [7.0, 7.0]]))
    torch.testing.assert_close(found, torch.tensor([log(4.0) - 0.75 * log(3.0), log(2.0)]))


def test_both_temperatures_hit_the_mean_entropy_sample_by_sample():
    one, other = (s * torch.randn(8, 5, generator=torch.Generator().manual_seed(s)) for s in (1, 3))
    wanted = (entropy(one) + entropy(other)) / 2
    for logits in (one, other):
        torch.testing.assert_close(entropy(logits / temperature(logits, wanted)), wanted, rtol=0, atol=1e-4)


def test_a_temperature_by_hand_and_the_ends_of_its_range():
    # z = (2 log 3, 0) has at 2 the distribution (3/4, 1/4)
    logits = torch.tensor([[2 * log(3.0), 0.0]])
    known = entropy(torch.tensor([[log(3.0), 0.0]]))
    torch.testing.assert_close(temperature(logits, known), torch.tensor([[2.0]]), rtol=0, atol=1e-4)
    torch.testing.assert_close(temperature(logits, torch.tensor([9.0])), torch.tensor([[20.0]]), rtol=0, atol=1e-3)
    torch.testing.assert_close(temperature(logits, torch.tensor([-1.0])), torch.tensor([[0.05]]), rtol=0, atol=1e-3)


def test_of_two_classes_in_one_order_the_divergence_is_zero_and_in_the_other_it_is_known():
    # at one entropy two classes have the distributions (a, 1 - a) or (1 - a, a)
    logits, known = torch.tensor([[4.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    assert divergence(logits, known).item() == pytest.approx(0, abs=1e-5)
    # both z have entropy H(3/4, 1/4), so that both temperatures are 1: 3/4 log 3 + 1/4 log 1/3
    found = divergence(torch.tensor([[0.0, log(3.0)]]), torch.tensor([[log(3.0), 0.0]]))
    assert found.item() == pytest.approx(0.5 * log(3.0), abs=1e-4)


def test_the_temperatures_are_constants_to_the_gradient():
    # of KL(p_t, p_s) it is (p_s - p_t) / tau_s, here with tau_s = 1: (1/4 - 3/4, 3/4 - 1/4)
    logits = torch.tensor([[0.0, log(3.0)]], requires_grad=True)
    divergence(logits, torch.tensor([[log(3.0), 0.0]])).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.5]]), rtol=0, atol=1e-4)


def test_what_works_against_h_is_taken_out_and_what_does_not_is_kept():
    # <g, h> = -2 * 3 + 1 * 4 = -2, |h|^2 = 25: g' = (-2, 1) + (2/25) (3, 4); half of it with 1/25
    g, h = torch.tensor([-2.0, 1.0]), torch.tensor([3.0, 4.0])
    torch.testing.assert_close(purified(g, h, 1.0), torch.tensor([-1.76, 1.32]))
    torch.testing.assert_close(purified(g, h, 0.5), torch.tensor([-1.88, 1.16]))
    for kept in ([-3.0, 4.0], [1.0, 2.0], [0.0, 0.0]):
        assert torch.equal(purified(g, torch.tensor(kept), 1.0), g)


def test_the_loss_of_stage_2_by_hand():
    # z_L = (0, 0): log 2; z_G + z_L = (log 3, 0) and label 0: log 4/3
    shared, own, label = torch.tensor([[log(3.0), 0.0]]), torch.zeros(1, 2), torch.tensor([0])
    found = residual_loss(shared, own, label, 0.99).item()
    assert found == pytest.approx(0.99 * log(2.0) + 0.01 * log(4 / 3))


def test_a_step_of_stage_1_by_the_definition():
    run, clip = purel_run(), tiny_backbone(CLIP)
    texts = clip.text_features(tiny_dataset().classnames, run.spec.templates)
    changed = 0
    for client in range(4):
        step = step_of(task_of(run, client))
        v, images = step.weights[GLOBAL], step.batch.inputs
        logits = run.model.forward({GLOBAL: v}, images, True).logits
        known = clip.logit_scale * normalize(images, dim=1) @ texts.T
        wanted = (entropy(known) + entropy(logits.detach())) / 2
        teacher = (known / temperature(known, wanted)).softmax(1)
        student = (logits / temperature(logits.detach(), wanted)).log_softmax(1)
        (h,) = torch.autograd.grad(kl_div(student, teacher, reduction="batchmean"), v, retain_graph=True)
        (g,) = torch.autograd.grad(cross_entropy(logits, step.labels), v)
        along = (g * h).sum()
        changed += int(along < 0)
        found = step.task.hooks.local_gradients(step=step_of(task_of(run, client)))
        wanted = g - along / h.square().sum() * h if along < 0 else g
        assert found.by_name.keys() == {GLOBAL}
        torch.testing.assert_close(found.by_name[GLOBAL], wanted, rtol=1e-4, atol=1e-6)
    assert changed, "no client's gradients disagree, so that the projection was not seen"


def test_a_step_of_stage_2_by_the_definition():
    run = purel_run(params={"alpha": 0.3})
    given = {GLOBAL: drawn_context(0), LOCAL: drawn_context(1)}
    step = received_step(run, 1, given)
    v = drawn_context(1).requires_grad_()
    shared, own = (run.model.forward({GLOBAL: w}, step.batch.inputs, False).logits for w in (drawn_context(0), v))
    loss = 0.3 * cross_entropy(own, step.labels) + 0.7 * cross_entropy(shared + own, step.labels)
    loss.backward()
    found = step.task.hooks.local_gradients(step=step)
    assert found.by_name.keys() == {LOCAL}
    torch.testing.assert_close(found.by_name[LOCAL], v.grad, rtol=1e-4, atol=1e-6)


def test_without_purification_the_shared_prompt_is_promptfl_bit_for_bit_and_with_it_is_not():
    training = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}
    plain = run_of("promptfl", {"promptfl": {"context_length": 4}}, backbone=CLIP, executor="sequential", **training)
    wanted = final_state(plain).weights["prompt.context"]
    assert torch.equal(final_state(purel_run(params={"strength": 0.0}, **training)).weights[GLOBAL], wanted)
    assert not torch.equal(final_state(purel_run(**training)).weights[GLOBAL], wanted)


def test_stage_2_leaves_the_shared_prompt_and_server_momentum_alone():
    for stack in ("fedpurel", "fedpurel+fedavgm"):
        one, other = (final_state(purel_run(stack, {"alpha": a}, lr=0.05)) for a in (0.99, 0.01))
        assert torch.equal(one.weights[GLOBAL], other.weights[GLOBAL])
        assert any(not torch.equal(one.own[client][LOCAL], other.own[client][LOCAL]) for client in one.own)


def test_the_shared_prompt_alone_is_sent():
    run = purel_run()
    assert run.private == {LOCAL} and run.model.own == {LOCAL} and run.info.round_bytes == 4 * 4 * 64


def test_the_global_model_predicts_by_z_g_and_own_models_by_the_sum():
    run = purel_run()
    state = run.initial_state()
    state = replace(state, weights={GLOBAL: drawn_context(0), LOCAL: drawn_context(9)}, round=run.spec.training.rounds)
    state.own.update({k: {LOCAL: drawn_context(1 + k)} for k in range(4)})
    _, predictions = evaluate(run, state)
    inputs = all_of(run.test)

    def logits(context):
        return run.model.forward({GLOBAL: context}, inputs, False).logits

    assert torch.equal(predictions.labels, logits(drawn_context(0)).argmax(1))
    for k, labels in predictions.by_client.items():
        assert torch.equal(labels, (logits(drawn_context(0)) + logits(drawn_context(1 + k))).argmax(1))
    assert len({tuple(each.tolist()) for each in (predictions.labels, *predictions.by_client.values())}) > 2
