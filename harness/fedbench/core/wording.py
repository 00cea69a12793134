"""Common wording of numbers and metrics in tables, the page and its charts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

NONE = "–"
"""Placeholder for a missing number."""
MEGA = 1e6
_SHORT = {
    "global": "accuracy",
    "domain_mean": "domains",
    "unseen_domain": "unseen",
    "seen_domain": "seen",
    "selected_unseen_domain": "unseen (selected)",
    "selected_seen_domain": "seen (selected)",
    "selected_domain_mean": "domains (selected)",
    "finetuned_mean_client": "fine-tuned",
    "heldout_mean_client": "new clients",
    "heldout_worst_client": "worst new client",
    "finetuned_heldout_mean_client": "new clients, fine-tuned",
    "std_client": "client std",
    "p10_client": "client p10",
    "gini_client": "client Gini",
    "top5": "top-5",
    "macro_f1": "macro F1",
    "calibration_error": "ECE",
    "prediction_entropy": "entropy",
    "new_auroc": "new AUROC",
    "personal_mean_client": "own models",
    "personal_worst_client": "worst own model",
    "personal_mean_global": "own models, whole test set",
    **{
        f"{prefix}{group}_client": f"{who}, {group}"
        for prefix, who in (("", "clients"), ("personal_", "own models"))
        for group in ("head", "mid", "tail", "many", "medium", "few")
    },
}


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 run``, ``2 runs``, ``1,200 studies``; the plural is given where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def ranks_shown(low: int | None, high: int | None) -> str:
    """An interval of ranks: ``1-3``; ``2`` where it is one rank or only ``low`` is known; "" for none."""
    return "" if low is None else str(low) if high in (None, low) else f"{low}-{high}"


def heading(metric: str) -> str:
    """A metric's name as a heading: ``head_accuracy`` is ``head``, ``domain_accuracy/photo`` is ``photo``."""
    stem = metric.rpartition("/")[2].removesuffix("_accuracy")
    return _SHORT.get(stem, stem.replace("_", " "))


def server_data_notes(labels: Sequence[str], used: Sequence[str]) -> Iterator[str]:
    """Notes that name the rows (by ``labels``) that use samples at the server; ``used`` is their ``server_data``."""
    for kind in ("labelled", "unlabelled"):
        rows = dict.fromkeys(label for label, own in zip(labels, used, strict=True) if own == kind)
        if rows:
            yield f"{kind} samples at the server are used by {', '.join(rows)}"


def not_on_unseen_notes(labels: Sequence[str], why: Sequence[str]) -> Iterator[str]:
    """Notes that name the rows (by ``labels``) not scored on unseen classes; ``why`` is their ``not_on_unseen``."""
    for reason in dict.fromkeys(filter(None, why)):
        rows = dict.fromkeys(label for label, own in zip(labels, why, strict=True) if own == reason)
        yield f"not scored on unseen classes: {', '.join(rows)}, since {reason}"


UNSEEN = "accuracy: on the classes trained on; new: unseen classes among themselves; harmonic: mean of the two"
"""Note below a table with the column ``new``."""
OWN_MODELS = (
    "own models: every client by its own model, mean over clients; columns that do not say own are the global model's"
)
"""Note below a table with a column of own models."""


def spread(mean: float, std: float, sign: str = "") -> str:
    """``mean ± std`` with one decimal; the mean alone where ``std`` is NaN, a dash where ``mean`` is."""
    if math.isnan(mean):
        return NONE
    # z: a difference that rounds to nothing is not negative
    return f"{mean:{sign}z.1f}" + ("" if math.isnan(std) else f" ± {std:.1f}")


def megabytes(count: float) -> str:
    """Bytes in MB (10^6) with as many digits as a reader needs; a dash for NaN."""
    if math.isnan(count):
        return NONE
    size = count / MEGA
    return f"{size:,.0f}" if size >= 100 else f"{size:.1f}" if size >= 10 else f"{size:.2f}"
