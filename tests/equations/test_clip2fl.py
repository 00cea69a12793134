"""CLIP2FL: Shi et al. 2024, Eqs. 1, 7 and 8; what it shares with CReFF is in test_federated_features.py."""

from math import log

import pytest
import torch
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError
from fedbench.core.types import Model, Outputs
from fedbench.kinds.registry import find_method
from fedbench.rounds.loop import rounds
from fedbench.testing import digest, final_state, tiny_backbone, tiny_run
from fedbench_methods.clip2fl import (
    CLIP2FL,
    CLIP2FLParams,
    distillation,
    prototype_contrast,
    teacher_logits,
    text_contrast,
)
from tests.equations.kit import CLIP, few, spec_of, with_absent_classes


def spec(method="clip2fl", backbone=CLIP, rounds=1, **params):
    return spec_of(method, few(method, **params), backbone=backbone, rounds=rounds)


# Eq. 1


def test_teacher_logits_are_a_hundred_cosines():
    # (3, 4) against the axes: 0.6 and 0.8, whatever its length
    got = teacher_logits(torch.tensor([[3.0, 4.0], [30.0, 40.0]]), torch.eye(2))
    torch.testing.assert_close(got, torch.tensor([[60.0, 80.0], [60.0, 80.0]]))


def test_distillation_by_hand():
    # cosines (.25, .22): u / T = (25, 22) / 3, softmax (.7311, .2689); student (1/2, 1/2):
    # KL = .7311 ln(.7311 / .5) + .2689 ln(.2689 / .5) = .11094; 9 KL = .9985. The other direction would give 1.0810
    teacher = torch.tensor([[25.0, 22.0]])
    assert distillation(teacher, torch.zeros(1, 2), 3.0).item() == pytest.approx(0.9985, abs=1e-4)


def test_distillation_is_the_mean_of_the_batch_and_zero_at_the_teacher():
    teacher = torch.tensor([[25.0, 22.0], [25.0, 22.0]])
    student = torch.stack([torch.zeros(2), teacher[1]])
    assert distillation(teacher, student, 3.0).item() == pytest.approx(0.9985 / 2, abs=1e-4)
    assert distillation(teacher, teacher, 3.0).item() == pytest.approx(0.0, abs=1e-6)


def test_distillation_pulls_towards_the_teacher_with_t_times_the_difference():
    student = torch.zeros(1, 2, requires_grad=True)
    distillation(torch.tensor([[25.0, 22.0]]), student, 3.0).backward()
    # T (softmax(o/T) - softmax(u/T)) = 3 (.5 - .7311, .5 - .2689)
    torch.testing.assert_close(student.grad, torch.tensor([[-0.6932, 0.6932]]), rtol=0, atol=1e-4)


def test_loss_term_is_beta_times_the_distillation_of_the_unaugmented_features(make_step):
    # the side feature (3, 4) and text at cosines .25 and .22 with it
    feature = torch.tensor([[3.0, 4.0]])
    across = torch.tensor([-0.8, 0.6])
    text = torch.stack([c * torch.tensor([0.6, 0.8]) + (1 - c * c) ** 0.5 * across for c in (0.25, 0.22)])
    model = Model(weights={}, forward=None, constants={"text": text})
    outputs = Outputs(torch.zeros(1, 2), feature)
    step = make_step(model, torch.full((1, 2), 99.0), [0], outputs=outputs, side={"teacher": feature})
    got = CLIP2FL(CLIP2FLParams(beta=2.0)).loss_terms(step)
    assert got.item() == pytest.approx(2 * 0.9985, abs=2e-4)
    assert CLIP2FL(CLIP2FLParams(beta=0.0)).loss_terms(step) is None


# Eq. 7


