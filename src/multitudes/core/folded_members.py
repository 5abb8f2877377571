"""Folded members: in evaluation on a GPU, members that share weights run as if they shared none.

A tiled batch scales or masks every activation of every member. Folded, each member has plain layers with weights of its
own, which `Members` run by their fastest runner. The weights are folded anew at every run, by one product a layer, and
lent to the network's own modules. So nothing is kept that could be out of date, and torch need not tell what changed,
which it does not: writes through `.data`, fused optimizers and batch norms move no version counter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.autograd import forward_ad

from multitudes.core.architecture import stackable
from multitudes.core.calling import Input, slots, tensors_in
from multitudes.core.devices import milliseconds
from multitudes.core.draws.stochastic import stochastic_layers
from multitudes.core.lending import Attributes, Written, lent
from multitudes.core.member_layer import MemberLayer
from multitudes.core.members import Members
from multitudes.core.multitude import Multitude
from multitudes.core.proof import alike, kind_of, unmoved
from multitudes.core.runners.template import hooked_module

__all__ = ["FoldedMembers"]

_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError)


class Sharing(Protocol):
    """What is asked of members that share weights: `SharedMembers` answer."""

    network: nn.Module
    members: int
    training: bool
    _written: list[Attributes]

    def unfolded(self, x: Input) -> Tensor: ...

    def shares_much(self, x: Input) -> bool: ...

    def _trial(self, x: Input) -> AbstractContextManager[tuple[Callable[[], Tensor], Callable[[], str]]]: ...


class FoldedMembers:
    """Whether the members of a network run folded, and how: what was found out, and no weights."""

    def __init__(self) -> None:
        self.members: Members | None = None
        self.modules: list[tuple[str, type]] = []  # what the network was made of then
        self.right: dict[Any, bool] = {}  # by the kind of an input
        self.faster: dict[Any, bool] = {}  # by its kind and size

    def __reduce__(self) -> tuple[type[FoldedMembers], tuple[()]]:
        """Copies and files find out anew."""
        return FoldedMembers, ()

    def predictions(self, net: Sharing, x: Input) -> Tensor | None:
        """`[M, B, ...]` of folded members; None where they do not run so."""
        if not _may_fold(net, x):
            return None
        modules = [(name, type(module)) for name, module in net.network.named_modules()]
        if modules != self.modules:
            self.members, self.modules, self.right, self.faster = None, modules, {}, {}
        kind = _kind(x)
        if kind not in self.right:
            self.right[kind] = not net.shares_much(x) and self._is_right(net, x)
        size = kind, sum(tensor.numel() for tensor in tensors_in(x)).bit_length()
        if self.right[kind] and size not in self.faster:
            self.faster[size] = self._is_faster(net, x)
        if not self.right[kind] or not self.faster[size]:
            return None
        try:
            return self._run(net, x)
        except (torch.OutOfMemoryError, _Wrote):
            self.faster[size] = False
        except _FAILURES:  # which the plain way has too, where they are about x
            pass
        return None

    def _run(self, net: Sharing, x: Input) -> Tensor:
        with _folded(net.network, net.members) as (network, written):
            if self.members is None or self.members.network is not network:
                self.members = _Lent(network, net.members)
            predictions = self.members._predictions(x)
        if written or any(self.members._written):
            raise _Wrote
        return predictions

    def _is_right(self, net: Sharing, x: Input) -> bool:
        """Whether folded members predict what the first and the last one do alone, with weights that are moved."""
        few = sorted({0, net.members - 1})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with unmoved(net.network, x):
                    self._run(net, x)  # for the members to choose and to prove their runner
                with net._trial(x) as (want, doubt):
                    alone = want()
                    with unmoved(net.network, x):
                        got = self._run(net, x)
                    return got.shape[1:] == alone.shape[1:] and alike(got[few], alone) and not doubt()
            except (*_FAILURES, _Wrote):  # too little memory is a RuntimeError
                return False

    def _is_faster(self, net: Sharing, x: Input) -> bool:
        with unmoved(net.network, x), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return milliseconds(partial(self._run, net, x)) < milliseconds(partial(net.unfolded, x))
            except (torch.OutOfMemoryError, _Wrote):
                return False


class _Wrote(Exception):
    """The network's code has written buffers or attributes, which folded members do not keep."""


class _Lent(Members):
    """Members whose stacked tensors are lent to a network, in the place of a copy that holds them."""

    def __init__(self, network: nn.Module, members: int) -> None:
        Multitude.__init__(self, network, members)
        self._runner = "auto"
        self.forget()


def _may_fold(net: Sharing, x: Input) -> bool:
    """Whether a network evaluates on a GPU, without gradients, draws or hooks, with layers that can be folded."""
    network = net.network
    if net.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or not on_gpu(x):
        return False
    if _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    if any(net._written) or hooked_module(network) is not None:
        return False
    modules = list(network.modules())
    folds = [module.folds for module in modules if isinstance(module, MemberLayer)]
    return all(folds) and not any(module.training for module in modules) and not stochastic_layers(network)


def on_gpu(x: Input) -> bool:
    return all(tensor.is_cuda for tensor in tensors_in(x))


def _kind(x: Input) -> Any:
    """What decides whether folded members are right on an input."""
    first = tensors_in(x)[0]
    several = first.dim() > 0 and len(first) > 1  # of one row, all lengths are alike
    device = first.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return kind_of(x), several, dtype


@contextmanager
def _folded(network: nn.Module, members: int) -> Iterator[tuple[nn.Module, Written]]:
    """Inside, the network has the users' own layers again, and all members' tensors, stacked `[M, ...]`.

    Yields it, or the layer that it is, and after that which buffers were assigned meanwhile.
    """
    stacks = {id(layer.layer): layer.folded() for layer in network.modules() if isinstance(layer, MemberLayer)}
    places = [
        (parent._modules, name, child)
        for parent in list(network.modules())
        for name, child in parent._modules.items()
        if isinstance(child, MemberLayer)
    ]
    inside: Any = network.layer if isinstance(network, MemberLayer) else network
    for registry, name, child in places:
        registry[name] = child.layer
    try:
        with lent(inside, _stacked(inside, stacks, members)) as written:
            yield inside, written
    finally:
        for registry, name, child in places:
            registry[name] = child


def _stacked(network: nn.Module, stacks: dict[int, dict[str, Tensor]], members: int) -> dict[str, Tensor]:
    """All tensors by their names: those that members share as views, and those of the folded layers."""
    parameters, buffers = slots(network)
    state: dict[str, Tensor] = {**parameters}
    state = {name: tensor.expand(members, *tensor.shape) for name, tensor in state.items() if stackable(tensor)}
    for path, module in network.named_modules():
        prefix = f"{path}." if path else ""
        state |= {prefix + name: tensor for name, tensor in stacks.get(id(module), {}).items()}
    state = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in state.items()}  # as a trace knows them
    return state | {name: b.expand(members, *b.shape) for name, b in buffers.items() if stackable(b)}
