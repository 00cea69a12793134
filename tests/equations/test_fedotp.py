"""FedOTP: Li et al. 2024, patches divided between a global and a local prompt by optimal transport."""

import math
from dataclasses import replace

import open_clip
import pytest
import torch
from open_clip.model import CLIP
from torch import nn
from torch.func import vmap
from torch.nn.functional import cross_entropy, normalize

from fedbench.core.errors import Unworkable
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.inputs import PixelTransform
from fedbench.models.prompts.context import initial_context, prompt_tower
from fedbench.rounds.finetuning import finetuned_metrics
from fedbench.rounds.loop import evaluate, train_round
from fedbench.testing import final_state, tiny_backbone, tiny_dataset, tiny_spec
from fedbench_methods.shared.patches import ClipPatchEncoder
from fedbench_methods.shared.transport import Plans, Transport, transport_plans, transported
from tests.equations.kit import drawn, runs, task_of

GLOBAL, LOCAL = "prompt.global", "prompt.local"


run_of = runs("fedotp")


def plans(similarities, eps=0.1, gamma=0.8, thresh=0.0, max_iter=2000):
    return transport_plans(similarities, Transport(eps, gamma, thresh, max_iter))


# of one image and class with two patches: Q = [[1/2, 1/4], [1/4, 1/4]] by patch and prompt, with eps = 1
WORKED = 1 + torch.tensor([[[0.5, 0.25]], [[0.25, 0.25]]]).log()
# u = (2/3, 1), since (1/2) / (3/4) and min(1, (1/2) / (1/2)); Q^T u = (7/12, 5/12), v = 0.4 / Q^T u
ONCE = torch.tensor([[[8 / 35, 6 / 35]], [[4 / 25, 6 / 25]]])
# then Q v = (102/175, 72/175): u = (175/204, 1), v = (163.2/277, 326.4/379)
TWICE = torch.tensor([[[70 / 277, 40.8 / 277]], [[70 / 379, 81.6 / 379]]])


def test_iterations_worked_out():
    for iterations, wanted in ((1, ONCE), (2, TWICE)):
        torch.testing.assert_close(plans(WORKED, 1.0, 0.8, 0.0, iterations), wanted)


def test_it_stops_where_v_moves_little_in_the_mean():
    # |dv| = (11/35, 1/25) in the first iteration, 0.177 in the mean; (0.0965, 0.0988), 0.0977, in the second
    for thresh, wanted in ((0.178, ONCE), (0.176, TWICE), (0.0978, TWICE)):
        torch.testing.assert_close(plans(WORKED, 1.0, 0.8, thresh, 100), wanted)
    assert (plans(WORKED, 1.0, 0.8, 0.0976, 100) - TWICE).abs().max() > 1e-3


def by_definition(similarities, eps, gamma, thresh, max_iter):
    """The iterations as the paper writes them, for one image and class, float64: (2, P), and how many there were."""
    q = torch.exp(-(1 - similarities.double()) / eps).T
    v = torch.ones(2, dtype=torch.float64)
    count, moved = 0, math.inf
    while count < max_iter and not moved < thresh:
        count += 1
        u = torch.minimum(torch.ones(len(q), dtype=torch.float64), (1 / len(q)) / (q @ v))
        before, v = v, (gamma / 2) / (q.T @ u)
        moved = (v - before).abs().mean()
    return (u[:, None] * q * v).T, count


@pytest.mark.parametrize(("eps", "gamma"), [(0.1, 0.8), (0.05, 0.5), (0.3, 1.0), (0.1, 1.0)])
def test_every_pair_has_the_plan_it_has_alone(eps, gamma):
    similarities = drawn(2, 3, 4, 7, scale=0.1) + 0.15
    found, counts = plans(similarities, eps, gamma, 1e-3, 100), set()
    for image in range(3):
        for name in range(4):
            wanted, count = by_definition(similarities[:, image, name], eps, gamma, 1e-3, 100)
            counts.add(count)
            torch.testing.assert_close(found[:, image, name].double(), wanted, rtol=1e-4, atol=1e-6)
            alone = plans(similarities[:, image : image + 1, name : name + 1], eps, gamma, 1e-3, 100)
            torch.testing.assert_close(found[:, image, name], alone[:, 0, 0])
    # some stop before others do, in the same batch
    assert len(counts) > 2 or (eps, gamma) == (0.1, 1.0)


