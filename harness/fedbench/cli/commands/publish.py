"""``fedbench publish``: a suite's leaderboard from nothing, at own and tuned values, as files; or a site of all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from fedbench.cli.console import say
from fedbench.cli.options import CACHE_DIR, DATA_DIR, CacheDir, DataDir, Plugins, Storage, Store, Workers
from fedbench.cli.steps import step, words_of
from fedbench.core.errors import FedbenchError

_FINE, _SOME_FAILED = 0, 1
_OF_SITE = ("site", "results", "code_url")


def publish(
    ctx: typer.Context,
    suite: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="A suite by name, or a YAML file; or give --site.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="A folder of the suite's name is written there.")
    ] = Path("leaderboards"),
    trials: Annotated[int, typer.Option(metavar="INT", help="Of tuning, for every row; 0 tunes nothing.", min=0)] = 20,
    tune_method: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="Tune only these rows; repeat it. By default all.")
    ] = None,
    tune_setting: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Tune only in these settings; repeat it. By default all.")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(metavar="INT", help="In place of the suite's; repeat it.", min=0)
    ] = None,
    scale: Annotated[str, typer.Option(metavar="NAME", help="The suite's grid at this scale; else its first.")] = "",
    site: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Run nothing; write pages of all result folders there. Takes no --suite."),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="With --site: where the results are; by default leaderboards."),
    ] = None,
    code_url: Annotated[
        str, typer.Option(metavar="URL", help="With --site: in front of paths in the repository, to link to code.")
    ] = "",
    plugin: Plugins = None,
    store: Store = None,
    storage: Storage = None,
    workers: Workers = None,
    data_dir: DataDir = DATA_DIR,
    cache_dir: CacheDir = CACHE_DIR,
) -> None:
    """Run a suite, tune it, run it tuned, and write the leaderboard with page and figures.

    Every step goes on where it was stopped, so the same command finishes what was interrupted. With --site: one static
    site of the result folders there are, with a page for every suite, method and data set.
    """
    if site is not None:
        for option in ctx.command.params:
            source = ctx.get_parameter_source(option.name or "")
            if option.name not in _OF_SITE and source is not None and source.name == "COMMANDLINE":
                raise FedbenchError(
                    f"{option.opts[0]} is for running a suite, --site writes pages of what has been run: give one of "
                    "them."
                )
        _write_site(site, results or Path("leaderboards"), code_url)
        return
    if suite is None:
        raise FedbenchError("give --suite NAME to run a suite, or --site FOLDER to write pages of all result folders.")
    if results is not None or code_url:
        raise FedbenchError("--results and --code-url are for --site.")
    from fedbench.core.files import usable_folder
    from fedbench.suites.suite import load_suite
    from fedbench.tracking.schema import store_uri
    from fedbench.tuning.storage import storage_url
    from fedbench.workflow.studies import SEEDS, unused_seeds

    read = load_suite(suite)
    if trials:
        storage_url(storage, store_uri(store))  # refused now rather than after all runs
    study = f"{read.name}-{scale}" if scale else read.name
    grid = words_of({"--suite": [suite], "--scale": [scale] if scale else []})
    stores = words_of({"--store": [store] if store else []})
    studies = words_of({"--storage": [storage] if storage else []})
    machine = words_of({"--jobs": [workers] if workers else [], "--data-dir": [data_dir], "--cache-dir": [cache_dir]})
    common = [*words_of({"--plugin": plugin or []}), *stores, *machine]
    seeds = words_of({"--seed": seed or []})
    part = words_of({"--method": tune_method or [], "--setting": tune_setting or []})
    # of no run that is shown
    spent = words_of({"--seed": unused_seeds(read, SEEDS, seed or ()), "--trials": [trials], "--study": [study]})
    folder = output / re.sub(r"[^\w.\- ]|^\.+", "_", read.name)
    usable_folder(folder, "--output")
    tuning = [
        ["tune", *grid, *part, *spent, *studies, *common],
        ["run", *grid, *part, *seeds, "--tuned", study, *studies, *common],
        ["study", study, "--output", str(folder / "tuning"), *studies, *stores],
    ]
    worst = step(ctx, ["run", *grid, *seeds, *common])
    if worst > _SOME_FAILED:
        raise typer.Exit(worst)
    for words in tuning if trials else []:
        code = step(ctx, words)
        worst = max(worst, code)
        if code != _FINE:
            break  # what is there is still written
    worst = max(worst, step(ctx, ["leaderboard", "--suite", suite, "--output", str(folder), *stores]))
    raise typer.Exit(worst)


def _write_site(site: Path, results: Path, code_url: str) -> None:
    from fedbench.core.files import usable_folder
    from fedbench_boards.site.pages import write_site

    written = write_site(usable_folder(site, "--site"), results, code_url)
    say(f"written to {site}: {written}")
