"""The partitions that come with fedbench, as plug-ins; the arithmetic of most is in the modules beside this one.

Clients whose data drift hold other samples in every stretch of the run: the rounds 1 .. R are cut into S equal
stretches, and round t is in stretch s = ⌊(t - 1) S / R⌋, counted from 0. Each sample is given out in one stretch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbench.core.errors import FedbenchError
from fedbench.core.method.base import NoParams
from fedbench.core.method.hyper import hyper
from fedbench.core.scenario import Scenario
from fedbench.kinds.kinds import ClientSamples, Indices, Partition, PartitionTask, Samples
from fedbench.scenarios.partitions import label_skew
from fedbench.scenarios.partitions.label_skew import MAX_REDRAWS
from fedbench.scenarios.partitions.parts import IntArray, Parts, deal_out, equal_parts, takers


class Iid(Partition[NoParams]):
    """Samples given out evenly at random."""

    name = "iid"

    def clients(self, task: PartitionTask) -> Parts:
        return label_skew.iid(task.train.labels, task.scenario.clients, task.rng)


class Dirichlet(Partition[NoParams]):
    """Label skew by Dirichlet draws (dirichlet_alpha, dirichlet_scheme, min_client_size)."""

    name = "dirichlet"
    shown = "dirichlet_alpha"

    def clients(self, task: PartitionTask) -> Parts:
        return _dirichlet(task.train.labels, task.scenario, task.scenario.clients, task.rng)


class CreffEqual(Partition[NoParams]):
    """CReFF's Dirichlet partition with clients of equal size (dirichlet_alpha)."""

    name = "creff_equal"
    shown = "dirichlet_alpha"

    def clients(self, task: PartitionTask) -> Parts:
        return label_skew.creff_equal(task.train.labels, task.scenario.clients, task.scenario.dirichlet_alpha, task.rng)


class OfShards(Partition[NoParams]):
    """A fixed number of shards a client (shards_per_client, shard_scheme)."""

    name = "shards"
    shown = "shards_per_client"

    def clients(self, task: PartitionTask) -> Parts:
        cards = {"sorted": label_skew.shards_sorted, "deck": label_skew.shards_deck}[task.scenario.shard_scheme]
        return cards(task.train.labels, task.scenario.clients, task.scenario.shards_per_client, task.rng)


class ClassesPerClient(Partition[NoParams]):
    """A fixed number of classes a client (classes_per_client, class_scheme)."""

    name = "classes_per_client"
    shown = "classes_per_client"

    def clients(self, task: PartitionTask) -> Parts:
        hands = {"round_robin": label_skew.classes_round_robin, "equal": label_skew.classes_equal}
        held = task.scenario.classes_per_client
        return hands[task.scenario.class_scheme](task.train.labels, task.scenario.clients, held, task.rng)


class ByDomain(Partition[NoParams]):
    """Feature skew: every client has one domain (clients_per_domain, within_domain)."""

    name = "domain"
    shown = "clients_per_domain"

    def clients(self, task: PartitionTask) -> ClientSamples:
        """Clients are measured on the test samples of their domain."""
        from fedbench.scenarios.partitions import feature_skew  # imports torch, which captions do without

        domains, scenario = task.train.domains, task.scenario
        if domains is None:
            raise FedbenchError("partition 'domain' needs data with domains; choose other data or another partition")
        parts = feature_skew.domain_clients(domains, task.present_domains, _within_domain(task, scenario))
        first = [domains[part[0]] if len(part) else -1 for part in parts]
        return ClientSamples(parts, of_domains(task.test, first), of_domains(task.validation, first))


def of_domains(split: Samples | None, wanted: list[int]) -> list[Indices] | None:
    """The samples of each domain in ``wanted``; clients of one domain share one array."""
    if split is None or split.domains is None:
        return None
    samples_of = {domain: np.flatnonzero(split.domains == domain) for domain in dict.fromkeys(wanted)}
    return [samples_of[domain] for domain in wanted]


def _dirichlet(labels: IntArray, scenario: Scenario, clients: int, rng: np.random.Generator) -> Parts:
    scheme = {
        "capped": label_skew.dirichlet_capped,
        "uncapped": label_skew.dirichlet_uncapped,
        "clientwise": label_skew.dirichlet_clientwise,
    }[scenario.dirichlet_scheme]
    return scheme(labels, clients, scenario.dirichlet_alpha, scenario.min_client_size, rng)


def _within_domain(task: PartitionTask, scenario: Scenario) -> Callable[[IntArray], Parts]:
    """A function that cuts the samples of one domain, by their indices, into those of its clients."""
    clients, labels, rng = scenario.clients_per_domain, task.train.labels, task.rng
    if scenario.within_domain == "iid":
        return lambda members: equal_parts(rng.permutation(members), clients)

    def deal(members: IntArray) -> Parts:
        try:
            parts = _dirichlet(labels[members], scenario, clients, rng)
        except FedbenchError as error:
            of = task.train.domains
            domain = task.domain_names[int(of[members[0]])] if len(members) and of is not None else "without samples"
            raise FedbenchError(f"within domain {domain}, whose clients are clients_per_domain: {error}") from None
        return Parts(members[parts.flat], parts.offsets)

    return deal


@dataclass(frozen=True, kw_only=True)
class LogNormalParams:
    """The skew of client sizes."""

    sigma: float = hyper(1.0, symbol="σ", source="FedLab (Zeng et al. 2023) has 0.3", low=0.0, high=5.0, search=False)


