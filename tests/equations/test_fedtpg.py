"""FedTPG: Qiu et al. 2024."""

from math import exp
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, normalize

from fedbench.core.errors import FedbenchError
from fedbench.core.method.tasks import ModelSetup
from fedbench.core.randomness import torch_generator
from fedbench.testing import final_state, tiny_backbone, tiny_dataset, tiny_run
from fedbench_methods.fedtpg import FedTPG, FedTpgParams
from fedbench_methods.shared.prompt_generator import attention, generated_context, initial_generator
from tests.equations.kit import spec_of

NAMES = tiny_dataset().classnames


def fedtpg_spec(context="all", **training):
    return spec_of("fedtpg", {"fedtpg": {"context": context}}, **training)


def model_for(names):
    """The model of a run whose classes are called ``names``."""
    return FedTPG(FedTpgParams()).build_model(
        ModelSetup(tiny_backbone("clip:embedded"), tuple(names), fedtpg_spec(), Path("."))
    )


def bare(names):
    return tiny_backbone("clip:embedded").text_features(names, ("{}",))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch_generator(seed, "test"))


def generator_of(length=3, width=8, dim=12):
    """A generator whose every tensor counts: biases and norms are drawn, too."""
    weights = initial_generator(length, width, dim, 0)
    return {name: value + 0.3 * drawn(*value.shape, seed=i) for i, (name, value) in enumerate(weights.items())}


def trained(names=NAMES):
    """The weights of ``model_for``, moved."""
    weights = model_for(names).weights
    return {name: value + 0.05 * drawn(*value.shape, seed=i) for i, (name, value) in enumerate(weights.items())}


def reference(weights, names):
    """v of torch's own modules."""
    width, dim = weights["generator.queries"].shape[1], names.shape[1]
    layer = {name.removeprefix("generator."): value for name, value in weights.items()}
    attend = nn.MultiheadAttention(width, 4, kdim=dim, vdim=dim, batch_first=True)
    parts = ("query", "key", "value")
    # torch keeps the three in one where they are of one shape
    packed = {"in_proj_weight": torch.cat([layer[f"{part}.weight"] for part in parts])} if width == dim else {}
    apart = packed or {f"{part[0]}_proj_weight": layer[f"{part}.weight"] for part in parts}
    biases = {"in_proj_bias": torch.cat([layer[f"{part}.bias"] for part in parts])}
    attend.load_state_dict(
        {**apart, **biases, "out_proj.weight": layer["out.weight"], "out_proj.bias": layer["out.bias"]}
    )
    norms = {"q": nn.LayerNorm(width), "c": nn.LayerNorm(dim), "h": nn.LayerNorm(width)}
    for name, norm in norms.items():
        norm.load_state_dict({part: layer[f"norm_{name}.{part}"] for part in ("weight", "bias")})
    widen, narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
    for name, linear in (("widen", widen), ("narrow", narrow)):
        linear.load_state_dict({part: layer[f"{name}.{part}"] for part in ("weight", "bias")})
    with torch.no_grad():
        read = norms["c"](names)[None]
        gathered = attend(norms["q"](layer["queries"])[None], read, read, need_weights=False)[0][0]
        inner = widen(norms["h"](gathered))
        forward = narrow(inner[:, : 4 * width] * gelu(inner[:, 4 * width :]))
    return gathered + forward


def test_attention_by_hand():
    # four heads of width one: scores are q_h k_h, every projection the identity, the last one 2 x + 1
    identity, weights = torch.eye(4), {}
    for layer in ("query", "key", "value"):
        weights |= {f"generator.{layer}.weight": identity, f"generator.{layer}.bias": torch.zeros(4)}
    weights |= {"generator.out.weight": 2 * identity, "generator.out.bias": torch.ones(4)}
    queries, names = torch.tensor([[1.0, 2.0, 0.0, -1.0]]), torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
    # head 1 scores (1, 0) of values (1, 0); head 2 (0, 2) of (0, 1); head 3 (0, 0) of (1, 0); head 4 (0, -1) of (0, 1)
    heads = [exp(1) / (exp(1) + 1), exp(2) / (1 + exp(2)), 0.5, exp(-1) / (1 + exp(-1))]
    expected = torch.tensor([[2 * head + 1 for head in heads]])
    torch.testing.assert_close(attention(queries, names, weights), expected)
    # the second name out of sight, every head has the value of the first
    absent = torch.tensor([0.0, -torch.inf])
    torch.testing.assert_close(attention(queries, names, weights, absent), torch.tensor([[3.0, 1.0, 3.0, 1.0]]))


