"""The one federated loop: assemble a run, then rounds of cohort, local training, aggregation and evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedbench.assemble import Assembly, assemble
from fedbench.datasets import load_dataset
from fedbench.defaults import participant_shares, weighted_mean
from fedbench.errors import FedbenchError
from fedbench.hookspecs import AggregationTask, ClientTask, EvaluationTask, ModelSetup, RoundRecord, RunInfo, RunResult
from fedbench.metrics import score, size_in_bytes, summarise, validation_accuracy
from fedbench.models import load_backbone
from fedbench.models.feature_cache import encode
from fedbench.models.inputs import FeatureInputs, ImageInputs, InputSource
from fedbench.scenarios import build_federation
from fedbench.scenarios.participation import cohort
from fedbench.spec import RunSpec
from fedbench.state import RunState
from fedbench.types import Dataset, Federation, Model, Predictions, Split, Tensors, Update

if TYPE_CHECKING:
    from fedbench.models import Backbone


@dataclass(frozen=True)
class Settings:
    """Where a run finds things on this machine, and how many threads it may use; not part of the run's identity."""

    data_dir: Path
    cache_dir: Path
    plugin_files: tuple[Path, ...] = ()
    threads: int = 1
    """Intra-op threads; runs use one each and cores are filled with runs, so that results don't depend on cores."""


@dataclass(frozen=True, eq=False)
class Run:
    """An assembled run, ready to train."""

    spec: RunSpec
    assembly: Assembly
    federation: Federation
    """What the method trains on."""
    scored: Federation
    """The scenario's own clients, on which every method is scored alike."""
    model: Model
    info: RunInfo
    train: InputSource
    test: InputSource
    validation: InputSource | None
    client_inputs: dict[int, InputSource] = field(default_factory=dict)

    def initial_state(self) -> RunState:
        """The state before round 1."""
        device = torch.device(self.spec.device)
        return RunState(0, _to(self.model.weights, device), _to(self.model.buffers, device))


def prepare(
    spec: RunSpec,
    settings: Settings,
    *,
    listeners: Sequence[object] = (),
    dataset: Dataset | None = None,
    backbone: Backbone | None = None,
) -> Run:
    """Load data and backbone, deal the federation, build the model. Raises FedbenchError for anything unusable.

    ``dataset`` and ``backbone`` spare the loading where a caller already has them.
    """
    torch.set_num_threads(settings.threads)
    assembly = assemble(spec.method, spec.params, settings.plugin_files, listeners)
    device = _device(spec.device)
    dataset = dataset or _dataset(spec.dataset, settings.data_dir, settings.cache_dir)
    backbone = backbone or backbone_for(spec, dataset, settings)
    backbone.module.to(device)
    scored = build_federation(dataset, spec.scenario, spec.seed)
    federation = assembly.hooks.federate(federation=scored, spec=spec)
    _refuse_ignored_settings(spec, assembly)
    model = assembly.hooks.build_model(setup=ModelSetup(backbone, dataset.classnames, spec))
    model = replace(model, constants=_to(model.constants, device))

    def inputs(split: Split) -> InputSource:
        if model.encoder is not None:
            return FeatureInputs(encode(split.images, model.encoder, settings.cache_dir, device=device).to(device))
        if model.transform is None:
            raise FedbenchError(f"{spec.method}: build_model gave neither an encoder nor a transform.")
        return ImageInputs(split.images, model.transform, device)

    info = RunInfo(
        owners=assembly.owners,
        data_hash=dataset.content_hash,
        weights_hash=backbone.weights_hash,
        num_clients=len(federation.clients),
        cohort_size=len(cohort(1, len(federation.clients), spec.scenario.participation, 0.0, spec.seed)),
        num_train=sum(len(shard.indices) for shard in federation.clients),
        num_test=len(federation.test),
        trainable_parameters=sum(t.numel() for t in model.weights.values()),
        round_bytes=size_in_bytes(model.weights, model.buffers),
    )
    validation = None if federation.validation is None else inputs(federation.validation)
    train, test = inputs(federation.train), inputs(federation.test)
    return Run(spec, assembly, federation, scored, model, info, train, test, validation)


