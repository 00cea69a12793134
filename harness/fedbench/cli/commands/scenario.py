"""``fedbench scenario show``: who holds what, before anything is trained: a paragraph, a line a client, and totals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbench.cli.options import (
    Assignments,
    Dataset,
    Further,
    Plugins,
    Scale,
    SuiteName,
    all_assignments,
    plugin_files,
)
from fedbench.core.errors import FedbenchError
from fedbench.core.wording import counted
from fedbench.workflow.asking import folders
from fedbench.workflow.console import cell, console, say, table

if TYPE_CHECKING:
    from rich.table import Table

    from fedbench.core.spec import RunSpec
    from fedbench.scenarios.picture import ClientPicture, PartitionPicture
    from fedbench.workflow.federation import Dealt
    from fedbench.workflow.selection import Selection

MOST_CLIENTS = 40
"""With more clients a selection is shown: the first, the most and the least skewed."""
_FIRST, _EXTREME = 20, 5
_MOST_BINS, _FEWEST_BINS = 60, 16
_MOST_NAMES = 12
"""If there are more classes, only the first are named."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_NONE = "·"
_GAP = 2
"""Characters between two columns."""

scenario = typer.Typer(
    help="Look at a scenario: which client holds what.",
    epilog="Example: fedbench scenario show longtail",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@scenario.command("show", epilog="Example: fedbench scenario show label-skew --set dirichlet_alpha=0.1")
def show(
    name: Annotated[
        str | None, typer.Argument(metavar="SCENARIO", help="A scenario's name; left out with --suite.")
    ] = None,
    further: Further = None,
    dataset: Dataset = None,
    seed: Annotated[int, typer.Option(metavar="INT", help="The run's seed.", min=0)] = 0,
    assignment: Assignments = None,
    suite: SuiteName = None,
    setting: Annotated[str, typer.Option(metavar="NAME", help="Of this setting of the suite.")] = "",
    scale: Scale = "",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it as CSV, which partition=table:FILE reads.")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Show which client holds how much of which class, and how skewed that is.

    The same scenario, data set and seed as in a run give the same clients as in the run.
    """
    plugin_files(plugin)
    # with --suite the first word behind --set takes the name's place
    words = [word for word in (name, *(further or ())) if word is not None]
    name = _name_among(words)
    _refuse_contradictions(name, suite, setting, scale)
    sets = all_assignments(assignment, [word for word in words if word != name], dataset=dataset)
    from fedbench.scenarios.picture import picture_of
    from fedbench.workflow.federation import deal, federation_asked

    selection = federation_asked(suite, seed, sets, setting, scale)
    dealt = deal(name, selection, folders(None, None))
    picture = picture_of(dealt.federation)
    title = (_title(name, selection, dealt.spec), _in_words(picture, dealt.spec), *_unseen(dealt))
    show_picture(picture, dealt.spec, title)
    if output is not None:
        from fedbench.scenarios import build_federation
        from fedbench.scenarios.partitions.existing import write_table

        # who is held out is drawn from all
        whole = dealt.spec.scenario.model_copy(update={"holdout_clients": 0.0})
        write_table(build_federation(dealt.data, whole, dealt.spec.seed), output)
        say(f"written to {output}; read it with --set partition=table:{output}")


def _name_among(words: Sequence[str]) -> str | None:
    """The scenario's name, wherever it stands among settings; None where there is none."""
    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise FedbenchError(f"{' and '.join(map(repr, names))} are several scenarios to show; give one.")
    return names[0] if names else None


def _refuse_contradictions(name: str | None, suite: str | None, setting: str, scale: str) -> None:
    if name is None and suite is None:
        from fedbench.scenarios import scenario_names

        raise FedbenchError(
            f"nothing to show: give a scenario ({', '.join(scenario_names())}) or --suite NAME; for instance "
            "fedbench scenario show longtail."
        )
    if name is not None and suite is not None:
        raise FedbenchError(
            f"scenario {name!r} and --suite {suite!r} are two answers to what to show; leave one out, or put the "
            f"scenario on the suite's data with --set scenario={name}."
        )
    if suite is None and (setting or scale):
        raise FedbenchError("--setting and --scale choose from a suite's grid; give --suite NAME, or leave them out.")


def _title(name: str | None, selection: Selection, spec: RunSpec) -> str:
    """The name of scenario and data, and what --set changed."""
    what = f"scenario {name}" if selection.suite is None else f"suite {Path(selection.suite).name}"
    if spec.setting:
        what += f", setting {spec.setting!r} at scale {spec.scale!r}"
    changed = ", ".join(f"{key}={value}" for key, value in dict(selection.sets).items() if key != "dataset")
    return f"{what}{' with ' if changed else ''}{changed}; data set {spec.dataset}, seed {spec.seed}"


def _in_words(picture: PartitionPicture, spec: RunSpec) -> str:
    """The scenario and what it makes of the data, as a paragraph."""
    from fedbench.scenarios.presets import scenario_summary

    settings = {name: "none" if value is None else str(value) for name, value in spec.scenario.model_dump().items()}
    effective = statistics.fmean(client.effective_classes for client in picture.clients)
    return (
        f"{counted(picture.samples, 'training sample')} of {_classes(len(picture.classnames))}, partitioned among "
        f"{counted(len(picture.clients), 'client')}: {scenario_summary(settings)}. A client holds {effective:.1f} "
        f"effective classes on average, and its classes diverge by {picture.mean_divergence:.3f} from those of all "
        "together."
    )


def _unseen(dealt: Dealt) -> Iterator[str]:
    """The classes that no client has and nobody names in training, and whether they are tested."""
    federation = dealt.federation
    names, unseen = dealt.data.classnames[federation.num_classes :], federation.unseen
    if names:
        of = f"{len(names)} of {_classes(len(dealt.data.classnames))}"
        tested = (
            "not tested, since training data are scored" if unseen is None else f"{len(unseen.test):,} test samples"
        )
        yield f"Unseen in training: {of} ({tested}): {_listed(names)}."


def show_picture(picture: PartitionPicture, spec: RunSpec, title: Sequence[str]) -> None:
    """Title, clients and totals on stdout; of more than 40 clients a selection."""
    from rich.table import Table

    out = console()
    say(title[0], style="bold")
    for paragraph in title[1:]:
        say(paragraph)
    say("")
    selected = _selected(picture)
    made, blocks = _clients(picture, selected, out.width)
    out.print(made)
    left_out = len(picture.clients) - len({client.id for held in selected.values() for client in held})
    if left_out:
        say(f"{left_out} of {len(picture.clients)} clients are left out; --output writes all of them.")
    say(
        f"effective: exp of the entropy of the class shares; largest: share of the most frequent class; JS div: "
        f"Jensen-Shannon divergence (base 2, 0 to 1) from the classes of all clients; by class: {blocks}, in label "
        f"order, scaled within the client, {_NONE} for none.",
        style="dim",
    )
    say("")
    totals = Table.grid(padding=(0, _GAP))
    totals.add_column(no_wrap=True, style="bold")
    totals.add_column(overflow="fold")
    for name, value in _totals(picture, spec):
        totals.add_row(cell(name), cell(value))
    out.print(totals)


def histogram(counts: Sequence[int]) -> str:
    """A block a count, as high as its share of the largest; the lowest block for any sample, a dot for none."""
    largest = max(counts)
    return "".join(_BLOCKS[-(-len(_BLOCKS) * count // largest) - 1] if count else _NONE for count in counts)


def _selected(picture: PartitionPicture) -> dict[str, tuple[ClientPicture, ...]]:
    """The clients to show, by what they are shown as."""
    if len(picture.clients) <= MOST_CLIENTS:
        return {"": picture.clients}
    ranked = picture.by_divergence
    return {
        f"first {_FIRST}": picture.clients[:_FIRST],
        f"{_EXTREME} most skewed": ranked[:_EXTREME],
        f"{_EXTREME} least skewed": ranked[: -_EXTREME - 1 : -1],
    }


def _clients(picture: PartitionPicture, selected: dict[str, tuple[ClientPicture, ...]], room: int) -> tuple[Table, str]:
    """The table of clients in ``room`` characters, and what a block of its histogram is."""
    import numpy as np

    from fedbench.scenarios.picture import binned, class_bin

    numbers = ("client", "samples", "classes", "effective", "largest", "JS div")
    show_domains = any(client.domains != picture.clients[0].domains for client in picture.clients)
    headings = (*numbers, "domains") if show_domains else numbers
    rows = {part: [_row(client, picture)[: len(headings)] for client in held] for part, held in selected.items()}
    columns = zip(headings, *(row for part in rows.values() for row in part), strict=True)
    bins = min(max(room - sum(max(map(len, column)) + _GAP for column in columns), _FEWEST_BINS), _MOST_BINS)
    made = table(*headings, "by class", right=numbers, whole=("domains", "by class"))
    for part, held in selected.items():
        if part:
            made.add_section()
            made.add_row(*[""] * len(headings), cell(part), style="dim")
        for client, row in zip(held, rows[part], strict=True):
            made.add_row(*map(cell, row), cell(histogram(binned(np.array(client.counts), bins).tolist())))
    width = class_bin(len(picture.classnames), bins)
    return made, "a block a class" if width == 1 else f"a block for {width} neighbouring classes"


def _row(client: ClientPicture, picture: PartitionPicture) -> tuple[str, ...]:
    held, known = len(client.domains), len(picture.domain_names)
    return (
        picture.name_of(client),
        f"{client.samples:,}",
        str(client.classes_held),
        f"{client.effective_classes:.1f}",
        f"{100 * client.largest_share:.0f} %",
        f"{client.divergence:.3f}",
        client.domains[0] if held == 1 else f"all {known}" if held == known else f"{held} of {known}",
    )


def _totals(picture: PartitionPicture, spec: RunSpec) -> Iterator[tuple[str, str]]:
    from fedbench.scenarios.participation import cohort
    from fedbench.scenarios.presets import label_words

    counts, names, sizes, asked = picture.class_counts, picture.classnames, picture.sizes, spec.scenario
    smallest, largest = min(counts), max(counts)
    yield "training", counted(picture.samples, "sample")
    ends = f"{smallest:,} ({names[counts.index(smallest)]}) to {largest:,} ({names[counts.index(largest)]})"
    evenly = smallest == largest
    yield "class counts", f"{_span(counts) if evenly else ends}; imbalance factor {_factor(picture.imbalance_factor)}"
    if not smallest:
        missing = [name for name, count in zip(names, counts, strict=True) if not count]
        yield "nobody holds", _listed(missing)
    for group, members in picture.groups.items():
        samples = counted(sum(counts[label] for label in members), "sample")
        listed = _listed([f"{names[label]} {counts[label]:,}" for label in members])
        yield group, f"{_classes(len(members))}, {samples}: {listed}"
    ratio = _factor(max(sizes) / min(sizes))
    yield "client sizes", f"{_span(sizes)}, median {statistics.median(sizes):,g}; largest over smallest {ratio}"
    yield "divergence", f"{picture.mean_divergence:.3f} on average, clients weighted by their samples"
    if picture.drift:
        further = ", ".join(f"{value:.3f}" for value in picture.drift)
        yield "drift", f"{1 + len(picture.drift)} stretches of as many rounds, the first is shown; from it {further}"
    if picture.new_clients:
        yield "new clients", f"{counted(picture.new_clients, 'client')} not shown that never train and are scored apart"
    if picture.domain_names:
        held = [len(client.domains) for client in picture.clients]
        whole = f"{held.count(len(picture.domain_names))} of {counted(len(held), 'client')} with all of them"
        yield "domains", f"{', '.join(picture.domain_names)}; {'one a client' if max(held) == 1 else whole}"
    if picture.held_out_domain is not None:
        yield "held out", f"{picture.held_out_domain}: only tested, no client trains on it"
    own = [client.test_samples for client in picture.clients]
    yield "scored" if asked.validation else "test", _split(picture.test_samples, own)
    if picture.validation_samples is not None:
        own = [client.validation_samples for client in picture.clients]
        yield "validation", _split(picture.validation_samples, own)
    sampled = len(cohort(1, len(picture.clients), asked.participation, 0.0, spec.seed))
    failing = f"; each fails to answer with probability {asked.dropout:g}" if asked.dropout else ""
    yield "participation", f"{sampled:,} of {counted(len(picture.clients), 'client')} in a round{failing}"
    if asked.validation:
        yield "tuning", "what is scored was cut from the training samples; the test split is no part of it"
    if not picture.labels_visible:
        yield "labels", "hidden: methods see none of the above"
    elif words := label_words(asked):
        yield "labels", f"{words}; the above are the right ones of all samples"


def _split(samples: int, own: Sequence[int | None]) -> str:
    known = [count for count in own if count is not None]
    of_each = f", of them {_span(known)} a client's own" if known else ", the same for all clients"
    return counted(samples, "sample") + of_each


def _listed(names: Sequence[str]) -> str:
    shown = names[:_MOST_NAMES]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(shown) < len(names) else "")


def _classes(number: int) -> str:
    return counted(number, "class", "classes")


def _span(counts: Sequence[int]) -> str:
    smallest, largest = min(counts), max(counts)
    return f"{smallest:,} each" if smallest == largest else f"{smallest:,} to {largest:,}"


def _factor(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:,.1f}"
