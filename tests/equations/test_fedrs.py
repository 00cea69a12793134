"""FedRS: Li and Zhan 2021, restricted softmax."""

import torch

from fedbench.core.types import Model, Outputs
from fedbench_methods.fedrs import factors


def test_factors_are_alpha_for_missing_classes_or_rise_with_the_counts():
    counts = torch.tensor([4, 0, 1])
    assert factors(counts, 0.5, "missing").tolist() == [1.0, 0.5, 1.0]
    # .5 + .5 * (1, 0, 1/4)
    assert factors(counts, 0.5, "counts").tolist() == [1.0, 0.5, 0.625]
    assert factors(torch.tensor([3, 3, 3]), 0.2, "counts").tolist() == [1.0, 1.0, 1.0]


def step_of(make_step, *, is_own=False, **params):
    model = Model({"w": torch.eye(3)}, lambda tensors, inputs, training: Outputs(inputs @ tensors["w"].T, inputs))
    weights = {"w": torch.eye(3, requires_grad=True)}
    made = make_step(
        model,
        torch.tensor([[2.0, 1.0, -1.0]]),
        [0],
        weights=weights,
        method="fedrs",
        params={"fedrs": params},
        num_classes=3,
    )
    return type(made)(**{**vars(made), "is_own": is_own})


def test_loss_and_gradient_by_hand(make_step):
    step = step_of(make_step, alpha=0.25)
    loss = step.task.hooks.local_objective(step=step)
    # counts (1, 0, 0): logits 2, .25 * 1, .25 * -1
    wanted = torch.tensor([2.0, 0.25, -0.25])
    torch.testing.assert_close(loss, wanted.logsumexp(0) - 2)
    loss.backward()
    # row c: alpha_c (p_c - [c = 0]) x
    p = wanted.softmax(0)
    slope = torch.tensor([1.0, 0.25, 0.25]) * (p - torch.tensor([1.0, 0, 0]))
    torch.testing.assert_close(step.weights["w"].grad, slope[:, None] * step.batch.inputs)


def test_logits_outside_training_and_those_of_an_own_model_are_left_alone(make_step):
    step = step_of(make_step, alpha=0.25)
    assert torch.equal(step.received_outputs.logits, step.batch.inputs)
    plain = step_of(make_step, alpha=1.0)
    own = step_of(make_step, alpha=0.25, is_own=True)
    assert own.task.hooks.local_objective(step=own) == plain.task.hooks.local_objective(step=plain)