def test_paper_contrast_by_hand_and_whatever_the_length():
    # v at its own text: -1 / .1 each; the one other feature has cosine 0: log exp 0 = 0. Sum: -20
    features = torch.tensor([[[3.0, 0.0]], [[0.0, 1.0]]])
    assert prototype_contrast(features, torch.eye(2), 0.1).item() == pytest.approx(-20.0, abs=1e-5)
    assert prototype_contrast(7 * features, torch.eye(2), 0.1).item() == pytest.approx(-20.0, abs=1e-5)


def test_paper_contrast_counts_other_features_of_the_same_class_as_negatives():
    # C = 2, m = 2, tau = 1, all at their text: positives -4; each has one neighbour at cosine 1, two at 0:
    # 4 log(e + 2); the positive pair itself is not in the denominator
    features = torch.eye(2)[:, None].expand(2, 2, 2)
    want = -4 + 4 * log(2.718281828 + 2)
    assert prototype_contrast(features, torch.eye(2), 1.0).item() == pytest.approx(want, abs=1e-5)


def test_paper_contrast_takes_the_text_of_the_features_own_class():
    # both features sit at the other class's text: cosines with their own are 0
    features = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])
    assert prototype_contrast(features, torch.eye(2), 0.1).item() == pytest.approx(0.0, abs=1e-5)


def test_official_contrast_by_hand():
    # C = 2, m = 2, v = its text: s = (10, 0): -10 + log(2 (e^10 + 1) - e^10) = log(1 + 2 e^-10) = 9.0796e-5
    features = torch.eye(2, dtype=torch.float64)[:, None].expand(2, 2, 2)
    got = text_contrast(features, torch.eye(2, dtype=torch.float64), 0.1)
    assert got.item() == pytest.approx(9.0796e-5, abs=1e-9)


def test_official_contrast_is_a_mean_of_raw_products_without_feature_pairs():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    text = normalize(torch.randn(3, 5, generator=generator, dtype=torch.float64), dim=1)
    terms = []
    for c in range(3):
        for v in features[c]:
            s = text @ v / 0.5
            terms.append(-s[c] + (4 * s.exp().sum() - s[c].exp()).log())
    got = text_contrast(features, text, 0.5)
    assert got.item() == pytest.approx(torch.stack(terms).mean().item(), abs=1e-12)
    # a feature's term doesn't know the others: moving one changes the mean by its own term only
    moved = features.clone()
    moved[0, 0] += 1
    s = text @ moved[0, 0] / 0.5
    change = (-s[0] + (4 * s.exp().sum() - s[0].exp()).log() - terms[0]) / 12
    assert (text_contrast(moved, text, 0.5) - got).item() == pytest.approx(change.item(), abs=1e-12)


def test_official_contrast_with_one_feature_a_class_leaves_its_own_text_out():
    # m = 1: log(sum - own) is the other's, s = (10, 0): -10 + 0
    features = torch.eye(2)[:, None]
    assert text_contrast(features, torch.eye(2), 0.1).item() == pytest.approx(-10.0, abs=1e-5)


# limits


def test_without_both_terms_it_is_creff_bit_for_bit():
    forms = {"gradient_form": "official", "head_start": "fresh"}
    ours = final_state(tiny_run(spec(beta=0.0, eta=0.0, variant="official")))
    theirs = final_state(tiny_run(spec("creff", **{**forms, "lr_feature": 0.1})))
    assert digest(ours) == digest(theirs)
    for name, tensor in theirs.server["creff"].items():
        assert torch.equal(ours.server["clip2fl"][name], tensor)


def test_without_contrast_classes_nobody_owns_keep_their_features_and_with_it_they_move():
    for eta, still in ((0.0, True), (1e-3, False)):
        run = tiny_run(with_absent_classes(spec(eta=eta, rounds=1)))
        # the server's state is one dict for the whole run, so the features are picked out round by round
        steps = [(s.server["clip2fl"]["features"], record) for s, record, _ in rounds(run, run.initial_state())]
        (before, _), (after, record) = steps
        counts = sum(run.federation.class_counts(client) for client in record.cohort)
        absent = (counts == 0).nonzero().flatten()
        assert len(absent) == 2
        assert torch.equal(before[absent], after[absent]) is still


