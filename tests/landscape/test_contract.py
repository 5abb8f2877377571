"""All analyses: arguments are not changed, seeds repeat results, results have figures, wrong arguments are named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes import landscape
from multitudes.landscape.accuracy_diversity import family, fit_exponent, lower_limit, upper_limit
from multitudes.landscape.weight_space.directions import Frame

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(24, 1, 8, 8, generator=GENERATOR)
Y = torch.randint(3, (24,), generator=GENERATOR)
DATA = X, Y


def convolutional(seed: int = 0) -> nn.Sequential:
    """A network with batch norm and dropout, whose state evaluation must not change."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.MaxPool2d(4)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3))


def noisy(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


class Oracle(nn.Module):
    """A network that is always right: a reference above chance."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(nn.functional.one_hot(Y, 3).float())

    def forward(self, x: Tensor) -> Tensor:
        return self.table[: len(x)]


LEFT, RIGHT, ALWAYS = convolutional(1), convolutional(2), Oracle()

ANALYSES: dict[str, Callable[[mt.Multitude], Any]] = {
    "plane": lambda net: landscape.plane(
        net, DATA, along=[landscape.random_direction(net, seed) for seed in (0, 1)], points=2, seeds=[1], draws=2
    ),
    "plane, batch norm": lambda net: landscape.plane(
        net, DATA, through=[net.network, LEFT, RIGHT], points=2, batch_norm=X, noise="fresh"
    ),
    "tunnel": lambda net: landscape.tunnel(net, net.network, LEFT, DATA, points=3, steps=2),
    "hessian_spectrum": lambda net: landscape.hessian_spectrum(net, DATA, 2, batch_size=12, draws=1, augment=noisy),
    "sharpness": lambda net: landscape.sharpness(net, DATA, steps=2, draws=1),
    "expected_sharpness": lambda net: landscape.expected_sharpness(net, DATA, samples=3),
    "expected_sharpness, draws": lambda net: landscape.expected_sharpness(net, DATA, None, samples=3),
    "loss_variance": lambda net: landscape.loss_variance(net, DATA, (1, 2), draws=8),
    "feature_uncertainty": lambda net: landscape.feature_uncertainty(net, DATA, draws=2),
    "neighbour_covariance": lambda net: landscape.neighbour_covariance(net, DATA),
    "feature_spectrum": lambda net: landscape.feature_spectrum(net, DATA, draws=2),
    "function_prior": lambda net: landscape.function_prior(),
    "similarity": lambda net: landscape.similarity({"a": net, "b": [LEFT, RIGHT]}, X, draws=2),
    "function_map": lambda net: landscape.function_map({"a": net, "b": [LEFT, RIGHT]}, X, draws=3),
    "diversity_plane": lambda net: landscape.diversity_plane(
        {"right": ALWAYS, "a": net, "b": [LEFT, RIGHT]}, DATA, draws=2, reference="right"
    ),
    "growth": lambda net: landscape.growth({"a": {"k": net}, "b": {"k": LEFT}}, DATA, draws=2),
}


def tensors(result: Any) -> list[Tensor]:
    """All tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        return tensors(list(result.values()))
    if isinstance(result, (list, tuple)):
        return [tensor for part in result for tensor in tensors(part)]
    return tensors([getattr(result, f.name) for f in fields(result)]) if hasattr(result, "__dataclass_fields__") else []


@pytest.mark.parametrize("name", ANALYSES)
def test_arguments_are_not_changed_and_a_seed_repeats_the_result(name: str) -> None:
    net = mt.mc_dropout(convolutional()).train()
    net.network[2].eval()
    before, modes = copy.deepcopy(net.state_dict()), [module.training for module in net.modules()]
    state = torch.get_rng_state()
    first = ANALYSES[name](net)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[key]) for key, tensor in net.state_dict().items())
    assert [module.training for module in net.modules()] == modes
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())
    assert not any(module._forward_hooks for module in net.modules())
    again = ANALYSES[name](net)
    assert tensors(first) and not any(tensor.is_cuda or tensor.requires_grad for tensor in tensors(first))
    torch.testing.assert_close(tensors(again), tensors(first), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", ANALYSES)
def test_results_have_a_figure(name: str) -> None:
    pytest.importorskip("plotly")
    fig = ANALYSES[name](mt.mc_dropout(convolutional())).plot()
    assert len(fig.data) and fig.layout.title.text


# -- wrong arguments ---------------------------------------------------------------------------------------

NET, OTHER = nn.Linear(5, 4), nn.Linear(5, 4)
DROPS = mt.mc_dropout(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4)))
R, C = torch.randn(24, 5, generator=GENERATOR), torch.randint(4, (24,), generator=GENERATOR)
LINE = [torch.ones(24)]
SHARES = torch.tensor([0.5, 0.6])


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def plane(data: Any = (R, C), network: nn.Module = NET, **options: Any) -> Any:
    return landscape.plane(network, data, **options)


