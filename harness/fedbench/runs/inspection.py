"""A look at runs before anything is trained: each is prepared in a worker, which also tells how much memory it needs.

Nothing that a method does to its process while it is prepared reaches the rows after it, and a process that dies is the
fault of its own row.

Of the memory, weights and samples are counted. What autograd saves in a local step is measured on batches of two and of
four samples of the largest client, by the run's own hooks as in its first round, and grows linearly from there: texts
are encoded once a step, images once a sample. (One sample would not do: batch-norm and losses over pairs are
undefined.) Left out is what lives for moments only (temporaries of single operations, a server that trains,
evaluation), and Python with its libraries. Of clients who train at once each takes a step's bytes; the cohort executor
trains as many as fit into `fedbench.rounds.executors.gradients.budget`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fedbench.core.errors import REASON, FedbenchError, MethodFault, NotHere, raised_at, reason_of, shortened, text_of
from fedbench.core.federation import ImageSource, Split, Subset, TensorImages
from fedbench.core.method.tasks import ClientTask
from fedbench.core.records import RunInfo
from fedbench.core.spec import RunSpec, Training
from fedbench.kinds.registry import plugins_everywhere
from fedbench.models.inputs import RESIDENT_BYTES, ImageInputs, UncachedFeatures
from fedbench.rounds.loop import start
from fedbench.rounds.messages import broadcast, client_task
from fedbench.rounds.metrics import size_in_bytes
from fedbench.rounds.run import Run, shared
from fedbench.runs.engines import can_fork
from fedbench.runs.engines.worker import Apart, Work, exit_text
from fedbench.runs.prepare import Loaded, Loader, Settings, backbone_for, dataset_for, enlargement, prepare

if TYPE_CHECKING:
    from torch import nn

    from fedbench.core.types import Backbone


@dataclass(frozen=True)
class Prepared:
    """What preparing a run shows."""

    info: RunInfo
    memory: Memory | None = None
    """Set by a dry run only."""
    sent: int = 0
    """Trained parameters that leave the client; its private ones do not. Of a dry run only."""
    measured: Mapping[str, MeasuredMemory] = field(default_factory=dict)
    """What was tried out for ``memory``, by what it depends on."""


@dataclass(frozen=True)
class Failed:
    """The run's method is at fault."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """What was requested can't be run as it is."""

    text: str
    is_of_loading: bool = False
    """Data or backbone can't be loaded; else they don't fit the method, or each other."""
    absent: Literal["", "data", "weights"] = ""
    """What is not on this machine."""


Found = Prepared | Failed | Refused


@dataclass(frozen=True)
class LookRequest:
    """A run to look at."""

    spec: RunSpec
    known: Mapping[str, MeasuredMemory] | None = None
    """What was measured for other runs; None: its memory is not wanted, and all its features are to be encoded."""


def look(request: LookRequest, settings: Settings, loaded: Loaded, emit: Callable[[Any], None]) -> bool:
    """Prepare the run; emits what there is to say of its images ("" for nothing), and `Found`. Whether it ended well.

    What is wrong with loading, FedbenchError aside, is raised, before anything is emitted.
    """
    spec, dataset = request.spec, loaded.dataset
    try:
        dataset = dataset or dataset_for(spec, settings)
        backbone = loaded.backbone or backbone_for(spec, dataset, settings)
        line = enlargement(dataset, backbone)
    except FedbenchError as error:
        absent: Literal["data", "weights"] = "data" if dataset is None else "weights"
        emit(Refused(str(error), is_of_loading=True, absent=absent if isinstance(error, NotHere) else ""))
        return True
    except Exception as error:
        error.add_note(f"while preparing row {spec.title!r}; nothing was run")
        raise
    emit(line)
    try:
        run = prepare(spec, settings, dataset=dataset, backbone=backbone, encode_all=request.known is None)
        emit(Prepared(run.info) if request.known is None else _measured(run, backbone, request.known))
        return True
    except MethodFault as error:
        emit(Failed(shortened(" ".join(text_of(error).split()), REASON)))
    except FedbenchError as error:  # a text encoder or a teacher may be absent as well
        emit(Refused(text_of(error), absent="weights" if isinstance(error, NotHere) else ""))
    except BaseException as error:  # a method may raise SystemExit or KeyboardInterrupt as well
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            raise  # Ctrl-C, which a process of its own ignores
        emit(Failed(f"{reason_of(error)} ({raised_at(error)})"))
    return False


def looks(
    specs: Sequence[RunSpec], settings: Settings, *, is_dry: bool, in_process: bool, tell: Callable[[str], None]
) -> Generator[tuple[RunSpec, Found], None, None]:
    """Look at all runs, those that read the same one after the other, and tell each line on their images once.

    With ``in_process``, and where the system can't fork, a run may change those after it. A dry look encodes no more
    images than it takes to tell what memory a run needs. Raises FedbenchError where a run's process ends before its
    data are loaded.
    """
    known: dict[str, MeasuredMemory] = {}
    absent: dict[tuple[str, str], Refused] = {}
    shown = {""}
    loader, apart = Loader(settings), Apart(settings)
    is_here = in_process or not can_fork()
    with closing(apart):
        for spec in _by_what_they_read(specs):
            same, request = absent.get((spec.dataset, spec.backbone)), LookRequest(spec, known if is_dry else None)
            for answer in [same] if same else _here(request, settings, loader) if is_here else _apart(request, apart):
                if isinstance(answer, Refused) and answer.absent and answer.is_of_loading:
                    absent[spec.dataset, spec.backbone] = answer
                if not isinstance(answer, str):
                    known |= answer.measured if isinstance(answer, Prepared) else {}
                    yield spec, answer
                elif answer not in shown:
                    shown.add(answer)
                    tell(answer)


def _here(request: LookRequest, settings: Settings, loader: Loader) -> list[str | Found]:
    events: list[str | Found] = []
    with plugins_everywhere(settings.plugin_files):
        look(request, settings, loader.load(request.spec), events.append)
    return events


def _apart(request: LookRequest, apart: Apart) -> list[str | Found]:
    events: list[str | Found] = []
    try:
        code = apart.carry_out(Work(look, request, request.spec), events.append)
    except (OSError, EOFError) as error:
        raise FedbenchError(
            f"no process could be started to prepare row {request.spec.title!r}: {type(error).__name__} {error}; "
            "end others, or use --engine in-process."
        ) from error
    if not events:
        reason = f"while its data and backbone were loaded, {exit_text(code)}."
        raise FedbenchError(f"row {request.spec.title!r}: {reason} Nothing was run.")
    return events if not isinstance(events[-1], str) else [*events, Failed(exit_text(code))]


def _by_what_they_read(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """The runs by data set and backbone, which are loaded anew where they change, in the order of their first ones."""
    datasets = list(dict.fromkeys(spec.dataset for spec in specs))
    backbones = list(dict.fromkeys(spec.backbone for spec in specs))
    return sorted(specs, key=lambda spec: (datasets.index(spec.dataset), backbones.index(spec.backbone)))


def _measured(run: Run, backbone: Backbone, known: Mapping[str, MeasuredMemory]) -> Prepared:
    """Runs that differ in nothing that matters to their memory are measured once."""
    key = _memory_key(run)
    measured = known[key] if key in known else measure(run)
    sent = sum(tensor.numel() for tensor in shared(run.model.weights, run.private).values())
    return Prepared(run.info, memory_of(run, _frozen(run, backbone), measured), sent, {key: measured})


def _memory_key(run: Run) -> str:
    """What a local step's memory depends on: neither on the partition of the data, nor on seeds, rates and budget.

    Rows of one method are taken to be alike where their models' weights are, by name and shape: a measurement with all
    of ViT-B/16 takes ten seconds, and a paper's suite has dozens of ablations that change the server alone.
    """
    spec, model = run.spec, run.model
    alike = spec.model_dump(mode="json", exclude={"scenario", "training", "seed", "tuned", "params"})
    of_training = spec.training.model_dump(include={"optimizer", "precision", "augment"})
    shapes = {name: tuple(t.shape) for name, t in (*model.weights.items(), *model.buffers.items())}
    encoders = [encoder.key for encoder in (model.encoder, *model.side_encoders.values()) if encoder is not None]
    return repr((alike, of_training, spec.scenario.labels, run.info.classnames, shapes, encoders))


def _frozen(run: Run, backbone: Backbone) -> list[nn.Module]:
    encoders = [run.model.encoder, *run.model.side_encoders.values()]
    beside = [getattr(encoder, "backbone", None) for encoder in encoders]
    return [backbone.module, *(other.module for other in beside if other is not None)]


MEASURED = (2, 4)
"""Samples of the batches that are measured."""


@dataclass(frozen=True)
class StepBytes:
    """What autograd saves in a local step on b samples: ``fixed + b * per_sample`` bytes."""

    fixed: float
    per_sample: float

    def on(self, samples: int) -> int:
        return round(self.fixed + samples * self.per_sample)


@dataclass(frozen=True)
class MeasuredMemory:
    """What has to be tried out to know what a run needs; partition, seeds, rates and budget don't matter."""

    step: StepBytes | None
    """What autograd saves; None for a model without weights, and where it could not be measured."""
    table_row: int
    """Bytes of a sample in the table of features; 0 where images are transformed batch by batch."""
    side_row: int
    """Bytes of a training sample in the tables of the model's side encoders."""
    inputs: int
    """Bytes of a training sample as a local step reads it."""
    unmeasured: str = ""
    """Why the step could not be measured."""


