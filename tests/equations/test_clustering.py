"""Client clusters: CAPT (arXiv 2503.06993), Eqs. 5 and 6 and appendix D, and means inside clusters."""

from math import log
from typing import get_args

import pytest
import torch

from fedbench.toolkit.fedavg import weighted_mean
from fedbench_methods.shared.clustering import (
    Algorithm,
    Similarity,
    class_shares,
    client_weights,
    cluster_means,
    cluster_rows,
    clustered_average,
    complementarity,
    complementary_clients,
    group_share,
    head_and_tail,
    jensen_shannon,
    similar_clients,
    similarity_matrix,
    snake_deal,
    weighted_means,
)


def shares(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_class_shares_are_counts_over_their_sum_and_an_empty_client_has_none():
    got = class_shares(torch.tensor([[1, 3], [0, 0]]))
    assert got.tolist() == [[0.25, 0.75], [0.0, 0.0]]


def test_jensen_shannon_of_disjoint_clients_is_ln_2():
    # m = (1/2, 1/2): KL(p || m) = 1 ln 2, KL(q || m) = 1 ln 2
    got = jensen_shannon(shares((1, 0), (0, 1)))
    torch.testing.assert_close(got, torch.tensor([[0, log(2)], [log(2), 0]], dtype=torch.float64))


def test_jensen_shannon_by_hand():
    # p = (1/2, 1/2), q = (1, 0), m = (3/4, 1/4):
    # KL(p || m) = 1/2 ln(2/3) + 1/2 ln 2 = 1/2 ln(4/3);  KL(q || m) = ln(4/3);  JS = 3/4 ln(4/3)
    got = jensen_shannon(shares((0.5, 0.5), (1, 0)))
    assert got[0, 1].item() == pytest.approx(0.75 * log(4 / 3)) and torch.equal(got, got.T)


def test_similarities_by_hand():
    p, q = (0.5, 0.5), (0.25, 0.75)
    expected = {
        # m = (3/8, 5/8): KL(p||m) = 1/2 ln(4/3) + 1/2 ln(4/5), KL(q||m) = 1/4 ln(2/3) + 3/4 ln(6/5)
        "js": 1 - 0.5 * (0.5 * log(4 / 3) + 0.5 * log(4 / 5) + 0.25 * log(2 / 3) + 0.75 * log(6 / 5)),
        # KL(p||q) = 1/2 ln 2 + 1/2 ln(2/3); KL(q||p) = 1/4 ln(1/2) + 3/4 ln(3/2)
        "kl": 1 / (1 + 0.5 * (0.5 * log(2) + 0.5 * log(2 / 3) + 0.25 * log(0.5) + 0.75 * log(1.5))),
        "wasserstein": 1 - 0.25,  # a quarter moves one class on, of K - 1 = 1
        "total_variation": 1 - 0.25,
        "cosine": 0.5 / (0.5**0.5 * 0.625**0.5),  # (1/8 + 3/8) / (|p| |q|)
    }
    assert set(expected) == set(get_args(Similarity))
    for measure, value in expected.items():
        got = similarity_matrix(shares(p, q), measure)
        assert got[0, 1].item() == pytest.approx(value, abs=1e-3), measure
        torch.testing.assert_close(got.diagonal(), torch.ones(2, dtype=torch.float64))
        torch.testing.assert_close(got, got.T)


def test_wasserstein_counts_how_far_apart_classes_are_and_total_variation_does_not():
    rows = shares((1, 0, 0), (0, 1, 0), (0, 0, 1))
    # one of K - 1 = 2 steps, and both
    assert similarity_matrix(rows, "wasserstein")[0].tolist() == [1.0, 0.5, 0.0]
    assert similarity_matrix(rows, "total_variation")[0].tolist() == [1.0, 0.0, 0.0]


def test_kl_is_finite_for_clients_without_common_classes():
    got = similarity_matrix(shares((1, 0), (0, 1)), "kl")
    # shares 1.001 / 1.002 and .001 / 1.002: KL = (1 / 1.002) ln 1001 = 6.8949, both ways
    assert got[0, 1].item() == pytest.approx(1 / 7.8949, abs=1e-5)


def test_complementarity_by_hand():
    # shares of head (class 0) and tail (class 2): h = (1, 1/4), t = (0, 1/2)
    rows = shares((1, 0, 0), (0.25, 0.25, 0.5))
    h, t = group_share(rows, (0,)), group_share(rows, (2,))
    # C_01 = h_0 t_1 + t_0 h_1 = 1/2; C_11 = 2 h_1 t_1 = 1/4; C_00 = 0
    assert complementarity(h, t).tolist() == [[0.0, 0.5], [0.5, 0.25]]


def test_head_and_tail_are_cut_at_75_and_95_percent_of_all_samples():
    # shares 50, 25, 20, 5 %, reaching 50, 75, 95, 100
    assert head_and_tail(torch.tensor([25, 5, 50, 20])) == ((0, 2), (1,))
    # 49, 27, 20, 4 reach 49, 76, 96, 100: a class that crosses goes to the next group
    assert head_and_tail(torch.tensor([27, 4, 49, 20])) == ((2,), (1, 3))


def test_without_a_head_or_with_a_tail_as_large_the_median_parts_them():
    assert head_and_tail(torch.tensor([4, 76, 20])) == ((1,), (0,))
    assert head_and_tail(torch.tensor([90, 6, 1, 3])) == ((0, 1), (2, 3))
    assert head_and_tail(torch.tensor([4] * 20)) == ((), ())


TWO_KINDS = torch.tensor([[9, 1, 0], [0, 1, 8], [8, 2, 0], [1, 0, 9], [9, 0, 1], [0, 2, 9]])


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
@pytest.mark.parametrize("measure", get_args(Similarity))
def test_clients_of_two_kinds_form_two_clusters_numbered_by_appearance(algorithm, measure):
    got = similar_clients(TWO_KINDS, measure, 2, algorithm, seed=0)
    assert got.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_clustering_repeats_and_leaves_the_global_generators_alone(algorithm):
    rows = torch.rand(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    first = cluster_rows(rows, 3, algorithm, seed=4)
    assert torch.equal(first, cluster_rows(rows, 3, algorithm, seed=4))
    assert torch.equal(before, torch.get_rng_state())
    assert first.tolist()[0] == 0 and sorted(set(first.tolist())) == list(range(int(first.max()) + 1))


def test_there_are_no_more_clusters_than_different_clients():
    assert cluster_rows(torch.ones(4, 3), 3, "kmeans", seed=0).tolist() == [0, 0, 0, 0]
    assert cluster_rows(torch.tensor([[1.0], [1.0], [5.0]]), 3, "kmeans", seed=0).tolist() == [0, 0, 1]
    assert cluster_rows(torch.ones(1, 1), 3, "gmm", seed=0).tolist() == [0]


def test_snake_deal_by_hand():
    # falling: .9 (0), .7 (3), .5 (2), .3 (4), .2 (5), .1 (1), dealt 0 1 1 0 0 1
    values = torch.tensor([0.9, 0.1, 0.5, 0.7, 0.3, 0.2])
    assert snake_deal(values, 2).tolist() == [0, 1, 1, 1, 0, 0]
    # dealt 0 1 2 2 1 0
    assert snake_deal(values, 3).tolist() == [0, 0, 2, 1, 2, 1]
    assert snake_deal(values[:2], 3).tolist() == [0, 1]


def test_dealt_clusters_have_about_equal_tails_and_kmeans_on_complementarity_has_not():
    generator = torch.Generator().manual_seed(0)
    counts = (60 * torch.rand(20, 10, generator=generator) ** 4 * torch.logspace(0, -1, 10)).long() + 1
    tails = group_share(class_shares(counts), head_and_tail(counts.sum(dim=0))[1])

    def spread(clusters):
        return torch.stack([tails[clusters == c].mean() for c in clusters.unique()]).std().item()

    dealt = complementary_clients(counts, 3, None, seed=0)
    assert sorted(torch.bincount(dealt).tolist()) == [6, 7, 7]
    assert spread(dealt) < 0.2 * spread(complementary_clients(counts, 3, "kmeans", seed=0))


def test_clients_are_assigned_in_turn_by_their_share_of_the_tail():
    counts = torch.tensor([[9, 1, 0], [0, 9, 1], [5, 0, 5], [9, 0, 0]])
    # 23, 10 and 6 of 39 reach 59, 85, 100 %: the tail is class 2, shares 0, .1, .5, 0; falling 2, 1, 0, 3, by 0 1 1 0
    assert complementary_clients(counts, 2, None, seed=0).tolist() == [1, 1, 0, 0]


def test_cluster_means_weigh_by_samples_and_an_empty_cluster_keeps_its_own():
    old = torch.tensor([[10.0, 10.0], [20.0, 20.0], [30.0, 30.0]])
    values = [torch.tensor([0.0, 4.0]), torch.tensor([4.0, 0.0]), torch.tensor([7.0, 8.0])]
    got = cluster_means(old, values, [0, 0, 2], torch.tensor([1.0, 3.0, 9.0]))
    # cluster 0: (1*0 + 3*4) / 4 = 3, (1*4 + 3*0) / 4 = 1; cluster 1 has nobody
    assert got.tolist() == [[3.0, 1.0], [20.0, 20.0], [7.0, 8.0]]


def test_class_weights_count_each_class_by_itself():
    values = [torch.tensor([[0.0], [0.0], [0.0]]), torch.tensor([[4.0], [4.0], [4.0]])]
    weights = torch.tensor([[1, 2, 0], [3, 0, 0]])
    # class 0: 3*4 / 4; class 1: only the first client; class 2: nobody, stays
    got = weighted_means(values, weights, torch.tensor([[9.0], [9.0], [9.0]]))
    assert got.tolist() == [[3.0], [0.0], [9.0]]


def test_clusters_count_in_the_global_mean_as_all_their_clients():
    old, clusters = torch.tensor([[0.0], [8.0]]), torch.tensor([0, 0, 1])
    held = client_weights(torch.tensor([[1, 0], [4, 1], [1, 1]]), "samples")
    assert held.tolist() == [1.0, 5.0, 2.0]
    means, overall = clustered_average(old, [torch.tensor([4.0])], [0], clusters, held)
    # cluster 0 takes its one participant's 4, cluster 1 keeps 8; (6 * 4 + 2 * 8) / 8 = 5
    assert means.tolist() == [[4.0], [8.0]] and overall.tolist() == [5.0]


def test_client_weights():
    counts = torch.tensor([[1, 2], [0, 4]])
    assert client_weights(counts, "uniform").tolist() == [1.0, 1.0]
    assert client_weights(counts, "class_counts").tolist() == [[1.0, 2.0], [0.0, 4.0]]


def test_one_cluster_is_the_weighted_mean_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(40, 7, generator=generator) for _ in range(5)]
    sizes = torch.tensor([3, 11, 7, 5, 1], dtype=torch.float64)
    plain = weighted_mean(values, sizes / sizes.sum())
    means, overall = clustered_average(
        torch.zeros(1, 40, 7), values, range(5), torch.zeros(5, dtype=torch.int64), sizes
    )
    assert torch.equal(means[0], plain) and torch.equal(overall, plain)
