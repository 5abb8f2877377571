"""Subspaces: weights drawn around a solution, or along the path to it.

Fort, Hu and Lakshminarayanan, *Deep ensembles: a loss landscape perspective*, 2019, draw weights around an optimum
theta_0, the last checkpoint, or from the last checkpoints theta_1, ..., theta_K, in four ways:

    random      theta_0 + 10 u v                    u uniform in [0, 1), v a random direction of length 1
    dropout     theta_0 * mask / (1 - p)            each weight zero with probability p
    diagonal    mean + std * eps                    mean and standard deviation of the checkpoints, per weight
    low_rank    mean + sum_i z_i v_i                v_1, ..., v_k the checkpoints' principal directions, of length 1

Izmailov et al., *Averaging weights leads to wider optima and better generalization*, 2018, take the mean (SWA).
Maddox et al., *A simple baseline for Bayesian uncertainty in deep learning*, 2019, draw from a Gaussian around it
(SWAG). Column i of D is theta_i minus the mean of the checkpoints up to the i-th:

    mean + sqrt(scale) (sqrt(var) eps_1 + D eps_2 / sqrt(K - 1)).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_choice, check_count, check_number
from multitudes.ensemble.members import Members, fuse
from multitudes.ensemble.multitude import Multitude
from multitudes.methods.registry import Method, Settings, Training, single, without
from multitudes.networks.calls import call_with, evaluating
from multitudes.networks.copies import Sharing, copied
from multitudes.networks.seeds import mixed, seeded
from multitudes.networks.stochastic import Draw, Stochastic, drawing
from multitudes.surgery.select import Factory, build_network, check_model
from multitudes.training.batch_norm import accuracy, norms, statistics
from multitudes.training.batches import Batches
from multitudes.training.recorder import (
    Checkpoints,
    Recorder,
    State,
    Trajectory,
    flat_state,
    flat_weights,
    principal_directions,
    unflattened,
    weights_of,
)
from multitudes.training.schedules import schedule_of

KINDS = ("random", "dropout", "diagonal", "low_rank")

# -- networks that draw their weights ----------------------------------------------------------------------


class Around(Stochastic, Sharing):
    """A network that runs with weights drawn around its own.

    It shares the registries of its `network`, whose weights are the center and the expectation. Further tensors for
    the draws are buffers named `trajectory_...`. All floating-point parameters are drawn, as one flat vector in the
    order of `named_parameters()`. Gradients go to the center.
    """

    noise = "network"
    shares = "network"
    unsaved: ClassVar[dict[str, str]] = {
        "data": "the data on which each draw recomputes batch-norm statistics cannot be saved: save mt.freeze(net, "
        "draws=...), whose networks contain their statistics"
    }
    """Settings that cannot be saved, with the reason."""
    network: nn.Module

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.data: Batches | None = None
        self.floor: float | None = None
        self.tries = 5
        # `fuse` compares settings, used or not, but does not look into `network`, so copy its settings here.
        self.settings = (type(network).__name__, *sorted((k, v) for k, v in vars(network).items() if _setting(k, v)))

    def draw_around(self, theta: Tensor) -> Tensor:
        """Draw weights `[P]` around `theta`."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.network.training = self.training
        return call_with(self.network, self.draw_state(), kwargs or args)

    def draw_state(self) -> State:
        """Return the weights of one draw by name, with their batch-norm statistics if there is data.

        With a floor, weights of lower accuracy are rejected. If all tries fail, the draw is the center.
        """
        if self.expects:
            return {}
        data = None if self.training else self.data
        theta = flat_weights(self.network)
        with torch.autocast(theta.device.type, enabled=False):
            for _ in range(1 if self.floor is None or data is None else self.tries):
                state = unflattened(self.draw_around(theta), self.network)
                if data is not None and norms(self.network):
                    state |= statistics(self.network, state, data)
                if data is None or self.floor is None or accuracy(self.network, state, data) >= self.floor:
                    return state
        warnings.warn(
            f"no draw reached accuracy {self.floor:g} in {self.tries} tries, so the center is used: lower floor or "
            "scale, or raise tries",
            stacklevel=2,
        )
        return {}

    @torch.no_grad()
    def fold(self) -> nn.Module:
        """Return a copy of the plain network with the tensors of one draw."""
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
        """Raise: fresh weights have no trajectory."""
        raise ValueError(
            "weights drawn around a trajectory cannot be reset: fuse multitudes with trajectories of their own, or "
            "pass init='pretrained'"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set settings on this object, not in the shared registries, so they never clash with the network's names."""
        if isinstance(value, (Tensor, nn.Module)):
            super().__setattr__(name, value)
        else:
            object.__setattr__(self, name, value)


class GaussianAround(Around):
    """`theta + std * eps_1 + F^T eps_2`, with `std [P]` and `F [K, P]`; None omits a term."""

    trajectory_std: Tensor | None
    trajectory_factor: Tensor | None

    def __init__(self, network: nn.Module, std: Tensor | None, factor: Tensor | None) -> None:
        super().__init__(network)
        theta = flat_weights(network)
        self.register_buffer("trajectory_std", None if std is None else std.to(theta))
        self.register_buffer("trajectory_factor", None if factor is None else factor.to(theta))

    def draw_around(self, theta: Tensor) -> Tensor:
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

    def draw_around(self, theta: Tensor) -> Tensor:
        direction = self.normal(theta.shape, like=theta)
        length = self.scale * self.uniform((1,), like=theta)
        return theta + length * direction / direction.norm()


class DropoutAround(Around):
    """Zero each weight with probability p, divide the rest by 1 - p; each draw takes its p from a range."""

    def __init__(self, network: nn.Module, low: float, high: float) -> None:
        super().__init__(network)
        self.low, self.high = low, high

    def draw_around(self, theta: Tensor) -> Tensor:
        fine = theta.new_empty(0, dtype=torch.promote_types(theta.dtype, torch.float32))  # half precision rounds p
        p = self.low + (self.high - self.low) * self.uniform((1,), like=fine)
        kept = self.uniform(theta.shape, like=fine) >= p
        return theta * kept / (1 - p).to(theta.dtype)


def _setting(key: str, value: Any) -> bool:
    return key[0] != "_" and key != "training" and isinstance(value, (int, float, str, bool, tuple, type(None)))


class Subspace(Multitude):
    """A network with other weights in each draw."""

    network: Around

    def networks(self, draws: int | None = None, seed: int | None = None) -> Members:
        """Return the networks of some draws as fixed members, with the same predictions for the same seed.

        A subspace that recomputes batch-norm statistics does so for every draw of every batch; its members contain
        them.

        Args:
            draws: Number of networks; by default `self.draws`.
            seed: Seed of the draws.

        Returns:
            An ensemble with one member per draw.
        """
        draws = self.draws if draws is None else draws
        check_count("draws", draws)
        draw = Draw(int(torch.randint(2**62, ())) if seed is None else seed)

        def networks() -> Iterator[nn.Module]:
            for number in range(draws):
                draw.index = torch.tensor(number)
                own_random_state = seeded(None if seed is None else mixed(seed, number))
                with drawing([self.network], draw), own_random_state:
                    network = self.network.fold()
                yield network

        return Members(networks(), draws).like(self)


# -- conversions -------------------------------------------------------------------------------------------


def subspace(
    model: nn.Module | Factory,
    kind: str,
    checkpoints: Checkpoints | None = None,
    *,
    rank: int = 5,
    p: float | tuple[float, float] = 0.1,
    scale: float | None = None,
    data: Any = None,
    floor: float | None = None,
    tries: int = 5,
    task: str | None = None,
) -> Subspace | Members:
    """Draw the weights of a network from a subspace around a solution (Fort et al., 2019).

    `random` draws `theta + scale u v`, `dropout` `theta * mask / (1 - p)`, `diagonal` `mean + std * eps` and `low_rank`
    `mean + sum_i z_i v_i`, with the principal directions `v_i` of the checkpoints.

    Args:
        model: The network, or a function that builds one, or `Members` that were trained together, each of which gets
            its own subspace. It is not changed.
        kind: `"random"` or `"dropout"`, around the last checkpoint; `"diagonal"` or `"low_rank"`, around the mean.
        checkpoints: A `Recorder`, whose kept checkpoints are used, or a list of state dicts. If None, `random` and
            `dropout` use the model's own weights.
        rank: Number of principal directions of `low_rank`, less than the number of checkpoints.
        p: Probability that `dropout` zeroes a weight, or a range `(low, high)` from which each draw takes its own.
        scale: Maximum distance of `random`, 10 by default, or factor of the Gaussians' deviations, 1 by default. The
            directions of `low_rank` always have length 1, so a small network may need much less.
        data: Inputs `[N, ...]`, `(x, y)` or an iterable of batches. If the network has batch norm, each draw recomputes
            its statistics in one pass over them (`networks` does it once); without data, all draws use the center's.
            The data are not in the state dict, and fused networks use the first one's.
        floor: Minimum accuracy on `data`; weights with a lower one are rejected. Each try takes a pass over the data.
        tries: Maximum number of tries. If all are rejected, the draw is the center, with a warning.
        task: Task of the predictions, if it cannot be inferred.

    Returns:
        A multitude that draws: `net(x, draws=D)` is `[D, B, ...]`, or `[M * D, B, ...]` for `Members`.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> checkpoints = [{k: v + i for k, v in model.state_dict().items()} for i in range(10)]
        >>> net = subspace(model, "diagonal", checkpoints)
        >>> net(torch.ones(5, 3), draws=30).shape
        torch.Size([30, 5, 2])
    """
    check_choice("kind", kind, KINDS)
    check_count("rank", rank)
    check_count("tries", tries)
    low, high = p if isinstance(p, tuple) and len(p) == 2 else (p, p)
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (low, high))
    if not numbers or not 0 <= low <= high < 1:
        raise ValueError(f"p must be a probability in [0, 1), or a pair of them in order, got {p!r}")
    if scale is not None:
        check_number("scale", scale, 0, above=True)
    if floor is not None:
        check_number("floor", floor, 0, high=1)
        if data is None:
            raise ValueError(f"floor={floor!r} needs data=(x, y) to measure the accuracy on")
    data = Batches.of(data)
    around = kind in ("random", "dropout")
    if checkpoints is None and not around:
        raise ValueError(f"kind={kind!r} needs checkpoints: a Recorder or a list of state dicts")

    def convert(center: nn.Module, trajectory: Trajectory) -> Multitude:
        states = trajectory.states
        _load(center, states[-1] if around else Trajectory(states).moments().mean)
        if kind == "random":
            network: Around = RandomAround(center, scale or 10.0)
        elif kind == "dropout":
            network = DropoutAround(center, low, high)
        elif kind == "diagonal":
            variance = Trajectory(states).moments().variance
            network = GaussianAround(center, (scale or 1.0) * flat_state(variance, center).sqrt(), None)
        else:
            network = GaussianAround(center, None, (scale or 1.0) * principal_directions(states, center, rank))
        return _with_data(network, data, floor, tries)

    return _converted(model, checkpoints, convert, task, least=1 if around else 2)


