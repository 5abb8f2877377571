import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from multitudes.core.predictive import Predictive, gaussian_nll
from tests.predictions import CLASSIFICATION, MOMENTS, PER_CLASS, PER_INPUT, raises, randn

# The container ----------------------------------------------------------------------------------------------


def test_members_and_inputs_are_counted():
    p = Predictive(randn(4, 10, 3))
    assert (p.members, len(p), p.task) == (4, 10, "classification")


@pytest.mark.parametrize(
    ("shape", "task", "text"),
    [
        ((4, 10, 3), "classification", "task='classification', members=4, inputs=10, outputs=[3]"),
        (
            (4, 10, 3, 8, 9),
            "classification",
            "task='classification', members=4, inputs=10, outputs=[3, 8, 9]",
        ),
        ((4, 10), "regression", "task='regression', members=4, inputs=10, outputs=[]"),
        ((4, 10, 6, 2), "gaussian", "task='gaussian', members=4, inputs=10, outputs=[3, 2]"),
    ],
)
def test_repr_tells_the_sizes(shape, task, text):
    assert repr(Predictive(torch.zeros(shape), task)) == f"Predictive({text})"


@pytest.mark.parametrize(
    ("index", "positions"),
    [
        (0, [0]),
        (-1, [9]),
        (np.int64(3), [3]),
        (torch.tensor(3), [3]),
        (torch.tensor([3]), [3]),
        (slice(2, 5), [2, 3, 4]),
        (slice(None, None, 4), [0, 4, 8]),
        ([7, 1], [7, 1]),
        ([], []),
        (torch.tensor([7, 1, -1]), [7, 1, 9]),
        (torch.arange(10) > 6, [7, 8, 9]),
        (np.arange(10) > 6, [7, 8, 9]),
        (torch.zeros(10, dtype=torch.bool), []),
    ],
    ids=str,
)
def test_an_index_selects_inputs_and_keeps_the_batch_dimension(index, positions):
    p = Predictive(randn(4, 10, 6), task="gaussian")
    chosen = p[index]
    assert chosen.task == "gaussian"
    assert torch.equal(chosen.predictions, p.predictions.index_select(1, torch.tensor(positions).long()))


def test_a_mask_of_the_only_input_can_leave_it_out():
    assert len(Predictive(randn(4, 1, 3))[torch.tensor([False])]) == 0


@pytest.mark.filterwarnings("ignore:var")  # torch's remark on the variance of nothing
def test_no_inputs_have_no_answers_but_no_error():
    p = Predictive(randn(4, 10, 3))
    none = p[p.entropy > 100]
    assert {name: len(getattr(none, name)) for name in PER_CLASS + PER_INPUT} == dict.fromkeys(PER_CLASS + PER_INPUT, 0)


def test_iteration_gives_one_input_at_a_time():
    p = Predictive(randn(4, 10, 3))
    assert torch.equal(torch.cat([one.probs for one in p]), p.probs)


@pytest.mark.parametrize("index", [10, -11, torch.tensor(10)])
def test_an_input_that_does_not_exist_is_an_index_error(index):
    sentence = f"^index must lie within the 10 inputs, got {int(index)}$"
    with pytest.raises(IndexError, match=sentence):
        Predictive(randn(4, 10, 3))[index]


@pytest.mark.parametrize("index", [None, torch.ones(10, 3, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.long)])
def test_an_index_that_reaches_past_the_inputs_is_an_index_error(index):
    with pytest.raises(IndexError, match=r"^index must select along the 10 inputs alone, got "):
        Predictive(randn(4, 10, 3))[index]


def test_concat_takes_any_iterable():
    p = Predictive(randn(4, 10), task="regression")
    assert torch.equal(Predictive.concat(iter(p)).mean, p.mean)


def test_to_changes_dtype_and_keeps_the_task():
    p = Predictive(randn(4, 10, 2), task="gaussian")
    double = p.to(torch.float64)
    assert (double.predictions.dtype, double.task) == (torch.float64, "gaussian")
    assert p.predictions.dtype == torch.float32
    assert p.to("meta").predictions.is_meta
    assert p.cpu() is p and p.to(torch.float32) is p


@pytest.mark.parametrize("quantity", CLASSIFICATION)
def test_a_quantity_is_computed_once(quantity):
    p = Predictive(randn(4, 10, 3))
    assert getattr(p, quantity) is getattr(p, quantity)


def test_all_quantities_share_one_softmax(monkeypatch):
    calls = []
    softmax = F.log_softmax
    monkeypatch.setattr(F, "log_softmax", lambda *args, **kwargs: calls.append(1) or softmax(*args, **kwargs))
    p = Predictive(randn(4, 10, 3))
    assert not calls  # nothing is computed before it is asked for
    for quantity in CLASSIFICATION:
        getattr(p, quantity)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["predictions", "task", "probs", "anything"])
