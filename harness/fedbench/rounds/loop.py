"""The one federated loop: rounds of broadcast, local training, aggregation and evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fedbench.core.errors import MethodFault
from fedbench.core.method.answers import require, require_predictions, require_scores, require_tensors
from fedbench.core.method.tasks import ClientTask, EvaluationTask, ReportedTask, StartTask
from fedbench.core.randomness import global_generators
from fedbench.core.records import FAULT_COUNTS, RoundRecord
from fedbench.core.types import InputSource, Predictions, Update
from fedbench.kinds.kinds import MetricTask
from fedbench.rounds.clients import settle, to_read
from fedbench.rounds.exchange import (
    Reports,
    accepted,
    aggregated_state,
    mean_metrics,
    schedule_of,
    train_clients,
    undo_lost,
)
from fedbench.rounds.executors.sequential import joined
from fedbench.rounds.measures import measured, measures_of
from fedbench.rounds.messages import (
    broadcast,
    broadcasts,
    channels_last,
    client_task,
    received_bytes,
    relabelled,
    sent_bytes,
)
from fedbench.rounds.metrics import size_in_bytes, unseen_metrics, validation_accuracy
from fedbench.rounds.run import Run, in_its_precision, shared
from fedbench.rounds.state import RunState


@in_its_precision
def train_round(run: Run, state: RunState) -> tuple[RunState, RoundRecord]:
    """Run one round: the cohort trains from ``state``, the server aggregates. The record has no metrics yet."""
    with global_generators(run.spec.seed, "global", state.round + 1):
        after, record = _trained_round(run, state)
    settle(after, record.bytes_up)
    return after, record


def _trained_round(run: Run, state: RunState) -> tuple[RunState, RoundRecord]:
    spec, number = run.spec, state.round + 1
    run = run.in_round(number)
    started = time.perf_counter()
    who = schedule_of(run, number)
    up, down = survey(run, state, number, who.chosen, who.training)
    reports: list[tuple[int, Mapping[str, float]]] = []
    rejected = 0
    of_server: dict[str, float] = {}
    measured_of: tuple[dict[int, ClientTask], tuple[Update, ...]] = ({}, ())
    exchanges = run.assembly.hooks.exchanges(round=number, spec=spec, state=state.server)
    if not isinstance(exchanges, int) or exchanges < 1:
        raise MethodFault(
            f"{run.assembly.answers_first('exchanges')} answers the hook exchanges with {exchanges!r}; it must "
            "be a whole number above 0."
        )
    for exchange in range(exchanges):
        sent = broadcasts(run, state, who.chosen, exchange)
        down += sum(sent_bytes(run, state, b) for b in sent.values())
        tasks = [
            client_task(run, state, number, exchange, client, sent[client], who.work.get(client, 1.0))
            for client in who.training
        ]
        tasks = relabelled(run, tasks)
        before = {client: state.kept_by(client) for client in who.late | who.corrupt}
        began, sent_up = train_clients(run, state, tasks, who.hostile)
        arrived = [u for u in sent_up if u.client not in who.late]
        up += sum(received_bytes(run, update) for update in arrived)
        updates = accepted(run, {task.client: task for task in began}, arrived, who.corrupt)
        undo_lost(run, state, before, updates)
        rejected += len(arrived) - len(updates)
        if not updates:
            continue
        reports += [(u.client, u.metrics) for u in updates]
        state, of_server = aggregated_state(run, state, updates, exchange, exchanges)
        measured_of = {task.client: task for task in began}, updates
    counts = (len(who.chosen) - len(who.training), len(who.late), len(who.work), rejected)
    loss, further = mean_metrics([metrics for _, metrics in reports])
    state, seconds = replace(state, round=number), time.perf_counter() - started
    record = RoundRecord(
        round=number,
        cohort=tuple(sorted({client for client, _ in reports})),
        metrics=loss,
        method_metrics={**further, **of_server},
        bytes_up=up,
        bytes_down=down,
        seconds=seconds,
        executor=run.executor.description if who.training else "",
        faults=dict(zip(FAULT_COUNTS, counts, strict=True)) if spec.scenario.has_faults else {},
        measured=measures_of(run, state, *measured_of),
    )
    return state, record


@in_its_precision
def start(run: Run, state: RunState) -> int:
    """Let methods fill the server's state from what clients report; returns the bytes that clients send for it."""
    federation = run.federation
    task = StartTask(Reports(federation), run.model, run.spec, state.server)
    answers = run.assembly.hooks.start(task=task)
    for answer in answers:
        require_tensors(answer, run.spec.method, "start")
    return size_in_bytes(*answers)


