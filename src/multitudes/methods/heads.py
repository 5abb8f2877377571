"""Many heads on one trunk: each member has its own output layers and shares all layers before them.

Lee et al., *Why M heads are better than one: training a diverse ensemble of deep networks*, 2015. Member i's network is
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
    """Give each member its own output layers on a shared trunk, in about the time of one network (Lee et al.).

    The output layers are found by running the network on `example`; for a Hugging Face model they are those outside
    its base model. `layers` selects others, whole blocks too. `from_layer` selects all layers from that one on, in
    execution order on `example`. Norms in a selected block, with their statistics, are each member's own. Parameters
    held directly by a shared module, such as class tokens, stay shared.

    The trunk keeps its weights, and each member's layers are reset by their own rules. `init="fresh"` resets the trunk
    too; `init="pretrained"` resets nothing, which is for one member. Frozen parameters stay frozen. The loss is the
    mean over members. If the whole trunk is frozen, it is their sum, and each member learns exactly as it would alone.
    In training, dropout before the heads has one mask for all members. With `rows="own"` each member trains on its own
    part of the batch, as in `batch_ensemble`.

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
            start.same_network_error("init=None draws each member's layers anew")
            if init == "pretrained"
            else f"no rule draws {_listed(names)} anew, so all members would be the same network, and stay so: layers= "
            "selects others"
        )
    net = make_shared_members(SharedMembers, start, network, converted, members, rows, task)
    net.own_losses = True
    notes = dict.fromkeys(names, "each member's own" if init == "pretrained" else "each member's own, drawn anew")
    net.notes = start.summary_notes(notes) if init == "fresh" else notes
    return net


# -- which layers ------------------------------------------------------------------------------------------


def _chosen(network: nn.Module, layers: Selector, from_layer: str | None, example: Input | None) -> list[str]:
    """Return the names of the members' own layers and blocks, none inside another."""
    if layers is not None and from_layer is not None:
        raise ValueError(f"layers={layers!r} and from_layer={from_layer!r} say the same thing: give one of them")
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
        raise ValueError(f"from_layer={from_layer!r} never runs, on the example at least")
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
                raise ValueError(f"layer {name!r} runs before from_layer={from_layer!r} and after, so it is shared")
            names.append(name)

    walk("")
    if not any(p.requires_grad for name in names for p in modules[name].parameters()):
        raise ValueError(
            f"from_layer={from_layer!r}: {_listed(names)} must have weights that are trained, and have none"
        )
    return names


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, names)) or "what runs from there on"


ROWS = (
    Method(
        "heads", by(heads), {"members": 8},
        "Little more than one network: the output layer of each member.",
        "Pick it when the time of one forward is all there is, or the trunk is somebody else's.",
        place=25,
    ),
)  # fmt: skip