def spectrum(network: Any = NET, data: Any = (R, C), **options: Any) -> Any:
    return landscape.hessian_spectrum(network, data, **{"top": 1} | options)


def tunnel(b: Any = OTHER, data: Any = (R, C), **options: Any) -> Any:
    return landscape.tunnel(NET, NET, b, data, **options)


def read(**solutions: Any) -> Any:
    return landscape.read_solutions(solutions, R)


ERRORS: list[tuple[Callable[[], Any], str]] = [
    # planes
    (lambda: plane(), "pass one of through, along and radial, got none"),
    (lambda: plane(through=[NET, OTHER], along=LINE), "pass one of .*, got through and along"),
    (lambda: plane(through=[NET]), "through must hold 2 or 3 solutions, got 1"),
    (lambda: plane(through=[NET, NET]), "b equals a"),
    (lambda: plane(radial=[NET, OTHER, OTHER]), "radial must hold 2 solutions, got 3"),
    (lambda: plane(through=[NET, nn.Linear(5, 3)]), r"through\[1\] does not fit the model"),
    (
        lambda: plane(along=[torch.ones(3)]),
        r"along\[0\] must be a vector with one number per weight, \[24\], got shape \[3\]",
    ),
    (lambda: plane(along=LINE, span=-1), "span must be above 0, got -1"),
    (lambda: plane(along=LINE, span=(1, 0)), "span must be a number above 0, or two numbers in order"),
    (lambda: plane(along=LINE, seeds=(0,)), "require a layer that draws"),
    (lambda: plane(along=LINE, noise="loud"), "noise must be 'fixed' or 'fresh', got 'loud'"),
    (lambda: plane((R, C + 1), along=LINE), "data must have classes 0 to 3, got 4"),
    (lambda: plane(R, along=LINE), "data must have targets"),
    (lambda: plane((R / 0, C), along=LINE), "batch 0 has NaN or infinite inputs"),
    (lambda: plane((R, R[:, 0]), along=LINE), "classes as targets for cross entropy"),
    (lambda: plane(network=mt.deep_ensemble(NET, 2), along=LINE), "network must be one network, got Members of 2"),
    (
        lambda: plane((R, R[:, :4]), along=LINE, criterion=nn.MSELoss()).plot("accuracy"),
        "what='accuracy' requires targets that are classes",
    ),
    # directions
    (
        lambda: landscape.filter_normalised(torch.ones(3), NET),
        r"direction must be a vector .*, \[24\], got shape \[3\]",
    ),
    (lambda: landscape.filter_normalised(LINE[0] / 0, NET), "direction must be finite, got inf at index 0"),
    (lambda: Frame.through([torch.zeros(2), SHARES, 2 * SHARES]), "c lies on the line through a and b"),
    (lambda: Frame.along(torch.zeros(2), [SHARES, -SHARES]), "the two directions are parallel"),
    # paths
    (lambda: tunnel(points=2), "points must be 3 or more"),
    (lambda: tunnel(NET), "a and b must have different weights"),
    (lambda: tunnel(lr=0), "lr must be above 0, got 0"),
    (lambda: tunnel(points=3, steps=1).plot("error"), "what must be one of loss, accuracy, agreement, got 'error'"),
    # curvature
    (lambda: spectrum(top=24), "top must be below the number of weights, 24, got 24"),
    (lambda: spectrum(method="qr"), "method must be one of lanczos, power, got 'qr'"),
    (lambda: spectrum(weight_decay=-1.0), "weight_decay must be 0 or more, got -1.0"),
    (lambda: spectrum(seed=-1), "seed must be None or a whole number"),
    (lambda: spectrum(draws=2), "draws=2 requires a multitude, got a Linear"),
    (lambda: spectrum(data=(R, C[:2])), "each with one target"),
    (lambda: spectrum(data=(R[:, :4], C)), "does not fit the network"),
    (lambda: spectrum(criterion=lambda p, y: p.sum() * torch.inf), "loss of network on data must be finite"),
    (lambda: spectrum(criterion=lambda p, y: p), "criterion must return a scalar"),
    (lambda: spectrum(copy.deepcopy(NET).requires_grad_(False)), "no parameter that requires a gradient"),
    (lambda: spectrum("net"), "network must be an nn.Module, got str"),
    # sharpness
    (lambda: landscape.sharpness(DROPS, (R, C), rho=0), "rho must be above 0, got 0"),
    (lambda: landscape.expected_sharpness(NET, (R, C), rho=None), "needs a multitude that draws, got a Linear"),
    (lambda: landscape.expected_sharpness(DROPS, (R, C), rho=None, draws=0), "rho=None needs a multitude that draws"),
    (lambda: landscape.loss_variance(NET, (R, C)), "net must be a multitude that draws, for classification, got a Lin"),
    (lambda: landscape.loss_variance(DROPS, (R, C), (1, 9), draws=16), "at most half of draws=16, got"),
    (lambda: landscape.loss_variance(DROPS, (R, R[:, 0])), "data must hold classes as targets"),
    # feature maps
    (lambda: landscape.feature_uncertainty(NET, R, layers=["nowhere"]), "no layer is named 'nowhere'"),
    (lambda: landscape.feature_uncertainty(NET, R, draws=0), "draws must be a whole number"),
    (lambda: landscape.feature_uncertainty(Unused(), R, layers=["unused"]), "'unused' is never called"),
    (
        lambda: landscape.neighbour_covariance(LEFT, X, "0", (8, 0)),
        "centre must be a point of .* of '0', got .8, 0",
    ),
    (lambda: landscape.neighbour_covariance(LEFT, X, "6"), "no feature map .* with points"),
    (lambda: landscape.neighbour_covariance(LEFT, X[:1]), "data must hold two or more inputs, got 1"),
    (lambda: landscape.feature_spectrum(LEFT, X, layers=["5"]), r"layers: '5' must give maps \[B, C, H, W\], got"),
    (lambda: landscape.feature_spectrum(nn.Flatten(), X), "has no layer that gives maps"),
    # function space
    (lambda: landscape.similarity([], R), "solutions must hold at least one network"),
    (lambda: read(a=3), r"solutions\['a'\] must be a network, a state dict, a Recorder, or a list of them, got int"),
    (lambda: read(a={"k": [3]}), r"solutions\['a'\]\['k'\]\[0\] must be a network"),
    (lambda: read(a=[{"weight": torch.ones(3)}]), "holds state dicts: pass their network as model="),
    (lambda: read(a=NET, b=nn.Linear(5, 2)), r"predictions of one shape, got \[24, 2\] and \[24, 4\]"),
    (lambda: landscape.similarity(NET, None), "data must be inputs"),
    (lambda: landscape.similarity(NET, []), "data must hold at least one batch"),
    (lambda: landscape.similarity(NET, [(R, None), (R, C)]), "targets in all 2 batches or in none, got 1"),
    (lambda: landscape.similarity(read(a=NET), R), "data must not be passed"),
    (lambda: landscape.similarity(NET, R).mean(same_run=True, kind="k"), "kind must be one of network, got 'k'"),
    (lambda: landscape.similarity(NET, R).mean("angle", same_run=True), "matrix must be one of cosine, .* got 'angle'"),
    (lambda: read(a=NET).classes(), "data must hold classes"),
    (lambda: landscape.function_map([NET, OTHER], R), "solutions must hold 3 or more for a map, got 2"),
    (lambda: landscape.function_map([NET] * 3, R, perplexity=5), "perplexity must be below .* 3, got 5"),
    (lambda: landscape.function_map([NET] * 3, R, perplexity=-1), "perplexity must be above 0, got -1"),
    # diversity and growth
    (lambda: lower_limit(SHARES, 0.1, 10), "reference must be an accuracy above chance \\(1/10\\), got 0.1"),
    (lambda: upper_limit(SHARES, 0.8, 1), "classes must be 2 or more, got 1"),
    (lambda: family(SHARES, -1.0, 0.8, 10), "exponent must be 0 or more, got -1.0"),
    (lambda: fit_exponent(SHARES, SHARES, 1.0, 10), "reference must be below 1"),
    (lambda: fit_exponent(SHARES, 0 * SHARES, 0.8, 10), "disagreement must be above 0 for some solution"),
    (lambda: landscape.diversity_plane(NET, (R, C), reference="b"), "label must be one of run 0, got 'b'"),
    (lambda: landscape.growth({"a": {"x": NET, "y": OTHER}, "b": {"x": NET}}, (R, C)), "kinds .*, but 'b' has no 'y'"),
    # priors
    (lambda: landscape.function_prior("laplace"), "kind must be one of gaussian, dropout, patching, got 'laplace'"),
    (lambda: landscape.function_prior(rate=1.0), "rate must be 0 or more and below 1, got 1.0"),
    (lambda: landscape.function_prior(x=torch.zeros(2, 2)), r"x must be finite floating-point points \[G\]"),
    # all of them together
    (lambda: landscape.explain(NET, (R, C)), "runs must hold two or more networks, got 1"),
    (lambda: landscape.explain([NET, OTHER], R), r"data must have targets, as \(x, y\)"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_a_wrong_argument_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
