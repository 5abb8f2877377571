"""Quantiles: the pinball loss, the mixture of the members' distributions, and conformal intervals."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import mean_pinball_loss
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape.weight_space.weight_loss import WeightLoss
from multitudes.tasks.quantiles import default_levels, pinball
from tests.zoo.of_parts import Of

LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sampled(p: mt.Predictive, count: int = 200_000) -> np.ndarray:
    """Draws from the mixture, `[count, B]`: a member at random, and its quantile function at a random level."""
    generator = np.random.default_rng(0)
    levels = np.array(p.quantiles)
    values = np.sort(p.predictions.double().numpy(), axis=2)
    draws = []
    for own in values:  # [B, Q]
        low = own[:, 0] - (own[:, 1] - own[:, 0]) * levels[0] / (levels[1] - levels[0])
        high = own[:, -1] + (own[:, -1] - own[:, -2]) * (1 - levels[-1]) / (levels[-1] - levels[-2])
        knots = np.concatenate([low[:, None], own, high[:, None]], 1)
        u = generator.random(count // len(values))
        draws.append(np.stack([np.interp(u, [0, *levels, 1], each) for each in knots], 1))
    return np.concatenate(draws)


def test_the_loss_is_scikit_learns_pinball_loss() -> None:
    q, y = numbers(50, 5), numbers(50, seed=2)
    want = np.mean([mean_pinball_loss(y, q[:, i], alpha=level) for i, level in enumerate(LEVELS)])
    assert pinball(q, y, LEVELS).item() == pytest.approx(want, rel=1e-6)
    net = mt.Multitude(nn.Identity())
    net.quantiles = LEVELS
    assert net.task == "quantiles"
    assert net.loss(q, y).item() == pytest.approx(want, rel=1e-6)
    of_three = np.mean([mean_pinball_loss(y, q[:, i], alpha=level) for i, level in enumerate((0.05, 0.5, 0.95))])
    assert mt.Multitude(nn.Identity()).loss(q[:, :3], y, task="quantiles").item() == pytest.approx(of_three, rel=1e-6)
    dense = q.view(10, 5, 5).transpose(1, 2)  # [B, Q, D]
    other = net.loss(dense, y.view(10, 5)).item()
    assert other == pytest.approx(pinball(dense.transpose(1, 2).reshape(50, 5), y, LEVELS).item(), rel=1e-6)
    assert default_levels(19) == pytest.approx(np.arange(1, 20) / 20)


def test_a_single_members_quantiles_are_its_own() -> None:
    q = numbers(1, 6, 5).sort(2).values
    p = mt.Predictive(q, "quantiles", quantiles=LEVELS)
    for index, level in enumerate(LEVELS):
        torch.testing.assert_close(p.quantile(level), q[0, :, index])
    torch.testing.assert_close(p.median, q[0, :, 2])
    torch.testing.assert_close(p.interval(0.5), (q[0, :, 1], q[0, :, 3]))
    torch.testing.assert_close(p.interval(), (q[0, :, 0], q[0, :, 4]))  # the widest
    crossed = mt.Predictive(q.flip(2), "quantiles", quantiles=LEVELS)
    torch.testing.assert_close(crossed.median, p.median)
    assert repr(p) == (
        "Predictive(task='quantiles', members=1, inputs=6, outputs=[5], quantiles=(0.1, 0.25, 0.5, 0.75, 0.9))"
    )
    for level, sentence in (
        (0.9, "the quantile of level 0.05 is outside"),
        (1.5, "level must lie between 0 and 1, got 1.5"),
    ):
        with pytest.raises(ValueError, match=sentence):
            p.interval(level)


def test_members_together_are_the_mixture_of_their_distributions() -> None:
    p = mt.Predictive(2 * numbers(4, 3, 5), "quantiles", quantiles=LEVELS)
    draws = sampled(p)
    for level in (0.1, 0.3, 0.5, 0.9):
        np.testing.assert_allclose(p.quantile(level).numpy(), np.quantile(draws, level, axis=0), atol=0.05)
        below = (draws <= p.quantile(level).double().numpy()).mean(0)
        np.testing.assert_allclose(below, level, atol=5e-3)
    np.testing.assert_allclose(p.mean.numpy(), draws.mean(0), atol=0.03)
    np.testing.assert_allclose(p.variance.numpy(), draws.var(0), rtol=0.03)
    torch.testing.assert_close(p.variance, p.epistemic_variance + p.aleatoric_variance)
    shifted = mt.Predictive(p.predictions + 10 * torch.arange(4)[:, None, None], "quantiles", quantiles=LEVELS)
    assert (shifted.epistemic_variance > 100).all()  # members that disagree widen the interval
    widths = [high - low for low, high in (p.interval(), shifted.interval())]
    assert (widths[1] > widths[0] + 20).all()


def test_quantiles_of_a_normal_distribution_are_learned() -> None:
    torch.manual_seed(0)
    net = mt.deep_ensemble(nn.Linear(2, 3), 2, task="quantiles", seed=0)
    x = numbers(4000, 2)
    y = x[:, 0] + 0.5 * numbers(4000, seed=3)
    mt.fit(net, [(x, y)], 400, optimizer="adam", lr=0.03, seed=0)
    low, high = net.predict(torch.zeros(1, 2)).interval()
    reach = 0.5 * scipy.stats.norm.ppf(0.95)
    assert low.item() == pytest.approx(-reach, abs=0.06) and high.item() == pytest.approx(reach, abs=0.06)
    result = mt.evaluate(net, (x, y), scale=2.0)
    single = mt.Multitude(net.member(0))
    single.task = "quantiles"
    scores = mt.evaluate(single, (x, y))
    q = net.member(0)(x).detach().numpy()
    pinballs = [mean_pinball_loss(y, q[:, i], alpha=level) for i, level in enumerate((0.05, 0.5, 0.95))]
    assert scores["pinball"] == pytest.approx(np.mean(pinballs), rel=1e-5)
    assert scores["coverage"] == pytest.approx(((q[:, 0] <= y.numpy()) & (y.numpy() <= q[:, 2])).mean())
    assert scores["width"] == pytest.approx((q[:, 2] - q[:, 0]).mean(), rel=1e-5)
    assert result["width"] == pytest.approx(2 * mt.evaluate(net, (x, y))["width"])
    assert set(scores) == {"pinball", "coverage", "width"}
    assert mt.evaluate(mt.fuse([nn.Linear(2, 1)], task="quantiles"), (x, y)).keys() == {"pinball"}  # the median alone


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_conformal_quantiles_have_the_promised_coverage(level: float) -> None:
    net = mt.Multitude(nn.Identity())
    net.task = "quantiles"
    q = torch.tensor([-0.3, 0.0, 0.3]).repeat(6000, 1)  # far too narrow
    y = numbers(6000)
    calibrated = mt.calibrate(net, (q[:3000], y[:3000]))
    p = calibrated.predict(q[3000:])
    low, high = p.set(level)
    assert ((low <= y[3000:]) & (y[3000:] <= high)).double().mean() == pytest.approx(level, abs=0.02)
    for one, two in zip(p.interval(level), (low, high), strict=True):
        assert torch.equal(one, two)
    # One distance from both ends, and the k-th smallest of the scores max(low - y, y - high).
    scores = torch.maximum(-0.3 - y[:3000], y[:3000] - 0.3).sort().values
    k = int(np.ceil(3001 * level)) - 1
    assert high[0].item() == pytest.approx(0.3 + scores[k].item(), abs=1e-6)
    coverage = mt.evaluate(calibrated, (q[3000:], y[3000:]))["coverage"]
    assert coverage == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(
    ("levels", "sentence"),
    [
        ((0.5, 0.1), "quantiles must be levels in rising order"),
        ((0.0, 0.5), "quantiles must be levels between 0 and 1"),
        ((), "quantiles must be levels between 0 and 1"),
        ((0.1, 0.9), "quantiles must hold one level for each of the network's 3 predictions"),
    ],
)
def test_wrong_levels_are_errors(levels: tuple[float, ...], sentence: str) -> None:
    net = mt.Multitude(nn.Linear(2, 3))
    with pytest.raises(ValueError, match=sentence):
        net.quantiles = levels
        net.predict(numbers(4, 2))
    with pytest.raises(ValueError, match=r"y must have the predictions' shape without their quantiles, \[4\]"):
        net.loss(numbers(4, 2), numbers(4, 1), task="quantiles")


def test_layers_may_be_named_like_attributes_of_multitudes() -> None:
    layers = {"task": nn.Linear(2, 8), "quantiles": nn.Linear(8, 3)}  # names of multitudes' own
    net = mt.deep_ensemble(Of(lambda net, x: net.quantiles(net.task(x).relu()), **layers), 2, seed=0)
    net.quantiles = (0.1, 0.5, 0.9)
    x, y = numbers(8, 2), numbers(8, seed=2)
    want = sum(pinball(net.member(i)(x), y, (0.1, 0.5, 0.9)) for i in range(2))
    torch.testing.assert_close(net.loss(x, y), want)
    assert net.predict(x).quantiles == (0.1, 0.5, 0.9)
    objective = WeightLoss(net, (x, y))
    assert objective.value(objective.start).item() == pytest.approx(want.item(), rel=1e-5)
