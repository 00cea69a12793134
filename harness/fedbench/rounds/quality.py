"""Metrics of scores instead of classes (top-5, calibration, entropy), F1, and the spread over clients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BINS = 15
"""Number of bins of the confidence (Guo et al., On Calibration of Modern Neural Networks, ICML 2017)."""
TOP = 5


def macro_f1(predicted: Tensor, labels: Tensor, num_classes: int) -> float:
    """Mean of 2 TP / (2 TP + FP + FN) over the classes that are tested or predicted, in percent."""
    hits = torch.bincount(labels[predicted == labels], minlength=num_classes).double()
    either = torch.bincount(labels, minlength=num_classes) + torch.bincount(predicted, minlength=num_classes)
    present = either > 0
    return 100.0 * float((2 * hits[present] / either[present]).mean())


def score_metrics(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """Metrics of logits ``scores`` (n, C) and ``labels`` (n,), in percent.

    ``top5_accuracy`` is given for more than five classes. ``calibration_error`` is the expected one over fifteen bins
    of the largest probability. ``prediction_entropy`` is the mean entropy as a share of ln C. Empty if a logit is NaN,
    as those of a diverged model are.
    """
    if bool(scores.isnan().any()):
        return {}
    scores = scores.double()
    logarithms = scores.log_softmax(dim=1)
    probabilities = logarithms.exp()
    # 0 ln 0 is 0
    entropy = torch.special.entr(probabilities).sum(dim=1).mean() / math.log(scores.shape[1])
    confidence, predicted = probabilities.max(dim=1)
    metrics = {
        "calibration_error": calibration_error(confidence, predicted == labels),
        "prediction_entropy": 100.0 * float(entropy),
    }
    if scores.shape[1] > TOP:
        within = (scores.topk(TOP, dim=1).indices == labels[:, None]).any(dim=1)
        metrics["top5_accuracy"] = 100.0 * float(within.double().mean())
    return metrics


def calibration_error(confidence: Tensor, right: Tensor) -> float:
    """Σ_b |accuracy_b − confidence_b| n_b / n in percent, over `BINS` equal bins (a, b] of ``confidence`` (n,)."""
    bins = (confidence.double() * BINS).ceil().long().clamp(1, BINS) - 1
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, right.double() - confidence.double())
    return 100.0 * float(gaps.abs().sum() / len(confidence))


def macro_auroc(scores: Tensor, labels: Tensor) -> float | None:
    """Mean over classes of the area under one class's ROC curve against the others, in percent, by probabilities.

    ``scores`` are logits (n, C). None where a class has all samples.
    """
    from scipy.stats import rankdata  # takes half a second

    probabilities = scores.double().softmax(dim=1)
    areas = []
    for label in sorted(set(labels.tolist())):
        own = labels == label
        if bool(own.all()):
            return None
        # the share of pairs in which the class's own sample is ahead; equals count half (Mann and Whitney)
        ranks = torch.from_numpy(rankdata(probabilities[:, label].numpy()))
        count = int(own.sum())
        above = float(ranks[own].sum()) - count * (count + 1) / 2
        areas.append(above / (count * (len(labels) - count)))
    return 100.0 * sum(areas) / len(areas)


def over_clients(accuracies: Sequence[float], prefix: str = "") -> dict[str, float]:
    """Mean, least, standard deviation, 10th percentile and Gini coefficient (in percent) of ``accuracies`` in percent.

    The deviation is of the population. Gini is 0 where all are equal, and where all are zero.
    """
    values = torch.tensor(accuracies, dtype=torch.float64).sort().values
    count, total = len(values), float(values.sum())
    places = torch.arange(1, count + 1, dtype=torch.float64)
    gini = float(((2 * places - count - 1) * values).sum()) / (count * total) if total else 0.0
    return {
        f"{prefix}mean_client_accuracy": sum(accuracies) / count,
        f"{prefix}worst_client_accuracy": min(accuracies),
        f"{prefix}std_client_accuracy": float(values.std(correction=0)),
        f"{prefix}p10_client_accuracy": float(values.quantile(0.1)),
        f"{prefix}gini_client_accuracy": 100.0 * gini,
    }
