"""Layers of ensemble model patching, with weights drawn from a mixture.

A patched layer has K versions (components) of its weight and bias, stacked `[K, ...]` under the layer's names. Each
draw combines them by eq. (1) of Chang et al. (2019),

    W = sum_k 1[Z = k] * (M_k + sigma eps_k),

and runs the layer with the result. `Mixing` draws the assignment Z: one number per network, layer, input unit ("row")
or element.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from multitudes.networks.copies import copied
from multitudes.networks.stochastic import Stochastic
from multitudes.networks.verification import agree
from multitudes.surgery.affine import SEVERAL, AffineMap, is_computed, kind_of, maps_of, run_with
from multitudes.surgery.select import CONVOLUTIONS, plain_layer

ASSIGNMENTS = ("network", "layer", "row", "element")
RELAXATIONS = ("straight-through", "weighted")


class Mixing(Stochastic):
    """Random choice among K components, with probabilities that are `given` or learned as `logits [K]`.

    With learned probabilities, an assignment is a weight for each component instead of a component's number: 1 for the
    drawn one, with the gradient of the probabilities (`"straight-through"`), or Gumbel-softmax weights at a
    `temperature` (`"weighted"`).
    """

    noise = "weights"

    def __init__(
        self,
        components: int,
        given: Sequence[float] | None,
        relaxation: str = "straight-through",
        temperature: float = 1.0,
        *,
        like: Tensor,
    ) -> None:
        super().__init__()
        self.components = components
        self.given = None if given is None else tuple(given)
        self.relaxation = relaxation
        self.temperature = temperature
        self.logits = nn.Parameter(like.new_zeros(components)) if given is None else None
        self.shared: Tensor | None = None  # assignment of the current draw, if it is the whole network's

    def reset_parameters(self) -> None:
        if self.logits is not None:
            nn.init.zeros_(self.logits)

    def probabilities(self, like: Tensor) -> Tensor:
        """Return `p`, `[K]`."""
        return like.new_tensor(self.given) if self.logits is None else self.logits.softmax(0)

    def assign(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Draw Z: component numbers `[*shape]`, or with learned probabilities, weights `[K, *shape]`."""
        like = like.new_empty((), dtype=torch.float32)  # half precision is too coarse for uniform numbers
        if self.logits is None:
            return self._number(self.uniform(shape, like), self.given)
        ones = [1] * len(shape)
        if self.relaxation == "weighted":
            gumbel = -(-self.uniform((self.components, *shape), like).log()).log()
            log_p = self.logits.float().log_softmax(0).view(-1, *ones)
            return ((log_p + gumbel) / self.temperature).softmax(0)
        p = self.logits.float().softmax(0)
        number = self._number(self.uniform(shape, like), None)
        picked = number == torch.arange(self.components, device=p.device).view(-1, *ones)
        return picked.float() + (p - p.detach()).view(-1, *ones)

    def _number(self, u: Tensor, given: tuple[float, ...] | None) -> Tensor:
        """Map uniform numbers to components: count the cumulative probabilities at or below each."""
        if given == (1 / self.components,) * self.components:
            return (u * self.components).long()  # below K even for the largest float32 below 1
        bounds: Any = self.probabilities(u).cumsum(0).unbind() if given is None else list(accumulate(given))
        return sum(((u >= bound).long() for bound in bounds[:-1]), torch.zeros_like(u, dtype=torch.int64))

    def mixed(self, stack: Tensor, z: Tensor) -> Tensor:
        """Return `sum_k 1[Z = k] * M_k` of components `[K, ...]`. If the stack lacks the last one, it is zero."""
        if self.logits is None:
            return _picked(stack, z) if len(stack) == self.components else _picked_or_zero(stack, z)
        weights = z[: len(stack)].to(stack.dtype)
        return (weights.reshape(len(stack), *[1] * (stack.dim() - z.dim()), *z.shape[1:]) * stack).sum(0)

    def mean(self, stack: Tensor) -> Tensor:
        """Return `sum_k p_k M_k`."""
        p = self.probabilities(stack)[: len(stack)]
        return (p.view(-1, *[1] * (stack.dim() - 1)) * stack).sum(0)

    # -- one assignment for the whole network: hooks on its root -------------------------------------------

    def begin(self, network: nn.Module, args: Any) -> None:
        """Draw the assignment shared by all layers."""
        if not self.expects:
            self.shared = self.assign((), next(network.parameters()))

    def end(self, network: nn.Module, args: Any, output: Any) -> None:
        self.shared = None

    def extra_repr(self) -> str:
        return f"learned, {self.relaxation}" if self.given is None else f"probabilities={list(self.given)}"


