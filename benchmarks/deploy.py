"""Costs of eager, compiled and deployed networks, in multiples of the eager single network.

    python benchmarks/deploy.py                                        # this machine's CPU, float32
    python benchmarks/deploy.py --device cuda --calls 10               # bfloat16, channels-last
    python benchmarks/deploy.py --device cuda --models resnet50 --batches 512 --compile single packed

All rows of a table run in one process and take turns. Each number is a median over the turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from speed import medians
from torch import nn

import multitudes as mt

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18": (mt.models.resnet18, (3, 32, 32)),
    "resnet50": (mt.models.resnet50, (3, 32, 32)),
    "vit": (mt.models.vit, (3, 32, 32)),
    "mlp": (partial(mt.models.mlp, 64, 10, hidden=(512, 512, 512), norm="batch"), (64,)),
}
METHODS: dict[str, Callable[[nn.Module, torch.Tensor], nn.Module]] = {
    "single": lambda model, x: model,
    "packed": lambda model, x: mt.packed(model, members=4, alpha=2, example=x),
    "deep": lambda model, x: mt.deep_ensemble(model, members=4),
    "batch_ensemble": lambda model, x: mt.batch_ensemble(model, members=4),
    "masksembles": lambda model, x: mt.masksembles(model, members=4, example=x),
}


def trained(net: nn.Module) -> nn.Module:
    """Give batch norms nontrivial statistics, as after training."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    return net.eval()


def ways(net: nn.Module, x: torch.Tensor, name: str, args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Return calls of the eager, compiled and deployed network, by name."""
    cuda = args.device == "cuda"
    net = net.to(args.device)
    start = time.perf_counter()
    deployed = mt.deploy(net, x)
    print(
        f"-- {name}, batch {len(x)}: deployed in {time.perf_counter() - start:.0f} s\n{deployed.summary()}", flush=True
    )
    if cuda:
        net = net.to(torch.bfloat16, memory_format=torch.channels_last) if x.dim() == 4 else net.bfloat16()
    own = x.bfloat16() if cuda else x
    own = own.to(memory_format=torch.channels_last) if cuda and x.dim() == 4 else own

    def eager() -> object:
        with torch.no_grad():
            return net(own)

    found: dict[str, Callable[[], object]] = {f"{name}, eager": eager}
    if name in args.compile:
        eager()  # trace and verify before compiling
        compiled = torch.compile(net)

        def run() -> object:
            with torch.no_grad():
                return compiled(own)

        found[f"{name}, compiled"] = run
    return {**found, f"{name}, deployed": partial(deployed, x)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--compile", nargs="*", default=[], choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64, 512])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1, help="calls timed together; more for a GPU")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    torch.backends.cudnn.benchmark = True
    where = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}; torch {torch.__version__}; medians of {args.repeats} turns of {args.calls}")
    for model in args.models:
        build, shape = MODELS[model]
        for batch in args.batches:
            torch.manual_seed(0)
            x = torch.randn(batch, *shape, device=args.device)
            calls: dict[str, Callable[[], object]] = {}
            for name in args.methods:
                example = torch.zeros(2, *shape)
                calls |= ways(trained(METHODS[name](build(), example)), x, name, args)
            taken = medians(calls, cuda, args.repeats, args.calls)
            single = taken.get("single, eager", float("nan"))
            print(f"\n{f'{model}, batch {batch}':32}{'ms':>10}{'x single, eager':>18}")
            for name, each in taken.items():
                print(f"{name:32}{each:10.3f}{each / single:18.2f}", flush=True)
            torch.compiler.reset()


if __name__ == "__main__":
    main()
