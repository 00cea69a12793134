"""CAPT: Hou et al. 2025, Eqs. 1-8 as reconstructed in the method's docstring; Eqs. 5-6 are in test_clustering.py."""

from dataclasses import replace
from math import exp, log, sqrt

import pytest
import torch
from torch.nn.functional import cross_entropy, linear, normalize

from fedbench.core.errors import FedbenchError
from fedbench.core.method.tasks import AggregationTask, BroadcastTask, StartTask
from fedbench.core.randomness import torch_generator
from fedbench.core.types import ClientReport, Model, Update
from fedbench.models.prompts.context import prompt_tower, random_context
from fedbench.models.prompts.image_tokens import encode_with_tokens, require_vision_transformer
from fedbench.rounds.loop import rounds, start
from fedbench.testing import final_state, tiny_backbone, tiny_dataset, tiny_run
from fedbench.toolkit.fedavg import average
from fedbench.toolkit.local_training import batch_table
from fedbench_methods.capt_reconstructed import ARMS, CaptReconstructed, ReconstructedParams, class_aware_loss
from fedbench_methods.shared.bandit import Pace, choose, mean_loss, reward, updated
from fedbench_methods.shared.clustering import complementary_clients, head_and_tail
from fedbench_methods.shared.prompted_clip import coupling
from tests.equations.kit import CLIP, generator, run_of, spec_of, task_of

NAME, NAMES = "capt-reconstructed", tiny_dataset().classnames


def capt_spec(params=None, **training):
    return spec_of(NAME, {NAME: params or {}}, **training)


def capt_run(params=None, **training):
    return tiny_run(capt_spec({"vl_align": False, **(params or {})}, **training))


# the local loss


def test_class_aware_loss_by_hand():
    images, texts = torch.tensor([[1.0, 0.0]]), torch.eye(2)
    # s = 2, pi = (.8, .2), y = 1: logits 2 + ln .8 and 0 + ln .2; L = ln(1 + e^2 .8 / .2)
    got = class_aware_loss(images, texts, torch.tensor([1]), torch.tensor([0.8, 0.2]), 2.0)
    assert got.item() == pytest.approx(log(1 + 4 * exp(2)))


def test_class_that_nobody_has_is_left_out():
    images, texts = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    got = class_aware_loss(images, texts, torch.tensor([1]), torch.tensor([0.8, 0.2, 0.0]), 2.0)
    assert got.item() == pytest.approx(log(1 + 4 * exp(2)))


def test_with_a_uniform_prior_the_class_aware_loss_is_cross_entropy():
    images, texts = (normalize(torch.randn(n, 5, generator=generator(n))) for n in (6, 4))
    labels = torch.tensor([0, 1, 1, 3, 2, 0])
    got = class_aware_loss(images, texts, labels, torch.full((4,), 0.25), 7.0)
    assert got.item() == pytest.approx(cross_entropy(7 * images @ texts.T, labels).item(), abs=1e-5)


def test_a_sample_moves_the_text_of_its_own_class_only_and_by_how_much():
    images, texts = torch.tensor([[1.0, 0.0]]), torch.eye(2).requires_grad_()
    class_aware_loss(images, texts, torch.tensor([1]), torch.tensor([0.8, 0.2]), 2.0).backward()
    # dL/dt_1 = s (p_1 - 1) f with p_1 = 1 / (1 + 4 e^2); t_0 is stopped
    pull = 2 * (1 / (1 + 4 * exp(2)) - 1)
    torch.testing.assert_close(texts.grad, torch.tensor([[0.0, 0.0], [pull, 0.0]]))


def test_images_have_the_whole_gradient():
    # the stop is on texts: dL/df = s sum_k (p_k - 1[k = y]) t_k
    images, texts = torch.tensor([[1.0, 0.0]], requires_grad=True), torch.eye(2)
    class_aware_loss(images, texts, torch.tensor([1]), torch.tensor([0.8, 0.2]), 2.0).backward()
    other = 4 * exp(2) / (1 + 4 * exp(2))
    torch.testing.assert_close(images.grad, torch.tensor([[2 * other, -2 * other]]))


