"""A suite that is killed at random moments ends as if it had never been disturbed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_kills_at_random_moments_leave_no_trace_in_what_is_stored(tmp_path: Path) -> None:
    """``FEDBENCH_SOAK`` asks for another number of kills than these few."""
    kills = int(os.environ.get("FEDBENCH_SOAK", "4"))
    line = [sys.executable, "-m", "tests.soak", "--kills", str(kills), "--folder", str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^kill \d+ of", done.stdout, re.MULTILINE)) == kills
    assert "everything that was stored is what the undisturbed one stored" in done.stdout
