"""Costs of a method against closed forms, and times of a study in turns."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from multitudes.ensemble.multitude import Multitude
from multitudes.lab.study.run import costs
from multitudes.lab.study.run.costs import BATCH, TimedPrediction, TrainingStep, in_turns, multiply_adds, parameters
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.run.worker import run as run_job
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec
from multitudes.methods.batch_ensemble import batch_ensemble
from multitudes.methods.deep_ensemble import deep_ensemble
from multitudes.methods.dropout import drop_connect, mc_dropout
from multitudes.methods.mimo import mimo
from multitudes.methods.snapshots import snapshots
from multitudes.methods.subspace import swag
from multitudes.methods.variance import variance

FIRST, SECOND, LAST = 8 * 8 * 9 * 1 * 4, 4 * 4 * 9 * 4 * 6, 2 * 2 * 6 * 10
"""Multiply-adds of the layers: points of the output x weights of a point's sum x channels."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5),
        nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 10),
    )  # fmt: skip


SHIFTED = [{name: value + i for name, value in network().state_dict().items()} for i in range(3)]


def drawing(net: Multitude, draws: int = 7) -> Multitude:
    net.draws = draws
    return net


@pytest.mark.parametrize(
    ("net", "want"),
    [
        (Multitude(network()), FIRST + SECOND + LAST),
        (deep_ensemble(network(), 5), 5 * (FIRST + SECOND + LAST)),
        (batch_ensemble(network(), 3), 3 * (FIRST + SECOND + LAST)),
        (snapshots(network(), [network().state_dict()] * 2), 2 * (FIRST + SECOND + LAST)),
        (mimo(network(), 3, example=torch.zeros(2, 1, 8, 8)), 3 * FIRST + SECOND + 3 * LAST),
        # What comes before the first layer that draws is computed once.
        (drawing(mc_dropout(network())), FIRST + 7 * (SECOND + LAST)),
        (drawing(drop_connect(network(), 0.1)), 7 * (FIRST + SECOND + LAST)),
        # A mean and a variance of each random layer: of the first one once.
        (drawing(variance(network())), 2 * FIRST + 7 * (2 * SECOND + LAST)),
        # Weights around a trajectory: also the product of a draw's noise with three checkpoints of all weights.
        (drawing(swag(network(), SHIFTED)), 7 * (FIRST + SECOND + LAST + 3 * parameters(network()))),
    ],
    ids=["single", "deep", "batch_ensemble", "snapshots", "mimo", "mc_dropout", "drop_connect", "variance", "swag"],
)
def test_multiply_adds_count_all_members_and_draws(net: Multitude, want: int) -> None:
    assert multiply_adds(net, torch.randn(5, 1, 8, 8)) == want


@pytest.mark.parametrize("runner", ["loop", "packed", "vmapped"])
def test_multiply_adds_are_the_same_by_every_runner(runner: str) -> None:
    net = deep_ensemble(network(), 3)
    net.runner = runner
    assert multiply_adds(net, torch.randn(2, 1, 8, 8)) == 3 * (FIRST + SECOND + LAST)


def test_parameters_of_members_add_up_and_shared_ones_count_once() -> None:
    single = 4 * 9 + 4 + 6 * 4 * 9 + 6 + 24 * 10 + 10
    assert parameters(network()) == single
    assert parameters(deep_ensemble(network(), 4)) == 4 * single
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    assert parameters(tied) == 9 + 3 + 3


# -- training ----------------------------------------------------------------------------------------------


def by_sgd(net: Multitude) -> dict[str, Any]:
    return {"optimizer": "sgd", "lr": 0.1, "momentum": 0.0}


def test_the_memory_of_a_step_holds_weights_gradients_and_optimizer_state() -> None:
    net = Multitude(nn.Linear(10_000, 10, bias=False))
    x, y = torch.randn(2, 10_000), torch.tensor([0, 1])
    weights = 4 * 100_000
    assert TrainingStep(net, x, y, by_sgd).peak_bytes() == pytest.approx(2 * weights, rel=0.01)
    adam = TrainingStep(net, x, y, lambda net: {"optimizer": "adam", "lr": 0.1})
    assert adam.peak_bytes() >= 4 * weights  # and two moments, and what a step needs in passing


def test_the_memory_of_a_step_grows_with_its_activations() -> None:
    net = Multitude(nn.Sequential(nn.Linear(4, 1000), nn.Sigmoid(), nn.Linear(1000, 2)))

    def peak(batch: int) -> int:
        return TrainingStep(net, torch.randn(batch, 4), torch.zeros(batch, dtype=torch.long), by_sgd).peak_bytes()

    # Backwards: the sigmoid's output, its gradient and its input's.
    assert 2 * 4 * 1000 * 64 <= peak(128) - peak(64) <= 4 * 4 * 1000 * 64


def test_a_deep_ensemble_needs_the_memory_of_its_members() -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    x, y = torch.randn(256, 64), torch.zeros(256, dtype=torch.long)
    single, deep = (TrainingStep(net, x, y, by_sgd) for net in (Multitude(model), deep_ensemble(model, 6)))
    weights, activations = 4 * sum(p.numel() for p in model.parameters()), 4 * 256 * 2 * 512
    # Each member's gradients are made when its activations are no longer needed.
    assert 6 * (weights + activations) <= deep.peak_bytes() <= 6 * single.peak_bytes()
    assert deep.seconds() > 0


