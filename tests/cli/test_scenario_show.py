"""The picture of a partition: its numbers by hand, and `fedbench scenario show`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.text import Text

from fedbench.cli.commands.scenario import histogram
from fedbench.core.errors import FedbenchError
from fedbench.core.federation import ClientShard, Dataset, Federation, Split, TensorImages
from fedbench.scenarios.picture import (
    ClientPicture,
    PartitionPicture,
    binned,
    divergences,
    effective_classes,
    imbalance_factor,
    picture_of,
)


def log2(value: float) -> float:
    return math.log2(value)


def split_of(labels: list[int], domains: list[int] | None = None) -> Split:
    images = TensorImages(torch.zeros((len(labels), 3, 2, 2), dtype=torch.uint8))
    return Split(images, torch.tensor(labels), None if domains is None else torch.tensor(domains))


def dataset(classes: int = 4, each: int = 10, domains: int = 0) -> Dataset:
    """``each`` training and two test samples of every class, in label order; domains alternate."""
    train, test = ([label for label in range(classes) for _ in range(n)] for n in (each, 2))
    names = tuple(f"kind {label}" for label in range(classes))
    in_train, in_test = ([i % domains for i in range(len(of))] if domains else None for of in (train, test))
    domain_names = ("photo", "sketch", "painting")[:domains]
    return Dataset("tiny", names, split_of(train, in_train), split_of(test, in_test), "hash", domain_names)


def picture(counts: list[list[int]]) -> PartitionPicture:
    clients = tuple(ClientPicture(i, tuple(row), 1.0, 0.0) for i, row in enumerate(counts))
    return PartitionPicture(clients, tuple(f"kind {label}" for label in range(len(counts[0]))), 5)


# the numbers


def test_effective_classes_are_the_exponential_of_the_entropy() -> None:
    # (1/2, 1/4, 1/4) has the entropy 1/2 ln 2 + 1/2 ln 4 = 3/2 ln 2
    counts = np.array([[4, 0, 0], [2, 2, 2], [2, 1, 1], [30, 30, 0]])
    assert effective_classes(counts) == pytest.approx([1, 3, 2**1.5, 2])


def test_clients_with_the_same_shares_do_not_diverge_whatever_their_size() -> None:
    assert divergences(np.array([[3, 1], [6, 2], [300, 100]])).tolist() == [0, 0, 0]


def test_a_single_client_does_not_diverge_from_itself() -> None:
    assert divergences(np.array([[5, 0, 7]])).tolist() == [0]


def test_two_disjoint_clients_of_equal_size_diverge_by_less_than_one() -> None:
    # p = (1, 0), g = (1/2, 1/2), m = (3/4, 1/4): the whole holds what the client holds, so JS(p, g) is not 1
    p_from_m = log2(4 / 3)
    g_from_m = (log2(2 / 3) + log2(2)) / 2
    expected = (p_from_m + g_from_m) / 2
    assert expected == pytest.approx(0.311278, abs=1e-6)
    assert divergences(np.array([[7, 0], [0, 7]])) == pytest.approx([expected, expected])


def test_the_smaller_of_two_disjoint_clients_diverges_more() -> None:
    # g = (1/4, 3/4); client 0: p = (1, 0), m = (5/8, 3/8); client 1: p = (0, 1), m = (1/8, 7/8)
    small = (log2(8 / 5) + (log2(2 / 5) / 4 + 3 * log2(2) / 4)) / 2
    large = (log2(8 / 7) + (log2(2) / 4 + 3 * log2(6 / 7) / 4)) / 2
    assert divergences(np.array([[1, 0], [0, 3]])) == pytest.approx([small, large])
    assert (small, large) == pytest.approx((0.548795, 0.137926), abs=1e-6)


def test_the_imbalance_factor_is_of_all_clients_together() -> None:
    # 10 and 2 together, though the first client alone has 4 and 1
    assert imbalance_factor(np.array([[4, 1], [6, 1]])) == 5


def test_a_class_nobody_holds_makes_the_imbalance_infinite_and_nothing_else() -> None:
    counts = np.array([[4, 0, 4], [2, 0, 2]])
    assert math.isinf(imbalance_factor(counts))
    assert effective_classes(counts) == pytest.approx([2, 2])
    assert divergences(counts).tolist() == [0, 0]


def test_a_client_without_samples_is_refused_by_name() -> None:
    with pytest.raises(FedbenchError, match="client 1 holds no sample"):
        divergences(np.array([[1, 2], [0, 0]]))


@pytest.mark.parametrize(
    ("bins", "expected"),
    [(5, [1, 2, 3, 4, 5]), (60, [1, 2, 3, 4, 5]), (4, [3, 7, 5]), (3, [3, 7, 5]), (2, [6, 9]), (1, [15])],
)
def test_bins_are_sums_of_neighbouring_classes_and_lose_nothing(bins: int, expected: list[int]) -> None:
    counts = np.array([1, 2, 3, 4, 5])
    assert binned(counts, bins).tolist() == expected
    assert binned(np.stack([counts, 10 * counts]), bins).tolist() == [expected, [10 * count for count in expected]]


def test_the_histogram_tells_a_single_sample_from_none() -> None:
    assert histogram([8, 4, 1, 0]) == "█▄▁·"
    assert histogram([1000, 1, 0, 126]) == "█▁·▂"
    assert histogram([3, 3]) == "██"


def hand_made() -> Federation:
    """Two clients: three samples of classes 0, 0, 1 in domain 0, and one of class 1 in domain 1; nobody has class 2."""
    clients = (
        ClientShard(0, torch.tensor([0, 1, 2]), torch.tensor([0]), torch.tensor([0])),
        ClientShard(1, torch.tensor([3]), torch.tensor([1, 2]), torch.tensor([1])),
    )
    train = split_of([0, 0, 1, 1, 2], [0, 0, 0, 1, 2])
    test = split_of([0, 1, 2, 2], [0, 1, 1, 2])
    return Federation(
        clients=clients,
        train=train,
        test=test,
        classnames=("ant", "bee", "cat"),
        domain_names=("photo", "sketch", "painting"),
        validation=split_of([0, 1], [0, 1]),
        held_out_domain=2,
        labels_visible=False,
        groups={"head": (0, 1), "tail": (2,)},
    )


def test_a_picture_has_everything_a_federation_tells() -> None:
    shown = picture_of(hand_made())
    assert shown.counts.tolist() == [[2, 1, 0], [0, 1, 0]]
    assert (shown.class_counts, shown.sizes, shown.samples) == ((2, 2, 0), (3, 1), 4)
    first, second = shown.clients
    assert (first.samples, first.classes_held) == (3, 2)
    assert first.largest_share == pytest.approx(2 / 3)
    assert (second.samples, second.classes_held, second.largest_share, second.effective_classes) == (1, 1, 1, 1)
    assert (first.domains, second.domains) == (("photo",), ("sketch",))
    assert (first.test_samples, second.test_samples, shown.test_samples) == (1, 2, 4)
    assert (first.validation_samples, shown.validation_samples) == (1, 2)
    assert shown.held_out_domain == "painting"
    assert shown.groups == {"head": (0, 1), "tail": (2,)}
    assert not shown.labels_visible
    assert math.isinf(shown.imbalance_factor)


def test_clients_that_are_nearly_alike_diverge_by_nothing_and_not_by_nan() -> None:
    alike = np.array([[50, 48, 51, 49, 50, 52, 47, 50, 49, 51]] * 10)
    assert divergences(alike).max() < 1e-12 and divergences(alike).min() >= 0


def test_the_mean_divergence_weighs_clients_by_their_samples() -> None:
    federation = replace(hand_made(), train=split_of([0, 1, 1, 1]), domain_names=(), held_out_domain=None)
    shards = (ClientShard(0, torch.tensor([0])), ClientShard(1, torch.tensor([1, 2, 3])))
    shown = picture_of(federation.with_clients(shards))
    # the disjoint clients of sizes 1 and 3 above; the plain mean would be 0.343361
    assert shown.mean_divergence == pytest.approx((0.548795 + 3 * 0.137926) / 4, abs=1e-6)
    assert [client.id for client in shown.by_divergence] == [0, 1]
    assert (shown.clients[0].domains, shown.clients[0].test_samples) == ((), None)


# the command


Data = Callable[[Dataset], None]


@pytest.fixture
def show(fedbench):
    """`fedbench scenario show ARGUMENTS` in an empty folder."""
    return lambda *arguments: fedbench("scenario", "show", *arguments)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Data:
    """Makes every name the name of the given data set."""
    return lambda data: monkeypatch.setattr("fedbench.datasets.load_dataset", lambda *_, **__: data)


@pytest.fixture
def tiny(use: Data) -> None:
    use(dataset())


def as_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on standard output is a terminal of 100 columns."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in {"COLUMNS": "100", "LINES": "40", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)


ONE_CLASS_EACH = ("--set", "partition=classes_per_client", "--set", "classes_per_client=1", "--set", "clients=4")


def cells_of(shown, client: int) -> list[str]:
    """The cells of the client's line."""
    line = next(line for line in shown.out.splitlines() if line.split()[:1] == [str(client)])
    return [part.strip() for part in line.split("  ") if part.strip()]


