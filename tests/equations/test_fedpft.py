"""FedPFT: Beitollahi et al. 2024: a head trained at the server on features drawn from the clients' mixtures."""

import pytest
import torch

from fedbench.rounds.loop import evaluate, rounds
from fedbench.testing import final_state
from fedbench_methods.fedpft import trained_head
from fedbench_methods.shared.mixtures import ADDED, Mixture, class_mixtures, drawn, drawn_classes, fitted
from tests.equations.kit import generator, runs

KINDS = ("spherical", "diagonal", "full")


pft_run = runs("fedpft")


def test_one_component_is_mean_and_covariance_by_hand():
    rows = torch.tensor([[0.0, 1.0], [2.0, 5.0]])
    # mean (1, 3); variances over n: 1 and 4, covariance 2
    found = {kind: fitted(rows, 1, kind, generator()) for kind in KINDS}
    assert all(m.means.tolist() == [[1.0, 3.0]] and m.weights.tolist() == [1.0] for m in found.values())
    torch.testing.assert_close(found["spherical"].covariances, torch.tensor([2.5 + ADDED]).double())
    torch.testing.assert_close(found["diagonal"].covariances, torch.tensor([[1.0, 4.0]]).double() + ADDED)
    torch.testing.assert_close(
        found["full"].covariances[0], torch.tensor([[1.0, 2.0], [2.0, 4.0]]).double() + ADDED * torch.eye(2)
    )


def test_a_single_sample_is_its_own_mean():
    found = fitted(torch.tensor([[0.5, -2.0]]), 3, "spherical", generator())
    assert found.means.tolist() == [[0.5, -2.0]] and found.covariances.item() == pytest.approx(ADDED)


@pytest.mark.parametrize("kind", KINDS)
def test_two_components_find_two_clouds(kind):
    noise = torch.randn(400, 2, generator=generator())
    rows = torch.cat([noise[:100] * 0.5 + torch.tensor([10.0, 0.0]), noise[100:] - torch.tensor([10.0, 0.0])])
    found = fitted(rows, 2, kind, generator())
    order = found.means[:, 0].argsort()
    torch.testing.assert_close(found.weights[order].float(), torch.tensor([0.75, 0.25]), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        found.means[order].float(), torch.stack([rows[100:].mean(0), rows[:100].mean(0)]), rtol=0, atol=1e-5
    )
    variances = {"spherical": found.covariances, "diagonal": found.covariances.mean(-1)}.get(kind)
    variances = found.covariances.diagonal(dim1=-2, dim2=-1).mean(-1) if variances is None else variances
    torch.testing.assert_close(variances[order].float(), torch.tensor([1.0, 0.25]), rtol=0.2, atol=0)


def test_overlapping_components_are_those_of_maximum_likelihood():
    rows = torch.tensor([[-3.0], [-2.0], [-0.4], [0.5], [2.2], [2.9]])
    found = fitted(rows, 2, "full", generator())

    def likelihood(mixture):
        scale = mixture.covariances[:, 0, 0].sqrt()
        densities = torch.distributions.Normal(mixture.means[:, 0], scale).log_prob(rows.double())
        return (mixture.weights.log() + densities).logsumexp(1).mean()

    best = likelihood(found)
    for shift in (-1e-2, 1e-2):
        moved = Mixture(found.weights, found.means + torch.tensor([[shift], [0.0]]), found.covariances)
        assert likelihood(moved) < best
        assert likelihood(Mixture(found.weights, found.means, found.covariances * (1 + shift))) < best


@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_the_mixtures_moments(kind):
    covariance = torch.tensor([[2.0, 0.6], [0.6, 1.0]]).double()
    given = {"spherical": torch.tensor([1.5]), "diagonal": covariance.diagonal()[None], "full": covariance[None]}[kind]
    rows = drawn(
        Mixture(torch.ones(1).double(), torch.tensor([[3.0, -1.0]]).double(), given.double()), 20000, kind, generator()
    )
    torch.testing.assert_close(rows.mean(0), torch.tensor([3.0, -1.0]).double(), rtol=0, atol=0.04)
    wanted = {"spherical": 1.5 * torch.eye(2), "diagonal": torch.diag(covariance.diagonal()), "full": covariance}[kind]
    torch.testing.assert_close(rows.T.cov(), wanted.double(), rtol=0, atol=0.06)