@pytest.mark.parametrize(("length", "width", "dim"), [(3, 8, 12), (1, 16, 16), (4, 64, 128)])
def test_context_is_that_of_torchs_own_layers(length, width, dim):
    weights, names = generator_of(length, width, dim), drawn(5, dim)
    torch.testing.assert_close(generated_context(weights, names), reference(weights, names), rtol=1e-4, atol=1e-4)


def test_with_both_last_layers_zero_the_context_is_zero():
    weights = generator_of()
    last = {k: torch.zeros_like(v) for k, v in weights.items() if k.startswith(("generator.out", "generator.narrow"))}
    assert len(last) == 4
    # a residual from the queries would be left
    assert torch.equal(generated_context({**weights, **last}, drawn(5, 12)), torch.zeros(3, 8))
    # the feed-forward has one: without its last layer what attention gathered stays
    narrow = {name: value for name, value in last.items() if "narrow" in name}
    assert generated_context({**weights, **narrow}, drawn(5, 12)).abs().min() > 0


def test_absent_names_are_as_if_they_were_not_there():
    weights, names = generator_of(), drawn(5, 12)
    absent = torch.tensor([0.0, -torch.inf, 0.0, 0.0, -torch.inf])
    seen = generated_context(weights, names[[0, 2, 3]])
    torch.testing.assert_close(generated_context(weights, names, absent), seen)
    assert (seen - generated_context(weights, names)).abs().max() > 1e-2


def test_count_is_that_of_the_formula():
    def count(length, width, dim):
        return sum(value.numel() for value in initial_generator(length, width, dim, 0).values())

    assert count(4, 512, 512) == 4_206_080  # ViT-B/16
    for length, size in ((4, 8), (2, 64), (16, 128)):
        assert count(length, size, size) == 16 * size**2 + 19 * size + length * size
    for length, width, dim in ((4, 64, 128), (3, 8, 12)):
        assert count(length, width, dim) == 14 * width**2 + 2 * dim * width + 17 * width + 2 * dim + length * width


def test_layers_begin_as_torchs_do_and_queries_small():
    layer = {name.removeprefix("generator."): value for name, value in initial_generator(40, 64, 128, 0).items()}
    assert layer["queries"].std().item() == pytest.approx(0.02, rel=0.05)
    # uniform: Xavier's for what attention projects, +-1/sqrt(fan-in) for the rest
    bounds = {"query": (6 / 128) ** 0.5, "key": (6 / 192) ** 0.5, "value": (6 / 192) ** 0.5}
    bounds |= {"out": 64**-0.5, "widen": 64**-0.5, "narrow": 256**-0.5}
    for name, bound in bounds.items():
        assert 0.99 * bound < layer[f"{name}.weight"].abs().max() <= bound
    assert not any(layer[f"{name}.bias"].any() for name in ("query", "key", "value", "out"))
    assert layer["widen.bias"].abs().max() > 0.9 * 64**-0.5 and layer["narrow.bias"].abs().max() > 0.9 * 256**-0.5
    for name, size in (("q", 64), ("c", 128), ("h", 64)):
        assert torch.equal(layer[f"norm_{name}.weight"], torch.ones(size)) and not layer[f"norm_{name}.bias"].any()


def test_logits_are_scaled_cosines_to_the_texts_behind_the_generated_context():
    clip, weights, inputs = tiny_backbone("clip:embedded"), trained(), drawn(6, 128)
    module, context = clip.module, reference(trained(), bare(NAMES))
    tokens = clip.tokenizer([f"X X X X {name}." for name in NAMES])
    embedded = module.token_embedding(tokens)
    x = torch.cat([embedded[:, :1], context.expand(4, -1, -1), embedded[:, 5:]], dim=1)
    x = module.ln_final(module.transformer(x + module.positional_embedding, attn_mask=module.attn_mask))
    texts = normalize(x[torch.arange(4), tokens.argmax(1)] @ module.text_projection, dim=1)
    expected = clip.logit_scale * normalize(inputs, dim=1) @ texts.T
    torch.testing.assert_close(model_for(NAMES).forward(weights, inputs, False).logits, expected, rtol=0, atol=2e-4)


