"""Small pictures side by side, one a method: reliability diagrams and histograms, drawn as plain SVG."""

from __future__ import annotations

from collections.abc import Sequence

from multitudes.report.html import text
from multitudes.report.style import Style, key

__all__ = ["histograms", "panel", "panels", "reliability_bars"]

SIZE = 100.0
"""The side of a picture, in its own units; below it is a strip for the axis."""


def panels(pictures: Sequence[str]) -> str:
    """As many side by side as fit."""
    return '<div class="panels">' + "".join(pictures) + "</div>"


def panel(number: int, method: str, note: str, drawing: str, alt: str, ends: tuple[str, str]) -> str:
    """A picture of one method, with its name above, and `note` and the ends of the axis below."""
    low, high = (text(end) for end in ends)
    return (
        f'<figure class="panel" data-panel="{number}"><figcaption>{key(number)}<b>{text(method)}</b></figcaption>'
        f'<svg viewBox="-1 -1 102 112" role="img" aria-label="{text(alt)}">'
        f'<rect class="frame" width="{SIZE:g}" height="{SIZE:g}"/>{drawing}'
        f'<text x="0" y="109">{low}</text><text x="{SIZE:g}" y="109" text-anchor="end">{high}</text></svg>'
        f"<small>{text(note)}</small></figure>"
    )


def reliability_bars(number: int, accuracy: Sequence[float], confidence: Sequence[float], count: Sequence[int]) -> str:
    """Accuracy for each bin of confidence as a bar, its gap to the confidence, and a dot as strong as there are rows.

    Empty bins, whose accuracy is NaN, have no bar.
    """
    width, most = SIZE / len(count), max(max(count), 1)
    parts = [f'<g style="color:{Style(number).colour}">']
    for at, (right, sure, rows) in enumerate(zip(accuracy, confidence, count, strict=True)):
        if not rows:
            continue
        x, top = at * width, SIZE * (1 - right)
        tip = f"<title>{rows} rows: confidence {sure:.1%}, accuracy {right:.1%}</title>"
        strength = 0.25 + 0.6 * (rows / most) ** 0.5
        bar = f'x="{x + 0.4:.2f}" width="{width - 0.8:.2f}"'
        gap_top, gap = SIZE * (1 - max(right, sure)), SIZE * abs(right - sure)
        parts.append(f'<g><rect class="bar" {bar} y="{top:.2f}" height="{SIZE - top:.2f}" opacity="{strength:.2f}"/>')
        parts.append(f'<rect class="gap" {bar} y="{gap_top:.2f}" height="{gap:.2f}"/>{tip}</g>')
    return "".join(parts) + f'</g><path class="guide" d="M0 {SIZE:g}L{SIZE:g} 0"/>'


def histograms(inside: Sequence[float], outside: Sequence[float]) -> str:
    """Two histograms with the same bins, each of the shares of its own rows: filled, and as a dashed line.

    Heights are square roots of the shares: else the many inputs that a network is sure of would hide all others.
    """
    top = max(*inside, *outside, 1e-9)
    width = SIZE / len(inside)

    def outline(shares: Sequence[float]) -> str:
        steps = "".join(
            f"L{at * width:.2f} {SIZE * (1 - (share / top) ** 0.5):.2f}H{(at + 1) * width:.2f}"
            for at, share in enumerate(shares)
        )
        return f"M0 {SIZE:g}{steps}V{SIZE:g}"

    return f'<path class="inside" d="{outline(inside)}"/><path class="outside" d="{outline(outside)}"/>'
