"""Read this first: the hooks of fedbench are the steps of a federated run, in the order in which they happen.

A method is a plugin that answers some of them; `fedbench.toolkit.fedavg.FedAvg` answers all the rest. "First result"
hooks take the first answer that is not None, methods before the defaults; "collected" hooks gather every answer. Those
in `WRAPPABLE` a method may also wrap: what the rest of its stack answers it then calls, and changes. Their arguments
are described in `fedbench.core.method.tasks`; tensors of these are not to be changed in place. What listeners are
notified of is in `fedbench.core.method.notifications`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import pluggy

from fedbench.core.federation import Federation
from fedbench.core.method.notifications import PROJECT, NotificationSpecs
from fedbench.core.method.tasks import (
    AggregationTask,
    BroadcastTask,
    ClientTask,
    EvaluationTask,
    Hooks,
    LabelTask,
    LocalStep,
    MeasureTask,
    ModelSetup,
    ReportedTask,
    StartTask,
)
from fedbench.core.spec import RunSpec
from fedbench.core.types import Broadcast, GlobalModel, Model, Predictions, StepGradients, Tensors, Update

if TYPE_CHECKING:
    from torch import Tensor

_F = TypeVar("_F", bound=Callable[..., Any])
_spec = pluggy.HookspecMarker(PROJECT)
_impl = pluggy.HookimplMarker(PROJECT)


def hookimpl(function: _F) -> _F:
    """Mark a plugin's method as the answer to the hook of the same name."""
    return _impl(function)


def default_hookimpl(function: _F) -> _F:
    """Mark one of the harness's own answers, which is called after every method that answers the same hook."""
    return _impl(function, trylast=True)


def wrapper(function: _F) -> _F:
    """Mark a plugin's method as one around the answer to the hook of the same name, one of `WRAPPABLE`.

    It has one more argument, ``rest``: ``rest(task)`` is what the rest of the stack answers, for the task that was
    handed or for another one, made of it by ``dataclasses.replace``.
    """
    function.fedbench_wrapper = True  # type: ignore[attr-defined]
    return function


WRAPPABLE = ("build_model", "broadcast", "local_train", "local_objective", "local_gradients", "aggregate", "evaluate")
"""The hooks whose answer a method may wrap."""


