"""Build a federation from data set and scenario: cut off test samples, thin classes, partition, name groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from fedbench.core.errors import FedbenchError, raised_at, reason_of
from fedbench.core.federation import Dataset, Federation, Measured, Shards, Split, Unseen
from fedbench.core.randomness import numpy_generator
from fedbench.core.scenario import Scenario
from fedbench.core.wording import counted
from fedbench.kinds import registry
from fedbench.kinds.kinds import AnyPartition, ClientSamples, PartitionTask, Samples
from fedbench.scenarios.groups import reporting_groups
from fedbench.scenarios.labels import by_class, of_clients, of_federation, require_tested, thin
from fedbench.scenarios.partitions import feature_skew, label_skew
from fedbench.scenarios.partitions.feature_skew import Cut, domains_of
from fedbench.scenarios.partitions.parts import IntArray, Parts, as_parts, joined


def partition_of(scenario: Scenario) -> tuple[AnyPartition, str]:
    """The partition of ``scenario`` with its parameters, and the text behind the colon.

    FedbenchError for an unknown name, and for options that the partition does not take.
    """
    partition, location = registry.build("partition", scenario.partition)
    return cast(AnyPartition, partition), location


def partition_digest(scenario: Scenario) -> str:
    """A hash of the files that the partition depends on besides data and seed; "" if there are none."""
    partition, location = partition_of(scenario)
    return partition.digest(location)


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
    thinned = _thin(cut, len(dataset.classnames), scenario, seed)
    kept = of_federation(thinned, cut.pool.labels.numpy(), scenario, seed)
    train = cut.pool if len(kept) == len(cut.pool) else cut.pool.select(torch.from_numpy(kept))
    samples = _given_out(dataset, train, cut, held_out, scenario, seed)
    shards = shards_of(samples, scenario, len(train))
    clients, new, order = without_held_out(shards, scenario, seed)
    return Federation(
        clients=clients,
        train=train,
        test=cut.test,
        classnames=dataset.classnames,
        domain_names=dataset.domain_names,
        validation=cut.validation,
        # what is set aside for tuning has no samples of it
        held_out_domain=None if scenario.validation else held_out,
        labels_visible=scenario.labels == "visible",
        server=server,
        client_names=tuple(samples.names[place] for place in order) if samples.names else (),
        later=tuple(subset(stretch, order[: len(clients)], 0) for stretch in later_stretches(samples, shards)),
        new_clients=new,
        unseen=None if left_out is None or scenario.validation else _unseen(left_out, scenario, held_out),
        groups=_groups(dataset, _thinned_labels(whole_cut, len(dataset.classnames), scenario, seed), scenario),
    )


def _refuse_impossible(dataset: Dataset, scenario: Scenario) -> None:
    has_domains = dataset.train.domains is not None and bool(dataset.domain_names)
    is_by_domain = scenario.partition_name == "domain"
    if not has_domains and is_by_domain:
        raise FedbenchError(
            f"partition 'domain' needs data with domains, but data set {dataset.name!r} has none; choose another data "
            "set or another partition (iid, dirichlet, shards, ...)"
        )
    if not has_domains and scenario.holdout_domain is not None:
        raise FedbenchError(
            f"holdout_domain={scenario.holdout_domain!r} needs data with domains, but data set {dataset.name!r} has "
            "none; choose another data set or set holdout_domain to none"
        )
    if not has_domains and dataset.test is None and dataset.train.clients is None:
        raise FedbenchError(
            f"data set {dataset.name!r} has neither a test split nor domains or clients to cut one from; give it a "
            "test split"
        )
    if scenario.equal_sizes and is_by_domain:
        raise FedbenchError(
            "equal_sizes cuts the clients' samples end to end and would mix domains; set it to false, or choose a "
            "partition other than 'domain'"
        )


def _unseen(dataset: Dataset, scenario: Scenario, held_out: int | None) -> Unseen:
    """The unseen classes with their test samples, cut like those of the other classes."""
    test = _cut(dataset, scenario, held_out, scenario.partition_seed or 0).test
    require_tested(test, dataset.classnames)
    return Unseen(test, dataset.classnames)


def _cut(dataset: Dataset, scenario: Scenario, held_out: int | None, seed: int) -> Cut:
    if dataset.test is None and dataset.train.clients is not None and held_out is None:
        return feature_skew.cut_by_client(dataset.train, scenario.domain_split, seed)
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
    """The samples left for clients, and ``server_samples`` of every class for the server."""
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


def _given_out(
    dataset: Dataset,
    train: Split,
    cut: Cut,
    held_out: int | None,
    scenario: Scenario,
    seed: int,
) -> ClientSamples:
    """The clients' samples as the scenario's partition gives them, checked."""
    partition, location = partition_of(scenario)
    present = () if cut.pool.domains is None else np.unique(domains_of(cut.pool)).tolist()
    task = PartitionTask(
        train=_samples(train),
        test=_samples(cut.test),
        validation=None if cut.validation is None else _samples(cut.validation),
        classnames=dataset.classnames,
        domain_names=dataset.domain_names,
        client_names=dataset.client_names,
        scenario=scenario,
        rng=numpy_generator(seed, "partition"),
        location=location,
        present_domains=[domain for domain in present if domain != held_out],
    )
    try:
        answer = partition.clients(task)
    except FedbenchError:
        raise
    except Exception as error:
        raise FedbenchError(f"partition {partition.name!r} fails: {reason_of(error)} ({raised_at(error)}).") from error
    samples = answer if isinstance(answer, ClientSamples) else ClientSamples(answer)
    _refuse_malformed(samples, partition.name)
    if samples.later_test and len(samples.later_test) != len(samples.later):
        raise FedbenchError(
            f"partition {partition.name!r} gives test samples to {len(samples.later_test)} later stretches and "
            f"training samples to {len(samples.later)}; it must give both to each."
        )
    tests = [ClientSamples(samples.train, test) for test in samples.later_test]
    for stretch in (samples, *map(ClientSamples, samples.later), *tests):
        _refuse_wrong(stretch, task, partition.name)
    if samples.later and scenario.equal_sizes:
        raise FedbenchError(
            f"equal_sizes cuts clients anew, and those of partition {partition.name!r} drift; leave it out."
        )
    samples = replace(samples, train=label_skew.recut(samples.train)) if scenario.equal_sizes else samples
    return of_clients(samples, task.train.labels, scenario, seed)


def _refuse_malformed(answer: ClientSamples, name: str) -> None:
    """Raise FedbenchError for an answer that is no array of indices for each client, or names only some clients."""
    further = [parts for parts in (answer.test, answer.validation) if parts is not None]
    for parts in (answer.train, *further, *answer.later, *answer.later_test):
        shapes = () if isinstance(parts, Parts) else map(np.ndim, parts) if isinstance(parts, Sequence) else (0,)
        if any(shape != 1 for shape in shapes):
            raise FedbenchError(
                f"partition {name!r} gives what is no list of arrays (n_k,), one for each client, but a "
                f"{type(parts).__name__}."
            )
    if answer.names and (len(answer.names) != len(answer.train) or len(set(answer.names)) < len(answer.names)):
        raise FedbenchError(
            f"partition {name!r} gives {len(answer.names)} names, {len(set(answer.names))} of them different, to "
            f"{len(answer.train)} clients; it must give each a name of its own, or none any."
        )
    for what, measured in (("test", answer.test), ("validation", answer.validation)):
        if measured is not None and len(twice := _twice(measured)):
            raise FedbenchError(f"partition {name!r} gives a client the {what} sample {twice[0]} twice.")


def _twice(parts: Sequence[IntArray]) -> IntArray:
    """Samples that a client has more than once. A set shared by clients is checked once."""
    whole = as_parts(parts if isinstance(parts, Parts) else list({id(part): part for part in parts}.values()))
    owners, samples = np.repeat(np.arange(len(whole)), whole.sizes), whole.ascending()
    again: IntArray = samples[1:][(samples[1:] == samples[:-1]) & (owners[1:] == owners[:-1])]
    return again


def _refuse_wrong(answer: ClientSamples, task: PartitionTask, name: str) -> None:
    """Raise FedbenchError for an answer with samples that do not exist, or one sample twice."""
    for what, split, parts in (
        ("training", task.train, answer.train),
        ("test", task.test, answer.test),
        ("validation", task.validation, answer.validation),
    ):
        if parts is None:
            continue
        if len(parts) != len(answer.train):
            raise FedbenchError(
                f"partition {name!r} gives {what} samples to {len(parts)} clients and training samples to "
                f"{len(answer.train)}; it must give every client its own."
            )
        flat = joined(parts) if len(parts) else np.zeros(0, dtype=np.int64)
        if flat.dtype != np.int64 or (len(flat) and not 0 <= flat.min() <= flat.max() < len(split or ())):
            raise FedbenchError(
                f"partition {name!r} gives {what} samples that there are not; it must give int64 indices from 0 to "
                f"{len(split or ()) - 1}."
            )
        if what == "training" and len(flat) and np.bincount(flat).max() > 1:
            raise FedbenchError(
                f"partition {name!r} gives the training sample {int(np.bincount(flat).argmax())} to several clients, "
                "or twice to one; it must give each to one client at most."
            )


def _samples(split: Split) -> Samples:
    domains, clients = (None if of is None else of.numpy() for of in (split.domains, split.clients))
    return Samples(split.labels.numpy(), domains, clients)


def _groups(dataset: Dataset, labels: IntArray, scenario: Scenario) -> Mapping[str, tuple[int, ...]]:
    """Reporting groups; empty if the scenario has no long tail, where a head would be an accident of the class order.

    ``labels`` are those of all training samples, including samples set aside, so that tuning has the same groups.
    """
    if scenario.imbalance == "none":
        return {}
    if scenario.imbalance == "natural" and dataset.list_groups:
        return dataset.list_groups
    counts = np.bincount(labels, minlength=len(dataset.classnames))
    return reporting_groups(counts, scenario.groups)


def shards_of(answer: ClientSamples, scenario: Scenario, samples: int) -> Shards:
    """The clients' shards in the first stretch; FedbenchError if one has none of the ``samples`` training samples."""
    parts = as_parts(answer.train)
    sizes = torch.from_numpy(parts.sizes)
    empty = torch.nonzero(sizes == 0).flatten()
    if len(empty) or not len(parts):
        others = f" and {counted(len(empty) - 1, 'other')} of {len(parts)}" if len(empty) > 1 else f" of {len(parts)}"
        who = f"client {empty[0]}{others}" if len(empty) else "every client"
        raise FedbenchError(
            f"partition {scenario.partition!r} leaves {who} without a sample; {samples} training samples are too few, "
            "lower the number of clients"
        )
    # ascending: what a client holds is a set, and the order of its batches is drawn elsewhere
    indices = torch.from_numpy(parts.ascending())
    shards = Shards(indices, torch.from_numpy(parts.offsets), torch.arange(len(parts)))
    return _measured(shards, answer.test, answer.validation)


