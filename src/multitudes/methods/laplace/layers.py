"""Output layers with a Gaussian posterior over their weights, and a wrapper that adds the noise of targets.

The weight matrix with the bias as last column, `W [O, F]`, has the trained values `W*` as mean, and the covariance S:

    full     S = L L^T                                          W = W* + L eps
    kron     S = (Q_G x Q_A) diag(s^2) (Q_G x Q_A)^T            W = W* + Q_G (s * eps) Q_A^T
    diag     S = diag(s^2)                                      W = W* + s * eps

If the likelihood treats outputs as independent (all but the softmax), the full covariance has one block per output:
`L [K, R, R]` with K blocks of R rows, `K R = O F`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.networks.calls import call
from multitudes.networks.copies import Sharing
from multitudes.networks.stochastic import Stochastic
from multitudes.surgery.affine import kind_of, maps_of, product, product_kind, weight_of
from multitudes.tasks.gaussian import join_gaussian

STRUCTURES = ("full", "kron", "diag")
"""Structures in order of decreasing memory."""

PROBIT = math.pi / 8


class LaplaceLayer(Stochastic):
    """An output layer with a posterior. Each draw has its own weights, the same for the whole batch.

    `weight` and `bias` are the trained ones, the posterior mean. The posterior's tensors are buffers: `factor`; or
    `left`, `right` and `deviations`; or only `deviations`. The posterior covers the first outputs only, since the
    variances of a Gaussian head are not random. `prior` is the prior precision, `evidence` the log marginal likelihood.
    """

    noise = "weights"
    weight: Tensor
    bias: Any
    side: str | None = None
    """Output of a run instead of a draw: "probit", scaled logits; "deviation", the outputs' standard deviations; or
    "point", the mean plus `point` (a buffer) standard deviations. None draws."""

    structure: str
    prior: Tensor
    evidence: Tensor
    factor: Any
    left: Any
    right: Any
    deviations: Any
    point: Any

    def set_posterior(self, structure: str, posterior: Mapping[str, Tensor], prior: float, evidence: float) -> None:
        """Set the posterior: structure, tensors by name, prior precision and log marginal likelihood."""
        self.structure = structure
        for name in ("factor", "left", "right", "deviations"):
            own = posterior.get(name)
            self.register_buffer(name, None if own is None else own.to(self.weight).contiguous())
        for name, value in (("prior", prior), ("evidence", evidence)):
            self.register_buffer(name, torch.tensor(value, device=self.weight.device))

    # -- one draw ----------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        if self.side == "deviation":
            return self._outputs(self.variances(self.rows(x)).sqrt()).to(x.dtype)
        mean = product(self, x, self.weight, self.bias)
        if self.side is not None:
            variances = self._outputs(self.variances(self.rows(x)))
            if self.side == "probit":
                return (mean * torch.rsqrt(1 + PROBIT * variances)).to(mean.dtype)
            return mean + (self.point * variances.sqrt()).to(mean.dtype)
        return mean if self.expects else mean + self._outputs(self._deviation(self.rows(x))).to(mean.dtype)

    def _deviation(self, rows: Tensor) -> Tensor:
        """Return the deviation of one draw's outputs from the mean, `[..., F] -> [..., O]`.

        For "kron", multiply the rows by each factor: cheaper than forming the weights.
        """
        if self.structure != "kron":
            return rows @ self._change().mT
        change = self.deviations * self.normal(self.deviations.shape, like=self.deviations)
        return rows @ self.right @ change.mT @ self.left.mT

    def _change(self) -> Tensor:
        """Draw the difference from the mean of weights and bias, `[O, F]`."""
        if self.structure == "full":
            change: Tensor = self.factor @ self.normal((*self.factor.shape[:2], 1), like=self.factor)
            return change.reshape(-1, self.weight.shape[1] + (self.bias is not None))
        change = self.deviations * self.normal(self.deviations.shape, like=self.deviations)
        return self.left @ change @ self.right.mT if self.structure == "kron" else change

    def variances(self, rows: Tensor) -> Tensor:
        """Return the variance of each random output for features, `[..., F] -> [..., O]`."""
        if self.structure == "full":
            blocks = self.factor.reshape(-1, rows.shape[-1], self.factor.shape[-1])  # of each output
            return torch.stack([(rows @ block).square().sum(-1) for block in blocks], -1)
        if self.structure == "diag":
            return rows.square() @ self.deviations.square().mT
        return (rows @ self.right).square() @ self.deviations.square().mT @ self.left.square().mT

    def last(self, values: Tensor) -> Tensor:
        """Move the channels of the layer's inputs or outputs last."""
        return values.movedim(1, -1) if isinstance(self, nn.Conv2d) else values

    def rows(self, x: Tensor) -> Tensor:
        """Return the features `[..., F]` of the layer's inputs, with ones appended if there is a bias."""
        last = self.last(x).to(self.weight.dtype)
        return last if self.bias is None else F.pad(last, (0, 1), value=1.0)

    def _outputs(self, values: Tensor) -> Tensor:
        """Reshape numbers of the random outputs `[..., O]` to the layer's output, with 0 for the other outputs."""
        values = F.pad(values, (0, len(self.weight) - values.shape[-1]))
        return values.movedim(-1, 1) if isinstance(self, nn.Conv2d) else values

    # -- plain -------------------------------------------------------------------------------------------

    def draw_tensors(self) -> tuple[Tensor, Tensor | None]:
        """Draw a weight and a bias."""
        change = self._change().to(self.weight)
        change = F.pad(change, (0, 0, 0, len(self.weight) - len(change)))  # outputs that are not random
        inputs = self.weight.shape[1]
        bias = None if self.bias is None else self.bias + change[:, inputs]
        return self.weight + change[:, :inputs].reshape(self.weight.shape), bias

    def fold(self) -> nn.Module:
        weight, bias = self.draw_tensors()
        plain: Any = self._empty(product_kind(self), weight, bias is not None)
        plain.weight = nn.Parameter(weight.detach().clone(), self.weight.requires_grad)
        plain.bias = None if bias is None else nn.Parameter(bias.detach().clone(), self.bias.requires_grad)
        return cast("nn.Module", plain.train(self.training))

    @staticmethod
    def of(layer: Any) -> LaplaceLayer:
        """Convert a linear layer or 1x1 convolution of any class. The result has no posterior yet."""
        kind = LaplaceConv if kind_of(layer) is nn.Conv2d else LaplaceLinear
        weight = weight_of(layer).detach()
        weight = weight.mT if maps_of(layer)[0].inputs == 0 else weight
        bias = getattr(layer, "bias", None)
        trained = any(p.requires_grad for name, p in layer.named_parameters() if name != "bias")
        new: Any = LaplaceLayer._empty(kind, weight, bias is not None)
        new.weight = nn.Parameter(weight.clone(), trained)
        new.bias = copy.deepcopy(bias)
        others = {key: value for key, value in vars(layer).items() if key not in vars(new)}  # of a user's subclass
        vars(new).update(copy.deepcopy({key: value for key, value in others.items() if not isinstance(value, Tensor)}))
        return cast("LaplaceLayer", new)

    @staticmethod
    def _empty(kind: type[nn.Module], weight: Tensor, bias: bool) -> nn.Module:
        """Return an uninitialized layer of class `kind` for a weight of this shape."""
        outputs, inputs, *kernel = weight.shape
        return nn.utils.skip_init(
            kind, inputs, outputs, *kernel[:1], bias=bias, device=weight.device, dtype=weight.dtype
        )

    def reset_parameters(self) -> None:
        """Raise: fresh weights have no posterior."""
        if hasattr(self, "structure"):  # else the plain layer's constructor calls this
            raise ValueError("weights with a Laplace posterior cannot be reset: convert the network again")
        super().reset_parameters()  # type: ignore[misc]  # of the plain layer, the next base of each subclass

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, structure={self.structure!r}"


