"""Attacks on the predictive mean of a multitude, or on a plain network.

- `fgsm`: one step along the sign of the gradient (Goodfellow et al., "Explaining and Harnessing Adversarial
  Examples", 2015); with `frequencies=`, limited to a frequency band (Park & Kim, "Blurs Behave Like Ensembles",
  2022, appendix E).
- `pgd`: many steps inside a ball, after a random start (Madry et al., "Towards Deep Learning Models Resistant to
  Adversarial Attacks", 2018).
- `iterative_fast_sign`: many steps of a fixed length along the sign of the gradient, without a ball around the input
  (Neklyudov et al., "Variance Networks: When Expectation Does Not Meet Your Expectations", 2019, section 6.3).

An attack increases the loss of the mean over members and draws, `-log (1/S sum_s p_s(y | x))`; a targeted attack
decreases it for the target class. Each step makes new draws, to attack the expectation over draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.base.checks import check_choice, check_count, check_number, check_seed
from multitudes.networks.calls import evaluating
from multitudes.networks.seeds import mixed
from multitudes.shift.arguments import Bounds, check_call, check_classes, check_labels, class_predictions
from multitudes.shift.frequency import band_at_full_size, check_band
from multitudes.shift.noise import generator_of, normal, uniform
from multitudes.tasks.predictive import Predictive


@dataclass(frozen=True)
class Attack:
    """Attacked images, and their predictions at each iteration.

    Iteration 0 is the given input, iteration k the result of k of K steps.

    Args:
        images: Attacked images `[B, ...]`, with the dtype and device of the input.
        predicted: Most probable class at each iteration, `[K + 1, B]`.
        entropies: Entropy of the predictive mean in nats at each iteration, `[K + 1, B]`.
        y: Classes to move away from, or to reach if `targeted`, `[B]`.
        targeted: True if the attack was to reach `y`.
        labels: True classes `[B]`, if known.

    Example:
        >>> y, predicted = torch.tensor([0, 1, 1, 1]), torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]])
        >>> attack = Attack(torch.zeros(4, 1), predicted, torch.zeros(2, 4), y, targeted=False, labels=y)
        >>> attack.accuracy
        tensor([0.7500, 0.5000])
        >>> attack.success_rate  # two of the three correct ones are now wrong
        tensor([0.0000, 0.6667])
    """

    images: Tensor
    predicted: Tensor
    entropies: Tensor
    y: Tensor
    targeted: bool
    labels: Tensor | None

    @property
    def accuracy(self) -> Tensor:
        """Share of correct predictions at each iteration, `[K + 1]`."""
        if self.labels is None:
            raise ValueError("accuracy needs the true classes: pass labels= to the targeted attack")
        return (self.predicted == self.labels).float().mean(1)

    @property
    def success_rate(self) -> Tensor:
        """Share of successful attacks at each iteration, `[K + 1]`, among inputs not yet in the desired state at first.

        Untargeted: share of the correct inputs that now have another class (attack success rate of Park & Kim, Table
        E.2). Targeted: share of the inputs with another class that now have `y`. NaN without such inputs.
        """
        reached = (self.predicted == self.y) if self.targeted else (self.predicted != self.y)
        return reached[:, ~reached[0]].float().mean(1)

    @property
    def entropy(self) -> Tensor:
        """Mean predictive entropy in nats at each iteration, `[K + 1]`."""
        return self.entropies.mean(1)

    @staticmethod
    def concat(parts: Iterable[Attack]) -> Attack:
        """Join the attacks on several batches, with the same number of steps and the same `targeted`."""
        parts = list(parts)
        if not parts:
            raise ValueError("parts must hold at least one Attack, got none")
        kinds = {(part.targeted, len(part.predicted) - 1, part.labels is None) for part in parts}
        if len(kinds) > 1:
            raise ValueError(
                f"parts must have the same (targeted, number of steps, labels is None), got {sorted(kinds)}"
            )
        labels = [part.labels for part in parts if part.labels is not None]
        return Attack(
            images=torch.cat([part.images for part in parts]),
            predicted=torch.cat([part.predicted for part in parts], 1),
            entropies=torch.cat([part.entropies for part in parts], 1),
            y=torch.cat([part.y for part in parts]),
            targeted=parts[0].targeted,
            labels=torch.cat(labels) if labels else None,
        )


def fgsm(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    epsilon: float,
    *,
    frequencies: tuple[float, float] | None = None,
    targeted: bool = False,
    labels: Tensor | None = None,
    draws: int | None = None,
    seed: int | None = None,
    bounds: Bounds = (0, 1),
) -> Attack:
    """Attack by the fast gradient sign method: `x + epsilon sign(grad L)`.

    With `frequencies=(low, high)`, only that band of the sign's spectrum is kept, scaled so that the largest change of
    an image is epsilon: `x + c F^-1(F(sign(grad L)) * M)`.

    Args:
        net: Multitude for classification or plain network `[B, ...] -> [B, C]`; it runs in evaluation mode.
        x: Images `[B, ...]` within the bounds.
        y: Classes to move away from, `[B]`; with `targeted`, classes to reach.
        epsilon: Radius of the l-inf ball, never exceeded even after rounding and clipping.
        frequencies: Band of the perturbation before clipping, in units of pi (see `frequency_noise`); None for all.
        targeted: True to reach the classes `y`.
        labels: True classes for a targeted attack, to compute its accuracy.
        draws: Draws per member to average the gradient over; by default the network's number.
        seed: Seed of the draws.
        bounds: Minimum and maximum of a pixel; None for no bounds.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> _ = net.weight.data.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
        >>> fgsm(net, torch.tensor([[0.5, 0.5]]), torch.tensor([0]), 0.25).images
        tensor([[0.2500, 0.7500]])
    """
    check_number("epsilon", epsilon, 0)
    if frequencies is not None:
        check_band(frequencies, x)

    def advance(images: Tensor, direction: Tensor) -> Tensor:
        change = direction.sign()
        if frequencies is not None:
            change = band_at_full_size(change, *frequencies)
        return _near(images, images + epsilon * change, epsilon, bounds)

    return _attack(net, x, y, 1, advance, None, targeted, labels, draws, seed, bounds)


def pgd(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    epsilon: float,
    steps: int = 10,
    step_size: float | None = None,
    norm: str = "linf",
    *,
    random_start: bool = True,
    targeted: bool = False,
    labels: Tensor | None = None,
    draws: int | None = None,
    seed: int | None = None,
    bounds: Bounds = (0, 1),
) -> Attack:
    """Attack by projected gradient descent: steps along the gradient, each projected to the ball around `x`.

    With `norm="linf"` a step is `step_size sign(grad L)`, with `norm="l2"` it is `step_size grad L / |grad L|_2`.

    Args:
        net: Network, as in `fgsm`; also `x`, `y`, `targeted`, `labels`, `draws` and `bounds`.
        epsilon: Radius of the ball, never exceeded even after rounding and clipping.
        steps: Number of steps.
        step_size: Length of a step; the default `2.5 epsilon / steps` can cross the ball.
        norm: `"linf"` or `"l2"`, for the ball and the steps.
        random_start: True to start from a random point of the ball instead of `x`.
        seed: Seed of the start and of the draws.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> _ = net.weight.data.copy_(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        >>> pgd(net, torch.tensor([[0.5, 0.5]]), torch.tensor([0]), 0.25, norm="l2", random_start=False).images
        tensor([[0.3500, 0.3000]])
    """
    check_number("epsilon", epsilon, 0)
    check_count("steps", steps)
    step = 2.5 * epsilon / steps if step_size is None else step_size
    check_number("step_size", step, 0)
    check_choice("norm", norm, ("linf", "l2"))
    near = _near if norm == "linf" else _near_l2

    def advance(images: Tensor, direction: Tensor) -> Tensor:
        unit = direction.sign() if norm == "linf" else _unit(direction)
        return near(x, images + step * unit, epsilon, bounds)

    def start() -> Tensor:
        return near(x, x + epsilon * _in_unit_ball(x, norm, seed), epsilon, bounds)

    return _attack(net, x, y, steps, advance, start if random_start else None, targeted, labels, draws, seed, bounds)


def iterative_fast_sign(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    step_size: float,
    steps: int = 10,
    *,
    targeted: bool = False,
    labels: Tensor | None = None,
    draws: int | None = None,
    seed: int | None = None,
    bounds: Bounds = (0, 1),
) -> Attack:
    """Attack by iterative fast sign: `x_{k+1} = x_k + step_size sign(grad L(x_k))`, clipped only to the bounds.

    Fig. 2 of the variance networks paper shows the `success_rate` and the `entropy` of such an attack with
    `targeted=True`, 10 draws of each network, and a step of 0.5 in unnamed pixel units. For units from 0 to 255, this
    is `step_size=0.5 / 255` here.

    Args:
        net: Network, as in `fgsm`; also `x`, `y`, `targeted`, `labels`, `draws`, `seed` and `bounds`.
        step_size: The paper's epsilon, the maximum change of a pixel in one step.
        steps: Number of steps.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> _ = net.weight.data.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
        >>> attack = iterative_fast_sign(net, torch.tensor([[0.5, 0.5]]), torch.tensor([0]), 0.125, 3, targeted=True)
        >>> attack.images
        tensor([[0.8750, 0.1250]])
    """
    check_number("step_size", step_size, 0)
    check_count("steps", steps)

    def advance(images: Tensor, direction: Tensor) -> Tensor:
        return _near(images, images + step_size * direction.sign(), step_size, bounds)

    return _attack(net, x, y, steps, advance, None, targeted, labels, draws, seed, bounds)


# -- the loop shared by all attacks --------------------------------------------------------------------------


def _attack(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: int,
    advance: Callable[[Tensor, Tensor], Tensor],
    start: Callable[[], Tensor] | None,
    targeted: bool,
    labels: Tensor | None,
    draws: int | None,
    seed: int | None,
    bounds: Bounds,
) -> Attack:
    """Run `advance(images, ascent direction)` for `steps` steps, from `start()` or from `x`."""
    check_call(net, x, bounds)
    check_labels("y", y, x)
    check_seed(seed)
    if labels is not None:
        check_labels("labels", labels, x)
        if not targeted:
            raise ValueError("labels are only for a targeted attack: an untargeted one has the true classes in y")
        labels = labels.to(x.device)
    y = y.to(x.device)
    # With a seed, each iteration has its own draws: with the same draws the attack would overfit these.
    seeds = [None if seed is None else mixed(seed, step) for step in range(steps + 1)]
    record: list[tuple[Tensor, Tensor]] = []

    def keep(predictions: Tensor) -> None:
        for name, classes in (("y", y), ("labels", labels)):
            if classes is not None:
                check_classes(name, classes, predictions.shape[2])
        p = Predictive(predictions.detach())
        record.append((p.label, p.entropy))

    with evaluating(net), torch.inference_mode(False), torch.no_grad():
        images = x.detach().clone()
        if start:
            keep(class_predictions(net, images, draws, seeds[0]))
            images = start()
        for step in range(steps):
            predictions, gradient = _gradient(net, images, y, draws, seeds[step])
            if len(record) == step:  # skip predictions at a random start: iteration 0 is the input
                keep(predictions)
            images = advance(images, -gradient if targeted else gradient)
        keep(class_predictions(net, images, draws, seeds[steps]))
    predicted, entropies = (torch.stack(each) for each in zip(*record, strict=True))
    return Attack(images, predicted, entropies, y, targeted, labels if targeted else y)


def _gradient(net: nn.Module, x: Tensor, y: Tensor, draws: int | None, seed: int | None) -> tuple[Tensor, Tensor]:
    """Return predictions for `x`, `[S, B, C]`, and the ascent direction of each input's loss, `[B, ...]`."""
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        predictions = class_predictions(net, x, draws, seed)
        check_classes("y", y, predictions.shape[2])
        odds = _odds(predictions, y)
        gradient = torch.autograd.grad(odds, x, allow_unused=True)[0] if odds.requires_grad else None
    if gradient is None:
        raise ValueError("net must be differentiable in x, got predictions without a gradient")
    if not bool(gradient.isfinite().all()):
        first = int((~gradient.flatten(1).isfinite()).any(1).nonzero()[0])
        raise ValueError(f"net must have finite gradients, got NaN or infinity for input {first}")
    return predictions, gradient


def _odds(predictions: Tensor, y: Tensor) -> Tensor:
    """Return `sum_b log (1 - p_b) / p_b`, where p_b is the mean over S of the probabilities of y_b, from `[S, B, C]`.

    Its gradient is that of `-log p_b` divided by `1 - p_b`: the same direction, even if p_b rounds to 1.
    """
    values = predictions.to(torch.promote_types(predictions.dtype, torch.float32))
    log_sum = F.log_softmax(values, 2).logsumexp(0)
    own = F.one_hot(y.long(), values.shape[2]).bool()
    return (log_sum.masked_fill(own, -math.inf).logsumexp(1) - log_sum[own]).sum()


# -- balls ---------------------------------------------------------------------------------------------------


def _near(x: Tensor, images: Tensor, epsilon: float, bounds: Bounds) -> Tensor:
    """Clip images to the bounds and to a difference from `x` of at most epsilon in every pixel, exactly."""
    radius = torch.tensor(epsilon, dtype=x.dtype, device=x.device)
    radius = torch.where(radius.double() > epsilon, radius.nextafter(torch.zeros_like(radius)), radius).double()
    exact = x.double()
    near = images.double().clamp(exact - radius, exact + radius).to(x.dtype)
    return _clip(torch.where((near.double() - exact).abs() > radius, torch.nextafter(near, x), near), bounds)


def _near_l2(x: Tensor, images: Tensor, epsilon: float, bounds: Bounds) -> Tensor:
    """Clip images to the bounds, and pull them to an l2 distance from `x` of at most epsilon, exactly."""
    images = _clip(images, bounds)
    # If clipping and rounding leave the ball, pull a little more each time, in the limit to x itself.
    slack = torch.finfo(x.dtype).eps / 2
    while True:
        change = images.double() - x.double()
        length = torch.linalg.vector_norm(change.flatten(1), dim=1).view(-1, *[1] * (x.dim() - 1))
        over = length > epsilon
        if not bool(over.any()):
            return images
        pulled = (x.double() + epsilon / length * max(0.0, 1 - slack) * change).to(x.dtype)
        images = _clip(torch.where(over, pulled, images), bounds)
        slack *= 2


def _clip(images: Tensor, bounds: Bounds) -> Tensor:
    return images if bounds is None else images.clamp(*bounds)


def _unit(direction: Tensor) -> Tensor:
    """Scale each image's direction to l2 norm 1; zero stays zero."""
    flat = direction.flatten(1)
    flat = flat / flat.abs().amax(1, keepdim=True).clamp(min=torch.finfo(flat.dtype).tiny)  # squares could underflow
    return F.normalize(flat, dim=1).view_as(direction)


def _in_unit_ball(x: Tensor, norm: str, seed: int | None) -> Tensor:
    """Draw uniform points from the unit ball, `[B, ...]`, on the CPU: the same for all devices."""
    generator, like = generator_of(seed), torch.empty(0, dtype=torch.promote_types(x.dtype, torch.float32))
    if norm == "linf":
        return uniform(x.shape, -1, 1, like, generator).to(x)
    directions = _unit(normal(x.shape, like, generator))
    radii = uniform((len(x),), 0, 1, like, generator) ** (1 / x[0].numel())
    return (radii.view(-1, *[1] * (x.dim() - 1)) * directions).to(x)
