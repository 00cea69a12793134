"""CReFF: Shang et al. 2022; the equations themselves are in test_federated_features.py."""

import pytest
import torch

from fedbench.rounds.loop import rounds
from fedbench.testing import digest, final_state, tiny_run, tiny_spec
from tests.equations.kit import CLIP, all_of, few, spec_of, with_absent_classes


def spec(method="creff", backbone=CLIP, rounds=2, seed=0, **params):
    return spec_of(method, few(method, **params), backbone=backbone, rounds=rounds, seed=seed)


def predictions(spec):
    run = tiny_run(spec)
    return [answer.labels.tolist() for _, _, answer in rounds(run, run.initial_state())]


@pytest.mark.parametrize("backbone", ["clip:embedded", "convnet"])
def test_clients_train_as_under_fedavg_whatever_the_server_retrains(backbone):
    plain = digest(final_state(tiny_run(spec("fedavg", backbone))))
    heads = []
    for epochs in (1, 5):
        state = final_state(tiny_run(spec(backbone=backbone, retrain_epochs=epochs, lr_head=1.0)))
        assert digest(state) == plain
        heads.append(state.server["creff"]["head.weight"])
    assert not torch.equal(*heads)


def test_no_retraining_from_the_global_head_is_fedavg_in_what_it_predicts_too():
    got = predictions(spec(rounds=3, match_steps=0, retrain_epochs=0, head_start="global"))
    assert got == predictions(spec("fedavg", rounds=3))


def test_no_matching_and_no_retraining_keep_features_and_first_head():
    run = tiny_run(spec(match_steps=0, retrain_epochs=0, head_start="warm"))
    state = final_state(run)
    first = final_state(tiny_run(spec(rounds=1)), until=0).server["creff"]
    for name in ("head.weight", "head.bias"):
        assert torch.equal(state.server["creff"][name], run.model.weights[name])
    assert torch.equal(state.server["creff"]["features"], first["features"])


def test_before_training_the_head_is_the_models_own_and_features_are_standard_normal():
    run = tiny_run(spec(features=100))
    assert predictions(spec(rounds=0, features=100))[0] == predictions(spec("fedavg", rounds=0))[0]
    kept = final_state(run, until=0).server["creff"]
    assert kept["features"].shape == (4, 100, 128) and torch.equal(
        kept["head.weight"], run.model.weights["head.weight"]
    )
    assert kept["features"].mean().abs() < 0.02 and kept["features"].std().item() == pytest.approx(1.0, abs=0.02)


def test_evaluation_takes_the_retrained_head_and_does_not_change_the_weights():
    run = tiny_run(spec())
    state = final_state(run)
    head = state.server["creff"]
    inputs = all_of(run.test)
    swapped = run.model.forward({k: head[k] for k in ("head.weight", "head.bias")}, inputs, False).logits.argmax(1)
    assert predictions(spec())[-1] == swapped.tolist()
    assert not torch.equal(state.weights["head.weight"], head["head.weight"])


def test_features_persist_and_only_what_a_round_owns_moves():
    run = tiny_run(with_absent_classes(spec(rounds=4)))
    before = None
    for state, record, _ in rounds(run, run.initial_state()):
        features = state.server["creff"]["features"]
        if before is not None:
            counts = sum(run.federation.class_counts(client) for client in record.cohort)
            moved = [not torch.equal(a, b) for a, b in zip(features, before, strict=True)]
            assert moved == (counts > 0).tolist() and sum(moved) == 2
            assert (features - before).norm() < 0.5 * before.norm()
        before = features


def test_bytes_are_the_models_and_the_head_down_and_owned_class_gradients_up():
    run = tiny_run(spec(rounds=1))
    *_, (_, record, _) = rounds(run, run.initial_state())
    model = head = 4 * (4 * 128 + 4)
    assert record.bytes_down == len(record.cohort) * (model + head)
    owned = [int((run.federation.class_counts(client) > 0).sum()) for client in record.cohort]
    # (C d + C) floats and an int64 index for each owned class
    assert record.bytes_up == sum(model + o * (head + 8) for o in owned)


def test_retraining_helps_a_class_that_clients_hardly_see():
    # the default budget on the tiny data: the re-trained head learns something, that is, beats chance by far
    made = tiny_spec("creff", rounds=4)
    run = tiny_run(made)
    *_, (_, record, _) = rounds(run, run.initial_state())
    assert record.metrics["global_accuracy"] > 50


def test_another_seed_draws_other_features():
    one, two = (final_state(tiny_run(spec(seed=seed)), until=0).server["creff"]["features"] for seed in (0, 1))
    assert not torch.equal(one, two)


def test_a_new_head_starts_in_bounds_on_what_it_reads_whatever_the_models_scale():
    # the head on the features is W v + s b: both W and s b are drawn in ±1/√d, and one epoch at rate zero keeps them
    made = spec(backbone="clip:embedded", rounds=1, retrain_epochs=1, lr_head=1e-4)
    run = tiny_run(made.model_copy(update={"head_scale": 100.0}))
    head = final_state(run).server["creff"]
    bound = head["head.weight"].shape[1] ** -0.5 + 1e-3
    assert head["head.weight"].abs().max() <= bound
    assert 100 * head["head.bias"].abs().max() <= bound
