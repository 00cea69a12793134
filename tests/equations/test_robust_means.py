"""Median and trimmed mean (Yin et al. 2018), Krum (Blanchard et al. 2017), RFA (Pillutla et al. 2022), norm bounding
(Sun et al. 2019), FLTrust (Cao et al. 2021)."""

import pytest
import torch

from fedbench.core.errors import FedbenchError, Unworkable
from fedbench.core.types import GlobalModel, Update
from fedbench.toolkit.fedavg import average
from fedbench.toolkit.wrapping import weights_of
from fedbench_methods.fltrust import FLTrust, FLTrustParams, trust, trusted
from fedbench_methods.geometric_median import GeometricMedian, GeometricMedianParams, next_shares
from fedbench_methods.krum import Krum, KrumParams, scores
from fedbench_methods.median import Median, middle
from fedbench_methods.norm_bound import NormBound, NormBoundParams
from fedbench_methods.shared.robust import shortened, squared_distances
from fedbench_methods.trimmed_mean import TrimmedMean, TrimmedMeanParams, trimmed
from tests.equations.kit import aggregation, end_of, run_of, updates_of


def answer(method, ends, sizes=None, start=0.0, **rest):
    """What the server makes of clients that end at ``ends``, and the metrics of the step."""
    ends = [torch.as_tensor(end, dtype=torch.float32) for end in ends]
    task = aggregation({"w": torch.full_like(ends[0], start)}, updates_of(ends, sizes or [1] * len(ends)), **rest)
    return weights_of(method.aggregate(task, average))["w"], task.metrics


def test_median_of_each_coordinate_by_itself():
    values = torch.tensor([[1.0, 50.0], [2.0, -5.0], [90.0, 7.0]])
    assert torch.equal(middle(values), torch.tensor([2.0, 7.0]))
    # of an even number the mean of the two in the middle: (2 + 4) / 2, whatever the clients' sizes
    found, _ = answer(Median(Median.Params()), [[1.0], [2.0], [4.0], [9.0]], [1, 1, 1, 100])
    assert found.tolist() == [3.0]


def test_trimmed_mean_by_hand():
    values = torch.tensor([[1.0, 9.0], [2.0, 3.0], [6.0, 4.0], [90.0, -70.0], [4.0, 5.0]])
    # without 1 and 90: (2 + 6 + 4) / 3; without 9 and -70: (3 + 4 + 5) / 3
    assert torch.equal(trimmed(values, 1), torch.tensor([4.0, 4.0]))
    found, _ = answer(TrimmedMean(TrimmedMeanParams(trim=0.2)), values)
    assert found.tolist() == [4.0, 4.0]
    # a share of .2 of four clients is none of them
    found, _ = answer(TrimmedMean(TrimmedMeanParams(trim=0.2)), values[:4])
    assert found.tolist() == [24.75, -13.5]


def test_krum_takes_whom_others_are_nearest_to():
    distances = squared_distances(updates_of([torch.tensor([end]) for end in (0.0, 1.0, 2.0, 10.0)], [1] * 4))
    assert distances[0].tolist() == [0, 1, 4, 100]
    # the two nearest of each, f = 0: 1 + 4, 1 + 1, 1 + 4, 64 + 81
    assert scores(distances, 0).tolist() == [5, 2, 5, 145]
    # and the one nearest, f = 1
    assert scores(distances, 1).tolist() == [1, 1, 1, 64]
    ends = [[0.0], [1.0], [2.5], [10.0], [1.5]]
    # f = 1, two nearest: 1 + 2.25, 1 + .25, 1 + 2.25, 56.25 + 72.25, .25 + 1
    found, _ = answer(Krum(KrumParams(attackers=0.2)), ends)
    assert found.tolist() == [1.0]
    # of the two best the mean by their samples
    found, _ = answer(Krum(KrumParams(attackers=0.2, selected=2)), ends, [1, 1, 1, 1, 3])
    assert found.tolist() == [1.375]
    # of m - f, which leaves out 10
    found, _ = answer(Krum(KrumParams(attackers=0.2, selected=0)), ends)
    assert found.tolist() == [1.25]


def test_krum_gives_up_a_cohort_too_small_for_its_attackers():
    with pytest.raises(Unworkable, match="1 attackers among 4 updates, for which it needs 5"):
        answer(Krum(KrumParams(attackers=0.25)), [[0.0], [1.0], [2.0], [3.0]])


def test_a_step_of_weiszfeld_by_hand():
    updates = updates_of([torch.tensor([end]) for end in (0.0, 0.0, 3.0)], [1, 1, 1])
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    # distances of the mean, 1, are 1, 1 and 2: weights 1, 1, .5 of 2.5
    found = next_shares(third, {"w": torch.tensor([1.0])}, updates, 1e-6)
    torch.testing.assert_close(found, torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64))
    assert answer(GeometricMedian(GeometricMedianParams(steps=1)), [[0.0], [0.0], [3.0]])[0].item() == pytest.approx(
        0.6
    )
    # of the weighted one, with 1, 1 and 2 samples: mean 1.5, all at 1.5, so that the weights stay
    assert answer(GeometricMedian(GeometricMedianParams(steps=1)), [[0.0], [0.0], [3.0]], [1, 1, 2])[0].item() == 1.5
    # near no client can the weight be more than 1 / ν
    near = next_shares(third, {"w": torch.tensor([0.0])}, updates, 0.5)
    torch.testing.assert_close(near, torch.tensor([6.0, 6.0, 1.0], dtype=torch.float64) / 13)


