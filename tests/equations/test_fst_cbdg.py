"""FST-CBDG: Yan and Guo 2024, Eqs. 1-8 and Algorithm 1."""

from dataclasses import replace
from math import log

import pytest
import torch
from torch.nn.functional import normalize

import fedbench.runs.prepare
import fedbench.toolkit.local_training
from fedbench.core.federation import Split
from fedbench.core.method.tasks import AggregationTask, LocalStep
from fedbench.core.types import Model, UnlabelledBatch, Update
from fedbench.models.clip.backbone import fill_templates
from fedbench.rounds.loop import evaluate
from fedbench.scenarios.presets import scenario_named
from fedbench.testing import digest, final_state, tiny_backbone, tiny_dataset, tiny_run, tiny_spec
from fedbench_methods.fst_cbdg import (
    FSTCBDG,
    FstCbdgParams,
    balanced_counts,
    equal_counts,
    moving_average,
    probabilities,
    pseudo_class_counts,
    self_training_loss,
    text_samples,
    text_sampling_loss,
)
from tests.equations.kit import generator, headed, one_client, run_of, runs

# f for logits (1, 0) and (2, 0)
ONE, TWO = torch.tensor([0.7310586, 0.2689414]), torch.tensor([0.8807971, 0.1192029])


cbdg_run = runs("fst-cbdg")


# --- the equations ---


def test_classifier_is_the_softmax():
    torch.testing.assert_close(probabilities(torch.tensor([[1.0, 0.0], [2.0, 0.0]])), torch.stack([ONE, TWO]))


def test_soft_labels_keep_beta_of_themselves_and_take_the_rest_from_the_model():
    # Eq. 4: .9 (.6, .4) + .1 (.8, .2) = (.62, .38)
    got = moving_average(torch.tensor([[0.6, 0.4]]), torch.tensor([[0.8, 0.2]]), beta=0.9)
    torch.testing.assert_close(got, torch.tensor([[0.62, 0.38]]))


def test_rows_of_the_soft_labels_always_sum_to_one():
    labels = probabilities(torch.randn(50, 7, generator=generator()))
    for seed in range(200):
        labels = moving_average(labels, probabilities(5 * torch.randn(50, 7, generator=generator(seed))), beta=0.5)
    torch.testing.assert_close(labels.sum(1), torch.ones(50), atol=1e-5, rtol=0)


def test_self_training_loss_is_the_mean_cross_entropy_with_the_soft_labels():
    # Eq. 3. f = (3/4, 1/4) from logits (log 3, 0); q = (1/2, 1/2): -(log 3/4 + log 1/4) / 2 = .836988
    # second image: the same f, q = (1, 0): -log 3/4 = .287682; mean (.836988 + .287682) / 2 = .562335
    logits = torch.tensor([[log(3), 0.0]] * 2)
    got = self_training_loss(logits, torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    assert got.item() == pytest.approx(0.562335, abs=1e-6)


def test_its_gradient_is_the_prediction_minus_the_soft_label():
    # (f - q) / B: ((3/4 - 1/2), (1/4 - 1/2)) / 2, ((3/4 - 1), 1/4) / 2
    logits = torch.tensor([[log(3), 0.0]] * 2, requires_grad=True)
    self_training_loss(logits, torch.tensor([[0.5, 0.5], [1.0, 0.0]])).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.125, -0.125], [-0.125, 0.125]]))


def test_every_image_counts_for_the_class_of_its_largest_soft_label():
    labels = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.4, 0.35, 0.25]])
    assert pseudo_class_counts(labels).tolist() == [2, 1, 0]


# Eq. 7 on m = (5, 3, 0): 5 - m; 1.2 * 5 = 6 - m; 1.1 * 5 = 5.5, rounded to 6 (halves to even)
@pytest.mark.parametrize(("gamma", "expected"), [(0.0, [0, 2, 5]), (0.2, [1, 3, 6]), (0.1, [1, 3, 6])])
def test_synthetic_counts_fill_every_class_up_to_one_level(gamma, expected):
    counts = torch.tensor([5, 3, 0])
    got = balanced_counts(counts, gamma)
    assert got.tolist() == expected
    assert len(set((counts + got).tolist())) == 1


def test_balanced_pseudo_classes_need_no_synthetic_instance():
    assert balanced_counts(torch.tensor([4, 4, 4]), 0.0).tolist() == [0, 0, 0]


