"""Ensembles as they grow, and runs of controlled seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape import subspaces
from multitudes.landscape.ensemble_growth import growth


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3))


def way(seed: int) -> mt.Recorder:
    model = net(seed)
    recorder = mt.Recorder(model)
    for _ in range(8):
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        recorder.step()
    return recorder


GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(30, 1, 8, 8, generator=GENERATOR)
Y = torch.randint(0, 3, (30,), generator=GENERATOR)


def by_hand(logits: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Accuracy, Brier score and JS divergence of `[S, B, C]`, by the formulas."""
    p = F.softmax(logits.double(), 2).detach().numpy()
    mean, truth = p.mean(0), np.eye(p.shape[2])[y.numpy()]
    entropy = -(p * np.log(p)).sum(2).mean(0)
    js = -(mean * np.log(mean)).sum(1) - entropy
    return float((mean.argmax(1) == y.numpy()).mean()), float(((mean - truth) ** 2).sum(1).mean()), float(js.mean())


# -- growth ------------------------------------------------------------------------------------------------


def test_the_first_runs_are_averaged_kind_by_kind() -> None:
    runs = [way(seed) for seed in range(3)]
    around = [{"baseline": r.net, **subspaces(r, kinds=["diagonal"]), "mean": mt.swa(r.net, r)} for r in runs]
    found = growth(around, (X, Y), draws=4, seed=1)
    assert found.kinds == ("baseline", "diagonal", "mean")
    assert found.runs == ("run 0", "run 1", "run 2")
    logits = {
        "baseline": [run.net(X)[None] for run in runs],
        "diagonal": [mt.subspace(r.net, "diagonal", r).networks(4, seed=1).predict(X).predictions for r in runs],
        "mean": [mt.swa(run.net, run).predict(X).predictions for run in runs],
    }
    for row, kind in enumerate(found.kinds):
        for size in range(1, 4):
            want = by_hand(torch.cat(logits[kind][:size]), Y)
            got = [score[row, size - 1].item() for score in (found.accuracy, found.brier, found.divergence)]
            assert got == pytest.approx(want, abs=1e-6)
    pytest.importorskip("plotly")
    traces = found.plot().data
    assert [trace.name for trace in traces] == ["baseline", "diagonal", "mean"] and list(traces[0].x) == [1, 2, 3]


def test_the_members_of_an_ensemble_are_runs_whose_mean_prediction_is_better_than_they_are() -> None:
    """The Brier score is convex, and one solution alone does not differ from itself."""
    nets = [net(seed) for seed in range(3)]
    found = growth(mt.fuse(nets), (X, Y))
    torch.testing.assert_close(found.brier, growth(nets, (X, Y)).brier)
    assert float(found.brier[0, -1]) <= np.mean([growth([one], (X, Y)).brier.item() for one in nets])
    assert float(found.divergence[0, 0]) == pytest.approx(0, abs=1e-6) and float(found.divergence[0, 1]) > 0.001
