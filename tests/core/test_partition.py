"""Federations in few tensors: what clients hold, what they report, and that no object is kept a client."""

import gc
import math
from types import FunctionType, ModuleType

import pytest
import torch

from fedbench.core import federation as module
from fedbench.core.federation import ClassTable, ClientShard, Dataset, Federation, Measured, Shards, Split, TensorImages
from fedbench.core.types import Predictions
from fedbench.rounds.exchange import Reports
from fedbench.rounds.metrics import client_accuracies, own_accuracies, per_class_accuracy, percent_right, score
from fedbench.scenarios import Scenario, build_federation


def split(labels, domains=None):
    blank = TensorImages(torch.zeros(1, 3, 1, 1, dtype=torch.uint8).expand(len(labels), 3, 1, 1))
    return Split(blank, torch.as_tensor(labels), domains)


# client 7 holds samples 0, 1, 2 and 3 (cat, cat, owl, cat), client 9 samples 4 and 2 (owl, owl): 2 is shared
LABELS = [0, 0, 2, 0, 2, 1]
CLIENTS = (
    ClientShard(7, torch.tensor([0, 1, 2, 3]), torch.tensor([0]), torch.tensor([1])),
    ClientShard(9, torch.tensor([4, 2])),
)


def hand_made(clients=CLIENTS, **more):
    return Federation(clients, split(LABELS), split([0, 1, 2, 2]), ("cat", "dog", "owl"), **more)


def built(clients, samples=3000, classes=10, **more):
    labels = torch.arange(samples) % classes
    names = tuple(f"class {number}" for number in range(classes))
    data = Dataset("toy", names, split(labels), split(torch.arange(50) % classes), "hash")
    return build_federation(data, Scenario(clients=clients, **more), seed=0)


def reachable(root):
    """How many objects hang on ``root``, its tensors and their like included; classes and code are none of them."""
    seen, waiting = set(), [root]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, (type, ModuleType, FunctionType)):
            seen.add(id(one))
            waiting += gc.get_referents(one)
    return len(seen)


def test_shards_give_back_the_clients_they_were_made_of():
    shards = Shards.of(CLIENTS)
    assert [(one.id, one.indices.tolist()) for one in shards] == [(7, [0, 1, 2, 3]), (9, [4, 2])]
    first, second = shards
    assert (first.test_indices is CLIENTS[0].test_indices, first.validation_indices.tolist()) == (True, [1])
    assert second.test_indices is None and second.validation_indices is None
    assert len(shards) == 2 and shards.sizes.tolist() == [4, 2]
    assert shards[-1].id == 9 and [one.id for one in shards[:1]] == [7]
    assert Shards.of(shards) is shards and len(Shards.of(())) == 0
    for outside in (2, -3):
        with pytest.raises(IndexError):
            shards[outside]


def test_clients_without_more_said_share_the_test_split():
    shards = Shards(torch.tensor([3, 1, 2]), torch.tensor([0, 1, 3]), torch.arange(2))
    assert [one.test_indices for one in shards] == [None, None]
    assert shards.measured_alike(0).tolist() == [True, True]


def test_clients_of_a_domain_share_one_tensor_of_test_samples():
    domains = torch.arange(24) % 2
    data = Dataset("toy", ("a",), split([0] * 24, domains), split([0] * 24, domains), "hash", ("art", "photo"))
    federation = build_federation(data, Scenario(partition="domain", clients_per_domain=4), seed=0)
    tests = [shard.test_indices for shard in federation.clients]
    assert len(tests) == 8 and len({id(one) for one in tests}) == 2
    assert federation.shards.measured_alike(1).tolist() == [False] * 4 + [True] * 4
    assert tests[4].tolist() == list(range(1, 24, 2))


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards", "classes_per_client", "creff_equal"])
def test_no_object_is_kept_a_client(partition):
    few, many = (built(n, partition=partition, min_client_size=1, dirichlet_alpha=100) for n in (10, 500))
    for federation in (few, many):
        score(Predictions(torch.zeros(50, dtype=torch.int64)), federation)
        federation.class_counts()
    assert reachable(few) == reachable(many) < 200
    # 8 bytes a sample and at most 8 a cell of the class table; ids and twice offsets by client
    tensors = (many.shards.indices, many.shards.offsets, many.shards.ids, *many.class_table.__dict__.values())
    assert sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor)) <= 3000 * 16 + 501 * 24


def test_the_class_table_by_hand():
    table = hand_made().class_table
    assert table.rows(0, 2).tolist() == [[3, 0, 1], [0, 0, 2]] and table.rows(1, 2).tolist() == [[0, 0, 2]]
    assert table.classes.tolist() == [0, 2, 2] and table.counts.tolist() == [3, 1, 2]
    assert table.totals().tolist() == [3, 0, 3]
    assert table.samples_of(torch.tensor([True, True, False])).tolist() == [3, 0]
    assert table.sums(torch.tensor([10.0, 5.0, 1.0], dtype=torch.float64)).tolist() == [31.0, 2.0]
    assert len(table) == 2


def test_class_counts_are_of_one_client_or_of_all():
    federation = hand_made()
    assert federation.class_counts(0).tolist() == [3, 0, 1] and federation.class_counts(1).tolist() == [0, 0, 2]
    assert federation.class_counts().tolist() == [3, 0, 3]
    other = federation.with_clients((ClientShard(0, torch.tensor([5])),))
    assert other.class_counts().tolist() == [0, 1, 0] == other.class_table.rows(0, 1)[0].tolist()


