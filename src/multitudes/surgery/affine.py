"""Affine maps: find the weight and the bias of `y = W x + b` in a layer of any class, and replace them.

A layer has one map, or several (attention, recurrent). Torch's own classes, and subclasses that inherit their
`forward`, are built in. Any other class with exactly a matrix and a vector is run to test whether it computes an affine
map. If a weight is computed from other tensors (`weight_norm`, `spectral_norm`, pruning), its computed value counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from multitudes.networks.copies import copied
from multitudes.networks.settings import computing_hooks
from multitudes.surgery.select import CONVOLUTIONS, PRODUCTS, TRANSPOSED, Selector, select

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
SEVERAL = (nn.MultiheadAttention, *RECURRENT, nn.Bilinear)
"""Layers that are converted as a whole: with several maps, or several inputs."""


@dataclass(frozen=True)
class AffineMap:
    """Names of a map's weight and bias, and the weight's axes of inputs and outputs, 0 and 1 or 1 and 0.

    With groups, the weight's first axis has the channels of all groups, the second those of one group.
    """

    weight: str = "weight"
    bias: str | None = "bias"
    inputs: int = 1
    outputs: int = 0
    groups: int = 1

    def widths(self, shape: torch.Size) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of a weight of this shape."""
        sizes = shape[0], shape[1] * self.groups
        return sizes[self.inputs], sizes[self.outputs]

    def outer(self, r: Tensor, s: Tensor, dims: int) -> Tensor:
        """Return `s r^T` of factors on inputs `[(M,) I]` and outputs `[(M,) O]`, shaped as a weight of rank `dims`."""
        product = s.unflatten(-1, (self.groups, -1, 1)) * r.unflatten(-1, (self.groups, 1, -1))  # [G, O/G, I/G]
        product = (product.mT if self.inputs == 0 else product).flatten(-3, -2)
        return product.reshape(*product.shape, *[1] * (dims - 2))


# -- selection ---------------------------------------------------------------------------------------------


def kind_of(layer: nn.Module) -> type[nn.Module] | None:
    """Return the torch class with affine maps whose `forward` a layer runs; None if there is none."""
    for kind in (*PRODUCTS, *SEVERAL):
        if isinstance(layer, kind):
            names = ("forward", "_conv_forward", "__call__")
            own = all(getattr(type(layer), name, None) is getattr(kind, name, None) for name in names)
            return kind if own and "forward" not in vars(layer) else None
    return None


def maps_of(layer: nn.Module) -> tuple[AffineMap, ...]:
    """Return a layer's affine maps; () if its class computes something else or is unknown."""
    kind = kind_of(layer)
    if kind is None:
        return _observed(layer)
    if kind in SEVERAL:
        return () if is_changed(layer) else _several(layer, kind)
    if not _weight_is_known(layer):
        return ()
    inputs = 0 if kind in TRANSPOSED else 1
    return (AffineMap(inputs=inputs, outputs=1 - inputs, groups=int(getattr(layer, "groups", 1))),)


def _several(layer: Any, kind: type[nn.Module]) -> tuple[AffineMap, ...]:
    if kind is nn.Bilinear:
        return (AffineMap(),)  # a map of its first input, given the second one
    if kind is nn.MultiheadAttention:
        names = ["in_proj_weight"] if layer._qkv_same_embed_dim else [f"{name}_proj_weight" for name in "qkv"]
        biases = ["in_proj_bias", None, None]
        return (*map(AffineMap, names, biases[: len(names)]), AffineMap("out_proj.weight", "out_proj.bias"))
    names = [name for name, _ in layer.named_parameters() if name.startswith("weight_")]
    return tuple(AffineMap(name, name.replace("weight_", "bias_") if "_hr_" not in name else None) for name in names)


def is_changed(layer: nn.Module) -> bool:
    """Return whether one of a layer's tensors is computed from others."""
    return any(parametrize.is_parametrized(module) or computing_hooks(module) for module in layer.modules())


def _weight_is_known(layer: Any) -> bool:
    computed = [*(layer.parametrizations if parametrize.is_parametrized(layer) else ()), *computing_hooks(layer)]
    if computed:
        return computed == ["weight"] and not has_other_hooks(layer)
    return layer._parameters.get("weight") is not None


def has_other_hooks(layer: nn.Module) -> bool:
    """Return whether a layer has forward hooks other than those that compute its weight."""
    return len(layer._forward_hooks) + len(layer._forward_pre_hooks) > len(computing_hooks(layer))


def _observed(layer: nn.Module) -> tuple[AffineMap, ...]:
    """Return the map of a user's or Hugging Face's class (`Conv1D`), if a test run shows that it is affine."""
    weight, bias = (layer._parameters.get(name) for name in ("weight", "bias"))
    if (
        weight is None
        or weight.dim() != 2
        or layer._parameters.keys() - {"weight", "bias"}
        or layer._modules
        or layer._buffers
        or layer._forward_hooks
        or layer._forward_pre_hooks
        or type(layer).__module__.startswith(("torch.", "multitudes."))
        or not weight.is_floating_point()
        or weight.is_meta
        or (bias is not None and bias.dim() != 1)
    ):
        return ()
    for inputs in (0, 1):
        found = AffineMap(inputs=inputs, outputs=1 - inputs)
        if (bias is None or len(bias) == weight.shape[1 - inputs]) and computes(layer, found):
            return (found,)
    return ()


