"""A moving average of weights in `fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from tests.zoo.predictions import raises


def batches(seed: int = 0, rows: int = 24) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.3 * torch.randn(rows, 1, generator=generator)
    return list(zip(x.split(8), y.split(8), strict=True))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.parametrize("method", ["plain", "deep", "tabm"])
def test_the_network_ends_with_the_average_of_the_steps(method: str) -> None:
    makers = {"plain": lambda m: mt.Multitude(m), "deep": lambda m: mt.deep_ensemble(m, 3, seed=0),
              "tabm": lambda m: mt.tabm(m, 3, seed=0)}  # fmt: skip
    make = makers[method]
    seen: list[dict[str, Tensor]] = []

    def see(progress: Any) -> None:
        if not progress.epoch_ended:
            seen.append({name: p.detach().clone() for name, p in progress.net.named_parameters()})

    how: dict[str, Any] = {"epochs": 4, "optimizer": "adamw", "lr": 0.01, "task": "regression", "seed": 1}
    plain, averaged = make(network()), make(network())
    want = {name: p.detach().clone() for name, p in plain.named_parameters()}
    mt.fit(plain, batches(), callbacks=[see], **how)
    for step, values in enumerate(seen, 1):
        rate = min(0.8, (1 + step) / (10 + step))
        want = {name: rate * want[name] + (1 - rate) * values[name] for name in want}
    mt.fit(averaged, batches(), average=0.8, **how)
    for name, parameter in averaged.named_parameters():
        torch.testing.assert_close(parameter, want[name])


def test_what_is_validated_is_the_average_and_the_best_of_it_is_kept() -> None:
    net = mt.Multitude(network())
    history = mt.fit(
        net, batches(), 6, optimizer="adamw", lr=0.05, task="regression", seed=0, average=0.9, validation=batches(1)
    )
    best = min(epoch.validation for epoch in history if epoch.validation is not None)
    error = torch.cat([(net.predict(x).mean - y).square() for x, y in batches(1)]).mean()
    assert error.item() == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_a_training_that_is_taken_up_again_has_the_same_average(steps: int, tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "optimizer": "adamw", "lr": 0.05, "task": "regression", "seed": 0, "average": 0.9, "epochs": 4,
        "validation": batches(1), "patience": 3,
    }  # fmt: skip
    whole, halves = mt.Multitude(network()), mt.Multitude(network())
    mt.fit(whole, batches(), **how)

    class Stop(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress.step == steps:
            raise Stop

    with pytest.raises(Stop):
        mt.fit(halves, batches(), checkpoint=tmp_path / "c", checkpoint_seconds=0, callbacks=[stop], **how)
    again = mt.Multitude(network())
    mt.fit(again, batches(), checkpoint=tmp_path / "c", checkpoint_seconds=0, **how)
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(
        ValueError, match="belongs to a training with average=0.9, but now average=0.5: delete the file"
    ):
        mt.fit(mt.Multitude(network()), batches(), checkpoint=tmp_path / "c", **(how | {"average": 0.5}))


def test_wrong_averages_are_told() -> None:
    for wrong in (0.0, 1.0, -1):
        with raises(f"average must be above 0 and below 1, got {wrong!r}"):
            mt.fit(mt.Multitude(network()), batches(), 1, task="regression", average=wrong)
