"""Flower's strategies as methods, and fedbench's partitions as Flower's; skipped where Flower is not installed.

It pins older versions of what fedbench uses, so it is no test dependency. To run these beside the usual environment:

    pip install --no-deps --target flower "flwr==1.42.0" flwr-datasets iterators pycryptodome tomli tomli_w grpcio \
        grpcio-health-checking httpx httpcore seaborn && PYTHONPATH=flower pytest tests/interop
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from fedbench import testing
from fedbench.core.errors import FedbenchError
from fedbench.core.scenario import Scenario
from fedbench.kinds.registry import plugins_everywhere
from fedbench.testing import final_state, tiny_run, tiny_spec
from fedbench_flower.methods import _kept, _restore

needs_flower = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="Flower is not installed")
needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("flwr_datasets") is None, reason="flwr-datasets is not installed"
)
METHODS = '''
"""Strategies of Flower.

A line.
A line.
"""
from dataclasses import dataclass

from fedbench.api import NoParams, hyper
from fedbench_flower.methods import FlowerMethod
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, FedProx


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """Of the server."""

    eta: float = hyper(0.05, symbol="η", source="ours", low=1e-4, high=1.0, log=True)


class FlowerAdam(FlowerMethod[AdamParams]):
    """Adam on the server."""

    name = "flower-adam"
    citation = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"

    def strategy(self):
        return FedAdam(eta=self.params.eta, beta_1=0.9, beta_2=0.99, tau=1e-3)


class FlowerMean(FlowerMethod[NoParams]):
    """The mean."""

    name = "flower-mean"
    citation = "McMahan et al., Communication-Efficient Learning, AISTATS 2017"

    def strategy(self):
        return FedAvg()


class FlowerMomentum(FlowerMethod[NoParams]):
    """Momentum."""

    name = "flower-momentum"
    citation = "Hsu, Qi, Brown, Effects of Non-Identical Data Distribution, 2019"

    def strategy(self):
        return FedAvgM(server_momentum=0.7)


class FlowerMedian(FlowerMethod[NoParams]):
    """The median."""

    name = "flower-median"
    citation = "Yin et al., Byzantine-Robust Distributed Learning, ICML 2018"

    def strategy(self):
        return FedMedian()


class FlowerProx(FlowerMethod[NoParams]):
    """Tells clients a proximal term."""

    name = "flower-prox"
    citation = "Li et al., Federated Optimization in Heterogeneous Networks, 2020"

    def strategy(self):
        return FedProx(proximal_mu=0.1)
'''


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    file = tmp_path_factory.mktemp("flower") / "flower_methods.py"
    file.write_text(METHODS)
    with plugins_everywhere([file]):
        yield file


def trained(method: str, **more: object) -> dict[str, torch.Tensor]:
    return final_state(tiny_run(tiny_spec(method, rounds=3, **more), executor="sequential")).weights


@needs_flower
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_flowers_mean_and_momentum_are_fedavg_and_fedavgm(methods: Path, weighting: str) -> None:
    for theirs, ours in (("flower-mean", "fedavg"), ("flower-momentum", "fedavgm")):
        found, wanted = trained(theirs, weighting=weighting), trained(ours, weighting=weighting)
        for name, weight in wanted.items():
            assert torch.allclose(found[name], weight, rtol=1e-5, atol=1e-6), (theirs, name)


@needs_flower
def test_flowers_adam_by_hand(methods: Path) -> None:
    # after one round: m = (1 - β1) Δ, v = (1 - β2) Δ², with Flower's bias correction of the rate
    spec = tiny_spec("flower-adam", rounds=1)
    run = tiny_run(spec, executor="sequential")
    start = {name: tensor.clone() for name, tensor in run.model.weights.items()}
    found = final_state(run).weights
    mean = final_state(tiny_run(tiny_spec("fedavg", rounds=1), executor="sequential")).weights
    for name, before in start.items():
        delta = (mean[name] - before).double()
        m, v = 0.1 * delta, 0.01 * delta**2
        rate = 0.05 * (1 - 0.99**2) ** 0.5 / (1 - 0.9**2)
        expected = before.double() + rate * m / (v.sqrt() + 1e-3)
        assert torch.allclose(found[name].double(), expected, rtol=1e-4, atol=1e-6), name


@needs_flower
@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_a_strategy_with_state_keeps_the_contract_of_methods(methods: Path, check) -> None:  # type: ignore[no-untyped-def]
    check("flower-adam")


@needs_flower
def test_other_strategies_resume_and_one_that_configures_clients_is_refused(methods: Path) -> None:
    testing.check_resumes(["flower-momentum", "flower-median"])
    with pytest.raises(FedbenchError, match=r"FedProx tells clients how to train \(proximal-mu\)"):
        trained("flower-prox")


def test_what_a_strategy_keeps_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flwr.app", SimpleNamespace(ArrayRecord=ModuleType, Array=np.asarray))
    kept = SimpleNamespace(best=np.float64(0.5), mean=np.array([1.0, 2.0]), last=3, seen=[], by={"a": 1.0}, none={})
    fresh = SimpleNamespace(best=None, mean=None, last=0, seen=[7], by={}, none={})
    again = SimpleNamespace(**vars(fresh))
    stored = _kept(kept, fresh, "mine")
    _restore(again, stored)
    assert (type(again.best), again.best, again.last, again.seen) == (np.float64, 0.5, 3, [])
    assert again.mean.tolist() == [1.0, 2.0] and again.by == {"a": 1.0} and "none/empty dict/" not in stored
    with pytest.raises(FedbenchError, match="keeps by from round to round by keys such as 3"):
        _kept(SimpleNamespace(by={3: 1.0}), fresh, "mine")


@needs_datasets
def test_partitions_are_the_clients_of_the_same_scenario() -> None:
    import datasets

    from fedbench.scenarios import build_federation
    from fedbench.testing import tiny_dataset
    from fedbench_flower.partitions import partitioner

    tiny = tiny_dataset()
    rows = {"n": list(range(len(tiny.train))), "kind": [tiny.classnames[c] for c in tiny.train.labels.tolist()]}
    kind = datasets.ClassLabel(names=list(tiny.classnames))
    data = datasets.Dataset.from_dict(rows, datasets.Features({"n": datasets.Value("int64"), "kind": kind}))
    scenario = Scenario(
        partition="dirichlet", clients=4, min_client_size=2, imbalance="exponential", imbalance_factor=3
    )
    ours = partitioner(scenario, 5, label="kind")
    ours.dataset = data
    federation = build_federation(tiny, scenario, 5)
    kept = federation.train.images
    numbers = kept.indices if hasattr(kept, "indices") else torch.arange(len(tiny.train))
    assert ours.num_partitions == 4
    for client in federation.clients:
        assert list(ours.load_partition(client.id)["n"]) == numbers[client.indices].tolist()
    with pytest.raises(FedbenchError, match="there is no partition 4"):
        ours.load_partition(4)
    wrong = partitioner(scenario, 5, label="kinds")
    wrong.dataset = data
    with pytest.raises(FedbenchError, match="did you mean 'kind'"):
        _ = wrong.num_partitions
