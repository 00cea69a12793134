"""Names of what runs are measured by, for whoever reads them in a suite before there is a run."""

from __future__ import annotations

from fedbench.core.errors import unknown_name
from fedbench.core.records import FAULT_COUNTS

GROUPS = ("head", "mid", "tail", "many", "medium", "few")
"""Names of reporting groups: classes by size."""
ACCURACIES = tuple(
    f"{name}_accuracy"
    for name in (
        *("global", "balanced", *GROUPS, "mean_client", "worst_client"),
        *("domain_mean", "worst_domain", "unseen_domain", "seen_domain", "new", "harmonic", "validation"),
        *("personal_mean_client", "personal_worst_client", "personal_mean_global", "top5"),
        *(f"{prefix}{spread}_client" for prefix in ("", "personal_", "heldout_") for spread in ("std", "p10", "gini")),
        *(f"{prefix}{group}_client" for prefix in ("", "personal_") for group in GROUPS),
        *("finetuned_mean_client", "finetuned_worst_client", "last10", "oracle", "selected"),
        *("heldout_mean_client", "heldout_worst_client"),
        *("finetuned_heldout_mean_client", "finetuned_heldout_worst_client"),
        *("selected_domain_mean", "selected_unseen_domain", "selected_seen_domain"),
    )
)
"""Names of accuracies that do not depend on the names of classes and domains."""
QUALITIES = ("macro_f1", "calibration_error", "prediction_entropy", "new_auroc")
"""Measures of predictions besides accuracies, in percent."""
LOWER_IS_BETTER = frozenset(
    {"calibration_error", *(f"{p}{s}_client_accuracy" for p in ("", "personal_", "heldout_") for s in ("std", "gini"))}
)
NEITHER = frozenset({"prediction_entropy"})
"""Measures that describe predictions without saying how good they are."""
DOMAINS = "domain_accuracy"
"""Name of the columns with the accuracies of all domains."""
SELECTED_DOMAINS = f"selected_{DOMAINS}"
"""Name of the columns with these accuracies at the round that validation selected."""
EACH_DOMAIN = (DOMAINS, SELECTED_DOMAINS)
OF_EACH = (*EACH_DOMAIN, "class_accuracy")
"""Prefixes of metrics of one domain or class, whose name follows a slash."""
STATISTICS = ("std", "p_value")
"""Statistics of the headline metric over seeds."""
TIMES = ("train_seconds", "seconds_a_round", "oracle_round")
"""Seconds of training in a run, seconds of a round, and the round with the best test accuracy."""
COSTS = ("bytes", "bytes_up", "bytes_down", "seconds", "train_seconds")


def known_accuracy(name: str) -> str:
    """The accuracy that ``name`` means: ``tail`` is short for ``tail_accuracy``. ValueError for one that no run has."""
    if name in QUALITIES or ("/" in name and name.partition("/")[0] in OF_EACH):
        return name
    full = next((full for full in (name, f"{name}_accuracy") if full in ACCURACIES), None)
    if full is None:
        raise ValueError(str(unknown_name("accuracy", name, [one.removesuffix("_accuracy") for one in ACCURACIES])))
    return full


_OF_ROUNDS = frozenset(
    {"bytes", "bytes_up", "bytes_down", "bytes_up_total", "bytes_down_total", "seconds", *FAULT_COUNTS}
)
"""Numbers recorded in every round besides its metrics."""


def is_of_harness(name: str) -> bool:
    """Whether a run has a number of this name whatever metrics it has."""
    return is_reserved(name) or name in (*TIMES, *COSTS, "megabytes", "train_loss")


def is_reserved(name: str) -> bool:
    """Whether a metric called ``name`` could be one of the harness's own, which a client must not report."""
    head = name.partition("/")[0]
    return name in _OF_ROUNDS or name in QUALITIES or head == "final" or head.endswith("_accuracy")
