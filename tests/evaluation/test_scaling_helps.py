"""Whether a scaling is kept: where networks are too sure, and not where a few rows happen to be all right."""

from __future__ import annotations

import pytest
import torch

from multitudes import Predictive
from multitudes.evaluation.calibrate import helpful_scaling


def logits(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[1, N, 2]` and classes that are drawn with the probabilities that these tell."""
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(rows, generator=generator)
    y = (torch.rand(rows, generator=generator) < z.sigmoid()).long()
    return torch.stack([torch.zeros(rows), z], 1)[None], y


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_predictions_that_are_too_sure_or_not_sure_enough_are_scaled(factor: float) -> None:
    z, y = logits(400, seed=0)
    scaling = helpful_scaling(Predictive(factor * z), y, 1)
    assert scaling is not None
    assert scaling.tensors["temperature"].item() == pytest.approx(factor, rel=0.4)


def test_calibrated_predictions_are_left_as_they_are() -> None:
    kept = [helpful_scaling(Predictive(z), y, 1) for z, y in (logits(100, seed) for seed in range(20))]
    assert sum(scaling is not None for scaling in kept) <= 2


def test_a_few_rows_that_are_all_right_make_nobody_surer() -> None:
    z = torch.tensor([[[3.0, 0.0], [0.0, 3.0]]]).repeat(1, 30, 1)
    y = torch.tensor([0, 1]).repeat(30)
    assert helpful_scaling(Predictive(z), y, 1) is None


def test_variances_are_scaled_where_that_gains_anything() -> None:
    target = torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
    narrow = torch.tensor([0.0, -3.0]).expand(1, 200, 2)  # variance 0.05, where 1 is right
    scaling = helpful_scaling(Predictive(narrow.contiguous(), task="gaussian"), target, 1)
    assert scaling is not None
    assert scaling(Predictive(narrow.contiguous(), task="gaussian")).variance.mean().item() == pytest.approx(1, rel=0.2)


def test_fewer_than_twenty_rows_tell_nothing() -> None:
    z, y = logits(19, seed=0)
    assert helpful_scaling(Predictive(5 * z), y, 1) is None
