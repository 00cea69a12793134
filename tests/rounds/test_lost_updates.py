"""What clients keep follows what the server accepted: after a lost or rejected update, for every method."""

import inspect
from dataclasses import replace

import pytest
import torch

from fedbench.core.federation import ClientShard, Split, TensorImages
from fedbench.core.method.hooks import hookimpl
from fedbench.core.spec import Training
from fedbench.core.types import Model
from fedbench.kinds.registry import find_method, method_names
from fedbench.models.inputs import FeatureInputs
from fedbench.plugins.assembly import assemble
from fedbench.rounds.executors.sequential import Sequential
from fedbench.rounds.loop import start, train_round
from fedbench.scenarios.participation import Schedule
from fedbench.testing import tiny_run, tiny_spec

STAYS = {"moon", "dp-fpl", "fst-cbdg", "fedbn", "fedloge", "fedotp", "fedpgp", "fedpha", "fedproto", "promptfolio"}
STAYS |= {"apfl", "ditto", "fedper", "fedrep", "fedrod", "fedsa-lora", "lg-fedavg", "local", "pfedme", "pfedmoap"}
"""What these keep is of the client's own data or model alone."""
BESIDE = {"fedpurel"}
"""What these keep is trained beside the model that the server made in the same round, so of the others' updates."""
UNDONE = {"scaffold", "fedpcl", "fed-grab", "feddc"}
"""What these keep has a counterpart on the server."""


def may_keep(name):
    """Whether a client of the method can keep something: private tensors, or what code that a client runs writes."""
    functions = inspect.getmembers(find_method(name), inspect.isfunction)
    of_clients = [
        f for called, f in functions if called == "after_training" or "step" in inspect.signature(f).parameters
    ]
    return hasattr(find_method(name), "private") or any(".state" in inspect.getsource(f) for f in of_clients)


def everything(tensors):
    """Tensors of nested mappings by their path, as bytes."""
    if not isinstance(tensors, dict):
        return tensors.numpy().tobytes()
    return {key: everything(value) for key, value in tensors.items() if not isinstance(value, dict) or value}


def kept(state, client):
    return everything({"methods": state.clients.get(client, {}), "own": state.own.get(client, {})})


def rest(state, lost):
    """All of a run but what the ``lost`` clients keep."""
    clients = {k: v for k, v in state.clients.items() if k not in lost}
    own = {k: v for k, v in state.own.items() if k not in lost}
    parts = {"weights": state.weights, "buffers": state.buffers, "server": state.server}
    return everything({**parts, "clients": clients, "own": own})


def spec_of(name):
    if name == "fedbn":
        return tiny_spec(name, backbone="resnet8?width=1")
    spec = tiny_spec(name, hidden=name == "fst-cbdg")
    if name == "fst-cbdg":
        return spec.model_copy(update={"params": {name: {**spec.params[name], "self_training": True}}})
    return spec


@pytest.mark.parametrize("name", [name for name in method_names() if may_keep(name)])
def test_what_a_client_keeps_of_a_lost_update_is_undone_or_stays_as_its_method_says(name, monkeypatch):
    run = tiny_run(spec_of(name), executor="sequential")
    all_four = Schedule((0, 1, 2, 3), (0, 1, 2, 3))

    def after(second):
        monkeypatch.setattr("fedbench.rounds.exchange.schedule", lambda number, *_: (all_four, second)[number - 1])
        state = run.initial_state()
        start(run, state)
        state, _ = train_round(run, state)
        before = {client: kept(state, client) for client in (0, 1)}
        return before, train_round(run, state)[0]

    before, lost = after(Schedule((0, 1, 2), (0, 1, 2), late=frozenset({0}), corrupt=frozenset({1})))
    _, dropped = after(Schedule((0, 1, 2), (2,)))
    _, sound = after(Schedule((0, 1, 2), (0, 1, 2)))
    # for the server and all others it is as if the two had dropped out before training
    assert rest(lost, {0, 1}) == rest(dropped, {0, 1})
    keeps_something = any(before.values())
    assert keeps_something == (name in STAYS | BESIDE | UNDONE)
    for client in (0, 1):
        trained = kept(sound, client)
        if keeps_something:
            assert trained != before[client], "the second round changes nothing that is kept: the test shows nothing"
        if name in BESIDE:
            assert kept(lost, client) not in (before[client], trained)
        else:
            assert kept(lost, client) == (trained if name in STAYS else before[client])


