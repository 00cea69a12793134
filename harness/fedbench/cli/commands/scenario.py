"""``fedbench scenario``: what a scenario makes of a data set, looked at before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbench.cli.console import say
from fedbench.cli.options import Further, Plugins, all_assignments, plugin_files
from fedbench.core.errors import FedbenchError
from fedbench.core.files import expanded

if TYPE_CHECKING:
    from fedbench.core.federation import Federation
    from fedbench.core.spec import RunSpec
    from fedbench.suites.resolve import Overrides

_MOST_NAMES = 12
"""Of more unseen classes the first are named."""

scenario = typer.Typer(
    help="Look at a scenario: which client holds what.",
    epilog="Example: fedbench scenario show longtail",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@scenario.command("show", epilog="Example: fedbench scenario show label-skew --set dirichlet_alpha=0.1 --png skew.png")
def show(
    name: Annotated[
        str | None, typer.Argument(metavar="SCENARIO", help="A scenario's name; left out with --suite.")
    ] = None,
    further: Further = None,
    dataset: Annotated[str | None, typer.Option(metavar="NAME", help="Same as --set dataset=NAME.")] = None,
    seed: Annotated[int, typer.Option(metavar="INT", help="The run's seed.", min=0)] = 0,
    assignment: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A scenario's setting: dirichlet_alpha=0.1; repeat it."),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="The scenario and data set of this suite.")
    ] = None,
    setting: Annotated[str, typer.Option(metavar="NAME", help="Of this setting of the suite.")] = "",
    scale: Annotated[str, typer.Option(metavar="NAME", help="The suite's grid at this scale; else its first.")] = "",
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it into this file, too.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it as CSV, which partition=table:FILE reads.")
    ] = None,
    plugin: Plugins = None,
    everything: Annotated[bool, typer.Option("--all", help="Every client and class name, however many.")] = False,
    data_dir: Annotated[Path, typer.Option(metavar="FOLDER", help="Data sets.", envvar="FEDBENCH_DATA")] = Path("data"),
    cache_dir: Annotated[Path, typer.Option(metavar="FOLDER", help="Rendered data.", envvar="FEDBENCH_CACHE")] = Path(
        "~/.cache/fedbench"
    ),
) -> None:
    """Show which client holds how much of which class, and how skewed that is.

    The same scenario, data set and seed as in a run give the same clients as in the run.
    """
    plugin_files(plugin)
    if png is not None:
        from fedbench.scenarios.drawing import check_png

        check_png(png)
    # with --suite the first word behind --set takes the name's place
    words = [word for word in (name, *(further or ())) if word is not None]
    name = _name_among(words)
    _refuse_contradictions(name, suite, setting, scale)
    assignments = all_assignments(assignment, [word for word in words if word != name])
    from fedbench.workflow.federations import federation_overrides, spec_of_federation

    overrides = federation_overrides(dataset, seed, assignments, setting, scale)
    spec = spec_of_federation(name, suite, overrides)

    from fedbench.cli.partition import in_words, show_picture
    from fedbench.core.errors import raised_at, reason_of
    from fedbench.datasets import load_dataset
    from fedbench.scenarios import build_federation
    from fedbench.scenarios.picture import picture_of

    folders = expanded(data_dir, "--data-dir"), expanded(cache_dir, "--cache-dir")
    try:
        data = load_dataset(spec.dataset, data_dir=folders[0], cache_dir=folders[1])
    except FedbenchError:
        raise
    except Exception as error:  # whatever a plug-in's code may raise
        what = f"{reason_of(error)} ({raised_at(error)})"
        raise FedbenchError(f"data set {spec.dataset!r} can't be loaded: {what}.") from error
    federation = build_federation(data, spec.scenario, spec.seed)
    picture = picture_of(federation)
    left_out = data.classnames[federation.num_classes :]
    title = (_title(name, suite, spec, overrides), in_words(picture, spec), *_unseen(left_out, federation, everything))
    show_picture(picture, spec, title, everything=everything)
    if png is not None:
        from fedbench.scenarios.drawing import draw, write_png

        write_png(draw(picture, title), png)
        say(f"drawn into {png}")
    if output is not None:
        from fedbench.scenarios.partitions.existing import write_table

        # who is held out is drawn from all
        whole = spec.scenario.model_copy(update={"holdout_clients": 0.0})
        write_table(build_federation(data, whole, spec.seed), output)
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


def _unseen(names: Sequence[str], federation: Federation, everything: bool) -> Iterator[str]:
    """Which classes no client has and nobody names in training, and whether they are tested."""
    if not names:
        return
    shown = names if everything else names[:_MOST_NAMES]
    further = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    unseen, of = federation.unseen, f"{len(names)} of {len(names) + federation.num_classes} classes"
    tested = "not tested, since training data are scored" if unseen is None else f"{len(unseen.test):,} test samples"
    yield f"Unseen in training: {of} ({tested}): {', '.join(shown)}{further}."


def _title(name: str | None, suite: str | None, spec: RunSpec, overrides: Overrides) -> str:
    """Where scenario and data come from, and what --set changed in it."""
    what = f"scenario {name}" if suite is None else f"suite {Path(suite).name}"
    if spec.setting:
        what += f", setting {spec.setting!r} at scale {spec.scale!r}"
    changed = ", ".join(f"{key}={value}" for key, value in dict(overrides.sets).items() if key != "dataset")
    return f"{what}{' with ' if changed else ''}{changed}; data set {spec.dataset}, seed {spec.seed}"