def total(shown, name: str) -> str:
    """What the totals say of ``name``."""
    line = next(line for line in shown.out.splitlines() if line.startswith(f"{name}  "))
    return line.removeprefix(name).strip()


@pytest.mark.usefixtures("tiny")
def test_a_pipe_gets_plain_text_with_a_line_a_client_and_totals(show) -> None:
    shown = show("iid", *ONE_CLASS_EACH, "--set", "participation=0.5")
    assert shown.code == 0, shown.err
    assert "\x1b" not in shown.out
    title, words = shown.out.splitlines()[:2]
    changed = "partition=classes_per_client, classes_per_client=1, clients=4, participation=0.5"
    assert title == f"scenario iid with {changed}; data set embedded, seed 0"
    assert words.startswith("40 training samples of 4 classes, partitioned among 4 clients: classes_per_client(1), ")
    # p has one class of four: m = (5/8, 1/8, 1/8, 1/8), JS = (log2(8/5) + log2(2/5)/4 + 3/4) / 2 = 0.5488
    for client in range(4):
        cells = cells_of(shown, client)
        assert cells[:-1] == [str(client), "10", "1", "1.0", "100 %", "0.549"]
        assert sorted(cells[-1]) == ["·", "·", "·", "█"]
    assert total(shown, "training") == "40 samples"
    assert total(shown, "class counts") == "10 each; imbalance factor 1.0"
    assert total(shown, "client sizes") == "10 each, median 10; largest over smallest 1.0"
    assert total(shown, "divergence").startswith("0.549 on average")
    assert total(shown, "test") == "8 samples, the same for all clients"
    assert total(shown, "participation") == "2 of 4 clients in a round"


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "words",
    [
        ("iid", "--set", "clients=4", "participation=0.5"),
        ("--set", "clients=4", "participation=0.5", "iid"),
        ("--set", "clients=4", "iid", "participation=0.5"),
    ],
)
def test_several_settings_follow_one_set_as_in_run(show, words: tuple[str, ...]) -> None:
    shown = show(*words)
    assert shown.out.startswith("scenario iid with clients=4, participation=0.5; data set embedded, seed 0\n"), (
        shown.err
    )
    assert total(shown, "participation") == "2 of 4 clients in a round"