def test_more_iterations_than_between_two_looks_and_a_number_that_is_no_multiple():
    similarities = drawn(2, 1, 1, 6, scale=0.1) + 0.1
    for iterations in (9, 10, 11, 23):
        wanted, count = by_definition(similarities[:, 0, 0], 0.05, 1.0, 0.0, iterations)
        assert count == iterations
        torch.testing.assert_close(plans(similarities, 0.05, 1.0, 0.0, iterations)[:, 0, 0].double(), wanted)


def test_columns_have_half_the_mass_and_rows_no_more_than_their_share():
    found = plans(drawn(2, 5, 3, 8, scale=0.1), 0.1, 0.7)
    torch.testing.assert_close(found.sum(-1), torch.full((2, 5, 3), 0.35))
    rows = found.sum(0)
    assert rows.max() <= 1 / 8 + 1e-6 and rows.min() < 1 / 8 - 1e-3


def test_of_one_prompt_twice_all_mass_gives_the_mean_similarity():
    patches = normalize(drawn(3, 6, 5), dim=-1)
    texts = normalize(drawn(4, 5, seed=1), dim=-1).expand(2, 4, 5)
    how = Transport(0.1, thresh=0.0, max_iter=2000)
    found = transported(patches, texts, how, checked=True)
    torch.testing.assert_close(found, (patches @ texts[0].T).mean(1), rtol=0, atol=1e-5)


def test_of_one_prompt_twice_without_entropy_the_most_similar_patches_are_taken():
    # gamma P = 3.5 of five patches: three whole and half of the fourth
    one = torch.tensor([0.1, 0.9, -0.3, 0.5, 0.3])
    found = plans(one.expand(2, 1, 1, 5), 0.01, 0.7, 0.0, 2000)
    wanted = (0.9 + 0.5 + 0.3 + 0.5 * 0.1) / 5
    assert (found * one).sum().item() == pytest.approx(wanted, abs=1e-4)
    torch.testing.assert_close(found.sum(0)[0, 0], torch.tensor([0.5, 1, 0, 1, 1]) / 5, rtol=0, atol=1e-4)


