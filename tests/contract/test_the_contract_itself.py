"""Each check must catch the fault it is for; the faulty methods are written to files and loaded as `--plugin` files."""

from textwrap import dedent

import pytest

from fedbench import assemble, testing

HEAD = '''
"""A faulty method.

A line.
A line.
"""
from dataclasses import dataclass
from fedbench.hookspecs import hookimpl
from fedbench.defaults import average, local_sgd
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


@pytest.mark.parametrize("fault", FAULTS)
def test_check_catches(fault, tmp_path, monkeypatch):
    check, body = FAULTS[fault]
    file = tmp_path / f"faulty_{abs(hash(fault))}.py"
    file.write_text(HEAD + dedent(body).replace("\n", "\n    "))
    original = assemble.find_method
    replacement = lambda name, files=(): original(name, [file] if name == "faulty" else files)  # noqa: E731
    for module in ("fedbench.assemble", "fedbench.prepare", "fedbench.testing", "fedbench.resolve"):
        monkeypatch.setattr(f"{module}.find_method", replacement)
    if check is testing.check_resume:
        # the new process is replaced by a second run of this one: what the plugin remembered is gone there too
        spec = testing.tiny_spec("faulty")
        whole = testing.digest(testing.final_state(testing.tiny_run(spec)))
        half = testing.final_state(testing.tiny_run(spec), until=2)
        assert whole != testing.digest(testing.final_state(testing.tiny_run(spec), half))
        return
    with pytest.raises((AssertionError, assemble.FedbenchError)) as caught:
        check("faulty")
    assert "unknown method" not in str(caught.value)  # the fault is met, not a plugin that was not found
