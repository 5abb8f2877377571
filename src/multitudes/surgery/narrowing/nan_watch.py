"""Find which channels each layer keeps, in one run in which dropped channels are NaN."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multitudes.networks.calls import Input, tensors_in
from multitudes.networks.trace import Trace, observing, recording
from multitudes.surgery.narrowing.attention_heads import HeadChoice
from multitudes.surgery.narrowing.cuts import CannotNarrow, Cut, form_of, is_depthwise
from multitudes.surgery.observe import LayerInputs, run_replacing

Along = Mapping[str, tuple[tuple[int, Tensor], ...]]
"""Cuts of parameters outside of layers, by name: the cut axes, and the entries kept along them."""

_LOOKS = {Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__}


class Watch(TorchFunctionMode):
    """One run in which each layer's dropped channels are NaN; `heads` chooses the channels to keep.

    A channel with any NaN is dropped: its other values may come from padding or masking.
    """

    def __init__(self, heads: HeadChoice) -> None:
        super().__init__()
        self.trace, self.heads = Trace(), heads
        self.cuts: dict[str, Cut] = {}
        self.sizes: Sizes = {}
        self.mixer = ""  # the function, and its place, that first made all channels NaN

    def run(self, model: nn.Module, example: Input, names: Collection[str]) -> None:
        try:
            with track_sizes(model, names) as self.sizes:
                self._run(model, example, names)
        except (KeyError, TypeError, RuntimeError):  # sizes as keys of a dict, or a scripted function
            self.sizes, self.cuts = {}, {}
            self._run(model, example, names)

    def _run(self, model: nn.Module, example: Input, names: Collection[str]) -> None:
        with recording(model) as self.trace:
            run_replacing(model, example, names, self.drop_channels, self)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _LOOKS and args[0].is_floating_point() and bool(args[0].isnan().any()):
            raise CannotNarrow(
                f"cannot narrow the network: {self._place()} branches on the values of channels "
                f"({function.__name__.strip('_')})"
            )
        result = function(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            note_sizes(getattr(function, "__name__", ""), args, kwargs or {}, result, self.heads.shares)
        if not self.mixer and isinstance(result, Tensor) and result.is_floating_point():
            self._find_mixer(function, (*args, *(kwargs or {}).values()), result)
        return result

    def _find_mixer(self, function: Any, args: tuple[Any, ...], result: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            running = self.trace.running
            if running and form_of(running[-1].module).outputs:
                return  # the outputs of known layers are replaced
            dense = [t for t in tensors_in(args) if t.layout is torch.strided and t.numel()]
            nan = [t.isnan() for t in dense if t.is_floating_point()]
            some = any(bool(mask.any()) for mask in nan) and not any(bool(mask.all()) for mask in nan)
            if some and result.numel() and bool(result.isnan().all()):
                self.mixer = f"{getattr(function, '__name__', 'a function')} in {self._place()}"

    def _place(self) -> str:
        running = self.trace.running
        if not running or not running[-1].name:
            return f"the network's own forward ({type(running[0].module).__name__})" if running else "the network"
        name, module = running[-1].name, running[-1].module
        kind = nn.MultiheadAttention if isinstance(module, nn.MultiheadAttention) else type(module)
        return f"layer {name!r} ({kind.__name__})"

    def drop_channels(self, name: str, layer: Any, read: LayerInputs, y: Tensor) -> Tensor:
        """Record the cut of a layer, and set its dropped channels to NaN."""
        with torch._C.DisableTorchFunction():
            form = form_of(layer)
            dropped = [x.isnan().movedim(form.axis, 0) for x in read.inputs]
            if form.axis == -1 and self._is_of_each_head(dropped):
                cut = Cut(torch.arange(form.inputs), torch.arange(form.outputs))
                out = torch.where(dropped[0][0].unsqueeze(-1), torch.nan, 0.0).to(y).expand_as(y).clone()
            elif form.follows:
                kept = self._kept(dropped[0], name)
                cut, out = Cut(kept, kept), torch.where(read.inputs[0].isnan(), torch.nan, 0.0).to(y)
            else:
                kept, *others = [self._kept(x, name) for x in dropped] or [torch.arange(form.inputs)]
                if is_depthwise(layer):
                    each = form.outputs // form.inputs
                    outputs = (kept.unsqueeze(1) * each + torch.arange(each)).flatten()
                else:
                    outputs = self.heads.outputs(name, form.outputs)
                cut = Cut(kept, outputs, others=tuple(others))
                out = torch.full_like(y, torch.nan).index_fill_(form.axis, cut.outputs.to(y.device), 0.0)
            if self.cuts.setdefault(name, cut) != cut:
                raise CannotNarrow(f"layer {name!r} runs several times, on different channels")
            return out

    def _is_of_each_head(self, dropped: list[Tensor]) -> bool:
        """Return whether all channels are NaN at some positions and none at others, as in layers that run per head."""
        if len(dropped) != 1 or not self.heads.found:
            return False
        return bool(dropped[0].any()) and not bool(dropped[0].all()) and bool((dropped[0] == dropped[0][:1]).all())

    def _kept(self, mask: Any, name: str) -> Tensor:
        dropped = mask.flatten(1).any(1)
        if bool(dropped.all()):
            by = f" by {self.mixer}" if self.mixer else ""
            raise CannotNarrow(f"cannot narrow the network: channels are mixed before layer {name!r}{by}")
        return (~dropped).nonzero()[:, 0].cpu()


def loses_the_same(model: nn.Module, example: Input, cuts: Mapping[str, Cut], along: Along) -> bool:
    """Return whether the entries that parameters would lose, set to NaN, reach only channels that layers lose."""
    reached: list[bool] = []

    def see(name: str, layer: nn.Module, read: LayerInputs, y: Tensor) -> Tensor:
        form = form_of(layer)
        for x, kept in zip(read.inputs, cuts[name].indices, strict=False):
            seen = x.isnan().movedim(form.axis, 0).flatten(1).any(1).cpu()
            reached.extend((~seen[kept]).tolist() if bool(seen.any()) else ())
        return torch.where(read.inputs[0].isnan(), torch.nan, 0.0).to(y) if form.follows else torch.zeros_like(y)

    data: dict[nn.Parameter, Tensor] = {}
    for name, kept in along.items():
        values = model.get_parameter(name).data
        for axis, index in ((axis, index.to(values.device)) for axis, index in kept):
            values = torch.full_like(values, torch.nan).index_copy(axis, index, values.index_select(axis, index))
        data[model.get_parameter(name)] = values
    with observing(model), holding_data(data):
        output = run_replacing(model, example, cuts, see)
    return bool(reached) and all(reached) and not bool(output.isnan().any())


@contextmanager
def holding_data(data: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Replace the values of parameters for the duration of a `with`, and clear autocast's cache of casts."""
    before = {parameter: parameter.data for parameter in data}
    try:
        for parameter, values in data.items():
            parameter.data = values
        torch.clear_autocast_cache()
        yield
    finally:
        for parameter, values in before.items():
            parameter.data = values
        torch.clear_autocast_cache()


