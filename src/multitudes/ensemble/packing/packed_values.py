"""Values of a packed network: one tensor for all members, used like a tensor of one member."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils._pytree import tree_flatten, tree_unflatten

from multitudes.networks.calls import InputError
from multitudes.networks.vmap import vmap_level

RULES: dict[Any, Callable[..., Any]] = {}
"""Rules that run torch's functions for all members: `rule(function, *args, **kwargs)` returns the result, or
`NotImplemented` for arguments that it does not support (`rules.py`)."""

_SETTINGS = {"ndim", "dtype", "device", "is_cuda", "requires_grad", "layout"}
_SETTINGS |= {"size", "numel", "is_floating_point", "is_complex", "element_size"}
"""Attributes and methods of a tensor that are the same for all members."""


class CannotPack(InputError):
    """Raised if the packed runner cannot run a network; holds the reason."""


@dataclass(eq=False)
class PackingState:
    """The state of a packed run, which all its values share."""

    members: int
    channels_last: bool = False
    """True if a CPU should keep feature maps channels-last."""
    gradients: bool = False
    """True if gradients are recorded."""
    vmapped: set[str] = field(default_factory=set)
    """Names of the functions that ran under vmap, for lack of a rule."""


class Many:
    """One value per member; torch's functions and methods compute all of them."""

    __slots__ = ("__weakref__", "state", "tensor")

    def __init__(self, tensor: Tensor, state: PackingState) -> None:
        if state.gradients and not torch.is_grad_enabled():  # such as an autograd function with its own backward
            raise CannotPack("its forward switches gradients off, which packed members do not support")
        self.tensor = tensor
        self.state = state

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(function, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name in _SETTINGS:
            return getattr(self.stacked()[0], name)
        attribute = getattr(Tensor, name)
        if callable(attribute):
            return partial(dispatch, attribute, self)
        return dispatch(attribute.__get__, self)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __len__(self) -> int:
        return self.shape[0]

    __hash__ = object.__hash__

    @property
    def shape(self) -> torch.Size:
        """The shape of one member's value."""
        return self.stacked().shape[1:]

    def dim(self) -> int:
        """Return the number of dimensions of one member's value."""
        raise NotImplementedError

    def stacked(self) -> Tensor:
        """Return the values as `[M, B, ...]`."""
        raise NotImplementedError

    def packed(self) -> Tensor:
        """Return the values as `[B, M*C, ...]`."""
        raise NotImplementedError

    def like(self, tensor: Tensor) -> Many:
        return type(self)(tensor, self.state)


class Packed(Many):
    """Values `[B, M*C, ...]`: the members' channels side by side."""

    __slots__ = ()

    def dim(self) -> int:
        return self.tensor.dim()

    def stacked(self) -> Tensor:
        batch, channels, *rest = self.tensor.shape
        return self.tensor.view(batch, self.state.members, channels // self.state.members, *rest).movedim(1, 0)

    def packed(self) -> Tensor:
        return self.tensor


class Stacked(Many):
    """Values `[M, B, ...]`: one member after the other, as for weights and sequences."""

    __slots__ = ()

    def dim(self) -> int:
        return self.tensor.dim() - 1

    def stacked(self) -> Tensor:
        return self.tensor

    def packed(self) -> Tensor:
        if self.tensor.dim() < 3:
            raise CannotPack(f"a value of shape {list(self.tensor.shape[1:])} has no channels")
        return self.tensor.movedim(0, 1).flatten(1, 2)


Value = Many | Tensor


# -- functions of values -----------------------------------------------------------------------------------


def dispatch(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a torch function for all members, by its rule or else under `vmap`."""
    rule = RULES.get(function)
    if rule is not None and (not kwargs or _fits(rule, len(args), tuple(kwargs))):
        result = rule(function, *args, **kwargs)
        if result is not NotImplemented:
            return result
    state = next(leaf.state for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Many))
    return run_under_vmap(state, function, *args, **kwargs)


@cache
def _fits(rule: Callable[..., Any], count: int, names: tuple[str, ...]) -> bool:
    """Return whether a rule takes this many positional arguments, and keywords of these names."""
    try:
        inspect.signature(rule).bind(None, *[None] * count, **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def run_under_vmap(state: PackingState, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function under `vmap`, with each member's own random numbers; shared values are not batched."""
    name = getattr(function, "__name__", str(function))
    if not torch.compiler.is_compiling():
        state.vmapped.add(name)
    if function is Tensor.view:  # members' values need not be contiguous
        function = Tensor.reshape
    leaves, structure = tree_flatten((args, kwargs))
    try:
        with vmap_level(state.members) as members:
            own = [members.own(leaf.stacked()) if isinstance(leaf, Many) else leaf for leaf in leaves]
            given, options = tree_unflatten(own, structure)
            results, form = tree_flatten(function(*given, **options))
            whole = [
                Stacked(members.whole(each), state)
                if isinstance(each, Tensor) and _functorch.is_batchedtensor(each)
                else each
                for each in results
            ]
    except (RuntimeError, TypeError, AttributeError, IndexError) as error:
        raise CannotPack(f"{name} failed: {error}") from error
    return tree_unflatten(whole, form)


# -- operators ---------------------------------------------------------------------------------------------


def _operator(name: str, function: Any) -> None:
    def method(self: Many, *args: Any) -> Any:
        return dispatch(function, self, *args)

    setattr(Many, name, method)


for _name in (
    "bool", "float", "int", "index", "getitem", "setitem", "matmul", "rmatmul", "eq", "ne", "lt", "le", "gt", "ge",
    "and", "or", "xor", "invert", "abs", "pos", "floordiv", "mod", "lshift", "rshift", "rsub", "rtruediv", "rpow",
    "rfloordiv", "rmod", "rand", "ror", "rxor", "rlshift", "rrshift", "iand", "ior", "ixor", "ilshift", "irshift",
    "ifloordiv", "imod", "ipow", "contains", "complex", "reversed",
):  # fmt: skip
    _operator(f"__{_name}__", getattr(Tensor, f"__{_name}__"))

for _name, _method in (
    ("add", "add"), ("radd", "add"), ("sub", "sub"), ("mul", "mul"), ("rmul", "mul"), ("truediv", "div"),
    ("pow", "pow"), ("neg", "neg"), ("iadd", "add_"), ("isub", "sub_"), ("imul", "mul_"), ("itruediv", "div_"),
):  # fmt: skip
    _operator(f"__{_name}__", getattr(Tensor, _method))
