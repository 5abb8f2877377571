"""Attributes that a network's code writes are put back after a trial."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from multitudes.networks.trace import preserve_attributes, writing_modules


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.steps, self.seen, self.named, self.gone = 0, [1], {"a": 1}, "here"

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.seen.append(2)
        self.named["b"] = x
        self.hidden = self.layer(x)
        del self.gone
        return self.hidden


def test_all_that_was_written_is_put_back_and_named() -> None:
    network = nn.Sequential(Writes(), nn.ReLU())
    seen, named = network[0].seen, network[0].named
    with preserve_attributes(writing_modules(network)) as written:
        network(torch.ones(1, 2))
    assert written == {("0", key) for key in ("steps", "seen", "named", "hidden", "gone")}
    assert (network[0].steps, network[0].seen, network[0].named, network[0].gone) == (0, [1], {"a": 1}, "here")
    assert network[0].seen is seen and network[0].named is named and not hasattr(network[0], "hidden")


def test_nothing_is_named_where_nothing_is_written_and_an_error_leaves_nothing() -> None:
    network = Writes()
    with preserve_attributes(writing_modules(network)) as written:
        network.layer(torch.ones(1, 2))
    assert not written
    try:
        with preserve_attributes(writing_modules(network)):
            network(torch.ones(1, 2))
            raise RuntimeError
    except RuntimeError:
        assert network.steps == 0 and network.seen == [1]
