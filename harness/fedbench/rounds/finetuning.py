"""Post-hoc personalisation of any method: after the last round every client trains on alone, and is tested."""

from __future__ import annotations

import copy
from dataclasses import replace

from fedbench.core.errors import FedbenchError
from fedbench.core.randomness import global_generators
from fedbench.core.types import Predictions
from fedbench.rounds.broadcast import broadcast, client_task
from fedbench.rounds.clients import settle
from fedbench.rounds.loop import predict
from fedbench.rounds.metrics import own_accuracies
from fedbench.rounds.run import Run
from fedbench.rounds.state import RunState


def finetuned_metrics(run: Run, state: RunState) -> dict[str, float]:
    """Mean and worst client accuracy of models that each client fine-tunes for ``finetune_epochs``; nothing is kept.

    A client with a test split of its own is scored on it, another one by its class shares of the global test set."""
    alone = run.spec.training.model_copy(update={"local_epochs": run.spec.training.finetune_epochs})
    run = replace(run, spec=run.spec.model_copy(update={"training": alone}))
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
    accuracies = own_accuracies(Predictions(None, by_client), run.scored)
    return {
        "finetuned_mean_client_accuracy": sum(accuracies) / len(accuracies),
        "finetuned_worst_client_accuracy": min(accuracies),
    }
