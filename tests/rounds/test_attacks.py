"""Attackers among the clients."""

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.scenario import Scenario
from fedbench.core.types import Update
from fedbench.rounds.attacks import attacked, little_is_enough
from fedbench.rounds.loop import rounds
from fedbench.scenarios.labels import as_clients_see_it
from fedbench.scenarios.participation import attackers
from fedbench.testing import digest, tiny_run
from tests.equations.kit import end_of, run_of, spec_of, updates_of

HALF = {"participation": 1.0, "attackers": 0.5}


class Task:
    """What an attack reads of a client's task."""

    def __init__(self, client, received, round=1):
        self.client, self.received, self.round, self.exchange = client, received, round, 0
        self.spec = spec_of("fedavg")


def sent(attack, ends, hostile, scale=1.0, round=1):
    """What clients send that received (1, 1) and trained to ``ends``."""
    received = {"w": torch.tensor([1.0, 1.0])}
    updates = updates_of([torch.tensor(end) for end in ends], [1] * len(ends))
    tasks = [Task(u.client, received, round) for u in updates]
    scenario = Scenario(attackers=0.5, attack=attack, attack_scale=scale)
    return [u.weights["w"] for u in attacked(tasks, updates, frozenset(hostile), scenario)]


def test_attackers_are_a_share_of_the_clients_and_the_same_in_all_rounds():
    assert attackers(0.0, 10, 0) == frozenset()
    assert len(attackers(0.2, 10, 0)) == 2 and len(attackers(0.01, 10, 0)) == 1
    assert attackers(0.2, 10, 0) < attackers(0.4, 10, 0)
    assert len({attackers(0.2, 10, seed) for seed in range(5)}) > 1


def test_a_flipped_sign_by_hand_and_others_send_what_they_trained():
    flipped, honest = sent("sign_flip", [[3.0, 0.0], [2.0, 2.0]], {0}, scale=2.0)
    assert flipped.tolist() == [-3.0, 3.0] and honest.tolist() == [2.0, 2.0]


def test_a_random_change_is_as_long_as_the_trained_one_and_new_each_time():
    [one, _] = sent("gaussian", [[4.0, 5.0], [2.0, 2.0]], {0}, scale=3.0)
    assert (one - 1).norm().item() == pytest.approx(15, rel=1e-5)
    [again, _] = sent("gaussian", [[4.0, 5.0], [2.0, 2.0]], {0}, scale=3.0, round=2)
    assert not torch.equal(one, again)


def test_a_little_is_enough_by_hand():
    # of 0 and 4 the mean is 2, the deviation 2
    found = little_is_enough(updates_of([torch.tensor([0.0]), torch.tensor([4.0])], [1, 1]), 1.5)
    assert found["w"].item() == 2 - 1.5 * 2
    together = sent("alie", [[0.0, 1.0], [4.0, 1.0], [9.0, 9.0], [9.0, 9.0], [9.0, 9.0]], {0, 1})
    assert together[0].tolist() == together[1].tolist() == [0.0, 1.0] and together[2].tolist() == [9.0, 9.0]


def test_flipped_labels_are_the_attackers_alone_and_clients_are_scored_by_the_right_ones():
    scored = tiny_run(spec_of("fedavg", scenario=HALF)).scored
    scenario = Scenario(attackers=0.5, attack="label_flip")
    seen = as_clients_see_it(scored, scenario, 0)
    hostile = attackers(0.5, len(scored.clients), 0)
    for client, shard in enumerate(scored.clients):
        right = scored.train.labels[shard.indices]
        expected = scored.num_classes - 1 - right if client in hostile else right
        assert torch.equal(seen.train.labels[shard.indices], expected)
    with pytest.raises(FedbenchError, match="flips labels, which labels=hidden hides"):
        tiny_run(spec_of("pouf", scenario=HALF, hidden=True))


@pytest.mark.parametrize("attack", ["label_flip", "sign_flip", "gaussian", "alie"])
def test_every_attack_changes_the_model_whoever_trains(attack):
    scenario = {**HALF, "attack": attack}
    plain = digest(end_of("fedavg", scenario={"participation": 1.0}, rounds=2))
    ours = {
        executor: end_of("fedavg", scenario=scenario, rounds=2, executor=executor)
        for executor in ("cohort", "sequential")
    }
    assert digest(ours["sequential"]) != plain
    for name, value in ours["cohort"].weights.items():
        torch.testing.assert_close(value, ours["sequential"].weights[name], atol=1e-5, rtol=1e-4)


def test_without_attackers_nothing_changes_to_the_bit_nor_does_the_runs_id():
    plain = {"participation": 1.0}
    off = {**plain, "attackers": 0.0, "attack": "sign_flip"}
    assert digest(end_of("fedavg", scenario=off)) == digest(end_of("fedavg", scenario=plain))
    assert spec_of("fedavg", scenario={"attackers": 0.0}).run_id == spec_of("fedavg").run_id
    assert spec_of("fedavg", scenario={"attackers": 0.2}).run_id != spec_of("fedavg").run_id


def test_a_median_ends_where_it_would_without_an_attacker_that_goes_far():
    scenario = {"participation": 1.0, "attackers": 0.25, "attack": "sign_flip", "attack_scale": 100.0}
    start = run_of("fedavg", scenario=scenario).model.weights

    def away(stack):
        end = end_of(stack, scenario=scenario, rounds=1)
        return torch.stack([(end.weights[name] - start[name]).square().sum() for name in start]).sum().sqrt()

    assert away("fedavg") > 10 * away("median")


def test_clients_that_train_in_turn_pass_no_attack_on():
    with pytest.raises(FedbenchError, match="in-turn lets clients train in turn"):
        end_of("in-turn", scenario={**HALF, "attack": "sign_flip"}, rounds=1)
    end_of("in-turn", scenario={**HALF, "attack": "label_flip"}, rounds=1)


def test_running_statistics_and_payloads_stay_as_trained():
    update = Update(0, {"w": torch.tensor([2.0])}, {"mean": torch.tensor([5.0])}, 1, payload={"p": torch.tensor([7.0])})
    scenario = Scenario(attackers=0.5, attack="sign_flip")
    [found] = attacked([Task(0, {"w": torch.tensor([0.0])})], (update,), frozenset({0}), scenario)
    assert (found.weights["w"].item(), found.buffers["mean"].item(), found.payload["p"].item()) == (-2.0, 5.0, 7.0)


def test_what_attackers_send_is_encoded_like_any_other_change():
    scenario = {**HALF, "attack": "gaussian", "attack_scale": 5.0}
    runs = [run_of(stack, scenario=scenario, rounds=1) for stack in ("topk", "fedavg")]
    encoded, plain = ([record for _, record, _ in rounds(run, run.initial_state())][-1].bytes_up for run in runs)
    assert encoded < 0.3 * plain
