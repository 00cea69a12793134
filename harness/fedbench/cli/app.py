"""The command ``fedbench``: its verbs, and what becomes of errors and Ctrl-C."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedbench.cli.commands.cache import cache
from fedbench.cli.commands.describing import describe, list_known
from fedbench.cli.commands.exchanging import merge, submit, verify
from fedbench.cli.commands.mapping import advise, map_, publish
from fedbench.cli.commands.plugins import check, new
from fedbench.cli.commands.reading import evaluate, figure, leaderboard, ui
from fedbench.cli.commands.run import run
from fedbench.cli.commands.scenario import scenario
from fedbench.cli.commands.study import study
from fedbench.cli.commands.tune import tune
from fedbench.core.errors import FedbenchError
from fedbench.core.version import __version__
from fedbench.kinds.registry import plugins_everywhere
from fedbench.workflow.console import OutputLost, complain, guard_output, say

BAD_INPUT = 2
INTERRUPTED = 130
OUTPUT_LOST = 74
"""EX_IOERR of sysexits.h."""


class _Verbs(TyperGroup):
    """Bad input ends with one message and exit code 2, Ctrl-C with 130; every other exception keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            _check_folder()
            # what a verb adds is forgotten behind it
            with plugins_everywhere(()):
                return super().invoke(ctx)
        except FedbenchError as error:
            complain(str(error))
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            complain("stopped by Ctrl-C.", label="interrupted")
            raise typer.Exit(INTERRUPTED) from None


def _check_folder() -> None:
    """Every path is looked up from the working directory, which somebody may have deleted."""
    try:
        os.getcwd()
    except OSError as error:
        raise FedbenchError(f"the working directory can't be read ({error.strerror}); change to another.") from None


app = typer.Typer(
    name="fedbench",
    cls=_Verbs,
    help="Compare federated-learning methods: one suite, one table, every run reproducible.",
    epilog="First steps: fedbench list suites, then fedbench run --suite longtail",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        say(f"fedbench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of the command itself."""


_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "run": (run, "fedbench run --suite longtail --seed 0 --set rounds=50"),
    "tune": (tune, "fedbench tune --suite longtail --method clip2fl --trials 20"),
    "study": (study, "fedbench study longtail --output figures"),
    "list": (list_known, "fedbench list methods"),
    "describe": (describe, "fedbench describe fedprox, or a stack: fedbench describe fedclip+fedprox"),
    "check": (check, "fedbench check mine --plugin mine.py"),
    "leaderboard": (leaderboard, "fedbench leaderboard --suite longtail --output leaderboards/longtail"),
    "advise": (advise, "fedbench advise --counts clients.csv --participation 0.4 --max-mb 10"),
    "map": (map_, "fedbench map --suite map --jobs 2 --output leaderboards"),
    "publish": (publish, "fedbench publish --suite longtail --trials 20 --output leaderboards"),
    "evaluate": (evaluate, "fedbench evaluate 3f2a, with the first digits of a run's id"),
    "figure": (figure, "fedbench figure sweep --suite fedglcl --by fedglcl.tau -o tau.pdf"),
    "submit": (submit, "fedbench submit leaderboards/longtail"),
    "verify": (verify, "fedbench verify leaderboards/longtail --share 0.1"),
    "merge": (merge, "fedbench merge theirs ours --into all"),
    "ui": (ui, "fedbench ui --port 8080"),
}
for _name, (_verb, _example) in _COMMANDS.items():
    app.command(_name, epilog=f"Example: {_example}")(_verb)
app.add_typer(new, name="new")
app.add_typer(scenario, name="scenario")
app.add_typer(cache, name="cache")


def main() -> None:
    """Run the command line; raises SystemExit with its exit code."""
    app(prog_name="fedbench")


def command() -> None:
    """`main` as a process of its own: a stdout that can't be written ends it with one message."""
    ended: list[int] = []
    atexit.register(_leave, ended)  # registered first, so it runs last
    try:
        guard_output()
        try:
            main()
        finally:
            sys.stdout.flush()
    except OutputLost as error:
        complain(f"{error} What is stored stays; the same command goes on." if error.is_resumable else str(error))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
        ended.append(OUTPUT_LOST)
        sys.exit(OUTPUT_LOST)
    except SystemExit as status:
        if isinstance(status.code, int):
            ended.append(status.code)
        raise


def _leave(ended: list[int]) -> None:
    """End the process here: the interpreter would take two seconds to free torch's and MLflow's objects one by one."""
    if ended:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it is closed
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(ended[0])
