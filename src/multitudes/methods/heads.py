"""Many heads on one trunk: each member has its own output layers and shares all layers before them.

Lee et al., *Why M heads are better than one: training a diverse ensemble of deep networks*, 2015. Member i is
`h_i(t(x))`: the trunk t runs once for all members, in training and evaluation; each head h_i is drawn independently.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from multitudes.base.checks import check_choice
from multitudes.ensemble.shared import SharedMembers
from multitudes.methods.registry import Method, by
from multitudes.networks.calls import Input
from multitudes.networks.copies import copied
from multitudes.networks.stochastic import stochastic_layers
from multitudes.surgery.initial_weights import Start
from multitudes.surgery.member_affine import make_shared_members
from multitudes.surgery.observe import call_order, example_for
from multitudes.surgery.output_layers import output_layers
from multitudes.surgery.own_layers import own_member_layers
from multitudes.surgery.select import Factory, Selector, check_untied


def heads(
    model: nn.Module | Factory,
    members: int = 8,
    *,
    layers: Selector = None,
    from_layer: str | None = None,
    rows: str = "shared",
    example: Input | None = None,
    init: str | None = None,
    task: str | None = None,
    seed: int | None = None,
) -> SharedMembers:
    """Give each member its own output layers on a shared trunk (Lee et al., 2015), in about the time of one network.

    Member i is `h_i(t(x))`. The trunk t keeps its weights, and the heads h_i are reset. The loss is the mean over
    members. If the whole trunk is frozen, it is their sum, so each member learns exactly as it would alone. In
    training, dropout before the heads has one mask for all members.

    Args:
        model: The network, or a function that builds one. It is not changed. Frozen parameters stay frozen.
        members: Number of members.
        layers: Selects the layers or whole blocks that each member gets, with norms and their statistics. By default
            these are the output layers, found by a run on `example`, or the layers outside a Hugging Face base model.
            Parameters that belong directly to a shared module, such as class tokens, stay shared.
        from_layer: Name of a layer: it and all layers that run after it on `example` are each member's own.
        rows: `"shared"`, or `"own"` to train each member on its own part of the batch, as in `batch_ensemble`.
        example: One batch of inputs to run; by default noise of the usual sizes is tried.
        init: None resets the heads only, `"fresh"` the trunk too, `"pretrained"` nothing (for one member).
        task: Task of the predictions, if it cannot be inferred.
        seed: Seed of the random weights.

    Returns:
        A multitude with predictions `[M, B, ...]`.

    Example:
        >>> net = heads(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2)), members=8)
        >>> net(torch.ones(5, 3)).shape
        torch.Size([8, 5, 2])
    """
    check_choice("rows", rows, ("shared", "own"))
    start = Start(model, members, init, example=example, seed=seed)
    names = _chosen(start.network, layers, from_layer, example)
    check_untied(start.network, names)
    with start.seeded():
        network = copied(start.network)
        network = start.initialize(network) if init == "fresh" else network
        converted = own_member_layers(network, names, members, drawn=init != "pretrained")
    own = [parameter for layer in converted.values() for parameter in layer.parameters(recurse=False)]
    same = members > 1 and all(torch.equal(stack[0], stack[1]) for stack in own)
    if same and not stochastic_layers(network):
        raise ValueError(
            start.same_network_error("init=None resets each member's layers")
            if init == "pretrained"
            else f"no rule resets {_listed(names)}, so all members would stay the same network: select other layers "
            "with layers="
        )
    net = make_shared_members(SharedMembers, start, network, converted, members, rows, task)
    net.own_losses = True
    notes = dict.fromkeys(names, "each member's own" if init == "pretrained" else "each member's own, reset")
    net.notes = start.summary_notes(notes) if init == "fresh" else notes
    return net


# -- which layers ------------------------------------------------------------------------------------------


def _chosen(network: nn.Module, layers: Selector, from_layer: str | None, example: Input | None) -> list[str]:
    """Return the names of the members' own layers and blocks, none inside another."""
    if layers is not None and from_layer is not None:
        raise ValueError(f"layers={layers!r} and from_layer={from_layer!r} exclude each other: pass one of them")
    if from_layer is not None:
        return _from_on(network, from_layer, example)
    try:
        names = output_layers(network, layers, example)
    except ValueError as error:
        raise ValueError(str(error).replace("heads", "layers", 1).replace("heads=", "layers=")) from error
    return [name for name in names if not any(name != other and name.startswith(f"{other}.") for other in names)]


def _from_on(network: nn.Module, from_layer: str, example: Input | None) -> list[str]:
    """Return the names of all modules with tensors that run from `from_layer` on."""
    modules = dict(network.named_modules())
    if from_layer not in modules or not from_layer:
        there = ", ".join(name for name in modules if name)
        raise ValueError(f"from_layer: no layer is named {from_layer!r}; there are: {there}")
    calls = call_order(network, example_for(network, example))
    if from_layer not in calls:
        raise ValueError(f"from_layer={from_layer!r} does not run on the example")
    begin = calls.index(from_layer)
    before, after = set(calls[:begin]), set(calls[begin:])
    names: list[str] = []

    def walk(name: str) -> None:
        module = modules[name]
        inside = from_layer == name or from_layer.startswith(f"{name}.") or not name
        called = name in before or name in after
        if from_layer != name and (inside or not called):
            for child in module._modules:
                if (path := f"{name}.{child}" if name else child) in modules:
                    walk(path)
        elif name in after and any(True for _ in [*module.parameters(), *module.buffers()]):
            if name in before:
                raise ValueError(f"layer {name!r} runs both before and after from_layer={from_layer!r}")
            names.append(name)

    walk("")
    if not any(p.requires_grad for name in names for p in modules[name].parameters()):
        raise ValueError(f"from_layer={from_layer!r}: {_listed(names)} must have trainable weights, but have none")
    return names


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, names)) or "the layers from there on"


ROWS = (
    Method(
        "heads", by(heads), {"members": 8},
        "One network, plus one output layer per member.",
        "Pick it if inference may take no longer than one forward, or the trunk must not change.",
        place=25,
    ),
)  # fmt: skip
