"""Packed-Ensembles: narrow members that together cost about as much as one network.

Laurent et al., *Packed-Ensembles for efficient uncertainty estimation*, 2023. Packed-Ensembles-(alpha, M, gamma)
scales the widths of a network by alpha, splits them among M members, and splits each member's layers into gamma
groups. A layer then has

    M * (alpha C_in / M) * (alpha C_out / M) * s^2 / gamma

weights. Three steps: narrow the network to `alpha / M` of its width, replicate it M times, run all replicas
together.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from multitudes.base.checks import check_count, check_number
from multitudes.ensemble.members import Members
from multitudes.ensemble.multitude import Multitude
from multitudes.methods.registry import Method, by
from multitudes.networks.calls import Input
from multitudes.networks.copies import copied
from multitudes.surgery.initial_weights import Start
from multitudes.surgery.narrowing.build import Build, build_function, built_at, refuse_options, whole_network
from multitudes.surgery.narrowing.narrow import narrowed_copy, rescale_activations, warn_of_whole
from multitudes.surgery.observe import example_for
from multitudes.surgery.select import Factory, Selector


def packed(
    model: nn.Module | Factory | Build,
    members: int = 4,
    alpha: float | None = None,
    gamma: int = 1,
    *,
    min_channels: int = 64,
    layers: Selector = None,
    example: Input | None = None,
    init: str | None = None,
    heads: Selector = None,
    task: str | None = None,
    seed: int | None = None,
) -> Members:
    """Build a Packed-Ensemble-(alpha, M, gamma) (Laurent et al., 2023): narrow members that run together.

    Each member is the network at `alpha / M` of its width. Widths that do not divide are rounded up; attention keeps
    its head size and whole heads. Hugging Face models are narrowed through their configurations, so a member can be
    saved and loaded as one. `net.summary()` shows every layer's widths and gamma.

    A function of the width can build the members instead. `build(1.0)` is then the reference for inputs, outputs and
    size, and `gamma`, `min_channels`, `layers`, `init` and `heads` cannot be used:

        def build(width: float) -> nn.Module:
            return MyNetwork(channels=round(64 * width), heads=round(8 * width))

        net = mt.packed(build, members=4, alpha=2)  # each member is a build(0.5)

    Args:
        model: The network, a function that builds one for each member, or a function of the width. It is not changed.
            Layers with frozen parameters, and the layers that they read from, are not narrowed.
        members: Number of members (M).
        alpha: Above 0 and at most `members`, for which each member is as wide as the model. 2 by default.
        gamma: Number of groups in each member's layers, except the first, the last, and small ones.
        min_channels: Minimum inputs per group; layers with fewer have a smaller gamma.
        layers: Selects the layers to which gamma applies.
        example: One batch of inputs, preferably real; by default noise of the usual sizes is tried.
        init: `"fresh"` (default); `"pretrained"` to start each member from its own selection of the model's channels
            and heads, scaled to keep the size of activations; or `"heads"` to reset the output layers also.
        heads: Selects the output layers that `init="heads"` resets.
        task: Task of the predictions, if it cannot be inferred.
        seed: Seed of the random weights and selections.

    Returns:
        An ensemble with predictions `[M, B, ...]`.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
        >>> net = packed(model, members=4, alpha=2)
        >>> net(torch.ones(5, 8)).shape
        torch.Size([4, 5, 3])
        >>> net.member(0)[0]
        Linear(in_features=8, out_features=32, bias=True)
    """
    build = build_function(model)
    if build is not None:
        refuse_options(gamma, min_channels, layers, init, heads)
    whole: nn.Module | Factory = model if build is None else partial(whole_network, build)  # type: ignore[assignment]
    start = Start(whole, members, init, heads, example=example, seed=seed)
    alpha = min(2, members) if alpha is None else alpha
    check_number("alpha", alpha, 0, high=members, above=True)
    check_count("gamma", gamma)
    notes: dict[str, str] = {}

    def networks() -> Iterator[nn.Module]:
        x = example_for(start.network, example)
        for index in range(members):
            whole = start.next_network()
            if index == 0 or not start.redraws:
                network, cuts = narrowed_copy(whole, alpha / members, gamma, min_channels, layers, x, start.redraws)
                notes.update({name: cut.note for name, cut in cuts.items()})
            if index == 0 and alpha < members:
                warn_of_whole(whole, network, members)
            yield start.initialize(copied(network) if start.redraws else rescale_activations(network, whole, cuts, x))

    with start.seeded():
        if build is None:
            ways_out = "init='heads' resets the output layers, or a smaller alpha gives each its own channels"
            given = start.require_distinct(networks(), ways_out)
        else:
            built = built_at(build, alpha / members, members, start.network, example)
            given = start.require_distinct(built, "set no seed in it")
        net = Members(given, members).like(start.given, task)
    net.notes = start.summary_notes(notes)
    how = f"gamma {gamma}" if build is None else f"build({alpha / members:g})"
    net.notes["total"] = f"alpha {alpha:g}, {how}, {_size(net, start.network)}"
    return net


def narrow(
    model: nn.Module | Factory | Build,
    factor: float,
    gamma: int = 1,
    *,
    min_channels: int = 64,
    layers: Selector = None,
    example: Input | None = None,
    init: str | None = None,
    heads: Selector = None,
    seed: int | None = None,
) -> nn.Module:
    """Scale all hidden widths of a network by `factor`; inputs and outputs keep their widths.

    The result is the member of a Packed-Ensemble of one.

    Args:
        model: The network, or a function as in `packed`. It is not changed.
        factor: Above 0 and at most 1. Widths that do not divide are rounded up.
        gamma: Number of groups in each layer, as in `packed`, like all other arguments.
        min_channels: Minimum inputs per group.
        layers: Selects the layers to which gamma applies.
        example: One batch of inputs.
        init: `"fresh"` (default), `"heads"` or `"pretrained"`.
        heads: Selects the output layers that `init="heads"` resets.
        seed: Seed of the random weights and selections.

    Returns:
        A plain network.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
        >>> narrow(model, 0.5)
        Sequential(
          (0): Linear(in_features=8, out_features=32, bias=True)
          (1): ReLU()
          (2): Linear(in_features=32, out_features=3, bias=True)
        )
    """
    if isinstance(model, Multitude):
        raise ValueError(f"model is a multitude ({type(model).__name__}): narrow its network first, or use packed")
    check_number("factor", factor, 0, high=1, above=True)
    options: dict[str, Any] = {"layers": layers, "example": example, "init": init, "heads": heads, "seed": seed}
    return packed(model, 1, factor, gamma, min_channels=min_channels, **options).member(0)


def _size(net: Members, model: nn.Module) -> str:
    """Describe the size relative to the model. Embedding tables are mentioned, as they narrow in one axis only."""
    total, whole = (sum(p.numel() for p in network.parameters()) for network in (net, model))
    tables = {id(p): p.numel() for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    mostly = 10 * sum(tables.values()) > whole
    rest = f", of which embedding tables are {sum(tables.values()) / whole:.0%}" if mostly else ""
    return f"{total / max(1, whole):.2f} times the parameters of model{rest}"


ROWS = (
    Method(
        "packed", by(packed), {"members": 4, "alpha": 2, "gamma": 1, "layers": None},
        "About one network. Members have alpha / members of its width.",
        "Pick it first. Its members are independent, and its scores are the best for their cost.",
        place=20,
    ),
)  # fmt: skip