class LaplaceLinear(LaplaceLayer, nn.Linear):
    """A linear layer, `[B, ..., I] -> [B, ..., O]`, with a posterior over its weights."""


class LaplaceConv(LaplaceLayer, nn.Conv2d):
    """A 1x1 convolution, `[B, I, H, W] -> [B, O, H, W]`, with a posterior over its weights."""


class WithoutDraws(Sharing):
    """Wrapper of a `LaplaceLayer` that draws nothing and returns the probit approximation, or one point of the outputs.

    It shares the layer's registries, and `point` is one of its buffers.
    """

    shares = "layer"
    layer: LaplaceLayer

    def __init__(self, layer: LaplaceLayer, point: float | None = None) -> None:
        super().__init__(layer)
        layer.side = "probit" if point is None else "point"
        self.register_buffer("point", None if point is None else torch.tensor(point).to(layer.weight))

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.layer(x))


class WithNoise(Sharing):
    """Wrapper that adds noise variances to a network's values: `[B]` or `[B, D, ...] -> [B, 2D, ...]`.

    Its predictions are for `task="gaussian"`. It shares the registries of `network`, and adds the buffer
    `target_noise`: one variance `[]`, or one per output `[D]`.
    """

    shares = "network"
    network: nn.Module
    target_noise: Tensor

    def __init__(self, network: nn.Module, noise: Tensor) -> None:
        super().__init__(network)
        self.register_buffer("target_noise", noise)
        # `fuse` compares attributes but does not look into `network`, so keep its class name here.
        self.kind = type(network).__name__

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.network.training = self.training
        mean = call(self.network, kwargs or args)
        mean = mean.unsqueeze(1) if mean.dim() == 1 else mean
        return join_gaussian(mean, self.target_noise.to(mean.dtype).expand_as(mean))
