"""``fedbench describe``: a method's paper, equations, hooks and hyper-parameters off its class; cards of others."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fedbench.cli.console import cell, console, say, table
from fedbench.cli.options import DATA_DIR, DataDir, Plugins, plugin_files

if TYPE_CHECKING:
    from fedbench.plugins.description import Description

_TEXT_WIDTH = 120


def describe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Anything that fedbench list shows, or a stack a+b.")],
    plugin: Plugins = None,
    data_dir: DataDir = DATA_DIR,
) -> None:
    """Show a method's equations, hooks and hyper-parameters, or what a suite, scenario, data set or backbone is.

    A name that several of them have shows them all.
    """
    from fedbench.cli.cards import show_cards
    from fedbench.core.errors import FedbenchError

    plugin_files(plugin)
    shown = show_cards(name, data_dir)
    try:
        _describe_methods(name, plugin)
    except FedbenchError:
        if not shown:
            raise


def _describe_methods(method: str, plugin: Plugins) -> None:
    from fedbench.core.spec import stack_names
    from fedbench.plugins.description import Descriptions

    files, stack = plugin_files(plugin), stack_names(method)
    known = Descriptions(files)
    for one in [known.of(name) for name in stack]:
        _show(one)
    if len(stack) > 1:
        from fedbench.plugins.assembly import assemble

        owners = assemble(method, {}, files).recorded_owners()
        _heading(f"{'+'.join(stack)}: who answers which hook")
        made = table("hook", "answered by, in call order", whole=("hook",))
        for hook, names in owners.items():
            made.add_row(cell(hook), cell(names))
        console().print(made)


def _show(method: Description) -> None:
    out = console()
    say(method.name, style="bold cyan")
    say(method.citation)
    if method.text:
        say("")
        # in a pipe every line stays as it is
        text = _fitted(method.text, out.width) if out.is_terminal else method.text
        out.print(Text(text), soft_wrap=not out.is_terminal)
    _heading("What it requires of a run")
    for requirement in method.requires or ("nothing",):
        say(requirement)
    _heading("What it is in a stack")
    say(method.role)
    _heading("Hooks it answers or wraps")
    hooks = table("hook", "kind", "what it does there", whole=("hook", "kind"))
    for row in method.hooks:
        hooks.add_row(*map(cell, row))
    out.print(hooks)
    _heading("Hyper-parameters")
    _show_parameters(method)
    _heading("Optimiser recipe")
    say(method.recipe or "none: the suite's optimiser is used")
    if method.recipe:
        say("Used where neither the suite's row nor --set says otherwise.", style="dim")
    say("")


def _show_parameters(method: Description) -> None:
    if not method.parameters:
        say("none besides the run's budget and optimiser")
        return
    headings = ("name", "symbol", "type", "default", "range", "neutral", "source")
    made = table(*headings, whole=("name", "symbol", "type", "default", "neutral"))
    for row in method.parameters:
        made.add_row(*map(cell, row))
    console().print(made)
    say(f"Set one with --set {method.name}.{method.parameters[0][0]}=VALUE.", style="dim")
    if method.has_neutral:
        say("At its neutral value the method equals fedavg.", style="dim")


def _heading(text: str) -> None:
    say(f"\n{text}", style="bold")


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
