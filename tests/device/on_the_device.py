"""Every method on a device that is not the CPU, as far as one made of the CPU can show; see ``pretend.py``.

`test_pretend_device` runs this in a process of its own: autograd learns of devices before its first backward pass.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fedbench.core.errors import FedbenchError, Unworkable
from fedbench.core.federation import Subset, TensorImages
from fedbench.core.method.hooks import STEPS
from fedbench.core.method.tasks import Hooks
from fedbench.core.spec import RunSpec
from fedbench.kinds.registry import method_names, plugins_everywhere
from fedbench.models.inputs import ImagesOnDevice
from fedbench.rounds.executors import ExecutorName, cohort, graphs, sequential
from fedbench.rounds.executors.stack import mapped
from fedbench.rounds.finetuning import finetuned_metrics
from fedbench.rounds.loop import evaluate
from fedbench.rounds.run import Run
from fedbench.rounds.state import RunState, all_tensors, load_state, save_state
from fedbench.runs import prepare
from fedbench.runs.checkpoint import Checkpointing
from fedbench.runs.job import run_spec
from fedbench.scenarios.partitions.feature_skew import Joined
from fedbench.testing import final_state, tiny_backbone, tiny_dataset, tiny_run, tiny_spec
from tests.device import pretend

QUICK = ("capt", "fedclip", "fedloge", "fst-cbdg", "promptfl", "ratio-loss", "scaffold")
"""One of each kind: pairs, own heads, texts, prompts, the server's own samples, clients' controls in closed form."""


def every(*quick: str) -> list[Any]:
    """All methods, those but ``quick`` as slow ones."""
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in method_names() if name not in quick)]


EVERY = every(*QUICK)
STOPS_BY_DATA = ("fedotp", "plot")
"""Their iteration ends where the data say so, and a plan that is no number is an error: both are read in every step."""
KEPT_BY_THE_SERVER = ("climb", "feddg-ga", "promptsrc")
"""What they keep is small and computed on the CPU; a saved state comes back on the device."""
READS_IN_LOSS = {*STOPS_BY_DATA, "capt", "capt-reconstructed", "proda"}
"""These lay out texts in the first loss that reads them, once."""
SENDS_IN_STEPS = {
    *("apfl", "balancefl", "dp-fpl", "fedfa", "fst-cbdg", "ratio-loss"),
    *("capt", "capt-reconstructed", "logit-adjustment"),
}
"""Draws of a step and what the server sends lie on the CPU; graphs copy the latter once a client."""
TOLERANCE = 2e-5
"""Optimisers and sums take other ways on an accelerator; clip-lora, whose first steps divide zero by zero, 50 times."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device, which runs accept under its name."""
    there = prepare._device
    monkeypatch.setattr(prepare, "_device", lambda name: pretend.device() if name == pretend.NAME else there(name))
    monkeypatch.setattr(torch, "Generator", pretend.Generator)
    pretend.device()
    pretend.reads.clear()


def on_device(spec: RunSpec) -> RunSpec:
    return spec.model_copy(update={"device": pretend.NAME})


def reading_refused(run: Run) -> Run:
    """``run``, in whose losses reading values back is an error."""

    def refusing(hook: Any) -> Any:
        def answer(**arguments: Any) -> Any:
            with pretend.without_reading():
                return hook(**arguments)

        return answer

    hooks = {name: getattr(run.assembly.hooks, name) for name in STEPS}
    hooks |= {name: refusing(hooks[name]) for name in ("local_loss", "loss_terms")}
    assembly = replace(run.assembly, hooks=cast(Hooks, SimpleNamespace(**hooks)))
    return replace(run, assembly=assembly)


def trained(spec: RunSpec, executor: ExecutorName, state: RunState | None = None) -> tuple[RunState, Run]:
    run = tiny_run(on_device(spec), executor=executor)
    run = run if spec.method in READS_IN_LOSS else reading_refused(run)
    return final_state(run, state), run


def require_close(found: RunState, wanted: RunState, factor: float = 1) -> None:
    model = {**found.weights, **found.buffers}
    assert [name for name, tensor in model.items() if not isinstance(tensor, pretend.PretendTensor)] == []
    assert all_tensors(found).keys() == all_tensors(wanted).keys()
    for name, tensor in all_tensors(wanted).items():
        difference = (all_tensors(found)[name].cpu() - tensor).abs().max()
        assert difference <= factor * TOLERANCE * (tensor.abs().max() + 1e-3), name


