"""pFedMoAP: Luo et al. 2025: other clients' prompts as experts, mixed by a gate of each client's own."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fedbench.core.method.tasks import BroadcastTask
from fedbench.core.types import Broadcast
from fedbench.rounds.loop import predict, train_round
from fedbench.testing import final_state, tiny_backbone
from fedbench_methods.pfedmoap import CONTEXT, EXPERTS, TEXTS, PFedMoAP, PFedMoAPParams, gated, nearest, pooled
from tests.equations.kit import all_of, runs

LAYERS = ("query", "key", "value", "out")


moap_run = runs("pfedmoap", context_length=2, width=16, heads=4)


def identity(width):
    weights = {f"gate.{name}.weight": torch.eye(width) for name in LAYERS}
    return weights | {f"gate.{name}.bias": torch.zeros(width) for name in LAYERS}


def test_pooling_takes_every_rth_entry():
    assert pooled(torch.arange(12), 4).tolist() == [0, 3, 6, 9]
    assert pooled(torch.arange(3), 8).tolist() == [0, 1, 2]


def test_attention_by_hand():
    query, values = torch.tensor([[math.log(2), 0.0]]), torch.tensor([[[1.0, 0.0]], [[0.0, 4.0]]])
    # one head, identities, kappa 1: scores (ln 2, 0), weights (2/3, 1/3)
    h = gated(query, values, identity(2), 1, 1.0)
    assert h.shape == (1, 1, 2) and h.flatten().tolist() == pytest.approx([2 / 3, 4 / 3])
    # kappa 2: (4/5, 1/5); kappa 0: the mean
    assert gated(query, values, identity(2), 1, 2.0).flatten().tolist() == pytest.approx([4 / 5, 4 / 5])
    assert gated(query, values, identity(2), 1, 0.0).flatten().tolist() == pytest.approx([1 / 2, 2])
    # two heads: the first as before over (1, 0), the second has a query of zero: the mean of 0 and 4
    assert gated(query, values, identity(2), 2, 1.0).flatten().tolist() == pytest.approx([2 / 3, 2.0])
    # biases of the output are added
    moved = {**identity(2), "gate.out.bias": torch.tensor([1.0, -1.0])}
    assert gated(query, values, moved, 1, 0.0).flatten().tolist() == pytest.approx([3 / 2, 1])


def test_equal_experts_are_themselves_whatever_the_query():
    values = torch.tensor([[[1.0, 2.0], [3.0, -1.0]]]).expand(5, 2, 2)
    for query in torch.randn(3, 1, 2, generator=torch.Generator().manual_seed(0)):
        torch.testing.assert_close(gated(query, values, identity(2), 1, 10.0)[0], values[0])


def test_nearest_prompts_by_euclidean_distance():
    points = torch.tensor([1.0, 3.0, -0.5, -2.0])[:, None, None]
    assert nearest(torch.zeros(1, 1), points, 1) == [2] and nearest(torch.zeros(1, 1), points, 3) == [2, 0, 3]
    method = PFedMoAP(PFedMoAPParams(number=2))
    pool = {"0": torch.zeros(1, 1), "4": torch.full((1, 1), 1.0), "7": torch.full((1, 1), 3.0)}
    assert method._experts(pool, 0, 1) == ["4"] and method._experts(pool, 7, 1) == ["4"]
    assert method._experts(pool, 5, 1) == [], "a client without a prompt of its own has none"
    assert method._experts({"0": pool["0"]}, 0, 1) == []


def test_random_experts_are_others_for_every_client_and_round():
    method = PFedMoAP(PFedMoAPParams(number=4, experts="random"))
    method._seed = 0
    pool = {str(client): torch.zeros(1, 1) for client in range(12)}
    chosen = [tuple(method._experts(pool, client, round)) for client, round in ((3, 1), (3, 2), (4, 1))]
    assert len(set(chosen)) == 3 and all(len(set(each)) == 3 for each in chosen)
    assert "3" not in chosen[0] and chosen[0] == tuple(method._experts(pool, 3, 1))


def test_logits_are_those_of_the_equation():
    run, clip = moap_run(params={"sharpness": 3.0, "local_weight": 0.7}), tiny_backbone("clip:embedded")
    generator = torch.Generator().manual_seed(1)
    inputs, texts = run.test.read(torch.arange(5)), normalize(torch.randn(2, 4, 128, generator=generator), dim=-1)
    plain = run.model.forward(run.model.weights, inputs, False)
    logits = run.model.forward({**run.model.weights, TEXTS: texts}, inputs, False).logits
    gate = {name: run.model.weights[name].double() for name in run.model.weights if name != CONTEXT}
    features, experts = plain.features.double(), torch.cat([plain.texts[None], texts]).double()
    for image in range(5):
        for label in range(4):
            q, v = features[image, ::8], experts[:, label, ::8]
            asked, keys, values = (
                rows @ gate[f"gate.{name}.weight"].T + gate[f"gate.{name}.bias"]
                for name, rows in (("query", q), ("key", v), ("value", v))
            )
            heads = [
                torch.softmax(3 * keys[:, at : at + 4] @ asked[at : at + 4], 0) @ values[:, at : at + 4]
                for at in range(0, 16, 4)
            ]
            h = gate["gate.out.weight"] @ torch.cat(heads) + gate["gate.out.bias"]
            wanted = 0.7 * plain.logits[image, label].item() + clip.logit_scale * (q @ h).item()
            assert logits[image, label].item() == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_without_an_output_and_with_lambda_one_it_is_promptfl():
    run = moap_run(params={"local_weight": 1.0})
    prompted = moap_run("promptfl", {"context_length": 2})
    inputs, texts = run.test.read(torch.arange(5)), torch.rand(3, 4, 128)
    off = {name: torch.zeros_like(v) if name.startswith("gate.out") else v for name, v in run.model.weights.items()}
    wanted = prompted.model.forward(prompted.model.weights, inputs, False).logits
    assert torch.equal(run.model.forward({**off, TEXTS: texts}, inputs, False).logits, wanted)
    # in the first round nobody has experts
    first, _ = train_round(run, run.initial_state())
    same, _ = train_round(prompted, prompted.initial_state())
    torch.testing.assert_close(first.weights[CONTEXT], same.weights[CONTEXT], rtol=0, atol=1e-6)


def test_loss_takes_the_experts_texts_and_forgets_them_after_the_round(make_step):
    run = moap_run()
    inputs = run.test.read(torch.arange(8))
    experts = 0.5 * torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(3))
    weights = {name: value.clone().requires_grad_() for name, value in run.model.weights.items()}
    step = make_step(run.model, inputs, [0, 1, 2, 3] * 2, num_classes=4, weights=weights, payload={EXPERTS: experts})
    method = PFedMoAP(PFedMoAPParams(context_length=2, width=16, heads=4))
    method.build_model(_setup(run))
    texts = torch.stack([run.model.forward({CONTEXT: each}, inputs, False).texts for each in experts])
    wanted = cross_entropy(run.model.forward({**weights, TEXTS: texts}, inputs, True).logits, step.labels)
    loss = method.local_loss(step)
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    assert all(weight.grad.abs().max() > 0 for name, weight in weights.items() if name != "gate.key.bias")
    method.after_training(step.task, None)
    assert step.task.state == {}


def _setup(run):
    from fedbench.core.method.tasks import ModelSetup

    return ModelSetup(tiny_backbone("clip:embedded"), ("bird", "boat", "car", "tree"), run.spec, None)


def test_a_client_is_sent_the_mean_and_its_experts():
    method, pool = PFedMoAP(PFedMoAPParams(number=3)), {str(c): torch.full((2, 4), float(c)) for c in range(4)}

    def sent(client):
        task = BroadcastTask(client, 2, 0, {CONTEXT: torch.ones(2, 4)}, None, {"pfedmoap": pool})
        return method.broadcast(task, lambda task: Broadcast(task.weights))

    assert sent(0).payload[EXPERTS][:, 0, 0].tolist() == [1.0, 2.0] and not sent(9).payload
    assert sent(0).weights[CONTEXT].sum() == 8


def test_own_models_have_gate_and_experts_and_the_global_one_neither():
    run = moap_run(lr=0.05, rounds=3, scenario={"participation": 1.0})
    state = final_state(run)
    assert set(state.server["pfedmoap"]) == {"0", "1", "2", "3"} and not any(state.clients.values())
    assert not torch.equal(state.own[0]["gate.out.weight"], state.own[1]["gate.out.weight"])
    inputs = all_of(run.test)
    answer = predict(run, state, run.test, clients=(0, 1, 2, 3))

    def texts(client):
        return run.model.forward({CONTEXT: state.server["pfedmoap"][str(client)]}, inputs, False).texts

    assert torch.equal(answer.labels, run.model.forward(state.weights, inputs, False).logits.argmax(1))
    for client, labels in answer.by_client.items():
        experts = torch.stack([texts(other) for other in range(4) if other != client])
        tensors = {**state.weights, **state.own[client], TEXTS: experts}
        assert torch.equal(labels, run.model.forward(tensors, inputs, False).logits.argmax(1))
    assert run.info.round_bytes == 4 * 2 * 64, "M d_t floats up"


def test_after_one_round_nobody_has_a_trained_gate_and_all_are_tested_by_the_prompt():
    run = moap_run(rounds=1)
    state = final_state(run)
    answer = predict(run, state, run.test, clients=(0, 1, 2, 3))
    assert all(torch.equal(labels, answer.labels) for labels in answer.by_client.values())
