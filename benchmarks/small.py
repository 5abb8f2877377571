"""Costs of small members on a CPU: each runner in evaluation, or in training steps, in multiples of the loop's time.

    python benchmarks/small.py
    python benchmarks/small.py --train
    python benchmarks/small.py --networks "demo CNN, 4" "MLP 64, 4"

All runners of a row run in one process and take turns. Each number is a median over the turns. With one thread, the
default, times are process times, on which other work has little influence. `M operations` are one member's
multiply-adds for the batch, in millions, and `a layer` their mean per layer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.networks.trace import recording

RUNNERS = ("packed", "vmapped", "auto")

IMAGE, DIGIT, ROW = (3, 32, 32), (1, 8, 8), (16,)


def perceptron(width: int, hidden: int = 2) -> nn.Module:
    """Build a perceptron for rows of 16 numbers."""
    widths = [16] + [width] * hidden
    layers = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def pointwise(width: int = 16, depth: int = 8) -> nn.Module:
    """Build a network of 1x1 convolutions, which are slow packed."""
    blocks = [
        nn.Sequential(nn.Conv2d(width if i else 3, width, 1), nn.BatchNorm2d(width), nn.ReLU()) for i in range(depth)
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def alike(network: nn.Module, members: int = 4) -> mt.Members:
    return mt.fuse([network] * members)


NETWORKS: dict[str, tuple[Callable[[], mt.Members], tuple[int, ...], tuple[int, ...]]] = {
    "demo CNN, 4": (lambda: alike(mt.models.small_cnn(channels=1, size=8)), DIGIT, (1, 2, 8, 32, 128, 512)),
    "demo CNN, packed-(2,4)": (
        lambda: mt.packed(mt.models.small_cnn(channels=1, size=8), members=4, alpha=2), DIGIT, (1, 2, 8, 32, 128, 512)
    ),
    "small CNN, 4": (lambda: alike(mt.models.small_cnn()), IMAGE, (1, 2, 8, 16, 32)),
    "small CNN, 16": (lambda: alike(mt.models.small_cnn(), 16), IMAGE, (1, 2, 8)),
    "medium CNN, 4": (lambda: alike(mt.models.medium_cnn()), IMAGE, (1, 2, 8)),
    "1x1 convolutions, 4": (lambda: alike(pointwise()), IMAGE, (1, 2, 8)),
    "LeNet-5, 4": (lambda: alike(mt.models.lenet5()), (1, 28, 28), (1, 8, 32, 128)),
    "MLP 16, 4": (lambda: alike(perceptron(16)), ROW, (1, 8, 64, 512)),
    "MLP 64, 4": (lambda: alike(perceptron(64)), ROW, (1, 8, 64, 512)),
    "MLP 64, 16": (lambda: alike(perceptron(64), 16), ROW, (1, 8, 64, 512)),
    "MLP 256, 4": (lambda: alike(perceptron(256)), ROW, (1, 8, 64, 128, 512)),
    "MLP 256 of 8 layers, 4": (lambda: alike(perceptron(256, 7)), ROW, (1, 8, 64, 512)),
    "MLP 1024, 4": (lambda: alike(perceptron(1024)), ROW, (1, 8, 64)),
    "tabular, 4": (lambda: alike(mt.models.tabular(16, 3)), ROW, (1, 8, 64, 512)),
    "ResNet-20, 4": (lambda: alike(mt.models.resnet20()), IMAGE, (1, 2, 8)),
    "ResNet-18, packed-(2,4)": (
        lambda: mt.packed(mt.models.resnet18(), members=4, alpha=2), IMAGE, (1, 2, 4, 8, 32)
    ),
    "ResNet-18, 4": (lambda: alike(mt.models.resnet18()), IMAGE, (1, 2, 8)),
    "ViT of 2 blocks of 48, 4": (lambda: alike(mt.models.vit(width=48, depth=2, heads=3)), IMAGE, (1, 2, 8, 32)),
    "ViT-tiny, packed-(2,4)": (lambda: mt.packed(mt.models.vit_tiny(), members=4, alpha=2), IMAGE, (1, 2, 8)),
    "ViT-tiny, 4": (lambda: alike(mt.models.vit_tiny()), IMAGE, (1, 2, 8)),
}  # fmt: skip


def operations(net: mt.Members, x: Tensor) -> float:
    """Return the multiply-adds of one member, in millions."""
    net.runner = "loop"
    with torch.no_grad(), recording(net.network, (), work=True) as trace:
        net(x)
    return trace.multiply_adds / 1e6 / net.members


def call(net: mt.Members, runner: str, x: Tensor) -> None:
    net.runner = runner
    if net.training:
        net.zero_grad()
        net(x).square().mean().backward()
    else:
        with torch.no_grad():
            net(x)


def measure(net: mt.Members, x: Tensor, seconds: float) -> dict[str, float]:
    """Return median milliseconds per call for each runner that can run the network."""
    functions: dict[str, Callable[[], object]] = {}
    for runner in ("loop", *RUNNERS):
        try:
            call(net, runner, x)
        except ValueError:
            continue
        functions[runner] = partial(call, net, runner, x)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while len(taken["loop"]) < 9 or time.perf_counter() < end:
        for name, function in functions.items():
            function()  # warm up memory and caches after the previous runner
            start = clock()
            for _ in range(3):
                function()
            taken[name].append((clock() - start) * 1000 / 3)
    return {name: statistics.median(values) for name, values in taken.items()}


def print_rows(name: str, seconds: float, training: bool) -> None:
    make, shape, batches = NETWORKS[name]
    torch.manual_seed(0)
    net = make().train(training)
    layers = sum(parameter.dim() > 1 for parameter in net.member(0).parameters())
    for batch in batches:
        if training and batch == 1:
            continue  # batch norm needs two rows
        x = torch.randn(batch, *shape)
        work = operations(net, x)
        taken = measure(net, x, seconds)
        ratios = "".join(f"{taken[r] / taken['loop']:9.2f}" if r in taken else f"{'-':>9}" for r in RUNNERS)
        print(f"{name:26}{batch:6}{work:14.3f}{work / layers:10.3f}{taken['loop']:10.3f}{ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="about so long for each row")
    parser.add_argument("--train", action="store_true", help="forward and backward, in training mode")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"CPU, {args.threads} threads; torch {torch.__version__}")
    print(
        f"{'':26}{'batch':>6}{'M operations':>14}{'a layer':>10}{'loop ms':>10}" + "".join(f"{r:>9}" for r in RUNNERS)
    )
    for name in args.networks:
        print_rows(name, args.seconds, args.train)


if __name__ == "__main__":
    main()
