"""What a client's SGD amounts to: how many steps it takes, and how much each step's gradient weighs in its update.

From weights x, with learning rate eta, momentum rho and a momentum buffer that starts empty, tau steps end at y with
    x - y = eta sum_s a_s g_s,    a_s = (1 - rho^(tau - s + 1)) / (1 - rho)
for gradients g_1 .. g_tau of the loss, weight decay and all terms that methods add included. A loss term (mu / 2)
||w - x||^2 can be taken out of the gradients instead: then it only changes the weights a, to (1 - eta mu)^(tau - s)
without momentum. The l1 norm of a is by how much the step count is to be replaced wherever steps are compared.
"""

from __future__ import annotations

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import Training
from fedbench.core.tasks import ClientTask
from fedbench.core.types import Model
from fedbench.toolkit.local_training import batches_of, learning_rates


def local_steps(task: ClientTask) -> int:
    """tau, the steps that the default `local_train` takes for ``task``."""
    return len(batches_of(task))


def gradient_weight(steps: int, momentum: float, pull: float = 0.0) -> float:
    """The l1 norm of a over ``steps`` tau >= 1 with ``momentum`` rho and ``pull`` = eta mu; tau where both are 0.

    Momentum and pull together are worked out likewise, by following a single gradient of size one through the steps.
    """
    buffer = weight = total = 1.0
    for _ in range(steps - 1):
        buffer = momentum * buffer - pull * weight
        weight += buffer
        total += abs(weight)
    return total


def rates_by_name(training: Training, model: Model, round: int) -> dict[str, float]:
    """eta of ``round`` (1 is the first) for every weight of ``model``."""
    rates = learning_rates(training, model.weights, round, model.lr_factors)
    return {name: rate for rate, names in rates.items() for name in names}


def require_sgd(training: Training, method: str) -> None:
    """Raise FedbenchError unless clients train by SGD, whose update is a weighted sum of gradients."""
    if training.optimizer != "sgd":
        raise FedbenchError(
            f"{method} needs clients whose update is a weighted sum of gradients, which {training.optimizer}'s is not; "
            "set optimizer=sgd."
        )