def _picked(stack: Tensor, z: Tensor) -> Tensor:
    """Return the components' values at Z: one component for a single number, else element by element."""
    if z.dim() == 0:
        return F.embedding(z, stack.flatten(1)).view(stack.shape[1:])  # the fastest lookup under vmap
    return stack.gather(0, z.expand(stack.shape[1:]).unsqueeze(0)).squeeze(0)


def _picked_or_zero(stack: Tensor, z: Tensor) -> Tensor:
    last = len(stack) - 1
    values = stack[0] if last == 0 else _picked(stack, z.clamp(max=last))
    return values * (z <= last)


# -- layers ------------------------------------------------------------------------------------------------


class Patch(Stochastic):
    """A layer with stacked components `weight [K, ...]` and `bias [K, ...]`, which each draw combines.

    It replaces a layer of any class with one affine map, or a norm, whose gamma is a diagonal matrix. `layers` are the
    components, K - 1 if the last is zero. The settings (`stride`, `eps`) are those of the first. With a zero component,
    or assignment by input unit, there is a single bias `[1, ...]` (the paper's K_j = 1). If layers share a `mixing`,
    exactly one is its `owner`.
    """

    noise = "weights"
    wraps = "layer"
    layer: Any
    weight: nn.Parameter
    bias: nn.Parameter | None
    mixing: Mixing

    def __init__(
        self,
        layers: Sequence[Any],
        mixing: Mixing,
        assignment: str = "layer",
        sigma: float = 0.0,
        spread: float = 0.1,
        owner: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        self.kind = type(layers[0]).__name__
        self.whole = type(layers[0]) not in KINDS
        self._copy_settings(layers[0])
        self.map = next(((m.weight, m.bias, m.inputs, m.outputs, m.groups) for m in maps_of(layers[0])), None)
        self.assignment = assignment
        self.sigma = sigma
        self.spread = spread
        self.weight = _stacked([layer.weight for layer in layers])
        one = assignment == "row" or len(layers) < mixing.components
        biases: list[Any] = [getattr(layer, "bias", None) for layer in (layers[:1] if one else layers)]
        self.register_parameter("bias", None if biases[0] is None else _stacked(biases))
        if owner:
            self.mixing = mixing
        else:  # not registered: with two names, `functional_call` would not restore its tensors
            object.__setattr__(self, "mixing", mixing)

    def _copy_settings(self, layer: nn.Module) -> None:
        """Copy the settings and buffers of torch's layers; keep other layers whole, without weight and bias.

        A torch layer without a weight inside the network would break code that searches for such layers.
        """
        if self.whole:
            self.layer = copied(layer)
            for name in {"weight", "bias"} & self.layer._parameters.keys():
                self.layer.register_parameter(name, None)
            return
        settings = {key: value for key, value in vars(layer).items() if key not in vars(nn.Module())}
        vars(self).update(copy.deepcopy(settings))
        for name, buffer in layer._buffers.items():
            self.register_buffer(name, None if buffer is None else buffer.clone())

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        weight, bias = self.draw_tensors()
        if self.whole and self.map is not None:
            return run_with(self.layer, AffineMap(*self.map), x, weight, bias, *args, **kwargs)
        if self.whole:
            tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
            return functional_call(self.layer, tensors, (x, *args), kwargs)
        if self.map is None:
            return self._normalize(x, weight, bias)
        kind: Any = getattr(nn, self.kind)
        return F.linear(x, weight, bias) if kind is nn.Linear else kind._conv_forward(self, x, weight, bias)

    def _normalize(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        by_group, settings = self.kind == "GroupNorm", vars(self)
        norm, over = (F.group_norm, "num_groups") if by_group else (F.layer_norm, "normalized_shape")
        if self.training:
            return norm(x, settings[over], weight, bias, settings["eps"])
        plain = norm(x, settings[over], None, None, settings["eps"])
        return _affine(plain, weight, bias, x.dim() - 2 if by_group else 0)

    def assignment_shape(self) -> tuple[int, ...]:
        """Return the shape of the weight's Z: one number, one per input unit, or one per element."""
        if self.assignment == "row" and self.map is not None:
            return (AffineMap(*self.map).widths(self.weight.shape[1:])[0],)
        return tuple(self.weight.shape[1:]) if self.assignment in ("row", "element") else ()

    def assignments(self) -> int:
        """Return the number of components that one draw picks for this layer alone."""
        if self.assignment == "network":
            return 0
        count = prod(self.assignment_shape())
        if self.assignment == "element" and self.bias is not None and len(self.bias) > 1:
            count += self.bias[0].numel()
        return count

    def draw_tensors(self) -> tuple[Tensor, Tensor | None]:
        """Draw the weight and bias, or return the mixture's mean for expectations."""
        if self.expects:
            if self.bias is None:
                return self.mixing.mean(self.weight), None
            bias = self.bias[0] if len(self.bias) == 1 else self.mixing.mean(self.bias)
            return self.mixing.mean(self.weight), bias
        z = self.mixing.shared if self.assignment == "network" else None
        if z is None:
            z = self.mixing.assign(self.assignment_shape(), self.weight)
        weight = self._mixed(self.weight, self._by_input(z) if self.assignment == "row" else z)
        if self.bias is None:
            return weight, None
        if len(self.bias) == 1:
            return weight, self._noisy(self.bias[0])
        if self.assignment == "element":
            z = self.mixing.assign(self.bias.shape[1:], self.bias)
        return weight, self._mixed(self.bias, z)

    def fold(self) -> nn.Module:
        if not self.whole:
            own = ("kind", "whole", "map", "assignment", "sigma", "spread", "mixing")
            return plain_layer(getattr(nn, self.kind), self, *self.draw_tensors(), omit=own)
        plain = copied(self.layer)
        for name, tensor in zip(("weight", "bias"), self.draw_tensors(), strict=True):
            if tensor is not None:
                plain.register_parameter(name, nn.Parameter(tensor.detach().clone()))
        return plain

    def _mixed(self, stack: Tensor, z: Tensor) -> Tensor:
        weighted = self.mixing.logits is not None and self.mixing.relaxation == "weighted"
        # The components' noise is independent, so its weighted sum is one noise with the summed variance.
        scale = z.square().sum(0).sqrt().to(stack.dtype) if weighted else 1.0
        return self._noisy(self.mixing.mixed(stack, z), scale)

    def _noisy(self, values: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        if not self.sigma:
            return values
        return values + self.sigma * scale * self.normal(values.shape, like=values)

    def _by_input(self, z: Tensor) -> Tensor:
        """Reshape an assignment of input units `[..., I]` to broadcast with the weight."""
        if self.map is None:
            return z
        affine, shape = AffineMap(*self.map), self.weight.shape[1:]
        groups, outputs = affine.groups, affine.widths(shape)[1]
        z = z.unflatten(-1, (groups, 1, -1)).expand(*z.shape[:-1], groups, outputs // groups, -1)
        z = (z.mT if affine.inputs == 0 else z).flatten(-3, -2)
        return z.reshape(*z.shape, *[1] * (len(shape) - 2))

    def reset_parameters(self) -> None:
        """Reset each component by torch's rule for such a layer; scatter those of a norm."""
        if self.map is None:
            if not self.whole:  # the reset rule of other classes is unknown
                nn.init.ones_(self.weight)
                if self.bias is not None:
                    nn.init.zeros_(self.bias)
            self.scatter()
            return
        for weight in self.weight.data:
            nn.init.kaiming_uniform_(weight, a=5**0.5)
        if self.bias is not None:
            bound = max(1, self.weight[0, 0].numel()) ** -0.5
            nn.init.uniform_(self.bias, -bound, bound)

    def has_equal_weights(self) -> bool:
        """Return whether all components have the same weight."""
        return not self.weight.is_meta and bool((self.weight == self.weight[:1]).all())

    @torch.no_grad()
    def scatter(self) -> None:
        """Add normal noise of `spread` times the weight's root mean square to the components, keeping their mean."""
        size = self.weight.square().mean().sqrt()
        size = torch.where(size > 0, size, self.weight[0, 0].numel() ** -0.5)
        for stack in (self.weight, self.bias):
            if stack is not None:
                p = self.mixing.probabilities(stack)[: len(stack)]
                noise = torch.randn_like(stack)
                noise -= torch.tensordot(p / p.sum(), noise, 1)
                stack.add_(self.spread * size * noise)

    def extra_repr(self) -> str:
        zero = ", last zero" if len(self.weight) < self.mixing.components else ""
        noise = f", sigma={self.sigma}" if self.sigma else ""
        return f"{self.kind}, components={self.mixing.components}{zero}, assignment={self.assignment!r}{noise}"

    def __getattr__(self, name: str) -> Any:
        """Forward attributes of the layer that networks read (`stride`, `eps`)."""
        own = name in ("layer", "weight", "bias", "mixing") or name.startswith("__")
        if own or "layer" not in self.__dict__.get("_modules", {}):
            return super().__getattr__(name)
        return getattr(self.layer, name)


def _stacked(tensors: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.stack([t.detach() for t in tensors]), tensors[0].requires_grad)


class PatchedBatchNorm(Patch, _BatchNorm):  # type: ignore[misc]  # whose forward takes x alone
    """A batch norm, `[B, C, ...] -> [B, C, ...]`, whose components share the running statistics.

    It subclasses torch's batch norm, so code that recomputes statistics finds it.
    """

    bias: Any  # torch declares that it is never None

    def _normalize(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.training or self.running_mean is None or self.running_var is None:
            kept = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
            return F.batch_norm(x, *kept, weight, bias, True, self._step(), self.eps)
        scale = weight * (self.running_var + self.eps).rsqrt()
        shift = -self.running_mean * scale if bias is None else bias - self.running_mean * scale
        return _affine(x, scale, shift, x.dim() - 2)

    def _step(self) -> float:
        """Return the momentum of the running statistics, or 1 / batches seen for a cumulative mean."""
        if self.num_batches_tracked is None or not (self.training and self.track_running_stats):
            return 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_running_stats()


def _affine(x: Tensor, scale: Tensor, shift: Tensor | None, after: int = 0) -> Tensor:
    """Return `x * scale + shift`, where x has `after` more trailing dimensions than scale.

    Under vmap this is faster than the affine part of torch's norm functions, and if the input is not batched, only
    this part is.
    """
    y = x * scale.view(*scale.shape, *[1] * after)
    if shift is not None:
        y += shift.view(*shift.shape, *[1] * after)
    return y.to(x.dtype)


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm)
KINDS = (nn.Linear, *CONVOLUTIONS, *NORMS)
"""Torch's layers, which a patch computes without keeping the layer."""


# -- which layers ------------------------------------------------------------------------------------------


def can_be_patched(layer: nn.Module) -> bool:
    """Return whether a layer can be patched: one affine map, a torch norm, or a class named like a norm."""
    if type(layer) in NORMS or is_other_norm(layer):
        return True
    return not is_computed(layer) and kind_of(layer) not in SEVERAL and bool(maps_of(layer))


def is_other_norm(layer: nn.Module) -> bool:
    """Return whether a non-torch layer is named like a norm and has a gamma, maybe a beta, and no other parameter."""
    alone = not (layer._parameters.keys() - {"weight", "bias"} or layer._modules)
    named = "norm" in type(layer).__name__.lower() and type(layer) not in NORMS
    return named and alone and layer._parameters.get("weight") is not None


@torch.no_grad()
def is_affine_norm(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a layer's output for an input is an affine function of its gamma and beta.

    This tests `f(a) + f(b) = f(a + b) + f(0)` with random a and b.
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
    except Exception:  # user code may raise anything: then it is not a known norm
        return False
    return bool(sums[0].isfinite().all()) and agree(sums[0].float()[None], sums[1].float()[None])
