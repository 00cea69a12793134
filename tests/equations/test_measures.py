"""What is measured of a round: CKA and drift by hand, dissimilarities by class, and that measuring changes nothing."""

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from fedbench.core.errors import MethodFault
from fedbench.core.types import LinearHead, Model, Outputs, Update
from fedbench.rounds.loop import rounds
from fedbench.rounds.measures import _numbers
from fedbench.testing import digest, final_state, tiny_run, tiny_spec
from fedbench_methods.cka import gram
from fedbench_methods.drift import Drift, NoParams
from fedbench_methods.shared.class_gradients import class_gradients, dissimilarities
from tests.equations.kit import run_of


def cka(one, other):
    return float((gram(one) * gram(other)).sum())


def records_of(run):
    return [record for _, record, _ in rounds(run, run.initial_state())]


def update(client, weights, samples=1, **payload):
    return Update(client, {"w": torch.tensor(weights)}, {}, samples, payload)


def test_cka_by_hand_and_by_its_form_in_features():
    one, other = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), torch.tensor([[1.0], [-1.0], [0.0]])
    # centred: columns (2, -1, -1)/3 and (-1, 2, -1)/3, and (1, -1, 0); |Y'X|^2 = 1 + 1, |X'X| = sqrt(10)/3, |Y'Y| = 2
    assert cka(one, other) == pytest.approx(2 / (math.sqrt(10) / 3 * 2))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, 2, 2, generator=generator), torch.randn(20, 5, generator=generator)
    x_, y_ = (z.flatten(1).double() - z.flatten(1).double().mean(0) for z in (x, y))
    expected = (y_.T @ x_).norm() ** 2 / ((x_.T @ x_).norm() * (y_.T @ y_).norm())
    assert cka(x, y) == pytest.approx(float(expected))
    turned = torch.linalg.qr(torch.randn(5, 5, generator=generator)).Q
    assert cka(y, 3 * y @ turned + 7) == pytest.approx(1)
    assert cka(y, torch.ones(20, 4)) == 0


def test_measures_change_no_bit_and_come_with_evaluated_rounds_only():
    spec = tiny_spec("cka+drift+fedprox", rounds=3, eval_every=2, backbone="resnet8?width=1")
    run = tiny_run(spec)
    records = records_of(run)
    assert [bool(record.measured) for record in records] == [False, False, True, True]
    plain = tiny_spec("fedprox", rounds=3, eval_every=2, backbone="resnet8?width=1")
    assert digest(final_state(tiny_run(spec))) == digest(final_state(tiny_run(plain)))
    last = records[-1].measured
    layers = [name.removeprefix("cka_global/") for name in last if name.startswith("cka_global/")]
    # three blocks of two convolutions, the stem, two shortcuts' and the head, then the logits
    assert layers[0] == "01_conv" and layers[-2:] == [f"{len(layers) - 1:02d}_linear", f"{len(layers):02d}_logits"]
    assert layers == sorted(layers) and all(
        0 < last[f"cka_{of}/{name}"] <= 1 for name in layers for of in ("global", "clients")
    )
    assert not {*last} & {*records[-1].metrics}


def test_one_client_is_like_the_global_model_and_has_no_pairs():
    run = run_of("cka+drift", scenario={"clients": 1, "participation": 1}, rounds=1)
    [_, record] = records_of(run)
    assert record.measured.keys() == {"cka_global/01_logits", "drift", "update_dissimilarity"}
    assert record.measured["cka_global/01_logits"] == pytest.approx(1)
    assert record.measured["update_dissimilarity"] == pytest.approx(1)


def test_models_beside_the_global_one_leave_it_an_anchor_and_a_private_part_of_it_does_not():
    specs = [tiny_spec(f"cka{more}", rounds=1) for more in ("", "+ditto", "+fedper")]
    plain, beside, part = (records_of(tiny_run(spec))[-1].measured for spec in specs)
    assert "cka_global/01_logits" in plain
    assert beside == pytest.approx(plain, abs=1e-6)
    assert part and all(name.startswith("cka_clients/") for name in part)


