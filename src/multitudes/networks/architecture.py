"""Networks of one architecture: the same names, shapes, dtypes and settings, each with its own weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.networks.copies import copied
from multitudes.networks.settings import computing_hooks, describe_setting


def of_one_architecture(networks: Iterable[nn.Module]) -> list[nn.Module]:
    """Check that networks have the architecture of the first one, and return them; share equal frozen parameters.

    A network that appears twice is copied. An iterator is read one network at a time, so that copies of a frozen
    backbone are never all in memory.
    """
    found: list[nn.Module] = []
    for index, network in enumerate(networks):
        network = copied(network) if any(network is other for other in found) else network
        if found:
            check_architecture(found[0], network, index)
            share_frozen(found[0], network)
        else:
            _check_shapes_known(network)
        found.append(network)
    return found


def stackable(tensor: Tensor) -> bool:
    """Return whether members' tensors can be stacked; sparse and quantized ones cannot."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal; sparse and quantized ones are compared as dense ones."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return dense(one).equal(dense(other))


def dense(tensor: Tensor) -> Tensor:
    """Return a sparse or quantized tensor as a dense one; return any other tensor unchanged."""
    return tensor.dequantize() if tensor.is_quantized else tensor.detach().to_dense()


def share_frozen(first: nn.Module, other: nn.Module) -> None:
    """Replace frozen parameters of `other` by equal ones of `first`, to store them once."""
    theirs = dict(first.named_parameters(remove_duplicate=False))
    for path, module in other.named_modules():
        prefix = f"{path}." if path else ""
        for name, own in module._parameters.items():
            if own is not None and not own.requires_grad:
                shared = theirs[prefix + name]
                if not shared.requires_grad and shared is not own and equal(shared, own):
                    module._parameters[name] = shared


def shared_parameters(networks: list[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters that the first network shares with others, by name."""
    others = {id(parameter) for network in networks[1:] for parameter in network.parameters()}
    return {name: parameter for name, parameter in networks[0].named_parameters() if id(parameter) in others}


def own_parameters(networks: list[nn.Module], shared: set[int]) -> None:
    """Give each network its own copy of the parameters with these ids; tied parameters stay tied."""
    for network in networks:
        copies: dict[int, nn.Parameter] = {}
        for module in network.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in shared:
                    if id(parameter) not in copies:
                        copies[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                    module._parameters[name] = copies[id(parameter)]


# -- checks ------------------------------------------------------------------------------------------------


def check_architecture(first: nn.Module, other: nn.Module, index: int) -> None:
    """Raise a ValueError if `networks[index]` differs from the first in a name, a shape, a dtype or a setting."""
    _check_tensors(_tensors(first), _tensors(other), index)
    settings = _settings(other)
    for name, want in _settings(first).items():
        own = settings.get(name, {"class": "missing"})
        for key in want | own:
            one, two = own.get(key, "missing"), want.get(key, "missing")
            if one != two:
                place = f"module {name!r}" if name else "the network itself"
                raise ValueError(
                    f"networks[{index}] and networks[0] differ in {place}: {key} is {one[:100]} and {two[:100]}"
                )


def _check_shapes_known(network: nn.Module) -> None:
    for name, parameter in network.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run the network once before converting it")


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    _check_shapes_known(network)
    return dict(network.named_parameters()) | dict(network.named_buffers())


def _check_tensors(first: dict[str, Tensor], other: dict[str, Tensor], index: int) -> None:
    if first.keys() != other.keys():
        name = min(first.keys() ^ other.keys())
        raise ValueError(f"networks[{index}] and networks[0] differ: only one of them has {name!r}")
    for name, want in first.items():
        got = other[name]
        if want.shape != got.shape or want.dtype != got.dtype:
            raise ValueError(
                f"networks[{index}] and networks[0] differ at {name!r}: {list(got.shape)} {got.dtype} and "
                f"{list(want.shape)} {want.dtype}"
            )


def _settings(network: nn.Module) -> dict[str, dict[str, str]]:
    """Describe the class and the public settings of each module."""
    return {
        name: {"class": type(module).__name__}
        | {
            key: _described(value)
            for key, value in vars(module).items()
            if key not in ("training", "draw", "expects", *computing_hooks(module))
            and (key[0] != "_" or _is_function(value))
        }
        for name, module in network.named_modules()
    }


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (nn.Module, Tensor))


def _described(value: Any) -> str:
    """Describe a setting; a constant tensor that is not a buffer by its values."""
    if not isinstance(value, Tensor) or not value.is_leaf:
        return describe_setting(value)
    numbers = value.detach().flatten()[:1000].tolist() if stackable(value) else []
    return f"a tensor {list(value.shape)} that is not a buffer (use register_buffer): {numbers}"
