"""The whole job of one cell of a suite: a run from its description to its result."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, cast

from fedbench.finetuning import finetuned_metrics
from fedbench.metrics import summarise
from fedbench.prepare import Settings, prepare
from fedbench.rounds import rounds
from fedbench.spec import RunSpec
from fedbench.tasks import RoundRecord, RunResult
from fedbench.types import Tensors


def run_spec(spec: RunSpec, settings: Settings, listeners: Sequence[object] = ()) -> RunResult:
    """Run ``spec`` from beginning to end, notifying listeners; the whole job of one cell of a suite."""
    steps = run_rounds(spec, settings, listeners)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(RunResult, end.value)


def run_rounds(
    spec: RunSpec, settings: Settings, listeners: Sequence[object] = ()
) -> Generator[RoundRecord, None, RunResult]:
    """`run_spec` a round at a time, so that several runs can go on side by side (the seeds of a tuning trial)."""
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
            yield record
        finetuned = finetuned_metrics(run, state) if spec.training.finetune_epochs and state.weights else {}
    except Exception as error:
        error.add_note(f"{spec.title}, round {len(records)}, seed {spec.seed}, run {spec.run_id}")
        raise
    assert predictions is not None  # the last round is always evaluated
    evaluating = set(run.assembly.owners["evaluate"].split(", "))
    result = RunResult(
        records=tuple(records),
        summary=_summary(records) | finetuned,
        predictions=() if predictions.labels is None else tuple(predictions.labels.tolist()),
        weights=_arrays(state.weights),
        seconds=time.perf_counter() - started,
        buffers=_arrays(state.buffers),
        server=_kept(state.server, evaluating),
        own={client: _arrays(tensors) for client, tensors in state.own.items()},
        executor=records[-1].executor,
        clients={client: kept for client, held in state.clients.items() if (kept := _kept(held, evaluating))},
    )
    hooks.run_finished(spec=spec, info=run.info, result=result)
    return result


def _kept(states: Mapping[str, Tensors], methods: Collection[str]) -> dict[str, dict[str, Any]]:
    """Of the tensors by method those of ``methods``: what others keep, evaluating their model does not need."""
    return {method: _arrays(tensors) for method, tensors in states.items() if method in methods}


def _arrays(tensors: Tensors) -> dict[str, Any]:
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def _summary(records: Sequence[RoundRecord]) -> dict[str, float]:
    summary = summarise({r.round: r.metrics for r in records if r.round == 0 or set(r.metrics) - {"train_loss"}})
    summary["bytes_up"] = float(sum(r.bytes_up for r in records))
    summary["bytes_down"] = float(sum(r.bytes_down for r in records))
    summary["train_seconds"] = sum(r.seconds for r in records)
    return summary
