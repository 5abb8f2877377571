"""Ensembles as they grow, under corruption, and by what is random."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape.growing import growth, initialisation_against_order, under_corruption, variants


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
    found = growth([variants(run, kinds=["diagonal"]) for run in runs], (X, Y), draws=4, seed=1)
    assert found.kinds == ("baseline", "diagonal", "weight averaging")
    assert found.runs == ("run 0", "run 1", "run 2")
    logits = {
        "baseline": [run.net(X)[None] for run in runs],
        "diagonal": [mt.subspace(r.net, "diagonal", r).networks(4, seed=1).predict(X).predictions for r in runs],
        "weight averaging": [mt.swa(run.net, run).predict(X).predictions for run in runs],
    }
    for row, kind in enumerate(found.kinds):
        for size in range(1, 4):
            want = by_hand(torch.cat(logits[kind][:size]), Y)
            got = [score[row, size - 1].item() for score in (found.accuracy, found.brier, found.divergence)]
            assert got == pytest.approx(want, abs=1e-6)


def test_one_solution_alone_does_not_differ_from_itself() -> None:
    found = growth([net(0), net(1)], (X, Y))
    assert float(found.divergence[0, 0]) == pytest.approx(0, abs=1e-6)
    assert float(found.divergence[0, 1]) > 0.001


def test_the_brier_score_of_an_ensemble_is_at_most_the_mean_of_its_members() -> None:
    """Since it is convex."""
    nets = [net(seed) for seed in range(4)]
    alone = [growth([one], (X, Y)).brier.item() for one in nets]
    assert float(growth(nets, (X, Y)).brier[0, -1]) <= np.mean(alone)


def test_members_of_an_ensemble_are_the_runs_that_it_grows_by() -> None:
    nets = [net(seed) for seed in range(3)]
    torch.testing.assert_close(growth(mt.fuse(nets), (X, Y)).brier, growth(nets, (X, Y)).brier)


def test_runs_must_have_the_same_kinds_and_classes_must_be_known() -> None:
    with pytest.raises(ValueError, match="same kinds in every run, but 'b' has no 'y'"):
        growth({"a": {"x": net(0), "y": net(1)}, "b": {"x": net(2)}}, (X, Y))
    with pytest.raises(ValueError, match="data must hold the true classes"):
        growth([net(0)], X)


# -- corruption --------------------------------------------------------------------------------------------


def test_scores_under_corruption_are_those_of_the_corrupted_images() -> None:
    runs = [way(0), way(1)]
    methods = {"runs": [run.net for run in runs], "random": mt.subspace(runs[0].net, "random", runs[0], scale=1.0)}
    names = ("gaussian_noise", "contrast")
    found = under_corruption(methods, X, Y, corruptions=names, severities=(0, 2, 5), draws=3, seed=4)
    assert found.methods == ("runs", "random")
    samples = methods["random"].networks(3, seed=4)  # type: ignore[union-attr]
    for t, name in enumerate(names):
        for v, severity in enumerate((0, 2, 5)):
            x = mt.shift.corrupt(X, name, severity, seed=4) if severity else X
            ensemble = torch.stack([run.net(x) for run in runs])
            for k, logits in enumerate((ensemble, samples.predict(x).predictions)):
                want = by_hand(logits, Y)
                got = [score[k, t, v].item() for score in (found.accuracy, found.brier, found.divergence)]
                assert got == pytest.approx(want, abs=1e-6)


def test_images_are_preprocessed_after_the_corruption() -> None:
    model = net(0)

    class Normalised(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return model((x - 0.5) / 0.25)

    options = {"corruptions": ["fog"], "severities": [1, 3]}
    inside = under_corruption({"m": Normalised()}, X, Y, **options)  # type: ignore[arg-type]
    outside = under_corruption({"m": model}, X, Y, preprocess=lambda x: (x - 0.5) / 0.25, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(inside.brier, outside.brier)


def test_layers_that_draw_draw_alike_for_every_image() -> None:
    dropped = mt.mc_dropout(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    )
    found = under_corruption({"m": dropped}, X, Y, corruptions=["brightness"], severities=[0, 1], draws=6, seed=2)
    want = by_hand(dropped.predict(mt.shift.corrupt(X, "brightness", 1, seed=2), draws=6, seed=2).predictions, Y)
    assert float(found.divergence[0, 0, 1]) == pytest.approx(want[2], abs=1e-6)


def test_a_network_that_is_given_twice_counts_twice() -> None:
    a, b = net(0), net(1)
    found = under_corruption({"m": [a, a, b]}, X, Y, corruptions=["contrast"], severities=[3], seed=0)
    x = mt.shift.corrupt(X, "contrast", 3, seed=0)
    assert float(found.brier[0, 0, 0]) == pytest.approx(by_hand(torch.stack([a(x), a(x), b(x)]), Y)[1], abs=1e-6)


def test_data_for_subspaces_may_come_only_once() -> None:
    run = way(0)
    kinds = variants(run, data=iter([(X, Y)]), floor=0.0, kinds=["random", "diagonal"])
    assert growth([kinds], (X, Y), draws=2).accuracy.shape == (4, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corruptions": ["rain"]}, "corruptions must be among gaussian_noise, .*, got 'rain'"),
        ({"severities": [6]}, "severities must be whole numbers from 0 to 5, got 6"),
        ({"severities": []}, "corruptions and severities must hold at least one each"),
        ({"seed": -1}, "seed must be None or a whole number"),
        ({"methods": {}}, "methods must be one or more methods by name"),
    ],
)
def test_wrong_corruptions_are_told(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        under_corruption(**({"methods": {"m": net(0)}, "images": X, "target": Y} | options))  # type: ignore[arg-type]


# -- randomness --------------------------------------------------------------------------------------------


def train(model: nn.Module, seed: int) -> None:
    """A few large steps, each on a batch that follows from torch's random state."""
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    for _ in range(10):
        rows = torch.randint(0, 30, (4,))
        optimizer.zero_grad()
        F.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()