def test_contrast_adds_eta_times_its_gradient_to_the_features():
    # one step: the difference to eta = 0 is -lr eta grad L_pcl at the start
    run = tiny_run(spec(eta=1e-2, match_steps=1, lr_feature=0.5))
    first = final_state(run, until=0).server["clip2fl"]["features"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(prototype_contrast(first, run.model.constants["text"], 0.1), first)
    with_it = final_state(run).server["clip2fl"]["features"]
    without = final_state(tiny_run(spec(eta=0.0, match_steps=1, lr_feature=0.5))).server["clip2fl"]["features"]
    torch.testing.assert_close(with_it - without, -0.5 * 1e-2 * gradient, rtol=0, atol=2e-6)


# variants and set-up


def test_variant_decides_what_is_left_to_it_and_nothing_else():
    def forms(**params):
        work = CLIP2FL(CLIP2FLParams(**params)).federated
        return work.gradient_form, work.head_start

    assert forms() == ("paper", "warm")
    assert forms(variant="official") == ("official", "fresh")
    assert forms(variant="official", gradient_form="paper") == ("paper", "fresh")
    assert forms(head_start="global", gradient_form="official") == ("official", "global")


def test_contrast_form_follows_the_variant_unless_set():
    def moved(**params):
        return final_state(tiny_run(spec(eta=1.0, gradient_form="official", prompt="paper", **params)))

    def features(**params):
        return moved(**params).server["clip2fl"]["features"]

    paper, official = features(variant="paper"), features(variant="official")
    assert not torch.equal(paper, official)
    assert torch.equal(features(variant="paper", contrast_form="official"), official)
    assert torch.equal(features(variant="official", contrast_form="paper"), paper)


@pytest.mark.parametrize(
    ("params", "template"),
    [
        ({}, "This is a {}"),
        ({"variant": "official"}, "a sketch of a {}"),
        ({"prompt": "templates"}, "a sketch of a {}"),
        ({"variant": "official", "prompt": "paper"}, "This is a {}"),
    ],
)
def test_prompt_is_the_papers_or_the_runs(params, template):
    run = tiny_run(spec(**params).model_copy(update={"templates": ("a sketch of a {}",)}))
    want = tiny_backbone("clip:embedded").text_features(run.federation.classnames, (template,))
    assert torch.equal(run.model.constants["text"], want)


def test_teacher_stands_beside_the_default_model_and_is_not_sent():
    run, plain = tiny_run(spec(backbone="convnet?projector=128")), tiny_run(spec("fedavg", "convnet?projector=128"))
    assert run.info.round_bytes == plain.info.round_bytes and list(run.side) == ["teacher"]
    assert all(torch.equal(run.model.weights[name], tensor) for name, tensor in plain.model.weights.items())
    images = run.federation.train.images.read(torch.arange(3))
    want = tiny_backbone("clip:embedded").encode_images(images)
    torch.testing.assert_close(run.side["teacher"].read(torch.arange(3)), want)


def test_narrow_features_are_refused_with_the_projector_to_write():
    with pytest.raises(FedbenchError, match="projector=128") as raised:
        tiny_run(spec(backbone="convnet"))
    assert "backbone" in str(raised.value)
    final_state(tiny_run(spec(backbone="convnet", eta=0.0)))
    final_state(tiny_run(spec(backbone="convnet?projector=128")))


def test_it_reads_the_runs_teacher_and_what_the_default_model_reads():
    assert find_method("clip2fl").reads == ("teacher", "tune", "head_scale")


@pytest.mark.parametrize(
    ("params", "rate"),
    [({}, 1.0), ({"variant": "official"}, 0.1), ({"gradient_form": "official"}, 0.1), ({"lr_feature": 0.5}, 0.5)],
)
def test_rate_of_the_features_follows_the_form_of_the_gradients_unless_set(params, rate):
    assert CLIP2FL(CLIP2FLParams(**params)).federated.params.lr_feature == rate
