"""What is asked for: which runs, and where they are carried out."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.suites.resolve import Overrides


@dataclass(frozen=True)
class Selection(Overrides):
    """The runs that a call or a command is about: a suite, what is picked from it, and what is changed in it."""

    suite: str | None = None
    """Name or file; None for methods without one."""
    tuned: str = ""
    """The study whose best values the runs have, or a CSV file of values."""

    @property
    def assignments(self) -> tuple[str, ...]:
        """What is set, as ``KEY=VALUE`` each."""
        return tuple(f"{key}={value}" for key, value in self.sets)


@dataclass(frozen=True)
class Place:
    """The place where runs or trials are carried out."""

    engine: str
    workers: int | None
    ray_address: str = ""
    run_cpus: float = 1.0
    run_gpus: float = 0.0
    memory_limit: float | None = None
    """GB of a run."""
    devices: tuple[str, ...] = ()
    """The CUDA cards that are given."""

    def check(self, engines: Sequence[str]) -> None:
        """Raise FedbenchError for an engine that is none of ``engines``, and for options of another."""
        if self.engine not in engines:
            raise unknown_name("engine", self.engine, engines)
        if self.workers is not None and (not isinstance(self.workers, int) or self.workers < 1):
            raise FedbenchError(f"{self.workers!r} jobs at the same time can't be; give a whole number from 1 on.")
        if self.engine != "ray" and (self.ray_address or self.run_cpus != 1 or self.run_gpus):
            raise FedbenchError("--ray-address, --run-cpus and --run-gpus are for --engine ray.")
        if self.engine != "processes" and self.memory_limit is not None:
            raise FedbenchError(f"--memory-limit has no effect with --engine {self.engine}; leave one out.")
        if self.engine != "processes" and self.devices:
            raise FedbenchError(f"--devices has no effect with --engine {self.engine}; leave one out.")


def command_line(verb: str, selection: Selection, *further: str, paths: bool = False) -> str:
    """The command that selects the same again: FILEs by their names, and no folder of this machine.

    With ``paths`` FILEs are where they are, so that it works here.
    """
    is_file = selection.suite is not None and selection.suite.endswith((".yaml", ".yml"))
    suite = Path(selection.suite).name if selection.suite is not None and is_file and not paths else selection.suite
    options: dict[str, Sequence[object]] = {
        "--suite": [suite] if suite is not None else [],
        "--scale": [selection.scale] if selection.scale else [],
        "--setting": selection.settings,
        "--method": selection.methods,
        "--on": selection.on,
        "--seed": selection.seeds,
        "--set": selection.assignments,
        "--tuned": [Path(selection.tuned).name if selection.tuned.endswith(".csv") and not paths else selection.tuned]
        if selection.tuned
        else [],
        "--plugin": [path if paths else path.name for path in selection.plugin_files],
    }
    return shlex.join(["fedbench", verb, *words_of(options), *further])


def words_of(options: dict[str, Sequence[object]]) -> list[str]:
    """Options with their values, as words of a command line."""
    return [word for option, values in options.items() for value in values for word in (option, str(value))]
