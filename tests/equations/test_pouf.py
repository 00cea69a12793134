"""POUF by hand: the two transports, information, and that no label is read."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from fedbench.core.types import Model
from fedbench.models.heads import TextOutputs
from fedbench.testing import digest
from fedbench_methods.pouf import information, transport
from tests.equations.kit import end_of, run_of


def test_transport_by_hand():
    # two images, two classes; at scale 0 both softmaxes are even: the mean cost over classes, then over images
    cosines = torch.tensor([[1.0, 0.0], [0.5, -1.0]])
    even = transport(torch.zeros(2, 2), cosines)
    assert even.item() == pytest.approx(((0 + 1) / 2 + (0.5 + 2) / 2) / 2 + ((0 + 0.5) / 2 + (1 + 2) / 2) / 2)
    # P = (3/4, 1/4) for the first image, even for the second; Q = (3/4, 1/4) over the images in class 0, even in 1
    logits = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    to_classes = (0.75 * 0 + 0.25 * 1 + 0.5 * 0.5 + 0.5 * 2) / 2
    to_images = (0.75 * 0 + 0.25 * 0.5 + 0.5 * 1 + 0.5 * 2) / 2
    assert transport(logits, cosines).item() == pytest.approx(to_classes + to_images)


def test_of_one_class_both_transports_are_one_minus_cosines():
    cosines = torch.tensor([[0.2], [0.6]])
    # over one class P = 1: the mean cost; over the images of even logits Q = 1/2: the mean cost again
    assert transport(torch.zeros(2, 1), cosines).item() == pytest.approx(2 * (1 - 0.4))


def test_information_is_least_where_each_is_sure_and_all_classes_are_there():
    balanced = 1000 * torch.eye(4)
    assert information(balanced).item() == pytest.approx(-math.log(4))
    assert information(1000 * torch.eye(4)[[0, 0, 0, 0]]).item() == pytest.approx(0, abs=1e-6)
    assert information(torch.zeros(3, 4)).item() == pytest.approx(0, abs=1e-6)
    torch.manual_seed(0)
    logits = torch.randn(5, 4)
    p = logits.softmax(1)
    entropy = lambda q: -(q * q.log()).sum(-1)  # noqa: E731
    torch.testing.assert_close(information(logits), entropy(p).mean() - entropy(p.mean(0)))


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_loss_is_of_the_cosines_to_the_texts(make_step, weight):
    features, texts = normalize(torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]]), dim=1), torch.eye(2)
    logits = 10 * features @ texts.T
    outputs = TextOutputs(logits, features, texts)
    step = make_step(
        Model({}, forward=None),
        torch.zeros(3, 2),
        None,
        method="pouf",
        params={"pouf": {"weight": weight}},
        outputs=outputs,
    )
    expected = transport(logits, logits / 10) + weight * information(logits)
    torch.testing.assert_close(step.task.hooks.local_loss(step=step), expected)


def test_hidden_and_visible_labels_train_alike():
    hidden, visible = (end_of("pouf", hidden=hide, lr=0.05) for hide in (True, False))
    assert digest(hidden) == digest(visible)
    start = run_of("pouf").model.weights["prompt.context"]
    assert (hidden.weights["prompt.context"] - start).abs().max() > 1e-4
