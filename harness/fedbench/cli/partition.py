"""The picture of a partition as text: a paragraph, a line a client, and totals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from rich.table import Table

from fedbench.cli.console import cell, console, say, table
from fedbench.core.spec import RunSpec
from fedbench.core.wording import counted
from fedbench.scenarios.participation import cohort
from fedbench.scenarios.picture import ClientPicture, PartitionPicture, binned, class_bin
from fedbench.scenarios.presets import label_words, scenario_summary

MOST_CLIENTS = 40
"""With more clients a selection is shown: the first, the most and the least skewed."""
_FIRST, _EXTREME = 20, 5
_MOST_BINS, _FEWEST_BINS = 60, 16
_MOST_NAMES = 12
_BLOCKS = "▁▂▃▄▅▆▇█"
_NONE = "·"
_GAP = 2
"""Characters between two columns."""


def in_words(picture: PartitionPicture, spec: RunSpec) -> str:
    """The scenario and what it makes of the data, as a paragraph."""
    settings = {name: "none" if value is None else str(value) for name, value in spec.scenario.model_dump().items()}
    clients = len(picture.clients)
    effective = statistics.fmean(client.effective_classes for client in picture.clients)
    classes = counted(len(picture.classnames), "class", "classes")
    return (
        f"{counted(picture.samples, 'training sample')} of {classes}, partitioned among {counted(clients, 'client')}: "
        f"{scenario_summary(settings)}. A client holds {effective:.1f} effective classes on average, and its classes "
        f"diverge by {picture.mean_divergence:.3f} from those of all together."
    )


def show_picture(picture: PartitionPicture, spec: RunSpec, title: Sequence[str], *, everything: bool) -> None:
    """Title, clients and totals on stdout; ``everything`` shows also more than 40 clients, and every class name."""
    out = console()
    say(title[0], style="bold")
    for paragraph in title[1:]:
        say(paragraph)
    say("")
    selected = {"": picture.clients} if everything else _selected(picture)
    made, width = _clients(picture, selected, out.width)
    out.print(made)
    _explain(picture, selected, width)
    say("")
    totals = Table.grid(padding=(0, _GAP))
    totals.add_column(no_wrap=True, style="bold")
    totals.add_column(overflow="fold")
    for name, value in _totals(picture, spec, everything=everything):
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


def _clients(picture: PartitionPicture, selected: dict[str, tuple[ClientPicture, ...]], room: int) -> tuple[Table, int]:
    """The table of clients in ``room`` characters, and how many neighbouring classes share a block of its histogram."""
    headings = ("client", "samples", "classes", "effective", "largest", "JS div")
    show_domains = any(client.domains != picture.clients[0].domains for client in picture.clients)
    texts = ("domains",) if show_domains else ()
    rows = {part: [_row(client, picture, texts) for client in held] for part, held in selected.items()}
    columns = zip(headings + texts, *(row for part in rows.values() for row in part), strict=True)
    taken = sum(max(map(len, column)) + _GAP for column in columns)
    bins = min(max(room - taken, _FEWEST_BINS), _MOST_BINS)
    made = table(*headings, *texts, "by class", right=headings, whole=(*texts, "by class"))
    for part, held in selected.items():
        if part:
            made.add_section()
            made.add_row(*[""] * len(headings + texts), cell(part), style="dim")
        for client, row in zip(held, rows[part], strict=True):
            made.add_row(*map(cell, row), cell(histogram(binned(np.array(client.counts), bins).tolist())))
    return made, class_bin(len(picture.classnames), bins)


def _row(client: ClientPicture, picture: PartitionPicture, texts: Sequence[str]) -> tuple[str, ...]:
    numbers = (
        picture.name_of(client),
        f"{client.samples:,}",
        str(client.classes_held),
        f"{client.effective_classes:.1f}",
        f"{100 * client.largest_share:.0f} %",
        f"{client.divergence:.3f}",
    )
    return (*numbers, _domains(client, picture)) if texts else numbers


def _domains(client: ClientPicture, picture: PartitionPicture) -> str:
    """The client's domain; how many, where it has several."""
    held, known = len(client.domains), len(picture.domain_names)
    return client.domains[0] if held == 1 else f"all {known}" if held == known else f"{held} of {known}"


