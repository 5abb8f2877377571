"""Copies of networks that hold functions, which Python's own copy leaves bound to the network that was copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt


class ByLambda(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.function: Any = lambda x: self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class ByFunctionInADict(ByLambda):
    def __init__(self) -> None:
        super().__init__()
        layer = self.fc

        def inner(x: Tensor) -> Tensor:
            return layer(x)

        self.functions = {"inner": [lambda x: inner(x)]}

    def forward(self, x: Tensor) -> Tensor:
        return self.functions["inner"][0](x)


class ByForward(ByLambda):
    def __init__(self) -> None:
        super().__init__()
        forward = self.forward
        self.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class ByHook(ByLambda):
    def __init__(self) -> None:
        super().__init__()
        self.identity = nn.Identity()
        self.identity.register_forward_hook(lambda module, args, output: self.fc(output))

    def forward(self, x: Tensor) -> Tensor:
        return self.identity(x)


@pytest.mark.parametrize("kind", [ByLambda, ByFunctionInADict, ByForward, ByHook])
def test_functions_of_a_network_run_the_copy_that_holds_them(kind: type[ByLambda]) -> None:
    model = kind()
    factor = 2 if kind is ByForward else 1
    net = mt.deep_ensemble(model, members=3, seed=0).train()
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    layers = [net.member(index).fc for index in range(3)]
    want = torch.stack([factor * (x @ layer.weight.T + layer.bias) for layer in layers])
    torch.testing.assert_close(net(x), want)
    net.loss(x, y).backward()
    assert all(layer.weight.grad is not None for layer in layers)
    assert model.fc.weight.grad is None
    torch.testing.assert_close(model(x), factor * (x @ model.fc.weight.T + model.fc.bias))


def test_a_layer_that_a_function_calls_cannot_differ_between_members() -> None:
    net = mt.batch_ensemble(ByLambda(), members=3)
    with pytest.raises(ValueError, match="layer 'fc' .* is called through an object that is not a module"):
        net(torch.randn(5, 4))
