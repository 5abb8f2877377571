"""Deep ensembles: independently initialised networks, trained together.

Lakshminarayanan, Pritzel and Blundell, *Simple and scalable predictive uncertainty estimation using deep
ensembles*, 2017. The predictive distribution is the mean over members,

    p(y | x) = 1/M sum_m p(y | x, theta_m).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from multitudes.base.checks import check_number
from multitudes.ensemble.members import Members
from multitudes.methods.registry import Method, by, single
from multitudes.networks.copies import copied
from multitudes.surgery.initial_weights import Start
from multitudes.surgery.select import Factory, Selector


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
    """Return an ensemble of `members` networks like `model`, which is not changed.

    If `model` is a function that builds a network, it is called for each member. For a given network, `init` decides:

    - `"fresh"` (default): reset every layer by its own rule;
    - `"heads"`: keep the weights, reset the output layers (or those that `heads` selects), to fine-tune a pretrained
      network;
    - `"pretrained"`: keep all weights. Then `perturb` must be positive: members that start equal and train on the same
      batches stay equal, unless the network has layers that draw (see `Stochastic`). Torch's dropout is not enough.

    `perturb` adds normal noise of `perturb` times each parameter's own standard deviation. Frozen parameters keep their
    values. The same `seed` gives the same members; without a seed, torch's global generator is used.

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
            network = start.initialize(copied(start.next_network()))
            for parameter in network.parameters() if perturb else ():
                if parameter.requires_grad and parameter.numel() > 1:
                    parameter.data.add_(torch.randn_like(parameter) * parameter.data.std(), alpha=perturb)
            yield network

    with start.seeded():
        net = Members(start.require_distinct(networks(), ways_out), members).like(start.given, task)
    net.notes = start.summary_notes()
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