def test_a_predictive_cannot_be_changed(name):
    p = Predictive(randn(4, 10, 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(p, name, p.predictions)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
@pytest.mark.parametrize("task", ["classification", "gaussian"])
def test_copies_and_pickles_say_the_same(duplicate, task):
    p = Predictive(randn(4, 10, 6), task)
    before = p.variance
    twin = duplicate(p)
    assert twin is not p and twin.task == task
    assert "variance" in vars(p) and "variance" not in vars(twin)  # what can be computed is not carried along
    assert torch.equal(twin.predictions, p.predictions) and torch.equal(twin.variance, before)


def test_a_deep_copy_shares_no_memory():
    p = Predictive(randn(4, 10, 6))
    assert copy.deepcopy(p).predictions.data_ptr() != p.predictions.data_ptr()


# Wrong use --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predictions", "task", "sentence"),
    [
        (
            torch.zeros(2, 3, 4),
            "segmentation",
            "task must be one of classification, regression, gaussian, got 'segmentation'",
        ),
        (torch.zeros(2, 3, 4), None, "task must be one of classification, regression, gaussian, got None"),
        ([[1.0]], "classification", "predictions must be a floating-point tensor, got list"),
        (np.zeros((2, 3, 4)), "classification", "predictions must be a floating-point tensor, got float64"),
        (
            torch.zeros(2, 3, 4, dtype=torch.int64),
            "classification",
            "predictions must be a floating-point tensor, got torch.int64",
        ),
        (
            torch.zeros(2, 3),
            "classification",
            "predictions of task classification must be [S, B, channels, ...], got shape [2, 3]",
        ),
        (
            torch.zeros(2, 3),
            "gaussian",
            "predictions of task gaussian must be [S, B, channels, ...], got shape [2, 3]",
        ),
        (
            torch.zeros(2),
            "regression",
            "predictions of task regression must be [S, B] or [S, B, D, ...], got shape [2]",
        ),
        (
            torch.zeros(0, 3, 4),
            "classification",
            "predictions of task classification must hold at least one member in dim 0, got shape [0, 3, 4]",
        ),
        (
            torch.zeros(2, 3, 5, 8),
            "gaussian",
            "predictions of task gaussian must hold as many raw variances as means in dim 2, "
            "an even number together, got shape [2, 3, 5, 8]",
        ),
        (
            torch.zeros(2, 3, 1),
            "classification",
            "predictions of task classification must hold 2 or more classes in dim 2 "
            "(use task='regression' for a single output), got shape [2, 3, 1]",
        ),
    ],
)
def test_predictions_that_cannot_be_read_are_refused(predictions, task, sentence):
    with raises(sentence):
        Predictive(predictions, task)


@pytest.mark.parametrize("quantity", sorted({*CLASSIFICATION} - {"variance"}))
@pytest.mark.parametrize("task", ["regression", "gaussian"])
def test_regression_does_not_answer_for_classes(quantity, task):
    with raises(f"{quantity} needs task classification, got predictions of {task}"):
        getattr(Predictive(randn(2, 3, 4), task), quantity)


@pytest.mark.parametrize("quantity", sorted({*MOMENTS} - {"variance"}))
def test_classification_does_not_answer_for_numbers(quantity):
    with raises(f"{quantity} needs task regression or gaussian, got predictions of classification"):
        getattr(Predictive(randn(2, 3, 4)), quantity)


def test_classification_has_no_interval():
    with raises("interval needs task regression or gaussian, got predictions of classification"):
        Predictive(randn(2, 3, 4)).interval(0.9)


@pytest.mark.parametrize("level", [0, 1, -0.1, 95, math.nan])
def test_levels_outside_0_and_1_are_refused(level):
    with raises(f"level must lie between 0 and 1, got {level}"):
        Predictive(randn(2, 3), "regression").interval(level)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([], "parts must hold at least one Predictive, got none"),
        (
            [Predictive(torch.zeros(2, 3, 4)), Predictive(torch.zeros(3, 3, 4))],
            "parts must have the same shape but for dim 1, got [2, 3, 4] and [3, 3, 4]",
        ),
        (
            [
                Predictive(torch.zeros(2, 3, 4)),
                Predictive(torch.zeros(2, 9, 4)),
                Predictive(torch.zeros(2, 3, 5)),
            ],
            "parts must have the same shape but for dim 1, got [2, 3, 4] and [2, 3, 5]",
        ),
        (
            [Predictive(torch.zeros(2, 3, 4)), Predictive(torch.zeros(2, 3, 4), "gaussian")],
            "parts must have the same task, got classification and gaussian",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(parts, sentence):
    with raises(sentence):
        Predictive.concat(parts)


@pytest.mark.parametrize("shape", [(), (4,), (4, 3)], ids=str)
def test_gaussian_nll_refuses_predictions_without_pairs(shape):
    with raises(
        f"gaussian predictions need as many raw variances as means, an even number in dim 1, got shape {list(shape)}"
    ):
        gaussian_nll(torch.zeros(shape), torch.zeros(4, 1))


def test_gaussian_nll_refuses_a_target_that_would_broadcast():
    with raises("target must have the means' shape [4, 1], got [4]"):
        gaussian_nll(torch.zeros(4, 2), torch.zeros(4))
