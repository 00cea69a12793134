"""``fedbench describe``: a method's paper, equations, hooks and hyper-parameters, read off its class."""

from __future__ import annotations

import inspect
import sys
import textwrap
import typing
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from fedbench.cli.console import cell, console, say, table
from fedbench.cli.options import Plugins, plugin_files

if TYPE_CHECKING:
    from fedbench.core.method.base import AnyMethod
    from fedbench.core.method.hyper import Hyper

_TEXT_WIDTH = 120


def describe(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="A method, or a stack a+b.")],
    plugin: Plugins = None,
) -> None:
    """Show a method's equations, hooks and hyper-parameters."""
    from fedbench.core.spec import stack_names
    from fedbench.plugins.assembly import assemble, find_method

    files = plugin_files(plugin)
    stack = stack_names(method)
    classes = [find_method(name, files) for name in stack]
    for cls in classes:
        _show_method(cls)
    if len(stack) > 1:
        owners = assemble(method, {}, files).owners
        _heading(f"{'+'.join(stack)}: who answers which hook")
        made = table("hook", "answered by, in call order", whole=("hook",))
        for hook, names in owners.items():
            made.add_row(cell(hook), cell(", ".join(names)))
        console().print(made)


def answered_hooks(cls: type[AnyMethod]) -> dict[str, str]:
    """Hook name -> first line of the docstring of the class's answer, in the order in which hooks are called."""
    from fedbench.plugins.declaration import HOOK_NAMES

    answers = {}
    for name in HOOK_NAMES:
        function = getattr(cls, name, None)
        if function is not None and hasattr(function, "fedbench_impl"):
            answers[name] = (inspect.getdoc(function) or "").partition("\n")[0]
    return answers


def _show_method(cls: type[AnyMethod]) -> None:
    out = console()
    say(cls.name, style="bold cyan")
    say(cls.citation)
    module = sys.modules.get(cls.__module__)
    text = inspect.getdoc(module) or inspect.getdoc(cls)
    if text:
        say("")
        # in a pipe every line stays as it is
        out.print(Text(_fitted(text, out.width) if out.is_terminal else text), soft_wrap=not out.is_terminal)
    _show_requirements(cls)
    _show_hooks(cls)
    _show_params(cls)
    _show_recipe(cls)


def _show_requirements(cls: type[AnyMethod]) -> None:
    from fedbench.core.method.base import REQUIREMENTS, declares

    _heading("What it requires of a run")
    for name in declares(cls, "requires") or ("nothing",):
        say(REQUIREMENTS.get(name, name))


def _show_hooks(cls: type[AnyMethod]) -> None:
    from fedbench.core.method.hooks import HookSpecs

    _heading("Hooks it answers")
    made = table("hook", "kind", "what it does there", whole=("hook", "kind"))
    for hook, line in answered_hooks(cls).items():
        opts: dict[str, Any] = getattr(getattr(HookSpecs, hook), "fedbench_spec", {})
        made.add_row(cell(hook), cell("first result" if opts.get("firstresult") else "collected"), cell(line))
    console().print(made)


def _show_params(cls: type[AnyMethod]) -> None:
    from fedbench.core.method.hyper import declared

    _heading("Hyper-parameters")
    parameters = declared(cls.Params)
    if not parameters:
        say("none besides the run's budget and optimiser")
        return
    headings = ("name", "symbol", "type", "default", "range", "neutral", "source")
    made = table(*headings, whole=("name", "symbol", "type", "default", "neutral"))
    for name, parameter in parameters.items():
        known = parameter.hyper
        row = (name, known.symbol, _kind(parameter.type), _number(parameter.default), _range(known))
        made.add_row(*map(cell, (*row, _number(known.neutral), known.source)))
    console().print(made)
    say(f"Set one with --set {cls.name}.{next(iter(parameters))}=VALUE.", style="dim")
    if any(parameter.hyper.neutral is not None for parameter in parameters.values()):
        say("At its neutral value the method equals fedavg.", style="dim")


def _show_recipe(cls: type[AnyMethod]) -> None:
    _heading("Optimiser recipe")
    if cls.recipe:
        say(", ".join(f"{key}={_number(value)}" for key, value in cls.recipe.items()))
        say("Used where neither the suite's row nor --set says otherwise.", style="dim")
    else:
        say("none: the suite's optimiser is used")
    say("")


def _heading(text: str) -> None:
    say(f"\n{text}", style="bold")


def _kind(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "choice"
    return getattr(kind, "__name__", str(kind))


def _number(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _range(known: Hyper) -> str:
    if known.choices is not None:
        return ", ".join(map(_number, known.choices))
    if known.low is None and known.high is None:
        return "any"
    bounds = f"{_number(known.low)} to {_number(known.high)}" if known.high is not None else f">= {_number(known.low)}"
    tuned = (
        f", tuned {_number(known.search[0])} to {_number(known.search[1])}" if isinstance(known.search, tuple) else ""
    )
    return bounds + (" (log)" if known.log else "") + tuned


def _fitted(text: str, width: int) -> str:
    """``text`` as it is where it fits into ``width``: which lines are equations, only who wrote it knows.

    Otherwise paragraphs flow; indented lines and line ends well before the margin stay.
    """
    lines = text.splitlines()
    full = max(map(len, lines), default=0)
    if full <= width:
        return text
    width = min(width, _TEXT_WIDTH)
    flowing: list[str] = []
    for line in lines:
        before = flowing[-1] if flowing else ""
        last = before.rpartition("\n")[2]
        is_prose = bool(line) and not line[0].isspace() and bool(last) and not last[0].isspace()
        if is_prose and len(last) + 1 + len(line.split()[0]) > full - 8:
            flowing[-1] = f"{before}\n{line}"
        else:
            flowing.append(line)
    return "\n".join(_wrapped(block, width) for block in flowing)


def _wrapped(block: str, width: int) -> str:
    if not block.strip():
        return ""
    indent = " " * (len(block) - len(block.lstrip()))
    if indent and len(block) <= width:
        return block
    joined = block if indent else " ".join(block.splitlines())
    hanging = f"{indent}    " if indent else ""
    wrapped = textwrap.wrap(
        joined.strip(), width, initial_indent=indent, subsequent_indent=hanging, break_on_hyphens=False
    )
    return "\n".join(wrapped)
