"""FedRoD: Chen and Chao 2022: a balanced generic predictor and what each client adds to it."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedbench.core.types import LinearHead, Model, Outputs
from fedbench.rounds.loop import predict
from fedbench.testing import final_state
from fedbench.toolkit.losses import balance
from fedbench.toolkit.wrapping import beside
from fedbench_methods.fedrod import BIAS, SCALE, WEIGHT
from tests.equations.kit import all_of, end_of, runs

COUNTS = (3, 1, 0)


rod_run = runs("fedrod")


def test_the_balance_is_the_logarithm_of_the_counts_and_never_infinite():
    found = balance(torch.tensor(COUNTS), 0.5)
    torch.testing.assert_close(found[:2], torch.tensor([0.5 * 1.0986123, 0.0]))
    assert found[2].item() == pytest.approx(0.5 * -18.420681)


def test_generic_weights_get_the_balanced_gradient_and_the_residual_that_of_the_sum_on_detached_features(make_step):
    torch.manual_seed(0)
    inputs, labels = torch.randn(4, 2), torch.tensor([0, 0, 1, 0])
    weights = {"body.w": torch.randn(2, 2), "head.weight": torch.randn(3, 2), "head.bias": torch.randn(3)}

    def forward(tensors, inputs, training):
        z = inputs @ tensors["body.w"]
        return Outputs(2 * (z @ tensors["head.weight"].T + tensors["head.bias"]), z)

    own = {WEIGHT: torch.randn(3, 2), BIAS: torch.randn(3)}
    model = beside(Model(weights, forward, head=LinearHead(scale=2.0), constants={SCALE: torch.tensor(2.0)}), own)
    leaves = {name: value.clone().requires_grad_() for name, value in model.weights.items()}
    step = make_step(
        model,
        inputs,
        labels.tolist(),
        weights=leaves,
        method="fedrod",
        params={"fedrod": {"gamma": 0.5}},
        num_classes=3,
    )
    loss = step.task.hooks.local_objective(step=step)
    # by hand: softmax of o + .5 log n for the generic part, of o + 2 (W z + b) for the residual
    twin = {name: value.clone().requires_grad_() for name, value in model.weights.items()}
    made = forward(twin, inputs, True)
    generic = cross_entropy(made.logits + 0.5 * torch.tensor([3.0, 1.0, 1e-8]).log(), labels)
    features = made.features.detach()
    residual = cross_entropy(made.logits.detach() + 2 * (features @ twin[WEIGHT].T + twin[BIAS]), labels)
    torch.testing.assert_close(loss, generic)  # what is recorded is that of the generic model
    for name, wanted in zip(twin, torch.autograd.grad(generic + residual, list(twin.values())), strict=True):
        [found] = torch.autograd.grad(loss, leaves[name], retain_graph=True)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("learner", ["fedavg", "promptfl", "fedglcl"])
def test_without_balance_the_global_model_is_trained_as_without_it(learner):
    plain = end_of(learner, backbone="clip:embedded", rounds=2, executor="sequential")
    run = rod_run(f"{learner}+fedrod", {"gamma": 0.0}, rounds=2, executor="sequential")
    state = final_state(run)
    for name, value in plain.weights.items():
        torch.testing.assert_close(state.weights[name], value, rtol=1e-5, atol=1e-7)
    assert run.info.round_bytes == sum(4 * value.numel() for value in plain.weights.values())
    balanced = final_state(rod_run(f"{learner}+fedrod", rounds=2, executor="sequential"))
    assert any(not torch.allclose(balanced.weights[name], value, rtol=1e-3) for name, value in plain.weights.items())


@pytest.mark.parametrize("learner", ["fedavg", "promptfl", "clip-lora", "fedclip"])
def test_own_models_predict_by_the_sum_and_the_global_one_without_the_residual(learner):
    run = rod_run(f"{learner}+fedrod", rounds=2)
    state = final_state(run)
    answer = predict(run, state, run.test, clients=(0, 1, 2, 3))
    made = run.model.forward(state.weights, all_of(run.test), False)
    assert torch.equal(answer.labels, made.logits.argmax(1))
    zero = {WEIGHT: state.weights[WEIGHT], BIAS: state.weights[BIAS]}
    assert not any(value.any() for value in zero.values()) and len(state.own) >= 2
    scale = run.model.constants[SCALE]
    assert scale > 1, "as CLIP's"
    for client, labels in answer.by_client.items():
        own = state.own.get(client, zero)
        logits = made.logits + scale * (made.features @ own[WEIGHT].T + own[BIAS])
        assert torch.equal(labels, logits.argmax(1))


def test_features_of_a_model_without_a_head_are_measured():
    run = rod_run("fedglcl+fedrod", backbone="convnet", rounds=2)
    # the projector is 128 wide, the backbone 84
    assert run.model.weights[WEIGHT].shape == (4, 128)