@pytest.mark.parametrize("executor", ["sequential", "auto"])
@pytest.mark.parametrize("method", EVERY)
def test_every_method_trains_there_as_on_the_cpu(method: str, executor: ExecutorName) -> None:
    spec = tiny_spec(method, rounds=2)
    found, run = trained(spec, executor)
    metrics = evaluate(run, found)[0]
    here = tiny_run(spec, executor=executor)
    wanted = final_state(here)
    require_close(found, wanted, 50 if method == "clip-lora" else 1)
    assert re.sub(", (steps as graphs|no graphs: [^;]*)", "", run.executor.description) == here.executor.description
    assert metrics == pytest.approx(evaluate(here, wanted)[0], abs=10)  # of ten samples of a client one may turn


@pytest.mark.parametrize("method", every(*QUICK, *KEPT_BY_THE_SERVER))
def test_a_run_goes_on_there_from_what_was_saved(method: str, tmp_path: Path) -> None:
    spec = tiny_spec(method, rounds=2)
    run = tiny_run(on_device(spec))
    half = final_state(run, until=1)
    save_state(half, tmp_path / "half.safetensors", spec.run_id)
    whole = final_state(run, half)
    again = load_state(tmp_path / "half.safetensors", spec.run_id, pretend.NAME)
    resumed = final_state(tiny_run(on_device(spec)), again)
    for name, tensor in all_tensors(whole).items():
        assert torch.equal(all_tensors(resumed)[name].cpu(), tensor.cpu()), name


@pytest.mark.parametrize("method", EVERY)
def test_a_further_local_step_reads_nothing_back_and_copies_nothing_there(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "IS_ON", False)  # they compare some steps
    counts, sent = [], []
    for epochs in (1, 3):
        run = tiny_run(on_device(tiny_spec(method, rounds=1, local_epochs=epochs)), executor="sequential")
        pretend.reads.clear()
        pretend.sends.clear()
        final_state(run)
        counts.append(len(pretend.reads))
        sent.append(len(pretend.sends))
    assert counts[0] == counts[1] or method in STOPS_BY_DATA
    assert sent[0] == sent[1] or method in SENDS_IN_STEPS


def test_a_whole_job_with_checkpoints_unseen_classes_and_fine_tuning(tmp_path: Path) -> None:
    spec = tiny_spec("promptfl", rounds=2, finetune_epochs=1)
    spec = spec.model_copy(update={"scenario": spec.scenario.model_copy(update={"unseen_classes": 0.34})})
    checkpoints = Checkpointing(tmp_path / "checkpoints", defaultdict(lambda: "code"), every=1)
    settings = prepare.Settings(tmp_path, tmp_path / "cache", checkpoints=checkpoints)
    loaded = SimpleNamespace(dataset=tiny_dataset(6), backbone=tiny_backbone("clip:embedded"))
    first = run_spec(on_device(spec), settings, (), loaded)  # type: ignore[arg-type]
    again = run_spec(on_device(spec), settings, (), loaded)  # type: ignore[arg-type]
    here = run_spec(spec, replace(settings, checkpoints=None), (), loaded)  # type: ignore[arg-type]
    assert again.summary.keys() == first.summary.keys() == here.summary.keys()
    assert "new_accuracy" in first.summary and "finetuned_mean_client_accuracy" in first.summary
    alike = {name for name in first.summary if "second" not in name}
    assert {n: first.summary[n] for n in alike} == {n: again.summary[n] for n in alike}


@pytest.mark.parametrize("augment", ["batch", "sample"])
def test_images_lie_there_once_and_are_augmented_there(augment: str) -> None:
    spec = tiny_spec("fedavg", backbone="fedavg-cnn", rounds=1, augment=augment)
    found, run = trained(spec, "auto")
    pixels = cast(Any, run.train).images._source.pixels
    assert isinstance(pixels, pretend.PretendTensor) and pixels.dtype == torch.uint8
    require_close(found, final_state(tiny_run(spec)))


def everybody(spec: RunSpec, partition: str = "iid") -> RunSpec:
    """``spec`` with all clients in every round, of one size with ``iid``."""
    scenario = spec.scenario.model_copy(update={"partition": partition, "participation": 1.0})
    return spec.model_copy(update={"scenario": scenario})


