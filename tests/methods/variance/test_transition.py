"""The phase-transition toolkit against brute-force second derivatives."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.ensemble.multitude import Multitude
from multitudes.methods.variance import kappa, phase, sparsify, variance
from multitudes.methods.variance.layers import PARAMETERIZATIONS, variance_layers
from tests.zoo.of_parts import Of


def sequences() -> nn.Module:
    """A linear layer that sees several vectors for each example."""
    return Of(lambda net, x: net.head(torch.tanh(net.embed(x)).mean(1)), embed=nn.Linear(4, 5), head=nn.Linear(5, 3))


def twice() -> nn.Module:
    """A linear layer that is used twice."""
    return Of(
        lambda net, x: net.head(torch.tanh(net.layer(torch.tanh(net.layer(x))))),
        layer=nn.Linear(5, 5), head=nn.Linear(5, 3),
    )  # fmt: skip


def centred() -> nn.Module:
    """Examples that depend on each other."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = F.softplus(net.layer(x))
        return net.head(hidden / hidden.mean(0))

    return Of(forward, layer=nn.Linear(5, 4), head=nn.Linear(4, 3))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Softplus(), nn.Dropout(0.5), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2), nn.Softplus(),
        nn.Flatten(), nn.Linear(2, 3),
    )  # fmt: skip


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, groups=2), nn.Softplus(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (5,)),
    "cnn": (cnn, (1, 4, 4)),
    "conv1d": (conv1d, (2, 6)),
    "sequences": (sequences, (3, 4)),
    "twice": (twice, (5,)),
    "centred": (centred, (5,)),
}


def case(name: str, parameterization: str = "layer", layers: Any = ".*") -> tuple[Multitude, nn.Module, Tensor, Tensor]:
    """A variance network, the plain one of its expectations, and a batch."""
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    model = build().double().eval()
    net = variance(model, layers, parameterization, log_alpha=0.5, init="pretrained")
    if parameterization == "zero":
        for layer in variance_layers(net).values():
            model.get_submodule(layer_name(net, layer)).weight.data.zero_()
    return net, model, torch.randn(7, *shape, dtype=torch.float64), torch.randint(3, (7,))


def layer_name(net: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in net.named_modules() if module is wanted)


