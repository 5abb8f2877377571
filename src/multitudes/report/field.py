"""A surface over a plane: its colours as a picture, and lines of equal height."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Field", "colours", "level_lines"]

VIRIDIS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
"""From low to high, at equal distances (matplotlib's scale of this name)."""

Point = tuple[float, float]
Grid = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Field:
    """Heights on a grid: `heights[j][i]` at `x[i]` and `y[j]`, all of them finite."""

    x: Sequence[float]
    y: Sequence[float]
    heights: Grid
    title: str = ""

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest."""
        return min(map(min, self.heights)), max(map(max, self.heights))


def colours(heights: Grid) -> list[list[tuple[int, int, int]]]:
    """Red, green and blue of each height, from the lowest to the highest.

    >>> colours([[0.0, 1.0]])
    [[(68, 1, 84), (253, 231, 37)]]
    """
    low, high = min(map(min, heights)), max(map(max, heights))
    return [[_colour((height - low) / (high - low or 1)) for height in row] for row in heights]


def _colour(fraction: float) -> tuple[int, int, int]:
    at = fraction * (len(VIRIDIS) - 1)
    below = min(int(at), len(VIRIDIS) - 2)
    one, other = (bytes.fromhex(VIRIDIS[number]) for number in (below, below + 1))
    red, green, blue = (round(a + (at - below) * (b - a)) for a, b in zip(one, other, strict=True))
    return red, green, blue


def level_lines(field: Field, level: float) -> list[tuple[Point, Point]]:
    """Where the surface has a height, as straight pieces, one or two in each cell of the grid (marching squares).

    Between neighbours of the grid the surface is linear; in a cell whose corners are above and below in turn, the
    mean of the four decides which corners are joined.

    >>> level_lines(Field([0, 1], [0, 1], [[0, 1], [0, 1]]), 0.25)
    [((0.25, 0.0), (0.25, 1.0))]
    """
    pieces: list[tuple[Point, Point]] = []
    for j, i in itertools.product(range(len(field.y) - 1), range(len(field.x) - 1)):
        corners = [(i, j), (i + 1, j), (i + 1, j + 1), (i, j + 1)]
        heights = [field.heights[row][column] for column, row in corners]
        crossed = [
            _crossing(field, corners[at], corners[(at + 1) % 4], level)
            for at in range(4)
            if (heights[at] > level) != (heights[(at + 1) % 4] > level)
        ]
        if len(crossed) == 4 and (sum(heights) / 4 > level) != (heights[0] > level):
            crossed = crossed[1:] + crossed[:1]  # the second and the fourth corner are joined, and not the others
        pieces += zip(crossed[::2], crossed[1::2], strict=True)
    return pieces


def _crossing(field: Field, one: tuple[int, int], other: tuple[int, int], level: float) -> Point:
    """Where an edge of a cell has the height."""
    low, high = (field.heights[row][column] for column, row in (one, other))
    share = (level - low) / (high - low)
    (x, y), (to_x, to_y) = ((field.x[column], field.y[row]) for column, row in (one, other))
    return x + share * (to_x - x), y + share * (to_y - y)
