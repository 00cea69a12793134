"""What calls show while they run: lines in a terminal, a bar in a notebook, nothing where nothing is wanted."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

import fedbench
from fedbench.core.records import RoundRecord, RunResult
from fedbench.core.spec import RunSpec, Training
from fedbench.tuning.search import TrialBegan, TrialEnded
from fedbench.tuning.trial import Tuned
from fedbench.workflow import tuning
from fedbench.workflow.screens import NotebookProgress, Progress, screen_for
from fedbench.workflow.studies import Searched


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The process is a notebook's kernel; what its cell's output showed, one after the other, without the markup."""
    shown: list[str] = []

    class Handle:
        def update(self, text: str) -> None:
            shown.append(" ".join(re.sub(r"<(?!progress)[^>]*>", " ", text).split()))

    library, display = ModuleType("IPython"), ModuleType("IPython.display")
    library.get_ipython = lambda: SimpleNamespace(kernel=object())
    display.HTML, display.display = str, lambda *_, **__: Handle()
    monkeypatch.setitem(sys.modules, "IPython", library)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def trials(study: str, title: str) -> list[TrialBegan | TrialEnded]:
    """Of a study of two trials: both begin, one is pruned."""
    row = Tuned(RunSpec(label=title), (), study)
    return [
        TrialBegan(row, 0, {"lr": 0.01}),
        TrialBegan(row, 1, {"lr": 0.02}),
        TrialEnded(row, 0, (61.5,), "", 1, 2),
        TrialEnded(row, 1, (), "pruned: hopeless", 2, 2),
    ]


def tuned(monkeypatch: pytest.MonkeyPatch, stopped: bool = False, **options: object) -> None:
    """`fedbench.tune` of two rows, whose trials end without being run, and then find nothing."""
    budget = SimpleNamespace(trials=2, objectives=("global_accuracy",))
    records = [(None, SimpleNamespace(budget=budget))] * 2

    def search(plan, settings, place, on_event):
        for event in trials("a", "<first>") + trials("b", "second"):
            on_event(event)
        return None if stopped else Searched((), ())

    monkeypatch.setattr(tuning, "planned", lambda *_: SimpleNamespace(name="study", records=records, budget=budget))
    monkeypatch.setattr(tuning, "search", search)
    with pytest.raises(KeyboardInterrupt if stopped else fedbench.FedbenchError):
        fedbench.tune("longtail", **options)


def test_trials_are_a_bar_in_a_notebook(cell, monkeypatch, capsys) -> None:
    tuned(monkeypatch)
    assert len(cell) == 1 + 8 + 1
    assert cell[0].endswith("0/4 trials 0:00")
    assert 'value="0" max="4"' in cell[2]
    assert cell[2].endswith(
        "&lt;first&gt; · clip:embedded trial 0 lr=0.01 &lt;first&gt; · clip:embedded trial 1 lr=0.02"
    )
    assert 'value="1" max="4"' in cell[3] and "1/4 trials 0:00, about 0:00 left" in cell[3] and "trial 0" not in cell[3]
    assert 'value="4" max="4"' in cell[-2] and "trial 1" not in cell[-2]
    assert cell[-1] == "4 trials, 2 of them pruned in 0:00"
    assert capsys.readouterr().out == ""


def test_a_bar_goes_when_its_call_is_interrupted(cell, monkeypatch) -> None:
    tuned(monkeypatch, stopped=True)
    assert cell[-1] == "4 trials, 2 of them pruned in 0:00"


def test_trials_are_lines_elsewhere_and_nothing_where_nothing_is_wanted(cell, monkeypatch, capsys) -> None:
    tuned(monkeypatch, progress=False)
    assert cell == [] and capsys.readouterr().out == ""
    monkeypatch.delitem(sys.modules, "IPython")
    tuned(monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert cell == [] and len(lines) == 8
    assert lines[2].split() == ["done", "<first>", "·", "clip:embedded", "trial", "0", "61.5", "(1/2)"]


def test_runs_are_a_bar_in_a_notebook(cell) -> None:
    specs = [RunSpec(seed=seed) for seed in (0, 1)]
    view = screen_for(progress=True).progress("adhoc", specs)
    assert isinstance(view, NotebookProgress)
    info = SimpleNamespace(trainable_parameters=1, resumed_round=0)
    with view:
        view.run_started(specs[0], info)
        assert "0/2 runs" in cell[-1] and "fedavg · clip:embedded seed 0" in cell[-1]
        view.run_finished(specs[0], info, RunResult((), {"global_accuracy": 60.0}, (), {}, 1.0))
        assert 'value="1" max="2"' in cell[-1] and "seed 0" not in cell[-1]
        view.run_failed(specs[1], "no mean today")
        assert "2/2 runs" in cell[-1]
    assert cell[-1] == "1 run, 1 failed in 0:00"


def test_the_time_left_is_at_the_pace_since_the_checkpoint() -> None:
    specs = [RunSpec(training=Training(rounds=100), seed=seed) for seed in (0, 1)]
    view = Progress("adhoc", specs)
    view.run_started(specs[0], SimpleNamespace(trainable_parameters=1, resumed_round=90))
    assert view.remaining() is None
    for number in (90, 95):
        view.round_finished(specs[0], RoundRecord(number, (), {}, 0, 0, 1.0))
    view.elapsed = lambda: 5.0
    assert view.remaining() == 5.0 + 100.0
