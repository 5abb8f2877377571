"""Stacking: networks of one architecture as one, whose tensors hold all of theirs, `[M, ...]`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.copying import copied
from multitudes.core.settings import computing_hooks, described

__all__ = ["stackable", "stacked_copy", "with_tensors"]


def stackable(tensor: Tensor) -> bool:
    """Whether members can have their own of a tensor side by side; of a sparse one they share one."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def stacked_copy(networks: Iterable[nn.Module], members: int) -> nn.Module:
    """A copy of the first network whose tensors are all the networks' tensors, stacked.

    The networks are taken one at a time, so that an iterator need not hold them all in memory.
    """
    stacked: nn.Module | None = None
    for index, network in enumerate(networks):
        if stacked is None:
            settings = _settings(network)
            stacked = with_tensors(network, lambda tensor: tensor.new_empty(members, *tensor.shape))
            slots = _state(stacked)
        state = _state(network)
        _check_alike(slots, state, index)
        _check_settings(settings, _settings(network), index)
        for name, slot in slots.items():
            if stackable(slot):
                slot.data[index].copy_(state[name].detach())
    assert stacked is not None
    return stacked


def _check_alike(slots: dict[str, Tensor], state: dict[str, Tensor], index: int) -> None:
    if slots.keys() != state.keys():
        name = min(slots.keys() ^ state.keys())
        raise ValueError(f"networks[{index}] and networks[0] differ: only one of them has {name!r}")
    for name, slot in slots.items():
        if not stackable(slot):
            _check_shared(name, slot, state[name], index)
            continue
        want, got = slot.shape[1:], state[name].shape
        if want != got or slot.dtype != state[name].dtype:
            raise ValueError(
                f"networks[{index}] and networks[0] differ at {name!r}: {list(got)} {state[name].dtype} against "
                f"{list(want)} {slot.dtype}"
            )


def _check_shared(name: str, one: Tensor, other: Tensor, index: int) -> None:
    """Sparse tensors are one for all members, and so must be the same."""
    if isinstance(one, nn.Parameter) and one.requires_grad:
        raise ValueError(f"parameter {name!r} is sparse ({one.layout}), so members cannot each have their own")
    if one.layout is not other.layout or not torch.equal(_dense(one), _dense(other)):
        raise ValueError(f"networks[{index}] and networks[0] differ at {name!r}, which is sparse: they must share it")


def _dense(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if tensor.is_quantized else tensor.detach().to_dense()


def _check_settings(first: dict[str, dict[str, str]], other: dict[str, dict[str, str]], index: int) -> None:
    for name, own in other.items():
        for key in own | first[name]:
            one, two = (settings.get(key, "missing") for settings in (own, first[name]))
            if one != two:
                place = f"module {name!r}" if name else "the network itself"
                what = f"{key} is {one[:100]} against {two[:100]}"
                raise ValueError(f"networks[{index}] and networks[0] differ in {place}: {what}")


def _settings(network: nn.Module) -> dict[str, dict[str, str]]:
    """What every module is, beside its tensors: its class and its settings, described."""
    passing = ("training", "draw", "expects")
    own = {
        name: {key: value for key, value in vars(module).items() if key not in (*passing, *computing_hooks(module))}
        for name, module in network.named_modules()
    }
    return {
        name: {"class": type(network.get_submodule(name)).__name__}
        | {key: _described(value) for key, value in settings.items() if key[0] != "_" or _is_function(value)}
        for name, settings in own.items()
    }


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (nn.Module, Tensor))


def _described(value: Any) -> str:
    """A setting in words; a tensor that is no parameter and no buffer by its numbers, since all members share it.

    What autograd has made is computed again.
    """
    if not isinstance(value, Tensor) or not value.is_leaf:
        return described(value)
    numbers = value.detach().flatten()[:1000].tolist() if stackable(value) else []
    return f"a tensor {list(value.shape)} that is no buffer (register_buffer makes it one): {numbers}"


def _state(network: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name, shared ones once, buffers left out of checkpoints included."""
    for name, parameter in network.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run the network once before converting it")
    return dict(network.named_parameters()) | dict(network.named_buffers())


def with_tensors(network: nn.Module, function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a network in which `function` has been put to every parameter and buffer, ties kept."""
    memo: dict[int, Any] = {}
    for tensor in _state(network).values():
        whole = stackable(tensor)
        new = function(tensor.detach()).clone(memory_format=torch.preserve_format) if whole else tensor.detach().clone()
        memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    return copied(network, memo)
