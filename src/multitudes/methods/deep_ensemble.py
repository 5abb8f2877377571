"""Deep ensembles: independently initialized networks, trained together.

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
    """Build a deep ensemble (Lakshminarayanan et al., 2017): independent networks that differ by their random start.

    The predictive distribution is the mean over members, `p(y | x) = 1/M sum_m p(y | x, theta_m)`.

    Args:
        model: The network, which is not changed, or a function that builds one and is called for each member. Frozen
            parameters keep their values.
        members: Number of members.
        init: Where the members start, if `model` is a network:

            - `"fresh"` (default): every layer is reset by its own rule.
            - `"heads"`: only the output layers are reset, to fine-tune a pretrained network.
            - `"pretrained"`: nothing is reset. `perturb` must then be positive unless the network has layers that draw
              (see `Stochastic`; torch's dropout is not one): members that start equal and train on the same batches
              stay equal.
        heads: Selects the output layers that `init="heads"` resets; by default they are found.
        perturb: Standard deviation of normal noise on the weights, relative to that of each parameter.
        task: Task of the predictions, if it cannot be inferred.
        seed: Seed of the random weights; by default torch's global generator is used.

    Returns:
        An ensemble with predictions `[M, B, ...]`.

    Example:
        >>> net = deep_ensemble(nn.Linear(3, 2), members=4, seed=0)
        >>> net(torch.ones(5, 3)).shape
        torch.Size([4, 5, 2])
    """
    start = Start(model, members, init, heads, seed=seed, nested=True)
    check_number("perturb", perturb, 0)
    if start.fresh and perturb:
        raise ValueError(f"perturb={perturb!r} needs init='pretrained' or 'heads'; fresh members differ anyway")
    ways_out = "init='heads' resets the output layers, or perturb=0.01 moves all weights"

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
        "One network, the reference for the costs of all methods.",
        "Pick it if one prediction is enough. All methods are compared with it.",
        place=0,
    ),
    Method(
        "deep", by(deep_ensemble), {"members": 4},
        "Training, storage and inference of one network per member.",
        "Pick it if you can afford it or need a reference. It usually has the best scores.",
        place=10,
    ),
)  # fmt: skip
