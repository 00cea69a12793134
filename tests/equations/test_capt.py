"""CAPT as released: the equations of the method's docstring, by hand."""

from math import exp, log, sqrt

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fedbench.core.method.tasks import AggregationTask
from fedbench.core.types import Model, Update
from fedbench.models.prompts.context import prompt_tower, random_context
from fedbench.rounds.loop import rounds, start, train_round
from fedbench.rounds.messages import broadcast
from fedbench.testing import final_state, tiny_backbone, tiny_dataset, tiny_spec
from fedbench.toolkit.losses import adjusted, mean_cross_entropy
from fedbench_methods.capt import (
    ARMS,
    CAPT,
    GENERAL,
    OF_CLASS,
    CaptParams,
    class_loss,
    general_loss,
)
from fedbench_methods.shared.bandit import draw, earned, index, points
from fedbench_methods.shared.clients import drawn_order
from fedbench_methods.shared.clustering import class_shares, complementary_groups, means_inside
from fedbench_methods.shared.prompted_clip import coupling
from tests.equations.kit import generator, run_of

NAMES = tiny_dataset().classnames


def capt_run(params=None, scenario=None, **training):
    return run_of("capt", {"capt": {"vl_align": False, **(params or {})}}, scenario=scenario, **training)


# the three losses


def test_the_general_loss_is_a_softmax_over_the_batch_and_has_no_labels():
    images, tokens = torch.eye(2), torch.tensor([[3.0, 0.0]])
    # cosines 1 and 0 at T = 1/2: -(log softmax)_1 and _2 of (2, 0) are log(1 + e^-2) and 2 more
    wanted = (log(1 + exp(-2)) + log(1 + exp(2))) / 2
    assert general_loss(images, tokens, 0.5).item() == pytest.approx(wanted)
    # of two tokens alike every entry is there twice
    assert general_loss(images, tokens.repeat(2, 1), 0.5).item() == pytest.approx(wanted + log(2))


def test_the_class_loss_normalises_tokens_and_not_their_mean():
    tokens = torch.tensor([[[3.0, 0.0], [0.0, 4.0]], [[0.0, 2.0], [0.0, 1.0]]])
    # means (1/2, 1/2) and (0, 1): o = (1, 0) at T = 1/2, with log pi: odds of class 0 are 3 e
    found = class_loss(torch.tensor([[1.0, 0.0]]), tokens, torch.tensor([1]), torch.tensor([0.75, 0.25]), 0.5)
    assert found.item() == pytest.approx(log(1 + 3 * exp(1)))


def test_the_main_loss_adjusts_by_the_prior():
    found = mean_cross_entropy(adjusted(torch.tensor([[2.0, 0.0]]), torch.tensor([0.8, 0.2])), torch.tensor([1]))
    assert found.item() == pytest.approx(log(1 + 4 * exp(2)))
    logits = torch.randn(6, 4, generator=generator())
    labels = torch.tensor([0, 1, 1, 3, 2, 0])
    found = mean_cross_entropy(adjusted(logits, torch.full((4,), 0.25)), labels)
    torch.testing.assert_close(found, cross_entropy(logits, labels))


def test_other_classes_tokens_have_a_gradient_too():
    tokens = torch.eye(2)[:, None].clone().requires_grad_()
    class_loss(torch.tensor([[0.6, 0.8]]), tokens, torch.tensor([1]), torch.tensor([0.5, 0.5]), 1.0).backward()
    assert tokens.grad[0].abs().max() > 0 and tokens.grad[1].abs().max() > 0


