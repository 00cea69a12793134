"""CoCoOp: Zhou et al. 2022, trained by FedAvg."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear, normalize

from fedbench.core.errors import FedbenchError
from fedbench.core.randomness import torch_generator
from fedbench.models.prompts.context import PromptTower
from fedbench.testing import final_state, tiny_backbone, tiny_dataset
from fedbench.toolkit.local_training import batch_table
from fedbench_methods import cocoop
from fedbench_methods.cocoop import conditional_context, meta_net
from tests.equations.kit import runs

TINY = {
    "prompt.context": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "meta.inner.weight": torch.tensor([[1.0, -0.5]]),
    "meta.inner.bias": torch.tensor([0.1]),
    "meta.outer.weight": torch.tensor([[2.0], [-1.0]]),
    "meta.outer.bias": torch.tensor([0.5, 0.25]),
}
IMAGES = torch.tensor([[0.6, 0.8], [-0.6, 0.8]])


cocoop_run = runs("cocoop")


def moved(run, purpose="test"):
    """The run's weights, each moved at random: of a meta-net whose every part counts."""
    generator = torch_generator(0, purpose)
    return {k: v + 0.1 * torch.randn(v.shape, generator=generator) for k, v in run.model.weights.items()}


def written_out(weights, images, names):
    """s f·t_k(x), image by image: whole texts, all places of the tower, pooled at the end token."""
    clip = tiny_backbone("clip:embedded")
    module = clip.module
    context, inner, a, outer, c = weights.values()
    tokens = clip.tokenizer(["X " * len(context) + f"{name}." for name in names])
    embedded, rows = module.token_embedding(tokens), []
    for image in normalize(images, dim=1):
        shifted = context + linear(linear(image, inner, a).relu(), outer, c)
        shifted = shifted.expand(len(names), -1, -1)
        x = torch.cat([embedded[:, :1], shifted, embedded[:, 1 + len(context) :]], dim=1)
        x = module.ln_final(module.transformer(x + module.positional_embedding, attn_mask=module.attn_mask))
        texts = x[torch.arange(len(names)), tokens.argmax(1)] @ module.text_projection
        rows.append(clip.logit_scale * normalize(texts, dim=1) @ image)
    return torch.stack(rows)


def test_meta_net_by_hand():
    # W_a f + a: 0.6 - 0.4 + 0.1 = 0.3 and -0.6 - 0.4 + 0.1 < 0, of which relu leaves nothing but c
    expected = torch.tensor([[2 * 0.3 + 0.5, -0.3 + 0.25], [0.5, 0.25]])
    torch.testing.assert_close(meta_net(IMAGES, TINY), expected)


def test_every_context_vector_moves_by_the_same_for_an_image():
    expected = torch.tensor([[[2.1, 1.95], [4.1, 3.95]], [[1.5, 2.25], [3.5, 4.25]]])
    torch.testing.assert_close(conditional_context(IMAGES, TINY), expected[:, None])


def test_logits_are_scaled_cosines_to_the_texts_of_each_image():
    run = cocoop_run()
    weights, inputs = (
        moved(run),
        5 * run.test.read(torch.arange(4)),
    )  # the condition is of unit length, whatever this is
    outputs = run.model.forward(weights, inputs, False)
    expected = written_out(weights, inputs, tiny_dataset().classnames)
    torch.testing.assert_close(outputs.logits, expected, rtol=0, atol=2e-4)
    torch.testing.assert_close(outputs.features, normalize(inputs, dim=1))
    assert expected.std(dim=0).min() > 0.01


def test_without_the_last_layer_it_is_promptfl_and_with_words_zero_shot():
    plain, run = cocoop_run("promptfl", params={"init": "words"}), cocoop_run()
    zero_shot = cocoop_run("clip-zs", templates=("a photo of a {}.",))
    weights, inputs = moved(run), run.test.read(torch.arange(12))
    weights |= {name: torch.zeros_like(weights[name]) for name in ("meta.outer.weight", "meta.outer.bias")}
    context = {"prompt.context": weights["prompt.context"]}
    ours, theirs = run.model.forward(weights, inputs, False).logits, plain.model.forward(context, inputs, False).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    words = {**weights, "prompt.context": run.model.weights["prompt.context"]}
    ours, theirs = run.model.forward(words, inputs, False).logits, zero_shot.model.forward({}, inputs, False).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    # as it is drawn, the meta-net moves round 0 away from that
    assert (run.model.forward(run.model.weights, inputs, False).logits - theirs).abs().max() > 0.1


def test_equal_images_have_equal_logits_and_the_order_of_a_batch_is_that_of_its_rows():
    run = cocoop_run()
    inputs = run.test.read(torch.tensor([0, 1, 0, 2, 3]))
    logits = run.model.forward(moved(run), inputs, False).logits
    torch.testing.assert_close(logits[0], logits[2], rtol=0, atol=1e-4)
    order = torch.tensor([3, 1, 4, 0, 2])
    permuted = run.model.forward(moved(run), inputs[order], False).logits
    torch.testing.assert_close(permuted, logits[order], rtol=0, atol=1e-4)


