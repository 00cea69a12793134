"""Learning rates over the rounds: decay, warm-up, cosine; runs recorded before them keep their ids."""

import pytest

from fedbench.core.spec import RunSpec, Training
from fedbench.toolkit.local_training import learning_rate
from fedbench.tracking.tags import DEFAULTS, flat_params


def rates(rounds, **training):
    return [learning_rate(Training(rounds=rounds, **training), t) for t in range(1, rounds + 1)]


def test_a_constant_rate_decays_bit_for_bit_as_before():
    assert rates(4, lr=0.3, lr_decay=0.9) == [0.3 * 0.9**t for t in range(4)]


def test_warm_up_and_cosine_by_hand():
    assert rates(4, lr=1.0, lr_schedule="cosine") == pytest.approx([1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])
    # three rounds of warm-up are quarters; what is left of the rounds is the cosine's
    assert rates(7, lr=2.0, lr_schedule="cosine", warmup_rounds=3) == pytest.approx(
        [0.5, 1, 1.5, 2, 2 * (1 + 0.5**0.5) / 2, 1, 2 * (1 - 0.5**0.5) / 2]
    )
    assert rates(3, lr=1.0, lr_schedule="cosine", lr_decay=0.5) == pytest.approx([1, 0.5 * 0.75, 0.25 * 0.25])


def test_fine_tuning_after_the_last_round_keeps_its_rate():
    training = Training(rounds=4, lr=1.0, lr_schedule="cosine")
    assert learning_rate(training, 5) == learning_rate(training, 4) > 0
    # a warm-up as long as the run never ends
    assert rates(2, lr=1.0, lr_schedule="cosine", warmup_rounds=5) == pytest.approx([1 / 6, 2 / 6])


def test_fields_at_their_defaults_leave_ids_as_they_were_and_stand_among_the_defaults():
    assert RunSpec().run_id == "5b4a9b76bdee4718"
    assert RunSpec(training=Training(clip_norm=1.0)).run_id != RunSpec().run_id
    assert "training.clip_norm" not in flat_params(RunSpec())
    assert DEFAULTS["training.clip_norm"] == "none" and DEFAULTS["training.lr_schedule"] == "constant"
