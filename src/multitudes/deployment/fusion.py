"""Fuse a convolution, its bias, a residual addition and ReLU into one cuDNN call.

cuDNN has single kernels for `relu(convolution(x) + bias)` and `relu(convolution(x) + other + bias)`. A convolution with
one group per member may also run with fewer, denser groups, whose weight is zero between members: more multiplications,
but in larger blocks. `best_ways` times the ways of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from multitudes.deployment.operation_graph import constant, remove_unused, with_constant
from multitudes.ensemble.packing.pointwise import block_diagonal

aten = torch.ops.aten
Pair = tuple[int, int]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    relu: bool,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    fused: bool,
) -> Tensor:
    """Return `convolution(x) + bias`, plus `other` if given, through ReLU if `relu`."""
    if fused and relu and x.is_cuda:
        if other is None:
            return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, groups)
        return torch.cudnn_convolution_add_relu(x, weight, other, 1.0, bias, stride, padding, dilation, groups)
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    y = y if other is None else y + other
    return F.relu(y) if relu else y


# -- finding convolutions ----------------------------------------------------------------------------------


def fuse_convolutions(graph: fx.GraphModule) -> int:
    """Replace convolutions and the operations after them with `convolution`; return the number of those with ReLU."""
    _views_last(graph)
    for relu in _calls(graph, aten.relu.default):
        node, other = _convolution_and_other(graph, relu.args[0])
        if node is not None:
            with graph.graph.inserting_before(relu):
                bias, other = _biases(graph, node, other)
                _replace(graph, relu, node, bias, other, relu=True)
    fused = count_convolutions(graph)
    remove_unused(graph)
    for node in _calls(graph, aten.convolution.default):
        if _is_convolution(graph, node):
            with graph.graph.inserting_before(node):
                _replace(graph, node, node, node.args[2], None, relu=False)
    _lay_out(graph)
    return fused


_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def _views_last(graph: fx.GraphModule) -> None:
    """Move reshapes of convolution outputs behind the next sum or ReLU.

    A network that draws reshapes around each convolution, to fold draws into the batch.
    """
    for node in list(graph.graph.nodes):
        if node.target is aten.relu.default and _is_once(node.args[0]) and node.args[0].target in _VIEWS:
            before = node.args[0].args[0]
            operands: tuple[Any, ...] = (before,)
        elif node.target is aten.add.Tensor and not node.kwargs and (found := _viewed_operand(graph, node)):
            before, other = found
            with graph.graph.inserting_before(node):
                operands = before, graph.graph.call_function(aten.reshape.default, (other, [*_value(before).shape]))
            operands[1].meta = dict(before.meta)
        else:
            continue
        with graph.graph.inserting_before(node):
            early = graph.graph.call_function(node.target, operands)
            early.meta = dict(before.meta)
            late = graph.graph.call_function(aten.reshape.default, (early, [*_value(node).shape]))
            late.meta = dict(node.meta)
        node.replace_all_uses_with(late)
    remove_unused(graph)


def _viewed_operand(graph: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the convolution whose reshaped output is one addend, and the other addend."""
    for one, other in (node.args, node.args[::-1]):
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node) or one.target not in _VIEWS:
            continue
        before = one.args[0]
        if _is_once(one) and _is_once(before) and _is_convolution(graph, before) and _same_form(one, other):
            assert isinstance(before, fx.Node)
            return before, other
    return None


def _lay_out(graph: fx.GraphModule) -> None:
    """Make every `convolution` compute in channels-last, and later views accept any layout."""
    for node in _calls(graph, convolution):
        weight = constant(graph, node.args[1])
        assert weight is not None
        with graph.graph.inserting_before(node):
            node.update_arg(1, with_constant(graph, weight.contiguous(memory_format=torch.channels_last)))
    for node in _calls(graph, aten.view.default):
        node.target = aten.reshape.default
    remove_unused(graph)


def _calls(graph: fx.GraphModule, function: Any) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "call_function" and node.target is function]


def _replace(graph: fx.GraphModule, whole: fx.Node, node: fx.Node, bias: Any, other: Any, relu: bool) -> None:
    """Replace the node `whole`, which contains the convolution `node`, with `convolution`."""
    x, weight, _, *geometry = node.args[:6]
    args: Any = (x, weight, bias, other, relu, *(tuple(each) for each in geometry), node.args[8], True)  # type: ignore
    fused = graph.graph.call_function(convolution, args)
    fused.meta = dict(whole.meta)
    whole.replace_all_uses_with(fused)


def _convolution_and_other(graph: fx.GraphModule, given: Any) -> tuple[fx.Node | None, fx.Node | None]:
    """Return the convolution before a ReLU and its other addend, each None if there is none."""
    if _is_once(given) and _is_convolution(graph, given):
        return given, None
    if not _is_once(given) or given.target is not aten.add.Tensor or given.kwargs:
        return None, None
    for node, other in (given.args, given.args[::-1]):
        if _is_once(node) and _is_convolution(graph, node) and isinstance(other, fx.Node) and _same_form(node, other):
            return node, other
    return None, None


