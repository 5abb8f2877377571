"""Trace a network as a graph of torch operations, for one input shape.

The trace is below Python, autograd and vmap. Parts that do not depend on the input become constants. Code that inspects
values or draws random numbers is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CannotTrace(RuntimeError):
    """A network cannot be traced; the message is the reason."""


@torch.no_grad()
def trace(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function of tensors, without in-place writes and with constants computed."""
    try:
        graph = make_fx(torch.func.functionalize(function, remove="mutations"))(*tensors)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # tracing runs user code
        raise CannotTrace(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__) from error
    for node in graph.graph.nodes:
        if _draws(node):
            raise CannotTrace(f"it draws random numbers ({node.target})")
    _compute_constants(graph)
    return graph


def _draws(node: fx.Node) -> bool:
    """Return whether an operation draws random numbers; attention without dropout does not."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    default = target._schema.arguments[names.index("dropout_p")].default_value
    return bool(given.get("dropout_p", default) != 0)


@torch.no_grad()
def check_synchronization(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> None:
    """Refuse a function that synchronizes the CPU with another device, or copies between devices."""
    with _SynchronizationWatch() as waits:
        function(*tensors)
    if waits.reasons:
        raise CannotTrace(waits.reasons[0])


class _SynchronizationWatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        places = {leaf.device.type for leaf in tree_leaves((args, kwargs, found)) if isinstance(leaf, Tensor)}
        if places != {"cpu"} and torch.Tag.data_dependent_output in function.tags:
            self.reasons.append(f"its code inspects values ({function})")
        if places != {"cpu"} and torch.Tag.dynamic_output_shape in function.tags and _selects(args):
            self.reasons.append(f"it has shapes that depend on values ({function})")
        if len(places) > 1 and function.overloadpacket in _COPIES:
            self.reasons.append(f"its code copies between devices ({function})")
        return found


def _selects(args: Any) -> bool:
    """Return whether the output shape depends on values; with integer indices it does not."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else None
    masks = (torch.bool, torch.uint8)
    return indices is None or any(isinstance(each, Tensor) and each.dtype in masks for each in indices)


_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)


def constant(graph: fx.GraphModule, value: Any) -> Tensor | None:
    """Return the tensor of a constant node; None for other nodes."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    found = getattr(graph, str(value.target))
    return found if isinstance(found, Tensor) else None


def with_constant(graph: fx.GraphModule, tensor: Tensor) -> fx.Node:
    """Insert a node for a constant tensor at the graph's insertion point."""
    number = len(graph._buffers)
    name = next(name for i in range(number, 2 * number + 2) if not hasattr(graph, name := f"constant_{i}"))
    graph.register_buffer(name, tensor)
    return graph.graph.get_attr(name)


def _compute_constants(graph: fx.GraphModule) -> None:
    values: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(graph, node.target).detach()
        elif node.op == "call_function" and all(each in values for each in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    for node, value in values.items():
        used = any(user not in values for user in node.users)
        if used and isinstance(value, Tensor) and node.op != "get_attr":
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(with_constant(graph, value.contiguous()))
    remove_unused(graph)


def remove_unused(graph: fx.GraphModule) -> fx.GraphModule:
    """Remove unused nodes, modules and constants from a graph."""
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    used = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name in [*graph._parameters, *graph._buffers, *vars(graph)]:
        if name.startswith(("_param_constant", "_tensor_constant", "constant_")) and name not in used:
            delattr(graph, name)
    graph.recompile()
    return graph
