"""Figures: positions in the SVG match the ticks; ticks are round; surfaces have steps."""

from __future__ import annotations

import base64
import io
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from multitudes.lab.report.chart import Axis, Series, View, fitted, picture, round_ticks, svg


def read(view: View) -> tuple[ElementTree.Element, dict[str, list[tuple[float, float]]]]:
    """Return the SVG, and positions and values of the ticks of both axes."""
    root = ElementTree.fromstring(str(svg(view, "a figure")))
    ticks: dict[str, list[tuple[float, float]]] = {"x": [], "y": []}
    for text in root.iter("text"):
        if text.get("class") == "tick":
            number = float((text.text or "").replace("−", "-").replace(",", "").removesuffix(" %"))
            axis = "x" if text.get("text-anchor") == "middle" else "y"
            ticks[axis].append((float(text.get(axis, "")) - (4 if axis == "y" else 0), number))
    return root, ticks


def points(root: ElementTree.Element) -> np.ndarray:
    (line,) = root.iter("polyline")
    return np.array([[float(each) for each in pair.split(",")] for pair in line.get("points", "").split()])


@pytest.mark.parametrize("log", [False, True])
def test_points_match_the_ticks(log: bool) -> None:
    x, y = [0.5, 3.0, 7.7, 40.0], [0.913, 0.925, 0.97, 0.944]
    view = View(
        [Series(x, y, 2)], Axis("x", log=log, ticks=(1.0, 3.0, 10.0, 30.0) if log else ()), Axis("y", percent=True)
    )
    root, ticks = read(view)
    scale = np.log if log else np.asarray
    for column, (axis, given, change) in enumerate((("x", x, scale), ("y", [100 * each for each in y], np.asarray))):
        places, numbers = np.array(ticks[axis]).T
        assert len(places) >= 3
        slope, start = np.polyfit(change(numbers), places, 1)
        assert points(root)[:, column] == pytest.approx(start + slope * change(np.array(given)), abs=0.2)


def test_error_bars_match_the_ticks() -> None:
    view = View(
        [Series([1.0, 2.0], [1.0, 3.0], 0, low=[0.5, math.nan], high=[2.0, math.nan])], Axis(), Axis(low=0, high=4)
    )
    root, ticks = read(view)
    places, numbers = np.array(ticks["y"]).T
    slope, start = np.polyfit(numbers, places, 1)
    bars = [each.get("d", "") for each in root.iter("path") if each.get("class") == "bars"]
    (found,) = re.findall(r"M\S+ (\S+)h6m-3 0V(\S+)m-3 0h6", bars[0])
    assert [float(each) for each in found] == pytest.approx([start + slope * 0.5, start + slope * 2.0], abs=0.2)


def test_points_outside_of_the_axes_are_left_out() -> None:
    lost = [math.nan, 5.0, math.inf]
    view = View(
        [Series([0.0, 1.0, 2.0, 3.0, 4.0], [1.0, *lost, 2.0], 0, tips=list("abcde"))], Axis(), Axis(low=0, high=3)
    )
    root, _ = read(view)
    (group,) = (each for each in root.iter("g") if each.get("class") == "m on")
    assert len(points(root)) == 2 and group.get("data-tips", "").split() == ["a", "e"]


def test_labels_are_escaped_and_do_not_overlap() -> None:
    evil = '"><script>alert(1)</script>'
    same = [Series([1.0], [1.0], at, line=False, marks=True, labels=[evil], tips=[evil]) for at in range(3)]
    drawn = str(svg(View(same, Axis(evil), Axis(evil)), evil))
    root = ElementTree.fromstring(drawn)
    assert "<script" not in drawn and root.get("aria-label") == evil
    labels = [
        (float(each.get("x", "")), float(each.get("y", "")))
        for each in root.iter("text")
        if each.get("class") == "label"
    ]
    assert len(set(labels)) == 3


@pytest.mark.parametrize(("low", "high"), [(0.9412, 0.9587), (-3, 17), (0, 1e-6), (1234.5, 99999), (5.0, 5.0000001)])
def test_ticks_are_few_round_numbers(low: float, high: float) -> None:
    values, decimals = round_ticks(low, high)
    assert 2 <= len(values) <= 7 and low - 1e-12 <= values[0] and values[-1] <= high + 1e-12
    steps = np.diff(values)
    assert steps == pytest.approx(steps[0], rel=1e-3)
    step = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-3)
    assert min(abs(step - round_step) for round_step in (1, 2, 5, 10)) < 0.01
    assert len({f"{value:.{decimals}f}" for value in values}) == len(values)


@pytest.mark.parametrize("values", [[2.0], [0.0, 0.0], [math.nan], [-1.0, -1.0]])
def test_an_axis_without_spread_has_a_range(values: list[float]) -> None:
    for log in (False, True):
        scale = fitted(Axis(log=log), values, 0, 100)
        assert scale.low < scale.high
        assert all(0 <= scale(value) <= 100 for value in values if math.isfinite(value) and (value > 0 or not log))


def shown(heights: np.ndarray) -> np.ndarray:
    """Return the picture of heights, `[H, W, 3]`."""
    address = picture(heights.tolist())
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition("base64,")[2])))).astype(float)


def test_the_steps_of_a_cone_are_rings() -> None:
    axis = np.linspace(-2, 2, 81)
    pixels = shown(np.hypot(axis, axis[:, None]))
    colours, step = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True)
    fine = np.linspace(-2, 2, len(pixels))
    radius = np.hypot(fine, fine[:, None]).flatten()
    ends = sorted((radius[step == at].min(), radius[step == at].max()) for at in range(len(colours)))
    width = radius.max() / len(ends)
    assert len(ends) == 16 and ends[0][0] < 0.02
    for at, (low, high) in enumerate(ends):
        assert (low, high) == pytest.approx((at * width, (at + 1) * width), abs=0.02)


def test_the_first_row_is_at_the_bottom() -> None:
    light = shown(np.array([[0.0, 1.0], [2.0, 3.0]])).mean(2)
    assert light[-1, 0] < light[-1, -1] < light[0, 0] < light[0, -1]


def test_colours_go_from_dark_to_light() -> None:
    row = shown(np.linspace(-1, 4, 50)[None])[0]
    light = (row @ [0.2126, 0.7152, 0.0722]).tolist()
    assert light == sorted(light) and light[0] < 30 and light[-1] > 200
    assert (shown(np.full((2, 2), 3.0)) == row[0]).all()
