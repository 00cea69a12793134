"""BalanceFL: Shuai et al. 2022: balanced classes, and what the received model knows of absent ones."""

import math

import pytest
import torch

from fedbench.core.types import LinearHead, Model, Outputs
from fedbench.testing import digest, final_state
from fedbench_methods.balancefl import BalanceFL, BalanceFLParams, deviations, inherited, log_shares, sample_weights
from tests.equations.kit import run_of

LN2 = math.log(2)


def headed(tensors, inputs, training):
    return Outputs(2.0 * (inputs @ tensors["w"].T + tensors["b"]), inputs)


def model(weight=None):
    weight = torch.eye(3, 2) if weight is None else weight
    return Model({"w": weight, "b": torch.zeros(3)}, headed, head=LinearHead("w", "b", 2.0))


def loss(make_step, inputs, labels, *, now=None, **params):
    chosen = {"balanced": False, "augment": False, "lam": 0.0, "entropy": 0.0, **params}
    weights = {"w": torch.eye(3, 2) if now is None else now, "b": torch.zeros(3)}
    step = make_step(model(), torch.tensor(inputs), labels, num_classes=3, weights=weights, method="balancefl")
    return BalanceFL(BalanceFLParams(**chosen)).local_loss(step).item()


def test_softmax_is_over_the_classes_present():
    shares = log_shares(torch.tensor([[1.0, 1.0, 50.0]]), torch.tensor([True, True, False]))
    assert shares[0, :2].tolist() == pytest.approx([-LN2, -LN2])


def test_absent_classes_are_distilled_by_hand_and_none_of_them_is_nothing():
    logits, received = torch.tensor([[9.0, 0.0, 0.0]], requires_grad=True), torch.tensor([[-5.0, 2 * LN2, 0.0]])
    absent = torch.tensor([False, True, True])
    # T = 2: received (ln 2, 0) = (2/3, 1/3), ours (1/2, 1/2)
    value = inherited(logits, received, absent, 2.0)
    assert value.item() == pytest.approx(LN2)
    value.sum().backward()
    # (ours - theirs) / T: (1/2 - 2/3) / 2, no gradient to what is present
    torch.testing.assert_close(logits.grad, torch.tensor([[0.0, -1 / 12, 1 / 12]]))
    logits.grad = None
    nothing = inherited(logits, received, torch.zeros(3, dtype=torch.bool), 2.0)
    nothing.sum().backward()
    assert nothing.item() == 0 and torch.equal(logits.grad, torch.zeros(1, 3))


def test_weights_give_every_class_the_same_total():
    counts = torch.tensor([6, 2, 0])
    weights = sample_weights(torch.tensor([0] * 6 + [1] * 2), counts)
    # 8 / (2 * 6), 8 / (2 * 2)
    assert weights.tolist() == pytest.approx([2 / 3] * 6 + [2.0] * 2) and weights.mean().item() == pytest.approx(1)


def test_terms_by_hand(make_step):
    # logits 2 x: (2, 0, 0) and (0, 2, 0); class 2 is absent
    inputs, labels = [[1.0, 0.0], [0.0, 1.0]], [0, 1]
    plain = math.log(1 + math.exp(-2))
    assert loss(make_step, inputs, labels) == pytest.approx(plain)
    p = 1 / (1 + math.exp(-2))
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    # a sum over the batch, subtracted
    assert loss(make_step, inputs, labels, entropy=0.1) == pytest.approx(plain - 0.1 * 2 * entropy)
    # one absent class alone has nothing to distil
    assert loss(make_step, inputs, labels, lam=3.0) == pytest.approx(plain)
    # client 0 has class 0 alone: CE over one class is zero, received (0, 0) for the others: ln 2
    assert loss(make_step, [[1.0, 0.0]], [0], lam=3.0) == pytest.approx(3 * LN2)


def test_received_logits_are_the_target_and_current_ones_learn(make_step):
    now = torch.tensor([[1.0, 0.0], [LN2, 0.0], [0.0, 0.0]])
    # ours / T = 2 (LN2, 0) / 2: (2/3, 1/3) against (1/2, 1/2)
    value = loss(make_step, [[1.0, 0.0]], [0], now=now, lam=1.0)
    assert value == pytest.approx(-0.5 * math.log(2 / 3) - 0.5 * math.log(1 / 3))


def test_absent_from_the_client_or_from_the_batch(make_step):
    from dataclasses import replace

    from fedbench.core.types import LabelledBatch

    step = make_step(model(), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), [0, 1], num_classes=3, method="balancefl")
    half = LabelledBatch(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), torch.tensor([0]))
    chosen = {"balanced": False, "augment": False, "lam": 1.0, "entropy": 0.0}
    values = {
        absent: BalanceFL(BalanceFLParams(absent=absent, **chosen)).local_loss(replace(step, batch=half)).item()
        for absent in ("client", "batch")
    }
    # of the client class 2 alone is absent; of the batch 1 and 2, received logits (0, 0)
    assert values == pytest.approx({"client": math.log(1 + math.exp(-2)), "batch": LN2})


def test_noise_has_the_mean_within_class_covariance():
    features = torch.tensor([[0.0, 0.0], [2.0, 0.0], [4.0, 0.0], [1.0, 1.0], [1.0, 5.0], [9.0, 9.0]])
    labels, counts = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([3, 2, 1])
    rows = deviations(features, labels, counts)
    # class 0: variance 4 of the first; class 1: 8 of the second; class 2 none: (3 * 4, 2 * 8) / 6
    torch.testing.assert_close(rows.T @ rows, torch.diag(torch.tensor([2.0, 8 / 3])))


def test_only_classes_with_few_samples_are_moved(make_step):
    inputs = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    labels = [0] * 160 + [1] * 40
    step = make_step(model(), inputs, labels, num_classes=3, method="balancefl")
    moved = BalanceFL(BalanceFLParams())._augmented(step)
    changed = (moved != step.outputs.logits).any(1)
    assert not changed[:160].any() and changed[160:].float().mean().item() == pytest.approx(0.75, abs=0.15)


def test_all_off_it_is_cross_entropy_over_the_clients_classes():
    off = {"lam": 0.0, "entropy": 0.0, "balanced": False, "augment": False}
    chosen = [off, {}, {**off, "lam": 1.0, "absent": "batch"}]
    runs = [run_of("balancefl", {"balancefl": params}, rounds=2) for params in chosen]
    assert len({digest(final_state(run)) for run in runs}) == 3
    state = final_state(runs[1])
    assert not any(kept.get("balancefl") for kept in state.clients.values()), "nothing is kept between rounds"
