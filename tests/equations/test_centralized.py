"""Centralized: any stack's learner on pooled data."""

import pytest

from fedbench.testing import digest, final_state, tiny_run, tiny_spec
from tests.equations.kit import one_client


@pytest.mark.parametrize("learner", ["fedavg", "promptfl"])
def test_it_is_the_learner_with_one_client_who_has_everything(monkeypatch, learner):
    spec = tiny_spec(f"centralized+{learner}", rounds=2)
    run = tiny_run(spec)
    assert len(run.federation.clients) == 1 and len(run.scored.clients) == 4
    assert len(run.federation.clients[0].indices) == sum(len(each.indices) for each in run.scored.clients)
    central = final_state(run)
    one_client(monkeypatch)
    alone = final_state(tiny_run(spec.model_copy(update={"method": learner})))
    assert digest(central) == digest(alone)
    monkeypatch.undo()
    assert digest(central) != digest(final_state(tiny_run(spec.model_copy(update={"method": learner}))))