def local_step(make_step, run, labels, prior, params=None, weights=None):
    inputs = run.train.read(torch.arange(len(labels)))
    return make_step(
        run.model,
        inputs,
        labels,
        weights=weights,
        method=NAME,
        params={NAME: params or {}},
        payload={"prior": torch.tensor(prior)},
        num_classes=4,
    )


@pytest.mark.parametrize("params", [{"loss_on": "parts"}, {}])
def test_local_loss_is_general_plus_lambda_times_class_aware(make_step, params):
    run, clip = capt_run(params), tiny_backbone("clip:embedded")
    prior, labels = [0.4, 0.3, 0.2, 0.1], [0, 1, 1, 3, 2]
    weights, tower = run.model.weights, prompt_tower(clip, NAMES, 4)
    images = normalize(run.train.read(torch.arange(5)), dim=-1)
    general = cross_entropy(clip.logit_scale * images @ tower.encode(weights["prompt.general"]).T, torch.tensor(labels))
    if params:
        texts = tower.encode(weights["prompt.class"])
    else:
        both = prompt_tower(clip, NAMES, 8)
        texts = both.encode(weights["prompt.general"], weights["prompt.class"])
    aware = cross_entropy(clip.logit_scale * images @ texts.T + torch.tensor(prior).log(), torch.tensor(labels))
    step = local_step(make_step, run, labels, prior)
    for balance in (1.0, 0.3):
        method = CaptReconstructed(ReconstructedParams(vl_align=False, balance=balance, **params))
        assert method.local_loss(step).item() == pytest.approx((general + balance * aware).item(), abs=1e-5)


def test_prior_is_the_one_the_server_sent(make_step):
    run, method = capt_run(), CaptReconstructed(ReconstructedParams(vl_align=False))
    losses = [
        method.local_loss(local_step(make_step, run, [0, 1, 1], prior)).item()
        for prior in ([0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1])
    ]
    assert abs(losses[0] - losses[1]) > 0.1


def test_a_batch_of_one_class_leaves_all_other_class_prompts_without_gradient(make_step):
    run = capt_run()
    weights = {name: value.clone().requires_grad_() for name, value in run.model.weights.items()}
    step = local_step(make_step, run, [2, 2, 2], [0.4, 0.3, 0.2, 0.1], weights=weights)
    CaptReconstructed(ReconstructedParams(vl_align=False)).local_loss(step).backward()
    gradient = weights["prompt.class"].grad
    assert torch.equal(gradient[[0, 1, 3]], torch.zeros(3, 4, 64))
    assert gradient[2].abs().max() > 0 and weights["prompt.general"].grad.abs().max() > 0


def test_prediction_is_by_the_integrated_prompt():
    run, clip = capt_run(), tiny_backbone("clip:embedded")
    weights = {"prompt.general": random_context(1, "g", 4, 64), "prompt.class": random_context(1, "c", 4, 4, 64)}
    inputs = run.test.read(torch.arange(8))
    context = torch.cat([weights["prompt.general"].expand(4, -1, -1), weights["prompt.class"]], dim=1)
    texts = prompt_tower(clip, NAMES, 8).encode(context)
    expected = clip.logit_scale * normalize(inputs, dim=-1) @ texts.T
    got = run.model.forward(weights, inputs, False).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_coupled_image_tokens_are_a_linear_map_of_the_general_prompt():
    run, clip = tiny_run(capt_spec()), tiny_backbone("clip:embedded")
    weights, inputs = run.model.weights, run.test.read(torch.arange(4))
    assert inputs.shape[1:] == (3, 32, 32)
    tokens = weights["prompt.general"] @ weights["coupling.weight"].T + weights["coupling.bias"]
    assert tokens.shape == (4, 192)
    expected = normalize(encode_with_tokens(require_vision_transformer(clip, "test"), inputs, tokens), dim=-1)
    got = run.model.forward(weights, inputs, False).features
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    plain = normalize(clip.module.encode_image(inputs), dim=-1)
    assert (got - plain).abs().max() > 1e-3


