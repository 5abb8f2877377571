"""The function priors of dropout and patching against their covariances."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from multitudes.landscape.prior import Prior, function_prior


@pytest.mark.parametrize("kind", ["gaussian", "dropout", "patching"])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_functions_have_the_covariance_of_the_closed_form(kind: str, dimensions: int) -> None:
    x = torch.tensor([[-3.0, 1.0], [0.0, 0.0], [0.5, 2.0], [4.0, -1.0]])[:, :dimensions]
    found = function_prior(kind, 20_000, x, hidden=20)
    want = found.prior.covariance(x, x)
    covariance = found.functions.T.cov()
    deviations = want.diagonal().sqrt()
    # Four standard errors of the covariance of nearly normal variables.
    error = ((want.square() + (deviations[:, None] * deviations).square()) / 20_000).sqrt()
    assert ((covariance - want).abs() < 4 * error).all()
    assert (found.functions.mean(0).abs() < 4 * deviations / 20_000**0.5).all()


def test_the_papers_variances() -> None:
    """20 + 100 * 5, and half of the hidden units with dropout."""
    x = torch.linspace(-5, 5, 11)[:, None]
    torch.testing.assert_close(Prior("patching").covariance(x, x).diagonal(), torch.full((11,), 520.0))
    torch.testing.assert_close(Prior("dropout").covariance(x, x).diagonal(), torch.full((11,), 270.0))


def test_functions_are_those_of_the_network() -> None:
    """One function of one hidden unit, by hand: two values, with the step where the unit's sign changes."""
    found = function_prior("gaussian", 1, torch.linspace(-50, 50, 1001), hidden=1, seed=3)
    values = found.functions[0]
    assert len(values.unique()) == 2
    assert (values.diff() != 0).sum() == 1


def test_half_of_the_units_of_dropout_do_not_see_x() -> None:
    """Functions have about as many steps as there are units with both their weights."""
    x = torch.linspace(-1000, 1000, 200_001)
    steps = {
        kind: (function_prior(kind, 4, x, hidden=40).functions.diff(dim=1).abs() > 1e-3).sum(1).float().mean().item()
        for kind in ("dropout", "patching")
    }
    assert steps["patching"] == pytest.approx(40, rel=0.1)  # some units step at the same place, or far away
    assert steps["dropout"] == pytest.approx(10, rel=0.5)


def test_patching_expresses_finer_details_than_dropout() -> None:
    """Between neighbouring points its functions change far more often (Fig. 3)."""
    x = torch.linspace(-10, 10, 2001)
    changes = {
        kind: (function_prior(kind, 50, x).functions.diff(dim=1).abs() > 1e-3).float().mean().item()
        for kind in ("dropout", "patching")
    }
    assert changes["patching"] > 2 * changes["dropout"]


def test_two_draws_of_one_patched_network_share_what_chance_gives_them() -> None:
    """A component is the same in both with probability 1/K, so B gives 20 / K, and so on for W, w and b."""
    components, hidden, at = 5, 10, 2.0
    pairs = np.array([
        function_prior("patching", 2, torch.tensor([at]), hidden=hidden, shared=True, seed=seed).functions[:, 0].numpy()
        for seed in range(6000)
    ])  # fmt: skip
    same = 1 / components
    size = 20 + 5 * at**2

    def agree(r: float) -> float:
        return 2 / np.pi * np.arcsin(r)

    signs = (
        same * same * agree(1.0) + same * (1 - same) * agree(20 / size) + (1 - same) * same * agree(5 * at**2 / size)
    )
    want = 20 * same + hidden * 5 * same * signs
    covariance = (pairs[:, 0] * pairs[:, 1]).mean()
    error = (pairs[:, 0] * pairs[:, 1]).std() / 6000**0.5
    assert abs(covariance - want) < 4 * error


def test_two_draws_of_one_network_with_dropout_share_its_weights() -> None:
    rate, hidden, at = 0.3, 10, 2.0
    pairs = np.array([
        function_prior("dropout", 2, torch.tensor([at]), hidden=hidden, rate=rate, shared=True, seed=seed)
        .functions[:, 0].numpy()
        for seed in range(6000)
    ])  # fmt: skip
    kept = 1 - rate
    one = 2 / np.pi * np.arcsin(20 / np.sqrt(20 * (20 + 5 * at**2)))  # one sees x, the other b alone
    signs = kept**2 + rate**2 + 2 * kept * rate * one
    want = 20 + hidden * 5 * kept**2 * signs
    products = pairs[:, 0] * pairs[:, 1]
    assert abs(products.mean() - want) < 4 * products.std() / 6000**0.5


def test_a_seed_gives_the_same_functions_and_leaves_torchs_state_alone() -> None:
    state = torch.get_rng_state()
    one, same, other = (function_prior("dropout", seed=seed).functions for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(state, torch.get_rng_state())


def test_functions_over_a_plane() -> None:
    found = function_prior("patching", 1, dimensions=2)
    assert found.x.shape == (1681, 2) and found.functions.shape == (1, 1681)
    assert len(found.plot().data[0].x) == 1681
    assert len(function_prior("dropout").plot().data) == 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kind": "laplace"}, "kind must be one of gaussian, dropout, patching, got 'laplace'"),
        ({"functions": 0}, "functions must be a whole number"),
        ({"rate": 1.0}, "rate must be 0 or more and below 1, got 1.0"),
        ({"components": 0}, "components must be a whole number"),
        ({"dimensions": 3}, "dimensions must be 1 or 2, got 3"),
        ({"x": torch.zeros(2, 2, 2)}, "x must be finite floating-point points"),
        ({"x": torch.tensor([torch.nan])}, "x must be finite"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        function_prior(**wrong)  # type: ignore[arg-type]
