"""The whole job of one cell of a suite: a run from its description to its result."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from fedbench.core.records import RoundRecord, RunResult
from fedbench.core.spec import RunSpec
from fedbench.core.types import Tensors
from fedbench.rounds.clients import of_methods, to_read
from fedbench.rounds.finetuning import finetuned_metrics
from fedbench.rounds.loop import last_round, rounds
from fedbench.rounds.metrics import summarise
from fedbench.runs.checkpoint import Checkpoint, Checkpoints
from fedbench.runs.prepare import NOTHING, Loaded, Settings, prepare


def run_spec(
    spec: RunSpec, settings: Settings, listeners: Sequence[object] = (), loaded: Loaded = NOTHING
) -> RunResult:
    """Run ``spec`` from beginning to end, notifying listeners; the whole job of one cell of a suite."""
    steps = run_rounds(spec, settings, listeners, loaded)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(RunResult, end.value)


def run_rounds(
    spec: RunSpec, settings: Settings, listeners: Sequence[object] = (), loaded: Loaded = NOTHING
) -> Generator[RoundRecord, None, RunResult]:
    """`run_spec` a round at a time, so that several runs can go on side by side (the seeds of a tuning trial).

    Where ``settings`` keep checkpoints, a run goes on from its own newest: listeners hear of the rounds before it once
    more, and the result is that of a run that never stopped, bit for bit.
    """
    started = time.perf_counter()
    run = prepare(spec, settings, listeners=listeners, dataset=loaded.dataset, backbone=loaded.backbone)
    hooks = run.assembly.notifications
    warnings: list[str] = []
    checkpoints = checkpoints_of(spec, run.info.data_hash, run.info.weights_hash, settings)
    saved = checkpoints.latest(spec.device, warnings.append)
    began_at = 0 if saved is None else saved.state.round
    hooks.run_started(spec=spec, info=replace(run.info, resumed_round=began_at))

    def warn(text: str) -> None:
        hooks.run_warned(spec=spec, warning=text)

    for text in warnings:
        warn(text)
    records: list[RoundRecord] = []
    labels: Tensor | None = None
    if saved is None:
        state = checkpoints.begin(run.initial_state(), spec.device)
    else:
        state, labels = saved.state, saved.predictions
        started -= saved.seconds
        run.executor.recall(saved.executor)
        for record in saved.records:
            records.append(record)
            hooks.round_finished(spec=spec, record=record)
    last = last_round(run)
    try:
        for after, record, predicted in rounds(run, state):
            state = after
            labels = labels if predicted is None else predicted.labels
            records.append(record)
            hooks.round_finished(spec=spec, record=record)
            yield record
            seconds = time.perf_counter() - started
            if checkpoints.are_due(state.round, seconds, is_last=state.round == last):
                checkpoints.save(Checkpoint(state, tuple(records), labels, run.executor.known(), seconds), warn=warn)
        finetuned = finetuned_metrics(run, state) if spec.training.finetune_epochs and state.weights else {}
    except BaseException as error:  # a method may raise SystemExit as well
        with suppress(TypeError):  # of a method whose errors have notes of another kind
            BaseException.add_note(error, f"{spec.title}, round {len(records)}, seed {spec.seed}, run {spec.run_id}")
        raise
    evaluating = set(run.assembly.answers("evaluate"))
    result = RunResult(
        records=tuple(records),
        summary=_summary(records) | finetuned,
        predictions=() if labels is None else tuple(labels.tolist()),
        weights=_arrays(state.weights),
        seconds=time.perf_counter() - started,
        buffers=_arrays(state.buffers),
        server=_kept(state.server, evaluating),
        own={client: _arrays(tensors) for client, tensors in to_read(state.own).items()},
        executor=next((record.executor for record in reversed(records) if record.executor), ""),
        clients={client: _kept(held, evaluating) for client, held in of_methods(state.clients, evaluating)},
        labels=() if labels is None else tuple(run.scored.test.labels.tolist()),
    )
    hooks.run_finished(spec=spec, info=run.info, result=result)
    return result


def checkpoints_of(spec: RunSpec, data_hash: str, weights_hash: str, settings: Settings) -> Checkpoints:
    """The run's checkpoints; it goes on from those of the same code, data, weights and executor alone."""
    code = "" if settings.checkpoints is None else settings.checkpoints.codes[spec.run_id]
    return Checkpoints(settings.checkpoints, spec.run_id, [code, data_hash, weights_hash, settings.executor])


def _kept(states: Mapping[str, Tensors], methods: Collection[str]) -> dict[str, dict[str, Any]]:
    """The tensors of ``methods`` alone: evaluating a model does not need what others keep."""
    return {method: _arrays(tensors) for method, tensors in states.items() if method in methods}


def _arrays(tensors: Tensors) -> dict[str, Any]:
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def _summary(records: Sequence[RoundRecord]) -> dict[str, float]:
    summary = summarise({r.round: r.metrics for r in records if r.round == 0 or set(r.metrics) - {"train_loss"}})
    summary["bytes_up"] = float(sum(r.bytes_up for r in records))
    summary["bytes_down"] = float(sum(r.bytes_down for r in records))
    summary["train_seconds"] = sum(r.seconds for r in records)
    for name in dict.fromkeys(name for r in records for name in r.faults):
        summary[name] = float(sum(r.faults.get(name, 0) for r in records))
    return summary
