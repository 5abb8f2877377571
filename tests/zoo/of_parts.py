"""One-line networks: named parts and a forward function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Of(nn.Module):
    """A network with named parts, whose forward calls `function(self, *inputs)`.

    `Of(lambda net, x: net.head(net.body(x)), body=nn.Linear(3, 4), head=nn.Linear(4, 2))`.
    """

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)