# -- sizes in a network's attributes --------------------------------------------------------------------------


class Size(int):
    """A number in a network's attributes that records how many entries are kept along axes of this size.

    It is hashed by identity, so that no cache (einops has one) returns a number from another run.
    """

    kept: set[int]

    __hash__ = object.__hash__

    def __new__(cls, value: int) -> Size:
        size = super().__new__(cls, value)
        size.kept = set()
        return size


Sizes = Mapping[tuple[str, ...], Any]
"""The `Size`s in a network, or lists of them, by module name and path of attributes."""


@contextmanager
def track_sizes(model: nn.Module, leave: Collection[str]) -> Iterator[Sizes]:
    """Replace the numbers in modules, except those named in `leave`, by `Size`s for the duration of a `with`."""
    found: dict[tuple[str, ...], Any] = {}
    before: list[tuple[dict[str, Any], str, Any]] = []
    seen: set[int] = set()

    def follow(held: dict[str, Any], path: tuple[str, ...]) -> None:
        for key, value in list(held.items()):
            if key.startswith("_") or key == "training":
                continue
            if (sized := _sized(value)) is not value:
                before.append((held, key, value))
                held[key] = found[*path, key] = sized
            elif _is_plain(value) and len(path) < 3 and id(value) not in seen:
                seen.add(id(value))
                follow(vars(value), (*path, key))

    try:
        for name, module in model.named_modules():
            if name not in leave:
                follow(vars(module), (name,))
        yield found
    finally:
        for held, key, value in before:
            held[key] = value


def _sized(value: Any) -> Any:
    if type(value) is int and value > 1:
        return Size(value)
    listed = type(value) in (list, tuple) and all(type(each) is int for each in value)
    return type(value)(map(_sized, value)) if listed else value


def _is_plain(value: Any) -> bool:
    """Return whether a value is an object with attributes, such as a configuration."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Tensor)


def note_sizes(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, shares: Mapping[int, int]
) -> None:
    """Record in the `Size`s among a function's arguments how many entries are kept, that is, not all NaN.

    `shares` maps the numbers of query heads that share keys and values to the numbers kept.
    """
    rest = [*args[1:], *kwargs.values()]
    flat = [each for arg in rest for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    sizes = [each for each in flat if isinstance(each, Size)]
    if not sizes:
        return
    if name == "repeat_interleave":
        for size in sizes:
            size.kept |= {shares[int(size)]} if int(size) in shares else set()
    elif name in ("split", "narrow"):
        for part, size in zip(result if isinstance(result, tuple) else [result], sizes, strict=False):
            size.kept |= {_kept(part, axis) for axis, whole in enumerate(args[0].shape) if part.shape[axis] != whole}
    elif name in ("view", "reshape", "expand", "unflatten") and isinstance(result, Tensor):
        dim, *shape = flat if name == "unflatten" else [0, *flat]
        first = int(dim) if dim >= 0 else result.dim() + int(dim) - len(shape) + 1
        for axis, size in enumerate(shape, first):
            if isinstance(size, Size) and first + len(shape) <= result.dim():
                size.kept.add(_kept(result, axis))


def _kept(x: Tensor, axis: int) -> int:
    if not x.is_floating_point() or not x.numel():
        return x.shape[axis]
    return int((~x.isnan().movedim(axis, 0).flatten(1).all(1)).sum())


def apply_sizes(network: nn.Module, sizes: Sizes) -> None:
    """Set the numbers of a narrowed network, in place, if all axes of a size keep equally many entries."""
    for (name, *owners, key), sized in sizes.items():
        held: Any = network.get_submodule(name)
        for owner in owners:
            held = getattr(held, owner)
        if (new := _final_size(sized)) != sized:
            vars(held)[key] = new


def _final_size(sized: Any) -> Any:
    if isinstance(sized, (list, tuple)):
        return type(sized)(map(_final_size, sized))
    return min(sized.kept) if isinstance(sized, Size) and len(sized.kept) == 1 else int(sized)
