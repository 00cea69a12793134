"""DP-FPL: Tran et al. 2025, a shared plus a private prompt whose gradients are cut, of low rank, and noisy."""

from dataclasses import replace
from math import log, sqrt

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fedbench.core.method.tasks import AggregationTask
from fedbench.core.randomness import torch_generator
from fedbench.core.spec import Training
from fedbench.core.types import Update
from fedbench.rounds.loop import evaluate
from fedbench.testing import digest, final_state, tiny_backbone, tiny_dataset
from fedbench.toolkit.local_training import batches_of
from fedbench_methods.dp_fpl import GLOBAL, LOCAL, DpFplParams, bases, cut, deviation, recomposed
from tests.equations.kit import CLIP, coop_texts, drawn, end_of, runs, step_of, task_of

OFF = {"epsilon": 0.0}
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}


run_of = runs("dp-fpl", executor="sequential")


def gradients(run, client=0, number=0):
    step = step_of(task_of(run, client), number)
    return step.task.hooks.local_gradients(step=step).by_name


def full_gradient(run, client=0):
    """Of the cross-entropy at v_G + l, written out."""
    step = step_of(task_of(run, client))
    context = (step.weights[GLOBAL] + step.weights[LOCAL]).detach().requires_grad_()
    texts = coop_texts(context, tiny_dataset().classnames)
    logits = tiny_backbone(CLIP).logit_scale * normalize(step.batch.inputs, dim=1) @ texts.T
    (found,) = torch.autograd.grad(cross_entropy(logits, step.labels), context)
    return found


def spread(noise):
    """Standard deviation and mean over the 1,024 entries: within 0.08 and 0.12 of 1 and 0, four times their errors."""
    assert noise.numel() == 1024
    assert noise.std().item() == pytest.approx(1, abs=0.08) and abs(noise.mean().item()) < 0.12
    return True


def test_the_step_of_the_private_prompt_by_hand():
    # u and w are the first row and column: what the tangent space lacks of G are the entries outside both
    u, w = torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    full = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    found = recomposed(u, w, full @ w.T, u.T @ full, "tangent")
    assert found.tolist() == [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]
    # as released, what is in both spans counts three times
    released = recomposed(u, w, full @ w.T, u.T @ full, "released")
    assert released.tolist() == [[3.0, 2.0, 3.0], [4.0, 0.0, 0.0]]


def test_it_is_the_projection_on_the_tangent_space_and_as_released_has_three_times_what_is_common():
    prompt, full = drawn(6, 10, seed=1), drawn(6, 10, seed=2)
    u, w = bases(prompt, drawn(10, 3, seed=3))
    outside_u, outside_w = torch.eye(6) - u @ u.T, torch.eye(10) - w.T @ w
    found = recomposed(u, w, full @ w.T, u.T @ full, "tangent")
    torch.testing.assert_close(found, full - outside_u @ full @ outside_w, rtol=0, atol=1e-5)
    torch.testing.assert_close(recomposed(u, w, found @ w.T, u.T @ found, "tangent"), found, rtol=0, atol=1e-5)
    common = u @ u.T @ full @ w.T @ w
    torch.testing.assert_close(recomposed(u, w, common @ w.T, u.T @ common, "tangent"), common, rtol=0, atol=1e-5)
    thrice = recomposed(u, w, common @ w.T, u.T @ common, "released")
    torch.testing.assert_close(thrice, 3 * common, rtol=0, atol=1e-5)


def test_bases_are_orthonormal_and_span_a_prompt_of_their_rank():
    prompt = drawn(6, 2, seed=1) @ drawn(2, 10, seed=2)
    u, w = bases(prompt, drawn(10, 2, seed=3))
    torch.testing.assert_close(u.T @ u, torch.eye(2), rtol=0, atol=1e-6)
    torch.testing.assert_close(w @ w.T, torch.eye(2), rtol=0, atol=1e-6)
    torch.testing.assert_close(u @ u.T @ prompt, prompt, rtol=0, atol=1e-5)
    torch.testing.assert_close(prompt @ w.T @ w, prompt, rtol=0, atol=1e-5)


def test_short_gradients_are_left_alone_and_long_ones_keep_their_direction():
    short = torch.tensor([[3.0, 4.0]])
    assert torch.equal(cut(short, 5.0), short) and torch.equal(cut(torch.zeros(2, 2), 5.0), torch.zeros(2, 2))
    torch.testing.assert_close(cut(2 * short, 5.0), short)