def swa(
    model: nn.Module | Factory, checkpoints: Checkpoints, *, data: Any = None, task: str | None = None
) -> Multitude:
    """Average the weights of a network along its training run (SWA, Izmailov et al., 2018).

    Args:
        model: The network, or a function that builds one, or `Members`. It is not changed.
        checkpoints: A `Recorder`, of which all recorded checkpoints count, kept or not, or a list of state dicts.
        data: Inputs to recompute batch-norm statistics on (see `subspace`). By default they are averaged like weights.
        task: Task of the predictions, if it cannot be inferred.

    Returns:
        A multitude of one member that draws nothing; `member(0)` is the plain network.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> checkpoints = [{k: v + i for k, v in model.state_dict().items()} for i in range(3)]
        >>> torch.allclose(swa(model, checkpoints).member(0).weight, model.weight + 1)
        True
    """
    data = Batches.of(data)

    def convert(network: nn.Module, trajectory: Trajectory) -> Multitude:
        _load(network, trajectory.states[-1] | trajectory.moments().mean)
        if data is not None and norms(network):
            _load(network, statistics(network, {}, data))
        return Multitude(network)

    return _converted(model, checkpoints, convert, task)


def swag(
    model: nn.Module | Factory,
    checkpoints: Checkpoints,
    *,
    rank: int | None = None,
    scale: float = 0.5,
    data: Any = None,
    task: str | None = None,
) -> Subspace | Members:
    """Draw the weights of a network from a Gaussian fitted to its training run (SWAG, Maddox et al., 2019).

    A draw is `mean + sqrt(scale) (sqrt(var) eps_1 + D eps_2 / sqrt(K - 1))`, where the columns of D are the deviations
    of the last K checkpoints from the running mean.

    Args:
        model: The network, or a function that builds one, or `Members` that were trained together, each of which gets
            its own Gaussian. It is not changed.
        checkpoints: A `Recorder`, or a list of state dicts. Mean and variance are over all recorded checkpoints, kept
            or not; the columns of D are those of the kept ones.
        rank: Number of columns of D (K in the paper); by default all.
        scale: Factor of the covariance; 0.5 is the paper's formula.
        data: Inputs to recompute batch-norm statistics on for each draw (see `subspace`). By default all draws use the
            averages.
        task: Task of the predictions, if it cannot be inferred.

    Returns:
        A multitude that draws: `net(x, draws=D)` is `[D, B, ...]`, or `[M * D, B, ...]` for `Members`.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> checkpoints = [{k: v + i for k, v in model.state_dict().items()} for i in range(10)]
        >>> net = swag(model, checkpoints, rank=5)
        >>> net(torch.ones(5, 3), draws=30).shape
        torch.Size([30, 5, 2])
    """
    if rank is not None:
        check_count("rank", rank)
    check_number("scale", scale, 0, above=True)
    data = Batches.of(data)

    def convert(center: nn.Module, trajectory: Trajectory) -> Multitude:
        columns = len(trajectory.states) if rank is None else rank
        if not 2 <= columns <= len(trajectory.states):
            raise ValueError(f"rank must be 2 to {len(trajectory.states)}, the number of checkpoints, got {columns}")
        deviations: list[Tensor] = []
        for state, moments in trajectory.along():
            deviations = [*deviations[1 - columns :], flat_state(state, center) - flat_state(moments.mean, center)]
        std = math.sqrt(scale) * flat_state(moments.variance, center).sqrt()
        factor = math.sqrt(scale / (columns - 1)) * torch.stack(deviations)
        _load(center, trajectory.states[-1] | moments.mean)
        return _with_data(GaussianAround(center, std, factor), data)

    return _converted(model, checkpoints, convert, task, least=2)


