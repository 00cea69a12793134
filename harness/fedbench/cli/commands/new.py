"""``fedbench new``: a package of one's own to begin with, whose tests pass as it is written."""

from __future__ import annotations

import keyword
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fedbench.cli.console import say
from fedbench.core.errors import FedbenchError
from fedbench.core.files import expanded

new = typer.Typer(no_args_is_help=True, help="Write a package of one's own to begin with.")
_FILES = {
    "pyproject.toml": "pyproject.toml",
    "{module}.py": "module.py",
    "tests/test_{module}_equations.py": "test_equations.py",
    "tests/test_{module}_contract.py": "test_contract.py",
    ".github/workflows/tests.yml": "tests.yml",
    "README.md": "README.md",
}
"""Where a package has what, by the template of it."""


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