def backbone_for(spec: RunSpec, dataset: Dataset, settings: Settings) -> Backbone:
    """The run's backbone; FedbenchError where the data set's images are too small for it."""
    height, width = dataset.train.images.read(torch.zeros(1, dtype=torch.int64)).shape[-2:]
    return load_backbone(spec.backbone, data_dir=settings.data_dir, seed=spec.seed, image_size=(height, width))


def train_round(run: Run, state: RunState) -> tuple[RunState, RoundRecord]:
    """One round: the cohort trains from ``state``, the server aggregates. The record has no metrics yet."""
    spec, hooks, scenario = run.spec, run.assembly.hooks, run.spec.scenario
    started = time.perf_counter()
    number = state.round + 1
    state = replace(state, weights=_channels_last(state.weights))
    clients = len(run.federation.clients)
    chosen = cohort(number, clients, scenario.participation, scenario.dropout, spec.seed)
    # a client that drops out has received the model, but returns nothing
    sampled = len(cohort(number, clients, scenario.participation, 0.0, spec.seed))
    updates = tuple(_train_client(run, state, number, client) for client in chosen)
    task = AggregationTask(number, state.weights, updates, spec, state.server)
    weights = hooks.aggregate(task=task)
    buffers = _average_buffers(updates, spec.training.weighting, state.buffers)
    record = RoundRecord(
        round=number,
        cohort=tuple(chosen),
        metrics={"train_loss": sum(u.metrics.get("train_loss", 0.0) for u in updates) / len(updates)},
        bytes_up=sum(size_in_bytes(u.weights, u.buffers, u.payload) for u in updates),
        bytes_down=sampled * size_in_bytes(state.weights, state.buffers),
        seconds=time.perf_counter() - started,
    )
    return RunState(number, weights, buffers, state.server, state.clients), record


def evaluate(run: Run, state: RunState) -> tuple[dict[str, float], Predictions]:
    """All metrics of the global model after ``state.round`` rounds, and the predictions behind them."""
    weights = _channels_last(state.weights)

    def predict(inputs: InputSource) -> Predictions:
        classes = run.federation.num_classes
        task = EvaluationTask(run.model, weights, state.buffers, inputs, classes, state.server, state.clients)
        return run.assembly.hooks.evaluate(task=task)

    predictions = predict(run.test)
    metrics = score(predictions, run.scored)
    if run.validation is not None and run.federation.validation is not None:
        metrics["validation_accuracy"] = validation_accuracy(predict(run.validation), run.federation.validation)
    return metrics, predictions


def rounds(
    run: Run, state: RunState, until: int | None = None
) -> Iterator[tuple[RunState, RoundRecord, Predictions | None]]:
    """The rounds after ``state``, up to ``until`` (all by default), each evaluated when due, then with predictions.

    From the initial state, round 0 comes first: the model before training. A model without weights (zero-shot) has
    nothing to train, so round 0 is all of it.
    """
    last = run.spec.training.rounds if state.weights else 0
    if state.round == 0:
        metrics, predictions = evaluate(run, state)
        yield state, RoundRecord(0, (), metrics, 0, 0, 0.0), predictions
    while state.round < min(last, last if until is None else until):
        state, record = train_round(run, state)
        latest = None
        if state.round % run.spec.training.eval_every == 0 or state.round == last:
            metrics, latest = evaluate(run, state)
            record = replace(record, metrics={**record.metrics, **metrics})
        yield state, record, latest


