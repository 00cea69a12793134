"""Groups of clients from the labels they hold: how alike two clients are, which belong together, means inside groups.

Class shares p_i = counts_i / n_i are rows of (N, K) matrices in float64; an empty client's row is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedbench.api import numpy_generator, reporting_groups

Similarity = Literal["js", "kl", "wasserstein", "total_variation", "cosine"]

Algorithm = Literal["kmeans", "gmm", "hierarchical", "spectral", "dbscan"]

SMOOTHING = 1e-3
"""Added to class shares before a Kullback-Leibler divergence, which is infinite for a class that one side lacks."""


def class_shares(counts: Tensor) -> Tensor:
    """p_i(k), (N, K) float64, from the samples that each client holds of each class (N, K)."""
    return counts.double() / counts.sum(dim=1, keepdim=True).clamp_min(1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) = sum_k p_k ln(p_k / q_k) in nats over the last axis, 0 ln 0 = 0."""
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(dim=-1)


def jensen_shannon(shares: Tensor) -> Tensor:
    """JS(p_i, p_j) = (KL(p_i || m) + KL(p_j || m)) / 2 with m = (p_i + p_j) / 2, in nats: (N, K) to (N, N)."""
    p, q = shares[:, None], shares[None]
    middle = (p + q) / 2
    return (_kl(p, middle) + _kl(q, middle)) / 2


def similarity_matrix(shares: Tensor, measure: Similarity) -> Tensor:
    """How alike clients are, (N, K) to (N, N), 1 for equal class shares and symmetric.

    1 - JS; 1 / (1 + KL) with the mean of both directions, smoothed; 1 - W / (K - 1) with the Wasserstein-1 distance on
    the order of the classes; 1 - total variation; the cosine.
    """
    p, q = shares[:, None], shares[None]
    if measure == "js":
        return 1 - jensen_shannon(shares)
    if measure == "kl":
        smooth = (shares + SMOOTHING) / (shares + SMOOTHING).sum(dim=1, keepdim=True)
        p, q = smooth[:, None], smooth[None]
        return 1 / (1 + (_kl(p, q) + _kl(q, p)) / 2)
    if measure == "wasserstein":
        steps = max(shares.shape[1] - 1, 1)
        return 1 - (p.cumsum(dim=-1) - q.cumsum(dim=-1))[..., :-1].abs().sum(dim=-1) / steps
    if measure == "total_variation":
        return 1 - (p - q).abs().sum(dim=-1) / 2
    return torch.nn.functional.cosine_similarity(p, q, dim=-1)


