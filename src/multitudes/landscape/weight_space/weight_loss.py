"""Loss, gradient and curvature of a network as functions of one weight vector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import vhp
from torch.func import functional_call

from multitudes.base.checks import check_number, check_seed
from multitudes.ensemble.multitude import Multitude, plain
from multitudes.landscape.targets import count_targets, task_and_criterion, with_targets
from multitudes.networks.attention import math_attention
from multitudes.networks.calls import (
    Input,
    InputError,
    call_with,
    evaluating,
    input_errors,
    plain_attention,
    to_device,
    under_all_names,
)
from multitudes.networks.seeds import mixed, seeded
from multitudes.networks.stochastic import expecting
from multitudes.tasks import Criterion


@dataclass(eq=False)
class WeightLoss:
    """Loss of a network on data, as a function of its trainable weights `w [P]`.

    `L(w) = criterion + weight_decay / 2 |w|^2`, mean over examples. The default criterion is that of the task, or cross
    entropy. Batches are read and augmented once, and cached on the CPU. If layers draw, `draws=0` uses expectations;
    otherwise each batch has its own fixed draws, whose predictions are averaged. The losses of members are added or
    averaged as in `net.loss`. Batch norm uses its running statistics.

    >>> network = nn.Linear(1, 1, bias=False)
    >>> data = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
    >>> weight_loss = WeightLoss(network, data, F.mse_loss)  # L(w) = (w^2 + 9 w^2) / 2
    >>> weight_loss.value(torch.tensor([2.0])), weight_loss.gradient(torch.tensor([2.0]))
    (tensor(20.), tensor([20.]))
    """

    network: nn.Module
    data: Any
    criterion: Criterion | None = None
    weight_decay: float = 0.0
    augment: Callable[[Any], Any] | None = None
    draws: int = 0
    seed: int = 0
    batches: list[tuple[Input, Tensor]] = field(init=False, default_factory=list)
    sizes: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._check()
        _, self.criterion = task_and_criterion(self.network, self.criterion, averages=self.draws > 1)
        if self.draws == 0:
            self.network = plain(self.network)  # same predictions, without an axis of draws
        self.weights = {name: p.detach() for name, p in self.network.named_parameters() if p.requires_grad}
        if not self.weights:
            raise ValueError(f"network ({type(self.network).__name__}) has no parameter that requires a gradient")
        self.device = next(iter(self.weights.values())).device
        for number, (x, y) in enumerate(with_targets(self.data, torch.device("cpu"))):
            with seeded(mixed(self.seed, number)):
                self.batches.append((x if self.augment is None else self.augment(x), y))
            self.sizes.append(count_targets(self.criterion, y))
        if not sum(self.sizes):
            raise ValueError("data must hold at least one target, got none")
        loss = self.value(self.start)  # raises for wrong inputs
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
            raise ValueError(f"draws={self.draws} requires a multitude, got a {type(self.network).__name__}")

    @property
    def start(self) -> Tensor:
        """Weights of the network, `[P]`."""
        dtype = torch.promote_types(next(iter(self.weights.values())).dtype, torch.float32)
        return torch.cat([weight.flatten().to(dtype) for weight in self.weights.values()])

    def value(self, w: Tensor, numbers: list[int] | None = None) -> Tensor:
        """Return `L(w)`, a scalar, on all batches or those of these numbers."""
        with self.ready(), torch.no_grad():
            loss = self.mean(lambda number: self.loss(number, self.split(w)), numbers)
        return loss + 0.5 * self.weight_decay * w.square().sum()

    def gradient(self, w: Tensor, numbers: list[int] | None = None) -> Tensor:
        """Return the gradient of `L` at `w`, `[P]`."""

        def of(number: int) -> Tensor:
            leaves = {name: part.detach().requires_grad_() for name, part in self.split(w).items()}
            loss = self.loss(number, leaves)
            return flattened(torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)).to(w.dtype)

        with self.ready(), torch.enable_grad():
            return self.mean(of, numbers) + self.weight_decay * w

    def curvature(self, vector: Tensor, numbers: list[int] | None = None) -> Tensor:
        """Multiply a vector by the Hessian of `L` at the weights of the network, `[P] -> [P]`.

        >>> data = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
        >>> WeightLoss(nn.Linear(1, 1, bias=False), data, F.mse_loss).curvature(torch.ones(1))  # L(w) = 5 w^2
        tensor([10.])
        """
        parts = tuple(self.split(vector).values())

        def of(number: int) -> Tensor:
            def loss(*weights: Tensor) -> Tensor:
                return self.loss(number, dict(zip(self.weights, weights, strict=True)))

            return flattened(vhp(loss, tuple(self.weights.values()), parts)[1]).to(vector.dtype)

        with self.ready(), torch.enable_grad():
            return self.mean(of, numbers) + self.weight_decay * vector

    def mean(self, of: Callable[[int], Tensor], numbers: list[int] | None = None) -> Tensor:
        """Return the mean over examples of `of(number)` of each batch."""
        chosen = [n for n in (range(len(self.batches)) if numbers is None else numbers) if self.sizes[n]]
        total = sum(self.sizes[number] for number in chosen)
        mean = of(chosen[0]) * (self.sizes[chosen[0]] / total)
        for number in chosen[1:]:
            mean += of(number) * (self.sizes[number] / total)
        return mean

    def loss(self, number: int, weights: dict[str, Tensor]) -> Tensor:
        """Return the criterion on one batch with these weights; call it inside `ready`."""
        x, y = to_device(self.batches[number][0], self.device), self.batches[number][1].to(self.device)
        network, criterion = self.network, self.criterion or F.cross_entropy
        with input_errors(x):
            if not isinstance(network, Multitude):
                return _scalar(criterion(call_with(network, weights, x), y))
            options: dict[str, Any] = {"draws": self.draws, "seed": mixed(self.seed, number)}
            predictions = functional_call(network, under_all_names(network, weights), (x,), options, tie_weights=False)
            by_member = predictions.unflatten(0, (network.members, -1))
            losses = torch.stack([_scalar(criterion(network.reading.averaged(drawn), y)) for drawn in by_member])
            return losses.sum() if network.independent else losses.mean()

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a vector `[P]` into tensors by name, with the shapes and dtypes of the weights."""
        parts = vector.to(self.device).split([weight.numel() for weight in self.weights.values()])
        return {
            name: part.view(weight.shape).to(weight.dtype)
            for (name, weight), part in zip(self.weights.items(), parts, strict=True)
        }

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Switch the network to evaluation mode inside the context."""
        expectations = expecting(self.network) if self.draws == 0 else nullcontext()
        math = math_attention()  # fused attention kernels have no second derivatives
        with evaluating(self.network), expectations, plain_attention(), math:
            yield


def flattened(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate detached tensors to one vector `[P]`."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _scalar(loss: Tensor) -> Tensor:
    if loss.dim():
        raise InputError(f"criterion must return a scalar, the mean over the batch, got shape {list(loss.shape)}")
    return loss


def unit_direction(like: Tensor, seed: int) -> Tensor:
    """Draw a uniform direction `[P]` of length 1, the same on every device."""
    direction = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)
    return (direction / direction.norm()).to(like.device)