@in_its_precision
def survey(run: Run, state: RunState, number: int, requested: Sequence[int], chosen: Sequence[int]) -> tuple[int, int]:
    """Let clients report without training before round ``number``; returns the bytes sent up and down for it.

    ``requested`` are the round's clients, who receive the model anyway. ``chosen`` are those of them who answer: a
    client that drops out of the round does not report either. Reports are small and sent before training, so they
    arrive undamaged, also from clients whose updates will not.
    """
    run = run.in_round(number)
    who = run.assembly.hooks.survey(round=number, spec=run.spec, state=state.server)
    if who == "nobody":
        return 0, 0
    if who == "cohort" and not requested:
        return 0, 0  # after the last round no cohort is about to train
    if who not in ("cohort", "everyone"):
        raise MethodFault(
            f"{run.assembly.answers_first('survey')} answers the hook survey with {who!r}; it must be "
            "nobody, cohort or everyone."
        )
    silent = set(requested) - set(chosen)
    sizes = run.federation.shards.sizes.tolist()
    everyone = [client for client, size in enumerate(sizes) if size and client not in silent]
    reports, up, down = {}, 0, 0
    for client in chosen if who == "cohort" else everyone:
        sent = broadcast(run, state, client)
        task = client_task(run, state, number, 0, client, sent)
        task = replace(task, inputs=task.inputs.resident())
        reports[client] = joined(task.hooks.report(task=task), run.spec.method, "report")
        up += size_in_bytes(reports[client])
        down += 0 if client in requested else sent_bytes(run, state, sent)
        del task
        settle(state)
    if not reports:
        return 0, 0  # all clients drop out: the server has received nothing
    run.assembly.hooks.reported(
        task=ReportedTask(
            round=number,
            cohort=tuple(chosen),
            reports=reports,
            weights=shared(state.weights, run.private),
            buffers=shared(state.buffers, run.private),
            model=run.model,
            spec=run.spec,
            state=state.server,
        )
    )
    return up, down


def evaluation_task(run: Run, state: RunState, inputs: InputSource) -> EvaluationTask:
    """The task of the hook `evaluate`: predict ``inputs`` by the run's model after ``state.round`` rounds."""
    return EvaluationTask(
        model=run.model,
        weights=channels_last(state.weights),
        buffers=state.buffers,
        inputs=inputs,
        num_classes=run.federation.num_classes,
        state=state.server,
        client_state=to_read(state.clients),
        own=to_read(state.own),
        private=run.private,
    )


@in_its_precision
def predict(
    run: Run, state: RunState, inputs: InputSource, client: int | None = None, clients: tuple[int, ...] = ()
) -> Predictions:
    """The predictions for ``inputs`` of the run's model after ``state.round`` rounds, or of ``client``'s fine-tuned
    model.

    Methods that give each client a model of its own also answer with those of ``clients``.
    """
    task = replace(evaluation_task(run, state, inputs), client=client, clients=clients)
    return require_predictions(task, run.assembly.hooks.evaluate(task=task), run.assembly.answers_first("evaluate"))


@in_its_precision
def evaluate(run: Run, state: RunState) -> tuple[dict[str, float], Predictions]:
    """All metrics after ``state.round`` rounds, including those of clients' own models when due, and the
    predictions."""
    with global_generators(run.spec.seed, "global evaluation", state.round):
        return _evaluated(run, state)


