"""Curvature: the Hessian of a network's loss, known through its products with vectors alone.

Park & Kim, "Blurs Behave Like Ensembles" (2022), appendix A.3, Algorithm 1: the *Hessian max eigenvalue spectrum*
gathers the top eigenvalues of the Hessians of mini-batches. The loss is the one that training descends, the
negative log-likelihood with its weight decay, `L(w) = NLL(w) + weight_decay / 2 |w|^2`, on augmented data.

Ghorbani et al., "An Investigation into Neural Net Optimization via Hessian Eigenvalue Density" (2019): the density of
all eigenvalues of the Hessian of a whole set, by stochastic Lanczos quadrature. Hutchinson (1990): its trace.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp

from multitudes.batches import Batches
from multitudes.checks import check_count, check_number, check_seed, needed
from multitudes.landscape.figures import COLOURS, figure, graph_objects
from multitudes.landscape.sharpness import Objective, flattened, random_direction
from multitudes.multitude import Multitude
from multitudes.progress import ProgressBar
from multitudes.stochastic import mixed

__all__ = [
    "Hessian",
    "HessianSpectrum",
    "HessianTrace",
    "SpectralDensity",
    "hessian_spectrum",
    "hessian_trace",
    "spectral_density",
]

METHODS = ("lanczos", "power")


class Hessian:
    """The Hessian of an objective at the network's own weights, `[P, P]`, as a linear map of vectors.

    Its products are the forward derivative of the gradient; where an operation has none, and for multitudes of members
    or draws, the gradient is differentiated backwards a second time. `batches` are the numbers of those to look at.

    >>> data = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
    >>> hessian = Hessian(Objective(nn.Linear(1, 1, bias=False), data, nn.functional.mse_loss))  # L(w) = 5 w^2
    >>> hessian(torch.ones(1))
    tensor([10.])
    """

    def __init__(self, objective: Objective, batches: list[int] | None = None) -> None:
        self.objective, self.batches = objective, batches
        self.forwards = not isinstance(objective.network, Multitude)

    def __call__(self, vector: Tensor) -> Tensor:
        """`[P] -> [P]`."""
        objective = self.objective
        parts = objective.split(vector)
        with objective.ready(), torch.enable_grad():
            product = objective.mean(lambda number: self._product(number, parts).to(vector.dtype), self.batches)
        return product + objective.weight_decay * vector

    def _product(self, number: int, vector: dict[str, Tensor]) -> Tensor:
        objective = self.objective
        if self.forwards:
            try:
                slope = grad(lambda weights: objective.loss(number, weights))
                return flattened(jvp(slope, (objective.weights,), (vector,))[1].values())
            except (RuntimeError, ValueError, AttributeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                self.forwards = False
        leaves = {name: weight.clone().requires_grad_() for name, weight in objective.weights.items()}
        inputs = list(leaves.values())
        slopes = torch.autograd.grad(objective.loss(number, leaves), inputs, create_graph=True, materialize_grads=True)
        # A slope that depends on no weight has no curvature.
        curved = [(slope, part) for slope, part in zip(slopes, vector.values(), strict=True) if slope.requires_grad]
        if not curved:
            return torch.zeros_like(flattened(slopes))
        outputs, directions = zip(*curved, strict=True)
        return flattened(torch.autograd.grad(outputs, inputs, directions, materialize_grads=True))


# -- the max eigenvalue spectrum ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HessianSpectrum:
    """The top eigenvalues of the Hessians of mini-batches."""

    eigenvalues: Tensor
    """Of each mini-batch, those of largest magnitude first, `[batches, top]`."""
    residuals: Tensor
    """`|H v - lambda v|` for each: so near to `lambda` there is an exact eigenvalue, `[batches, top]`."""

    @property
    def largest(self) -> Tensor:
        """The first eigenvalue of each mini-batch, `[batches]`."""
        return self.eigenvalues[:, 0]

    def plot(self) -> Any:
        """The distribution of the first eigenvalues over mini-batches (Fig. 8), and of all that were computed."""
        fig = figure("Hessian max eigenvalue spectrum", "eigenvalue", "density")
        shown = {"top 1": self.largest}
        if self.eigenvalues.shape[1] > 1:
            shown["all"] = self.eigenvalues.flatten()
        for (name, values), colour in zip(shown.items(), COLOURS, strict=False):
            bins = max(10, math.isqrt(len(values)))  # few values are seen apart, not as one bar
            options = {"histnorm": "probability density", "nbinsx": bins, "opacity": 0.6, "marker_color": colour}
            fig.add_trace(graph_objects().Histogram(x=values.tolist(), name=name, **options))
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
    """The Hessian max eigenvalue spectrum (Algorithm 1): the top eigenvalues of each mini-batch's Hessian.

    Args:
        network: any network, or a multitude. Where layers draw, `draws=0` (by default) computes with expectations;
            `draws=1` gives each mini-batch a draw of its own, as in the paper.
        data: `(x, y)`, which is shuffled by `seed` and cut into mini-batches, or an iterable of batches.
        top: k, how many eigenvalues of each mini-batch; those of largest magnitude, as power iteration finds them.
        batches: how many mini-batches to look at; None for all.
        weight_decay: that of training, as PyTorch's optimizers count it.
        augment: the augmentation of training, from inputs to inputs; drawn once for each mini-batch.
        method: "lanczos" by SciPy, or "power" iteration with deflation.
        batch_size: the rows of a mini-batch, where `data` are two tensors.
        tolerance: "lanczos": the relative error of eigenvalues. "power": stop where the residual is this small against
            the eigenvalue, or after `max_iterations`.
        options: of `Objective`: `criterion`, `draws`, `batch_statistics`.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])  # mean squares: the Hessian is x^T x = diag(1, 4)
    >>> network = nn.Linear(2, 1, bias=False)
    >>> spectrum = hessian_spectrum(network, (x, torch.zeros(2, 1)), 1, criterion=nn.functional.mse_loss)
    >>> round(spectrum.largest.item(), 4)
    4.0
    """
    check_count("top", top)
    check_count("max_iterations", max_iterations)
    check_number("tolerance", tolerance, 0, above=True)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    chosen = _minibatches(data, batch_size, batches, seed)
    objective = Objective(network, chosen, weight_decay=weight_decay, augment=augment, seed=seed, **options)
    size = objective.start.numel()
    if top >= size:
        raise ValueError(f"top must be below the number of weights, {size}, got {top}")
    found = []
    hessian = Hessian(objective)
    bar = ProgressBar(len(objective.batches), progress, "mini-batches")
    try:
        for number in range(len(objective.batches)):
            start = random_direction(objective.start, mixed(seed, number))
            hessian.batches = [number]
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


def _minibatches(data: Any, batch_size: int, count: int | None, seed: int) -> list[Any]:
    """The first mini-batches; two tensors are shuffled and cut into equal parts of at most `batch_size` rows."""
    check_count("batch_size", batch_size)
    check_seed(seed)
    if count is not None:
        check_count("batches", count)
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        x, y = data
        if len(x) != len(y) or not len(x):
            raise ValueError(f"data must have one target for each of 1 or more inputs, got {len(y)} for {len(x)}")
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        parts = order.tensor_split(-(-len(x) // batch_size))
        data = ((x[part.to(x.device)], y[part.to(y.device)]) for part in parts)
    return list(islice(Batches(data).on(torch.device("cpu")), count))


def _lanczos_top(hessian: Hessian, start: Tensor, top: int, tolerance: float) -> tuple[Tensor, Tensor]:
    sparse = needed("scipy.sparse.linalg", "landscape", "method='lanczos'")

    def product(vector: Any) -> Any:
        return hessian(torch.as_tensor(vector).flatten().to(start)).double().cpu().numpy()

    if not hessian(start).any():  # no curvature at all, which Lanczos's method cannot start from
        return torch.zeros(top).to(start), torch.zeros(top).to(start)
    operator = sparse.LinearOperator((len(start), len(start)), matvec=product, dtype="float64")
    values, vectors = sparse.eigsh(operator, top, which="LM", v0=start.double().cpu().numpy(), tol=tolerance)
    order = abs(values).argsort()[::-1].copy()
    pairs = [(torch.tensor(values[n]).to(start), torch.tensor(vectors[:, n]).to(start)) for n in order]
    residuals = [(hessian(vector) - value * vector).norm() for value, vector in pairs]
    return torch.stack([value for value, _ in pairs]), torch.stack(residuals)


def _power_top(hessian: Hessian, start: Tensor, top: int, tolerance: float, most: int) -> tuple[Tensor, Tensor]:
    """Power iteration; what has been found is taken out of each vector (deflation)."""
    found: list[Tensor] = []
    values, residuals = [], []

    def deflated(vector: Tensor) -> Tensor:
        for other in found:
            vector = vector - (other @ vector) * other
        return vector

    for rank in range(top):
        vector = deflated(random_direction(start, rank) + start)
        vector = vector / vector.norm()
        for _ in range(most):
            product = deflated(hessian(vector))
            value = vector @ product
            residual = (product - value * vector).norm()
            if bool(residual <= tolerance * value.abs()) or not bool(product.norm() > 0):
                break
            vector = product / product.norm()
        found.append(vector)
        values.append(value)
        residuals.append(residual)
    order = torch.stack(values).abs().argsort(descending=True)
    return torch.stack(values)[order], torch.stack(residuals)[order]


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
