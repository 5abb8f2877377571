"""The loss as a function of a network's weights (`Objective`): how sharp it is, and how much it fluctuates.

Park & Kim, "Blurs Behave Like Ensembles" (2022), appendix D.3: what the loss gains within a radius (eq. 14, after Foret
et al., 2021), what it gains there in the mean (eq. 16), and how the variance of an ensemble's loss falls (eq. 27):

    sharpness_rho    = max_{|eps| <= rho} L(w + eps) - L(w)
    E[sharpness_rho] = E[max(L(w + eps), L(w)) - L(w) | |eps| <= rho]
    V[L]             = V[p] / (N mu^2 |D|)    for N draws
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from multitudes.batches import Batches
from multitudes.batchnorm import norms
from multitudes.calling import Input, Told, call_with, moved, plain_attention, slots, told_in_terms_of
from multitudes.checks import check_count, check_number, check_seed
from multitudes.landscape.figures import COLOURS, figure, graph_objects
from multitudes.multitude import Criterion, Multitude, evaluating, plain
from multitudes.predictive import averaged, gaussian_nll
from multitudes.stochastic import expecting, mixed, stochastic_layers
from multitudes.surgery import seeded

__all__ = [
    "ExpectedSharpness",
    "LossVariance",
    "Objective",
    "Sharpness",
    "expected_sharpness",
    "loss_variance",
    "sharpness",
]

CRITERIA: dict[str, Criterion] = {"classification": F.cross_entropy, "regression": F.mse_loss, "gaussian": gaussian_nll}


# -- the loss as a function of the weights -----------------------------------------------------------------


@dataclass(eq=False)
class Objective:
    """The loss of a network on data, as a function of its trainable weights, one vector `w` `[P]`.

    `L(w) = criterion + weight_decay / 2 |w|^2`, with cross entropy as the criterion, or what a multitude's task
    asks for. The batches are read, and their inputs augmented, once, so that every evaluation sees the same data, and
    kept on the CPU. The loss of several batches is the mean over their examples. Where layers draw, `draws=0` computes
    with expectations; otherwise each batch has draws of its own, the same ones whenever it is evaluated, and the
    loss is that of their averaged prediction. Members' losses are added or averaged as in `net.loss`. Batch norm uses
    its running statistics, or with `batch_statistics` the batch's own, as in training; the running ones never move.

    >>> network = nn.Linear(1, 1, bias=False)
    >>> data = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
    >>> objective = Objective(network, data, F.mse_loss)  # L(w) = (w^2 + 9 w^2) / 2
    >>> objective.value(torch.tensor([2.0])), objective.gradient(torch.tensor([2.0]))
    (tensor(20.), tensor([20.]))
    """

    network: nn.Module
    data: Any
    criterion: Criterion | None = None
    weight_decay: float = 0.0
    augment: Callable[[Any], Any] | None = None
    draws: int = 0
    seed: int = 0
    batch_statistics: bool = False
    batches: list[tuple[Input, Tensor]] = field(init=False, default_factory=list)
    sizes: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._check()
        task = self.network.task if isinstance(self.network, Multitude) else "classification"
        self.criterion = CRITERIA[task] if self.criterion is None else self.criterion
        ignores = self.criterion is F.cross_entropy  # it leaves targets of -100 out of its mean
        if self.draws == 0:
            self.network = plain(self.network)  # which torch.func can differentiate
        self.weights = {name: p.detach() for name, p in self.network.named_parameters() if p.requires_grad}
        if not self.weights:
            raise ValueError(f"network ({type(self.network).__name__}) has no parameter that requires a gradient")
        self.device = next(iter(self.weights.values())).device
        for number, (x, y) in enumerate(Batches(self.data).on(torch.device("cpu"))):
            if y is None:
                raise ValueError("data must hold targets: pass (x, y), or batches of inputs and targets")
            with seeded(mixed(self.seed, number)):
                self.batches.append((x if self.augment is None else self.augment(x), y))
            counted = y != -100 if ignores and not y.is_floating_point() else torch.ones_like(y)
            self.sizes.append(int(counted.sum()))
        if not sum(self.sizes):
            raise ValueError("data must hold at least one target, got none")
        loss = self.value(self.start)  # an input that does not fit says so here, in plain words
        if not bool(loss.isfinite()):
            raise ValueError(f"the loss of network on data must be finite, got {loss.item()}")

    def _check(self) -> None:
        if not isinstance(self.network, nn.Module):
            raise ValueError(f"network must be an nn.Module, got {type(self.network).__name__}")
        check_number("weight_decay", self.weight_decay, 0)
        check_seed(self.seed)
        if isinstance(self.draws, bool) or not isinstance(self.draws, int) or self.draws < 0:
            raise ValueError(f"draws must be a whole number, 0 for expectations, got {self.draws!r}")
        if self.draws and not isinstance(self.network, Multitude):
            raise ValueError(f"draws={self.draws} is for a multitude, got a {type(self.network).__name__}")

    @property
    def start(self) -> Tensor:
        """The network's own weights, `[P]`."""
        dtype = torch.promote_types(next(iter(self.weights.values())).dtype, torch.float32)
        return torch.cat([weight.flatten().to(dtype) for weight in self.weights.values()])

    def value(self, w: Tensor, numbers: list[int] | None = None) -> Tensor:
        """`L(w)`, a scalar, on all batches or on those of these numbers."""
        with self.ready(), torch.no_grad():
            loss = self.mean(lambda number: self.loss(number, self.split(w)), numbers)
        return loss + 0.5 * self.weight_decay * w.square().sum()

    def gradient(self, w: Tensor, numbers: list[int] | None = None) -> Tensor:
        """The gradient of `L` at `w`, `[P]`."""

        def of(number: int) -> Tensor:
            leaves = {name: part.detach().requires_grad_() for name, part in self.split(w).items()}
            loss = self.loss(number, leaves)
            return flattened(torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)).to(w.dtype)

        with self.ready(), torch.enable_grad():
            return self.mean(of, numbers) + self.weight_decay * w

    def mean(self, of: Callable[[int], Tensor], numbers: list[int] | None = None) -> Tensor:
        """The mean over examples of what `of(number)` gives for each batch."""
        chosen = [n for n in (range(len(self.batches)) if numbers is None else numbers) if self.sizes[n]]
        total = sum(self.sizes[number] for number in chosen)
        mean = of(chosen[0]) * (self.sizes[chosen[0]] / total)
        for number in chosen[1:]:
            mean += of(number) * (self.sizes[number] / total)
        return mean

    def loss(self, number: int, weights: dict[str, Tensor]) -> Tensor:
        """The criterion on one batch, with these weights in the place of the network's; call it inside `ready`."""
        x, y = moved(self.batches[number][0], self.device), self.batches[number][1].to(self.device)
        network, criterion = self.network, self.criterion or F.cross_entropy
        with told_in_terms_of(x):
            if not isinstance(network, Multitude):
                return _scalar(criterion(call_with(network, weights, x), y))
            options = {"draws": self.draws, "seed": mixed(self.seed, number)}
            own, places = dict(network.named_parameters()), slots(network)[0]
            placed = {id(own[name]): weight for name, weight in weights.items()}
            tensors: Any = {place: placed[id(p)] for place, p in places.items() if id(p) in placed}
            predictions = functional_call(network, tensors, (x,), options, tie_weights=False)
            by_member = predictions.unflatten(0, (network.members, -1))
            losses = torch.stack([_scalar(criterion(averaged(drawn, network.task), y)) for drawn in by_member])
            return losses.sum() if network.independent else losses.mean()

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector `[P]` by the weights' names, in their shapes and dtypes."""
        parts = vector.to(self.device).split([weight.numel() for weight in self.weights.values()])
        return {
            name: part.view(weight.shape).to(weight.dtype)
            for (name, weight), part in zip(self.weights.items(), parts, strict=True)
        }

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, the network runs as the objective says; afterwards it is as it was."""
        layers = norms(self.network) if self.batch_statistics else {}
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.network))
            if self.draws == 0:
                stack.enter_context(expecting(self.network))
            stack.enter_context(plain_attention())
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # fused attention has no second derivatives
            for layer in layers.values():
                layer.training, layer.track_running_stats = True, False
            try:
                yield
            finally:
                for layer in layers.values():
                    layer.track_running_stats = True


def flattened(tensors: Iterable[Tensor]) -> Tensor:
    """Tensors as one vector, `[P]`, without their history."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _scalar(loss: Tensor) -> Tensor:
    if loss.dim():
        raise Told(f"criterion must give one number, the batch's mean, got shape {list(loss.shape)}")
    return loss


