"""FPL: Huang et al. 2023: cluster prototypes and unbiased ones."""

import math

import pytest
import torch

from fedbench.core.types import Model, Outputs, Update
from fedbench.toolkit.fedavg import average
from fedbench_methods.fpl import CLASSES, CLUSTERS, FPL, KNOWN, UNBIASED, FPLParams, cluster_contrast, cluster_means
from fedbench_methods.shared.clustering import first_neighbour_clusters
from tests.equations.kit import aggregation


def at(*degrees):
    angles = torch.tensor(degrees) * math.pi / 180
    return torch.stack([angles.cos(), angles.sin()], 1)


def test_rows_and_their_nearest_are_in_one_cluster():
    # three pairs; over their means 5 and 87.5 are nearest, and 190 is to 87.5: one cluster, which is not taken
    assert first_neighbour_clusters(at(0.0, 10.0, 80.0, 95.0, 180.0, 200.0)).tolist() == [0, 0, 1, 1, 2, 2]
    assert first_neighbour_clusters(at(180.0, 0.0, 200.0, 10.0)).tolist() == [0, 1, 0, 1]


def test_clusters_are_merged_while_more_than_one_are_left():
    # pairs at 1, 11, 181, 191: again in pairs, then one, which is not taken
    rows = at(0.0, 2.0, 10.0, 12.0, 180.0, 182.0, 190.0, 192.0)
    assert first_neighbour_clusters(rows).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_chain_is_one_cluster_and_lengths_do_not_count():
    assert first_neighbour_clusters(at(0.0, 10.0, 19.0)).tolist() == [0, 0, 0]
    rows = at(0.0, 10.0, 180.0, 190.0) * torch.tensor([[1.0], [100.0], [1.0], [0.01]])
    assert first_neighbour_clusters(rows).tolist() == [0, 0, 1, 1]
    assert first_neighbour_clusters(at(5.0)).tolist() == [0] and first_neighbour_clusters(at(0.0, 180.0)).tolist() == [
        0,
        0,
    ]


def test_two_large_domains_do_not_outweigh_a_small_one():
    means = torch.cat([at(0.0, 1.0, 2.0, 3.0), at(90.0, 91.0)])
    clusters = cluster_means(means)
    assert len(clusters) == 2
    torch.testing.assert_close(clusters, torch.stack([means[:4].mean(0), means[4:].mean(0)]))


def test_contrast_by_hand_whatever_the_lengths():
    clusters, classes = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]]), torch.tensor([0, 0, 1])
    features = torch.tensor([[5.0, 0.0]])
    # cosines 1, 0, -1 at tau .5: e^2, 1, e^-2
    e = math.e
    value = cluster_contrast(features, torch.tensor([0]), clusters, classes, 0.5).item()
    assert value == pytest.approx(-math.log((e**2 + 1) / (e**2 + 1 + e**-2)))
    other = cluster_contrast(features, torch.tensor([1]), clusters, classes, 0.5).item()
    assert other == pytest.approx(-math.log(e**-2 / (e**2 + 1 + e**-2)), rel=1e-5)


def test_both_terms_are_divided_by_the_batch_and_samples_of_unknown_classes_have_none(make_step):
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    sent = {
        CLUSTERS: torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), CLASSES: torch.tensor([0, 2]),
        UNBIASED: torch.tensor([[1.0, 2.0], [0.0, 0.0], [-1.0, 0.0]]), KNOWN: torch.tensor([True, False, True]),
    }  # fmt: skip
    step = make_step(
        Model({"w": torch.zeros(2)}, None), features, [0, 1], num_classes=3, payload=sent,
        outputs=Outputs(torch.zeros(2, 3), features),
    )  # fmt: skip
    # sample 0: cosines 1, -1 at tau 1, and (0 + 4) / 2; sample 1: nothing
    wanted = (math.log(1 + math.exp(-2)) + 2) / 2
    assert FPL(FPLParams(tau=1.0)).loss_terms(step).item() == pytest.approx(wanted)
    assert FPL(FPLParams(tau=1.0, lam=0.1)).loss_terms(step).item() == pytest.approx(0.1 * wanted)
    assert FPL(FPLParams(lam=0.0)).loss_terms(step) is None


def holds(by):
    return torch.tensor([c in by for c in range(3)])


def aggregated(sent, state):
    updates = tuple(
        Update(k, {"w": torch.zeros(1)}, {}, 1, {"fpl.means": torch.stack([*by.values()]), "fpl.holds": holds(by)})
        for k, by in enumerate(sent)
    )
    FPL(FPLParams()).aggregate(aggregation({"w": torch.zeros(1)}, updates, state), average)
    return state["fpl"]


def test_prototypes_of_clusters_unbiased_means_and_classes_nobody_has():
    state = {}
    near, far = at(0.0, 4.0, 90.0, 92.0), torch.tensor([0.5, 0.5])
    kept = aggregated([{0: near[0]}, {0: near[1]}, {0: near[2], 2: far}, {0: near[3]}], state)
    assert kept[CLASSES].tolist() == [0, 0, 2] and kept[KNOWN].tolist() == [True, False, True]
    torch.testing.assert_close(kept[CLUSTERS], torch.stack([near[:2].mean(0), near[2:].mean(0), far]))
    torch.testing.assert_close(kept[UNBIASED], torch.stack([near.mean(0), torch.zeros(2), far]))
    # in the next round nobody has class 2, and class 0 is someone else's
    again = aggregated([{0: far}], state)
    assert again[CLASSES].tolist() == [0, 2] and torch.equal(again[CLUSTERS], torch.stack([far, far]))
