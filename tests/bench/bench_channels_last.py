"""How much faster resnet8 trains with channels-last kernels and images: paired, interleaved steps on one thread.

    python tests/bench/bench_channels_last.py [--width 1] [--pairs 15]

Prints the ratio (contiguous / channels-last) of every pair's time as min, median and max.
"""

import argparse
import statistics
import time

import torch

from fedbench.models import load_backbone
from fedbench.models.cnn import cnn_model


def step_seconds(weights, buffers, forward, images, labels, steps=10):
    parameters = {name: value.clone().requires_grad_() for name, value in weights.items()}
    optimiser = torch.optim.SGD(parameters.values(), 0.01)
    started = time.perf_counter()
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(forward({**parameters, **buffers}, images, True).logits, labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return (time.perf_counter() - started) / steps


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--width", type=int, default=1)
    arguments.add_argument("--pairs", type=int, default=15)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone(f"resnet8?width={chosen.width}", data_dir=None, seed=0)
    weights, buffers, forward = cnn_model(backbone, 10, 0)
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    layout = torch.channels_last
    turned = {k: v.contiguous(memory_format=layout) if v.ndim == 4 else v for k, v in weights.items()}
    ratios = []
    for _ in range(chosen.pairs + 1):
        plain = step_seconds(weights, buffers, forward, images, labels)
        ratios.append(plain / step_seconds(turned, buffers, forward, images.contiguous(memory_format=layout), labels))
    ratios = sorted(ratios[1:])  # the first pair warms up
    low, middle, high = ratios[0], statistics.median(ratios), ratios[-1]
    print(f"width {chosen.width}: contiguous / channels-last {low:.2f} {middle:.2f} {high:.2f}")


if __name__ == "__main__":
    main()
