"""Copies of networks with functions in attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from tests.zoo.of_parts import Of


def by_lambda(net: Any) -> None:
    net.function = lambda net, x: net.call(x)
    net.call = lambda x: net.fc(x)


def by_function_in_a_dict(net: Any) -> None:
    layer = net.fc

    def inner(x: Tensor) -> Tensor:
        return layer(x)

    net.functions = {"inner": [lambda x: inner(x)]}
    net.function = lambda net, x: net.functions["inner"][0](x)


def by_forward(net: Any) -> None:
    net.function = lambda net, x: net.fc(x)
    forward = net.forward
    net.forward = lambda x: 2 * forward(x)


def by_hook(net: Any) -> None:
    net.function = lambda net, x: net.identity(x)
    net.identity = nn.Identity()
    net.identity.register_forward_hook(lambda module, args, output: net.fc(output))


def network(change: Callable[[Any], None]) -> Any:
    net = Of(lambda net, x: x, fc=nn.Linear(4, 3))
    change(net)
    return net


@pytest.mark.parametrize("change", [by_lambda, by_function_in_a_dict, by_forward, by_hook])
def test_functions_in_attributes_use_the_copied_layers(change: Callable[[Any], None]) -> None:
    model = network(change)
    factor = 2 if change is by_forward else 1
    net = mt.deep_ensemble(model, members=3, seed=0).train()
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    layers = [net.member(index).fc for index in range(3)]
    want = torch.stack([factor * (x @ layer.weight.T + layer.bias) for layer in layers])
    torch.testing.assert_close(net(x), want)
    net.loss(x, y).backward()
    assert all(layer.weight.grad is not None for layer in layers)
    assert model.fc.weight.grad is None
    torch.testing.assert_close(model(x), factor * (x @ model.fc.weight.T + model.fc.bias))


def test_a_layer_called_by_a_function_cannot_differ_between_members() -> None:
    net = mt.batch_ensemble(network(by_lambda), members=3)
    with pytest.raises(ValueError, match="layer 'fc' .* is called through an object that is not a module"):
        net(torch.randn(5, 4))
