"""Every option has its name from fedbench, whatever typer makes of a placeholder."""

from __future__ import annotations

import typing
from collections.abc import Iterator

import typer

from fedbench.cli.app import app


def unnamed(commands: typer.Typer) -> Iterator[str]:
    """Options without a name of their own whose placeholder is the parameter's name in capitals."""
    for command in commands.registered_commands:
        for name, hint in typing.get_type_hints(command.callback, include_extras=True).items():
            for option in getattr(hint, "__metadata__", ()):
                # within Annotated the first name stands in the default's place
                is_unnamed = isinstance(option, typer.models.OptionInfo) and option.default is ...
                if is_unnamed and (option.metavar or "").lower() == name:
                    yield f"{command.name} --{name}"
    for group in commands.registered_groups:
        yield from unnamed(group.typer_instance)


def test_no_option_is_called_like_its_placeholder():
    # typer 0.27 then takes the placeholder for the name: --METHOD instead of --method
    assert list(unnamed(app)) == []
