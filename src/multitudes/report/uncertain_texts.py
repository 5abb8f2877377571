"""The most uncertain test texts, and what each method predicts for them."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from multitudes.report.results import Results
from multitudes.report.style import HIGHLIGHTED
from multitudes.study.rows import TARGETS

__all__ = ["shortened", "uncertain_texts"]

TEXTS = 10
LONGEST = 280
"""Characters of a text that are shown."""
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
"""Characters without a picture, of which some turn what follows around."""


def uncertain_texts(results: Results) -> dict[str, Any]:
    """The texts of the largest mean entropy, with what each method predicts, of one seed; of numbers, the largest
    deviation of the best method."""
    if results.texts is None:
        return {}
    return _of_classes(results) if TARGETS[results.task].classes else _of_numbers(results)


def _of_classes(results: Results) -> dict[str, Any]:
    found = {}
    for at, method in enumerate(results.methods[:HIGHLIGHTED]):
        arrays = _arrays(results, method, "probs", "members", "target")
        if arrays is not None:
            found[at] = arrays
    if not found:
        return {}
    probs, target = torch.stack([own[0] for own in found.values()]), next(iter(found.values()))[2]
    unsure = torch.special.entr(probs).sum(2).mean(0)
    names = results.classes or tuple(str(number) for number in range(probs.shape[2]))
    voting = _voting(results, {results.methods[at]: len(own[1]) for at, own in found.items()})
    members = found[results.methods.index(voting)][1]
    rows = []
    for row in _most(results.texts, unsure):
        truth = int(target[row])
        cells = [_cell(own[0][row], names, truth) for own in found.values()]
        told = (shortened(results.texts[row]), names[truth], float(unsure[row]))
        rows.append((*told, _mutual_information(members[:, row]), _votes(members[:, row], names), cells))
    return {"columns": list(found), "rows": rows, "best": voting, "several": len(members) > 1}


def _voting(results: Results, members: dict[str, int]) -> str:
    """The best of the methods with several members or draws, or else any."""
    ranked = [row.name for row in results.board if members.get(row.name, 0) > 1]
    return next(iter([*ranked, *members]))


def _most(texts: list[str], unsure: Tensor) -> list[int]:
    """The rows of the most uncertain texts, the most uncertain first; each text once."""
    first = {texts[row]: row for row in reversed(unsure.argsort(descending=True, stable=True).tolist())}
    order = sorted(first.values(), key=lambda row: -float(unsure[row]))
    return order[:TEXTS]


def _arrays(results: Results, method: str, *names: str) -> tuple[Tensor, ...] | None:
    """Of the predictions of a method's first seed, where they are of the texts of the page."""
    outcomes = results.alike(method)
    found = outcomes[0].tensors(*names) if outcomes else None
    return found if found is not None and len(found[-1]) == len(results.texts) else None


def _cell(probs: Tensor, names: tuple[str, ...], truth: int) -> tuple[str, float, bool]:
    label = int(probs.argmax())
    return names[label], 100 * float(probs[label]), label == truth


def _mutual_information(members: Tensor) -> float:
    """Of members' probabilities `[S, C]`, in nats: the entropy of their mean less their mean entropy."""
    whole = torch.special.entr(members.double().mean(0)).sum()
    return max(0.0, float(whole - torch.special.entr(members.double()).sum(1).mean()))


def _votes(members: Tensor, names: tuple[str, ...]) -> str:
    """How many members predict each class, those with the most votes first.

    >>> _votes(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]]), ("no", "yes"))
    '2 yes, 1 no'
    """
    labels, counts = members.argmax(1).unique(return_counts=True)
    order = counts.argsort(descending=True, stable=True).tolist()
    return ", ".join(f"{counts[at]} {names[int(labels[at])]}" for at in order)


def _of_numbers(results: Results) -> dict[str, Any]:
    best = next((row.name for row in results.board if not row.baseline), None)
    found = None if best is None else _arrays(results, best, "std", "mean", "low", "high", "target")
    if found is None:
        return {}
    rows = [
        (shortened(results.texts[row]), *(float(own[row]) for own in found[1:]), float(found[0][row]))
        for row in _most(results.texts, found[0])
    ]
    return {"numbers": rows, "best": best}


def shortened(text: str) -> str:
    """A text as a page shows it: its beginning, without characters that cannot be seen.

    >>> shortened("one line"), len(shortened("word " * 100))
    ('one line', 280)
    """
    shown = UNSEEN.sub("\ufffd", text.replace("\r\n", "\n"))
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 2].rstrip()} …"