def with_and_without_graphs(spec: RunSpec, executor: ExecutorName = "sequential") -> str:
    """The description of a run with graphs, which ends with the bits of one without."""
    run, plain = (tiny_run(on_device(spec), executor=executor) for _ in range(2))
    found = all_tensors(final_state(run))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "IS_ON", False)
        wanted = all_tensors(final_state(plain))
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name].cpu(), tensor.cpu())] == []
    assert "graphs" not in plain.executor.description
    return run.executor.description


LOW_RANK = ("fedex-lora", "fedsa-lora", "ffa-lora", "flexlora", "flora")
CANNOT_RECORD = {
    "the CPU": ("apfl", "fedotp", "plot"),
    "the task's round": ("balancefl", "clip-lora", "dp-fpl", "fedbabu", "fedfa", "rolora", *LOW_RANK),
    "what the client keeps": ("fed-grab", "fst-cbdg", "pfedme"),
    "the task's inputs": ("fedrep",),
}
TRAINS_NOTHING = ("clip-zs", "fedpft")


@pytest.mark.parametrize("method", EVERY)
def test_recorded_steps_end_with_the_bits_of_steps_one_by_one(method: str) -> None:
    told = with_and_without_graphs(tiny_spec(method, rounds=2, local_epochs=2))
    reason = next((reason for reason, methods in CANNOT_RECORD.items() if method in methods), None)
    if method in TRAINS_NOTHING:
        assert "graphs" not in told
    elif reason is None:
        assert told.endswith(", steps as graphs")
    else:
        assert ", no graphs: " in told and told.endswith(reason)


@pytest.mark.parametrize(
    "training",
    [
        {"momentum": 0.9, "clip_norm": 0.1, "lr_schedule": "cosine"},
        {"optimizer": "adam"},
        {"augment": "sample"},
    ],
    ids=lambda training: "-".join(training),
)
def test_networks_with_running_statistics_are_recorded_with_any_optimiser(training: dict[str, object]) -> None:
    spec = tiny_spec("fedavg", backbone="resnet8?width=1", rounds=2, local_epochs=2, **training)
    assert with_and_without_graphs(spec).endswith(", steps as graphs")


@pytest.mark.parametrize(
    ("method", "backbone", "partition"),
    [
        ("fedntd", "convnet", "dirichlet"),
        ("fedavg", "resnet8?width=1", "iid"),
        ("promptfl", "clip:embedded", "dirichlet"),
        pytest.param("fedavg", "resnet8?width=1", "dirichlet", marks=pytest.mark.slow),
        pytest.param("vpt", "clip:embedded", "dirichlet", marks=pytest.mark.slow),
        pytest.param("clip-adapter", "clip:embedded", "iid", marks=pytest.mark.slow),
    ],
)
def test_steps_of_all_clients_at_once_are_recorded(
    method: str, backbone: str, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cohort, "FEWER_ON_IMAGES", 0)
    spec = tiny_spec(method, backbone=backbone, rounds=3)
    executor: ExecutorName = "auto" if method in ("promptfl", "clip-adapter") else "cohort"
    told = with_and_without_graphs(everybody(spec, partition), executor)
    assert told == "cohort, steps as graphs"


METHOD = '''
"""A method of a test."""
import torch
import fedbench.api as fb
from fedbench.api import hookimpl
from fedbench.toolkit.fedavg import cross_entropy
from fedbench.toolkit.local_training import local_sgd

class Tried(fb.Method[fb.NoParams]):
    """Tried."""
    name, citation = "tried", "Nobody, A paper that does not exist, 2000"
    rounds = 0

    @hookimpl
    def broadcast(self, task):
        """Counts."""
        self.rounds = task.round
        return fb.Broadcast(task.weights, {"scale": torch.tensor(float(task.client))})

    @hookimpl
    def after_training(self, task, update):
        """Counts."""
        kept = task.state.setdefault("tried", {"trained": torch.zeros(())})
        task.state["tried"] = {"trained": kept["trained"] + 1}

    @hookimpl
    def local_train(self, task):
        """Knows who trains."""
        self.client = task.client
        return local_sgd(task)

    @hookimpl
    def local_loss(self, step):
        """Tried."""
        loss, inputs = cross_entropy(step), step.batch.inputs
        return LOSS
'''
LOSSES = {
    "loss * (1 + step.task.payload['scale'])": "steps as graphs",
    "loss * (2.0 if self.rounds > 1 else 1.0)": "no graphs: its loss is not what it was when it was recorded",
    "loss * (1 + self.client)": "no graphs: its loss is not what it was when it was recorded",
    "loss + torch.rand((), device=inputs.device) * step.outputs.logits.mean()": "no graphs: its steps are not the same",
    "loss * float(step.outputs.logits.detach().mean())": "no graphs: its step reads values back",
    "loss * torch.tensor([2.0]).to(inputs.device)[0]": "no graphs: its step reads values back",
    "loss * step.task.client": "no graphs: its loss reads the task's client",
    "loss * (2 if step.number > 1 else 1)": "no graphs: its loss reads the task's number of the step",
    "loss / (1 + step.task.round)": "no graphs: its loss reads the task's round",
    "loss * (2 if step.number == 0 else 1)": "steps as graphs",
}


