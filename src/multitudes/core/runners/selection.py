"""Selection: the runner that `auto` takes, by device, mode, kind of network and size.

The table comes from `benchmarks/README.md`; nothing is timed here, so that the same network and batch always run the
same way.

| device | mode | network | runner |
|---|---|---|---|
| CPU | training, or with gradients | any | loop |
| CPU | evaluation | small members (`is_small`) | packed |
| CPU | evaluation | others | loop |
| CPU | compiled | any | loop |
| GPU | any | mostly convolutions | packed |
| GPU | any | others | vmapped |
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.nn.modules.conv import _ConvNd

from multitudes.core.calling import Input, tensors_in
from multitudes.core.draws.stochastic import stochastic_layers
from multitudes.core.trace import recording, unmoved

__all__ = ["MOST_BYTES", "MOST_OPERATIONS", "MOST_WEIGHTS", "convolves", "runner_for"]

MOST_OPERATIONS = 15e6
"""The multiply-adds of a member's layer, in the mean, up to which packed members are faster on a CPU."""

MOST_BYTES = 2**20
"""The most that all members' largest activation may take, so that it stays in a core's cache."""

MOST_WEIGHTS = 2**20
"""The most bytes that all members' weights may take, since they are stacked in every call."""


class Independent(Protocol):
    """The part of `Members` that selection reads."""

    network: Any
    members: int
    training: bool
    _chosen: dict[Any, str]

    def _of_first(self, x: Input) -> Tensor: ...

    def refusal(self, name: str, x: Input) -> str: ...


def runner_for(net: Independent, x: Input) -> str:
    """Return the name of the runner for an input, by the table above."""
    first = x if isinstance(x, Tensor) else tensors_in(x)[0]
    if first.is_cuda:
        return "packed" if convolves(net.network[0]) else "vmapped"
    if net.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or _is_watched():
        return "loop"
    key = (first.shape, first.dtype, torch.is_autocast_enabled("cpu"), isinstance(x, Tensor))
    if key not in net._chosen:
        net._chosen[key] = "packed" if is_small(net, x) else "loop"
    return net._chosen[key]


def convolves(network: nn.Module) -> bool:
    """Return whether a network has at least as many kernels as matrices."""
    ranks = [parameter.dim() for parameter in network.parameters()]
    return sum(rank > 2 for rank in ranks) >= ranks.count(2)


def _is_watched() -> bool:
    """Return whether a transform, a dispatch mode or a tracer is active, which should see each member's own code."""
    return (
        _functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_tracing()
    )


def is_small(net: Independent, x: Input) -> bool:
    """Return whether members are so small that calling their layers takes most of the time, and can be packed.

    Packing makes a CPU's depthwise convolutions and those of one pixel several times slower, so that networks of these
    are not small. Each step must have a rule of its own.
    """
    tensors = tensors_in(x)
    kinds = {t.dtype for t in (*tensors, *net.network.parameters()) if t.is_floating_point()}
    if not kinds <= {torch.float32, torch.float64} or torch.is_autocast_enabled("cpu"):
        return False
    if stochastic_layers(net.network) or not tensors[0].dim() or not len(tensors[0]):
        return False
    member = net.network[0]
    if net.members * sum(p.nbytes for p in member.parameters()) > MOST_WEIGHTS:
        return False
    convolutions = [module for module in member.modules() if isinstance(module, _ConvNd)]
    of_one_pixel = sum(max(module.kernel_size) == 1 for module in convolutions)
    if 4 * of_one_pixel > len(convolutions) or any(module.groups > 1 for module in convolutions):
        return False
    operations, nbytes = _size_of_run(net, x)
    if operations > MOST_OPERATIONS or nbytes * net.members > MOST_BYTES:
        return False
    return not net.refusal("packed", x) and net._fast["packed"].all_steps_have_rules()


def _size_of_run(net: Independent, x: Input) -> tuple[float, int]:
    """One member's multiply-adds for each layer, in the mean, and the bytes of the largest tensor that it makes."""
    layers = sum(parameter.dim() > 1 for parameter in net.network[0].parameters())
    with unmoved(net.network, x), torch.no_grad(), recording(net.network, (), work=True) as trace:
        net._of_first(x)
    return trace.multiply_adds / max(1, layers), trace.nbytes