def make(seed: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3))


def test_four_runs_differ_by_initialisation_by_order_or_by_both() -> None:
    seen = []

    def trained(model: nn.Module, seed: int) -> None:
        seen.append((model[1].weight.detach().sum().item(), seed))
        train(model, seed)

    inputs = torch.randn(200, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    found = initialisation_against_order(make, trained, inputs, seeds=(3, 8))
    (a, s0), (b, s1), (c, s2), (d, s3) = seen
    assert a == b != c == d and (s0, s1, s2, s3) == (3, 8, 3, 8)
    apart = found.similarity.disagreement
    assert found.disagreement == {
        "order": pytest.approx(float(apart[0, 1] + apart[2, 3]) / 2),
        "initialisation": pytest.approx(float(apart[0, 2] + apart[1, 3]) / 2),
        "both": pytest.approx(float(apart[0, 3] + apart[1, 2]) / 2),
    }
    assert min(found.disagreement.values()) > 0


def test_equal_seeds_give_equal_functions_on_a_cpu() -> None:
    before = torch.get_rng_state()
    found = initialisation_against_order(make, train, X, repeat=True)
    assert found.disagreement["neither"] == 0
    assert len(found.similarity.labels) == 5
    assert torch.equal(torch.get_rng_state(), before)


def test_what_makes_networks_must_make_new_ones() -> None:
    one = net(0)
    with pytest.raises(ValueError, match="make must give a new network each time"):
        initialisation_against_order(lambda seed: one, train, X)
    with pytest.raises(ValueError, match="make must give an nn.Module, got int"):
        initialisation_against_order(lambda seed: seed, train, X)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"seeds must be two different numbers, got \(1, 1\)"):
        initialisation_against_order(make, train, X, seeds=(1, 1))


# -- figures -----------------------------------------------------------------------------------------------


def test_figures_have_a_line_for_each_method() -> None:
    pytest.importorskip("plotly")
    grown = growth({"a": {"x": net(0), "y": net(1)}, "b": {"x": net(2), "y": net(3)}}, (X, Y)).plot()
    assert [trace.name for trace in grown.data] == ["x", "y"]
    assert list(grown.data[0].x) == [1, 2]
    shifted = under_corruption({"m": net(0)}, X, Y, corruptions=["fog"], severities=[0, 5]).plot()
    assert [list(trace.x) for trace in shifted.data] == [[0, 5]] * 3
    bars = initialisation_against_order(make, train, X).plot().data[0]
    assert list(bars.x) == ["order", "initialisation", "both"]
