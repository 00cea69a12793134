"""What a pass of the image tower with learnable tokens costs, written out against open_clip's own blocks: paired, one
thread.

    python tests/bench/bench_image_tower.py [--pairs 40] [--tower ViT-B-16 --batch 4] [--tokens 4] [--device cuda]

One step is 32 images with tokens behind their patches, forward and backward to the tokens. Prints the ratios of every
pair's processor times as min, median and max: open_clip's blocks / written out.
"""

import argparse
import statistics
import time

import open_clip
import torch

from fedbench.models import load_backbone
from fedbench.models.clip.image_towers import image_tower
from fedbench.models.prompts.image_tokens import encode_with_tokens


def by_open_clip(tower, images, tokens):
    visual = tower.module.visual
    patches = visual.conv1(images).flatten(2).permute(0, 2, 1)
    start = visual.class_embedding.expand(len(images), 1, -1)
    x = torch.cat([start, patches], dim=1) + visual.positional_embedding
    x = torch.cat([x, tokens.expand(len(images), *tokens.shape)], dim=1)
    pooled, _ = visual._pool(visual.transformer(visual.ln_pre(x)))
    return pooled @ visual.proj


def seconds(encode, tower, images, tokens):
    tokens = tokens.clone().requires_grad_()
    started = time.process_time()
    encode(tower, images, tokens).sum().backward()
    if images.is_cuda:
        torch.cuda.synchronize()
    return time.process_time() - started


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--pairs", type=int, default=40)
    arguments.add_argument("--tower", default="embedded", help="or an architecture of open_clip, with random weights")
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--tokens", type=int, default=4)
    arguments.add_argument("--device", default="cpu")
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    if chosen.tower == "embedded":
        module = load_backbone("clip:embedded", data_dir=None, seed=0).module
    else:
        module = open_clip.create_model(chosen.tower).eval().requires_grad_(False)
    tower = image_tower(module.to(chosen.device))
    images = torch.randn(chosen.batch, 3, *module.visual.image_size, device=chosen.device)
    tokens = torch.randn(chosen.tokens, tower.width, device=chosen.device)
    ways = (by_open_clip, encode_with_tokens)
    for way in ways:
        seconds(way, tower, images, tokens)  # warms up
    pairs = [[seconds(way, tower, images, tokens) for way in ways] for _ in range(chosen.pairs)]
    found = sorted(slow / fast for slow, fast in pairs)
    times = [1000 * statistics.median(each) for each in zip(*pairs, strict=True)]
    print(f"open_clip / written out: {found[0]:.2f} {statistics.median(found):.2f} {found[-1]:.2f}")
    print(f"({times[0]:.1f} ms / {times[1]:.1f} ms)")


if __name__ == "__main__":
    main()
