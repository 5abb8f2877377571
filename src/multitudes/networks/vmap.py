"""Run a network's own code once for all members, or for many draws, under vmap.

Inside `vmap_level` a stacked tensor `[M, ...]` looks like one member's, and the network's code runs for all members.
This is right for any code, also for forwards that cannot be traced. vmap is slow or fails for a few functions: it adds
a bias with a slow kernel, copies embedding tables, transposes feature maps, hides from attention that gradients are
needed, and fails on recurrent layers. Rules replace these functions: one product per member into one result, one norm
per member, one attention and one recurrence over members and batch. Operations on tensors that all members share run
once. Under `torch.compile`, products and norms have no rules, since the compiler fuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._functorch.vmap import (  # type: ignore[attr-defined]  # from the implementation of torch.vmap
    _add_batch_dim,
    _remove_batch_dim,
    vmap_increment_nesting,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from multitudes.networks.attention import AttentionArguments, math_attention, multihead_attention
from multitudes.networks.calls import InputError, plain_attention

ONE_BY_ONE_ABOVE = 2**22
"""Products with a bias and more values than this run as one call per member, which adds the bias while it writes its
result. On an H200 this takes a third of the time of one call for all members (benchmarks/README.md)."""


@dataclass(frozen=True)
class VmapLevel:
    """A vmap level over members; it converts stacked tensors to each member's own and back."""

    count: int
    level: int

    def own(self, tensor: Tensor) -> Tensor:
        """Convert a stacked tensor `[M, ...]` to each member's own, `[...]`."""
        return _add_batch_dim(tensor, 0, self.level)

    def whole(self, tensor: Tensor) -> Tensor:
        """Convert each member's own tensor to a stacked one, `[M, ...]`; expand shared tensors."""
        return _remove_batch_dim(tensor, self.level, self.count, 0)

    def outside(self) -> AbstractContextManager[Any]:
        """Leave the vmap level inside `with`, to compute with stacked tensors."""
        return nullcontext() if torch.compiler.is_compiling() else temporarily_pop_interpreter_stack()


@contextmanager
def vmap_level(count: int) -> Iterator[VmapLevel]:
    """Run code for all members at once inside `with`; each member draws its own random numbers."""
    plain = plain_attention() if torch.compiler.is_compiling() else nullcontext()
    with plain, vmap_increment_nesting(count, "different") as level:
        members = VmapLevel(count, level)
        with _Rules(members):
            yield members


class LazyVmap:
    """A vmap level over members that is entered on demand and left at the end of `with`.

    Computations before `enter` run once for all members.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.members: VmapLevel | None = None
        self._stack = ExitStack()
        self._outer = _level()
        self._modes = 0

    def enter(self) -> VmapLevel:
        """Enter the level if that has not happened yet."""
        if self.members is None:
            if _level() != self._outer:
                raise InputError(
                    "a layer that differs between members runs inside a functorch transform of the network"
                )
            self.members = self._stack.enter_context(vmap_level(self.count))
            self._modes = torch._C._len_torch_function_stack()
        return self.members

    @property
    def disturbed(self) -> bool:
        """True if the network left a function mode after `enter`, such as `with torch.device(...)`."""
        return self.members is not None and torch._C._len_torch_function_stack() != self._modes

    def whole(self, tensor: Tensor) -> Tensor:
        """Convert each member's own tensor to a stacked one, `[M, ...]`; expand shared tensors."""
        return tensor.expand(self.count, *tensor.shape) if self.members is None else self.members.whole(tensor)

    def __enter__(self) -> LazyVmap:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _level() -> int:
    """Return the level of the innermost functorch transform, or 0."""
    return 0 if _functorch.peek_interpreter_stack() is None else _functorch.maybe_current_level() or 0


_is_own = _functorch.is_batchedtensor


