"""The severities of corruptions have the published constants (Hendrycks & Dietterich, 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from multitudes.shift import CORRUPTIONS, EXTRA, corrupt, corruptions
from tests.shift.test_corruptions import SEVERITIES


def zooms(*ends: tuple[float, float]) -> list[tuple[int, float]]:
    """The published enlargements are `arange(1, end, step)`; their number and the step."""
    return [(len(np.arange(1, end, step)), step) for end, step in ends]


# The constants `c` of make_cifar_c.py and make_imagenet_c.py at github.com/hendrycks/robustness, severities 1 to 5.
PUBLISHED: dict[str, tuple[list[Any], list[Any]]] = {
    "gaussian_noise": ([0.04, 0.06, 0.08, 0.09, 0.10], [0.08, 0.12, 0.18, 0.26, 0.38]),
    "shot_noise": ([500, 250, 100, 75, 50], [60, 25, 12, 5, 3]),
    "impulse_noise": ([0.01, 0.02, 0.03, 0.05, 0.07], [0.03, 0.06, 0.09, 0.17, 0.27]),
    "defocus_blur": (
        [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)],
        [(3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)],
    ),
    "glass_blur": (
        [(0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)],
        [(0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)],
    ),
    "motion_blur": (
        [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)],
        [(10, 3), (15, 5), (15, 8), (15, 12), (20, 15)],
    ),
    "zoom_blur": (
        zooms((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        zooms((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    ),
    "snow": (
        [
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ],
        [
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ],
    ),
    "frost": (
        [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)],
        [(1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)],
    ),
    "fog": (
        [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)],
        [(1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)],
    ),
    "brightness": ([0.05, 0.1, 0.15, 0.2, 0.3], [0.1, 0.2, 0.3, 0.4, 0.5]),
    "contrast": ([0.75, 0.5, 0.4, 0.3, 0.15], [0.4, 0.3, 0.2, 0.1, 0.05]),
    "elastic_transform": (  # in pixels, of images of 32 and of 224 (where the published code has "244" for 224)
        [
            (32 * 0, 32 * 0, 32 * 0.08),
            (32 * 0.05, 32 * 0.2, 32 * 0.07),
            (32 * 0.08, 32 * 0.06, 32 * 0.06),
            (32 * 0.1, 32 * 0.04, 32 * 0.05),
            (32 * 0.1, 32 * 0.03, 32 * 0.03),
        ],
        [
            (244 * 2, 244 * 0.7, 244 * 0.1),
            (244 * 2, 244 * 0.08, 244 * 0.2),
            (244 * 0.05, 244 * 0.01, 244 * 0.02),
            (244 * 0.07, 244 * 0.01, 244 * 0.02),
            (244 * 0.12, 244 * 0.01, 244 * 0.02),
        ],
    ),
    "pixelate": ([0.95, 0.9, 0.85, 0.75, 0.65], [0.6, 0.5, 0.4, 0.3, 0.25]),
    "jpeg_compression": ([80, 65, 58, 50, 40], [25, 18, 15, 10, 7]),
    "speckle_noise": ([0.06, 0.1, 0.12, 0.16, 0.2], [0.15, 0.2, 0.35, 0.45, 0.6]),
    "gaussian_blur": ([0.4, 0.6, 0.7, 0.8, 1], [1, 2, 3, 4, 6]),
    "spatter": (
        [
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ],
        [
            (0.65, 0.3, 4, 0.69, 0.6, 0),
            (0.65, 0.3, 3, 0.68, 0.6, 0),
            (0.65, 0.3, 2, 0.68, 0.5, 0),
            (0.65, 0.3, 1, 0.65, 1.5, 1),
            (0.67, 0.4, 1, 0.65, 1.5, 1),
        ],
    ),
    "saturate": (
        [(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)],
        [(0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)],
    ),
}


def published(name: str, side: int, severity: int) -> Any:
    return PUBLISHED[name][side > 64][severity - 1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_severities_have_the_published_constants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(PUBLISHED) == CORRUPTIONS + EXTRA
    given: list[Any] = []
    table = corruptions._CORRUPTIONS if name in CORRUPTIONS else corruptions._EXTRA
    kept = table[name]._replace(function=lambda x, generator, *parameters: given.append(parameters) or x)
    monkeypatch.setitem(table, name, kept)
    for side in (32, 64, 65, 224):
        given.clear()
        for severity in SEVERITIES:
            corrupt(torch.zeros(1, 1, side, 8), name, severity)
        expected = np.array(PUBLISHED[name][side > 64], dtype=float).reshape(5, -1)
        if name == "elastic_transform":  # ours are fractions of a side
            expected /= 224 if side > 64 else 32
        np.testing.assert_allclose(np.array(given, dtype=float), expected, rtol=1e-12)