def brute_force(net: Multitude, model: nn.Module, log_p: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """sigma^2 times the diagonal of the whole Hessian of log p, for each layer's weight."""
    found = {}
    for name, layer in variance_layers(net.network).items():
        weight = model.get_submodule(name).weight.detach()

        def of(w: Tensor, name: str = name) -> Tensor:
            return log_p(torch.func.functional_call(model, {f"{name}.weight": w}, (x,)))

        hessian = torch.func.hessian(of)(weight).reshape(weight.numel(), weight.numel())
        found[name] = (layer.variance() * hessian.diagonal().view_as(weight)).detach()
    return found


def assert_same(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys() and len(want) > 0
    for name, values in want.items():
        torch.testing.assert_close(found[name], values, rtol=1e-8, atol=1e-10)
        assert values.abs().max() > 1e-6


# -- kappa -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_kappa_is_the_diagonal_of_the_hessian_times_the_variance(name: str) -> None:
    net, model, x, y = case(name)
    want = brute_force(net, model, lambda p: -F.cross_entropy(p, y, reduction="sum"), x)
    assert_same(kappa(net.train(), x, y), want)


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_kappa_of_every_parameterization_is_at_the_expectation(parameterization: str) -> None:
    net, model, x, y = case("mlp", parameterization, ["4"])
    assert_same(kappa(net, x, y), brute_force(net, model, lambda p: -F.cross_entropy(p, y, reduction="sum"), x))


def test_kappa_for_another_likelihood() -> None:
    net, model, x, _ = case("mlp")
    y = torch.randn(7, 3, dtype=torch.float64)
    want = brute_force(net, model, lambda p: -((p - y) ** 2).sum() / 3, x)
    assert_same(kappa(net, x, y, F.mse_loss), want)


@pytest.mark.parametrize("options", [{"chunk": 1}, {"chunk": 5}, {"batch_size": 3}, {"batch_size": 1, "chunk": 1000}])
@pytest.mark.parametrize("name", ["mlp", "conv1d"])
def test_kappa_does_not_depend_on_chunks_and_batches(name: str, options: dict[str, int]) -> None:
    net, _, x, y = case(name)
    assert_same(kappa(net, x, y, **options), kappa(net, x, y))


def test_a_linear_layer_takes_one_product_for_each_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[int] = []
    vmap = torch.vmap
    monkeypatch.setattr(torch, "vmap", lambda f: lambda vectors: products.append(len(vectors)) or vmap(f)(vectors))
    net, _, x, y = case("mlp", layers=["0"])
    kappa(net, x, y, chunk=4)
    assert products == [4, 2]  # 6 units; there are 30 weights


def test_kappa_does_not_change_the_network() -> None:
    net, _, x, y = case("mlp")
    net.train()
    before, names = copy.deepcopy(net.state_dict()), list(net.state_dict())
    kappa(net, x, y)
    assert list(net.state_dict()) == names and net.training and net.network[1].training
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in net.parameters())


def test_kappa_is_copied_but_not_saved() -> None:
    net, _, x, y = case("mlp")
    found = kappa(net, x, y)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert_same({name: layer.kappa for name, layer in variance_layers(twin.network).items()}, found)
    assert not any("kappa" in name for name in net.state_dict())


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_hutchinson_probing_is_unbiased(name: str) -> None:
    net, _, x, y = case(name)
    exact = kappa(net, x, y)
    estimates = [kappa(net, x, y, method="hutchinson", probes=20, seed=seed) for seed in range(100)]
    for layer, values in exact.items():
        many = torch.stack([estimate[layer] for estimate in estimates])
        error = (many.mean(0) - values).abs() / (many.std(0) / 10 + 1e-12)
        assert error.max() < 5
        few = (many[0] - values).norm()
        assert (many.mean(0) - values).norm() < 0.4 * few  # a hundred times the probes: a tenth of the error


def test_probes_repeat_with_a_seed_and_keep_torchs_random_state() -> None:
    net, _, x, y = case("mlp")
    state = torch.get_rng_state()
    first = kappa(net, x, y, method="hutchinson", probes=3, seed=1)
    assert_same(kappa(net, x, y, method="hutchinson", probes=3, seed=1), first)
    assert torch.equal(torch.get_rng_state(), state)


# -- phase and sparsify ------------------------------------------------------------------------------------


def measured() -> tuple[Multitude, Tensor, Tensor, dict[str, Tensor]]:
    net, _, x, y = case("mlp", layers=["0", "4"])
    return net.eval(), x, y, kappa(net, x, y)


def test_the_phase_is_log_alpha_and_the_share_of_weights_above_a_threshold() -> None:
    net, _, _, found = measured()
    threshold = found["0"].abs().flatten().sort().values[9].item()  # of 30, ten are at it or below
    told = phase(net, threshold)
    assert told["0"].log_alpha == pytest.approx(0.5)
    assert told["0"].share == pytest.approx(20 / 30)
    assert told["4"].share == pytest.approx((found["4"].abs() > threshold).float().mean().item())
    zero, _, x, y = case("mlp", "zero", ["4"])
    kappa(zero, x, y)
    assert phase(zero)["4"].log_alpha == math.inf


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
@pytest.mark.parametrize("to", ["zero", "mean"])
def test_only_weights_with_small_kappa_are_fixed(to: str, parameterization: str) -> None:
    net, _, x, y = case("mlp", parameterization, ["4"])
    found = kappa(net.eval(), x, y)["4"]
    threshold = found.abs().median().item()
    before = copy.deepcopy(net)
    sparse, compression = sparsify(net, threshold, to=to)
    old, new = variance_layers(net.network)["4"], variance_layers(sparse.network)["4"]
    small = found.abs() < threshold
    torch.testing.assert_close(new.variance(), torch.where(small, 0.0, old.variance()))
    torch.testing.assert_close(new.mean(), torch.where(small, 0.0 if to == "zero" else old.mean(), old.mean()))
    assert compression == pytest.approx(24 / int((~small).sum()))
    assert sparsify(net, threshold, to=to).fixed == pytest.approx(small.float().mean().item())
    assert type(sparse) is type(net) and sparse(x, draws=6).std(0).min() > 0
    torch.testing.assert_close(net(x, draws=3, seed=0), before(x, draws=3, seed=0))


def test_a_fixed_weight_draws_nothing() -> None:
    """If all weights but one are fixed, the output's variance comes from this weight."""
    net, _, x, y = case("mlp", layers=["0"])
    found = kappa(net, x, y)["0"].abs()
    sparse, compression = sparsify(net, found.max().item(), to="mean")
    assert compression == 30
    layer = variance_layers(sparse.network)["0"]
    row, column = divmod(int(found.argmax()), 5)
    spread = layer(x.repeat(20_000, 1)).view(20_000, 7, 6).var(0)
    want = torch.zeros_like(spread)
    want[:, row] = x[:, column] ** 2 * layer.variance()[row, column]
    torch.testing.assert_close(spread, want, rtol=0.06, atol=1e-12)


def test_fixed_weights_stay_fixed_in_training() -> None:
    net, x, y, found = measured()
    for to in ("zero", "mean"):
        sparse = sparsify(net, found["0"].abs().median().item(), to=to).net
        layer = variance_layers(sparse.network)["0"]
        small = layer.fixed.clone()
        before = layer.mean().detach()
        optimizer = torch.optim.AdamW(sparse.train().parameters(), 0.1, weight_decay=0.5)
        for _ in range(3):
            sparse.loss(x, y, dataset_size=7).backward()
            optimizer.step()
        after = layer.mean().detach()
        assert torch.equal(after[small], before[small]) and (after[~small] != before[~small]).all()
        assert (layer.variance()[small] == 0).all()


def test_fixed_weights_have_no_divergence() -> None:
    net, _, _, found = measured()
    sparse, compression = sparsify(net, found["0"].abs().median().item())
    torch.testing.assert_close(sparse.kl() * compression, net.kl())


def test_a_sparse_network_saves_and_loads_also_into_one_that_is_not() -> None:
    net, x, _, found = measured()
    sparse = sparsify(net, found["0"].abs().median().item(), to="mean").net
    want = sparse(x, draws=4, seed=0)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(sparse))):
        other.load_state_dict(sparse.state_dict())
        torch.testing.assert_close(other(x, draws=4, seed=0), want)
    three = mt.deep_ensemble(sparse, 3, init="pretrained")
    torch.testing.assert_close(three(x, draws=0), sparse(x, draws=0).expand(3, -1, -1))
    torch.testing.assert_close(three.member(1)(x, draws=4, seed=0), want)


