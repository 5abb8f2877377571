"""LoRA: members share one frozen network, and have low-rank adapters and output layers of their own."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from multitudes.base.checks import check_choice, check_count, check_number
from multitudes.ensemble.multitude import Multitude
from multitudes.ensemble.shared import SharedMembers
from multitudes.methods.lora.layers import Lora, widths_of
from multitudes.methods.lora.peft_files import load_adapters, read_adapter, write_adapters
from multitudes.methods.registry import Method, Settings, Training, by
from multitudes.networks.calls import Input
from multitudes.networks.copies import copied
from multitudes.surgery.affine import SEVERAL, affine_layers, kind_of, maps_of, select_affine, weight_of
from multitudes.surgery.initial_weights import Start
from multitudes.surgery.member_affine import make_shared_members
from multitudes.surgery.observe import note_reach, unconverted_kinds
from multitudes.surgery.output_layers import output_layers
from multitudes.surgery.own_layers import own_member_layers
from multitudes.surgery.select import CONVOLUTIONS, Factory, Selector, check_untied, select, within


class LoraMembers(SharedMembers):
    """Members that share one frozen network and differ in low-rank adapters."""

    own_losses = True

    def save_adapters(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Save each member in PEFT's format, `adapter_model.safetensors` and `adapter_config.json`.

        `peft.PeftModel.from_pretrained(base, folder)` and `lora(model, adapters=folders)` load the files.

        Args:
            folder: Folder for `member-0`, `member-1` and so on.

        Returns:
            The members' folders.
        """
        return write_adapters(self.network, self.members, Path(folder))


def lora(
    model: nn.Module | Factory,
    members: int | None = None,
    rank: int | None = None,
    *,
    alpha: float | None = None,
    layers: Selector = None,
    heads: Selector = None,
    dropout: float = 0.0,
    adapters: Sequence[str | os.PathLike[str]] | None = None,
    rows: str = "shared",
    example: Input | None = None,
    init: str | None = None,
    task: str | None = None,
    seed: int | None = None,
) -> LoraMembers:
    """Give each member low-rank adapters of one frozen network (LoRA, Hu et al., 2021).

    Member i's layer is `y = W x + b + (alpha / rank) B_i A_i x`, with `A_i [rank, I]` random and `B_i [O, rank]` zero
    at the start. Only adapters and output layers are trained. The loss is the sum over members, so each learns exactly
    as it would alone. `net.member(i)` is a plain network with the adapter merged into its weights.

    Args:
        model: The network, usually pretrained, or a function that builds one. It is not changed.
        members: Number of members, 8 by default.
        rank: Rank of the adapters, 8 by default.
        alpha: Scale of the adapters times the rank; by default the rank.
        layers: Selects the adapted layers; by default all linear layers but the output layers, or all convolutions if
            there are no others.
        heads: Selects the output layers that each member has for itself; by default they are found as in `heads`, or
            shared in language models. `[]` shares them.
        dropout: Dropout rate on the adapters' inputs in training.
        adapters: Folders written by PEFT or `net.save_adapters`, one per member. The files determine the adapted
            layers and ranks.
        rows: `"shared"`, or `"own"` to train each member on its own part of the batch, as in `batch_ensemble`.
        example: One batch of inputs to find the output layers with; by default noise of the usual sizes is tried.
        init: None resets the output layers, `"pretrained"` keeps them, `"fresh"` resets the whole network.
        task: Task of the predictions, if it cannot be inferred.
        seed: Seed of the random weights.

    Returns:
        A multitude with predictions `[M, B, ...]`.

    Example:
        >>> import torch
        >>> net = lora(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2)), members=4, rank=2)
        >>> net(torch.ones(5, 3)).shape, [name for name, p in net.named_parameters() if p.requires_grad]
        (torch.Size([4, 5, 2]), ['0.A', '0.B', '2.weights', '2.biases'])
    """
    check_choice("rows", rows, ("shared", "own"))
    if adapters is not None:
        given = {"rank": rank, "alpha": alpha, "layers": layers, "heads": heads, "init": init, "members": members}
        return _from_files(model, adapters, given, rows, task)
    members, rank = 8 if members is None else members, 8 if rank is None else rank
    check_count("rank", rank)
    check_number("dropout", dropout, 0, below=1)
    if alpha is not None:
        check_number("alpha", alpha, 0, above=True)
    start = Start(model, members, init, example=example, seed=seed)
    own = _heads(start.network, heads, example)
    chosen = _layers_to_adapt(start.network, layers, own)
    _check_rank(chosen, rank)
    check_untied(start.network, [*own, *chosen])
    with start.seeded():
        network = copied(start.network)
        network = start.initialize(network) if init == "fresh" else network
        converted = own_member_layers(network, own, members, drawn=init != "pretrained")
        for name in chosen:
            converted[name] = Lora(network.get_submodule(name), members, rank, alpha or rank, dropout)
    return _freeze_shared(
        make_shared_members(LoraMembers, start, network, converted, members, rows, task), network, converted, own
    )