def test_the_meta_net_begins_as_torchs_linear_layers_do():
    weights = cocoop_run(params={"reduction": 4}).model.weights
    for layer, fan_in in (("inner", 128), ("outer", 32)):
        for part in ("weight", "bias"):
            drawn = weights[f"meta.{layer}.{part}"].abs()
            assert 0.85 * fan_in**-0.5 < drawn.max() <= fan_in**-0.5
    assert [weights[f"meta.{layer}.weight"].shape for layer in ("inner", "outer")] == [(32, 128), (64, 32)]


def test_one_client_is_centralised_cocoop_step_for_step():
    run = cocoop_run(
        scenario={"clients": 1, "participation": 1.0, "partition": "iid"},
        **{"rounds": 1, "batch_size": 16, "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
    )
    federated, names = final_state(run).weights, tiny_dataset().classnames
    shard = run.federation.clients[0].indices
    images, labels = run.train.read(shard), run.federation.train.labels[shard]
    weights = {name: value.clone().requires_grad_() for name, value in run.model.weights.items()}
    optimiser = torch.optim.SGD(weights.values(), 0.05, momentum=0.9, weight_decay=5e-4)
    for batch in batch_table(len(shard), 1, 16, torch_generator(0, "batches", 1, 0)):
        optimiser.zero_grad()
        cross_entropy(written_out(weights, images[batch], names), labels[batch]).backward()
        optimiser.step()
    for name, value in weights.items():
        assert (value - run.model.weights[name]).abs().max() > 1e-3
        torch.testing.assert_close(federated[name], value.detach(), rtol=0, atol=2e-5)


def counted(monkeypatch):
    """How many images each call of the text tower has been for."""
    calls, encode = [], PromptTower.encode

    def count(tower, *blocks, **rest):
        calls.append(len(blocks[0]))
        return encode(tower, *blocks, **rest)

    monkeypatch.setattr(PromptTower, "encode", count)
    return calls


@pytest.mark.parametrize(("sequences", "chunks"), [(8, [2, 2, 1]), (11, [2, 2, 1]), (12, [3, 2]), (3, [1] * 5)])
def test_chunks_change_neither_values_nor_gradients_and_are_computed_again(monkeypatch, sequences, chunks):
    labels = torch.tensor([0, 1, 2, 3, 0])

    def step(run):
        inputs = run.test.read(torch.arange(5))
        weights = {name: value.requires_grad_() for name, value in moved(run).items()}
        logits = run.model.forward(weights, inputs, True).logits
        loss = cross_entropy(logits, labels)
        return logits.detach(), dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))

    calls = counted(monkeypatch)
    whole = step(cocoop_run())
    assert calls == [5]
    monkeypatch.setattr(cocoop, "SEQUENCES", sequences)  # for four classes
    calls.clear()
    run = cocoop_run()
    in_parts = step(run)
    assert calls[: len(chunks)] == chunks and sorted(calls[len(chunks) :]) == sorted(chunks)
    torch.testing.assert_close(in_parts, whole, rtol=1e-4, atol=1e-4)
    calls.clear()
    with torch.no_grad():
        logits = run.model.forward(moved(run), run.test.read(torch.arange(5)), False).logits
    assert calls == chunks
    torch.testing.assert_close(logits, whole[0], rtol=1e-4, atol=1e-4)


def test_clients_whose_batches_need_chunks_train_one_after_another(monkeypatch):
    training = {"rounds": 1, "batch_size": 8, "lr": 0.05}
    whole = cocoop_run(executor="cohort", **training)
    expected = final_state(whole).weights
    # eight images a batch, and a ninth where one is left over: 36 texts of four classes
    for sequences, fits in ((36, True), (35, False)):
        monkeypatch.setattr(cocoop, "SEQUENCES", sequences)
        run = cocoop_run(**training)
        found = final_state(run).weights
        assert run.executor.description.startswith("cohort" if fits else "sequential")
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    with pytest.raises(FedbenchError, match="cocoop takes 8 images at once with 4 classes"):
        final_state(cocoop_run(executor="cohort", **training))


def test_context_and_meta_net_are_sent():
    def size(m, d, width, r):
        return m * width + d * d // r + d // r + width * d // r + width

    assert cocoop_run().info.round_bytes == 4 * size(4, 128, 64, 16)
    sized = {"init": "random", "context_length": 3, "reduction": 8}
    assert cocoop_run(params=sized).info.round_bytes == 4 * size(3, 128, 64, 8)
    assert size(4, 512, 512, 16) == 35_360  # ViT-B/16
