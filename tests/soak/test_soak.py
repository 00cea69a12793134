"""A suite and a tuning study that are killed at random moments end as if they had never been disturbed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kills"), [("suite", 4), ("study", 2)])
def test_kills_at_random_moments_leave_no_trace_in_what_is_stored(kind: str, kills: int, tmp_path: Path) -> None:
    """``FEDBENCH_SOAK_SUITE`` and ``FEDBENCH_SOAK_STUDY`` ask for other numbers of kills than these few."""
    asked = {"suite": 0, "study": 0, kind: int(os.environ.get(f"FEDBENCH_SOAK_{kind.upper()}", kills))}
    arguments = ["--suite-kills", str(asked["suite"]), "--study-kills", str(asked["study"]), "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^kill \d+ of", done.stdout, re.MULTILINE)) == asked[kind]
    assert "everything that was stored is what the undisturbed one stored" in done.stdout
