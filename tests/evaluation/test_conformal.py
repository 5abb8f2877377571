import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from multitudes.evaluation.calibrate import fit_calibration
from multitudes.evaluation.conformal import Conformal, ConformalScore, conformal_scores
from multitudes.tasks.predictive import Predictive
from tests.zoo.predictions import close, raises, randn


def classifier(inputs=1500, classes=8, members=2, sharpness=2.0, seed=0):
    """Overconfident members, by a factor of `sharpness`, and targets."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(inputs, classes, generator=generator)
    y = logits.softmax(1).multinomial(1, generator=generator)[:, 0]
    noise = 0.3 * torch.randn(members, inputs, classes, generator=generator)
    return Predictive(sharpness * (logits + noise)), y


def regressor(inputs=1500, task="gaussian", seed=0):
    """Means with skewed, heavy-tailed errors, and variances that are proportional to these but too small."""
    generator = torch.Generator().manual_seed(seed)
    mean, log_scale = torch.randn(2, inputs, 1, generator=generator)
    error = torch.distributions.Exponential(1.0).icdf(torch.rand(inputs, 1, generator=generator)).square() - 1
    spread = 0.5 * torch.randn(3, inputs, 1, generator=generator)
    means = mean + log_scale.exp() * spread
    raw = torch.cat([means, (2 * log_scale).expand_as(means)], 2)
    return Predictive(raw if task == "gaussian" else means, task), mean + log_scale.exp() * error


def assert_coverage(p, y, score, levels=(0.8, 0.9, 0.95), splits=200, n=500, **settings):
    """Over random divisions into old and new inputs, the mean share of new targets in their sets is the level.

    It is between the level and `1 / (n + 1)` more, within three standard errors.
    """
    shares = {level: [] for level in levels}
    for split in range(splits):
        order = torch.randperm(len(p), generator=torch.Generator().manual_seed(split))
        old, new = order[:n], order[n:]
        fitted, unseen = Conformal.fit(p[old], y[old], ConformalScore(score, **settings), seed=split), p[new]
        for level in levels:
            chosen = fitted.set(unseen, level, seed=split)
            if p.task == "classification":
                inside = chosen.gather(1, y[new].unsqueeze(1))
            else:
                inside = (chosen[0] <= y[new]) & (y[new] <= chosen[1])
            shares[level].append(inside.double().mean())
    for level, of_splits in shares.items():
        of_splits = torch.stack(of_splits)
        mean, error = float(of_splits.mean()), float(of_splits.std()) / math.sqrt(splits)
        assert level - 3 * error <= mean <= level + 1 / (n + 1) + 3 * error
        assert n < 500 or abs(mean - level) < 0.02


# Coverage ---------------------------------------------------------------------------------------------------

SETS = [
    ("lac", {}),
    ("aps", {}),
    ("aps", {"randomized": True}),
    ("raps", {"k_reg": 2, "penalty": 0.05}),
    ("raps", {"k_reg": 0, "penalty": 0.1, "randomized": True}),
]


@pytest.mark.parametrize(("score", "settings"), SETS, ids=str)
def test_sets_have_the_promised_coverage(score, settings):
    p, y = classifier()
    assert (p.label == y).double().mean() < 0.78  # else the most probable class alone would be enough
    assert_coverage(p, y, score, **settings)


@pytest.mark.parametrize("task", ["regression", "gaussian"])
@pytest.mark.parametrize("score", ["absolute", "scaled"])
def test_intervals_have_the_promised_coverage(score, task):
    assert_coverage(*regressor(task=task), score)


def test_small_calibration_sets_keep_the_coverage():
    p, y = classifier(inputs=500)
    assert_coverage(p, y, "lac", [0.9], splits=300, n=9)  # the threshold is the largest of nine scores


def test_correlated_pixels_have_the_promised_mean_coverage():
    generator = torch.Generator().manual_seed(0)
    sharpness = torch.randn(400, 1, 1, 1, generator=generator).exp()  # of an image: hard ones are hard everywhere
    logits = sharpness * torch.randn(400, 4, 5, 5, generator=generator)
    y = logits.softmax(1).movedim(1, -1).flatten(0, -2).multinomial(1, generator=generator).view(400, 5, 5)
    assert_coverage(Predictive(3 * logits[None]), y, "lac", [0.8], splits=300, n=9)


def test_sets_of_a_good_network_hold_only_the_most_probable_class():
    p, y = classifier(sharpness=1.0)
    y = torch.where(torch.rand(len(y), generator=torch.Generator().manual_seed(1)) < 0.97, p.label, y)
    chosen = Conformal.fit(p, y, "aps").set(p, 0.9)
    assert torch.equal(chosen, torch.nn.functional.one_hot(p.label, 8).bool())
    assert_coverage(p, y, "aps", [0.9], randomized=True)  # randomized sets hold no more than they must


# Scores -----------------------------------------------------------------------------------------------------


def by_hand(probs, c, score, k_reg=5, penalty=0.01):
    """The score of class `c`, by loops."""
    if score == "lac":
        return 1 - probs[c]
    before = [i for i, p in enumerate(probs) if p > probs[c] or (p == probs[c] and i < c)]
    rank = len(before) + 1
    return sum(probs[i] for i in before) + (penalty * max(0, rank - k_reg) if score == "raps" else 0)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("score", "settings"), [("lac", {}), ("aps", {}), ("raps", {"k_reg": 1, "penalty": 0.3})])
def test_scores_and_sets_are_those_of_loops(score, settings, ties):
    logits = randn(2, 30, 5).round() if ties else randn(2, 30, 5)
    p, y = Predictive(logits), torch.arange(30) % 5
    probs = p.probs.double().numpy()
    expected = np.array([[by_hand(row, c, score, **settings) for c in range(5)] for row in probs])
    own = expected[np.arange(30), y.numpy()]
    close(conformal_scores(p, y, ConformalScore(score, **settings)), own, atol=1e-12)
    fitted = Conformal.fit(p, y, ConformalScore(score, **settings))
    for level in (0.3, 0.6, 0.9):
        threshold = np.sort(own)[math.ceil(31 * level) - 1]
        assert fitted.threshold(level) == pytest.approx(threshold, abs=1e-12)
        assert np.array_equal(fitted.set(p, level).numpy(), expected <= threshold + 1e-9)


def test_randomized_sets_are_repeatable_by_their_seed(monkeypatch):
    p, y = classifier(200)

    def fitted():
        return Conformal.fit(p, y, ConformalScore("aps", randomized=True), seed=1)

    one = fitted()
    scores, chosen = one.scores, one.set(p, 0.9, seed=3)
    assert torch.equal(one.set(p, 0.9, seed=3), chosen)
    assert not torch.equal(one.set(p, 0.9, seed=4), chosen)
    assert torch.equal(fitted().scores, scores)
    monkeypatch.setattr("multitudes.evaluation.conformal._CHUNK", 60)  # of inputs that are sorted together
    close(fitted().scores, scores, atol=1e-12)
    assert torch.equal(fitted().set(p, 0.9, seed=3), chosen)  # ties are held to within 1e-6


# The finite-sample quantile ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 9, 10, 19, 99, 100, 999])
def test_the_threshold_is_the_score_of_the_right_rank(n):
    scores = torch.arange(1, n + 1).double()
    fitted = Conformal(ConformalScore("lac"), scores, torch.ones(n).double())
    for hundredths in range(1, 100):
        rank = math.ceil((n + 1) * Fraction(hundredths, 100))
        assert fitted.threshold(hundredths / 100) == (rank if rank <= n else math.inf)


@pytest.mark.parametrize(
    ("n", "level", "everything"), [(1, 0.9, True), (9, 0.9, False), (9, 0.95, True), (1, 0.5, False)]
)
def test_without_enough_data_sets_hold_everything(n, level, everything):
    p, y = classifier(n)
    new, _ = classifier(50, seed=1)
    assert bool(Conformal.fit(p, y, "lac").set(new, level).all()) == everything
    for task in ("regression", "gaussian"):
        p, y = regressor(n, task)
        low, high = Conformal.fit(p, y).set(regressor(50, task, seed=1)[0], level)
        assert bool((low == -math.inf).all() and (high == math.inf).all()) == everything


def test_each_image_has_the_same_weight():
    p = Predictive(randn(1, 3, 4, 2, 3))
    y = torch.randint(0, 4, (3, 2, 3), generator=torch.Generator().manual_seed(0))
    y[0] = 255
    y[0, 0, 0], y[1, 0, :2] = 2, 255
    fitted = Conformal.fit(p, y, "lac", ignore=255)
    images = [[1 - float(q) for q in p.probs[i].double().gather(0, own[None].clamp(max=3))[0][own != 255]]
              for i, own in enumerate(y)]  # fmt: skip
    assert [len(image) for image in images] == [1, 4, 6] and len(fitted.scores) == 11
    for level in (0.2, 0.5, 0.7):
        reached = [s for s in sorted(itertools.chain(*images))
                   if sum(np.mean([t <= s for t in image]) for image in images) >= 4 * level]  # fmt: skip
        assert fitted.threshold(level) == pytest.approx(reached[0], abs=1e-12)
    assert fitted.threshold(0.76) == math.inf  # 4 * 0.76 is more than 3 images


# Intervals --------------------------------------------------------------------------------------------------


def test_the_width_of_intervals_is_the_score_of_the_right_rank():
    p, y = regressor(19)
    residual = (y - p.mean).abs().double()
    low, high = Conformal.fit(p, y, "absolute").set(p, 0.9)
    close(high - p.mean, torch.full_like(p.mean, float(residual.flatten().sort().values[17])))
    close(p.mean - low, high - p.mean)
    low, high = Conformal.fit(p, y, "scaled").set(p, 0.9)
    close(high - p.mean, p.std * float((residual / p.std).flatten().sort().values[17]))
    close(p.mean - low, high - p.mean)


def test_intervals_are_closed_so_that_ties_count():
    y = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0, 5.0, 1.0, 0.0, 1.0])
    p = Predictive(torch.full((1, 9), 0.3), task="regression")
    low, high = Conformal.fit(p, y).set(p, 0.6)  # the 6th of 9 residuals is one of five that are 0.7
    assert torch.equal((low <= y) & (y <= high), y <= 1)


# What is wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, -0.1, 90, math.nan, "0.9"])
def test_a_level_lies_between_0_and_1(level):
    p, y = classifier(20)
    with raises(f"level must be above 0 and below 1, got {level!r}"):
        Conformal.fit(p, y).set(p, level)


def scores_of_numbers(target):
    return conformal_scores(regressor(4)[0], target)


WRONG = [
    (lambda: ConformalScore("apps"), "score must be one of absolute, aps, cqr, lac, raps, scaled, got 'apps'"),
    (lambda: ConformalScore("raps", k_reg=-1), "k_reg must be a whole number, 0 or more, got -1"),
    (lambda: ConformalScore("raps", penalty=-0.1), "penalty must be 0 or more, got -0.1"),
    (lambda: ConformalScore("lac", randomized=True), "randomized=True needs score 'aps' or 'raps', got 'lac'"),
    (lambda: ConformalScore("aps", randomized=1), "randomized must be True or False, got 1"),
    (lambda: conformal_scores(*classifier(20), "scaled"),
     "score must be one of aps, lac, raps for classification, got 'scaled'"),
    (lambda: conformal_scores(*regressor(20, "regression"), "aps"),
     "score must be one of absolute, scaled for regression, got 'aps'"),
    (lambda: conformal_scores(Predictive(torch.tensor([[1.0, 2], [2, 2]]), "regression"), torch.zeros(2), "scaled"),
     "score 'scaled' needs standard deviations above 0, got 0 at index [1]: use members that differ, "
     "task='gaussian', or score 'absolute'"),
    (lambda: scores_of_numbers(torch.zeros(4)), "target must have the shape of one member's means, [4, 1], got [4]"),
    (lambda: scores_of_numbers(torch.tensor([[0.0], [1.0], [math.nan], [0.0]])),
     "target must hold finite values, got nan at index [2, 0]"),
    (lambda: scores_of_numbers(torch.zeros(4, 1, dtype=torch.bool)),
     "target must be a tensor of real values [4, 1], got torch.bool"),
    (lambda: scores_of_numbers([0.0]), "target must be a tensor of real values [4, 1], got list"),
    (lambda: conformal_scores(*regressor(4, "regression"), ignore=255),
     "ignore must be None for predictions of task regression, got 255"),
    (lambda: conformal_scores(classifier(4)[0], torch.tensor([0, 1, 8, 9])),
     "target must lie within 0 and 7, got 8 at index [2]"),
    (lambda: fit_calibration(*classifier(4), seed=-1),
     "seed must be None or a whole number, 0 or more and below 2**63, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("use", "sentence"), WRONG)
def test_invalid_arguments_raise_an_error(use, sentence):
    with raises(sentence):
        use()
