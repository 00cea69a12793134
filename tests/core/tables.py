"""The tables of methods in the READMEs, made from the plugins; ``python -m tests.core.tables`` rewrites them."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedbench.core.method.base import ROLES
from fedbench.kinds.registry import find_method
from fedbench.plugins.assembly import role_of

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Place:
    """Between which marks of which file stands what."""

    file: Path
    mark: str
    made: Callable[[], str]


def names() -> list[str]:
    """Of this package's methods, in the order of their entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["entry-points"]["fedbench.methods"])


def table() -> str:
    """A line a method."""
    lines = ["| method | what it does | in a stack | requires | source |", "|---|---|---|---|---|"]
    for name in names():
        cls = find_method(name)
        requires = ", ".join(cls.requires)
        lines.append(f"| `{name}` | {inspect.getdoc(cls)} | {role_of(cls)} | {requires} | {cls.citation} |")
    return "\n".join(lines)


def by_role() -> str:
    """A line a role, with its methods."""
    roles = {name: role_of(find_method(name)) for name in names()}
    lines = [f"{len(roles)} methods, by what they are in a stack:", "", "| in a stack | | methods |", "|---|---|---|"]
    for role, text in ROLES.items():
        own = ", ".join(f"`{name}`" for name, its in roles.items() if its == role)
        lines.append(f"| **{role}** | {text} | {own} |")
    return "\n".join(lines)


PLACES = (
    Place(ROOT / "plugins" / "README.md", "methods by role", by_role),
    Place(ROOT / "plugins" / "README.md", "methods", table),
)


def _cut(place: Place) -> tuple[str, str, str]:
    text = place.file.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"<!-- {place.mark} -->\n")
    inside, end, after = rest.partition(f"<!-- end of {place.mark} -->")
    assert begin and end, f"{place.file} lacks the marks of {place.mark}"
    return before + begin, inside, end + after


def shown(place: Place) -> str:
    """What stands between the marks."""
    return _cut(place)[1].strip()


def main() -> None:
    """Rewrite all."""
    for place in PLACES:
        before, _, after = _cut(place)
        place.file.write_text(f"{before}{place.made()}\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
