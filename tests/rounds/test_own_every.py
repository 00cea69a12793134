"""Clients' own models by round: when they are evaluated, and that it changes nothing else."""

import pytest

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec, Training
from fedbench.rounds.loop import rounds
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import single
from fedbench.testing import digest, tiny_run, tiny_spec

OWN = "personal_mean_client_accuracy"


def trained(method, **training):
    """The metrics of every round and the digest of the last state."""
    run = tiny_run(tiny_spec(method, rounds=5, **training))
    metrics = {}
    for after, record, _ in rounds(run, run.initial_state()):
        metrics[record.round], state = dict(record.metrics), after
    return metrics, digest(state)


@pytest.mark.parametrize("method", ["fedbn", "fedproto", "fedavg"])
def test_own_models_by_round_change_no_other_number(method):
    backbone = "resnet8?width=1"
    plain, before = trained(method, backbone=backbone)
    often, after = trained(method, backbone=backbone, own_every=2)
    assert after == before and often[5] == plain[5]
    assert [number for number in plain if OWN in plain[number]] == ([] if method == "fedavg" else [5])
    # not of round 0, before which nobody has a model of its own; of the last round always
    assert [number for number in often if OWN in often[number]] == ([] if method == "fedavg" else [2, 4, 5])
    for number, metrics in often.items():
        assert {name: value for name, value in metrics.items() if not name.startswith("personal_")} == {
            name: value for name, value in plain[number].items() if not name.startswith("personal_")
        }


def test_those_of_a_round_are_those_that_a_run_of_as_many_rounds_ends_with():
    # the rate does not fall over the rounds, so that the shorter run is the beginning of the longer
    often, _ = trained("fedbn", backbone="resnet8?width=1", own_every=1)
    run = tiny_run(tiny_spec("fedbn", rounds=3, backbone="resnet8?width=1"))
    *_, (_, record, _) = rounds(run, run.initial_state())
    assert record.metrics[OWN] == often[3][OWN] and often[3][OWN] != often[5][OWN]


def test_runs_that_evaluate_own_models_at_the_end_keep_their_ids():
    assert "own_every" not in RunSpec().model_dump(mode="json")["training"]
    often = RunSpec(training=Training(own_every=2))
    assert often.run_id != RunSpec().run_id and often.model_dump(mode="json")["training"]["own_every"] == 2


def test_they_are_evaluated_beside_the_global_model():
    assert Training(eval_every=2, own_every=4).own_every == 4
    overrides = Overrides(sets=(("eval_every", "5"), ("own_every", "3")))
    with pytest.raises(FedbenchError, match=r"own_every='3': it must be a multiple of eval_every=5 "):
        expand(single(), overrides)
