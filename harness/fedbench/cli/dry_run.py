"""The table of ``--dry-run``: what each row costs, and what to get for rows whose data are not here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedbench.core.spec import RunSpec
from fedbench.core.wording import counted
from fedbench.datasets.catalogue import card_of
from fedbench.models import how_to_get
from fedbench.plugins.assembly import AROUND
from fedbench.rounds.executors.gradients import MEMORY
from fedbench.runs.prepare import Settings
from fedbench.suites.suite import Suite, asked_for
from fedbench.workflow.console import cell, complain, console, gigabytes, megabytes, say, table
from fedbench.workflow.plan import AbsentRow, FailedRow, PlannedRow, SuitePlan


def show(suite: Suite, plan: SuitePlan, settings: Settings) -> None:
    """The table of ``--dry-run``, the reasons of failed rows, and what is to be got before the absent ones can run."""
    rows, failed = plan.rows, plan.failed
    every: list[PlannedRow | FailedRow | AbsentRow] = [*rows, *failed, *plan.absent]
    runs = sum(len(row.specs) for row in every)
    asked = asked_for(suite.name, (spec for row in every for spec in row.specs))
    say(f"suite {asked}: {counted(runs, 'run')}")
    has_private = any(row.sent != row.info.trainable_parameters for row in rows)
    numbers = ("rounds", *(("trained",) if has_private else ()), "sent", "MB/client", "MB/run", "memory")
    grid = any(row.specs[0].setting for row in every)
    here: list[PlannedRow | AbsentRow] = [*rows, *plan.absent]
    backbones = {row.specs[0].backbone for row in here}
    shared_name = next(iter(backbones)) if len(backbones) == 1 and len(here) > 1 else ""
    if shared_name:
        say(f"backbone {shared_name}")
    made = table(*(["setting"] if grid else []), "row", "seeds", "rounds", "clients", *numbers[1:], right=numbers)
    for row in rows:
        made.add_row(
            *([cell(row.specs[0].setting)] if grid else []),
            cell(_short(row, shared_name)),
            cell(" ".join(str(spec.seed) for spec in row.specs)),
            cell(row.rounds),
            cell(f"{row.info.cohort_size} of {row.info.num_clients}"),
            *([cell(f"{row.info.trainable_parameters:,}")] if has_private else []),
            cell(f"{row.sent:,}"),
            cell(megabytes(row.bytes_per_client)),
            cell(megabytes(row.run_bytes)),
            cell("not measured" if row.memory is None or row.memory.total is None else gigabytes(row.memory.total)),
        )
    others: list[FailedRow | AbsentRow] = [*failed, *plan.absent]
    for other in others:
        spec, seeds = other.specs[0], " ".join(str(one.seed) for one in other.specs)
        name = spec.row if isinstance(other, FailedRow) else _short(other, shared_name)
        known = ("failed",) if isinstance(other, FailedRow) else (str(spec.training.rounds), "not here")
        made.add_row(*([cell(spec.setting)] if grid else []), cell(name), cell(seeds), *known)
    console().print(made)
    if plan.absent:
        say("not here: what these rows read is not on this machine. To get:", style="bold")
        for line in _to_get(plan.absent, settings):
            say(line)
    for lost in failed:
        complain(f"{lost.specs[0].title}: {lost.reason}", label="failed")
    if rows:
        _explain(rows, has_private)
    say("Nothing was run or stored.", style="dim")


def _short(row: PlannedRow | AbsentRow, shared_name: str) -> str:
    """The row's name without the backbone that all of them have."""
    return row.specs[0].row.replace(f" · {shared_name}", "", 1) if shared_name else row.specs[0].row


def _explain(rows: Sequence[PlannedRow], has_private: bool) -> None:
    """What the numbers of the dry run mean."""
    parts = (
        "trained: parameters; sent: those of them that leave a client" if has_private else "sent: trained parameters"
    )
    total = megabytes(sum(row.run_bytes * len(row.specs) for row in rows))
    lines = [
        f"{parts}. MB/client: the model down and up, in a round.",
        f"All runs together: {total} MB or more: what a method sends besides is counted when it runs.",
        "memory: a run's process beside Python: weights, samples and one client's local step, measured on few samples.",
        f"Where clients train at once, their steps together take up to {gigabytes(MEMORY)}, or one client's.",
    ]
    needs = [(row.specs[0].title, row.memory) for row in rows if row.memory is not None]
    known = [(memory.total, title, memory) for title, memory in needs if memory.total is not None]
    if known:
        _, title, memory = max(known, key=lambda one: one[0])
        step = f", a step on {memory.batch} samples {gigabytes(memory.step)}" if memory.step else ""
        lines.append(f"Most: {title}: weights {gigabytes(memory.weights)}, samples {gigabytes(memory.samples)}{step}.")
    lines += dict.fromkeys(text for row in rows if (text := _order(row)))
    reasons = {memory.unmeasured: title for title, memory in needs[::-1] if memory.unmeasured}
    lines += [f"Not measured: {title}: {reason}" for reason, title in reasons.items()]
    for line in lines:
        say(line, style="dim")


def _order(row: PlannedRow) -> str:
    """Who wraps whom in the row's stack, and in which steps."""
    hooks: dict[str, list[str]] = {}
    for hook, owners in row.info.owners.items():
        if AROUND in owners:
            hooks.setdefault(owners.partition(", ")[0], []).append(hook)
    parts = [f"{order} ({', '.join(names)})" for order, names in hooks.items()]
    return f"{row.specs[0].method}: {'; '.join(parts)}." if parts else ""


def _to_get(rows: Sequence[AbsentRow], settings: Settings) -> Iterator[str]:
    """A line for each data set and each file of weights: where it is published, where it is to lie, what to type."""
    for name in dict.fromkeys(row.specs[0].dataset for row in rows if row.lacks == "data"):
        card = card_of(name)
        assert card is not None, "other data are an error"
        folder = name.partition("?")[0].partition(":")[2]
        place = f"as {str(settings.data_dir / folder)!r}" if folder else f"below {str(settings.data_dir)!r}"
        hub = f"; or --set dataset=hf:{card.hub[0]}" if card.hub else ""
        yield f"  {card.title} ({name}): {card.get}"
        yield f"      {place}: {card.layout}{hub}"
    wanted: dict[str, str] = {}
    for name in dict.fromkeys(name for row in rows for name in _pretrained(row.specs[0])):
        wanted.setdefault(how_to_get(name, settings.data_dir), name)  # networks with other options read the same file
    yield from (f"  {name}: {todo}" for todo, name in wanted.items() if todo)


def _pretrained(spec: RunSpec) -> list[str]:
    beside = [name for name in (spec.teacher, spec.text_encoder) if name.startswith(("clip:", "glove:"))]
    return [spec.backbone, *beside]