# -- sharpness ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sharpness:
    """What the loss `L(w)` gains at most within a radius, and how the ascents found it."""

    value: float
    loss: float
    rho: float
    gains: Tensor
    """`L(w + eps) - L(w)` along the ascents, `[starts, steps]`."""

    def plot(self) -> Any:
        """The ascents."""
        fig = figure(f"Sharpness at rho = {self.rho:g}", "step", "L(w + ε) − L(w)")
        for number, gains in enumerate(self.gains):
            fig.add_trace(graph_objects().Scatter(y=gains.tolist(), mode="lines", name=f"start {number}"))
        return fig


def sharpness(
    network: nn.Module, data: Any, rho: float = 0.05, steps: int = 20, starts: int = 2, *, seed: int = 0, **options: Any
) -> Sharpness:
    """`max_{|eps| <= rho} L(w + eps) - L(w)` (eq. 14), by ascent over the sphere of radius `rho`.

    Each step goes as far as it may along the gradient, `eps <- rho g / |g|` with g the gradient at `w + eps`: on a
    convex loss it never descends, and around the minimum of a quadratic one it is power iteration. The first start is
    the gradient at w, the others are random directions. The result is a lower bound of the maximum, and 0 or more.

    `options` are those of `Objective`: `criterion`, `weight_decay`, `augment`, `draws`, `batch_statistics`, ...

    >>> network = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(network.weight)
    >>> data = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)  # L(w) = 5 w^2
    >>> round(sharpness(network, data, rho=0.1, criterion=F.mse_loss).value, 4)
    0.05
    """
    check_number("rho", rho, 0, above=True)
    check_count("steps", steps)
    check_count("starts", starts)
    objective = Objective(network, data, seed=seed, **options)
    w = objective.start
    loss = objective.value(w)
    gains = torch.zeros(starts, steps)
    for start in range(starts):
        direction = objective.gradient(w) if start == 0 else torch.zeros_like(w)
        for step in range(steps):
            if not bool(direction.norm() > 0):  # where it is flat, every direction is as good
                direction = random_direction(w, mixed(seed, start))
            eps = rho * direction / direction.norm()
            gains[start, step] = objective.value(w + eps) - loss
            direction = objective.gradient(w + eps)
    return Sharpness(max(0.0, gains.max().item()), loss.item(), rho, gains)


