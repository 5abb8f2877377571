"""Speed of two versions of the library: times of each case, and their ratio.

    git worktree add /tmp/before REVISION
    python benchmarks/sources.py /tmp/before/src src
    python benchmarks/sources.py /tmp/before/src src --only resnet18 train

Each version runs in its own process with one thread. The two take turns in each case. Numbers are medians of process
time, on which other work has little influence.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any


class Version:
    """A process that imports one version and runs cases on request."""

    def __init__(self, sources: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            env={**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the version stopped at {line!r}")
        return answer.strip()


def networks() -> dict[str, tuple[Callable[[], Any], tuple[int, ...]]]:
    """Return functions that build the single networks, with the shapes of their inputs."""
    import torch
    from torch import nn

    import multitudes as mt

    def perceptron() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    def dropout() -> nn.Module:
        layers = (nn.Linear(16, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.2))
        return nn.Sequential(*layers, nn.Linear(128, 3))

    def transformer() -> nn.Module:
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        return nn.Sequential(
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.LazyLinear(5)
        )

    def built(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> nn.Module:
        torch.manual_seed(0)
        network = build()
        network(torch.zeros(2, *shape[1:]))
        return network

    shapes: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "perceptron": (perceptron, (64, 16)),
        "dropout": (dropout, (64, 16)),
        "small_cnn": (lambda: mt.models.small_cnn(channels=1, size=8), (64, 1, 8, 8)),
        "medium_cnn": (mt.models.medium_cnn, (16, 3, 32, 32)),
        "transformer": (transformer, (16, 12, 64)),
        "resnet20": (mt.models.resnet20, (16, 3, 32, 32)),
        "resnet18": (mt.models.resnet18, (16, 3, 32, 32)),
    }
    return {name: (partial(built, build, shape), shape) for name, (build, shape) in shapes.items()}


def methods() -> dict[str, Callable[[Any], Any]]:
    import multitudes as mt

    return {
        "deep": partial(mt.deep_ensemble, members=4),
        "deep16": partial(mt.deep_ensemble, members=16),
        "packed": partial(mt.packed, members=4, alpha=2),
        "batch_ensemble": partial(mt.batch_ensemble, members=4),
        "masksembles": partial(mt.masksembles, members=4),
        "mimo": partial(mt.mimo, members=4),
        "mc_dropout": mt.mc_dropout,
        "patched": mt.patched,
        "lora": partial(mt.lora, members=4),
    }


def case(network: str, method: str, mode: str) -> Callable[[], object]:
    """Return a call of a method's multitude in evaluation, or one of its training steps."""
    import torch

    build, shape = networks()[network]
    net = methods()[method](build())
    x = torch.randn(*shape)
    if mode == "eval":
        net.eval()

        def evaluate() -> object:
            with torch.no_grad():
                return net(x)

        return evaluate
    y = torch.randint(2, (shape[0],))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def train() -> object:
        optimizer.zero_grad()
        net.loss(x, y, task="classification").backward()
        return optimizer.step()

    net.train()
    return train


def work() -> None:
    """Read lines from stdin: prepare the case that a line names, or time the number of calls that it gives."""
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    call: Callable[[], object] = int
    for line in sys.stdin:
        words = line.split()
        if len(words) == 3:
            try:
                call = case(*words)
                for _ in range(3):
                    call()
                print("ready", flush=True)
            except Exception as error:  # the method refuses this network
                print(type(error).__name__, str(error).replace("\n", " ")[:80], flush=True)
            continue
        start = time.process_time()
        for _ in range(int(words[0])):
            call()
        print((time.process_time() - start) / int(words[0]), flush=True)


def measured(versions: list[Version], words: str, turns: int) -> list[float] | str:
    """Return median seconds of a case with each version, or the error."""
    answers = [version.ask(words) for version in versions]
    if answers != ["ready"] * len(versions):
        return ", ".join(answers)
    slowest = max(float(version.ask("2")) for version in versions)
    calls = max(1, round(0.05 / max(slowest, 1e-6)))
    times: list[list[float]] = [[] for _ in versions]
    for _ in range(turns):
        for version, taken in zip(versions, times, strict=True):
            taken.append(float(version.ask(str(calls))))
    return list(map(statistics.median, times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--only", nargs="+", default=[], help="words that a case's name has all of")
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    versions = [Version(args.before), Version(args.after)]
    print("| case | before, ms | after, ms | after / before |\n|---|---|---|---|")
    cases = [f"{n} {method} {mode}" for n in networks() for method in methods() for mode in ("eval", "train")]
    for words in cases:
        if not set(args.only) <= set(words.split()):
            continue
        found = measured(versions, words, args.turns)
        if isinstance(found, str):
            print(f"| {words} | {found} |", flush=True)
            continue
        before, after = (1000 * seconds for seconds in found)
        print(f"| {words} | {before:.3f} | {after:.3f} | {after / before:.2f} |", flush=True)


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--worker"] else main()
