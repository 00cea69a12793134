"""local_steps: how many local steps a round has, in place of epochs, and that runs without it are what they were."""

import copy

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec, Training
from fedbench.rounds.finetuning import finetuned_metrics
from fedbench.rounds.loop import start
from fedbench.rounds.messages import broadcast, client_task
from fedbench.runs.inspection import step_bytes
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import group_of, single
from fedbench.testing import digest, final_state, tiny_run, tiny_spec
from fedbench.toolkit.local_training import batch_table, batches_of
from fedbench.tracking.tags import DEFAULTS, flat_params

CLIP = "clip:embedded"


def run_of(method="fedavg", scenario=None, executor="auto", **training):
    described = tiny_spec(method, **{"backbone": CLIP, "rounds": 2, **training})
    scenario = described.scenario.model_copy(update=scenario or {})
    return tiny_run(described.model_copy(update={"scenario": scenario}), executor=executor)


def task_of(run, client=0, work=1.0):
    state = run.initial_state()
    start(run, state)
    return client_task(run, state, 1, 0, client, broadcast(run, state, client), work)


@pytest.mark.parametrize("executor", ["sequential", "cohort"])
@pytest.mark.parametrize("method", ["fedavg", "fednova"])
def test_as_many_steps_as_a_pass_has_batches_are_one_epoch_bit_for_bit(method, executor):
    # 22 or 23 samples a client, in batches of 8: three of them
    given = {"scenario": {"partition": "iid", "participation": 1.0}, "executor": executor, "momentum": 0.9}
    steps, epoch = run_of(method, local_steps=3, **given), run_of(method, local_epochs=1, **given)
    assert {len(batches_of(task_of(epoch, client))) for client in range(4)} == {3}
    assert digest(final_state(steps)) == digest(final_state(epoch))
    assert digest(final_state(run_of(method, local_steps=2, **given))) != digest(final_state(epoch))


def test_clients_of_all_sizes_take_the_same_steps_and_executors_agree():
    states = {}
    for executor in ("sequential", "cohort"):
        run = run_of("fedprox", {"participation": 1.0}, executor, local_steps=4, momentum=0.9, lr=0.1)
        sizes = [len(shard.indices) for shard in run.federation.clients]
        assert min(sizes) < 24 < max(sizes)
        assert {len(batches_of(task_of(run, client))) for client in range(4)} == {4}
        states[executor] = final_state(run)
    for name, weight in states["sequential"].weights.items():
        torch.testing.assert_close(states["cohort"].weights[name], weight, rtol=1e-4, atol=1e-6)


def test_after_a_pass_a_client_begins_another_shuffled_anew():
    task = task_of(run_of(local_steps=7), client=1)
    count, table = len(task.inputs), batches_of(task)
    batches = len(batch_table(count, 1, 8, torch.Generator()))
    assert 1 < batches < 7
    first, rest = table[:batches], table[batches : 2 * batches]
    assert sorted(torch.cat(first).tolist()) == list(range(count))
    assert len(set(torch.cat(rest).tolist())) == len(torch.cat(rest)) and not torch.equal(first[0], rest[0])
    # the passes are those of as many epochs
    wanted = batch_table(count, 7, 8, task.generator("batches"))[:7]
    assert all(torch.equal(one, other) for one, other in zip(table, wanted, strict=True))


def test_one_step_a_round_on_full_batches_is_gradient_descent_on_all_data():
    scenario = {"participation": 1.0, "partition": "iid"}
    budget = {"rounds": 3, "batch_size": 100, "momentum": 0.0, "weight_decay": 0.0, "lr": 0.5}
    run = run_of(scenario=scenario, executor="sequential", local_steps=1, **budget)
    alone = run_of(scenario={**scenario, "clients": 1}, executor="sequential", local_steps=1, **budget)
    wanted = final_state(alone).weights
    for name, weight in final_state(run).weights.items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-4, atol=1e-5)
        assert not torch.equal(weight, run.model.weights[name])


def test_momentum_has_no_effect_on_one_step_a_round():
    ends = [digest(final_state(run_of(local_steps=1, momentum=momentum))) for momentum in (0.0, 0.9)]
    assert ends[0] == ends[1]


def test_a_straggler_does_its_part_of_the_steps_and_of_one_step_there_is_none():
    run = run_of(local_steps=6)
    assert [len(batches_of(task_of(run, work=work))) for work in (1.0, 0.5, 0.01)] == [6, 3, 1]
    with pytest.raises(FedbenchError, match=r"stragglers=0\.5 has clients do a part .* local_steps=1 has no parts"):
        run_of(scenario={"stragglers": 0.5}, local_steps=1)
    final_state(run_of(scenario={"stragglers": 1.0}, local_steps=2))


def test_a_run_that_was_stopped_goes_on_alike():
    run = run_of(rounds=4, local_steps=1)
    assert digest(final_state(run, final_state(run, until=2))) == digest(final_state(run))


def test_fine_tuning_goes_on_in_epochs():
    tuned = {}
    for steps in (None, 1):
        run = run_of(local_steps=steps, finetune_epochs=3, lr=0.1)
        state = run.initial_state()
        tuned[steps] = finetuned_metrics(run, copy.deepcopy(state))
    assert tuned[None] == tuned[1]


def test_what_a_step_saves_is_measured_on_one_step():
    assert step_bytes(run_of(local_steps=50)) == step_bytes(run_of())


def test_the_copies_of_ratio_loss_take_as_many_steps_as_clients():
    ends = {}
    for name, training in {"epoch": {}, "step": {"local_steps": 1}, "more": {"local_steps": 9}}.items():
        described = tiny_spec("ratio-loss", rounds=2, batch_size=100, lr=0.05, **training)
        ends[name] = digest(final_state(tiny_run(described, executor="sequential")))
    assert ends["epoch"] == ends["step"] != ends["more"]


def test_runs_without_it_keep_their_ids_and_record_nothing_of_it():
    assert RunSpec().run_id == "5b4a9b76bdee4718"
    assert "training.local_steps" not in flat_params(RunSpec()) and DEFAULTS["training.local_steps"] == "none"
    stepped = RunSpec(training=Training(local_steps=1))
    assert stepped.run_id != RunSpec().run_id and flat_params(stepped)["training.local_steps"] == "1"
    assert group_of(stepped) == f"{group_of(RunSpec())}/local_steps=1"


def test_it_takes_the_place_of_epochs():
    overrides = Overrides(sets=(("local_epochs", "5"), ("local_steps", "3")))
    with pytest.raises(FedbenchError, match=r"local_steps='3': it takes the place of local_epochs=5; set that to 1"):
        expand(single(), overrides)
    with pytest.raises(FedbenchError, match=r"local_steps='0'"):
        expand(single(), Overrides(sets=(("local_steps", "0"),)))
    for text, steps in (("none", None), ("3", 3)):
        [one] = expand(single(), Overrides(sets=(("local_steps", text),), seeds=(0,)))
        assert one.training.local_steps == steps