@dataclass(frozen=True)
class Memory:
    """Bytes that one process needs for a run, beside Python and its libraries."""

    weights: int
    """Frozen modules; the global weights, the training client's, its gradients and moments, the cohort's updates."""
    samples: int
    """Images in memory and tables of features."""
    step: int | None
    """Bytes of one client's largest local step; None if it could not be measured."""
    batch: int = 0
    """Samples of that step."""
    unmeasured: str = ""
    """Why the step could not be measured."""

    @property
    def total(self) -> int | None:
        return None if self.step is None else self.weights + self.samples + self.step


def measure(run: Run) -> MeasuredMemory:
    """Try out one sample and one local step of ``run``.

    A step that its method cannot take without what a real run does before it (a survey, say) stays unmeasured.
    """
    first, sources = torch.zeros(1, dtype=torch.int64), (run.train, *run.side.values())
    sizes = [_size(source.read(first)) for source in sources]
    kept, *beside = [_size(s.table(first)) if isinstance(s, UncachedFeatures) else 0 for s in sources]
    step, unmeasured = None, ""
    if run.model.weights:
        try:
            step = step_bytes(run)
        except FedbenchError as error:
            unmeasured = f"training it says: {error}"
        except Exception as error:
            # what a method keeps between rounds is not there yet, or it has a bug that a real run will show whole
            unmeasured = f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"
    return MeasuredMemory(step, kept, sum(beside), sum(sizes), unmeasured)


