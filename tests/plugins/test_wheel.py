"""The wheel: all that the source folders have and nothing else, and it works alone in an empty folder; the archive."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *(ROOT / "harness" / name for name in ("fedbench", "fedbench_boards")),
    *(ROOT / "plugins" / name for name in ("fedbench_embedded", "fedbench_flower", "fedbench_methods")),
    ROOT / "suites" / "fedbench_suites",
)
SUITE = """
name: tiny
dataset: "embedded?train=80&test=20"
scenario: {preset: iid, clients: 2}
training: {rounds: 1}
published: clip2fl
published_metrics: {global_accuracy: accuracy}
scales:
  embedded:
    settings:
      - name: IF 100
        published: {dataset: CIFAR-10-LT, imbalance_factor: 100, table: 1}
rows:
  - {method: fedavg, published: {}}
  - {method: fedprox, published: {}}
"""
COMMANDS = """
import fedbench, fedbench_boards, fedbench_embedded, fedbench_flower, fedbench_methods, fedbench_suites
from fedbench.cli.app import app
ours = (fedbench, fedbench_boards, fedbench_embedded, fedbench_flower, fedbench_methods, fedbench_suites)
print(*(module.__file__ for module in ours), sep="\\n")
for words in (
    ["list"],
    ["run", "--suite", "tiny.yaml", "--engine", "in-process", "--cache-dir", "cache"],
    ["leaderboard", "--suite", "tiny.yaml"],
):
    print("$", *words, flush=True)
    if app(words, prog_name="fedbench", standalone_mode=False):
        raise SystemExit(1)
"""
"""The three commands in one process: what takes long is to import torch and MLflow."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source tree, installed into a folder of its own: it is pure Python, so unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(folder))
    shutil.unpack_archive(wheel, folder / "site", "zip")
    return folder / "site"


def contents(folder: Path, *, at: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(at).as_posix(): path.read_bytes() for path in files}


def test_the_wheel_has_every_file_of_its_packages_and_nothing_else(site: Path) -> None:
    wanted = {name: data for package in PACKAGES for name, data in contents(package, at=package.parent).items()}
    found = {name: data for name, data in contents(site, at=site).items() if ".dist-info/" not in name}
    assert found.keys() == wanted.keys()
    assert found == wanted
    # what no import would miss
    assert {
        "fedbench/py.typed",
        "fedbench_boards/leaderboard/page/template.html.j2",
        "fedbench_embedded/embedded.safetensors",
        "fedbench_methods/fedprox.py",
        "fedbench_suites/longtail.yaml",
        "fedbench_suites/published/clip2fl.csv",
        "fedbench_suites/published/clip2fl.paper.yaml",
    } <= found.keys()


@pytest.mark.slow
def test_the_source_archive_has_the_packages_and_no_results(tmp_path: Path) -> None:
    [archive] = SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    wanted = {name for package in PACKAGES for name in contents(package, at=ROOT)}
    assert wanted | {"pyproject.toml", "README.md", "LICENSE"} <= packed
    assert not [name for name in packed if name.startswith("leaderboards")]


def test_the_wheel_registers_the_command_and_every_method(site: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [metadata] = site.glob("*.dist-info")
    points = {(p.group, p.name): p.value for p in Distribution.at(metadata).entry_points}
    wanted = {("console_scripts", name): value for name, value in project["scripts"].items()}
    for group, methods in project["entry-points"].items():
        wanted |= {(group, name): value for name, value in methods.items()}
    assert points == wanted
    assert (metadata / "licenses" / "LICENSE").is_file()


@pytest.mark.slow
def test_list_run_and_leaderboard_work_from_the_wheel_in_an_empty_folder(site: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(SUITE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FEDBENCH_", "MLFLOW_"))}
    # before the folders of an editable installation, whose path files come last
    environment |= {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMMANDS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported, listed, ran, read = done.stdout.split("$ ")
    assert [Path(line).parents[1] for line in imported.splitlines()] == [site] * 6
    assert "fedprox" in listed and "longtail" in listed
    # table 1 of the paper prints 56.17 for FedAvg and 56.92 for FedProx
    for shown in (ran, read):
        assert "  paper  " in shown and "≠ 56.2" in shown and "≠ 56.9" in shown, shown
    assert done.stderr == ""
