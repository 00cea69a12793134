"""The partitions that come with fedbench, as plug-ins; their arithmetic is in the modules beside this one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedbench.core.errors import FedbenchError
from fedbench.core.method.base import NoParams
from fedbench.core.scenario import Scenario
from fedbench.kinds.kinds import ClientSamples, Indices, Partition, PartitionTask, Samples
from fedbench.scenarios.partitions import dirichlet, label_skew
from fedbench.scenarios.partitions.parts import Parts, equal_parts
from fedbench.scenarios.partitions.rounding import IntArray


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
        return dirichlet.creff_equal(task.train.labels, task.scenario.clients, task.scenario.dirichlet_alpha, task.rng)


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
    known = {domain: np.flatnonzero(split.domains == domain) for domain in dict.fromkeys(wanted)}
    return [known[domain] for domain in wanted]


def _dirichlet(labels: IntArray, scenario: Scenario, clients: int, rng: np.random.Generator) -> Parts:
    scheme = {
        "capped": dirichlet.dirichlet_capped,
        "uncapped": dirichlet.dirichlet_uncapped,
        "clientwise": dirichlet.dirichlet_clientwise,
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
