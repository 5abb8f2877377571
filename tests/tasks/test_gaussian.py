"""The criteria of task "gaussian": likelihood and beta-NLL in closed form, and the density of a mixture."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

import multitudes as mt
from multitudes.tasks.gaussian import VARIANCE_FLOOR, beta_nll, gaussian_nll, mixture_nll, split_gaussian
from tests.zoo.predictions import raises, randn

P = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
Y = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3


def gradient(beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the sum over values, with respect to means and raw variances."""
    p = P.clone().requires_grad_()
    beta_nll(p, Y, beta, reduction="sum").backward()
    return p.grad.chunk(2, 1)


@pytest.mark.parametrize("shape", [(1, 2), (7, 6), (3, 4, 5, 6)], ids=str)
def test_the_likelihood_is_torchs(shape):
    prediction, target = randn(*shape), randn(shape[0], shape[1] // 2, *shape[2:], seed=1)
    mean, variance = split_gaussian(prediction)
    loss = gaussian_nll(prediction, target)
    assert loss.shape == ()
    torch.testing.assert_close(loss, F.gaussian_nll_loss(mean, target, variance, full=True))
    p = mt.Predictive(prediction[None], task="gaussian")  # which reads the same Gaussian
    torch.testing.assert_close(loss, -Normal(p.mean, p.std).log_prob(target).mean())


def test_half_precision_is_computed_in_float32_and_a_variance_has_a_floor():
    prediction, target = P.bfloat16(), Y.bfloat16()
    loss = gaussian_nll(prediction, target)
    assert loss.dtype == torch.float32 and torch.equal(loss, gaussian_nll(prediction.float(), target.float()))
    p = mt.Predictive(torch.tensor([[[0.0, -1e4]]]), task="gaussian")
    assert p.variance.item() == pytest.approx(VARIANCE_FLOOR)


def test_beta_0_is_the_negative_log_likelihood():
    torch.testing.assert_close(beta_nll(P, Y, 0.0), gaussian_nll(P, Y))
    mean, variance = split_gaussian(P)
    want = -Normal(mean, variance.sqrt()).log_prob(Y)
    torch.testing.assert_close(gaussian_nll(P, Y, reduction="none"), want)
    torch.testing.assert_close(beta_nll(P, Y, 0.5, reduction="none"), want * variance.sqrt())


def test_at_beta_1_means_have_the_gradient_of_half_the_squared_error():
    of_means, _ = gradient(1.0)
    torch.testing.assert_close(of_means, P[:, :3] - Y)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_gradients_are_those_of_the_paper(beta):
    mean, variance = split_gaussian(P)
    of_means, of_raw = gradient(beta)
    torch.testing.assert_close(of_means, (mean - Y) * variance ** (beta - 1))  # equation 8
    slope = P[:, 3:].sigmoid()  # of softplus
    torch.testing.assert_close(of_raw, (variance - (Y - mean) ** 2) / 2 * variance ** (beta - 2) * slope)  # equation 9


@pytest.mark.parametrize("criterion", [beta_nll, partial(beta_nll, beta=1.0), partial(beta_nll, beta=0.0)])
def test_beta_nll_is_a_criterion_of_task_gaussian(criterion):
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    net = mt.deep_ensemble(nn.Linear(4, 2), 3, task="gaussian", seed=0)
    want = sum(criterion(net.member(i)(x), y) for i in range(3))
    torch.testing.assert_close(net.loss(x, y, criterion), want)
    assert len(mt.fit(net, [(x, y)], 2, criterion=criterion)) == 2
    with pytest.raises(ValueError, match="criterion beta_nll is for task 'gaussian', and the task is 'regression'"):
        net.loss(x, y, criterion, task="regression")
    with pytest.raises(ValueError, match=r"target must have the means' shape \[32, 1\], got \[32\]"):
        net.loss(x, y[:, 0], criterion)


def test_wrong_arguments_are_errors():
    for beta in (-0.1, 1.1, "0.5"):
        with pytest.raises(ValueError, match="beta must be 0 or more and at most 1, got"):
            beta_nll(P, Y, beta)
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'none', got 'batch'"):
        gaussian_nll(P, Y, reduction="batch")
    for shape in ((), (4,), (4, 3)):
        with raises(
            "gaussian predictions need as many raw variances as means, an even number in dim 1, "
            f"got shape {list(shape)}"
        ):
            gaussian_nll(torch.zeros(shape), torch.zeros(4, 1))


def test_a_mixture_is_the_mean_of_its_members_densities():
    members = torch.stack([P / 3, P / 3 + 1, P / 2]).clamp(min=-1)  # no density underflows
    densities = []
    for member in members:
        mean, variance = split_gaussian(member)
        densities.append(Normal(mean, variance.sqrt()).log_prob(Y).exp())
    torch.testing.assert_close(mixture_nll(members, Y), -torch.stack(densities).mean(0).log())
    far = mixture_nll(members, Y + 1e4)  # where densities underflow
    assert far.isfinite().all()
