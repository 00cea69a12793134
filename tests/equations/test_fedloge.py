"""FedLoGe: Xiao et al. 2024: a fixed sparse simplex for the backbone, a global and a private head on its features."""

import math
from functools import lru_cache

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.method.tasks import EvaluationTask
from fedbench.core.types import LinearHead, Model, Outputs
from fedbench.models.inputs import FeatureInputs
from fedbench.rounds.executors.sequential import train_client
from fedbench.rounds.finetuning import finetuned_metrics
from fedbench.rounds.loop import rounds, train_round
from fedbench.testing import final_state, tiny_run
from fedbench_methods.fedloge import (
    BIAS,
    FIXED,
    FIXED_BIAS,
    WEIGHT,
    FedLoGe,
    FedLoGeParams,
    personal_head,
    realigned,
)
from fedbench_methods.shared.etf import kept_entries, simplex, simplex_loss, smallest_angles, sparse_simplex
from tests.equations.kit import end_of, generator, run_of, spec_of, task_of

LOCAL = frozenset({WEIGHT, BIAS})


@pytest.mark.parametrize(("classes", "width"), [(10, 64), (4, 4), (4, 3), (2, 1)])
def test_without_sparsity_and_steps_the_gram_matrix_is_that_of_a_simplex(classes, width):
    want = classes / (classes - 1) * (torch.eye(classes, dtype=torch.float64) - 1 / classes)
    rows = simplex(classes, width, generator())
    torch.testing.assert_close(rows @ rows.T, want, atol=1e-12, rtol=0)
    fixed = sparse_simplex(classes, width, 0.0, 1.0, 0, generator())
    torch.testing.assert_close(fixed @ fixed.T, want.float(), atol=1e-6, rtol=0)


def test_features_narrower_than_classes_minus_one_are_refused():
    with pytest.raises(FedbenchError, match="4 vectors at equal angles, .*width 3 or more"):
        sparse_simplex(4, 2, 0.0, 1.0, 0, generator())
    with pytest.raises(FedbenchError, match="this backbone has 2: choose a wider one"):
        run_of("fedloge", backbone="resnet8?width=1&projector=2")


def test_sparsity_zeroes_its_share_of_the_entries_for_good():
    for steps in (0, 30):
        fixed = sparse_simplex(10, 50, 0.6, 0.1, steps, generator())
        assert int((fixed == 0).sum()) == 300


def test_a_class_without_entries_is_refused():
    with pytest.raises(FedbenchError, match="leaves a class without any of its 4 entries"):
        kept_entries(5, 4, 0.9, generator())


def test_smallest_angle_is_to_the_nearest_other_row_whatever_the_lengths():
    rows = torch.tensor([[1.0, 0.0], [0.0, 3.0], [-2.0, 2.0]])
    assert torch.rad2deg(smallest_angles(rows)).tolist() == pytest.approx([90.0, 45.0, 45.0], abs=1e-3)


def test_loss_of_the_simplex_by_hand():
    # (3 - 1)² + (4 - 1)² - (π/2 + π/2) / 2
    loss = simplex_loss(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), 1.0)
    assert loss.item() == pytest.approx(13 - math.pi / 2, abs=1e-5)


def test_ten_classes_reach_the_angle_and_the_norm_of_the_released_logs():
    fixed = sparse_simplex(10, 64, 0.6, 0.1, 1500, generator())
    angles = torch.rad2deg(smallest_angles(fixed))
    # arccos(-1/9) = 96.3794; before the steps the smallest is far below
    assert angles.min().item() == pytest.approx(96.38, abs=0.02)
    assert torch.rad2deg(smallest_angles(sparse_simplex(10, 64, 0.6, 0.1, 0, generator()))).min() < 90
    assert fixed.norm(dim=1).mean().item() == pytest.approx(0.1, rel=0.03)


def test_realignment_keeps_directions_makes_norms_equal_and_leaves_zero_rows():
    weight = torch.tensor([[3.0, 4.0], [0.0, -0.5], [0.0, 0.0]])
    expected = torch.tensor([[1.02, 1.36], [0.0, -1.7], [0.0, 0.0]])
    torch.testing.assert_close(realigned(weight, 1.7), expected)


