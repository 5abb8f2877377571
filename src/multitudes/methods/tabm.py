"""TabM: BatchEnsemble of perceptrons for tables.

Gorishniy, Kotelnikov and Babenko, *TabM: advancing tabular deep learning with parameter-efficient ensembling*, 2025.
Members share all weights except their output layers and factors. Only the factors on the first layer's inputs start
random. Each member learns from the loss of its own prediction; sharing weights reduces overfitting.
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
    """Convert a network for tables to TabM (Gorishniy et al., 2025): a BatchEnsemble with an output layer per member.

    Args:
        model: The network, usually `mt.models.tabular`, or a function that builds one. It is not changed.
        members: Number of members.
        variant: `"tabm"` for factors and biases per member on each layer; `"mini"` for factors on the first layer's
            inputs only; `"packed"` for members that share nothing but embeddings.
        rows: `"shared"`, or `"own"` to train each member on its own part of the batch, as in `batch_ensemble`.
        example: One batch of inputs to find the output layers with, for networks other than `tabular`.
        init: Where the shared weights start: `"fresh"`, `"heads"` or `"pretrained"`, as in `deep_ensemble`.
        task: Task of the predictions, if it cannot be inferred.
        seed: Seed of the random weights and factors.

    Returns:
        A multitude with predictions `[M, B, ...]`.

    Example:
        >>> import torch
        >>> from multitudes.models import tabular
        >>> net = tabm(tabular(8, 1, hidden=(64, 64)))
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
        raise ValueError(f"model ({type(network).__name__}) must have a hidden layer, in which its members differ")
    return batch_ensemble(
        model,
        members,
        # Signs keep the size of numbers; normal factors weight embeddings differently in each member.
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
        "Slightly more parameters than one network. Time of all members, in one batch.",
        "Pick it first for tables.",
        place=12, tables=True,
    ),
)  # fmt: skip
