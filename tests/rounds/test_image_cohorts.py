"""Networks on images whose clients train at once: the weights, running statistics and draws of one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl
from fedbench.core.method.tasks import ClientTask
from fedbench.core.types import Broadcast, Tensors, Update
from fedbench.models.inputs import ImageInputs
from fedbench.plugins.assembly import assemble
from fedbench.rounds.executors import SMALL, executor_for
from fedbench.rounds.executors import cohort as cohort_module
from fedbench.rounds.executors.cohort import InFloat64, is_own, passes_trial, train_stack
from fedbench.rounds.executors.gradients import Vectorised
from fedbench.rounds.executors.sequential import Sequential
from fedbench.rounds.executors.stack import Stack, own_buffers
from fedbench.rounds.messages import client_task
from fedbench.rounds.run import Run
from fedbench.rounds.state import all_tensors
from fedbench.testing import final_state, tiny_run, tiny_spec
from fedbench.toolkit.local_training import local_sgd

BY_SIZE = Vectorised("by size")
SAME_SIZES = {"partition": "iid", "participation": 1.0}


def run_of(
    method: str = "fedavg",
    backbone: str = "convnet",
    *,
    executor: str = "cohort",
    ragged: bool = False,
    params: dict[str, dict[str, object]] | None = None,
    **training: object,
) -> Run:
    """Four clients on the tiny images, of one size unless ``ragged``."""
    spec = tiny_spec(method, **{"rounds": 2, **training})
    scenario = spec.scenario.model_copy(update={} if ragged else SAME_SIZES)
    spec = spec.model_copy(update={"backbone": backbone, "scenario": scenario, "params": params or spec.params})
    return tiny_run(spec, executor=executor)  # type: ignore[arg-type]


def tasks_of(run: Run) -> list[ClientTask]:
    state = run.initial_state()
    return [client_task(run, state, 1, 0, client, Broadcast(state.weights)) for client in range(4)]


def precise(task: ClientTask) -> ClientTask:
    """``task`` with its model and images in float64, for both executors alike."""

    def doubled(tensors: Tensors) -> Tensors:
        return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}

    inputs = task.inputs
    assert isinstance(inputs, ImageInputs)
    images = ImageInputs(inputs.images, lambda pixels: inputs.transform(pixels).double(), inputs.device, inputs.indices)
    return replace(task, received=doubled(task.received), buffers=doubled(task.buffers), inputs=images)


@pytest.mark.parametrize("augment", ["none", "batch", "sample"])
@pytest.mark.parametrize("backbone", ["convnet", "fedavg-cnn", "resnet8?width=1"])
def test_clients_of_unequal_sizes_end_where_each_ends_alone(backbone: str, augment: str) -> None:
    run = run_of(backbone=backbone, executor="sequential", ragged=True, augment=augment, local_epochs=2)
    tasks = [precise(task) for task in tasks_of(run)]
    assert len({len(task.inputs) for task in tasks}) > 1
    for task, at_once in zip(tasks, train_stack(tasks, BY_SIZE), strict=True):
        alone = local_sgd(task)
        assert at_once.client == alone.client and at_once.weights.keys() == alone.weights.keys()
        for found, wanted in ((at_once.weights, alone.weights), (at_once.buffers, alone.buffers)):
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
        assert at_once.metrics["train_loss"] == pytest.approx(alone.metrics["train_loss"], rel=1e-6)
        if own_buffers(task):
            assert not torch.equal(at_once.buffers["body.bn1.running_mean"], task.buffers["body.bn1.running_mean"])


class Kept(Sequential):
    """Keeps the tasks that it was given last."""

    tasks: list[ClientTask]

    def train(self, tasks: Sequence[ClientTask]) -> list[Update]:
        self.tasks = list(tasks)
        return super().train(tasks)


TOWERS: dict[str, dict[str, object]] = {
    "capt": {"in_turn": False},
    "capt-reconstructed": {"vl_align": True},
    "clip-lora": {"dropout": 0.0},
    "maple": {},
    "promptsrc": {},
    "vpt": {},
}


@pytest.mark.parametrize("method", TOWERS)
def test_clients_behind_a_frozen_tower_end_where_each_ends_alone(method: str) -> None:
    run = run_of(method, "clip:embedded", executor="sequential", ragged=True, params={method: TOWERS[method]})
    kept = Kept()
    final_state(replace(run, executor=kept), until=1)
    tasks = kept.tasks
    with InFloat64():
        at_once = train_stack(tasks, BY_SIZE)
        alone = [local_sgd(task) for task in tasks]
    for found, wanted in zip(at_once, alone, strict=True):
        assert all(value.dtype == torch.float64 for value in wanted.weights.values())
        for name, value in wanted.weights.items():
            torch.testing.assert_close(found.weights[name], value, rtol=1e-10, atol=1e-12, msg=name)
            assert not torch.equal(value, tasks[0].received[name].double()), name


@pytest.mark.parametrize(
    "method", ["fedprox", "scaffold", "moon", "fedlc", "fedntd", "creff", "clip2fl", "fedbn", "fedetf", "fedglcl"]
)
def test_methods_end_where_they_end_one_after_another(method: str) -> None:
    backbone = "resnet8?width=1" if method == "fedbn" else "convnet?projector=128"
    at_once, alone = (run_of(method, backbone, executor=executor) for executor in ("cohort", "sequential"))
    found, wanted = all_tensors(final_state(at_once)), all_tensors(final_state(alone))
    assert at_once.executor.description == "cohort"
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() <= 1e-3 * value.abs().max() + 5e-5, name


@pytest.mark.parametrize(
    ("method", "backbone", "gap"),
    [
        ("fedavg", "convnet", 0.02),
        ("vpt", "clip:embedded", 0.02),
        ("fedprox", "clip:embedded", 0.04),  # samples are computed one by one, and rounded otherwise
        ("promptfl", "clip:embedded", 0.02),
    ],
)
def test_half_precision_is_the_steps_under_both_executors(method: str, backbone: str, gap: float) -> None:
    at_once, alone, precise = (
        run_of(method, backbone, executor=executor, precision=precision)
        for executor, precision in (("cohort", "bfloat16"), ("sequential", "bfloat16"), ("sequential", "float32"))
    )
    found, wanted, other = (final_state(run).weights for run in (at_once, alone, precise))
    assert at_once.executor.description == "cohort"
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() <= gap * value.abs().max(), name
        assert not torch.equal(value, other[name]), name


def test_on_a_cpu_they_train_one_after_another_unless_asked() -> None:
    run = run_of(executor="auto")
    final_state(run, until=1)
    assert run.executor.description == "sequential: the model is trained on images"


def test_few_batches_of_one_size_are_trained_one_after_another() -> None:
    with pytest.raises(FedbenchError, match="few clients have batches of one size"):
        final_state(run_of(ragged=True))


class Wrong(Vectorised):
    """Gradients times ``factor``; with ``only`` those of that type alone."""

    def __init__(self, factor: float, only: torch.dtype | None = None) -> None:
        super().__init__("by size")
        self.factor, self.only = factor, only

    def __call__(self, *arguments: object) -> tuple[Tensors, Tensor]:
        gradients, losses = super().__call__(*arguments)  # type: ignore[arg-type]
        return {n: g * (self.factor if self.only in (None, g.dtype) else 1) for n, g in gradients.items()}, losses


def test_gradients_that_are_a_thousandth_off_are_refused_in_the_trial_and_in_a_round() -> None:
    tasks = tasks_of(run_of(executor="sequential"))
    stack = Stack(tasks)
    for way, is_right in ((BY_SIZE, True), (Wrong(1.001), False)):
        assert passes_trial(way, tasks[:2]) is is_right
        computed = way(stack, stack.weights, stack.batch(1))[0]
        for client in range(4):
            assert is_own(stack, stack.weights, stack.batch(1), computed, way, client) is is_right


def test_gradients_that_are_right_in_float64_alone_are_refused() -> None:
    stack = Stack(tasks_of(run_of(executor="sequential")))
    flipped = Wrong(-1, torch.float32)
    assert passes_trial(flipped, stack.tasks[:2])
    computed = flipped(stack, stack.weights, stack.batch(0))[0]
    assert not is_own(stack, stack.weights, stack.batch(0), computed, flipped, 0)


@pytest.mark.parametrize("method", ["fedavg", "fedntd", "moon"])
def test_statistics_that_differ_from_client_to_client_are_each_ones_own(method: str) -> None:
    run = run_of(method, "resnet8?width=1", executor="sequential")
    tasks = []
    for task in map(precise, tasks_of(run)):
        moved = {n: b + 0.3 * task.client if b.is_floating_point() else b for n, b in task.buffers.items()}
        tasks.append(replace(task, buffers=moved))
    for task, at_once in zip(tasks, train_stack(tasks, BY_SIZE), strict=True):
        alone = local_sgd(task)
        for found, wanted in ((at_once.weights, alone.weights), (at_once.buffers, alone.buffers)):
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


class FromStepTwo:
    """A term that reads the client's number from the second local step on."""

    @hookimpl
    def loss_terms(self, step: object) -> Tensor:
        weights = step.weights  # type: ignore[attr-defined]
        total = sum(value.square().sum() for value in weights.values())
        return total * (step.task.client if step.number else 1.0)  # type: ignore[attr-defined]


