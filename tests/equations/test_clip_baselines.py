"""CLIP-ZS, the text-initialised head and CLIP-FC-Centralized: Yan and Guo 2024, section 3."""

import torch
from torch.nn.functional import normalize

from fedbench.rounds.loop import evaluate
from fedbench.scenarios import build_federation
from fedbench.testing import digest, tiny_backbone, tiny_dataset, tiny_spec
from fedbench_methods.shared.clients import pooled
from tests.equations.kit import end_of, one_client, run_of


def test_zero_shot_predicts_the_nearest_text_and_sends_nothing():
    run = run_of("clip-zs")
    clip = tiny_backbone("clip:embedded")
    text = clip.text_features(tiny_dataset().classnames, ("a photo of a {}",))
    images = clip.encode_images(run.federation.test.images.read(torch.arange(len(run.federation.test))))
    expected = (normalize(images, dim=1) @ normalize(text, dim=1).T).argmax(1)
    _, predictions = evaluate(run, run.initial_state())
    assert torch.equal(predictions.labels, expected)
    assert run.info.round_bytes == 0


def test_zero_shot_is_unchanged_by_feature_scale():
    run = run_of("clip-zs")
    inputs = run.test.read(torch.arange(20))
    assert torch.equal(
        run.model.forward({}, inputs, False).logits.argmax(1), run.model.forward({}, 7 * inputs, False).logits.argmax(1)
    )


def test_round_zero_of_a_text_initialised_head_is_zero_shot():
    zero_shot, head = run_of("clip-zs"), run_of("fedavg")
    ours = evaluate(head, head.initial_state())[1].labels
    assert torch.equal(ours, evaluate(zero_shot, zero_shot.initial_state())[1].labels)


def test_head_logits_are_scale_times_w_z_plus_b_on_unit_features():
    run = run_of("fedavg")
    clip = tiny_backbone("clip:embedded")
    inputs = torch.zeros(1, clip.embed_dim)
    inputs[0, 1] = 9.0  # any length: the unit vector e_1
    weight = torch.zeros(4, clip.embed_dim)
    weight[:, 1] = torch.tensor([1.0, -1.0, 0.5, 0.0])
    tensors = {"head.weight": weight, "head.bias": torch.tensor([0.0, 0.0, 0.0, 2.0])}
    expected = clip.logit_scale * torch.tensor([[1.0, -1.0, 0.5, 2.0]])
    torch.testing.assert_close(run.model.forward(tensors, inputs, False).logits, expected)


def test_pooling_keeps_every_sample_once_on_one_client():
    federation = build_federation(tiny_dataset(), tiny_spec("fedavg").scenario, seed=0)
    merged = pooled(federation)
    assert [shard.id for shard in merged.clients] == [0]
    every = torch.cat([s.indices for s in federation.clients])
    assert sorted(merged.clients[0].indices.tolist()) == sorted(every.tolist())


def test_centralised_equals_fedavg_with_one_client_bit_for_bit(monkeypatch):
    central = end_of("clip-linear-centralized", rounds=2)
    one_client(monkeypatch)
    alone = end_of("clip-linear-centralized", method="fedavg", rounds=2)
    assert digest(central) == digest(alone)
