"""Number of the package's functions and files in one warm call: a measure of how hard it is to follow.

    python -m benchmarks.hops  # from the root of the repository

Evaluation is `net(x)` without gradients, a training step `net.loss(x, y).backward()`. Each runs twice before it is
counted, so that the counted call does not trace, verify or fill caches. Lambdas and comprehensions belong to the
function around them, and only add to the depth.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import multitudes as mt

PACKAGE = str(Path(mt.__file__).parent)


class Limit(NamedTuple):
    """Maximum number of functions and files in one call."""

    functions: int
    files: int


TRAINING = Limit(50, 14)
EVALUATION = {
    "packed": Limit(20, 8),
    "deep_ensemble": Limit(20, 8),
    "batch_ensemble": Limit(40, 12),
    "masksembles": Limit(40, 12),
    "mc_dropout": Limit(30, 10),
}
"""Limits of each method in evaluation; `TRAINING` is the limit of all methods."""


@dataclass
class Hops:
    """Functions that a call runs, as (file, name)."""

    functions: set[tuple[str, str]] = field(default_factory=set)
    calls: int = 0
    depth: int = 0

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    def within(self, limit: Limit) -> bool:
        return len(self.functions) <= limit.functions and len(self.files) <= limit.files


def hops(call: Callable[[], Any], package: str = PACKAGE) -> Hops:
    """Call three times, and count the functions in the folder `package` that the third call runs.

    >>> from multitudes.networks.calls import call
    >>> found = hops(lambda: call(nn.Linear(3, 2), torch.zeros(1, 3)))
    >>> sorted(name for _, name in found.functions), found.calls, found.depth
    (['call', 'chosen_output', 'prediction_in', 'split_call'], 4, 3)
    """
    found, depth = Hops(), 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if event not in ("call", "return") or not file.startswith(package):
            return
        depth += 1 if event == "call" else -1
        found.depth = max(found.depth, depth)
        if event == "call" and not name.endswith(">"):
            found.functions.add((file, name))
            found.calls += 1

    call()
    call()
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def network() -> nn.Module:
    """Build a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10),
    )  # fmt: skip


def multitudes() -> Iterator[tuple[str, mt.Multitude]]:
    """Yield each method's name and network."""
    yield "packed", mt.packed(network(), members=4, alpha=2)
    yield "deep_ensemble", mt.deep_ensemble(network(), members=4)
    yield "batch_ensemble", mt.batch_ensemble(network(), members=4)
    yield "masksembles", mt.masksembles(network(), members=4)
    yield "mc_dropout", mt.mc_dropout(network())


def of_method(net: mt.Multitude, x: torch.Tensor, y: torch.Tensor) -> tuple[Hops, Hops]:
    """Count the functions of evaluation and of a training step."""
    net.eval()
    with torch.no_grad():
        evaluation = hops(lambda: net(x))
    net.train()
    return evaluation, hops(lambda: net.loss(x, y).backward())


def table() -> Iterator[str]:
    """Yield a Markdown table of counts and limits."""
    x, y = torch.randn(64, 3, 16, 16), torch.randint(0, 10, (64,))
    yield "| method | call | functions | limit | files | limit | calls | depth | |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---|"
    for method, net in multitudes():
        for what, found, limit in zip(
            ("evaluation", "training step"), of_method(net, x, y), (EVALUATION[method], TRAINING), strict=True
        ):
            counts = f"{len(found.functions)} | {limit.functions} | {len(found.files)} | {limit.files}"
            met = "within" if found.within(limit) else "over"
            yield f"| `{method}` | {what} | {counts} | {found.calls} | {found.depth} | {met} |"


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # about initial weights
    print("\n".join(table()))


if __name__ == "__main__":
    main()