def _converted(
    model: nn.Module | Factory,
    checkpoints: Checkpoints | None,
    convert: Callable[[nn.Module, Trajectory], Multitude],
    task: str | None,
    least: int = 1,
) -> Any:
    """Convert a copy of the network, or of each member, with its checkpoints, or with its own weights if None."""
    model = build_network(model)
    if isinstance(model, Members):
        trajectory = Trajectory.of([model.state_dict()] if checkpoints is None else checkpoints, model)
        members = range(model.members)
        return fuse([_converted(model.member(i), trajectory.of_member(i), convert, task, least) for i in members])
    network = check_model(model)
    if isinstance(network, Around):
        raise ValueError("model already draws its weights around a trajectory: convert the plain network")
    if not weights_of(network):
        raise ValueError(f"model ({type(network).__name__}) has no weights to draw")
    network = copied(network)
    trajectory = Trajectory.of([network.state_dict()] if checkpoints is None else checkpoints, network, least)
    return convert(network, trajectory).like(model, task)


def _load(network: nn.Module, state: State) -> None:
    network.load_state_dict(state, strict=False)  # entries that are not tensors stay the model's


def _with_data(network: Around, data: Batches | None, floor: float | None = None, tries: int = 5) -> Subspace:
    """Return the subspace, with data for batch-norm statistics and the floor."""
    if data is not None and (norms(network) or floor is not None):
        network.data, network.floor, network.tries = data, floor, tries
        if norms(network):
            _load(network.network, statistics(network.network, {}, data))
        if floor is not None and (reached := accuracy(network.network, {}, data)) < floor:
            raise ValueError(f"floor={floor!r} is above the accuracy of the center on data, {reached:.3f}")
    return Subspace(network)


