"""FedALA: Zhang et al. 2023: a learned mixture of the received and the last own weights to start from."""

import pytest
import torch

from fedbench.core.types import LinearHead, Model
from fedbench.rounds.loop import predict
from fedbench.testing import final_state
from fedbench.toolkit.local_training import batch_table
from fedbench_methods.fedala import mixed, next_share
from tests.equations.kit import all_of, body_and_head, run_of


def test_mixture_and_step_of_the_shares_by_hand():
    kept, received, share = torch.tensor([1.0, 1.0, 2.0]), torch.tensor([3.0, 0.0, 2.0]), torch.tensor([0.5, 0.25, 0.7])
    # 1 + 2 * .5, 1 - 1 * .25, 2 + 0
    torch.testing.assert_close(mixed(kept, received, share), torch.tensor([2.0, 0.75, 2.0]))
    assert torch.equal(mixed(kept, received, torch.ones(3)), received)
    # .5 - .1 * 1 * 2, .25 - .1 * 1 * -1, unchanged where both are equal
    found = next_share(share, torch.ones(3), kept, received, 0.1)
    torch.testing.assert_close(found, torch.tensor([0.3, 0.35, 0.7]))
    # 0.5 - 10 * 2 and .25 + 10 * 1 leave the bounds
    assert next_share(share, torch.full((3,), 10.0), kept, received, 1.0).tolist() == [0.0, 1.0, share[2].item()]


def trained(make_task, state, received, **params):
    weights = {"body.weight": torch.tensor([2.0]), "head.weight": torch.tensor([0.5]), "head.bias": torch.zeros(1)}
    task = make_task(
        Model(weights, body_and_head, head=LinearHead()),
        torch.ones(2, 1),
        [0, 0],
        method="fedala",
        params={"fedala": {"sampled": 1.0, **params}},
        received={name: torch.tensor([value]) for name, value in received.items()},
        state=state,
        lr=1e-30,
    )
    return task.hooks.local_train(task=task).weights, task.state["fedala"]


def test_a_later_participation_takes_one_pass_and_starts_the_head_from_the_mixture(make_task):
    own = {"body.weight": torch.tensor([9.0]), "head.weight": torch.tensor([1.5]), "head.bias": torch.tensor([1.0])}
    kept = {f"weights/{name}": value for name, value in own.items()}
    kept |= {"shares/head.weight": torch.tensor([0.5]), "shares/head.bias": torch.tensor([0.25])}
    received = {"body.weight": 2.0, "head.weight": 0.5, "head.bias": 0.0}
    found, after = trained(make_task, {"fedala": kept}, received, rate=0.1)
    # theta^: weight 1.5 - 1 * .5 = 1, bias 1 - 1 * .25 = .75; o = 2 * 1 + .75, r = sigmoid(o) - 1
    r = (torch.sigmoid(torch.tensor(2.75)) - 1).item()
    # x - theta is -1 for both; gradients 2 r and r
    weight, bias = 0.5 + 0.1 * 2 * r, 0.25 + 0.1 * r
    assert after["shares/head.weight"].item() == pytest.approx(weight)
    assert after["shares/head.bias"].item() == pytest.approx(bias)
    # the run's own rate is next to nothing: what comes out is the start, the body as received
    assert found["head.weight"].item() == pytest.approx(1.5 - weight) and found["body.weight"].item() == 2.0
    assert after["weights/head.bias"].item() == pytest.approx(1 - bias)


def test_the_first_learning_goes_on_until_the_losses_settle_and_not_beyond_50_passes(make_task, monkeypatch):
    own = {"body.weight": torch.tensor([2.0]), "head.weight": torch.tensor([1.5]), "head.bias": torch.tensor([1.0])}
    kept = {f"weights/{name}": value for name, value in own.items()}
    received = {"body.weight": 2.0, "head.weight": 0.5, "head.bias": 0.0}
    passes = []
    monkeypatch.setattr("fedbench_methods.fedala.batch_table", lambda *_: passes.append(1) or [torch.arange(2)])
    _, after = trained(make_task, {"fedala": kept}, received, rate=1e-3)
    # losses that hardly change: after ten there have to be eleven
    assert len(passes) == 11 and after["shares/head.weight"] < 1
    passes.clear()
    monkeypatch.setattr("fedbench_methods.fedala.SPREAD", 0.0)
    trained(make_task, {"fedala": kept}, received, rate=1e-3)
    assert len(passes) == 50


@pytest.mark.parametrize(("stack", "backbone"), [("fedala", "resnet8?width=1"), ("promptfl+fedala", "clip:embedded")])
def test_own_models_are_the_weights_trained_last_and_shares_are_learned(stack, backbone):
    run = run_of(stack, backbone=backbone, rounds=4)
    state = final_state(run)
    answer = predict(run, state, run.test, clients=(0, 1, 2, 3))
    inputs = all_of(run.test)
    shares = []
    for client, labels in answer.by_client.items():
        kept = state.clients.get(client, {}).get("fedala", {})
        own = {n.partition("/")[2]: t for n, t in kept.items() if not n.startswith("shares/")}
        logits = run.model.forward({**state.weights, **state.buffers, **own}, inputs, False).logits
        assert torch.equal(labels, logits.argmax(1))
        shares += [t for n, t in kept.items() if n.startswith("shares/")]
    assert shares and any((share < 1).any() for share in shares) and all(torch.equal(s, s.clamp(0, 1)) for s in shares)


@pytest.mark.parametrize(("sampled", "wanted"), [(0.5, 0.5), (0.8, 0.8), (1.0, 1.0)])
def test_shares_are_learned_on_their_part_of_the_clients_samples(monkeypatch, sampled, wanted):
    run = run_of("fedala", {"fedala": {"sampled": sampled}}, rounds=4, executor="sequential")
    drawn = set()

    def table(count, *arguments):
        drawn.add(count)
        return batch_table(count, *arguments)

    monkeypatch.setattr("fedbench_methods.fedala.batch_table", table)
    final_state(run)
    sizes = {max(round(wanted * size), min(size, 2)) for size in run.federation.shards.sizes.tolist()}
    assert drawn and drawn <= sizes
