"""PromptFolio: Pan, Huang and Shi 2024."""

from dataclasses import replace

import torch
from torch.nn.functional import normalize

from fedbench.rounds.loop import evaluate
from fedbench.testing import final_state, tiny_backbone, tiny_dataset
from fedbench_methods.promptfolio import GLOBAL, LOCAL, portfolio
from tests.equations.kit import CLIP, all_of, coop_texts, drawn_context, run_of, runs

folio_run = runs("promptfolio", executor="sequential", context_length=4)


def test_the_mixture_by_hand_is_not_brought_to_unit_length():
    # 0.6 (1, 0) + 0.4 (0, 1); and 0.6 (1, 0) + 0.4 (1, 0), where the two agree
    shared, own = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    torch.testing.assert_close(portfolio(shared, own, 0.4), torch.tensor([[0.6, 0.4], [1.0, 0.0]]))


def test_its_length_is_that_of_the_formula():
    shared, own = (normalize(torch.randn(5, 8, generator=torch.Generator().manual_seed(s)), dim=1) for s in (0, 1))
    cosines = (shared * own).sum(1)
    for theta in (0.2, 0.5, 0.9):
        lengths = portfolio(shared, own, theta).square().sum(1)
        torch.testing.assert_close(lengths, 1 - 2 * theta * (1 - theta) * (1 - cosines))


def test_logits_are_of_the_mixed_texts():
    run, clip = folio_run(params={"theta": 0.3}), tiny_backbone("clip:embedded")
    weights, inputs = {GLOBAL: drawn_context(0), LOCAL: drawn_context(1)}, run.test.read(torch.arange(7))
    texts = 0.7 * coop_texts(drawn_context(0), tiny_dataset().classnames) + 0.3 * coop_texts(
        drawn_context(1), tiny_dataset().classnames
    )
    outputs = run.model.forward(weights, 2 * inputs, False)
    wanted = clip.logit_scale * normalize(inputs, dim=1) @ texts.T
    torch.testing.assert_close(outputs.logits, wanted, rtol=0, atol=1e-4)


def test_theta_zero_is_promptfl_bit_for_bit_whatever_the_private_prompt():
    training = {"momentum": 0.9, "lr": 0.05, "weight_decay": 0.0}
    plain = run_of("promptfl", {"promptfl": {"context_length": 4}}, backbone=CLIP, executor="sequential", **training)
    wanted = final_state(plain).weights["prompt.context"]
    run = folio_run(params={"theta": 0.0}, **training)
    state = final_state(run)
    assert torch.equal(state.weights[GLOBAL], wanted)
    assert all(torch.equal(own[LOCAL], run.model.weights[LOCAL]) for own in state.own.values())
    start = run.initial_state()
    start.own.update({client: {LOCAL: drawn_context(client)} for client in range(4)})
    assert torch.equal(final_state(run, start).weights[GLOBAL], wanted)


def test_theta_one_leaves_the_shared_prompt_and_trains_the_private_ones():
    run = folio_run(params={"theta": 1.0}, weight_decay=0.0, lr=0.05)
    state = final_state(run)
    assert torch.equal(state.weights[GLOBAL], run.model.weights[GLOBAL])
    assert state.own and all((own[LOCAL] - run.model.weights[LOCAL]).abs().max() > 1e-3 for own in state.own.values())


def test_the_shared_prompt_alone_is_sent_and_clients_keep_their_own():
    run = folio_run(lr=0.05)
    assert run.private == {LOCAL} and run.info.round_bytes == 4 * 4 * 64
    state = final_state(run)
    assert len({tuple(own[LOCAL].flatten().tolist()) for own in state.own.values()}) == len(state.own) > 1


def test_the_global_model_knows_no_private_prompt_and_own_models_mix():
    run = folio_run()
    state = run.initial_state()
    state = replace(state, weights={GLOBAL: drawn_context(0), LOCAL: drawn_context(9)}, round=run.spec.training.rounds)
    state.own.update({k: {LOCAL: drawn_context(1 + k)} for k in range(4)})
    _, predictions = evaluate(run, state)
    inputs = all_of(run.test)

    def labels(local):
        return run.model.forward({GLOBAL: drawn_context(0), LOCAL: local}, inputs, False).logits.argmax(1)

    assert torch.equal(predictions.labels, labels(drawn_context(0)))
    assert all(torch.equal(predictions.by_client[k], labels(drawn_context(1 + k))) for k in range(4))
    assert len({tuple(each.tolist()) for each in (predictions.labels, *predictions.by_client.values())}) > 2
