"""Snapshots of one training run: cyclic learning rates and cyclic stochastic-gradient MCMC.

Huang et al., *Snapshot ensembles: train 1, get M for free*, 2017: the learning rate falls from alpha_0 to 0 along
a cosine, M times in T steps, and the network is kept at the end of each cycle:

    alpha(t) = alpha_0 / 2 (cos(pi r(t)) + 1),    r(t) = mod(t, T/M) / (T/M).

Zhang et al., *Cyclical stochastic gradient MCMC for Bayesian deep learning*, 2020: add noise in the last part of each
cycle, where r(t) >= beta, and keep samples from there. For a loss that is the mean over N examples, with temperature
tau and momentum m (0 for Langevin dynamics, positive for Hamiltonian), the update

    v <- m v - alpha grad + sqrt(2 (1 - m) alpha tau / N) eps,    theta <- theta + v,

samples from exp(-N (loss + weight_decay |theta|^2 / 2) / tau).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from multitudes.base.checks import check_count, check_number
from multitudes.ensemble.members import Members
from multitudes.ensemble.multitude import Multitude, plain
from multitudes.methods.registry import Method, Settings, Training, single
from multitudes.networks.copies import copied
from multitudes.surgery.select import Factory, build_network, check_model
from multitudes.training.recorder import Checkpoints, Recorder, Trajectory

# -- cycles ------------------------------------------------------------------------------------------------


class CosineCycles(LRScheduler):
    """Learning rate that falls along a cosine from the optimizer's rate to 0, `cycles` times in `steps` steps."""

    def __init__(self, optimizer: Optimizer, steps: int, cycles: int) -> None:
        self.steps, self.cycles = steps, cycles
        super().__init__(optimizer)

    @property
    def phase(self) -> float:
        """Fraction of the current cycle that is over, from 0 to below 1."""
        return self.last_epoch * self.cycles % self.steps / self.steps

    @property
    def cycle_ended(self) -> bool:
        """True if the last step ended a cycle: the time to record."""
        done = self.last_epoch * self.cycles
        return done // self.steps > (done - self.cycles) // self.steps

    def get_lr(self) -> list[float | Tensor]:
        """Return each group's learning rate for the next step."""
        return [base * 0.5 * (1 + math.cos(math.pi * self.phase)) for base in self.base_lrs]


def cyclic_lr(optimizer: Optimizer, steps: int, cycles: int) -> CosineCycles:
    """Schedule the learning rate for snapshots (Huang et al., 2017): it falls along a cosine in each cycle.

        recorder = mt.Recorder(model, keep=5)
        schedule = mt.cyclic_lr(optimizer, steps=epochs * len(loader), cycles=5)
        for x, y in batches:
            ...                                   # loss.backward(), optimizer.step(), optimizer.zero_grad()
            schedule.step()
            if schedule.cycle_ended:
                recorder.record()
        net = mt.snapshots(model, recorder)

    Args:
        optimizer: The optimizer; its learning rates are those at the start of each cycle.
        steps: Total number of steps.
        cycles: Number of cycles.

    Returns:
        A scheduler of torch, whose `cycle_ended` is true after the last step of each cycle.

    Example:
        >>> optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        >>> schedule = cyclic_lr(optimizer, steps=4, cycles=2)
        >>> for _ in range(4):
        ...     rate = optimizer.param_groups[0]["lr"]
        ...     optimizer.step()
        ...     schedule.step()
        ...     print(round(rate, 3), schedule.cycle_ended)
        0.1 False
        0.05 True
        0.1 False
        0.05 True
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    _check_cycles(steps, cycles)
    return CosineCycles(optimizer, steps, cycles)


def snapshots(model: nn.Module | Factory, checkpoints: Checkpoints, *, task: str | None = None) -> Members:
    """Build an ensemble of the recorded snapshots of a network (Huang et al., 2017), each with its own buffers.

    Args:
        model: The network, or a function that builds one. It is not changed.
        checkpoints: A `Recorder`, or a list of state dicts.
        task: Task of the predictions, if it cannot be inferred.

    Returns:
        An ensemble with one member per checkpoint.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> recorder = Recorder(model)
        >>> for _ in range(4):
        ...     model.reset_parameters()
        ...     recorder.record()
        >>> snapshots(model, recorder)(torch.ones(5, 3)).shape
        torch.Size([4, 5, 2])
    """
    model = build_network(model)
    check_model(model, nested=True)
    states = Trajectory.of(checkpoints, model).states

    def networks() -> Iterator[nn.Module]:
        for state in states:
            network = copied(plain(model))
            network.load_state_dict(state, strict=False)  # entries that are not tensors stay the model's
            yield network

    return Members(networks(), len(states)).like(model, task)


# -- stochastic-gradient MCMC ------------------------------------------------------------------------------


class Langevin(Optimizer):
    """SGD with noise: Langevin dynamics, or Hamiltonian dynamics with momentum. With `noisy = False` it is plain SGD.

    The loss must be the mean over `dataset_size` examples or a batch of them.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        dataset_size: int,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        temperature: float = 1.0,
    ) -> None:
        check_number("lr", lr, 0, above=True)
        check_count("dataset_size", dataset_size)
        check_number("momentum", momentum, 0, below=1)
        check_number("weight_decay", weight_decay, 0)
        check_number("temperature", temperature, 0)
        options = {"momentum": momentum, "weight_decay": weight_decay, "temperature": temperature}
        super().__init__(params, {"lr": lr, "dataset_size": dataset_size, **options})
        self.noisy = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, theta: Tensor, group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        gradient = theta.grad + group["weight_decay"] * theta
        v = -lr * gradient
        if momentum:
            v += momentum * self.state[theta].get("v", 0.0)
        if self.noisy:
            variance = 2 * (1 - momentum) * lr * group["temperature"] / group["dataset_size"]
            v += math.sqrt(variance) * torch.randn_like(theta)
        if momentum:
            self.state[theta]["v"] = v
        theta.add_(v)


