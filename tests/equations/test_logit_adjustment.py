"""Logit adjustment: Menon et al. 2021, Eq. 10."""

from math import log

import torch

from fedbench.core.types import Model, Outputs
from fedbench.rounds.loop import start
from fedbench.toolkit.losses import adjusted, class_prior
from fedbench_methods.logit_adjustment import PRIOR
from tests.equations.kit import CLIP, run_of, task_of


def adjusted_run(stack, tau, executor="sequential"):
    return run_of(stack, {"logit-adjustment": {"tau": tau}}, backbone=CLIP, rounds=2, executor=executor)


def test_the_prior_is_the_share_of_all_samples():
    assert class_prior(torch.tensor([[3, 0, 1], [2, 0, 2]])).tolist() == [0.625, 0.0, 0.375]


def test_logits_by_hand_also_of_a_class_that_nobody_has():
    found = adjusted(torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([0.75, 0.25, 0.0]), 2.0)
    wanted = torch.tensor([[1 + 2 * log(0.75), 2 + 2 * log(0.25), 2 * log(1e-8)]])
    torch.testing.assert_close(found, wanted)


def test_loss_and_gradient_by_hand(make_step):
    model = Model({"w": torch.eye(2)}, lambda tensors, inputs, training: Outputs(inputs @ tensors["w"].T, inputs))
    step = make_step(
        model,
        torch.tensor([[1.0, 0.0]]),
        [1],
        weights={"w": torch.eye(2, requires_grad=True)},
        method="logit-adjustment",
        params={"logit-adjustment": {"tau": 1.0}},
        payload={PRIOR: torch.tensor([0.8, 0.2])},
        num_classes=2,
    )
    loss = step.task.hooks.local_objective(step=step)
    # o = (1, 0), so the adjusted odds of class 0 are 4 e: L = log(1 + 4 e)
    odds = 4 * torch.tensor(1.0).exp()
    torch.testing.assert_close(loss, (1 + odds).log())
    loss.backward()
    p = odds / (1 + odds)
    torch.testing.assert_close(step.weights["w"].grad, torch.stack([torch.stack([p, 0 * p]), torch.stack([-p, 0 * p])]))
    # outside training the logits are the model's
    assert torch.equal(step.received_outputs.logits, step.batch.inputs)


def test_all_clients_are_sent_the_prior_of_all_and_report_their_counts_once():
    run = adjusted_run("logit-adjustment", 1.0)
    state = run.initial_state()
    # 8 bytes a class and client
    assert start(run, state) == 8 * run.federation.num_classes * len(run.federation.clients)
    counts = torch.stack([run.federation.class_counts(client) for client in range(len(run.federation.clients))])
    for client in range(2):
        task = task_of(run, client, state=state)
        torch.testing.assert_close(task.payload[PRIOR], counts.sum(0) / counts.sum())
