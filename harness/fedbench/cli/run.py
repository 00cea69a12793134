"""``fedbench run``: the options of a run; ``fedbench.cli.execution`` does what they ask."""

from __future__ import annotations

from typing import Annotated

import typer

from fedbench.cli.options import (
    CACHE_DIR,
    DATA_DIR,
    CacheDir,
    DataDir,
    Plugins,
    Request,
    Storage,
    Store,
    Workers,
    plugin_files,
)


def run(
    further: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Further settings behind the first --set.", show_default=False),
    ] = None,
    suite: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="A suite by name, or a YAML file.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(metavar="METHOD", help="Only these rows, or others (a+b); repeat it."),
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(metavar="INT", help="Only these seeds; repeat it.", min=0)] = None,
    assignment: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting: rounds=50, fedprox.mu=0.1; repeat it."),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Same as --set dataset=NAME; picks a grid's settings.")
    ] = None,
    scenario: Annotated[str | None, typer.Option(metavar="NAME", help="Same as --set scenario=NAME.")] = None,
    backbone: Annotated[str | None, typer.Option(metavar="NAME", help="Same as --set backbone=NAME.")] = None,
    scale: Annotated[str, typer.Option(metavar="NAME", help="The suite's grid at this scale; else its first.")] = "",
    setting: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these settings of the grid; repeat it.")
    ] = None,
    tuned: Annotated[str, typer.Option(metavar="STUDY", help="With the best values that fedbench tune found.")] = "",
    storage: Storage = None,
    plugin: Plugins = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show runs, traffic and memory; train nothing.")] = False,
    rerun: Annotated[bool, typer.Option("--rerun", help="Repeat runs that the store already has.")] = False,
    store: Store = None,
    workers: Workers = None,
    executor: Annotated[
        str, typer.Option(metavar="NAME", help="How cohorts are trained: auto, cohort (at once), sequential.")
    ] = "auto",
    data_dir: DataDir = DATA_DIR,
    cache_dir: CacheDir = CACHE_DIR,
    plain: Annotated[bool, typer.Option("--plain", help="Progress as plain lines, as in a pipe.")] = False,
) -> None:
    """Run a suite, or single methods, and show the leaderboard.

    Runs already in the store, made by the same code, are skipped, so the same command resumes what was interrupted.
    """
    from fedbench import pool

    # a single run needs no workers; whoever asks for several lets them import beside this process
    if not dry_run and workers != 1 and (suite is not None or len(method or ()) > 1 or len(seed or ()) > 1):
        pool.warm_up()
    from fedbench.cli import plan
    from fedbench.errors import FedbenchError, unknown_name
    from fedbench.executors import EXECUTORS
    from fedbench.prepare import Settings

    given = {text.partition("=")[0].strip(): text for text in assignment or ()}
    for word in further or ():
        key, sign, _ = word.partition("=")
        if not sign:
            raise FedbenchError(
                f"unexpected argument {word!r}: settings are KEY=VALUE, a suite is --suite {word}, a method --method "
                f"{word}."
            )
        if given.setdefault(key.strip(), word) != word:
            raise FedbenchError(f"{key.strip()} is set twice, by {given[key.strip()]!r} and {word!r}; leave one out.")
    request = Request(
        suite=suite,
        methods=tuple(method or ()),
        seeds=tuple(seed or ()),
        assignments=(*(assignment or ()), *(further or ())),
        dataset=dataset,
        scenario=scenario,
        backbone=backbone,
        plugin_files=plugin_files(plugin),
        scale=scale,
        settings=tuple(setting or ()),
        store=store,
        data_dir=data_dir.expanduser(),
        cache_dir=cache_dir.expanduser(),
        workers=workers,
        rerun=rerun,
        plain=plain,
        tuned=tuned,
        storage=storage,
    )
    chosen, specs = plan.requested(request)
    if executor not in EXECUTORS:
        raise unknown_name("executor", executor, EXECUTORS)
    settings = Settings(request.data_dir, request.cache_dir, request.plugin_files, executor=executor)
    if dry_run:
        plan.show(chosen, plan.plan(specs, settings, dry=True))
        return
    # imports MLflow, which neither wrong input nor a dry run should wait for
    from fedbench.cli.execution import carry_out

    raise typer.Exit(carry_out(request, chosen, specs, settings))