def test_equal_sampling_spreads_the_same_budget():
    # n = (0, 2, 5), mean 7/3, rounded 2; with gamma .2 (1, 3, 6), mean 10/3, rounded 3
    assert equal_counts(torch.tensor([5, 3, 0]), 0.0).tolist() == [2, 2, 2]
    assert equal_counts(torch.tensor([5, 3, 0]), 0.2).tolist() == [3, 3, 3]


def test_samples_lie_around_the_text_of_their_class():
    text = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    exact, classes = text_samples(text, torch.tensor([2, 0, 1]), 0.0, generator())
    assert classes.tolist() == [0, 0, 2]
    assert torch.equal(exact, text[[0, 0, 2]])
    noisy, _ = text_samples(text, torch.tensor([20_000, 0, 0]), 0.05, generator())
    torch.testing.assert_close(noisy.mean(0), text[0], atol=0.002, rtol=0)
    # isotropic, of standard deviation sigma: covariance sigma^2 I = .0025 I
    torch.testing.assert_close(torch.cov(noisy.T), 0.0025 * torch.eye(2), atol=1e-4, rtol=0)


def test_text_loss_is_the_sum_over_samples_or_their_mean_and_zero_without_any():
    # Eq. 6. f = (3/4, 1/4): -log 3/4 - log 1/4 = .287682 + 1.386294 = 1.673976, half of it .836988
    logits, classes = torch.tensor([[log(3), 0.0]] * 2), torch.tensor([0, 1])
    assert text_sampling_loss(logits, classes, "sum").item() == pytest.approx(1.673976, abs=1e-6)
    assert text_sampling_loss(logits, classes, "mean").item() == pytest.approx(0.836988, abs=1e-6)
    for reduction in ("sum", "mean"):
        assert text_sampling_loss(logits[:0], classes[:0], reduction).item() == 0.0


# --- one iteration of Algorithm 1 ---


MODEL = Model(
    weights={"head.weight": torch.eye(2), "head.bias": torch.zeros(2)},
    forward=headed,
    constants={"text": torch.eye(2)},
)
# three images at the first class's text, one at the second's
IMAGES = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])


def iteration(task, params, batch=(0, 1, 2, 3), weight=2.0, number=0):
    """The loss of one iteration at W = ``weight`` I, b = 0, and those weights."""
    weights = {"head.weight": (weight * torch.eye(2)).requires_grad_(), "head.bias": torch.zeros(2).requires_grad_()}
    index = torch.tensor(batch)
    step = LocalStep(weights, {}, UnlabelledBatch(IMAGES[index], index), task, number)
    return FSTCBDG(FstCbdgParams(**params)).local_loss(step), weights


def kept(task):
    return task.state["fst-cbdg"]["soft_labels"]


def test_soft_labels_move_before_the_loss_and_start_from_the_texts(make_task):
    received = {"head.weight": 3 * torch.eye(2), "head.bias": torch.zeros(2)}
    task = make_task(MODEL, IMAGES, None, received=received)
    loss, _ = iteration(task, {"text_weight": 0.0})
    # q^0 = softmax(1, 0) = .7310586 from T, neither from the weights nor the received ones;
    # f = softmax(2, 0) = .8807971 from W = 2 I; q = .9 * .7310586 + .1 * .8807971 = .7460324.
    # L = log(e^2 + 1) - 2 q = 2.126928 - 1.492065 = .634863 (with q^0, were the loss first, it would be .664811)
    torch.testing.assert_close(kept(task)[0], torch.tensor([0.7460324, 0.2539676]))
    torch.testing.assert_close(kept(task)[3], torch.tensor([0.2539676, 0.7460324]))
    assert loss.item() == pytest.approx(0.634863, abs=1e-5)


def test_loss_adds_lambda_times_the_sum_over_the_synthetic_instances(make_task):
    # m = (3, 1), n = (0, 2), sigma 0: z = T_2 twice, -log f(z)_2 = -log .8807971 = .126928 each:
    # .634863 + .5 * 2 * .126928 = .761791; with the mean, .634863 + .5 * .126928 = .698327
    for reduction, expected in (("sum", 0.761791), ("mean", 0.698327)):
        params = {"text_weight": 0.5, "sigma": 0.0, "reduction": reduction}
        loss, _ = iteration(make_task(MODEL, IMAGES, None), params)
        assert loss.item() == pytest.approx(expected, abs=1e-5)


