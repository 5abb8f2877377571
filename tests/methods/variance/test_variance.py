"""Variance layers and their divergences against closed forms and numerical integration."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.methods.variance import variance
from multitudes.methods.variance.kl import approximate_kl, stochastic_kl, student_kl
from multitudes.methods.variance.layers import PARAMETERIZATIONS, VarianceConv1d, VarianceLinear

KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "sequence": (lambda: nn.Linear(5, 3, bias=False), (4, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 2), padding=(1, 0), dilation=(1, 2)), (2, 4, 5)),
    "reflecting": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect", bias=False), (2, 4, 4)),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_parameterization = pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)


def one_layer(kind: str, parameterization: str, batch: int = 3) -> tuple[Multitude, Any, Tensor]:
    """A network of one variance layer with a spread that differs from weight to weight, and a batch for it."""
    torch.manual_seed(0)
    plain, shape = KINDS[kind][0](), KINDS[kind][1]
    net = variance(nn.Sequential(plain), ["0"], parameterization).eval()
    layer: Any = net.network.get_submodule("0")
    for name in ("log_alpha", "log_sigma"):
        if hasattr(layer, name):
            getattr(layer, name).data = torch.randn_like(getattr(layer, name)) * 0.7
    return net, layer, torch.randn(batch, *shape)


def variances(layer: Any) -> Tensor:
    """Each weight's variance, as eq. (12) and (17) to (20) have it."""
    if layer.parameterization == "zero":
        return layer.sigma.detach() ** 2
    if layer.parameterization == "additive":
        return torch.exp(layer.log_sigma.detach()) ** 2
    return (torch.exp(layer.log_alpha) * layer.weight**2).detach()


# -- draws -------------------------------------------------------------------------------------------------


@pytest.mark.quick(10)
@each_kind
@each_parameterization
def test_outputs_are_normal_with_the_mean_and_variance_of_eq_21_to_24(kind: str, parameterization: str) -> None:
    net, layer, x = one_layer(kind, parameterization)
    draws = 10_000
    with torch.no_grad():
        drawn = net(x, draws=draws, seed=1)
    # A product is linear in its weights: b = J w + bias, so that Var b = J^2 Var w for weights that are independent.
    plain = KINDS[kind][0]().requires_grad_(False)
    jacobian = torch.func.jacrev(lambda w: torch.func.functional_call(plain, {"weight": w, **bias(plain, 0.0)}, (x,)))(
        plain.weight
    ).flatten(-plain.weight.dim())
    shift = torch.func.functional_call(plain, {"weight": 0 * plain.weight, **bias(plain, layer.bias)}, (x,))
    mean = jacobian @ layer.weight.flatten() + shift
    variance_ = jacobian**2 @ variances(layer).flatten()
    error = (drawn.mean(0) - mean).abs() / (variance_ / draws).sqrt()
    assert error.max() < 4.5
    assert ((drawn.var(0) / variance_ - 1).abs() / math.sqrt(2 / draws)).max() < 4.5
    fourth = ((drawn - mean) ** 4).mean(0) / variance_**2  # 3 for a normal distribution
    assert abs(fourth.mean() - 3) < 0.1
    torch.testing.assert_close(net(x, draws=0)[0], mean)


def bias(plain: nn.Module, value: Any) -> dict[str, Tensor]:
    if plain.bias is None:
        return {}
    return {"bias": value.detach() if isinstance(value, Tensor) else torch.full_like(plain.bias, value)}


@each_parameterization
@pytest.mark.parametrize("kind", ["sequence", "conv1d", "conv2d"])
def test_noise_is_independent_for_each_example_and_position(kind: str, parameterization: str) -> None:
    net, _, x = one_layer(kind, parameterization)
    x = torch.ones_like(x)  # alike examples and positions, so that shared noise would correlate fully
    with torch.no_grad():
        noise = net(x, draws=3000, seed=0) - net(x, draws=0)
    correlations = torch.corrcoef(noise.flatten(1).T)
    assert (correlations - torch.eye(len(correlations))).abs().max() < 0.1


@pytest.mark.parametrize("start", [-30.0, 30.0])
def test_log_alpha_is_used_from_minus_20_to_20(start: float) -> None:
    layer = VarianceLinear(3, 2)
    layer.log_alpha.data.fill_(start)
    torch.testing.assert_close(layer.variance(), math.exp(math.copysign(20, start)) * layer.weight**2)
    assert layer.kl().isfinite()


# -- numbers that are hard to compute with -----------------------------------------------------------------


@each_kind
@each_parameterization
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_are_finite_where_inputs_are_zero_or_large(
    kind: str, parameterization: str, dtype: torch.dtype
) -> None:
    net, layer, x = one_layer(kind, parameterization)
    net.to(dtype)
    x = (400 * x).to(dtype)  # half numbers end at 65504, below 400^2
    x[0] = 0
    x.requires_grad_()
    y = net.train()(x)
    assert y.dtype == dtype
    (y.float() / 400).square().mean().backward()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad.isfinite().all()
    assert x.grad[1:].any()