@pytest.mark.parametrize(("loss", "told"), LOSSES.items())
def test_a_graph_holds_pure_steps_and_the_reason_is_told_where_it_holds_none(
    loss: str, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "tried.py"
    file.write_text(METHOD.replace("LOSS", loss))
    with plugins_everywhere([file]):
        spec = tiny_spec("tried", backbone="clip:embedded", rounds=3, local_epochs=2)
        if "rand" in loss:
            run = tiny_run(on_device(spec), executor="sequential")
            final_state(run)
            assert told in run.executor.description
        else:
            assert told in with_and_without_graphs(spec)


def test_a_loss_of_all_clients_at_once_that_changes_is_computed_without_graphs(tmp_path: Path) -> None:
    file = tmp_path / "tried.py"
    trains_itself = METHOD[
        METHOD.index("    @hookimpl\n    def local_train") : METHOD.index("    @hookimpl\n    def local_loss")
    ]
    file.write_text(METHOD.replace(trains_itself, "").replace("LOSS", "loss * (2.0 if self.rounds > 2 else 1.0)"))
    with plugins_everywhere([file]):
        spec = everybody(tiny_spec("tried", backbone="clip:embedded", rounds=4, local_epochs=2))
        told = with_and_without_graphs(spec, "auto")
    assert told == "cohort, no graphs: its loss is not what it was when it was recorded"


def without_dropout(method: str, rounds: int) -> RunSpec:
    return tiny_spec(method, rounds=rounds).model_copy(update={"params": {"clip-lora": {"dropout": 0.0}}})


def test_replayed_steps_leave_alone_what_the_server_alone_changes() -> None:
    assert with_and_without_graphs(without_dropout("flora", rounds=2)).endswith(", steps as graphs")


def test_what_a_replay_does_not_write_is_not_taken_for_zero() -> None:
    unwritten, zero = {"a": torch.tensor([torch.nan, 1.0])}, {"a": torch.tensor([0.0, 1.0])}
    assert graphs._gap(unwritten, zero) > graphs.CLOSE
    assert graphs._gap(unwritten, unwritten) == 0


def test_predictions_that_a_method_leaves_there_are_scored(tmp_path: Path) -> None:
    answers = """
    @hookimpl
    def evaluate(self, task):
        answer = largest_logit(task)
        there = next(iter(task.weights.values())).device
        return Predictions(answer.labels.to(there), scores=answer.scores.to(there))
"""
    file = tmp_path / "tried.py"
    imports = "from fedbench.core.types import Predictions\nfrom fedbench.toolkit.fedavg import largest_logit\n"
    file.write_text(METHOD.replace("import torch\n", f"import torch\n{imports}", 1).replace("LOSS", "loss") + answers)
    with plugins_everywhere([file]):
        state, run = trained(tiny_spec("tried", backbone="clip:embedded", rounds=1), "sequential")
        metrics, _ = evaluate(run, state)
    assert 0 <= metrics["global_accuracy"] <= 100


@pytest.mark.slow
def test_buffers_that_the_server_changes_leave_plan_and_graphs() -> None:
    spec = everybody(without_dropout("flora", rounds=4))
    run = tiny_run(on_device(spec), executor="cohort")
    final_state(run)
    assert len(run.executor._plans) == 2  # type: ignore[attr-defined]  # the server sends more from round 2 on
    assert with_and_without_graphs(spec, "cohort") == "cohort, steps as graphs"


def test_a_graph_that_does_nothing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretend.CUDAGraph, "replay", lambda recorded: None)
    told = with_and_without_graphs(tiny_spec("fedavg", rounds=2, local_epochs=2))
    assert told.endswith("no graphs: its steps are not the same twice")


