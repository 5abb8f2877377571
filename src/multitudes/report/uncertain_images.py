"""The test images that methods are least sure of, and what each of them thinks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multitudes.report.html import Section, image, section, text
from multitudes.report.quality import probabilities
from multitudes.report.results import Results
from multitudes.report.style import named

__all__ = ["opinions"]

IMAGES = 10


def opinions(results: Results) -> Section | None:
    """A table of the most uncertain images by method, each with its label and confidence, of one seed."""
    first: dict[int, tuple[str, Tensor, Tensor]] = {}
    for at, method in enumerate(results.methods):
        pair = probabilities(results.of(method)[0])
        if pair is not None and results.images is not None and len(pair[0]) == len(results.images):
            first[at] = (method, *pair)
    if not first:
        return None
    target = next(iter(first.values()))[2]
    entropy = torch.stack([torch.special.entr(probs).sum(1) for _, probs, _ in first.values()]).mean(0)
    chosen = entropy.argsort(descending=True, stable=True)[:IMAGES].tolist()
    names = results.classes or tuple(str(number) for number in range(next(iter(first.values()))[1].shape[1]))
    head = "".join(_picture(results.images[row], names[int(target[row])], row) for row in chosen)
    rows = "".join(
        f'<tr><th scope="row">{named(at, method)}</th>{_answers(probs[chosen], target[chosen], names)}</tr>'
        for at, (method, probs, _) in first.items()
    )
    return section(
        "opinions",
        "What they are least sure of",
        "<p>The test images with the largest entropy, mean over methods. ✓ is right, ✗ is wrong; the number is the "
        "confidence in per cent. Each method speaks by its first seed.</p>",
        '<div class="scroll" tabindex="0" role="group" aria-label="table"><table class="opinions">'
        "<caption>The most uncertain test images, and each method’s opinion</caption>"
        f'<thead><tr><th scope="col">Method</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>',
    )


def _picture(pixels: Any, truth: str, row: int) -> str:
    shown = image(pixels, f"test image {row}, which is {truth}")
    return f'<th scope="col">{shown}<span>{text(truth)}</span></th>'


def _answers(probs: Tensor, target: Tensor, names: tuple[str, ...]) -> str:
    """A cell for each image `[N, C]`."""
    confidence, label = probs.max(1)
    cells = []
    for sure, said, truth in zip(confidence.tolist(), label.tolist(), target.tolist(), strict=True):
        style, mark, word = ("right", "✓", "right") if said == truth else ("wrong", "✗", "wrong")
        cells.append(
            f'<td class="{style}"><span aria-label="{word}">{mark}</span> {text(names[said])} '
            f"<small>{100 * sure:.0f}</small></td>"
        )
    return "".join(cells)
