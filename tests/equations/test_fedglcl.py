"""FedGLCL: Yan et al. 2025, Eqs. 3-8, Tables 8-10 and FedGLCL-L."""

import hashlib
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fedbench.core.errors import FedbenchError
from fedbench.core.method.tasks import ModelSetup
from fedbench.core.spec import RunSpec
from fedbench.core.types import Model, Outputs
from fedbench.models import load_backbone
from fedbench.models.cnn.backbone import cnn_model
from fedbench.models.text.classifier import ProjectorShape, build_projector, embedding_model
from fedbench.models.text.vectors import class_text
from fedbench.rounds.loop import evaluate, train_round
from fedbench.rounds.messages import broadcast, client_task
from fedbench.testing import final_state, tiny_backbone, tiny_run, tiny_spec
from fedbench_methods import fedglcl
from fedbench_methods.fedglcl import FedGLCL, FedGlclParams, prompt_templates, proxy_names, similarity_loss
from tests.equations.kit import CLIP, all_of, run_of, spec_of

TAU = 0.5
DELTA = torch.tensor([[0.6, 0.2]])
NAMES = ("bird", "boat", "car", "tree")


def spec(backbone=CLIP, text="auto", rounds=2, seed=0, **params):
    return spec_of("fedglcl", {"fedglcl": params}, backbone=backbone, text_encoder=text, rounds=rounds, seed=seed)


def setup(backbone, **settings):
    asked = RunSpec(backbone=backbone, **settings)
    return ModelSetup(load_backbone(backbone, data_dir=Path("."), seed=0), NAMES, asked, Path("."))


def size(tensors):
    return sum(tensor.numel() for tensor in tensors.values())


# Loss


def test_equation_7_leaves_the_positive_out_of_the_denominator():
    # delta = (.6, .2), tau = .5, y = 0: -1.2 + log exp(.4) = -.8
    assert similarity_loss(DELTA / TAU, torch.tensor([0])).item() == pytest.approx(-0.8)


def test_cross_entropy_form_keeps_it():
    # ln(1 + e^-.8) = .37110; the difference is ln(1 - .68997) = -1.17110
    included = cross_entropy(DELTA / TAU, torch.tensor([0])).item()
    assert included == pytest.approx(0.37110, abs=1e-5)
    assert similarity_loss(DELTA / TAU, torch.tensor([0])).item() - included == pytest.approx(-1.17110, abs=1e-5)


def test_with_three_classes_the_negatives_are_summed_inside_the_log():
    # z = (1, 0, log 3), y = 0: -1 + log(1 + 3); z' = (0, 2, 0), y = 1: -2 + log 2; the batch is averaged
    logits = torch.tensor([[1.0, 0.0, log(3)], [0.0, 2.0, 0.0]])
    expected = (-1 + log(4) - 2 + log(2)) / 2
    assert similarity_loss(logits, torch.tensor([0, 1])).item() == pytest.approx(expected)


def test_equation_7_is_cross_entropy_plus_log_of_one_minus_p():
    logits, labels = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 4, 0])
    p = logits.softmax(1).gather(1, labels[:, None]).squeeze(1)
    expected = cross_entropy(logits, labels) + torch.log(1 - p).mean()
    torch.testing.assert_close(similarity_loss(logits, labels), expected)


