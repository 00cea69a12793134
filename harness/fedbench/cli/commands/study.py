"""``fedbench study``: what studies have found, and figures of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbench.cli.options import Storage, Store
from fedbench.workflow.console import cell, console, say, table


def study(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A study; by default all are listed.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Write trials and figures there.")
    ] = None,
    storage: Storage = None,
    store: Store = None,
) -> None:
    """Show what studies found, how far it carries over, which hyper-parameters mattered, and where to browse them."""
    from fedbench.cli.tuning import budget_text, show_found, show_gaps
    from fedbench.core.files import usable_folder
    from fedbench.core.wording import counted
    from fedbench.tracking.databases import shown
    from fedbench.tracking.schema import store_uri
    from fedbench.tuning.figures import FEWEST, importances, write
    from fedbench.tuning.results import result_of
    from fedbench.tuning.storage import open_storage, storage_url
    from fedbench.tuning.studies import record_of, studies_named
    from fedbench_boards.gaps import gaps
    from fedbench_boards.gaps import write as write_gaps

    if output is not None:
        output = usable_folder(output, "--output")
    url = storage_url(storage, store_uri(store))
    studies = studies_named(open_storage(url, create=False), name)
    if not studies:
        say(f"there are no studies in {shown(url)} yet; make one with `fedbench tune`.")
        return
    results = [(record_of(study).title, result_of(study)) for study in studies]
    finished = [result for _, result in results if result is not None]
    show_found(finished)
    for title in (title for title, result in results if result is None):
        say(f"{title}: no trial is finished yet")
    every = gaps(finished, store_uri(store, to_write=False)) if name is not None or output is not None else []
    if name is not None:
        if every:
            show_gaps(every)
        lines = table("row", "hyper-parameter", "importance", right=("importance",))
        too_few: list[str] = []
        for study in studies:
            shares = importances(study)
            if not shares:
                too_few.append(record_of(study).title)
            for position, (key, share) in enumerate(shares.items()):
                lines.add_row(*map(cell, ("" if position else record_of(study).title, key, f"{share:.2f}")))
        if lines.row_count:
            console().print(lines)
            say("importance: share of the objective's variance that the value explains (PED-ANOVA)", style="dim")
        for title in too_few:
            say(f"{title}: fewer than {FEWEST} complete trials that differ, too few for an importance", style="dim")
        budgets = [record_of(study).budget for study in studies]
        for line in dict.fromkeys(f"{counted(budget.trials, 'trial')}: {budget_text(budget)}" for budget in budgets):
            say(f"budget       {line}")
    if output is not None:
        for study in studies:
            write(study, output)
        if every:
            write_gaps(every, output)
        say(f"written to {output}")
    say(f"dashboard    pip install optuna-dashboard && optuna-dashboard {shown(url)}")