@pytest.mark.parametrize("name", ["scaffold", "fedpcl"])
def test_what_a_first_participation_leaves_is_undone_too(name, monkeypatch):
    monkeypatch.setattr("fedbench.rounds.exchange.schedule", lambda *_: Schedule((0, 1), (0, 1), late=frozenset({0})))
    run = tiny_run(tiny_spec(name))
    state = run.initial_state()
    start(run, state)
    state, _ = train_round(run, state)
    assert not kept(state, 0) and kept(state, 1)


# --- SCAFFOLD on a convex problem ---


class Quadratic:
    """Samples (a, b) have the loss a/2 (w - b)^2."""

    @hookimpl
    def local_loss(self, step):
        a, b = step.batch.inputs.T
        return (a / 2 * (step.weights["w"] - b).square()).mean()


CURVATURES = torch.tensor([0.5, 1.0, 2.0, 4.0, 1.0, 0.5])
CENTRES = torch.tensor([3.0, -1.0, 0.5, -1.0, 2.0, 3.7])
OPTIMUM = 0.15
"""Of the mean of the clients' losses: sum a b / sum a = (1.5 - 1 + 1 - 4 + 2 + 1.85) / 9."""


ROUNDS = 60


def convex_run(method, **faults):
    """Six clients of one quadratic each, four of whom take part in a round with five local steps of .2."""
    budget = Training(rounds=ROUNDS, lr=0.2, momentum=0.0, local_epochs=5, batch_size=8, weighting="uniform")
    spec = tiny_spec(method, backbone="clip:embedded")
    scenario = spec.scenario.model_copy(update={"clients": 6, "participation": 0.67, **faults})
    spec = spec.model_copy(update={"scenario": scenario, "training": budget})
    run = tiny_run(tiny_spec(method, backbone="clip:embedded"))
    clients = [ClientShard(client, torch.tensor([client])) for client in range(6)]
    data = Split(TensorImages(torch.zeros(6, 3, 1, 1, dtype=torch.uint8)), torch.zeros(6, dtype=torch.int64))
    federation = replace(run.federation, clients=clients, train=data)
    hooks = assemble(method, {}, listeners=[Quadratic()]).hooks
    return replace(
        run,
        spec=spec,
        assembly=replace(run.assembly, hooks=hooks),
        federation=federation,
        scored=federation,
        model=Model(weights={"w": torch.tensor([0.0])}, forward=None),
        train=FeatureInputs(torch.stack([CURVATURES, CENTRES], dim=1)),
        executor=Sequential(),
    )


def last(run):
    state = run.initial_state()
    start(run, state)
    for _ in range(ROUNDS):
        state, _ = train_round(run, state)
    return state


FAULTS = {
    "none": {},
    "dropout": {"dropout": 0.3},
    "late_dropout": {"late_dropout": 0.3},
    "stragglers": {"stragglers": 0.5, "straggler_work": 0.2},
    "corrupt": {"corrupt": 0.3},
    "rarely corrupt": {"corrupt": 0.05},
    "all": {"dropout": 0.1, "late_dropout": 0.2, "stragglers": 0.5, "straggler_work": 0.2, "corrupt": 0.2},
}


@pytest.mark.parametrize("faults", FAULTS)
def test_scaffold_ends_at_the_optimum_whatever_befalls_its_clients(faults):
    state = last(convex_run("scaffold", **FAULTS[faults]))
    assert state.weights["w"].item() == pytest.approx(OPTIMUM, abs=1e-4)
    # c is the mean of all c_k, each of which has come to be the gradient at the optimum, a (w - b)
    own = torch.stack([state.clients[client]["scaffold"]["w"] for client in range(6)]).flatten()
    torch.testing.assert_close(own, CURVATURES * (OPTIMUM - CENTRES), atol=1e-3, rtol=0)
    torch.testing.assert_close(state.server["scaffold"]["w"], own.mean()[None], atol=1e-5, rtol=0)


def test_fedavg_does_not_end_there_as_its_clients_drift():
    assert abs(last(convex_run("fedavg")).weights["w"].item() - OPTIMUM) > 0.05
