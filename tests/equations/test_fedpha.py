"""FedPHA: Fang et al. 2025."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fedbench.rounds.loop import evaluate
from fedbench.testing import final_state, tiny_backbone, tiny_dataset
from fedbench_methods.fedpha import GLOBAL, LOCAL, projected, pull_term, push_term
from tests.equations.kit import CLIP, all_of, coop_texts, drawn_context, end_of, runs

NAMES = tiny_dataset().classnames


pha_run = runs("fedpha", context_length=4, local_length=4)


# v_G = 3 e_1, 2 e_2 in three dimensions: the right singular vectors are e_1 (leading) and e_2; e_3 is not reached
SHARED = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 0.0]])
OWN = torch.tensor([[5.0, 6.0, 7.0]])


@pytest.mark.parametrize(
    ("rho", "released", "null_space"),
    [
        (0.5, [0.0, 6.0, 0.0], [0.0, 6.0, 7.0]),  # cut = 1: without e_1
        (1.0, [5.0, 6.0, 0.0], [5.0, 6.0, 7.0]),  # cut = 0: the row space, and everything
        (0.0, [0.0, 0.0, 0.0], [0.0, 0.0, 7.0]),  # cut = 2: nothing, and what the shared prompt does not reach
        (0.6, [5.0, 6.0, 0.0], [5.0, 6.0, 7.0]),  # floor(0.8) = 0
    ],
)
def test_the_projection_by_hand(rho, released, null_space):
    torch.testing.assert_close(projected(OWN, SHARED, rho, whole=False), torch.tensor([released]))
    torch.testing.assert_close(projected(OWN, SHARED, rho, whole=True), torch.tensor([null_space]))


def test_a_cut_is_not_one_less_for_a_rounded_product():
    # 10 (1 - 0.9) is 0.99999... in floats; one leading direction goes
    shared = torch.diag(torch.arange(10.0, 0.0, -1.0))
    found = projected(torch.ones(1, 10), shared, 0.9, whole=True)
    torch.testing.assert_close(found, torch.tensor([[0.0] + 9 * [1.0]]), rtol=0, atol=1e-5)


def test_the_thin_decomposition_keeps_few_directions_of_many():
    own, shared = drawn_context(0, 200), drawn_context(1, 16)
    # floor(16 * 0.2) = 3 are cut: 13 of 64 directions, and 61 of 64
    for whole, share in ((False, 13 / 64), (True, 61 / 64)):
        found = projected(own, shared, 0.8, whole=whole)
        assert (found.square().sum() / own.square().sum()).item() == pytest.approx(share, abs=0.03)
        again = projected(found, shared, 0.8, whole=whole)
        torch.testing.assert_close(again, found, rtol=0, atol=1e-4)


def test_both_terms_by_hand():
    own, kept = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    # (1 + 1 + 0 + 0) / 4
    assert pull_term(own, kept).item() == pytest.approx(0.5)
    # distances sqrt 2 and 0: max(0, 2 - sqrt 2) and 2, the mean; at α = 1 only the second counts
    assert push_term(own, kept, 2.0).item() == pytest.approx((4 - 2**0.5) / 2)
    assert push_term(own, kept, 1.0).item() == pytest.approx(0.5)


def test_the_push_is_away_and_has_no_gradient_at_equal_texts():
    own = torch.tensor([[0.3, 0.4], [0.0, 0.0]], requires_grad=True)
    push_term(own, torch.zeros(2, 2), 1.0).backward()
    # -(3/5, 4/5) / 2 for the first: a step of descent goes away from the shared text; the second has no direction
    torch.testing.assert_close(own.grad, torch.tensor([[-0.3, -0.4], [0.0, 0.0]]))


@pytest.mark.parametrize(("projection", "length"), [("released", 4), ("null_space", 4), ("null_space", 7)])
def test_the_whole_loss_is_that_of_the_equations(make_step, projection, length):
    params = {"projection": projection, "local_length": length, "rho": 0.5, "pull": 3.0, "push": 0.5, "margin": 1.5}
    run, clip = pha_run(params=params), tiny_backbone("clip:embedded")
    weights = {GLOBAL: drawn_context(0).requires_grad_(), LOCAL: drawn_context(1, length).requires_grad_()}
    inputs, labels = run.train.read(torch.arange(8)), [0, 1, 2, 3] * 2
    chosen = {"fedpha": {"context_length": 4, **params}}
    step = make_step(run.model, inputs, labels, weights=weights, method="fedpha", params=chosen, num_classes=4)
    found = step.task.hooks.local_objective(step=step)
    _, _, rows = torch.linalg.svd(weights[GLOBAL], full_matrices=projection == "null_space")
    minor = rows[2:].T
    own, shared = coop_texts(weights[LOCAL], NAMES), coop_texts(weights[GLOBAL], NAMES)
    kept = coop_texts(weights[LOCAL] @ minor @ minor.T, NAMES)
    images, target = clip.logit_scale * normalize(inputs, dim=1), torch.tensor(labels)
    wanted = cross_entropy(images @ own.T, target) + cross_entropy(images @ shared.T, target)
    wanted = wanted + 3.0 * (own - kept).square().sum() / own.numel()
    wanted = wanted + 0.5 * (1.5 - (own - shared).norm(dim=1)).clamp(min=0).mean()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4)


def test_without_terms_the_private_prompt_is_trained_by_its_own_loss_alone():
    off = {"pull": 0.0, "push": 0.0}
    run = pha_run(params=off, rounds=1, lr=0.05)
    weights = {name: value.clone().requires_grad_() for name, value in run.model.weights.items()}
    outputs = run.model.forward(weights, run.train.read(torch.arange(8)), True)
    cross_entropy(outputs.logits, torch.arange(8) % 4).backward()
    assert weights[GLOBAL].grad is None and weights[LOCAL].grad.abs().max() > 0
    # the shared prompt is then PromptFL's, whose loss is the other one
    settings = {"backbone": CLIP, "rounds": 1, "lr": 0.05, "weight_decay": 5e-4}
    wanted = end_of("promptfl", {"promptfl": {"context_length": 4}}, **settings).weights["prompt.context"]
    torch.testing.assert_close(final_state(run).weights[GLOBAL], wanted, rtol=0, atol=1e-5)


def test_no_gradient_passes_the_decomposition():
    run = pha_run()
    shared = drawn_context(0).requires_grad_()
    outputs = run.model.forward({GLOBAL: shared, LOCAL: drawn_context(1)}, run.train.read(torch.arange(4)), True)
    assert not outputs.projected.requires_grad and outputs.shared.requires_grad


def test_the_global_model_has_the_shared_prompt_and_own_models_the_clients_of_another_length():
    run = pha_run(params={"local_length": 6})
    state = replace(
        run.initial_state(),
        weights={GLOBAL: drawn_context(0), LOCAL: drawn_context(9, 6)},
        round=run.spec.training.rounds,
    )
    state.own.update({k: {LOCAL: drawn_context(1 + k, 6)} for k in range(4)})
    _, predictions = evaluate(run, state)
    inputs = normalize(all_of(run.test), dim=1)
    assert torch.equal(predictions.labels, (inputs @ coop_texts(drawn_context(0), NAMES).T).argmax(1))
    for k in range(4):
        assert torch.equal(predictions.by_client[k], (inputs @ coop_texts(drawn_context(1 + k, 6), NAMES).T).argmax(1))


def test_the_shared_prompt_alone_is_sent_and_all_prompts_learn():
    run = pha_run(lr=0.05)
    assert run.private == {LOCAL} and run.info.round_bytes == 4 * 4 * 64
    state = final_state(run)
    assert (state.weights[GLOBAL] - run.model.weights[GLOBAL]).abs().max() > 1e-3
    assert all((own[LOCAL] - run.model.weights[LOCAL]).abs().max() > 1e-3 for own in state.own.values())
