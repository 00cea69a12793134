"""Each check must catch the fault it is for; the faulty methods are written to files and loaded as `--plugin` files."""

from pathlib import Path
from textwrap import dedent

import pytest
from typer.testing import CliRunner

from fedbench import testing
from fedbench.cli.app import app
from fedbench.core.errors import FedbenchError
from fedbench.kinds.registry import plugins_everywhere

HEAD = '''
"""A faulty method.

A line.
A line.
"""
from dataclasses import dataclass
from fedbench.core.method.hooks import hookimpl
from fedbench.toolkit.fedavg import average, local_sgd
import torch

@dataclass(frozen=True, kw_only=True)
class P:
    """None."""

class Faulty:
    name, citation, Params, recipe = "faulty", "Nobody, A paper that does not exist, 2000", P, {}
    calls = 0

    def __init__(self, params):
        self.params = params
        self.memory = None
'''

FAULTS = {
    "forgets state between processes": (
        testing.check_resume,
        """
        @hookimpl
        def aggregate(self, task):
            '''Averages with what it remembers outside the harness's state.'''
            new = average(task)
            self.memory = new if self.memory is None else {k: 0.5 * (v + self.memory[k]) for k, v in new.items()}
            return self.memory
        """,
    ),
    "draws from the global generator": (
        testing.check_training,
        """
        @hookimpl
        def aggregate(self, task):
            '''Adds noise.'''
            return {k: v + 1e-3 * torch.randn_like(v) for k, v in average(task).items()}
        """,
    ),
    "trains nothing": (
        testing.check_training,
        """
        @hookimpl
        def aggregate(self, task):
            '''Keeps the old weights.'''
            return dict(task.weights)
        """,
    ),
    "is not deterministic": (
        testing.check_same_seed,
        """
        @hookimpl
        def aggregate(self, task):
            '''Counts its calls over all runs.'''
            type(self).calls += 1
            return {k: v + self.calls for k, v in average(task).items()}
        """,
    ),
    "forgets to mark a hook": (
        testing.check_hooks,
        """
        @hookimpl
        def local_train(self, task):
            '''Default.'''
            return local_sgd(task)

        def aggregate(self, task):
            '''Unmarked.'''
            return average(task)
        """,
    ),
    "answers no hook": (testing.check_hooks, ""),
    "misspells a hook": (
        testing.check_hooks,
        """
        @hookimpl
        def local_train(self, task):
            '''Default.'''
            return local_sgd(task)

        @hookimpl
        def agregate(self, task):
            '''Misspelt.'''
            return average(task)
        """,
    ),
    "forgets to return": (
        testing.check_training,
        """
        @hookimpl
        def aggregate(self, task):
            '''No return.'''
            average(task)
        """,
    ),
    "diverges": (
        testing.check_training,
        """
        @hookimpl
        def aggregate(self, task):
            '''NaN.'''
            return {k: v * float("nan") for k, v in average(task).items()}
        """,
    ),
}


def faulty(fault, folder):
    """The file of the method with the fault, and the check that must catch it."""
    check, body = FAULTS[fault]
    file = folder / "faulty.py"
    file.write_text(HEAD + dedent(body).replace("\n", "\n    "))
    return file, check


@pytest.mark.parametrize("fault", FAULTS)
def test_check_catches(fault, tmp_path):
    file, check = faulty(fault, tmp_path)
    with plugins_everywhere([file]):
        if check is testing.check_resume:
            # the new process is replaced by a second run of this one: what the plugin remembered is gone there too
            spec = testing.tiny_spec("faulty")
            whole = testing.digest(testing.final_state(testing.tiny_run(spec)))
            half = testing.final_state(testing.tiny_run(spec), until=2)
            assert whole != testing.digest(testing.final_state(testing.tiny_run(spec), half))
            return
        with pytest.raises((AssertionError, FedbenchError)) as caught:
            check("faulty")
    assert "unknown method" not in str(caught.value)  # the fault is met, not a plugin that was not found


