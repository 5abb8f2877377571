"""The functions that a prior on weights means: dropout against patching.

Chang et al., "Ensemble Model Patching" (2019), Fig. 3 and appendix D.1: functions of a network with one hidden layer,

    y = B + sum_h W_h sign(b_h + w_h x),   B, b ~ N(0, 20),   W, w ~ N(0, 5),   h = 1 ... 100,

nearly a Gaussian process. Dropout sets each hidden unit's W and w to zero with a probability of 1/2; a unit without
its w does not see x, so that functions are rough and constant in parts. Patching takes W, w, B and b each from one of
K = 5 independent components, and has the functions of the Gaussian process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multitudes.core.checks import check_count, check_number, check_seed
from multitudes.landscape.figures import SCALE, add_line, figure

__all__ = ["FunctionPrior", "Prior", "function_prior"]

KINDS = ("gaussian", "dropout", "patching")


@dataclass(frozen=True)
class Prior:
    """A prior on the weights of the network, and the covariance of its functions in closed form.

    `weight_variance` is that of W and w, `bias_variance` that of B and b.
    """

    kind: str = "patching"
    hidden: int = 100
    rate: float = 0.5
    components: int = 5
    weight_variance: float = 5.0
    bias_variance: float = 20.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        check_count("hidden", self.hidden)
        check_count("components", self.components)
        check_number("rate", self.rate, 0, below=1)
        check_number("weight_variance", self.weight_variance, 0)
        check_number("bias_variance", self.bias_variance, 0, above=True)

    def covariance(self, x: Tensor, other: Tensor) -> Tensor:
        """`Cov(y(x), y(x'))` of one function, over all there are, `[G, D], [K, D] -> [G, K]`.

        Signs of two normal variables of correlation r agree in the mean by `2 / pi arcsin r`. Where dropout has
        taken w away, with probability p, both see b alone and always agree; and it keeps W with probability `1 - p`.

        >>> x = torch.tensor([[0.0], [4.0]])
        >>> Prior("patching").covariance(x, x).round()
        tensor([[520., 168.],
                [168., 520.]])
        >>> Prior("dropout").covariance(x, x).round()
        tensor([[270., 182.],
                [182., 270.]])
        """
        weight, bias = self.weight_variance, self.bias_variance
        size, other_size = (bias + weight * points.square().sum(1) for points in (x, other))
        r = (bias + weight * x @ other.T) / (size[:, None] * other_size).sqrt()
        agreement = 2 / math.pi * torch.arcsin(r.clamp(-1, 1))
        p = self.rate if self.kind == "dropout" else 0.0
        return bias + self.hidden * (1 - p) * weight * (p + (1 - p) * agreement)

    def sample(self, x: Tensor, functions: int, seed: int = 0, shared: bool = False) -> Tensor:
        """Functions at `x [G, D]`, `[F, G]`; each with Gaussian weights of its own, or with `shared` ones."""
        generator = torch.Generator().manual_seed(seed)
        networks = 1 if shared else functions
        count = self.components if self.kind == "patching" else 1

        def drawn(variance: float, *shape: int) -> Tensor:
            """Weights `[functions, *shape]`: of each network's components, one is taken for each function."""
            normal = torch.randn(networks, count, *shape, generator=generator) * variance**0.5
            taken = torch.randint(count, (functions,), generator=generator)
            return normal[torch.arange(functions) % networks, taken]

        def kept() -> Tensor:
            rate = self.rate if self.kind == "dropout" else 0.0
            return (torch.rand(functions, self.hidden, generator=generator) >= rate).float()

        outer = drawn(self.bias_variance)  # B
        inner = drawn(self.bias_variance, self.hidden)  # b
        last = drawn(self.weight_variance, self.hidden) * kept()  # W
        first = drawn(self.weight_variance, self.hidden, x.shape[1]) * kept()[:, :, None]  # w
        units = torch.sign(inner[:, None] + torch.einsum("gd,fhd->fgh", x, first))
        return outer[:, None] + torch.einsum("fgh,fh->fg", units, last)


@dataclass(frozen=True, eq=False)
class FunctionPrior:
    """Functions drawn from a prior."""

    prior: Prior
    x: Tensor
    """Where, `[G, D]`."""
    functions: Tensor
    """`[F, G]`."""

    def plot(self) -> Any:
        """The functions over a line, or the first of them over a plane (Fig. 3)."""
        title = f"Functions from a {self.prior.kind} prior"
        if self.x.shape[1] == 1:
            fig = figure(title, "x", "y")
            for number, values in enumerate(self.functions):
                add_line(fig, self.x[:, 0], values, f"function {number}", number, mode="lines")
            return fig
        fig = figure(title, "x₁", "x₂")
        marker = {"color": self.functions[0].tolist(), "colorscale": SCALE, "symbol": "square", "showscale": True}
        return fig.add_scatter(x=self.x[:, 0].tolist(), y=self.x[:, 1].tolist(), mode="markers", marker=marker)


def function_prior(
    kind: str = "patching",
    functions: int = 3,
    x: Tensor | None = None,
    *,
    dimensions: int = 1,
    seed: int = 0,
    shared: bool = False,
    **settings: Any,
) -> FunctionPrior:
    """Functions that a prior on the weights of a network with one hidden layer means (Fig. 3).

    Args:
        kind: "gaussian", "dropout" or "patching".
        functions: how many to draw.
        x: where, `[G]` or `[G, D]`; by default 401 points from -10 to 10, or a 41 x 41 grid with `dimensions=2`.
        dimensions: of x, 1 or 2, where it is not given.
        seed: the functions'.
        shared: whether the functions are draws of one network, with masks or components of their own; otherwise each
            has Gaussian weights of its own, and they come independently from the prior.
        settings: of `Prior`: `hidden`, `rate`, `components`, `weight_variance`, `bias_variance`.

    >>> found = function_prior("dropout", functions=3)
    >>> found.x.shape, found.functions.shape
    (torch.Size([401, 1]), torch.Size([3, 401]))
    """
    prior = Prior(kind, **settings)
    check_count("functions", functions)
    check_seed(seed)
    if x is None:
        if dimensions not in (1, 2):
            raise ValueError(f"dimensions must be 1 or 2, got {dimensions!r}")
        side = torch.linspace(-10, 10, 401 if dimensions == 1 else 41)
        x = torch.cartesian_prod(*[side] * dimensions)
    x = x[:, None] if x.dim() == 1 else x
    if x.dim() != 2 or not x.is_floating_point() or not x.numel() or not bool(x.isfinite().all()):
        raise ValueError(f"x must be finite floating-point points [G] or [G, D], got {list(x.shape)} of {x.dtype}")
    return FunctionPrior(prior, x, prior.sample(x.detach().cpu().float(), functions, seed, shared))
