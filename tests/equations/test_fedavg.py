"""FedAvg: McMahan et al. 2017, Algorithm 1."""

from math import exp

import pytest
import torch

from fedbench.core.method.tasks import AggregationTask
from fedbench.core.randomness import torch_generator
from fedbench.core.spec import RunSpec, Training
from fedbench.core.types import Model, Update
from fedbench.toolkit.fedavg import average
from fedbench.toolkit.local_training import batch_table, build_optimiser, crop_and_flip
from tests.equations.kit import aggregation


def aggregated(updates, weighting="samples", start=0.0):
    return average(aggregation({"w": torch.tensor([start])}, updates, training={"weighting": weighting}))["w"]


def update(client, value, num_examples):
    return Update(client, {"w": torch.tensor([value])}, {}, num_examples)


def test_one_full_batch_step_is_one_gradient_step(train_client):
    # logits (w.x, 0), w = 0, so p(class 0) = 1/2 for both samples.
    # d/dw of CE: (p0 - 1{y=0}) x.
    # Sample A x=(2,0), y=0: (-1/2)(2,0) = (-1,0). Sample B x=(0,4), y=1: (1/2)(0,4) = (0,2).
    # mean gradient (-1/2, 1); w - 0.5 * gradient = (1/4, -1/2)
    result = train_client([(2.0, 0.0, 0), (0.0, 4.0, 1)])
    torch.testing.assert_close(result.weights["w"], torch.tensor([0.25, -0.5]))


def test_two_epochs_take_two_steps(train_client):
    # one sample x=(1,0), y=0, lr 1/2: step 1 gradient -1/2, w = 1/4; step 2 gradient sigmoid(1/4) - 1
    result = train_client([(1.0, 0.0, 0)], local_epochs=2)
    second = 0.25 - 0.5 * (1 / (1 + exp(-0.25)) - 1)
    torch.testing.assert_close(result.weights["w"], torch.tensor([second, 0.0]))


def test_server_weights_clients_by_num_examples():
    # (1*0 + 3*4) / 4 = 3
    assert aggregated([update(0, 0.0, 1), update(1, 4.0, 3)]).item() == 3.0


def test_uniform_weighting_ignores_num_examples():
    assert aggregated([update(0, 0.0, 1), update(1, 4.0, 3)], weighting="uniform").item() == 2.0


def test_identical_clients_give_their_weights_back_bit_for_bit():
    value = torch.tensor(0.1).item()
    result = aggregated([update(k, value, n) for k, n in enumerate((1, 2, 4, 7, 11))])
    assert result.item() == value


def test_only_participants_count():
    # the server's own weights (start) do not enter the mean
    assert aggregated([update(3, 2.0, 5)], start=100.0).item() == 2.0


def test_equal_clients_and_full_batches_equal_one_centralised_step(train_client):
    samples = [(2.0, 0.0, 0), (0.0, 4.0, 1), (1.0, 1.0, 0), (3.0, -1.0, 1)]
    together = train_client(samples)
    parts = [train_client(samples[:1], client=0), train_client(samples[1:], client=1)]
    spec = RunSpec()
    merged = average(AggregationTask(1, together.weights, {}, tuple(parts), Model(together.weights, None), spec, {}))
    torch.testing.assert_close(merged["w"], together.weights["w"])


@pytest.mark.parametrize(("count", "batch", "sizes"), [(10, 4, [4, 4, 2]), (9, 4, [4, 5]), (1, 4, [1]), (3, 8, [3])])
def test_every_sample_is_seen_once_an_epoch_and_no_batch_but_the_only_one_has_one_sample(count, batch, sizes):
    table = batch_table(count, 2, batch, torch_generator(0, "batches", 1, 0))
    assert [len(b) for b in table] == sizes * 2
    for epoch in (table[: len(sizes)], table[len(sizes) :]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(count))


def test_sample_order_depends_on_round_and_client_alone():
    first = [b.tolist() for b in batch_table(20, 1, 5, torch_generator(3, "batches", 2, 7))]
    torch.rand(5)
    assert first == [b.tolist() for b in batch_table(20, 1, 5, torch_generator(3, "batches", 2, 7))]
    assert first != [b.tolist() for b in batch_table(20, 1, 5, torch_generator(3, "batches", 3, 7))]
    assert first != [b.tolist() for b in batch_table(20, 1, 5, torch_generator(3, "batches", 2, 8))]


def test_momentum_starts_at_zero_at_every_participation(train_client):
    # momentum .9, one step a round: a kept buffer would add 0.9 times the first gradient to the second step
    once = train_client([(1.0, 0.0, 0)], momentum=0.9)
    again = train_client([(1.0, 0.0, 0)], start=tuple(once.weights["w"].tolist()), momentum=0.9, round=2)
    plain = train_client([(1.0, 0.0, 0)], start=tuple(once.weights["w"].tolist()), momentum=0.0, round=2)
    assert torch.equal(again.weights["w"], plain.weights["w"])


