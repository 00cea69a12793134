"""Labels that are wrong or missing: what is drawn, who trains, and that the right ones are within nobody's reach."""

import functools
import types
from dataclasses import replace

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import STEPS
from fedbench.core.scenario import Scenario
from fedbench.kinds.registry import method_names
from fedbench.plugins.assembly import assemble
from fedbench.rounds.exchange import schedule_of
from fedbench.rounds.finetuning import finetuned_metrics
from fedbench.rounds.loop import evaluate, train_round
from fedbench.scenarios import build_federation
from fedbench.scenarios.labels import as_clients_see_it
from fedbench.scenarios.participation import Schedule
from fedbench.testing import digest, final_state, tiny_dataset, tiny_run, tiny_spec


def seen(seed=0, **scenario):
    base = Scenario(clients=4, **scenario)
    federation = build_federation(tiny_dataset(), base, seed)
    return federation, as_clients_see_it(federation, base, seed)


def run_with(method="fedavg", **scenario):
    training = scenario.pop("training", {})
    spec = tiny_spec(method, **training)
    return tiny_run(spec.model_copy(update={"scenario": spec.scenario.model_copy(update=scenario)}))


def wrong(truth, given, client):
    own = truth.clients[client].indices
    return (truth.train.labels[own] != given.train.labels[own]).float().mean().item()


def test_without_noise_and_with_all_labels_the_federation_is_itself():
    truth, given = seen()
    assert given is truth
    truth, given = seen(labels="hidden", label_noise=0.5)
    assert given is truth and not given.labels_visible


def test_symmetric_noise_hits_every_other_class_and_pairwise_the_next():
    truth, given = seen(label_noise=0.5)
    held, classes = truth.shards.indices, truth.num_classes
    away = (given.train.labels - truth.train.labels)[held] % classes
    assert set(away.tolist()) == set(range(classes))
    assert 0.3 < (away > 0).float().mean() < 0.7
    truth, given = seen(label_noise=0.5, noise_kind="pairwise")
    assert set(((given.train.labels - truth.train.labels)[held] % classes).tolist()) == {0, 1}


def test_more_noise_keeps_the_wrong_labels_of_less():
    truth, little = seen(label_noise=0.2)
    _, much = seen(label_noise=0.6)
    is_wrong = little.train.labels != truth.train.labels
    held = torch.zeros_like(is_wrong)
    held[truth.shards.indices] = True
    is_wrong &= held
    assert is_wrong.any() and torch.equal(little.train.labels[is_wrong], much.train.labels[is_wrong])
    assert not torch.equal(seen(1, label_noise=0.2)[1].train.labels, little.train.labels)
    # the partition's seed replaces the run's
    same = seen(1, label_noise=0.2, partition_seed=0)[1]
    assert torch.equal(same.train.labels, little.train.labels)


def test_noise_of_some_clients_and_at_rates_of_their_own():
    truth, given = seen(label_noise=0.9, noisy_clients=0.5)
    rates = [wrong(truth, given, client) for client in range(4)]
    assert sorted(rate > 0.6 for rate in rates) == [False, False, True, True] and sorted(rates)[:2] == [0, 0]
    truth, given = seen(label_noise=0.9, noise_rates="drawn")
    rates = [wrong(truth, given, client) for client in range(4)]
    assert len(set(rates)) == 4 and max(rates) - min(rates) > 0.2 and max(rates) < 0.95


def test_of_every_client_a_share_of_the_samples_has_labels():
    truth, given = seen(labelled_samples=0.25)
    for client in truth.clients:
        has = given.train.labels[client.indices] >= 0
        assert has.sum() == max(round(0.25 * len(has)), 1)
        assert torch.equal(given.train.labels[client.indices][has], truth.train.labels[client.indices][has])
    truth, given = seen(labelled_samples=0.001)
    assert [int((given.train.labels[c.indices] >= 0).sum()) for c in truth.clients] == [1, 1, 1, 1]
    # all samples of half the clients, and of theirs a half
    truth, given = seen(labelled_clients=0.5)
    assert sorted(int((given.train.labels[c.indices] >= 0).all()) for c in truth.clients) == [0, 0, 1, 1]
    shares = [
        (seen(labelled_clients=0.5, labelled_samples=0.5)[1].train.labels[c.indices] >= 0).float().mean()
        for c in truth.clients
    ]
    assert sorted(round(float(share), 1) for share in shares) == [0, 0, 0.5, 0.5]


def test_samples_without_labels_are_no_clients_and_clients_are_scored_by_all_of_theirs():
    run, whole = run_with(labelled_samples=0.5), run_with()
    assert len(run.federation.shards.indices) < len(whole.federation.shards.indices)
    assert torch.equal(run.scored.train.labels, whole.scored.train.labels)
    assert torch.equal(run.scored.shards.indices, whole.scored.shards.indices)
    noisy = run_with(label_noise=0.5)
    assert not torch.equal(noisy.federation.train.labels, whole.federation.train.labels)
    assert torch.equal(noisy.scored.class_table.totals(), whole.scored.class_table.totals())
    assert digest(final_state(noisy)) != digest(final_state(whole)) != digest(final_state(run))