def _measured(shards: Shards, test: Sequence[IntArray] | None, validation: Sequence[IntArray] | None) -> Shards:
    """``shards`` with the samples that clients are measured on."""
    if test is None and validation is None:
        return replace(shards, measured=(Measured(),), measured_on=None)
    nothing = [None] * len(shards)
    pairs = list(zip(test or nothing, validation or nothing, strict=True))
    # what clients share is kept once
    number: dict[tuple[int, int], int] = {}
    which = [number.setdefault((id(test), id(validation)), len(number)) for test, validation in pairs]
    first = {place: pairs[position] for position, place in reversed(list(enumerate(which)))}
    measured = tuple(Measured(*map(_ascending, first[place])) for place in range(len(number)))
    return replace(shards, measured=measured, measured_on=torch.tensor(which))


def later_stretches(answer: ClientSamples, first: Shards) -> Iterator[Shards]:
    """The shards of the clients of ``first`` in each later stretch, in which some may be empty.

    FedbenchError if the number of clients changes.
    """
    for number, part in enumerate(answer.later):
        parts = as_parts(part)
        if len(parts) != len(first):
            raise FedbenchError(f"a partition gives {len(first)} clients first and {len(parts)} later; they must stay.")
        indices, offsets = torch.from_numpy(parts.ascending()), torch.from_numpy(parts.offsets)
        held = replace(first, indices=indices, offsets=offsets)
        yield _measured(held, answer.later_test[number], answer.validation) if answer.later_test else held


def without_held_out(shards: Shards, scenario: Scenario, seed: int) -> tuple[Shards, Shards | tuple[()], list[int]]:
    """The clients that train, the held-out clients, and the positions of both among ``shards``."""
    count = len(shards)
    if not scenario.holdout_clients:
        return shards, (), list(range(count))
    held = max(round(scenario.holdout_clients * count), 1)
    if held >= count:
        raise FedbenchError(
            f"holdout_clients={scenario.holdout_clients:g} leaves none of {count} clients to train; set it lower."
        )
    drawn = numpy_generator(seed, "holdout-clients").permutation(count)
    training, new = np.sort(drawn[held:]).tolist(), np.sort(drawn[:held]).tolist()
    return subset(shards, training, 0), subset(shards, new, len(training)), [*training, *new]


def subset(shards: Shards, places: Sequence[int], first: int) -> Shards:
    """The clients at ``places``, numbered from ``first`` on; ``shards`` itself if that is all of them."""
    if len(places) == len(shards):
        return shards
    return Shards.of([replace(shards[place], id=first + number) for number, place in enumerate(places)])


def _ascending(samples: IntArray | None) -> torch.Tensor | None:
    return None if samples is None else torch.from_numpy(np.sort(samples))
