"""The phase transition of variance networks: find the weights that must be drawn and those that can be fixed.

Neklyudov et al., *Variance networks: when expectation does not meet your expectations*, 2018, sections 5 and 6.4. A
random weight can be replaced by its expectation if the log-likelihood is close to linear in it over a standard
deviation. The curvature measures how far from linear it is:

    kappa_ij = sigma_ij^2 d^2/dW_ij^2 log p(y | x, W)  at  W = E W.                                    (16)

If some |kappa| are large, predicting with expected weights fails. Weights of small |kappa| can be fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp

from multitudes.base.checks import check_choice, check_count, check_number
from multitudes.ensemble.multitude import Multitude, plain
from multitudes.methods.variance.layers import VarianceLayer, variance_layers
from multitudes.networks.calls import Input, call, plain_attention, prediction_in, select_rows, split_call, tensors_in
from multitudes.networks.copies import copied
from multitudes.networks.seeds import seeded
from multitudes.networks.stochastic import expecting
from multitudes.networks.trace import hooked, recording
from multitudes.surgery.select import replace
from multitudes.tasks import Criterion, task_of
from multitudes.tasks.classes import check_clear

THRESHOLD = 10**1.5
"""Threshold of the paper for the first dense layer of LeNet-5 on MNIST. kappa sums over examples: it grows with N."""


# -- kappa -------------------------------------------------------------------------------------------------


def kappa(
    net: nn.Module,
    x: Input,
    y: Tensor,
    criterion: Criterion | None = None,
    *,
    method: str = "exact",
    probes: int = 100,
    batch_size: int | None = None,
    chunk: int = 32,
    seed: int | None = None,
) -> dict[str, Tensor]:
    """Compute kappa of each weight of the variance layers (eq. 16): `sigma^2 d^2/dW^2 log p(y | x, W)`.

    It is summed over examples, in evaluation mode with all other weights at their expectations, and stored in the
    layers for `phase` and `sparsify`.

    Args:
        net: A variance network of one member.
        x: One batch of inputs.
        y: Their targets.
        criterion: Mean of minus the log-likelihood over a batch; by default cross entropy.
        method: `"exact"` takes one Hessian-vector product per weight, or per output unit of a linear layer with one
            input vector per example. `"hutchinson"` estimates the second derivatives; use it for large convolutions.
        probes: Number of random vectors for `"hutchinson"`.
        batch_size: Number of examples per run; by default all.
        chunk: Number of products per run.
        seed: Seed of the random vectors.

    Returns:
        kappa by layer name, each of the weight's shape.

    Example:
        >>> from multitudes.methods.variance import variance
        >>> net = variance(nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 2)))
        >>> kappas = kappa(net, torch.randn(16, 3), torch.randint(2, (16,)))
        >>> {name: values.shape for name, values in kappas.items()}
        {'0': torch.Size([8, 3])}
    """
    layers = _layers_of(net)
    task = (net if isinstance(net, Multitude) else Multitude(net)).known_task
    if criterion is None and task is not None and task_of(task).class_axis != 1:
        raise ValueError(f"criterion must be given for task {task!r}: minus the log-likelihood, its mean over a batch")
    check_choice("method", method, ("exact", "hutchinson"))
    count = tensors_in(x)[0].shape[0]
    batch_size = count if batch_size is None else batch_size
    for name, value in (("probes", probes), ("chunk", chunk), ("batch_size", batch_size)):
        check_count(name, value)
    network = replace(plain(net), {name: layer.expected() for name, layer in layers.items()}).eval()
    kappas = {name: torch.zeros_like(layer.variance()) for name, layer in layers.items()}
    with seeded(seed), expecting(network), plain_attention(), torch.no_grad():
        if criterion is None and task is None and y.dim() > 1:
            check_clear(call(network, select_rows(x, torch.arange(1))).unsqueeze(0), y[:1])
        for index in torch.arange(count, device=y.device).split(batch_size):
            curvature = _Curvature(network, select_rows(x, index), y[index], criterion, chunk)
            for name, layer in layers.items():
                second = curvature.exact(name) if method == "exact" else curvature.estimate(name, probes)
                kappas[name] += layer.variance() * second
    for name, layer in layers.items():
        layer.kappa = kappas[name]
    return kappas


@dataclass
class _Curvature:
    """Second derivatives of log p(y | x, W), summed over a batch, for a network of plain layers."""

    network: nn.Module
    x: Input
    y: Tensor
    criterion: Criterion | None
    chunk: int

    def exact(self, name: str) -> Tensor:
        """Return the diagonal of the Hessian for a layer's weight `[O, ...]`."""
        by_unit = self._by_unit(name)
        if by_unit is not None:
            return by_unit
        weight = self._weight(name)
        product = _hessian(self._of_weight(name), weight)

        def entries(index: Tensor) -> Tensor:
            basis = F.one_hot(index, weight.numel()).to(weight).view(-1, *weight.shape)
            return self._vmap(product, basis).flatten(1).gather(1, index[:, None])[:, 0]

        return self._in_chunks(entries, weight.numel()).view_as(weight)

    def estimate(self, name: str, probes: int) -> Tensor:
        """Estimate the same by Hutchinson's method: the mean of z * Hz over vectors z of random signs."""
        weight = self._weight(name)
        product = _hessian(self._of_weight(name), weight)

        def estimates(index: Tensor) -> Tensor:
            z = torch.randint(2, (len(index), *weight.shape), device=weight.device).to(weight) * 2 - 1
            return z * self._vmap(product, z)

        return self._in_chunks(estimates, probes).mean(0)

    def _by_unit(self, name: str) -> Tensor | None:
        """Sum a_ni^2 d^2/db_nj^2 over n, for a linear layer b = W a with one vector a for each example n.

        This takes one product per unit instead of per weight. It requires that no example's loss depends on another
        example's b, which is tested. Return None if it does not apply.
        """
        layer = self.network.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            return None
        with recording(self.network, [name]) as trace:
            call(self.network, self.x)
        inputs = [value for each in trace.calls for value in each.args]
        if len(inputs) != 1 or inputs[0].dim() != 2 or len(inputs[0]) != len(self.y):
            return None
        a, zero = inputs[0], inputs[0].new_zeros(len(inputs[0]), layer.out_features)
        product = _hessian(self._of_shift(name), zero)
        generator = torch.Generator(zero.device).manual_seed(0)
        one_half = torch.randn(zero.shape, generator=generator, dtype=zero.dtype, device=zero.device)
        one_half[::2] = 0.0
        if product(one_half)[::2].any():
            return None

        def entries(index: Tensor) -> Tensor:
            basis = F.one_hot(index, layer.out_features).to(zero)[:, None].expand(-1, len(zero), -1)
            second = self._vmap(product, basis)[torch.arange(len(index), device=index.device), :, index]  # [chunk, B]
            return second @ a.square()

        return self._in_chunks(entries, layer.out_features)

    def _of_weight(self, name: str) -> Callable[[Tensor], Tensor]:
        """Return log p as a function of a layer's weight."""
        args, kwargs = split_call(self.network, self.x)
        key = f"{name}.weight" if name else "weight"
        network = self.network
        return lambda w: self._log_p(prediction_in(functional_call(network, {key: w}, args, kwargs), network))

    def _of_shift(self, name: str) -> Callable[[Tensor], Tensor]:
        """Return log p as a function of a shift added to a layer's output."""

        def log_p(shift: Tensor) -> Tensor:
            with hooked(self.network, [name], lambda _, layer, args, b: b + shift):
                return self._log_p(call(self.network, self.x))

        return log_p

    def _log_p(self, prediction: Tensor) -> Tensor:
        if self.criterion is None:
            return -F.cross_entropy(prediction, self.y, reduction="sum")
        return -len(self.y) * self.criterion(prediction, self.y)

    def _weight(self, name: str) -> Tensor:
        return self.network.get_submodule(name).get_parameter("weight").detach()

    def _in_chunks(self, function: Callable[[Tensor], Tensor], count: int) -> Tensor:
        indices = torch.arange(count, device=self.y.device).split(self.chunk)
        return torch.cat([function(index) for index in indices])

    def _vmap(self, product: Callable[[Tensor], Tensor], vectors: Tensor) -> Tensor:
        return product(vectors[0])[None] if len(vectors) == 1 else torch.vmap(product)(vectors)