def test_measuring_changes_neither_the_network_nor_the_random_state() -> None:
    net = deep_ensemble(network(), 2)
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    step = TrainingStep(net, x, torch.tensor([0, 1, 2, 3]), by_sgd)
    step.peak_bytes(), step.seconds(), TimedPrediction(net, x).seconds()
    multiply_adds(net, x)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


# -- inference ---------------------------------------------------------------------------------------------


class Slow(nn.Module):
    """Takes 10 milliseconds for each input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01 * len(x))
        return x


def test_a_slow_network_is_timed_with_a_smaller_batch() -> None:
    assert TimedPrediction(Multitude(Slow()), torch.randn(64, 2)).batch == 16
    assert TimedPrediction(Multitude(Slow()), torch.randn(64, 2), batch=5).batch == 5
    quick = TimedPrediction(Multitude(nn.Identity()), torch.randn(500, 2))
    assert quick.batch == BATCH and quick.seconds() > 0


def test_a_step_can_be_timed_at_a_learning_rate_that_needs_a_warm_up() -> None:
    x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))
    found = TrainingStep(Multitude(network()), x, y, lambda net: {"optimizer": "sgd", "lr": 1e6, "warmup": 0})
    assert found.seconds() > 0


# -- in turns ----------------------------------------------------------------------------------------------


def test_ratios_do_not_depend_on_a_disturbance_of_a_round() -> None:
    """The machine is twice as slow in every other round."""
    calls: list[str] = []

    def timed(name: str, seconds: float) -> float:
        calls.append(name)
        return seconds * (1 + (len(calls) - 1) // 3 % 2)

    timings = {name: lambda name=name, s=s: timed(name, s) for name, s in (("a", 1.0), ("b", 3.0), ("c", 0.5))}
    found = in_turns(timings, "a", rounds=8)
    assert calls == ["a", "b", "c"] * 8
    assert [(each.ratio, each.low, each.high) for each in found.values()] == [(1, 1, 1), (3, 3, 3), (0.5, 0.5, 0.5)]
    assert found["b"].seconds == 4.5  # the median of 3 and 6


def test_the_spread_of_a_ratio_is_between_its_quartiles_over_rounds() -> None:
    times = iter([2.0, 4.0, 3.0, 5.0, 6.0])
    found = in_turns({"a": lambda: 1.0, "b": lambda: next(times)}, "a", rounds=5)["b"]
    assert (found.low, found.ratio, found.high) == (3.0, 4.0, 5.0)


def test_rounds_end_at_the_time_limit() -> None:
    count = []
    in_turns({"a": lambda: count.append(1) or 1.0}, "a", rounds=9, limit=0.0)
    assert len(count) == 1


# -- times of a study --------------------------------------------------------------------------------------

METHODS = {"single": {}, "deep": {"members": 3}, "mc_dropout": {}, "snapshots": {}}


def study(folder: Path, **options: object) -> Run:
    small = {"epochs": 4, "shift": [], "device": "cpu", "limit": 40, "draws": 3, **options}
    run = prepare(Spec.of(data="digits", methods=METHODS, seeds=[0], **small), folder)
    for job in run.missing:
        run_job(job.directory)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return study(tmp_path_factory.mktemp("study"))


def test_times_count_members_and_draws(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace seconds by the work: members and draws of a prediction, members of a step."""
    monkeypatch.setattr(costs.TimedPrediction, "seconds", lambda self: float(len(self.net.predict(self.x).predictions)))
    monkeypatch.setattr(costs.TrainingStep, "seconds", lambda self: float(self.net.members))
    found = costs.measure_times(run)
    assert found is not None
    ratios = {label: (own["inference"]["ratio"], own["training"]["ratio"]) for label, own in found["methods"].items()}
    assert ratios["single"] == (1, 1) and ratios["deep"] == (3, 3) and ratios["mc_dropout"] == (3, 1)
    assert ratios["snapshots"][0] > 1 and ratios["snapshots"][1] == 1
    assert found["machine"]["device"] == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [True, False])
def test_compared_networks_have_the_same_memory_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels_last: bool
) -> None:
    seen: list[bool] = []

    def once(self: costs.TimedPrediction) -> float:
        wide = [weight for weight in self.net.parameters() if weight.dim() == 4 and weight.shape[1] > 1]
        seen.extend(weight.is_contiguous(memory_format=torch.channels_last) for weight in wide)
        return 1.0

    run = study(tmp_path, channels_last=channels_last)
    monkeypatch.setattr(costs.TimedPrediction, "once", once)
    costs.measure_times(run)
    assert seen and set(seen) == {channels_last}


def test_a_study_without_results_has_no_times(tmp_path: Path) -> None:
    run = prepare(Spec.of(data="digits", methods=METHODS, seeds=[0], device="cpu"), tmp_path)
    assert costs.measure_times(run) is None
