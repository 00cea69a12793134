"""Checks of a method's class, made once when it is loaded; a fault is one sentence."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Set
from functools import cache
from typing import Any

import pluggy
import pydantic

from fedbench.core.errors import FedbenchError, reason_of, unknown_name
from fedbench.core.method.base import REQUIREMENTS, ROLES, AnyMethod
from fedbench.core.method.hooks import STEPS, WRAPPABLE, HookSpecs, plugin_manager
from fedbench.core.method.hyper import declared, parse_value
from fedbench.core.method.notifications import NOTIFICATIONS, PROJECT, NotificationSpecs
from fedbench.core.spec import OPTIMISER_KEYS, Training, no_bool
from fedbench.kinds.base import LONGEST_NAME, NAME

HOOK_NAMES = (*STEPS, *NOTIFICATIONS)
_MARK = "fedbench_wrapper"
_SECTIONS = frozenset({"run", "scenario", "training", "backbone", "other-method"})
"""Heads of settings that are no method's: `--set scenario.clients=5`."""
_WRAPS = "what is to call the rest of its stack is marked with @wrapper"
_READ = ("text_encoder", "teacher", "tune", "head_scale")


def check_method(cls: object, where: str) -> None:
    """Raise FedbenchError, which begins with ``where`` the class comes from, unless it is the class of a method."""
    if not isinstance(cls, type):
        raise FedbenchError(f"plugin {where} is not a class; {_IS_A}.")
    _check_class(cls, where)


_IS_A = "a method is a class with name, citation, Params and recipe"


@cache
def _check_class(cls: Any, where: str) -> None:
    missing = [a for a in ("name", "citation", "Params", "recipe") if not hasattr(cls, a)]
    if missing:
        raise FedbenchError(f"plugin {where} lacks {', '.join(missing)}; {_IS_A}.")
    try:
        check_name(cls.name)
        if not isinstance(cls.citation, str) or not cls.citation.strip():
            raise FedbenchError(f"citation={cls.citation!r} is not a text; name authors, title and year.")
        _check_params(cls.name, cls.Params)
        _check_recipe(cls.name, cls.recipe)
        _check_words(cls, "requires", tuple(REQUIREMENTS), "no run can grant")
        _check_words(cls, "prevents", tuple(REQUIREMENTS), "no method can require")
        _check_words(cls, "reads", _READ, "is no setting that a method names")
        if getattr(cls, "role", "") not in ("", *ROLES):
            raise FedbenchError(f"role={cls.role!r} is none that a method has; choose of {', '.join(ROLES)}.")
        _check_constructor(cls)
        check_wrappers(cls)
        _check_hooks(cls)
    except FedbenchError as error:
        raise FedbenchError(f"plugin {where}, class {cls.__name__}: {error}") from error


