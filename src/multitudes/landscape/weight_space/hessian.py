"""Largest curvatures of the loss, by Hessian-vector products.

Park and Kim, *Blurs behave like ensembles*, 2022, appendix A.3, Algorithm 1: the *Hessian max eigenvalue spectrum* is
the distribution of the top eigenvalues of mini-batch Hessians. The loss is the training loss with weight decay,
`L(w) = NLL(w) + weight_decay / 2 |w|^2`, on augmented data.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_choice, check_count, check_number, check_seed, needed
from multitudes.base.progress import ProgressBar
from multitudes.landscape.figures import COLOURS, figure
from multitudes.landscape.targets import shuffled
from multitudes.landscape.weight_space.weight_loss import WeightLoss, unit_direction
from multitudes.networks.seeds import mixed
from multitudes.training.batches import Batches

METHODS = ("lanczos", "power")

Product = Callable[[Tensor], Tensor]
"""Multiplication of a matrix by a vector, `[P] -> [P]`."""


@dataclass(frozen=True, eq=False)
class HessianSpectrum:
    """Top eigenvalues of the Hessians of mini-batches."""

    eigenvalues: Tensor
    """Eigenvalues of each mini-batch by decreasing magnitude, `[batches, top]`."""
    residuals: Tensor
    """Bounds `|H v - lambda v|` of their errors, `[batches, top]`."""

    @property
    def largest(self) -> Tensor:
        """First eigenvalue of each mini-batch, `[batches]`."""
        return self.eigenvalues[:, 0]

    def plot(self) -> Any:
        """Plot the distributions of the first eigenvalues (Fig. 8) and of all computed ones over mini-batches."""
        fig = figure("Hessian max eigenvalue spectrum", "eigenvalue", "density")
        shown = {"top 1": self.largest}
        if self.eigenvalues.shape[1] > 1:
            shown["all"] = self.eigenvalues.flatten()
        for (name, values), colour in zip(shown.items(), COLOURS, strict=False):
            bins = max(10, math.isqrt(len(values)))  # with few values, separate bars
            options = {"histnorm": "probability density", "nbinsx": bins, "opacity": 0.6, "marker_color": colour}
            fig.add_histogram(x=values.tolist(), name=name, **options)
        return fig.update_layout(barmode="overlay", showlegend=True)


def hessian_spectrum(
    network: nn.Module,
    data: Any,
    top: int = 5,
    batches: int | None = 8,
    weight_decay: float = 0.0,
    augment: Callable[[Any], Any] | None = None,
    method: str = "lanczos",
    *,
    batch_size: int = 128,
    tolerance: float = 1e-4,
    max_iterations: int = 1000,
    seed: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> HessianSpectrum:
    """Compute the top eigenvalues of the Hessian of each mini-batch (Algorithm 1).

    Args:
        network: Any network, or a multitude.
        data: `(x, y)`, which is shuffled and split into mini-batches, or an iterable of batches.
        top: Number k of eigenvalues per mini-batch, by largest magnitude.
        batches: Number of mini-batches; None for all.
        weight_decay: Weight decay of training, in the convention of PyTorch.
        augment: Augmentation of training, a function of inputs; applied once to each mini-batch.
        method: "lanczos" by SciPy, or "power" iteration with deflation.
        batch_size: Rows per mini-batch, if `data` is a pair of tensors.
        tolerance: Relative error of eigenvalues ("lanczos"), or ratio of residual to eigenvalue at which "power" stops.
        max_iterations: Maximum number of "power" iterations per eigenvalue.
        seed: Seed of shuffling, start vectors and draws.
        progress: Show progress on stderr. Default: on a terminal, after two seconds.
        options: `criterion`, and `draws` for layers that draw: 0 (default) uses expectations, 1 a separate draw for
            each mini-batch, as in the paper.

    Returns:
        Eigenvalues of each mini-batch, with `plot()`.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])  # mean squares: the Hessian is x^T x = diag(1, 4)
        >>> network = nn.Linear(2, 1, bias=False)
        >>> spectrum = hessian_spectrum(network, (x, torch.zeros(2, 1)), 1, criterion=nn.functional.mse_loss)
        >>> round(spectrum.largest.item(), 4)
        4.0
    """
    check_count("top", top)
    check_count("max_iterations", max_iterations)
    check_number("tolerance", tolerance, 0, above=True)
    check_choice("method", method, METHODS)
    check_count("batch_size", batch_size)
    check_seed(seed)
    if batches is not None:
        check_count("batches", batches)
    chosen = Batches(shuffled(data, seed), batch_size).on(torch.device("cpu"))
    weight_loss = WeightLoss(
        network, list(islice(chosen, batches)), weight_decay=weight_decay, augment=augment, seed=seed, **options
    )
    size = weight_loss.start.numel()
    if top >= size:
        raise ValueError(f"top must be below the number of weights, {size}, got {top}")
    found = []
    bar = ProgressBar(len(weight_loss.batches), progress, "mini-batches")
    try:
        for number in range(len(weight_loss.batches)):
            start = unit_direction(weight_loss.start, mixed(seed, number))
            hessian = partial(weight_loss.curvature, numbers=[number])
            if method == "lanczos":
                found.append(_lanczos_top(hessian, start, top, tolerance))
            else:
                found.append(_power_top(hessian, start, top, tolerance, max_iterations))
            bar.update(number + 1)
    finally:
        bar.clear()
    values, residuals = (torch.stack(own).cpu() for own in zip(*found, strict=True))
    if method == "power" and bool((residuals > tolerance * values.abs()).any()):
        rough = (residuals / values.abs()).max().item()
        warnings.warn(f"power iteration stopped early: residuals are up to {rough:.1g} of an eigenvalue", stacklevel=2)
    return HessianSpectrum(values, residuals)


def _lanczos_top(hessian: Product, start: Tensor, top: int, tolerance: float) -> tuple[Tensor, Tensor]:
    sparse = needed("scipy.sparse.linalg", "landscape", "method='lanczos'")

    def product(vector: Any) -> Any:
        return hessian(torch.as_tensor(vector).flatten().to(start)).double().cpu().numpy()

    if not hessian(start).any():  # no curvature; Lanczos cannot start
        return torch.zeros(top).to(start), torch.zeros(top).to(start)
    operator = sparse.LinearOperator((len(start), len(start)), matvec=product, dtype="float64")
    values, vectors = sparse.eigsh(operator, top, which="LM", v0=start.double().cpu().numpy(), tol=tolerance)
    order = abs(values).argsort()[::-1].copy()
    top_values, columns = (torch.tensor(part).to(start) for part in (values[order], vectors[:, order]))
    products = torch.stack([hessian(vector) for vector in columns.T], 1)
    return top_values, (products - top_values * columns).norm(dim=0)


def _power_top(hessian: Product, start: Tensor, top: int, tolerance: float, most: int) -> tuple[Tensor, Tensor]:
    """Find eigenvalues by power iteration with deflation."""
    found = start.new_zeros(len(start), 0)
    values, residuals = [], []

    def deflate(vector: Tensor) -> Tensor:
        return vector - found @ (found.T @ vector)

    for rank in range(top):
        vector = deflate(unit_direction(start, rank) + start)
        vector = vector / vector.norm()
        for _ in range(most):
            product = deflate(hessian(vector))
            value = vector @ product
            residual = (product - value * vector).norm()
            if bool(residual <= tolerance * value.abs()) or not bool(product.norm() > 0):
                break
            vector = product / product.norm()
        found = torch.column_stack([found, vector])
        values.append(value)
        residuals.append(residual)
    order = torch.stack(values).abs().argsort(descending=True)
    return torch.stack(values)[order], torch.stack(residuals)[order]
