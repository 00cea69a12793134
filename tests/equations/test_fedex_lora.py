"""FedEx-LoRA: Singhal et al. 2025: exact means of low-rank additions, by a residual in the frozen weights."""

from dataclasses import replace

import torch

from fedbench.core.method.tasks import BroadcastTask
from fedbench.core.spec import RunSpec
from fedbench.core.types import Broadcast, Update
from fedbench.rounds.loop import predict, train_round
from fedbench.testing import tiny_run
from fedbench.toolkit.fedavg import average
from fedbench_methods.fedex_lora import FedExLoRA, FedExLoRAParams, residual
from tests.equations.kit import aggregation, all_of, exact_mean, lora_spec, pairs


def played(a, b, sizes=(1, 1), old=None, round=1, **params):
    """The server's answer and R after a round in which clients end at these factors of one pair "w"."""
    method, state = FedExLoRA(FedExLoRAParams(**params)), {}
    buffers = {"w.residual": torch.zeros(len(b[0]), a[0].shape[1]) if old is None else old}
    updates = tuple(Update(k, {"w.A": a[k], "w.B": b[k]}, buffers, n) for k, n in enumerate(sizes))
    task = aggregation({"w.A": a[0], "w.B": b[0]}, updates, state, round=round, buffers=buffers)
    answer = method.aggregate(task, average)
    return answer.weights, answer.buffers["w.residual"], state


def scalars(*values):
    return [torch.full((1, 1), float(value)) for value in values]


def test_scalars_by_hand():
    # mean(BA) = (0 + 4) / 2 = 2, mean(B) mean(A) = 1
    means, found, _ = played(scalars(0, 2), scalars(0, 2))
    assert means["w.A"].item() == means["w.B"].item() == 1 and found.item() == 1
    # shares 1/4, 3/4: .25 * 2 * 1 + .75 * 1 * 5 = 4.25; means A 1.25, B 4: 5; R = -.75
    means, found, _ = played(scalars(2, 1), scalars(1, 5), sizes=(1, 3))
    assert means["w.A"].item() * means["w.B"].item() == 5 and found.item() == -0.75


def test_residuals_add_up_over_rounds():
    _, first, _ = played(scalars(0, 2), scalars(0, 2))
    _, second, _ = played(scalars(2, 1), scalars(1, 5), sizes=(1, 3), old=first, round=2)
    assert first.item() == 1 and second.item() == 0.25


def test_one_client_and_equal_a_leave_nothing_over():
    generator = torch.Generator().manual_seed(0)
    a = [torch.randn(2, 5, generator=generator)] * 2
    b = [torch.randn(5, 2, generator=generator) for _ in range(2)]
    _, found, _ = played(a, b, sizes=(1, 3))
    assert found.abs().max() < 1e-6
    _, found, _ = played(a[:1], b[:1], sizes=(7,))
    assert torch.equal(found, torch.zeros(5, 5))


def test_the_released_code_adds_the_transpose():
    a, b = [torch.eye(1, 2), torch.eye(2)[1:]], [torch.ones(2, 1), torch.tensor([[5.0], [1.0]])]
    _, exact, _ = played(a, b)
    _, released, _ = played(a, b, orientation="transposed")
    # mean(BA) = [[.5, 2.5], [.5, .5]], mean(B) = (3, 1), mean(A) = (.5, .5): [[1.5, 1.5], [.5, .5]]
    assert exact.tolist() == [[-1.0, 1.0], [0.0, 0.0]] and torch.equal(released, exact.T)
    means = torch.full((1, 2), 0.5), torch.tensor([[3.0], [1.0]])
    assert torch.equal(residual(torch.cat(a), torch.cat(b, 1) / 2, *means), exact)


def test_who_was_there_is_sent_the_factors_of_the_residual_and_others_all_of_it():
    generator = torch.Generator().manual_seed(0)
    a = [torch.randn(1, 8, generator=generator) for _ in range(2)]
    b = [torch.randn(8, 1, generator=generator) for _ in range(2)]
    means, found, state = played(a, b)
    method = FedExLoRA(FedExLoRAParams())

    def sent(client):
        return method.broadcast(
            BroadcastTask(client, 2, 0, means, RunSpec(), state, {"w.residual": found}),
            lambda task: Broadcast(task.weights),
        )

    there, new = sent(1), sent(5)
    # 2 m r w = 32 floats against w^2 = 64
    assert sum(value.numel() for value in there.payload.values()) == 32
    assert new.payload.keys() == {"w.residual"} and torch.equal(new.payload["w.residual"], found)
    change = there.payload["w.change.B"] @ there.payload["w.change.A"] - means["w.B"] @ means["w.A"]
    torch.testing.assert_close(change, found)
    # where factors would be more, the matrix goes: 2 * 2 * 3 * 4 floats against 16
    wide = [torch.randn(3, 4, generator=generator) for _ in range(2)]
    _, _, state = played(wide, [each.T.contiguous() for each in wide])
    assert sent(0).payload.keys() == {"w.change"}


def test_round_for_round_the_model_is_the_mean_of_the_clients():
    run = tiny_run(lora_spec("clip-lora+fedex-lora"), executor="sequential")
    seen, aggregate = [], run.assembly.hooks.aggregate
    run.assembly.hooks.aggregate = lambda task: seen.append(task) or aggregate(task=task)
    state = run.initial_state()
    for _ in range(2):
        before = state.buffers
        state, _ = train_round(run, state)
        kept, task = state.buffers, seen[-1]
        for name in pairs(run):
            now = state.weights[f"{name}.B"] @ state.weights[f"{name}.A"] + kept[f"{name}.residual"]
            wanted = before[f"{name}.residual"] + exact_mean(task.updates, name)
            torch.testing.assert_close(now, wanted, rtol=0, atol=1e-6)
            assert kept[f"{name}.residual"].abs().max() > 0


def test_predictions_and_losses_are_at_the_residual_without_dropout_on_it(make_step):
    run = tiny_run(lora_spec("clip-lora+fedex-lora", {"dropout": 0.5}))
    generator, inputs = torch.Generator().manual_seed(1), all_of(run.test)
    residuals = {f"{name}.residual": 0.3 * torch.randn(64, 64, generator=generator) for name in pairs(run)}
    state = replace(run.initial_state(), buffers=residuals)
    # the factors of rank 64 that make the same addition
    whole = tiny_run(lora_spec("clip-lora", {"rank": 64}))
    factors = {}
    for name in pairs(run):
        # gamma is 1/sqrt(r): that of r = 2 against that of 64
        factors |= {f"{name}.A": torch.eye(64), f"{name}.B": residuals[f"{name}.residual"] * 32**0.5}
    logits = whole.model.forward(factors, inputs, False).logits
    plain = run.model.forward(run.model.weights, inputs, False).logits
    assert (logits - plain).abs().max() > 0.1
    torch.testing.assert_close(predict(run, state, run.test).scores, logits, rtol=1e-4, atol=1e-3)
    step = make_step(
        run.model, inputs, [i % 4 for i in range(len(inputs))], num_classes=4, buffers=residuals,
        weights={name: value.clone().requires_grad_() for name, value in run.model.weights.items()},
        method=run.spec.method, params=run.spec.params,
    )  # fmt: skip
    # B = 0, so that dropout has nothing to act on but the residual
    loss = step.task.hooks.local_objective(step=step)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, step.labels), rtol=1e-4, atol=1e-4)