def check_name(name: object) -> None:
    """Raise FedbenchError for what can't be a method's name: it stands in stacks (a+b), settings, tags and files."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise FedbenchError(
            f"name={name!r} cannot be a method's name; use up to {LONGEST_NAME} letters (a-z), digits, hyphens and "
            "underscores, a letter or digit first."
        )
    if name in _SECTIONS:
        raise FedbenchError(f"name={name!r} is a word that settings begin with (--set {name}.KEY=VALUE); use another.")


def _check_params(method: str, params: Any) -> None:
    for name, parameter in declared(params).items():
        try:
            parse_value(f"the default {method}.{name}", parameter, parameter.default)
        except pydantic.errors.PydanticUserError:
            text = f"values of {params.__name__}.{name} can't be checked against its type {parameter.type!r}"
            raise FedbenchError(f"{text}; use int, float, str, bool or a Literal.") from None
    try:
        params()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit as well
        raise FedbenchError(f"{params.__name__}() with its defaults raises {reason_of(error)}.") from error


def _check_recipe(method: str, recipe: object) -> None:
    if not isinstance(recipe, Mapping):
        raise FedbenchError(
            f"recipe={recipe!r} is not a mapping from settings of the optimiser to values; {{}} is none."
        )
    for key, value in recipe.items():
        if key in Training.model_fields and key not in OPTIMISER_KEYS:
            raise FedbenchError(f"the recipe of {method} sets {key}; it may set the optimiser only.")
        if key not in OPTIMISER_KEYS:
            raise unknown_name(f"setting in the recipe of {method}", str(key), OPTIMISER_KEYS)
        try:
            Training.model_validate({key: no_bool(value)})
        except ValueError as error:  # pydantic's ValidationError is one
            text = error.errors()[0]["msg"] if isinstance(error, pydantic.ValidationError) else str(error)
            raise FedbenchError(f"the recipe of {method} has {key}={value!r}: {text[0].lower()}{text[1:]}.") from None


def _check_words(cls: Any, attribute: str, known: tuple[str, ...], otherwise: str) -> None:
    given = getattr(cls, attribute, ())
    exist = f"{', '.join(known[:-1])} and {known[-1]} exist"
    if not isinstance(given, tuple | list | Set):
        raise FedbenchError(f"{attribute}={given!r} is not a tuple of names; {exist}.")
    for name in given:
        if name not in known:
            raise FedbenchError(f"{attribute} {name!r}, which {otherwise}; {exist}.")


def _check_constructor(cls: Any) -> None:
    try:
        inspect.signature(cls).bind(object())
    except (TypeError, ValueError) as error:
        raise FedbenchError(f"it can't be made from its Params ({error}); write def __init__(self, params).") from None


def _check_hooks(cls: Any) -> None:
    manager = plugin_manager()
    marked = {a: inspect.getattr_static(cls, a) for a in dir(cls) if manager.parse_hookimpl_opts(cls, a) is not None}
    # an object with the answers alone: the class's own may need what its constructor makes
    probe = type(cls.__name__, (), marked)()
    for attribute, given in marked.items():
        options: Any = manager.parse_hookimpl_opts(probe, attribute) or {}
        hook = options.get("specname") or attribute
        if hook in HOOK_NAMES:
            _check_arguments(given, getattr(probe, attribute), str(hook))
    try:
        manager.register(probe, cls.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise FedbenchError(f"{' '.join(str(error).split())}; hooks are {', '.join(HOOK_NAMES)}.") from error


def _check_arguments(given: object, bound: Any, hook: str) -> None:
    """``given`` is the answer to ``hook`` as it stands in the class, ``bound`` as it is called."""
    offered = [
        name
        for name in inspect.signature(getattr(HookSpecs if hook in STEPS else NotificationSpecs, hook)).parameters
        if name != "self"
    ]
    name = bound.__name__
    right = f"the hook offers {', '.join(offered)}: def {name}(self, {', '.join(offered)})"
    if inspect.isfunction(given) and next(iter(inspect.signature(given).parameters), offered[0]) in offered:
        raise FedbenchError(f"its answer to the hook {hook} lacks self; {right}.")
    named = inspect.signature(bound).parameters.values()
    required = [p.name for p in named if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [argument for argument in required if argument not in offered]
    if "rest" in unknown and hook in WRAPPABLE:
        raise FedbenchError(
            f"its answer to the hook {hook} asks for rest; {_WRAPS}: def {name}(self, {offered[0]}, rest)."
        )
    if unknown:
        raise FedbenchError(f"its answer to the hook {hook} asks for {', '.join(unknown)}; {right}.")


def refuse_unmarked(plugin: AnyMethod, name: str) -> None:
    """FedbenchError for a function that bears a hook's name and is no answer to it: the default would answer."""
    for hook in HOOK_NAMES:
        function = getattr(plugin, hook, None)
        if callable(function) and not hasattr(function, f"{PROJECT}_impl") and hook not in wraps(plugin):
            mark = _WRAPS if hook in WRAPPABLE and _takes_rest(function) else "mark it with @hookimpl"
            raise FedbenchError(
                f"{name} has a function {hook}, which is the name of a hook, without @hookimpl or @wrapper, so it "
                f"would never be called; {mark}, or call a helper function something else."
            )


def _takes_rest(function: Any) -> bool:
    try:
        return "rest" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # of what is callable and no function
        return False


def wraps(owner: object) -> list[str]:
    """The hooks that a method, a class or an object of it, wraps."""
    return [name for name in WRAPPABLE if hasattr(getattr(owner, name, None), _MARK)]


def check_wrappers(cls: type) -> None:
    """Raise FedbenchError where a function marked as a wrapper can be none."""
    for name in dir(cls):
        if not hasattr(inspect.getattr_static(cls, name), _MARK):
            continue
        if name not in WRAPPABLE:
            raise FedbenchError(f"{name} is marked with @wrapper; what can be wrapped is {', '.join(WRAPPABLE)}.")
        wanted = ["self", argument_of(name), "rest"]
        if [*inspect.signature(getattr(cls, name)).parameters] != wanted:
            raise FedbenchError(f"its wrapper of the hook {name} is to be def {name}({', '.join(wanted)}).")


def argument_of(hook: str) -> str:
    """The name of the one argument of a hook in `WRAPPABLE`."""
    return [*inspect.signature(getattr(HookSpecs, hook)).parameters][1]
