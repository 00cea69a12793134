"""Samples that the scenario grants the server: set aside from all clients, handed to methods that require them only."""

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl
from fedbench.core.scenario import Scenario
from fedbench.runs.prepare import Settings, prepare
from fedbench.scenarios import build_federation
from fedbench.testing import final_state, tiny_backbone, tiny_dataset, tiny_spec
from fedbench.toolkit.fedavg import average

PLUGIN = '''
"""A method that records what the server has."""

from dataclasses import dataclass

import torch

from fedbench.toolkit.fedavg import average
from fedbench.core.method.hooks import hookimpl


@dataclass(frozen=True, kw_only=True)
class P:
    """None."""


class {name}:
    """Records."""

    name, citation, Params, recipe, requires = "{name}", "nobody", P, {{}}, frozenset({requires!r})

    def __init__(self, params):
        self.params = params

    @hookimpl
    def aggregate(self, task):
        """Look, then average."""
        seen = task.server_data
        task.state["seen"] = {{"inputs": seen.inputs.read(torch.arange(len(seen.inputs)))}}
        if seen.labels is not None:
            task.state["seen"]["labels"] = seen.labels
        return average(task)
'''


def run_of(tmp_path, requires, **scenario):
    name = "Asks" + "".join(sorted(requires)).replace("_", "")
    file = tmp_path / f"{name}.py"  # a plugin file is loaded once a process, by its path
    file.write_text(PLUGIN.format(name=name, requires=requires))
    settings = Settings(data_dir=tmp_path, cache_dir=tmp_path, plugin_files=(file,))
    spec = tiny_spec("fedavg", rounds=1)
    changed = spec.scenario.model_copy(update=scenario)
    spec = spec.model_copy(update={"method": name, "scenario": changed, "params": {}})
    return prepare(spec, settings, dataset=tiny_dataset(), backbone=tiny_backbone(spec.backbone))


@pytest.mark.parametrize("imbalance", ["none", "exponential"])
def test_the_servers_samples_are_as_many_of_each_class_and_no_clients(imbalance):
    scenario = Scenario(server_samples=4, clients=3, imbalance=imbalance, imbalance_factor=5)
    federation = build_federation(tiny_dataset(), scenario, 0)
    assert torch.bincount(federation.server.labels).tolist() == [4, 4, 4, 4]
    pool = tiny_dataset().train.images.pixels.flatten(1)
    server = federation.server.images.read(torch.arange(16)).flatten(1)
    clients = federation.train.images.read(federation.shards.indices).flatten(1)
    where = [int((pool == image).all(1).nonzero()) for image in server]
    dealt = {int((pool == image).all(1).nonzero()) for image in clients}
    assert len(set(where)) == 16 and not dealt & set(where)
    # the tiny set has 22 or 23 training samples a class
    counts = torch.bincount(tiny_dataset().train.labels)
    if imbalance == "none":
        assert federation.class_counts().tolist() == (counts - 4).tolist()
    else:
        assert int(federation.class_counts().max()) == int(counts.min()) - 4


def test_shared_samples_leave_the_clients_what_they_have_without_a_server():
    without = build_federation(tiny_dataset(), Scenario(clients=3), 0)
    shared = build_federation(tiny_dataset(), Scenario(clients=3, server_samples=4, server_source="shared"), 0)
    assert torch.equal(shared.shards.indices, without.shards.indices)
    assert torch.bincount(shared.server.labels).tolist() == [4, 4, 4, 4]
    scenario = Scenario(clients=3, server_samples=1000, server_source="shared")
    assert torch.equal(
        torch.bincount(build_federation(tiny_dataset(), scenario, 0).server.labels), without.class_counts()
    )


def test_another_seed_draws_others_and_none_are_drawn_where_none_are_granted():
    seeds = [build_federation(tiny_dataset(), Scenario(server_samples=4, clients=3), seed).server for seed in (0, 0, 1)]
    images = [split.images.read(torch.arange(16)) for split in seeds]
    assert torch.equal(images[0], images[1]) and not torch.equal(images[0], images[2])
    assert build_federation(tiny_dataset(), Scenario(clients=3), 0).server is None


def test_too_many_are_refused_in_one_sentence():
    with pytest.raises(FedbenchError, match=r"server_samples=23 leaves nothing of a class that has 2\d training"):
        build_federation(tiny_dataset(), Scenario(server_samples=23, clients=3), 0)


def test_labels_reach_only_a_method_that_requires_them(tmp_path):
    granted = {"server_samples": 5, "server_labels": "visible"}
    state = final_state(run_of(tmp_path, {"server_data"}, **granted))
    assert set(state.server["seen"]) == {"inputs"} and len(state.server["seen"]["inputs"]) == 20
    run = run_of(tmp_path, {"server_labels"}, **granted)
    assert torch.bincount(final_state(run).server["seen"]["labels"]).tolist() == [5, 5, 5, 5]
    assert run.info.server_data == "labelled"
    assert run_of(tmp_path, {"server_data"}, **granted).info.server_data == "unlabelled"


@pytest.mark.parametrize(
    ("requires", "scenario", "said"),
    [
        ({"server_data"}, {}, "needs unlabelled samples at the server.*set scenario.server_samples"),
        ({"server_labels"}, {"server_samples": 5}, "needs labelled samples.*scenario.server_labels=visible"),
        ({"labels"}, {"labels": "hidden"}, "Askslabels needs labels, which this scenario hides"),
        ({"a_lottery"}, {"server_samples": 5}, "requires 'a_lottery', which no run can grant"),
    ],
)
def test_what_the_scenario_does_not_grant_is_refused(tmp_path, requires, scenario, said):
    with pytest.raises(FedbenchError, match=said):
        run_of(tmp_path, requires, **scenario)


def test_a_method_that_requires_nothing_gets_nothing(tmp_path):
    seen = []

    class Looks:
        @hookimpl
        def aggregate(self, task):
            seen.append(task.server_data)
            return average(task)

    spec = tiny_spec("fedavg", rounds=1)
    spec = spec.model_copy(update={"scenario": spec.scenario.model_copy(update={"server_samples": 5})})
    settings = Settings(data_dir=tmp_path, cache_dir=tmp_path)
    run = prepare(spec, settings, listeners=[Looks()], dataset=tiny_dataset(), backbone=tiny_backbone(spec.backbone))
    final_state(run)
    assert seen == [None] and run.info.server_data == ""
