"""Kill fedbench at random moments and see that nothing is lost: ``python -m tests.soak --help``.

A suite and a tuning study are carried out once undisturbed. Then the same commands are killed with SIGKILL and started
again, over and over, in fresh folders; whatever they stored at last must be what the undisturbed ones stored.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from tests.soak.fedbench_command import Command
from tests.soak.soak import Outcome, soak
from tests.soak.studies import StudySoak
from tests.soak.suites import SuiteSoak


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--suite-kills", type=int, default=4, metavar="N", help="of a running suite (default 4)")
    parser.add_argument("--study-kills", type=int, default=2, metavar="N", help="of a tuning study (default 2)")
    parser.add_argument("--seed", type=int, metavar="INT", help="of the moments; drawn and told if left out")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="an empty one, kept; by default a temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every kill and every difference")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 where anything differs."""
    given = options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    console.print(f"moments drawn with --seed {seed}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="fedbench-soak-") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for kills, kind in ((given.suite_kills, SuiteSoak), (given.study_kills, StudySoak)):
            if kills:
                began = time.monotonic()
                outcome = soak(kind(Command(folder / kind.name)), kills, random.Random(f"{seed} {kind.name}"), console)
                outcome.seconds = time.monotonic() - began
                outcome.show(console)
                outcomes.append(outcome)
        if given.json:
            given.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n", "utf-8")
    return int(any(outcome.differences for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