@pytest.mark.parametrize(
    "params", [{}, {"general_loss": 0.0}, {"class_loss": 0.3}, {"main": "plain"}, {"main": "off", "class_loss": 2.0}]
)
def test_the_local_loss_is_the_sum_on_one_text_a_class(make_step, params):
    run, clip = capt_run(params), tiny_backbone("clip:embedded")
    labels, prior = torch.tensor([0, 1, 1, 3, 2]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    inputs, weights = run.train.read(torch.arange(5)), run.model.weights
    step = make_step(
        run.model,
        inputs,
        labels.tolist(),
        method="capt",
        params={"capt": params},
        payload={"prior": prior},
        num_classes=4,
    )
    images = normalize(inputs, dim=1)
    # of the embedded CLIP tokens are narrower than features
    tokens = [clip.text.project(weights[name]) for name in (GENERAL, OF_CLASS)]
    texts = prompt_tower(clip, NAMES, 4).encode(weights[GENERAL], weights[OF_CLASS])
    logits = clip.logit_scale * images @ texts.T
    wanted = params.get("general_loss", 1) * general_loss(images, tokens[0], 0.1)
    wanted = wanted + params.get("class_loss", 1) * class_loss(images, tokens[1], labels, prior, 0.1)
    if (main := params.get("main")) != "off":
        wanted = wanted + cross_entropy(logits + (0 if main else prior.log()), labels)
    found = CAPT(CaptParams(vl_align=False, **params)).local_loss(step)
    assert found.item() == pytest.approx(wanted.item(), abs=1e-4)


def test_one_token_stands_behind_the_patches():
    run = run_of("capt")
    shapes = {name: tuple(value.shape) for name, value in run.model.weights.items()}
    width = coupling(64, shapes["coupling.bias"][0], 0)["coupling.weight"].shape
    assert shapes[GENERAL] == (1, 64) and shapes[OF_CLASS] == (4, 3, 64) and shapes["coupling.weight"] == tuple(width)


# clusters and the global mean


def test_clients_that_complement_each_other_are_together():
    shares = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    found = complementary_groups(shares, 2)
    # each has one client of either class
    assert len(set(found)) == 2 and found[0] != found[1] and found[2] != found[3]
    assert complementary_groups(shares[:1], 4) == [0]
    # nobody complements anybody
    assert len(complementary_groups(shares[:2], 1)) == 2


def test_head_and_tail_are_no_matter_to_complementarity():
    one, other = class_shares(torch.tensor([[5, 3, 2], [1, 0, 9]]))
    head, tail = [0, 1], [2]
    summed = sum((one[part] * (1 - other[part])).sum() for part in (head, tail))
    torch.testing.assert_close(summed, 1 - one @ other)


def test_means_inside_clusters_by_hand():
    found = means_inside([torch.tensor([2.0]), torch.tensor([4.0]), torch.tensor([9.0])], [1, 1, 0])
    assert [value.item() for value in found] == [3.0, 3.0, 9.0]


def aggregate(params, counts, general, of_class, sizes, round=1, old=(0.0, 0.0)):
    """The server's answer to clients 0, 1, .. with scalars as prompts: general (n,), of_class (n, K)."""
    weights = {GENERAL: torch.full((1, 1), old[0]), OF_CLASS: torch.full((len(counts[0]), 1, 1), old[1])}
    updates = tuple(
        Update(i, {GENERAL: torch.tensor([[g]]), OF_CLASS: torch.tensor(c)[:, None, None]}, {}, n)
        for i, (g, c, n) in enumerate(zip(general, of_class, sizes, strict=True))
    )
    spec = tiny_spec("capt")
    counts = torch.tensor(counts)
    state = {"capt": {"counts": counts, "prior": counts.sum(0) / counts.sum()}}
    task = AggregationTask(round, weights, {}, updates, Model(weights, lambda *_: None), spec, state)
    found = CAPT(CaptParams(**params)).aggregate(task)
    return found[GENERAL].item(), found[OF_CLASS].flatten().tolist(), state["capt"]


def test_a_class_prompt_is_the_plain_mean_over_clients_with_more_than_a_tenth_of_it():
    counts = [[18, 1, 1], [10, 10, 0], [2, 18, 0]]
    values = [[1.0, 2.0, 3.0], [5.0, 6.0, 7.0], [9.0, 10.0, 11.0]]
    general, of_class, _ = aggregate({"clustering": False}, counts, [1.0, 2.0, 6.0], values, [1, 1, 2], old=(0.0, -4.0))
    # the third client has a tenth of class 0, which is not more; of class 2 nobody has enough
    assert of_class == [3.0, 8.0, -4.0]
    # by samples
    assert general == pytest.approx((1 + 2 + 2 * 6) / 4)


def test_clusters_replace_what_a_client_sent_before_the_mean():
    # like clients are 0 and 1, 2 and 3; 1 - <p_i, p_j> pairs 1 with 2 (1), then 0 with 3 (0.88; 0 with {1, 2} 0.1)
    counts = [[18, 2], [20, 0], [0, 20], [1, 19]]
    values = [[1.0, 0.0], [3.0, 0.0], [0.0, 5.0], [0.0, 7.0]]
    general, of_class, _ = aggregate({"clusters": 2}, counts, [1.0, 2.0, 3.0, 4.0], values, [1, 3, 1, 3])
    # of like clients the means are 2 and 6; of complementary ones 2.5 and 2.5
    assert of_class == [2.0, 6.0]
    assert general == 2.5
    general, _, _ = aggregate({"clusters": 2}, counts, [1.0, 2.0, 6.0, 4.0], values, [1, 3, 1, 3])
    assert general == (1 * 2.5 + 3 * 4 + 1 * 4 + 3 * 2.5) / 8


def test_between_global_means_one_model_goes_on_and_the_servers_stays():
    run = capt_run({"period": 2}, rounds=3)
    state = run.initial_state()
    start(run, state)
    first, _ = train_round(run, state)
    assert not torch.equal(first.weights[GENERAL], state.weights[GENERAL])
    assert not any(name.startswith("going.") for name in first.server["capt"])
    second, record = train_round(run, first)
    assert all(torch.equal(second.weights[name], first.weights[name]) for name in first.weights)
    going = broadcast(run, second, drawn_order(record.cohort, 2, run.spec.seed)[0]).weights
    assert not torch.equal(going[GENERAL], second.weights[GENERAL])
    third, _ = train_round(run, second)
    assert not torch.equal(third.weights[GENERAL], second.weights[GENERAL])
    assert not any(name.startswith("going.") for name in third.server["capt"])


def test_the_last_client_in_turn_is_the_one_that_goes_on():
    counts, values = [[20, 0], [20, 0]], [[1.0, 0.0], [3.0, 0.0]]
    general, of_class, state = aggregate({"period": 2}, counts, [1.0, 2.0], values, [1, 1], round=2, old=(0.5, 0.25))
    assert (general, of_class) == (0.5, [0.25, 0.25])
    last = drawn_order((0, 1), 2, tiny_spec("capt").seed)[-1]
    assert state[f"going.{GENERAL}"].item() == (1.0, 2.0)[last]


def test_out_of_turn_every_round_ends_in_a_mean_and_clients_start_alike():
    run = capt_run({"in_turn": False, "clustering": False}, rounds=2)
    before = None
    for state, _, _ in rounds(run, run.initial_state()):
        assert before is None or not torch.equal(state.weights[GENERAL], before)
        before = state.weights[GENERAL]
        sent = [broadcast(run, state, client).weights[GENERAL] for client in (0, 1)]
        assert torch.equal(sent[0], sent[1]) and torch.equal(sent[0], before)
    assert "in turn" not in run.executor.description
    other = capt_run({"clustering": False}, rounds=2)
    assert not torch.equal(before, final_state(other).weights[GENERAL])
    assert other.executor.description == "sequential: clients train in turn"


# the bandit


def test_the_index_by_hand():
    found = index(torch.tensor([6.0, 1.0]).double(), torch.tensor([3.0, 1.0]).double())
    bonus = 2 * log(5)
    wanted = [6 / 3.00001 + sqrt(bonus / 3.00001), 1 / 1.00001 + sqrt(bonus / 1.00001)]
    torch.testing.assert_close(found, torch.tensor(wanted).double())


def test_arms_are_tried_in_turn_then_the_best_with_a_tenth_of_chance():
    zero = torch.zeros(3).double()
    drawn = draw(zero, zero, 4000, generator())
    # of equal ones the first; of the tenth that is drawn two thirds are others
    assert 1 - drawn.count(0) / 4000 == pytest.approx(0.1 * 2 / 3, abs=0.02)
    assert draw(zero, torch.tensor([4.0, 0.0, 0.0]).double(), 1, generator(1)) == [1]


def test_a_reward_by_hand():
    assert points([50.0, 60.0], 40.0) == pytest.approx(0.6 * 60 + 0.3 * 40)
    assert points([1.0, 50.0, 52.0, 54.0, 56.0, 60.0], 40.0) == pytest.approx(36 + 12 + 0.1 * 10 / 5)


def test_each_of_the_drawn_arms_earns_at_a_falling_rate():
    found = earned(torch.tensor([2.0, 0.0]).double(), torch.tensor([1.0, 0.0]).double(), [1, 1, 0], 10.0, 2)
    rate = 0.095
    first = rate * 10
    wanted = [2 + rate * 8, first + rate * (10 - first)]
    torch.testing.assert_close(found["values"], torch.tensor(wanted).double())
    assert found["plays"].tolist() == [2, 2]


def test_the_bandit_is_rewarded_by_the_servers_samples_in_rounds_with_a_mean():
    run = capt_run({"scheduler": "bandit"}, {"server_samples": 2, "server_labels": "visible"}, rounds=4)
    plays, changed = [], []
    before = run.initial_state()
    start(run, before)
    for _ in range(4):
        after, _ = train_round(run, before)
        plays.append(int(after.server["capt"]["plays"].sum()))
        changed.append(not torch.equal(after.weights[GENERAL], before.weights[GENERAL]))
        before = after
    # round 1 always has a mean; four plays a mean
    assert changed[0] and plays == [4 * sum(changed[: i + 1]) for i in range(4)]
    scores = before.server["capt"]["accuracies"]
    assert len(scores) == sum(changed) and bool(((scores * 8 / 100) % 1 == 0).all()), "of 8 samples"
    assert len(ARMS) == len(before.server["capt"]["values"])


def test_prompts_are_drawn_from_a_normal_distribution_of_two_hundredths():
    run = capt_run()
    assert torch.equal(run.model.weights[GENERAL], random_context(run.spec.seed, "context", 1, 64))
    assert run.model.weights[OF_CLASS].std().item() == pytest.approx(0.02, rel=0.2)


def test_a_lost_last_client_leaves_the_one_before_it_to_go_on():
    counts, values = [[20, 0], [20, 0]], [[1.0, 0.0], [3.0, 0.0]]
    _, _, state = aggregate({"period": 2}, counts[:1], [1.0], values[:1], [1], round=2)
    assert state[f"going.{GENERAL}"].item() == 1.0
