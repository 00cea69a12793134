"""Label skew by coarse labels: Pachinko allocation.

    root_k ~ Dir(α·1) over coarse labels,   leaf_kc ~ Dir(β·1) over the classes of coarse label c

Each of N clients draws n/N samples: a coarse label by root_k, a class of it by leaf_kc, a sample of that class that
nobody has. A class that runs out leaves its coarse label's distribution, an empty coarse label leaves every root.

Reddi et al., Adaptive Federated Optimization, ICLR 2021, appendix C; Li and McCallum, Pachinko Allocation, ICML 2006.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedbench.core.errors import FedbenchError
from fedbench.core.files import looked_up, read_bytes
from fedbench.core.method.hyper import hyper
from fedbench.kinds.kinds import Partition, PartitionTask
from fedbench.scenarios.partitions.parts import Parts, deal_out, equal_sizes, shuffled_classes

_CIFAR100 = {
    "aquatic mammals": "beaver, dolphin, otter, seal, whale",
    "fish": "aquarium fish, flatfish, ray, shark, trout",
    "flowers": "orchid, poppy, rose, sunflower, tulip",
    "food containers": "bottle, bowl, can, cup, plate",
    "fruit and vegetables": "apple, mushroom, orange, pear, sweet pepper",
    "household electrical devices": "clock, keyboard, lamp, telephone, television",
    "household furniture": "bed, chair, couch, table, wardrobe",
    "insects": "bee, beetle, butterfly, caterpillar, cockroach",
    "large carnivores": "bear, leopard, lion, tiger, wolf",
    "large man-made outdoor things": "bridge, castle, house, road, skyscraper",
    "large natural outdoor scenes": "cloud, forest, mountain, plain, sea",
    "large omnivores and herbivores": "camel, cattle, chimpanzee, elephant, kangaroo",
    "medium-sized mammals": "fox, porcupine, possum, raccoon, skunk",
    "non-insect invertebrates": "crab, lobster, snail, spider, worm",
    "people": "baby, boy, girl, man, woman",
    "reptiles": "crocodile, dinosaur, lizard, snake, turtle",
    "small mammals": "hamster, mouse, rabbit, shrew, squirrel",
    "trees": "maple tree, oak tree, palm tree, pine tree, willow tree",
    "vehicles 1": "bicycle, bus, motorcycle, pickup truck, train",
    "vehicles 2": "lawn mower, rocket, streetcar, tank, tractor",
}
CIFAR100 = {name: coarse for coarse, names in _CIFAR100.items() for name in names.split(", ")}
"""Class -> superclass of CIFAR-100 (Krizhevsky, 2009)."""


@dataclass(frozen=True, kw_only=True)
class PachinkoParams:
    """The skew over coarse labels and over their classes, and the file of coarse labels."""

    alpha: float = hyper(0.1, symbol="α", source="Reddi et al. 2021, CIFAR-100", low=1e-3, high=1e6, search=False)
    beta: float = hyper(10.0, symbol="β", source="Reddi et al. 2021, CIFAR-100", low=1e-3, high=1e6, search=False)
    coarse: str = hyper("", symbol="-", source="a CSV file of class,coarse label; empty: CIFAR-100's own", search=False)


class Pachinko(Partition[PachinkoParams]):
    """Label skew over coarse labels and the classes below them; clients of equal size."""

    name = "pachinko"

    def clients(self, task: PartitionTask) -> Parts:
        coarse = self._coarse(task)
        pools, left = shuffled_classes(task.train.labels, task.rng)
        classes = len(task.classnames)
        left = np.pad(left, (0, classes - len(left)))
        starts = np.cumsum(left) - left
        members = [np.flatnonzero(coarse == label) for label in range(int(coarse.max()) + 1)]
        samples, owners = [], []
        for client, size in enumerate(equal_sizes(len(pools), task.scenario.clients).tolist()):
            root = task.rng.dirichlet(np.full(len(members), self.params.alpha))
            leaves = [task.rng.dirichlet(np.full(len(own), self.params.beta)) for own in members]
            for _ in range(size):
                chosen = _drawn(root, np.array([left[own].sum() for own in members]), task.rng)
                label = members[chosen][_drawn(leaves[chosen], left[members[chosen]], task.rng)]
                left[label] -= 1
                samples.append(pools[starts[label] + left[label]])
                owners.append(client)
        return deal_out(np.array(samples), np.array(owners), task.scenario.clients)

    def digest(self, location: str) -> str:
        return hashlib.sha256(self._content()).hexdigest() if self.params.coarse else ""

    def _content(self) -> bytes:
        file = looked_up(self.params.coarse, "the table of pachinko?coarse")
        if not file.is_file():
            raise FedbenchError(
                f"pachinko?coarse={self.params.coarse}: there is no such file; give a CSV class,coarse."
            )
        return read_bytes(file)

    def _coarse(self, task: PartitionTask) -> np.ndarray:
        """The number of each class's coarse label, (C,)."""
        given: Mapping[str, str] = CIFAR100
        if self.params.coarse:
            rows = csv.reader(self._content().decode("utf-8-sig", errors="replace").splitlines())
            given = {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}
        missing = [name for name in task.classnames if name not in given]
        if missing:
            raise FedbenchError(
                f"partition 'pachinko' knows no coarse label of the class {missing[0]!r}; give a CSV file of "
                "class,coarse with pachinko?coarse=FILE."
            )
        names = sorted({given[name] for name in task.classnames})
        return np.array([names.index(given[name]) for name in task.classnames])


def _drawn(shares: np.ndarray, left: np.ndarray, rng: np.random.Generator) -> int:
    """Draw a position with something ``left`` by its share; uniformly if these shares are all 0."""
    weights = np.where(left > 0, shares, 0.0)
    if not weights.sum():
        weights = (left > 0).astype(float)
    return int(rng.choice(len(weights), p=weights / weights.sum()))