def test_a_change_is_no_longer_than_the_bound():
    [update] = updates_of([torch.tensor([4.0, 5.0])], [1])
    received = {"w": torch.tensor([1.0, 1.0])}
    # the change (3, 4) is 5 long
    torch.testing.assert_close(shortened(update, received, 1.0).weights["w"], torch.tensor([1.6, 1.8]))
    assert shortened(update, received, 5.0) is update
    found, metrics = answer(NormBound(NormBoundParams(bound=1.0)), [[4.0, 5.0], [1.0, 0.5]], start=1.0)
    torch.testing.assert_close(found, torch.tensor([1.3, 1.15]))
    assert metrics == {"norm_bound_shortened": 0.5}


def test_trust_and_the_trusted_mean_by_hand():
    own = {"w": torch.tensor([2.0, 0.0])}
    assert [trust({"w": torch.tensor(g)}, own).item() for g in ([3.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, 0.0])] == [
        1,
        0,
        0,
        0,
    ]
    ends = [torch.tensor(end) for end in ([4.0, 1.0], [1.0, 9.0], [2.0, 2.0])]
    # changes (3, 0), (0, 8), (1, 1): trust 1, 0, √½; brought to length 2 they are (2, 0), (0, 2), (√2, √2)
    # the mean is (2 + 1, 1) / (1 + √½)
    found, scores = trusted(updates_of(ends, [1, 1, 1]), {"w": torch.tensor([1.0, 1.0])}, own, 0.5)
    torch.testing.assert_close(scores, torch.tensor([1.0, 0.0, 0.5**0.5], dtype=torch.float64))
    torch.testing.assert_close(found["w"], 1 + 0.5 * torch.tensor([3.0, 1.0]) / (1 + 0.5**0.5))
    # nobody is trusted: nothing changes
    against = updates_of([torch.tensor([-1.0, 1.0])], [1])
    received = {"w": torch.tensor([1.0, 1.0])}
    assert trusted(against, received, own, 1.0)[0] is received


def test_the_servers_own_change_is_that_of_a_client_with_its_samples():
    run = run_of("fltrust", rounds=1, lr=0.1, momentum=0.0, local_epochs=1, batch_size=1000)
    weights = {name: value.clone().requires_grad_() for name, value in run.model.weights.items()}
    data = run.server
    logits = run.model.forward(weights, data.inputs.read(torch.arange(len(data.inputs))), True).logits
    torch.nn.functional.cross_entropy(logits, data.labels).backward()
    task = aggregation(run.model.weights, updates_of([0.0], [1]), server_data=data)
    task = type(task)(**{**vars(task), "spec": run.spec, "model": run.model})
    found = FLTrust(FLTrustParams())._own_change(task)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], -0.1 * value.grad, atol=1e-6, rtol=1e-4)


ROBUST = [
    Median(Median.Params()),
    TrimmedMean(TrimmedMeanParams(trim=0.2)),
    Krum(KrumParams(attackers=0.2)),
    Krum(KrumParams(attackers=0.2, selected=0)),
    GeometricMedian(GeometricMedianParams(steps=20)),
]


@pytest.mark.parametrize("method", ROBUST, ids=lambda method: f"{method.name} {method.params}")
def test_one_of_five_clients_moves_a_robust_mean_hardly(method):
    honest = [[1.0, 2.0], [1.1, 2.1], [0.9, 1.9], [1.0, 2.1]]
    found, _ = answer(method, [*honest, [1e6, -1e6]])
    assert (found - torch.tensor([1.0, 2.0])).abs().max() <= 0.11


@pytest.mark.parametrize("method", ROBUST, ids=lambda method: f"{method.name} {method.params}")
def test_running_statistics_are_robust_too_and_counters_stay(method):
    ends = [1.0, 1.1, 0.9, 1.0, 1e6]
    updates = tuple(
        Update(k, {"w": torch.tensor([end])}, {"mean": torch.tensor([end]), "seen": torch.tensor(k)}, 1)
        for k, end in enumerate(ends)
    )
    buffers = {"mean": torch.tensor([0.0]), "seen": torch.tensor(0)}
    found = method.aggregate(aggregation({"w": torch.tensor([0.0])}, updates, buffers=buffers), average)
    assert isinstance(found, GlobalModel)
    assert abs(found.buffers["mean"].item() - 1) <= 0.11 and found.buffers["seen"].item() in range(4)


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "geometric-median", "norm-bound"])
def test_a_server_step_goes_on_from_the_robust_mean(name):
    alone = end_of(name, rounds=1)
    stepped = end_of(f"fedavgm+{name}", {"fedavgm": {"beta": 0.0, "server_lr": 0.5}}, rounds=1)
    start = run_of(name, rounds=1).model.weights
    for key, value in start.items():
        torch.testing.assert_close(stepped.weights[key], (value + alone.weights[key]) / 2)


def test_where_nobody_is_trusted_running_statistics_stay_as_well(monkeypatch):
    monkeypatch.setattr(FLTrust, "_own_change", lambda self, task: {"w": torch.tensor([1.0])})
    updates = (Update(0, {"w": torch.tensor([-5.0])}, {"mean": torch.tensor([9.0])}, 1),)
    task = aggregation({"w": torch.tensor([0.0])}, updates, buffers={"mean": torch.tensor([2.0])})
    found = FLTrust(FLTrustParams()).aggregate(task, average)
    assert found.weights["w"].item() == 0.0 and found.buffers["mean"].item() == 2.0


@pytest.mark.parametrize("stack", ["feddyn+median", "fedamp+median", "fedspeed+krum", "feddc+geometric-median"])
def test_who_goes_by_each_clients_update_has_no_defence_that_replaces_it(stack):
    with pytest.raises(FedbenchError, match="needs each client's own update at the server"):
        run_of(stack)
