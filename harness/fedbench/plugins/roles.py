"""What a method is in a stack, by the hooks that it answers and wraps, and which methods can't be in one stack."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fedbench.core.errors import FedbenchError
from fedbench.core.method.base import REQUIREMENTS, AnyMethod, declares
from fedbench.core.method.hooks import STEPS
from fedbench.kinds.methods import wraps

_ANSWERED = {
    "label": "label provider",
    "private": "personalisation",
    "build_model": "learner",
    "federate": "learner",
    "local_gradients": "local objective",
    "local_objective": "local objective",
    "local_loss": "local objective",
    "loss_terms": "local objective",
    "aggregate": "aggregation",
    "turns": "aggregation",
    "broadcast": "aggregation",
    "evaluate": "aggregation",
}
_WRAPPED = {"aggregate": "server step", "build_model": "learner"}
_ALONE = {
    "personalisation": "each gives clients models of their own",
    "server step": "each takes the server's step from the mean of the clients",
}
"""Roles of which a stack has one at most, and why."""


def role_of(cls: type[AnyMethod]) -> str:
    """The role that a method declares, or the first that follows from its hooks."""
    declared = declares(cls, "role")
    if declared:
        return str(declared)
    answers = {name for name in STEPS if hasattr(getattr(cls, name, None), "fedbench_impl")}
    around = wraps(cls)
    found = [role for hook, role in _ANSWERED.items() if hook in answers]
    found += [_WRAPPED.get(hook, _ANSWERED.get(hook, "aggregation")) for hook in around]
    order = list(dict.fromkeys(["label provider", "personalisation", "learner", "server step", *_ANSWERED.values()]))
    return min(found, key=order.index, default="measure")


def refuse_roles(
    roles: Mapping[str, str],
    prevents: Mapping[str, Collection[str]],
    requires: Mapping[str, Collection[str]],
    method: str,
) -> None:
    """FedbenchError where two methods have a role that only one can have, or one prevents what another requires.

    ``roles``, ``prevents`` and ``requires`` by method.
    """
    stack = sorted(roles.items())
    for name, prevented in sorted(prevents.items()):
        lacking = [(other, one) for one in prevented for other in sorted(requires) if one in requires[other]]
        for other, requirement in (pair for pair in lacking if pair[0] != name):
            raise FedbenchError(
                f"the stack {method!r} clashes: {other} needs {REQUIREMENTS[requirement]}, which "
                f"{name} prevents; run them as separate rows."
            )
    for role, why in _ALONE.items():
        names = [name for name, own in stack if own == role]
        if len(names) > 1:
            raise FedbenchError(
                f"the stack {method!r} clashes: {' and '.join(names[:2])} are both a {role}, and {why}; run them as "
                "separate rows."
            )
