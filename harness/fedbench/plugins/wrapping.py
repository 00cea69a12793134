"""Methods around methods: which hooks a method wraps, in which order, and the chains that a run calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from fedbench.core.errors import FedbenchError, MethodFault
from fedbench.core.method.hooks import STEPS, WRAPPABLE, HookSpecs
from fedbench.core.method.tasks import Hooks

MARK = "fedbench_wrapper"
Around = Callable[[Any, Callable[[Any], Any]], Any]
"""A method's function around a hook's answer: of what is handed, and the rest of the stack."""


AROUND = " around "


def joined_owners(names: Sequence[str], depth: int) -> str:
    """The ``names`` of who answers a hook, in call order, of whom the first ``depth`` wrap it."""
    return ", ".join([AROUND.join(names[: depth + 1]), *names[depth + 1 :]])


def wraps(owner: object) -> list[str]:
    """The hooks that a method, a class or an object of it, wraps."""
    return [name for name in WRAPPABLE if hasattr(getattr(owner, name, None), MARK)]


def check_wrappers(cls: type) -> None:
    """Raise FedbenchError where a function marked as a wrapper can be none."""
    for name in dir(cls):
        if not hasattr(inspect.getattr_static(cls, name), MARK):
            continue
        if name not in WRAPPABLE:
            raise FedbenchError(f"{name} is marked with @wrapper; what can be wrapped is {', '.join(WRAPPABLE)}.")
        wanted = ["self", argument_of(name), "rest"]
        if [*inspect.signature(getattr(cls, name)).parameters] != wanted:
            raise FedbenchError(f"its wrapper of the hook {name} is to be def {name}({', '.join(wanted)}).")


def argument_of(hook: str) -> str:
    """What the one argument of a hook in `WRAPPABLE` is called."""
    return [*inspect.signature(getattr(HookSpecs, hook)).parameters][1]


def wrapped(hooks: Hooks, around: Mapping[str, Sequence[tuple[str, Around]]]) -> Hooks:
    """``hooks`` with the wrappers ``around`` them: hook -> (method, function), the outermost first."""
    steps = {hook: getattr(hooks, hook) for hook in STEPS}
    for hook, chain in around.items():
        for method, function in reversed(chain):
            steps[hook] = _around(hook, method, function, steps[hook])
    return cast(Hooks, SimpleNamespace(**steps))


def _around(hook: str, method: str, function: Around, inner: Callable[..., Any]) -> Callable[..., Any]:
    argument = argument_of(hook)

    def rest(given: Any) -> Any:
        return inner(**{argument: given})

    def answered(**arguments: Any) -> Any:
        answer = function(arguments[argument], rest)
        if answer is None:
            raise MethodFault(
                f"{method} wraps the hook {hook} but returned None; return rest({argument}) where it has "
                "nothing to change."
            )
        return answer

    return answered
