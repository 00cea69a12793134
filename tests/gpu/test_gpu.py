"""What is run on an accelerator runs on a CPU as well."""

from __future__ import annotations

import pytest
import torch

from fedbench.rounds.state import RunState
from tests.gpu.__main__ import main
from tests.gpu.methods import TOLERANCE, largest_difference


def test_methods_are_compared_and_written_down(tmp_path, capsys):
    file = tmp_path / "gpu.md"
    assert main(["--dry-run", "--methods", "scaffold", "--skip-workloads", "--markdown", str(file)]) == 0
    assert "| scaffold | tiny |" in file.read_text() and "the CPU's weights to the bit" in file.read_text()
    assert file.read_text() == capsys.readouterr().out


def test_a_method_that_fails_is_a_row_and_the_exit_code(capsys):
    assert main(["--dry-run", "--methods", "nosuch", "--skip-workloads"]) == 1
    assert "| nosuch | tiny |" in capsys.readouterr().out


def test_weights_that_differ_are_found():
    one, other = (RunState(1, {"a": torch.ones(3), "b": torch.tensor([8.0, value])}, {}) for value in (1.0, 2.0))
    found, where = largest_difference(one, other)
    assert where == "b" and found == pytest.approx(1 / 8, abs=1e-3) and found > TOLERANCE


def test_without_a_device_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        main([])
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_dry_run():
    assert main(["--dry-run"]) == 0