def test_thresholds_from_none_to_all() -> None:
    net, x, _, _ = measured()
    none, all_ = sparsify(net, 0), sparsify(net, 1e9, to="mean")
    assert (none.compression, none.fixed) == (1.0, 0.0)
    assert (all_.compression, all_.fixed) == (math.inf, 1.0)
    torch.testing.assert_close(none.net(x, draws=3, seed=0), net(x, draws=3, seed=0))
    torch.testing.assert_close(all_.net(x, draws=3), net(x, draws=0).expand(3, -1, -1))


def test_weights_fixed_twice_keep_their_first_value() -> None:
    net, x, y, found = measured()
    first = sparsify(net, found["0"].abs().median().item(), to="mean").net
    again = kappa(first, x, y)["0"]
    assert (again[variance_layers(first.network)["0"].fixed] == 0).all()
    second = sparsify(first, 1e9, to="zero").net
    layer, old = variance_layers(second.network)["0"], variance_layers(first.network)["0"]
    torch.testing.assert_close(layer.mean(), torch.where(old.fixed, old.mean(), 0.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net, x, y: kappa(net, x, y, method="exakt"), "method must be one of exact, hutchinson, got 'exakt'"),
        (lambda net, x, y: kappa(net, x, y, probes=0), "probes must be a whole number, 1 or more, got 0"),
        (lambda net, x, y: kappa(net, x, y, chunk=0.5), "chunk must be a whole number, 1 or more, got 0.5"),
        (lambda net, x, y: kappa(net, x, y, batch_size=0), "batch_size must be a whole number, 1 or more, got 0"),
        (lambda net, x, y: kappa(mlp(), x, y), r"net \(Sequential\) has no variance layer"),
        (lambda net, x, y: kappa(mt.deep_ensemble(net, 2), x, y), r"net is a multitude of members \(Members\)"),
        (lambda net, x, y: phase(net), r"layer '0' has no kappa yet: call kappa\(net, x, y\) first"),
        (lambda net, x, y: sparsify(net, 1.0), r"layer '0' has no kappa yet: call kappa\(net, x, y\) first"),
        (lambda net, x, y: sparsify(net.network, 1.0), "net must be a multitude made by .*, got Sequential"),
        (lambda net, x, y: phase(net, -1), "threshold must be 0 or more, got -1"),
        (lambda net, x, y: sparsify(net, -1), "threshold must be 0 or more, got -1"),
        (lambda net, x, y: sparsify(net, 1.0, to="mu"), "to must be one of zero, mean, got 'mu'"),
    ],
)
def test_bad_arguments_are_errors(call: Callable[..., Any], message: str) -> None:
    net, _, x, y = case("mlp")
    with pytest.raises(ValueError, match=message):
        call(net, x, y)
