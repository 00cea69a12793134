"""From data set and scenario to federation: cut off test samples, thin the classes, deal to clients, name groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Federation, Split, Unseen
from fedbench.core.partition import Measured, Shards
from fedbench.core.randomness import numpy_generator
from fedbench.core.scenario import Scenario
from fedbench.scenarios.groups import reporting_groups
from fedbench.scenarios.partitions import dirichlet, feature_skew, label_skew
from fedbench.scenarios.partitions.feature_skew import Cut, domains_of
from fedbench.scenarios.partitions.long_tail import thin
from fedbench.scenarios.partitions.parts import Parts, equal_parts
from fedbench.scenarios.partitions.rounding import IntArray
from fedbench.scenarios.unseen import by_class, require_tested


def build(dataset: Dataset, scenario: Scenario, seed: int) -> Federation:
    """The federation; ``scenario.partition_seed``, where set, replaces ``seed`` in every draw made here.

    Data without a test split of their own are cut alike for every seed (of the run; not of the partition), so that what
    is tuned on one seed has seen no test sample of another.
    Testing samples are cut off before the classes are thinned, so that test and validation keep their class balance.
    With ``scenario.validation`` the federation's test split is cut from the training samples: the data set's own test
    split, and a held-out domain, are no part of it; neither are the unseen classes. These are left out before anything
    else, so that all that is drawn is what it would be if the data set had the others alone.
    """
    seed = seed if scenario.partition_seed is None else scenario.partition_seed
    _refuse_impossible(dataset, scenario)
    dataset, left_out = by_class(dataset, scenario)
    held_out = None if scenario.holdout_domain is None else feature_skew.domain_index(dataset, scenario.holdout_domain)
    whole_cut = cut = _cut(dataset, scenario, held_out, scenario.partition_seed or 0)
    if scenario.validation:
        cut = _score_on_training_data(cut, scenario.validation, seed)
    cut, server = _with_server(cut, len(dataset.classnames), scenario, seed)
    kept = _thin(cut, len(dataset.classnames), scenario, seed)
    whole = len(kept) == len(cut.pool)
    train = cut.pool if whole else cut.pool.select(torch.from_numpy(kept))
    rng = numpy_generator(seed, "partition")
    if scenario.partition == "domain":
        # every domain of the data, so that one left without training samples is refused instead of forgotten
        present = [int(d) for d in np.unique(domains_of(cut.pool)) if d != held_out]
        deal = _within_domain(train, dataset.domain_names, scenario, rng)
        parts = feature_skew.domain_clients(domains_of(train), present, deal)
    else:
        parts = _by_label(train.labels.numpy(), scenario, rng)
        parts = label_skew.recut(parts) if scenario.equal_sizes else parts
    return Federation(
        clients=_shards(parts, train, cut, scenario),
        train=train,
        test=cut.test,
        classnames=dataset.classnames,
        domain_names=dataset.domain_names,
        validation=cut.validation,
        # what is set aside for tuning has no samples of it
        held_out_domain=None if scenario.validation else held_out,
        labels_visible=scenario.labels == "visible",
        server=server,
        unseen=None if left_out is None or scenario.validation else _unseen(left_out, scenario, held_out),
        groups=_groups(dataset, _thinned_labels(whole_cut, len(dataset.classnames), scenario, seed), scenario),
    )


def _refuse_impossible(dataset: Dataset, scenario: Scenario) -> None:
    has_domains = dataset.train.domains is not None and bool(dataset.domain_names)
    if not has_domains and scenario.partition == "domain":
        raise FedbenchError(
            f"partition 'domain' needs data with domains, but data set {dataset.name!r} has none; choose another data "
            "set or another partition (iid, dirichlet, shards, ...)"
        )
    if not has_domains and scenario.holdout_domain is not None:
        raise FedbenchError(
            f"holdout_domain={scenario.holdout_domain!r} needs data with domains, but data set {dataset.name!r} has "
            "none; choose another data set or set holdout_domain to none"
        )
    if not has_domains and dataset.test is None:
        raise FedbenchError(
            f"data set {dataset.name!r} has neither a test split nor domains to cut one from; give it a test split"
        )
    if scenario.equal_sizes and scenario.partition == "domain":
        raise FedbenchError(
            "equal_sizes cuts the clients' samples end to end and would mix domains; set it to false, or choose a "
            "partition other than 'domain'"
        )


def _unseen(dataset: Dataset, scenario: Scenario, held_out: int | None) -> Unseen:
    """The unseen classes with the part of their samples that is the test split's, cut as that of the others is."""
    test = _cut(dataset, scenario, held_out, scenario.partition_seed or 0).test
    require_tested(test, dataset.classnames)
    return Unseen(test, dataset.classnames)