def test_learning_rate_decays_from_the_second_round():
    training = Training(lr=0.8, lr_decay=0.5)
    rates = [
        build_optimiser(training, {"w": torch.zeros(1, requires_grad=True)}, r).param_groups[0]["lr"] for r in (1, 2, 3)
    ]
    assert rates == [0.8, 0.4, 0.2]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        # coupled: gradient (-1/2, 0 + 2/10); w - (1/2)(-1/2, 1/5)
        ("sgd", (0.25, 1.9)),
        # coupled, the same gradient; a first Adam step is lr g / (|g| + eps): (1/2)(-1/2 / (3/4), 1/5 / (9/20))
        ("adam", (1 / 3, 2 - 2 / 9)),
        # decoupled: w (1 - lr decay) = (0, 1.9), then Adam's step of the data's gradient alone, (-1/3, 0)
        ("adamw", (1 / 3, 1.9)),
    ],
)
def test_weight_decay_is_coupled_for_sgd_and_adam_and_decoupled_for_adamw(train_client, optimizer, expected):
    # w = (0, 2), x = (1, 0), y = 0: w.x = 0, p(class 0) = 1/2, so the data's gradient is (-1/2) x = (-1/2, 0).
    # lr 1/2, decay 1/10, eps 1/4
    options = {"optimizer": optimizer, "weight_decay": 0.1, "eps": 0.25}
    result = train_client([(1.0, 0.0, 0)], start=(0.0, 2.0), **options)
    torch.testing.assert_close(result.weights["w"], torch.tensor(expected))


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_takes_both_betas_from_the_settings(train_client, optimizer):
    # beta1 = 0: the moment is the gradient. beta2 = 1/2: v2 = g1^2/4 + g2^2/2, over 1 - 1/4 that is (g1^2 + 2 g2^2)/3.
    # x = (1, 0), y = 0, lr 1/2: g1 = -1/2, step 1 is 1/2 (v1 / (1/2) = g1^2); g2 = sigmoid(1/2) - 1
    g2 = 1 / (1 + exp(-0.5)) - 1
    second = 0.5 * -g2 / ((0.25 + 2 * g2**2) / 3) ** 0.5
    result = train_client([(1.0, 0.0, 0)], local_epochs=2, optimizer=optimizer, beta1=0.0, beta2=0.5)
    torch.testing.assert_close(result.weights["w"], torch.tensor([0.5 + second, 0.0]))


def test_a_client_trains_at_the_decayed_learning_rate_of_its_round(train_client):
    # gradient (-1/2, 0); lr 1/2, 1/4, 1/8 in rounds 1, 2, 3
    steps = [train_client([(1.0, 0.0, 0)], round=r, lr_decay=0.5).weights["w"][0].item() for r in (1, 2, 3)]
    assert steps == [0.25, 0.125, 0.0625]


def test_a_clients_batches_follow_from_seed_round_and_client_alone(train_client):
    # steps on four batches of two: another order ends elsewhere
    samples = [(1.0, 0.5 * k, k % 2) for k in range(8)]

    def end(**who):
        return train_client(samples, batch_size=2, **who).weights["w"]

    first = end(seed=3, round=2, client=4)
    torch.rand(5)
    assert torch.equal(first, end(seed=3, round=2, client=4))
    assert not torch.equal(first, end(seed=3, round=3, client=4))
    assert not torch.equal(first, end(seed=3, round=2, client=5))
    assert not torch.equal(first, end(seed=4, round=2, client=4))


def test_batch_augmentation_treats_all_samples_alike_and_sample_augmentation_does_not():
    image = torch.arange(64.0).reshape(1, 1, 8, 8).repeat(16, 1, 1, 1)
    generator = torch_generator(0, "augmentation", 1, 0)
    batch = crop_and_flip(image, per_sample=False, generator=generator)
    assert all(torch.equal(batch[0], other) for other in batch)
    sample = crop_and_flip(image, per_sample=True, generator=generator)
    assert len({tuple(s.flatten().tolist()) for s in sample}) > 8


def test_augmentation_crops_a_window_of_the_padded_image_and_may_mirror_it():
    image = torch.arange(1.0, 17.0).reshape(1, 1, 4, 4)
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1))[0, 0]
    windows = [padded[i : i + 4, j : j + 4] for i in range(3) for j in range(3)]
    allowed = {tuple(w.flatten().tolist()) for w in windows} | {tuple(w.flip(1).flatten().tolist()) for w in windows}
    generator = torch_generator(0, "augmentation", 1, 0)
    seen = {
        tuple(crop_and_flip(image, per_sample=True, generator=generator, padding=1).flatten().tolist())
        for _ in range(300)
    }
    assert seen == allowed
