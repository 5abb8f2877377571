"""Patches of layers of any class: an affine map, or a norm whose gamma and beta act on a normalised value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from multitudes.core.copying import copied
from multitudes.core.proof import alike
from multitudes.methods.patching.layers import PATCHES, Mixing, Patch, PatchedNorm
from multitudes.surgery.affine import SEVERAL, is_computed, kind_of, maps_of


class PatchedWrapped(Patch):
    """Any layer of one affine map: its own code runs with the weight and the bias of a draw."""

    wraps = "layer"
    layer: nn.Module

    def __init__(self, layers: Sequence[Any], mixing: Mixing, *args: Any) -> None:
        super().__init__(layers, mixing, *args)
        self.transposed = any(affine.inputs == 0 for affine in maps_of(layers[0]))

    def _settle(self, layer: nn.Module) -> None:
        self.layer = copied(layer)
        for name in ("weight", "bias"):
            if name in self.layer._parameters:
                self.layer.register_parameter(name, None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weight, bias = self.drawn()
        tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        return functional_call(self.layer, tensors, args, kwargs)

    def fold(self) -> nn.Module:
        plain = copied(self.layer)
        for name, tensor in zip(("weight", "bias"), self.drawn(), strict=True):
            if tensor is not None:
                plain.register_parameter(name, nn.Parameter(tensor.detach().clone()))
        return plain

    def _inputs(self) -> tuple[int, ...]:
        return (self.weight.shape[1],) if self.transposed else super()._inputs()

    def _by_input(self, z: Tensor) -> Tensor:
        return z.reshape(*z.shape, *[1] * (self.weight.dim() - 2)) if self.transposed else super()._by_input(z)

    def __getattr__(self, name: str) -> Any:
        """What networks ask a layer for (`stride`, `eps`)."""
        own = name in ("layer", "weight", "bias", "mixing", "reset_parameters") or name.startswith("__")
        if own or "layer" not in self.__dict__.get("_modules", {}):
            return super().__getattr__(name)
        return getattr(self.layer, name)


class PatchedWrappedNorm(PatchedWrapped, PatchedNorm):
    """Any norm: its gamma and beta are patched; the rest, running statistics included, is the layer's own."""

    def _inputs(self) -> tuple[int, ...]:
        return PatchedNorm._inputs(self)

    def _by_input(self, z: Tensor) -> Tensor:
        return z

    def reset_parameters(self) -> None:
        """Move the components apart, around what they are: only the layer's own class knows how a norm starts."""
        self.scatter()


def patch_for(layer: nn.Module) -> type[Patch] | None:
    """The class that patches a layer, by what it computes; None where that is not known."""
    if is_computed(layer):
        return PATCHES.get(type(layer)) if "weight" in layer._parameters else None
    if type(layer) in PATCHES:
        return PATCHES[type(layer)]
    if looks_like_norm(layer):
        return PatchedWrappedNorm
    return PatchedWrapped if kind_of(layer) not in SEVERAL and maps_of(layer) else None


def looks_like_norm(layer: nn.Module) -> bool:
    """Whether a layer is called a norm, and has a gamma, perhaps a beta, and no other parameter."""
    weight = layer._parameters.get("weight")
    others = layer._parameters.keys() - {"weight", "bias"}
    return "norm" in type(layer).__name__.lower() and weight is not None and not others and not layer._modules


@torch.no_grad()
def is_affine_norm(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a layer's output for an input is an affine function of its gamma and beta.

    Then `f(a) + f(b) = f(a + b) + f(0)`, which is tried with some.
    """
    probe = copied(layer).eval().double()
    args = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    generator = torch.Generator().manual_seed(0)
    a, b = ({n: torch.randn(p.shape, generator=generator).to(p) for n, p in probe.named_parameters()} for _ in "ab")

    def output(tensors: dict[str, Tensor]) -> Tensor:
        y: Tensor = functional_call(probe, tensors, args, kwargs)
        return y.double()

    try:
        sums = output(a) + output(b), output({n: a[n] + b[n] for n in a}) + output({n: 0 * a[n] for n in a})
    except Exception:  # whatever a user's own code may raise: it is not known as a norm then
        return False
    return bool(sums[0].isfinite().all()) and alike(sums[0].float()[None], sums[1].float()[None])