def test_personal_head_is_global_rows_times_local_norms_plus_local_rows():
    general = torch.tensor([[2.0, 0.0], [0.0, 10.0]])
    local = torch.tensor([[3.0, 4.0], [0.0, 0.5]])
    # (2, 0)·5 + (3, 4); (0, 10)·0.5 + (0, 0.5); not divided by the global norms 2 and 10
    assert personal_head(general, local, 1.0).tolist() == [[13.0, 4.0], [0.0, 5.5]]
    # exponent 0: the plain sum
    assert personal_head(general, local, 0.0).tolist() == [[5.0, 4.0], [0.0, 10.5]]


def toy(scale=1.0, fixed=True):
    """z = w x elementwise (b, 2), three heads of two classes."""

    def forward(tensors, inputs, training):
        features = tensors["w"] * inputs
        logits = scale * (features @ tensors["head.weight"].T + tensors["head.bias"])
        return Outputs(logits, features)

    weights = {
        "w": torch.tensor([1.0, 2.0]),
        "head.weight": torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        "head.bias": torch.tensor([0.0, 0.5]),
        WEIGHT: torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        BIAS: torch.tensor([0.0, 0.0]),
    }
    constants = {FIXED: torch.tensor([[0.5, 0.0], [0.0, 1.0]]), FIXED_BIAS: torch.zeros(2)} if fixed else {}
    return Model(weights=weights, forward=forward, constants=constants, head=LinearHead(scale=scale))


def minus_log_first(a, b):
    """−log softmax of the first of two logits."""
    return math.log(1 + math.exp(b - a))


@pytest.mark.parametrize(("scale", "fixed"), [(1.0, True), (2.0, True), (1.0, False)])
def test_loss_is_the_cross_entropies_of_fixed_global_and_local_head(make_step, scale, fixed):
    model = toy(scale, fixed)
    step = make_step(model, torch.tensor([[2.0, 1.0]]), [0])
    # z = (2, 2): global (2, 2.5), local (2, 0), fixed (1, 2)
    want = minus_log_first(2 * scale, 2.5 * scale) + minus_log_first(2 * scale, 0)
    want += minus_log_first(scale, 2 * scale) if fixed else 0
    assert FedLoGe(FedLoGeParams()).local_loss(step).item() == pytest.approx(want, abs=1e-6)


def test_backbone_has_the_gradient_of_the_fixed_head_only_and_each_head_its_own(make_step):
    model = toy()
    weights = {name: t.clone().requires_grad_() for name, t in model.weights.items()}
    FedLoGe(FedLoGeParams()).local_loss(make_step(model, torch.tensor([[2.0, 1.0]]), [0], weights=weights)).backward()
    # softmax(1, 2) = (.268941, .731059): dL/dz = Eᵀ(−.731059, .731059) = (−.365529, .731059); times x = (2, 1)
    torch.testing.assert_close(weights["w"].grad, torch.tensor([-0.731059, 0.731059]), atol=1e-5, rtol=0)
    # softmax(2, 2.5)_2 = .622459; times z = (2, 2)
    residual = torch.tensor([-0.622459, 0.622459])
    torch.testing.assert_close(weights["head.bias"].grad, residual, atol=1e-5, rtol=0)
    torch.testing.assert_close(weights["head.weight"].grad, residual[:, None] * 2.0 * torch.ones(2), atol=1e-5, rtol=0)
    # softmax(2, 0)_2 = .119203
    torch.testing.assert_close(weights[BIAS].grad, torch.tensor([-0.119203, 0.119203]), atol=1e-5, rtol=0)


def test_hidden_labels_are_refused(make_step):
    with pytest.raises(FedbenchError, match="needs labels"):
        FedLoGe(FedLoGeParams()).local_loss(make_step(toy(), torch.ones(1, 2), None))


def fast(backbone, *, rounds=2, **params):
    return spec_of("fedloge", {"fedloge": {"steps": 20, **params}}, backbone=backbone, rounds=rounds)


@lru_cache
def cnn_run():
    """Two rounds on a CNN: the run, its fixed head before them, and by round state, record and predictions."""
    run = tiny_run(fast("convnet"), executor="sequential")
    before = {name: t.clone() for name, t in run.model.constants.items()}
    return run, before, list(rounds(run, run.initial_state()))


def test_training_leaves_the_fixed_head_bit_for_bit_and_it_follows_the_seed():
    run, before, _ = cnn_run()
    assert all(torch.equal(before[name], t) for name, t in run.model.constants.items())
    again = tiny_run(fast("convnet")).model.constants
    other = run_of("fedloge", {"fedloge": {"steps": 20}}, backbone="convnet", seed=1).model.constants
    assert torch.equal(again[FIXED], before[FIXED]) and not torch.equal(other[FIXED], before[FIXED])


