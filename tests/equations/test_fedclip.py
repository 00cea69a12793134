"""FedCLIP: Lu et al. 2023, Eqs. 29-33."""

from math import exp, log

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fedbench.core.method.tasks import AggregationTask
from fedbench.core.types import Model, Update
from fedbench.plugins.assembly import assemble
from fedbench.testing import digest, final_state, tiny_backbone, tiny_spec
from fedbench_methods.fedclip import (
    IMAGE,
    TEXT,
    FedCLIP,
    FedClipParams,
    PairedOutputs,
    attention,
    gated,
    in_batch_loss,
    initial_adapter,
)
from tests.equations.kit import all_of, end_of, run_of


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


def test_gate_multiplies_the_raw_feature_entry_by_entry():
    # gate (3/4, 1/4) on I = (4, 3): I* = (3, 3/4)
    parts = adapter([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]], [log(3.0), 0.0])
    torch.testing.assert_close(gated(torch.tensor([[4.0, 3.0]]), parts), torch.tensor([[3.0, 0.75]]))


def test_gate_is_computed_from_the_feature_at_its_own_length():
    # I = (.549306, 0), tanh = (1/2, 0), W2 = [[1, 0], [0, 0]]: softmax(1/2, 0) = (.622459, .377541), and
    # I*_1 = .622459 * .549306 = .341921; from the unit vector, tanh 1 = .761594, it would be .374405
    parts = adapter([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0], [[1.0, 0.0], [0.0, 0.0]], [0.0, 0.0])
    got = gated(torch.tensor([[0.549306, 0.0]]), parts)
    torch.testing.assert_close(got, torch.tensor([[0.341921, 0.0]]), atol=1e-5, rtol=0)


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
    images = normalize(torch.randn(6, 5, generator=generator, dtype=torch.float64), dim=1)
    classes = normalize(torch.randn(3, 5, generator=generator, dtype=torch.float64), dim=1)
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    counts = torch.bincount(labels).double()
    balanced = cross_entropy(7 * images @ classes.T + (counts / 6).log(), labels)
    similarity = 7 * images @ classes[labels].T
    assert cross_entropy(similarity, torch.arange(6)).item() == pytest.approx(
        balanced.item() + counts[labels].log().mean().item(), abs=1e-12
    )


TEMPLATES = ("a photo of a {}", "art of a {}")


def clip_run(params=None, **settings):
    return run_of("fedclip", {"fedclip": params or {}}, templates=TEMPLATES, **settings)


def logits_of(run, weights):
    inputs = all_of(run.test)
    return run.model.forward({**weights, **run.model.buffers}, inputs, False).logits


@pytest.mark.parametrize("adapters", ["image", "text", "both"])
@pytest.mark.parametrize("encoders", ["frozen", "trained"])
def test_uniform_gates_are_exactly_zero_shot(adapters, encoders):
    ours = clip_run({"adapters": adapters, "encoders": encoders})
    zero_shot = run_of("clip-zs", templates=TEMPLATES)
    flat = {k: torch.zeros_like(v) if k.endswith(("W2", "b2")) else v for k, v in ours.model.weights.items()}
    got, expected = logits_of(ours, flat), logits_of(zero_shot, {})
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(got.argmax(1), expected.argmax(1))


def test_image_gate_acts_on_raw_features_and_text_gate_on_every_prompts_raw_feature():
    clip, run = tiny_backbone("clip:embedded"), clip_run({"adapters": "both"})
    weights = run.model.weights
    prompts = [t.format(name) for t in run.spec.templates for name in run.federation.classnames]
    prompts = normalize(gated(clip.encode_text(prompts), weights, TEXT), dim=1)
    texts = normalize(prompts[:4] + prompts[4:], dim=1)
    images = normalize(gated(all_of(run.test), weights, IMAGE), dim=1)
    torch.testing.assert_close(logits_of(run, weights), clip.logit_scale * images @ texts.T, rtol=1e-4, atol=1e-4)


def test_local_loss_takes_the_text_of_each_samples_own_class(make_step):
    text, scale = torch.eye(3), torch.tensor(4.0)
    features = normalize(torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]]), dim=1)
    outputs = PairedOutputs(scale * features, features, text, scale)
    step = make_step(Model(weights={}, forward=None), features, labels=[2, 1], outputs=outputs)
    got = FedCLIP(FedClipParams()).local_loss(step)
    assert got.item() == pytest.approx(in_batch_loss(features, text[[2, 1]], torch.tensor(4.0)).item())