def sinkhorn(similarities, eps, iterations=1000):
    """Balanced optimal transport with uniform marginals, by logarithms in float64; (2, P)."""
    cost = (similarities.double() - 1) / eps
    f, g = torch.zeros(1, cost.shape[1], dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    for _ in range(iterations):
        f = -math.log(cost.shape[1]) - (cost + g).logsumexp(0, keepdim=True)
        g = -math.log(2) - (cost + f).logsumexp(1, keepdim=True)
    return (cost + f + g).exp()


@pytest.mark.parametrize(("eps", "shift"), [(0.1, 0.0), (0.01, 0.0), (0.01, -0.7)])
def test_with_all_mass_it_is_sinkhorn_also_where_exp_would_underflow(eps, shift):
    similarities = drawn(2, 6, scale=0.03) + shift
    found = plans(similarities[:, None, None], eps, 1.0, 0.0, 1000)[:, 0, 0]
    torch.testing.assert_close(found.double(), sinkhorn(similarities, eps), rtol=0, atol=1e-5)
    if shift:
        assert not torch.exp(-(1 - similarities) / eps).any()  # in float32


def test_a_plan_that_is_no_number_is_refused_in_evaluation_and_left_to_the_loss_in_training():
    patches, texts = torch.ones(1, 2, 3), torch.full((2, 2, 3), float("nan"))
    with pytest.raises(Unworkable, match="not a number.*lower the learning rate"):
        transported(patches, texts, Transport(0.1, 0.8), checked=True)
    assert transported(patches, texts, Transport(0.1, 0.8), checked=False).isnan().all()
    run = run_of()
    with pytest.raises(Unworkable):
        evaluate(run, replace(run.initial_state(), weights={n: w / 0 for n, w in run.model.weights.items()}))


def test_side_by_side_under_vmap_as_alone():
    similarities = drawn(3, 2, 4, 2, 5, 6, scale=0.1) + 0.1  # clients, prompts, samples, ...
    options = (False, Transport(0.1, 0.8))
    nested = vmap(vmap(lambda s: Plans.apply(s, *options), in_dims=1), in_dims=0)(similarities)
    for client in range(3):
        for sample in range(4):
            wanted = plans(similarities[client][:, sample], 0.1, 0.8, 1e-3, 100)
            torch.testing.assert_close(nested[client, sample], wanted)


def test_the_gradient_flows_through_the_similarities_alone():
    patches = normalize(drawn(2, 5, 4), dim=-1)
    texts = normalize(drawn(2, 3, 4, seed=1), dim=-1).requires_grad_()
    how = Transport(0.1, 0.8)
    found = transported(patches, texts, how, checked=False)
    similarities = torch.einsum("bpd,nkd->nbkp", patches, texts.detach())
    plan = transport_plans(similarities, how)
    torch.testing.assert_close(found, (plan * similarities).sum((0, 3)))
    (gradient,) = torch.autograd.grad(found[1, 2], texts)
    wanted = torch.zeros(2, 3, 4)
    wanted[:, 2] = plan[:, 1, 2] @ patches[1]
    torch.testing.assert_close(gradient, wanted)


def test_logits_are_of_both_prompts_texts_and_the_patches():
    run, clip = run_of(params={"context_length": 4}), tiny_backbone("clip:embedded")
    weights = {GLOBAL: drawn(4, 64, scale=0.1), LOCAL: drawn(4, 64, seed=1, scale=0.1)}
    outputs = run.model.forward(weights, run.test.read(torch.arange(3)), False)
    tower = prompt_tower(clip, tiny_dataset().classnames, 4)
    patches = ClipPatchEncoder(clip)(tiny_dataset().test.images.read(torch.arange(3))).float()
    texts = [tower.encode(weights[name]) for name in (GLOBAL, LOCAL)]
    for image in range(3):
        for name in range(4):
            similarities = torch.stack([patches[image] @ text[name] for text in texts])
            plan, _ = by_definition(similarities, 0.1, 0.8, 1e-3, 100)
            wanted = clip.logit_scale * (plan * similarities).sum()
            assert outputs.logits[image, name].item() == pytest.approx(wanted.item(), abs=1e-3)
    torch.testing.assert_close(outputs.features, patches.mean(1))


def test_plans_are_float32_under_autocast():
    patches, texts = normalize(drawn(3, 16, 8), dim=-1), normalize(drawn(2, 5, 8, seed=1), dim=-1)
    with torch.autocast("cpu", torch.bfloat16):
        halved = torch.einsum("bpd,nkd->nbkp", patches, texts)
        assert halved.dtype == torch.bfloat16
        found = Plans.apply(halved, False, Transport(0.1, 0.8))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, transport_plans(halved.float(), Transport(0.1, 0.8)), rtol=0, atol=1e-6)


def test_an_evaluation_batch_may_be_taken_in_parts(monkeypatch):
    run = run_of(params={"context_length": 4})
    weights = {GLOBAL: drawn(4, 64, scale=0.1), LOCAL: drawn(4, 64, seed=1, scale=0.1)}
    inputs = run.test.read(torch.arange(7))
    whole = run.model.forward(weights, inputs, False).logits
    monkeypatch.setattr("fedbench_methods.shared.transport.ENTRIES", 2 * 4 * inputs.shape[1])  # of two images
    seen = []
    monkeypatch.setattr(
        "fedbench_methods.shared.transport.transport_plans",
        lambda s, *o: seen.append(s.shape[1]) or transport_plans(s, *o),
    )
    with torch.no_grad():
        assert torch.allclose(run.model.forward(weights, inputs, False).logits, whole, atol=1e-5)
    assert seen == [2, 2, 2, 1]


def test_the_global_prompt_alone_is_sent_and_each_client_keeps_its_own():
    run = run_of(rounds=2)
    assert run.private == {LOCAL} and run.info.round_bytes == 4 * 16 * 64
    initial = run.model.weights
    assert initial[GLOBAL].shape == initial[LOCAL].shape == (16, 64)
    assert not torch.equal(initial[GLOBAL], initial[LOCAL])
    # the draw that promptfl begins at; and another of the same size
    clip = tiny_backbone("clip:embedded")
    assert torch.equal(initial[GLOBAL], initial_context(clip, run.spec.seed, 16, "random"))
    assert initial[LOCAL].std().item() == pytest.approx(0.02, rel=0.1)
    tasks = [task_of(run, k) for k in range(4)]
    assert all(torch.equal(task.received[LOCAL], initial[LOCAL]) for task in tasks)
    state, record = train_round(run, run.initial_state())
    assert record.bytes_up == record.bytes_down == 2 * 4 * 16 * 64
    one, other = record.cohort
    assert torch.equal(state.weights[LOCAL], initial[LOCAL]) and not torch.equal(state.weights[GLOBAL], initial[GLOBAL])
    assert len({state.own[one][LOCAL].sum().item(), state.own[other][LOCAL].sum().item(), initial[LOCAL].sum()}) == 3


