"""Ensemble Model Patching (Chang et al., 2019), Tables 4 and 9 to 11, on CIFAR-10 instead of ImageNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipes.report.raw import MISSING, Claim, Raw, Section, number, percent, table

METHODS = {
    "single": "vanilla",
    "mc_dropout": "dropout",
    "patched_norm": "EMP (norm)",
    "patched": "EMP (norm + output)",
    "cross_patched_norm": "ECMP (norm)",
    "cross_patched": "ECMP (norm + output)",
}

TABLE_4 = {
    "single": (0.0, 66.1, 8.09, 14.2),
    "mc_dropout": (0.0, 65.9, 7.61, 14.0),
    "patched_norm": (0.328, 66.6, 5.74, 11.0),
    "patched": (17.9, 67.0, 3.91, 6.83),
    "cross_patched_norm": (0.328, 66.4, 4.62, 8.07),
    "cross_patched": (17.9, 67.1, 1.65, 3.15),
}
"""ResNet-18 on ImageNet, 200 draws: overhead in parameters, accuracy (top-1), ECE and MCE, all in %."""

BY_DRAWS = {
    "mc_dropout": {1: (65.3, 8.99, 16.6), 20: (65.9, 7.64, 14.1), 100: (65.9, 7.64, 14.2), 200: (65.9, 7.61, 14.0)},
    "patched": {1: (65.6, 7.03, 13.8), 20: (66.9, 4.08, 7.00), 100: (67.0, 3.88, 7.71), 200: (67.0, 3.91, 6.83)},
    "cross_patched": {1: (64.1, 7.52, 14.5), 20: (66.9, 1.70, 4.18), 100: (67.1, 1.50, 3.05), 200: (67.1, 1.65, 3.15)},
}
"""Tables 11, 9 and 10, ResNet-18 on ImageNet, by the number of draws: accuracy, ECE and MCE in %."""


def section(raw: Raw) -> Section:
    """Report calibration by method, and by the number of draws."""
    found = {method: raw[f"{method}-0"] for method in METHODS if f"{method}-0" in raw}
    text = f"""ResNet-18 on CIFAR-10. The paper's numbers, in brackets, are of ResNet-18 on ImageNet: only the
order of the methods is comparable. Calibration errors use 20 bins, without those of 5 or fewer predictions. Training
uses Adam at its default rate as in the paper, for 40 epochs (100 in the paper) with a cosine schedule and mixed
precision.

{_by_method(found)}

By the number of draws, S (Tables 9 to 11):

{_by_draws(found)}
"""
    return Section("Ensemble Model Patching: Tables 4 and 9 to 11", text, _claims(found))


def _with_paper(value: float | None, paper: float | None, digits: int) -> str:
    return percent(value, digits) + ("" if paper is None else f" ({number(paper, digits)})")


SCORES = ["accuracy %", "ECE %", "MCE %", "NLL"]


def _scores(scores: dict[str, float], paper: Sequence[float | None]) -> list[str]:
    """Return the cells of `SCORES`; `paper` has the first three of them."""
    digits = {"accuracy": 1, "ece": 2, "mce": 1}
    both = [_with_paper(scores[name], of, digits[name]) for name, of in zip(digits, paper, strict=True)]
    return [*both, number(scores["nll"])]


def _by_method(found: dict[str, Any]) -> str:
    rows = []
    for method, result in found.items():
        overhead, *paper = TABLE_4[method]
        more = _with_paper(result["costs"]["parameters_ratio"] - 1, overhead, 2)
        rows.append([METHODS[method], more, *_scores(result["scores"], paper)])
    return table(["method", "overhead %", *SCORES], rows)


def _by_draws(found: dict[str, Any]) -> str:
    rows = []
    for method in [each for each in found if each != "single"]:
        by_size = found[method]["by_size"]
        for index, size in enumerate(by_size["sizes"]):
            scores = {name: values[index] for name, values in by_size.items()}
            paper = BY_DRAWS.get(method, {}).get(size, (None, None, None))
            rows.append([METHODS[method], str(size), *_scores(scores, paper)])
    return table(["method", "S", *SCORES], rows)


def _claims(found: dict[str, Any]) -> list[Claim]:
    text = "ECMP (norm + output) has a lower ECE than the vanilla network and than dropout"
    errors = {method: found[method]["scores"]["ece"] for method in found}
    own, others = errors.get("cross_patched"), [errors.get("single"), errors.get("mc_dropout")]
    if own is None or None in others:
        return [Claim(text, None)]
    numbers = ", ".join(f"{METHODS[method]} {percent(error, 2)} %" for method, error in errors.items())
    return [Claim(text, all(other is not None and own < other for other in others), numbers or MISSING)]