def _freeze_shared(net: LoraMembers, network: nn.Module, converted: Collection[str], heads: list[str]) -> LoraMembers:
    """Freeze the shared parameters, and set the notes."""
    own = net._own_names()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in own and parameter.requires_grad)
    notes = dict.fromkeys(converted, "a low-rank adapter for each member")
    net.notes = notes | dict.fromkeys(heads, "each member's own")
    note_reach(net, network, converted, warn=False)
    return net


# -- which layers ------------------------------------------------------------------------------------------


def _heads(network: nn.Module, heads: Selector, example: Input | None) -> list[str]:
    """Return the names of the members' own output layers; a language model's is shared unless `heads` selects it."""
    if (heads is None and _token_layer(network) is not None) or (isinstance(heads, (list, tuple)) and not heads):
        return []
    names = output_layers(network, heads, example)
    return [name for name in names if not any(name != other and name.startswith(f"{other}.") for other in names)]


def _token_layer(network: nn.Module) -> nn.Module | None:
    """Return the output layer over tokens of a Hugging Face model, if there is one."""
    layer = getattr(network, "get_output_embeddings", lambda: None)()
    return layer if isinstance(layer, nn.Module) else None


def _layers_to_adapt(network: nn.Module, layers: Selector, heads: Collection[str]) -> dict[str, nn.Module]:
    kinds = (None, nn.Linear, nn.MultiheadAttention, *CONVOLUTIONS)
    able = {name: layer for name, layer in affine_layers(network).items() if kind_of(layer) in kinds}
    own = {name for name in able if any(within(name, head) for head in heads)}
    if layers is None:
        untied = select_affine(network, None) if able else {}
        last = _token_layer(network)
        free = {n: layer for n, layer in able.items() if n in untied and n not in own and layer is not last}
        linear = {name: layer for name, layer in free.items() if kind_of(layer) not in CONVOLUTIONS}
        wanted = linear or free  # else the convolutions
        if not wanted:
            others = unconverted_kinds(network, heads) or "no other layers"
            raise ValueError(
                f"model ({type(network).__name__}) has no linear layer or convolution besides its output layer, only "
                f"{others}: select layers with layers="
            )
        return wanted
    chosen = {name: layer for name, layer in select(network, layers, able).items() if name not in own}
    if not chosen:
        raise ValueError(
            f"layers={layers!r} selects only output layers, which are each member's own: pass heads=[] to adapt them"
        )
    return chosen


def _check_rank(chosen: dict[str, nn.Module], rank: int) -> None:
    for name, layer in chosen.items():
        for affine in maps_of(layer):
            weight = layer.get_parameter(affine.weight) if kind_of(layer) in SEVERAL else weight_of(layer)
            inputs, outputs = widths_of(weight, affine)
            if rank > min(inputs, outputs):
                raise ValueError(
                    f"rank={rank} must be at most {min(inputs, outputs)} for layer {name!r} ({type(layer).__name__}) "
                    f"with {inputs} inputs and {outputs} outputs: lower it, or exclude the layer with layers="
                )


# -- PEFT files --------------------------------------------------------------------------------------------


def _from_files(
    model: nn.Module | Factory,
    adapters: Sequence[str | os.PathLike[str]],
    given: dict[str, Any],
    rows: str,
    task: str | None,
) -> LoraMembers:
    if isinstance(adapters, (str, os.PathLike)) or not adapters:
        raise ValueError(f"adapters must be a list of folders written by PEFT, got {adapters!r}")
    for name, value in given.items():
        if value is not None and (name != "members" or value != len(adapters)):
            raise ValueError(
                f"{name}={value!r} cannot be combined with adapters ({len(adapters)} members), whose files determine it"
            )
    start = Start(model, len(adapters), "pretrained")
    read = [read_adapter(Path(folder), start.network) for folder in adapters]
    network = copied(start.network)
    heads = list(dict.fromkeys(name for adapter in read for name in adapter.heads))
    chosen = list(dict.fromkeys(name for adapter in read for name in adapter.layers))
    check_untied(network, [*heads, *chosen])
    converted = own_member_layers(network, heads, len(adapters), drawn=False)
    for name in chosen:
        rank = max(adapter.layers[name].rank for adapter in read if name in adapter.layers)
        converted[name] = Lora(network.get_submodule(name), len(adapters), rank, 1.0, read[0].dropout)
    net = make_shared_members(LoraMembers, start, network, converted, len(adapters), rows, task)
    load_adapters(net.network, read)
    return _freeze_shared(net, network, converted, heads)


# -- for studies -------------------------------------------------------------------------------------------


FASTER = 10
"""Usual ratio of the learning rate of adapters to that of fine-tuning: B starts at zero."""


def _train(net: Multitude, training: Training, settings: Settings) -> Training:
    if settings["lr"] is None and training.get("lr") is None:
        return training
    return {**training, "lr": FASTER * training["lr"] if settings["lr"] is None else settings["lr"]}


ROWS = (
    Method(
        "lora", by(lora), {"members": 8, "rank": 8, "lr": None},
        "Parameters of one network, plus small adapters. Time of all members.",
        "Pick it for a large pretrained network. Its weights are stored once and do not change.",
        place=35, train=_train, pretrained=True,
    ),
)  # fmt: skip
