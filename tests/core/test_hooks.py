"""Hooks are documented, typed and tested; imports point one way."""

import ast
import inspect
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from fedbench.core.method.hooks import STEPS, HookSpecs
from fedbench.core.method.notifications import NOTIFICATIONS, NotificationSpecs
from fedbench.core.method.tasks import Hooks
from fedbench.toolkit.fedavg import FedAvg
from tests.core import tables

ROOT = Path(__file__).parents[2]


def arguments(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def imports(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("hook", [*STEPS, *NOTIFICATIONS])
def test_every_hook_says_its_kind_and_who_answers(hook):
    text = inspect.getdoc(getattr(HookSpecs if hook in STEPS else NotificationSpecs, hook))
    assert text.split(":")[0] in ("First result", "Collected", "Collected and added to the base loss", "Notification")
    if not text.startswith("Notification"):
        assert "Default:" in text
        words = " ".join(text.split())
        assert re.search("nswered (for example )?by", words) or "No method of this package needs" in words


def test_the_typed_protocol_equals_the_specifications():
    assert [name for name in vars(Hooks) if not name.startswith("_")] == list(STEPS)
    for hook in STEPS:
        assert arguments(getattr(Hooks, hook)) == arguments(getattr(HookSpecs, hook))


def test_the_defaults_answer_every_first_result_hook():
    first = [hook for hook in STEPS if getattr(HookSpecs, hook).fedbench_spec["firstresult"]]
    assert [hook for hook in first if hook not in vars(FedAvg)] == []


def test_the_harness_names_no_method_and_no_method_imports_another():
    beside = tuple(folder.name for folder in (ROOT / "plugins").glob("fedbench_*"))
    for file in (ROOT / "harness").rglob("*.py"):
        assert not any(name.startswith(beside) for name in imports(file)), file
    for file in (ROOT / "plugins").rglob("*.py"):
        named = [name for name in imports(file) if name.startswith("fedbench_methods")]
        assert all(name.startswith("fedbench_methods.shared") for name in named), file


def test_suites_hold_no_code():
    names = sorted(entry.name for entry in resources.files("fedbench_suites").iterdir())
    assert [n for n in names if n.endswith(".py")] == ["__init__.py"]


def test_every_method_file_is_registered():

    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["fedbench.methods"]
    modules = {value.split(":")[0] for value in table.values()}
    files = {f"fedbench_methods.{f.stem}" for f in (ROOT / "plugins/fedbench_methods").glob("*.py")}
    assert files - {"fedbench_methods.__init__"} <= modules, "add the entry-point line, then `pip install -e .` again"


def test_the_top_level_is_the_agreed_one():
    agreed = {"harness", "plugins", "suites", "leaderboards", "tests", "pyproject.toml", "README.md"}
    extra = {"LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md"}
    import subprocess

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split(
        "\n"
    )
    found = {line.split("/")[0] for line in listed if line}
    assert {name for name in found if not name.startswith(".")} <= agreed | extra


@pytest.mark.parametrize("place", tables.PLACES, ids=lambda place: place.mark)
def test_tables_of_methods_are_made_from_the_plugins(place):
    assert tables.shown(place) == place.made(), "run python -m tests.core.tables"


def test_no_two_classes_of_the_harness_have_one_name():
    homes: dict[str, list[str]] = {}
    for file in (ROOT / "harness").rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(file.stem)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_the_table_of_equations_names_tests_that_exist():
    table = (Path(__file__).parents[2] / "plugins" / "README.md").read_text()
    folder = Path(__file__).parents[1] / "equations"
    found = 0
    for line in table.splitlines():
        file = None
        for cited in re.findall(r"`((?:[\w/]+\.py)?(?:::)?test_\w+(?:\.py)?(?:::test_\w+)?)`", line):
            path, _, name = cited.rpartition("::") if "::" in cited else ("", "", cited)
            if cited.endswith(".py"):
                path, name = cited, ""
            if path:
                file = Path(__file__).parents[2] / path if "/" in path else folder / path
            assert file is not None and file.is_file(), f"{cited}: no such file"
            exists = not name or re.search(rf"^def {name}\b", file.read_text(), re.M)
            assert exists, f"{cited}: no such test in {file.name}"
            found += 1
    assert found > 50


def test_the_table_of_equations_names_functions_that_exist():
    defined: dict[str, set[str]] = {}
    for file in [*(ROOT / "harness").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.setdefault(file.stem, set()).add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined.setdefault(file.stem, set()).add(node.target.id)
    table = (ROOT / "plugins" / "README.md").read_text(encoding="utf-8")
    cited = [
        tuple(name.split("."))
        for line in table.splitlines()
        if line.startswith("|") and line.count("|") >= 4
        for name in re.findall(r"`(\w+(?:\.\w+)+)`", line.split("|")[2])
    ]
    assert len(cited) > 100
    assert [".".join(one) for one in cited if not set(one[1:]) <= defined.get(one[0], set())] == []
