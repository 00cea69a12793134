"""What one command is to do, as its parent run in MLflow has it: name, tags and a note for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fedbench.core.wording import counted


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """What ``fedbench run`` is to carry out. It names no path of this machine but what is part of a run's settings."""

    command: str
    """The command line that asks for the same runs again."""
    runs: int
    """Runs to carry out; every one of them ends as finished or failed."""
    skipped: int = 0
    """Requested runs that the store held already."""
    scale: str = ""
    settings: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    """Methods, settings and seeds are the requested ones; empty where the suite's own were meant."""
    seeds: tuple[int, ...] = ()
    overrides: tuple[str, ...] = ()
    """``KEY=VALUE`` each."""
    plugin_files: tuple[Path, ...] = ()
    """Names and hashes of them are recorded."""
    asked_for: str = ""
    """What its runs are read by again."""
    suite_text: str = ""
    """The suite's file as it was read; "" for a suite of no file."""
    suite_version: int = 1

    def name(self, suite: str, began: datetime) -> str:
        """``longtail · paper · 24 runs · 2026-11-21 18:03``."""
        parts = (suite, self.scale, counted(self.runs, "run"), f"{began:%Y-%m-%d %H:%M}")
        return " · ".join(part for part in parts if part)

    def tags(self) -> dict[str, str]:
        """What was requested, as tags; lists as JSON."""
        lists: dict[str, Sequence[object]] = {
            "settings": self.settings,
            "methods": self.methods,
            "seeds": self.seeds,
            "overrides": self.overrides,
            "plugins": [path.name for path in self.plugin_files],
        }
        tags = {"command": self.command, "runs": str(self.runs), "skipped": str(self.skipped), "scale": self.scale}
        tags |= {name: json.dumps(values, ensure_ascii=False) for name, values in lists.items()}
        return {f"fedbench.{name}": value for name, value in tags.items()}

    def note(self, suite: str, finished: int, failures: Sequence[str], status: str) -> str:
        """Markdown: what this is, the command, and how far it came. ``failures`` are a line each."""
        rest = self.runs - finished - len(failures)
        ends = [f"{finished} finished", f"{len(failures)} failed"]
        ends += [f"{rest} {'to come' if status == 'RUNNING' else 'not carried out'}"] if rest else []
        held = f" In the store already: {counted(self.skipped, 'run')}." if self.skipped else ""
        # what a reader wants first stands first: MLflow folds the rest
        lines = [f"`fedbench run` on the suite **{suite}**, {counted(self.runs, 'run')}: {', '.join(ends)}.{held}"]
        if failures:
            lines.append("\n".join(f"- failed: {failure}" for failure in failures))
        lines.append(f"`{self.command}`")
        return "\n\n".join(lines) + "\n"
