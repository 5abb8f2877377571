"""The function priors of dropout and patching against their covariances."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from multitudes.landscape import function_prior


def covariance(kind: str, x: Tensor, hidden: int, rate: float = 0.5) -> Tensor:
    """`Cov(y(x), y(x'))` in closed form, `[G, G]`.

    Signs of two normal variables of correlation r agree in the mean by `2 / pi arcsin r`. Without its w, with
    probability p, a unit is the sign of b for both; and dropout keeps W with probability `1 - p`.
    """
    size = 20 + 5 * x.square()
    r = (20 + 5 * x[:, None] * x) / (size[:, None] * size).sqrt()
    p = rate if kind == "dropout" else 0.0
    return 20 + hidden * (1 - p) * 5 * (p + (1 - p) * 2 / math.pi * torch.arcsin(r.clamp(-1, 1)))


@pytest.mark.parametrize("kind", ["gaussian", "dropout", "patching"])
def test_functions_have_the_covariance_of_the_closed_form(kind: str) -> None:
    x = torch.tensor([-3.0, 0.0, 0.5, 4.0])
    found = function_prior(kind, 20_000, x, hidden=20).functions
    want = covariance(kind, x, 20)
    deviations = want.diagonal().sqrt()
    # Four standard errors of the covariance of nearly normal variables.
    error = ((want.square() + (deviations[:, None] * deviations).square()) / 20_000).sqrt()
    assert ((found.T.cov() - want).abs() < 4 * error).all()
    assert (found.mean(0).abs() < 4 * deviations / 20_000**0.5).all()


@pytest.mark.parametrize(("kind", "variance"), [("patching", 20 + 100 * 5), ("dropout", 20 + 50 * 5)])
def test_functions_have_the_papers_variances(kind: str, variance: float) -> None:
    """Half of the hidden units have no W with dropout."""
    found = function_prior(kind, 4000, torch.linspace(-5, 5, 3)).functions.var(0)
    assert found.numpy() == pytest.approx(variance, rel=4 * (2 / 4000) ** 0.5)


def test_functions_are_those_of_the_network() -> None:
    """One function of one hidden unit: two values, with the step where the unit's sign changes."""
    values = function_prior("gaussian", 1, torch.linspace(-50, 50, 1001), hidden=1, seed=3).functions[0]
    assert len(values.unique()) == 2
    assert (values.diff() != 0).sum() == 1


def test_half_of_the_units_of_dropout_do_not_see_x_so_that_patching_expresses_finer_details() -> None:
    """Functions have about as many steps as there are units with both their weights (Fig. 3)."""
    x = torch.linspace(-1000, 1000, 200_001)
    dropout, patching = (
        (function_prior(kind, 4, x, hidden=40).functions.diff(dim=1).abs() > 1e-3).sum(1).float().mean().item()
        for kind in ("dropout", "patching")
    )
    assert patching == pytest.approx(40, rel=0.1)  # some units step at the same place, or far away
    assert dropout == pytest.approx(10, rel=0.5)


def test_a_seed_chooses_the_functions() -> None:
    one, same, other = (function_prior("dropout", seed=seed).functions for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    pytest.importorskip("plotly")
    assert len(function_prior("dropout").plot().data) == 3
