"""A plug-in of one's own: ``new method`` writes a package to begin with, ``check`` holds one against its contract."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fedbench.cli.options import Plugins, plugin_files
from fedbench.core.errors import FedbenchError
from fedbench.core.files import expanded
from fedbench.workflow.console import say

BROKEN = 1
Check = Callable[[str], str | None]
_LONGEST = 1000
"""Characters of a reason that are shown."""
new = typer.Typer(no_args_is_help=True, help="Write a package of one's own to begin with.")
_FILES = {
    "pyproject.toml": "pyproject.toml",
    "{module}.py": "module.py",
    "tests/test_{module}_equations.py": "test_equations.py",
    "tests/test_{module}_contract.py": "test_contract.py",
    ".github/workflows/tests.yml": "tests.yml",
    "README.md": "README.md",
}
"""The path of each file of a package, by its template."""


def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A method, not a stack, or any other plug-in.")],
    plugin: Plugins = None,
) -> None:
    """Check that a method, or another plug-in, keeps the contract of fedbench.testing.

    Trains on a tiny federation for seconds. Exit code 0 where no check fails, 1 where one does.
    """
    from fedbench import testing
    from fedbench.testing import plugins

    plugin_files(plugin)
    outcomes = []
    for about, checks in _contracts(name, testing.CHECKS, plugins.CHECKS):
        for one in checks:
            outcomes.append(_outcome(one, name))
            say(f"{about}{one.__name__.removeprefix('check_').replace('_', ' ')}: {outcomes[-1]}")
    failed = sum(outcome.startswith("failed") for outcome in outcomes)
    if failed:
        say(f"{name} breaks the contract: {failed} of {len(outcomes)} checks failed.", style="bold red")
        raise typer.Exit(BROKEN)
    say(f"{name} keeps the contract.", style="bold")


def _contracts(
    name: str, of_methods: Sequence[Check], of_plugins: Mapping[str, Sequence[Check]]
) -> Iterator[tuple[str, Sequence[Check]]]:
    """The contracts of what ``name`` stands for; a name that several kinds have has several.

    FedbenchError for a name that there is not: it is bad input, and fails no check.
    """
    from fedbench.kinds.registry import PLUGIN_FILES, find_method, method_names
    from fedbench.testing.plugins import kinds_of

    is_method = name in method_names(PLUGIN_FILES.get())
    try:
        kinds = kinds_of(name)
    except FedbenchError:
        find_method(name)
        kinds = []
    if is_method:
        find_method(name)
        yield "method: " if kinds else "", of_methods
    for kind in kinds:
        yield f"{kind}: " if is_method or len(kinds) > 1 else "", of_plugins[kind]


def _outcome(one: Check, method: str) -> str:
    """``passed``, ``not applicable: why``, or ``failed: why``, in one line."""
    from fedbench.core.errors import raised_at, reason_of

    try:
        why = one(method)
    except KeyboardInterrupt:
        raise
    except (AssertionError, FedbenchError) as error:
        outcome = f"failed: {str(error) or raised_at(error)}"
    except BaseException as error:  # whatever the method does, the other checks follow
        outcome = f"failed: {reason_of(error)} ({raised_at(error)})"
    else:
        outcome = f"not applicable: {why}" if why else "passed"
    line = " ".join(outcome.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


@new.command("method", epilog="Example: fedbench new method fedmine")
def method(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the method: letters, digits and hyphens.")],
    folder: Annotated[Path | None, typer.Option(help="Where to; a new folder called NAME by default.")] = None,
) -> None:
    """Write an installable package with a method, its tests and a workflow that runs them."""
    from fedbench.kinds.methods import check_name
    from fedbench.kinds.registry import method_names

    check_name(name)
    if name in method_names():
        raise FedbenchError(f"{name!r} is a method already; see `fedbench describe {name}`, and choose another name.")
    module = name.replace("-", "_").lower()
    if not module.isidentifier():
        raise FedbenchError(f"{name!r} can't be a Python module's name; let it begin with a letter.")
    if keyword.iskeyword(module):
        raise FedbenchError(f"{name!r} can't be a Python module's name, since {module!r} is a word of the language.")
    if find_spec(module) is not None:
        raise FedbenchError(
            f"{name!r} would be a module called {module!r}, and Python has one here already, of which only one can be "
            "imported; choose another name."
        )
    place = Path(name) if folder is None else expanded(folder, "--folder")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise FedbenchError(f"{str(place)!r} is there already and not an empty folder; give another with --folder.")
    _write(place, name, module)
    say(f"{place}: method {name}, in {module}.py")
    say(f'next: cd {place} && pip install -e ".[test]" && pytest', style="dim")


def _write(place: Path, name: str, module: str) -> None:
    from jinja2 import Environment

    templates = resources.files("fedbench.cli") / "template"
    environment = Environment(keep_trailing_newline=True, autoescape=False)
    cls = "".join(part[:1].upper() + part[1:] for part in module.split("_"))
    try:
        for path, template in _FILES.items():
            text = (templates / f"{template}.j2").read_text(encoding="utf-8")
            file = place / path.format(module=module)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(environment.from_string(text).render(name=name, module=module, cls=cls), encoding="utf-8")
    except OSError as error:
        raise FedbenchError(f"{str(place)!r} can't be written: {error.strerror}.") from error