@pytest.mark.parametrize("check", [testing.check_hidden_labels, testing.check_other_backbone, testing.check_stacking])
def test_what_is_refused_whatever_is_asked_of_it_fails_with_that_sentence(check, tmp_path):
    file, _ = faulty("answers no hook", tmp_path)
    with plugins_everywhere([file]), pytest.raises(FedbenchError, match="^faulty answers no hook"):
        check("faulty")


@pytest.mark.parametrize("check", [testing.check_hidden_labels, testing.check_other_backbone])
def test_a_refusal_for_another_reason_than_what_is_asked_is_shown(check, tmp_path):
    file, _ = faulty("answers no hook", tmp_path)
    file.write_text(
        file.read_text()
        + dedent("""
        @hookimpl
        def federate(self, federation, spec):
            '''Refuses.'''
            from fedbench.api import FedbenchError
            if spec.scenario.labels == "hidden" or spec.backbone == "convnet":
                raise FedbenchError("the moon is full")
            return federation
        """).replace("\n", "\n    ")
    )
    with plugins_everywhere([file]), pytest.raises(AssertionError, match="refused for another .*: the moon is full"):
        check("faulty")


def test_a_docstring_that_is_too_short_is_what_the_check_says(tmp_path):
    file, _ = faulty("diverges", tmp_path)
    file.write_text(file.read_text().replace("A line.\nA line.\n", "A line.\n"))
    with plugins_everywhere([file]), pytest.raises(AssertionError, match="docstring of 3 lines; write citation and"):
        testing.check_declaration("faulty")


def checked(*arguments):
    """Lines and exit code of `fedbench check`."""
    done = CliRunner().invoke(app, ["check", *arguments])
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line), done


def test_the_command_shows_a_line_for_each_check_of_a_plugin_file(tmp_path, monkeypatch):
    def check_stopped(name):
        raise SystemExit(0)

    def check_bug(name):
        raise KeyError("two\nlines")

    few = (testing.check_declaration, testing.check_hooks, testing.check_neutral, check_stopped, check_bug)
    monkeypatch.setattr(testing, "CHECKS", few)
    file, _ = faulty("forgets to mark a hook", tmp_path)
    lines, done = checked("faulty", "--plugin", str(file))
    assert done.exit_code == 1
    assert list(lines)[:5] == ["declaration", "hooks", "neutral", "stopped", "bug"]
    assert lines["declaration"] == "passed"
    assert lines["hooks"].startswith(
        "failed: faulty has a function aggregate, which is the name of a hook, without @hook"
    )
    assert lines["neutral"] == "not applicable: no hyper-parameter declares a neutral value"
    assert lines["stopped"].startswith("failed: SystemExit: 0 (test_the_contract_itself.py, line ")
    assert lines["bug"].startswith("failed: KeyError: 'two\\nlines' (")
    assert lines["faulty breaks the contract"] == "3 of 5 checks failed."
    monkeypatch.setattr(testing, "CHECKS", few[:1])
    lines, done = checked("fedprox")
    assert done.exit_code == 0 and lines == {"declaration": "passed"} and "fedprox keeps the contract." in done.stdout


def test_an_unknown_method_is_bad_input_and_fails_no_check():
    _, done = checked("fedprx")
    assert done.exit_code == 2 and "did you mean 'fedprox'" in done.stderr and not done.stdout


def test_the_method_of_the_readme_is_declared_as_the_contract_wants_it(tmp_path, monkeypatch):
    code = (Path(__file__).parents[2] / "README.md").read_text("utf-8").partition("## Write a method")[2]
    (tmp_path / "fedmedian.py").write_text(code.partition("```python\n")[2].partition("```")[0], "utf-8")
    monkeypatch.setattr(testing, "CHECKS", (testing.check_declaration, testing.check_hooks))
    lines, _ = checked("fedmedian", "--plugin", str(tmp_path / "fedmedian.py"))
    assert lines == {"declaration": "passed", "hooks": "passed"}


@pytest.mark.slow
def test_a_method_of_a_file_keeps_the_whole_contract_resumed_in_a_new_process_as_well():
    file = Path(__file__).parents[1] / "third_party_package" / "example_median.py"
    lines, done = checked("example-median", "--plugin", str(file))
    assert done.exit_code == 0, done.stdout
    assert len(lines) == len(testing.CHECKS) and lines["resume"] == "passed"
