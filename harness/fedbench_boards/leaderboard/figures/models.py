"""Data of figures of recorded models: entropies of their predictions, their features, their groups of clients."""

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
"""The number of samples whose features are embedded: the first of the test split."""
_CLUSTERS = re.compile(r"(.*?)\.?clusters")


def entropies(run: Run, state: RunState) -> NDArray[np.float64]:
    """Entropy in bits of the prediction for every test sample, (n,). FedbenchError for a model without scores."""
    scores = predict(run, state, run.test).scores
    if scores is None:
        raise FedbenchError(f"{run.spec.method} gives no scores of its predictions; choose other rows.")
    bits: NDArray[np.float64] = (torch.special.entr(scores.double().softmax(1)).sum(1) / math.log(2)).cpu().numpy()
    return bits


@torch.no_grad()
def embedded(run: Run, state: RunState) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """t-SNE's plane (n, 2) of test samples as the model sees them, and their classes (n,).

    It embeds a sample's features, or its logits if the encoder is frozen, since prompts and heads differ only in these;
    both at unit length. Van der Maaten and Hinton, JMLR 2008, as in scikit-learn, with a fixed seed. FedbenchError for
    too few samples.
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
    """The cluster of every client (N,), by the tensors that are averaged within clusters; empty if a method forms
    none."""
    state = run.initial_state()
    start(run, state)
    by_tensor = {}
    for tensors in state.server.values():
        for name, tensor in tensors.items():
            named = _CLUSTERS.fullmatch(name)
            if named and tensor.shape == (len(run.federation.clients),):
                by_tensor[named[1] or "clusters"] = tensor.cpu().numpy()
    return by_tensor