def memory_of(run: Run, frozen: Sequence[nn.Module], measured: MeasuredMemory) -> Memory:
    """What ``run`` needs with the ``frozen`` modules that it reads. A run without weights takes no step."""
    weights = weight_bytes(run, frozen)
    samples = sample_bytes(run, measured.table_row) + len(run.train) * measured.side_row
    if not run.model.weights:
        return Memory(weights, samples, 0)
    batch = largest_batch(run)
    if measured.step is None:
        return Memory(weights, samples, None, batch, measured.unmeasured)
    step = measured.step.on(batch) + batch * measured.inputs + _resident_bytes(run, measured.inputs)
    return Memory(weights, samples, step, batch)


def weight_bytes(run: Run, frozen: Sequence[nn.Module]) -> int:
    """Bytes of frozen modules and constants, and of all copies of trained weights that exist while a cohort trains."""
    kept = {t.data_ptr(): t for module in frozen for t in (*module.parameters(), *module.buffers())}
    still = sum(map(_size, kept.values())) + size_in_bytes(run.model.constants)
    weights, buffers = run.model.weights, run.model.buffers
    size, both = size_in_bytes(weights), size_in_bytes(weights, buffers)
    sent = size_in_bytes(shared(weights, run.private), shared(buffers, run.private | run.model.of_server))
    kept_apart = both - size_in_bytes(shared({**weights, **buffers}, run.private))
    # the initial and the global model, the client's own, its gradients and moments
    client = 3 * both + (1 + moments(run.spec.training)) * size
    return still + client + run.info.cohort_size * sent + run.info.num_clients * kept_apart


def moments(training: Training) -> int:
    """Tensors that the optimiser keeps for each weight."""
    return (1 if training.momentum else 0) if training.optimizer == "sgd" else 2


