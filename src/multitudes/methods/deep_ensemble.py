"""Deep ensembles: independently initialised networks, trained side by side.

Lakshminarayanan, Pritzel and Blundell, *Simple and scalable predictive uncertainty estimation using deep
ensembles*, 2017. The predictive distribution is the members' mean,

    p(y | x) = 1/M sum_m p(y | x, theta_m).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from multitudes.core.checks import check_number
from multitudes.core.copying import copied
from multitudes.core.members import Members
from multitudes.methods.registry import Method, by, single
from multitudes.surgery.layers import Factory, Selector
from multitudes.surgery.start import Start


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

    `model` may be a function that builds a network: then each member is built by it. Members of a given network are
    drawn anew by its layers' own rules (`init="fresh"`, the default), or keep its weights but for the output layers,
    which are drawn anew for each (`"heads"`, the way to fine-tune a pretrained network; `heads` selects other layers
    than those that are found), or keep all of them (`"pretrained"`). Then `perturb` must move them, by normal noise of
    so many times each parameter's own standard deviation, for members that start as one network and learn from the same
    batches stay one, unless it has layers that draw (see `Stochastic`); torch's dropout in training is not enough.
    Frozen parameters keep their values. The same `seed` gives the same members; without one, torch's random state is
    used.

    >>> net = deep_ensemble(nn.Linear(3, 2), members=4, seed=0)
    >>> net(torch.ones(5, 3)).shape
    torch.Size([4, 5, 2])
    """
    start = Start(model, members, init, heads, seed=seed, nested=True)
    check_number("perturb", perturb, 0)
    if start.fresh and perturb:
        raise ValueError(f"perturb={perturb!r} needs init='pretrained' or 'heads'; fresh members differ anyway")
    ways_out = "init='heads' draws the output layers anew, or perturb=0.01 moves all weights"

    def networks() -> Iterator[nn.Module]:
        for _ in range(members):
            network = start.begin(copied(start.another()))
            for parameter in network.parameters() if perturb else ():
                if parameter.requires_grad and parameter.numel() > 1:
                    parameter.data.add_(torch.randn_like(parameter) * parameter.data.std(), alpha=perturb)
            yield network

    with start.seeded():
        net = Members(start.apart(networks(), ways_out), members).like(start.given, task)
    net.notes = start.noted()
    return net


ROWS = (
    Method(
        "single", single, {},
        "One network: the reference for all costs.",
        "Pick it when one prediction is enough; everything here is compared with it.",
        place=0,
    ),
    Method(
        "deep", by(deep_ensemble), {"members": 4},
        "As many networks as there are members, to train, to keep and to run.",
        "Pick it when you can pay for it, or need a reference: usually the best scores.",
        place=10,
    ),
)  # fmt: skip
