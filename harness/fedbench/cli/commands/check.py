"""``fedbench check``: a method against the contract that every method keeps, one line for each check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated

import typer

from fedbench.cli.console import say
from fedbench.cli.options import Plugins, plugin_files
from fedbench.core.errors import FedbenchError

BROKEN = 1
Check = Callable[[str], str | None]
_LONGEST = 1000
"""Characters of a reason that are shown."""


def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A method, not a stack, or any other plug-in.")],
    plugin: Plugins = None,
) -> None:
    """Check that a method, or another plug-in, keeps the contract of fedbench.testing.

    Trains on a tiny federation for seconds. Exit code 0 where no check fails, 1 where one does.
    """
    from fedbench import testing
    from fedbench.testing import plugins

    plugin_files(plugin)
    outcomes = []
    for about, checks in _contracts(name, testing.CHECKS, plugins.CHECKS):
        for one in checks:
            outcomes.append(_outcome(one, name))
            say(f"{about}{one.__name__.removeprefix('check_').replace('_', ' ')}: {outcomes[-1]}")
    failed = sum(outcome.startswith("failed") for outcome in outcomes)
    if failed:
        say(f"{name} breaks the contract: {failed} of {len(outcomes)} checks failed.", style="bold red")
        raise typer.Exit(BROKEN)
    say(f"{name} keeps the contract.", style="bold")


def _contracts(
    name: str, of_methods: Sequence[Check], of_plugins: Mapping[str, Sequence[Check]]
) -> Iterator[tuple[str, Sequence[Check]]]:
    """The contracts of what ``name`` stands for; a name that several kinds have has several.

    FedbenchError for a name that there is not: it is bad input, and fails no check.
    """
    from fedbench.kinds.registry import PLUGIN_FILES, find_method, method_names
    from fedbench.testing.plugins import kinds_of

    is_method = name in method_names(PLUGIN_FILES.get())
    try:
        kinds = kinds_of(name)
    except FedbenchError:
        find_method(name)
        kinds = []
    if is_method:
        find_method(name)
        yield "method: " if kinds else "", of_methods
    for kind in kinds:
        yield f"{kind}: " if is_method or len(kinds) > 1 else "", of_plugins[kind]


def _outcome(one: Check, method: str) -> str:
    """``passed``, ``not applicable: why``, or ``failed: why``, in one line."""
    from fedbench.core.errors import raised_at, reason_of

    try:
        why = one(method)
    except KeyboardInterrupt:
        raise
    except (AssertionError, FedbenchError) as error:
        outcome = f"failed: {str(error) or raised_at(error)}"
    except BaseException as error:  # whatever the method does, the other checks follow
        outcome = f"failed: {reason_of(error)} ({raised_at(error)})"
    else:
        outcome = f"not applicable: {why}" if why else "passed"
    line = " ".join(outcome.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
