"""Networks in a line: parts by name, and what is computed with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Of(nn.Module):
    """A network of these parts whose forward is a function of itself and its inputs.

    `Of(lambda net, x: net.head(net.body(x)), body=nn.Linear(3, 4), head=nn.Linear(4, 2))`.
    """

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)