@pytest.mark.usefixtures("tiny")
def test_settings_behind_set_need_no_scenario_with_a_suite(show) -> None:
    shown = show("--suite", "longtail", "--set", "clients=2", "partition=iid", "imbalance_factor=5")
    assert shown.out.startswith("suite longtail with clients=2, partition=iid, imbalance_factor=5; "), shown.err


@pytest.mark.usefixtures("tiny")
def test_a_long_tail_shows_its_groups_and_counts(show, use: Data) -> None:
    use(dataset(classes=3, each=100))
    shown = show("longtail", "--set", "clients=2", "--set", "partition=iid", "--set", "imbalance_factor=100")
    # floor(100 / 100^(c/2)) = 100, 10, 1 of 111: the first has 90 % > 75 %, so it is mid; 99 % and 100 % are tail
    assert total(shown, "class counts") == "1 (kind 2) to 100 (kind 0); imbalance factor 100.0"
    assert total(shown, "mid") == "1 class, 100 samples: kind 0 100"
    assert total(shown, "tail") == "2 classes, 11 samples: kind 1 10, kind 2 1"
    assert total(shown, "client sizes") == "55 to 56, median 55.5; largest over smallest 1.0"


def test_domains_have_a_column_where_clients_differ_in_them(show, use: Data) -> None:
    use(dataset(domains=2))
    skewed = show("feature-skew")
    assert [cells_of(skewed, client)[6] for client in (0, 1)] == ["photo", "sketch"]
    assert total(skewed, "domains") == "photo, sketch; one a client"
    # 80/20 in each domain apply to data without a test split only; each client tests on its own domain's half
    assert total(skewed, "test") == "8 samples, of them 4 each a client's own"
    alike = show("iid", "--set", "clients=2")
    assert len(cells_of(alike, 0)) == 7
    assert total(alike, "domains") == "photo, sketch; 2 of 2 clients with all of them"