def _explain(picture: PartitionPicture, selected: dict[str, tuple[ClientPicture, ...]], width: int) -> None:
    shown = {client.id for held in selected.values() for client in held}
    left_out = len(picture.clients) - len(shown)
    if left_out:
        say(f"{left_out} of {len(picture.clients)} clients are left out; --all shows them.")
    blocks = "a block a class" if width == 1 else f"a block for {width} neighbouring classes"
    say(
        f"effective: exp of the entropy of the class shares; largest: share of the most frequent class; JS div: "
        f"Jensen-Shannon divergence (base 2, 0 to 1) from the classes of all clients; by class: {blocks}, in label "
        f"order, scaled within the client, {_NONE} for none.",
        style="dim",
    )


def _totals(picture: PartitionPicture, spec: RunSpec, *, everything: bool) -> Iterator[tuple[str, str]]:
    counts, names, sizes = picture.class_counts, picture.classnames, picture.sizes
    smallest, largest = min(counts), max(counts)
    yield "training", counted(picture.samples, "sample")
    ends = f"{smallest:,} ({names[counts.index(smallest)]}) to {largest:,} ({names[counts.index(largest)]})"
    evenly = smallest == largest
    yield "class counts", f"{_span(counts) if evenly else ends}; imbalance factor {_factor(picture.imbalance_factor)}"
    if not smallest:
        missing = [name for name, count in zip(names, counts, strict=True) if not count]
        yield "nobody holds", _listed(missing, everything=everything)
    for group, members in picture.groups.items():
        samples = sum(counts[label] for label in members)
        listed = _listed([f"{names[label]} {counts[label]:,}" for label in members], everything=everything)
        yield group, f"{counted(len(members), 'class', 'classes')}, {counted(samples, 'sample')}: {listed}"
    ratio = _factor(max(sizes) / min(sizes))
    yield "client sizes", f"{_span(sizes)}, median {statistics.median(sizes):,g}; largest over smallest {ratio}"
    yield "divergence", f"{picture.mean_divergence:.3f} on average, clients weighted by their samples"
    if picture.drift:
        further = ", ".join(f"{value:.3f}" for value in picture.drift)
        yield "drift", f"{1 + len(picture.drift)} stretches of as many rounds, the first is shown; from it {further}"
    if picture.new_clients:
        yield "new clients", f"{counted(picture.new_clients, 'client')} not shown that never train and are scored apart"
    yield from _domain_lines(picture)
    scored = "scored" if spec.scenario.validation else "test"
    yield scored, _split(picture.test_samples, [client.test_samples for client in picture.clients])
    if picture.validation_samples is not None:
        own = [client.validation_samples for client in picture.clients]
        yield "validation", _split(picture.validation_samples, own)
    yield "participation", _participation(picture, spec)
    if spec.scenario.validation:
        yield "tuning", "what is scored was cut from the training samples; the test split is no part of it"
    if not picture.labels_visible:
        yield "labels", "hidden: methods see none of the above"
    elif words := label_words(spec.scenario):
        yield "labels", f"{words}; the above are the right ones of all samples"


def _domain_lines(picture: PartitionPicture) -> Iterator[tuple[str, str]]:
    if picture.domain_names:
        held = [len(client.domains) for client in picture.clients]
        whole = f"{held.count(len(picture.domain_names))} of {counted(len(held), 'client')} with all of them"
        yield "domains", f"{', '.join(picture.domain_names)}; {'one a client' if max(held) == 1 else whole}"
    if picture.held_out_domain is not None:
        yield "held out", f"{picture.held_out_domain}: only tested, no client trains on it"


def _split(samples: int, own: Sequence[int | None]) -> str:
    known = [count for count in own if count is not None]
    if not known:
        return f"{counted(samples, 'sample')}, the same for all clients"
    return f"{counted(samples, 'sample')}, of them {_span(known)} a client's own"


def _participation(picture: PartitionPicture, spec: RunSpec) -> str:
    clients, scenario = len(picture.clients), spec.scenario
    sampled = len(cohort(1, clients, scenario.participation, 0.0, spec.seed))
    failing = f"; each fails to answer with probability {scenario.dropout:g}" if scenario.dropout else ""
    return f"{sampled:,} of {counted(clients, 'client')} in a round{failing}"


def _listed(names: Sequence[str], *, everything: bool) -> str:
    shown: Iterable[str] = names if everything else names[:_MOST_NAMES]
    further = 0 if everything else max(len(names) - _MOST_NAMES, 0)
    return ", ".join(shown) + (f" and {further} more" if further else "")


def _span(counts: Sequence[int]) -> str:
    smallest, largest = min(counts), max(counts)
    return f"{smallest:,} each" if smallest == largest else f"{smallest:,} to {largest:,}"


def _factor(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:,.1f}"