def _is_once(node: Any) -> bool:
    return isinstance(node, fx.Node) and len(node.users) == 1


def _is_convolution(graph: fx.GraphModule, node: Any) -> bool:
    """Return whether a node is a 2-d convolution with a constant weight."""
    if not isinstance(node, fx.Node) or node.target is not aten.convolution.default:
        return False
    weight = constant(graph, node.args[1])
    known = node.args[2] is None or constant(graph, node.args[2]) is not None
    return weight is not None and weight.dim() == 4 and known and not node.args[6]


def _same_form(node: fx.Node, other: fx.Node) -> bool:
    one, two = (_value(each) for each in (node, other))
    return one is not None and two is not None and (one.shape, one.dtype) == (two.shape, two.dtype)


def _value(node: fx.Node) -> Any:
    return node.meta.get("tensor_meta", node.meta.get("val"))


def _biases(graph: fx.GraphModule, node: fx.Node, other: fx.Node | None) -> tuple[fx.Node, fx.Node | None]:
    """Return the bias, merged with that of the other addend if it is a convolution too."""
    weight = constant(graph, node.args[1])
    own = constant(graph, node.args[2])
    assert weight is not None
    bias = weight.new_zeros(len(weight)) if own is None else own
    if _is_once(other) and _is_convolution(graph, other):
        assert other is not None
        given = constant(graph, other.args[2])
        if given is not None:
            bias = (bias.float() + given.float()).to(bias.dtype)
            other.update_arg(2, None)
    return with_constant(graph, bias), other


# -- the fastest way per convolution -----------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """Number of groups of a convolution, and whether it is fused with the operations after it."""

    groups: int
    fused: bool


def merged(weight: Tensor, groups: int, fewer: int) -> Tensor:
    """Return the weight of the same convolution with fewer groups, which is zero between the original groups.

    >>> merged(torch.ones(4, 1, 1, 1), 4, 2)[:, :, 0, 0]
    tensor([[1., 0.],
            [0., 1.],
            [1., 0.],
            [0., 1.]])
    """
    parts = weight.unflatten(0, (fewer, groups // fewer, -1))
    return torch.cat([block_diagonal(part) for part in parts])


def best_ways(
    graph: fx.GraphModule, tensors: list[Tensor], milliseconds: Callable[[Callable[[], Any]], float]
) -> list[Way]:
    """Time the ways of each `convolution` of a graph; return the fastest of each, in order."""
    chooser = _Chooser(graph, milliseconds)
    with torch.no_grad():
        chooser.run(*tensors)
    return chooser.chosen


def count_convolutions(graph: fx.GraphModule) -> int:
    """Count the `convolution`s of a graph."""
    return len(_calls(graph, convolution))


def apply_ways(graph: fx.GraphModule, ways: Sequence[Way]) -> None:
    """Apply a way to each `convolution` of a graph, in order."""
    for node, way in zip(_calls(graph, convolution), ways, strict=True):
        weight = constant(graph, node.args[1])
        assert weight is not None
        if way.groups != node.args[8]:
            with graph.graph.inserting_before(node):
                groups: Any = node.args[8]
                wide = merged(weight, groups, way.groups).contiguous(memory_format=torch.channels_last)
                node.update_arg(1, with_constant(graph, wide))
        node.args = (*node.args[:8], way.groups, way.fused)
    remove_unused(graph)


MAX_GROUPS = 64
"""Maximum groups for which denser forms are tried."""


class _Chooser(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, milliseconds: Callable[[Callable[[], Any]], float]) -> None:
        super().__init__(graph)
        self.milliseconds = milliseconds
        self.chosen: list[Way] = []
        self.known: dict[Any, Way] = {}  # equal layers are timed once

    def run_node(self, n: fx.Node) -> Any:
        if n.target is convolution:
            args, _ = self.fetch_args_kwargs_from_env(n)
            key = tuple((tuple(a.shape), a.stride()) if isinstance(a, Tensor) else a for a in args)
            if key not in self.known:
                self.known[key] = self._fastest(args)
            self.chosen.append(self.known[key])
        return super().run_node(n)

    def _fastest(self, args: Any) -> Way:
        """Return the fastest number of groups, fused unless separate calls are faster."""
        relu, groups = args[4], args[8]
        fewer = [g for g in (groups, 4, 2, 1) if g <= groups and groups % g == 0] if groups <= MAX_GROUPS else [groups]
        times = {way: self._time(args, way) for way in dict.fromkeys(Way(count, relu) for count in fewer)}
        best = min(times, key=lambda way: times[way])
        separate = Way(best.groups, False)
        return separate if relu and self._time(args, separate) < times[best] else best

    def _time(self, args: Any, way: Way) -> float:
        x, weight, bias, other, relu, stride, padding, dilation, groups, _ = args
        own = weight if way.groups == groups else merged(weight, groups, way.groups)
        own = own.contiguous(memory_format=torch.channels_last)
        geometry = stride, padding, dilation, way.groups
        return self.milliseconds(partial(convolution, x, own, bias, other, relu, *geometry, way.fused))
