"""Clients whose data drift: they hold other samples in every stretch of the run.

The rounds 1 .. R are cut into S equal stretches: round t is in stretch s = ⌊(t - 1) S / R⌋, counted from 0. Each sample
is given out in one stretch alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hyper import hyper
from fedbench.kinds.kinds import ClientSamples, Partition, PartitionTask
from fedbench.scenarios.partitions.built_in import of_domains
from fedbench.scenarios.partitions.parts import Parts, deal_out, equal_parts
from fedbench.scenarios.partitions.rounding import IntArray, takers


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