class CyclicSgmcmc:
    """Optimizer, schedule and recorder in one: see `cyclic_sgmcmc`."""

    def __init__(
        self, model: nn.Module, optimizer: Langevin, steps: int, cycles: int, exploration: float, draws: int
    ) -> None:
        self.model, self.optimizer, self.exploration = model, optimizer, exploration
        self.schedule = cyclic_lr(optimizer, steps, cycles)
        self.recorder = Recorder(model, keep=cycles * draws)
        shares = [exploration + (1 - exploration) * (i + 1) / draws for i in range(draws)]
        # Rounded to whole steps, halves up. They are at least one step apart, so none coincide.
        self._times = {math.floor((c + share) * steps / cycles + 0.5) for c in range(cycles) for share in shares}

    def zero_grad(self) -> None:
        """Reset all gradients, as an optimizer does."""
        self.optimizer.zero_grad()

    def step(self) -> bool:
        """Take a step, with noise in the sampling part of a cycle. Return whether a sample was recorded."""
        self.optimizer.noisy = self.schedule.phase >= self.exploration
        self.optimizer.step()
        self.schedule.step()
        due = self.schedule.last_epoch in self._times
        if due:
            self.recorder.record()
        return due

    def multitude(self) -> Members:
        """Return the samples so far as members."""
        if not self.recorder.count:
            raise ValueError("no sample has been recorded yet: sampling starts near the end of the first cycle")
        return snapshots(self.model, self.recorder)


def cyclic_sgmcmc(
    model: nn.Module | Factory,
    steps: int,
    cycles: int,
    dataset_size: int,
    *,
    lr: float = 0.5,
    momentum: float = 0.0,
    weight_decay: float = 5e-4,
    temperature: float = 1.0,
    exploration: float = 0.9,
    draws: int = 3,
) -> CyclicSgmcmc:
    """Train a network by cyclic stochastic-gradient MCMC (Zhang et al., 2020), in place of an optimizer.

    Each cycle explores without noise first, then samples: `v <- m v - lr grad + noise`, `theta <- theta + v`.

        sampler = mt.cyclic_sgmcmc(model, steps=150 * len(loader), cycles=3, dataset_size=50_000)
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            sampler.step()
            sampler.zero_grad()
        net = sampler.multitude()

    Args:
        model: The network to train in place; its loss must be a mean over examples.
        steps: Total number of steps.
        cycles: Number of times that the learning rate falls from `lr` to 0.
        dataset_size: Number of training examples (N).
        lr: Learning rate at the start of each cycle.
        momentum: 0 for Langevin dynamics, positive for Hamiltonian.
        weight_decay: Precision of the normal prior, divided by N.
        temperature: 1 samples from the posterior, lower values from a sharper distribution.
        exploration: Share of each cycle that runs without noise (beta).
        draws: Number of networks to record per cycle, evenly spread over the rest of it.

    Returns:
        A sampler with `step`, `zero_grad` and `multitude`.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> sampler = cyclic_sgmcmc(model, steps=100, cycles=2, dataset_size=20)
        >>> for _ in range(100):
        ...     model(torch.ones(5, 3)).square().mean().backward()
        ...     _ = sampler.step()
        ...     sampler.zero_grad()
        >>> sampler.multitude()(torch.ones(5, 3)).shape
        torch.Size([6, 5, 2])
    """
    model = build_network(model)
    check_model(model, nested=True)
    _check_cycles(steps, cycles)
    check_number("exploration", exploration, 0, high=1)
    check_count("draws", draws)
    if (1 - exploration) * steps / cycles < draws - 1e-6:
        raise ValueError(
            f"draws={draws} do not fit into the {(1 - exploration) * steps / cycles:.3g} steps of a cycle after "
            f"exploration={exploration:g}"
        )
    optimizer = Langevin(model.parameters(), lr, dataset_size, momentum, weight_decay, temperature)
    return CyclicSgmcmc(model, optimizer, steps, cycles, exploration, draws)


def _check_cycles(steps: int, cycles: int) -> None:
    check_count("steps", steps)
    check_count("cycles", cycles)
    if cycles > steps:
        raise ValueError(f"cycles must be at most steps={steps}, got {cycles}")


# -- for studies -------------------------------------------------------------------------------------------


def _cyclic(net: Multitude, training: Training, settings: Settings) -> Training:
    return {**training, "schedule": {"name": "cyclic", "cycles": settings["members"]}}


def _after_cycles(steps: int, settings: Settings) -> list[int]:
    members = check_count("members", settings["members"])
    if members > steps:
        raise ValueError(f"members={members} do not fit into {steps} training steps: train longer")
    return [-(-(index + 1) * steps // members) for index in range(members)]


def _finish(net: Multitude, recorder: Recorder | None, x: Tensor, settings: Settings, seed: int) -> Multitude:
    return snapshots(net, recorder if recorder is not None else [])


ROWS = (
    Method(
        "snapshots", single, {"members": 4},
        "Training of one network. Storage and inference of one network per member.",
        "Pick it if you can train only one network. It needs a cyclic learning rate.",
        place=150, train=_cyclic, times=_after_cycles, finish=_finish,
    ),
)  # fmt: skip
