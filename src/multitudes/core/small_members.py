"""Small members: on a CPU, where each layer computes so little that calling it takes most of the time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multitudes.core.calling import Input, tensors_in
from multitudes.core.counting import flop_counter
from multitudes.core.dispatching import Overlapping
from multitudes.core.draws.stochastic import stochastic_layers
from multitudes.core.proof import kind_of, unmoved

__all__ = ["MOST_BYTES", "MOST_OPERATIONS", "Sizes"]

MOST_OPERATIONS = 15e6
"""The multiply-adds of a member's layer, in the mean, up to which packed members are faster on a CPU."""

MOST_BYTES = 2**20
"""The most that all members' largest activation may take: a core's cache holds it, and memory for it is not paged in
anew. Both numbers come from measurements (`benchmarks/small.py`, `benchmarks/README.md`)."""


@dataclass(frozen=True)
class _Size:
    """What one member computes for each value of the input."""

    operations: float  # multiply-adds of a layer, in the mean
    nbytes: float  # of the largest tensor that it makes


class Sizes:
    """How large one member's computation is, by the kind of an input and, in powers of two, the size of a row."""

    def __init__(self) -> None:
        self._sizes: dict[Any, _Size] = {}

    def are_small(self, network: nn.Module, members: int, x: Input, run: Callable[[], Tensor]) -> bool:
        """Whether members are small on `x`; `run` is one member's, and is counted once for each size of a row."""
        if not _only_predicts(network, x):
            return False
        tensors = tensors_in(x)
        values, rows = sum(tensor.numel() for tensor in tensors), len(tensors[0]) if tensors[0].dim() else 0
        if not values or not rows:
            return False
        key = kind_of(x), (values // rows).bit_length()
        if key not in self._sizes:
            self._sizes[key] = _counted(network, x, run, values)
        size = self._sizes[key]
        return size.operations * values <= MOST_OPERATIONS and size.nbytes * values * members <= MOST_BYTES


def _counted(network: nn.Module, x: Input, run: Callable[[], Tensor], values: int) -> _Size:
    """The size of a run; without end where packing makes a CPU's convolutions several times slower.

    These are depthwise ones, and those of one pixel, which a few of the others make good for.
    """
    convolutions = [module for module in network.modules() if isinstance(module, _ConvNd)]
    of_one_pixel = sum(max(module.kernel_size) == 1 for module in convolutions)
    if 4 * of_one_pixel > len(convolutions) or any(module.groups > 1 for module in convolutions):
        return _Size(math.inf, math.inf)
    layers = sum(parameter.dim() > 2 for parameter in network.parameters())  # with a matrix or a kernel, [M, ...]
    with unmoved(network, x), torch.no_grad(), flop_counter() as counter, _Largest() as largest:
        run()
    return _Size(counter.get_total_flops() / 2 / max(1, layers) / values, largest.nbytes / values)


class _Largest(Overlapping, TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made inside, views of others left out."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not any(returned.alias_info for returned in function._schema.returns):
            made = [value.nbytes for value in tree_leaves(result) if isinstance(value, Tensor)]
            self.nbytes = max(self.nbytes, *made, 0)
        return result


def _only_predicts(network: nn.Module, x: Input) -> bool:
    """Whether a network predicts on a CPU, in float32 or better, with no gradient, no draws, no other transform."""
    watched = _functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0
    if network.training or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or watched:
        return False
    if torch.compiler.is_compiling() or torch._C._is_tracing() or stochastic_layers(network):
        return False
    first = next(network.parameters(), None)
    tensors = tensors_in(x) if first is None else [*tensors_in(x), first]
    kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return kinds <= {torch.float32, torch.float64} and all(tensor.device.type == "cpu" for tensor in tensors)