# -- for studies -------------------------------------------------------------------------------------------


def _train(net: Multitude, training: Training, settings: Settings) -> Training:
    """Keep the learning rate above a floor, since checkpoints would be the same at a rate of 0."""
    floor = settings["floor_rate"]
    check_number("floor_rate", floor, 0, high=1)
    falling = schedule_of(training.get("schedule", "cosine"))
    return {**training, "schedule": lambda done: max(floor, falling(done))}


def _times(steps: int, settings: Settings) -> list[int]:
    """Spread the checkpoints evenly over the last `share` of the steps, or over more in a short training run."""
    count, share = check_count("checkpoints", settings["checkpoints"]), settings["share"]
    check_number("share", share, 0, high=1, above=True)
    if steps < count:
        raise ValueError(f"checkpoints={count} do not fit into {steps} training steps: train longer")
    share = max(share, count / steps)
    return [round(steps * (1 - share * (count - 1 - index) / count)) for index in range(count)]


def _swag(net: Multitude, recorder: Recorder | None, x: Tensor, settings: Settings, seed: int) -> Multitude:
    return _fix_draws(swag(net, recorder or [], data=x, **without(settings, *_RECORDING)), seed)


def _subspace(net: Multitude, recorder: Recorder | None, x: Tensor, settings: Settings, seed: int) -> Multitude:
    return _fix_draws(subspace(net, checkpoints=recorder or [], data=x, **without(settings, *_RECORDING)), seed)


def _fix_draws(net: Multitude, seed: int) -> Multitude:
    """Fix the draws if there is batch norm, whose statistics take a pass over the data and are not in a state dict."""
    return net.networks(seed=seed) if isinstance(net, Subspace) and norms(net.network) else net


_RECORDING = {"checkpoints": 10, "share": 0.4, "floor_rate": 0.3}
ROWS = (
    Method(
        "swag", single, {**_RECORDING, "rank": None, "scale": 0.5},
        "Training of one network. Storage of twelve networks. One forward per draw.",
        "Pick it if you can record checkpoints in the last part of training.",
        place=130, train=_train, times=_times, finish=_swag,
    ),
    Method(
        "subspace", single, {**_RECORDING, "kind": "diagonal", "rank": 5, "scale": None},
        "Training of one network. Storage of a few directions. One forward per draw.",
        "Pick it to measure the gain from weights close to one solution.",
        place=140, train=_train, times=_times, finish=_subspace,
    ),
)  # fmt: skip