def test_drift_by_hand():
    tasks = {client: SimpleNamespace(received={"w": torch.tensor([1.0, 1.0])}) for client in (0, 1)}
    # moves (3, 0) and (0, 4), weighted 1 to 3
    updates = (update(0, [4.0, 1.0]), update(1, [1.0, 5.0], samples=3))
    found = Drift(NoParams()).measure(SimpleNamespace(tasks=tasks, updates=updates))
    assert found["drift"] == pytest.approx(0.25 * 3 + 0.75 * 4)
    assert found["update_cosine"] == pytest.approx(0)
    assert found["update_dissimilarity"] == pytest.approx(math.sqrt((0.25 * 9 + 0.75 * 16) / (0.75**2 + 3**2)))
    still = Drift(NoParams()).measure(SimpleNamespace(tasks=tasks, updates=(update(0, [1.0, 1.0]),)))
    assert still == {"drift": 0.0}
    assert Drift(NoParams()).measure(SimpleNamespace(tasks=tasks, updates=())) == {}


def dissimilar(features, real, labels, weight):
    """Of federated ``features`` for one client with the ``real`` ones, whose gradients it has sent."""
    head, bias = LinearHead(), torch.zeros(len(weight))
    owned = torch.unique(labels)
    parts = [class_gradients(real[labels == label][None], label[None], weight, bias, 1.0) for label in owned]
    weights, biases = (torch.cat(each) for each in zip(*((part.weight, part.bias) for part in parts), strict=True))
    sent = {"classes": owned, "gradients.weight": weights, "gradients.bias": biases}
    model = Model({}, lambda tensors, inputs, training: Outputs(inputs, inputs), head=head)
    task = SimpleNamespace(
        payload={"head.weight": weight, "head.bias": bias},
        inputs=_Rows(real),
        visible_labels=labels,
        received={},
        buffers={},
        model=model,
    )
    return dissimilarities(SimpleNamespace(tasks={0: task}, updates=(update(0, [0.0], **sent),), model=model), features)


class _Rows:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def read(self, at):
        return self.rows[at]


def test_federated_features_that_are_the_real_ones_are_not_dissimilar_and_opposite_ones_are():
    real, labels = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0, 2])
    weight = torch.tensor([[0.5, 0.1], [0.0, 0.3], [0.2, 0.2]])
    features = torch.zeros(3, 2, 2)
    features[0], features[2] = real[:2], real[2]
    same = dissimilar(features, real, labels, weight)
    for found in same.values():
        assert found.isnan().tolist() == [False, True, False]
        torch.testing.assert_close(found[[0, 2]], torch.zeros(2), atol=1e-4, rtol=0)
    # features of the other sign: means at cosine -1; all residuals keep their sign, so the gradients turn round as well
    turned = dissimilar(-features, real, labels, weight)
    torch.testing.assert_close(turned["feature_dissimilarity"][[0, 2]], torch.full((2,), 2.0), atol=1e-4, rtol=0)
    torch.testing.assert_close(turned["gradient_dissimilarity"][[0, 2]], torch.full((2,), 2.0), atol=1e-4, rtol=0)
    # at a right angle to the real ones
    aside = dissimilar(features.flip(2), real, labels, weight)
    torch.testing.assert_close(aside["feature_dissimilarity"][[0, 2]], torch.ones(2), atol=1e-4, rtol=0)


def test_creff_measures_where_it_is_asked_to_and_is_else_as_it_was():
    run, plain = (run_of("creff", {"creff": {"dissimilarity": asked}}, rounds=2) for asked in (True, False))
    records = records_of(run)
    named = {"gradient_dissimilarity", "feature_dissimilarity"}
    expected = {f"{name}{end}" for name in named for end in ("", *(f"/{group}" for group in run.scored.groups))}
    assert records[-1].measured.keys() == expected
    assert all(0 <= value <= 2 for value in records[-1].measured.values())
    assert records[-1].method_metrics["matching_loss"] > 0
    assert digest(final_state(run)) == digest(final_state(plain))
    assert not records_of(plain)[-1].measured


def test_a_number_for_every_class_is_recorded_by_group():
    values = torch.tensor([1.0, 3.0, math.nan, math.nan])
    found = dict(_numbers("far", values, {"head": [0, 2], "tail": [2, 3]}, 4, "mine"))
    assert found == {"far": 2.0, "far/head": 1.0}
    with pytest.raises(MethodFault, match=r"mine measures far as a tensor of shape \(3,\)"):
        dict(_numbers("far", values[:3], {}, 4, "mine"))
    with pytest.raises(MethodFault, match="mine answers the hook measure .* must be a number or a tensor as far"):
        dict(_numbers("far", cast(float, "1.0"), {}, 4, "mine"))
