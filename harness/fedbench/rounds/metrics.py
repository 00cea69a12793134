"""Metrics of a round in %: of predicted classes (overall, by class, group, domain and client), and of their scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Federation, Split, Unseen
from fedbench.core.metric_names import DOMAINS
from fedbench.core.types import Predictions, Tensors

HELDOUT = "heldout_"
"""Prefix of the metrics of clients that never train."""
_SELECTED = ("unseen_domain_accuracy", "seen_domain_accuracy", "domain_mean_accuracy")
"""Means over domains that are recorded for the selected round, besides the accuracy of every domain."""


def percent_right(right: Tensor) -> float:
    """Share of True in ``right`` (n,), in percent."""
    return 100.0 * float(right.double().mean())


def per_class_accuracy(right: Tensor, labels: Tensor, num_classes: int) -> list[float | None]:
    """Accuracy of every class in percent; None for a class without test samples."""
    samples = torch.bincount(labels, minlength=num_classes)[:num_classes]
    hits = torch.bincount(labels[right], minlength=num_classes)[:num_classes]
    percent = 100.0 * (hits.double() / samples)
    return [None if count == 0 else value for count, value in zip(samples.tolist(), percent.tolist(), strict=True)]


def score(predictions: Predictions, federation: Federation) -> dict[str, float]:
    """All metrics of a model on the test split of ``federation``.

    ``global_accuracy`` is over samples, ``balanced_accuracy`` the mean over classes, ``macro_f1`` that of F1,
    ``class_accuracy/<name>`` the recall of a class, ``<group>_accuracy`` the mean over the classes of a group,
    ``domain_accuracy/<name>`` per domain with their unweighted mean ``domain_mean_accuracy`` and their least
    ``worst_domain_accuracy``; mean, worst and spread over clients are `over_clients`. Where predictions have scores,
    `score_metrics` are of them. A client without test samples of its own is scored by the model's per-class accuracies
    weighted by its own class shares; ``<group>_client_accuracy`` is the mean over clients of the same among the classes
    of a group, without those who have none of them. Groups without classes are left out, not zero. All of these are the
    global model's; those called ``heldout_`` are over clients that never train. Those called ``personal_`` are of each
    client's own model, and so is ``personal_mean_global_accuracy``, the mean over clients of its accuracy on the whole
    test split. Where the scenario has unseen classes, `unseen_metrics` adds ``new_accuracy``, ``harmonic_accuracy`` and
    ``new_auroc``.
    """
    own = own_accuracies(predictions, federation) if predictions.by_client else []
    # empty as well where no client holds a class that is tested
    personal = {}
    if own:
        personal = {
            **over_clients(own, "personal_"),
            **_by_group(federation, lambda among: own_accuracies(predictions, federation, among), "personal_"),
            "personal_mean_global_accuracy": _mean(own_accuracies_everywhere(predictions, federation)),
        }
    if predictions.labels is None:
        return personal
    scored = {} if predictions.scores is None else score_metrics(predictions.scores, federation.test.labels)
    return _global_metrics(predictions.labels, federation) | scored | personal


def _global_metrics(predicted: Tensor, federation: Federation) -> dict[str, float]:
    labels = federation.test.labels
    right = predicted == labels
    by_class = per_class_accuracy(right, labels, federation.num_classes)
    present = [a for a in by_class if a is not None]
    metrics = {
        "global_accuracy": percent_right(right),
        "balanced_accuracy": _mean(present),
        "macro_f1": macro_f1(predicted, labels, federation.num_classes),
    }
    for group, classes in federation.groups.items():
        accuracies = [a for a in (by_class[c] for c in classes) if a is not None]
        if accuracies:
            metrics[f"{group}_accuracy"] = _mean(accuracies)
    metrics |= _domain_metrics(right, federation)
    clients = client_accuracies(predicted, federation)
    if clients:
        metrics |= over_clients(clients)
        metrics |= _by_group(federation, lambda among: client_accuracies(predicted, federation, among))
    if federation.new_clients:
        new = client_accuracies(predicted, federation.of_new_clients)
        metrics |= over_clients(new, HELDOUT) if new else {}
    for name, accuracy in zip(federation.classnames, by_class, strict=True):
        if accuracy is not None:
            metrics[f"class_accuracy/{name}"] = accuracy
    return metrics


def _by_group(federation: Federation, of: Callable[[Tensor], list[float]], prefix: str = "") -> dict[str, float]:
    """The mean over clients of the accuracies that ``of`` gives for the classes (C,) bool of each reporting group."""
    metrics = {}
    for group, classes in federation.groups.items():
        among = torch.zeros(federation.num_classes, dtype=torch.bool)
        among[list(classes)] = True
        accuracies = of(among)
        if accuracies:
            metrics[f"{prefix}{group}_client_accuracy"] = _mean(accuracies)
    return metrics


def validation_accuracy(predicted: Tensor, validation: Split) -> float:
    """Unweighted mean over domains of the accuracy on the validation split; over samples where there are none."""
    right = predicted == validation.labels
    if validation.domains is None:
        return percent_right(right)
    return _mean([percent_right(right[validation.domains == d]) for d in sorted(set(validation.domains.tolist()))])


def unseen_metrics(
    predicted: Tensor, unseen: Unseen, base: float | None, scores: Tensor | None = None
) -> dict[str, float]:
    """Metrics of ``predicted`` (n,), classes among the unseen ones, on the test samples of unseen classes.

    ``new_accuracy`` is over samples. ``harmonic_accuracy`` is 2 a b / (a + b) of it and ``base``, the accuracy over the
    test samples of the classes trained on (``global_accuracy``): the H of CoCoOp (Zhou et al., CVPR 2022). It is left
    out if ``base`` is None. ``new_auroc`` is `macro_auroc` of ``scores`` among the unseen classes.
    """
    new = percent_right(predicted == unseen.test.labels)
    metrics = {"new_accuracy": new}
    if base is not None:
        metrics["harmonic_accuracy"] = 2 * base * new / (base + new) if base + new else 0.0
    area = None if scores is None else macro_auroc(scores, unseen.test.labels)
    return metrics if area is None else {**metrics, "new_auroc": area}


def _domain_metrics(right: Tensor, federation: Federation) -> dict[str, float]:
    domains = federation.test.domains
    if domains is None or len(federation.domain_names) < 2:
        return {}
    metrics = {}
    for index, name in enumerate(federation.domain_names):
        chosen = domains == index
        if bool(chosen.any()):
            metrics[f"domain_accuracy/{name}"] = percent_right(right[chosen])
    by_domain = list(metrics.values())
    metrics["domain_mean_accuracy"] = _mean(by_domain)
    metrics["worst_domain_accuracy"] = min(by_domain)
    if federation.held_out_domain is not None:
        unseen = federation.domain_names[federation.held_out_domain]
        seen = [v for k, v in metrics.items() if k.startswith("domain_accuracy/") and k != f"domain_accuracy/{unseen}"]
        metrics["unseen_domain_accuracy"] = metrics[f"domain_accuracy/{unseen}"]
        metrics["seen_domain_accuracy"] = _mean(seen)
    return metrics


def client_accuracies(predicted: Tensor, federation: Federation, among: Tensor | None = None) -> list[float]:
    """Accuracy of one model on every client in percent, in the order of the federation.

    A client is scored on its own test samples. One that has none is scored by per-class accuracies weighted by its
    class shares, and left out if it holds no class that is tested. If ``among`` (C,) bool is given, only its classes
    count: a client whose own test samples have none of them is left out as well.
    """
    return _scored(_of_all_clients(predicted == federation.test.labels, federation, among))


def own_accuracies(predictions: Predictions, federation: Federation, among: Tensor | None = None) -> list[float]:
    """Accuracy of every client by its own model, as in `client_accuracies`. A client without one is scored by the
    global model (FedbenchError without either)."""
    accuracies = [
        _of_one_client(right, federation, position, among)
        for position, right in enumerate(_right_by_client(predictions, federation))
    ]
    return _scored(torch.tensor(accuracies, dtype=torch.float64))


def own_accuracies_everywhere(predictions: Predictions, federation: Federation) -> list[float]:
    """Accuracy of every client's own model on the whole test split, in percent, in the order of the federation."""
    return [percent_right(right) for right in _right_by_client(predictions, federation)]


