"""Snapshots: cyclic learning rates, and cyclic stochastic-gradient MCMC."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor, nn

import multitudes as mt
from multitudes.methods.snapshots import CyclicSgmcmc, Langevin, cyclic_lr, cyclic_sgmcmc, snapshots
from multitudes.training.recorder import Recorder
from tests.zoo.cases import NETWORKS


def sgd(lr: float = 0.2) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def rates(steps: int, cycles: int, lr: float = 0.2) -> tuple[list[float], list[int]]:
    """The learning rate of each step, and the steps that end a cycle."""
    optimizer = sgd(lr)
    schedule = cyclic_lr(optimizer, steps, cycles)
    seen, ends = [], []
    for step in range(1, steps + 1):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        if schedule.cycle_ended:
            ends.append(step)
    return seen, ends


# -- cycles ------------------------------------------------------------------------------------------------


def test_the_learning_rate_is_the_papers() -> None:
    seen, ends = rates(steps=30, cycles=3)
    assert seen == pytest.approx([0.1 * (math.cos(math.pi * (t % 10) / 10) + 1) for t in range(30)])
    assert ends == [10, 20, 30]


@pytest.mark.parametrize(("steps", "cycles"), [(10, 3), (17, 5), (7, 7), (1000, 7)])
def test_cycles_that_do_not_divide_the_steps_differ_by_one_step(steps: int, cycles: int) -> None:
    seen, ends = rates(steps, cycles)
    assert len(ends) == cycles and ends[-1] == steps
    lengths = np.diff([0, *ends])
    assert lengths.max() - lengths.min() <= 1
    for start, end in zip([0, *ends], ends, strict=False):
        assert seen[start] > 0.2 * 0.5 * (1 + math.cos(math.pi / lengths.min())) - 1e-12
        assert all(later < earlier for earlier, later in zip(seen[start:end], seen[start + 1 : end], strict=False))


def test_every_group_keeps_its_own_rate_and_a_schedule_resumes() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.1)]
    optimizer = torch.optim.SGD(groups)
    schedule = cyclic_lr(optimizer, steps=20, cycles=2)
    for _ in range(7):
        optimizer.step()
        schedule.step()
    got = [group["lr"] for group in optimizer.param_groups]
    assert got == pytest.approx([share * 0.5 * (1 + math.cos(0.7 * math.pi)) for share in (1.0, 0.1)])
    other = cyclic_lr(torch.optim.SGD(copy.deepcopy(groups)), steps=20, cycles=2)
    other.load_state_dict(schedule.state_dict())
    assert other.phase == schedule.phase == pytest.approx(0.7)
    assert other.get_lr() == pytest.approx(got)


# -- snapshots ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_the_members_are_the_snapshots_with_their_own_statistics(network: str) -> None:
    case = NETWORKS[network]
    x, _ = case.batch()
    model = case.model(0)
    recorder = Recorder(model)
    answers = []
    for seed in range(3):
        model.load_state_dict(case.model(seed).state_dict())
        recorder.record()
        answers.append(model(x).detach())
    before = copy.deepcopy(model.state_dict())
    net = snapshots(model, recorder)
    torch.testing.assert_close(net(x), torch.stack(answers), rtol=1e-5, atol=1e-5)
    for i, state in enumerate(recorder):
        assert all(torch.equal(tensor, state[name]) for name, tensor in net.member(i).state_dict().items())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    mt.check(net, x)


def test_snapshots_of_a_network_that_draws_draw_as_it_does() -> None:
    model = mt.mc_dropout(nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2))).eval()
    model.draws = 5
    recorder, x, means = Recorder(model), torch.randn(4, 3), []
    for _ in range(3):
        model.network[0].reset_parameters()
        recorder.record()
        means.append(model(x, draws=0))
    net = snapshots(model, recorder)
    assert net(x, seed=1).shape == (15, 4, 2)
    torch.testing.assert_close(net(x, draws=0), torch.cat(means))


def test_snapshots_of_an_ensemble_are_an_ensemble_of_ensembles() -> None:
    x = torch.randn(4, 3)
    ensemble = mt.deep_ensemble(nn.Linear(3, 2), members=2).eval()
    recorder = Recorder(ensemble)
    answers = []
    for _ in range(3):
        nn.init.normal_(ensemble.weight)
        recorder.record()
        answers.append(ensemble(x).detach())
    torch.testing.assert_close(snapshots(ensemble, recorder)(x), torch.cat(answers))


# -- stochastic-gradient MCMC ------------------------------------------------------------------------------

CHAINS = 20_000
"""Coordinates of one weight, each of which is a chain of its own."""


def quadratic(theta: Tensor, precision: float, centre: float) -> Tensor:
    """A loss whose gradient pulls every chain to the centre."""
    return 0.5 * precision * (theta - centre).square().sum()


def assert_normal(samples: Tensor, mean: float, variance: float) -> None:
    """Equal to within five standard errors of independent normal samples."""
    assert abs(samples.mean().item() - mean) < 5 * math.sqrt(variance / CHAINS)
    assert abs(samples.var().item() - variance) < 5 * variance * math.sqrt(2 / CHAINS)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_langevin_steps_recover_a_known_gaussian(momentum: float) -> None:
    torch.manual_seed(0)
    lr, precision, decay, size, temperature = 0.02, 2.0, 0.5, 50, 0.7
    theta = nn.Parameter(torch.zeros(CHAINS))
    optimizer = Langevin([theta], lr, size, momentum, decay, temperature)
    for _ in range(600):
        optimizer.zero_grad()
        quadratic(theta, precision, centre=1.5).backward()
        optimizer.step()
    hessian = precision + decay
    # One step is linear in (theta, v), so the stationary covariance solves a Lyapunov equation, step size and all.
    step = np.array([[1 - lr * hessian, momentum], [-lr * hessian, momentum]])
    noise = np.ones((2, 2)) * 2 * (1 - momentum) * lr * temperature / size
    exact = solve_discrete_lyapunov(step, noise)[0, 0]
    assert exact == pytest.approx(temperature / (size * hessian), rel=0.04)  # the target, up to the step size
    assert_normal(theta.detach(), 1.5 * precision / hessian, exact)


def test_without_noise_it_is_sgd() -> None:
    start = torch.randn(50)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    langevin = Langevin([ours], 0.1, 10, momentum=0.9, weight_decay=0.01)
    langevin.noisy = False
    reference = torch.optim.SGD([theirs], 0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(20):
        for theta, optimizer in ((ours, langevin), (theirs, reference)):
            optimizer.zero_grad()
            quadratic(theta, 2.0, 1.0).backward()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
    untouched = nn.Parameter(start.clone())
    Langevin([untouched], 0.1, 10).step()
    assert torch.equal(untouched, start), "what has no gradient does not move"


class Chains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(CHAINS))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.theta


def run(sampler: CyclicSgmcmc, steps: int) -> list[Tensor]:
    """The chains after each step."""
    seen = []
    for _ in range(steps):
        quadratic(sampler.model.theta, 2.0, centre=1.0).backward()
        sampler.step()
        sampler.zero_grad()
        seen.append(sampler.model.theta.detach().clone())
    return seen


def test_a_cycle_explores_first_and_then_samples() -> None:
    torch.manual_seed(0)
    sampler = cyclic_sgmcmc(
        Chains(), 80, 2, dataset_size=30, lr=0.3, weight_decay=0.0, temperature=0.5, exploration=0.75, draws=2
    )
    mean, variance = 0.0, 0.0
    for step, theta in enumerate(run(sampler, 80)):
        phase = step % 40 / 40
        rate = 0.3 / 2 * (math.cos(math.pi * phase) + 1)
        mean += rate * 2.0 * (1.0 - mean)
        variance *= (1 - rate * 2.0) ** 2
        if phase >= 0.75:
            variance += 2 * rate * 0.5 / 30
        if variance > 1e-9:
            assert_normal(theta, mean, variance)
    assert [state["theta"].std() > 0 for state in sampler.recorder] == [True] * 4
    assert sampler.multitude().members == 4


def test_samples_are_spread_over_the_last_part_of_each_cycle() -> None:
    def recorded(**options: float) -> list[int]:
        sampler = cyclic_sgmcmc(Chains(), 100, 2, dataset_size=10, **options)
        sampler.model.theta.sum().backward()
        return [step for step in range(1, 101) if sampler.step()]

    assert recorded(exploration=0.9, draws=1) == [50, 100]
    assert recorded(exploration=0.8, draws=5) == [42, 44, 46, 48, 50, 92, 94, 96, 98, 100]
    assert recorded(exploration=0.9, draws=5) == [*range(46, 51), *range(96, 101)]
    assert recorded() == [47, 48, 50, 97, 98, 100]
    assert recorded(exploration=0.0, draws=50) == list(range(1, 101))


def test_a_sampler_trains_a_network_and_gives_its_samples() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(60, 2)
    y = (x[:, 0] > 0).long()
    sampler = cyclic_sgmcmc(model, steps=200, cycles=2, dataset_size=60, temperature=0.1)
    for _ in range(200):
        F.cross_entropy(model(x), y).backward()
        sampler.step()
        sampler.zero_grad()
    net = sampler.multitude().eval()
    assert net(x).shape == (6, 60, 2)
    assert (net.predict(x).label == y).float().mean() > 0.9
    assert net.predict(x).member_probs.std(0).max() > 0
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in net.member(5).state_dict().items())


# -- wrong input -------------------------------------------------------------------------------------------


def test_bad_arguments_are_errors() -> None:
    model = nn.Linear(2, 2)

    def sampler(**options: object) -> object:
        return cyclic_sgmcmc(model, **({"steps": 100, "cycles": 2, "dataset_size": 10} | options))

    for wrong, sentence in (
        (lambda: cyclic_lr(model, 10, 2), "optimizer must be a torch.optim.Optimizer, got Linear"),
        (lambda: cyclic_lr(sgd(), 0, 2), "steps must be a whole number, 1 or more, got 0"),
        (lambda: cyclic_lr(sgd(), 10, 2.5), "cycles must be a whole number, 1 or more, got 2.5"),
        (lambda: cyclic_lr(sgd(), 10, 11), "cycles must be at most steps=10, got 11"),
        (lambda: snapshots(model, []), "checkpoints must be 1 or more, got 0"),
        (lambda: snapshots(model, [{}]), r"checkpoints\[0\] does not fit the model: .* is missing"),
        (lambda: snapshots(3, []), "model must be an nn.Module, or a function that builds one, got int"),
        (lambda: sampler(cycles=0), "cycles must be a whole number, 1 or more, got 0"),
        (lambda: sampler(dataset_size=0), "dataset_size must be a whole number, 1 or more, got 0"),
        (lambda: sampler(lr=0), "lr must be above 0, got 0"),
        (lambda: sampler(momentum=1.0), "momentum must be 0 or more and below 1, got 1.0"),
        (lambda: sampler(momentum=-0.1), "momentum must be 0 or more and below 1, got -0.1"),
        (lambda: sampler(weight_decay=-1), "weight_decay must be 0 or more, got -1"),
        (lambda: sampler(temperature=-1), "temperature must be 0 or more, got -1"),
        (lambda: sampler(exploration=1.1), "exploration must be 0 or more and at most 1, got 1.1"),
        (lambda: sampler(draws=0), "draws must be a whole number, 1 or more, got 0"),
        (lambda: sampler(draws=6), "draws=6 do not fit into the 5 steps of a cycle"),
        (lambda: sampler().multitude(), "no sample has been recorded yet"),
    ):
        with pytest.raises(ValueError, match=sentence):
            wrong()