def sample_bytes(run: Run, table_row: int) -> int:
    """Bytes of the images in memory, and of the tables of features with rows of ``table_row`` bytes."""
    server = None if run.server is None else run.server.inputs
    unseen = None if run.unseen is None else run.unseen.inputs
    tables = [source for source in (run.train, run.test, run.validation, server, unseen) if source is not None]
    federation = run.federation
    splits: list[Split | None] = [federation.train, federation.test, federation.validation, federation.server]
    held = {id(pixels): pixels for split in splits if split is not None for pixels in _pixels(split.images)}
    return table_row * sum(map(len, tables)) + sum(map(_size, held.values()))


def largest_batch(run: Run) -> int:
    """Samples of the run's largest local step."""
    return min(
        run.spec.training.batch_size,
        int(max(shards.sizes.max() for shards in (run.federation.shards, *run.federation.later))),
    )


def step_bytes(run: Run) -> StepBytes:
    """What autograd saves in a step of ``run``, measured; raises whatever the run's hooks raise in it."""
    task = _first_task(run)
    few, many = (saved_bytes(_on_samples(task, samples)) for samples in MEASURED)
    per_sample = (many - few) / (MEASURED[1] - MEASURED[0])
    return StepBytes(few - MEASURED[0] * per_sample, per_sample)


def saved_bytes(task: ClientTask) -> int:
    """The most bytes that autograd holds at once while ``task`` is trained; the trained weights are not counted."""
    tally = _Tally()
    with torch.autograd.graph.saved_tensors_hooks(tally.pack, lambda held: held.tensor):
        task.hooks.local_train(task=task)
    return tally.most


class _Tally:
    """Counts the storages that are saved for a backward pass, each once and as long as it is saved."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._now = 0
        self.most = 0

    def pack(self, tensor: Tensor) -> _Held:
        whole = tensor if tensor._base is None else tensor._base
        # weights, trained or frozen, are there without the step
        if isinstance(whole, nn.Parameter) or (whole.is_leaf and whole.requires_grad):
            return _Held(tensor.detach(), lambda: None)
        storage = tensor.untyped_storage()
        where, size = storage.data_ptr(), storage.nbytes()
        held = self._holders.get(where, 0)
        self._holders[where] = held + 1
        self._now += 0 if held else size
        self.most = max(self.most, self._now)

        def release() -> None:
            self._holders[where] -= 1
            self._now -= 0 if self._holders[where] else size

        return _Held(tensor.detach(), release)


class _Held:
    """A saved tensor that tells when it is let go."""

    def __init__(self, tensor: Tensor, release: Callable[[], None]) -> None:
        self.tensor = tensor
        self._release = release

    def __del__(self) -> None:
        self._release()


def _first_task(run: Run) -> ClientTask:
    state = run.initial_state()
    start(run, state)
    client = int(run.federation.shards.sizes.argmax())
    return client_task(run, state, 1, 0, client, broadcast(run, state, client))


def _on_samples(task: ClientTask, samples: int) -> ClientTask:
    """``task`` as one step on ``samples`` of its samples, some of them repeatedly where there are fewer."""
    index = torch.arange(samples) % len(task.inputs)
    training = task.training.model_copy(update={"batch_size": samples, "local_epochs": 1, "local_steps": None})
    return replace(
        task,
        inputs=task.inputs.select(index),
        labels=None if task.labels is None else task.labels[index.to(task.labels.device)],
        side={name: rows.select(index) for name, rows in task.side.items()},
        spec=task.spec.model_copy(update={"training": training}),
        state={method: dict(held) for method, held in task.state.items()},
    )


def _resident_bytes(run: Run, image: int) -> int:
    """Bytes of the transformed images, ``image`` each, that a client keeps while it trains, if they fit."""
    if not isinstance(run.train, ImageInputs):
        return 0
    kept = run.federation.shards.sizes * image
    fitting = kept[kept <= RESIDENT_BYTES]
    return int(fitting.max()) if len(fitting) else 0


def _pixels(images: ImageSource) -> Iterator[Tensor]:
    """The tensor that ``images`` are held in; nothing where they are decoded on demand."""
    while isinstance(images, Subset):
        images = images.source
    if isinstance(images, TensorImages):
        yield images.pixels


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
