"""Commands made of other commands, each of which is shown as it would be typed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from fedbench.cli.console import resumable, say


def step(ctx: typer.Context, words: Sequence[str]) -> int:
    """Carry out one command of fedbench, shown first; its exit code."""
    # the command line that this command was found on: its module imports this one
    root: Any = ctx.find_root().command
    with resumable():
        say(f"$ {shlex.join(['fedbench', *words])}", style="bold")
        return int(root(words, prog_name="fedbench", standalone_mode=False) or 0)


def words_of(options: Mapping[str, Sequence[object]]) -> list[str]:
    """Options with their values, as words of a command line."""
    return [word for option, values in options.items() for value in values for word in (option, str(value))]
