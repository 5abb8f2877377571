"""Functions drawn from a prior on weights: dropout and patching.

Chang et al., *Ensemble model patching*, 2019, Fig. 3 and appendix D.1: functions of a network with one hidden layer,

    y = B + sum_h W_h sign(b_h + w_h x),   B, b ~ N(0, 20),   W, w ~ N(0, 5),   h = 1 ... 100,

are nearly a Gaussian process. Dropout sets W and w of each hidden unit to zero with probability 1/2. A unit without w
does not depend on x, so functions are rough and partly constant. Patching takes W, w, B and b from one of K = 5
independent components each, so functions are those of the Gaussian process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multitudes.base.checks import check_choice, check_count, check_number, check_seed
from multitudes.landscape.figures import add_line, figure

KINDS = ("gaussian", "dropout", "patching")


@dataclass(frozen=True, eq=False)
class FunctionPrior:
    """Functions `[F, G]` from a prior at the points `x [G]`."""

    kind: str
    x: Tensor
    functions: Tensor

    def plot(self) -> Any:
        """Plot the functions (Fig. 3)."""
        fig = figure(f"Functions from a {self.kind} prior", "x", "y")
        for number, values in enumerate(self.functions):
            add_line(fig, self.x, values, f"function {number}", number, mode="lines")
        return fig


def function_prior(
    kind: str = "patching",
    functions: int = 3,
    x: Tensor | None = None,
    *,
    hidden: int = 100,
    rate: float = 0.5,
    components: int = 5,
    weight_variance: float = 5.0,
    bias_variance: float = 20.0,
    seed: int = 0,
) -> FunctionPrior:
    """Draw independent functions from a prior on the weights of a network with one hidden layer (Fig. 3).

    Args:
        kind: "gaussian", "dropout" or "patching".
        functions: Number of functions F.
        x: Points to evaluate at, `[G]`. Default: 401 points from -10 to 10.
        hidden: Number of hidden units.
        rate: For "dropout", the probability that a weight is zero.
        components: For "patching", the number of components of each weight.
        weight_variance: Variance of W and w.
        bias_variance: Variance of B and b.
        seed: Seed of the functions.

    Returns:
        Functions `[F, G]`, with `plot()`.

    Example:
        >>> found = function_prior("dropout", functions=3)
        >>> found.x.shape, found.functions.shape
        (torch.Size([401]), torch.Size([3, 401]))
    """
    check_choice("kind", kind, KINDS)
    for name, count in (("functions", functions), ("hidden", hidden), ("components", components)):
        check_count(name, count)
    check_number("rate", rate, 0, below=1)
    check_number("weight_variance", weight_variance, 0)
    check_number("bias_variance", bias_variance, 0, above=True)
    check_seed(seed)
    x = torch.linspace(-10, 10, 401) if x is None else x.detach().cpu()
    if x.dim() != 1 or not x.is_floating_point() or not x.numel() or not bool(x.isfinite().all()):
        raise ValueError(f"x must be finite floating-point points [G], got {list(x.shape)} of {x.dtype}")
    generator = torch.Generator().manual_seed(seed)
    count = components if kind == "patching" else 1

    def draw(variance: float, *shape: int) -> Tensor:
        """Draw weights `[F, *shape]`, for each function from one of its components."""
        normal = torch.randn(functions, count, *shape, generator=generator) * variance**0.5
        return normal[torch.arange(functions), torch.randint(count, (functions,), generator=generator)]

    def mask() -> Tensor:
        if kind != "dropout":
            return torch.ones(functions, hidden)
        return (torch.rand(functions, hidden, generator=generator) >= rate).float()

    outer, inner = draw(bias_variance), draw(bias_variance, hidden)  # B, b
    last, first = (draw(weight_variance, hidden) * mask() for _ in range(2))  # W, w
    units = torch.sign(inner[:, None] + x.float()[None, :, None] * first[:, None])  # [F, G, H]
    return FunctionPrior(kind, x, outer[:, None] + torch.einsum("fgh,fh->fg", units, last))
