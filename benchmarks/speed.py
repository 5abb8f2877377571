"""Costs of an ensemble: inference and training time of each runner, in multiples of the single network's.

    python benchmarks/speed.py                                   # this machine's CPU, batch 32
    python benchmarks/speed.py --device cuda --batch 512         # bf16 autocast, channels-last
    python benchmarks/speed.py --device cuda --batch 512 --compile

All rows of a table run in one process and take turns. Each number is a median over the turns, so that changes in the
machine's speed affect all rows equally.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import multitudes as mt
from multitudes.ensemble.packing import pointwise
from multitudes.ensemble.shared import SharedMembers

METHODS: dict[str, Callable[[nn.Module], mt.Multitude]] = {
    "deep ensemble, 4": partial(mt.deep_ensemble, members=4),
    "packed-(2,4,1)": partial(mt.packed, members=4, alpha=2),
    "packed-(2,4,2)": partial(
        mt.packed, members=4, alpha=2, gamma=2, layers=lambda name, _: not name.endswith("conv1")
    ),
    "BatchEnsemble, 4": partial(mt.batch_ensemble, members=4),
    "Masksembles, 4": partial(mt.masksembles, members=4),
    "BatchEnsemble, 4, own rows": partial(mt.batch_ensemble, members=4, rows="own"),
    "Masksembles, 4, own rows": partial(mt.masksembles, members=4, rows="own"),
    "MIMO, 4": partial(mt.mimo, members=4),
}


def networks(model: nn.Module, methods: list[str], runners: list[str]) -> dict[str, nn.Module]:
    """Return the networks of the table, by row name: the single network, and each method with each runner."""
    rows: dict[str, nn.Module] = {"single": model}
    for name in methods:
        net = METHODS[name](model)
        if not isinstance(net, mt.Members):
            rows[name] = net
            continue
        for runner in runners:
            rows[f"{name}: {runner}"] = net = METHODS[name](model)
            net.runner = runner
    return rows


class Case:
    """A row of the table: a network for inference and training steps."""

    def __init__(self, net: nn.Module, args: argparse.Namespace, x: torch.Tensor, y: torch.Tensor) -> None:
        self.net = net.to(args.device)
        if args.device == "cuda":
            self.net.to(memory_format=torch.channels_last)
        self.run = torch.compile(self.net) if args.compile else self.net
        self.optimizer = torch.optim.SGD(self.net.parameters(), 1e-4, momentum=0.9)
        self.x, self.y = x, y
        self.cuda = args.device == "cuda"

    def autocast(self) -> torch.autocast | nullcontext[None]:
        return torch.autocast("cuda", torch.bfloat16) if self.cuda else nullcontext()

    def inference(self) -> None:
        self.net.eval()
        with torch.no_grad(), self.autocast():
            self.run(self.x)

    def training(self) -> None:
        self.net.train()
        with self.autocast():
            self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self) -> torch.Tensor:
        if isinstance(self.net, SharedMembers) and self.net.rows == "own":
            return self.net.loss(self.x, self.y, task="classification")
        predictions = self.run(self.x)
        members = predictions if isinstance(self.net, mt.Multitude) else predictions.unsqueeze(0)
        return torch.stack([F.cross_entropy(prediction, self.y) for prediction in members]).sum()


def medians(functions: dict[str, Callable[[], object]], cuda: bool, repeats: int, calls: int = 1) -> dict[str, float]:
    """Return median milliseconds per call of each function. Functions take turns."""

    def run(function: Callable[[], object], times: int) -> None:
        for _ in range(times):
            function()
        if cuda:
            torch.cuda.synchronize()

    taken: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            run(function, 1)  # warm up memory and caches after the previous network
            start = time.perf_counter()
            run(function, calls)
            if turn:  # the first turn warms up and compiles
                taken[name].append((time.perf_counter() - start) * 1000 / calls)
    return {name: statistics.median(values) for name, values in taken.items()}


def measure(cases: dict[str, Case], kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Return median milliseconds of each case's inference or training."""
    functions = {name: getattr(case, kind) for name, case in cases.items()}
    return medians(functions, args.device == "cuda", args.repeats, args.calls)


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of a benchmark of networks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1, help="calls timed together; more for a GPU")
    parser.add_argument("--compile", action="store_true")
    return parser


def batch_for(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels for all networks, and print the device and settings."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}; torch {torch.__version__}; batch {args.batch}; medians of {args.repeats}; {args.compile=}")
    x = torch.randn(args.batch, 3, 32, 32, device=args.device)
    if args.device == "cuda":
        x = x.to(memory_format=torch.channels_last)
    return x, torch.randint(10, (args.batch,), device=args.device)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--runners", nargs="+", default=["auto", "loop", "packed", "vmapped"])
    parser.add_argument("--kinds", nargs="+", default=["inference", "training"])
    parser.add_argument("--dense-below", type=float, default=pointwise.DENSE_BELOW, help="see packing/pointwise.py")
    args = parser.parse_args()
    pointwise.DENSE_BELOW = args.dense_below

    x, y = batch_for(args)
    for model in args.models:
        rows = networks(getattr(mt.models, model)(), args.methods, args.runners)
        cases = {name: Case(net, args, x, y) for name, net in rows.items()}
        results = {kind: measure(cases, kind, args) for kind in args.kinds}
        print(f"\n{model:32}" + "".join(f"{kind + ' ms':>16}{'x single':>10}" for kind in args.kinds))
        for name in cases:
            columns = (f"{r[name]:16.1f}{r[name] / r['single']:10.2f}" for r in results.values())
            print(f"{name:32}" + "".join(columns), flush=True)


if __name__ == "__main__":
    main()