def test_gradient_towards_the_positive_never_saturates_and_rows_sum_to_zero():
    delta = torch.tensor([[0.99, -0.9, -0.8], [0.1, 0.3, 0.2]], requires_grad=True)
    similarity_loss(delta / 0.07, torch.tensor([0, 1])).backward()
    # -1/tau for each of two averaged rows: at delta .99 as at .3
    torch.testing.assert_close(delta.grad[[0, 1], [0, 1]], torch.full((2,), -1 / 0.07 / 2))
    torch.testing.assert_close(delta.grad.sum(1), torch.zeros(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("denominator", "expected"), [("include", 0.37110), ("exclude", -0.8)])
def test_denominator_chooses_the_loss(make_step, denominator, expected):
    model = Model(weights={}, forward=None)
    step = make_step(model, DELTA, labels=[0], outputs=Outputs(DELTA / TAU, DELTA))
    got = FedGLCL(FedGlclParams(denominator=denominator)).local_loss(step)
    assert got.item() == pytest.approx(expected, abs=1e-5)


# Logits


def test_logits_are_cosines_over_tau_whatever_the_lengths_of_embedding_and_text():
    made = setup("convnet")
    text = torch.tensor([[3.0, 4.0], [0.0, 2.0], [-1.0, 0.0], [1.0, 0.0]])
    model = embedding_model(made, text, 1 / TAU, ProjectorShape())
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    out = model.forward(model.weights, images, False)
    # the embedding's direction (a, b): cosines .6a + .8b, b, -a, a
    a, b = out.features.T
    expected = torch.stack([0.6 * a + 0.8 * b, b, -a, a], dim=1) / TAU
    torch.testing.assert_close(out.logits, expected)
    torch.testing.assert_close(out.features.norm(dim=1), torch.ones(3))
    longer = {k: 7 * v if k.startswith("projector") else v for k, v in model.weights.items()}
    torch.testing.assert_close(model.forward(longer, images, False).logits, out.logits)
    rescaled = embedding_model(made, text * torch.tensor([[5.0], [0.1], [1.0], [9.0]]), 1 / TAU, ProjectorShape())
    torch.testing.assert_close(rescaled.forward(model.weights, images, False).logits, out.logits)


def test_identity_as_text_is_fedavg_with_a_cosine_head(make_step):
    # V = C, T = I: delta_j = I_j / |I|, and I = W h + b is what FedAvg's head gives
    made = setup("convnet")
    model = embedding_model(made, torch.eye(4), 1 / 0.07, ProjectorShape())
    weights, _, head = cnn_model(made.backbone, 4, seed=0)
    same = {**model.weights, "head.weight": model.weights["projector.fc.weight"]}
    same["head.bias"] = model.weights["projector.fc.bias"]
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    plain = head({name: same[name] for name in weights}, images, False).logits
    step = make_step(model, images, [0, 1, 2, 3], num_classes=4)
    expected = cross_entropy(normalize(plain, dim=1) / 0.07, torch.arange(4))
    torch.testing.assert_close(FedGLCL(FedGlclParams()).local_loss(step), expected)


def test_a_last_relu_bounds_the_cosine_by_the_positive_part_of_the_text():
    # T = (3, -4, 0): the best non-negative embedding is (1, 0, 0), cosine 3/5
    projector = build_projector(3, 3, ProjectorShape(final_relu=True))
    torch.nn.init.eye_(projector.fc.weight)
    torch.nn.init.zeros_(projector.fc.bias)
    text = torch.tensor([3.0, -4.0, 0.0])
    many = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0))
    cosines = normalize(projector(torch.cat([text[None], many])), dim=1) @ normalize(text, dim=0)
    assert cosines[0].item() == pytest.approx(0.6)
    assert cosines[1:].max() <= 0.6 + 1e-6


def test_an_embedding_of_zeros_has_cosine_zero_and_no_gradient_that_is_not_finite():
    model = embedding_model(setup("convnet"), torch.eye(4), 10.0, ProjectorShape(final_relu=True))
    dead = {**model.weights, "projector.fc.weight": torch.zeros(4, 84), "projector.fc.bias": torch.full((4,), -1.0)}
    dead = {name: value.clone().requires_grad_() for name, value in dead.items()}
    out = model.forward(dead, torch.rand(2, 3, 32, 32), True)
    assert torch.equal(out.logits, torch.zeros(2, 4))
    cross_entropy(out.logits, torch.tensor([0, 1])).backward()
    assert all(torch.isfinite(value.grad).all() for value in dead.values())


# Projectors


def test_projectors_have_the_order_of_their_sources():
    def layers(**shape):
        return [type(layer).__name__ for layer in build_projector(8, 4, ProjectorShape(**shape))]

    assert layers(norm="bn", final_relu=True) == ["Linear", "BatchNorm1d", "ReLU"]  # released code, AlexNet
    table8 = ["Linear", "ReLU", "UnitLength", "Linear", "ReLU", "UnitLength"]
    assert layers(kind="mlp", final_relu=True) == table8
    assert layers(kind="mlp", norm="bn") == ["Linear", "ReLU", "BatchNorm1d", "Linear", "BatchNorm1d"]


def test_alexnet_with_the_codes_projector_has_42_86_million_parameters():
    # 57.02 M without classifier, minus FC2 and its norm (4096 * 4096 + 3 * 4096), plus 4096 * 640 + 3 * 640
    text = torch.ones(10, 640)
    with torch.device("meta"):
        model = embedding_model(setup("alexnet?dense=1"), text, 1.0, ProjectorShape(norm="bn", final_relu=True))
    assert size(model.weights) == 57_022_528 - 4096 * 4099 + 643 * 4096 - 3 * 4096 + 3 * 640 == 42_856_384


