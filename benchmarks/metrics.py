"""Memory, time and state of all classification metrics at once, on a stream of predictions.

    python benchmarks/metrics.py                                       # a quick try
    python benchmarks/metrics.py --rows 1000000 --classes 1000         # twenty times ImageNet's validation set
    python benchmarks/metrics.py --rows 1000000 --classes 1000 --members 2

Logits are generated batch by batch and not kept. All metrics share the rows of a batch, which are read once. Memory is
the peak of the process minus its memory with one batch and no metric. Time includes reading and the metrics, but not
generating logits.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from multitudes import Predictive, metrics
from multitudes.metrics import Rows, read_rows


def batches(args: argparse.Namespace) -> Iterator[tuple[Predictive, Tensor]]:
    """Yield logits `[S, B, C]` that favor the true class, and the true classes."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, args.rows, args.batch):
        size = min(args.batch, args.rows - start)
        target = torch.randint(args.classes, (size,), generator=generator)
        logits = torch.randn(args.members, size, args.classes, generator=generator)
        logits[:, torch.arange(size), target] += 4
        yield Predictive(logits), target


def given(function: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Return the known arguments that a function requires. Raise TypeError if it requires others."""
    required = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD and name != "self"
    ]
    unknown = [name for name in required if name not in known]
    if unknown:
        raise TypeError(f"needs {', '.join(unknown)}")
    return {name: known[name] for name in required}


def update(metric: Metric, rows: Rows) -> None:
    # For metrics that need out-of-distribution rows, every other row is one.
    metric.update(**given(type(metric).update, {"prediction": rows, "outside": rows.target % 2 == 1}))


def classification(args: argparse.Namespace, rows: Rows) -> tuple[dict[str, Metric], dict[str, str]]:
    """Return the metrics that can be built and updated with rows, and for the others the reason why not."""
    found: dict[str, Metric] = {}
    skipped: dict[str, str] = {}
    for name in metrics.__all__:
        kind = getattr(metrics, name)
        if not (isinstance(kind, type) and issubclass(kind, Metric)):
            continue
        try:
            metric = kind(**given(kind, {"classes": args.classes, "members": args.members}))
            update(metric, rows)
            metric.reset()
        except (TypeError, ValueError) as error:
            skipped[name] = str(error)
        else:
            found[name] = metric
    return found, skipped


def memory(field: str) -> float:
    """Return a field of /proc/self/status in MB: `VmRSS` (memory in use) or `VmHWM` (its peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ValueError(f"field must be one of /proc/self/status, got {field!r}")


def state_size(metric: Metric) -> float:
    """Return the size of a metric's state in MB."""
    tensors: list[Tensor] = []
    for state in metric.metric_state.values():
        tensors += state if isinstance(state, list) else [state]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--members", type=int, default=1)
    parser.add_argument("--batch", type=int, default=2_000)
    args = parser.parse_args()
    print(f"CPU, {torch.get_num_threads()} threads; torch {torch.__version__}; batches of {args.batch}")
    print(f"{args.rows} rows of {args.classes} classes; members: {args.members}")

    predictive, target = next(batches(args))
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    found, skipped = classification(args, read_rows(predictive[:8], target[:8]))
    seconds = dict.fromkeys(["reading", *found], 0.0)
    del predictive, target

    def timed(name: str, function: Any, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments)
        seconds[name] += time.perf_counter() - start
        return result

    for predictive, target in batches(args):
        rows = timed("reading", read_rows, predictive, target)
        for name, metric in found.items():
            timed(name, update, metric, rows)
        del predictive, target, rows  # else the next batch would add to this one's memory
    sizes = {name: state_size(metric) for name, metric in found.items()}
    results = {name: timed(name, metric.compute) for name, metric in found.items()}
    peak = memory("VmHWM")

    print(f"\n{'':26}{'seconds':>9}{'state MB':>10}   result")
    for name, took in seconds.items():
        value = results.get(name)
        shown = f"{float(value):.4f}" if isinstance(value, Tensor) and value.numel() == 1 else type(value).__name__
        print(f"{name:26}{took:9.2f}{sizes.get(name, 0):10.2f}   {shown if name in found else ''}")
    total = sum(seconds.values())
    print(f"\n{len(found)} metrics: {args.rows / total:.0f} rows a second, {peak - before:.0f} MB above the batch")
    for name, reason in skipped.items():
        print(f"not among them: {name}: {reason}")


if __name__ == "__main__":
    main()
