"""The contracts of plug-ins that are no methods: `fedbench check NAME`, or in a test of one's own

    @pytest.mark.parametrize("check", fedbench.testing.plugins.CHECKS["partition"])
    def test_contract(check): check("my-partition?alpha=0.5")

A check takes the name as it is typed. It raises an error, or returns a reason where it does not apply.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Federation
from fedbench.core.randomness import torch_generator
from fedbench.core.scenario import Scenario
from fedbench.core.types import Predictions
from fedbench.datasets import load_dataset
from fedbench.kinds.kinds import AnyMetric, MetricTask
from fedbench.kinds.registry import build
from fedbench.models import load_backbone
from fedbench.models.names import is_pretrained
from fedbench.models.text.vectors import text_vectors
from fedbench.rounds.measures import measured
from fedbench.scenarios import build_federation
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import load_suite
from fedbench.testing import digest, final_state, scratch_folder, tiny_dataset, tiny_run, tiny_spec

_DATA = Path("data")


def check_data_set(name: str) -> None:
    """Images are uint8 (b, 3, h, w), indices have names, loading twice gives the same content."""
    first, second = (load_dataset(name, data_dir=_DATA, cache_dir=scratch_folder()) for _ in range(2))
    assert first.content_hash and first.content_hash == second.content_hash, "loaded twice, the content differs"
    assert first.name == name, f"its Dataset is called {first.name!r}; call it request.text"
    assert all(first.classnames) and len(set(first.classnames)) == len(first.classnames), "class names are not unique"
    for split in filter(None, (first.train, first.test)):
        assert len(split) == len(split.images) > 0, "a split has another number of labels than of images, or none"
        some = torch.arange(min(len(split), 3))
        images = split.images.read(some)
        assert images.dtype == torch.uint8 and images.ndim == 4 and images.shape[1] == 3, (
            "images are not uint8 (b,3,h,w)"
        )
        assert torch.equal(images, split.images.read(some)), "read twice, images differ"
        for what, index, names in (
            ("labels", split.labels, first.classnames),
            ("domains", split.domains, first.domain_names),
            ("clients", split.clients, first.client_names),
        ):
            if index is not None:
                assert index.dtype == torch.int64 and index.shape == (len(split),), f"{what} are not int64 (n,)"
                assert 0 <= int(index.min()) <= int(index.max()) < len(names), f"{what} lack names"


def check_trains_on_data_set(name: str) -> None:
    """A federation can be made of it: by its own clients, its domains or iid."""
    data = load_dataset(name, data_dir=_DATA, cache_dir=scratch_folder())
    partition = "iid" if data.train.clients is None else "natural"
    federation = build_federation(data, Scenario(partition=partition, clients=2), 0)
    assert len(federation.test) and len(federation.clients) >= 1


def check_partition(name: str) -> None:
    """Every client has samples, none has another's; the data stay as they are; draws follow the generator alone."""
    data = _data_of_clients()
    before = copy.deepcopy(_indices(data))
    state = np.random.get_state()[1].copy(), torch.get_rng_state()  # type: ignore[index]
    first, second = (_held(build_federation(data, _partitioned(name), 0)) for _ in range(2))
    assert first == second, "the same seed gives other clients"
    assert all(map(torch.equal, before, _indices(data))), "it changed what it is handed"
    assert np.array_equal(state[0], np.random.get_state()[1]), "drew from numpy's global generator; use task.rng"  # type: ignore[index]
    assert torch.equal(state[1], torch.get_rng_state()), "drew from torch's global generator; use task.rng"


def check_seeds_of_partition(name: str) -> str | None:
    """Another seed gives another partition, unless nothing is drawn."""
    data = _data_of_clients()
    partitions = {str(_held(build_federation(data, _partitioned(name), seed))) for seed in range(3)}
    return None if len(partitions) > 1 else "three seeds give one partition: nothing is drawn"


def check_training_on_partition(name: str) -> None:
    """A method trains on it."""
    spec = tiny_spec("fedavg", rounds=2)
    scenario = _partitioned(name).model_copy(update={"participation": 1.0})
    spec = spec.model_copy(update={"scenario": scenario})
    data = _data_of_clients()
    final_state(tiny_run(spec, dataset=data))


def check_backbone(name: str) -> None:
    """Finite features (b, feature_dim); the same seed gives the same weights, another one others."""
    size = (32, 32)
    first, second, other = (load_backbone(name, data_dir=_DATA, seed=seed, image_size=size) for seed in (0, 0, 1))
    assert first.name == name, f"its Backbone is called {first.name!r}; call it request.text"
    states = [backbone.module.state_dict() for backbone in (first, second, other)]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items()), "one seed gives two networks"
    if not is_pretrained(name):
        assert any(not torch.equal(value, states[2][key]) for key, value in states[0].items()), (
            "two seeds give one network; initialise it by torch's default generator, or by request.seed"
        )
        assert not first.weights_hash, "a network that starts at random has no weights_hash"
    if hasattr(first, "feature_dim") and not hasattr(first, "text_features"):
        images = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8, generator=torch_generator(0, "images"))
        features = first.module.eval()(first.transform(images))
        assert features.shape == (2, first.feature_dim), f"features are {tuple(features.shape)}, not (b, feature_dim)"
        assert bool(features.isfinite().all()), "features are not finite"