def _cut(dataset: Dataset, scenario: Scenario, held_out: int | None, seed: int) -> Cut:
    if dataset.train.domains is None:
        assert dataset.test is not None  # refused above
        return Cut(dataset.train, np.arange(len(dataset.train)), dataset.test)
    return feature_skew.cut_by_domain(dataset, scenario.domain_split, held_out, seed)


def _score_on_training_data(cut: Cut, share: float, seed: int) -> Cut:
    """``share`` of the training samples, class by class and domain by domain, in place of the test split.

    Of two or more samples at least one is set aside and one left.
    """
    labels, domains = cut.pool.labels.numpy()[cut.train], cut.pool.domains
    strata = labels if domains is None else np.stack([labels, domains.numpy()[cut.train]], axis=1)
    rng = numpy_generator(seed, "validation")
    _, members = np.unique(strata, axis=0, return_inverse=True)
    aside = []
    for stratum in range(int(members.max()) + 1):
        own = rng.permutation(cut.train[members.reshape(-1) == stratum])
        aside.append(own[: min(max(round(share * len(own)), 1), len(own) - 1)])
    chosen = np.sort(np.concatenate(aside))
    if not len(chosen):
        raise FedbenchError("validation needs a class with two training samples at least; set it to 0.")
    return Cut(cut.pool, np.setdiff1d(cut.train, chosen), cut.pool.select(torch.from_numpy(chosen)), cut.validation)


def _with_server(cut: Cut, classes: int, scenario: Scenario, seed: int) -> tuple[Cut, Split | None]:
    """What is left to deal to clients, and ``server_samples`` of every class of the training samples."""
    samples = scenario.server_samples
    if not samples:
        return cut, None
    labels = cut.pool.labels.numpy()[cut.train]
    fewest = int(np.bincount(labels, minlength=classes).min())
    if fewest <= samples and scenario.server_source == "aside":
        raise FedbenchError(
            f"server_samples={samples} leaves nothing of a class that has {fewest} training samples; set it lower, or "
            "server_source=shared."
        )
    rng = numpy_generator(seed, "server-data")
    chosen = np.sort(np.concatenate([rng.permutation(cut.train[labels == c])[:samples] for c in range(classes)]))
    rest = cut.train if scenario.server_source == "shared" else np.setdiff1d(cut.train, chosen)
    return Cut(cut.pool, rest, cut.test, cut.validation), cut.pool.select(torch.from_numpy(chosen))


def _thin(cut: Cut, classes: int, scenario: Scenario, seed: int) -> IntArray:
    if scenario.imbalance != "exponential":
        return cut.train
    rng = numpy_generator(seed, "imbalance")
    order = rng.permutation(classes) if scenario.imbalance_order == "shuffled" else np.arange(classes)
    return cut.train[thin(cut.pool.labels.numpy()[cut.train], order, scenario.imbalance_factor, rng)]


def _thinned_labels(cut: Cut, classes: int, scenario: Scenario, seed: int) -> IntArray:
    labels: IntArray = cut.pool.labels.numpy()[_thin(cut, classes, scenario, seed)]
    return labels


