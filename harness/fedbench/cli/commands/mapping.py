"""Commands made of others, each shown as it would be typed: ``publish``, ``map``, and ``advise``, which reads a map."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbench.cli.options import (
    OutputFolder,
    Plugins,
    Scale,
    Seed,
    Storage,
    Store,
    SuiteName,
    Workers,
    finite,
    plugin_files,
)
from fedbench.core.errors import FedbenchError
from fedbench.core.files import usable_folder
from fedbench.tracking.databases import masked
from fedbench.workflow.console import clock, resumable, say, show_table

if TYPE_CHECKING:
    from fedbench.suites.suite import Suite
    from fedbench_boards.advice.advising import Advice

_FINE, _SOME_FAILED = 0, 1
_OF_SITE = ("site", "results")


def step(ctx: typer.Context, *words: str) -> int:
    """Carry out one command of fedbench, shown first; its exit code."""
    # the command line that this command was found on: its module imports this one
    root: Any = ctx.find_root().command
    with resumable():
        say(f"$ {shlex.join(['fedbench', *map(masked, words)])}", style="bold")
        return int(root(words, prog_name="fedbench", standalone_mode=False) or 0)


def given(option: str, values: Any) -> list[str]:
    """The option with its value, or with each of several, as words of a command line; none where nothing is given."""
    several = values if isinstance(values, list | tuple) else [values]
    return [word for value in several if value not in (None, "") for word in (option, str(value))]


def _folder_of(suite: Suite, output: Path) -> Path:
    return usable_folder(output / re.sub(r"[^\w.\- ]|^\.+", "_", suite.name), "--output")


def publish(
    ctx: typer.Context,
    suite: SuiteName = None,
    output: OutputFolder = Path("leaderboards"),
    trials: Annotated[int, typer.Option(metavar="INT", help="Of tuning, for every row; 0 tunes nothing.", min=0)] = 20,
    seed: Seed = None,
    scale: Scale = "",
    site: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Run nothing; write pages of all result folders there. Takes no --suite."),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="With --site: where the results are; by default leaderboards."),
    ] = None,
    plugin: Plugins = None,
    store: Store = None,
    storage: Storage = None,
    workers: Workers = None,
) -> None:
    """Run a suite, tune it, run it tuned, and write the leaderboard with page and figures.

    Every step goes on where it was stopped, so the same command finishes what was interrupted. With --site: one static
    site: first the pictures that README.md in --results shows, then a page for every suite, method and data set there.
    """
    if site is not None:
        _refuse_beside_site(ctx)
        from fedbench_boards.site.pages import write_site

        written = write_site(usable_folder(site, "--site"), results or Path("leaderboards"))
        say(f"written to {site}: {written}")
        return
    if suite is None:
        raise FedbenchError("give --suite NAME to run a suite, or --site FOLDER to write pages of all result folders.")
    if results is not None:
        raise FedbenchError("--results is for --site.")
    from fedbench.suites.suite import load_suite
    from fedbench.tracking.schema import store_uri
    from fedbench.tuning.storage import storage_url
    from fedbench.workflow.studies import SEEDS, unused_seeds

    plugin_files(plugin)
    read = load_suite(suite)
    if trials:
        storage_url(storage, store_uri(store))  # refused now rather than after all runs
    study = read.name + (f"-{scale}" if scale else "")
    grid, stores = [*given("--suite", suite), *given("--scale", scale)], given("--store", store)
    studies, seeds = given("--storage", storage), given("--seed", seed)
    plugins = given("--plugin", plugin)
    common = [*plugins, *stores, *given("--jobs", workers)]
    # of no run that is shown
    spent = [*given("--seed", unused_seeds(read, SEEDS, seed or ())), *given("--trials", trials)]
    folder = _folder_of(read, output)
    worst = step(ctx, "run", *grid, *seeds, *common)
    if worst > _SOME_FAILED:
        raise typer.Exit(worst)
    tuning = [
        ["tune", *grid, *spent, "--study", study, *studies, *common],
        ["run", *grid, *seeds, "--tuned", study, *studies, *common],
        ["study", study, "--output", str(folder / "tuning"), *studies, *stores],
    ]
    for words in tuning if trials else []:
        code = step(ctx, *words)
        worst = max(worst, code)
        if code != _FINE:
            break  # what is there is still written
    board = step(ctx, "leaderboard", "--suite", suite, "--output", str(folder), *plugins, *stores)
    raise typer.Exit(max(worst, board))


def _refuse_beside_site(ctx: typer.Context) -> None:
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name or "")
        if option.name not in _OF_SITE and source is not None and source.name == "COMMANDLINE":
            raise FedbenchError(
                f"{option.opts[0]} is for running a suite, --site writes pages of what has been run: give one of them."
            )


def map_(
    ctx: typer.Context,
    suite: Annotated[str, typer.Option(metavar="NAME|FILE", help="A suite of several settings.")] = "map",
    output: OutputFolder = Path("leaderboards"),
    rates: Annotated[
        str, typer.Option(metavar="FACTORS", help="Of every row's learning rate, to choose among; 1 chooses nothing.")
    ] = "0.1,1,10",
    seed: Seed = None,
    plugin: Plugins = None,
    store: Store = None,
    workers: Workers = None,
) -> None:
    """Run a suite with every row at its best learning rate in each setting, and write what fedbench advise reads.

    Each row first runs at every rate on four fifths of the training data, at a seed that the suite has not; the best
    on the other fifth counts: rates.csv. Then the suite runs with these, and the folder gets the leaderboard and
    evidence.csv.gz. The same command goes on where it was stopped.
    """
    from fedbench.suites.suite import load_suite
    from fedbench.tracking.schema import FINAL, store_uri
    from fedbench.workflow.studies import unused_seeds
    from fedbench_boards.advice import rates as choosing
    from fedbench_boards.advice.evidence import SHIPPED, evidence_of, write_evidence
    from fedbench_boards.leaderboard.results import load_results

    files = plugin_files(plugin)
    factors, read = _factors(rates), load_suite(suite)
    folder = _folder_of(read, output)
    common = [*given("--plugin", plugin), *given("--store", store)]
    jobs, chosen, worst = given("--jobs", workers), folder / "rates.csv", _FINE

    def run(*words: str) -> None:
        nonlocal worst
        worst = max(worst, step(ctx, "run", *words, *common, *jobs))
        if worst > _SOME_FAILED:
            raise typer.Exit(worst)

    tables: list[Path] = []
    if factors != [1.0]:
        (trial_seed,) = unused_seeds(read, 1, seed or ())
        trial, tried_with = choosing.write(read, suite, factors, trial_seed, files, folder / choosing.FOLDER)
        for table in tried_with:
            run("--suite", str(trial), "--tuned", str(table))
        stored = load_results(store_uri(store, to_write=False), choosing.name_of(read))
        tried = choosing.runs_of(stored, str(trial), tried_with, (trial_seed,), files)
        choosing.best(tried, trial_seed).to_csv(chosen, index=False)
        tables = [chosen]
        spent = tried[f"{FINAL}seconds"].sum() / len(factors) * len(seed or read.seeds)
        say(f"The suite's runs take about {clock(spent)}, divided by --jobs, as those that chose the rates did.")
    run("--suite", suite, *given("--tuned", tables), *given("--seed", seed))
    worst = max(worst, step(ctx, "leaderboard", "--suite", suite, *common, "--output", str(folder)))
    uri = store_uri(store, to_write=False)
    measured = choosing.runs_of(load_results(uri, read.name), suite, tables, tuple(seed or ()), files)
    write_evidence(evidence_of(uri, measured), folder / SHIPPED)
    say(f"evidence written to {folder}")
    raise typer.Exit(worst)


def _factors(text: str) -> list[float]:
    try:
        factors = [float(part) for part in text.split(",")]
    except ValueError:
        factors = []
    if not factors or len(set(factors)) < len(factors) or not all(0 < factor <= 1e4 for factor in factors):
        raise FedbenchError(f"--rates {text!r}: give different positive factors, such as 0.1,1,10.")
    return factors


def advise(
    ctx: typer.Context,
    counts: Annotated[
        Path,
        typer.Option(metavar="FILE", help="CSV: client and a column by class, a line a client; or client and label."),
    ],
    participation: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Of the clients that train in a round.", min=0.0, max=1.0, callback=finite),
    ] = 1.0,
    needs: Annotated[
        str, typer.Option(metavar="MODEL", help="global: one for all; personal: each client's own.")
    ] = "global",
    max_mb: Annotated[
        float | None, typer.Option(metavar="MB", help="Sent both ways by all clients in a run.", callback=finite)
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="To train a run of the map, on one core.", callback=finite)
    ] = None,
    domains: Annotated[
        bool, typer.Option("--domains", help="Every client has a domain: its own camera, hospital or style.")
    ] = False,
    evidence: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="evidence.csv.gz of fedbench map; else what ships with it."),
    ] = None,
    baseline: Annotated[str, typer.Option(metavar="ROW", help="What margins are over.")] = "fedavg",
    run: Annotated[
        bool, typer.Option("--run", help="Run the rows to try and the baseline on exactly these counts.")
    ] = False,
    dataset: Annotated[str, typer.Option(metavar="NAME", help="What --run takes samples of.")] = "",
    backbone: Annotated[str, typer.Option(metavar="NAME", help="What --run runs on.")] = "",
    seed: Seed = None,
    store: Store = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where --run writes suite, counts and leaderboard.")
    ] = Path("advice"),
) -> None:
    """Advise which methods to try, by how much they may lead, and how far that is to be trusted.

    The federation is measured (skew, imbalance, sizes, participation, domains), and every method's lead is forecast
    from the settings of fedbench map. --run tries them on the federation's own counts, each at its best rate.
    """
    from fedbench_boards.advice.advising import Constraints, Forecaster, caveats, write_replay
    from fedbench_boards.advice.evidence import GLOBAL, PERSONAL, measures_of, read_counts, read_evidence

    if needs not in (GLOBAL, PERSONAL):
        raise FedbenchError(f"--needs {needs!r} is neither {GLOBAL} nor {PERSONAL}.")
    if participation == 0:
        raise FedbenchError("--participation 0: somebody must train.")
    clients, known = read_counts(counts), read_evidence(evidence)
    limits = Constraints(needs, *(math.inf if most is None else most for most in (max_mb, max_seconds)))
    measures = measures_of(clients.to_numpy(), participation, has_domains=domains)
    advice = Forecaster(known, baseline, needs).advise(measures, limits)
    _show(advice)
    for sentence in caveats(advice):
        say(sentence)
    data, backbones = (", ".join(sorted(set(known.runs[of]))) for of in ("dataset", "backbone"))
    say(f"It rests on {len(known.runs):,} runs on {data}, with {backbones}: neither your data nor your backbone.")
    if needs == PERSONAL:
        say("Scores are means over clients by their own models, or by the global one where a row has none.")
        say("Rates were chosen for the global model where a row has one.")
    if run:
        rows = [baseline, *(choice.row for choice in advice.to_try)]
        suite = write_replay(known.runs, rows, clients, participation, dataset, backbone, output)
        say(f"the suite {suite} has these counts and the rows to try")
        options = [*given("--seed", seed), *given("--store", store)]
        raise typer.Exit(step(ctx, "map", "--suite", str(suite), "--output", str(output), *options))


def _show(advice: Advice) -> None:
    from fedbench_boards.advice.advising import RATE, interval_shown
    from fedbench_boards.advice.evidence import WORDS

    measures = [(WORDS[name], f"{value:.2f}") for name, value in asdict(advice.measures).items()]
    show_table(measures, "this federation", "", right=("",))
    say("")
    near = [(setting, f"{distance:.2f}") for setting, distance in advice.nearest.items()]
    show_table(near, "nearest measured settings", "steps away", right=("steps away",))
    say("")
    rows = []
    for choice in advice.to_try:
        interval = interval_shown(choice.margin, choice.half_width)
        rows.append((choice.row, f"{choice.margin:+.1f}", interval, f"{choice.megabytes:.3g}", f"{choice.seconds:.2g}"))
    numbers = (f"over {advice.baseline}", f"{RATE:.0%} interval", "MB", "seconds")
    show_table(rows, "try", *numbers, right=numbers)
    say("")
