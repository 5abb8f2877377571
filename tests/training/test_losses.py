"""Losses that are read late: fused optimizers skip bad steps, and nothing else changes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from multitudes.training import late_losses as losses
from multitudes.training.fit import fit
from tests.training.training_cases import X, Y

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    # Fused optimizers skip steps on a CPU too.
    monkeypatch.setattr(losses, "can_skip_steps", lambda optimizer: optimizer.defaults["fused"])
    return request.param


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


OPTIMIZERS = {
    "sgd": lambda parameters, fused: torch.optim.SGD(parameters, 0.1, 0.9, fused=fused),
    "adam": lambda parameters, fused: torch.optim.Adam(parameters, 1e-2, fused=fused),
}


def trained(device: str, batches, name: str = "sgd", fused: bool = True, **options) -> tuple[nn.Module, list]:
    net = network().to(device)
    history = fit(net, batches, 2, optimizer=lambda p: OPTIMIZERS[name](p, fused), schedule="constant", **options)
    return net, history


def batches(count: int = 4) -> list:
    return list(zip(X.split(16)[:count], Y.split(16)[:count], strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_late_reading_does_not_change_training(device, name):
    late, history = trained(device, batches(), name)
    waiting, expected = trained(device, batches(), name, fused=False)
    torch.testing.assert_close(late.state_dict(), waiting.state_dict())
    assert [epoch.loss for epoch in history] == pytest.approx([epoch.loss for epoch in expected])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [1, 2, 3])
def test_a_bad_loss_is_reported_for_its_step_and_changes_no_weight(device, name, bad):
    good = batches()
    kept: list[dict] = []
    after = [lambda progress: kept.append({n: p.detach().clone() for n, p in progress.net.named_parameters()}) and None]
    net = network().to(device)
    optimizer = OPTIMIZERS[name](net.parameters(), True)
    wrong = [*good[:bad], (X[:16] * math.nan, Y[:16]), *good[bad:]]
    with pytest.raises(
        FloatingPointError, match=rf"the loss is nan at step {bad + 1} \(epoch 1\).*the input holds NaN"
    ):
        fit(net, wrong, 2, optimizer=lambda parameters: optimizer, schedule="constant", callbacks=after)
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, kept[bad - 1][name])
    assert not hasattr(optimizer, "found_inf")


def test_the_last_loss_is_read_too(device):
    with pytest.raises(FloatingPointError, match=r"step 4 \(epoch 1\)"):
        trained(device, [*batches(3), (X[:16] * math.nan, Y[:16])])


def test_a_callback_gets_the_loss_of_its_step(device):
    seen: list[float] = []
    _, history = trained(device, batches(), callbacks=[lambda p: seen.append(p.loss)])
    assert seen[4] == history[0].loss == pytest.approx(sum(seen[:4]) / 4)


def test_only_fused_optimizers_on_a_gpu_read_late():
    for fused in (True, False):
        assert not losses.can_skip_steps(torch.optim.Adam(nn.Linear(2, 2).parameters(), fused=fused))
    if torch.cuda.is_available():
        assert losses.can_skip_steps(torch.optim.Adam(nn.Linear(2, 2).cuda().parameters(), fused=True))
        assert not losses.can_skip_steps(torch.optim.Adam(nn.Linear(2, 2).cuda().parameters()))