def test_components_are_drawn_by_their_weights_and_without_spread_they_are_the_means():
    mixture = Mixture(
        torch.tensor([0.25, 0.75]).double(), torch.tensor([[0.0], [1.0]]).double(), torch.zeros(2).double()
    )
    rows = drawn(mixture, 10000, "spherical", generator())
    assert set(rows.flatten().tolist()) == {0.0, 1.0} and rows.mean().item() == pytest.approx(0.75, abs=0.02)


def test_reports_have_classes_in_order_and_rare_ones_where_they_are_kept():
    features = torch.tensor([[1.0, 0.0], [5.0, 5.0], [3.0, 0.0], [7.0, 7.0], [8.0, 8.0]])
    labels = torch.tensor([3, 1, 3, 0, 0])
    sent = class_mixtures(features, labels, 4, 2, "full", 1, generator())
    assert sent["counts"].tolist() == [2, 1, 0, 2] and sent["components"].tolist() == [2, 1, 0, 2]
    assert sent["means"].shape == (5, 2) and sent["covariances"].shape == (5, 3) and sent["weights"].shape == (5,)
    assert sent["means"][2].tolist() == [5.0, 5.0]
    # more than K samples: none
    assert class_mixtures(features, labels, 4, 2, "full", 3, generator())["counts"].tolist() == [0, 0, 0, 0]
    drawn_features, drawn_labels = drawn_classes([sent, sent], "full", generator())
    assert drawn_labels.tolist() == [0, 0, 1, 3, 3] * 2
    torch.testing.assert_close(drawn_features[2], torch.tensor([5.0, 5.0]), rtol=0, atol=0.01)


def test_the_head_is_torchs_adamw_on_cross_entropy():
    features, labels = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    weight, bias = trained_head(
        features, labels, torch.zeros(2, 2), torch.zeros(2), epochs=1, lr=0.1, batch_size=2, generator=generator()
    )
    # the gradient of W is ((-.25, .25), (.25, -.25)), that of b zero; the first step of Adam is lr times its sign
    torch.testing.assert_close(weight, torch.tensor([[0.1, -0.1], [-0.1, 0.1]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(bias, torch.zeros(2))


@pytest.mark.parametrize(("covariance", "numbers"), [("spherical", 1), ("diagonal", 128), ("full", 128 * 129 // 2)])
def test_without_rounds_clients_send_their_mixtures_and_nothing_else(covariance, numbers):
    run = pft_run(params={"covariance": covariance, "epochs": 1}, rounds=0)
    [(state, record, _)] = list(rounds(run, run.initial_state()))
    width = run.model.weights["head.weight"].shape[1]
    assert width == 128
    owned = sum(int((run.federation.class_counts(client) > 0).sum()) for client in range(4))
    # two bytes a number, and for every class its samples and its components as int64
    assert record.bytes_up == owned * 2 * (1 + width + numbers) + 4 * 2 * 4 * 8
    model = sum(4 * value.numel() for value in run.model.weights.values())
    assert record.bytes_down == 4 * model and state.server["fedpft"].keys() == {"head.weight", "head.bias"}


def test_stopped_it_predicts_by_the_servers_head_whatever_the_rounds():
    heads = []
    for number in (0, 1, 3):
        run = pft_run(params={"lr_head": 0.01}, rounds=number)
        state = final_state(run)
        heads.append(state.server["fedpft"]["head.weight"])
        accuracy = evaluate(run, state)[0]["global_accuracy"]
        assert accuracy > 60
        if number:
            assert torch.equal(state.weights["head.weight"], heads[-1])
    assert torch.equal(heads[0], heads[1]) and torch.equal(heads[0], heads[2])


def test_training_goes_on_from_the_servers_head():
    run = pft_run("fedpft+fedprox", {"then": "train", "lr_head": 0.01}, rounds=1)
    state = final_state(run)
    head, own = state.server["fedpft"]["head.weight"], run.model.weights["head.weight"]
    now = state.weights["head.weight"]
    assert 0 < (now - head).norm() < 0.5 * (now - own).norm()