class LogNormal(Partition[LogNormalParams]):
    """Client sizes in proportion to exp(σ z), z standard normal; samples iid (min_client_size)."""

    name = "lognormal"

    def clients(self, task: PartitionTask) -> Parts:
        least = task.scenario.min_client_size
        for _ in range(MAX_REDRAWS):
            weights = np.exp(self.params.sigma * task.rng.standard_normal(task.scenario.clients))
            owners = takers(len(task.train), weights / weights.sum())
            if np.bincount(owners, minlength=len(weights)).min() >= least:
                return deal_out(task.rng.permutation(len(task.train)), owners, len(weights))
        raise FedbenchError(
            f"sigma={self.params.sigma:g} never gave each of {task.scenario.clients} clients at least {least} of "
            f"{len(task.train)} training samples in {MAX_REDRAWS} draws; lower sigma, clients or min_client_size."
        )


@dataclass(frozen=True, kw_only=True)
class PowerLawParams:
    """The skew of client sizes."""

    exponent: float = hyper(
        1.0, symbol="a", source="Li et al., FedProx (2020), have sizes by a power law", low=0.0, high=5.0, search=False
    )


class PowerLaw(Partition[PowerLawParams]):
    """Client sizes in proportion to k^-a, k = 1 .. N, in an order that is drawn; samples iid (min_client_size)."""

    name = "power_law"

    def clients(self, task: PartitionTask) -> Parts:
        count, least = task.scenario.clients, task.scenario.min_client_size
        weights: NDArray[np.float64] = task.rng.permutation(np.arange(1, count + 1) ** -float(self.params.exponent))
        owners = takers(len(task.train), weights / weights.sum())
        smallest = int(np.bincount(owners, minlength=count).min())
        if smallest < least:
            raise FedbenchError(
                f"exponent={self.params.exponent:g} gives the smallest of {count} clients {smallest} of "
                f"{len(task.train)} training samples, and min_client_size is {least}; lower one of the three."
            )
        return deal_out(task.rng.permutation(len(task.train)), owners, count)


@dataclass(frozen=True, kw_only=True)
class LabelDriftParams:
    """The number of stretches, and the concentration of the draws."""

    stretches: int = hyper(4, symbol="S", source="ours", low=2, high=1000, search=False)
    alpha: float = hyper(0.5, symbol="α", source="as dirichlet_alpha", low=1e-3, high=1e6, search=False)


class LabelDrift(Partition[LabelDriftParams]):
    """Label drift: every client's share of each class moves from one Dirichlet draw to another.

    Of class c, client k has in stretch s the share (1 - x) p_ck + x q_ck of the stretch's samples, x = s / (S - 1),
    where p_c and q_c ~ Dir(α·1) over the clients. A client may have no sample in a later stretch; then it sits it out.
    """

    name = "label_drift"

    def clients(self, task: PartitionTask) -> ClientSamples:
        """All stretches have the same number of samples of every class, ±1."""
        stretches, count, labels = self.params.stretches, task.scenario.clients, task.train.labels
        classes = int(labels.max(initial=0)) + 1
        start, end = (task.rng.dirichlet(np.full(count, self.params.alpha), size=classes) for _ in range(2))
        samples: list[list[IntArray]] = [[] for _ in range(stretches)]
        owners: list[list[IntArray]] = [[] for _ in range(stretches)]
        for label in range(classes):
            members = equal_parts(task.rng.permutation(np.flatnonzero(labels == label)), stretches)
            for stretch, own in enumerate(members):
                moved = stretch / (stretches - 1)
                owner = takers(len(own), (1 - moved) * start[label] + moved * end[label])
                samples[stretch].append(own)
                owners[stretch].append(owner)
        parts = [
            deal_out(np.concatenate(own), np.concatenate(owner), count)
            for own, owner in zip(samples, owners, strict=True)
        ]
        return ClientSamples(parts[0], later=parts[1:])


@dataclass(frozen=True, kw_only=True)
class DomainDriftParams:
    """The number of stretches of the run."""

    stretches: int = hyper(4, symbol="S", source="ours", low=2, high=1000, search=False)


class DomainDrift(Partition[DomainDriftParams]):
    """Covariate drift: every client moves on to the next domain in every stretch.

    Of D domains client k has domain (k + s) mod D in stretch s: an S-th part of that domain's samples, shared evenly
    with the clients that are there in the same stretch. In every stretch a client is measured on the test samples of
    the domain that it then has.
    """

    name = "domain_drift"

    def clients(self, task: PartitionTask) -> ClientSamples:
        """FedbenchError for data without domains, and for fewer clients than domains."""
        domains, present, count = task.train.domains, task.present_domains, task.scenario.clients
        if domains is None or len(present) < 2:
            raise FedbenchError("partition 'domain_drift' needs data with two domains; choose other data.")
        if count < len(present):
            raise FedbenchError(
                f"partition 'domain_drift' needs a client for each of the {len(present)} domains, and clients={count}."
            )
        members = {
            domain: equal_parts(task.rng.permutation(np.flatnonzero(domains == domain)), self.params.stretches)
            for domain in present
        }
        stretches = range(self.params.stretches)
        parts = [self._stretch(stretch, members, count) for stretch in stretches]
        there = [[present[(client + stretch) % len(present)] for client in range(count)] for stretch in stretches]
        tests = [of_domains(task.test, own) for own in there]
        return ClientSamples(parts[0], tests[0], later=parts[1:], later_test=tests[1:])

    def _stretch(self, stretch: int, members: dict[int, Parts], count: int) -> Parts:
        samples, owners = [], []
        for place, (_, own) in enumerate(members.items()):
            there = [client for client in range(count) if (client + stretch) % len(members) == place]
            samples.append(own[stretch])
            shares = equal_parts(np.arange(len(own[stretch])), len(there))
            owners.append(np.repeat(np.array(there, dtype=np.int64), shares.sizes))
        return deal_out(np.concatenate(samples), np.concatenate(owners), count)