def test_fixed_bias_is_zero_by_default_and_random_as_an_option():
    _, before, _ = cnn_run()
    assert torch.equal(before[FIXED_BIAS], torch.zeros(4))
    drawn = tiny_run(fast("convnet", etf_bias="random")).model.constants
    assert 0 < drawn[FIXED_BIAS].abs().max() <= 84**-0.5
    assert torch.equal(drawn[FIXED], before[FIXED])


def test_backbone_trains_alike_whatever_the_trained_heads_are():
    run, _, _ = cnn_run()
    tasks = []
    for factor in (1.0, -3.0):
        state = run.initial_state()
        for name in ("head.weight", "head.bias", WEIGHT, BIAS):
            state.weights[name] = factor * state.weights[name]
        state.own[0] = {name: state.weights[name] for name in (WEIGHT, BIAS)}
        tasks.append(task_of(run, 0, state=state))
    one, other = (train_client(task).weights for task in tasks)
    heads = {"head.weight", "head.bias", WEIGHT, BIAS}
    assert all(torch.equal(one[name], other[name]) for name in one.keys() - heads)
    assert not torch.equal(one["head.weight"], other["head.weight"])
    assert not torch.equal(one["body.conv1.weight"], run.model.weights["body.conv1.weight"])


def test_local_heads_stay_with_their_clients_and_are_not_sent():
    run, _, after = cnn_run()
    plain = run_of("fedavg", backbone="convnet", rounds=1)
    record = train_round(plain, plain.initial_state())[1]
    assert (after[1][1].bytes_up, after[1][1].bytes_down) == (record.bytes_up, record.bytes_down)
    state = after[2][0]
    assert set(state.own) == set(after[1][1].cohort) | set(after[2][1].cohort)
    assert all(kept.keys() == LOCAL for kept in state.own.values())
    heads = [kept[WEIGHT] for kept in state.own.values()]
    assert not torch.equal(heads[0], heads[1])
    assert torch.equal(state.weights[WEIGHT], run.model.weights[WEIGHT])


def test_on_frozen_features_there_is_no_fixed_head_and_the_global_one_is_fedavgs_bit_for_bit():
    run = tiny_run(fast("clip:embedded"), executor="sequential")
    assert run.model.constants == {}
    state = final_state(run)
    plain = end_of("fedavg", backbone="clip:embedded", rounds=2, executor="sequential")
    assert all(torch.equal(state.weights[name], t) for name, t in plain.weights.items())
    with pytest.raises(FedbenchError, match="this backbone is frozen"):
        tiny_run(fast("clip:embedded", generic="fixed"))


def asked(model, inputs, *, clients=(), client=None, own=None, private=LOCAL, **params):
    task = EvaluationTask(
        model=model,
        weights={name: t.clone() for name, t in model.weights.items()},
        buffers={},
        inputs=FeatureInputs(torch.tensor(inputs)),
        num_classes=2,
        client=client,
        clients=clients,
        own=own or {},
        private=private,
    )
    before = {name: t.clone() for name, t in task.weights.items()}
    got = FedLoGe(FedLoGeParams(**params)).evaluate(task)
    assert all(torch.equal(before[name], t) for name, t in task.weights.items()), "evaluation changed the model"
    return got


def with_weights(model, **weights):
    named = {name.replace("_", "."): torch.tensor(value) for name, value in weights.items()}
    return Model(weights={**model.weights, **named}, forward=model.forward, constants=model.constants, head=model.head)


def test_generic_model_has_rows_of_one_length_and_its_bias_as_it_is():
    # rows (10, 0) and (0, 1), bias (0, b): at z = (1, 2) the raw logits are 10 and 2 + b, realigned 1.7 and 3.4 + b;
    # with b scaled by 1.7 like its row the second would be 1.36 for b = −1.2
    for bias, realigned_class in ((-1.2, 1), (-1.8, 0)):
        model = with_weights(toy(), head_weight=[[10.0, 0.0], [0.0, 1.0]], head_bias=[0.0, bias])
        # x = (1, 1) gives z = (1, 2)
        assert asked(model, [[1.0, 1.0]]).labels.tolist() == [realigned_class]
    # on longer rows the same bias, −1.8, matters less: 5 and 8.2
    assert asked(model, [[1.0, 1.0]], realigned_norm=5.0).labels.tolist() == [1]


