"""What a worker on another machine is sent: fedbench, every package that registers methods, and plugin files with what
they import of their own folders.

They are copied into one folder that goes first on the worker's import path, with the metadata by which methods are
found. So the worker needs nothing but the libraries, and it makes sure that its code is the very same.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from fedbench.core.errors import FedbenchError
from fedbench.core.version import PACKAGE
from fedbench.kinds.registry import installed_plugins
from fedbench.plugins.provenance import files_under, roots, versions
from fedbench.plugins.run_code import PLUGIN, code_hash, files_beside
from fedbench.runs.prepare import Settings

_PLUGINS = "fedbench_plugin_files"
_SUITES = "fedbench_suites"
"""The package of fedbench that registers no method."""
_SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Shipped:
    """What a worker's code must be, and where the plugin files are in it."""

    code: str
    """`code_hash` of the process that sends it."""
    versions: tuple[tuple[str, str], ...]
    packages: tuple[str, ...]
    """Those that register methods."""
    plugin_files: tuple[str, ...]
    """Their paths in the folder that is sent."""

    def unpacked(self, settings: Settings) -> Settings:
        """``settings`` with the plugin files where they are here; FedbenchError where the code here is another."""
        files = tuple(PACKAGE.parent / file for file in self.plugin_files)
        difference = _difference(self, files)
        if difference:
            raise FedbenchError(
                f"this worker's code is not that of the machine where the command was given: {difference}; install "
                "the same versions on every node."
            )
        return replace(settings, plugin_files=files)


def ship(folder: Path, plugin_files: Sequence[Path]) -> Shipped:
    """Copy into ``folder``, which is empty, what a worker needs. Raises FedbenchError where a source can't be read."""
    packages = roots()
    suites = find_spec(_SUITES)
    beside = [] if suites is None or suites.origin is None else [Path(suites.origin).parent]
    try:
        sent = dict(file for root in [*packages.values(), *beside] for file in files_under(root))
        sent |= {re.sub(f"^{PLUGIN}/", f"{_PLUGINS}/", name): file for name, file in files_beside(plugin_files).items()}
        for name, file in sent.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
        _write_metadata(folder)
    except (OSError, shutil.Error) as error:
        raise FedbenchError(f"the code can't be packed for the workers: {error}.") from error
    files = tuple(f"{_PLUGINS}/{number}/{file.name}" for number, file in enumerate(plugin_files))
    return Shipped(code_hash(plugin_files), tuple(sorted(versions().items())), tuple(sorted(packages)), files)


def environment() -> dict[str, str]:
    """The environment variables that workers get: one thread each, and this process's settings, but no secrets."""
    ours = {name: value for name, value in os.environ.items() if name.startswith(("FEDBENCH_", "HF_"))}
    return _ONE_THREAD | {name: value for name, value in ours.items() if not _SECRET.search(name)}


def _write_metadata(folder: Path) -> None:
    """Let the plug-ins' entry points be found in ``folder``, under the names of the distributions they come in.

    A distribution that the worker has installed as well is hidden by that.
    """
    by_distribution: dict[tuple[str, str], dict[str, list[str]]] = {}
    for point in installed_plugins():
        name, version = ("unknown", "0") if point.dist is None else (point.dist.name, point.dist.version)
        groups = by_distribution.setdefault((name, version), {})
        groups.setdefault(f"[{point.group}]", []).append(f"{point.name} = {point.value}")
    for (name, version), groups in by_distribution.items():
        target = folder / f"{re.sub(r'[-_.]+', '_', name)}-{version}.dist-info"
        target.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (target / "METADATA").write_text(metadata, encoding="utf-8")
        points = "\n".join(line for group, lines in groups.items() for line in (group, *lines, ""))
        (target / "entry_points.txt").write_text(points, encoding="utf-8")


@lru_cache
def _difference(shipped: Shipped, plugin_files: tuple[Path, ...]) -> str:
    """What is different here, named by both sides; "" where nothing is."""
    here = code_hash(plugin_files)
    if here == shipped.code:
        return ""
    ours, theirs = versions(), dict(shipped.versions)
    differences = [
        f"{name} {ours.get(name, 'missing')} here and {theirs.get(name, 'missing')} there"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    differences += _packages("here", set(roots()) - set(shipped.packages))
    differences += _packages("there", set(shipped.packages) - set(roots()))
    return ", ".join(differences) or f"its sources have the hash {here[:16]} here and {shipped.code[:16]} there"


def _packages(where: str, names: Iterable[str]) -> list[str]:
    return [f"package {name} registers methods only {where}" for name in sorted(names)]
