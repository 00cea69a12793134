"""MOON: Li, He, Song 2021, Eqs. 3-4."""

from math import exp, log

import pytest
import torch

from fedbench.core.types import Model, Outputs
from fedbench.rounds.loop import train_round
from fedbench.rounds.state import load_state, save_state
from fedbench_methods.moon import MOON, MoonParams, kept_model, model_contrast, previous_model
from tests.equations.kit import run_of

METHOD = MOON(MoonParams(mu=3.0, temperature=0.5))


def rotated(tensors, inputs, training):
    """Features x W, moved by a buffer outside training only, as batch-norm would."""
    features = inputs @ tensors["W"] + (0.0 if training else tensors["shift"])
    return Outputs(features, features)


def angle(cosine):
    """A unit vector whose cosine with (1, 0) is ``cosine``."""
    return [cosine, (1 - cosine**2) ** 0.5]


def test_contrast_at_cosines_of_point_8_and_point_2():
    # -log(e^1.6 / (e^1.6 + e^.4)) = log(1 + e^-1.2) = .263282
    now, received, previous = (torch.tensor([v]) for v in ([1.0, 0.0], angle(0.8), angle(0.2)))
    assert model_contrast(now, received, previous, 0.5).item() == pytest.approx(0.263282, abs=1e-6)
    # the roles are not alike: swapped, log(1 + e^1.2)
    assert model_contrast(now, previous, received, 0.5).item() == pytest.approx(log(1 + exp(1.2)))


def test_contrast_is_the_mean_over_the_batch_and_blind_to_lengths():
    now = torch.tensor([[5.0, 0.0], [0.0, 0.1]])
    received, previous = torch.tensor([[2.0, 0.0], [3.0, 0.0]]), torch.tensor([[0.0, 4.0], [0.0, 1.0]])
    # cosines (1, 0) and (0, 1), temperature 1: the mean of log(1 + e^-1) and log(1 + e)
    assert model_contrast(now, received, previous, 1.0).item() == pytest.approx(
        (log(1 + exp(-1)) + log(1 + exp(1))) / 2
    )


def test_gradient_pulls_towards_the_received_and_away_from_the_previous():
    now = torch.tensor([[1.0, 0.0]], requires_grad=True)
    model_contrast(now, torch.tensor([angle(0.8)]), torch.tensor([[0.0, -1.0]]), 0.5).backward()
    # u = (cos_p - cos_g) / .5 = -1.6; d cos_g = .6 and d cos_p = -1 along the second axis:
    # sigmoid(-1.6) * (-1 - .6) / .5, and nothing along now itself
    expected = torch.tensor([[0.0, -1.6 / 0.5 / (1 + exp(1.6))]])
    torch.testing.assert_close(now.grad, expected)


def test_previous_equal_to_received_gives_log_2_and_no_gradient():
    now = torch.tensor([[0.3, -0.8], [1.0, 2.0]], requires_grad=True)
    other = torch.tensor([[0.5, 0.5], [-1.0, 0.2]])
    loss = model_contrast(now, other, other, 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(log(2))
    assert torch.equal(now.grad, torch.zeros(2, 2))


@pytest.fixture
def contrast_step(make_step):
    """A step of a client whose state holds the model ``previous``."""

    def make(previous, *, current=None, state=None):
        model = Model(weights={"W": torch.eye(2)}, forward=rotated, buffers={"shift": torch.zeros(2)})
        kept = {"moon": kept_model(*previous)} if previous else {}
        given = current or {"W": torch.eye(2)}
        weights = {name: value.requires_grad_() for name, value in given.items()}
        return make_step(
            model, torch.tensor([[1.0, 0.0]]), [0], weights=weights, state=kept, buffers={"shift": torch.zeros(2)}
        )

    return make


def test_term_is_mu_times_the_contrast_of_three_forward_passes(contrast_step):
    # received: z_glob = (1, 0); previous: (0, 1); now: (.6, .8). mu 3: 3 log(1 + e^{(.8 - .6) / .5})
    turned, current = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.6, 0.8], [0.0, 0.0]])
    step = contrast_step(({"W": turned}, {"shift": torch.zeros(2)}), current={"W": current})
    assert METHOD.loss_terms(step).item() == pytest.approx(3 * log(1 + exp(0.4)))


def test_frozen_models_run_in_eval_mode_with_their_own_statistics(contrast_step):
    # previous weights give (1, 0), its buffer adds (-1, 1) outside training only: z_prev = (0, 1)
    current = torch.tensor([[0.6, 0.8], [0.0, 0.0]])
    step = contrast_step(({"W": torch.eye(2)}, {"shift": torch.tensor([-1.0, 1.0])}), current={"W": current})
    assert METHOD.loss_terms(step).item() == pytest.approx(3 * log(1 + exp(0.4)))


def test_frozen_models_get_no_gradient(contrast_step):
    previous = {"W": torch.tensor([[0.0, 1.0], [1.0, 0.0]], requires_grad=True)}
    current = {"W": torch.tensor([[0.6, 0.8], [0.0, 0.0]], requires_grad=True)}
    step = contrast_step((previous, {"shift": torch.zeros(2)}), current=current)
    step.received["W"].requires_grad_()
    METHOD.loss_terms(step).backward()
    assert current["W"].grad.abs().sum() > 0
    assert previous["W"].grad is None and step.received["W"].grad is None


def test_first_participation_adds_nothing(contrast_step):
    assert METHOD.loss_terms(contrast_step(None)) is None


def test_kept_model_is_what_training_ended_with(make_task):
    model = Model(weights={"W": torch.eye(2)}, forward=rotated, buffers={"shift": torch.zeros(2)})
    task = make_task(model, torch.tensor([[1.0, 0.0]]), [0], method="moon")
    update = task.hooks.local_train(task=task)
    assert task.hooks.after_training(task=task, update=update) == []
    weights, buffers = previous_model(task.state["moon"])
    assert torch.equal(weights["W"], update.weights["W"]) and not torch.equal(weights["W"], torch.eye(2))
    assert torch.equal(buffers["shift"], update.buffers["shift"])


def test_kept_model_comes_back_by_name():
    weights, buffers = {"head.weight": torch.ones(2)}, {"head.weight": torch.zeros(1), "n": torch.tensor(3)}
    kept = kept_model(weights, buffers)
    assert set(kept) == {"weights/head.weight", "buffers/head.weight", "buffers/n"}
    assert previous_model(kept) == (weights, buffers)


def test_state_is_kept_with_the_cohort_nothing_is_sent_and_it_can_be_saved(tmp_path):
    run = run_of("moon", backbone="convnet?projector=8&projector_layers=2", rounds=4)
    state, record = train_round(run, run.initial_state())
    assert record.bytes_up == record.bytes_down == 2 * run.info.round_bytes
    assert set(state.clients) == set(record.cohort)
    for kept in state.clients.values():
        weights, buffers = previous_model(kept["moon"])
        assert set(weights) == set(run.model.weights) and set(buffers) == set(run.model.buffers)
        assert any(not torch.equal(weights[name], state.weights[name]) for name in weights)
    save_state(state, tmp_path / "state.safetensors", run.spec.run_id)
    loaded = load_state(tmp_path / "state.safetensors", run.spec.run_id)
    client = record.cohort[0]
    for name, tensor in state.clients[client]["moon"].items():
        assert torch.equal(loaded.clients[client]["moon"][name], tensor)
