"""Whose code a run is made by: what changes the identity of a run, what does not, and what is said of it."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fedbench.core.errors import FedbenchError
from fedbench.kinds.registry import installed_plugins, is_harness
from fedbench.plugins import run_code
from fedbench.plugins.provenance import roots
from fedbench.plugins.run_code import Codes, code_hash, files_beside, harness_hash
from fedbench.plugins.sources import files_of, files_of_all, files_under

METHOD = '''
from dataclasses import dataclass
{imports}

@dataclass(frozen=True, kw_only=True)
class Params:
    """None."""

class Method:
    name, citation, Params, recipe = "{name}", "nobody", Params, {{}}
    def __init__(self, params):
        {inside}
'''
PACKAGE = {
    "third/__init__.py": "",
    "third/first.py": METHOD.format(
        name="first", imports="from . import helper", inside="from .deep.rates import RATE"
    ),
    "third/second.py": METHOD.format(name="second", imports="import json, torch", inside="pass"),
    "third/open.py": METHOD.format(name="open", imports="import importlib", inside="importlib.import_module(params)"),
    "third/helper.py": "from third_core import constants",
    "third/unused.py": "",
    "third/deep/__init__.py": "",
    "third/deep/rates.py": "RATE = 1",
    "third/deep/priors.json": "{}",
    # another top-level module of the same distribution
    "third_core/__init__.py": "",
    "third_core/constants.py": "",
    "of_others.py": "",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an installed third-party package of three methods, as an installer leaves it."""
    folder = tmp_path / "site"
    metadata = folder / "some_methods-2.1.dist-info"
    metadata.mkdir(parents=True)
    for name, text in PACKAGE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    points = [f"{name} = third.{name}:Method" for name in ("first", "second", "open")]
    (metadata / "entry_points.txt").write_text("\n".join(["[fedbench.methods]", *points, ""]))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some-methods\nVersion: 2.1\n")
    (metadata / "RECORD").write_text("".join(f"{name},,\n" for name in PACKAGE if name != "of_others.py"))
    monkeypatch.syspath_prepend(str(folder))
    return folder


CHANGES = {
    "third/first.py": {"first", "open"},
    "third/second.py": {"second", "open"},
    "third/helper.py": {"first", "open"},
    "third_core/constants.py": {"first", "open"},
    "third/deep/rates.py": {"first", "open"},
    # which methods read it cannot be told
    "third/deep/priors.json": {"first", "second", "open"},
    # one that imports modules by computed names may import any
    "third/unused.py": {"open"},
    "of_others.py": set(),
}
"""Changed file -> the methods that run again."""


def test_a_change_counts_for_the_methods_that_import_or_may_read_it(site: Path) -> None:
    def hashes() -> dict[str, str]:
        codes = Codes()
        return {name: codes.of(name).hash for name in ("first", "second", "open", "fedprox", "fedavg")}

    before = hashes()
    for changed, again in CHANGES.items():
        (site / changed).write_text((site / changed).read_text() + " ")
        after = hashes()
        assert {name for name in after if before[name] != after[name]} == again, changed
        before = after


def test_a_file_that_is_added_to_a_package_counts_and_what_running_it_writes_does_not(site: Path) -> None:
    before = Codes().of("second").hash
    for name in ("__pycache__/second.pyc", "fedbench-store/mlflow.db", ".git/HEAD"):
        (site / "third" / name).parent.mkdir()
        (site / "third" / name).write_text("x")
    assert Codes().of("second").hash == before
    (site / "third" / "table.csv").write_text("1")
    assert Codes().of("second").hash != before


def test_a_third_partys_code_is_told_with_its_package_and_version(site: Path) -> None:
    prox, first = Codes().of("first+fedprox").methods
    assert (first.as_json()["package"], first.version, len(first.hash)) == ("some-methods", "2.1", 64)
    assert prox.as_json() == {"method": "fedprox", "hash": prox.hash}