def test_fixed_head_is_the_generic_one_as_an_option():
    # z = (5, 2) and (3, 2): realigned (8.5, 3.9) and (5.1, 3.9); fixed (2.5, 2) and (1.5, 2)
    model = toy()
    assert asked(model, [[5.0, 1.0], [3.0, 1.0]]).labels.tolist() == [0, 0]
    assert asked(model, [[5.0, 1.0], [3.0, 1.0]], generic="fixed").labels.tolist() == [0, 1]


def test_personal_predictions_are_by_the_scaled_global_and_the_local_head_of_each_client():
    model = toy()
    own = {
        0: {WEIGHT: torch.tensor([[3.0, 4.0], [0.0, 1.0]]), BIAS: torch.tensor([0.0, 0.0])},
        1: {WEIGHT: torch.tensor([[0.1, 0.0], [0.0, 1.0]]), BIAS: torch.tensor([0.0, 3.0])},
    }
    # client 0: head ((8, 4), (0, 2)); client 1: ((0.2, 0), (0, 2)), both with the global bias (0, 0.5)
    # z = (1, 2): client 0 (16, 4.5), client 1 (0.2, 7.5); z = (20, 0): client 1 (4, 3.5)
    got = asked(model, [[1.0, 1.0], [20.0, 0.0]], clients=(0, 1), own=own)
    assert {client: labels.tolist() for client, labels in got.by_client.items()} == {0: [0, 0], 1: [1, 0]}
    # without the global bias client 1 would need 4 > 3; with 0.5 more of it, 4 < 4.5
    model = with_weights(model, head_bias=[0.0, 1.5])
    assert asked(model, [[20.0, 0.0]], clients=(1,), own=own).by_client[1].tolist() == [1]


def test_a_client_may_predict_a_class_it_has_no_samples_of():
    # the released evaluation would know from the test labels which classes to leave out
    run, _, _ = cnn_run()
    held = [set(run.federation.train.labels[client.indices].tolist()) for client in run.federation.clients]
    client, absent = next((k, c) for k, has in enumerate(held) for c in range(4) if c not in has)
    state = run.initial_state()
    bias = torch.zeros(4)
    bias[absent] = 100.0
    own = {client: {WEIGHT: state.weights[WEIGHT], BIAS: bias}}
    task = EvaluationTask(
        run.model, state.weights, state.buffers, run.test, 4, clients=(client,), own=own, private=run.private
    )
    got = FedLoGe(FedLoGeParams()).evaluate(task).by_client[client]
    assert got.tolist() == [absent] * len(run.test)


def test_every_client_has_a_personal_model_after_the_last_round_and_none_before():
    _, _, after = cnn_run()
    assert [sorted(predictions.by_client) for _, _, predictions in after] == [[], [], [0, 1, 2, 3]]


def test_features_are_each_clients_own_where_another_method_keeps_parts_of_the_backbone_private():
    model = toy()
    own = {0: {"w": torch.tensor([1.0, 0.0])}, 1: {"w": torch.tensor([0.0, 1.0])}}
    heads = {WEIGHT: torch.tensor([[1.0, 0.0], [0.0, 1.0]]), BIAS: torch.tensor([0.0, -0.5])}
    own = {client: {**w, **heads} for client, w in own.items()}
    got = asked(model, [[1.0, 1.0]], clients=(0, 1), own=own, private=LOCAL | {"w"})
    assert {client: labels.tolist() for client, labels in got.by_client.items()} == {0: [0], 1: [1]}


def test_a_fine_tuned_client_is_evaluated_with_both_heads():
    # its local head: ((3, 4), (0, 1)); z = (1, 3): personal (3 + 5 + 12, 3 + 3 + 0.5) = (20, 6.5), generic 1.7, 5.6
    model = with_weights(toy(), local_weight=[[3.0, 4.0], [0.0, 1.0]])
    assert asked(model, [[1.0, 1.5]], client=1).labels.tolist() == [0]
    assert asked(model, [[1.0, 1.5]]).labels.tolist() == [1]


def test_clients_can_be_fine_tuned():
    run = run_of("fedloge", {"fedloge": {"steps": 20}}, backbone="clip:embedded", rounds=1, finetune_epochs=1)
    state = final_state(run)
    before = {client: kept[WEIGHT].clone() for client, kept in state.own.items()}
    assert 0 <= finetuned_metrics(run, state)["finetuned_mean_client_accuracy"] <= 100
    assert all(torch.equal(before[client], kept[WEIGHT]) for client, kept in state.own.items())
