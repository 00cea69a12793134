"""The settings of the suite `map`: python leaderboards/map_design.py prints them as lines of YAML.

Six factors (data, skew, tail, clients, share of them in a round, samples of a class) have 1,080 combinations. Of each
data set's the first 20 of a scrambled Sobol sequence are taken that can be dealt out. Twelve settings have one domain a
client; these are listed by hand.
"""

from __future__ import annotations

from collections.abc import Iterator

from scipy.stats import qmc

PHOTOS = "backbone: clip:lite0-minilm"
DATA = {
    "embedded": 'dataset: "embedded?train=10000"',
    "CIFAR-10": f"dataset: hf:data/cifar10, {PHOTOS}",
    "Fashion-MNIST": f"dataset: fashion-mnist, {PHOTOS}",
}
SKEWS = ("α 0.02", "α 0.1", "α 0.5", "iid", "two shards")
TAILS = (1, 10, 100)
CLIENTS = (5, 20, 100, 1000)
SHARES = (0.1, 0.4, 1.0)
SAMPLES = (100, 1000)
"""Of the largest class."""
EACH = 20
CLASSES = 10
Point = tuple[str, int, int, float, int]


def is_possible(skew: str, tail: int, clients: int, share: float, samples: int) -> bool:
    """Whether 1 to 400 clients train in a round, and samples are enough for all clients, a class's for its shards."""
    sizes = [int(samples * tail ** (-number / (CLASSES - 1))) for number in range(CLASSES)]
    shards = 2 * clients / CLASSES if skew == "two shards" else 0
    return 1 <= clients * share <= 400 and sum(sizes) >= 2.4 * clients and min(sizes) >= shards


def points(seed: int) -> list[Point]:
    """The first possible combinations of a Sobol sequence, each once."""
    found: dict[Point, None] = {}
    factors = (SKEWS, TAILS, CLIENTS, SHARES, SAMPLES)
    for place in qmc.Sobol(len(factors), seed=seed).random(1024):
        point: Point = tuple(values[int(at * len(values))] for at, values in zip(place, factors, strict=True))
        if is_possible(*point):
            found[point] = None
        if len(found) == EACH:
            break
    return list(found)


def partition(skew: str, clients: int) -> str:
    """Settings of the partition: with few clients their sizes differ, with many they are equal."""
    few = clients <= 20
    if skew == "iid":
        return 'partition: "lognormal?sigma=1"' if few else "partition: iid"
    if skew == "two shards":
        return "partition: shards"
    scheme = "uncapped" if few else "clientwise"
    return f"partition: dirichlet, dirichlet_alpha: {skew.split()[1]}, dirichlet_scheme: {scheme}"


def imbalance(tail: int) -> str:
    return "imbalance: none" if tail == 1 else f"imbalance: exponential, imbalance_factor: {tail}"


def settings() -> Iterator[str]:
    """A line of YAML a setting."""
    for number, (data, of_data) in enumerate(DATA.items()):
        for skew, tail, clients, share, samples in points(number):
            name = f"{data}, {skew}, tail {tail}, {clients} clients, {share:.0%}, {samples} a class"
            parts = [of_data, partition(skew, clients), f"clients: {clients}", f"participation: {share}"]
            parts += [imbalance(tail), f"shots: {samples}"]
            yield f'- {{name: "{name}", set: {{{", ".join(parts)}}}}}'
    pacs = f'dataset: "imagefolder:data/pacs.tar", {PHOTOS}'
    for data, of_data in (("PACS", pacs), ("embedded", DATA["embedded"])):
        for skew, tail, each, share in (
            *[("iid", 1, 1, 1.0), ("iid", 1, 5, 0.4), ("α 0.1", 1, 5, 0.4), ("α 0.5", 1, 25, 0.1)],
            *[("iid", 10, 5, 1.0), ("α 0.1", 10, 25, 0.4)],
        ):
            name = f"{data}, a domain each and {skew}, tail {tail}, {4 * each} clients, {share:.0%}"
            within = "iid" if skew == "iid" else f"dirichlet, dirichlet_alpha: {skew.split()[1]}"
            parts = [of_data, f"partition: domain, clients_per_domain: {each}, within_domain: {within}"]
            parts += [f"participation: {share}", imbalance(tail)]
            yield f'- {{name: "{name}", set: {{{", ".join(parts)}}}}}'


if __name__ == "__main__":
    print("\n".join(settings()))
