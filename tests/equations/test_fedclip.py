"""FedCLIP: Lu et al. 2023, Eqs. 29-33."""

from math import exp, log

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fedbench.testing import final_state, tiny_backbone, tiny_run, tiny_spec
from fedbench.types import Model, Outputs
from fedbench_methods.fedclip import FedCLIP, FedClipParams, adapted, attention, in_batch_loss, initial_adapter


def adapter(w1, b1, w2, b2):
    tensors = [torch.tensor(t) for t in (w1, b1, w2, b2)]
    return dict(zip(("adapter.W1", "adapter.b1", "adapter.W2", "adapter.b2"), tensors, strict=True))


def test_attention_is_softmax_of_linear_tanh_linear():
    # W1 = 2x2 identity, b1 = (0, 1), I = (0, -1): tanh(0), tanh(0) = (0, 0); W2 irrelevant, b2 = (log 3, 0):
    # softmax = (3/4, 1/4)
    parts = adapter([[1.0, 0.0], [0.0, 1.0]], [0.0, 1.0], [[5.0, 7.0], [2.0, -3.0]], [log(3.0), 0.0])
    got = attention(torch.tensor([[0.0, -1.0]]), parts)
    torch.testing.assert_close(got, torch.tensor([[0.75, 0.25]]))


def test_attention_reads_the_raw_feature_through_tanh():
    # W1 = identity, I = (1, 0): tanh(1) = .76159; W2 = [[2, 0], [0, 0]]: softmax(1.52319, 0)
    parts = adapter([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0], [[2.0, 0.0], [0.0, 0.0]], [0.0, 0.0])
    first = 1 / (1 + exp(-2 * 0.7615941559557649))
    torch.testing.assert_close(attention(torch.tensor([[1.0, 0.0]]), parts), torch.tensor([[first, 1 - first]]))


def test_adapted_feature_is_the_unit_vector_of_the_gated_one():
    # gate (3/4, 1/4) on I = (0, -1) + ... : I* = (0, -1/4) -> unit (0, -1)
    parts = adapter([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]], [log(3.0), 0.0])
    # I = (4, 3): I* = (3, 3/4) -> direction (4, 1) / sqrt(17)
    expected = torch.tensor([[4.0, 1.0]]) / 17**0.5
    torch.testing.assert_close(adapted(torch.tensor([[4.0, 3.0]]), parts), expected)


def test_loss_is_the_mean_of_both_directions():
    images, texts = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    # s = 2: Z = [[2, 2], [0, 0]]. Rows: CE = log 2 both. Columns of Z: (2, 0) and (2, 0), targets 0 and 1:
    # log(1 + e^-2) and log(1 + e^2); half of [log 2 + their mean]
    columns = (log(1 + exp(-2)) + log(1 + exp(2))) / 2
    got = in_batch_loss(images, texts, torch.tensor(2.0))
    assert got.item() == pytest.approx(0.5 * (log(2) + columns))


def test_duplicate_classes_give_balanced_softmax_plus_a_constant():
    # image-to-text part: CE with logits + log(c_k / B) over the classes present, plus mean log c_{y_b}
    generator = torch.Generator().manual_seed(0)
    images = normalize(torch.randn(6, 5, generator=generator), dim=1)
    classes = normalize(torch.randn(3, 5, generator=generator), dim=1)
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    counts = torch.bincount(labels).float()
    balanced = cross_entropy(7 * images @ classes.T + (counts / 6).log(), labels)
    similarity = 7 * images @ classes[labels].T
    assert cross_entropy(similarity, torch.arange(6)).item() == pytest.approx(
        balanced.item() + counts[labels].log().mean().item(), abs=1e-5
    )


def test_uniform_gate_is_exactly_zero_shot():
    setup = tiny_run(tiny_spec("fedclip"))
    zero_shot = tiny_run(tiny_spec("clip-zs"))
    flat = {k: v if "1" in k else torch.zeros_like(v) for k, v in setup.model.weights.items()}
    inputs = setup.test.read(torch.arange(len(setup.test)))
    ours = setup.model.forward(flat, inputs, False).logits
    theirs = zero_shot.model.forward({}, inputs, False).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.argmax(1), theirs.argmax(1))


def test_local_loss_takes_the_text_of_each_samples_own_class(make_step):
    text = torch.eye(3)
    model = Model(weights={}, forward=None, constants={"text": text, "scale": torch.tensor(4.0)})
    features = normalize(torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]]), dim=1)
    step = make_step(model, features, labels=[2, 1], outputs=Outputs(features, features))
    got = FedCLIP(FedClipParams()).local_loss(step)
    assert got.item() == pytest.approx(in_batch_loss(features, text[[2, 1]], torch.tensor(4.0)).item())


def test_adapter_has_two_d_squared_plus_two_d_parameters():
    # ViT-B/32, d = 512: 2 (d^2 + d) = 525,312, the paper's 5.3E5
    assert sum(t.numel() for t in initial_adapter(512, 512, seed=0).values()) == 525_312
    # CAPT's re-implementation, 512 -> 128 -> 512: 131,712
    assert sum(t.numel() for t in initial_adapter(512, 128, seed=0).values()) == 131_712


def test_only_the_adapter_is_sent():
    run = tiny_run(tiny_spec("fedclip"))
    dim = tiny_backbone("clip:embedded").embed_dim
    assert run.info.round_bytes == 4 * 2 * (dim**2 + dim)


def test_recipe_is_adam_with_coupled_decay_and_training_moves_the_adapter():
    spec = tiny_spec("fedclip")
    chosen = spec.training
    assert (chosen.optimizer, chosen.beta2, chosen.eps, chosen.weight_decay) == ("adam", 0.98, 1e-6, 0.2)
    run = tiny_run(spec)
    state = final_state(run, until=1)
    assert all(not torch.equal(run.model.weights[name], tensor) for name, tensor in state.weights.items())