def _right_by_client(predictions: Predictions, federation: Federation) -> Iterator[Tensor]:
    """Whether each client's own model, else the global one, is right on each test sample, (n,) bool."""
    for client in federation.shards.ids.tolist():
        predicted = predictions.by_client.get(client, predictions.labels)
        if predicted is None:
            raise FedbenchError(f"client {client} has no predictions of its own, and there is no global model.")
        yield predicted == federation.test.labels


def _scored(accuracies: Tensor) -> list[float]:
    known: list[float] = accuracies[~accuracies.isnan()].tolist()
    return known


def _of_all_clients(right: Tensor, federation: Federation, among: Tensor | None) -> Tensor:
    """Accuracies of one model in percent by client, (N,) float64, NaN for those to leave out."""
    shards, table = federation.shards, federation.class_table
    values, known = _class_values(right, federation, among)
    tested = shards.sizes if bool(known.all()) else table.samples_of(known)
    # a client without a tested class is 0 / 0, which is NaN
    accuracies = table.sums(values) / tested
    for which, own in enumerate(shards.measured):
        if own.test is not None and len(own.test):
            # without a sample the mean is NaN
            accuracies[shards.measured_alike(which)] = percent_right(right[_tested(own.test, federation, among)])
    return accuracies


def _of_one_client(right: Tensor, federation: Federation, position: int, among: Tensor | None) -> float:
    """The accuracy of the client at ``position`` in percent; ``right`` (n,) is that of its own model on the test
    split."""
    own = federation.shards.measured_by(position).test
    if own is not None and len(own):
        return percent_right(right[_tested(own, federation, among)])
    values, known = _class_values(right, federation, among)
    counts = federation.class_table.rows(position, position + 1)[0] * known
    return float((counts * values).sum() / counts.sum())