def test_a_loss_that_changes_after_the_trial_is_trained_one_after_another() -> None:
    run = run_of(executor="sequential", rounds=1)
    assembly = assemble("fedavg", {}, listeners=[FromStepTwo()])
    assembly = replace(assembly, owners={**assembly.owners, "loss_terms": "plugin"})
    at_once = cohort_module.Cohort(assembly, run.executor, strict=False)  # type: ignore[arg-type]
    ended = final_state(replace(run, assembly=assembly, executor=at_once))
    wanted = final_state(replace(run, assembly=assembly))
    assert at_once.description.startswith("sequential: its loss is not what it was in the trial")
    assert all(torch.equal(ended.weights[name], value) for name, value in wanted.weights.items())


def test_a_network_with_dropout_is_trained_one_after_another_and_the_reason_is_told() -> None:
    run = run_of(executor="sequential")
    model = run.model

    def dropped(tensors: object, inputs: Tensor, training: bool) -> object:
        return model.forward(tensors, torch.nn.functional.dropout(inputs, 0.5, training), training)  # type: ignore[arg-type]

    noisy = replace(run, model=replace(model, forward=dropped))  # type: ignore[arg-type]
    executor = executor_for("cohort", run.spec.training, run.assembly, noisy.model)
    with pytest.raises(FedbenchError, match="cannot be vectorised"):
        final_state(replace(noisy, executor=executor))


class OnCuda(torch.Tensor):
    """A tensor that says it lies on a card."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(("numbers", "told"), [(SMALL, "cohort"), (SMALL + 1, "the model is trained on images")])
def test_on_a_card_small_networks_train_at_once_and_large_ones_do_not(numbers: int, told: str) -> None:
    run = run_of(executor="sequential")
    weights = torch.zeros(1).expand(numbers).as_subclass(OnCuda)
    executor = executor_for("auto", run.spec.training, run.assembly, replace(run.model, weights={"w": weights}))
    assert told in executor.description