def test_a_step_encodes_the_images_once_and_trains_the_coupling(make_step):
    run, clip, passes = tiny_run(capt_spec()), tiny_backbone("clip:embedded"), []
    weights = {name: value.clone().requires_grad_() for name, value in run.model.weights.items()}
    step = local_step(make_step, run, [0, 1, 2], [0.25] * 4, weights=weights)
    handle = clip.module.visual.ln_pre.register_forward_pre_hook(lambda *_: passes.append(1))
    CaptReconstructed(ReconstructedParams()).local_loss(step).backward()
    handle.remove()
    assert len(passes) == 1
    assert all(value.grad.abs().max() > 0 for value in weights.values())
    assert all(p.grad is None for p in clip.module.parameters())


# against PromptFL


@pytest.mark.parametrize("prompts", ["general", "both"])
def test_general_prompt_alone_is_promptfl_round_by_round(prompts):
    common = {"rounds": 3, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.0}
    params = {"prompts": prompts, "balance": 0.0, "similar_clusters": 1, "complementary_clusters": 1}
    ours = capt_run({**params, "scheduler": "fixed"}, **common)
    theirs = run_of("promptfl", {"promptfl": {"context_length": 4}}, **common)
    for (mine, *_), (other, *_) in zip(
        rounds(ours, ours.initial_state()), rounds(theirs, theirs.initial_state()), strict=True
    ):
        assert torch.equal(mine.weights["prompt.general"], other.weights["prompt.context"])
    assert not torch.equal(other.weights["prompt.context"], theirs.model.weights["prompt.context"])


