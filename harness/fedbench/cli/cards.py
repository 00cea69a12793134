"""Cards of what is no method: a suite, a scenario, a data set, a backbone. Nothing is loaded for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.cli.console import cell, console, say, table
from fedbench.core.scenario import Scenario
from fedbench.core.wording import counted

if TYPE_CHECKING:
    from fedbench.kinds.base import AnyPlugin
    from fedbench.kinds.registry import Registered

Card = list[tuple[str, str]]
"""Label and text of each line."""


def show_cards(name: str, data_dir: Path) -> bool:
    """Show all cards that ``name`` has: it may be a suite's and a scenario's. Whether there is any."""
    cards = list(_cards(name, data_dir))
    for kind, lines in cards:
        say(f"\n{kind} {name}", style="bold cyan")
        made = table("label", "text", whole=("label",))
        for label, text in lines:
            made.add_row(cell(label), cell(text))
        made.show_header = False
        console().print(made)
    return bool(cards)


def _cards(name: str, data_dir: Path) -> Iterator[tuple[str, Card]]:
    from fedbench.scenarios import PRESETS
    from fedbench.suites.suite import suite_names

    if name in suite_names() or name.endswith((".yaml", ".yml")):
        yield "suite", _suite(name)
    if name in PRESETS:
        yield "scenario", _scenario(name)
    for kind in ("data set", "backbone", "partition", "text encoder", "metric"):
        found = _found(kind, name)
        if found is not None:
            plugin = found.load()
            if kind == "data set":
                lines = _dataset(name)
            elif kind == "backbone":
                lines = _backbone(name, data_dir)
            else:
                lines = [("what it is", plugin.description()), ("typed as", plugin.usage())]
            yield kind, [*lines, *_parameters(plugin), ("from", found.origin)]


def _found(kind: str, name: str) -> Registered | None:
    from fedbench.kinds.registry import parted, registered

    return registered(kind).get(parted(kind, name.partition("?")[0])[0])


def _parameters(plugin: type[AnyPlugin]) -> Card:
    from fedbench.plugins.description import parameter_rows

    return [
        (f"?{name}", f"{symbol}, {kind}, {values}; {default} by default; {source}")
        for name, symbol, kind, default, values, _, source in parameter_rows(plugin.Params)
    ]


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
    from fedbench.scenarios import scenario_named, scenario_names

    chosen, usual = scenario_named(name), Scenario()
    differs = {
        field: getattr(chosen, field)
        for field in Scenario.model_fields
        if getattr(chosen, field) != getattr(usual, field) or field in ("clients", "participation")
    }
    card = [("what it is", scenario_names()[name])]
    card += [(field, f"{value}: {Scenario.model_fields[field].description or ''}") for field, value in differs.items()]
    return [*card, ("who holds what", f"fedbench scenario show --scenario {name}")]


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


def _backbone(name: str, data_dir: Path) -> Card:
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
        todo = how_to_get(name, data_dir)
        card.append(("weights", todo or "none to get"))
    return card
