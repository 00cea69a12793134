"""What is asked for: which runs, and where they are carried out."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedbench.core.errors import FedbenchError, unknown_name


@dataclass(frozen=True)
class Selection:
    """Which runs a command is about."""

    suite: str | None = None
    """Name or file."""
    methods: tuple[str, ...] = ()
    """Methods, seeds, scale and settings are the suite's own where empty."""
    seeds: tuple[int, ...] = ()
    sets: tuple[str, ...] = ()
    """``KEY=VALUE`` each: what is given as ``--set``, or by an option that stands for one."""
    plugin_files: tuple[Path, ...] = ()
    scale: str = ""
    settings: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    """Only rows on these backbones."""
    tuned: str = ""
    """The study whose best values the runs have."""


@dataclass(frozen=True)
class Place:
    """Where runs or trials are carried out."""

    engine: str
    workers: int | None
    ray_address: str
    run_cpus: float
    run_gpus: float
    memory_limit: float | None = None
    """GB of a run."""

    def check(self, engines: Sequence[str]) -> None:
        """Raise FedbenchError for an engine that is none of ``engines``, and for options of another."""
        if self.engine not in engines:
            raise unknown_name("engine", self.engine, engines)
        if self.workers is not None and (not isinstance(self.workers, int) or self.workers < 1):
            raise FedbenchError(f"{self.workers!r} jobs at the same time can't be; give a whole number from 1 on.")
        if self.engine != "ray" and (self.ray_address or self.run_cpus != 1 or self.run_gpus):
            raise FedbenchError("--ray-address, --run-cpus and --run-gpus are for --engine ray.")


def command_line(verb: str, selection: Selection, *further: str, paths: bool = False) -> str:
    """The command that selects the same again: FILEs by their names, and no folder of this machine.

    With ``paths`` FILEs are where they are, so that it works here.
    """
    is_file = selection.suite is not None and selection.suite.endswith((".yaml", ".yml"))
    suite = Path(selection.suite).name if selection.suite is not None and is_file and not paths else selection.suite
    options = {
        "--suite": [suite] if suite is not None else [],
        "--scale": [selection.scale] if selection.scale else [],
        "--setting": selection.settings,
        "--method": selection.methods,
        "--on": selection.on,
        "--seed": [str(seed) for seed in selection.seeds],
        "--set": selection.sets,
        "--tuned": [selection.tuned] if selection.tuned else [],
        "--plugin": [str(path) if paths else path.name for path in selection.plugin_files],
    }
    words = [word for option, values in options.items() for value in values for word in (option, value)]
    return shlex.join(["fedbench", verb, *words, *further])
