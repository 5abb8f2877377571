"""How methods look in all figures and tables.

A method has one colour, dash and symbol on the whole page. Colours are Okabe and Ito's, as variables of the style
sheet, so that they follow the light and the dark theme; symbols and dashes distinguish methods where colours do not.
The first methods are highlighted when the page opens; the others are grey until the reader selects them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HIGHLIGHTED", "STAR", "Style"]

HIGHLIGHTED = 6
"""How many methods are in colour at once."""

COLOURS = 8
"""The style sheet has `--c0` to `--c7`."""

DASHES = ("", "6 3", "2 2.5", "6 2.5 2 2.5", "10 3", "10 2.5 2 2.5")

STAR = "m0-6l1.6 4.2 4.4.2-3.4 2.8 1.1 4.3-3.7-2.4-3.7 2.4 1.1-4.3-3.4-2.8 4.4-.2z"
SYMBOLS = (
    "m-4 0a4 4 0 1 1 8 0a4 4 0 1 1-8 0z",  # a circle
    "m-3.6-3.6h7.2v7.2h-7.2z",  # a square
    "m0-5l5 5-5 5-5-5z",  # a diamond
    "m-1.6-5h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4z",  # a cross
    "m-3.3-4.8l3.3 3.3 3.3-3.3 1.5 1.5-3.3 3.3 3.3 3.3-1.5 1.5-3.3-3.3-3.3 3.3-1.5-1.5 3.3-3.3-3.3-3.3z",  # an x
    "m0-5l5 9h-10z",  # a triangle
    STAR,
    "m-2.5-4.3h5l2.5 4.3-2.5 4.3h-5l-2.5-4.3z",  # a hexagon
)
"""Paths around the place where they are drawn."""


@dataclass(frozen=True)
class Style:
    """The style of the method with this number: after eight, colours repeat with other symbols and dashes."""

    number: int

    @property
    def colour(self) -> str:
        """A variable of the style sheet."""
        return f"var(--c{self.number % COLOURS})"

    @property
    def symbol(self) -> str:
        """A path around the place where it is drawn."""
        return SYMBOLS[(self.number + self.number // COLOURS) % len(SYMBOLS)]

    @property
    def dash(self) -> str:
        """The lengths of strokes and gaps; empty for a whole line."""
        return DASHES[(self.number + self.number // COLOURS) % len(DASHES)]

    @property
    def classes(self) -> str:
        """Of an element that is in colour where the method is highlighted."""
        return "m on" if self.number < HIGHLIGHTED else "m"
