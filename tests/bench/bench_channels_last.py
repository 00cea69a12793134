"""How much faster a CNN trains with channels-last kernels and images, and then in bfloat16: paired, interleaved steps
on one thread.

    python tests/bench/bench_channels_last.py [--backbone resnet8?width=1] [--pairs 15]

Prints the ratios (contiguous / channels-last, bfloat16 / float32) of every pair's time as min, median and max.
"""

import argparse
import statistics
import time
from contextlib import nullcontext

import torch

from fedbench.models import load_backbone
from fedbench.models.cnn.backbone import cnn_model


def step_seconds(weights, buffers, forward, images, labels, half=False, steps=10):
    parameters = {name: value.clone().requires_grad_() for name, value in weights.items()}
    optimiser = torch.optim.SGD(parameters.values(), 0.01)
    started = time.perf_counter()
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            loss = torch.nn.functional.cross_entropy(forward({**parameters, **buffers}, images, True).logits, labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return (time.perf_counter() - started) / steps


def told(name, ratios):
    ratios = sorted(ratios[1:])  # the first pair warms up
    print(f"{name} {ratios[0]:.2f} {statistics.median(ratios):.2f} {ratios[-1]:.2f}")


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backbone", default="resnet8?width=1")
    arguments.add_argument("--pairs", type=int, default=15)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone(chosen.backbone, data_dir=None, seed=0)
    weights, buffers, forward = cnn_model(backbone, 10, 0)
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    layout = torch.channels_last
    turned = {k: v.contiguous(memory_format=layout) if v.ndim == 4 else v for k, v in weights.items()}
    model, turned_images = (turned, buffers, forward), images.contiguous(memory_format=layout)
    layouts, precisions = [], []
    for _ in range(chosen.pairs + 1):
        plain = step_seconds(weights, buffers, forward, images, labels)
        last = step_seconds(*model, turned_images, labels)
        half = step_seconds(*model, turned_images, labels, half=True)
        layouts.append(plain / last)
        precisions.append(half / last)
    told(f"{chosen.backbone}: contiguous / channels-last", layouts)
    told(f"{chosen.backbone}: bfloat16 / float32", precisions)


if __name__ == "__main__":
    main()
