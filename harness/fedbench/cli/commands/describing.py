"""What there is: ``list`` names it, ``describe`` shows a method off its class, and cards of everything else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fedbench.cli.options import Plugins, plugin_files
from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.version import __version__
from fedbench.core.wording import counted
from fedbench.workflow.asking import folders
from fedbench.workflow.console import cell, console, say, show_table, table

if TYPE_CHECKING:
    from fedbench.plugins.description import Description

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
Card = list[tuple[str, str]]
"""Label and text of each line."""


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
        names = ("setting", "of the")
        show_table(_settings(), *names, "default", "what it is", whole=names)
        say("Suites, scenarios and methods begin with some others, see fedbench describe NAME.", style="dim")
    elif what not in KINDS:
        raise unknown_name("kind of thing to list", what, (*KINDS, SETTINGS), "Example: fedbench list methods.")
    elif what == "methods":
        show_table(_methods(files), "method", "citation", "answers", "from", whole=("method",))
        say("A stack is written a+b; fedbench describe METHOD shows equations and hyper-parameters.", style="dim")
    else:
        one = what.removesuffix("s")
        show_table(_plugins(what), one, "what it is", "from", whole=(one,))
        if what == "datasets":
            _show_published()


def _show_published() -> None:
    from fedbench.datasets.catalogue import CARDS

    rows = ((card.title, card.typed, f"{card.classes:,}", ", ".join(card.domains)) for card in CARDS)
    show_table(rows, "published data set", "typed as", "classes", "domains", whole=("published data set",))
    say("What to get and how it is to lie: fedbench describe imagefolder:PACS.", style="dim")


def _settings() -> Iterator[tuple[str, ...]]:
    """Every setting that is no method's: its name, of what it is, its default and what it is."""
    from fedbench.core.scenario import Scenario
    from fedbench.core.spec import RunSpec, Training
    from fedbench.suites.resolve import RUN_KEYS

    of_run = {name: RunSpec.model_fields[name] for name in RUN_KEYS}
    for part, fields in (("run", of_run), ("scenario", Scenario.model_fields), ("training", Training.model_fields)):
        for name, one in fields.items():
            default = one.get_default(call_default_factory=True)
            shown = ", ".join(default) if isinstance(default, tuple) else str(default).lower()
            yield name, part, shown, one.description or ""


def _names(kind: str, files: tuple[Path, ...]) -> list[str]:
    """Names alone; the plug-ins of installed packages are not imported for them."""
    from fedbench.kinds.registry import registered

    if kind == "methods":
        return sorted(_origins(files))
    if kind == "scenarios":
        from fedbench.scenarios import scenario_names

        return list(scenario_names())
    if kind == "suites":
        from fedbench.suites.files import suite_files

        return list(suite_files())
    return list(registered(KINDS[kind]))


def _plugins(what: str) -> Iterator[tuple[str, ...]]:
    """The name as it is typed, what it is, and the package with its version that it comes from."""
    if what == "scenarios":
        from fedbench.scenarios import scenario_names

        yield from ((name, text, f"fedbench-harness {__version__}") for name, text in scenario_names().items())
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


def _methods(files: tuple[Path, ...]) -> Iterator[tuple[str, ...]]:
    from fedbench.plugins.description import Descriptions

    known = Descriptions(files)
    for name, origin in sorted(_origins(files).items()):
        try:
            method = known.of(name)
        except FedbenchError as error:  # of one method, and the others can be used
            yield name, f"broken: {error}", "", origin
        else:
            yield name, method.citation, ", ".join(row[0] for row in method.hooks), origin


def _origins(files: tuple[Path, ...]) -> dict[str, str]:
    """The package, or the file, that each method comes from."""
    # names of installed ones need no torch, and assembly imports it
    from fedbench.kinds.registry import METHOD, installed, load_plugin_file

    origins = {
        point.name: "unknown" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        for point in installed(METHOD)
    }
    return origins | {cls.name: file.name for file in files for cls in load_plugin_file(file)}


def describe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Anything that fedbench list shows, or a stack a+b.")],
    plugin: Plugins = None,
) -> None:
    """Show a method's equations, hooks and hyper-parameters, or what a suite, scenario, data set or backbone is.

    A name that several of them have shows them all.
    """
    files = plugin_files(plugin)
    cards = list(_cards(name))
    for kind, lines in cards:
        say(f"\n{kind} {name}", style="bold cyan")
        made = table("label", "text", whole=("label",))
        for label, text in lines:
            made.add_row(cell(label), cell(text))
        made.show_header = False
        console().print(made)
    try:
        _describe_methods(name, files)
    except FedbenchError:
        if not cards:
            raise


def _describe_methods(method: str, files: tuple[Path, ...]) -> None:
    from fedbench.core.spec import stack_names
    from fedbench.plugins.description import Descriptions

    stack, known = stack_names(method), Descriptions(files)
    for one in [known.of(name) for name in stack]:
        _show(one)
    if len(stack) > 1:
        from fedbench.plugins.assembly import assemble

        owners = assemble(method, {}, files).recorded_owners()
        _heading(f"{'+'.join(stack)}: who answers which hook")
        show_table(owners.items(), "hook", "answered by, in call order", whole=("hook",))


