"""What every metric says of bad settings, predictions and targets."""

import math

import pytest
import torch

from multitudes.metrics.uncertainties import UNCERTAINTIES
from multitudes.tasks.predictive import Predictive
from tests.metrics.declared_cases import DECLARED, OF_FORECASTS, OF_ROWS, C, N, P, S, Y, table
from tests.metrics.forecast_cases import heads
from tests.metrics.metric_cases import changed, classes, logits
from tests.zoo.predictions import raises

# Settings -------------------------------------------------------------------------------------------------

COUNT = "must be a whole number, 1 or more, got"
COUNTS = {
    name: ([0, -3, 2.5, None, True], COUNT) for name in ("k", "bins", "min_count", "levels", "classes", "members")
}
BAD_SETTINGS = COUNTS | {
    "ignore": ([1.5, "a", True], "must be an integer label or None, got"),
    "noise_precision": ([0, -1.0, math.nan, math.inf, "1"], "must be above 0, got"),
    "scale": ([0, -1.0, math.nan, math.inf, None], "must be above 0, got"),
    "level": ([0, 1, -0.1, 1.5, None, "0.9"], "must be above 0 and below 1, got"),
    "coverage": ([0, -0.1, 1.01, "0.9", None, math.nan], "must be above 0 and at most 1, got"),
    "uncertainty": (["confidence", None, ["entropy"]], f"must be one of {', '.join(UNCERTAINTIES)}, got"),
}


@table(DECLARED)
def test_bad_settings_are_named_by_the_function_and_when_the_class_is_made(case):
    for name in case.declaration.class_settings.keys() & BAD_SETTINGS.keys():
        values, sentence = BAD_SETTINGS[name]
        for value in values:
            with raises(f"{name} {sentence} {value!r}"):
                case.make(**{name: value})
            if name in case.declaration.settings:
                with raises(f"{name} {sentence} {value!r}"):
                    case.function(*case.data(slice(None)), **{name: value})


@table({name: case for name, case in DECLARED.items() if set(case.declaration.shape) & {"classes", "members"}})
def test_sizes_must_be_those_of_the_data(case):
    (name,) = set(case.declaration.shape) & {"classes", "members"}
    found = {"classes": C, "members": S}[name]
    with raises(f"prediction must have {name}={found + 1}, got {found}"):
        case.make(**{name: found + 1}).update(P, Y)


# Bad input ------------------------------------------------------------------------------------------------

Z, PROBS = P.predictions, P.probs
MUST = "prediction must hold probabilities within 0 and 1, got"
SHAPE = "target must have the prediction's shape without classes, [40], got"
KIND = "target must be an integer tensor of classes [40], got"
A_TENSOR = "prediction must be a Predictive or a floating-point tensor of probabilities, got"
BAD_ROWS = {
    "nan": (changed(PROBS, math.nan, 3, 1), Y, f"{MUST} nan at index [3, 1]"),
    "infinite": (changed(PROBS, math.inf, 3, 1), Y, f"{MUST} inf at index [3, 1]; a softmax"),
    "above 1": (changed(PROBS, 1.25, 5, 0), Y, f"{MUST} 1.25 at index [5, 0]; a softmax over dim 1"),
    "below 0": (changed(PROBS, -0.5, 5, 0), Y, f"{MUST} -0.5 at index [5, 0]; a softmax"),
    "sum": (changed(PROBS, torch.tensor([0.1, 0.2, 0.3, 0.1]), 7), Y,
            "prediction must add up to 1 over the classes in dim 1, got a sum of 0.7 at index [7] of [40]"),
    "too few": (P, Y[1:], f"{SHAPE} [39]"),
    "column": (P, Y[:, None], f"{SHAPE} [40, 1]"),
    "class 4": (P, Y.index_fill(0, torch.tensor([9, 11]), 4), "target must lie within 0 and 3, got 4 at index [9]"),
    "class -1": (P, Y.index_fill(0, torch.tensor([9, 11]), -1), "target must lie within 0 and 3, got -1 at index [9]"),
    "soft": (P, PROBS, f"{KIND} torch.float32"),
    "bool": (P, Y > 1, f"{KIND} torch.bool"),
    "list": (P, Y.tolist(), f"{KIND} list"),
    "labels": (Y, Y, f"{A_TENSOR} torch.int64"),
    "one dim": (PROBS[:, 0], Y, "prediction must be probabilities [B, classes, ...], got shape [40]"),
    "array": (PROBS.numpy(), Y, f"{A_TENSOR} float32"),
    "nested lists": (PROBS.tolist(), Y, f"{A_TENSOR} list"),
    "regression": (Predictive(Z[..., 0], "regression"), Y,
                   "prediction must be of task classification, tokens, binary or multilabel, got a Predictive of task "
                   "regression"),
    "nan logit": (Predictive(changed(Z, math.nan, 1, 3, 1)), Y, f"{MUST} nan at index [3, 0]"),
    "nan pixel": (Predictive(changed(logits(S, 2, C, 3, 5), math.nan, 0, 1, 0, 2, 3)), classes(C, 2, 3, 5),
                  f"{MUST} nan at index [1, 0, 2, 3]"),
}  # fmt: skip
V, T = heads(S, N, 2)
ONE = "target must have the shape of one member's means, "
BAD_FORECASTS = {
    "nan mean": (Predictive(changed(V.predictions, math.nan, 2, 3, 1), "gaussian"), T,
                 "prediction must hold finite values, got nan at index [2, 3, 1]"),
    "infinite": (Predictive(changed(V.predictions, math.inf, 2, 3, 3), "gaussian"), T,
                 "prediction must hold finite values, got inf at index [2, 3, 3]"),
    "nan target": (V, changed(T, math.nan, 4, 1), "target must hold finite values, got nan at index [4, 1]"),
    "infinite target": (V, changed(T, -math.inf, 4, 1), "target must hold finite values, got -inf at index [4, 1]"),
    "too few": (V, T[1:], f"{ONE}[40, 2], got [39, 2]"),
    "no column": (Predictive(V.predictions[..., :1], "regression"), T[:, 0], f"{ONE}[40, 1], got [40]"),
    "bool": (V, T > 0, "target must be a tensor of real values [40, 2], got torch.bool"),
    "list": (V, T.tolist(), "target must be a tensor of real values [40, 2], got list"),
    "classes": (P, T, "prediction must be of task regression or gaussian, got one of task classification"),
}  # fmt: skip


def refused(case, p, y, sentence):
    metric = case.make()
    for ask in (case.function, metric.update):
        with pytest.raises(ValueError) as caught:
            ask(p, y)
        assert str(caught.value).startswith(sentence)
    assert not len(metric.values) if case.declaration.kept else bool((metric.sums == 0).all())


@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS)
@table(OF_ROWS)
def test_bad_predictions_and_classes_are_named_with_their_first_index(case, bad):
    refused(case, *bad)


@pytest.mark.parametrize("bad", BAD_FORECASTS.values(), ids=BAD_FORECASTS)
@table(OF_FORECASTS)
def test_bad_forecasts_and_values_are_named_with_their_first_index(case, bad):
    refused(case, *bad)
