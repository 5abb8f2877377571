"""Axes: map values to positions in a figure, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """An axis: its title, its ends and its ticks."""

    title: str = ""
    percent: bool = False
    """True if values are fractions whose ticks are in percent."""
    log: bool = False
    """True for a logarithmic scale, which needs explicit ticks."""
    ticks: tuple[float, ...] = ()
    """Tick positions; empty for round numbers."""
    low: float | None = None
    high: float | None = None
    """Ends of the axis; None fits the values with some margin."""
    bare: bool = False
    """True if values are meaningless; no ticks."""


@dataclass(frozen=True)
class Scale:
    """An axis in a figure: maps `low` to position `start` and `high` to `end`."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the position of a value."""
        low, high, at = (self._linear(each) for each in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def _linear(self, value: float) -> float:
        return math.log(value) if self.axis.log else value

    def holds(self, value: float) -> bool:
        """Return whether a value is on the axis."""
        room = 1e-9 * (self.high - self.low)
        return math.isfinite(value) and self.low - room <= value <= self.high + room

    def ticks(self, apart: float) -> list[tuple[float, str]]:
        """Return positions and texts of the ticks, skipping those closer than `apart` to the one before."""
        values, decimals = self._values()
        kept: list[tuple[float, str]] = []
        for value in values:
            if not kept or abs(self(value) - kept[-1][0]) >= apart:
                kept.append((self(value), self._text(value, decimals)))
        return kept

    def _values(self) -> tuple[list[float], int | None]:
        """Return candidate tick values and their decimal places; None for as many as each needs."""
        if self.axis.bare or self.axis.ticks:
            return [value for value in self.axis.ticks if self.holds(value)], None
        unit = 100 if self.axis.percent else 1
        values, decimals = round_ticks(unit * self.low, unit * self.high)
        return [value / unit for value in values], decimals

    def _text(self, value: float, decimals: int | None) -> str:
        value = 100 * value if self.axis.percent else value
        text = f"{value:g}" if decimals is None else f"{value + 0.0:,.{decimals}f}"
        return text.replace("-", "−") + (" %" if self.axis.percent else "")


def fitted(axis: Axis, values: Iterable[float], start: float, end: float, room: float = 0.06) -> Scale:
    """Fit a scale to all finite values, with some margin at ends that the axis does not fix.

    >>> scale = fitted(Axis(low=0.0), [1.0, 5.0], 0, 100, room=0)
    >>> scale.high, scale(2.5)
    (5.0, 50.0)
    """
    known = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
    low, high = min(known, default=1.0), max(known, default=2.0)
    if axis.log:
        extra = (high / low) ** room if high > low else 1.5
        ends = low / extra, high * extra
    else:
        extra = room * (high - low) if high > low else 0.05 * abs(high) or 0.5
        ends = low - extra, high + extra
    low, high = (end if given is None else given for given, end in zip((axis.low, axis.high), ends, strict=True))
    return Scale(axis, low, high if high > low else low + 1, start, end)


def round_ticks(low: float, high: float, most: int = 6) -> tuple[list[float], int]:
    """Return round numbers between two ends, and the decimal places they need.

    >>> round_ticks(0.0, 1.0), round_ticks(-3.0, 17.0)
    (([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], 1), ([0.0, 5.0, 10.0, 15.0], 0))
    """
    power = math.floor(math.log10((high - low) / most))
    steps = ((factor * 10.0**exponent, exponent) for exponent in (power, power + 1) for factor in (1, 2, 5))
    step, exponent = next((step, at) for step, at in steps if (high - low) / step <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    decimals = max(0, -exponent)
    return [round(number * step, decimals + 1) for number in range(first, last + 1)], decimals
