"""Sharpness of the loss, and variance of the loss of ensembles.

Park and Kim, *Blurs behave like ensembles*, 2022, appendix D.3: maximum increase of the loss within a radius (eq. 14,
after Foret et al., 2021), mean increase (eq. 16), and variance of the loss of an ensemble (eq. 27):

    sharpness_rho    = max_{|eps| <= rho} L(w + eps) - L(w)
    E[sharpness_rho] = E[max(L(w + eps), L(w)) - L(w) | |eps| <= rho]
    V[L]             = V[p] / (N mu^2 |D|)    for N draws
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_count, check_number, check_seed
from multitudes.ensemble.multitude import Multitude
from multitudes.landscape.figures import COLOURS, add_line, figure
from multitudes.landscape.targets import with_targets
from multitudes.landscape.weight_space.weight_loss import WeightLoss, unit_direction
from multitudes.networks.devices import device_in
from multitudes.networks.seeds import mixed
from multitudes.networks.stochastic import stochastic_layers

# -- sharpness ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sharpness:
    """Maximum increase of the loss `L(w)` within a radius, and the ascents to it."""

    value: float
    loss: float
    rho: float
    gains: Tensor
    """`L(w + eps) - L(w)` along the ascents, `[starts, steps]`."""

    def plot(self) -> Any:
        """Plot the ascents."""
        fig = figure(f"Sharpness at rho = {self.rho:g}", "step", "L(w + ε) − L(w)")
        for number, gains in enumerate(self.gains):
            add_line(fig, range(len(gains)), gains, f"start {number}", number, mode="lines")
        return fig


def sharpness(
    network: nn.Module, data: Any, rho: float = 0.05, steps: int = 20, starts: int = 2, *, seed: int = 0, **options: Any
) -> Sharpness:
    """Estimate `max_{|eps| <= rho} L(w + eps) - L(w)` (eq. 14) by gradient ascent on the sphere of radius `rho`.

    Each step is `eps <- rho g / |g|`, with the gradient g at `w + eps`. The result is a lower bound of the maximum,
    and at least 0.

    Args:
        network: Any network, or a multitude.
        data: `(x, y)` or an iterable of batches.
        rho: Radius.
        steps: Number of steps per ascent.
        starts: Number of ascents; the first one starts along the gradient, others in random directions.
        seed: Seed of directions and draws.
        options: `criterion`; `weight_decay` and `augment` as in training; `draws`, where 0 (default) uses the
            expectations of layers that draw.

    Returns:
        The maximum increase and the ascents, with `plot()`.

    Example:
        >>> network = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.zeros_(network.weight)
        >>> data = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)  # L(w) = 5 w^2
        >>> round(sharpness(network, data, rho=0.1, criterion=nn.functional.mse_loss).value, 4)
        0.05
    """
    check_number("rho", rho, 0, above=True)
    check_count("steps", steps)
    check_count("starts", starts)
    weight_loss = WeightLoss(network, data, seed=seed, **options)
    w = weight_loss.start
    loss = weight_loss.value(w)
    gains = torch.zeros(starts, steps)
    for start in range(starts):
        direction = weight_loss.gradient(w) if start == 0 else torch.zeros_like(w)
        for step in range(steps):
            if not bool(direction.norm() > 0):  # random start, or a flat place
                direction = unit_direction(w, mixed(seed, start))
            eps = rho * direction / direction.norm()
            gains[start, step] = weight_loss.value(w + eps) - loss
            direction = weight_loss.gradient(w + eps)
    return Sharpness(max(0.0, gains.max().item()), loss.item(), rho, gains)


@dataclass(frozen=True, eq=False)
class ExpectedSharpness:
    """Mean increase of the loss `L(w)`; decreases count as 0."""

    value: float
    standard_error: float
    loss: float
    losses: Tensor
    """`L(w + eps)`, `[samples]`."""

    def plot(self) -> Any:
        """Plot a histogram of the losses, and L(w)."""
        fig = figure(f"Expected sharpness {self.value:.3g}", "loss", "samples")
        fig.add_histogram(x=self.losses.tolist(), name="L(w + ε)", marker_color=COLOURS[0])
        fig.add_vline(x=self.loss, line_color=COLOURS[1], annotation_text="L(w)")
        return fig


def expected_sharpness(
    network: nn.Module, data: Any, rho: float | None = 0.05, samples: int = 64, *, seed: int = 0, **options: Any
) -> ExpectedSharpness:
    """Estimate `E[max(L(w + eps), L(w)) - L(w) | |eps| <= rho]` (eq. 16), with the standard error of the mean.

    Args:
        network: Any network, or a multitude.
        data: `(x, y)` or an iterable of batches.
        rho: Radius of the ball in which `eps` is uniform. None uses the draws of the network instead, as in the paper:
            a sample is the loss of the mean of `draws` draws (default 1), and `L(w)` is the mean of all (eq. 17).
        samples: Number of samples.
        seed: Seed of the samples.
        options: See `sharpness`.

    Returns:
        The mean increase and all losses, with `plot()`.
    Example:
        >>> network = nn.Linear(1, 1, bias=False)
        >>> data = torch.ones(1, 1), torch.ones(1, 1)
        >>> line = expected_sharpness(network, data, 0.3, 4000, criterion=lambda p, y: p.sum())  # L = w: E max(eps, 0)
        >>> abs(line.value - 0.3 / 4) < 4 * line.standard_error < 0.01
        True
    """
    check_count("samples", samples)
    if rho is not None:
        check_number("rho", rho, 0, above=True)
    elif not isinstance(network, Multitude) or not stochastic_layers(network.network) or options.get("draws") == 0:
        raise ValueError(f"rho=None needs a multitude that draws, got a {type(network).__name__} without draws")
    weight_loss = WeightLoss(network, data, seed=seed, **({"draws": 1} if rho is None else {}) | options)
    w = weight_loss.start
    losses = torch.zeros(samples, dtype=torch.float64)
    for sample in range(samples):
        own = mixed(seed, sample)
        if rho is None:
            weight_loss.seed = own
            losses[sample] = weight_loss.value(w)
        else:
            radius = rho * torch.rand((), generator=torch.Generator().manual_seed(own)).item() ** (1 / len(w))
            losses[sample] = weight_loss.value(w + radius * unit_direction(w, mixed(own, 0)))
    loss = losses.mean() if rho is None else weight_loss.value(w).double().cpu()
    gains = (losses - loss).clamp(min=0)
    error = gains.std().item() / samples**0.5 if samples > 1 else float("nan")
    return ExpectedSharpness(gains.mean().item(), error, loss.item(), losses)


# -- variance of the loss ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LossVariance:
    """Variances `V[L]` of the loss of ensembles of N draws, for N in `sizes [K]`, and the fit `constant / N`."""

    sizes: Tensor
    variances: Tensor
    constant: float
    """Constant of the fit `V[L] = constant / N`."""
    exponent: float
    """Exponent of the fit `V[L] ~ N^exponent`; -1 by eq. (27)."""
    predicted: float
    """Constant of eq. (27), `mean(V[p] / mu^2) / |D|`, for independent draws of each example."""

    def plot(self) -> Any:
        """Plot the variance against N, on logarithmic axes (Fig. D.3a)."""
        fig = figure("Variance of the loss", "draws N", "V[L]")
        add_line(fig, self.sizes, self.variances, "measured", mode="markers+lines")
        add_line(fig, self.sizes, self.constant / self.sizes, f"{self.constant:.2g} / N", 1, 1, "lines")
        return fig.update_xaxes(type="log").update_yaxes(type="log")


def loss_variance(
    net: Multitude, data: Any, sizes: Sequence[int] = (1, 2, 4, 8, 16, 32), draws: int = 512, *, seed: int = 0
) -> LossVariance:
    """Compute the variance of the loss `-mean log p^(N)` of ensembles of N draws, and fit `c / N` (Fig. D.3a, eq. 27).

    Args:
        net: A multitude that draws, for classification.
        data: `(x, y)` or an iterable of batches.
        sizes: Sizes N of ensembles.
        draws: Number of draws, split into as many ensembles of size N as possible.
        seed: Seed of the draws.

    Returns:
        Variances by size and the fit, with `plot()`.
    Example:
        >>> from multitudes import mc_dropout
        >>> net = mc_dropout(nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 3)))
        >>> law = loss_variance(net, (torch.randn(64, 8), torch.arange(64) % 3), draws=2048)
        >>> -1.2 < law.exponent < -0.8
        True
    """
    if not isinstance(net, Multitude) or not stochastic_layers(net.network) or net.reading.class_axis != 1:
        raise ValueError(f"net must be a multitude that draws, for classification, got a {type(net).__name__}")
    check_seed(seed)
    if len(set(sizes)) < 2 or max(check_count("sizes", size) for size in sizes) > check_count("draws", draws) // 2:
        raise ValueError(f"sizes must be two or more numbers, at most half of draws={draws}, got {sizes!r}")
    log_p = _log_confidences(net, data, draws, seed)
    ensembles = [log_p[: draws // size * size].unflatten(0, (-1, size)) for size in sizes]
    losses = [-(own.logsumexp(1) - math.log(own.shape[1])).mean(1) for own in ensembles]
    variances = torch.stack([loss.var() for loss in losses])
    # The logarithm of a variance over g ensembles has a variance of about 2 / (g - 1).
    trust = torch.tensor([len(loss) - 1 for loss in losses]).double()
    log_n, log_v = torch.tensor(sizes).double().log(), variances.log()
    trust = trust / trust.sum()
    centred = log_n - (trust * log_n).sum()
    exponent = (trust * centred * log_v).sum() / (trust * centred.square()).sum()
    p = log_p.exp()
    predicted = (p.var(0) / p.mean(0).square()).mean() / p.shape[1]
    constant = (trust * (log_v + log_n)).sum().exp()
    return LossVariance(torch.tensor(sizes), variances, constant.item(), exponent.item(), predicted.item())


@torch.no_grad()
def _log_confidences(net: Multitude, data: Any, draws: int, seed: int) -> Tensor:
    """Return the log-probability of the class of each example, `[draws, examples]`, float64 on the CPU."""
    parts = []
    for number, (x, y) in enumerate(with_targets(data, device_in(net))):
        if y.is_floating_point():
            raise ValueError("data must hold classes as targets: pass (x, y), or batches of inputs and classes")
        drawn = net.predict(x, draws=draws, seed=mixed(seed, number)).member_log_probs
        if drawn.shape[1:2] + drawn.shape[3:] != y.shape:
            raise ValueError(f"data has classes of shape {list(y.shape)} for predictions {list(drawn.shape)}")
        own = drawn.gather(2, y[None, :, None].expand(len(drawn), *y.shape[:1], 1, *y.shape[1:])).double().cpu()
        by_member = own.flatten(1).unflatten(0, (net.members, draws))
        parts.append(by_member.logsumexp(0) - math.log(net.members))
    return torch.cat(parts, 1)