def test_who_has_no_label_takes_no_part_and_is_scored_all_the_same():
    run = run_with(labelled_clients=0.5, participation=1.0, training={"finetune_epochs": 1})
    sizes = run.federation.shards.sizes
    able = tuple(torch.nonzero(sizes).flatten().tolist())
    assert len(able) == 2 and schedule_of(run, 1).chosen == schedule_of(run, 1).training == able
    state, record = train_round(run, run.initial_state())
    assert record.cohort == able and record.bytes_down == 2 * run.info.round_bytes
    metrics = {**evaluate(run, final_state(run, state))[0], **finetuned_metrics(run, state)}
    assert 0 <= metrics["worst_client_accuracy"] <= metrics["mean_client_accuracy"] <= 100
    assert 0 <= metrics["finetuned_worst_client_accuracy"] <= 100


def test_a_schedule_among_the_able():
    drawn = Schedule((0, 1, 2, 3), (0, 1, 3), frozenset({1, 3}), {0: 0.5, 1: 0.7}, frozenset({0}))
    able = torch.tensor([True, False, True, True])
    assert drawn.among(able) == Schedule((0, 2, 3), (0, 3), frozenset({3}), {0: 0.5}, frozenset({0}))
    assert drawn.among(torch.ones(4, dtype=torch.bool)) is drawn


# these give labels, or learn from none
UNLABELLED = {"pseudo-labels"}


@pytest.mark.parametrize("method", sorted(set(method_names()) - UNLABELLED))
def test_every_method_trains_where_half_the_clients_have_labels(method):
    try:
        run = run_with(method, labelled_clients=0.5, participation=1.0, training={"rounds": 1})
    except FedbenchError as error:
        # a class that nobody with labels has; or a method that pools or needs data that are not here
        assert "\n" not in str(error)
        pytest.skip(str(error))
    state = final_state(run)
    metrics, _ = evaluate(run, state)
    assert all(value == value for name, value in metrics.items() if "accuracy" in name)
    assert all(torch.isfinite(tensor).all() for tensor in state.weights.values())


def tensors_within(thing, seen_ids):
    """Every tensor that can be reached from ``thing`` by attributes, items, closures and bound arguments."""
    if id(thing) in seen_ids or isinstance(thing, str | bytes | int | float | type | types.ModuleType | Thief | None):
        return
    seen_ids[id(thing)] = thing
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    if isinstance(thing, dict):
        inner = [*thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset):
        inner = [*thing]
    elif isinstance(thing, functools.partial):
        inner = [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, types.MethodType):
        inner = [thing.__self__, thing.__func__]
    elif isinstance(thing, types.FunctionType):
        inner = [cell.cell_contents for cell in thing.__closure__ or () if cell_is_filled(cell)]
    else:
        inner = list(getattr(thing, "__dict__", {}).values())
    for each in inner:
        yield from tensors_within(each, seen_ids)


def cell_is_filled(cell):
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class Thief:
    """Looks through all that hooks are handed."""

    def __init__(self):
        self.handed, self.found = set(), []

    def spy_on(self, hook):
        def asked(**handed):
            for thing in handed.values():
                self.handed.add(type(thing).__name__)
                self.found += [t.detach().flatten() for t in tensors_within(thing, {}) if t.dtype == torch.int64]
            return hook(**handed)

        return asked

    def assemble(self, *given):
        assembly = assemble(*given)
        return replace(
            assembly, hooks=types.SimpleNamespace(**{h: self.spy_on(getattr(assembly.hooks, h)) for h in STEPS})
        )


HANDED = {
    "Federation",
    "ModelSetup",
    "StartTask",
    "BroadcastTask",
    "ClientTask",
    "LocalStep",
    "AggregationTask",
    "EvaluationTask",
}


@pytest.mark.parametrize(
    ("method", "scenario"),
    [
        ("fst-cbdg", {"labels": "hidden"}),
        ("pseudo-labels+promptfl", {"labels": "hidden"}),
        ("pseudo-labels", {"labels": "visible", "labelled_samples": 0.5}),
        ("fedavg", {"labelled_samples": 0.5}),
        ("fedavg", {"labelled_clients": 0.5}),
        ("fedavg", {"label_noise": 0.5}),
        ("fedavg", {}),
    ],
)
def test_no_label_that_is_withheld_can_be_reached_from_what_a_hook_is_handed(method, scenario, monkeypatch):
    thief = Thief()
    spec = tiny_spec(method)
    spec = spec.model_copy(update={"scenario": spec.scenario.model_copy(update=scenario)})
    monkeypatch.setattr("fedbench.runs.prepare.assemble", thief.assemble)
    run = tiny_run(spec, executor="sequential")
    final_state(run)
    assert thief.handed >= HANDED
    truth, test = run.scored.train.labels, run.scored.test.labels
    # the labels of all that are tested, of all training samples, and of each client's, in their order
    secrets = [test]
    if scenario:
        secrets += [truth, *(truth[client.indices] for client in run.scored.clients)]
    if "labelled_clients" in scenario:
        secrets = [test, truth]  # half the clients know all of theirs
    for secret in secrets:
        same = [found for found in thief.found if found.shape == secret.shape and torch.equal(found, secret)]
        assert not same, f"{len(same)} of the tensors within reach are labels that are withheld"
    if not scenario:
        # that the thief finds labels where clients have them
        own = truth[run.scored.clients[0].indices]
        assert any(found.shape == own.shape and torch.equal(found, own) for found in thief.found)
