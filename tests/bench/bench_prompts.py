"""How much faster texts packed by their common beginning are than whole texts: paired, interleaved, on one thread.

    python tests/bench/bench_prompts.py [--pairs 40] [--clients 8] [--tower ViT-B-32 --classes 100 --length 16]

One step is `PromptTower.encode` of a random context, forward and backward. Prints ratios of every pair's times as min,
median and max: whole / packed for one client, and clients one by one / stacked by vmap, both packed.
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import get_args

import open_clip
import torch

from fedbench.models import load_backbone
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.prompts.context import Position, prompt_tower, random_context

NAMES = ("airplane", "bird", "boat", "car", "cat", "chair", "dog", "flower", "house", "tree")
KINDS = ("red", "old", "tall", "wet", "small", "dark", "open", "flat", "loud", "plain")


def seconds(encode, contexts, pull):
    started = time.process_time()  # of the processor, so that a busy machine does not count
    sum((encode(context) * pull).sum() for context in contexts).backward()
    return time.process_time() - started


def ratios(slow, fast, pairs):
    slow(), fast()  # warms up
    both = [(slow(), fast()) for _ in range(pairs)]
    found = sorted(one / other for one, other in both)
    times = [statistics.median(each) * 1000 for each in zip(*both, strict=True)]
    return f"{found[0]:.2f} {statistics.median(found):.2f} {found[-1]:.2f}   ({times[0]:.1f} ms / {times[1]:.1f} ms)"


def backbone_of(tower):
    if tower == "embedded":
        return load_backbone("clip:embedded", data_dir=None, seed=0)
    module = open_clip.create_model(tower).eval().requires_grad_(False)
    return ClipBackbone(tower, module, open_clip.get_tokenizer(tower), None, module.text_projection.shape[1])


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--pairs", type=int, default=40)
    arguments.add_argument("--clients", type=int, default=8, help="0: don't stack")
    arguments.add_argument("--tower", default="embedded", help="or an architecture of open_clip, with random weights")
    arguments.add_argument("--classes", type=int, default=10, help="up to 100")
    arguments.add_argument("--length", type=int, default=16, help="M")
    arguments.add_argument("--position", default="end", choices=get_args(Position))
    arguments.add_argument("--per-class", action="store_true", help="a context of each class's own")
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    backbone = backbone_of(chosen.tower)
    names = [*NAMES, *(f"{kind} {name}" for kind in KINDS for name in NAMES)][: chosen.classes]
    packed = prompt_tower(backbone, names, chosen.length, chosen.position)
    whole = replace(packed, packs=False)
    shape = (*((chosen.classes,) if chosen.per_class else ()), chosen.length, packed.width)
    contexts = [random_context(seed, "bench", *shape).requires_grad_() for seed in range(max(1, chosen.clients))]
    pull = torch.randn(chosen.classes, backbone.embed_dim)
    one = contexts[:1]
    found = ratios(lambda: seconds(whole.encode, one, pull), lambda: seconds(packed.encode, one, pull), chosen.pairs)
    print(f"whole / packed: {found}")
    if chosen.clients:
        stacked = [torch.stack([context.detach() for context in contexts]).requires_grad_()]
        alone = lambda: seconds(packed.encode, contexts, pull)  # noqa: E731
        together = lambda: seconds(torch.func.vmap(packed.encode), stacked, pull)  # noqa: E731
        print(f"{chosen.clients} clients one by one / stacked: {ratios(alone, together, chosen.pairs)}")


if __name__ == "__main__":
    main()
