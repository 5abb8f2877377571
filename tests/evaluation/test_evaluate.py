"""Each score of `evaluate` equals its metric on predictions made by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import multitudes as mt
from multitudes import metrics
from multitudes.evaluation.evaluate import evaluate
from multitudes.evaluation.scores import Evaluation, Score
from multitudes.metrics.ood import detect
from multitudes.metrics.robustness import mean_corruption_error, relative_mean_corruption_error
from multitudes.networks.seeds import mixed

torch.manual_seed(0)
X, Y = torch.rand(60, 1, 8, 8), torch.randint(4, (60,))
OTHER = torch.rand(40, 1, 8, 8) ** 4
LOADER = DataLoader(TensorDataset(X, Y), 16)


def ensemble(outputs: int = 4) -> mt.Multitude:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, outputs))
    return mt.deep_ensemble(model, 3, seed=0)


@pytest.fixture(scope="module")
def net():
    return ensemble()


@pytest.mark.parametrize(
    "data",
    [(X, Y), LOADER, list(LOADER), iter(LOADER), [{"input": X, "labels": Y}]],
    ids=["pair", "loader", "list", "iterator", "mapping"],
)
def test_scores_are_those_of_the_metrics(net, data):
    result = evaluate(net, data)
    p = net.predict(X)
    expected = {
        "accuracy": metrics.accuracy(p, Y), "nll": metrics.nll(p, Y), "brier": metrics.brier(p, Y),
        "ece": metrics.ece(p, Y), "mce": metrics.mce(p, Y), "adaptive_ece": metrics.adaptive_ece(p, Y),
        "classwise_ece": metrics.classwise_ece(p, Y), "overconfidence": metrics.overconfidence(p, Y),
        "aurc": metrics.selective.aurc(p, Y), "accuracy_at_90": metrics.selective.accuracy_at_coverage(p, Y, 0.9),
        "member_error": metrics.member_error(p, Y), "disagreement": metrics.diversity.disagreement(p),
        "ensemble_js": metrics.divergences.ensemble_js(p), "balanced_accuracy": metrics.balanced_accuracy(p, Y),
    }  # fmt: skip
    assert dict(result) == pytest.approx({name: float(value) for name, value in expected.items()})
    assert set(result.counts.values()) == {60}


def test_bins_and_min_count_reach_the_calibration_errors(net):
    result, p = evaluate(net, LOADER, bins=4, min_count=9), net.predict(X)
    assert result["ece"] == pytest.approx(float(metrics.ece(p, Y, bins=4, min_count=9)))
    assert result["mce"] == pytest.approx(float(metrics.mce(p, Y, bins=4, min_count=9)))
    for name in ("classwise_ece", "adaptive_ece"):
        assert result[name] == pytest.approx(float(getattr(metrics, name)(p, Y, bins=4)))
    for name in ("bins", "min_count"):
        with pytest.raises(ValueError, match=f"{name} must be a whole number, 1 or more, got 0"):
            evaluate(net, LOADER, **{name: 0})


def test_watch_receives_every_prediction_of_data_and_ood_data(net):
    received: dict = {}

    def watch(name, p, target):
        received.setdefault(name, []).append((p, target))

    evaluate(net, LOADER, ood={"other": OTHER}, shift="contrast", severities=[1], watch=watch)
    assert list(received) == [None, "other"]
    seen = mt.Predictive.concat([p for p, _ in received[None]])
    torch.testing.assert_close(seen.predictions, net.predict(X).predictions)
    assert torch.equal(torch.cat([target for _, target in received[None]]), Y)
    torch.testing.assert_close(received["other"][0][0].predictions, net.predict(OTHER).predictions)
    assert received["other"][0][1] is None


@pytest.mark.parametrize(("tasks", "names"), [("selective", ["aurc", "accuracy_at_90"]), (["scores"], ["accuracy"])])
def test_groups_of_scores_can_be_chosen(net, tasks, names):
    assert [name for name in evaluate(net, LOADER, tasks=tasks)][: len(names)] == names
    assert "ece" not in evaluate(net, LOADER, tasks=tasks)


def test_corrupted_data_have_the_scores_of_corruptions_by_hand(net):
    result = evaluate(net, LOADER, shift=["fog", "gaussian_noise"], severities=[1, 5], preprocess=lambda x: 2 * x)
    for name, severity in (("fog", 1), ("gaussian_noise", 5)):
        seeds = [mixed(0, batch) % 2**63 for batch in range(4)]
        parts = [mt.shift.corrupt(x, name, severity, seed=s) for x, s in zip(X.split(16), seeds, strict=True)]
        p = mt.Predictive.concat([net.predict(2 * part) for part in parts])
        for measure in ("accuracy", "nll", "brier", "ece"):
            expected = float(getattr(metrics, measure)(p, Y))
            assert result[f"shift/{name}/{severity}/{measure}"] == pytest.approx(expected)
    fog, noise = result["shift/fog/5/nll"], result["shift/gaussian_noise/5/nll"]
    assert result["shift/mean/5/nll"] == pytest.approx((fog + noise) / 2)
    every = [result[f"shift/{name}/{s}/ece"] for name in ("fog", "gaussian_noise") for s in (1, 5)]
    assert result["shift/mean/ece"] == pytest.approx(sum(every) / 4) and result.counts["shift/mean/ece"] == 240
    assert result["nll"] == pytest.approx(float(metrics.nll(net.predict(2 * X), Y)))


def test_corruptions_are_the_same_in_every_evaluation_with_the_same_seed(net):
    shift = {"shift": "gaussian_noise", "severities": [5]}
    first, second, other = (evaluate(net, LOADER, **shift, seed=seed) for seed in (None, None, 7))
    assert dict(first) == dict(second)
    assert first["shift/gaussian_noise/5/nll"] != other["shift/gaussian_noise/5/nll"]


def test_shift_true_runs_all_fifteen_corruptions(net):
    result = evaluate(net, (X[:4], Y[:4]), shift=True, severities=[3], tasks="scores")
    assert {name.split("/")[1] for name in result if name.startswith("shift/")} == {*mt.shift.CORRUPTIONS, "mean"}


def test_a_baseline_adds_relative_errors(net):
    shift = {"shift": ["gaussian_noise", "impulse_noise"], "severities": [2, 5], "preprocess": lambda x: x - 0.5}
    labelled = (X, net.predict(X - 0.5).label)  # so that noise has something to spoil
    baseline = evaluate(net.member(1), labelled, **shift)
    result = evaluate(net, labelled, baseline=baseline, **shift)

    def table(r, measure):
        return {n: [r[f"shift/{n}/{s}/{measure}"] for s in (2, 5)] for n in ("gaussian_noise", "impulse_noise")}

    def errors(r):
        return {name: [1 - value for value in row] for name, row in table(r, "accuracy").items()}

    assert result["shift/mean_corruption_error"] == pytest.approx(
        float(mean_corruption_error(errors(result), errors(baseline)))
    )
    clean, their_clean = 1 - result["accuracy"], 1 - baseline["accuracy"]
    relative = relative_mean_corruption_error(errors(result), clean, errors(baseline), their_clean)
    assert result["shift/relative_mean_corruption_error"] == pytest.approx(float(relative))
    for name, measure in (("mcnll", "nll"), ("mcece", "ece")):
        expected = mean_corruption_error(table(result, measure), table(baseline, measure))
        assert result[f"shift/{name}"] == pytest.approx(float(expected))
    itself = evaluate(net, labelled, baseline=result, **shift)
    assert itself["shift/mean_corruption_error"] == itself["shift/relative_mean_corruption_error"] == pytest.approx(1)


def test_relative_errors_exist_for_every_group_of_scores(net):
    shift = {"shift": ["gaussian_noise"], "severities": [5]}
    whole, part = (evaluate(net.member(1), LOADER, tasks=tasks, **shift) for tasks in (None, "calibration"))
    relative = ["shift/mean_corruption_error", "shift/mcnll", "shift/mcece"]
    expected = evaluate(net, LOADER, baseline=whole, **shift)
    assert "shift/relative_mean_corruption_error" in expected
    for tasks, baseline in (("calibration", whole), ("calibration", part), (None, part)):
        result = evaluate(net, LOADER, tasks=tasks, baseline=baseline, **shift)
        assert {name: result[name] for name in relative} == {name: expected[name] for name in relative}
        assert "shift/relative_mean_corruption_error" not in result


def test_a_baseline_needs_the_same_corruptions_and_classes(net):
    values, shift = ensemble(1), {"shift": "contrast", "severities": [5]}
    result = evaluate(values, (X, torch.randn(60, 1)), task="regression", **shift)
    again = evaluate(values, (X, torch.randn(60, 1)), task="regression", baseline=result, **shift)
    assert again.keys() == result.keys()
    with pytest.raises(
        ValueError, match="baseline must have the same corruptions .* lacks 'shift/contrast/5/accuracy'"
    ):
        evaluate(net, LOADER, baseline=evaluate(net, LOADER, shift="fog", severities=[5]), **shift)


def test_without_an_increase_of_the_baseline_error_the_relative_one_is_nan(net):
    bright = {"shift": "brightness", "severities": [1], "data": (X[:9], net.predict(X[:9]).label)}
    result = evaluate(net, **bright, preprocess=lambda x: 0 * x)
    again = evaluate(net, **bright, preprocess=lambda x: 0 * x, baseline=result)
    assert math.isnan(again["shift/relative_mean_corruption_error"]) and again["shift/mcnll"] == pytest.approx(1)


def test_other_versions_of_the_data_are_scored_by_name(net):
    result = evaluate(net, LOADER, shift={"dark": (X / 4, Y)}, tasks="scores")
    assert result["shift/dark/nll"] == pytest.approx(float(metrics.nll(net.predict(X / 4), Y)))


def test_every_uncertainty_detects_ood_data(net):
    result = evaluate(net, LOADER, ood={"dark": OTHER, "same": (X, Y)})
    table = detect(net.predict(X), net.predict(OTHER))
    for uncertainty, found in table.items():
        assert result[f"ood/dark/{uncertainty}/auroc"] == pytest.approx(float(found.auroc))
        assert result[f"ood/dark/{uncertainty}/aupr"] == pytest.approx(float(found.aupr))
        assert result[f"ood/dark/{uncertainty}/fpr95"] == pytest.approx(float(found.fpr))
        assert result[f"ood/same/{uncertainty}/auroc"] == pytest.approx(0.5)
    assert result.counts["ood/dark/entropy/auroc"] == 100 and result.counts["ood/same/entropy/auroc"] == 120
    assert evaluate(net, LOADER, ood=OTHER)["ood/entropy/auroc"] == result["ood/dark/entropy/auroc"]


def test_ignored_pixels_do_not_count():
    net = mt.deep_ensemble(nn.Conv2d(1, 3, 1), 2, seed=0)
    y = torch.randint(3, (60, 8, 8))
    y[0] = 255
    result, p = evaluate(net, (X, y), ignore=255), net.predict(X)
    assert result["mean_iou"] == pytest.approx(float(metrics.segmentation.mean_iou(p, y, ignore=255)))
    assert result["ece"] == pytest.approx(float(metrics.ece(p, y, ignore=255)))
    assert result.counts["nll"] == 59 * 64 and "aurc" not in result


@pytest.mark.parametrize("task", ["regression", "gaussian"])
def test_values_are_scored_in_the_unit_of_the_targets(task):
    net, y = ensemble(1 if task == "regression" else 2), torch.randn(60, 1)
    noise = {"noise_precision": 4.0 if task == "regression" else None, "scale": 3.0}
    result, p = evaluate(net, (X, y), task=task, **noise), net.predict(X, task)
    assert result["rmse"] == pytest.approx(float((p.mean - y).square().mean().sqrt() * 3))
    assert result["log_density"] == pytest.approx(float(metrics.regression.log_density(p, y, **noise)))
    assert result["crps"] == pytest.approx(float(metrics.regression.crps(p, y, **noise)))
    assert 0 <= result["coverage_95"] <= 1 and result["width_95"] > 0
    assert "log_density" in result and "accuracy" not in result
    if task == "regression":
        assert "log_density" not in evaluate(net, (X, y), task=task)


# -- the result --------------------------------------------------------------------------------------------


def test_results_survive_saving(tmp_path):
    result = Evaluation({"a": Score(0.5, 3), "b/c": Score(math.nan, 0), "d": Score(math.inf, 1)})
    result.save(tmp_path / "r.json")
    again = Evaluation.load(tmp_path / "r.json")
    assert again.counts == result.counts and again["a"] == 0.5 and again["d"] == math.inf and math.isnan(again["b/c"])
    assert json.loads((tmp_path / "r.json").read_text())["b/c"] == {"value": None, "count": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"other.json' does not hold an evaluation"):
        Evaluation.load(tmp_path / "other.json")


def test_a_missing_score_is_reported_with_similar_names():
    with pytest.raises(KeyError, match="there is no score 'nlll'; did you mean nll"):
        Evaluation({"nll": Score(0.5, 3), "ece": Score(0.1, 3)})["nlll"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tasks": "score"}, "tasks must be one of scores, calibration, selective, diversity, got 'score'"),
        ({"shift": "frogs"}, "shift must be corruptions .gaussian_noise, .* or {name: data}, got 'frogs'"),
        ({"shift": "fog", "severities": [6]}, "severities must be whole numbers from 1 to 5, got 6"),
        ({"shift": "fog", "data": (X * 9, Y)}, r"batch 0 of data: images must lie in \[0, 1\]"),
        ({"shift": "fog", "data": [{"input": X, "labels": Y}]}, "batch 0 of data: shift='fog' needs batches of images"),
        ({"data": X}, r"data must have targets to compute scores: pass batches of \(x, y\), got only inputs"),
        ({"data": (X, Y + 9)}, "target must lie within 0 and 3, got 1"),
        ({"data": (X * math.nan, Y)}, "batch 0 of data: x holds .* NaN"),
        ({"baseline": {"nll": 1}}, "baseline must be an Evaluation, got"),
        ({"baseline": Evaluation({})}, "baseline needs corruptions: pass shift=True or their names, got shift=None"),
        ({"seed": "a"}, "seed must be None or a whole number"),
    ],
)
def test_invalid_arguments_raise_an_error(net, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        evaluate(net, options.pop("data", (X, Y)), **options)