def test_pseudo_classes_are_counted_over_all_images_of_the_client_not_the_batch(make_task):
    # batch: one image of the second class. m = (3, 1) of all four gives 2 samples; of the batch alone it would be 1
    params = {"self_training": False, "sigma": 0.0}
    loss, _ = iteration(make_task(MODEL, IMAGES, None), params, batch=(3,))
    assert loss.item() == pytest.approx(2 * 0.126928, abs=1e-5)


def test_equal_sampling_draws_for_every_class(make_task):
    # T = (1, 0), (0, 2) and W = 2 I: one sample costs -log sigmoid(2) = .126928 or -log sigmoid(4) = .0181499.
    # n = (0, 2), mean 1: one of each, instead of two of the second
    model = replace(MODEL, constants={"text": torch.diag(torch.tensor([1.0, 2.0]))})
    for sampling, expected in (("equal", 0.126928 + 0.0181499), ("balanced", 2 * 0.0181499)):
        params = {"self_training": False, "sigma": 0.0, "sampling": sampling}
        loss, _ = iteration(make_task(model, IMAGES, None), params)
        assert loss.item() == pytest.approx(expected, abs=1e-5)


def test_scale_multiplies_the_logits_of_synthetic_instances(make_task):
    # s = 3, W = 2 I: logits (0, 6), -log sigmoid(6) = .00247569
    params = {"self_training": False, "sigma": 0.0, "scale": 3.0}
    loss, _ = iteration(make_task(MODEL, IMAGES, None), params)
    assert loss.item() == pytest.approx(2 * 0.00247569, abs=1e-6)


def test_synthetic_instances_are_not_brought_to_unit_length(make_task):
    # z as drawn around T (Eq. 5): twice the length doubles the logits to (0, 4), -log sigmoid(4) = .0181499
    model = replace(MODEL, constants={"text": 2 * torch.eye(2)})
    loss, _ = iteration(make_task(model, IMAGES, None), {"self_training": False, "sigma": 0.0})
    assert loss.item() == pytest.approx(2 * 0.0181499, abs=1e-6)


def test_without_noise_the_text_loss_depends_on_images_through_their_counts_only(make_task):
    params = {"self_training": False, "sigma": 0.0}
    loss, weights = iteration(make_task(MODEL, IMAGES, None), params)
    loss.backward()
    # -sum_k n_k log f(T_k)_k at z = (0, 1), logits (0, 2): gradient 2 (.1192029, -.1192029) z^T
    torch.testing.assert_close(weights["head.weight"].grad, torch.tensor([[0.0, 0.2384058], [0.0, -0.2384058]]))
    other, _ = iteration(make_task(MODEL, 3 * IMAGES + 0.1, None), params)
    assert other.item() == loss.item()


def test_only_the_batchs_soft_labels_move_or_all_of_them(make_task):
    first, second = make_task(MODEL, IMAGES, None), make_task(MODEL, IMAGES, None)
    iteration(first, {"q_update": "batch"}, batch=(0, 3))
    iteration(second, {"q_update": "all"}, batch=(0, 3))
    assert kept(first)[:, 0].tolist() == pytest.approx([0.7460324, 0.7310586, 0.7310586, 0.2539676], abs=1e-6)
    assert kept(second)[:, 0].tolist() == pytest.approx([0.7460324, 0.7460324, 0.7460324, 0.2539676], abs=1e-6)


def test_soft_labels_are_kept_by_sample_and_earlier_tensors_stay_as_they_were(make_task):
    task = make_task(MODEL, IMAGES, None)
    iteration(task, {}, batch=(3, 0))
    before = kept(task)
    copy = before.clone()
    iteration(task, {}, batch=(0, 1), number=1)
    assert torch.equal(before, copy)
    # image 0 a second time: .9 * .7460324 + .1 * .8807971 = .7595089; 1 for the first time, 2 never, 3 once
    assert kept(task)[:, 0].tolist() == pytest.approx([0.7595089, 0.7460324, 0.7310586, 0.2539676], abs=1e-6)


