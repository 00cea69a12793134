"""Centralized: any stack's learner on pooled data."""

import pytest

from fedbench.testing import digest, final_state
from tests.equations.kit import end_of, one_client, run_of


@pytest.mark.parametrize("learner", ["fedavg", "promptfl"])
def test_it_is_the_learner_with_one_client_who_has_everything(monkeypatch, learner):
    run = run_of(f"centralized+{learner}", rounds=2)
    assert len(run.federation.clients) == 1 and len(run.scored.clients) == 4
    assert len(run.federation.clients[0].indices) == sum(len(each.indices) for each in run.scored.clients)
    central = final_state(run)
    one_client(monkeypatch)
    alone = end_of(learner, backbone=run.spec.backbone, rounds=2)
    assert digest(central) == digest(alone)
    monkeypatch.undo()
    assert digest(central) != digest(end_of(learner, backbone=run.spec.backbone, rounds=2))
