"""Spatial smoothing: Blur, Prob, smoothed networks and classifier heads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import ndimage, signal
from torch import Tensor, fx, nn

import multitudes as mt
from multitudes.methods.smoothing import HEADS, KERNELS, PROBS, Blur, Prob, Smooth, head, smooth
from multitudes.models.resnet import BasicBlock
from tests.zoo.feature_map_networks import FOUR, Functional, chain, noise, small_resnet

M = mt.models
SLOW = pytest.mark.slow


def outer(kernel: tuple[int, ...]) -> np.ndarray:
    """Eq. (8)."""
    k = np.array(kernel, dtype=float)
    return np.outer(k, k) / k.sum() ** 2


# -- blur --------------------------------------------------------------------------------------------------


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


def test_smooth_is_blur_of_prob() -> None:
    z = noise(2, 3, 6, 6)
    want = Blur((1, 2, 1))(F.relu(5 * torch.tanh(z / 5)))
    torch.testing.assert_close(Smooth((1, 2, 1), "tanh", 5.0)(z), want)
    assert torch.equal(Smooth((1,), "none")(z), z)


# -- a plain network ---------------------------------------------------------------------------------------


def test_a_blur_of_one_point_without_prob_changes_nothing() -> None:
    net, x = small_resnet(), noise(4, 3, 16, 16)
    torch.testing.assert_close(smooth(net, (1,), "none", example=x)(x), net(x))


def test_the_model_its_mode_and_the_random_state_do_not_change() -> None:
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
@pytest.mark.parametrize("kernel", [(1, 1), (1, 4, 6, 4, 1)])
def test_it_learns_and_traces(kernel: tuple[int, ...], growing: bool) -> None:
    smoothed, x = smooth(small_resnet(), kernel, growing=growing), noise(4, 3, 16, 16)
    smoothed.train()(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in smoothed.parameters())
    want = smoothed.eval()(x)
    torch.testing.assert_close(fx.symbolic_trace(smoothed)(x), want)
    torch.testing.assert_close(smoothed.double()(x.double()), want.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("growing", [False, True])
def test_it_compiles(growing: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3, stride=2), nn.AdaptiveAvgPool2d(1))
    x = noise(2, 3, 16, 16)
    for kernel in ((1, 1), (1, 4, 6, 4, 1)):
        smoothed = smooth(net, kernel, growing=growing, example=x)
        compiled = torch.compile(smoothed, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), smoothed(x))


@pytest.mark.parametrize(("prob", "growing"), [("tanh", True), *(pytest.param(p, False, marks=SLOW) for p in PROBS)])
def test_a_smoothed_network_is_packed(prob: str, growing: bool) -> None:
    x = noise(3, 3, 16, 16)
    model = chain(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    net = mt.packed(smooth(model, (1, 2, 1), prob, growing=growing, example=x), 2, example=x)
    mt.check(net, x)
    net.runner = "packed"
    torch.testing.assert_close(net(x), torch.stack([net.member(i)(x) for i in range(2)]), rtol=1e-4, atol=1e-4)
    assert sum(isinstance(m, Smooth) for m in net.member(0).modules()) == 3


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", [mt.mimo, mt.batch_ensemble, mt.masksembles])
def test_other_methods_convert_smoothed_networks(method: Callable[..., mt.Multitude]) -> None:
    mt.check(method(smooth(small_resnet()), 2).eval(), noise(3, 3, 32, 32))


# -- classifier heads --------------------------------------------------------------------------------------


def features(net: Any, x: Tensor) -> np.ndarray:
    z = net.relu(net.bn1(net.conv1(x)))
    return net.layer4(net.layer3(net.layer2(net.layer1(z)))).detach().flatten(2).numpy()


@pytest.mark.parametrize(("kind", "pool"), [("gap", np.mean), ("max", np.max), ("median", np.median)])
@pytest.mark.parametrize("size", [32, 24])  # 16 points, an even number, and 9
def test_heads_pool_each_map_and_keep_the_linear_layer(kind: str, pool: Callable[..., Any], size: int) -> None:
    net, x = small_resnet(), noise(2, 3, size, size)
    pooled = torch.from_numpy(pool(features(net, x), axis=-1))
    swapped = head(net, kind)
    torch.testing.assert_close(swapped(x), net.fc(pooled))
    assert list(swapped.state_dict()) == list(net.state_dict())
    assert repr(head(swapped, "gap")) == repr(net)


def test_the_mlp_head_is_vggs() -> None:
    net, x = small_resnet(), noise(2, 3, 32, 32)
    swapped = head(net, "mlp", hidden=32, seed=1)
    weights = [tuple(p.shape) for p in swapped.fc.parameters() if p.dim() == 2]
    assert weights == [(32, 64 * 7 * 7), (32, 32), (5, 32)]
    assert [layer.p for layer in swapped.fc if isinstance(layer, nn.Dropout)] == [0.5, 0.5]
    points = F.adaptive_avg_pool2d(torch.from_numpy(features(net, x)).unflatten(2, (4, 4)), 7)
    one, two, three = (layer for layer in swapped.fc if isinstance(layer, nn.Linear))
    torch.testing.assert_close(swapped(x), three(F.relu(two(F.relu(one(points.flatten(1)))))))
    assert torch.equal(head(net, "mlp", hidden=32, seed=1)(x), swapped(x))
    assert torch.equal(head(swapped, "mlp", hidden=32)(x), swapped(x))  # all weights fit, and are kept
    assert head(swapped, "max").fc[0].weight.shape == (5, 64)


def test_a_classifier_of_several_layers_is_replaced_as_a_whole() -> None:
    net = M.VGGLike(classes=5, width=4).double().train()
    swapped = head(net, "gap")
    assert [type(layer) for layer in swapped.classifier] == [nn.Dropout, nn.Linear]
    linear = swapped.classifier[1]
    assert linear.weight.shape == (5, 32) and linear.weight.dtype == torch.float64 and linear.training
    assert isinstance(swapped.features[-1], nn.AdaptiveAvgPool2d)
    swapped = head(net, "mlp", hidden=32).eval()
    assert swapped(noise(2, 3, 32, 32).double()).shape == (2, 5)
    new, old = swapped.classifier[1][-1].weight, net.classifier[-1].weight
    assert new.shape == old.shape and not torch.equal(new, old)  # it reads something else now
    assert isinstance(swapped.get_submodule("features.51"), nn.MaxPool2d)  # VGG's own, before the head


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_heads_and_smoothing_compose(kind: str) -> None:
    net, x = small_resnet(), noise(2, 3, 32, 32)
    swapped = head(smooth(net), kind, hidden=8, seed=0)
    assert sum(isinstance(m, Smooth) for m in swapped.modules()) == 4
    torch.testing.assert_close(swapped(x), smooth(head(net, kind, hidden=8, seed=0), layers=FOUR)(x))
    mt.check(mt.packed(swapped, 2), x)


# -- bad arguments -----------------------------------------------------------------------------------------


def twice(pool: nn.Module) -> nn.Module:
    return chain(pool, nn.Conv2d(4, 4, 1), pool, nn.Flatten(), nn.Linear(4 * 8**2, 3))


def squeezed() -> nn.Module:
    class Squeezed(M.ResNet):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layer4(self.layer3(self.layer2(self.layer1(self.conv1(x)))))
            return self.fc(self.avgpool(x)[:, :, 0, 0])

    return Squeezed(BasicBlock, (1, 1, 1, 1), width=4)


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
    (lambda: head(mt.deep_ensemble(small_resnet(), 2), "gap"), r"multitude already"),
    (lambda: head(small_resnet(), "avg"), r"kind must be one of gap, max, median, mlp, got 'avg'"),
    (lambda: head(small_resnet(), "mlp", hidden=0), r"hidden must be a whole number, 1 or more, got 0"),
    (lambda: head(small_resnet(), "mlp", dropout=1.0), r"dropout must be 0 or more and below 1, got 1\.0"),
    (lambda: head(Functional(), "max"), r"\(pooling functions are not found\)"),
    (lambda: head(M.unet(5, width=4), "max"), r"no pooling layer comes before its linear layers"),
    (lambda: head(M.lenet5(), "gap"), r"\(fc1, fc2\) are not in one nn\.Sequential"),
    (lambda: head(chain(nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4 * 14**2, 3)), "gap"),
     r"more than a flattening between '3' and '6'"),
    (lambda: head(twice(nn.MaxPool2d(2)), "gap"), r"a layer of its head is also used elsewhere"),
    (lambda: head(squeezed(), "mlp", hidden=4), r"does not run when given the head 'mlp'.*must flatten"),
])  # fmt: skip
def test_bad_arguments_are_errors(function: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function()
