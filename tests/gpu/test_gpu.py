"""What is run on an accelerator runs on a CPU as well."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedbench.rounds.state import RunState
from fedbench.testing import tiny_spec
from tests.bench.systems.fedbench_runs import run_of, settings
from tests.bench.workloads import TINY_HEAD, make_data
from tests.gpu import __main__ as command
from tests.gpu import methods
from tests.gpu.__main__ import STAGES, Stage, main
from tests.gpu.arithmetic import flops_of_an_image, work_of
from tests.gpu.methods import TOLERANCE, largest_difference
from tests.gpu.table import Aim, Line, Row
from tests.gpu.workloads import EAGER

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


def rows_in(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def stage(name, *rows, minutes=0.0):
    return Stage(name, minutes, f"the stage {name}", lambda place: rows)


def fine():
    return Line(seconds=2.0, images=100.0)


def broken():
    raise ValueError("it broke\nand more")


def test_methods_are_compared_and_written_down(tmp_path, capsys):
    chosen = ["--stages", "methods", "--methods", "scaffold"]
    assert main(["--dry-run", *chosen, "--output", str(tmp_path)]) == 0
    file = tmp_path / "gpu.md"
    assert "| scaffold | tiny |" in file.read_text() and "the CPU's weights to the bit" in file.read_text()
    (row,) = rows_in(tmp_path)
    assert (row["stage"], row["what"], row["step"]) == ("methods", "scaffold", None)
    assert "methods: scaffold, tiny" in capsys.readouterr().out


def test_a_method_that_fails_is_a_row_and_the_exit_code(capsys):
    assert main(["--dry-run", "--stages", "methods", "--methods", "nosuch"]) == 1
    out = capsys.readouterr().out
    assert "methods: nosuch, tiny: " in out and "found fails: " in out


def test_a_stage_has_figures_beside_aims_and_the_ceiling_of_the_same_command(tmp_path):
    assert main(["--dry-run", "--stages", "ceiling", "graphs", "--output", str(tmp_path)]) == 0
    rows = rows_in(tmp_path)
    ceilings = {row["how"]: row["tflops"] for row in rows if row["stage"] == "ceiling"}
    eager, stacked = ({row["how"]: row for row in rows}[f"{how}, float32"] for how in (EAGER.how, "at once"))
    assert eager["share"] == pytest.approx(100 * eager["tflops"] / ceilings["float32"])
    assert eager["ratio"] == 1 and eager["images"] > 0 and not eager["aim"]
    assert stacked["aim"].startswith("<= 0.35 ms a step: ")
    without = [row for row in rows if "tf32" in row["how"]]
    assert without and all(row["found"] == "skipped: a CPU has no TF32" and row["seconds"] is None for row in without)


def test_a_row_that_fails_is_reported_and_the_others_run(monkeypatch, tmp_path, capsys):
    rows = (Row("W", "first", fine, Aim("images", 90)), Row("W", "second", broken), Row("W", "third", fine))
    monkeypatch.setattr(command, "STAGES", (stage("one", *rows),))
    assert main(["--dry-run", "--output", str(tmp_path)]) == 1
    assert [row["has_failed"] for row in rows_in(tmp_path)] == [False, True, False]
    text = (tmp_path / "gpu.md").read_text()
    assert "| W | first | 2 | 1.00 | 100 | >= 90 images/s: met |  |" in text
    assert "| W | second |  |  |  |  | fails: ValueError: it broke |" in text
    assert "- one, about 0 min: the stage one" in capsys.readouterr().out


def test_a_stage_that_fails_is_reported_and_the_others_run_and_files_are_there_as_each_ends(monkeypatch, tmp_path):
    def second(place):
        assert "## one: the stage one" in (tmp_path / "gpu.md").read_text() and len(rows_in(tmp_path)) == 1
        raise ValueError("no rows")

    stages = (stage("one", Row("W", "", fine)), Stage("two", 0, "", second), stage("three", Row("W", "", fine)))
    monkeypatch.setattr(command, "STAGES", stages)
    assert main(["--dry-run", "--output", str(tmp_path)]) == 1
    assert [(row["stage"], row["found"]) for row in rows_in(tmp_path)] == [
        ("one", ""), ("two", "fails: ValueError: no rows"), ("three", "")
    ]  # fmt: skip


def test_minutes_leave_out_what_does_not_fit(monkeypatch, tmp_path, capsys):
    rows = (Row("W", "", fine),)
    monkeypatch.setattr(command, "STAGES", (stage("long", *rows, minutes=5), stage("short", *rows, minutes=1)))
    assert main(["--dry-run", "--minutes", "2", "--output", str(tmp_path)]) == 0
    assert [row["stage"] for row in rows_in(tmp_path)] == ["short"]
    assert "long: left out, about 5 min where 2.0 are left" in capsys.readouterr().out


def test_rows_stop_when_the_time_is_over(monkeypatch, tmp_path):
    def slow():
        time.sleep(0.3)
        return fine()

    monkeypatch.setattr(command, "STAGES", (stage("one", Row("W", "first", slow), Row("W", "second", broken)),))
    assert main(["--dry-run", "--minutes", "0.004", "--output", str(tmp_path)]) == 0
    assert [row["found"] for row in rows_in(tmp_path)] == ["", "not measured: the time is over"]


def test_an_aim_is_met_at_its_bound_and_has_no_verdict_without_a_figure():
    assert Aim("seconds", 2).judged(fine()) == "<= 2 s: met"
    assert Aim("seconds", 1.9).judged(fine()) == "<= 1.9 s: missed"
    assert Aim("images", 1200).judged(fine()) == ">= 1,200 images/s: missed"
    assert Aim("step", 0.7).judged(fine()) == "<= 0.7 ms a step"
    assert Aim("seconds", 2).judged(Line()) == "<= 2 s"


def test_operations_of_a_linear_head_by_hand(tmp_path):
    job = replace(TINY_HEAD, rounds=1)
    run = run_of(job, make_data(job, tmp_path), settings(tmp_path, "sequential", 1))
    # logits forward and the weights' gradient, features x classes each; the features have none
    assert flops_of_an_image(run) == 2 * 2 * 512 * job.classes
    record = SimpleNamespace(cohort=(0, 3))
    assert work_of(run, record) == (2 * job.samples, 2 * job.samples // job.batch)


def test_what_travels_to_a_machine_is_small():
    listed = subprocess.run(["git", "ls-files", "-z", ":!leaderboards"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert len(files) > 100 and sum(file.stat().st_size for file in files if file.is_file()) < 50 * MIB


def test_every_stage_of_the_gpu_page_is_named_there():
    page = (ROOT / "tests" / "bench" / "gpu.md").read_text("utf-8")
    assert all(f"| `{one.name}` |" in page for one in STAGES)


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
