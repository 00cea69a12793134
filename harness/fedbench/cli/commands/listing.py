"""``fedbench list``: what can be named on the command line and in suite files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from fedbench.cli.console import cell, console, say, table
from fedbench.cli.options import Plugins, plugin_files
from fedbench.core.errors import FedbenchError, unknown_name

KINDS = ("methods", "datasets", "scenarios", "backbones", "suites")


def list_known(
    what: Annotated[
        str | None, typer.Argument(metavar="[WHAT]", help=f"One of {', '.join(KINDS)}; all without it.")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """List methods, data sets, scenarios, backbones or suites."""
    files = plugin_files(plugin)
    if what is None:
        for kind in KINDS:
            names = ", ".join(_names(kind, files))
            say(f"{kind}: {names}")
        say("\nMore on each with fedbench list WHAT, on a method with fedbench describe METHOD.", style="dim")
    elif what not in KINDS:
        raise unknown_name("kind of thing to list", what, KINDS, "Example: fedbench list methods.")
    elif what == "methods":
        _list_methods(files)
    else:
        made = table(what.removesuffix("s"), "what it is", whole=(what.removesuffix("s"),))
        for name, description in _described(what).items():
            made.add_row(cell(name), cell(description))
        console().print(made)
        if what == "datasets":
            _list_published()


def _list_published() -> None:
    from fedbench.datasets.catalogue import CARDS

    made = table("published data set", "typed as", "classes", "domains", whole=("published data set",))
    for card in CARDS:
        made.add_row(*map(cell, (card.title, card.typed, f"{card.classes:,}", ", ".join(card.domains))))
    console().print(made)
    say("What to get and how it is to lie: fedbench describe imagefolder:PACS.", style="dim")


def _names(kind: str, files: tuple[Path, ...]) -> list[str]:
    if kind == "methods" and files:
        from fedbench.plugins.assembly import method_names

        return method_names(files)
    if kind == "methods":  # names of installed ones need no torch, and assembly imports it
        from fedbench.kinds.installed import installed_methods

        return sorted({point.name for point in installed_methods()})
    return list(_described(kind))


def _described(kind: str) -> Mapping[str, str]:
    """Name -> description, from the part of fedbench that owns the kind."""
    if kind == "datasets":
        from fedbench.datasets import dataset_names

        return dataset_names()
    if kind == "scenarios":
        from fedbench.scenarios import scenario_names

        return scenario_names()
    if kind == "backbones":
        from fedbench.models import backbone_names

        return backbone_names()
    from fedbench.suites.suite import load_suite, suite_names

    return {name: load_suite(name).description for name in suite_names()}


def _list_methods(files: tuple[Path, ...]) -> None:
    from fedbench.plugins.description import Descriptions

    known = Descriptions(files)
    made = table("method", "citation", "answers", whole=("method",))
    for name in _names("methods", files):
        try:
            method = known.of(name)
        except FedbenchError as error:  # of one method, and the others can be used
            made.add_row(cell(name), cell(f"broken: {error}"), cell(""))
        else:
            made.add_row(cell(name), cell(method.citation), cell(", ".join(row[0] for row in method.hooks)))
    console().print(made)
    say("A stack is written a+b; fedbench describe METHOD shows equations and hyper-parameters.", style="dim")