def test_the_deviation_by_hand():
    # 10/32 sqrt(100 ln 1e5) / 0.4 = 0.3125 * 33.9307 / 0.4; half of it at twice epsilon: larger is less noise
    training = Training(rounds=100, batch_size=32)
    assert deviation(DpFplParams(), training) == pytest.approx(26.508, abs=1e-3)
    assert deviation(DpFplParams(epsilon=0.8), training) == pytest.approx(13.254, abs=1e-3)


@pytest.mark.parametrize("rank", [4, 64])
def test_without_noise_and_of_full_rank_a_step_is_that_of_the_whole_private_prompt(rank):
    run = run_of(params={**OFF, "rank": rank, "context_length": 4})
    found, wanted = gradients(run), full_gradient(run)
    torch.testing.assert_close(found[GLOBAL], wanted, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found[LOCAL], found[GLOBAL], rtol=1e-4, atol=1e-6)


def test_of_low_rank_it_is_the_projection_at_bases_drawn_anew_in_every_step():
    run = run_of(params={**OFF, "rank": 2, "context_length": 6})
    projections = []
    for number in (0, 1):
        found, full = gradients(run, client=3, number=number), full_gradient(run, client=3)
        draws = torch_generator(0, "noise of dp-fpl's clients", 1, 3, 0, number)
        u, w = bases(run.model.weights[LOCAL], torch.randn(64, 2, generator=draws))
        wanted = full - (full - u @ (u.T @ full)) @ (torch.eye(64) - w.T @ w)
        torch.testing.assert_close(found[LOCAL], wanted, rtol=1e-3, atol=1e-5)
        assert torch.linalg.matrix_rank(found[LOCAL], rtol=1e-4) == 4
        projections.append(found[LOCAL])
    assert not torch.allclose(*projections, rtol=0.1)


def test_as_released_and_scaled():
    # of full rank all of G is in the span of u, and what of it is in that of the rows of l counts three times
    run = run_of(params={**OFF, "rank": 64, "context_length": 4, "projection": "released", "factor_scale": 0.1})
    found, full = gradients(run), full_gradient(run)
    rows = torch.linalg.qr(run.model.weights[LOCAL].T).Q
    torch.testing.assert_close(found[GLOBAL], full, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found[LOCAL], 0.1 * (full + 2 * full @ rows @ rows.T), rtol=1e-3, atol=1e-5)


def test_noise_of_the_private_prompt_has_the_deviation_and_the_shared_gradient_has_none():
    # of full rank u is square and what ∂u adds is taken out again: u n is left, as wide as n
    params = {"rank": 64, "clip": 1000.0, "epsilon": 5.0}
    noisy, quiet = run_of(params=params), run_of(params={**params, **OFF})
    sigma = 1000 / 8 * sqrt(4 * log(1e5)) / 5
    before = gradients(quiet)
    drawn_noise = []
    for where in ({}, {"number": 1}, {"client": 1}):
        found = gradients(noisy, **where)
        noise = (found[LOCAL] - gradients(quiet, **where)[LOCAL]) / sigma
        assert spread(noise)
        drawn_noise.append(noise)
        if not where.get("client"):
            assert torch.equal(found[GLOBAL], before[GLOBAL])
    first, second, third = drawn_noise
    assert not torch.allclose(first, second, atol=0.1) and not torch.allclose(first, third, atol=0.1)
    assert torch.equal(gradients(noisy)[LOCAL], gradients(noisy)[LOCAL])


def test_gradients_are_cut_each_by_itself():
    quiet = gradients(run_of(params={**OFF, "rank": 64}))[GLOBAL]
    length = quiet.norm().item() / 4
    run = run_of(params={"rank": 64, "clip": length, "epsilon": 1000.0})
    found = gradients(run)
    torch.testing.assert_close(found[GLOBAL], quiet / 4, rtol=1e-3, atol=1e-6)


def averaged(run, round=1, sizes=(30, 10)):
    """The mean of updates that are as they were received, as far as the server moves it."""
    weights = {GLOBAL: run.model.weights[GLOBAL]}
    updates = tuple(Update(client, dict(weights), {}, size) for client, size in enumerate(sizes))
    task = AggregationTask(round, weights, {}, updates, run.model, run.spec, {}, num_clients=4)
    return run.assembly.hooks.aggregate(task=task)[GLOBAL] - weights[GLOBAL]


@pytest.mark.parametrize(("weighting", "share"), [("samples", 0.75), ("uniform", 0.5)])
def test_the_servers_noise_is_that_of_a_plain_step_by_the_largest_share(weighting, share):
    training = {"lr": 0.1, "lr_decay": 0.5, "weighting": weighting}
    run = run_of(params={"epsilon": 0.5}, **training)
    sigma = 10 / 8 * sqrt(4 * log(1e5)) / 0.5
    first, second = averaged(run), averaged(run, round=2)
    assert spread(first / (0.1 * share * sigma)) and spread(second / (0.05 * share * sigma))
    assert not torch.allclose(first, 2 * second, rtol=0.1)
    assert not averaged(run_of(params=OFF, **training)).any()