def test_without_clusters_and_bandit_every_prompt_is_the_plain_average():
    run = capt_run({"clustering": False, "scheduler": "fixed"}, lr=0.05, rounds=2)
    state = final_state(run, until=1)
    server = state.server[NAME]
    assert server["prompt.general"].shape[0] == server["prompt.class"].shape[0] == 1
    updates = []
    for client in (0, 2, 3):
        weights = {n: v + torch.randn(v.shape, generator=generator(client)) for n, v in state.weights.items()}
        size = len(run.federation.clients[client].indices)
        updates.append(Update(client, weights, {}, size, metrics={"train_loss": 1.0}))
    task = AggregationTask(2, state.weights, {}, tuple(updates), run.model, run.spec, state.server)
    got = CaptReconstructed(ReconstructedParams(vl_align=False, clustering=False, scheduler="fixed")).aggregate(task)
    expected = average(task)
    assert set(got) == set(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert torch.equal(task.state[NAME]["prompt.class"][0], expected["prompt.class"])


# the server


def server_state(method, counts, weights, *, seed=0):
    reports = tuple(ClientReport(i, int(row.sum()), row) for i, row in enumerate(counts))
    state = {}
    spec = capt_spec(seed=seed)
    model = Model(weights=weights, forward=None)
    sent = method.start(StartTask(reports, model, spec, state))
    return state, sent, spec, model


SIX = torch.tensor([[9, 1, 0], [0, 1, 8], [8, 2, 0], [1, 0, 9], [9, 0, 1], [0, 2, 9]])
PROMPTS = {"prompt.general": torch.zeros(1, 1), "prompt.class": torch.zeros(3, 1, 1)}


def test_start_sends_counts_up_and_makes_prior_and_clusters():
    method = CaptReconstructed(ReconstructedParams(vl_align=False, similar_clusters=2, complementary_clusters=2))
    state, sent, *_ = server_state(method, SIX, PROMPTS)
    assert torch.equal(sent["class_counts"], SIX)
    # 27 + 6 + 27 = 60 samples
    torch.testing.assert_close(state[NAME]["prior"], torch.tensor([0.45, 0.1, 0.45]))
    assert state[NAME]["prompt.class.clusters"].tolist() == [0, 1, 0, 1, 0, 1]
    # 27, 27 and 6 reach 45, 90 and 100 %: class 0 is head, class 1 tail with shares .1 1/9 .2 0 0 2/11, falling
    # 2 5 1 0 3 4, by 0 1 1 0 0 1
    assert state[NAME]["prompt.general.clusters"].tolist() == [0, 1, 0, 0, 1, 1]
    assert state[NAME]["prompt.general"].shape == (2, 1, 1)
    assert state[NAME]["prompt.class"].shape == (2, 3, 1, 1)


# 36, 15 and 9 of 60 reach 60, 85 and 100 %: head 0, tail 2
TAILED = torch.tensor([[9, 1, 0], [3, 4, 3], [8, 2, 0], [3, 3, 4], [9, 1, 0], [4, 4, 2]])


def test_tail_of_what_is_reported_decides_who_is_with_whom():
    method = CaptReconstructed(ReconstructedParams(vl_align=False, complementary_clusters=2))
    state, *_ = server_state(method, TAILED, PROMPTS)
    # shares of class 2: 0, .3, 0, .4, 0, .2; falling 3 1 5 0 2 4, by 0 1 1 0 0 1
    assert state[NAME]["prompt.general.clusters"].tolist() == [0, 1, 0, 0, 1, 1]


def test_literal_heterogeneity_clusters_gather_clients_of_like_tail():
    method = CaptReconstructed(ReconstructedParams(vl_align=False, complementary_clusters=2, het_cluster="literal"))
    state, *_ = server_state(method, TAILED, PROMPTS)
    assert state[NAME]["prompt.general.clusters"].tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("factor", "scenario"), [(2.0, {"groups": "shots"}), (10.0, {"server_samples": 6}), (10.0, {"validation": 0.3})]
)
def test_clusters_follow_from_what_clients_report_whatever_groups_are_scored(factor, scenario):
    run = run_of(NAME, scenario={"imbalance": "exponential", "imbalance_factor": factor, **scenario}, backbone=CLIP)
    state = run.initial_state()
    start(run, state)
    reported = torch.stack([run.federation.class_counts(client) for client in range(4)])
    scored = tuple(run.federation.groups.get(name, ()) for name in ("head", "tail"))
    assert head_and_tail(reported.sum(dim=0)) != scored and run.federation.groups
    wanted = complementary_clients(reported, 3, None, seed=0)
    assert torch.equal(state.server[NAME]["prompt.general.clusters"], wanted)


def test_hidden_labels_are_refused():
    reports = (ClientReport(0, 5, None),)
    task = StartTask(reports, Model(weights=PROMPTS, forward=None), capt_spec(), {})
    with pytest.raises(FedbenchError, match="label"):
        CaptReconstructed(ReconstructedParams()).start(task)


def test_a_client_receives_the_prompts_of_its_clusters_the_coupling_and_the_prior():
    method = CaptReconstructed(ReconstructedParams(similar_clusters=2, complementary_clusters=2))
    state, _, spec, _ = server_state(method, SIX, PROMPTS)
    inside = state[NAME]
    inside["prompt.general"], inside["prompt.class"] = (
        torch.tensor([[[1.0]], [[2.0]]]),
        torch.arange(6.0).reshape(2, 3, 1, 1),
    )
    weights = {**PROMPTS, "coupling.weight": torch.ones(2, 1), "coupling.bias": torch.zeros(2)}
    sent = [method.broadcast(BroadcastTask(c, 1, 0, weights, spec, state)) for c in range(2)]
    # client 0 is in clusters (0, 0), client 1 in (1, 1)
    assert [s.weights["prompt.general"].item() for s in sent] == [1.0, 2.0]
    assert [s.weights["prompt.class"].flatten().tolist() for s in sent] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert all(torch.equal(s.weights["coupling.weight"], torch.ones(2, 1)) for s in sent)
    assert torch.equal(sent[0].payload["prior"], inside["prior"])