@pytest.mark.parametrize("at_once", [1, 37, 1_000_000])
@pytest.mark.parametrize("classes", [1, 10, 33])
def test_the_table_is_the_same_in_whatever_spans_it_is_made(monkeypatch, at_once, classes):
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    federation = built(40, samples=900, classes=classes, partition="dirichlet", min_client_size=1)
    table = ClassTable.of(federation.shards, federation.train.labels, classes)
    counts = torch.stack([federation.class_counts(client) for client in range(40)])
    assert torch.equal(table.rows(0, 40), counts)
    weights = torch.rand(classes, dtype=torch.float64)
    expected = torch.stack([(row.double() * weights).sum() for row in counts])
    assert torch.equal(table.sums(weights), expected)


def one_by_one(predictions, federation):
    """Accuracies of clients, a client at a time and from all its classes."""
    found, labels = [], federation.test.labels
    for position, shard in enumerate(federation.clients):
        right = predictions.by_client.get(shard.id, predictions.labels) == labels
        if shard.test_indices is not None and len(shard.test_indices):
            found.append(percent_right(right[shard.test_indices]))
            continue
        by_class = per_class_accuracy(right, labels, federation.num_classes)
        known = torch.tensor([accuracy is not None for accuracy in by_class])
        values = torch.tensor([accuracy or 0.0 for accuracy in by_class], dtype=torch.float64)
        counts = federation.class_counts(position).double() * known
        if float(counts.sum()) > 0:
            found.append(float((counts * values).sum() / counts.sum()))
    return found


@pytest.mark.parametrize("classes", [1, 7, 16, 100, 345])
@pytest.mark.parametrize("personal", [False, True])
def test_client_accuracies_are_bit_for_bit_those_of_each_client_alone(classes, personal):
    federation = built(60, samples=2000, classes=classes, partition="dirichlet", min_client_size=1, dirichlet_alpha=5)
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(0, classes, (61, 50), generator=generator)
    predicted = torch.where(torch.rand(61, 50, generator=generator) < 0.6, federation.test.labels, draws)
    own = dict(enumerate(predicted[:60])) if personal else {}
    predictions = Predictions(predicted[60], {client: row for client, row in own.items() if client % 3})
    found = own_accuracies(predictions, federation) if personal else client_accuracies(predicted[60], federation)
    assert found == one_by_one(predictions, federation)


def test_client_accuracies_by_hand_with_own_tests_shared_tests_and_a_client_to_leave_out():
    # tested: cat, dog, owl, owl; right are cat and one owl, so by class 100, 0, 50
    clients = (*CLIENTS, ClientShard(3, torch.tensor([0, 5])), ClientShard(4, torch.tensor([5])))
    # 7 by its own test sample 0; 9 has owls: 50; 3 a cat and a dog: 50; 4 a dog: 0
    predicted = torch.tensor([0, 0, 2, 0])
    assert client_accuracies(predicted, hand_made(clients)) == [100, 50, 50, 0]
    # nobody is tested on dogs: 3 is scored by its cat, 4 not at all
    untested = Federation(clients, split(LABELS), split([0, 2, 2]), ("cat", "dog", "owl"))
    assert client_accuracies(torch.tensor([0, 2, 0]), untested) == [100, 50, 100]
    # the clients' own models: 7 is wrong on sample 0, 9 right on both owls
    mine = {7: torch.tensor([1, 0, 0, 0]), 9: torch.tensor([1, 0, 2, 2])}
    assert own_accuracies(Predictions(predicted, mine), hand_made(clients)) == [0, 100, 50, 0]


def test_per_class_accuracy_is_none_for_a_class_without_samples():
    right = torch.tensor([True, False, True, True])
    assert per_class_accuracy(right, torch.tensor([0, 0, 0, 2]), 4) == [100 * (2 / 3), None, 100.0, None]


def test_metrics_are_as_many_for_many_clients_as_for_few():
    predictions = Predictions(torch.zeros(50, dtype=torch.int64))
    few, many = (score(predictions, built(clients)) for clients in (5, 300))
    assert few.keys() == many.keys()
    assert not any(math.isnan(value) for value in many.values())


def test_reports_are_made_when_they_are_read(monkeypatch):
    asked = []
    monkeypatch.setattr(ClassTable, "rows", lambda self, first, last: asked.append(first) or torch.tensor([[first]]))
    reports = Reports(hand_made())
    assert len(reports) == 2 and asked == []
    assert (reports[1].client, reports[1].num_examples, reports[1].class_counts.tolist()) == (1, 2, [1])
    assert asked[-1] == 1 and set(asked) == {1}
    assert [(report.client, report.num_examples) for report in reports] == [(0, 4), (1, 2)]
    assert [report.client for report in reports[-1:]] == [1] and reports[-2].client == 0
    with pytest.raises(IndexError):
        reports[2]


def test_reports_have_no_counts_where_labels_are_hidden():
    assert [report.class_counts for report in Reports(hand_made(labels_visible=False))] == [None, None]


def test_measured_is_of_a_test_and_a_validation_split():
    shards = Shards.of(CLIENTS)
    assert [own.test is None for own in shards.measured] == [False, True]
    assert shards.measured_by(1).test is None and Measured().validation is None