def test_names_are_read_in_any_order_and_with_spaces():
    weights, inputs, order = trained(), drawn(6, 128), [2, 0, 3, 1]
    names = ("fire_truck", "boat", "old tree", "dog")
    logits = model_for(names).forward(weights, inputs, False).logits
    permuted = model_for([names[k] for k in order]).forward(weights, inputs, False).logits
    torch.testing.assert_close(permuted, logits[:, order], rtol=0, atol=2e-4)
    context, permuted = (generated_context(weights, bare([NAMES[k] for k in ks])) for ks in (range(4), order))
    torch.testing.assert_close(context, permuted, rtol=1e-5, atol=1e-6)
    spaces = model_for(("fire truck", *names[1:])).forward(weights, inputs, False).logits
    assert torch.equal(logits, spaces)


def test_trained_weights_take_any_set_of_names():
    few, many = model_for(NAMES), model_for((*NAMES, "horse", "ship", "plane"))
    shapes = [{name: value.shape for name, value in model.weights.items()} for model in (few, many)]
    assert shapes[0] == shapes[1]
    weights, inputs = final_state(tiny_run(fedtpg_spec(rounds=1))).weights, drawn(6, 128)
    logits = [model.forward(weights, inputs, False).logits for model in (few, many)]
    assert [each.shape for each in logits] == [(6, 4), (6, 7)]
    # a text depends on the other names, too
    assert (logits[0] - logits[1][:, :4]).abs().max() > 1e-3


def step_of(make_step, labels, context):
    inputs = drawn(len(labels), 128)
    params = {"fedtpg": {"context": context}}
    step = make_step(model_for(NAMES), inputs, labels, weights=trained(), method="fedtpg", params=params, num_classes=4)
    return step.task.hooks.local_loss(step=step), inputs, step


def test_by_default_a_client_reads_and_tells_apart_all_names(make_step):
    loss, inputs, _ = step_of(make_step, [1, 3, 3, 1], "all")
    logits = model_for(NAMES).forward(trained(), inputs, False).logits
    torch.testing.assert_close(loss, cross_entropy(logits, torch.tensor([1, 3, 3, 1])))


def test_present_a_client_reads_and_tells_apart_its_own_names(make_step):
    loss, inputs, step = step_of(make_step, [1, 3, 3, 1], "present")
    # a federation of these two classes alone
    logits = model_for((NAMES[1], NAMES[3])).forward(trained(), inputs, False).logits
    torch.testing.assert_close(loss, cross_entropy(logits, torch.tensor([0, 1, 1, 0])), rtol=1e-4, atol=1e-4)
    # further terms read the same pass
    torch.testing.assert_close(step.outputs.logits[:, [1, 3]], logits, rtol=0, atol=2e-4)


def test_present_is_all_for_a_client_with_every_class(make_step):
    losses = [step_of(make_step, [2, 1, 0, 3], context)[0] for context in ("all", "present")]
    torch.testing.assert_close(*losses)


def test_present_needs_labels(make_step):
    params = {"fedtpg": {"context": "present"}}
    step = make_step(model_for(NAMES), drawn(2, 128), None, method="fedtpg", params=params)
    with pytest.raises(FedbenchError, match="labels=visible"):
        step.task.hooks.local_loss(step=step)


def test_present_trains_at_once_as_one_by_one_and_is_tested_on_all_names():
    scenario = {"dirichlet_alpha": 0.1, "participation": 1.0, "min_client_size": 2}
    spec = fedtpg_spec("present", scenario=scenario, rounds=2, lr=0.05)
    run = tiny_run(spec, executor="cohort")
    assert any(0 in counts for counts in run.info.class_counts)
    at_once, one_by_one = final_state(run).weights, final_state(tiny_run(spec, executor="sequential")).weights
    assert run.executor.description == "cohort"
    for name, value in one_by_one.items():
        # a key's bias adds the same to all scores of a query, so that it has no gradient
        assert name == "generator.key.bias" or (value - run.model.weights[name]).abs().max() > 1e-5
        torch.testing.assert_close(at_once[name], value, rtol=1e-4, atol=1e-6)
    inputs = run.test.read(torch.arange(6))
    found, all_names = (model.forward(at_once, inputs, False).logits for model in (run.model, model_for(NAMES)))
    assert torch.equal(found, all_names)
