"""What figures show of recorded models: entropies of their predictions, their features, their groups of clients."""

from __future__ import annotations

import math
import re

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError
from fedbench.rounds.loop import predict, start
from fedbench.rounds.run import Run
from fedbench.rounds.state import RunState
from fedbench.toolkit.fedavg import EVALUATION_BATCH

MOST_POINTS = 1000
"""Samples whose features are embedded: the first of the test split."""
_CLUSTERS = re.compile(r"(.*?)\.?clusters")


def entropies(run: Run, state: RunState) -> NDArray[np.float64]:
    """Entropy in bits of the prediction for every test sample, (n,). FedbenchError for a model without scores."""
    scores = predict(run, state, run.test).scores
    if scores is None:
        raise FedbenchError(f"{run.spec.method} gives no scores of its predictions; choose other rows.")
    found: NDArray[np.float64] = (torch.special.entr(scores.double().softmax(1)).sum(1) / math.log(2)).cpu().numpy()
    return found


@torch.no_grad()
def embedded(run: Run, state: RunState) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The plane (n, 2) in which t-SNE lays test samples by what the model makes of them, and their classes (n,).

    That is a sample's features, or its logits where the encoder is frozen: prompts and heads differ in these only. Of
    unit length. Van der Maaten and Hinton, JMLR 2008, as scikit-learn has it, with a fixed seed. FedbenchError for too
    few samples.
    """
    from sklearn.manifold import TSNE

    rows = torch.arange(min(len(run.test), MOST_POINTS))
    tensors = {**state.weights, **state.buffers}
    parts = [run.model.forward(tensors, run.test.read(some), False) for some in torch.split(rows, EVALUATION_BATCH)]
    seen = [part.features.flatten(1) if run.model.encoder is None else part.logits for part in parts]
    features = normalize(torch.cat(seen), dim=1).cpu().numpy()
    perplexity = min(30.0, (len(rows) - 1) / 3)
    if perplexity < 1:
        raise FedbenchError(f"{len(rows)} test samples are too few to embed.")
    plane = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    return plane, run.scored.test.labels[rows].numpy()


def clusters(run: Run) -> dict[str, NDArray[np.int64]]:
    """The cluster of every client (N,), by what is averaged inside it; empty for methods that form none."""
    state = run.initial_state()
    start(run, state)
    found = {}
    for tensors in state.server.values():
        for name, tensor in tensors.items():
            named = _CLUSTERS.fullmatch(name)
            if named and tensor.shape == (len(run.federation.clients),):
                found[named[1] or "clusters"] = tensor.cpu().numpy()
    return found
