"""Decide whether members are so small that a CPU spends most of its time on calling their layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.nn.modules.conv import _ConvNd

from multitudes.ensemble.packing.packed_network import gains_channels_last
from multitudes.networks.calls import Input, tensors_in
from multitudes.networks.stochastic import stochastic_layers
from multitudes.networks.trace import preserve_state, recording
from multitudes.networks.versions import hooked_module

MANY = 8
"""From this many members on, calling layers M times takes longer than stacking their weights. With fewer,
packing pays only for convolutions of two or more rows."""

MOST_WEIGHTS = 2**21
"""Maximum bytes of all members' weights in networks without convolutions; every call stacks them."""

MOST_KERNELS = 2**23
"""Maximum bytes of all members' weights in networks with convolutions."""

MOST_BYTES = 2**19
"""Maximum bytes of all members' largest activation, so that it stays in a cache."""

MOST_MAPS = 2**25
"""The same with channels-last feature maps, which speed up pooling more than a cache does."""


def convolves(network: nn.Module) -> bool:
    """Return whether a network has at least as many kernels as matrices."""
    ranks = [parameter.dim() for parameter in network.parameters()]
    return sum(rank > 2 for rank in ranks) >= ranks.count(2)


def is_watched() -> bool:
    """Return whether a transform, a dispatch mode or a tracer is active, which must run each member's own code."""
    return (
        _functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_tracing()
    )


def is_small(member: nn.Module, members: int, x: Input, run: Callable[[], Tensor]) -> bool:
    """Return whether members are so small on `x` that running them packed is faster; `run` runs one of them.

    Packed depthwise and 1x1 convolutions are several times slower on a CPU, so networks of these are not small.
    """
    tensors = tensors_in(x)
    kinds = {t.dtype for t in (*tensors, *member.parameters()) if t.is_floating_point()}
    if not kinds <= {torch.float32, torch.float64} or torch.is_autocast_enabled("cpu"):
        return False
    if stochastic_layers(member) or hooked_module(member) is not None or not tensors[0].dim() or not len(tensors[0]):
        return False
    convolutions = [module for module in member.modules() if isinstance(module, _ConvNd)]
    of_one_pixel = sum(max(module.kernel_size) == 1 for module in convolutions)
    if 4 * of_one_pixel > len(convolutions) or any(module.groups > 1 for module in convolutions):
        return False
    if members < MANY and (not convolutions or len(tensors[0]) < 2):
        return False
    if members * sum(p.nbytes for p in member.parameters()) > (MOST_KERNELS if convolutions else MOST_WEIGHTS):
        return False
    with preserve_state(member, x), torch.no_grad(), recording(member, (), work=True) as trace:
        run()
    return trace.nbytes * members <= (MOST_MAPS if gains_channels_last(member) else MOST_BYTES)
