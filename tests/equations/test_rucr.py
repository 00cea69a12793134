"""RUCR: Huang et al. 2024, prototypes before a round, a prior on the label's logit, a head rectified at the end."""

from dataclasses import replace
from math import exp, log

import pytest
import torch

import fedbench_methods.rucr as rucr
from fedbench.core.method.tasks import ReportedTask
from fedbench.core.types import Model, Outputs
from fedbench.rounds.loop import rounds
from fedbench.testing import digest, final_state, tiny_run, tiny_spec
from fedbench.toolkit.heads import retrained
from fedbench_methods.rucr import RUCR, RUCRParams, merged, scaled_log, unification_loss, virtual_features
from tests.equations.kit import all_of, few, generator, played, spec_of, task_of

# --- prototypes and prior ---

REPORTS = (
    {"means": torch.tensor([[3.0, 4.0], [0.0, 2.0]]), "counts": torch.tensor([1, 0, 2, 0])},
    {"means": torch.tensor([[0.0, 2.0], [6.0, 8.0]]), "counts": torch.tensor([3, 4, 0, 0])},
)


def test_prototypes_are_means_weighted_by_counts_and_zero_where_nobody_has_the_class():
    # class 0: (1 (3, 4) + 3 (0, 2)) / 4
    assert merged(REPORTS).tolist() == [[0.75, 2.5], [6.0, 8.0], [0.0, 2.0], [0.0, 0.0]]


def test_directions_are_means_of_unit_vectors_and_not_brought_to_unit_length():
    # class 0: (1 (.6, .8) + 3 (0, 1)) / 4 = (.15, .95), of length .962
    expected = torch.tensor([[0.15, 0.95], [0.6, 0.8], [0.0, 1.0], [0.0, 0.0]])
    torch.testing.assert_close(merged(REPORTS, unit_length=True), expected)


def told(round, cohort, reports, **params):
    """What the server makes of a survey."""
    state = {}
    spec = tiny_spec("rucr", backbone="convnet", rounds=4)
    RUCR(RUCRParams(**params)).reported(ReportedTask(round, cohort, reports, {}, {}, None, spec, state))
    return state["rucr"]


def test_prototypes_and_prior_are_the_cohorts_and_directions_everyones():
    kept = told(4, (1,), dict(enumerate(REPORTS)), rectify_rounds=1)
    assert torch.equal(kept["prototypes"], merged(REPORTS[1:]))
    torch.testing.assert_close(kept["prior"], torch.tensor([3 / 7, 4 / 7, 0.0, 0.0]))
    assert torch.equal(kept["directions"], merged(REPORTS, unit_length=True))


def test_before_the_last_rounds_there_are_no_directions_and_without_the_term_no_prototypes():
    assert set(told(2, (0, 1), dict(enumerate(REPORTS)), rectify_rounds=1)) == {"prototypes", "prior"}
    assert set(told(3, (0, 1), dict(enumerate(REPORTS)), rectify_rounds=1, loss_weight=0.0)) == {"directions"}


# --- the local term ---


def test_prior_is_on_the_labels_logit_only_by_hand():
    # z along P_0 and across P_1: s = (1, 0), π = .5: the label's logit is 1 - ln 2 = .3069, the loss
    # log(1 + e^-.3069) = .5514; cross-entropy alone would be .3133, and so would a prior on both logits
    loss = unification_loss(
        torch.tensor([[2.0, 0.0]]),
        torch.tensor([0]),
        torch.tensor([[5.0, 0.0], [0.0, 3.0]]),
        scaled_log(torch.tensor([0.5, 0.5]), 1.0),
        torch.tensor([True, True]),
        1.0,
    )
    assert loss.item() == pytest.approx(0.5514, abs=1e-4)
    assert loss.item() == pytest.approx(log(1 + exp(-(1 - log(2)))), abs=1e-6)