def test_a_recording_that_fails_is_told_and_one_that_leaves_the_device_unusable_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(pretend, "_record", failing)
    spec = tiny_spec("fedavg", rounds=2, local_epochs=2)
    assert ", no graphs: " in with_and_without_graphs(spec)
    monkeypatch.setattr(torch.get_device_module(pretend.NAME), "empty_cache", failing)
    with pytest.raises(Unworkable, match="FEDBENCH_GRAPHS=0"):
        final_state(tiny_run(on_device(spec), executor="sequential"))


def test_held_out_clients_are_tuned_there() -> None:
    spec = tiny_spec("fedavg", rounds=1, finetune_epochs=1)
    spec = spec.model_copy(update={"scenario": spec.scenario.model_copy(update={"holdout_clients": 0.25})})
    there, here = tiny_run(on_device(spec)), tiny_run(spec)
    found, wanted = (finetuned_metrics(run, final_state(run)) for run in (there, here))
    assert "finetuned_heldout_mean_client_accuracy" in wanted and found == pytest.approx(wanted, abs=10)


def test_images_of_two_sources_lie_there() -> None:
    first, second = (torch.randint(0, 255, (n, 3, 4, 4), dtype=torch.uint8) for n in (3, 2))
    joined = Subset(Joined(TensorImages(first), TensorImages(second)), torch.tensor([4, 0, 3]))
    there = ImagesOnDevice(pretend.device())(joined)
    for index in (torch.tensor([0, 2, 1]), torch.tensor([1]), torch.tensor([0, 2, 1], device=pretend.device())):
        read = there.read(index)
        assert isinstance(read, pretend.PretendTensor) and torch.equal(read.cpu(), joined.read(index.cpu()))


@pytest.mark.parametrize("forgotten", ["weights", "buffers", "samples", "client"])
def test_a_tensor_that_a_graph_does_not_get_shows(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sequential._tensors

    def without(step: Any) -> Any:
        tensors = whole(step)
        return {**tensors, forgotten: mapped(tensors[forgotten], torch.zeros_like)}

    monkeypatch.setattr(sequential, "_tensors", without)
    method, backbone = ("fedprox", "clip:embedded") if forgotten == "client" else ("fedavg", "resnet8?width=1")
    told = with_and_without_graphs(tiny_spec(method, backbone=backbone, rounds=2, local_epochs=2))
    assert told.endswith("no graphs: its steps are not the same twice")


FAULTS = {
    "a tensor of the CPU among others": ("step.outputs.logits.sum() * torch.ones(3).sum(0, keepdim=True)", "mixes dev"),
    "a value read back": ("step.outputs.logits.mean() * step.outputs.logits.detach().max().item()", "reads values"),
    "a list read back": ("step.outputs.logits.mean() + sum(step.labels.tolist())", "reads values"),
    "NumPy": ("step.outputs.logits.mean() * float(step.labels.numpy().sum())", "to numpy"),
    "a generator of the CPU": (
        "step.outputs.logits.mean() * torch.rand(1, device=step.labels.device, generator=step.generator('noise'))[0]",
        "generator of another device",
    ),
}


@pytest.mark.parametrize("executor", ["sequential", "auto"])
@pytest.mark.parametrize("loss, message", FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_found(loss: str, message: str, executor: ExecutorName, tmp_path: Path) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(
        dedent(f'''
        """A faulty method."""
        import torch
        import fedbench.api as fb
        from fedbench.api import hookimpl

        class Faulty(fb.Method[fb.NoParams]):
            """Faulty."""
            name, citation = "faulty", "Nobody, A paper that does not exist, 2000"

            @hookimpl
            def local_loss(self, step):
                """Faulty."""
                return {loss}
        ''')
    )
    with plugins_everywhere([file]):
        spec = tiny_spec("faulty", backbone="clip:embedded", rounds=1)
        final_state(tiny_run(spec, executor=executor))  # the CPU does not mind
        with pytest.raises((RuntimeError, TypeError, FedbenchError), match=message):
            trained(spec, executor)


def test_tensors_that_an_accelerator_takes_from_the_cpu_are_taken() -> None:
    there = torch.arange(6.0, device=pretend.device()).view(2, 3)
    assert (there * torch.tensor(2.0)).tolist() == [[0, 2, 4], [6, 8, 10]]
    assert there[:, torch.tensor([2, 0])].tolist() == [[2, 0], [5, 3]]
    with pytest.raises(RuntimeError, match="mixes devices"):
        torch.arange(6.0)[torch.tensor([0, 1], device=pretend.device())]
    with pytest.raises(RuntimeError, match="mixes devices"):
        torch.stack([there[0, 0], torch.tensor(1.0)])
