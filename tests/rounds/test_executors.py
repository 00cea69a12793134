"""The cohort executor against the sequential one: same weights, told reasons, and no loss trained that it can't."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from fedbench.core.errors import FedbenchError, Unworkable
from fedbench.core.federation import ClientShard, TensorImages
from fedbench.core.method.hooks import hookimpl
from fedbench.core.method.tasks import ClientTask
from fedbench.core.spec import Training
from fedbench.core.types import Broadcast, LinearHead, Model, Outputs
from fedbench.models import inputs as inputs_module
from fedbench.models.inputs import FeatureInputs, ImageInputs
from fedbench.models.per_thread import per_thread
from fedbench.plugins.assembly import assemble
from fedbench.rounds.executors import cohort as cohort_module
from fedbench.rounds.executors import executor_for
from fedbench.rounds.executors.gradients import ClosedForm, Vectorised
from fedbench.rounds.executors.stack import Stack, StackedOptimiser, signature
from fedbench.rounds.loop import rounds
from fedbench.rounds.messages import client_task
from fedbench.testing import final_state, tiny_run, tiny_spec
from fedbench.toolkit.fedavg import weighted_mean
from fedbench.toolkit.local_training import batch_table, build_optimiser, local_sgd

DEFAULTS = assemble("fedavg", {})


def run_with(plugin, *, strict=False, method="fedavg", owners=("loss_terms",), **training):
    """A run whose three clients of unequal sizes take ragged batches, with ``plugin`` among its methods."""
    spec = tiny_spec(method, **{"rounds": 2, "local_epochs": 2, **training})
    spec = spec.model_copy(update={"scenario": spec.scenario.model_copy(update={"participation": 0.75})})
    run = tiny_run(spec)
    assembly = assemble(method, {}, listeners=[plugin] if plugin else [])
    assembly = replace(assembly, owners={**assembly.owners, **dict.fromkeys(owners if plugin else (), ("plugin",))})
    name = "cohort" if strict else "auto"
    return replace(run, assembly=assembly, executor=executor_for(name, spec.training, assembly, run.model))


def one_by_one(run):
    return replace(run, executor=executor_for("sequential", run.spec.training, run.assembly, run.model))


def assert_same(run, told="cohort"):
    """The run ends alike under both executors, to float tolerance, and says how it trained."""
    at_once, wanted = final_state(run), final_state(one_by_one(run))
    for name, value in wanted.weights.items():
        assert not torch.equal(value, run.model.weights[name])
        torch.testing.assert_close(at_once.weights[name], value, rtol=1e-4, atol=1e-6)
    assert run.executor.description.startswith(told), run.executor.description


class Terms:
    """A method that adds ``term(step)`` to the loss and counts how often it is asked."""

    def __init__(self, term):
        self.term, self.asked = term, 0

    @hookimpl
    def loss_terms(self, step):
        self.asked += 1
        return self.term(step)


# --- the same weights ---


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_linear_heads_end_where_the_sequential_executor_ends(optimizer, decay):
    assert_same(run_with(None, optimizer=optimizer, weight_decay=decay, momentum=0.9, lr_decay=0.5))


@pytest.mark.parametrize("clip_norm", [1e-3, 0.3, 1e6])
def test_gradients_are_clipped_by_both_executors(clip_norm):
    clipped, free = (run_with(None, lr_schedule="cosine", clip_norm=norm) for norm in (clip_norm, None))
    assert_same(clipped)
    ends = [final_state(run).weights for run in (clipped, free)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items()) == (clip_norm == 1e6)


def test_clipping_is_of_all_weights_of_one_client_together():
    weights = {"a": torch.zeros(2, 1), "b": torch.zeros(2, 1, 1)}
    optimiser = StackedOptimiser(Training(lr=1.0, momentum=0.0, clip_norm=1.0), weights, 1, {})
    optimiser.step({"a": torch.tensor([[3.0], [0.3]]), "b": torch.tensor([[[4.0]], [[0.4]]])})
    # 3 and 4 have a norm of 5; 0.3 and 0.4 one of 0.5
    torch.testing.assert_close(weights["a"], torch.tensor([[-0.6], [-0.3]]))
    torch.testing.assert_close(weights["b"], torch.tensor([[[-0.8]], [[-0.4]]]))


@pytest.mark.parametrize("method", ["apfl", "fedetf"])
def test_weights_that_are_single_numbers_are_clipped_with_the_others(method):
    spec = tiny_spec(method, rounds=2, clip_norm=0.1)
    params = {"apfl": {"alpha_moves": "step"}} if method == "apfl" else {}
    run = tiny_run(spec.model_copy(update={"params": params}), executor="cohort")
    assert any(value.ndim == 0 for value in run.model.weights.values())
    at_once, wanted = final_state(run), final_state(one_by_one(run))
    for name, value in wanted.weights.items():
        torch.testing.assert_close(at_once.weights[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("executor", ["sequential", "auto"])
def test_a_model_beside_the_global_one_is_clipped_apart(executor):
    # what ditto's own model trains by is not to change how far the global one moves
    plain, beside = (
        final_state(tiny_run(tiny_spec(name, rounds=2, clip_norm=0.1), executor=executor))
        for name in ("fedavg", "ditto")
    )
    for name, value in plain.weights.items():
        torch.testing.assert_close(beside.weights[name], value, atol=0 if executor == "sequential" else 1e-6, rtol=0)


def test_a_term_on_the_weights_is_added_to_the_closed_form():
    plugin = Terms(lambda step: sum((step.weights[n] - step.received[n]).square().sum() for n in step.weights))
    assert_same(run_with(plugin))


def test_a_term_so_small_that_no_trial_would_see_it_is_not_left_out():
    plugin = Terms(lambda step: 1e-7 * step.weights["head.weight"].square().sum())
    run = run_with(plugin)
    final_state(run)
    # asked in every one of the steps of the longest client, in both rounds, and in the trial
    assert run.executor.description.startswith("cohort") and plugin.asked > 2 * 2 * 3


def test_a_term_that_begins_in_a_later_round_is_added_from_then_on():
    plugin = Terms(lambda step: step.weights["head.weight"].square().sum() if step.task.round == 2 else None)
    assert_same(run_with(plugin))


@pytest.mark.parametrize("method", ["fedavg", "fedglcl"])
def test_a_loss_that_stops_being_a_mean_over_samples_is_noticed_in_that_round(method):
    def from_round_two(step):
        logits = step.outputs.logits
        return (logits[:, None] - logits[None, :]).square().mean() if step.task.round == 2 else logits.square().mean()

    run = run_with(Terms(from_round_two), method=method, lr=1e-3)
    told = [record.executor for _, record, _ in rounds(run, run.initial_state())]
    assert told[1].startswith("cohort") and "not what it was in the trial (other gradients" in told[2]
    assert_same(run, told="sequential")


def test_a_loss_over_pairs_of_a_batch_is_not_taken_for_a_mean_over_samples(monkeypatch):
    def spread(step):
        logits = step.outputs.logits
        return 0.1 * (logits[:, None] - logits[None, :]).square().mean()

    monkeypatch.setattr(cohort_module, "FEWER", 1)
    assert_same(run_with(Terms(spread)))


def test_a_loss_over_whole_batches_of_many_sizes_is_trained_sequentially_since_that_is_faster():
    run = run_with(Terms(lambda step: 0.01 * step.outputs.logits.square().sum()))
    assert_same(run, told="sequential")
    assert "whole batches" in run.executor.description


def test_a_sum_over_samples_is_not_taken_for_a_mean(monkeypatch):
    monkeypatch.setattr(cohort_module, "FEWER", 1)
    assert_same(run_with(Terms(lambda step: 0.01 * step.outputs.logits.square().sum())))


def test_what_a_client_received_knows_and_keeps_is_its_own():
    class Own:
        @hookimpl
        def broadcast(self, task):
            return Broadcast(task.weights, {"centre": torch.tensor(float(task.client))})

        @hookimpl
        def loss_terms(self, step):
            """The weights are drawn to the centre, by the share of class 0 and by what was kept."""
            kept = step.task.state["own"]["count"]
            share = step.task.class_counts[0] / step.task.class_counts.sum()
            return (share + kept) * (step.weights["head.bias"] - step.task.payload["centre"]).square().sum()

        @hookimpl
        def after_training(self, task, update):
            before = task.state.get("own", {"count": torch.tensor(0.0)})["count"]
            task.state["own"] = {"count": before + 1 + task.client}

    class Filled(Own):
        """All clients keep something before their first round, so that the loss can read it."""

    run = run_with(Filled(), owners=("loss_terms", "broadcast", "after_training"))

    def trained(run):
        state = run.initial_state()
        for client in range(4):
            state.clients[client] = {"own": {"count": torch.tensor(0.1 * client)}}
        return final_state(run, state)

    at_once, wanted = trained(run), trained(one_by_one(run))
    assert run.executor.description.startswith("cohort")
    for name, value in wanted.weights.items():
        torch.testing.assert_close(at_once.weights[name], value, rtol=1e-4, atol=1e-6)
    assert {c: float(kept["own"]["count"]) for c, kept in at_once.clients.items()} == {
        c: float(kept["own"]["count"]) for c, kept in wanted.clients.items()
    }


def test_clients_that_keep_different_things_are_trained_apart(monkeypatch):
    class Keeps:
        @hookimpl
        def loss_terms(self, step):
            kept = step.task.state.get("keeps")
            return None if kept is None else (step.weights["head.bias"] - kept["bias"]).square().sum()

    run = run_with(Keeps())
    parts = []
    original = cohort_module.train_stack
    monkeypatch.setattr(cohort_module, "train_stack", lambda tasks, g: parts.append(len(tasks)) or original(tasks, g))

    def trained(run):
        state = run.initial_state()
        state.clients = {0: {"keeps": {"bias": torch.ones(4)}}, 1: {"keeps": {"bias": -torch.ones(4)}}}
        return final_state(run, state, until=1)

    at_once, wanted = trained(run), trained(one_by_one(run))
    # of clients 0, 1 and 2 the last keeps nothing: it is alone of its kind
    assert parts == [2]
    for name, value in wanted.weights.items():
        torch.testing.assert_close(at_once.weights[name], value, rtol=1e-4, atol=1e-6)


def test_a_cohort_beyond_the_memory_is_trained_in_parts(monkeypatch):
    whole = final_state(run_with(None))
    monkeypatch.setattr("fedbench.rounds.executors.gradients.MEMORY", 1)
    parts = []
    original = cohort_module.train_stack
    monkeypatch.setattr(cohort_module, "train_stack", lambda tasks, g: parts.append(len(tasks)) or original(tasks, g))
    run = run_with(None)
    halves = final_state(run)
    assert parts == [1] * 6
    for name, value in whole.weights.items():
        torch.testing.assert_close(halves.weights[name], value, rtol=1e-5, atol=1e-7)


def test_updates_come_in_the_order_of_the_tasks_with_the_clients_mean_loss():
    run = run_with(None)
    state = run.initial_state()
    tasks = [client_task(run, state, 1, 0, client, Broadcast(state.weights)) for client in (3, 0, 2)]
    at_once, wanted = run.executor.train(tasks), one_by_one(run).executor.train(tasks)
    assert [u.client for u in at_once] == [3, 0, 2]
    assert [u.num_examples for u in at_once] == [len(task.inputs) for task in tasks]
    assert len({u.num_examples for u in at_once}) == 3
    for one, other in zip(at_once, wanted, strict=True):
        assert one.metrics["train_loss"] == pytest.approx(other.metrics["train_loss"], rel=1e-5)


# --- what it must not train ---


@pytest.mark.parametrize(
    ("term", "reason"),
    [
        (lambda step: step.weights["head.bias"].sum() * step.task.client, "client"),
        (lambda step: step.outputs.logits.mean() * len(step.task.inputs), "inputs"),
        (lambda step: step.outputs.logits.mean() * step.task.labels[0], "labels"),
        (lambda step: torch.rand(1, generator=step.task.generator("x")) * step.outputs.logits.mean(), "client"),
        (lambda step: step.outputs.logits.mean() * torch.sigmoid(step.outputs.logits).mean().item(), "vectorised"),
        (lambda step: step.outputs.logits.mean() if step.batch.labels.sum() > 3 else None, "vectorised"),
    ],
    ids=["client", "inputs", "labels", "generator", "item", "branch"],
)
def test_a_loss_that_needs_a_single_client_is_trained_sequentially_and_said(term, reason):
    run = run_with(Terms(term))
    assert_same(run, told="sequential")
    assert reason in run.executor.description
    with pytest.raises(FedbenchError, match="cannot train fedavg.*executor=auto"):
        final_state(run_with(Terms(term), strict=True))


def test_a_loss_that_writes_the_clients_state_is_trained_sequentially():
    def counted(step):
        before = step.task.state.get("counted", {"steps": torch.tensor(0.0)})["steps"]
        step.task.state["counted"] = {"steps": before + 1}
        return step.weights["head.bias"].square().sum() * before

    run = run_with(Terms(counted))
    assert_same(run, told="sequential")
    kept = final_state(run).clients
    assert all(float(methods["counted"]["steps"]) >= 2 for methods in kept.values())


def test_a_model_that_mixes_the_samples_of_a_batch_is_compared_before_it_is_trusted(monkeypatch):
    monkeypatch.setattr(cohort_module, "FEWER", 1)
    run = run_with(None)

    def centred(tensors, inputs, training):
        features = inputs - inputs.mean(dim=0, keepdim=True)
        return Outputs(features @ tensors["head.weight"].T + tensors["head.bias"], features)

    run = replace(run, model=replace(run.model, forward=centred))
    assert_same(run)


def test_models_on_features_with_running_statistics_are_trained_sequentially():
    model = Model({}, lambda *_: None, encoder=object(), buffers={"mean": torch.zeros(1)})
    assert "running statistics" in executor_for("auto", Training(), DEFAULTS, model).description
    with pytest.raises(FedbenchError, match="running statistics; use executor=auto"):
        executor_for("cohort", Training(), DEFAULTS, model)
    assert executor_for("sequential", Training(), DEFAULTS, model).description == "sequential"


def test_a_method_with_its_own_local_training_keeps_it():
    assembly = replace(DEFAULTS, owners={**DEFAULTS.owners, "local_train": ("mine", "fedavg")})
    model = Model({}, lambda *_: None, encoder=object())
    assert "mine trains" in executor_for("auto", Training(), assembly, model).description


def test_bfloat16_is_of_the_local_steps_only_and_not_in_closed_form():
    half, full = (run_with(None, precision=precision) for precision in ("bfloat16", "float32"))
    rough, exact = final_state(half), final_state(full)
    assert half.executor.description == "cohort"
    for name, value in exact.weights.items():
        assert rough.weights[name].dtype == torch.float32 and not torch.equal(rough.weights[name], value)
        torch.testing.assert_close(rough.weights[name], value, rtol=0.1, atol=0.05)


def test_a_client_that_diverges_is_named():
    with pytest.raises(Unworkable, match=r"loss of client \d in round 1 is .*lower the learning rate"):
        final_state(run_with(None, lr=100.0, momentum=0.99, optimizer="sgd", weight_decay=10.0, local_epochs=10))


def test_records_say_which_executor_trained():
    run = run_with(None)
    told = [record.executor for _, record, _ in rounds(run, run.initial_state())]
    assert told == ["", *["cohort, gradients in closed form"] * 2]


def pairs(step):
    """Over pairs of a batch: no mean over samples, and nothing on a single one."""
    logits = step.outputs.logits
    return 0.05 * (logits[:, None] - logits[None, :]).square().mean()


def dealt(run, sizes):
    """The run with clients of these sizes, all of which take part."""
    order, start, shards = torch.randperm(len(run.federation.train), generator=torch.Generator().manual_seed(0)), 0, []
    for number, size in enumerate(sizes):
        shards.append(ClientShard(number, order[start : start + size]))
        start += size
    whole = run.spec.scenario.model_copy(update={"participation": 1.0, "clients": len(sizes)})
    federation = run.federation.with_clients(tuple(shards))
    return replace(run, federation=federation, spec=run.spec.model_copy(update={"scenario": whole}))


@pytest.mark.parametrize(
    ("term", "sizes"),
    [
        (lambda s: None if len(s.batch.labels) < 2 else pairs(s), [16] * 5 + [1]),
        (lambda s: pairs(s) if s.task.round == 2 else 0.01 * s.outputs.logits.square().mean(), [13, 12, 21, 1]),
        (lambda s: pairs(s) if s.number >= 1 else 0.01 * s.outputs.logits.square().mean(), [13, 12, 7, 5]),
        (lambda s: s.outputs.logits.square().mean() * (5 if len(s.batch.labels) == 3 else 1), [8, 8, 8, 3, 2]),
        (lambda s: 1e-3 * pairs(s), [13, 12, 7, 5]),
        (lambda s: s.weights["head.bias"].sum() * s.task.client if s.task.round == 2 else None, [13, 12, 7, 5]),
        (lambda s: s.outputs.logits.mean().item() * s.weights["head.bias"].sum() if s.number else None, [13, 12, 7]),
        (lambda s: torch.stack([s.task.labels[:2]]).sum() * s.weights["head.bias"].sum(), [13, 12, 7]),
        (lambda s: 0.0 * len(s.task.state.setdefault("own", {})) + pairs(s), [13, 12, 7]),
    ],
    ids=["pairs-guarded", "later-round", "later-step", "by-size-of-batch", "tiny", "client", "item", "stack", "state"],
)
def test_losses_that_are_not_what_they_look_like_end_where_the_sequential_executor_ends(term, sizes):
    for method in ("fedavg", "fedglcl"):
        if method == "fedglcl":
            term = lambda s, term=term: term(s) if "head.bias" in s.weights else pairs(s)  # noqa: E731
        run = dealt(run_with(Terms(term), method=method, lr=1e-2), sizes)
        at_once, wanted = final_state(run), final_state(one_by_one(run))
        for name, value in wanted.weights.items():
            moved = (value - run.model.weights[name]).abs().max()
            assert (at_once.weights[name] - value).abs().max() <= 1e-4 * moved + 1e-7, (
                method,
                name,
                run.executor.description,
            )


def test_what_a_loss_writes_into_its_clients_state_is_written_once_a_step():
    def counted(step):
        kept = step.task.state["own"]
        kept["steps"] = kept["steps"] + 1
        return 0.01 * kept["steps"].clone() * step.weights["head.bias"].square().sum()

    run = dealt(run_with(Terms(counted)), [13, 12, 7])

    def trained(run):
        state = run.initial_state()
        state.clients = {client: {"own": {"steps": torch.tensor(0.0)}} for client in range(3)}
        return final_state(run, state)

    at_once, wanted = trained(run), trained(one_by_one(run))
    steps = [float(kept["own"]["steps"]) for kept in wanted.clients.values()]
    assert steps == [float(kept["own"]["steps"]) for kept in at_once.clients.values()] == [8.0, 8.0, 4.0]
    assert torch.equal(at_once.weights["head.bias"], wanted.weights["head.bias"])
    assert "client keeps" in run.executor.description or "vectorised" in run.executor.description


def test_a_record_has_no_message_of_pythons_as_the_reason():
    run = tiny_run(tiny_spec("fed-grab", rounds=2, backbone="clip:embedded"))
    told = [record.executor for _, record, _ in rounds(run, run.initial_state())]
    assert set(told) - {""} == {"sequential: its loss cannot be vectorised (it changes what the client keeps)"}
    run = run_with(Terms(lambda step: step.outputs.logits.mean() if step.batch.labels.sum() > 3 else None))
    final_state(run)
    wanted = "its loss cannot be vectorised (it does what PyTorch cannot do for many clients at once)"
    assert run.executor.description == f"sequential: {wanted}"


def test_a_loss_without_a_gradient_at_the_start_fails_as_it_does_sequentially():
    term = lambda s: (s.weights["head.bias"] - s.received["head.bias"]).square().sum().sqrt()  # noqa: E731
    with pytest.raises(Unworkable, match="diverged"):
        final_state(run_with(Terms(term)))


def test_a_cohort_of_one_is_told_as_sequential():
    run = dealt(run_with(None), [13])
    final_state(run)
    assert run.executor.description.startswith("sequential")


def test_mixed_kinds_are_told_with_their_numbers():
    def term(step):
        """Only clients that keep something have a loss that needs their number."""
        return step.weights["head.bias"].sum() * step.task.client if "own" in step.task.state else None

    run = dealt(run_with(Terms(term)), [13, 12, 7, 5])
    state = run.initial_state()
    state.clients = {client: {"own": {"x": torch.zeros(1)}} for client in (0, 1)}
    final_state(run, state, until=1)
    assert run.executor.description.startswith(
        "2 clients sequential: its loss reads the task's client; 2 clients cohort"
    )


def test_learning_rates_by_name_reach_the_cohort():
    run = run_with(None)
    run = replace(run, model=replace(run.model, lr_factors={"head.bias": 0.1}))
    assert_same(run)
    assert not torch.equal(final_state(run).weights["head.bias"], final_state(run_with(None)).weights["head.bias"])


def test_a_linear_head_is_trained_in_closed_form_and_a_head_with_another_weight_is_not():
    run = run_with(None)
    assert_same(run, told="cohort, gradients in closed form")
    forward = run.model.forward

    def shifted(tensors, inputs, training):
        outputs = forward(tensors, inputs, training)
        return Outputs(outputs.logits + tensors["shift"], outputs.features)

    weights = {**run.model.weights, "shift": torch.zeros(4)}
    wider = replace(run, model=replace(run.model, weights=weights, forward=shifted))
    assert_same(wider)
    assert wider.executor.description == "cohort"


def test_weights_that_a_client_sends_are_its_own_memory():
    run = run_with(None)
    state = run.initial_state()
    tasks = [client_task(run, state, 1, 0, client, Broadcast(state.weights)) for client in (0, 1, 2)]
    for update in run.executor.train(tasks):
        for value in update.weights.values():
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


def test_clients_side_by_side_are_trained_by_as_many_threads():
    meeting, names = threading.Barrier(2, timeout=20), set()

    class Meets:
        @hookimpl
        def local_train(self, task):
            names.add(threading.current_thread().name)
            meeting.wait()
            return local_sgd(task)

    run = run_with(Meets(), owners=())
    executor = executor_for("sequential", run.spec.training, run.assembly, run.model, cores=2)
    state = run.initial_state()
    executor.train([client_task(run, state, 1, 0, client, Broadcast(state.weights)) for client in (0, 1)])
    assert len(names) == 2


def test_a_module_is_each_threads_own_and_shares_its_tensors():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    own = per_thread(net)
    assert own() is net
    with ThreadPoolExecutor(1) as threads:
        other, again = threads.submit(own).result(), threads.submit(own).result()
    assert other is not net and other is again
    assert all(a is b for a, b in zip(net.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("indices", [None, torch.tensor([5, 2, 9, 2])])
def test_resident_images_are_the_same_images_in_the_same_order(indices):
    pixels = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    inputs = ImageInputs(TensorImages(pixels), lambda p: p.float() / 7, torch.device("cpu"), indices)
    resident = inputs.resident()
    chosen = torch.tensor([3, 0, 1])
    assert resident.is_image and resident.select(chosen).is_image and len(resident) == len(inputs)
    assert torch.equal(resident.read(chosen), inputs.read(chosen))
    assert resident.read(chosen).is_contiguous(memory_format=torch.channels_last)


def test_images_beyond_the_limit_stay_as_they_are(monkeypatch):
    pixels = torch.zeros(12, 3, 8, 8, dtype=torch.uint8)
    inputs = ImageInputs(TensorImages(pixels), lambda p: p.float(), torch.device("cpu"))
    monkeypatch.setattr(inputs_module, "RESIDENT_BYTES", 12 * 3 * 8 * 8 * 4 - 1)
    assert inputs.resident() is inputs


def test_a_mean_over_more_than_one_part_is_that_of_the_whole():
    values = [torch.randn(2**16 + 3, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    shares = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    want = sum(share * value.double() for share, value in zip(shares, values, strict=True)).float()
    torch.testing.assert_close(weighted_mean(values, shares), want, rtol=1e-6, atol=1e-7)
    assert torch.equal(weighted_mean([values[0]] * 3, shares), values[0])


# --- the parts, by hand ---


def stack_of(*samples_by_client, weights, model, batch_size=8):
    """A stack of clients that hold (feature, class) pairs, rows of one table."""
    flat = [sample for samples in samples_by_client for sample in samples]
    table = FeatureInputs(torch.tensor([[float(x)] for x, _ in flat]))
    tasks, first = [], 0
    spec = tiny_spec("fedavg", batch_size=batch_size)
    for client, samples in enumerate(samples_by_client):
        rows = torch.arange(first, first + len(samples))
        labels = torch.tensor([y for _, y in samples])
        tasks.append(
            ClientTask(client, 1, weights, {}, {}, table.select(rows), labels, None, model, spec, {}, DEFAULTS.hooks)
        )
        first += len(samples)
    return Stack(tasks)


def linear_model(scale=1.0):
    def forward(tensors, inputs, training):
        return Outputs(scale * (inputs @ tensors["head.weight"].T + tensors["head.bias"]), inputs)

    weights = {"head.weight": torch.zeros(2, 1), "head.bias": torch.zeros(2)}
    return weights, Model(weights, forward, encoder=object(), head=LinearHead(scale=scale))


@pytest.mark.parametrize("way", ["closed", "by sample", "by size"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_gradients_of_ragged_batches_by_hand(way, scale):
    # at W = 0, b = 0 both classes have probability 1/2: of a sample (x, y) the gradient of the bias is
    # s (1/2 - [c = y]) and that of the weight the same times x; a client's gradient is the mean over its own samples
    weights, model = linear_model(scale)
    stack = stack_of([(2, 0), (4, 1), (6, 0)], [(10, 1)], weights=weights, model=model)
    features = stack.tasks[0].inputs.features
    ways = {"closed": ClosedForm(features, None), "by sample": Vectorised("by sample")}
    gradients = ways.get(way, Vectorised("by size"))
    batch = stack.batch(0)
    assert batch.sizes == (3, 1) and batch.is_ragged
    found, losses = gradients(stack, stack.weights, batch)
    half = scale / 2
    first = half * (-2 + 4 - 6) / 3
    torch.testing.assert_close(found["head.weight"], torch.tensor([[[first], [-first]], [[5.0 * scale], [-5 * scale]]]))
    torch.testing.assert_close(
        found["head.bias"], torch.tensor([[-half / 3, half / 3], [half, -half]]), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(losses, torch.full((2,), math.log(2)))


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_closed_form_is_the_gradient_that_autograd_finds(scale):
    generator = torch.Generator().manual_seed(0)
    _, model = linear_model(scale)
    weights = {"head.weight": torch.randn(2, 1, generator=generator), "head.bias": torch.randn(2, generator=generator)}
    stack = stack_of([(2, 0), (4, 1), (6, 0)], [(10, 1), (-1, 0)], weights=weights, model=model)
    found, losses = ClosedForm(stack.tasks[0].inputs.features, None)(stack, stack.weights, stack.batch(0))
    wanted, own = Vectorised("by size")(stack, stack.weights, stack.batch(0))
    torch.testing.assert_close(losses, own)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient)


def test_rows_of_side_encoders_are_the_clients_own():
    weights, model = linear_model()
    stack = stack_of([(0, 0), (1, 1)], [(2, 0), (3, 1)], weights=weights, model=model)
    table = FeatureInputs(torch.arange(4.0)[:, None] * 10)
    tasks = [
        replace(task, side={"teacher": table.select(torch.arange(2) + 2 * task.client)})
        for task in reversed(stack.tasks)
    ]
    samples = Stack(tasks).samples(Stack(tasks).batch(0))
    assert torch.equal(samples["side"]["teacher"], 10 * samples["inputs"])


def test_clients_that_were_sent_other_shapes_are_of_another_kind():
    weights, model = linear_model()
    task = stack_of([(0, 0)], weights=weights, model=model).tasks[0]
    one, other = (replace(task, payload={"centre": torch.zeros(n)}) for n in (1, 2))
    assert signature(one) != signature(other) and signature(one) == signature(replace(one, client=7))


def test_the_memory_of_a_client_counts_its_samples_and_four_times_its_weights():
    run = dealt(run_with(None), [16, 16])
    state = run.initial_state()
    tasks = [client_task(run, state, 1, 0, client, Broadcast(state.weights)) for client in (0, 1)]
    width, classes = run.train.features.shape[1], 4
    counted = cohort_module.bytes_of_a_client(ClosedForm(run.train.features, None), tasks)
    # weights, gradients and two moments of a head; a batch of 8 samples and their logits
    assert counted >= 4 * 4 * classes * (width + 1) + 4 * 8 * (width + classes)


def test_a_client_without_steps_left_stays_as_it_is_and_the_longest_comes_first():
    weights, model = linear_model()
    stack = stack_of([(1, 0)], [(1, 0), (2, 1), (3, 0), (4, 1), (5, 0)], weights=weights, model=model, batch_size=2)
    # five samples in twos: 2, and the last one joins the batch before it
    assert stack.steps == [2, 1] and [task.client for task in stack.tasks] == [1, 0]
    assert [stack.active(step) for step in range(2)] == [2, 1]
    assert [stack.batch(step).sizes for step in range(2)] == [(2, 1), (3,)]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_stacked_optimisers_step_like_one_optimiser_a_client_bit_for_bit(optimizer, momentum):
    generator = torch.Generator().manual_seed(0)
    training = Training(optimizer=optimizer, momentum=momentum, weight_decay=0.05, lr=0.1, lr_decay=0.9)
    start = {"a": torch.randn(3, 4, 2, generator=generator), "b": torch.randn(3, 5, generator=generator)}
    stacked = {name: value.clone() for name, value in start.items()}
    ours = StackedOptimiser(training, stacked, 3, {"b": 0.5})
    alone = [{name: value[k].clone().requires_grad_() for name, value in start.items()} for k in range(3)]
    theirs = [build_optimiser(training, weights, 3, {"b": 0.5}) for weights in alone]
    for active in (3, 3, 2, 1):
        gradients = {n: torch.randn(active, *v.shape[1:], generator=generator) for n, v in start.items()}
        ours.step(gradients)
        for k in range(active):
            for name, weight in alone[k].items():
                weight.grad = gradients[name][k].clone()
            theirs[k].step()
    for k in range(3):
        for name, weight in alone[k].items():
            assert torch.equal(stacked[name][k], weight.detach()), (name, k)


def test_both_executors_read_the_same_batches():
    weights, model = linear_model()
    stack = stack_of([(x, x % 2) for x in range(7)], [(x, 0) for x in range(3)], weights=weights, model=model)
    task = stack.tasks[0]
    table = batch_table(7, task.training.local_epochs, 8, task.generator("batches"))
    assert stack.samples(stack.batch(0))["index"][0].tolist() == table[0].tolist()
    inputs, labels = stack.samples(stack.batch(0))["inputs"][0, :, 0], stack.samples(stack.batch(0))["labels"][0]
    assert inputs.tolist() == [float(i) for i in table[0]] and labels.tolist() == [int(i) % 2 for i in table[0]]