def run_spec(spec: RunSpec, settings: Settings, listeners: Sequence[object] = ()) -> RunResult:
    """Run ``spec`` from beginning to end, notifying listeners; the whole job of one cell of a suite."""
    started = time.perf_counter()
    run = prepare(spec, settings, listeners=listeners)
    hooks = run.assembly.hooks
    hooks.run_started(spec=spec, info=run.info)
    records = []
    state = run.initial_state()
    predictions = None
    try:
        for after, record, predicted in rounds(run, state):
            state = after
            predictions = predicted or predictions
            records.append(record)
            hooks.round_finished(spec=spec, record=record)
    except Exception as error:
        error.add_note(f"{spec.row}, round {len(records)}, seed {spec.seed}, run {spec.run_id}")
        raise
    assert predictions is not None  # the last round is always evaluated
    result = RunResult(
        records=tuple(records),
        summary=_summary(records),
        predictions=tuple(predictions.labels.tolist()),
        weights={name: tensor.cpu().numpy() for name, tensor in {**state.weights, **state.buffers}.items()},
        seconds=time.perf_counter() - started,
    )
    hooks.run_finished(spec=spec, info=run.info, result=result)
    return result


def _summary(records: Sequence[RoundRecord]) -> dict[str, float]:
    by_round = {r.round: r.metrics for r in records if "global_accuracy" in r.metrics}
    summary = summarise(by_round)
    summary["bytes_up"] = float(sum(r.bytes_up for r in records))
    summary["bytes_down"] = float(sum(r.bytes_down for r in records))
    summary["train_seconds"] = sum(r.seconds for r in records)
    return summary


def _train_client(run: Run, state: RunState, number: int, client: int) -> Update:
    federation = run.federation
    shard = federation.clients[client]
    inputs = run.client_inputs.get(client)
    if inputs is None:
        inputs = run.client_inputs[client] = run.train.select(shard.indices)
    visible = federation.labels_visible
    task = ClientTask(
        client=client,
        round=number,
        received=state.weights,
        buffers=state.buffers,
        inputs=inputs,
        labels=federation.train.labels[shard.indices].to(run.spec.device) if visible else None,
        class_counts=federation.class_counts(client).to(run.spec.device) if visible else None,
        model=run.model,
        spec=run.spec,
        state=state.clients.setdefault(client, {}),
        hooks=run.assembly.hooks,
    )
    try:
        return run.assembly.hooks.local_train(task=task)
    except Exception as error:
        error.add_note(f"client {client}, round {number}")
        raise


def _average_buffers(updates: Sequence[Update], weighting: str, received: Tensors) -> Tensors:
    """Running statistics averaged like the weights; counters (integers) copied from the first client."""
    shares = participant_shares(tuple(updates), weighting)
    averaged = {}
    for name, old in received.items():
        values = [u.buffers[name] for u in updates]
        averaged[name] = weighted_mean(values, shares) if old.is_floating_point() else values[0]
    return averaged


def _refuse_ignored_settings(spec: RunSpec, assembly: Assembly) -> None:
    """A setting of the default model that the run's method would not read is a mistake, not a no-op."""
    owner = assembly.owners["build_model"].partition(",")[0]
    if owner == "fedavg":
        return
    for name, value, unset in (("tune", spec.tune, "auto"), ("head_scale", spec.head_scale, None)):
        if value != unset:
            raise FedbenchError(f"{owner} builds its own model and does not read {name}={value}; leave {name} unset.")


@lru_cache(maxsize=1)
def _dataset(name: str, data_dir: Path, cache_dir: Path) -> Dataset:
    # The runs of a suite share a data set; a worker process reads it once.
    return load_dataset(name, data_dir=data_dir, cache_dir=cache_dir)


def _to(tensors: Tensors, device: torch.device) -> Tensors:
    return {name: tensor.detach().clone().to(device) for name, tensor in tensors.items()}


def _channels_last(tensors: Tensors) -> Tensors:
    """Convolution kernels in the layout that trains faster on CPUs.

    resnet8 on one thread: 1.20 times at width 1, 1.26 at width 4, medians of tests/bench/bench_channels_last.py.
    """
    layout = torch.channels_last
    return {name: t.contiguous(memory_format=layout) if t.ndim == 4 else t for name, t in tensors.items()}


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise FedbenchError(f"device {name!r} is not a torch device; use for instance cpu or cuda:0.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FedbenchError(f"device {name!r} is not available: torch sees no CUDA device here; use device=cpu.")
    return device