def check_training_of_backbone(name: str) -> None:
    """Two rounds of fedavg move finite weights, clients trained at once as one after the other, to float tolerance."""
    spec = tiny_spec("fedavg", backbone=name, rounds=2)
    one_by_one = final_state(tiny_run(spec, executor="sequential"))
    assert digest(final_state(tiny_run(spec, executor="sequential"))) == digest(one_by_one), "two runs differ"
    at_once = final_state(tiny_run(spec))
    for key, wanted in one_by_one.weights.items():
        assert bool(wanted.isfinite().all()), f"{key} is not finite after two rounds"
        difference = (at_once.weights[key] - wanted).abs().max()
        assert difference <= 1e-3 * wanted.abs().max() + 1e-5, f"{key} differs by {difference:.1e} between executors"


def check_text_encoder(name: str) -> None:
    """A finite vector a class, the same for the same names and seed."""
    names = ("bird", "boat", "car")
    first, second = (text_vectors(name, names, ("a photo of a {}",), 0, data_dir=_DATA) for _ in range(2))
    assert first.shape[0] == 3 and first.dtype == torch.float32, f"vectors are {first.dtype} {tuple(first.shape)}"
    assert torch.equal(first, second), "asked twice, the vectors differ"
    assert not torch.allclose(first[0], first[1]), "two classes have one vector"


def check_metric(name: str) -> None:
    """Numbers under its own name, the same each time, of a global model and without one."""
    metric = cast(AnyMetric, build("metric", name)[0])
    federation = build_federation(tiny_dataset(), Scenario(partition="dirichlet", clients=3, min_client_size=2), 0)
    n, classes = len(federation.test), federation.num_classes
    scores = torch.randn(n, classes, generator=torch_generator(0, "scores"))
    whole = Predictions(scores.argmax(dim=1), {0: federation.test.labels.clone()}, scores)
    for predictions in (whole, replace(whole, scores=None), replace(whole, by_client={}), Predictions(None, {})):
        for groups in ({}, {"head": (0, 1), "tail": (2, 3)}):
            task = MetricTask(predictions, replace(federation, groups=groups))
            kept = None if predictions.labels is None else predictions.labels.clone()
            first, second = (measured((metric,), task, is_last=True) for _ in range(2))
            assert first == second, "asked twice, the numbers differ"
            assert kept is None or torch.equal(kept, task.predicted), "it changed the predictions"


def check_suite(name: str) -> None:
    """Every scale has runs, and every row's settings hold."""
    suite = load_suite(name)
    assert suite.description, "no description, which `fedbench list suites` shows"
    for scale in list(suite.scales) or [""]:
        assert expand(suite, Overrides(scale=scale))


CHECKS: Mapping[str, tuple[Callable[[str], str | None], ...]] = {
    "data set": (check_data_set, check_trains_on_data_set),
    "partition": (check_partition, check_seeds_of_partition, check_training_on_partition),
    "backbone": (check_backbone, check_training_of_backbone),
    "text encoder": (check_text_encoder,),
    "metric": (check_metric,),
    "suite": (check_suite,),
}
"""Kind of plug-in -> its contract."""


def _data_of_clients() -> Dataset:
    """The tiny data set in two domains, whose samples come from five clients."""
    tiny = tiny_dataset()

    def of(count: int) -> torch.Tensor:
        return torch.arange(count) % 5

    assert tiny.test is not None
    train, test = (replace(split, clients=of(len(split))) for split in (tiny.train, tiny.test))
    return replace(tiny, train=train, test=test, client_names=("a", "b", "c", "d", "e"))


def _indices(data: Dataset) -> list[torch.Tensor]:
    split = data.train
    return [index for index in (split.labels, split.domains, split.clients) if index is not None]


def _partitioned(name: str) -> Scenario:
    return Scenario(partition=name, clients=4, min_client_size=4, dirichlet_alpha=1.0)


def _held(federation: Federation) -> list[list[int]]:
    return [shard.indices.tolist() for shard in federation.clients]


def kinds_of(name: str) -> list[str]:
    """The kinds of which there is a plug-in of that name; no methods. FedbenchError for none of them."""
    from fedbench.kinds.registry import parted, registered
    from fedbench.suites.files import suite_files

    head = name.partition("?")[0]
    kinds = [kind for kind in CHECKS if kind != "suite" and parted(kind, head)[0] in registered(kind)]
    if name in suite_files() or name.endswith((".yaml", ".yml")):
        kinds.append("suite")
    if not kinds:
        raise FedbenchError(f"nothing is called {name!r}; see fedbench list.")
    return kinds