def test_similarity_of_a_class_the_client_lacks_is_zero_but_stays_in_the_sum():
    # cosines (.6, .8, 0) / .5 = (1.2, 1.6, 0), the second class not owned: (1.2, 0, 0); loss log(e^1.2 + 2) - 1.2
    features, prototypes = torch.tensor([[3.0, 4.0, 0.0]]), torch.eye(3)
    owned = torch.tensor([True, False, True])
    loss = unification_loss(features, torch.tensor([0]), prototypes, torch.zeros(3), owned, 0.5)
    assert loss.item() == pytest.approx(log(exp(1.2) + 2) - 1.2, abs=1e-6)


def test_weight_of_the_prior_multiplies_its_log_and_a_class_without_samples_has_none():
    got = scaled_log(torch.tensor([0.25, 0.75, 0.0]), 2.0)
    assert got.tolist() == pytest.approx([2 * log(0.25), 2 * log(0.75), 0.0])


def test_prototypes_of_zero_and_features_of_zero_have_finite_gradients():
    features = torch.tensor([[0.0, 0.0], [1.0, 0.0]], requires_grad=True)
    owned = torch.tensor([True, True])
    prior = scaled_log(torch.tensor([1.0, 0.0]), 1.0)
    loss = unification_loss(features, torch.tensor([0, 0]), torch.tensor([[1.0, 1.0], [0.0, 0.0]]), prior, owned, 0.9)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(features.grad).all()


def test_loss_is_the_mean_over_the_batch_and_its_length_does_not_matter():
    args = (torch.eye(2), scaled_log(torch.tensor([0.5, 0.5]), 1.0), torch.tensor([True, True]), 1.0)
    rows, labels = torch.tensor([[2.0, 0.0], [9.0, 9.0]]), torch.tensor([0, 1])
    both = unification_loss(rows, labels, *args)
    parts = [unification_loss(10 * rows[i : i + 1], labels[i : i + 1], *args) for i in (0, 1)]
    torch.testing.assert_close(both, (parts[0] + parts[1]) / 2)


def embedding(tensors, inputs, training):
    """Two features W x, which are the logits as well."""
    features = inputs @ tensors["w"].T
    return Outputs(features, features)


def test_term_is_lambda_times_the_loss_and_absent_without_prototypes(make_step):
    model = Model({"w": torch.eye(2)}, embedding)
    payload = {"prototypes": torch.eye(2), "prior": torch.tensor([0.5, 0.5])}
    weights = {"w": torch.eye(2).requires_grad_()}
    inputs = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    method = RUCR(RUCRParams(loss_weight=0.3, temperature=1.0))
    got = method.loss_terms(make_step(model, inputs, [0, 1], weights=weights, payload=payload))
    assert got.item() == pytest.approx(0.3 * 0.5514, abs=1e-4)
    assert method.loss_terms(make_step(model, inputs, [0, 1], weights=weights)) is None
    off = RUCR(RUCRParams(loss_weight=0.0))
    assert off.loss_terms(make_step(model, inputs, [0, 1], weights=weights, payload=payload)) is None


# --- virtual features ---


def test_at_left_and_right_one_they_are_the_direction_of_their_class():
    directions = torch.tensor([[0.15, 0.95], [0.6, 0.8]])
    got = virtual_features(directions, torch.randn(5, 2, generator=generator()), 7, 1.0, 1.0, generator())
    assert torch.equal(got, directions[:, None].expand(2, 7, 2))