@dataclass(frozen=True, eq=False)
class ExpectedSharpness:
    """What the loss `L(w)` gains in the mean, where it gains."""

    value: float
    standard_error: float
    loss: float
    losses: Tensor
    """`L(w + eps)`, `[samples]`."""

    def plot(self) -> Any:
        """The losses around, and the loss itself."""
        fig = figure(f"Expected sharpness {self.value:.3g}", "loss", "samples")
        fig.add_trace(graph_objects().Histogram(x=self.losses.tolist(), name="L(w + ε)", marker_color=COLOURS[0]))
        fig.add_vline(x=self.loss, line_color=COLOURS[1], annotation_text="L(w)")
        return fig


def expected_sharpness(
    network: nn.Module,
    data: Any,
    rho: float | None = 0.05,
    samples: int = 64,
    *,
    seed: int = 0,
    **options: Any,
) -> ExpectedSharpness:
    """`E[max(L(w + eps), L(w)) - L(w) | |eps| <= rho]` (eq. 16), with the standard error of the mean.

    `eps` is uniform in the ball of radius `rho`. With `rho=None` the randomness is the network's own, as in the paper:
    each sample is the loss of a draw (of `draws` averaged ones, 1 by default), and `L(w)` the mean of all (eq. 17).

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
    objective = Objective(network, data, seed=seed, **({"draws": 1} if rho is None else {}) | options)
    w = objective.start
    losses = torch.zeros(samples, dtype=torch.float64)
    for sample in range(samples):
        own = mixed(seed, sample)
        if rho is None:
            objective.seed = own
            losses[sample] = objective.value(w)
        else:
            radius = rho * torch.rand((), generator=torch.Generator().manual_seed(own)).item() ** (1 / len(w))
            losses[sample] = objective.value(w + radius * random_direction(w, mixed(own, 0)))
    loss = losses.mean() if rho is None else objective.value(w).double().cpu()
    gains = (losses - loss).clamp(min=0)
    error = gains.std().item() / samples**0.5 if samples > 1 else float("nan")
    return ExpectedSharpness(gains.mean().item(), error, loss.item(), losses)


def random_direction(like: Tensor, seed: int) -> Tensor:
    """A direction drawn uniformly, of length 1, `[P]`; a seed gives the same one on every device."""
    direction = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)
    return (direction / direction.norm()).to(like.device)


# -- the variance of the loss ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LossVariance:
    """The variance of the loss of an ensemble of N draws, for several N, and the law `constant / N`."""

    sizes: Tensor
    """N, `[K]`."""
    variances: Tensor
    """`V[L]` over ensembles, `[K]`."""
    constant: float
    """Of the fit `V[L] = constant / N`."""
    exponent: float
    """Of the fit `V[L] ~ N^exponent`, -1 where the law holds."""
    predicted: float
    """The constant of eq. (27), `mean(V[p] / mu^2) / |D|`, which supposes that examples are drawn independently."""

    def plot(self) -> Any:
        """The variance against N, on logarithmic axes (Fig. D.3a)."""
        fig = figure("Variance of the loss", "draws N", "V[L]")
        go, sizes = graph_objects(), self.sizes.tolist()
        fig.add_trace(go.Scatter(x=sizes, y=self.variances.tolist(), mode="markers+lines", name="measured"))
        law = [self.constant / size for size in sizes]
        fig.add_trace(go.Scatter(x=sizes, y=law, mode="lines", line_dash="dash", name=f"{self.constant:.2g} / N"))
        return fig.update_xaxes(type="log").update_yaxes(type="log")


def loss_variance(
    net: Multitude, data: Any, sizes: Sequence[int] = (1, 2, 4, 8, 16, 32), draws: int = 512, *, seed: int = 0
) -> LossVariance:
    """The variance of the loss `-mean log p^(N)` of ensembles of N draws (Fig. D.3a, eq. 27), fitted by `c / N`.

    `draws` predictions of all of `data` are made once, and cut into as many ensembles of N as there are.

    >>> from multitudes import mc_dropout
    >>> net = mc_dropout(nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 3)))
    >>> law = loss_variance(net, (torch.randn(64, 8), torch.arange(64) % 3), draws=2048)
    >>> -1.2 < law.exponent < -0.8
    True
    """
    if not isinstance(net, Multitude) or not stochastic_layers(net.network) or net.task != "classification":
        raise ValueError(f"net must be a multitude that draws, for classification, got a {type(net).__name__}")
    check_seed(seed)
    if len(set(sizes)) < 2 or max(check_count("sizes", size) for size in sizes) > check_count("draws", draws) // 2:
        raise ValueError(f"sizes must be two or more numbers, at most half of draws={draws}, got {sizes!r}")
    log_p = _log_confidences(net, data, draws, seed)
    ensembles = [log_p[: draws // size * size].unflatten(0, (-1, size)) for size in sizes]
    losses = [-(own.logsumexp(1) - math.log(own.shape[1])).mean(1) for own in ensembles]
    variances = torch.stack([loss.var() for loss in losses])
    # The logarithm of a variance over g ensembles has itself a variance of about 2 / (g - 1).
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
    """The log-probability of each example's class by each draw, in float64 on the CPU, `[draws, examples]`."""
    parts = []
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    for number, (x, y) in enumerate(Batches(data).on(device)):
        if y is None or y.is_floating_point():
            raise ValueError("data must hold classes as targets: pass (x, y), or batches of inputs and classes")
        drawn = net.predict(x, draws=draws, seed=mixed(seed, number)).member_log_probs
        if drawn.shape[1:2] + drawn.shape[3:] != y.shape:
            raise ValueError(f"data has classes of shape {list(y.shape)} for predictions {list(drawn.shape)}")
        own = drawn.gather(2, y[None, :, None].expand(len(drawn), *y.shape[:1], 1, *y.shape[1:])).double().cpu()
        by_member = own.flatten(1).unflatten(0, (net.members, draws))
        parts.append(by_member.logsumexp(0) - math.log(net.members))
    return torch.cat(parts, 1)
