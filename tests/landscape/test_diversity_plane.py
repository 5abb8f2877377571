"""The diversity-accuracy plane against simulated labels, and growing ensembles against the formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape import subspaces
from multitudes.landscape.accuracy_diversity import (
    DiversityPlane,
    diversity_plane,
    family,
    fit_exponent,
    lower_limit,
    normalised,
    upper_limit,
)
from multitudes.landscape.ensemble_growth import growth

N = 100_000
BOUND = 4 * 0.5 / N**0.5  # four standard errors of a share


def other_class(labels: np.ndarray, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Any class but the given one, all equally likely."""
    return (labels + rng.integers(1, classes, len(labels))) % classes


def answers(truth: np.ndarray, accuracy: float, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Labels that are right with probability `accuracy`, and else any other class."""
    right = rng.random(len(truth)) < accuracy
    return np.where(right, truth, other_class(truth, classes, rng))


def flipped(
    truth: np.ndarray, labels: np.ndarray, p_right: float, p_wrong: float, classes: int, rng: np.random.Generator
) -> np.ndarray:
    """Right labels flip to another class with one probability, wrong ones with another."""
    flips = rng.random(len(labels)) < np.where(labels == truth, p_right, p_wrong)
    return np.where(flips, other_class(labels, classes, rng), labels)


@pytest.mark.parametrize(("classes", "reference"), [(2, 0.55), (3, 0.95), (10, 0.7), (100, 0.55)])
def test_independent_labels_differ_by_the_upper_limit(classes: int, reference: float) -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, classes, N)
    own = answers(truth, reference, classes, rng)
    for accuracy in (0.1, 0.5, 0.9):
        labels = answers(truth, accuracy, classes, rng)
        limit = upper_limit(torch.tensor(accuracy), reference, classes)
        assert np.mean(labels != own) == pytest.approx(float(limit), abs=BOUND)


@pytest.mark.parametrize(("classes", "reference"), [(2, 0.55), (3, 0.95), (10, 0.7), (100, 0.55)])
def test_the_lower_limit_has_exponent_one_and_meets_the_upper_limit_at_chance(classes: int, reference: float) -> None:
    accuracy, disagreement = family(torch.linspace(0, 1, 50, dtype=torch.float64), 1.0, reference, classes)
    torch.testing.assert_close(lower_limit(accuracy, reference, classes), disagreement)
    chance = torch.tensor(1 / classes, dtype=torch.float64)
    torch.testing.assert_close(lower_limit(chance, reference, classes), upper_limit(chance, reference, classes))


@pytest.mark.parametrize(("classes", "exponent"), [(2, 0.22), (10, 0.0), (10, 3.0), (100, 1.0)])
def test_the_family_equals_simulated_flips_of_right_and_wrong_labels(classes: int, exponent: float) -> None:
    rng = np.random.default_rng(2)
    truth = rng.integers(0, classes, N)
    own = answers(truth, 0.7, classes, rng)
    for p in (0.05, 0.4, 0.9):
        labels = flipped(truth, own, p, p**exponent, classes, rng)
        accuracy, disagreement = family(torch.tensor(p), exponent, 0.7, classes)
        assert np.mean(labels == truth) == pytest.approx(float(accuracy), abs=BOUND)
        assert np.mean(labels != own) == pytest.approx(float(disagreement), abs=BOUND)


@pytest.mark.parametrize("exponent", [0.4, 2.0])
def test_a_fit_equals_the_least_squares_of_scipy(exponent: float) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(4)
    p = rng.uniform(0.05, 0.8, 12)
    accuracy, disagreement = (v.numpy() for v in family(torch.tensor(p), exponent, 0.75, 10))
    accuracy, disagreement = accuracy + rng.normal(0, 0.02, 12), disagreement + rng.normal(0, 0.02, 12)

    def residuals(unknown: np.ndarray) -> np.ndarray:
        e, flips = unknown[0], unknown[1:]
        a = 0.75 * (1 - flips) + 0.25 * flips**e / 9
        d = 0.75 * flips + 0.25 * flips**e
        return np.concatenate([a - accuracy, d - disagreement])

    want = optimize.least_squares(
        residuals, [exponent, *p], bounds=([0.01, *[0] * 12], [100, *[1] * 12]), xtol=1e-14, ftol=1e-14
    ).x[0]
    got = fit_exponent(torch.tensor(accuracy), torch.tensor(disagreement), 0.75, 10)
    assert got == pytest.approx(want, rel=5e-3)


# -- the plane of solutions --------------------------------------------------------------------------------


class Lookup(nn.Module):
    """A network that predicts a fixed label for each input number."""

    def __init__(self, labels: Tensor, classes: int) -> None:
        super().__init__()
        self.table = nn.Parameter(nn.functional.one_hot(labels, classes).float())

    def forward(self, x: Tensor) -> Tensor:
        return self.table[x]


def simulated(size: int = 4000) -> tuple[dict[str, object], tuple[Tensor, Tensor]]:
    """A reference, two more runs that know nothing of it, and perturbations of it."""
    rng = np.random.default_rng(5)
    truth = rng.integers(0, 10, size)
    own = answers(truth, 0.8, 10, rng)

    def network(labels: np.ndarray) -> nn.Module:
        return Lookup(torch.tensor(labels), 10)

    around = [network(flipped(truth, own, p, p**0.3, 10, rng)) for p in np.linspace(0.05, 0.8, 8)]
    runs = {f"run {i}": network(answers(truth, 0.8, 10, rng)) for i in (1, 2)}
    return {"run 0": {"solution": network(own), "perturbed": around}, **runs}, (torch.arange(size), torch.tensor(truth))


@pytest.fixture(scope="module")
def found() -> DiversityPlane:
    return diversity_plane(*simulated())


def test_independent_solutions_lie_on_the_upper_limit_and_perturbations_below(found: DiversityPlane) -> None:
    assert found.reference == "run 0, solution 0"
    assert found.disagreement[0] == 0 and found.diversity[0] == 0
    limit = normalised(upper_limit(found.accuracy, found.reference_accuracy, 10), found.accuracy)
    torch.testing.assert_close(found.diversity[-2:], limit[-2:], atol=0.1, rtol=0)
    assert bool((found.diversity[1:-2] < limit[1:-2]).all())
    assert found.exponents == {"perturbed": pytest.approx(0.3, abs=0.05)}  # of each kind of the reference's run


def test_diversity_is_normalised_by_the_accuracy_of_the_solution() -> None:
    solutions, (x, y) = simulated(200)
    found = diversity_plane(solutions, (x, y), reference="run 1")
    labels = torch.stack(
        [
            n.table.argmax(1)
            for n in (solutions["run 0"]["solution"], *solutions["run 0"]["perturbed"], solutions["run 1"])
        ]  # type: ignore[index]
    )
    for i, own in enumerate(labels):
        accuracy, apart = np.mean((own == y).numpy()), np.mean((own != labels[-1]).numpy())
        assert found.accuracy[i] == pytest.approx(accuracy)
        assert found.diversity[i] == pytest.approx(apart / (1 - accuracy))


def test_the_limits_of_a_plane_go_from_chance_to_its_best_solution(found: DiversityPlane) -> None:
    accuracy, lower, upper = found.limits(50)
    assert accuracy[0] == 0.1 and float(accuracy[-1]) == pytest.approx(float(found.accuracy.max()))
    assert lower.shape == upper.shape == (50,)
    assert bool((lower <= upper + 1e-12).all())


def test_a_figure_shows_solutions_limits_and_fits(found: DiversityPlane) -> None:
    pytest.importorskip("plotly")
    names = [trace.name for trace in found.plot().data]
    assert names[:2] == ["lower limit", "upper limit"]
    assert names[2] == "perturbed" and names[3].startswith("perturbed: e = 0.")
    assert names[4:] == ["other runs, network", "reference: run 0, solution 0"]


def test_a_perfect_reference_has_a_plane_without_a_fit() -> None:
    y = torch.arange(20) % 2
    solutions = {"a": {"k": [Lookup(y, 2), Lookup(1 - y, 2)]}}
    found = diversity_plane(solutions, (torch.arange(20), y), reference="a, k 0")
    assert found.exponents == {}
    assert found.diversity.tolist() == [0.0, 1.0]


# -- growth ------------------------------------------------------------------------------------------------


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3))


def walk(seed: int) -> mt.Recorder:
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


def test_growth_averages_the_first_runs_of_each_kind() -> None:
    runs = [walk(seed) for seed in range(3)]
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


def test_the_mean_prediction_of_members_is_better_than_the_members() -> None:
    """The Brier score is convex, and one solution alone does not differ from itself."""
    nets = [net(seed) for seed in range(3)]
    found = growth(mt.fuse(nets), (X, Y))
    torch.testing.assert_close(found.brier, growth(nets, (X, Y)).brier)
    assert float(found.brier[0, -1]) <= np.mean([growth([one], (X, Y)).brier.item() for one in nets])
    assert float(found.divergence[0, 0]) == pytest.approx(0, abs=1e-6) and float(found.divergence[0, 1]) > 0.001