def _by_label(labels: IntArray, scenario: Scenario, rng: np.random.Generator) -> Parts:
    """Indices into the training split, by client."""
    clients = scenario.clients
    match scenario.partition:
        case "dirichlet":
            scheme = {
                "capped": dirichlet.dirichlet_capped,
                "uncapped": dirichlet.dirichlet_uncapped,
                "clientwise": dirichlet.dirichlet_clientwise,
            }[scenario.dirichlet_scheme]
            return scheme(labels, clients, scenario.dirichlet_alpha, scenario.min_client_size, rng)
        case "creff_equal":
            return dirichlet.creff_equal(labels, clients, scenario.dirichlet_alpha, rng)
        case "shards":
            cards = {"sorted": label_skew.shards_sorted, "deck": label_skew.shards_deck}[scenario.shard_scheme]
            return cards(labels, clients, scenario.shards_per_client, rng)
        case "classes_per_client":
            hands = {"round_robin": label_skew.classes_round_robin, "equal": label_skew.classes_equal}
            return hands[scenario.class_scheme](labels, clients, scenario.classes_per_client, rng)
        case _:
            return label_skew.iid(labels, clients, rng)


def _within_domain(
    train: Split, names: tuple[str, ...], scenario: Scenario, rng: np.random.Generator
) -> Callable[[IntArray], Parts]:
    """How the samples of one domain, by their indices, are cut into those of its clients."""
    clients, labels = scenario.clients_per_domain, train.labels.numpy()
    if scenario.within_domain == "iid":
        return lambda members: equal_parts(rng.permutation(members), clients)
    by_label = scenario.model_copy(update={"partition": "dirichlet", "clients": clients})

    def deal(members: IntArray) -> Parts:
        try:
            parts = _by_label(labels[members], by_label, rng)
        except FedbenchError as error:
            domain = names[int(domains_of(train)[members[0]])] if len(members) else "without samples"
            raise FedbenchError(f"within domain {domain}, whose clients are clients_per_domain: {error}") from None
        return Parts(members[parts.flat], parts.offsets)

    return deal


def _shards(parts: Parts, train: Split, cut: Cut, scenario: Scenario) -> Shards:
    sizes = torch.from_numpy(parts.sizes)
    empty = torch.nonzero(sizes == 0).flatten()
    if len(empty):
        raise FedbenchError(
            f"partition {scenario.partition!r} leaves client {empty[0]} and {len(empty) - 1} others of {len(parts)} "
            f"without a sample; {len(train)} training samples are too few, lower the number of clients"
        )
    # ascending: what a client holds is a set, and the order of its batches is drawn elsewhere
    indices = torch.from_numpy(parts.ascending())
    shards = Shards(indices, torch.from_numpy(parts.offsets), torch.arange(len(parts)))
    if scenario.partition != "domain":
        return shards
    first = domains_of(train)[parts.flat[parts.offsets[:-1]]]
    present, which = np.unique(first, return_inverse=True)
    measured = tuple(Measured(_of_domain(cut.test, d), _of_domain(cut.validation, d)) for d in present.tolist())
    return replace(shards, measured=measured, measured_on=torch.from_numpy(which))


def _of_domain(split: Split | None, domain: int) -> torch.Tensor | None:
    if split is None or split.domains is None:
        return None
    return torch.nonzero(split.domains == domain).reshape(-1)


def _groups(dataset: Dataset, labels: IntArray, scenario: Scenario) -> Mapping[str, tuple[int, ...]]:
    """No groups where the scenario claims no long tail: a balanced set's head would be an accident of its order.

    ``labels`` are those of all training samples, those set aside included: tuning for the tail means the same classes.
    """
    if scenario.imbalance == "none":
        return {}
    if scenario.imbalance == "natural" and dataset.list_groups:
        return dataset.list_groups
    counts = np.bincount(labels, minlength=len(dataset.classnames))
    return reporting_groups(counts, scenario.groups)