def test_every_trained_part_gets_a_gradient_and_nothing_else_is_a_weight(make_step):
    dim = tiny_backbone("clip:embedded").embed_dim
    for adapters, sizes in (("image", 1), ("text", 1), ("both", 2), ("none", 0)):
        for encoders in ("frozen", "trained"):
            if adapters == "none" and encoders == "frozen":
                continue
            run = clip_run({"adapters": adapters, "encoders": encoders})
            weights = {k: v.clone().requires_grad_() for k, v in run.model.weights.items()}
            step = make_step(run.model, run.train.read(torch.arange(8)), [0, 1, 2, 3] * 2, weights=weights)
            FedCLIP(FedClipParams()).local_loss(step).backward()
            assert [k for k, v in weights.items() if v.grad is None] == []
            own = [v for k, v in weights.items() if k.startswith("adapter.")]
            assert sum(v.numel() for v in own) == sizes * 2 * (dim**2 + dim)
            assert {k.partition(".")[0] for k in weights} <= (
                {"adapter"} if encoders == "frozen" else {"adapter", "clip"}
            )
            moving = {"clip.logit_scale", "clip.token_embedding.weight", "clip.positional_embedding"}
            assert moving <= weights.keys() or encoders == "frozen"


def test_whole_clip_starts_as_the_default_models_fine_tuning_does():
    ours = clip_run({"adapters": "none", "encoders": "trained"})
    full = run_of("fedavg", templates=TEMPLATES, tune="full")
    assert {f"clip.{name}" for name in full.model.weights} == ours.model.weights.keys()
    assert ours.info.round_bytes == full.info.round_bytes
    got, expected = logits_of(ours, ours.model.weights), logits_of(full, full.model.weights)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_trained_towers_move_and_leave_the_backbone_as_it_was():
    clip = tiny_backbone("clip:embedded")
    before = {k: v.clone() for k, v in clip.module.state_dict().items()}
    run = clip_run({"adapters": "both", "encoders": "trained"}, rounds=1)
    state = final_state(run)
    still = [k for k, v in state.weights.items() if torch.equal(v, run.model.weights[k])]
    assert still == []
    assert all(torch.equal(before[k], v) for k, v in clip.module.state_dict().items())


def test_trained_towers_run_in_the_mode_they_are_asked_for_and_are_left_in_eval_mode():
    clip, seen = tiny_backbone("clip:embedded").module, []
    run = clip_run({"encoders": "trained"})
    handle = clip.visual.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    try:
        for training in (True, False):
            run.model.forward({**run.model.weights, **run.model.buffers}, run.test.read(torch.arange(2)), training)
    finally:
        handle.remove()
    assert seen == [True, False]
    assert not clip.training


def test_whole_clip_stacks_with_fedprox_which_changes_it_from_the_second_step_on():
    params = {"fedclip": {"adapters": "none", "encoders": "trained"}, "fedprox": {"mu": 1.0}}
    plain = final_state(clip_run(params["fedclip"], rounds=1))
    assert digest(plain) != digest(end_of("fedclip+fedprox", params, templates=TEMPLATES, rounds=1))


def test_the_two_adapters_are_drawn_apart():
    image, text = initial_adapter(8, 8, seed=0), initial_adapter(8, 8, seed=0, prefix=TEXT)
    assert not torch.equal(image["adapter.W1"], text["adapter.text.W1"])


def test_equal_adapters_come_back_and_others_are_weighted_by_their_samples_unless_uniform():
    parts = initial_adapter(8, 8, seed=0)
    server = assemble("fedclip", {}).hooks
    spec = tiny_spec("fedclip")

    def aggregated(spec, *weights):
        updates = tuple(Update(k, w, {}, 1 + 2 * k) for k, w in enumerate(weights))
        return server.aggregate(task=AggregationTask(1, weights[0], {}, updates, None, spec, {}))

    same = aggregated(spec, parts, parts)
    assert all(torch.equal(same[name], value) for name, value in parts.items())
    # Eq. 33: n = (1, 3), values (0, 4): (1 * 0 + 3 * 4) / 4 = 3; the released code's uniform mean: 2
    values = {"adapter.b1": torch.tensor([0.0])}, {"adapter.b1": torch.tensor([4.0])}
    assert aggregated(spec, *values)["adapter.b1"].tolist() == [3.0]
    assert aggregated(tiny_spec("fedclip", weighting="uniform"), *values)["adapter.b1"].tolist() == [2.0]


def test_adapter_has_two_d_squared_plus_two_d_parameters():
    # ViT-B/32, d = 512: 2 (d^2 + d) = 525,312, the paper's 5.3E5
    assert sum(t.numel() for t in initial_adapter(512, 512, seed=0).values()) == 525_312
    # with the text adapter twice that
    both = initial_adapter(512, 512, seed=0) | initial_adapter(512, 512, seed=0, prefix=TEXT)
    assert sum(t.numel() for t in both.values()) == 1_050_624
    # CAPT's re-implementation, 512 -> 128 -> 512: 131,712
    assert sum(t.numel() for t in initial_adapter(512, 128, seed=0).values()) == 131_712
