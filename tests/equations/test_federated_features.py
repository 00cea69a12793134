"""Federated features: Eqs. 3-6, 9 and 10 of CLIP2FL (Shi et al. 2024), as in CReFF; and the siamese augmentation."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from fedbench.core.errors import FedbenchError
from fedbench.core.method.tasks import AggregationTask, ClientTask
from fedbench.core.types import LinearHead, Model, Outputs, Update
from fedbench.models.inputs import FeatureInputs
from fedbench.toolkit.heads import fresh_head, retrained
from fedbench_methods.shared import siamese_augmentation as siamese
from fedbench_methods.shared.class_gradients import ClassGradients, class_gradients, mean_over_owners
from fedbench_methods.shared.federated_features import (
    FeatureParams,
    FederatedFeatures,
    descended,
    matching_loss,
)
from tests.equations.kit import generator


def gradients(weight, bias):
    weight, bias = torch.tensor(weight), torch.tensor(bias)
    return ClassGradients(torch.arange(len(weight)), weight, bias)


# Eqs. 3 and 5: class gradients


def test_class_gradient_by_hand():
    # W = 0, b = 0: p = (1/2, 1/2), p - e_0 = (-1/2, 1/2) for both v; G = 1/2 [(-1/2, 1/2)^T (1, 0) + ... (0, 2)]
    features = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    got = class_gradients(features, torch.tensor([0]), torch.zeros(2, 2), torch.zeros(2), 1.0)
    assert torch.equal(got.weight, torch.tensor([[[-0.25, -0.5], [0.25, 0.5]]]))
    assert torch.equal(got.bias, torch.tensor([[-0.5, 0.5]]))


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_closed_form_equals_autograd_through_the_scaled_head(scale):
    draw = generator()
    z = torch.randn(3, 7, 5, generator=draw, dtype=torch.float64)
    weight = torch.randn(4, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, generator=draw, dtype=torch.float64, requires_grad=True)
    classes = torch.tensor([3, 0, 2])
    got = class_gradients(scale * z, classes, weight.detach(), bias.detach(), scale)
    for i, label in enumerate(classes):
        loss = cross_entropy(scale * linear(z[i], weight, bias), label.expand(7))
        for ours, theirs in zip((got.weight[i], got.bias[i]), torch.autograd.grad(loss, (weight, bias)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


# Eq. 4: the mean over owners


def test_mean_is_unweighted_over_the_owners_of_a_class_only():
    def report(classes, value):
        count = len(classes)
        return ClassGradients(torch.tensor(classes), torch.full((count, 2, 3), value), torch.full((count, 2), value))

    # class 0: only the first, 6 (not 6/3); class 2: (6 + 2 + 1)/3 = 3; class 1: nobody
    got = mean_over_owners([report([0, 2], 6.0), report([2], 2.0), report([2], 1.0)])
    assert got.classes.tolist() == [0, 2]
    assert torch.equal(got.weight, torch.tensor([6.0, 3.0])[:, None, None].expand(2, 2, 3))
    assert torch.equal(got.bias, torch.tensor([6.0, 3.0])[:, None].expand(2, 2))


# Eq. 6: gradient matching


@pytest.mark.parametrize("form", ["paper", "official"])
def test_equal_gradients_match_whatever_their_length(form):
    ours = gradients([[[30.0, 40.0], [5.0, 12.0]]], [[9.0, -12.0]])
    longer = ClassGradients(ours.classes, 7 * ours.weight, 7 * ours.bias)
    assert matching_loss(ours, ours, form).item() == pytest.approx(0.0, abs=1e-6)
    assert matching_loss(ours, longer, form).item() == pytest.approx(0.0, abs=1e-6)


def test_opposite_gradients_are_two_in_the_paper_and_two_a_row_in_the_code():
    # C = 3 rows and, in the code, the bias as a fourth: 2 a class against 2 (C + 1) a class; two classes
    ours = gradients(torch.randn(2, 3, 4, generator=generator()).mul(9).tolist(), [[1.0, 2.0, -3.0]] * 2)
    opposite = ClassGradients(ours.classes, -ours.weight, -ours.bias)
    assert matching_loss(ours, opposite, "paper").item() == pytest.approx(2 * 2, abs=1e-5)
    assert matching_loss(ours, opposite, "official").item() == pytest.approx(2 * 2 * (3 + 1), abs=1e-5)


def test_rows_are_compared_one_by_one():
    # row 0: cos = 0; row 1: cos = 1, a hundred times as long; bias: cos((1, 0), (3, 4)) = 0.6
    ours = gradients([[[1.0, 0.0], [0.0, 100.0]]], [[1.0, 0.0]])
    theirs = gradients([[[0.0, 1.0], [0.0, 100.0]]], [[3.0, 4.0]])
    assert matching_loss(ours, theirs, "paper").item() == pytest.approx(1 / 2, abs=1e-5)
    assert matching_loss(ours, theirs, "official").item() == pytest.approx(1 + 0.4, abs=1e-5)


def test_a_row_of_zeros_costs_one_and_has_a_finite_gradient():
    weight = torch.zeros(1, 1, 3, requires_grad=True)
    other = ClassGradients(torch.tensor([0]), torch.ones(1, 1, 3), torch.ones(1, 1))
    loss = matching_loss(ClassGradients(other.classes, weight, other.bias), other, "paper")
    loss.backward()
    assert loss.item() == 1.0 and torch.isfinite(weight.grad).all()


def test_first_order_gradient_of_the_closed_form_is_the_second_order_one_of_autograd():
    draw = generator()
    features = torch.randn(2, 5, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, generator=draw, dtype=torch.float64, requires_grad=True)
    classes = torch.tensor([0, 2])
    weights, biases = torch.randn(2, 3, 4, generator=draw).double(), torch.randn(2, 3, generator=draw).double()
    target = ClassGradients(classes, weights, biases)
    ours = matching_loss(class_gradients(features, classes, weight.detach(), bias.detach(), 1.0), target, "official")
    twice = torch.zeros((), dtype=torch.float64)
    for i, label in enumerate(classes):
        loss = cross_entropy(linear(features[i], weight, bias), label.expand(5))
        parts = torch.autograd.grad(loss, (weight, bias), create_graph=True)
        rows = torch.cat([parts[0], torch.nn.functional.pad(parts[1][None], (0, 1))])
        real = torch.cat([weights[i], torch.nn.functional.pad(biases[i][None], (0, 1))])
        twice = twice + (1 - (rows * real).sum(1) / (rows.norm(dim=1) * real.norm(dim=1) + 1e-6)).sum()
    assert ours.item() == pytest.approx(twice.item(), abs=1e-9)
    (first,), (second,) = torch.autograd.grad(ours, features), torch.autograd.grad(twice, features)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-9)


def test_descent_takes_plain_steps_and_leaves_its_input_alone():
    start = torch.tensor([[[1.0, -2.0]]])
    # f = v^2, lr 0.25: v <- v - 0.25 * 2 v = v / 2 at each step, no momentum
    assert torch.equal(descended(start, lambda v: v.square().sum(), 3, 0.25), start / 8)
    assert torch.equal(descended(start, lambda v: v.square().sum(), 0, 0.25), start)
    assert torch.equal(start, torch.tensor([[[1.0, -2.0]]]))


# Eq. 10: the head


def test_retraining_step_by_hand():
    # C = 2, m = 1, v = 3 and -1, head 0, one batch, lr 0.1: row 0 of the gradient ((-1/2) 3 + (1/2)(-1)) / 2 = -1
    features = torch.tensor([[[3.0]], [[-1.0]]])
    weight, bias = retrained(features, torch.zeros(2, 1), torch.zeros(2), 1.0, 1, 0.1, generator())
    torch.testing.assert_close(weight, torch.tensor([[0.1], [-0.1]]))
    torch.testing.assert_close(bias, torch.zeros(2))


def test_retraining_is_sgd_on_the_head_without_scale():
    draw = generator()
    features = torch.randn(3, 4, 5, generator=draw)
    weight, bias, scale = torch.randn(3, 5, generator=draw), torch.randn(3, generator=draw), 4.0
    got = retrained(features, weight, bias, scale, 2, 0.3, generator(1))
    ours, offset = weight.clone().requires_grad_(), (scale * bias).requires_grad_()
    labels = torch.arange(3).repeat_interleave(4)
    for _ in range(2):
        loss = cross_entropy(linear(features.flatten(0, 1), ours, offset), labels)
        parts = torch.autograd.grad(loss, (ours, offset))
        ours, offset = (t - 0.3 * part for t, part in zip((ours, offset), parts, strict=True))
    torch.testing.assert_close(got[0], ours)
    torch.testing.assert_close(got[1], offset / scale)


def test_retraining_goes_through_all_features_in_batches_of_32():
    # 70 copies of v = 1 for class 0 and of v = -1 for class 1: by symmetry W_0 = -W_1 = w and row 0 of the gradient is
    # -(1 - p), p = 1 / (1 + e^{-2 w}), whatever the order; 140 features are 4 batches of 32 and one of 12: 5 steps
    features = torch.stack([torch.ones(70, 1), -torch.ones(70, 1)])
    weight, _ = retrained(features, torch.zeros(2, 1), torch.zeros(2), 1.0, 1, 0.01, generator())
    # bias gradients do not vanish in unbalanced batches, hence the tolerance
    assert weight[0].item() == pytest.approx(5 * 0.01 * 0.5, rel=0.03)


def test_no_epochs_leave_the_head_as_it_is():
    weight, bias = torch.randn(3, 5, generator=generator()), torch.full((3,), 0.1)
    got = retrained(torch.randn(3, 2, 5, generator=generator()), weight, bias, 16.36, 0, 0.1, generator())
    assert torch.equal(got[0], weight) and torch.equal(got[1], bias)


def test_fresh_head_is_uniform_within_one_over_root_d():
    weight, bias = fresh_head(50, 16, generator())
    assert weight.shape == (50, 16) and bias.shape == (50,)
    assert 0.24 < weight.abs().max() <= 0.25 and weight.std().item() == pytest.approx(0.25 / 3**0.5, rel=0.05)


# what clients send


def identity_model(num_classes, dim, scale=1.0):
    """Features are the inputs times a trained factor."""

    def forward(tensors, inputs, training):
        features = tensors["factor"] * inputs.flatten(1)
        return Outputs(scale * linear(features, tensors["head.weight"], tensors["head.bias"]), features)

    weights = {
        "factor": torch.ones(1),
        "head.weight": torch.zeros(num_classes, dim),
        "head.bias": torch.zeros(num_classes),
    }
    return Model(weights=weights, forward=forward, head=LinearHead(scale=scale))


def shared(form="official", start="fresh", **params):
    return FederatedFeatures("shared", FeatureParams(**params), form, start)


def head_payload(num_classes, dim, draw):
    return {
        "head.weight": torch.randn(num_classes, dim, generator=draw),
        "head.bias": torch.randn(num_classes, generator=draw),
    }


def update_of(task, weights=None, payload=None):
    return Update(task.client, weights or dict(task.received), {}, len(task.inputs), payload or {})


def test_a_client_sends_gradients_of_its_own_classes_at_the_sent_head(make_task):
    draw = generator()
    inputs, labels = torch.randn(5, 4, generator=draw), [2, 0, 2, 2, 0]
    payload, scale = head_payload(3, 4, draw), 3.0
    task = make_task(identity_model(3, 4, scale), inputs, labels, payload=payload, num_classes=3)
    sent = shared().client_gradients(task, update_of(task))
    assert sent["classes"].tolist() == [0, 2] and sent["gradients.weight"].shape == (2, 3, 4)
    for row, (label, own) in enumerate([(0, [1, 4]), (2, [0, 2, 3])]):
        # no more samples than batch_real: all of them, in every repeat
        head = payload["head.weight"], payload["head.bias"]
        want = class_gradients(scale * inputs[own][None], torch.tensor([label]), *head, scale)
        torch.testing.assert_close(sent["gradients.weight"][row], want.weight[0])
        torch.testing.assert_close(sent["gradients.bias"][row], want.bias[0])


def test_upload_is_owned_classes_times_head_floats(make_task):
    # the papers' C = 10, d = 512: 5,130 floats a class, and an index of eight bytes; 4 of 10 classes owned
    task = make_task(
        identity_model(10, 512),
        torch.ones(4, 512),
        [1, 3, 5, 9],
        payload=head_payload(10, 512, generator()),
        num_classes=10,
    )
    sent = shared(repeats=1).client_gradients(task, update_of(task))
    assert sent["gradients.weight"][0].numel() + sent["gradients.bias"][0].numel() == 5130
    assert sum(t.numel() * t.element_size() for t in sent.values()) == 4 * (5130 * 4 + 8)


def test_draws_are_batch_real_samples_without_replacement(make_task):
    # W = 0: row 0 of the gradient of class 0 is -1/2 the mean of the drawn z, one-hot here: 3 of 5 entries are -1/6
    payload = {"head.weight": torch.zeros(2, 5), "head.bias": torch.zeros(2)}
    task = make_task(identity_model(2, 5), torch.eye(5), [0] * 5, payload=payload)
    one = shared(batch_real=3, repeats=1).client_gradients(task, update_of(task))["gradients.weight"][0, 0]
    assert sorted(one.tolist()) == pytest.approx([-1 / 6, -1 / 6, -1 / 6, 0, 0])
    # the mean of many draws comes close to that of all, -1/10 each
    many = shared(batch_real=3, repeats=300).client_gradients(task, update_of(task))["gradients.weight"][0, 0]
    torch.testing.assert_close(many, torch.full((5,), -0.1), rtol=0, atol=0.02)


def test_extractor_is_the_received_backbone_or_the_updated_one(make_task):
    payload = head_payload(2, 3, generator())
    task = make_task(identity_model(2, 3), torch.randn(4, 3, generator=generator()), [0, 1, 1, 0], payload=payload)
    moved = update_of(task, {**task.received, "factor": torch.tensor([5.0])})
    kept, updated = (shared(extractor=which).client_gradients(task, moved) for which in ("received", "updated"))
    assert torch.equal(kept["gradients.weight"], shared().client_gradients(task, update_of(task))["gradients.weight"])
    assert not torch.allclose(kept["gradients.weight"], updated["gradients.weight"])


def test_images_are_augmented_unless_told_otherwise_and_features_never(make_task):
    inputs, payload = torch.randn(6, 3, 8, 8, generator=generator()), head_payload(2, 192, generator())
    made = make_task(identity_model(2, 192), inputs, [0, 0, 0, 1, 1, 1], payload=payload)
    images = ClientTask(**{**vars(made), "inputs": FeatureInputs(inputs, is_image=True)})
    plain = shared().client_gradients(made, update_of(made))["gradients.weight"]
    off = shared(augment="none").client_gradients(images, update_of(images))["gradients.weight"]
    on = shared().client_gradients(images, update_of(images))["gradients.weight"]
    torch.testing.assert_close(plain, off)
    assert not torch.allclose(plain, on, atol=1e-3)
    assert torch.equal(on, shared().client_gradients(images, update_of(images))["gradients.weight"])


def test_hidden_labels_and_a_model_without_linear_head_are_refused(make_task):
    task = make_task(identity_model(2, 3), torch.ones(2, 3), None)
    with pytest.raises(FedbenchError, match="label"):
        shared().client_gradients(task, update_of(task))
    with pytest.raises(FedbenchError, match="backbone"):
        Model(weights={}, forward=None).linear_head  # noqa: B018


# what the server does


def server_task(task, features, payloads, head=None):
    state = {"features": features, **(head or task.payload)}
    updates = tuple(update_of(task, payload=payload) for payload in payloads)
    return AggregationTask(1, dict(task.received), {}, updates, task.model, task.spec, {"shared": state})


def test_one_client_and_features_that_are_its_own_stay_as_they_are(make_task):
    # 4 samples a class, no more than batch_real: g and g^v are gradients of the same features, so L_grad = 0
    draw = generator()
    # a head that is far from sure of itself, so that no row is short enough for the epsilon to matter
    inputs, payload = torch.randn(12, 5, generator=draw), head_payload(3, 5, draw)
    payload = {name: 0.2 * tensor for name, tensor in payload.items()}
    labels = [0] * 4 + [1] * 4 + [2] * 4
    task = make_task(identity_model(3, 5, 2.0), inputs, labels, payload=payload, num_classes=3)
    work = shared(start="warm", match_steps=100, retrain_epochs=0)
    own = (2.0 * inputs).reshape(3, 4, 5)
    after = server_task(task, own, [work.client_gradients(task, update_of(task))])
    work.aggregate(after)
    torch.testing.assert_close(after.state["shared"]["features"], own, rtol=0, atol=1e-4)
    # other features do move
    other = server_task(task, own.flip(2), [work.client_gradients(task, update_of(task))])
    work.aggregate(other)
    assert (other.state["shared"]["features"] - own.flip(2)).abs().max() > 0.05


def test_classes_nobody_owns_keep_their_features_bit_for_bit(make_task):
    draw = generator()
    task = make_task(
        identity_model(4, 5),
        torch.randn(6, 5, generator=draw),
        [0, 0, 2, 2, 2, 0],
        payload=head_payload(4, 5, draw),
        num_classes=4,
    )
    work, features = shared(match_steps=5, retrain_epochs=1), torch.randn(4, 3, 5, generator=draw)
    after = server_task(task, features, [work.client_gradients(task, update_of(task))])
    work.aggregate(after)
    moved = [not torch.equal(a, b) for a, b in zip(after.state["shared"]["features"], features, strict=True)]
    assert moved == [True, False, True, False]


def test_matching_brings_the_gradients_together(make_task):
    draw = generator()
    task = make_task(
        identity_model(3, 6),
        torch.randn(30, 6, generator=draw),
        [0, 1, 2] * 10,
        payload=head_payload(3, 6, draw),
        num_classes=3,
    )
    work, features = shared(start="warm", match_steps=200, retrain_epochs=0), torch.randn(3, 4, 6, generator=draw)
    sent = work.client_gradients(task, update_of(task))
    target = ClassGradients(sent["classes"], sent["gradients.weight"], sent["gradients.bias"])
    after = server_task(task, features, [sent])
    work.aggregate(after)

    def loss(v):
        head = task.payload["head.weight"], task.payload["head.bias"]
        return matching_loss(class_gradients(v, target.classes, *head, 1.0), target, "official").item()

    assert loss(after.state["shared"]["features"]) < 0.05 * loss(features)


def test_matching_reads_the_sent_head_and_retraining_starts_where_told(make_task):
    draw = generator()
    task = make_task(
        identity_model(3, 5),
        torch.randn(6, 5, generator=draw),
        [0, 1, 2] * 2,
        payload=head_payload(3, 5, draw),
        num_classes=3,
        received={"factor": torch.ones(1), "head.weight": torch.full((3, 5), 0.25), "head.bias": torch.ones(3)},
    )
    heads = {}
    for start in ("fresh", "warm", "global"):
        work = shared(start=start, match_steps=0, retrain_epochs=int(start == "fresh"), lr_head=1e-4)
        after = server_task(task, torch.zeros(3, 2, 5), [work.client_gradients(task, update_of(task))])
        weights = work.aggregate(after)
        assert all(torch.equal(weights[name], task.received[name]) for name in weights)
        heads[start] = after.state["shared"]["head.weight"]
    assert torch.equal(heads["warm"], task.payload["head.weight"])
    assert torch.equal(heads["global"], task.received["head.weight"])
    assert heads["fresh"].abs().max() <= 5**-0.5 + 1e-3


# siamese augmentation


def images(size=16):
    return torch.randn(3, 3, size, size, generator=generator(5))


def test_one_draw_serves_the_whole_batch_and_the_input_stays():
    same = images()[:1].expand(4, -1, -1, -1).clone()
    before, kinds = same.clone(), set()
    for seed in range(40):
        got = siamese.augmented(same, generator(seed))
        assert got.shape == same.shape and torch.equal(got[:1].expand_as(got), got)
        assert torch.equal(got, siamese.augmented(same, generator(seed)))
        kinds.add(round(got.sum().item(), 3))
    assert torch.equal(same, before) and len(kinds) > 20


def test_colour_keeps_the_mean_up_to_brightness():
    x = images()
    shift = siamese.colour(x, generator()).mean((1, 2, 3)) - x.mean((1, 2, 3))
    brightness = torch.rand(3, generator=generator())[0] - 0.5
    torch.testing.assert_close(shift, brightness.expand(3), rtol=0, atol=1e-5)


def test_contrast_stretches_about_the_mean_and_saturation_about_grey():
    brightness, saturation, contrast = (torch.rand(3, generator=generator()) + torch.tensor([-0.5, 0.0, 0.5])).tolist()
    # two grey pixels 0 and 2: no saturation to change; they end at 1 + brightness -+ contrast
    grey = torch.tensor([0.0, 2.0]).expand(1, 3, 1, 2)
    want = torch.tensor([1 + brightness - contrast, 1 + brightness + contrast]).expand(1, 3, 1, 2)
    torch.testing.assert_close(siamese.colour(grey, generator()), want)
    # one pixel (0, 1, 2): its mean is its grey, so both factors stretch the channels about 1 + brightness
    pixel = torch.tensor([0.0, 1.0, 2.0]).reshape(1, 3, 1, 1)
    stretched = 1 + brightness + 2 * saturation * contrast * (pixel - 1)
    torch.testing.assert_close(siamese.colour(pixel, generator()), stretched)


def test_crop_shifts_by_at_most_an_eighth_and_fills_with_zeros():
    x, shifts = torch.ones(1, 3, 16, 16), set()
    for seed in range(60):
        kept = siamese.crop(x, generator(seed))[0, 0]
        rows, columns = int(kept.any(1).sum()), int(kept.any(0).sum())
        assert kept.sum() == rows * columns
        shifts |= {16 - rows, 16 - columns}
    assert shifts == {0, 1, 2}


def test_cutout_blanks_at_most_half_the_side():
    cut = [int((siamese.cutout(torch.ones(1, 3, 16, 16), generator(seed))[0, 0] == 0).sum()) for seed in range(60)]
    # 8 by 8, less what reaches over the border: at least 4 by 4
    assert max(cut) == 64 and min(cut) >= 16


def test_flip_mirrors_in_half_the_cases():
    x = images()
    flipped = [torch.equal(siamese.flip(x, generator(seed)), x.flip(3)) for seed in range(100)]
    assert 35 < sum(flipped) < 65
    assert all(done or torch.equal(siamese.flip(x, generator(seed)), x) for seed, done in enumerate(flipped))


def test_scale_and_rotate_move_a_point_by_their_bounds():
    # a bright column at x = 0.5 of -1..1 on 64 pixels: a zoom by 1/1.2..1.2 puts it between 0.5/1.2 and 0.6
    x = torch.zeros(1, 1, 64, 64)
    x[..., 47:49] = 1.0
    places = torch.linspace(-1 + 1 / 64, 1 - 1 / 64, 64)
    spots = []
    for seed in range(60):
        row = siamese.scale(x, generator(seed))[0, 0, 32]
        spots.append(float((row * places).sum() / row.sum()))
    assert min(spots) > 0.5 / 1.2 - 0.02 and max(spots) < 0.6 + 0.02 and max(spots) - min(spots) > 0.12
    # the same column, turned about the centre by up to 15 degrees, is at 0.5 / cos(angle) <= 0.518 in the middle row
    for seed in range(20):
        row = siamese.rotate(x, generator(seed))[0, 0, 31:33].mean(0)
        assert 0.47 < float((row * places).sum() / row.sum()) < 0.55
