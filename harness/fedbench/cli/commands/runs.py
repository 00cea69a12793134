"""``fedbench runs``: what a store has, and dropping some of it."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from fedbench.cli.console import cell, console, say, table
from fedbench.cli.options import Store
from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.wording import NONE, counted

if TYPE_CHECKING:
    from fedbench.tracking.recorded.keeping import KeptRun, Which

runs = typer.Typer(
    help="The runs of a store: list them, drop some.",
    epilog="Example: fedbench runs list --suite longtail",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
_Suite = Annotated[str | None, typer.Option(metavar="NAME", help="Of this suite alone.")]
_Method = Annotated[str, typer.Option("--method", metavar="METHOD", help="Of this method or stack alone.")]
_Status = Annotated[str, typer.Option(metavar="NAME", help="finished, failed or running.")]


@runs.command("list", epilog="Example: fedbench runs list --status failed")
def list_runs(suite: _Suite = None, method: _Method = "", status: _Status = "", store: Store = None) -> None:
    """Show the runs of a store, oldest first."""
    from fedbench.tracking.recorded.keeping import kept_runs
    from fedbench.tracking.schema import store_uri

    found = kept_runs(store_uri(store, to_write=False), _which(suite, method, status, ()))
    _show(found)
    say(counted(len(found), "run"), style="dim")


@runs.command("drop", epilog="Example: fedbench runs drop 3f2a --yes; or fedbench runs drop --status failed")
def drop(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Beginnings of runs' ids.")] = None,
    suite: _Suite = None,
    method: _Method = "",
    status: _Status = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    store: Store = None,
) -> None:
    """Delete runs, and the commands that then have none left.

    MLflow marks them as deleted, so that `mlflow runs restore` has them back until `mlflow gc` frees their disk space.
    """
    from fedbench.tracking.recorded.keeping import drop_runs, kept_runs
    from fedbench.tracking.schema import store_uri

    which = _which(suite, method, status, tuple(ids or ()))
    if not (which.ids or suite or method or status):
        raise FedbenchError("nothing to drop: give ids, --suite, --method or --status.")
    uri = store_uri(store)
    found = kept_runs(uri, which)
    if not found:
        say("no such run; nothing is dropped.")
        return
    _show(found)
    if not yes and not typer.confirm(f"Drop {counted(len(found), 'run')}?"):
        say("nothing is dropped.")
        return
    parents = drop_runs(uri, found)
    commands = f" and {counted(parents, 'command')} without a run" if parents else ""
    say(f"dropped {counted(len(found), 'run')}{commands}; their disk space: mlflow gc --backend-store-uri {uri}")


def _which(suite: str | None, method: str, status: str, ids: tuple[str, ...]) -> Which:
    from fedbench.core.spec import stack_names
    from fedbench.tracking.recorded.keeping import STATUSES, Which

    if status and status not in STATUSES:
        raise unknown_name("status", status, STATUSES)
    return Which(suite, "+".join(stack_names(method)) if method else "", status, ids)


def _show(found: list[KeptRun]) -> None:
    made = table("run", "suite", "row", "seed", "status", "accuracy", "begun", whole=("run",), right=("accuracy",))
    for one in found:
        tags, info = one.tags, one.run.info
        setting = tags.text("setting")
        accuracy = NONE if math.isnan(one.accuracy) else f"{one.accuracy:.1f}"
        begun = datetime.fromtimestamp(info.start_time / 1000, UTC).strftime("%Y-%m-%d %H:%M")
        row = f"{setting} · {tags.text('row')}" if setting else tags.text("row")
        seed = one.run.data.params["seed"]
        made.add_row(*map(cell, (one.run_id, one.suite, row, seed, info.status.lower(), accuracy, begun)))
    console().print(made)
