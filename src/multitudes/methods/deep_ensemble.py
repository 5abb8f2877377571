"""Deep ensembles: independently initialised networks, trained side by side.

Lakshminarayanan, Pritzel and Blundell, *Simple and scalable predictive uncertainty estimation using deep
ensembles*, 2017. The predictive distribution is the members' mean,

    p(y | x) = 1/M sum_m p(y | x, theta_m).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn

from multitudes.core.checks import check_number
from multitudes.core.members import Members
from multitudes.methods.registry import Method, by
from multitudes.surgery.layers import Factory, Selector
from multitudes.surgery.start import starting


def deep_ensemble(
    model: nn.Module | Factory,
    members: int = 5,
    *,
    init: str | None = None,
    heads: Selector = None,
    perturb: float = 0.0,
    task: str | None = None,
    seed: int | None = None,
) -> Members:
    """An ensemble of `members` networks like `model`, which is left as it was.

    With `init="fresh"` each member is initialised anew by its layers' own `reset_parameters`; with
    `"pretrained"` each is a copy, its weights moved by normal noise of `perturb` times each weight tensor's
    own standard deviation. The same `seed` gives the same members; without one, torch's random state is used.

    >>> net = deep_ensemble(nn.Linear(3, 2), members=4, seed=0)
    >>> net(torch.ones(5, 3)).shape
    torch.Size([4, 5, 2])
    """
    start = starting(model, members, init, heads, seed=seed, nested=True)
    check_number("perturb", perturb, 0)
    if start.fresh and perturb:
        raise ValueError(f"perturb={perturb!r} needs init='pretrained'; fresh members differ anyway")

    def networks() -> Iterator[nn.Module]:
        for _ in range(members):
            yield _perturbed(start.begin(copy.deepcopy(start.another())), perturb)

    with start.seeded():
        return Members(networks(), members).like(start.given, task)


def _perturbed(network: nn.Module, amount: float) -> nn.Module:
    if amount:
        for parameter in network.parameters():
            if parameter.is_floating_point() and parameter.numel() > 1:
                parameter.data.add_(torch.randn_like(parameter) * parameter.data.std(), alpha=amount)
    return network


ROWS = (
    Method(
        "deep", by(deep_ensemble), {"members": 4},
        "As many networks as there are members, to train, to keep and to run.",
        "Pick it when you can pay for it, or need a reference: usually the best scores.",
        place=10,
    ),
)  # fmt: skip