def test_the_next_participation_keeps_the_soft_labels_or_restarts_from_the_received_model(make_task):
    # kept: .9 * .7460324 + .1 * .8807971 = .7595089. Restarted from the received W = 3 I: softmax(3, 0) = .9525741,
    # .9 * .9525741 + .1 * .8807971 = .9453964; the second step of that round goes on from there: .9389365
    received = {"head.weight": 3 * torch.eye(2), "head.bias": torch.zeros(2)}
    for restart, expected in (("keep", 0.7595089), ("received", 0.9453964)):
        first = make_task(MODEL, IMAGES, None)
        iteration(first, {"restart": "keep"})
        task = make_task(MODEL, IMAGES, None, received=received, round=2, state=first.state)
        iteration(task, {"restart": restart})
        assert kept(task)[0, 0].item() == pytest.approx(expected, abs=1e-6)
    iteration(task, {"restart": "received"}, number=1)
    assert kept(task)[0, 0].item() == pytest.approx(0.9389365, abs=1e-6)


# dL/dW_11 of the three images at (1, 0), of four: f - q = .8807971 - .7460324 = .1347647; where q is not detached,
# minus .1 * f_1 (o_1 - f . o) = .1 * .8807971 * (2 - 1.7615942) = .0209987
@pytest.mark.parametrize(("detach", "gradient"), [(True, 0.1347647), (False, 0.1137660)])
def test_soft_labels_are_constants_unless_asked_otherwise(make_task, detach, gradient):
    for policy in ("batch", "all"):
        params = {"text_weight": 0.0, "detach": detach, "q_update": policy}
        loss, weights = iteration(make_task(MODEL, IMAGES, None), params)
        loss.backward()
        assert weights["head.weight"].grad[0, 0].item() == pytest.approx(0.75 * gradient, abs=1e-6)


def test_kept_soft_labels_carry_no_gradient(make_task):
    task = make_task(MODEL, IMAGES, None)
    iteration(task, {"detach": False})
    assert not kept(task).requires_grad


def test_draws_differ_by_step_round_and_client_and_come_back_with_the_same_keys(make_task):
    params = {"self_training": False, "sigma": 0.1}

    def loss(number=0, **task):
        return iteration(make_task(MODEL, IMAGES, None, **task), params, number=number)[0].item()

    assert loss() == loss()
    assert len({loss(), loss(number=1), loss(round=2), loss(client=1), loss(seed=1)}) == 5


# --- server and model ---


@pytest.mark.parametrize(("weighting", "mean"), [("uniform", 2.0), ("samples", 3.0)])
def test_server_takes_the_plain_mean_of_the_participants_unless_weighted(weighting, mean):
    # n = (1, 3), values (0, 4): 2, or (1 * 0 + 3 * 4) / 4 = 3
    updates = tuple(Update(k, {"w": torch.tensor([4.0 * k])}, {}, 1 + 2 * k) for k in (0, 1))
    task = AggregationTask(1, {"w": torch.zeros(1)}, {}, updates, MODEL, tiny_spec("fst-cbdg"), {})
    assert FSTCBDG(FstCbdgParams(weighting=weighting)).aggregate(task)["w"].tolist() == [mean]


def test_round_zero_is_zero_shot_clip_and_the_head_is_what_is_sent():
    run, zero_shot = cbdg_run(hidden=True), run_of("clip-zs")
    ours = evaluate(run, run.initial_state())[1].labels
    assert torch.equal(ours, evaluate(zero_shot, zero_shot.initial_state())[1].labels)
    dim = tiny_backbone("clip:embedded").embed_dim
    assert run.info.round_bytes == 4 * (4 * dim + 4)
    assert torch.equal(run.model.weights["head.weight"], run.model.constants["text"])


def test_logits_have_the_methods_own_scale_and_the_head_says_so():
    run = cbdg_run(params={"scale": 30.0}, hidden=True)
    inputs, weights = run.test.read(torch.arange(6)), run.model.weights
    expected = 30 * (normalize(inputs, dim=1) @ weights["head.weight"].T)
    torch.testing.assert_close(run.model.forward(weights, inputs, False).logits, expected)
    assert (run.model.head.weight, run.model.head.bias, run.model.head.scale) == ("head.weight", "head.bias", 30.0)


