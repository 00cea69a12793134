"""Build one plugin manager for one run, refuse stacks that clash, and say who answers which hook."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pluggy

from fedbench.core.errors import FedbenchError, MethodFault
from fedbench.core.method.base import REQUIREMENTS, AnyMethod, declares
from fedbench.core.method.hooks import STEPS, WRAPPABLE, plugin_manager, relay
from fedbench.core.method.hyper import build_params
from fedbench.core.method.notifications import NOTIFICATIONS, NotificationSpecs
from fedbench.core.method.tasks import Hooks
from fedbench.core.records import ReadOnly, RunInfo
from fedbench.core.spec import RunSpec, stack_names
from fedbench.kinds.methods import HOOK_NAMES, argument_of, refuse_unmarked, wraps
from fedbench.kinds.registry import find_method
from fedbench.plugins.guards import watched
from fedbench.toolkit.fedavg import FedAvg

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
    "upload": "compression",
    "broadcast": "aggregation",
    "evaluate": "aggregation",
}
_WRAPPED = {"aggregate": "server step", "build_model": "learner"}
_ALONE = {
    "personalisation": "each gives clients models of their own",
    "compression": "each encodes the change that a client sends",
    "defence": "each changes the updates before the other sees them",
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
    roles = [role for hook, role in _ANSWERED.items() if hook in answers]
    roles += [_WRAPPED.get(hook, _ANSWERED.get(hook, "aggregation")) for hook in around]
    first = ("label provider", "personalisation", "learner", "server step", "compression")
    order = list(dict.fromkeys([*first, *_ANSWERED.values()]))
    return min(roles, key=order.index, default="measure")


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
        lacking = [
            (other, requirement)
            for requirement in prevented
            for other in sorted(requires)
            if requirement in requires[other]
        ]
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


def notifications(manager: pluggy.PluginManager, listeners: Sequence[object]) -> NotificationSpecs:
    """Notifications for ``listeners`` and then for the run's methods, for these as copies.

    A frozen dataclass can be written to by whoever insists, and what listeners record must be true.
    """
    methods = [plugin for plugin in manager.get_plugins() if not any(plugin is listener for listener in listeners)]

    def to_all(hook: str) -> Callable[..., None]:
        to_listeners = manager.subset_hook_caller(hook, methods)
        to_methods = manager.subset_hook_caller(hook, listeners)

        def notify(**fields: Any) -> None:
            to_listeners(**fields)
            if to_methods.get_hookimpls():
                to_methods(**{name: _for_methods(value, fields["spec"]) for name, value in fields.items()})

        return notify

    return cast(NotificationSpecs, SimpleNamespace(**{hook: to_all(hook) for hook in NOTIFICATIONS}))


def _for_methods(fields: object, spec: RunSpec) -> object:
    """A copy of what listeners are fields, without the counts of labels that the scenario hides."""
    copy = deepcopy(fields)
    if isinstance(copy, RunInfo) and spec.scenario.labels == "hidden":
        return replace(copy, class_counts=())
    # made anew, since a copy of a read-only array can be written to
    return replace(copy) if isinstance(copy, ReadOnly) else copy


Around = Callable[[Any, Callable[[Any], Any]], Any]
"""A method's function around a hook's answer: of what is handed, and the rest of the stack."""
AROUND = " around "


@dataclass(frozen=True)
class Assembly:
    """One run's plugins: ``hooks`` to call, and ``owners``, hook name -> the methods that answer it, in call order.

    ``hooks`` are the steps of a run, and what tasks are handed; ``notifications`` tell of it. Of ``owners`` those that
    wrap the answer come first, the outermost before the others.
    """

    hooks: Hooks
    owners: Mapping[str, tuple[str, ...]]
    notifications: NotificationSpecs
    keeps_lost_training: frozenset[str] = frozenset()
    """The methods of the run that declare it; see `fedbench.core.method.base.Method`."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """Requirement -> the method that has it, with the run's hyper-parameters."""
    provides: Mapping[str, str] = field(default_factory=dict)
    """What a method of the run meets for the others -> that method."""
    wrappers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Hook -> the methods that wrap its answer, the outermost first."""
    personalisation: str = ""
    """The method that gives clients models of their own."""

    def answers(self, hook: str) -> tuple[str, ...]:
        return self.owners.get(hook, ())

    def answers_first(self, hook: str) -> str:
        """The method whose answer to the first-result ``hook`` is taken, as it wraps it or is the first to answer."""
        return self.owners[hook][0]

    def answerer(self, hook: str) -> str:
        """The method that answers the first-result ``hook``, whoever wraps it."""
        return self.owners[hook][len(self.wrappers.get(hook, ())) :][0]

    def recorded_owners(self) -> dict[str, str]:
        """``owners`` as they are recorded with a run: names joined by commas, or by AROUND where one wraps the next."""
        depths = {hook: len(names) for hook, names in self.wrappers.items()}
        return {hook: joined_owners(names, depths.get(hook, 0)) for hook, names in self.owners.items()}


def assemble(
    method: str,
    params: Mapping[str, Mapping[str, Any]],
    plugin_files: Iterable[Path] = (),
    listeners: Sequence[object] = (),
) -> Assembly:
    """The plugin manager of one run of the stack ``method``, hyper-parameters checked.

    ``listeners`` are plugins that only answer notifications. Raises FedbenchError for an unknown method or
    hyper-parameter, a value out of range, and two methods that answer the same first-result hook.
    """
    stack = stack_names(method)
    strangers = sorted(set(params) - set(stack) - {FedAvg.name})
    if strangers:
        raise FedbenchError(
            f"hyper-parameters are given for {', '.join(strangers)}, which is not in the run's stack {method!r}."
        )
    manager = plugin_manager()
    for listener in listeners:
        manager.register(listener)
    keeping, requires, provides = set(), dict[str, str](), dict[str, str]()
    roles, plugins = dict[str, str](), dict[str, AnyMethod]()
    for name in reversed(stack):
        if name != FedAvg.name:
            cls = find_method(name, plugin_files)
            keeping |= {name} if declares(cls, "keeps_lost_training") else set()
            plugin = cls(build_params(name, cls.Params, params.get(name, {})))
            requires |= dict.fromkeys(sorted(getattr(plugin, "requires", ())), name)
            provides |= dict.fromkeys(declares(cls, "provides"), name)
            refuse_unmarked(plugin, name)
            manager.register(plugin, name)
            roles[name], plugins[name] = role_of(cls), plugin
    # of several trylast answers pluggy calls the last registered last: a method's own comes before the defaults
    defaults = FedAvg(build_params(FedAvg.name, FedAvg.Params, params.get(FedAvg.name, {})))
    manager.register(defaults, FedAvg.name)
    manager.check_pending()  # methods are checked when they are loaded: this is for listeners
    silent = [name for name, one in plugins.items() if not manager.get_hookcallers(one) and not wraps(one)]
    if silent:
        names = ", ".join(HOOK_NAMES)
        why = f"{silent[0]} answers no hook, so it would run as FedAvg"
        raise FedbenchError(f"{why}; mark a method named like one with @hookimpl, or @wrapper: {names}.")
    defaults.replaced = _replacements(manager, method)
    outermost_first = sorted(plugins, key=lambda name: (_depth(roles[name]), name))
    around = {hook: [name for name in outermost_first if hook in wraps(plugins[name])] for hook in WRAPPABLE}
    wrappers = {hook: tuple(names) for hook, names in around.items() if names}
    prevents = {name: (*getattr(one, "prevents", ()), *_prevented(manager, one)) for name, one in plugins.items()}
    required = {name: getattr(plugin, "requires", ()) for name, plugin in plugins.items()}
    refuse_roles(roles, prevents, required, method)
    owners = {hook: (*wrappers.get(hook, ()), *names) for hook, names in _owner_table(manager).items()}
    chains = {hook: [(name, getattr(plugins[name], hook)) for name in names] for hook, names in wrappers.items()}
    hooks = watched(wrapped(relay(manager), chains), _blamed(method, owners))
    personal = next((name for name, role in roles.items() if role == "personalisation"), "")
    notified = notifications(manager, listeners)
    return Assembly(hooks, owners, notified, frozenset(keeping), requires, provides, wrappers, personal)


def _prevented(manager: pluggy.PluginManager, plugin: object) -> tuple[str, ...]:
    """What a plugin prevents by the hooks that it answers."""
    tells_more = any(caller.name in ("start", "report", "turns") for caller in manager.get_hookcallers(plugin) or ())
    return ("only_weights",) if tells_more else ()


def _depth(role: str) -> int:
    """How far inside a method wraps.

    A defence comes before all who read updates, own models are around the rest, and a server step goes on from what
    others aggregate.
    """
    return {"defence": 0, "personalisation": 1, "server step": 2}.get(role, 3)


def _replacements(manager: pluggy.PluginManager, method: str) -> dict[str, str]:
    """First-result hook -> the one method that answers it before the defaults; two of them are a clash."""
    replaced = {}
    for hook in HOOK_NAMES:
        caller = getattr(manager.hook, hook)
        if not caller.spec.opts["firstresult"]:
            continue
        owners = [i.plugin_name for i in caller.get_hookimpls() if not i.hookwrapper and not i.wrapper]
        methods = sorted(name for name in owners if name != FedAvg.name)
        if len(methods) > 1:
            raise FedbenchError(
                f"the stack {method!r} clashes: {' and '.join(methods)} both answer the hook {hook}; "
                "run them as separate rows."
            )
        if methods:
            replaced[hook] = methods[0]
    return replaced


def _owner_table(manager: pluggy.PluginManager) -> dict[str, tuple[str, ...]]:
    table = {}
    for hook in HOOK_NAMES:
        named = [i.plugin_name for i in reversed(getattr(manager.hook, hook).get_hookimpls())]
        methods = tuple(name for name in named if not name.isdigit())
        if methods:
            table[hook] = methods
    return table


_CALLS = {
    "local_train": ("local_gradients", "local_objective", "local_loss", "loss_terms", "build_model"),
    "evaluate": ("build_model",),
}
"""Hooks whose default answer runs code of those who answer others; `build_model` gives the forward pass."""


def _blamed(method: str, owners: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Hook -> the methods that are to blame for what goes wrong in it; without hooks that run no method's code."""

    def is_answered(hook: str) -> bool:
        return any(name != FedAvg.name for name in owners.get(hook, ()))

    blamed = {}
    for hook in STEPS:
        if any(is_answered(each) for each in (hook, *_CALLS.get(hook, ()))):
            names = [name for name in owners.get(hook, ()) if name != FedAvg.name]
            blamed[hook] = ", ".join(names) or method
    return blamed


def joined_owners(names: Sequence[str], depth: int) -> str:
    """The ``names`` of who answers a hook, in call order, of whom the first ``depth`` wrap it."""
    return ", ".join([AROUND.join(names[: depth + 1]), *names[depth + 1 :]])


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
