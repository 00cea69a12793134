"""Pseudo-labels by hand, what they leave out, and that they are all that a method sees of hidden labels."""

import math

import pytest
import torch

from fedbench.core.errors import FedbenchError, MethodFault, Unworkable
from fedbench.testing import digest, final_state, tiny_backbone, tiny_run, tiny_spec
from fedbench_methods.pseudo_labels import PseudoLabels, top_of_each_class, zero_shot


def run_of(method, **params):
    spec = tiny_spec(method)
    return tiny_run(spec.model_copy(update={"params": {**spec.params, "pseudo-labels": params}}))


def test_label_and_confidence_by_hand():
    features = torch.tensor([[3.0, 0.0], [0.0, 0.5], [2.0, 2.0]])
    confidence, labels = zero_shot(features, torch.eye(2), 2.0)
    assert labels.tolist() == [0, 1, 0]
    # features have unit length: logits (2, 0), (0, 2) and two equal ones
    sure = math.exp(2) / (math.exp(2) + 1)
    torch.testing.assert_close(confidence, torch.tensor([sure, sure, 0.5]))


def test_of_every_label_the_most_confident_stay():
    confidence = torch.tensor([0.9, 0.8, 0.9, 0.3, 0.4])
    labels = torch.tensor([0, 0, 0, 1, 1])
    assert top_of_each_class(confidence, labels, 2).tolist() == [True, False, True, True, True]
    # of equals the first
    assert top_of_each_class(confidence, labels, 1).tolist() == [True, False, False, False, True]


def test_clients_see_zero_shot_labels_and_no_others():
    run = tiny_run(tiny_spec("pseudo-labels+promptfl"))
    clip = tiny_backbone("clip:embedded")
    features = clip.encode_images(run.scored.train.images.read(torch.arange(len(run.scored.train))))
    texts = clip.text_features(run.scored.classnames, run.spec.templates)
    expected = (torch.nn.functional.normalize(features, dim=-1) @ texts.T).argmax(1)
    assert torch.equal(run.federation.train.labels, expected)
    assert not torch.equal(expected, run.scored.train.labels), "the tiny data must have images that are labelled wrong"
    assert run.federation.labels_visible and not run.scored.labels_visible
    assert torch.equal(run.federation.class_counts(), torch.bincount(expected, minlength=len(run.scored.classnames)))
    # what is recorded and scored stays the scenario's own
    assert sum(map(sum, run.info.class_counts)) == len(run.scored.train)


def test_by_the_true_labels_it_is_the_method_with_labels_bit_for_bit(monkeypatch):
    truth = tiny_run(tiny_spec("promptfl")).scored.train.labels
    by_truth = lambda features, *_: (torch.ones(len(truth)), truth)  # noqa: E731
    monkeypatch.setattr("fedbench_methods.pseudo_labels.zero_shot", by_truth)
    ours = final_state(tiny_run(tiny_spec("pseudo-labels+promptfl", hidden=True)))
    theirs = tiny_spec("promptfl")
    assert digest(ours) == digest(final_state(tiny_run(theirs)))


def test_what_is_left_out_is_no_clients():
    run = run_of("pseudo-labels", select="top_k", k=2)
    for client in run.federation.clients:
        counts = torch.bincount(run.federation.train.labels[client.indices])
        assert 1 <= counts.max() <= 2
    whole = run_of("pseudo-labels")
    assert len(run.federation.shards.indices) < len(whole.federation.shards.indices) == len(whole.scored.train)
    clip = tiny_backbone("clip:embedded")
    features = clip.encode_images(whole.scored.train.images.read(torch.arange(len(whole.scored.train))))
    texts = clip.text_features(whole.scored.classnames, whole.spec.templates)
    confidence, _ = zero_shot(features, texts, clip.logit_scale)
    threshold = round(float(confidence.quantile(0.2)), 3)
    sure = run_of("pseudo-labels", select="confident", threshold=threshold)
    kept = (confidence >= threshold).nonzero()[:, 0]
    assert torch.equal(sure.federation.shards.indices.sort().values, kept) and len(kept) < len(confidence)
    with pytest.raises(Unworkable, match="gives none of client .* a label"):
        run_of("pseudo-labels", select="confident", threshold=0.99)


def test_it_is_refused_where_labels_are_seen_and_named_where_they_are_not():
    spec = tiny_spec("pseudo-labels+promptfl")
    seen = spec.scenario.model_copy(update={"labels": "visible"})
    with pytest.raises(FedbenchError, match="pseudo-labels gives clients labels, which they have in this scenario"):
        tiny_run(spec.model_copy(update={"scenario": seen}))
    with pytest.raises(FedbenchError, match=r"one that gives labels \(pseudo-labels\+capt\)"):
        tiny_run(tiny_spec("capt", hidden=True))


@pytest.mark.parametrize("wrong", [torch.zeros(3, dtype=torch.int64), torch.zeros(40), 99, -2])
def test_an_answer_that_is_no_labels_is_a_fault_of_the_method(wrong, monkeypatch):
    def kept(self, confidence, labels, clients):
        return wrong if isinstance(wrong, torch.Tensor) else torch.full_like(labels, wrong)

    monkeypatch.setattr(PseudoLabels, "_kept", kept)
    with pytest.raises(MethodFault, match="pseudo-labels answers the hook label with"):
        tiny_run(tiny_spec("pseudo-labels"))
