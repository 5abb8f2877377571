"""Output layers whose weights have a Gaussian posterior, and networks that tell the noise of their targets.

A weight matrix with its bias as a last column, `W [O, F]`, has mean `W*`, the trained one, and the covariance S:

    full     S = L L^T                                          W = W* + L eps
    kron     S = (Q_G x Q_A) diag(s^2) (Q_G x Q_A)^T            W = W* + Q_G (s * eps) Q_A^T
    diag     S = diag(s^2)                                      W = W* + s * eps

Where a likelihood treats outputs apart, as all but the softmax's do, the full covariance has a block for each output:
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

from multitudes.core.calling import call
from multitudes.core.copying import Sharing
from multitudes.core.draws.stochastic import Stochastic
from multitudes.core.tasks.gaussian import join_gaussian
from multitudes.surgery.affine import kind_of, maps_of, product, product_kind, weight_of

STRUCTURES = ("full", "kron", "diag")
"""From the richest to the smallest."""

PROBIT = math.pi / 8


class LaplaceLayer(Stochastic):
    """An output layer with a posterior: each draw has weights of its own, which serve the whole batch.

    `weight` and `bias` are the trained ones, the expectation. The posterior's tensors are buffers: `factor`, or `left`,
    `right` and `deviations`, or `deviations` alone. The first outputs are random, as many as the posterior is of; the
    variances of a Gaussian head are not. `prior` and `evidence` are the prior precision and the logarithm of the
    marginal likelihood.
    """

    noise = "weights"
    weight: Tensor
    bias: Any
    side: str | None = None
    """What a run gives instead of a draw: "probit", scaled logits; "deviation", the outputs' standard deviations; or
    "point", the mean and so many of them as the buffer `point` says."""

    structure: str
    prior: Tensor
    evidence: Tensor
    factor: Any
    left: Any
    right: Any
    deviations: Any
    point: Any

    def hold(self, structure: str, posterior: Mapping[str, Tensor], prior: float, evidence: float) -> None:
        """Take on a posterior: its structure, its tensors by name, and what it came from."""
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
        """The deviation of one draw's outputs from the mean, `[..., F] -> [..., O]`.

        Of factors, rows are multiplied with each: there are fewer of them than weights.
        """
        if self.structure != "kron":
            return rows @ self._change().mT
        change = self.deviations * self.normal(self.deviations.shape, like=self.deviations)
        return rows @ self.right @ change.mT @ self.left.mT

    def _change(self) -> Tensor:
        """The numbers that a draw adds to the weights and the bias, `[O, F]`."""
        if self.structure == "full":
            change: Tensor = self.factor @ self.normal((*self.factor.shape[:2], 1), like=self.factor)
            return change.reshape(-1, self.weight.shape[1] + (self.bias is not None))
        change = self.deviations * self.normal(self.deviations.shape, like=self.deviations)
        return self.left @ change @ self.right.mT if self.structure == "kron" else change

    def variances(self, rows: Tensor) -> Tensor:
        """The variance of each random output for features `[..., F] -> [..., O]`."""
        if self.structure == "full":
            blocks = self.factor.reshape(-1, rows.shape[-1], self.factor.shape[-1])  # of each output
            return torch.stack([(rows @ block).square().sum(-1) for block in blocks], -1)
        if self.structure == "diag":
            return rows.square() @ self.deviations.square().mT
        return (rows @ self.right).square() @ self.deviations.square().mT @ self.left.square().mT

    def last(self, values: Tensor) -> Tensor:
        """The layer's inputs or outputs with their channels last."""
        return values.movedim(1, -1) if isinstance(self, nn.Conv2d) else values

    def rows(self, x: Tensor) -> Tensor:
        """Features `[..., F]` of the layer's inputs, with a last one of ones for a bias."""
        last = self.last(x).to(self.weight.dtype)
        return last if self.bias is None else F.pad(last, (0, 1), value=1.0)

    def _outputs(self, values: Tensor) -> Tensor:
        """Put numbers for each random output, `[..., O]`, into the form of the layer's outputs; 0 for others."""
        values = F.pad(values, (0, len(self.weight) - values.shape[-1]))
        return values.movedim(-1, 1) if isinstance(self, nn.Conv2d) else values

    # -- plain -------------------------------------------------------------------------------------------

    def drawn(self) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias of one draw."""
        change = self._change().to(self.weight)
        change = F.pad(change, (0, 0, 0, len(self.weight) - len(change)))  # outputs that are not random
        inputs = self.weight.shape[1]
        bias = None if self.bias is None else self.bias + change[:, inputs]
        return self.weight + change[:, :inputs].reshape(self.weight.shape), bias

    def fold(self) -> nn.Module:
        weight, bias = self.drawn()
        plain: Any = self._empty(product_kind(self), weight, bias is not None)
        plain.weight = nn.Parameter(weight.detach().clone(), self.weight.requires_grad)
        plain.bias = None if bias is None else nn.Parameter(bias.detach().clone(), self.bias.requires_grad)
        return cast("nn.Module", plain.train(self.training))

    @staticmethod
    def of(layer: Any) -> LaplaceLayer:
        """From a linear layer or a convolution of one pixel, whatever its class, as yet without a posterior."""
        kind = LaplaceConv if kind_of(layer) is nn.Conv2d else LaplaceLinear
        weight = weight_of(layer).detach()
        weight = weight.mT if maps_of(layer)[0].inputs == 0 else weight
        bias = getattr(layer, "bias", None)
        learns = any(p.requires_grad for name, p in layer.named_parameters() if name != "bias")
        made: Any = LaplaceLayer._empty(kind, weight, bias is not None)
        made.weight = nn.Parameter(weight.clone(), learns)
        made.bias = copy.deepcopy(bias)
        kept = {key: held for key, held in vars(layer).items() if key not in vars(made)}  # of a user's subclass
        vars(made).update(copy.deepcopy({key: held for key, held in kept.items() if not isinstance(held, Tensor)}))
        return cast("LaplaceLayer", made)

    @staticmethod
    def _empty(kind: type[nn.Module], weight: Tensor, bias: bool) -> nn.Module:
        """A layer of a class, for a weight of this shape, without numbers."""
        outputs, inputs, *kernel = weight.shape
        return nn.utils.skip_init(
            kind, inputs, outputs, *kernel[:1], bias=bias, device=weight.device, dtype=weight.dtype
        )

    def reset_parameters(self) -> None:
        """Fresh weights have no posterior."""
        if hasattr(self, "structure"):  # else the plain layer's constructor asks
            raise ValueError("weights with a Laplace posterior cannot be initialised anew: convert the network again")
        super().reset_parameters()  # type: ignore[misc]  # the plain layer's, which each class puts behind this one

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, structure={self.structure!r}"


class LaplaceLinear(LaplaceLayer, nn.Linear):
    """A linear layer, `[B, ..., I] -> [B, ..., O]`, with a posterior of its weights."""


class LaplaceConv(LaplaceLayer, nn.Conv2d):
    """A convolution of one pixel, `[B, I, H, W] -> [B, O, H, W]`, with a posterior of its weights."""


class WithoutDraws(Sharing):
    """A layer with a posterior that draws nothing: its logits by the probit approximation, or one point of its outputs.

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
    """A network that predicts values, and tells the variance of their noise: `[B]` or `[B, D, ...] -> [B, 2D, ...]`.

    Its predictions are those of `task="gaussian"`. It shares the registries of its `network`, with one buffer more,
    `target_noise`: one variance `[]`, or one for each output `[D]`.
    """

    shares = "network"
    network: nn.Module
    target_noise: Tensor

    def __init__(self, network: nn.Module, noise: Tensor) -> None:
        super().__init__(network)
        self.register_buffer("target_noise", noise)
        # Networks that are fused must be alike, and `network` is not looked into.
        self.kind = type(network).__name__

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.network.training = self.training
        mean = call(self.network, kwargs or args)
        mean = mean.unsqueeze(1) if mean.dim() == 1 else mean
        return join_gaussian(mean, self.target_noise.to(mean.dtype).expand_as(mean))