def test_half_precision_draws_are_those_of_float32() -> None:
    net, _, x = one_layer("linear", "layer")
    x = 300 * x
    half = copy.deepcopy(net).half()
    wide = half(x.half(), draws=2000, seed=0).float()
    torch.testing.assert_close(wide.std(0), net(x, draws=2000, seed=0).std(0), rtol=0.1, atol=0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        auto = net(x, draws=2000, seed=0).float()
    torch.testing.assert_close(auto, net(x, draws=2000, seed=0), rtol=0.02, atol=3.0)


# -- divergences -------------------------------------------------------------------------------------------


@functools.cache
def expected_log(log_alpha: float) -> float:
    """-1/2 log alpha + E log|1 + sqrt(alpha) eps|, by numerical integration on both sides of the pole."""
    root = math.exp(log_alpha / 2)

    def integrand(eps: float) -> float:
        return math.exp(-(eps**2) / 2) / math.sqrt(2 * math.pi) * math.log(abs(1 + root * eps) + 1e-300)

    cuts = sorted({-12.0, 12.0, max(-12.0, -1 / root)})
    parts = [integrate.quad(integrand, *cut, epsabs=1e-7, epsrel=1e-7)[0] for cut in itertools.pairwise(cuts)]
    return -log_alpha / 2 + sum(parts)


LOG_ALPHAS = [-8 + i / 2 for i in range(33)]


def test_eq_10_is_the_divergence_within_a_hundredth_of_a_nat() -> None:
    exact = torch.tensor([expected_log(a) for a in LOG_ALPHAS], dtype=torch.float64)
    difference = approximate_kl(torch.tensor(LOG_ALPHAS, dtype=torch.float64)) - exact
    constant = (math.log(2) - float(torch.digamma(torch.tensor(1.0, dtype=torch.float64)))) / 2  # -E log|eps|
    assert (difference - constant).abs().max() < 0.01


@pytest.mark.parametrize("log_alpha", [-8.0, -3.0, 0.0, 2.0, 8.0])
def test_eq_9_is_unbiased(log_alpha: float) -> None:
    torch.manual_seed(0)
    samples = stochastic_kl(torch.tensor(log_alpha, dtype=torch.float64), torch.randn(1_000_000, dtype=torch.float64))
    exact = expected_log(log_alpha) - expected_log(60.0)
    assert abs(samples.mean() - exact) < 4 * samples.std() / 1000


@pytest.mark.parametrize("nu", [0.5, 3.0, 30.0])
@pytest.mark.parametrize(("mean", "deviation"), [(0.3, 0.1), (-2.0, 3.0), (0.0, 0.5)])
def test_eq_25_is_the_divergence_from_students_prior(nu: float, mean: float, deviation: float) -> None:
    torch.manual_seed(0)
    mean_, variance_ = torch.tensor(mean, dtype=torch.float64), torch.tensor(deviation**2, dtype=torch.float64)
    samples = student_kl(mean_, variance_, torch.randn(400_000, dtype=torch.float64), nu)
    q, p = stats.norm(mean, deviation), stats.t(nu)
    exact = integrate.quad(
        lambda w: q.pdf(w) * (q.logpdf(w) - p.logpdf(w)), mean - 12 * deviation, mean + 12 * deviation
    )[0]
    assert abs(samples.mean() - exact) < 4 * samples.std() / math.sqrt(len(samples)) + 1e-9


@pytest.mark.parametrize("parameterization", ["layer", "neuron", "weight", "additive"])
def test_a_layers_divergence_is_the_sum_over_its_weights(parameterization: str) -> None:
    _, layer, _ = one_layer("sequence", parameterization)
    alphas = (variances(layer) / layer.weight**2).expand_as(layer.weight)
    torch.testing.assert_close(layer.kl(), approximate_kl(alphas.log()).sum())
    many = torch.stack([layer.kl("stochastic") for _ in range(2000)])
    exact = sum(expected_log(a) - expected_log(60.0) for a in alphas.log().flatten().tolist())
    assert abs(many.mean() - exact) < 4 * many.std() / math.sqrt(2000)


def test_estimates_use_separate_noise_for_each_weight() -> None:
    layer = VarianceLinear(40, 25, log_alpha=0.0)
    torch.manual_seed(0)
    many = torch.stack([layer.kl("stochastic") for _ in range(1000)])
    one = stochastic_kl(torch.tensor(0.0), torch.randn(100_000)).std()
    assert abs(many.std() / (one * math.sqrt(1000)) - 1) < 0.1  # one number for all would give 1000 * one


def test_a_zero_centered_layer_has_no_divergence_from_the_log_uniform_prior_but_from_students() -> None:
    layer = VarianceLinear(40, 25, parameterization="zero")
    assert layer.kl("approximate") == layer.kl("stochastic") == 0
    for nu in (0.5, 5.0):
        q, p = stats.norm(0, 0.1), stats.t(nu)
        layer.sigma.data.fill_(0.1)
        exact = 1000 * integrate.quad(lambda w, p=p, q=q: q.pdf(w) * (q.logpdf(w) - p.logpdf(w)), -1.2, 1.2)[0]
        estimates = torch.stack([layer.kl("student", nu) for _ in range(200)])
        assert abs(estimates.mean() - exact) < 4 * estimates.std() / math.sqrt(200)


# -- every parameterization of every layer -----------------------------------------------------------------


def test_a_layer_checks_its_arguments_too() -> None:
    with pytest.raises(ValueError, match="parameterization must be one of"):
        VarianceConv1d(2, 2, 3, parameterization="kernel")