def test_at_zero_they_are_unit_features_of_the_client_without_replacement():
    features = torch.tensor([[3.0, 4.0], [0.0, 5.0], [-2.0, 0.0]])
    got = virtual_features(torch.ones(2, 2), features, 3, 0.0, 0.0, generator())
    expected = sorted([[0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    for kind in got.tolist():
        assert [pytest.approx(row, abs=1e-6) for row in sorted(kind)] == expected


def test_a_client_with_fewer_samples_than_features_starts_over():
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    [got] = virtual_features(torch.ones(1, 2), features, 5, 0.0, 0.0, generator())
    assert sorted(got.sum(0).tolist()) == [2.0, 3.0]


def test_shares_lie_between_left_and_right_and_have_two_decimals_each_sample_its_own():
    # P̂ = (1, 0), z̃ = (0, 1): the first entry is the share
    features = torch.tensor([[0.0, 7.0]])
    got = virtual_features(torch.tensor([[1.0, 0.0]]), features, 2000, 0.35, 0.95, generator())[0]
    shares = got[:, 0].double()
    torch.testing.assert_close(100 * shares, (100 * shares).round(), rtol=0, atol=1e-4)
    assert shares.min() >= 0.35 - 1e-6 and shares.max() <= 0.95 + 1e-6
    assert len(shares.unique()) == 61 and shares.mean().item() == pytest.approx(0.65, abs=0.02)
    torch.testing.assert_close(got.sum(1), torch.ones(2000))


# --- whole runs ---


def spec(method="rucr", backbone="convnet", rounds=2, **params):
    return spec_of(method, few(method, **params), backbone=backbone, rounds=rounds)


def test_who_is_surveyed_by_round():
    made = tiny_spec("rucr", backbone="convnet", rounds=30)
    answers = {
        name: [RUCR(RUCRParams(**params)).survey(number, made, {}) for number in range(1, 32)]
        for name, params in {
            "default": {},
            "rectified only": {"loss_weight": 0.0},
            "term only": {"rectify_rounds": 0},
            "neither": {"rectify_rounds": 0, "loss_weight": 0.0},
        }.items()
    }
    # crt_ep = 20 means the last 21 rounds
    assert answers["default"] == ["cohort"] * 9 + ["everyone"] * 21 + ["nobody"]
    assert answers["rectified only"] == ["nobody"] * 9 + ["everyone"] * 21 + ["nobody"]
    assert answers["term only"] == ["cohort"] * 30 + ["nobody"]
    assert answers["neither"] == ["nobody"] * 31


def test_rectification_alone_trains_as_fedavg_and_evaluates_with_the_rectified_head():
    run = tiny_run(spec(backbone="clip:embedded", rounds=3, loss_weight=0.0, rectify_rounds=1, lr_head=0.1))
    plain = tiny_run(spec("fedavg", "clip:embedded", rounds=3))
    inputs = all_of(run.test)
    both = zip(rounds(run, run.initial_state()), rounds(plain, plain.initial_state()), strict=True)
    for (mine, record, predicted), (theirs, _, its_predicted) in both:
        assert digest(mine) == digest(theirs)
        if record.round < 2:
            assert torch.equal(predicted.labels, its_predicted.labels) and not mine.server.get("rucr")
            continue
        head = mine.server["rucr"]
        assert set(head) == {"head.weight", "head.bias"}
        assert not torch.equal(head["head.weight"], mine.weights["head.weight"])
        assert torch.equal(predicted.labels, run.model.forward(head, inputs, False).logits.argmax(1))


def test_the_term_changes_what_is_trained():
    plain = digest(final_state(tiny_run(spec("fedavg", rounds=1))))
    ours = [digest(final_state(tiny_run(spec(rounds=1, loss_weight=w, rectify_rounds=0)))) for w in (0.15, 1.0)]
    assert len({plain, *ours}) == 3


def test_the_cohort_is_sent_the_prototypes_of_the_model_it_receives(monkeypatch):
    run = tiny_run(spec(rounds=2, rectify_rounds=0))
    seen = []
    original = rucr.unification_loss

    def recorded(features, labels, prototypes, log_prior, owned, temperature):
        seen.append((prototypes, log_prior))
        return original(features, labels, prototypes, log_prior, owned, temperature)

    monkeypatch.setattr(rucr, "unification_loss", recorded)
    before = run.initial_state()
    for after, record, _ in rounds(run, before):
        if record.round == 0:
            continue
        rows = torch.cat([run.federation.clients[client].indices for client in record.cohort])
        labels = run.federation.train.labels[rows]
        outputs = run.model.forward({**before.weights, **before.buffers}, run.train.read(rows), False)
        for prototypes, log_prior in seen:
            for label in labels.unique().tolist():
                mean = outputs.features[labels == label].mean(0)
                torch.testing.assert_close(prototypes[label], mean, rtol=1e-4, atol=1e-6)
                assert log_prior[label].item() == pytest.approx(log((labels == label).double().mean()), abs=1e-5)
        assert seen
        seen.clear()
        before = after


def test_bytes_of_a_round_with_the_term():
    run, ours = played(spec(rounds=1, rectify_rounds=0))
    model, record = run.info.round_bytes, ours[-1][1]
    width = run.model.weights["head.weight"].shape[1]
    owned = sum(int((run.federation.class_counts(client) > 0).sum()) for client in record.cohort)
    # up: the means of owned classes and C counts; down: the model once, P and π
    assert record.bytes_up == 2 * model + 4 * owned * width + 2 * 4 * 8
    assert record.bytes_down == 2 * (model + 4 * 4 * width + 4 * 4)


def test_bytes_of_a_rectifying_round_in_the_middle_of_a_run():
    run, ours = played(spec(backbone="clip:embedded", rounds=2, loss_weight=0.0))
    model, record = run.info.round_bytes, ours[-1][1]
    owned = sum(int((run.federation.class_counts(client) > 0).sum()) for client in range(4))
    # two clients of the cohort send a model and a head, all four their statistics; the two others are sent a model,
    # without what was made of the survey of the round before
    assert record.bytes_up == 2 * (model + 4 * (4 * 128 + 4)) + 4 * owned * 128 + 4 * 4 * 8
    assert record.bytes_down == 2 * (model + 4 * 4 * 128) + 2 * model


@pytest.mark.parametrize(("backbone", "scale"), [("clip:embedded", 16.0), ("convnet", 1.0)])
def test_a_client_trains_its_updated_head_on_mixtures_of_directions_and_received_features(monkeypatch, backbone, scale):
    made = spec(backbone=backbone, loss_weight=0.0)
    run = tiny_run(made.model_copy(update={"head_scale": scale}) if scale != 1 else made)
    seen = {}

    def recorded(directions, features, *args):
        seen.update(features=features, directions=directions)
        seen["made"] = virtual_features(directions, features, *args)
        return seen["made"]

    monkeypatch.setattr(rucr, "virtual_features", recorded)
    state = run.initial_state()
    width = run.model.weights["head.weight"].shape[1]
    directions = torch.nn.functional.normalize(torch.randn(4, width, generator=generator()), dim=1)
    directions[1] = 0
    state.server["rucr"] = {"directions": directions}
    task = task_of(run, 0, state=state)
    [update] = run.executor.train([task])
    inputs = task.inputs.read(torch.arange(len(task.inputs)))
    received = run.model.forward({**task.received, **task.buffers}, inputs, False).features
    torch.testing.assert_close(seen["features"], received)
    # a class without a direction gets no features
    assert torch.equal(seen["directions"], directions[[0, 2, 3]])
    draws = task.generator("virtual-features")
    virtual_features(directions[[0, 2, 3]], seen["features"], 8, 0.35, 0.95, draws)
    weight, bias = retrained(
        scale * seen["made"],
        update.weights["head.weight"],
        update.weights["head.bias"],
        scale,
        2,
        0.01,
        draws,
        classes=torch.tensor([0, 2, 3]),
        batch_size=256,
    )
    assert torch.equal(update.payload["head.weight"], weight) and torch.equal(update.payload["head.bias"], bias)
    assert not torch.equal(weight, update.weights["head.weight"])


def test_rectified_heads_are_averaged_by_samples():
    run = tiny_run(spec(backbone="clip:embedded", rounds=1, loss_weight=0.0))
    taken = []
    state = run.initial_state()
    for after, *_ in rounds(replace(run, executor=Recording(run.executor, taken)), state):
        state = after
    sizes = torch.tensor([update.num_examples for update in taken], dtype=torch.float64)
    assert len(sizes) == 2 and sizes[0] != sizes[1]
    expected = sum(size / sizes.sum() * u.payload["head.weight"] for size, u in zip(sizes, taken, strict=True))
    torch.testing.assert_close(state.server["rucr"]["head.weight"].double(), expected.double(), rtol=1e-6, atol=1e-7)


class Recording:
    """An executor that keeps the updates."""

    def __init__(self, executor, taken):
        self.executor, self.taken = executor, taken

    @property
    def description(self):
        return self.executor.description

    def train(self, tasks):
        updates = self.executor.train(tasks)
        self.taken.extend(updates)
        return updates