def head_and_tail(counts: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Head and tail classes by the samples (K,) that all clients together report of each class.

    Largest first, head up to 75 % of all samples and tail beyond 95 %, a class that crosses going to the next group:
    the rule that the published tables of CAPT fit. Where that gives no head, or a tail as large as it, classes above
    and below the median; on balanced data there is neither.
    """
    groups = reporting_groups(counts.numpy(), "cumulative_exclusive")
    head, tail = groups.get("head", ()), groups.get("tail", ())
    if head and tail and counts[list(head)].min() > counts[list(tail)].max():
        return head, tail
    middle = counts.double().quantile(0.5)
    return tuple(torch.nonzero(counts > middle)[:, 0].tolist()), tuple(torch.nonzero(counts < middle)[:, 0].tolist())


def group_share(shares: Tensor, classes: Sequence[int]) -> Tensor:
    """The share of each client's samples that is of ``classes``: (N, K) to (N,)."""
    return shares[:, list(classes)].sum(dim=1)


def complementarity(head: Tensor, tail: Tensor) -> Tensor:
    """C_ij = h_i t_j + t_i h_j from the clients' shares of head and of tail classes (N,): (N, N)."""
    return torch.outer(head, tail) + torch.outer(tail, head)


def cluster_rows(matrix: Tensor, count: int, algorithm: Algorithm, seed: int) -> Tensor:
    """The cluster of each client, (N,) int64, by the rows of ``matrix`` (N, D).

    There are at most ``count`` clusters, and no more than different rows; ids follow the first client of each.
    ``dbscan`` finds their number itself: clients closer than half the median distance of two clients hang together.
    """
    from sklearn.cluster import DBSCAN, AgglomerativeClustering, KMeans, SpectralClustering
    from sklearn.mixture import GaussianMixture

    rows = matrix.numpy()
    count = min(count, len(torch.unique(matrix, dim=0)))
    if count == 1:
        return torch.zeros(len(matrix), dtype=torch.int64)
    state = int(numpy_generator(seed, "client clusters").bit_generator.seed_seq.generate_state(1)[0])
    if algorithm == "kmeans":
        found = KMeans(count, n_init=10, random_state=state).fit_predict(rows)
    elif algorithm == "gmm":
        found = GaussianMixture(count, covariance_type="diag", random_state=state).fit_predict(rows)
    elif algorithm == "hierarchical":
        found = AgglomerativeClustering(count).fit_predict(rows)
    elif algorithm == "spectral":
        near = torch.exp(-torch.cdist(matrix, matrix).square()).numpy()
        found = SpectralClustering(count, random_state=state, affinity="precomputed").fit_predict(near)
    else:
        reach = float(torch.pdist(matrix).median()) / 2
        # a client alone is a cluster of its own, not noise: every client needs one
        found = DBSCAN(eps=max(reach, 1e-9), min_samples=1).fit_predict(rows)
    return _in_order_of_appearance(found.tolist())


def _in_order_of_appearance(labels: list[int]) -> Tensor:
    ids: dict[int, int] = {}
    return torch.tensor([ids.setdefault(label, len(ids)) for label in labels])


def snake_deal(values: Tensor, count: int) -> Tensor:
    """The cluster of each client, (N,) int64, so that the clusters' mean ``values`` (N,) are about equal.

    Clients in falling order are assigned 0, 1, .., count-1, count-1, .., 1, 0, 0, 1, ..; of equal ones the lower id.
    """
    count = min(count, len(values))
    order = torch.argsort(values, descending=True, stable=True)
    turn = torch.arange(len(values)) % (2 * count)
    clusters = torch.empty(len(values), dtype=torch.int64)
    clusters[order] = torch.where(turn < count, turn, 2 * count - 1 - turn)
    return clusters


def similar_clients(counts: Tensor, measure: Similarity, count: int, algorithm: Algorithm, seed: int) -> Tensor:
    """Clusters of clients with like class shares, (N,) int64, from their samples by class (N, K)."""
    return cluster_rows(similarity_matrix(class_shares(counts), measure), count, algorithm, seed)


def complementary_clients(counts: Tensor, count: int, algorithm: Algorithm | None, seed: int) -> Tensor:
    """Clusters meant to have head and tail classes alike, (N,) int64, from the clients' samples by class (N, K).

    ``algorithm`` clusters the rows of the complementarity matrix; None assigns the clients in turn by their tail share.
    """
    head, tail = (group_share(class_shares(counts), classes) for classes in head_and_tail(counts.sum(dim=0)))
    if algorithm is None:
        return snake_deal(tail, count)
    return cluster_rows(complementarity(head, tail), count, algorithm, seed)


def complementary_groups(shares: Tensor, count: int) -> list[int]:
    """The group of each client, by complete linkage at the distance 1 - C / max C, from class ``shares`` (N, K).

    C_ij = 1 - <p_i, p_j>: clients whose classes complement each other are near. At most ``count`` groups, from 0.
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    if len(shares) == 1:
        return [0]
    above = torch.triu_indices(len(shares), len(shares), offset=1)
    apart = (shares[above[0]] * (1 - shares[above[1]])).sum(dim=1)
    distances = 1 - apart / apart.max().clamp(min=1e-12)
    return [int(c) - 1 for c in fcluster(linkage(distances.numpy(), method="complete"), count, criterion="maxclust")]


def weighted_means(values: Sequence[Tensor], weights: Tensor, otherwise: Tensor) -> Tensor:
    """sum_i w_i v_i / sum_i w_i of values (...), in float64; ``otherwise`` (...) where the weights sum to zero.

    ``weights`` (m,), or (m, K) with a weight for each row of values (K, ...).
    """
    total = weights.sum(dim=0)
    shares = weights.double() / torch.where(total > 0, total, 1)
    mean = torch.zeros_like(otherwise, dtype=torch.float64)
    for share, value in zip(shares, values, strict=True):
        mean = mean + _as_rows(share, value) * value.double()
    return torch.where(_as_rows(total, otherwise) > 0, mean, otherwise.double()).to(otherwise.dtype)


def cluster_means(old: Tensor, values: Sequence[Tensor], clusters: Sequence[int], weights: Tensor) -> Tensor:
    """The mean of ``values`` inside each cluster, (k, ...); ``old`` (k, ...) stays for a cluster nobody is in.

    ``values[i]`` (...) comes from a client in cluster ``clusters[i]``; ``weights`` (m,) or (m, K).
    """
    means = []
    for cluster, before in enumerate(old):
        members = [i for i, own in enumerate(clusters) if own == cluster]
        means.append(weighted_means([values[i] for i in members], weights[members], before))
    return torch.stack(means)


def means_inside(values: Sequence[Tensor], clusters: Sequence[int]) -> list[Tensor]:
    """Each client's ``values`` (...), replaced by the plain mean over its cluster."""
    means = cluster_means(torch.stack([values[0]] * (max(clusters) + 1)), values, clusters, torch.ones(len(values)))
    return [means[cluster] for cluster in clusters]


def client_weights(counts: Tensor, weighting: str) -> Tensor:
    """What each client weighs in a mean, float64, from its samples by class (N, K).

    Its samples (N,), its samples of each class (N, K) under ``weighting="class_counts"``, 1 under ``uniform``.
    """
    if weighting == "class_counts":
        return counts.double()
    return torch.ones(len(counts), dtype=torch.float64) if weighting == "uniform" else counts.sum(dim=1).double()


def clustered_average(
    old: Tensor, values: Sequence[Tensor], clients: Sequence[int], clusters: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The means inside clusters (k, ...) and the mean of these (...), each cluster counting as all of its clients.

    ``values[i]`` (...) comes from client ``clients[i]``; ``clusters`` (N,) and ``weights`` (N,) or (N, K) are those of
    all clients, participants or not. ``old`` (k, ...) stays for a cluster without participant.
    """
    means = cluster_means(old, values, clusters[list(clients)].tolist(), weights[list(clients)])
    totals = weights.new_zeros(len(old), *weights.shape[1:]).index_add(0, clusters, weights)
    return means, weighted_means(list(means), totals, means[0])


def _as_rows(weight: Tensor, like: Tensor) -> Tensor:
    """``weight`` () or (K,), with axes appended so that it multiplies the rows of ``like``."""
    return weight.to(like.device).reshape(weight.shape + (1,) * (like.ndim - weight.ndim))


def first_neighbour_clusters(rows: Tensor) -> Tensor:
    """Which cluster each of ``rows`` (n, d) is in, (n,) int64 from 0 (FINCH, Sarfraz et al., CVPR 2019, the last one).

    A row and its nearest other one, by cosine, are in one cluster; then clusters, by the means of their rows, as long
    as that gives fewer of them, and more than one.
    """
    which = torch.arange(len(rows))
    while True:
        count = int(which.max()) + 1
        if count == 1:
            return which
        means = torch.stack([rows[which == cluster].mean(0) for cluster in range(count)])
        directions = torch.nn.functional.normalize(means.double(), dim=1)
        nearest = (directions @ directions.T).fill_diagonal_(-torch.inf).argmax(1).tolist()
        merged = _components(nearest)
        fewer = int(merged.max()) + 1
        # the first step stands even where one cluster is all it leaves
        if count < len(rows) and (fewer == 1 or fewer == count):
            return which
        which = merged[which]


def _components(linked: list[int]) -> Tensor:
    """The connected components, (n,) int64 in the order of their first members, where i is linked to ``linked[i]``."""
    root = list(range(len(linked)))

    def of(node: int) -> int:
        while root[node] != node:
            node = root[node]
        return node

    for node, other in enumerate(linked):
        one, two = sorted((of(node), of(other)))
        root[two] = one
    numbers = {first: number for number, first in enumerate(sorted({of(node) for node in range(len(linked))}))}
    return torch.tensor([numbers[of(node)] for node in range(len(linked))])