def update(client, general, by_class, samples=10, loss=1.0):
    weights = {"prompt.general": torch.full((1, 1), general), "prompt.class": torch.tensor(by_class).reshape(3, 1, 1)}
    return Update(client, weights, {}, samples, metrics={"train_loss": loss})


def aggregated(method, updates, *, exchange=0, exchanges=1, arm=0):
    state, _, spec, model = server_state(method, SIX, PROMPTS)
    state[NAME]["arm"] = torch.tensor(arm)
    task = AggregationTask(1, PROMPTS, {}, updates, model, spec, state, exchange, exchanges)
    return method.aggregate(task), state[NAME]


def test_prompts_are_averaged_inside_clusters_and_these_by_all_their_samples():
    method = CaptReconstructed(ReconstructedParams(vl_align=False, similar_clusters=2, complementary_clusters=2))
    updates = (update(0, 1.0, [1.0, 2.0, 3.0]), update(1, 5.0, [4.0, 4.0, 4.0]), update(3, 3.0, [8.0, 8.0, 8.0]))
    # (2, 5) is one arm: 2 exchanges, a global mean every 5 rounds; so clusters stay apart here
    weights, state = aggregated(method, updates, arm=ARMS.index((2, 5)))
    # P_g: clusters {0, 2, 3} and {1, 4, 5}; clients 0 and 3 of 10 samples: 2; client 1: 5
    assert state["prompt.general"].flatten().tolist() == [2.0, 5.0]
    # all clients' samples 10 9 10 10 10 11: 30 and 30
    assert weights["prompt.general"].item() == 3.5
    # P_c: clusters {0, 2, 4} and {1, 3, 5}; clients 1 (9 samples) and 3 (10): (9*4 + 10*8) / 19
    torch.testing.assert_close(state["prompt.class"][1].flatten(), torch.full((3,), 116 / 19))
    assert state["prompt.class"][0].flatten().tolist() == [1.0, 2.0, 3.0]
    torch.testing.assert_close(
        weights["prompt.class"].flatten(), torch.tensor([0.5 * (k + 116 / 19) for k in (1, 2, 3)])
    )


def test_a_cluster_without_participants_keeps_its_prompts():
    method = CaptReconstructed(ReconstructedParams(vl_align=False, similar_clusters=2, complementary_clusters=2))
    weights, state = aggregated(method, (update(0, 1.0, [1.0, 2.0, 3.0]),), arm=ARMS.index((1, 5)))
    assert state["prompt.general"].flatten().tolist() == [1.0, 0.0]
    assert state["prompt.class"][1].flatten().tolist() == [0.0, 0.0, 0.0]
    assert weights["prompt.general"].item() == 0.5


def test_class_counts_as_weights_let_only_owners_of_a_class_speak():
    method = CaptReconstructed(
        ReconstructedParams(
            vl_align=False, similar_clusters=2, complementary_clusters=2, class_weighting="class_counts"
        )
    )
    updates = (update(0, 1.0, [1.0, 1.0, 1.0]), update(4, 1.0, [5.0, 5.0, 5.0]))
    _, state = aggregated(method, updates, arm=ARMS.index((1, 5)))
    # client 0 has (9, 1, 0), client 4 (9, 0, 1): class 0 their mean 3, class 1 client 0's, class 2 client 4's
    assert state["prompt.class"][0].flatten().tolist() == [3.0, 1.0, 5.0]