def test_a_method_of_fedbench_is_its_file_with_what_it_shares_and_the_defaults_are_the_harness() -> None:
    package = roots()["fedbench_methods"]
    files = files_of("fedbench_methods.clip_lora", roots())
    assert files == {f"fedbench_methods/{name}": package / name for name in ("__init__.py", "py.typed", "clip_lora.py")}
    shared = {f"fedbench_methods/shared/{name}.py" for name in ("__init__", "gaussians", "mixtures")}
    assert {name for name in files_of("fedbench_methods.fedpft", roots()) if "/shared/" in name} == shared
    assert Codes().of("fedavg").methods == ()
    assert Codes().of("fedprox").hash != Codes().of("moon").hash


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A plugin file in a folder that is on the import path, as the current one may be, and full of other things."""
    folder = tmp_path / "home"
    (folder / "tables").mkdir(parents=True)
    (folder / "beside").mkdir()
    for name in ("beside/__init__.py", "beside/sub.py", "notes.txt", "table.json", "tables/prior.csv", "other.py"):
        (folder / name).write_text("")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()

    def write(imports: str, inside: str) -> Path:
        file = folder / "mine.py"
        file.write_text(METHOD.format(name="mine", imports=imports, inside=inside))
        return file

    return write


def test_a_plugin_file_is_made_of_what_it_imports_and_of_the_files_that_it_names(plugin: Callable[..., Path]) -> None:
    reads = 'here = Path(__file__).parent; open(here / "tables" / "prior.csv"); here.joinpath("table.json")'
    file = plugin("from pathlib import Path\nimport numpy\nimport beside.sub", reads)
    assert set(files_of(file, roots())) == {
        *("--plugin/mine.py", "--plugin/tables/prior.csv", "--plugin/table.json", "beside/__init__.py", "beside/sub.py")
    }
    # names do not depend on where it lies: a worker elsewhere gets the same hash
    assert str(file.parent) not in "".join(files_beside([file]))
    before = Codes([file]).of("mine").hash, Codes([file]).of("fedprox").hash
    (file.parent / "tables" / "prior.csv").write_text("1")
    after = Codes([file]).of("mine").hash, Codes([file]).of("fedprox").hash
    assert before[0] != after[0] and before[1] == after[1]
    assert Codes([file]).of("mine").methods[0].plugin == "mine.py"


def test_a_package_called_plugin_is_told_from_the_plugin_file(plugin: Callable[..., Path]) -> None:
    file = plugin("import plugin.mine", "pass")
    package = file.parent / "plugin"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mine.py").write_text("a = 1\n")
    assert {file, package / "mine.py"} <= set(files_of(file, roots()).values())


@pytest.mark.parametrize(
    "inside", ['"notes.txt\\0"', '"/etc/hostname"', '"../site"', '"tables"', '"mine.py"', "import nowhere.at_all"]
)
def test_strings_that_name_no_file_beside_a_plugin_file_count_for_nothing(
    plugin: Callable[..., Path], inside: str
) -> None:
    assert set(files_of(plugin("from .. import nothing", inside), roots())) == {"--plugin/mine.py"}


def test_a_source_that_cannot_be_read_is_refused(plugin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = plugin("", "pass")
    everything = code_hash([file])
    assert everything != code_hash()
    file.unlink()
    with pytest.raises(FedbenchError, match=r"source file .*mine.py' cannot be read: No such file"):
        code_hash([file])


def test_all_code_of_a_command_is_the_harness_every_method_and_every_plugin_file(
    plugin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = plugin("", "pass")
    files = files_beside([file, file])
    assert {"--plugin/0/mine.py", "--plugin/1/mine.py", "fedbench_methods/fedprox.py"} <= set(files)
    before = code_hash([file])
    monkeypatch.setattr(run_code, "versions", lambda: {"torch": "0.1"})
    assert code_hash([file]) != before and Codes().harness == harness_hash()


def test_the_files_of_all_methods_are_those_of_each(site: Path) -> None:
    points = [point for point in installed_plugins() if not is_harness(point)]
    each = [files_of(point.module, roots(), point.dist) for point in points]
    assert files_beside() == {name: path for files in each for name, path in files.items()}
    assert {"third_core/constants.py", "fedbench_methods/fedprox.py"} <= set(files_beside())


@pytest.mark.parametrize("starts", [["names", "imports"], ["imports", "names"]])
def test_imports_of_a_file_that_a_string_names_as_well_are_followed(
    starts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"names": "X = 'helper.py'", "imports": "import helper", "helper": "import deep", "deep": ""}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert set(files_of_all(starts, roots())) == {f"{name}.py" for name in texts}


def test_a_folder_of_sources_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("")
    assert dict(files_under(tmp_path)) == {"a.py": tmp_path / "a.py"}
    listed = os.scandir

    def scandir(folder: str | Path) -> object:
        if Path(folder).name == "inner":
            raise OSError(24, "Too many open files", str(folder))
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(FedbenchError, match=r"source folder .*inner' cannot be read: Too many open files"):
        dict(files_under(tmp_path))
