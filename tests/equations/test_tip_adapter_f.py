"""Tip-Adapter-F: Zhang et al. 2022, with one key a class."""

from math import exp

import torch
from torch.nn.functional import normalize

from fedbench.rounds.loop import evaluate, start, train_round
from fedbench.testing import final_state, tiny_backbone, tiny_dataset
from fedbench_methods.tip_adapter_f import KEYS, cache_logits
from tests.equations.kit import all_of, run_of, runs

tip_run = runs("tip-adapter-f")


def test_the_cache_by_hand():
    # f.F = 1, 0.6 and 0 (a key of zero): 1, e^-0.8 and e^-2 at β = 2
    keys = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 0.0]])
    found = cache_logits(torch.tensor([[1.0, 0.0]]), keys, 2.0)
    torch.testing.assert_close(found, torch.tensor([[1.0, exp(-0.8), exp(-2.0)]]))


def test_logits_are_zero_shot_and_alpha_times_the_cache():
    run, clip = tip_run(params={"alpha": 3.0, "beta": 2.0}), tiny_backbone("clip:embedded")
    inputs, keys = run.test.read(torch.arange(7)), torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    features = normalize(inputs, dim=1)
    texts = clip.text_features(tiny_dataset().classnames, run.spec.templates)
    wanted = clip.logit_scale * features @ texts.T + 3 * torch.exp(-2 * (1 - features @ keys.T))
    found = run.model.forward({KEYS: keys}, 5 * inputs, False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_keys_of_zero_predict_as_zero_shot_clip_does():
    run, zero_shot = tip_run(), run_of("clip-zs")
    inputs = all_of(run.test)
    theirs = zero_shot.model.forward({}, inputs, False).logits
    torch.testing.assert_close(run.model.forward(run.model.weights, inputs, False).logits - theirs,
                               torch.full_like(theirs, exp(-5.5)), rtol=0, atol=1e-4)  # fmt: skip


def test_clients_begin_at_unit_means_over_all_samples_of_a_class_and_the_mean_of_theirs_follows():
    run = tip_run(lr=0.0, rounds=2)
    everyone = torch.cat([client.indices for client in run.federation.clients])
    features, labels = normalize(run.train.read(everyone), dim=1), run.federation.train.labels[everyone]
    wanted = normalize(torch.stack([features[labels == k].mean(0) for k in range(4)]), dim=1)
    state = run.initial_state()
    start(run, state)
    assert not state.weights[KEYS].any()
    state, _ = train_round(run, state)
    # the recipe's decay is times the learning rate, so that nothing moves
    torch.testing.assert_close(state.weights[KEYS], wanted, rtol=0, atol=1e-5)
    before = state.weights[KEYS]
    state, _ = train_round(run, state)
    assert torch.equal(state.weights[KEYS], before)


def test_class_means_are_sent_once_and_the_keys_in_every_round():
    run = tip_run(rounds=2)
    assert run.info.round_bytes == 4 * 4 * 128
    state = run.initial_state()
    start(run, state)
    state, first = train_round(run, state)
    _, second = train_round(run, state)
    owned = sum(len(torch.unique(run.federation.train.labels[client.indices])) for client in run.federation.clients)
    counts = sum(4 * 8 for _ in run.federation.clients)
    assert first.bytes_up - second.bytes_up == 4 * 128 * owned + counts


def test_training_moves_the_keys_and_personalisations_and_server_rules_stack():
    run = tip_run("tip-adapter-f+ditto+fedavgm", rounds=2, lr=0.01)
    state = final_state(run)
    metrics, _ = evaluate(run, state)
    assert metrics["personal_mean_client_accuracy"] >= 0
    assert (state.weights[KEYS] - state.server["tip-adapter-f"][KEYS]).abs().max() > 1e-3