def test_at_a_global_mean_all_clusters_take_it_over_and_not_before_the_last_exchange():
    method = CaptReconstructed(ReconstructedParams(vl_align=False, similar_clusters=2, complementary_clusters=2))
    updates = (update(0, 1.0, [1.0, 2.0, 3.0]), update(1, 5.0, [4.0, 4.0, 4.0]))
    arm = ARMS.index((2, 1))
    weights, state = aggregated(method, updates, exchange=0, exchanges=2, arm=arm)
    assert state["prompt.general"].flatten().tolist() == [1.0, 5.0] and int(state["plays"].sum()) == 0
    weights, state = aggregated(method, updates, exchange=1, exchanges=2, arm=arm)
    assert weights["prompt.general"].item() == 3.0
    assert state["prompt.general"].flatten().tolist() == [3.0, 3.0] and int(state["plays"].sum()) == 1
    assert torch.equal(state["prompt.class"][0], weights["prompt.class"])
    assert torch.equal(state["prompt.class"][1], weights["prompt.class"])


def test_received_and_stored_tensors_are_left_alone():
    method = CaptReconstructed(ReconstructedParams(vl_align=False, similar_clusters=2, complementary_clusters=2))
    state, _, spec, model = server_state(method, SIX, PROMPTS)
    before = {name: (value, value.clone()) for name, value in state[NAME].items()}
    method.aggregate(AggregationTask(1, PROMPTS, {}, (update(0, 1.0, [1.0] * 3),), model, spec, state))
    assert all(torch.equal(*pair) for pair in before.values())
    assert torch.equal(PROMPTS["prompt.general"], torch.zeros(1, 1))


def test_rounds_have_as_many_exchanges_as_the_arm_says_and_each_is_paid_for():
    run = capt_run(rounds=1)
    method, state = CaptReconstructed(ReconstructedParams()), {NAME: {"arm": torch.tensor(ARMS.index((3, 2)))}}
    assert method.exchanges(1, run.spec, state) == 3
    # with epsilon = 1 the first arm is drawn: one of more than one exchange for one of these seeds
    exchanges = 1
    for seed in range(20):
        spec = capt_spec({"vl_align": False, "epsilon": 1.0}, rounds=1, seed=seed)
        run = tiny_run(spec)
        state = run.initial_state()
        start(run, state)
        exchanges = method.exchanges(1, spec, state.server)
        if exchanges > 1:
            break
    assert exchanges > 1
    record = list(rounds(run, run.initial_state()))[-1][1]
    model = 4 * (4 * 64 + 4 * 4 * 64)
    assert record.bytes_up == exchanges * 2 * model
    assert record.bytes_down == exchanges * 2 * (model + 4 * 4)  # the prior of 4 classes goes down, too


# the bandit


def test_an_arm_is_worth_the_mean_of_what_it_earned():
    values, plays = torch.tensor([0.5, 0.2], dtype=torch.float64), torch.tensor([3, 1])
    # arm 0, played a fourth time, earns 0.1: 0.5 + (0.1 - 0.5) / 4 = 0.4
    moved, played = updated(values, plays, 0, 0.1)
    torch.testing.assert_close(moved, torch.tensor([0.4, 0.2], dtype=torch.float64))
    assert played.tolist() == [4, 1] and values.tolist() == [0.5, 0.2] and plays.tolist() == [3, 1]


def test_choice_is_the_best_value_plus_a_bonus_for_rarely_played_arms():
    values, plays = torch.tensor([0.5, 0.2], dtype=torch.float64), torch.tensor([3, 0])
    # t = 3: sqrt(ln 4 / 4) = .5887, sqrt(ln 4 / 1) = 1.1774; arm 1 wins when c > .3 / .5887 = .5096
    assert sqrt(log(4) / 4) == pytest.approx(0.5887, abs=1e-4)
    assert choose(values, plays, 0.0, 0.50, generator()) == 0
    assert choose(values, plays, 0.0, 0.52, generator()) == 1
    # of equal arms the first
    assert choose(torch.zeros(3, dtype=torch.float64), torch.zeros(3).long(), 0.0, 0.5, generator()) == 0


