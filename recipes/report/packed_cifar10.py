"""Packed-Ensembles (Laurent et al., 2023), Table 1: quality at the cost of a single network."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from recipes.report.raw import MISSING, Claim, Raw, Section, mean_of, number, percent, spread, table

METHODS = {
    "single": "single network",
    "batch_ensemble": "BatchEnsemble",
    "mimo": "MIMO (rho = 1)",
    "masksembles": "Masksembles",
    "packed": "Packed-(2, 4, 2)",
    "packed_1": "Packed-(2, 4, 1)",
    "deep": "deep ensemble",
}

PAPER: dict[str, tuple[float, ...]] = {
    "single": (94.0, 0.238, 0.035, 94.0, 89.7, 33.8, 11.17, 0.56),
    "batch_ensemble": (92.9, 0.257, 0.031, 92.4, 87.8, 32.1, 11.21, 2.22),
    "mimo": (94.0, 0.228, 0.033, 94.4, 90.2, 28.6, 11.19, 2.24),
    "masksembles": (94.0, 0.188, 0.009, 93.6, 89.5, 27.8, 11.24, 2.22),
    "packed": (94.3, 0.178, 0.007, 94.7, 91.3, 23.2, 8.18, 0.48),
    "deep": (95.1, 0.156, 0.008, 94.7, 91.3, 18.0, 44.70, 2.22),
}
"""Table 1, CIFAR-10 and ResNet-18, means of five runs: accuracy, NLL, ECE, AUPR, AUROC, FPR95, million parameters,
billion multiply-adds."""

Read = Callable[[dict[str, Any]], float]


def score(name: str) -> Read:
    """Return a reader of a job's score."""
    return lambda result: result["scores"][name]


def cost(name: str, unit: float = 1.0) -> Read:
    """Return a reader of a job's cost."""
    return lambda result: result["costs"][name] / unit


OOD = "ood/svhn/max_probability/"
COLUMNS: dict[str, tuple[Read, float, int]] = {
    "accuracy %": (score("accuracy"), 100, 1),
    "NLL": (score("nll"), 1, 3),
    "ECE": (score("ece"), 1, 3),
    "AUPR %": (score(OOD + "aupr"), 100, 1),
    "AUROC %": (score(OOD + "auroc"), 100, 1),
    "FPR95 %": (score(OOD + "fpr95"), 100, 1),
    "parameters, M": (cost("parameters", 1e6), 1, 2),
    "mult-adds, G": (cost("multiply_adds", 1e9), 1, 2),
}
"""Reader, factor and number of digits of each column."""


def section(raw: Raw) -> Section:
    """Write Table 1, and check its claims."""
    found = {method: results_of(raw, method) for method in METHODS}
    text = f"""ResNet-18 on CIFAR-10 with four members; re-derived SVHN is out-of-distribution, scored by confidence.
Numbers are ours, with the deviation over seeds if there are several, and in brackets those of the paper (means of five
runs). The paper trains on 50,000 images in batches of 128. Here networks are trained on 49,000 images in batches of
500, with twice the learning rate, mixed precision and a cosine schedule. Both train for 75 epochs.

{_quality(found)}

MIMO has a quarter of the multiply-adds of the paper, whose code repeats each batch four times. With rho = 1 all members
have the same inputs, so the repetition only adds cost. Masks are not trained, and do not count as parameters here.

Costs are multiples of the single network, not compiled, on an otherwise idle machine. Training steps were measured
alternately with the single network in one process, inference (images per second, batches of 256) in separate processes:

{_costs(found)}
"""
    return Section("Packed-Ensembles: Table 1", text, _claims(found))


def results_of(raw: Raw, method: str) -> list[dict[str, Any]]:
    """Return the results of a method, one per seed; `packed-0` belongs to packed, but `packed_1-0` does not."""
    return [result for name, result in raw.matching(method).items() if name.rpartition("-")[0] == method]


def _quality(found: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for method, results in found.items():
        if not results:
            continue
        paper = PAPER.get(method)
        row = [METHODS[method]]
        for index, (read, factor, digits) in enumerate(COLUMNS.values()):
            theirs = "" if paper is None else f" ({number(paper[index], digits)})"
            row.append(spread(map(read, results), digits, factor) + theirs)
        rows.append(row)
    return table(["method", *COLUMNS], rows)


def _costs(found: dict[str, list[dict[str, Any]]]) -> str:
    ratios = {
        "parameters": "parameters_ratio",
        "mult-adds": "multiply_adds_ratio",
        "training time": "training_seconds_ratio",
        "memory in training": "peak_memory_bytes_ratio",
    }
    speeds = {method: mean_of(map(cost("inference_per_second"), results)) for method, results in found.items()}
    rows = [
        [
            METHODS[method],
            *(number(mean_of(map(cost(name), results)), 2) for name in ratios.values()),
            _ratio(speeds[method], speeds["single"]),
        ]
        for method, results in found.items()
        if results
    ]
    return table(["method", *ratios, "speed of inference"], rows)


def _ratio(value: float | None, base: float | None) -> str:
    return MISSING if value is None or base is None else number(value / base, 2)


def _claims(found: dict[str, list[dict[str, Any]]]) -> list[Claim]:
    three = ("single", "packed", "deep")
    if not all(found[method] for method in three):
        return [Claim("Packed-(2, 4, 2) is nearly a deep ensemble, and better than a single network", None)]

    def means(name: str) -> list[float]:
        return [statistics.fmean(map(score(name), found[method])) for method in three]

    def summary(what: str, values: list[float], say: Callable[[float], str]) -> str:
        return f"{what}: " + ", ".join(
            f"{METHODS[each]} {say(value)}" for each, value in zip(three, values, strict=True)
        )

    right, nll, ece = means("accuracy"), means("nll"), means("ece")
    ahead = right[1] > right[0] and nll[1] < nll[0] and ece[1] < ece[0]
    accuracy, likelihood = summary("accuracy %", right, percent), summary("NLL", nll, number)
    calibration = summary("ECE", ece, number)
    return [
        Claim("A single ResNet-18 is right on 93 % or more", right[0] >= 0.93, accuracy),
        Claim("Packed-(2, 4, 2) is within a point of the deep ensemble", right[2] - right[1] <= 0.01, accuracy),
        Claim("Packed-(2, 4, 2) is ahead of the single network in accuracy, NLL and ECE", ahead, calibration),
        Claim("NLL: deep < packed < single", nll[2] < nll[1] < nll[0], likelihood),
    ]