def test_the_global_model_has_the_global_prompt_twice_and_own_models_the_clients():
    run = run_of(scenario={"participation": 1.0})
    state = run.initial_state()
    # prompts so far apart that the predictions differ
    state = replace(state, weights={GLOBAL: drawn(16, 64, scale=0.5), LOCAL: drawn(16, 64, seed=9, scale=0.5)})
    state.own.update({k: {LOCAL: drawn(16, 64, seed=1 + k, scale=0.5)} for k in range(3)})
    final = replace(state, round=run.spec.training.rounds)
    metrics, predictions = evaluate(run, final)
    inputs = run.test.read(torch.arange(len(run.test)))

    def labels(local):
        return run.model.forward({GLOBAL: state.weights[GLOBAL], LOCAL: local}, inputs, False).logits.argmax(1)

    assert torch.equal(predictions.labels, labels(state.weights[GLOBAL]))
    for client in range(4):
        own = state.own[client] if client < 3 else state.weights
        assert torch.equal(predictions.by_client[client], labels(own[LOCAL]))
    answers = [predictions.labels, *predictions.by_client.values()]
    assert len({tuple(each.tolist()) for each in answers}) == 5
    right = [(each == run.federation.test.labels).double().mean().item() for each in predictions.by_client.values()]
    assert metrics["personal_mean_global_accuracy"] == pytest.approx(25 * sum(right))
    assert metrics["global_accuracy"] != metrics["personal_mean_global_accuracy"]


def test_recipe_and_both_prompts_learn():
    chosen = tiny_spec("fedotp").training
    assert (chosen.optimizer, chosen.lr, chosen.momentum, chosen.weight_decay) == ("sgd", 1e-3, 0.9, 5e-4)
    run = run_of(scenario={"participation": 1.0}, lr=0.05, finetune_epochs=1)
    state = final_state(run)
    before, after = run.model.weights, state.own[0] | {GLOBAL: state.weights[GLOBAL]}
    task = task_of(run, 0, state=state, round=5)
    inputs = task.inputs.read(torch.arange(len(task.inputs)))
    losses = [cross_entropy(run.model.forward(w, inputs, False).logits, task.labels).item() for w in (before, after)]
    assert losses[1] < losses[0] - 0.05
    assert all((after[name] - before[name]).abs().max() > 1e-3 for name in (GLOBAL, LOCAL))
    # a fine-tuned model is evaluated with both prompts as they are
    assert finetuned_metrics(run, state)["finetuned_mean_client_accuracy"] > evaluate(run, state)[0]["global_accuracy"]


def resnet():
    """A tiny CLIP with a ResNet of random weights, at 64 pixels: four positions."""
    vision = {"image_size": 64, "layers": (1, 1, 1, 1), "width": 8, "head_width": 8}
    text = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = CLIP(8, open_clip.CLIPVisionCfg(**vision), open_clip.CLIPTextCfg(**text))
        for layer in module.visual.modules():
            if isinstance(layer, nn.BatchNorm2d):
                nn.init.uniform_(layer.weight, 0.5, 1.5)
    transform = PixelTransform((0.5,) * 3, (0.5,) * 3, 64)
    module.eval().requires_grad_(False)
    return ClipBackbone("clip:small", module, open_clip.SimpleTokenizer(), transform, 8)


def test_on_a_resnet_it_trains_on_the_positions_of_the_attention_pool(monkeypatch):
    clip = resnet()
    monkeypatch.setattr("fedbench.testing.tiny.tiny_backbone", lambda name: clip)
    run = run_of(params={"context_length": 4}, rounds=1)
    assert run.train.features.shape[1:] == (4, 8)
    assert not torch.equal(final_state(run).weights[GLOBAL], run.model.weights[GLOBAL])
