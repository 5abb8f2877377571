"""TabM: many perceptrons for a table in one network, by BatchEnsemble.

Gorishniy, Kotelnikov and Babenko, *TabM: advancing tabular deep learning with parameter-efficient ensembling*, 2025.
The members share all weights except their output layers and factors. Only the factors on the first layer's inputs start
random. Each member learns from the loss of its own prediction; the shared weights keep it from overfitting.
"""

from __future__ import annotations

from torch import nn

from multitudes.base.checks import check_choice
from multitudes.ensemble.multitude import plain
from multitudes.ensemble.shared import SharedMembers
from multitudes.methods.batch_ensemble import batch_ensemble
from multitudes.methods.registry import Method, by
from multitudes.networks.calls import Input
from multitudes.surgery.affine import affine_layers
from multitudes.surgery.output_layers import output_layers
from multitudes.surgery.select import Factory, build_network

VARIANTS = ("tabm", "mini", "packed")


def tabm(
    model: nn.Module | Factory,
    members: int = 32,
    *,
    variant: str = "tabm",
    rows: str = "shared",
    example: Input | None = None,
    init: str | None = None,
    task: str | None = None,
    seed: int | None = None,
) -> SharedMembers:
    """Convert a network for tables, usually `mt.models.tabular`, to one of many members (Gorishniy et al., 2025).

    `variant="tabm"` gives each layer factors and biases for each member; "mini" gives factors to the first layer's
    inputs only; "packed" gives each member all weights except the embeddings. In all three, each member has its own
    output layer. `rows` is as in `batch_ensemble`. The output layers of other networks are found by running
    them on `example`.

    >>> from multitudes.models import tabular
    >>> net = tabm(tabular(8, 1, hidden=(64, 64)))
    >>> import torch
    >>> net(torch.randn(5, 8)).shape
    torch.Size([32, 5, 1])
    """
    check_choice("variant", variant, VARIANTS)
    model = build_network(model)
    network = plain(model)
    chunks = getattr(network, "chunks", None)
    layers = list(affine_layers(network))
    heads = layers[-1:] if chunks else output_layers(network, None, example)
    others = [name for name in layers if name not in heads]
    if not others:
        raise ValueError(f"model ({type(network).__name__}) must have a hidden layer, which members are told apart by")
    return batch_ensemble(
        model,
        members,
        # Signs keep the size of numbers; normal factors let an embedding be more or less important to a member.
        factors="normal" if getattr(network, "embedding", None) is not None else "sign",
        spread=1.0,
        center=0.0,
        random="first",
        chunks=chunks,
        sides="inputs" if variant == "mini" else "both",
        own=layers if variant == "packed" else heads,
        rows=rows,
        layers=others[:1] if variant == "mini" else others,
        init=init,
        task=task,
        seed=seed,
    )


ROWS = (
    Method(
        "tabm", by(tabm), {"members": 8, "variant": "tabm", "rows": "shared"},
        "Little more parameters than one network; the time of its members, side by side.",
        "Pick it first where the data are a table.",
        place=12,
        tables=True,
    ),
)  # fmt: skip
