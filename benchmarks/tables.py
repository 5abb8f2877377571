"""Costs of a training step of `mt.tabm` and of its authors' package, with equal settings, in turns.

    python benchmarks/tables.py [--threads 1 2] [--turns 15]
    python benchmarks/tables.py --device cuda [--precision bfloat16]

Both have 32 members, piecewise-linear embeddings of width 16 with 48 bins, two hidden layers of 512, dropout 0.1, and
batches of 256 rows of 9 numbers. A step is the forward pass, the mean of the members' squared errors, the backward
pass, gradient clipping and AdamW. Both run in plain PyTorch, and `mt.tabm` also in `mt.fit`. The script needs the
packages `tabm` and `rtdl_num_embeddings`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import rtdl_num_embeddings
import tabm
import torch
from torch import Tensor, nn

import multitudes as mt

FEATURES, BINS, WIDTH = 9, 48, 16
LR, DECAY, CLIP = 2e-3, 3e-4, 1.0
STEPS = 8
"""Steps per turn."""


def edges() -> list[list[float]]:
    """Return bin edges at the quantiles of a normal distribution."""
    levels = torch.linspace(0.001, 0.999, BINS + 1, dtype=torch.float64)
    return [torch.special.ndtri(levels).tolist()] * FEATURES


def theirs(members: int, hidden: int) -> nn.Module:
    """Build the package's network: `[B, F] -> [B, k, 1]`."""
    bins = [torch.tensor(each) for each in edges()]
    numbers = rtdl_num_embeddings.PiecewiseLinearEmbeddings(bins, WIDTH, activation=False, version="B")
    settings = {"k": members, "n_blocks": 2, "d_block": hidden, "dropout": 0.1}
    return tabm.TabM.make(n_num_features=FEATURES, d_out=1, num_embeddings=numbers, **settings)


def ours(members: int, hidden: int) -> mt.Multitude:
    """Build the library's network: `[B, F] -> [k, B, 1]`."""
    return mt.tabm(lambda: mt.models.tabular(FEATURES, 1, edges(), hidden=(hidden, hidden)), members, task="regression")


def turn(net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    """Return a turn: `STEPS` steps in plain PyTorch."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=DECAY)
    net.train()

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss(*batch).backward()
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()

    return steps


def fitted(net: mt.Multitude, batch: tuple[Tensor, Tensor], precision: str) -> Callable[[], None]:
    """Return a turn: `STEPS` steps by `fit`."""

    def steps() -> None:
        mt.fit(
            net, [batch] * STEPS, 1, optimizer="adamw", lr=LR, weight_decay=DECAY, schedule="constant", clip=CLIP,
            precision=precision, progress=False,
        )  # fmt: skip

    return steps


def cases(members: int, hidden: int, rows: int, device: torch.device, precision: str) -> dict[str, Callable[[], None]]:
    """Return a turn of each row of the table, by row name."""
    x, y = torch.randn(rows, FEATURES, device=device), torch.randn(rows, 1, device=device)
    low = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
    package, net, other = theirs(members, hidden).to(device), ours(members, hidden).to(device), ours(members, hidden)

    def their_loss(x: Tensor, y: Tensor) -> Tensor:
        with low:
            own = package(x)
        return (own.float() - y[:, None]).square().mean()

    def our_loss(x: Tensor, y: Tensor) -> Tensor:
        with low:
            return net.loss(x, y)

    return {
        "tabm package": turn(package, their_loss, (x, y)),
        "mt.tabm": turn(net, our_loss, (x, y)),
        "mt.tabm, by fit": fitted(other.to(device), (x, y), precision),
    }


def measured(turns: int, rows: dict[str, Callable[[], None]], cuda: bool) -> dict[str, list[float]]:
    """Return milliseconds per step of each row in each turn."""
    found: dict[str, list[float]] = {name: [] for name in rows}
    for count in range(turns + 2):
        for name, steps in rows.items():
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            steps()
            if cuda:
                torch.cuda.synchronize()
            if count >= 2:  # the first two turns warm up
                found[name].append(1000 * (time.perf_counter() - start) / STEPS)
    return found


def table(found: dict[str, list[float]]) -> None:
    first = next(iter(found.values()))
    for name, times in found.items():
        ratio = statistics.median(a / b for a, b in zip(times, first, strict=True))
        print(f"{name:24s}{statistics.median(times):14.2f}{ratio:12.2f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--turns", type=int, default=15)
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    for threads in given.threads:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        rows = cases(given.members, given.hidden, given.batch, device, given.precision)
        where = f"{threads} threads" if device.type == "cpu" else torch.cuda.get_device_name()
        size = f"{given.members} members, 2 x {given.hidden}, batch {given.batch}"
        print(f"\n{where}, {size}, {given.precision}\n{'':24s}{'ms a step':>14s}{'x package':>12s}")
        table(measured(given.turns, rows, device.type == "cuda"))


if __name__ == "__main__":
    main()
