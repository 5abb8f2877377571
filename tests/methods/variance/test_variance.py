"""Variance layers, networks and divergences, compared with closed forms and numerical integration."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import integrate, stats
from torch import Tensor, nn

import multitudes as mt
from multitudes.ensemble.multitude import Multitude
from multitudes.methods.variance import variance
from multitudes.methods.variance.kl import approximate_kl, stochastic_kl, student_kl
from multitudes.methods.variance.layers import (
    PARAMETERIZATIONS,
    Absolute,
    VarianceConv1d,
    VarianceLayer,
    VarianceLinear,
)
from multitudes.networks.stochastic import expecting

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


# -- networks ----------------------------------------------------------------------------------------------


def network(activation: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8),
        activation or nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


# -- objective and ensembles -------------------------------------------------------------------------------


def test_the_loss_is_the_negative_elbo() -> None:
    torch.manual_seed(0)
    net = variance(network())
    x, y = torch.randn(6, 1, 4, 4), torch.randint(3, (6,))
    torch.manual_seed(1)
    loss = net.loss(x, y, dataset_size=60)
    torch.manual_seed(1)
    kl = 36 * approximate_kl(torch.tensor(-5.0)) + 512 * approximate_kl(torch.tensor(-5.0))
    torch.testing.assert_close(loss, F.cross_entropy(net(x)[0], y) + kl / 60)
    torch.testing.assert_close(net.kl(), kl)


def test_arguments_of_kl_override_the_settings() -> None:
    net = variance(network(), kl="student", nu=0.5)
    seeds = [torch.manual_seed(0) and net.kl(), torch.manual_seed(0) and net.kl(kind="student", nu=0.5)]
    assert seeds[0] == seeds[1]
    torch.testing.assert_close(net.kl(kind="approximate"), variance(network()).kl())
    with pytest.raises(ValueError, match=r"kind must be one of approximate, stochastic, student, got 'exact'"):
        net.kl(kind="exact")
    with pytest.raises(ValueError, match="nu must be above 0, got 0"):
        net.kl(nu=0)


def test_layers_converted_in_two_steps_count_once() -> None:
    twice = variance(variance(network(), ["0"]), ["4"], "neuron")
    torch.testing.assert_close(twice.kl(), variance(network(), ["0", "4"]).kl())


@pytest.mark.parametrize("parameterization", ["layer", "zero"])
def test_an_ensemble_of_variance_networks(parameterization: str) -> None:
    torch.manual_seed(0)
    net = mt.deep_ensemble(variance(network(), None, parameterization), 3)
    x, y = torch.randn(6, 1, 4, 4), torch.randint(3, (6,))
    mt.check(net, x)
    members = [net.member(i) for i in range(3)]
    torch.testing.assert_close(net.kl(), sum(member.kl() for member in members))
    for runner in ("loop", "packed", "vmapped"):
        net.runner = runner
        torch.testing.assert_close(net.eval()(x, draws=0), torch.cat([m.eval()(x, draws=0) for m in members]))
    name = "4.sigma" if parameterization == "zero" else "4.weight"
    assert not torch.equal(net.get_parameter(f"0.{name}"), net.get_parameter(f"1.{name}"))
    net.train().loss(x, y, dataset_size=60).backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in net.parameters())


# -- conversion --------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("parameterization", ["layer", "neuron", "weight", "additive"])
def test_from_a_pretrained_network_the_deterministic_procedure_is_that_network(
    kind: str, parameterization: str
) -> None:
    model = nn.Sequential(KINDS[kind][0]()).double()
    model[0].weight.requires_grad_(False)
    net = variance(model, ["0"], parameterization, init="pretrained")
    x = torch.randn(3, *KINDS[kind][1], dtype=torch.float64)
    torch.testing.assert_close(net(x, draws=0)[0], model(x), rtol=0, atol=0)
    layer = net.network.get_submodule("0")
    assert isinstance(layer, VarianceLayer) and isinstance(layer, type(model[0]))
    assert layer.weight is not model[0].weight and not layer.weight.requires_grad
    rms = model[0].weight.square().mean()
    if parameterization == "additive":
        torch.testing.assert_close(layer.variance(), (math.exp(-5) * rms).expand_as(layer.weight))
    else:
        torch.testing.assert_close(layer.variance(), math.exp(-5) * layer.weight**2)


def test_from_a_pretrained_network_a_zero_centered_layer_has_the_weights_as_its_deviations() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    layer: Any = variance(model, ["0"], "zero", init="pretrained").network.get_submodule("0")
    torch.testing.assert_close(layer.sigma, model[0].weight)
    assert not hasattr(layer, "log_alpha") and "weight" not in dict(layer.named_parameters())
    assert torch.equal(layer.weight, torch.zeros(3, 4))


def test_fresh_deviations_are_uniform_in_the_root_of_the_fan_in() -> None:
    layer: Any = variance(nn.Sequential(nn.Conv2d(8, 500, 3, groups=2)), ["0"], "zero").network.get_submodule("0")
    bound = 1 / math.sqrt(4 * 9)
    uniform = stats.kstest(layer.sigma.detach().flatten().numpy(), stats.uniform(-bound, 2 * bound).cdf)
    assert uniform.pvalue > 0.001


def test_all_layers_but_the_last_are_converted_unless_named() -> None:
    def converted(net: Multitude) -> list[str]:
        return [name for name, layer in net.named_modules() if isinstance(layer, VarianceLayer)]

    assert converted(variance(network())) == ["0", "4"]
    assert converted(variance(network(), ["6"])) == ["6"]


def test_a_zero_centered_layer_and_an_absolute_value() -> None:
    net = variance(network(Absolute()), ["4"], "zero").eval()
    torch.testing.assert_close(Absolute()(torch.tensor([-2.0, 3.0])), torch.tensor([2.0, 3.0]))
    x = torch.randn(6, 1, 4, 4)
    with expecting(net.network):
        same = net.network(x)
    torch.testing.assert_close(same, same[:1].expand_as(same))  # no input reaches the output


def test_alpha_can_have_its_own_learning_rate() -> None:
    net = variance(network())
    groups = net.parameter_groups(lr=3e-3, log_alpha=0.1)
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    for name, parameter in net.named_parameters():
        assert rates[id(parameter)] == (0.1 if name.endswith("log_alpha") else 3e-3)


def hooked() -> nn.Module:
    model = network()
    model[4].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parameterization": "row"}, r"parameterization must be one of layer, neuron, .* zero, got 'row'"),
        ({"kl": "exact"}, r"kl must be one of approximate, stochastic, student, got 'exact'"),
        ({"log_alpha": 21}, r"log_alpha must be -20 or more and at most 20, got 21"),
        ({"log_alpha": "low"}, r"log_alpha must be -20 or more and at most 20, got 'low'"),
        ({"nu": 0.0}, r"nu must be above 0, got 0.0"),
        ({"init": "zero"}, r"init must be one of fresh, pretrained, heads, got 'zero'"),
        ({"layers": ["1"]}, r"layer '1' is a BatchNorm2d, which this method cannot convert"),
        ({"layers": "x"}, r"layers='x' selects nothing; it could select: 0, 4, 6"),
        ({"model": nn.Sequential(nn.Linear(2, 2))}, r"has only one layer: layers=\['0'\] converts it"),
        ({"model": nn.Sequential(nn.ReLU())}, r"no layer that can be converted: it has no parameters"),
        ({"model": mt.deep_ensemble(network(), 2)}, r"model is a multitude of members already"),
        ({"model": hooked()}, r"'4' has forward hooks"),
        ({"model": 3}, r"model must be an nn.Module, or a function that builds one, got int"),
    ],
)
def test_bad_arguments_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        variance(**{"model": network(), **arguments})
    with pytest.raises(ValueError, match="parameterization must be one of"):
        VarianceConv1d(2, 2, 3, parameterization="kernel")
