"""CCVR: Luo et al. 2021, Gaussians of features pooled over clients and a head calibrated on draws from them."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

import fedbench_methods.ccvr as ccvr
from fedbench.core.method.tasks import ReportedTask
from fedbench.core.types import LinearHead, Model, Outputs
from fedbench.models.heads import scaled_logits
from fedbench.rounds.loop import predict, rounds
from fedbench.rounds.metrics import size_in_bytes
from fedbench.testing import digest, tiny_spec
from fedbench.toolkit.heads import retrained
from fedbench_methods.ccvr import CCVR, CCVRParams, tukey, virtual_features
from fedbench_methods.shared.gaussians import (
    Gaussian,
    class_report,
    covariance,
    drawn,
    pooled,
    pooled_by_class,
    shrunk,
    symmetric,
    upper_triangle,
)
from tests.equations.kit import CLIP, FEW, all_of, end_of, few, generator, played, run_of, spec_of


def samples(counts, width=5, seed=0):
    """Features (n, d) with a correlated spread of each class's own, and labels."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    mixing = torch.randn(len(counts), width, width, generator=generator(seed))
    noise = torch.randn(len(labels), width, generator=generator(seed + 1))
    features = torch.einsum("nd,nde->ne", noise, mixing[labels]) + 3 * labels[:, None]
    return features, labels


# --- statistics of one client ---


def test_covariance_is_over_n_minus_one():
    # mean (1, 2): deviations (-1, -2), (1, 2)
    rows = torch.tensor([[0.0, 0.0], [2.0, 4.0]])
    assert covariance(rows).tolist() == [[2.0, 4.0], [4.0, 8.0]]
    assert covariance(rows[:1]).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_upper_triangle_is_sent_row_by_row_and_read_back():
    matrix = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]])
    assert upper_triangle(matrix).tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(symmetric(upper_triangle(matrix), 3), matrix)


def test_a_client_reports_its_own_classes_only_with_a_triangle_each_and_all_counts():
    features, labels = samples([4, 0, 1])
    report = class_report(features, labels, 3)
    assert report["means"].shape == (2, 5) and report["covariances"].shape == (2, 15)
    assert report["counts"].tolist() == [4, 0, 1]
    assert size_in_bytes(report) == 2 * 4 * (5 + 15) + 3 * 8
    assert torch.equal(report["means"][1], features[4]) and not report["covariances"][1].any()


def test_statistics_of_a_class_do_not_depend_on_the_classes_before_it():
    features, labels = samples([6, 7])
    both = class_report(features, labels, 2)
    alone = class_report(features[labels == 1], labels[labels == 1], 2)
    for name in ("means", "covariances"):
        assert torch.equal(both[name][1], alone[name][0])


# --- pooling ---


