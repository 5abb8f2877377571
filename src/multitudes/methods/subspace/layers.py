"""Networks that run with weights drawn around their own (see `conversion`)."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from multitudes.core.batches import Batches
from multitudes.core.calling import call_with
from multitudes.core.copying import Sharing, copied
from multitudes.core.draws.stochastic import Stochastic
from multitudes.core.locking import evaluating
from multitudes.training.batchnorm import accuracy, norms, statistics
from multitudes.training.recorder import State, flat_weights, unflattened


class Around(Stochastic, Sharing):
    """A network that runs with weights drawn around its own, by `drawn`.

    It shares the registries of its `network`, whose own weights are the centre and the expectation; what
    else the draws need are buffers named `trajectory_...`. All floating-point parameters are drawn, as one flat
    vector, in the order of `named_parameters()`. A gradient goes to the centre.
    """

    noise = "network"
    shares = "network"
    unsaved: ClassVar[dict[str, str]] = {
        "data": "the data on which each draw recomputes batch-norm statistics cannot be saved: save mt.freeze(net, "
        "draws=...), whose networks have their statistics"
    }
    """Why a file cannot hold a setting."""
    network: nn.Module

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.data: Batches | None = None
        self.floor: float | None = None
        self.tries = 5
        # Networks that are fused must be alike in their settings, used or unused, and `network` is not looked into.
        self.settings = (type(network).__name__, *sorted((k, v) for k, v in vars(network).items() if _setting(k, v)))

    def drawn(self, theta: Tensor) -> Tensor:
        """A draw `[P]` of weights around `theta`."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.network.training = self.training
        return call_with(self.network, self.draw_state(), kwargs or args)

    def draw_state(self) -> State:
        """The weights of one draw, by name, and where there is data, the batch-norm statistics that go with them.

        With a floor, weights of lower accuracy are rejected. Where all tries are, nothing is drawn: the centre stays.
        """
        if self.expects:
            return {}
        data = None if self.training else self.data
        theta = flat_weights(self.network)
        with torch.autocast(theta.device.type, enabled=False):
            for _ in range(1 if self.floor is None or data is None else self.tries):
                state = unflattened(self.drawn(theta), self.network)
                if data is not None and norms(self.network):
                    state |= statistics(self.network, state, data)
                if data is None or self.floor is None or accuracy(self.network, state, data) >= self.floor:
                    return state
        warnings.warn(
            f"no weights of accuracy {self.floor:g} were found in {self.tries} tries, so the centre was taken; "
            "lower the floor or the scale, or raise tries",
            stacklevel=2,
        )
        return {}

    @torch.no_grad()
    def fold(self) -> nn.Module:
        """A copy of the plain network with the tensors of one draw."""
        with evaluating(self):
            state = self.draw_state()
        own = {name: buffer for name, buffer in self._buffers.items() if name.startswith("trajectory_")}
        network = copied(self.network, {id(buffer): None for buffer in own.values()})
        for name in own:
            del network._buffers[name]
        network.load_state_dict(state, strict=False)
        network.training = self.training
        return network

    def reset_parameters(self) -> None:
        """Fresh weights have no trajectory."""
        raise ValueError(
            "weights that are drawn around a trajectory cannot be initialised anew: fuse multitudes of their own "
            "trajectories, or pass init='pretrained'"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Its own settings never clash with the network's names."""
        if isinstance(value, (Tensor, nn.Module)):
            super().__setattr__(name, value)
        else:
            object.__setattr__(self, name, value)


class GaussianAround(Around):
    """`theta + std * eps_1 + F^T eps_2`, with `std [P]` and `F [K, P]`, either of them None for nothing."""

    trajectory_std: Tensor | None
    trajectory_factor: Tensor | None

    def __init__(self, network: nn.Module, std: Tensor | None, factor: Tensor | None) -> None:
        super().__init__(network)
        theta = flat_weights(network)
        self.register_buffer("trajectory_std", None if std is None else std.to(theta))
        self.register_buffer("trajectory_factor", None if factor is None else factor.to(theta))

    def drawn(self, theta: Tensor) -> Tensor:
        std, factor = self.trajectory_std, self.trajectory_factor
        weights = theta
        if std is not None:
            weights = weights + std * self.normal(theta.shape, like=theta)
        if factor is not None:
            weights = weights + self.normal(factor.shape[:1], like=theta) @ factor
        return weights


class RandomAround(Around):
    """`theta + scale * u * v`, with u uniform in [0, 1) and v a random direction of length 1."""

    def __init__(self, network: nn.Module, scale: float) -> None:
        super().__init__(network)
        self.scale = scale

    def drawn(self, theta: Tensor) -> Tensor:
        direction = self.normal(theta.shape, like=theta)
        length = self.scale * self.uniform((1,), like=theta)
        return theta + length * direction / direction.norm()


class DropoutAround(Around):
    """Each weight zero with probability p, or else divided by 1 - p; p itself drawn from a range, for each draw."""

    def __init__(self, network: nn.Module, low: float, high: float) -> None:
        super().__init__(network)
        self.low, self.high = low, high

    def drawn(self, theta: Tensor) -> Tensor:
        fine = theta.new_empty(0, dtype=torch.promote_types(theta.dtype, torch.float32))  # half precision rounds p
        p = self.low + (self.high - self.low) * self.uniform((1,), like=fine)
        kept = self.uniform(theta.shape, like=fine) >= p
        return theta * kept / (1 - p).to(theta.dtype)


def _setting(key: str, value: Any) -> bool:
    return key[0] != "_" and key != "training" and isinstance(value, (int, float, str, bool, tuple, type(None)))
