"""Classifier heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.methods.smoothing import HEADS, Smooth, head, smooth
from multitudes.models.resnet import BasicBlock
from tests.methods.smoothing_networks import FOUR, Functional, chain, noise, small_resnet

M = mt.models


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


def test_a_classifier_of_several_layers_gives_way_as_a_whole() -> None:
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
def test_bad_arguments_are_told(function: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function()