@torch.no_grad()
def computes(layer: nn.Module, affine: AffineMap) -> bool:
    """Return whether a layer computes this map, in training and in evaluation."""
    probe: Any = copied(layer)
    generator = torch.Generator().manual_seed(0)
    width = affine.widths(probe.weight.shape)[0]
    for parameter in probe.parameters():  # they may be zeros
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    x = torch.randn(2, 3, width, generator=generator, dtype=torch.float64)
    weight = probe.weight if affine.inputs == 1 else probe.weight.mT
    want = F.linear(x, weight, probe._parameters.get("bias"))
    with torch.random.fork_rng([]):
        try:
            answers = [probe.train(mode)(x) for mode in (True, False)]
        except Exception:  # the user's code may raise anything
            return False
    return all(isinstance(y, Tensor) and y.shape == want.shape and torch.allclose(y, want) for y in answers)


def affine_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's layers with affine maps, by name, except those inside attention."""
    inside = {
        f"{name}.{child}" if name else child
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention) or (parametrize.is_parametrized(module) and name)
        for child, _ in module.named_modules()
        if child
    }
    return {name: module for name, module in model.named_modules() if name not in inside and maps_of(module)}


def select_affine(model: nn.Module, layers: Selector) -> dict[str, nn.Module]:
    """Return the layers with affine maps that `layers` selects; by default all but those that share a weight.

    For example, a language model's head that shares the embedding's weight is not converted.
    """
    able = affine_layers(model)
    chosen = select(model, layers, able)
    if layers is not None:
        return chosen
    inside = {id(module) for layer in able.values() for module in layer.modules()}
    others = {id(p) for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)}
    return {n: m for n, m in chosen.items() if not any(id(p) in others for p in m.parameters())} or chosen


# -- execution ---------------------------------------------------------------------------------------------


def weight_of(layer: Any) -> Tensor:
    """Return the weight that a layer of one map would use in its next forward."""
    hook = computing_hooks(layer).get("weight") if layer._forward_pre_hooks else None
    weight: Tensor
    if hook is None:
        weight = layer.weight
    elif isinstance(hook, prune.BasePruningMethod):
        weight = hook.apply_mask(layer)
    else:
        weight = hook.compute_weight(layer, *((layer.training,) if isinstance(hook, SpectralNorm) else ()))
    return weight


def is_computed(layer: nn.Module) -> bool:
    """Return whether a layer's weight is computed from others."""
    return layer._parameters.get("weight") is None


def axis_of(layer: Any) -> int:
    """Return the channel axis of a layer's inputs and outputs, counted from the last."""
    return -1 - len(layer.kernel_size) if kind_of(layer) in (*CONVOLUTIONS, *TRANSPOSED) else -1


def run_with(
    layer: Any, affine: AffineMap, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any
) -> Tensor:
    """Run a layer of one map on x with a replaced weight and bias."""
    kind = kind_of(layer)
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    if hooked and kind is not None and "weight" in layer._parameters:  # in the registry even if None, unless computed
        tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        y: Tensor = functional_call(layer, tensors, (x, *args), kwargs)
        return y
    if kind in CONVOLUTIONS:
        y = layer._conv_forward(x, weight, bias)
        return y
    if kind in TRANSPOSED:
        return _transposed(layer, x, weight, bias, *args, **kwargs)
    return F.linear(x, weight.mT if affine.inputs == 0 else weight, bias)


def _transposed(
    layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: list[int] | None = None
) -> Tensor:
    spatial = len(layer.kernel_size)
    convolve: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[spatial - 1]
    settings = layer.stride, layer.padding, layer.kernel_size
    extra = layer._output_padding(x, output_size, *settings, spatial, layer.dilation)
    return convolve(x, weight, bias, layer.stride, layer.padding, extra, layer.groups, layer.dilation)


def product_kind(layer: nn.Module) -> type[nn.Module]:
    """Return the class of `PRODUCTS` that a layer derives from."""
    return next(kind for kind in PRODUCTS if isinstance(layer, kind))


def product(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply torch's own forward of a linear layer or convolution to x with a replaced weight and bias."""
    convolves = isinstance(layer, CONVOLUTIONS)
    y: Tensor = layer._conv_forward(x, weight, bias) if convolves else F.linear(x, weight, bias)
    return y


def plain_copy(layer: Any, weight: Tensor, bias: nn.Parameter | None = None) -> nn.Module:
    """Copy a layer of one map, in the user's own class, with a plain weight and, if given, a bias."""
    plain = copied(layer)
    trained = any(parameter.requires_grad for name, parameter in layer.named_parameters() if name != "bias")
    if parametrize.is_parametrized(plain):
        del plain._modules["parametrizations"]
        plain.__class__ = type(plain).__bases__[0]  # torch's removal changes the class that all copies share
    for hook in computing_hooks(plain).values():
        remove = {WeightNorm: remove_weight_norm, SpectralNorm: remove_spectral_norm}
        remove.get(type(hook), prune.remove)(plain, "weight")
    plain.register_parameter("weight", nn.Parameter(weight.detach().clone(), trained))
    if bias is not None:
        plain.register_parameter("bias", bias)
    return plain
