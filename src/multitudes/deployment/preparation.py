"""Reduce a network's computation, for any engine."""

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
from multitudes.networks.calls import Input, call, map_tensors, tensors_in
from multitudes.networks.copies import copied
from multitudes.networks.stochastic import expecting, stochastic_layers
from multitudes.networks.trace import recording


def check_repeatable(net: Multitude, example: Input, options: dict[str, Any]) -> None:
    """Refuse a network whose predictions for the same input change from call to call."""
    first = net(example, **options)
    if not first.is_floating_point() and not first.is_complex():
        raise ValueError(f"net must predict floating-point or complex numbers, got {first.dtype}")
    with suppress(Exception):  # the network may reject other numbers
        net(
            map_tensors(lambda tensor: 1.5 * tensor + 0.1 if tensor.is_floating_point() else tensor, example), **options
        )
    off = distance(net(example, **options), first)
    if off > 10 * rounding(first.dtype, first.device):
        raise ValueError(
            f"net must repeat its predictions for the same input, but a second call changes them by {off:.1e} of their "
            "variation: a network that keeps values between calls cannot be deployed; if its code draws random "
            "numbers, convert it first, for example with mt.mc_dropout"
        )


@torch.no_grad()
def prepare_network(net: Multitude, example: Input, options: dict[str, Any]) -> tuple[Multitude, list[tuple[str, str]]]:
    """Return a copy with separate members and folded norms, and rows of the summary."""
    rows = []
    quick = _with_separate_members(net, example)
    if quick is not net:
        rows.append(("members", f"{net.members}, folded into separate networks"))
    norms = sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in quick.template.modules())
    if norms:
        quick, folded = _without_norms(quick, example, options)
        rows.append(("batch norms", f"{folded} of {norms} folded into neighboring layers"))
    return quick, rows


def _with_separate_members(net: Multitude, example: Input) -> Multitude:
    """Convert members that share weights to separate networks, unless they draw or it doubles the work."""
    if not isinstance(net, SharedMembers) or stochastic_layers(net.network):
        return net
    net(example)  # chooses a runner
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
    """Return a copy with norms folded where that is equivalent, and their number.

    Nothing is folded if the network's code inspects values: another input may skip the norm.
    """
    values = [*net.network.parameters(), *net.network.buffers(), *tensors_in(example)]
    with expecting(net.network), recording(net.network, (), inspected=values) as trace:
        net._of_first(example)
    if trace.inspections:
        return net, 0
    quick, pairs = _folded(net, example, options)
    want = net(example, **options)
    if not pairs or distance(quick(example, **options), want) > rounding(want.dtype, want.device):
        return net, 0
    return quick, len(pairs)


def _folded(net: Multitude, example: Input, options: dict[str, Any]) -> tuple[Multitude, list[Folded]]:
    if not isinstance(net, Members):
        quick = copied(net)
        quick(example, **options)  # chooses a runner
        pairs = foldable(quick.network, lambda: quick(example, **options))
        fold_norms(quick.network, pairs)
        quick.forget()
        return quick, pairs
    networks = [copied(net._member(index)) for index in range(net.members)]
    if type(net) is not Members or isinstance(networks[0], Multitude):  # subclasses have more state
        return net, []
    first = Multitude(networks[0]).like(net)
    first(example, **options)
    pairs = foldable(networks[0], lambda: first(example, **options))
    return Members([fold_norms(network, pairs) for network in networks], net.members).like(net), pairs
