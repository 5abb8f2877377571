"""Networks of variance layers: conversion, objective, ensembles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

import multitudes as mt
from multitudes.ensemble.multitude import Multitude
from multitudes.methods.variance import variance
from multitudes.methods.variance.kl import approximate_kl
from multitudes.methods.variance.layers import Absolute, VarianceLayer
from multitudes.networks.stochastic import expecting
from tests.methods.variance.test_variance import KINDS, each_kind, each_parameterization


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


@each_parameterization
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