class HookSpecs:
    """The hooks, in the order in which a run calls them."""

    @_spec(firstresult=True)
    def federate(self, federation: Federation, spec: RunSpec) -> Federation | None:
        """First result: the federation the method runs on, before the first round.

        It may deal the training samples to other clients, and change nothing else. Labels of test, validation and
        server samples are withheld, and of training samples where the scenario hides them.

        Default: the scenario's. Answered for example by `clip-linear-centralized`, which pools all clients into one.
        """

    @_spec(firstresult=True)
    def build_model(self, setup: ModelSetup) -> Model | None:
        """First result: what is trained and sent, around the backbone. Called once on a plugin object.

        Where a scenario has unseen classes, another object of the plugin builds the model of their names. It is
        tested with the trained tensors if all have the names and shapes of those here, for any number of classes.

        Default: a text-initialised linear head on frozen CLIP features, or the whole network. Answered for example by
        `fedclip` (an adapter), `clip-zs` (nothing to train).
        """

    @_spec(firstresult=True)
    def label(self, task: LabelTask) -> Tensor | None:
        """First result: labels for clients whose own are hidden, (n,) int64, -1 for samples to leave out. Called once.

        All methods of the run then see these as if they were the clients' labels; nobody sees the hidden ones. Labels
        that a client has of its own stay. A method that answers declares ``provides = ("labels",)``. Default: none.
        Answered by `pseudo-labels`.
        """

    @_spec(firstresult=True)
    def relabel(self, task: ClientTask) -> Tensor | None:
        """First result: other labels for this round, (m,) int64, -1 to leave one out; asked before a client trains.

        ``task`` has the m samples of the client that `label` gave a label, no others. The next round begins with the
        labels of `label` again. Default: none. Answered by `pseudo-labels`.
        """

    @_spec
    def start(self, task: StartTask) -> Tensors | None:
        """Collected: fill the server's state from what clients report, once, before round 1; returns what they sent.

        The bytes of the answer (label histograms, say) count as sent up in round 0. Default: nothing. Answered for
        example by `capt` (the clients' class shares) and `creff` (federated features).
        """

    @_spec
    def private(self, model: Model, spec: RunSpec) -> Collection[str] | None:
        """Collected: names of weights and running statistics that never leave a client.

        The harness keeps them with each client, trains them with the rest and leaves them out of what is sent, counted
        and averaged. All of ``model.own`` has to be among them: a run refuses a model of clients' own that is sent.
        Default: none. Answered for example by `fedbn` (batch-norm layers), `fedloge` (a head of each client's own).
        """

    @_spec(firstresult=True)
    def survey(
        self, round: int, spec: RunSpec, state: Mapping[str, Tensors]
    ) -> Literal["nobody", "cohort", "everyone"] | None:
        """First result: which clients answer `report` before round ``round`` trains; rounds + 1 is after the last.

        Default: nobody. Answered for example by `ccvr` (everyone, at the end), `rucr` (the cohort, before every round).
        """

    @_spec
    def report(self, task: ClientTask) -> Tensors | None:
        """Collected: what a client that is surveyed tells the server about its data, without training.

        ``task`` is that of a round, with the model the server sends. The answer counts as sent up; so does the model as
        sent down, to clients that are not about to receive it for training. Default: nothing. Answered for example by
        `ccvr`.
        """

    @_spec
    def reported(self, task: ReportedTask) -> None:
        """Notification: the reports of a survey are in; the server writes what it makes of them in ``task.state``."""

    @_spec(firstresult=True)
    def exchanges(self, round: int, spec: RunSpec, state: Mapping[str, Tensors]) -> int | None:
        """First result: how often the cohort trains and the server aggregates within a round.

        Default: once. Answered for example by `fedpurel` (an exchange for each of its two stages).
        """

    @_spec(firstresult=True)
    def turns(self, clients: tuple[int, ...], round: int, spec: RunSpec) -> Sequence[int] | None:
        """First result: the order in which ``clients`` train one after another, all of them once.

        The first trains from what the server sends, each other one from the shared weights and running statistics that
        the one before it ended at. The server gets the update of each. Default: None, all train from what the server
        sends. Answered by `in-turn` and `capt`.
        """

    @_spec(firstresult=True)
    def broadcast(self, task: BroadcastTask) -> Broadcast | None:
        """First result: what the server sends to one client. Must not change the task's tensors.

        Default: the global weights. Answered for example by `capt` (the model that goes on) and `creff` (also the
        re-trained head).
        """

    @_spec(firstresult=True)
    def local_train(self, task: ClientTask) -> Update | None:
        """First result: one client's update for the round.

        Default: epochs of minibatch steps over `local_loss` + `loss_terms`. No method of this package needs to answer
        it to change a loss, or to send something besides (`after_training`).
        """

    @_spec(firstresult=True)
    def local_gradients(self, step: LocalStep) -> StepGradients | None:
        """First result: what the optimiser is given in a local step.

        Default: the gradients of `local_objective`, by `fedbench.toolkit.local_training.loss_gradients`. Wrapped by
        methods that look at the gradients (`prograd`) or take them elsewhere (`fedsam`); clients then train one after
        another. Answered by no method of this package.
        """

    @_spec(firstresult=True)
    def local_objective(self, step: LocalStep) -> Tensor | None:
        """First result: the whole loss of a batch, a scalar with a gradient.

        Default: `local_loss` and all `loss_terms`, added. Wrapped by methods that take it at other weights (`ditto`),
        or leave some of them out (`fedrep`). Answered by no method of this package.
        """

    @_spec(firstresult=True)
    def local_loss(self, step: LocalStep) -> Tensor | None:
        """First result: the base loss of a batch, a scalar with a gradient. Default: cross-entropy. Answered
        for example by `fedclip`.
        """

    @_spec
    def loss_terms(self, step: LocalStep) -> Tensor | None:
        """Collected and added to the base loss: a scalar with a gradient, or None in a step without a term.

        Default: none. Answered for example by `fedprox`, `moon`, `fedntd`.
        """

    @_spec
    def after_training(self, task: ClientTask, update: Update) -> Tensors | None:
        """Collected: what a client sends up beside its weights; also the place to keep state for its next round.

        Whether the update arrives is not known yet. If it does not, that state is undone; see
        `fedbench.core.method.base.Method.keeps_lost_training`.
        Default: nothing. Answered for example by `creff` (class gradients), `moon` (keeps its weights, sends nothing).
        """

    @_spec(firstresult=True)
    def upload(self, task: ClientTask, update: Update) -> Update | None:
        """First result: what arrives of a client's update, and the bytes of its message (`Update.encoded`).

        ``update`` is without private tensors. Its weights may be others; all else stays. What a client keeps for its
        next round goes into ``task.state``. Default: the update as it is. Answered for example by `int8`, `topk`.
        """

    @_spec(firstresult=True)
    def aggregate(self, task: AggregationTask) -> Tensors | GlobalModel | None:
        """First result: the server's next weights. Running statistics are averaged by the harness, for every method,
        unless the answer is a `GlobalModel`, which has its own.

        Default: the mean of the clients' weights, weighted by `num_examples`. Answered for example by `creff` (which
        also re-trains a head), `capt` (inside clusters), `fst-cbdg` (unweighted).
        """

    @_spec(firstresult=True)
    def evaluate(self, task: EvaluationTask) -> Predictions | None:
        """First result: predicted classes; the harness scores them, so that every method is measured alike.

        Default: the largest logit of the global model and, where tensors are private, of each client's own. Answered
        for example by `creff` (with the re-trained head); a method with a model of each client's own adds the
        predictions of those in ``task.clients``. ``task.client`` says whose own model it is where a client was
        fine-tuned after the last round.
        With ``task.is_unseen`` the classes are those of ``task.model``, not those trained on: a method that answers by
        what it has kept of each class gives ``Predictions(None)``.
        """

    @_spec
    def measure(self, task: MeasureTask) -> Mapping[str, float | Tensor] | None:
        """Collected: what is to be known of a round beside accuracy; asked after a round that is evaluated.

        Numbers by name, or tensors (C,) with a number for every class, NaN where there is none: of those the mean is
        recorded, and the mean over each reporting group. What is measured changes nothing, and its time does not count
        as the round's. Default: nothing. Answered for example by `cka` and `drift`,
        which any stack may name.
        """


STEPS = tuple(name for name in vars(HookSpecs) if not name.startswith("_"))


def plugin_manager() -> pluggy.PluginManager:
    """A new manager that knows hooks and notifications; one per run, so that runs in one process keep apart."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    manager.add_hookspecs(NotificationSpecs)
    return manager


def relay(manager: pluggy.PluginManager) -> Hooks:
    """The manager's hooks with the types of `Hooks`."""
    return cast(Hooks, manager.hook)