def test_unit_features_at_scale_one_give_the_papers_entropies_close_to_log_k():
    run = cbdg_run(hidden=True)
    labels = probabilities(run.model.forward(run.model.weights, run.train.read(torch.arange(90)), False).logits)
    assert ((labels * labels.log()).sum(1) + log(4)).max() < 0.05


def test_raw_features_take_the_length_of_both_encoders():
    clip, names = tiny_backbone("clip:embedded"), tiny_dataset().classnames
    templates = ("a photo of a {}", "a {}")
    run = cbdg_run(params={"unit_features": False}, hidden=True, templates=templates)
    text = clip.encode_text(fill_templates(names, templates))
    inputs = run.test.read(torch.arange(6))
    expected = inputs @ (0.5 * (text[:4] + text[4:])).T
    torch.testing.assert_close(run.model.forward(run.model.weights, inputs, False).logits, expected)


# --- whole runs ---


@pytest.mark.parametrize("policy", ["batch", "all"])
def test_self_training_alone_moves_nothing_but_rounding(policy):
    # some processors multiply matrices of all a client's rows and of a batch's in another order, and so round otherwise
    params = {"text_weight": 0.0, "q_update": policy}
    run = cbdg_run(params=params, hidden=True, weight_decay=0.0, local_epochs=3, rounds=3)
    before, after = run.initial_state().weights, final_state(run).weights
    assert max(float((after[name] - before[name]).abs().max()) for name in before) < 1e-6


def test_weight_decay_without_detaching_or_synthetic_instances_do_move_it():
    start = digest(cbdg_run(hidden=True).initial_state())
    for params, decay in (({"text_weight": 0.0}, 1e-5), ({"text_weight": 0.0, "detach": False}, 0.0), ({}, 0.0)):
        assert digest(final_state(cbdg_run(params=params, hidden=True, weight_decay=decay, rounds=1))) != start


@pytest.fixture
def steps(monkeypatch):
    """All local steps taken in the test."""
    tiny_spec("fst-cbdg")  # its backbone is found by a round with labels, once a process
    seen = []

    def record(*args):
        seen.append(LocalStep(*args))
        return seen[-1]

    monkeypatch.setattr(fedbench.toolkit.local_training, "LocalStep", record)
    return seen


def unsupervised(method="fst-cbdg", **params):
    """The preset on a data set of 90 samples: six clients, two of them a round."""
    scenario = scenario_named("unsupervised").model_copy(update={"clients": 6, "participation": 0.4})
    spec = tiny_spec("fst-cbdg", rounds=3)
    return spec.model_copy(update={"scenario": scenario, "method": method, "params": {"fst-cbdg": params}})


def test_no_label_is_within_reach_under_the_unsupervised_scenario(steps):
    final_state(tiny_run(unsupervised()))
    assert len(steps) > 6
    for step in steps:
        assert step.task.labels is None and step.task.class_counts is None
        assert not hasattr(step.batch, "labels")


@pytest.mark.parametrize("labels", ["hidden", "visible"])
def test_permuted_training_labels_leave_the_weights_bit_identical(monkeypatch, labels):
    spec = unsupervised()
    spec = spec.model_copy(update={"scenario": spec.scenario.model_copy(update={"labels": labels})})
    expected = digest(final_state(tiny_run(spec)))
    original = fedbench.runs.prepare.build_federation

    def permuted(*args):
        federation = original(*args)
        order = torch.randperm(len(federation.train), generator=generator())
        return replace(federation, train=Split(federation.train.images, federation.train.labels[order]))

    monkeypatch.setattr(fedbench.runs.prepare, "build_federation", permuted)
    run = tiny_run(spec)
    assert not torch.equal(run.federation.train.labels, tiny_dataset().train.labels)
    assert digest(final_state(run)) == expected


@pytest.mark.parametrize("params", [{}, {"self_training": False, "sigma": 0.02}])
def test_pooled_clients_are_one_client_with_all_images_and_no_label(monkeypatch, steps, params):
    pooled = final_state(tiny_run(unsupervised("fst-cbdg+clip-linear-centralized", **params)))
    assert all(step.task.labels is None and not hasattr(step.batch, "labels") for step in steps)
    assert pooled.clients[0]["fst-cbdg"]["soft_labels"].shape == (90, 4)
    assert {len(step.task.inputs) for step in steps} == {90}
    one_client(monkeypatch)
    assert digest(final_state(tiny_run(unsupervised(**params)))) == digest(pooled)