def test_one_step_a_round_is_the_noisy_step_of_the_equations():
    scenario, lr = {"participation": 1.0}, 0.05
    run = run_of(params={"clip": 0.5, "rank": 3}, scenario=scenario, rounds=1, local_steps=1, lr=lr, **PLAIN)
    state, sigma = final_state(run), 0.5 / 8 * sqrt(log(1e5)) / 0.4
    sizes = torch.tensor([len(shard.indices) for shard in run.federation.clients], dtype=torch.float64)
    shares, mean = (sizes / sizes.sum()).tolist(), torch.zeros(16, 64)
    for client in range(4):
        task = task_of(run, client)
        [index] = batches_of(task)
        weights = {name: value.clone().requires_grad_() for name, value in task.received.items()}
        images, labels = task.inputs.read(index), task.labels[index]
        loss = cross_entropy(run.model.forward(weights, images, True).logits, labels)
        (full,) = torch.autograd.grad(loss, weights[LOCAL])
        mean += shares[client] * cut(full, 0.5)
        draws = torch_generator(0, "noise of dp-fpl's clients", 1, client, 0, 0)
        u, w = bases(weights[LOCAL].detach(), torch.randn(64, 3, generator=draws))
        by_u = cut(full @ w.T, 0.5) + sigma * torch.randn(16, 3, generator=draws)
        by_w = cut(u.T @ full, 0.5) + sigma * torch.randn(3, 64, generator=draws)
        wanted = weights[LOCAL].detach() - lr * (by_u @ w + u @ by_w - u @ u.T @ by_u @ w)
        torch.testing.assert_close(state.own[client][LOCAL], wanted, rtol=1e-3, atol=1e-5)
    mean += max(shares) * sigma * torch.randn(16, 64, generator=torch_generator(0, "noise of dp-fpl's server", 1, 0))
    torch.testing.assert_close(state.weights[GLOBAL], run.model.weights[GLOBAL] - lr * mean, rtol=1e-3, atol=1e-5)


def test_logits_are_of_the_sum_and_v_g_alone_is_sent():
    run = run_of(params={"context_length": 4})
    assert run.private == {LOCAL} and run.info.round_bytes == 4 * 4 * 64
    weights, inputs = {GLOBAL: drawn(4, 64), LOCAL: drawn(4, 64, seed=1)}, run.test.read(torch.arange(7))
    texts = coop_texts(weights[GLOBAL] + weights[LOCAL], tiny_dataset().classnames)
    wanted = tiny_backbone(CLIP).logit_scale * normalize(inputs, dim=1) @ texts.T
    torch.testing.assert_close(run.model.forward(weights, inputs, False).logits, wanted, rtol=0, atol=1e-4)


def test_the_global_model_is_v_g_alone_and_own_models_add_the_clients_prompt():
    run = run_of()
    state = replace(run.initial_state(), round=run.spec.training.rounds)
    shared = state.weights[GLOBAL]
    state.own.update({client: {LOCAL: drawn(16, 64, seed=client)} for client in range(3)})
    _, predictions = evaluate(run, state)
    inputs = run.test.read(torch.arange(len(run.test)))
    # the fourth client has not taken part: it has the first draw
    owns = [*(state.own[client][LOCAL] for client in range(3)), run.model.weights[LOCAL]]
    for labels, own in [
        (predictions.labels, torch.zeros(16, 64)),
        *zip(predictions.by_client.values(), owns, strict=True),
    ]:
        logits = run.model.forward({GLOBAL: shared, LOCAL: own}, inputs, False).logits
        assert torch.equal(labels, logits.argmax(1))


def test_server_steps_go_on_from_the_noisy_mean():
    still = {"backbone": CLIP, "local_steps": 1, "executor": "sequential"}
    momentum = end_of("dp-fpl+fedavgm", {"fedavgm": {"beta": 0.0}}, **still)
    assert digest(end_of("dp-fpl", **still)) == digest(momentum)
    # what momentum is made of has the noise: of clients with 23, 23, 22 and 22 samples, beside which G is small
    scenario = {"partition": "iid", "participation": 1.0}
    state = final_state(run_of("dp-fpl+fedavgm", {"epsilon": 0.1}, scenario=scenario, rounds=1, lr=0.1, local_steps=1))
    sigma = 10 / 8 * sqrt(log(1e5)) / 0.1
    assert spread(state.server["fedavgm"][GLOBAL] / (0.1 * 23 / 90 * sigma))
