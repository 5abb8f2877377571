"""All eigenvalues of the Hessian of a whole set of data: their density, and their sum.

Ghorbani et al., "An Investigation into Neural Net Optimization via Hessian Eigenvalue Density" (2019): the density by
stochastic Lanczos quadrature. Hutchinson (1990): the trace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.checks import check_count, check_number
from multitudes.core.progress import ProgressBar
from multitudes.core.seeding import mixed
from multitudes.landscape.figures import figure, graph_objects
from multitudes.landscape.hessian import Hessian
from multitudes.landscape.objective import Objective

__all__ = ["HessianTrace", "SpectralDensity", "hessian_trace", "signs", "spectral_density"]

# -- the density of all eigenvalues ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SpectralDensity:
    """How the eigenvalues of a Hessian are distributed, as a density over a grid; it integrates to 1."""

    grid: Tensor
    """Eigenvalues, `[G]`."""
    density: Tensor
    """`[G]`: a Gaussian of width `sigma` around each node."""
    sigma: float
    nodes: Tensor
    """Of the quadrature, `[N]`."""
    weights: Tensor
    """Of the nodes, `[N]`; they add up to 1."""

    def moment(self, order: int) -> float:
        """The mean of the eigenvalues' powers, an estimate of `trace(H^order) / P`."""
        return (self.weights * self.nodes**order).sum().item()

    def plot(self) -> Any:
        """The density, on a logarithmic axis."""
        fig = figure("Hessian eigenvalue density", "eigenvalue", "density")
        fig.add_trace(graph_objects().Scatter(x=self.grid.tolist(), y=self.density.tolist(), mode="lines"))
        peak = math.log10(max(self.density.max().item(), 1e-300))
        return fig.update_yaxes(type="log", range=[peak - 8, peak + 0.5])


def spectral_density(
    network: nn.Module,
    data: Any,
    steps: int = 64,
    probes: int = 4,
    sigma: float | None = None,
    points: int = 1024,
    *,
    seed: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> SpectralDensity:
    """The density of the eigenvalues of the Hessian of the mean loss over all of `data`, by Lanczos quadrature.

    From each of `probes` random vectors, `steps` steps of Lanczos's method give a small tridiagonal matrix, whose
    eigenvalues and first components are nodes and weights of a Gaussian quadrature of the density. It keeps `steps`
    vectors as long as the weights. `sigma` is the width of the smoothing, by default a hundredth of the spectrum.
    `options` are those of `Objective`: `criterion`, `weight_decay`, `augment`, `draws`, `batch_statistics`.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])  # mean squares: the eigenvalues are 1 and 4
    >>> network = nn.Linear(2, 1, bias=False)
    >>> density = spectral_density(network, (x, torch.zeros(2, 1)), criterion=nn.functional.mse_loss)
    >>> round(density.moment(1), 3), round(torch.trapezoid(density.density, density.grid).item(), 3)
    (2.5, 1.0)
    """
    check_count("steps", steps)
    check_count("probes", probes)
    check_count("points", points)
    if sigma is not None:
        check_number("sigma", sigma, 0, above=True)
    hessian = Hessian(objective := Objective(network, data, seed=seed, **options))
    found = []
    bar = ProgressBar(probes, progress, "probes")
    try:
        for probe in range(probes):
            found.append(_quadrature(hessian, signs(objective.start, mixed(seed, probe)), steps))
            bar.update(probe + 1)
    finally:
        bar.clear()
    nodes = torch.cat([own for own, _ in found])
    weights = torch.cat([own for _, own in found]) / probes
    low, high = nodes.min().item(), nodes.max().item()
    width = sigma or 0.01 * max(high - low, 0.01 * abs(high), 1e-12)
    grid = torch.linspace(low - 6 * width, high + 6 * width, points, dtype=torch.float64)
    bells = torch.exp(-0.5 * ((grid[:, None] - nodes) / width) ** 2) / (width * math.sqrt(2 * math.pi))
    return SpectralDensity(grid, bells @ weights, width, nodes, weights)


def signs(like: Tensor, seed: int) -> Tensor:
    """A vector of random signs, `[P]`; a seed gives the same one on every device."""
    bits = torch.randint(2, like.shape, generator=torch.Generator().manual_seed(seed))
    return (2 * bits - 1).to(like)


def _quadrature(hessian: Hessian, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the spectral measure of `start`, in float64 on the CPU."""
    basis = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(steps, len(start))):
        product = hessian(basis[-1])
        diagonal.append((basis[-1] @ product).item())
        for _ in range(2):  # twice is enough (Parlett): rounding would bring found directions back in
            for vector in basis:
                product = product - (vector @ product) * vector
        length = product.norm().item()
        if length <= torch.finfo(start.dtype).eps * max(map(abs, [*diagonal, *beside])):
            break  # what is left is rounding: the quadrature is exact
        beside.append(length)
        basis.append(product / length)
    beside = beside[: len(diagonal) - 1]
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for row, value in enumerate(beside):
        matrix[row, row + 1] = matrix[row + 1, row] = value
    nodes, vectors = torch.linalg.eigh(matrix)
    return nodes, vectors[0].square()


# -- the trace ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HessianTrace:
    """The sum of the eigenvalues, with the standard error of its estimate."""

    value: float
    standard_error: float
    samples: Tensor
    """`v^T H v`, `[probes]`."""

    def plot(self) -> Any:
        """The running mean of the samples."""
        fig = figure(f"Trace of the Hessian: {self.value:.4g} ± {self.standard_error:.2g}", "probes", "trace")
        count = torch.arange(1, len(self.samples) + 1)
        go = graph_objects()
        fig.add_trace(go.Scatter(x=count.tolist(), y=self.samples.tolist(), mode="markers", name="one probe"))
        mean = self.samples.cumsum(0) / count
        fig.add_trace(go.Scatter(x=count.tolist(), y=mean.tolist(), mode="lines", name="mean"))
        return fig


def hessian_trace(
    network: nn.Module, data: Any, probes: int = 32, *, seed: int = 0, progress: bool | None = None, **options: Any
) -> HessianTrace:
    """The trace of the Hessian of the mean loss over all of `data`, by Hutchinson's estimate.

    `trace(H) = E[v^T H v]` for random signs v. `options` are those of `Objective`.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])  # mean squares: the eigenvalues are 1 and 4
    >>> network = nn.Linear(2, 1, bias=False)
    >>> hessian_trace(network, (x, torch.zeros(2, 1)), criterion=nn.functional.mse_loss).value
    5.0
    """
    if check_count("probes", probes) < 2:
        raise ValueError(f"probes must be 2 or more, so that there is a standard error, got {probes}")
    hessian = Hessian(objective := Objective(network, data, seed=seed, **options))
    samples = torch.zeros(probes, dtype=torch.float64)
    bar = ProgressBar(probes, progress, "probes")
    try:
        for probe in range(probes):
            vector = signs(objective.start, mixed(seed, probe))
            samples[probe] = vector @ hessian(vector)
            bar.update(probe + 1)
    finally:
        bar.clear()
    return HessianTrace(samples.mean().item(), samples.std().item() / probes**0.5, samples)