def _tested(samples: Tensor, federation: Federation, among: Tensor | None) -> Tensor:
    """Test ``samples`` (m,) of the classes ``among`` (C,) bool; all samples if it is None."""
    return samples if among is None else samples[among[federation.test.labels[samples]]]


def _class_values(right: Tensor, federation: Federation, among: Tensor | None) -> tuple[Tensor, Tensor]:
    """Per-class accuracies in percent, (C,) float64, and whether a class counts, (C,) bool.

    A class counts if it has test samples and is among the given classes. The accuracy of the others is 0.
    """
    by_class = per_class_accuracy(right, federation.test.labels, federation.num_classes)
    counts = [a is not None and (among is None or bool(among[c])) for c, a in enumerate(by_class)]
    values = [a if a is not None and counted else 0.0 for a, counted in zip(by_class, counts, strict=True)]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(counts)


def summarise(accuracies: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """The final metrics, from the metrics by round: those of the last round, the mean of the last ten, the best.

    Only evaluated rounds count. ``oracle_accuracy`` is the best round chosen on test data: an upper bound, never a
    headline. Where the protocol has a validation split, ``selected_accuracy`` is the test score at the round that is
    best on it (the first such round), and so are ``selected_domain_accuracy/<name>`` and the means over domains.
    """
    rounds = sorted(accuracies)
    last = dict(accuracies[rounds[-1]])
    if "global_accuracy" not in last:
        # a method without a global model has personal metrics alone
        return last
    curve = [accuracies[r]["global_accuracy"] for r in rounds if r > 0] or [last["global_accuracy"]]
    last["last10_accuracy"] = _mean(curve[-10:])
    last["oracle_accuracy"] = max(curve)
    last["oracle_round"] = float(next(r for r in rounds if accuracies[r]["global_accuracy"] == max(curve)))
    if "validation_accuracy" in last:
        # the model before training is no candidate; strictly greater: an earlier round wins a tie
        trained = [r for r in rounds if r > 0] or rounds
        best = max(trained, key=lambda r: (accuracies[r]["validation_accuracy"], -r))
        last["selected_round"] = float(best)
        last["selected_accuracy"] = accuracies[best]["global_accuracy"]
        for name in list(last):
            if name in _SELECTED or name.startswith(f"{DOMAINS}/"):
                last[f"selected_{name}"] = accuracies[best][name]
    return last


def size_in_bytes(*tensors: Tensors) -> int:
    """Bytes of all tensors of the given mappings."""
    return sum(t.numel() * t.element_size() for mapping in tensors for t in mapping.values())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


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