def _hessian(function: Callable[[Tensor], Tensor], at: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function from a vector to its product with the Hessian.

    It is reverse over reverse, since forward mode fails for `mse_loss`.
    """
    pull = vjp(grad(function), at)[1]
    return lambda vector: pull(vector)[0]


# -- results -----------------------------------------------------------------------------------------------


class Phase(NamedTuple):
    """Mean log alpha of a layer, and the share of its weights with |kappa| above a threshold."""

    log_alpha: float
    share: float


def phase(net: nn.Module, threshold: float = THRESHOLD) -> dict[str, Phase]:
    """Return the phase of each variance layer by its latest `kappa`.

    Args:
        net: A variance network whose `kappa` has been computed.
        threshold: Above it, |kappa| counts as large.

    Returns:
        A `Phase` by layer name. The log alpha of a zero-centered layer is infinite.
    """
    check_number("threshold", threshold, 0)
    return {
        name: Phase(layer.log_alphas().mean().item(), (kappas.abs() > threshold).float().mean().item())
        for name, (layer, kappas) in _with_kappa(net).items()
    }


class Sparse(NamedTuple):
    """A network with some fixed weights, and the ratio of all weights to random ones."""

    net: Multitude
    compression: float

    @property
    def fixed(self) -> float:
        """Share of the variance layers' weights that are fixed."""
        return 1 - 1 / self.compression


def sparsify(net: Multitude, threshold: float, to: str = "zero") -> Sparse:
    """Fix the weights with |kappa| below a threshold; they stay fixed in further training.

    Args:
        net: A variance network whose `kappa` has been computed. It is not changed.
        threshold: Weights with a smaller |kappa| are fixed.
        to: `"zero"`, or `"mean"` to fix weights at their expectations.

    Returns:
        The network, and the ratio of all weights of variance layers to the random ones.

    Example:
        >>> from multitudes.methods.variance import variance
        >>> net = variance(nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 2)))
        >>> kappas = kappa(net, torch.randn(16, 3), torch.randint(2, (16,)))
        >>> sparse, compression = sparsify(net, kappas["0"].abs().sort().values.flatten()[12].item())
    """
    check_number("threshold", threshold, 0)
    check_choice("to", to, ("zero", "mean"))
    if not isinstance(net, Multitude):
        raise ValueError(f"net must be a multitude made by variance(model), got {type(net).__name__}")
    _with_kappa(net)
    sparse = copied(net)
    weights = left = 0
    for name, (layer, kappas) in _with_kappa(sparse).items():
        mean = layer.mean()
        fixed = layer.fix(kappas.abs() < threshold, mean if to == "mean" else torch.zeros_like(mean))
        random = mean.numel() - int(fixed.sum())
        sparse.notes[name] = f"{random} of {mean.numel()} weights random"
        weights, left = weights + mean.numel(), left + random
    return Sparse(sparse, weights / left if left else float("inf"))


def _layers_of(net: nn.Module) -> dict[str, VarianceLayer]:
    if isinstance(plain(net), Multitude):
        raise ValueError(f"net is a multitude of members ({type(net).__name__}): pass one of them, net.member(i)")
    layers = variance_layers(plain(net))
    if not layers:
        raise ValueError(f"net ({type(net).__name__}) has no variance layer: convert it with variance(model)")
    return layers


def _with_kappa(net: nn.Module) -> dict[str, tuple[VarianceLayer, Tensor]]:
    pairs = {}
    for name, layer in _layers_of(net).items():
        if layer.kappa is None:
            raise ValueError(f"layer {name!r} has no kappa yet: call kappa(net, x, y) first")
        pairs[name] = layer, layer.kappa
    return pairs
