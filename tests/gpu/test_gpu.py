"""What is run on an accelerator runs on a CPU as well."""

from __future__ import annotations

import pytest
import torch

from fedbench.rounds.state import RunState
from fedbench.testing import tiny_spec
from tests.gpu import methods
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


def test_signs_of_a_pair_of_factors_are_free_and_of_one_alone_are_not():
    a, b = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    sign = torch.tensor([-1.0, 1.0])
    wanted = RunState(1, {"l.A": a, "l.B": b}, {})
    both, one = (RunState(1, {"l.A": sign[:, None] * a, "l.B": other}, {}) for other in (b * sign, b))
    assert largest_difference(both, wanted, up_to_signs=True)[0] == 0 < 1 < largest_difference(both, wanted)[0]
    assert largest_difference(one, wanted, up_to_signs=True)[0] > 1


def test_what_is_no_number_on_one_side_is_no_agreement():
    number, none = (RunState(1, {"a": torch.tensor([1.0, value])}, {}) for value in (2.0, torch.nan))
    assert largest_difference(none, number) == largest_difference(number, none) == (torch.inf, "a")
    assert largest_difference(none, none) == (0, "a")


def test_a_resumed_run_is_compared_as_well(monkeypatch):
    def perturbed(state, *_):
        return RunState(state.round, {name: tensor + 1 for name, tensor in state.weights.items()}, state.buffers)

    monkeypatch.setattr(methods, "_saved", perturbed)
    assert methods.compare("fedavg", "cpu").has_failed


def test_a_method_that_magnifies_roundings_is_held_to_what_it_makes_of_them(monkeypatch):
    monkeypatch.setattr(methods, "largest_difference", lambda *_, **__: (next(apart), "head.bias"))
    for there, fails in ((0.2, False), (0.9, True)):
        apart = iter([there] * 4 + [0.1, 0.05, 0.02])
        line = methods.compare("fedavg", "cpu")
        assert line.has_failed == fails and "1.0e-01 on the CPU alone" in line.found


def test_weights_a_rounding_away_end_elsewhere():
    assert 0 < methods.rounded_apart(tiny_spec("fedavg", rounds=1)) < TOLERANCE


def test_dropout_is_off_in_comparisons():
    assert methods.undropped(tiny_spec("flora")).params["clip-lora"]["dropout"] == 0


def test_without_a_device_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        main([])
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_dry_run():
    assert main(["--dry-run"]) == 0
