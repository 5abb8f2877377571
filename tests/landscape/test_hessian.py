"""Curvature against the dense Hessian, closed forms and NumPy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian

import multitudes as mt
from multitudes.landscape.weight_space.hessian import hessian_spectrum
from multitudes.landscape.weight_space.weight_loss import WeightLoss


def small_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def small_data(rows: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, generator=generator).double(), torch.randint(3, (rows,), generator=generator)


def dense(network: nn.Module, x: Tensor, y: Tensor, weight_decay: float = 0.0) -> Tensor:
    """The Hessian from `torch.func.hessian`, `[P, P]`."""
    weights = dict(network.named_parameters())
    shapes = {name: weight.shape for name, weight in weights.items()}
    flat = torch.cat([weight.detach().flatten() for weight in weights.values()])

    def loss(vector: Tensor) -> Tensor:
        parts = vector.split([shape.numel() for shape in shapes.values()])
        own = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return F.cross_entropy(functional_call(network, own, (x,)), y) + weight_decay / 2 * vector.square().sum()

    return hessian(loss)(flat)


def by_size(values: Tensor, top: int) -> Tensor:
    return values[values.abs().argsort(descending=True)][:top]


@pytest.mark.parametrize(("method", "dtype"), [("lanczos", torch.float64), ("power", torch.float32)])
def test_top_eigenvalues_are_those_of_the_dense_hessian(method: str, dtype: torch.dtype) -> None:
    network, (x, y) = small_network(), small_data()
    want = by_size(torch.linalg.eigvalsh(dense(network, x, y)), 5)
    network, x = copy.deepcopy(network).to(dtype), x.to(dtype)
    found = hessian_spectrum(network, [(x, y)], 5, method=method, tolerance=1e-5, max_iterations=5000)
    assert found.eigenvalues.dtype == dtype
    assert ((found.eigenvalues[0].double() - want).abs() / want.abs()).max() < 1e-3
    assert (found.residuals < 1e-3).all()


def test_weight_decay_adds_itself_to_each_eigenvalue() -> None:
    network, data = small_network(), [small_data()]
    without, decayed = (hessian_spectrum(network, data, 2, weight_decay=decay).eigenvalues for decay in (0.0, 0.5))
    torch.testing.assert_close(decayed, without + 0.5, rtol=1e-4, atol=1e-4)


def test_each_mini_batch_has_its_own_spectrum() -> None:
    network, (x, y) = small_network(), small_data()
    batches = [(x[:10], y[:10]), (x[10:], y[10:])]
    found = hessian_spectrum(network, batches, 1, augment=lambda images: images.flip(1))
    for (images, labels), largest in zip(batches, found.largest, strict=True):
        want = by_size(torch.linalg.eigvalsh(dense(network, images.flip(1), labels)), 1)
        torch.testing.assert_close(largest[None], want, rtol=1e-3, atol=0)


def test_two_tensors_are_shuffled_into_mini_batches() -> None:
    network, data = small_network(), small_data(40)
    assert hessian_spectrum(network, data, 1, batch_size=10).eigenvalues.shape == (4, 1)
    assert hessian_spectrum(network, data, 1, batches=3, batch_size=10).eigenvalues.shape == (3, 1)
    one, other = (hessian_spectrum(network, data, 1, batch_size=10, seed=seed).largest for seed in (0, 1))
    assert not torch.allclose(one, other)


def test_random_augmentation_is_drawn_once_for_a_mini_batch() -> None:
    calls = []

    def augment(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x + torch.randn_like(x)

    network, data, state = small_network(), [small_data()], torch.get_rng_state()
    found = [hessian_spectrum(network, data, 2, augment=augment).eigenvalues for _ in range(2)]
    assert calls == [40, 40]
    assert torch.equal(*found)
    assert torch.equal(state, torch.get_rng_state())


def test_hessian_of_mean_squares_is_the_second_moment_of_the_inputs() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).double()
    network = nn.Linear(6, 1, bias=False).double()
    data = x, torch.randn(50, 1).double()
    want = np.linalg.eigvalsh(2 * (x.T @ x).numpy() / 50)
    found = hessian_spectrum(network, [data], 5, criterion=F.mse_loss)
    np.testing.assert_allclose(found.eigenvalues[0].numpy(), want[::-1][:5], rtol=1e-4)


@pytest.mark.parametrize("sizes", [[40], [3, 30, 7]])
def test_the_hessian_does_not_depend_on_the_batches(sizes: list[int]) -> None:
    network, (x, y) = small_network(), small_data()
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    product = WeightLoss(network, batches).curvature
    full = dense(network, x, y)
    torch.testing.assert_close(torch.stack([product(row) for row in torch.eye(len(full)).double()]), full)


def test_ignored_targets_have_no_weight() -> None:
    network, (x, y) = small_network(), small_data(8)
    ignored = y.clone()
    ignored[:3] = -100
    product = WeightLoss(network, [(x[:4], ignored[:4]), (x[4:], ignored[4:])]).curvature
    full = dense(network, x[3:], y[3:])
    torch.testing.assert_close(product(torch.ones(len(full)).double()), full.sum(1))


def test_a_multitude_that_draws_has_the_hessian_of_its_expectation_or_of_fixed_draws() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    net, (x, y) = mt.mc_dropout(network), small_data()
    vector = torch.randn(sum(p.numel() for p in network.parameters())).double()
    expected = WeightLoss(net, [(x, y)]).curvature(vector)
    torch.testing.assert_close(expected, dense(network.eval(), x, y) @ vector)
    loss = WeightLoss(net, [(x, y)], draws=3, seed=5)
    drawn = loss.curvature
    torch.testing.assert_close(drawn(vector), drawn(vector))
    assert not torch.allclose(drawn(vector), expected)
    step = 1e-5
    ahead, behind = (loss.gradient(loss.start + sign * step * vector) for sign in (1, -1))
    torch.testing.assert_close(drawn(vector), (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-7)


def test_independent_members_have_the_eigenvalues_of_each() -> None:
    net = mt.deep_ensemble(small_network(), members=2)
    data = [small_data()]
    together = hessian_spectrum(net, data, 4).eigenvalues[0]
    separate = torch.cat([hessian_spectrum(net.member(i), data, 4).eigenvalues[0] for i in range(2)])
    torch.testing.assert_close(together, by_size(separate, 4), rtol=1e-3, atol=0)


def states(network: nn.Module) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    own = network.state_dict()
    return [
        {key: value + 0.1 * torch.randn(value.shape, generator=generator) for key, value in own.items()}
        for _ in range(4)
    ]


METHODS = {
    "swag": lambda network: mt.swag(network, states(network)),
    "batch_ensemble": lambda network: mt.batch_ensemble(network, 2),
    "mimo": lambda network: mt.mimo(network, 2),
    "patched": lambda network: mt.patched(network, layers="output", example=small_data()[0]),
    "both": lambda network: mt.deep_ensemble(mt.mc_dropout(network, 0.2, "activation"), members=2),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_multitude_has_products_that_agree_with_differences_of_gradients(method: str) -> None:
    torch.manual_seed(0)
    net = METHODS[method](small_network())
    draws = method in ("swag", "patched", "both")
    for count in (0, 2) if draws else (0,):
        loss = WeightLoss(net, [small_data(12)], draws=count)
        vector = torch.randn(loss.start.shape).double()
        ahead, behind = (loss.gradient(loss.start + sign * 1e-5 * vector) for sign in (1, -1))
        torch.testing.assert_close(loss.curvature(vector), (ahead - behind) / 2e-5, rtol=1e-5, atol=1e-7)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unsqueeze(1) * torch.arange(1, 4, device=x.device).view(1, 3, 1)
        fused = F.scaled_dot_product_attention(tokens, tokens @ self.last.weight.T @ self.last.weight, tokens)
        return self.last(self.inner(fused, fused, fused, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("network", [Attending(), nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))])
def test_any_network_has_products_that_agree_with_differences_of_gradients(network: nn.Module) -> None:
    loss = WeightLoss(network.double(), [small_data(12)], weight_decay=0.01)
    vector = torch.randn(loss.start.shape, generator=torch.Generator().manual_seed(3)).double()
    ahead, behind = (loss.gradient(loss.start + sign * 1e-5 * vector) for sign in (1, -1))
    torch.testing.assert_close(loss.curvature(vector), (ahead - behind) / 2e-5, rtol=1e-5, atol=1e-7)


def test_batch_norm_uses_its_running_statistics() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double().train()
    vector = torch.randn(sum(p.numel() for p in network.parameters())).double()
    product = WeightLoss(network, [small_data()]).curvature(vector)
    torch.testing.assert_close(product, dense(copy.deepcopy(network).eval(), *small_data()) @ vector)


def test_frozen_weights_are_not_varied() -> None:
    network = small_network()
    network[0].requires_grad_(False)
    assert len(WeightLoss(network, small_data()).start) == 27


def test_a_linear_loss_has_no_curvature() -> None:
    network, (x, _) = nn.Linear(4, 1), small_data()
    loss = WeightLoss(network, (x.float(), torch.zeros(40, 1)), lambda prediction, _: prediction.mean())
    assert torch.equal(loss.curvature(torch.ones(5)), torch.zeros(5))
    for method in ("lanczos", "power"):
        flat = hessian_spectrum(network, loss.data, 2, method=method, criterion=loss.criterion)
        assert flat.eigenvalues.tolist() == [[0, 0]]


def test_power_iteration_that_stops_early_warns() -> None:
    with pytest.warns(UserWarning, match="power iteration stopped early: residuals are up to"):
        hessian_spectrum(small_network(), small_data(), 2, method="power", max_iterations=2)