@dataclass(eq=False)
class _Rules(TorchFunctionMode):
    """Dispatch torch functions to the rules below. Any function mode also turns off torch's fused attention."""

    members: VmapLevel

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(function)
        if rule is not None and not torch.compiler.is_compiling():
            own = any(isinstance(value, Tensor) and _is_own(value) for value in (*args, *kwargs.values()))
            if not own or _functorch.maybe_current_level() != self.members.level:  # under the network's own vmap
                rule = None
        if rule is not None:
            result = rule(self.members, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if function is Tensor.unflatten:  # the compiler fails on `super()` inside it
            return args[0].unflatten(*args[1:], **kwargs)
        return function(*args, **kwargs)


# -- products ----------------------------------------------------------------------------------------------


def products(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute each member's linear layer: `[M, N, I]`, `[M, O, I]`, `[M, O]` -> `[M, N, O]`."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind) and rows.dtype != torch.float64:
        rows, weight = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (rows, weight))
    if bias is None:
        return torch.bmm(rows, weight.mT)
    bias = bias.to(rows.dtype)
    if torch.compiler.is_compiling():  # fuses the sum with what follows
        return torch.bmm(rows, weight.mT) + bias.unsqueeze(1)
    small = rows.shape[0] * rows.shape[1] * weight.shape[1] <= ONE_BY_ONE_ABOVE
    if small or _functorch.peek_interpreter_stack() is not None:  # under another vmap, that of draws
        return torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return _Products.apply(rows, weight, bias)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        result = rows.new_empty(*rows.shape[:2], weight.shape[1])
        for own_bias, own_rows, own_weight, own in zip(bias, rows, weight.mT, result, strict=True):
            torch.addmm(own_bias, own_rows, own_weight, out=own)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        (gradient,), (of_rows, of_weight, of_bias) = gradients, ctx.needs_input_grad
        return (
            torch.bmm(gradient, weight) if of_rows else None,
            torch.bmm(gradient.mT, rows) if of_weight else None,
            gradient.sum(1) if of_bias else None,
        )


# -- rules: rule(members, *args, **kwargs), with the function's arguments, or NotImplemented --------------------


def _linear(members: VmapLevel, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if torch.compiler.is_compiling() or not _is_own(weight) or input.dim() < 2:
        return NotImplemented
    x, weight, bias = members.whole(input), members.whole(weight), None if bias is None else members.whole(bias)
    with members.outside():
        return members.own(products(x.flatten(1, -2), weight, bias).unflatten(1, x.shape[1:-1]))


def _addmm(members: VmapLevel, input: Tensor, mat1: Tensor, mat2: Tensor, **scales: Any) -> Any:
    """Compute a linear layer that has its weight transposed."""
    if scales or input.dim() != 1 or not _is_own(mat2):
        return NotImplemented
    return _linear(members, mat1, mat2.mT, input)


def _layer_norm(
    members: VmapLevel,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if torch.compiler.is_compiling() or weight is None or not _is_own(weight):
        return NotImplemented
    tensors = [members.whole(tensor) for tensor in (input, weight, bias) if tensor is not None]
    with members.outside():
        own = zip(*(tensor.unbind() for tensor in tensors), strict=True)  # unbind once: one stack of gradients
        norm: Callable[..., Tensor] = partial(F.layer_norm, eps=eps)
        return members.own(torch.stack([norm(x, normalized_shape, *affine) for x, *affine in own]))


def _embedding(
    members: VmapLevel,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look up all members' rows in one table; an index out of range raises an error for the last member."""
    if not _is_own(weight) or max_norm is not None or sparse:
        return NotImplemented
    table, index = members.whole(weight), members.whole(input)
    rows = table.shape[1]
    with members.outside():
        first = torch.arange(members.count, device=index.device) * rows
        shifted = index + first.view(-1, *[1] * (index.dim() - 1))
        result = F.embedding(shifted, table.flatten(0, 1), scale_grad_by_freq=scale_grad_by_freq)
        if padding_idx is not None:  # no gradient for this row
            result = torch.where((index == padding_idx % rows).unsqueeze(-1), result.detach(), result)
        return members.own(result)


def _attention(members: VmapLevel, *args: Any, **kwargs: Any) -> Any:
    """Fold members into the batch axis."""
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = AttentionArguments(*args, **kwargs)
    attend: Callable[..., Tensor] = partial(
        F.scaled_dot_product_attention, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    rank = query.dim()
    drawn = dropout_p > 0 and torch.compiler.is_compiling()  # vmap draws each member's own numbers
    if drawn or rank < 3 or key.dim() != rank or value.dim() != rank:
        with math_attention():  # works with and without gradients
            return attend(query, key, value, attn_mask)
    tensors = [members.whole(tensor) for tensor in (query, key, value)]
    batch = torch.broadcast_shapes(*(tensor.shape[:2] for tensor in tensors))
    mask = None
    if attn_mask is not None and (_is_own(attn_mask) or attn_mask.dim() == rank):
        mask, attn_mask = members.whole(attn_mask), None
    with members.outside():
        if mask is not None:
            attn_mask = _folded(mask.reshape(len(mask), *[1] * (rank + 1 - mask.dim()), *mask.shape[1:]), batch)
        folded = [_folded(tensor, batch) for tensor in tensors]
        with _right_gradients(folded[0]):
            return members.own(attend(*folded, attn_mask).unflatten(0, batch))


_BUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _right_gradients(tensor: Tensor) -> AbstractContextManager[Any]:
    """Avoid cuDNN's attention, whose gradients were off by a fifth on an H200 (torch 2.11, bfloat16)."""
    return sdpa_kernel(_BUT_CUDNN) if tensor.is_cuda and torch.is_grad_enabled() else nullcontext()


def _multihead(members: VmapLevel, *args: Any, **kwargs: Any) -> Any:
    """Run the code of torch's multi-head attention, whose parts have rules."""
    with _Rules(members):
        return multihead_attention(*args, **kwargs)


def _convolution(function: Any) -> Callable[..., Tensor]:
    """Cast arguments that vmap's convolution fails to cast under autocast: the bias, and on a CPU all."""

    def rule(
        members: VmapLevel, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        kind = input.device.type
        if not torch.is_autocast_enabled(kind) or input.dtype == torch.float64:  # autocast ignores float64
            return function(input, weight, bias, *rest, **options)
        dtype = torch.get_autocast_dtype(kind)
        y = function(input.to(dtype), weight.to(dtype), None, *rest, **options)
        return y if bias is None else y + bias.to(dtype).view(-1, *[1] * (weight.dim() - 2))

    return rule


def _batch_norm(
    members: VmapLevel,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Multiply and add with fixed statistics; in training, fold members with shared statistics into the batch axis."""
    if running_mean is None or running_var is None:
        return NotImplemented
    if training:
        own = [tensor is not None and _is_own(tensor) for tensor in (running_mean, weight, bias)]
        if any(own) or not _is_own(input):
            return NotImplemented
        x = members.whole(input)
        with members.outside():
            norm = F.batch_norm(x.flatten(0, 1), running_mean, running_var, weight, bias, True, momentum, eps)
            return members.own(norm.unflatten(0, x.shape[:2]))
    scale = (running_var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    shift = -running_mean * scale
    if bias is not None:
        shift = shift + bias
    shape = (-1, *[1] * (input.dim() - 2))
    return torch.addcmul(shift.view(shape), input, scale.view(shape)).to(input.dtype)


def _average_pool(members: VmapLevel, input: Tensor, output_size: Any) -> Any:
    return input.mean((-2, -1), keepdim=True) if output_size in (1, (1, 1), [1, 1]) else NotImplemented


def _recurrent(function: Any) -> Callable[..., Any]:
    """Fold members that share weights into the batch axis; packed sequences have no rule."""

    def rule(members: VmapLevel, input: Tensor, hidden: Any, weights: Any, *settings: Any) -> Any:
        if not isinstance(weights, list) or any(map(_is_own, weights)) or input.dim() != 3:
            return NotImplemented
        dropout, training, batch = settings[2], settings[3], 0 if settings[5] else 1
        if dropout > 0 and training:
            return NotImplemented
        x = members.whole(input)
        states = [members.whole(state) for state in (hidden if isinstance(hidden, (tuple, list)) else [hidden])]
        with members.outside():
            first = [state.movedim(0, 1).flatten(1, 2) for state in states]  # [layers, M*B, H]
            given = first if isinstance(hidden, (tuple, list)) else first[0]
            output, *last = function(x.movedim(0, batch).flatten(batch, batch + 1), given, weights, *settings)
            size = (members.count, -1)
            whole = [output.unflatten(batch, size).movedim(batch, 0)]
            whole += [state.unflatten(1, size).movedim(1, 0) for state in last]
            return tuple(members.own(tensor) for tensor in whole)

    return rule


def _folded(tensor: Tensor, batch: Sequence[int]) -> Tensor:
    """Fold members into the batch axis: `[M, B, ...] -> [M*B, ...]`."""
    return tensor.expand(*batch, *tensor.shape[2:]).flatten(0, 1)


_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)

_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    F.embedding: _embedding,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multihead,
    F.adaptive_avg_pool2d: _average_pool,
    **{function: _convolution(function) for function in _CONVOLUTIONS},
    **{function: _recurrent(function) for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
}
