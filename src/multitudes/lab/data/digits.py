"""Handwritten 8 x 8 digits from scikit-learn, with patches of photographs as out-of-distribution inputs."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from multitudes.base.checks import needed
from multitudes.lab.data.parts import Data, Part
from multitudes.lab.data.splits import spread

TRAIN, VALIDATION, PHOTOGRAPHS = 400, 400, 400
"""Few training rows: with a thousand, all networks get nearly everything right, and methods hardly differ."""


@cache
def digits() -> Data:
    """Return scikit-learn's 1797 digits with a fixed split: 400 for training, 400 for validation, 997 for testing.

    The out-of-distribution inputs, "photographs", are 400 patches of scikit-learn's two photographs. Each has exactly
    the pixel values of one test digit, sorted by the brightness of the patch: brightness and contrast are those of a
    digit, and only the shapes differ. The result is cached: do not modify its tensors in place.

    >>> digits()
    Data('digits': 400 + 400 + 997 images of [1, 8, 8], 10 classes, 400 photographs)
    """
    found = needed("sklearn.datasets", "data", "the digits").load_digits()
    x = (torch.from_numpy(found.images) * (255 / 16)).round().to(torch.uint8)[:, None]
    y = torch.from_numpy(found.target).long()
    rest = torch.arange(len(y))
    parts = []
    for count in (TRAIN, VALIDATION):
        drawn = rest[spread(y[rest], count, seed=0)]
        rest = rest[~torch.isin(rest, drawn)]
        parts.append(Part(x[drawn], y[drawn]))
    (train, validation), test = parts, Part(x[rest], y[rest])
    classes = tuple(str(name) for name in found.target_names)
    return Data("digits", train, validation, test, classes, ood={"photographs": _photographs(test.x[:PHOTOGRAPHS])})


def _photographs(like: Tensor) -> Tensor:
    """Return one patch of a photograph per image in `like`, with the pixel values of that image."""
    needed("PIL.Image", "data", "photographs")  # scikit-learn reads photographs with it
    pieces = []
    for photograph in needed("sklearn.datasets", "data", "photographs").load_sample_images().images:
        grey = torch.tensor(photograph, dtype=torch.float64).mean(2)[None, None]
        small = torch.nn.functional.avg_pool2d(grey, 2)[0, 0]  # finer detail than a digit's strokes would be noise
        pieces.append(small.unfold(0, 8, 8).unfold(1, 8, 8).reshape(-1, 1, 8, 8))
    every = torch.cat(pieces)
    # Select the patches with the most contrast: a uniform sky would be stretched into noise.
    chosen = every.std((1, 2, 3)).argsort(descending=True, stable=True)[: len(like)].sort().values
    darkest_first = every[chosen].flatten(1).argsort(stable=True)
    pixels = torch.empty_like(like).flatten(1)
    return pixels.scatter_(1, darkest_first, like.flatten(1).sort().values).view_as(like)