def test_epsilon_draws_uniformly():
    values, plays, source = torch.tensor([9.0, 0.0, 0.0]).double(), torch.ones(3).long(), generator()
    drawn = torch.bincount(torch.tensor([choose(values, plays, 0.3, 0.0, source) for _ in range(2000)]), minlength=3)
    # arm 0 in 1 - .3 * 2/3 = .8 of the cases, the others in .1 each
    torch.testing.assert_close(drawn / 2000, torch.tensor([0.8, 0.1, 0.1]), rtol=0, atol=0.03)


def test_in_the_long_run_the_better_arm_is_played():
    values, plays, source = torch.zeros(2).double(), torch.zeros(2).long(), generator()
    for _ in range(300):
        arm = choose(values, plays, 0.0, 0.5, source)
        values, plays = updated(values, plays, arm, 1.0 if arm == 1 else 0.0)
    assert plays[1] > 280 and values.tolist() == [0.0, 1.0]


def test_reward_is_the_relative_fall_of_the_loss_less_the_bytes():
    # from 2.0 to 1.5: .25; two of three exchanges at kappa .03: .02
    assert reward(2.0, 1.5, 2 / 3, 0.03) == pytest.approx(0.23)
    assert reward(2.0, 2.5, 1.0, 0.0) == pytest.approx(-0.25)
    # round 1 has nothing to fall from
    assert reward(0.0, 1.5, 1.0, 0.01) == pytest.approx(-0.01)


def test_losses_of_clients_count_by_their_samples():
    updates = [Update(c, {}, {}, n, metrics={"train_loss": v}) for c, (n, v) in enumerate([(1, 4.0), (3, 0.0)])]
    assert mean_loss(updates) == 1.0


def test_global_means_come_after_as_many_rounds_as_the_arm_says():
    pace = Pace(((1, 1), (2, 3)), epsilon=0.0, bonus=0.0, cost=0.3)
    state = {**pace.begin(generator()), "arm": torch.tensor(1)}
    assert pace.exchanges(state) == 2
    state, due = pace.end_round(state, 2.0, generator())
    assert not due and int(state["apart"]) == 1
    # two of two exchanges: -.3 for arm 1, so arm 0 is next, whose period of 1 is over
    assert state["values"].tolist() == pytest.approx([0.0, -0.3]) and int(state["arm"]) == 0
    state, due = pace.end_round(state, 1.0, generator())
    assert due and int(state["apart"]) == 0
    # the loss fell by half; one of two exchanges
    assert state["values"].tolist() == pytest.approx([0.35, -0.3]) and state["plays"].tolist() == [1, 1]
    state, due = pace.end_round({**state, "arm": torch.tensor(1), "apart": torch.tensor(2)}, 1.0, generator())
    assert due


def test_a_fixed_pace_is_one_exchange_and_a_global_mean_every_round():
    run = capt_run({"scheduler": "fixed"}, rounds=3)
    for state, record, _ in rounds(run, run.initial_state()):
        server = state.server[NAME]
        assert all(torch.equal(prompt, state.weights["prompt.general"]) for prompt in server["prompt.general"])
        assert record.round == 0 or record.bytes_up == 2 * run.info.round_bytes


def test_clusters_differ_between_global_means():
    run, apart = capt_run({"similar_clusters": 2, "complementary_clusters": 2, "epsilon": 1.0}, rounds=4), False
    for state, *_ in rounds(run, run.initial_state()):
        general = state.server[NAME]["prompt.general"]
        apart = apart or not torch.equal(general[0], general[1])
    assert apart


# sizes and settings


