"""Post-hoc personalisation of any method: after the last round every client trains on alone, and is tested."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from fedbench.core.errors import FedbenchError
from fedbench.core.randomness import global_generators
from fedbench.core.types import Broadcast, Predictions
from fedbench.plugins.assembly import assemble
from fedbench.rounds.clients import settle
from fedbench.rounds.loop import predict
from fedbench.rounds.messages import broadcast, client_task
from fedbench.rounds.metrics import HELDOUT, own_accuracies
from fedbench.rounds.run import Run, in_its_precision, shared
from fedbench.rounds.state import RunState
from fedbench.toolkit.fedavg import FedAvg
from fedbench.toolkit.local_training import local_sgd


@in_its_precision
def finetuned_metrics(run: Run, state: RunState) -> dict[str, float]:
    """Mean and worst client accuracy after each client fine-tuned the model for ``finetune_epochs``; nothing is kept.

    A client with a test split of its own is scored on it, others by their class shares of the global test set.
    """
    budget = {"local_epochs": run.spec.training.finetune_epochs, "local_steps": None}
    alone = run.spec.training.model_copy(update=budget)
    run = replace(run.in_round(state.round), spec=run.spec.model_copy(update={"training": alone}))
    by_client = {}
    for client in range(len(run.federation.clients)):
        if not len(run.federation.clients[client].indices):
            # without a label there is nothing to train on
            answer = predict(run, state, run.test, client).labels
            if answer is not None:
                by_client[client] = answer
            continue
        # hooks may write state; what they write here is thrown away
        own = {client: copy.deepcopy(state.clients.get(client, {}))}
        scratch = replace(state, server=copy.deepcopy(state.server), clients=own)
        task = client_task(run, scratch, state.round + 1, 0, client, broadcast(run, scratch, client))
        with global_generators(run.spec.seed, "global finetuning", client):
            [update] = run.executor.train([task])
        tuned = replace(scratch, weights=update.weights, buffers=update.buffers)
        predicted = predict(run, tuned, run.test, client).labels
        if predicted is None:
            raise FedbenchError(f"{run.spec.method} has no model to fine-tune; set finetune_epochs to 0.")
        by_client[client] = predicted
        settle(state)
    return _over(own_accuracies(Predictions(None, by_client), run.scored), "") | _of_new_clients(run, state)


def _of_new_clients(run: Run, state: RunState) -> dict[str, float]:
    """Accuracies of clients that never took part, fine-tuned from the global model by SGD on the cross-entropy, as
    FedAvg.

    No method keeps anything for them. Empty if there are none, if clients have no labels, and for a method without a
    global model.
    """
    if not run.scored.new_clients or not run.scored.labels_visible or predict(run, state, run.test).labels is None:
        return {}
    # the labels that the scenario's clients have may be wrong or few; those of new ones are their own
    federation = run.scored.of_new_clients
    plain = replace(run, federation=federation, scored=federation, assembly=assemble(FedAvg.name, {}), given=None)
    by_client = {}
    for position, identity in enumerate(federation.shards.ids.tolist()):
        scratch = replace(state, server={}, clients={}, own={})
        task = client_task(plain, scratch, state.round + 1, 0, position, Broadcast(shared(state.weights, run.private)))
        with global_generators(run.spec.seed, "global finetuning of new clients", position):
            update = local_sgd(task)
        tuned = replace(scratch, weights=update.weights, buffers=update.buffers)
        predicted = predict(plain, tuned, run.test, position).labels
        assert predicted is not None
        by_client[identity] = predicted
    return _over(own_accuracies(Predictions(None, by_client), federation), HELDOUT)


def _over(accuracies: Sequence[float], who: str) -> dict[str, float]:
    return {
        f"finetuned_{who}mean_client_accuracy": sum(accuracies) / len(accuracies),
        f"finetuned_{who}worst_client_accuracy": min(accuracies),
    }
