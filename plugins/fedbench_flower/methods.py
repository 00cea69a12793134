"""A strategy of Flower as a method: ``pip install "fedbench-harness[flower]"``, Flower 1.22 or newer.

For strategies that only aggregate: FedAvgM, FedAdam, FedYogi, FedAdagrad, FedMedian, FedTrimmedAvg, Krum, ... One that
tells clients how to train (FedProx's μ) is refused, since clients train as fedbench's methods say. A run's code does
not cover the version of Flower: repeat runs with ``--rerun`` after an update.

    class FlowerAdam(FlowerMethod[FlowerAdamParams]):
        \"\"\"Adam on the server, by Flower.\"\"\"

        name = "flower-fedadam"
        citation = "Reddi et al., Adaptive Federated Optimization, ICLR 2021; Flower's FedAdam"

        def strategy(self):
            return FedAdam(eta=self.params.eta)
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedbench.core.errors import FedbenchError, MethodFault
from fedbench.core.method.base import Method, P
from fedbench.core.method.hooks import hookimpl
from fedbench.core.method.tasks import AggregationTask
from fedbench.core.types import Tensors

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message

_ROUND = "server-round"
"""What every strategy of Flower tells clients."""
_KINDS = {"float": float, "int": int}
_EMPTY = {"empty dict": dict, "empty list": list}
_RECORD = "record"


class FlowerMethod(Method[P]):
    """A method whose server step is that of a Flower strategy, with its ``Params`` for the strategy's arguments.

    The strategy is made anew for every round; what it keeps (moments, the arrays it sent) is in the server's state, so
    that a run resumes to the bit. Its own fractions and numbers of nodes are without effect: the scenario says who
    takes part. Updates count by samples, or alike where the run's ``weighting`` says so.
    """

    requires = ("whole_model",)

    @abstractmethod
    def strategy(self) -> Any:
        """The strategy, an object of `flwr.serverapp.strategy`, as it is before the first round."""

    @hookimpl
    def aggregate(self, task: AggregationTask) -> Tensors:
        """What the strategy aggregates of the clients' weights."""
        from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

        _speak_for_a_server()
        strategy, fresh = self.strategy(), self.strategy()
        strategy.fraction_train, strategy.min_train_nodes, strategy.min_available_nodes = 1.0, 1, 1
        _restore(strategy, task.state.get(self.name, {}))
        sent = ArrayRecord(_arrays(task.weights))
        nodes = _Nodes([update.client + 1 for update in task.updates])
        messages = list(strategy.configure_train(task.round, sent, ConfigRecord(), nodes))
        self._refuse_configured(messages, sent)
        by_node = {message.metadata.dst_node_id: message for message in messages}
        replies = []
        for update in task.updates:
            counts = update.num_examples if task.spec.training.weighting == "samples" else 1
            content = RecordDict(
                {
                    strategy.arrayrecord_key: ArrayRecord(_arrays(update.weights)),
                    "metrics": MetricRecord({strategy.weighted_by_key: counts}),
                }
            )
            replies.append(Message(content, reply_to=by_node[update.client + 1]))
        arrays, _ = strategy.aggregate_train(task.round, replies)
        if arrays is None:
            raise MethodFault(f"{self.name}: the strategy {type(strategy).__name__} aggregated nothing.")
        task.state[self.name] = _kept(strategy, fresh, self.name)
        return {
            name: torch.from_numpy(np.array(arrays[name].numpy())).to(weight).reshape(weight.shape)
            for name, weight in task.weights.items()
        }

    def _refuse_configured(self, messages: Sequence[Message], sent: ArrayRecord) -> None:
        """FedbenchError for a strategy that sends clients more than the weights."""
        for message in messages:
            records = list(message.content.values())
            further = {key for record in message.content.config_records.values() for key in record} - {_ROUND}
            if further or len(records) != 2 or list(message.content.array_records.values()) != [sent]:
                what = ", ".join(sorted(further)) or "other records than the weights"
                raise FedbenchError(
                    f"{self.name}: the strategy {type(self.strategy()).__name__} tells clients how to train ({what}), "
                    "and fedbench's clients train as its methods say; stack its server step with a method that does "
                    "the client's part, or write it as a method."
                )


def _speak_for_a_server() -> None:
    """Let Flower create messages, which it does in a run of its own alone, and keep its log to warnings."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:  # earlier versions ask for none
        return
    for name in ("run_id", "node_id", "task_id"):
        try:
            getattr(TaskIdentity, name)
        except RuntimeError:
            setattr(TaskIdentity, name, 1)


class _Nodes:
    """What a strategy asks a Flower grid: who is there."""

    def __init__(self, nodes: list[int]) -> None:
        self._nodes = nodes

    def get_node_ids(self) -> list[int]:
        """The round's clients."""
        return self._nodes


def _arrays(weights: Tensors) -> dict[str, Any]:
    from flwr.app import Array

    return {name: Array(weight.detach().cpu().numpy()) for name, weight in weights.items()}


def _kept(strategy: Any, fresh: Any, method: str) -> Tensors:
    """What the strategy has changed of itself, as tensors: ``attribute/kind/key``."""
    from flwr.app import ArrayRecord

    kept: Tensors = {}
    before = vars(fresh)
    for name, value in vars(strategy).items():
        if name in ("fraction_train", "min_train_nodes", "min_available_nodes") or _same(value, before.get(name)):
            continue
        items: Mapping[object, Any]
        if isinstance(value, ArrayRecord):
            kind, items = _RECORD, {key: array.numpy() for key, array in value.items()}
        elif isinstance(value, dict):
            kind, items = "dict", value
        elif isinstance(value, list):
            kind, items = "list", dict(enumerate(value))
        else:
            kind, items = type(value).__name__, {"": value}
        if kind in ("dict", "list") and not items and value != before.get(name):
            kind, items = f"empty {kind}", {"": 0}
        for key, item in items.items():
            if kind == "dict" and not isinstance(key, str):
                raise FedbenchError(
                    f"{method}: the strategy {type(strategy).__name__} keeps {name} from round to round by keys such "
                    f"as {key!r}; only what is kept under texts can be stored with a run."
                )
            if not isinstance(item, np.ndarray | np.generic | int | float) or isinstance(item, bool):
                raise FedbenchError(
                    f"{method}: the strategy {type(strategy).__name__} keeps {name}, of the type "
                    f"{type(item).__name__}, from round to round; only numbers and arrays can be stored with a run."
                )
            kept[f"{name}/{kind}/{key}"] = torch.from_numpy(np.array(item))
    return kept


def _same(value: Any, before: Any) -> bool:
    """Whether an attribute is as the constructor left it; two objects without content of their own count as such."""
    if callable(value):
        return True
    return type(value) is type(before) and isinstance(value, str | int | float | None) and value == before


def _restore(strategy: Any, kept: Tensors) -> None:
    from flwr.app import Array, ArrayRecord

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for label, tensor in kept.items():
        name, kind, key = label.split("/", 2)
        found.setdefault((name, kind), {})[key] = tensor.numpy()
    for (name, kind), items in found.items():
        if kind == _RECORD:
            value: Any = ArrayRecord({key: Array(array) for key, array in items.items()})
        elif kind == "dict":
            value = items
        elif kind == "list":
            value = [items[str(number)] for number in range(len(items))]
        elif kind in _EMPTY:
            value = _EMPTY[kind]()
        elif kind in _KINDS:
            value = _KINDS[kind](items[""])
        else:
            value = items[""][()]  # an array, or a number of numpy's
        setattr(strategy, name, value)