def _show(method: Description) -> None:
    out = console()
    say(method.name, style="bold cyan")
    say(method.citation)
    if method.text:
        say("")
        # in a pipe every line stays as it is
        out.print(Text(method.text), soft_wrap=not out.is_terminal)
    _heading("What it requires of a run")
    for requirement in method.requires or ("nothing",):
        say(requirement)
    _heading("What it is in a stack")
    say(method.role)
    _heading("Hooks it answers or wraps")
    show_table(method.hooks, "hook", "kind", "what it does there", whole=("hook", "kind"))
    _heading("Hyper-parameters")
    if method.parameters:
        names = ("name", "symbol", "type", "default", "range", "neutral", "source")
        show_table(method.parameters, *names, whole=("name", "symbol", "type", "default", "neutral"))
        say(f"Set one with --set {method.name}.{method.parameters[0][0]}=VALUE.", style="dim")
        if method.has_neutral:
            say("At its neutral value the method equals fedavg.", style="dim")
    else:
        say("none besides the run's budget and optimiser")
    _heading("Optimiser recipe")
    say(method.recipe or "none: the suite's optimiser is used")
    if method.recipe:
        say("Used where neither the suite's row nor --set says otherwise.", style="dim")
    say("")


def _heading(text: str) -> None:
    say(f"\n{text}", style="bold")


def _cards(name: str) -> Iterator[tuple[str, Card]]:
    """All that ``name`` stands for but methods, with what is said of it. Nothing is loaded for that."""
    from fedbench.kinds.registry import parted, registered
    from fedbench.plugins.description import parameter_rows
    from fedbench.scenarios import PRESETS
    from fedbench.suites.suite import suite_names

    if name in suite_names() or name.endswith((".yaml", ".yml")):
        yield "suite", _suite(name)
    if name in PRESETS:
        yield "scenario", _scenario(name)
    for kind in ("data set", "backbone", "partition", "text encoder", "metric"):
        found = registered(kind).get(parted(kind, name.partition("?")[0])[0])
        if found is None:
            continue
        plugin = found.load()
        if kind == "data set":
            card = _dataset(name)
        elif kind == "backbone":
            card = _backbone(name)
        else:
            card = [("what it is", plugin.description()), ("typed as", plugin.usage())]
        card += [
            (f"?{option}", f"{symbol}, {takes}, {values}; {default} by default; {source}")
            for option, symbol, takes, default, values, _, source in parameter_rows(plugin.Params)
        ]
        yield kind, [*card, ("from", found.origin)]


def _suite(name: str) -> Card:
    from fedbench.suites.expand import expand
    from fedbench.suites.resolve import Overrides
    from fedbench.suites.suite import load_suite

    suite = load_suite(name)
    card = [("what it is", suite.description), ("rows", ", ".join(row.label or row.method for row in suite.rows))]
    for scale in list(suite.scales) or [""]:
        runs = expand(suite, Overrides(scale=scale))
        settings = ", ".join(dict.fromkeys(spec.setting for spec in runs if spec.setting))
        data = ", ".join(dict.fromkeys(spec.dataset for spec in runs))
        about = [suite.scales[scale].description] if scale else []
        about += [counted(len(runs), "run"), f"settings: {settings}" if settings else "", data]
        card.append((f"scale {scale}".strip(), "; ".join(filter(None, about))))
    card += [("seeds", ", ".join(map(str, suite.seeds))), ("ranked by", ", ".join(suite.headlines))]
    card += [("paper's numbers", suite.published)] if suite.published else []
    card.append(("version", str(suite.version)))
    card += [(f"new in version {number}", text) for number, text in sorted(suite.changes.items())]
    return [*card, ("run it", f"fedbench run --suite {name}")]


def _scenario(name: str) -> Card:
    from fedbench.core.scenario import Scenario
    from fedbench.scenarios import scenario_named, scenario_names

    chosen, usual = scenario_named(name), Scenario()
    card = [("what it is", scenario_names()[name])]
    for field, about in Scenario.model_fields.items():
        value = getattr(chosen, field)
        if value != getattr(usual, field) or field in ("clients", "participation"):
            card.append((field, f"{value}: {about.description or ''}"))
    return [*card, ("who holds what", f"fedbench scenario show {name}")]


def _dataset(name: str) -> Card:
    from fedbench.datasets.catalogue import card_of
    from fedbench.kinds.registry import find

    source = find("data set", name.partition("?")[0].partition(":")[0])
    card, known = [("kind", source.description()), ("options", ", ".join(source.options()))], card_of(name)
    if known is None:
        return card
    return [
        ("what it is", f"{known.title}, {known.classes:,} classes"),
        *([("domains", ", ".join(known.domains))] if known.domains else []),
        ("to get", known.get),
        ("layout", known.layout),
        ("typed as", f"--set dataset={known.typed}"),
        ("also read as", ", ".join(sorted(known.names - {known.typed.partition("?")[0]})) or "no other name"),
        *card,
    ]


def _backbone(name: str) -> Card:
    from fedbench.kinds.registry import find, parted
    from fedbench.models import how_to_get, image_size_of, pretraining_of

    plain = name.partition("?")[0]
    family = find("backbone", parted("backbone", plain)[0])
    card = [("what it is", family.description()), ("written", family.usage())]
    card += [("options", ", ".join(family.options()))] if family.options() else []
    if ":" in plain or family.location is None:
        side = image_size_of(name)
        card.append(("images", "of any size" if side is None else f"{side} x {side} pixels"))
        pretraining = pretraining_of(name)
        card.append(("pretrained on", pretraining.text if pretraining else "nothing: it starts at random"))
        todo = how_to_get(name, folders(None, None)[0])
        card.append(("weights", todo or "none to get"))
    return card
