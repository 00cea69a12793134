"""``fedbench list``: what can be named on the command line and in suite files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fedbench.cli.console import cell, console, say, table
from fedbench.cli.options import Plugins, plugin_files
from fedbench.core.errors import FedbenchError, unknown_name

KINDS = {
    "methods": "method",
    "datasets": "data set",
    "scenarios": "",
    "partitions": "partition",
    "backbones": "backbone",
    "text-encoders": "text encoder",
    "metrics": "metric",
    "suites": "suite",
}
"""What can be listed -> the kind of plug-in that it is; a scenario is none."""
SETTINGS = "settings"
"""Can be listed too, with what they are; they are too many to be named beside the others."""
Line = tuple[str, str, str]
"""Name as it is typed, what it is, and the package with its version that it comes from."""


def list_known(
    what: Annotated[
        str | None, typer.Argument(metavar="[WHAT]", help=f"One of {', '.join(KINDS)}, {SETTINGS}; all without it.")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """List methods, data sets, scenarios, partitions, backbones, text encoders, metrics, suites or settings."""
    files = plugin_files(plugin)
    if what is None:
        for kind in KINDS:
            say(f"{kind}: {', '.join(_names(kind, files))}")
        say("\nMore on each with fedbench list WHAT, on one with fedbench describe NAME.", style="dim")
        say(f"What --set takes: fedbench list {SETTINGS}.", style="dim")
    elif what == SETTINGS:
        _list_settings()
    elif what not in KINDS:
        raise unknown_name("kind of thing to list", what, (*KINDS, SETTINGS), "Example: fedbench list methods.")
    elif what == "methods":
        _list_methods(files)
    else:
        made = table(what.removesuffix("s"), "what it is", "from", whole=(what.removesuffix("s"),))
        for line in _lines(what):
            made.add_row(*map(cell, line))
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


def _list_settings() -> None:
    """Every setting that is no method's, with its default."""
    from fedbench.core.scenario import Scenario
    from fedbench.core.spec import RunSpec, Training
    from fedbench.suites.resolve import RUN_KEYS

    of_run = {name: RunSpec.model_fields[name] for name in RUN_KEYS}
    made = table("setting", "of the", "default", "what it is", whole=("setting", "of the"))
    for part, fields in (("run", of_run), ("scenario", Scenario.model_fields), ("training", Training.model_fields)):
        for name, one in fields.items():
            default = one.get_default(call_default_factory=True)
            shown = ", ".join(default) if isinstance(default, tuple) else str(default).lower()
            made.add_row(*map(cell, (name, part, shown, one.description or "")))
    console().print(made)
    say("Suites, scenarios and methods begin with some others, see fedbench describe NAME.", style="dim")


def _names(kind: str, files: tuple[Path, ...]) -> list[str]:
    """Names alone; the plug-ins of installed packages are not imported for them."""
    if kind == "methods":
        return sorted(_origins(files))
    if kind == "scenarios":
        from fedbench.scenarios import scenario_names

        return list(scenario_names())
    if kind == "suites":
        from fedbench.suites.files import suite_files

        return list(suite_files())
    from fedbench.kinds.registry import registered

    return list(registered(KINDS[kind]))


def _lines(what: str) -> Iterator[Line]:
    if what == "scenarios":
        from fedbench.scenarios import scenario_names

        yield from ((name, description, _own()) for name, description in scenario_names().items())
    elif what == "suites":
        from fedbench.suites.files import suite_files
        from fedbench.suites.suite import load_suite

        yield from ((name, load_suite(name).description, file.origin) for name, file in suite_files().items())
    else:
        from fedbench.kinds.registry import registered

        for name, one in registered(KINDS[what]).items():
            try:
                plugin = one.load()
            except FedbenchError as error:  # of one, and the others can be used
                yield name, f"broken: {error}", one.origin
            else:
                yield plugin.usage(), plugin.description(), one.origin


def _own() -> str:
    from fedbench.core.version import __version__

    return f"fedbench-harness {__version__}"


def _origins(files: tuple[Path, ...]) -> dict[str, str]:
    """The package, or the file, that each method comes from."""
    # names of installed ones need no torch, and assembly imports it
    from fedbench.kinds.registry import METHOD, installed

    found = {
        point.name: "unknown" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        for point in installed(METHOD)
    }
    if files:
        from fedbench.kinds.registry import load_plugin_file

        found |= {cls.name: file.name for file in files for cls in load_plugin_file(file)}
    return found


def _list_methods(files: tuple[Path, ...]) -> None:
    from fedbench.plugins.description import Descriptions

    known = Descriptions(files)
    made = table("method", "citation", "answers", "from", whole=("method",))
    for name, origin in sorted(_origins(files).items()):
        try:
            method = known.of(name)
        except FedbenchError as error:  # of one method, and the others can be used
            made.add_row(cell(name), cell(f"broken: {error}"), cell(""), cell(origin))
        else:
            answers = ", ".join(row[0] for row in method.hooks)
            made.add_row(*map(cell, (name, method.citation, answers, origin)))
    console().print(made)
    say("A stack is written a+b; fedbench describe METHOD shows equations and hyper-parameters.", style="dim")
