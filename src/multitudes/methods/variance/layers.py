"""Layers of random weights, drawn by local reparameterization: Neklyudov et al., 2018 (see `conversion`).

`kl.py` has the divergences.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_choice, check_number
from multitudes.methods.variance.kl import approximate_kl, stochastic_kl, student_kl
from multitudes.networks.copies import copied
from multitudes.networks.stochastic import Stochastic
from multitudes.surgery.affine import product, product_kind
from multitudes.surgery.select import plain_layer

PARAMETERIZATIONS = ("layer", "neuron", "weight", "additive", "zero")
KLS = ("approximate", "stochastic", "student")
CLIP = 20.0
"""log alpha is clamped to -20 to 20."""


class VarianceLayer(Stochastic):
    """A layer with random weights, drawn separately for each example.

    `weight` contains the expectations mu. The spread is `log_alpha`, of shape `[]`, `[O, 1, ...]` or the weight's, or
    `log_sigma`. A zero-centered layer has a signed `sigma` instead, and its `weight` reads as zeros. The bias is not
    random. For expectations, the layer is the plain one with the expected weights.

    A sparse layer has two more buffers: weights that are `fixed` are not random, but have a constant `value`. `kappa`
    is the latest result of the function `kappa`; it is not in the state dict.

    Args:
        args: Those of the plain layer.
        parameterization: As in `variance`, like the following arguments.
        log_alpha: Start of log alpha.
        kl: Divergence from the prior.
        nu: Degrees of freedom of Student's t.
        kwargs: Those of the plain layer.
    """

    parameterization = ""
    bias: Any
    fixed: Tensor | None
    value: Tensor | None
    kappa: Tensor | None

    def __init__(
        self,
        *args: Any,
        parameterization: str = "layer",
        log_alpha: float = -5.0,
        kl: str = "approximate",
        nu: float = 1e-16,
        **kwargs: Any,
    ) -> None:
        check_options(parameterization, log_alpha, kl, nu)
        super().__init__(*args, **kwargs)
        self._randomise(parameterization, log_alpha, kl, nu)
        self.reset_spread()

    @classmethod
    def of(
        cls,
        layer: nn.Module,
        parameterization: str = "layer",
        log_alpha: float = -5.0,
        kl: str = "approximate",
        nu: float = 1e-16,
    ) -> Self:
        """Convert a plain layer. Its weights become the expectations, or the sigmas of a zero-centered layer."""
        check_options(parameterization, log_alpha, kl, nu)
        new = cls.__new__(cls)
        vars(new).update(vars(copied(layer)))
        new._randomise(parameterization, log_alpha, kl, nu)
        if parameterization != "zero":
            new.reset_spread()
        return new

    def _randomise(self, parameterization: str, log_alpha: float, kl: str, nu: float) -> None:
        self.parameterization, self.start, self.kind, self.nu = parameterization, float(log_alpha), kl, nu
        self.register_buffer("fixed", None)
        self.register_buffer("value", None)
        self.register_buffer("kappa", None, persistent=False)
        mu = self.weight
        if parameterization == "zero":
            del self.weight
            self.sigma = nn.Parameter(mu.detach(), mu.requires_grad)
        elif parameterization == "additive":
            self.log_sigma = nn.Parameter(torch.empty_like(mu))
        else:
            shapes = {"layer": [], "neuron": [len(mu), *[1] * (mu.dim() - 1)], "weight": mu.shape}
            self.log_alpha = nn.Parameter(mu.new_empty(shapes[parameterization]))

    def reset_parameters(self) -> None:
        """Reset the expectations as the plain layer does, then the spread."""
        super().reset_parameters()  # type: ignore[misc]  # of the plain layer, the next base of each subclass
        if self.parameterization:  # else the plain layer's constructor calls this
            self.reset_spread()

    @torch.no_grad()
    def reset_spread(self) -> None:
        """Reset alpha to its start (`additive`: relative to the weights' root mean square), or draw sigma."""
        if self.parameterization == "zero":
            bound = 1 / math.sqrt(self.sigma[0].numel())
            self.sigma.uniform_(-bound, bound)
        elif self.parameterization == "additive":
            size = self.weight.square().mean().sqrt().clamp(min=1e-6)
            self.log_sigma.copy_((0.5 * self.start + size.log()).expand_as(self.log_sigma))
        else:
            self.log_alpha.fill_(self.start)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and ("sigma" in self.__dict__ or "sigma" in self.__dict__.get("_parameters", ())):
            return torch.zeros_like(self.sigma)
        return super().__getattr__(name)

    # -- the weights' distribution -----------------------------------------------------------------------

    def mean(self) -> Tensor:
        """Return the expectation of each weight."""
        if self.fixed is None or self.value is None:
            return self.weight
        return torch.where(self.fixed, self.value, self.weight)

    def variance(self) -> Tensor:
        """Return the variance of each weight, in at least float32."""
        if self.parameterization == "zero":
            variance = _wide(self.sigma).square()
        elif self.parameterization == "additive":
            variance = _wide(2 * self.log_sigma).exp()
        else:
            variance = self.log_alphas().exp() * _wide(self.weight).square()
        return variance if self.fixed is None else variance.masked_fill(self.fixed, 0.0)

    def log_alphas(self) -> Tensor:
        """Return the clamped log alpha, of the weight's shape or broadcastable to it."""
        if self.parameterization == "zero":
            return torch.full_like(_wide(self.sigma), torch.inf)
        if self.parameterization == "additive":
            square = _wide(self.weight).square()
            log_alpha = _wide(2 * self.log_sigma) - square.clamp(min=torch.finfo(square.dtype).tiny).log()
        else:
            log_alpha = _wide(self.log_alpha)
        return log_alpha.clamp(-CLIP, CLIP)

    def kl(self, kind: str | None = None, nu: float | None = None) -> Tensor:
        """Return the divergence of the layer's random weights from the prior, a scalar.

        The divergence of a zero-centered weight from the log-uniform prior does not depend on sigma (appendix C), so it
        is 0. Estimates use separate noise for each weight, even if weights share alpha, for a lower variance.
        """
        kind, nu = self.kind if kind is None else kind, self.nu if nu is None else nu
        variance = self.variance()
        if kind == "student":
            variance = variance.clamp(min=torch.finfo(variance.dtype).tiny)
            each = student_kl(_wide(self.mean()), variance, self.normal(variance.shape, like=variance), nu)
        elif self.parameterization == "zero":
            return variance.new_zeros(())
        elif kind == "stochastic":
            each = stochastic_kl(self.log_alphas(), self.normal(variance.shape, like=variance))
        else:
            each = approximate_kl(self.log_alphas())
        if self.fixed is None:
            return each.mean() * variance.numel()
        return torch.where(self.fixed, 0.0, each).sum()

    # -- one draw ----------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        if self.expects:
            return product(self, x, self.mean(), self.bias)
        # At least float32: half-precision numbers overflow when squared, and 1e-16 underflows to 0.
        with torch.autocast(x.device.type, enabled=False):
            variance = product(self, _wide(x).square(), self.variance(), None)
            noise = self.normal(variance.shape, like=variance) * torch.sqrt(1e-16 + variance)
        if self.parameterization == "zero" and self.fixed is None:
            bias = 0.0 if self.bias is None else self.bias.view(-1, *[1] * (self.sigma.dim() - 2))
            return noise.to(x.dtype) + bias
        mean = product(self, x, self.mean(), self.bias)
        return mean + noise.to(mean.dtype)

    # -- plain and sparse --------------------------------------------------------------------------------

    def expected(self) -> nn.Module:
        """Return the plain layer with the expected weights."""
        own = ("parameterization", "start", "kind", "nu")
        plain = plain_layer(product_kind(self), self, self.mean(), self.bias, omit=own)
        for name in ("fixed", "value", "kappa"):
            del plain._buffers[name]
        return plain

    def fix(self, which: Tensor, value: Tensor) -> Tensor:
        """Fix the weights at `which` to `value`, both of the weight's shape. Return the mask of all fixed weights."""
        if self.fixed is not None and self.value is not None:
            which, value = which | self.fixed, torch.where(self.fixed, self.value, value)
        self.fixed, self.value = which, value.detach().clone()
        return which

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("fixed", "value"):
            if getattr(self, name) is None and f"{prefix}{name}" in state_dict:  # the state of a sparse layer
                device = next(self.parameters()).device
                setattr(self, name, torch.empty_like(state_dict[f"{prefix}{name}"], device=device))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parameterization={self.parameterization!r}"


class VarianceLinear(VarianceLayer, nn.Linear):
    """A linear layer, `[B, ..., I] -> [B, ..., O]`, with random weights (21, 22)."""


class VarianceConv1d(VarianceLayer, nn.Conv1d):
    """A convolution, `[B, I, L] -> [B, O, L']`, with random weights drawn at each position (23, 24)."""


class VarianceConv2d(VarianceLayer, nn.Conv2d):
    """A convolution, `[B, I, H, W] -> [B, O, H', W']`, with random weights drawn at each position (23, 24)."""


class VarianceConv3d(VarianceLayer, nn.Conv3d):
    """A convolution, `[B, I, D, H, W] -> [B, O, D', H', W']`, with random weights drawn at each position (23, 24)."""


class Absolute(nn.Module):
    """`|x|`, for use after a zero-centered layer, where a ReLU would drop half of the outputs (appendix D)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


LAYERS: dict[type[nn.Module], type[VarianceLayer]] = {
    nn.Linear: VarianceLinear,
    nn.Conv1d: VarianceConv1d,
    nn.Conv2d: VarianceConv2d,
    nn.Conv3d: VarianceConv3d,
}


def variance_layers(network: nn.Module) -> dict[str, VarianceLayer]:
    """Return a network's variance layers by name."""
    return {name: layer for name, layer in network.named_modules() if isinstance(layer, VarianceLayer)}


def check_options(parameterization: str, log_alpha: float, kl: str, nu: float) -> None:
    """Raise unless the settings of a variance layer are valid."""
    check_choice("parameterization", parameterization, PARAMETERIZATIONS)
    check_choice("kl", kl, KLS)
    check_number("log_alpha", log_alpha, -CLIP, CLIP)
    check_number("nu", nu, 0, above=True)
