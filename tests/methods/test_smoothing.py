"""Spatial smoothing: Blur, Prob, and the network that has them."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import ndimage, signal
from torch import Tensor, fx, nn

import multitudes as mt
from multitudes.methods.smoothing import KERNELS, PROBS, Blur, Prob, Smooth, smooth
from multitudes.models.preact_resnet import PreactivationBlock
from tests.methods.smoothing_networks import Functional, noise, small_resnet

M = mt.models


def outer(kernel: tuple[int, ...]) -> np.ndarray:
    """Eq. (8)."""
    k = np.array(kernel, dtype=float)
    return np.outer(k, k) / k.sum() ** 2


# -- blur --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_point_is_spread_by_the_kernel_which_sums_to_one(kernel: tuple[int, ...], growing: bool) -> None:
    point = torch.zeros(1, 1, 13, 13)
    point[0, 0, 6, 6] = 1.0
    spread = Blur(kernel, growing)(point)[0, 0].numpy()
    assert spread.sum() == pytest.approx(1.0)
    rows, columns = spread.nonzero()
    patch = spread[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    np.testing.assert_allclose(patch, outer(kernel), rtol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_blur_is_scipys_correlation_with_the_nearest_values_around(kernel: tuple[int, ...]) -> None:
    x = noise(2, 3, 9, 12).double()
    blurred = Blur(kernel)(x)
    origin = -1 if len(kernel) % 2 == 0 else 0  # SciPy's window of an even length lies further to the left
    for image, got in zip(x.flatten(0, 1), blurred.flatten(0, 1), strict=True):
        want = ndimage.correlate(image.numpy(), outer(kernel), mode="nearest", origin=origin)
        np.testing.assert_allclose(got.numpy(), want, atol=1e-12)
    box = ndimage.uniform_filter(x[0, 0].numpy(), size=2, mode="nearest", origin=-1)
    np.testing.assert_allclose(Blur((1, 1))(x)[0, 0].numpy(), box, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_growing_blur_is_the_full_convolution(kernel: tuple[int, ...]) -> None:
    x = noise(1, 2, 7, 10).double()
    for image, got in zip(x[0], Blur(kernel, growing=True)(x)[0], strict=True):
        np.testing.assert_allclose(got.numpy(), signal.convolve2d(image.numpy(), outer(kernel)), atol=1e-12)


def test_the_growing_box_is_the_papers_average_pooling_and_agrees_with_the_other_inside() -> None:
    x = noise(2, 3, 8, 8)
    growing = Blur((1, 1), growing=True)(x)
    torch.testing.assert_close(growing, F.avg_pool2d(x, 2, stride=1, padding=1, count_include_pad=True))
    torch.testing.assert_close(growing[..., 1:-1, 1:-1], Blur((1, 1))(x)[..., :-1, :-1])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (2, 3), (8, 8)])
def test_constant_maps_stay_as_they_are(kernel: tuple[int, ...], size: tuple[int, int]) -> None:
    x = noise(2, 3, 1, 1).expand(2, 3, *size)
    torch.testing.assert_close(Blur(kernel)(x), x)


@pytest.mark.parametrize("kernel", KERNELS)
def test_frequencies_are_damped_by_powers_of_cosines(kernel: tuple[int, ...]) -> None:
    size, margin = 32, 4
    x = noise(1, 1, size, size, seed=1).double()
    around = F.pad(x, (margin,) * 4, mode="circular")
    blurred = Blur(kernel)(around)[..., margin:-margin, margin:-margin]
    before, after = (torch.fft.fft2(t[0, 0]).abs().numpy() for t in (x, blurred))
    omega = 2 * np.pi * np.fft.fftfreq(size)
    damping = np.abs(np.cos(omega / 2)) ** (len(kernel) - 1)  # of (1, 1): |1 + exp(i w)| / 2
    np.testing.assert_allclose(after, before * np.outer(damping, damping), atol=1e-9)


def test_high_frequencies_fall_and_low_ones_stay() -> None:
    size = 64
    coarse = F.interpolate(noise(1, 8, 4, 4, seed=2), size=size, mode="bicubic")
    x = coarse + 0.5 * noise(1, 8, size, size, seed=3)
    omega = np.abs(2 * np.pi * np.fft.fftfreq(size))
    largest = np.maximum.outer(omega, omega)

    def energies(maps: Tensor) -> tuple[float, float]:
        energy = (torch.fft.fft2(maps).abs() ** 2).numpy()
        return energy[..., largest < 0.1 * np.pi].sum(), energy[..., largest > 0.7 * np.pi].sum()

    low, high = energies(x)
    for kernel in KERNELS[1:]:
        low_after, high_after = energies(Blur(kernel)(x))
        assert low_after == pytest.approx(low, rel=0.05)
        assert high_after < 0.4 * high


# -- prob --------------------------------------------------------------------------------------------------


def test_prob_is_a_bounded_function_and_a_relu() -> None:
    z = torch.linspace(-30, 30, 601, dtype=torch.float64)
    x = z.numpy()
    closed_forms = {
        "tanh": np.maximum(4 * np.tanh(x / 4), 0),
        "relu6": np.clip(x, 0, 6),
        "scale": np.maximum(x / 4, 0),
        "none": x,
    }
    assert set(closed_forms) == set(PROBS)
    for kind, want in closed_forms.items():
        np.testing.assert_allclose(Prob(kind, tau=4)(z).numpy(), want, atol=1e-12)


def test_the_temperature_is_the_bound_and_leaves_the_slope_at_zero() -> None:
    for tau in (0.2, 1.0, 10.0):
        z = torch.tensor([1e-6, 1e6], dtype=torch.float64, requires_grad=True)
        p = Prob("tanh", tau)(z)
        (slopes,) = torch.autograd.grad(p.sum(), z)
        assert p[1].item() == pytest.approx(tau)
        assert slopes[0].item() == pytest.approx(1.0)


@pytest.mark.parametrize(("kernel", "shift"), [((1, 1), -0.5), ((1, 2, 1), 0.0), ((1, 4, 6, 4, 1), 0.0)])
def test_a_kernel_of_two_points_moves_a_map_by_half_a_point(kernel: tuple[int, ...], shift: float) -> None:
    point = torch.zeros(1, 1, 9, 9)
    point[..., 4, 4] = 1.0
    seen = Blur(kernel)(point)[0, 0]
    places = torch.arange(9.0)
    centre = ((seen.sum(1) * places).sum(), (seen.sum(0) * places).sum())
    assert centre == pytest.approx((4 + shift, 4 + shift))


def test_smooth_is_blur_of_prob() -> None:
    z = noise(2, 3, 6, 6)
    want = Blur((1, 2, 1))(F.relu(5 * torch.tanh(z / 5)))
    torch.testing.assert_close(Smooth((1, 2, 1), "tanh", 5.0)(z), want)
    assert torch.equal(Smooth((1,), "none")(z), z)


# -- a plain network ---------------------------------------------------------------------------------------


def test_a_blur_of_one_point_without_prob_changes_nothing() -> None:
    net, x = small_resnet(), noise(4, 3, 16, 16)
    torch.testing.assert_close(smooth(net, (1,), "none", example=x)(x), net(x))


def test_the_given_model_its_mode_and_the_random_state_are_left_alone() -> None:
    net = small_resnet().train()
    net.layer2[0].bn1.eval()
    before, text, state = copy.deepcopy(net.state_dict()), repr(net), torch.get_rng_state()
    smoothed = smooth(net)
    assert torch.equal(torch.get_rng_state(), state)
    assert repr(net) == text
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (*net.modules(), *smoothed.modules()))
    assert smoothed.training and smoothed.layer2.smooth.blur.training
    assert not smoothed.get_submodule("layer2.0.bn1").training


def test_pretrained_weights_load_into_it_and_back() -> None:
    net, other = small_resnet(), small_resnet()
    for parameter in other.parameters():
        parameter.data.mul_(1.1)
    smoothed, x = smooth(net), noise(2, 3, 16, 16)
    smoothed.load_state_dict(other.state_dict())
    torch.testing.assert_close(smoothed(x), smooth(other)(x))
    net.load_state_dict(smoothed.state_dict())
    torch.testing.assert_close(net(x), other(x))


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_it_learns_traces_copies_and_doubles(kernel: tuple[int, ...], growing: bool) -> None:
    smoothed, x = smooth(small_resnet(), kernel, growing=growing), noise(4, 3, 16, 16)
    smoothed.train()(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in smoothed.parameters())
    smoothed.eval()
    want = smoothed(x)
    for same in (
        fx.symbolic_trace(smoothed),
        copy.deepcopy(smoothed),
        pickle.loads(pickle.dumps(smoothed)),
    ):
        torch.testing.assert_close(same(x), want)
    double = smoothed.double()(x.double())
    torch.testing.assert_close(double, want.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("growing", [False, True])
def test_it_compiles(growing: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3, stride=2), nn.AdaptiveAvgPool2d(1))
    x = noise(2, 3, 16, 16)
    for kernel in ((1, 1), (1, 4, 6, 4, 1)):
        smoothed = smooth(net, kernel, growing=growing, example=x)
        compiled = torch.compile(smoothed, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), smoothed(x))


@pytest.mark.slow
@pytest.mark.parametrize("prob", PROBS)
def test_the_packed_runner_lays_its_channels_side_by_side(prob: str) -> None:
    x = noise(3, 3, 8, 8)
    net = mt.deep_ensemble(smooth(small_resnet(), (1, 2, 1), prob, example=x), 3)
    mt.check(net, x)
    net.runner = "packed"
    torch.testing.assert_close(net(x), torch.stack([net.member(i)(x) for i in range(3)]), rtol=1e-4, atol=1e-4)
    targets = {step.target for plan in net._plans.values() for step in plan.steps if step.kind == "call_module"}
    kinds = {type(net.network.get_submodule(target)).__module__.partition(".")[0] for target in targets}
    assert kinds == {"torch"}  # none of ours, which would run under vmap


@pytest.mark.quick(1)
@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("build", [
    small_resnet,
    lambda: M.PreactResNet(PreactivationBlock, (1, 1, 1, 1), classes=5, width=8).eval(),
    lambda: M.VGG((1, 1, 1, 1, 1), classes=5, width=8).eval(),
])  # fmt: skip
def test_a_smoothed_network_is_packed(build: Callable[[], nn.Module], growing: bool) -> None:
    x = noise(3, 3, 32, 32)
    net = mt.packed(smooth(build(), growing=growing, example=x), 2, example=x)
    mt.check(net, x)
    net.runner = "packed"
    assert net(x).shape == (2, 3, 5)
    assert sum(isinstance(m, Smooth) for m in net.member(0).modules()) in (3, 4, 5)


@pytest.mark.parametrize("method", [mt.batch_ensemble, mt.masksembles, mt.mimo])
def test_a_smoothed_network_is_what_every_method_takes(method: Callable[..., mt.Multitude]) -> None:
    net = method(smooth(small_resnet()), 2).eval()
    mt.check(net, noise(3, 3, 32, 32))


# -- bad arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "message"), [
    (lambda: smooth(3), r"model must be an nn\.Module, or a function that builds one, got int"),
    (lambda: smooth(mt.deep_ensemble(small_resnet(), 2)), r"multitude already \(Members\).*packed\(smooth\(model\)\)"),
    (lambda: smooth(small_resnet(), kernel=(1, 3, 1)), r"kernel must be one of \(1,\), \(1, 1\), .* got \(1, 3, 1\)"),
    (lambda: smooth(small_resnet(), kernel=2), r"kernel must be one of .* got 2"),
    (lambda: smooth(small_resnet(), prob="sigmoid"), r"prob must be one of tanh, relu6, scale, none, got 'sigmoid'"),
    (lambda: smooth(small_resnet(), tau=0), r"tau must be above 0, got 0"),
    (lambda: smooth(small_resnet(), tau=math.nan), r"tau must be above 0, got nan"),
    (lambda: smooth(small_resnet(), layers="layer9"), r"layers='layer9' selects nothing"),
    (lambda: smooth(small_resnet(), layers=["fc"]), r"layer 'fc' reads \[2, 64\], which is not a feature map"),
    (lambda: smooth(nn.TransformerEncoderLayer(8, 2), layers=["out_proj"], example=torch.ones(1, 2, 8)),
     r"layer 'self_attn\.out_proj' is never called"),
    (lambda: smooth(Functional()), r"no down-sampling.* functions in a forward are not found"),
    (lambda: smooth(nn.Linear(3, 2)), r"model \(Linear\) has no down-sampling"),
    (lambda: smooth(M.small_cnn(), growing=True), r"does not run when smoothed before features\.2.*growing=False"),
])  # fmt: skip
def test_bad_arguments_are_told(function: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function()
