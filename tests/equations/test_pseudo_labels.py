"""Pseudo-labels by hand, what they leave out, and that they are all that a method sees of hidden labels."""

import math
from dataclasses import replace

import pytest
import torch

from fedbench.core.errors import FedbenchError, MethodFault, Unworkable
from fedbench.rounds.messages import relabelled
from fedbench.testing import digest, final_state, tiny_backbone, tiny_run, tiny_spec
from fedbench_methods.pseudo_labels import PseudoLabels, class_means, top_of_each_class, zero_shot
from tests.equations.kit import end_of, run_of, runs, spec_of, task_of

label_run = runs("pseudo-labels", backbone="")


def test_label_and_confidence_by_hand():
    features = torch.tensor([[3.0, 0.0], [0.0, 0.5], [2.0, 2.0]])
    confidence, labels = zero_shot(features, torch.eye(2), 2.0).max(dim=-1)
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
    run = run_of("pseudo-labels+promptfl")
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
    truth = run_of("promptfl").scored.train.labels
    by_truth = lambda *_: torch.nn.functional.one_hot(truth).float()  # noqa: E731
    monkeypatch.setattr("fedbench_methods.pseudo_labels.zero_shot", by_truth)
    ours = end_of("pseudo-labels+promptfl", hidden=True)
    theirs = tiny_spec("promptfl")
    assert digest(ours) == digest(final_state(tiny_run(theirs)))


def test_what_is_left_out_is_no_clients():
    run = label_run(params={"select": "top_k", "k": 2})
    for client in run.federation.clients:
        counts = torch.bincount(run.federation.train.labels[client.indices])
        assert 1 <= counts.max() <= 2
    whole = label_run()
    assert len(run.federation.shards.indices) < len(whole.federation.shards.indices) == len(whole.scored.train)
    clip = tiny_backbone("clip:embedded")
    features = clip.encode_images(whole.scored.train.images.read(torch.arange(len(whole.scored.train))))
    texts = clip.text_features(whole.scored.classnames, whole.spec.templates)
    confidence, _ = zero_shot(features, texts, clip.logit_scale).max(dim=-1)
    threshold = round(float(confidence.quantile(0.2)), 3)
    sure = label_run(params={"select": "confident", "threshold": threshold})
    kept = (confidence >= threshold).nonzero()[:, 0]
    assert torch.equal(sure.federation.shards.indices.sort().values, kept) and len(kept) < len(confidence)
    with pytest.raises(Unworkable, match="gives no client's samples a label"):
        label_run(params={"select": "confident", "threshold": 0.99})


@pytest.mark.parametrize("wrong", [torch.zeros(3, dtype=torch.int64), torch.zeros(40), 99, -2])
def test_an_answer_that_is_no_labels_is_a_fault_of_the_method(wrong, monkeypatch):
    def kept(self, confidence, labels, clients):
        return wrong if isinstance(wrong, torch.Tensor) else torch.full_like(labels, wrong)

    monkeypatch.setattr(PseudoLabels, "_kept", kept)
    with pytest.raises(MethodFault, match="pseudo-labels answers the hook label with"):
        run_of("pseudo-labels")


def tasks_of(run, client):
    """Tasks of ``client`` in two rounds, as they go to training."""
    state = run.initial_state()
    tasks = [task_of(run, client, state=state, round=number) for number in (1, 2)]
    return [relabelled(run, [task]) for task in tasks]


def test_soft_labels_are_drawn_from_the_probabilities_anew_every_round(monkeypatch):
    made = []
    init = PseudoLabels.__init__
    monkeypatch.setattr(PseudoLabels, "__init__", lambda self, params: (made.append(self), init(self, params))[1])
    run = label_run(params={"labels": "soft"})
    plugin = made[-1]
    plugin._of_clients[0] = torch.full_like(plugin._of_clients[0], 0.25)
    (first,), (second,) = tasks_of(run, 0)
    assert len(first.inputs) == len(run.federation.clients[0].indices) and not torch.equal(first.labels, second.labels)
    assert torch.equal(first.class_counts, torch.bincount(first.labels, minlength=4))
    # of samples whose probability is all on one class, that class
    sure = torch.arange(len(first.labels)) % 4
    plugin._of_clients[0] = torch.nn.functional.one_hot(sure, 4).float()
    assert all(torch.equal(task.labels, sure) for (task,) in tasks_of(run, 0))


def test_refreshed_labels_are_those_of_the_received_model():
    run = label_run(params={"refresh": "round"})
    state = run.initial_state()
    weights = {name: torch.randn(t.shape, generator=torch.manual_seed(1)) for name, t in state.weights.items()}
    state = replace(state, weights=weights)
    task = task_of(run, 1, state=state)
    [asked] = relabelled(run, [task])
    logits = run.model.forward(weights, task.inputs.read(torch.arange(len(task.inputs))), False).logits
    assert torch.equal(asked.labels, logits.argmax(1)) and not torch.equal(asked.labels, task.labels)
    some = label_run(params={"refresh": "round", "select": "top_k", "k": 1})
    [few] = relabelled(some, [task_of(some, 1, state=state)])
    assert torch.equal(few.labels.sort().values, logits.argmax(1).unique())
    none = label_run(params={"refresh": "round", "select": "confident", "threshold": 0.99})
    even = replace(state, weights={name: torch.zeros_like(t) for name, t in weights.items()})
    assert relabelled(none, [task_of(none, 1, state=even)]) == []


def test_by_the_servers_samples_texts_are_class_means():
    features = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]])
    means = class_means(features, torch.tensor([0, 0, 1]), 3)
    torch.testing.assert_close(means, torch.tensor([[0.5**0.5, 0.5**0.5], [1.0, 0.0], [0.0, 0.0]]))
    with pytest.raises(FedbenchError, match="needs labelled samples at the server"):
        label_run(params={"by": "server"})
    granted = {"server_samples": 5, "server_labels": "visible"}
    run, plain = label_run(params={"by": "server"}, scenario=granted), label_run(scenario=granted)
    held = run.federation.shards.indices
    assert not torch.equal(run.federation.train.labels[held], plain.federation.train.labels[held])
    truth = run.scored.train.labels[held]
    assert (run.federation.train.labels[held] == truth).float().mean() > 0.5


def test_own_labels_stay_and_only_the_others_are_given():
    few = {"labels": "visible", "labelled_samples": 0.5}
    for more in ({}, {"labels": "soft"}, {"refresh": "round", "labels": "soft"}):
        run = label_run(params=more, scenario=few)
        for (task,) in tasks_of(run, 0):
            own = run.federation.clients[0].indices
            assert len(task.inputs) == len(own)
            has = ~run.given[own]
            assert 0 < has.sum() < len(own) and torch.equal(task.labels[has], run.scored.train.labels[own][has])


@pytest.mark.parametrize("params", [{"labels": "soft"}, {"refresh": "round", "labels": "soft"}])
def test_labels_that_change_are_the_same_by_both_executors_and_after_a_stop(params):
    spec = spec_of("pseudo-labels", {"pseudo-labels": params})
    whole = final_state(tiny_run(spec, executor="sequential"))
    half = final_state(tiny_run(spec), until=2)
    assert digest(final_state(tiny_run(spec, executor="sequential"), half)) != digest(half)
    together, again = final_state(tiny_run(spec)), final_state(tiny_run(spec), half)
    assert digest(together) == digest(again)
    for name, tensor in whole.weights.items():
        torch.testing.assert_close(together.weights[name], tensor, rtol=1e-4, atol=1e-5)