def _evaluated(run: Run, state: RunState) -> tuple[dict[str, float], Predictions]:
    run = run.in_round(state.round)
    is_last = state.round >= last_round(run)
    with_own = is_last or _own_are_due(run, state.round)
    predictions = predict(run, state, run.test, clients=tuple(run.scored.shards.ids.tolist()) if with_own else ())
    metrics = measured(run.metrics, MetricTask(predictions, run.scored), is_last=is_last)
    if run.validation is not None and run.federation.validation is not None:
        seen = predict(run, state, run.validation).labels
        if seen is not None:
            metrics["validation_accuracy"] = validation_accuracy(seen, run.federation.validation)
    if run.scored.unseen is not None:
        new = predict_unseen(run, state)
        if new is not None and new.labels is not None:
            metrics |= unseen_metrics(new.labels, run.scored.unseen, metrics.get("global_accuracy"), new.scores)
    # scores are large, and done with
    return metrics, replace(predictions, scores=None)


def _own_are_due(run: Run, number: int) -> bool:
    """Whether clients' own models are evaluated after round ``number`` although it isn't the last.

    Before training no client has a model of its own.
    """
    every = run.spec.training.own_every
    return number > 0 and every > 0 and number % every == 0


def predict_unseen(run: Run, state: RunState) -> Predictions | None:
    """The trained tensors' predictions for the test samples of the unseen classes, among these classes by their names.

    None for a model that cannot name them, or a method without a global model. MethodFault for answers that are none of
    these classes.
    """
    if run.unseen is None or run.scored.unseen is None:
        return None
    task = evaluation_task(run, state, run.unseen.inputs)
    task = replace(task, model=run.unseen.model, num_classes=run.scored.unseen.num_classes, is_unseen=True)
    answer = run.unseen.hooks.evaluate(task=task)
    require(answer, Predictions, "Predictions", run.assembly.answers_first("evaluate"), "evaluate")
    labels, scores = answer.labels, answer.scores
    require(labels, (Tensor, type(None)), "a tensor of classes", run.assembly.answers_first("evaluate"), "evaluate")
    require_scores(scores, task, run.assembly.answers_first("evaluate"))
    if labels is not None and not (
        labels.shape == (len(task.inputs),) and bool(((labels >= 0) & (labels < task.num_classes)).all())
    ):
        raise MethodFault(
            f"{run.assembly.answers_first('evaluate')} answers the hook evaluate for {task.num_classes} unseen "
            "classes with labels that are not one of them for each sample; where what it answers by is of the classes "
            "trained on, return Predictions(None) for task.is_unseen."
        )
    return Predictions(labels, scores=scores).on_cpu()


def last_round(run: Run) -> int:
    """The last round's number; 0 for a model without weights, which has nothing to train."""
    return run.spec.training.rounds if run.model.weights else 0


def rounds(
    run: Run, state: RunState, until: int | None = None
) -> Iterator[tuple[RunState, RoundRecord, Predictions | None]]:
    """The rounds after ``state``, up to ``until`` (all by default). Each is evaluated when due, and then has
    predictions.

    From the initial state, round 0 comes first: the model before training. A model without weights (zero-shot) has
    nothing to train, so round 0 is all of it.
    """
    last = last_round(run)
    if state.round == 0:
        with global_generators(run.spec.seed, "global", 0):
            sent = start(run, state)
            up, down = survey(run, state, run.spec.training.rounds + 1, (), ()) if last == 0 else (0, 0)
        metrics, predictions = evaluate(run, state)
        yield state, RoundRecord(0, (), metrics, sent + up, down, 0.0), predictions
    while state.round < min(last, last if until is None else until):
        state, record = train_round(run, state)
        latest = None
        if state.round == last:
            began = time.perf_counter()
            with global_generators(run.spec.seed, "global", last + 1):
                up, down = survey(run, state, last + 1, (), ())
            record = replace(
                record,
                bytes_up=record.bytes_up + up,
                bytes_down=record.bytes_down + down,
                seconds=record.seconds + time.perf_counter() - began,
            )
        if state.round % run.spec.training.eval_every == 0 or state.round == last:
            metrics, latest = evaluate(run, state)
            record = replace(record, metrics={**record.metrics, **metrics})
        yield state, record, latest
