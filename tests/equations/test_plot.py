"""PLOT: Chen et al. 2023."""

import pytest
import torch
from torch.nn.functional import normalize

from fedbench.testing import tiny_backbone, tiny_dataset
from fedbench_methods.plot import PROMPTS
from fedbench_methods.shared.patches import ClipPatchEncoder
from fedbench_methods.shared.transport import Transport, transport_plans, transported
from tests.equations.kit import coop_texts, drawn, runs
from tests.equations.test_fedotp import sinkhorn

plot_run = runs("plot", context_length=4)


def test_the_first_iterations_by_hand():
    # two patches and two prompts, Q = [[1/2, 1/4], [1/4, 1/4]] by patch and prompt, with eps = 1. From v = (1, 1):
    # u = (1/2) / (3/4, 1/2) = (2/3, 1), Q^T u = (7/12, 5/12), v = (1/2) / Q^T u = (6/7, 6/5)
    similarities = 1 + torch.tensor([[[0.5, 0.25]], [[0.25, 0.25]]]).log()
    once = torch.tensor([[[2 / 7, 3 / 14]], [[1 / 5, 3 / 10]]])
    torch.testing.assert_close(transport_plans(similarities, Transport(1.0, 1.0, 0.0, 1, balanced=True)), once)
    # Q v = (51/70, 18/35): u = (1/2) / of it = (35/51, 35/36), the second above what a relaxed row would be held at
    found = transport_plans(similarities, Transport(1.0, 1.0, 0.0, 2, balanced=True))
    u = torch.tensor([35 / 51, 35 / 36])
    v = 0.5 / torch.tensor([0.5 * u[0] + 0.25 * u[1], 0.25 * u[0] + 0.25 * u[1]])
    wanted = torch.tensor([[0.5, 0.25], [0.25, 0.25]])[:, None] * u * v[:, None, None]
    torch.testing.assert_close(found, wanted)


def test_rows_are_not_held_below_their_share():
    # small similarities make u large; with three prompts and mass 1 every patch gives 1/P
    similarities = drawn(3, 2, 4, 6, scale=0.1) - 0.3
    found = transport_plans(similarities, Transport(0.1, 1.0, 0.0, 2000, balanced=True))
    torch.testing.assert_close(found.sum(0), torch.full((2, 4, 6), 1 / 6), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.sum(-1), torch.full((3, 2, 4), 1 / 3), rtol=0, atol=1e-5)
    # relaxed, all rows are held at u = 1 in the first iteration, since Q is far below 1/P: another plan
    first, relaxed = (
        transport_plans(similarities, Transport(0.1, 1.0, 0.0, 1, balanced=balanced)) for balanced in (True, False)
    )
    kernel = ((similarities.double() - 1) / 0.1).exp()
    weighted = kernel / kernel.sum(0)
    torch.testing.assert_close(first.double(), weighted / weighted.sum(-1, keepdim=True) / 3, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(relaxed.double(), kernel / kernel.sum(-1, keepdim=True) / 3, rtol=1e-4, atol=1e-6)


def test_it_is_sinkhorn():
    similarities = drawn(2, 6, scale=0.03)
    found = transport_plans(similarities[:, None, None], Transport(0.1, 1.0, 0.0, 1000, balanced=True))[:, 0, 0]
    torch.testing.assert_close(found.double(), sinkhorn(similarities, 0.1), rtol=0, atol=1e-5)


def test_of_one_prompt_it_is_the_mean_cosine():
    patches = normalize(drawn(3, 6, 5), dim=-1)
    texts = normalize(drawn(1, 4, 5, seed=1), dim=-1)
    found = transported(patches, texts, Transport(0.1, 1.0, 0.0, 10, balanced=True), checked=True)
    torch.testing.assert_close(found, (patches @ texts[0].T).mean(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_logits_are_of_all_prompts_texts_and_the_patches(count):
    run, clip = plot_run(params={"prompts": count, "thresh": 0.0, "max_iter": 500}), tiny_backbone("clip:embedded")
    prompts = drawn(count, 4, 64, scale=0.5)
    outputs = run.model.forward({PROMPTS: prompts}, run.test.read(torch.arange(3)), False)
    patches = ClipPatchEncoder(clip)(tiny_dataset().test.images.read(torch.arange(3))).float()
    texts = torch.stack([coop_texts(prompt, tiny_dataset().classnames) for prompt in prompts])
    for image in range(3):
        for name in range(4):
            cosines = texts[:, name] @ patches[image].T
            kernel = ((cosines.double() - 1) / 0.1).exp()
            u, v = torch.ones(len(patches[image])).double(), torch.ones(count).double()
            for _ in range(500):
                u = 1 / len(u) / (kernel.T @ v)
                v = 1 / count / (kernel @ u)
            wanted = clip.logit_scale * (v[:, None] * kernel * u * cosines).sum()
            assert outputs.logits[image, name].item() == pytest.approx(wanted.item(), abs=2e-3)
