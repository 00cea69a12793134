"""What every method is asked as a run: its recipe, what it sends, that it learns, stacks, and goes on where it was."""

from dataclasses import replace

import pytest
import torch

from fedbench.rounds.loop import evaluate, predict, train_round
from fedbench.rounds.state import all_tensors, load_state, save_state
from fedbench.testing import digest, final_state, tiny_spec
from tests.equations.kit import CLIP, D_T, D_V, FEW, LORA, RESNET, end_of, loss_of, run_of

ALONE = {"executor": "sequential"}
RECIPES = {
    "capt-reconstructed": {"optimizer": "sgd", "lr": 1e-3, "weight_decay": 0.0},
    "clip-lora": {"optimizer": "adamw", "lr": 2e-4, "weight_decay": 1e-2, "beta1": 0.9, "beta2": 0.999},
    "cocoop": {"optimizer": "sgd", "lr": 2e-3, "momentum": 0.9, "weight_decay": 5e-4},
    "fedclip": {"optimizer": "adam", "beta2": 0.98, "eps": 1e-6, "weight_decay": 0.2},
    "fedpcl": {"optimizer": "adam", "lr": 1e-3, "weight_decay": 1e-4},
    "fedtpg": {"optimizer": "sgd", "lr": 3e-3, "momentum": 0.9, "weight_decay": 1e-5},
    "kgcoop": {"optimizer": "sgd", "lr": 2e-3, "momentum": 0.9, "weight_decay": 5e-4},
    "promptfl": {"optimizer": "sgd", "lr": 2e-3, "momentum": 0.9, "weight_decay": 1e-4},
}
"""How the papers' code trains clients."""
DEFAULTS = {
    "cocoop": {"reduction": 16, "init": "words", "context_length": 4},
    "fedtpg": {"context_length": 4, "context": "all"},
    "kgcoop": {"weight": 8.0, "kg_form": "cosine", "init": "words", "context_length": 4},
}
"""Hyper-parameters of the released code."""


@pytest.mark.parametrize("method", RECIPES)
def test_the_recipe_is_the_released_codes(method):
    spec = tiny_spec(method)
    assert {name: getattr(spec.training, name) for name in RECIPES[method]} == RECIPES[method]
    assert method not in DEFAULTS or spec.params[method] == DEFAULTS[method]


def of(method, **params):
    return {method: params}


SHORT = {"context_length": 4}


@pytest.mark.parametrize(
    ("stack", "params", "floats"),
    [
        # a context of M vectors of the embedded text tower, d_t = 64; the teacher stays where it is
        ("kgcoop", {}, 4 * D_T),
        ("kgcoop", of("kgcoop", init="random", context_length=7), 7 * D_T),
        ("plot", of("plot", **SHORT), 4 * 4 * D_T),
        ("proda", of("proda", prompts=8, **SHORT), 8 * 4 * D_T),
        ("fedtpg", {}, 14 * 64**2 + 2 * 128 * 64 + 17 * 64 + 2 * 128 + 4 * 64),
        # tokens of the image tower
        ("vpt", {}, 5 * D_V),
        ("vpt", of("vpt", depth="deep", tokens=2), 4 * 2 * D_V),
        ("vpt+ditto+fedavgm", {}, 5 * D_V),
        # one float a class and dimension
        ("taskres", {}, 4 * 128),
        ("taskres+ditto+fedavgm", {}, 4 * 128),
        *(("fedclip", of("fedclip", adapters=one), 2 * (128**2 + 128)) for one in ("image", "text")),
        ("fedclip", of("fedclip", adapters="both"), 2 * 2 * (128**2 + 128)),
    ],
)
def test_what_is_sent_has_the_size_of_the_formula(stack, params, floats):
    assert run_of(stack, params, backbone=CLIP).info.round_bytes == 4 * floats


@pytest.mark.parametrize("method", ["fed-focal", "fedntd"])
def test_bytes_are_fedavgs(method):
    records = []
    for name in (method, "fedavg"):
        run = run_of(name, rounds=1)
        records.append(train_round(run, final_state(run, until=0))[1])
    one, other = records
    assert (one.bytes_up, one.bytes_down) == (other.bytes_up, other.bytes_down)


@pytest.mark.parametrize(
    ("method", "params", "settings", "fall", "least"),
    [
        ("clip-adapter", {}, {"lr": 0.05}, None, 0),
        *(
            ("clip-lora", {"lora_agg": how, "dropout": 0.1}, {"lr": 5e-3}, 0.02, 0)
            for how in ("factors", "freeze_A", "product_svd")
        ),
        ("fedclip", {}, {"rounds": 1}, None, 0),
        ("maple", {}, {"lr": 0.05}, 0.05, 0),
        ("plot", SHORT, {"lr": 0.1}, 0.05, 1e-3),
        ("proda", {"prompts": 8, **SHORT}, {"lr": 0.05}, 0.05, 1e-3),
        ("promptfl", {}, {"lr": 0.05}, 0.1, 0),
        ("taskres", {}, {"lr": 0.05, "templates": ("a photo of a {}.",)}, 0.1, 0),
        ("vpt", {"depth": "deep"}, {"lr": 0.2}, 0.05, 0),
    ],
)
def test_training_lowers_the_loss_and_moves_every_tensor_and_prompt(method, params, settings, fall, least):
    run = run_of(method, {method: params}, backbone=CLIP, **settings)
    before, after = run.model.weights, final_state(run).weights
    assert fall is None or loss_of(run, after) < loss_of(run, before) - fall
    for name, value in before.items():
        moved = (after[name] - value).abs()
        assert (moved.amax((1, 2)) if moved.ndim == 3 else moved.amax()).min() > least