def test_pooling_by_hand_with_a_client_of_one_sample():
    # (0, 0), (2, 0) and (3, 3): mean (5/3, 1), deviations (-5/3, -1), (1/3, -1), (4/3, 2);
    # sums of products 42/9, 4, 6, over n - 1 = 2
    means = torch.tensor([[1.0, 0.0], [3.0, 3.0]])
    covariances = torch.tensor([[[2.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    got = pooled(means, covariances, torch.tensor([2, 1]))
    torch.testing.assert_close(got.mean, torch.tensor([5 / 3, 1.0], dtype=torch.float64))
    torch.testing.assert_close(got.covariance, torch.tensor([[7 / 3, 2.0], [2.0, 3.0]], dtype=torch.float64))


def test_pooling_is_the_papers_sum_of_three_terms():
    features, _ = samples([30])
    parts = torch.split(features, [3, 20, 7])
    means = torch.stack([part.double().mean(0) for part in parts])
    covariances = torch.stack([covariance(part) for part in parts])
    counts = torch.tensor([3, 20, 7])
    mean = (counts[:, None] * means).sum(0) / 30
    expected = -30 / 29 * torch.outer(mean, mean)
    for n, own_mean, own in zip((3, 20, 7), means, covariances, strict=True):
        expected = expected + (n - 1) / 29 * own + n / 29 * torch.outer(own_mean, own_mean)
    torch.testing.assert_close(pooled(means, covariances, counts).covariance, expected)


def test_one_client_gives_the_sample_covariance():
    features, labels = samples([9, 5])
    for label, got in pooled_by_class([class_report(features, labels, 2)]):
        rows = features[labels == label].double()
        torch.testing.assert_close(got.mean, rows.mean(0), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got.covariance, torch.cov(rows.T), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pooled_statistics_do_not_depend_on_how_samples_are_split_over_clients(seed):
    features, labels = samples([12, 3, 8])
    whole = dict(pooled_by_class([class_report(features, labels, 3)]))
    owner = torch.randint(0, 4, (len(labels),), generator=generator(seed))
    parts = [class_report(features[owner == k], labels[owner == k], 3) for k in range(4)]
    got = dict(pooled_by_class(parts))
    assert list(got) == [0, 1, 2]
    for label in got:
        torch.testing.assert_close(got[label].mean, whole[label].mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got[label].covariance, whole[label].covariance, rtol=1e-6, atol=2e-6)


def test_a_class_with_one_sample_in_all_has_no_spread_and_classes_nobody_owns_are_left_out():
    features, labels = samples([3, 0, 1])
    got = dict(pooled_by_class([class_report(features, labels, 4)]))
    assert list(got) == [0, 2]
    torch.testing.assert_close(got[2].mean, features[3].double())
    assert not got[2].covariance.any()


def test_far_from_the_origin_nothing_cancels():
    rows = torch.tensor([[1000.0, 1000.0], [1000.5, 1000.0], [1000.0, 1001.0], [1000.5, 1001.0]])
    labels = torch.zeros(4, dtype=torch.int64)
    parts = [class_report(rows[part], labels[part], 1) for part in (slice(0, 1), slice(1, 4))]
    [(_, got)] = pooled_by_class(parts)
    torch.testing.assert_close(got.covariance, torch.cov(rows.double().T), rtol=1e-4, atol=1e-4)


def test_shrinkage_keeps_the_trace_and_none_is_the_matrix_itself():
    # trace 4, so ρ (tr S / d) I = 0.5 * 2 I
    matrix = torch.tensor([[3.0, 1.0], [1.0, 1.0]])
    assert shrunk(matrix, 0.5).tolist() == [[2.5, 0.5], [0.5, 1.5]]
    assert torch.equal(shrunk(matrix, 0.0), matrix)
    assert shrunk(matrix, 1.0).tolist() == [[2.0, 0.0], [0.0, 2.0]]


# --- virtual features ---


def test_draws_have_the_pooled_mean_and_covariance():
    wanted = Gaussian(torch.tensor([1.0, -2.0]).double(), torch.tensor([[2.0, 1.2], [1.2, 1.0]]).double())
    got = drawn(wanted, 40000, generator())
    torch.testing.assert_close(got.mean(0), wanted.mean, rtol=0, atol=0.03)
    torch.testing.assert_close(torch.cov(got.T), wanted.covariance, rtol=0, atol=0.05)


def test_a_single_sample_is_drawn_again_and_again():
    mean = torch.tensor([1.0, -2.0]).double()
    got = drawn(Gaussian(mean, torch.zeros(2, 2).double()), 3, generator())
    torch.testing.assert_close(got, mean.expand(3, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_singular_covariances_that_were_rounded_to_float32_are_drawn_from(seed):
    features = 50 * torch.randn(6, 96, generator=generator(seed))
    parts = [class_report(features[part], torch.zeros(3, dtype=torch.int64), 1) for part in (slice(0, 3), slice(3, 6))]
    [(_, gaussian)] = pooled_by_class(parts)
    got = drawn(gaussian, 50, generator())
    # in the plane of the samples, but for the ridge
    basis = torch.linalg.qr((features - features.mean(0)).T.double()[:, :5]).Q
    apart = got - gaussian.mean
    beside = apart - apart @ basis @ basis.T
    assert beside.norm() < 0.01 * apart.norm()


def test_virtual_features_are_so_many_of_every_class_that_anyone_owns():
    features, labels = samples([30, 0, 40])
    report = class_report(features, labels, 4)
    classes, got = virtual_features([report], 2000, 0.0, generator())
    assert classes.tolist() == [0, 2] and got.shape == (2, 2000, 5) and got.dtype == torch.float32
    torch.testing.assert_close(got.mean(1), report["means"], rtol=0, atol=0.3)
    _, again = virtual_features([report], 2000, 0.0, generator())
    _, other = virtual_features([report], 2000, 0.0, generator(1))
    assert torch.equal(got, again) and not torch.equal(got, other)


def test_full_shrinkage_draws_from_a_sphere():
    features, labels = samples([200])
    _, [got] = virtual_features([class_report(features, labels, 1)], 20000, 1.0, generator())
    spread = torch.cov(got.T)
    variance = covariance(features).diagonal().mean()
    torch.testing.assert_close(spread.double(), variance * torch.eye(5).double(), rtol=0, atol=0.05 * variance.item())


def test_tukey_is_the_power_after_a_relu_and_nothing_at_one():
    features = torch.tensor([[-1.0, 4.0, 0.25]])
    assert tukey(features, 0.5).tolist() == [[0.0, 2.0, 0.5]]
    assert torch.equal(tukey(features, 1.0), features)


# --- the server ---


def linear_model(weight, bias, scale=1.0):
    """A head on its inputs."""

    def forward(tensors, inputs, training):
        return Outputs(scaled_logits(inputs, tensors["head.weight"], tensors["head.bias"], scale), inputs)

    return Model({"head.weight": weight, "head.bias": bias}, forward, head=LinearHead(scale=scale))


def calibrated(model, reports, round=5, **params):
    """The head that ``reports`` give."""
    state = {}
    task = ReportedTask(round, (), dict(enumerate(reports)), model.weights, {}, model, tiny_spec("ccvr"), state)
    CCVR(CCVRParams(**params)).reported(task)
    return state["ccvr"]


@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_head_is_trained_by_cross_entropy_on_scaled_virtual_features_of_the_owned_classes(monkeypatch, scale):
    features, labels = samples([5, 0, 6])
    made = {}

    def recorded(*args):
        made["classes"], made["features"] = virtual_features(*args)
        return made["classes"], made["features"]

    monkeypatch.setattr(ccvr, "virtual_features", recorded)
    weight, bias = torch.randn(3, 5, generator=generator(3)), torch.tensor([0.1, -0.2, 0.0])
    model = linear_model(weight, bias, scale)
    got = calibrated(model, [class_report(features, labels, 3)], virtual_features=40, epochs=1, lr_head=0.1)
    assert made["classes"].tolist() == [0, 2]
    # 80 features in one batch of 256: one gradient step of the head W v + B on v = s z, B = s b
    matrix, shift = weight.clone().requires_grad_(), (scale * bias).requires_grad_()
    virtual = scale * made["features"].flatten(0, 1)
    cross_entropy(virtual @ matrix.T + shift, torch.tensor([0] * 40 + [2] * 40)).backward()
    torch.testing.assert_close(got["head.weight"], (matrix - 0.1 * matrix.grad).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scale * got["head.bias"], (shift - 0.1 * shift.grad).detach(), rtol=1e-4, atol=1e-5)


def test_batches_have_the_size_asked_for():
    features = torch.randn(2, 6, 3, generator=generator())
    head = (torch.zeros(2, 3), torch.zeros(2))
    for size in (12, 5):
        weight, bias = head[0].clone().requires_grad_(), head[1].clone().requires_grad_()
        labels = torch.tensor([0, 1]).repeat_interleave(6)
        order = torch.randperm(12, generator=generator(1))
        for rows in torch.split(order, size):
            loss = cross_entropy(features.flatten(0, 1)[rows] @ weight.T + bias, labels[rows])
            steps = torch.autograd.grad(loss, (weight, bias))
            weight, bias = ((p - 0.5 * g).detach().requires_grad_() for p, g in zip((weight, bias), steps, strict=True))
        got = retrained(features, *head, 1.0, 1, 0.5, generator(1), batch_size=size)
        torch.testing.assert_close(got[0], weight.detach())
        torch.testing.assert_close(got[1], bias.detach())


def test_a_head_at_the_optimum_of_separable_gaussians_keeps_its_predictions():
    # N(±(4, 0), I): the best head has W = Σ⁻¹ μ, b = 0
    rows = torch.randn(400, 2, generator=generator())
    labels = torch.arange(2).repeat(200)
    features = rows + torch.tensor([[4.0, 0.0], [-4.0, 0.0]])[labels]
    weight = torch.tensor([[4.0, 0.0], [-4.0, 0.0]])
    head = calibrated(
        linear_model(weight, torch.zeros(2)), [class_report(features, labels, 2)], virtual_features=5000, epochs=5
    )
    assert (head["head.weight"] - weight).abs().max() < 0.05
    grid = torch.cartesian_prod(torch.linspace(-6, 6, 12), torch.linspace(-3, 3, 13))
    moved = grid @ head["head.weight"].T + head["head.bias"]
    assert torch.equal(moved.argmax(1), (grid @ weight.T).argmax(1))


def test_a_new_head_starts_in_bounds_on_what_it_reads_and_does_not_know_the_old_one():
    features, labels = samples([5, 6])
    reports = [class_report(features, labels, 2)]
    heads = [
        calibrated(
            linear_model(torch.full((2, 5), value), torch.zeros(2), 16.0),
            reports,
            virtual_features=1,
            epochs=1,
            lr_head=1e-4,
            head_start="fresh",
        )
        for value in (0.0, 100.0)
    ]
    assert torch.equal(heads[0]["head.weight"], heads[1]["head.weight"])
    bound = 5**-0.5 + 0.02
    assert heads[0]["head.weight"].abs().max() < bound and 16 * heads[0]["head.bias"].abs().max() < bound


# --- whole runs ---


def spec(method="ccvr", backbone=CLIP, rounds=2, **params):
    return spec_of(method, few(method, **params), backbone=backbone, rounds=rounds)


@pytest.mark.parametrize("backbone", ["clip:embedded", "convnet"])
def test_training_is_fedavgs_and_only_what_follows_the_last_round_differs(backbone):
    run, ours = played(spec(backbone=backbone))
    _, plain = played(spec("fedavg", backbone))
    for (mine, record, predicted), (theirs, its_record, its_predicted) in zip(ours, plain, strict=True):
        assert digest(mine) == digest(theirs)
        if record.round < 2:
            assert torch.equal(predicted.labels, its_predicted.labels)
            assert (record.bytes_up, record.bytes_down) == (its_record.bytes_up, its_record.bytes_down)
    head, weights = ours[-1][0].server["ccvr"], ours[-1][0].weights
    assert not torch.equal(head["head.weight"], weights["head.weight"])
    inputs = all_of(run.test)
    tensors = {**weights, **ours[-1][0].buffers, **head}
    assert torch.equal(ours[-1][2].labels, run.model.forward(tensors, inputs, False).logits.argmax(1))


def test_bytes_are_one_model_down_to_each_and_the_statistics_of_owned_classes_up():
    run, ours = played(spec())
    _, plain = played(spec("fedavg"))
    extra_up = ours[-1][1].bytes_up - plain[-1][1].bytes_up
    owned = sum(int((run.federation.class_counts(client) > 0).sum()) for client in range(4))
    assert extra_up == 4 * owned * (128 + 128 * 129 // 2) + 4 * (4 * 8)
    assert ours[-1][1].bytes_down - plain[-1][1].bytes_down == 4 * run.info.round_bytes


def test_powers_apply_to_what_is_reported_and_to_what_the_head_reads():
    made = spec(backbone="convnet", power=0.5, lr_head=1.0)
    run, ours = played(made)
    state = ours[-1][0]
    tensors = {**state.weights, **state.buffers}
    everything = run.train.read(torch.cat([shard.indices for shard in run.federation.clients]))
    labels = run.federation.train.labels[torch.cat([shard.indices for shard in run.federation.clients])]
    rooted = run.model.forward(tensors, everything, False).features.clamp(min=0).sqrt()
    reports = [class_report(rooted, labels, 4)]
    expected = calibrated(
        replace(run.model, weights=state.weights), reports, round=3, **{**FEW["ccvr"], "lr_head": 1.0}, power=0.5
    )
    head = state.server["ccvr"]
    inputs = all_of(run.test)
    tested = run.model.forward(tensors, inputs, False).features.clamp(min=0).sqrt()
    logits = tested @ head["head.weight"].T + head["head.bias"]
    assert torch.equal(ours[-1][2].labels, logits.argmax(1))
    torch.testing.assert_close(head["head.weight"], expected["head.weight"], rtol=0, atol=1e-3)
    assert (head["head.weight"] - state.weights["head.weight"]).abs().max() > 0.02


def test_another_seed_draws_other_features():
    one, other = (end_of("ccvr", few("ccvr"), backbone=CLIP, rounds=0, seed=seed).server["ccvr"] for seed in (0, 1))
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_calibration_helps_a_class_that_the_head_neglects():
    run = run_of("ccvr", rounds=0)
    state = run.initial_state()
    state.weights["head.weight"][1] = 0.0
    before = predict(run, state, run.test).labels
    [(after, _, predicted)] = list(rounds(run, state))
    assert (before == 1).sum() == 0 and (predicted.labels == 1).sum() > 0
    assert "ccvr" in after.server
