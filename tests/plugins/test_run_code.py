"""Whose code a run is made by: what changes the identity of a run, what does not, and what is said of it."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fedbench.core.errors import FedbenchError
from fedbench.kinds import registry
from fedbench.plugins import provenance
from fedbench.plugins.provenance import Codes, code_hash, files_beside, files_under, harness_hash, roots, with_imports

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
    "third/first.py": METHOD.format(name="first", imports="from . import helper", inside="pass"),
    "third/second.py": METHOD.format(name="second", imports="import json, torch", inside="pass"),
    "third/helper.py": "",
    "third/deep/__init__.py": "",
    "third/deep/priors.json": "{}",
    "alone.py": METHOD.format(name="alone", imports="", inside="pass"),
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
    points = [*(f"{name} = third.{name}:Method" for name in ("first", "second")), "alone = alone:Method"]
    (metadata / "entry_points.txt").write_text("\n".join(["[fedbench.methods]", *points, ""]))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some-methods\nVersion: 2.1\n")
    # a script, which an installer puts outside
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tool.py").write_text("")
    recorded = [*(name for name in PACKAGE if name != "of_others.py"), "../bin/tool.py"]
    (metadata / "RECORD").write_text("".join(f"{name},,\n" for name in recorded))
    monkeypatch.syspath_prepend(str(folder))
    return folder


CHANGES = {
    **dict.fromkeys(
        ("third/first.py", "third/helper.py", "third/deep/priors.json", "alone.py"), {"first", "second", "alone"}
    ),
    "of_others.py": set(),
    "../bin/tool.py": set(),
}
"""Changed file -> the methods that run again."""


def test_a_change_counts_for_the_methods_of_its_distribution(site: Path) -> None:
    def hashes() -> dict[str, str]:
        codes = Codes()
        return {name: codes.of(name).hash for name in ("first", "second", "alone", "fedprox", "fedavg")}

    before = hashes()
    for changed, again in CHANGES.items():
        (site / changed).write_text((site / changed).read_text() + " ")
        after = hashes()
        assert {name for name in after if before[name] != after[name]} == again, changed
        before = after


def test_another_version_of_a_package_is_other_code(site: Path) -> None:
    before = Codes().of("first").hash
    metadata = site / "some_methods-2.1.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("2.1\n", "2.2\n"))
    registry._read.cache_clear()
    assert Codes().of("first").hash != before


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
    files = with_imports(package / "clip_lora.py", package, "fedbench_methods")
    assert files == {"clip_lora.py": package / "clip_lora.py"}
    shared = {f"shared/{name}.py" for name in ("__init__", "gaussians", "mixtures")}
    files = with_imports(package / "fedpft.py", package, "fedbench_methods")
    assert {name for name in files if name.startswith("shared/")} == shared
    assert Codes().of("fedavg").methods == ()
    assert Codes().of("fedprox").hash != Codes().of("moon").hash


def test_what_a_module_imports_of_its_package_is_followed_however_it_is_written(tmp_path: Path) -> None:
    texts = {
        "mine.py": "import ours.shared.steps\nimport shared.unused\ndef late():\n    from ours.shared import heads",
        "shared/__init__.py": "",
        "shared/steps.py": "from . import deep\nfrom .deep.rates import RATE\nfrom ... import nothing",
        "shared/heads.py": "from ..other import x",
        "shared/deep/__init__.py": "",
        "shared/deep/rates.py": "from ours import mine",
        "shared/unused.py": "",
        "other.py": "this is no Python",
        "unused.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = with_imports(tmp_path / "mine.py", tmp_path, "ours")
    assert set(found) == {name for name in texts if "unused" not in name}


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A plugin file in a folder that is on the import path, as the current one may be, and full of other things."""
    folder = tmp_path / "home"
    (folder / "beside").mkdir(parents=True)
    for name in ("beside/__init__.py", "beside/sub.py", "notes.txt", "other.py"):
        (folder / name).write_text("")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()

    def write(imports: str, inside: str) -> Path:
        file = folder / "mine.py"
        file.write_text(METHOD.format(name="mine", imports=imports, inside=inside))
        return file

    return write


def test_a_plugin_file_is_made_of_what_it_imports_and_of_the_files_that_it_names(plugin: Callable[..., Path]) -> None:
    file = plugin("from pathlib import Path\nimport numpy\nimport beside.sub", "open('notes.txt')")
    assert set(files_beside([file])) == {"--plugin/0/mine.py", "beside/__init__.py", "beside/sub.py", "notes.txt"}
    before = Codes([file]).of("mine").hash, Codes([file]).of("fedprox").hash
    for name in ("beside/sub.py", "notes.txt"):
        (file.parent / name).write_text("X = 1")
        after = Codes([file]).of("mine").hash, Codes([file]).of("fedprox").hash
        assert before[0] != after[0] and before[1] == after[1]
        before = after
    assert Codes([file]).of("mine").methods[0].plugin == "mine.py"


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
    assert set(files) == {"--plugin/0/mine.py", "--plugin/1/mine.py"}
    before = code_hash([file])
    monkeypatch.setattr(provenance, "versions", lambda: {"torch": "0.1"})
    assert code_hash([file]) != before and Codes().harness == harness_hash()


def test_a_folder_of_sources_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("")
    assert dict(files_under(tmp_path)) == {f"{tmp_path.name}/a.py": tmp_path / "a.py"}
    listed = os.scandir

    def scandir(folder: str | Path) -> object:
        if Path(folder).name == "inner":
            raise OSError(24, "Too many open files", str(folder))
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(FedbenchError, match=r"source folder .*inner' cannot be read: Too many open files"):
        dict(files_under(tmp_path))