PERSONAL = [
    ("clip-adapter", {}, {"rounds": 2}),
    ("plot", SHORT, {"rounds": 1}),
    ("proda", {"prompts": 8, **SHORT}, {"rounds": 1}),
    ("taskres", {}, {"rounds": 2, "templates": ("a photo of a {}.",)}),
    ("vpt", {}, {"rounds": 1}),
]


@pytest.mark.parametrize(
    ("stack", "params", "settings"),
    [
        *((f"balancefl+{other}", {}, {"rounds": 2}) for other in ("ditto", "fedavgm")),
        *(
            (f"dp-fpl+{other}", {}, {"backbone": CLIP, "rounds": 2, "local_steps": 1, **ALONE})
            for other in ("fedprox", "feddisco", "fedsam", "prograd")
        ),
        ("fedfa+moon", {}, {"backbone": RESNET, "rounds": 2, "weighting": "uniform"}),
        ("climb+in-turn", of("in-turn", end="mean"), {"backbone": CLIP, "rounds": 2}),
        *((f"fedlaw+{other}", {}, {"rounds": 2}) for other in ("fedadam", "ditto")),
        ("fedpha+fedavgm", of("fedpha", local_length=4, **SHORT), {"backbone": CLIP, "rounds": 1}),
        *((f"{m}+ditto+fedavgm", {m: params}, {"backbone": CLIP, **settings}) for m, params, settings in PERSONAL),
        *(
            (stack, {}, {"backbone": CLIP, "rounds": 1, **ALONE})
            for stack in ("maple+prograd", "taskres+prograd+fedavgm", "promptfolio+prograd", "prograd")
        ),
        ("promptfolio+fedavgm+fedprox", of("promptfolio", **SHORT), {"backbone": CLIP, "rounds": 2, **ALONE}),
    ],
)
def test_losses_personalisations_and_server_rules_stack(stack, params, settings):
    run = run_of(stack, params, **settings)
    state = final_state(run)
    metrics, _ = evaluate(run, state)
    assert state.weights and all(torch.isfinite(value).all() for value in state.weights.values())
    sent = state.weights.keys() - run.private
    assert any(not torch.equal(state.weights[name], run.model.weights[name]) for name in sent)
    assert 0 <= metrics["global_accuracy"] <= 100
    assert "ditto" not in stack or metrics["personal_mean_client_accuracy"] >= 0


@pytest.mark.parametrize(
    ("stack", "params", "settings", "told"),
    [
        ("fed-focal", {}, {"backbone": CLIP}, "cohort"),
        # its loss changes what clients keep
        ("fed-grab", {}, {"backbone": CLIP}, "sequential: its loss"),
        ("fedloge", of("fedloge", steps=20), {"backbone": CLIP}, "cohort"),
        *(("fednova", of("fednova", mu=mu), {}, "cohort, gradients in closed form") for mu in (0.0, 0.5)),
        ("promptfl+in-turn", {}, {"backbone": CLIP}, "sequential: clients train in turn"),
        # from round 2 on clients have a control of their own
        ("scaffold", {}, {"rounds": 4}, "cohort, gradients in closed form"),
    ],
)
def test_clients_train_at_once_where_they_can(stack, params, settings, told):
    run = run_of(stack, params, **{"rounds": 2, **settings})
    state = final_state(run, until=0)
    for _ in range(run.spec.training.rounds):
        state, record = train_round(run, state)
        assert record.executor.startswith(told) if told.endswith("loss") else record.executor == told


@pytest.mark.parametrize(
    ("stack", "params", "settings"),
    [
        ("fedlc", {}, {"rounds": 1}),
        ("fedglcl+fedproto", {}, {"backbone": CLIP, "rounds": 2}),
        ("promptfl+logit-adjustment", of("logit-adjustment", tau=1.0), {"backbone": CLIP, "rounds": 2}),
        # not AdamW, whose first steps follow the sign of a gradient that is all rounding
        *(
            (
                f"clip-lora+{method}",
                {"clip-lora": LORA},
                {"optimizer": "sgd", "lr": 0.1, "rounds": 2, "scenario": {"participation": 1.0}},
            )
            for method in ("flora", "fedex-lora")
        ),
    ],
)
def test_a_cohort_at_once_ends_as_clients_one_after_another(stack, params, settings):
    at_once, alone = (all_tensors(end_of(stack, params, executor=way, **settings)) for way in ("cohort", "sequential"))
    assert at_once.keys() == alone.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(at_once[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["fedpcl", "fedproto"])
def test_it_goes_on_where_it_was_stopped_with_every_clients_own_model(tmp_path, method):
    run = run_of(method)
    save_state(final_state(run, until=2), tmp_path / "half.safetensors", run.spec.run_id)
    again = final_state(run_of(method), load_state(tmp_path / "half.safetensors", run.spec.run_id))
    assert digest(again) == digest(end_of(method))


@pytest.mark.parametrize(
    ("method", "params", "settings"),
    [
        ("ccvr", FEW["ccvr"], {"backbone": CLIP, "rounds": 2}),
        ("creff", {}, {"rounds": 1}),
        ("rucr", {**FEW["rucr"], "loss_weight": 0.0}, {"backbone": CLIP, "rounds": 1}),
    ],
)
def test_a_client_that_fine_tuned_is_evaluated_with_the_head_it_tuned(method, params, settings):
    run, plain = run_of(method, {method: params}, **settings), run_of("fedavg", **settings)
    state = final_state(run)
    flipped = replace(state, weights={name: -tensor for name, tensor in state.weights.items()})
    own = predict(run, flipped, run.test, client=0).labels
    assert torch.equal(own, predict(plain, flipped, plain.test).labels)
    assert not torch.equal(own, predict(run, flipped, run.test).labels)
