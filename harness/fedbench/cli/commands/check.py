"""``fedbench check``: a method against the contract that every method keeps, one line for each check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from fedbench.cli.console import say
from fedbench.cli.options import Plugins, plugin_files
from fedbench.core.errors import FedbenchError

BROKEN = 1
_LONGEST = 1000
"""Characters of a reason that are shown."""


def check(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="A method, not a stack.")],
    plugin: Plugins = None,
) -> None:
    """Check that a method keeps the contract of fedbench.testing.

    Trains on a tiny federation for seconds. Exit code 0 where no check fails, 1 where one does.
    """
    from fedbench import testing
    from fedbench.kinds.files import plugins_everywhere
    from fedbench.plugins.assembly import find_method

    with plugins_everywhere(plugin_files(plugin)):
        find_method(method)  # an unknown method is bad input, and fails no check
        outcomes = []
        for one in testing.CHECKS:
            outcomes.append(_outcome(one, method))
            say(f"{one.__name__.removeprefix('check_').replace('_', ' ')}: {outcomes[-1]}")
    failed = sum(outcome.startswith("failed") for outcome in outcomes)
    if failed:
        say(f"{method} breaks the contract: {failed} of {len(outcomes)} checks failed.", style="bold red")
        raise typer.Exit(BROKEN)
    say(f"{method} keeps the contract.", style="bold")


def _outcome(one: Callable[[str], str | None], method: str) -> str:
    """``passed``, ``not applicable: why``, or ``failed: why``, in one line."""
    from fedbench.kinds.failure_text import raised_at, reason_of

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
