"""FedSA-LoRA: Guo et al. 2025: A is shared, B stays with its client."""

import torch

from fedbench.rounds.loop import predict
from fedbench.testing import final_state, tiny_run
from tests.equations.kit import all_of, lora_spec


def test_of_every_pair_a_is_sent_and_b_is_the_clients_own():
    run = tiny_run(lora_spec("clip-lora+fedsa-lora"))
    state = final_state(run)
    names = {name.removesuffix(".A") for name in run.model.weights if name.endswith(".A")}
    assert run.private == {f"{name}.B" for name in names} and len(names) == 2 * 3
    # r w floats a projection: r = 2, w = 64
    assert run.info.round_bytes == 4 * 6 * 2 * 64
    trained = [own for own in state.own.values() if own]
    assert len(trained) >= 2
    name = min(run.private)
    assert all(own[name].abs().max() > 0 for own in trained)
    assert not torch.equal(trained[0][name], trained[1][name])
    assert all(not torch.equal(state.weights[f"{n}.A"], run.model.weights[f"{n}.A"]) for n in names)


def test_the_global_model_stays_zero_shot_and_own_models_are_shared_a_with_own_b():
    run = tiny_run(lora_spec("clip-lora+fedsa-lora"))
    state = final_state(run)
    answer = predict(run, state, run.test, clients=(0, 1, 2, 3))
    inputs = all_of(run.test)

    def classes(weights):
        return run.model.forward(weights, inputs, False).logits.argmax(1)

    assert torch.equal(answer.labels, classes(run.model.weights)), "B = 0"
    for client, labels in answer.by_client.items():
        assert torch.equal(labels, classes({**state.weights, **state.own.get(client, {})}))
    assert any(not torch.equal(labels, answer.labels) for labels in answer.by_client.values())


def test_one_client_alone_ends_as_under_clip_lora():
    both = []
    for stack in ("clip-lora", "clip-lora+fedsa-lora"):
        only = {"clients": 1, "partition": "iid", "participation": 1.0}
        state = final_state(tiny_run(lora_spec(stack, scenario=only), executor="sequential"))
        both.append({**state.weights, **state.own.get(0, {})})
    assert both[0].keys() == both[1].keys()
    assert all(torch.equal(value, both[1][name]) for name, value in both[0].items())
