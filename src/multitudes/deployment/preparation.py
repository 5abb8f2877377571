"""Prepare a network for any engine, by reducing its computation."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from multitudes.deployment.engines import distance, rounding
from multitudes.deployment.norm_folding import Folded, fold_norms, foldable
from multitudes.ensemble.members import Members
from multitudes.ensemble.multitude import Multitude
from multitudes.ensemble.shared import SharedMembers
from multitudes.files.onnx_exporter import separate_members
from multitudes.networks.calls import Input, call, mapped, tensors_in
from multitudes.networks.copies import copied
from multitudes.networks.stochastic import expecting, stochastic_layers
from multitudes.networks.trace import recording


def check_repeatable(net: Multitude, example: Input, options: dict[str, Any]) -> None:
    """Refuse a network whose predictions for the same input change between calls."""
    first = net(example, **options)
    if not first.is_floating_point() and not first.is_complex():
        raise ValueError(f"net must predict logits or values, whose rounding is known, and it predicts {first.dtype}")
    with suppress(Exception):  # it need not accept other numbers
        net(mapped(lambda tensor: 1.5 * tensor + 0.1 if tensor.is_floating_point() else tensor, example), **options)
    off = distance(net(example, **options), first)
    if off > 10 * rounding(first.dtype, first.device):
        raise ValueError(
            f"net gives other predictions for the same example when it is called again (by {off:.1e} of how much they "
            "vary): a network that remembers its calls cannot be deployed, and one that draws random numbers in its "
            "own code must be converted, say by mt.mc_dropout, so that its draws are known"
        )


@torch.no_grad()
def prepare_network(net: Multitude, example: Input, options: dict[str, Any]) -> tuple[Multitude, list[tuple[str, str]]]:
    """Return a copy of a network with separate members and folded norms, and rows of the summary."""
    rows = []
    quick = _with_separate_members(net, example)
    if quick is not net:
        rows.append(("members", f"{net.members}, folded into networks of their own"))
    norms = sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in quick.template.modules())
    if norms:
        quick, folded = _without_norms(quick, example, options)
        rows.append(("batch norms", f"{folded} of {norms} folded into the layers beside them"))
    return quick, rows


def _with_separate_members(net: Multitude, example: Input) -> Multitude:
    """Convert members that share weights to separate networks, unless that doubles the work or they draw."""
    if not isinstance(net, SharedMembers) or stochastic_layers(net.network):
        return net
    net(example)  # determines how members run
    with recording(net.network, (), work=True) as together:
        net(example)
    member = net.member(0)
    with recording(member, (), work=True) as alone:
        call(member, example)
    if 2 * together.multiply_adds <= net.members * alone.multiply_adds:
        return net
    separate: Multitude = separate_members(net)
    return separate


def _without_norms(net: Multitude, example: Input, options: dict[str, Any]) -> tuple[Multitude, int]:
    """Return a copy of a network with norms folded where equivalent, and their number.

    Nothing is folded if the network's code inspects values: another input may take a path past the norm.
    """
    values = [*net.network.parameters(), *net.network.buffers(), *tensors_in(example)]
    with expecting(net.network), recording(net.network, (), looks=values) as trace:
        net._of_first(example)
    if trace.looks:
        return net, 0
    quick, pairs = _folded(net, example, options)
    want = net(example, **options)
    if not pairs or distance(quick(example, **options), want) > rounding(want.dtype, want.device):
        return net, 0
    return quick, len(pairs)


def _folded(net: Multitude, example: Input, options: dict[str, Any]) -> tuple[Multitude, list[Folded]]:
    if not isinstance(net, Members):
        quick = copied(net)
        quick(example, **options)  # determines how it runs
        pairs = foldable(quick.network, lambda: quick(example, **options))
        fold_norms(quick.network, pairs)
        quick.forget()
        return quick, pairs
    networks = [copied(net._member(index)) for index in range(net.members)]
    if type(net) is not Members or isinstance(networks[0], Multitude):  # subclasses hold more than stacked tensors
        return net, []
    first = Multitude(networks[0]).like(net)
    first(example, **options)
    pairs = foldable(networks[0], lambda: first(example, **options))
    return Members([fold_norms(network, pairs) for network in networks], net.members).like(net), pairs
