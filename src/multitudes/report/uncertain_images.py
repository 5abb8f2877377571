"""The most uncertain test images, and what each method predicts for them."""

from __future__ import annotations

from typing import Any

import torch

from multitudes.report.results import Results

__all__ = ["uncertain_images"]

IMAGES = 10


def uncertain_images(results: Results) -> dict[str, Any]:
    """The images of the largest mean entropy, with the class and confidence that each method predicts, of one seed."""
    found = {}
    for at, method in enumerate(results.methods):
        outcomes = results.alike(method)
        pair = outcomes[0].tensors("probs", "target") if outcomes else None
        if pair is not None and results.images is not None and len(pair[0]) == len(results.images):
            found[at] = pair
    if not found:
        return {}
    probs, target = torch.stack([probs for probs, _ in found.values()]), next(iter(found.values()))[1]
    chosen = torch.special.entr(probs).sum(2).mean(0).argsort(descending=True, stable=True)[:IMAGES]
    names = results.classes or tuple(str(number) for number in range(probs.shape[2]))
    truths = target[chosen].tolist()
    images = [(row, results.images[row], names[truth]) for row, truth in zip(chosen.tolist(), truths, strict=True)]
    rows = []
    for at, (own, _) in found.items():
        confidence, label = (each.tolist() for each in own[chosen].max(1))
        cells = zip(label, confidence, truths, strict=True)
        rows.append((at, [(names[each], 100 * sure, each == truth) for each, sure, truth in cells]))
    return {"images": images, "rows": rows}
