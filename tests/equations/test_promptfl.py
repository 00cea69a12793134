"""PromptFL: Guo et al. 2024; the local model is CoOp's."""

import torch
from torch.nn.functional import cross_entropy, normalize

from fedbench.core.randomness import torch_generator
from fedbench.models.prompts.context import random_context
from fedbench.testing import final_state, tiny_backbone, tiny_dataset
from fedbench.toolkit.local_training import batch_table
from tests.equations.kit import all_of, coop_texts, run_of, runs

promptfl_run = runs("promptfl")


def test_context_of_words_is_zero_shot_with_that_template():
    zero_shot = run_of("clip-zs", templates=("a photo of a {}.",))
    run = promptfl_run(params={"init": "words"})
    inputs = all_of(run.test)
    ours = run.model.forward(run.model.weights, inputs, False).logits
    theirs = zero_shot.model.forward({}, inputs, False).logits
    # both texts are cut at the longest one here, in batches of their own: equal to rounding (exactly so in full,
    # see test_prompts.py)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert torch.equal(ours.argmax(1), theirs.argmax(1))


def test_logits_are_scaled_cosines_to_the_texts_of_the_context():
    run, clip = promptfl_run(), tiny_backbone("clip:embedded")
    context = random_context(3, "test", 16, 64)
    inputs = run.test.read(torch.arange(10))
    outputs = run.model.forward({"prompt.context": context}, 5 * inputs, False)
    expected = clip.logit_scale * normalize(inputs, dim=1) @ coop_texts(context, tiny_dataset().classnames).T
    torch.testing.assert_close(outputs.logits, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(outputs.features, normalize(inputs, dim=1))


def test_one_client_is_centralised_coop_step_for_step():
    settings = {"rounds": 2, "local_epochs": 2, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
    run = promptfl_run(
        params={"context_length": 4},
        scenario={"clients": 1, "participation": 1.0, "partition": "iid"},
        **settings,
    )
    federated = final_state(run).weights["prompt.context"]
    scale, names = tiny_backbone("clip:embedded").logit_scale, tiny_dataset().classnames
    shard = run.federation.clients[0].indices
    images, labels = normalize(run.train.read(shard), dim=1), run.federation.train.labels[shard]
    context = run.model.weights["prompt.context"].clone().requires_grad_()
    for round in (1, 2):
        optimiser = torch.optim.SGD([context], 0.1, momentum=0.9, weight_decay=1e-4)  # new in every round
        order = torch_generator(run.spec.seed, "batches", round, 0)
        for batch in batch_table(len(shard), 2, run.spec.training.batch_size, order):
            optimiser.zero_grad()
            cross_entropy(scale * images[batch] @ coop_texts(context, names).T, labels[batch]).backward()
            optimiser.step()
    assert (federated - run.model.weights["prompt.context"]).abs().max() > 1e-3
    torch.testing.assert_close(federated, context.detach(), rtol=0, atol=1e-5)


def test_only_the_context_is_sent():
    # M d_t floats; the embedded tower is 64 wide
    assert promptfl_run().info.round_bytes == 4 * 16 * 64
    assert promptfl_run(params={"context_length": 4}).info.round_bytes == 4 * 4 * 64
    # a context of each of the 4 classes: K M d_t
    assert promptfl_run(params={"per_class": True, "context_length": 4}).info.round_bytes == 4 * 4 * 4 * 64
    # ViT-B/16, M = 16: 8,192 floats
    assert random_context(0, "test", 16, 512).numel() == 8_192


def test_a_context_of_each_class_moves_with_its_own_text():
    run = promptfl_run(params={"per_class": True, "context_length": 2})
    context = run.model.weights["prompt.context"]
    inputs = run.test.read(torch.arange(6))
    before = run.model.forward({"prompt.context": context}, inputs, False).logits
    moved = context.clone()
    moved[1] = 5 * moved[1].flip(-1)
    after = run.model.forward({"prompt.context": moved}, inputs, False).logits
    assert ((after - before).abs().amax(0) > 1e-4).tolist() == [False, True, False, False]


def test_words_for_every_class_are_the_shared_words():
    shared, own = promptfl_run(params={"init": "words"}), promptfl_run(params={"init": "words", "per_class": True})
    inputs = shared.test.read(torch.arange(6))
    logits = [run.model.forward(run.model.weights, inputs, False).logits for run in (shared, own)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)  # scaled by up to a hundred
    assert own.model.weights["prompt.context"].shape == (4, 4, 64)


def test_position_changes_the_texts():
    logits = []
    for position in ("end", "middle", "front"):
        run = promptfl_run(params={"position": position, "init": "words"})
        logits.append(run.model.forward(run.model.weights, run.test.read(torch.arange(6)), False).logits)
    assert (logits[0] - logits[1]).abs().max() > 1e-3 and (logits[1] - logits[2]).abs().max() > 1e-3