def test_a_held_out_domain_is_named(show, use: Data) -> None:
    use(dataset(domains=3, each=30))
    shown = show("leave-one-domain-out", "--set", "holdout_domain=sketch")
    assert total(shown, "held out") == "sketch: only tested, no client trains on it"
    assert total(shown, "validation").endswith("a client's own")
    assert [cells_of(shown, client)[6] for client in (0, 1)] == ["photo", "painting"]


@pytest.mark.usefixtures("tiny")
def test_unseen_classes_are_counted_and_named(show, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("--set", "unseen_classes=0.5", "--set", "clients=2")
    shown = show("iid", *settings)
    assert shown.out.splitlines()[2] == "Unseen in training: 2 of 4 classes (4 test samples): kind 2, kind 3."
    tuned = show("iid", *settings, "--set", "validation=0.2")
    assert "2 of 4 classes (not tested, since training data are scored): kind 2, kind 3." in tuned.out
    assert "Unseen" not in show("iid", "--set", "clients=2").out
    monkeypatch.setattr("fedbench.cli.commands.scenario._MOST_NAMES", 1)
    assert "kind 2 and 1 more." in show("iid", *settings).out


@pytest.mark.usefixtures("tiny")
def test_hidden_labels_dropout_and_tuning_splits_are_told(show) -> None:
    settings = ("labels=hidden", "dropout=0.25", "validation=0.2", "clients=2")
    shown = show("iid", *(part for setting in settings for part in ("--set", setting)))
    assert total(shown, "labels").startswith("hidden")
    assert total(shown, "participation") == "2 of 2 clients in a round; each fails to answer with probability 0.25"
    # a fifth of the ten samples of each of four classes
    assert total(shown, "scored") == "8 samples, the same for all clients"
    assert total(shown, "training") == "32 samples"
    assert "test split is no part" in total(shown, "tuning")


def test_a_class_nobody_holds_is_named(show, use: Data) -> None:
    data = dataset()
    use(replace(data, classnames=(*data.classnames, "ghost")))
    shown = show("iid", "--set", "clients=2")
    assert total(shown, "nobody holds") == "ghost"
    assert total(shown, "class counts") == "0 (ghost) to 10 (kind 0); imbalance factor ∞"


def test_of_many_clients_a_selection_is_shown(show, use: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    use(dataset(classes=10, each=100))
    asked = ("label-skew", "--set", "clients=50", "--set", "min_client_size=1", "--set", "dirichlet_alpha=0.1")
    part = show(*asked)
    monkeypatch.setattr("fedbench.cli.commands.scenario.MOST_CLIENTS", 50)
    whole = show(*asked)
    heads = [line.strip() for line in part.out.splitlines()]
    positions = [heads.index(head) for head in ("first 20", "5 most skewed", "5 least skewed")]
    assert positions == sorted(positions)
    assert [heads[positions[0] + 1 + i].split()[0] for i in range(20)] == [str(i) for i in range(20)]
    divergence = {client: float(cells_of(whole, client)[5]) for client in range(50)}
    most, least = (
        [int(heads[positions[which] + 1 + i].split()[0]) for i in range(5)]  # under the second and the third heading
        for which in (1, 2)
    )
    ranked = sorted(divergence.values(), reverse=True)
    assert [divergence[client] for client in most] == ranked[:5]
    assert [divergence[client] for client in least] == ranked[:-6:-1]
    left_out = 50 - len({*range(20), *most, *least})
    assert f"{left_out} of 50 clients are left out; --output writes all of them." in part.out
    assert "left out" not in whole.out


def test_a_terminal_of_100_columns_is_not_exceeded_whatever_the_classes(
    show, use: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_terminal(monkeypatch)
    use(dataset(classes=100, each=20, domains=2))
    shown = show("label-skew", "--set", "min_client_size=1", "--set", "dirichlet_alpha=0.05")
    assert shown.code == 0, shown.err
    assert "\x1b[1m" in shown.out
    lines = Text.from_ansi(shown.out).plain.splitlines()
    assert max(map(len, lines)) <= 100
    first = next(line for line in lines if line.split()[:1] == ["0"])
    bars = first.split()[-1]
    assert set(bars) <= set("▁▂▃▄▅▆▇█·")
    legend = " ".join(" ".join(lines).split())
    width = int(legend.split("a block for ")[1].split()[0])
    assert len(bars) == math.ceil(100 / width) >= 30


def test_in_a_pipe_up_to_60_classes_have_a_block_each(show, use: Data) -> None:
    use(dataset(classes=60, each=4))
    shown = show("iid", "--set", "clients=2")
    assert len(cells_of(shown, 0)[-1]) == 60
    assert "a block a class" in shown.out
    use(dataset(classes=61, each=4))
    shown = show("iid", "--set", "clients=2")
    assert len(cells_of(shown, 0)[-1]) == 31
    assert "a block for 2 neighbouring classes" in shown.out


@pytest.mark.usefixtures("tiny")
def test_the_seed_decides_the_partition(show) -> None:
    asked = ("iid", "--set", "clients=3")
    assert show(*asked).out == show(*asked).out
    first, other = show(*asked).out.splitlines()[1:], show(*asked, "--seed", "1").out.splitlines()[1:]
    assert first != other


SUITE = """
name: grid
scenario: {preset: iid, clients: 2}
scales:
  small:
    set: {fedprox.mu: 0.1}
    settings:
      - {name: two, set: {clients: 2}}
      - {name: four, set: {clients: 4, dataset: "embedded?train=40"}}
  large:
    settings:
      - {name: five, set: {clients: 5}}
rows:
  - {method: fedavg, set: {clients: 10}, only: [two]}
  - {method: fedprox}
"""


@pytest.fixture
def grid(tmp_path: Path) -> str:
    (tmp_path / "grid.yaml").write_text(SUITE, encoding="utf-8")
    return "grid.yaml"


@pytest.mark.usefixtures("tiny")
def test_a_suites_setting_has_its_scenario_and_data_whatever_its_rows_change(show, grid: str) -> None:
    two = show("--suite", grid, "--setting", "two")
    assert total(two, "participation") == "2 of 2 clients in a round"
    four = show("--suite", grid, "--setting", "four", "--seed", "3")
    title = "suite grid.yaml, setting 'four' at scale 'small'; data set embedded?train=40, seed 3"
    assert four.out.splitlines()[0] == title
    assert total(four, "participation") == "4 of 4 clients in a round"
    assert total(show("--suite", grid, "--scale", "large"), "participation") == "5 of 5 clients in a round"


@pytest.mark.usefixtures("tiny")
def test_what_is_set_overrules_the_suite_and_two_data_sets_are_refused(show, grid: str) -> None:
    shown = show("--suite", grid, "--setting", "four", "--set", "clients=8", "--dataset", "cifar10")
    assert total(shown, "participation") == "8 of 8 clients in a round"
    assert "data set cifar10," in shown.out
    both = show("iid", "--dataset", "cifar10", "--set", "dataset=cifar100")
    assert both.code == 2 and "dataset is set twice" in both.err


@pytest.mark.usefixtures("tiny")
def test_what_the_data_cannot_give_is_an_error_of_the_scenario(show) -> None:
    assert "needs data with domains" in show("feature-skew").err
    assert "without a sample" in show("iid", "--set", "clients=41").err


def test_a_data_set_whose_own_code_fails_is_told_in_a_sentence(show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbench.datasets.load_dataset", lambda *_, **__: [][1])
    shown = show("iid")
    assert shown.code == 2
    assert "data set 'embedded' can't be loaded: IndexError: list index out of range (" in " ".join(shown.err.split())
