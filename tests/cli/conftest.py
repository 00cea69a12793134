"""``fedbench ARGUMENTS`` in an empty folder, as every test of the command line calls it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from fedbench.cli.app import main
from fedbench.testing import tiny_dataset


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """All that it wrote, as one line."""
        return " ".join((self.out + self.err).split())


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The working directory is an empty folder, and the environment says nothing of others."""
    monkeypatch.chdir(tmp_path)
    for name in ("FEDBENCH_DATA", "FEDBENCH_CACHE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fedbench(elsewhere: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call the command; no traceback may reach its user."""

    def call(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["fedbench", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return Ended(ended.value.code if isinstance(ended.value.code, int) else 0, captured.out, captured.err)

    return call


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data set `embedded` is the tiny one of `fedbench.testing`."""
    for module in ("fedbench.runs.prepare",):
        monkeypatch.setattr(f"{module}.load_dataset", lambda *_, **__: tiny_dataset())
    monkeypatch.setattr("fedbench.runs.inspection.can_fork", lambda: False)  # nothing is patched in another process
