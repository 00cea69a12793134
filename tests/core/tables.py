"""Tables in the READMEs that are made from the code; ``python -m tests.core.tables`` rewrites them."""

from __future__ import annotations

import ast
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


PATH = (
    ("cli/commands/run.py", "run", "reads the options"),
    ("workflow/plan.py", "requested", "loads the suite and asks for its runs"),
    ("suites/expand.py", "expand", "makes rows, settings and seeds one list of runs"),
    ("suites/resolve.py", "resolve", "lays suite, method and command line over one another: the `RunSpec` of a run"),
    ("workflow/execution.py", "carry_out", "skips what is stored, records the rest"),
    ("runs/engines/engine.py", "execute", "begins runs where there is room and tells what becomes of them"),
    ("runs/engines/worker.py", "_serve", "a worker process: carries out one run after another"),
    ("runs/job.py", "run_rounds", "one run: prepares it, trains its rounds, writes checkpoints"),
    ("runs/prepare.py", "_prepared", "data, federation, backbone, model, inputs"),
    ("rounds/loop.py", "_trained_round", "one round: cohort, training, aggregation"),
    ("rounds/exchange.py", "train_clients", "hands every client its task"),
    ("rounds/executors/sequential.py", "train_client", "asks the method's hook `local_train`"),
    ("toolkit/fedavg.py", "FedAvg.local_train", "the default answer, local SGD"),
    ("toolkit/local_training.py", "local_sgd", "**the steps of SGD on one client**"),
)
"""File in `harness/fedbench`, function, and what it does: from the command to one step of SGD."""


def path() -> str:
    """A line a file, with the lines that its function takes."""
    lines = ["| | file | lines | function | what it does |", "|---:|---|---|---|---|"]
    for number, (file, name, what) in enumerate(PATH, 1):
        node: ast.AST = ast.parse((ROOT / "harness" / "fedbench" / file).read_text(encoding="utf-8"))
        for part in name.split("."):
            bodies = (child for child in ast.iter_child_nodes(node) if getattr(child, "name", "") == part)
            node = next(bodies)
        assert isinstance(node, ast.FunctionDef)
        lines.append(
            f"| {number} | [`{file}`](fedbench/{file}) | {node.lineno}-{node.end_lineno} | `{name}` | {what} |"
        )
    return "\n".join(lines)


PLACES = (
    Place(ROOT / "plugins" / "README.md", "methods by role", by_role),
    Place(ROOT / "plugins" / "README.md", "methods", table),
    Place(ROOT / "harness" / "README.md", "path of a run", path),
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
