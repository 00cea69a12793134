"""One exchange of a round: which clients train, which updates arrive, and the server's step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import overload

from fedbench.core.errors import FedbenchError, MethodFault
from fedbench.core.federation import Federation
from fedbench.core.method.answers import require_finite_updates, require_global
from fedbench.core.method.tasks import AggregationTask, ClientTask
from fedbench.core.scenario import LABEL_FLIP
from fedbench.core.types import ClientReport, Tensors, Update
from fedbench.rounds.attacks import attacked
from fedbench.rounds.messages import damaged, reason_to_reject, uploaded
from fedbench.rounds.run import Run, kept_and_sent, shared
from fedbench.rounds.state import ClientState, RunState
from fedbench.scenarios.participation import Schedule, cohort, schedule
from fedbench.toolkit.fedavg import average_buffers


def schedule_of(run: Run, number: int) -> Schedule:
    """The schedule of round ``number``, without clients that have no sample to train on (none with a label, if labels
    are needed).

    If a method has pooled the clients, the scenario's faults do not apply to the pooled ones.
    """
    scenario, clients = run.spec.scenario, len(run.federation.clients)
    if clients != len(run.scored.clients):
        everyone = tuple(cohort(number, clients, scenario.participation, 0.0, run.spec.seed))
        return Schedule(everyone, everyone)
    return schedule(number, clients, scenario, run.spec.seed).among(run.federation.shards.sizes > 0)


def train_clients(
    run: Run, state: RunState, tasks: Sequence[ClientTask], hostile: frozenset[int] = frozenset()
) -> tuple[Sequence[ClientTask], tuple[Update, ...]]:
    """The tasks with which clients began, and what they send; ``hostile`` clients attack.

    Private tensors stay in ``state``. Raises Unworkable if a client diverged, FedbenchError where attackers would train
    in turn with others.
    """
    if not tasks:
        return (), ()
    hooks, first, scenario = run.assembly.hooks, tasks[0], run.spec.scenario
    order = hooks.turns(clients=tuple(task.client for task in tasks), round=first.round, spec=run.spec)
    if order is None:
        updates = run.executor.train(tasks)
        require_finite_updates(tasks, updates)
    elif hostile and scenario.attack != LABEL_FLIP:
        raise FedbenchError(
            f"{run.assembly.answers_first('turns')} lets clients train in turn, each from what the one before it ended "
            f"at: what attack={scenario.attack} sends is not defined there; set attack={LABEL_FLIP} or leave one out."
        )
    else:
        tasks, updates = _in_turn(run, tasks, order)
    return tasks, uploaded(run, tasks, attacked(tasks, keep_private(run, state, updates), hostile, scenario))


def _in_turn(run: Run, tasks: Sequence[ClientTask], order: Sequence[int]) -> tuple[list[ClientTask], list[Update]]:
    """The tasks with which clients began, and their updates, in the order of ``tasks``.

    Each client starts where the one before it in ``order`` ended.
    """
    by_client = {task.client: task for task in tasks}
    if sorted(order) != sorted(by_client):
        raise MethodFault(
            f"{run.assembly.answers_first('turns')} answers the hook turns with {list(order)}; it must be an order of "
            f"the clients {sorted(by_client)}."
        )
    updates: dict[int, Update] = {}
    weights, buffers = Tensors(), Tensors()
    for client in order:
        task = by_client[client]
        task = replace(task, received={**task.received, **weights}, buffers={**task.buffers, **buffers})
        by_client[client] = task
        [update] = run.executor.train([task])
        require_finite_updates([task], [update])
        weights, buffers = shared(update.weights, run.private), shared(update.buffers, run.private)
        updates[client] = update
    run.executor.description = run.executor.told("clients train in turn")
    return [by_client[task.client] for task in tasks], [updates[task.client] for task in tasks]


def keep_private(run: Run, state: RunState, updates: Sequence[Update]) -> tuple[Update, ...]:
    """The updates without private tensors, which stay with the clients in ``state``."""
    if not run.private:
        return tuple(updates)
    leaving = []
    for update in updates:
        state.own[update.client], sent = kept_and_sent(update, run.private)
        leaving.append(sent)
    return tuple(leaving)


def undo_lost(run: Run, state: RunState, before: Mapping[int, ClientState], updates: Sequence[Update]) -> None:
    """Restore the clients' state from ``before`` an exchange, unless the server accepted one of the ``updates``.

    The clients' state thus matches the server's. State of methods with ``keeps_lost_training`` stays as trained.
    """
    stays = run.assembly.keeps_lost_training
    for client in before.keys() - {update.client for update in updates}:
        trained, earlier = state.kept_by(client), before[client]
        state.clients[client] = earlier.methods | {name: t for name, t in trained.methods.items() if name in stays}
        if stays.issuperset(run.assembly.answers("private")):
            continue
        state.own.pop(client, None)
        if earlier.own is not None:
            state.own[client] = earlier.own


def accepted(
    run: Run, tasks: Mapping[int, ClientTask], arrived: Sequence[Update], corrupt: Collection[int]
) -> tuple[Update, ...]:
    """The updates among ``arrived`` that the server can use; those of ``corrupt`` clients are damaged first.

    Undamaged updates have already passed `require_update` and `require_finite_updates`, which check the same.
    """
    usable = []
    for update in arrived:
        if update.client in corrupt:
            task = tasks[update.client]
            update = damaged(update, run.spec.seed, task.round, task.exchange)
            if reason_to_reject(update, shared(task.received, run.private), shared(task.buffers, run.private)):
                continue
        usable.append(update)
    return tuple(usable)


def mean_metrics(reported: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """The mean ``train_loss`` of updates, and the means of all their other metrics, by name.

    A mean is over the updates that have the metric, each counted once whatever its number of samples. Metrics that no
    update has are left out.
    """
    values: dict[str, list[float]] = {}
    for metrics in reported:
        for name, value in metrics.items():
            values.setdefault(name, []).append(float(value))
    means = {name: sum(own) / len(own) for name, own in values.items()}
    loss = {name: means.pop(name) for name in ("train_loss",) if name in means}
    return loss, means


def aggregated_state(
    run: Run, state: RunState, updates: tuple[Update, ...], exchange: int, exchanges: int
) -> tuple[RunState, dict[str, float]]:
    """The state after the server's step on ``updates``, and the method's metrics of that step."""
    task = AggregationTask(
        round=state.round + 1,
        weights=shared(state.weights, run.private),
        buffers=shared(state.buffers, run.private),
        updates=updates,
        model=run.model,
        spec=run.spec,
        state=state.server,
        exchange=exchange,
        exchanges=exchanges,
        num_clients=len(run.federation.clients),
        server_data=run.server,
    )
    answer = run.assembly.hooks.aggregate(task=task)
    averaged = average_buffers(updates, run.spec.training.weighting, task.buffers)
    weights, buffers = require_global(task, answer, averaged, run.assembly.answers_first("aggregate"))
    if run.private:
        weights, buffers = {**state.weights, **weights}, {**state.buffers, **buffers}
    return replace(state, weights=weights, buffers=buffers), task.metrics


class Reports(Sequence[ClientReport]):
    """One report a client, in the order of the federation; without class counts where labels are hidden."""

    def __init__(self, federation: Federation) -> None:
        # not the federation itself, whose test labels are no method's
        self._sizes = federation.shards.sizes
        self._counts = federation.class_table if federation.labels_visible else None

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, position: int) -> ClientReport: ...
    @overload
    def __getitem__(self, position: slice) -> tuple[ClientReport, ...]: ...
    def __getitem__(self, position: int | slice) -> ClientReport | tuple[ClientReport, ...]:
        if isinstance(position, slice):
            return tuple(self[one] for one in range(*position.indices(len(self))))
        at = range(len(self))[position]
        counts = None if self._counts is None else self._counts.rows(at, at + 1)[0]
        return ClientReport(at, int(self._sizes[at]), counts)