@pytest.mark.parametrize(("norm", "extra"), [("l2", 0), ("bn", 2 * (2048 + 640))])
def test_resnet50_with_table_8s_projector_adds_5_51_million(norm, extra):
    text = torch.ones(100, 640)
    with torch.device("meta"):
        model = embedding_model(setup("resnet50"), text, 1.0, ProjectorShape(kind="mlp", norm=norm, final_relu=True))
    # 2048 * 2049 + 640 * 2049 = 5,507,712
    assert size(model.weights) == 23_508_032 + 5_507_712 + extra
    assert round((5_507_712 + extra) / 1e6, 2) == 5.51


@pytest.mark.parametrize("shape", [{"norm": "bn"}, {"final_relu": True}, {"kind": "mlp", "norm": "bn"}])
def test_embedding_is_unit_after_every_projector_and_the_backbone_stays_as_it_was(shape):
    made = setup("convnet")
    model = embedding_model(made, torch.eye(4), 10.0, ProjectorShape(**shape))
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    out = model.forward({**model.weights, **model.buffers}, images, False)
    torch.testing.assert_close(out.features.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(out.logits, 10 * out.features)
    # the mode is set on a copy, since two models may share a backbone
    assert made.backbone.module.training


@pytest.mark.parametrize("denominator", ["include", "exclude"])
def test_papers_projector_trains_on_a_cnn(denominator):
    chosen = {"projector": "mlp", "projector_norm": "bn", "final_relu": True, "denominator": denominator}
    run = tiny_run(spec(backbone="convnet", rounds=1, **chosen))
    state = final_state(run)
    assert all(torch.isfinite(value).all() for value in state.weights.values())
    assert not torch.equal(state.buffers["projector.norm1.running_mean"], torch.zeros(84))


def test_round_0_on_clip_is_exactly_zero_shot():
    ours, zero_shot = tiny_run(spec()), run_of("clip-zs")
    inputs = all_of(ours.test)
    got = ours.model.forward(ours.model.weights, inputs, False)
    theirs = zero_shot.model.forward({}, inputs, False)
    torch.testing.assert_close(got.logits * 0.07, theirs.logits / tiny_backbone("clip:embedded").logit_scale)
    assert torch.equal(
        evaluate(ours, ours.initial_state())[1].labels, evaluate(zero_shot, zero_shot.initial_state())[1].labels
    )


def test_on_clip_the_projector_reads_unit_features_and_the_docstring_says_so():
    model = embedding_model(setup("clip:embedded"), torch.eye(4), 10.0, ProjectorShape())
    assert torch.count_nonzero(model.weights["projector.fc.bias"]) > 0  # which would tell lengths apart
    features = torch.randn(3, model.weights["projector.fc.weight"].shape[1], generator=torch.Generator().manual_seed(2))
    both = [model.forward(model.weights, inputs, False).logits for inputs in (features, 4 * features)]
    torch.testing.assert_close(*both)
    assert "frozen unit image features" in fedglcl.__doc__


@pytest.mark.parametrize("changed", [{"text": "random", "dim": 128}, {"final_relu": True}, {"projector": "mlp"}])
def test_other_text_or_projector_starts_from_the_seed(changed):
    def weights(seed):
        return tiny_run(spec(seed=seed, **changed)).model.weights

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


# Text


def test_text_is_the_same_on_every_client_in_every_round_and_never_sent():
    run = tiny_run(spec())
    state, seen = run.initial_state(), set()
    for _ in range(2):
        for client in range(len(run.federation.clients)):
            sent = broadcast(run, state, client)
            assert not sent.payload and set(sent.weights) == {"projector.fc.weight", "projector.fc.bias"}
            run.executor.train([client_task(run, state, state.round + 1, 0, client, sent)])
            seen.add(hashlib.sha256(run.model.constants["text"].numpy().tobytes()).hexdigest())
        state, record = train_round(run, state)
        # d = V = 128: a projector of 128 * 128 + 128 float32, to and from two clients
        assert record.bytes_up == record.bytes_down == 2 * run.info.round_bytes
    assert len(seen) == 1
    assert run.info.round_bytes == 4 * (128 * 128 + 128)
    # one vector a class, in the order of the labels
    assert run.federation.classnames == NAMES
    own = class_text(setup("clip:embedded"), run.spec.templates)
    torch.testing.assert_close(run.model.constants["text"], own)


def test_drawn_text_has_the_width_v_and_orthogonal_text_refuses_more_classes():
    run = tiny_run(spec(text="orthogonal", dim=16))
    text = run.model.constants["text"]
    torch.testing.assert_close(text @ text.T, torch.eye(4), rtol=0, atol=1e-6)
    assert run.model.weights["projector.fc.weight"].shape == (16, 128)
    with pytest.raises(FedbenchError, match="4 orthogonal vectors don't fit into 2 dimensions"):
        tiny_run(spec(text="orthogonal", dim=2))


def test_ensemble_is_85_different_prompts_and_bare_is_the_name_alone():
    ensemble = prompt_templates("ensemble", ("x {}",))
    assert len(set(ensemble)) == 85 and all(prompt.count("{}") == 1 for prompt in ensemble)
    assert sum("scene" in prompt for prompt in ensemble) == 5
    assert prompt_templates("bare", ("x {}",)) == ("{}",)
    assert prompt_templates("template", ("x {}", "{} y")) == ("x {}", "{} y")


def test_prompts_and_proxies_reach_the_text_of_each_class():
    made = setup("clip:embedded")
    expected = {
        "bare": class_text(made, ("{}",)),
        "template": class_text(made, ("a photo of a {}",)),
    }
    for prompt, text in expected.items():
        torch.testing.assert_close(tiny_run(spec(prompt=prompt)).model.constants["text"], text)
    proxies = class_text(replace(made, classnames=proxy_names(NAMES, 0)), ("a photo of a {}",))
    torch.testing.assert_close(tiny_run(spec(proxy="imagenet")).model.constants["text"], proxies)


def test_proxy_names_are_other_classes_fixed_by_the_seed():
    classes = ("Tench", "siberian husky", "car")
    names = proxy_names(classes, 0)
    assert names == proxy_names(classes, 0) != proxy_names(classes, 1)
    # 1000 names, two of them twice, two of them classes: 996 are left, and all of them can be asked for
    everything = proxy_names((*classes, *(f"c{i}" for i in range(993))), 0)
    assert len(set(everything)) == 996 and not {"tench", "Siberian Husky"} & set(everything)
    with pytest.raises(FedbenchError, match="has 998 names, not 999"):
        proxy_names(tuple(f"c{i}" for i in range(999)), 0)


# Stacks and FedGLCL-L


def test_trainable_text_moves_the_tower_and_sends_exactly_its_parameters_more():
    fixed, trained = tiny_run(spec()), tiny_run(spec(trainable_text=True, rounds=1))
    clip = tiny_backbone("clip:embedded").module
    tower = sum(p.numel() for n, p in clip.named_parameters() if not n.startswith("visual.") and n != "logit_scale")
    assert trained.info.round_bytes - fixed.info.round_bytes == 4 * tower
    assert not trained.model.constants
    # round 0 is what fixed text gives
    inputs = fixed.test.read(torch.arange(20))
    start = trained.model.forward(trained.model.weights, inputs, False).logits
    torch.testing.assert_close(start, fixed.model.forward(fixed.model.weights, inputs, False).logits, atol=1e-4, rtol=0)
    before = trained.model.weights["text.ln_final.weight"]
    state = final_state(trained)
    assert not torch.equal(state.weights["text.ln_final.weight"], before)
    # T follows the averaged tower: with the old tower in its place the new model answers otherwise
    back = {name: trained.model.weights[name] if name.startswith("text.") else w for name, w in state.weights.items()}
    new = trained.model.forward(state.weights, inputs, False).logits
    assert not torch.equal(new, trained.model.forward(back, inputs, False).logits)


def test_the_tower_learns_at_its_own_rate():
    run = tiny_run(spec(trainable_text=True, text_lr_factor=0.25))
    factors = run.model.lr_factors
    assert set(factors) == {name for name in run.model.weights if name.startswith("text.")}
    assert set(factors.values()) == {0.25}


def test_recipe_is_the_released_codes_sgd_without_a_learning_rate():
    chosen = tiny_spec("fedglcl").training
    assert (chosen.optimizer, chosen.momentum, chosen.weight_decay) == ("sgd", 0.9, 1e-5)
    assert "lr" not in FedGLCL.recipe
