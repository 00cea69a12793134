"""The third party's package, installed the way a user installs it, and found by name like any other."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "third_party_package"


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder the package is installed in, on this process's path and its children's."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(target))
    patch.setenv("PYTHONPATH", str(target), prepend=":")
    importlib.invalidate_caches()
    yield target
    patch.undo()