def test_sizes_are_those_of_the_formula():
    # ViT-B/16, M = m = 4, K = 100: M d_t + K m d_t + (d_t d_v + d_v) = 2,048 + 204,800 + 393,984
    parts = [random_context(0, "g", 4, 512), random_context(0, "c", 100, 4, 512), *coupling(512, 768, 0).values()]
    assert sum(part.numel() for part in parts) == 600_832
    # embedded: d_t = 64, d_v = 192, K = 4
    assert tiny_run(capt_spec()).info.trainable_parameters == 4 * 64 + 4 * 4 * 64 + 64 * 192 + 192
    assert capt_run().info.round_bytes == 4 * (4 * 64 + 4 * 4 * 64)


def test_label_counts_are_sent_once_before_the_first_round():
    run = capt_run()
    _, record, _ = next(iter(rounds(run, run.initial_state())))
    assert record.bytes_up == 4 * 4 * 8  # 4 clients, 4 classes, int64


def test_general_and_class_prompts_start_from_draws_of_their_own():
    weights = capt_run().model.weights
    assert not torch.equal(weights["prompt.general"], weights["prompt.class"][0])


def test_ablations_train_what_they_name():
    assert set(capt_run({"prompts": "general"}).model.weights) == {"prompt.general"}
    assert set(capt_run({"prompts": "class"}).model.weights) == {"prompt.class"}
    run = capt_run({"prompts": "class"}, lr=0.05, rounds=1)
    assert (final_state(run).weights["prompt.class"] != run.model.weights["prompt.class"]).any()
    with pytest.raises(FedbenchError, match="vl_align=off"):
        tiny_run(capt_spec({"prompts": "class"}))


def test_prompts_of_classes_that_no_participant_has_do_not_move():
    run = capt_run({"scheduler": "fixed", "clustering": False}, lr=0.05, rounds=1)
    federation = run.federation
    bird_free = tuple(
        replace(shard, indices=shard.indices[federation.train.labels[shard.indices] != 0])
        for shard in federation.clients
    )
    state = final_state(replace(run, federation=federation.with_clients(bird_free)))
    moved = (state.weights["prompt.class"] != run.model.weights["prompt.class"]).flatten(1).any(1)
    assert moved.tolist() == [False, True, True, True]


def test_whole_local_training_follows_the_equations():
    # one client's first round, replayed by hand from Eqs. 1, 2 and 4 on cached features
    run = capt_run({"scheduler": "fixed", "loss_on": "parts"}, lr=0.1, momentum=0.9, rounds=1)
    state, clip = run.initial_state(), tiny_backbone("clip:embedded")
    start(run, state)
    [update] = run.executor.train([task_of(run, 1, state=state)])
    got = update.weights
    shard = run.federation.clients[1].indices
    images, labels = normalize(run.train.read(shard), dim=-1), run.federation.train.labels[shard]
    prior = run.federation.class_counts().double() / run.federation.class_counts().sum()
    weights = {name: value.clone().requires_grad_() for name, value in run.model.weights.items()}
    optimiser = torch.optim.SGD(weights.values(), 0.1, momentum=0.9)
    tower = prompt_tower(clip, NAMES, 4, truncate=False)
    for batch in batch_table(len(shard), 1, run.spec.training.batch_size, torch_generator(0, "batches", 1, 1)):
        f, y = clip.logit_scale * images[batch], labels[batch]
        general = cross_entropy(linear(f, tower.encode(weights["prompt.general"])), y)
        texts = tower.encode(weights["prompt.class"])
        rows = []
        for sample, label in zip(f, y, strict=True):
            own = texts.detach().clone()
            own = torch.cat([own[:label], texts[label : label + 1], own[label + 1 :]])
            rows.append((prior.log() + (own @ sample).double()).log_softmax(0)[label])
        optimiser.zero_grad()
        (general - torch.stack(rows).mean()).backward()
        optimiser.step()
    for name, value in weights.items():
        assert (value - run.model.weights[name]).abs().max() > 1e-3
        torch.testing.assert_close(got[name], value.detach(), rtol=0, atol=1e-5)
