import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from multitudes.tasks.predictive import Predictive
from tests.zoo.predictions import CLASSIFICATION, MOMENTS, PER_CLASS, PER_INPUT, close, raises, randn

# The container ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "task", "text"),
    [
        ((4, 10, 3, 8, 9), "classification", "task='classification', members=4, inputs=10, outputs=[3, 8, 9]"),
        ((4, 10), "regression", "task='regression', members=4, inputs=10, outputs=[]"),
        ((4, 10, 6, 2), "gaussian", "task='gaussian', members=4, inputs=10, outputs=[3, 2]"),
    ],
)
def test_repr_shows_the_sizes(shape, task, text):
    p = Predictive(torch.zeros(shape), task)
    assert (repr(p), p.members, len(p)) == (f"Predictive({text})", 4, 10)


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


@pytest.mark.filterwarnings("ignore:var")  # torch's remark on the variance of nothing
def test_an_empty_selection_has_empty_quantities():
    p = Predictive(randn(4, 10, 3))
    assert len(p[:1][torch.tensor([False])]) == 0
    none = p[p.entropy > 100]
    assert {name: len(getattr(none, name)) for name in PER_CLASS + PER_INPUT} == dict.fromkeys(PER_CLASS + PER_INPUT, 0)


def test_iteration_gives_one_input_at_a_time_and_concat_takes_any_iterable():
    p = Predictive(randn(4, 10, 3))
    close(torch.cat([one.probs for one in p]), p.probs)  # softmaxes of other sizes may differ in the last bit
    assert torch.equal(Predictive.concat(iter(p)).predictions, p.predictions)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [(10, "10 is out of range for 10 inputs"), (-11, "-11 is out of range for 10 inputs"),
     (torch.tensor(10), "10 is out of range for 10 inputs"), (None, "must select inputs .10. and no other axis, got "),
     (torch.ones(10, 3, dtype=torch.bool), "must select inputs .10. and no other axis, got "),
     (torch.zeros(2, 2, dtype=torch.long), "must select inputs .10. and no other axis, got ")],
    ids=str,
)  # fmt: skip
def test_an_input_that_does_not_exist_is_an_index_error(index, sentence):
    with pytest.raises(IndexError, match=f"^index {sentence}"):
        Predictive(randn(4, 10, 3))[index]


def test_to_changes_dtype_and_keeps_the_task():
    p = Predictive(randn(4, 10, 2), task="gaussian")
    double = p.to(torch.float64)
    assert (double.predictions.dtype, double.task) == (torch.float64, "gaussian")
    assert p.predictions.dtype == torch.float32
    assert p.to("meta").predictions.is_meta
    assert p.cpu() is p and p.to(torch.float32) is p


def test_a_quantity_is_computed_once_and_all_share_one_softmax(monkeypatch):
    calls = []
    softmax = F.log_softmax
    monkeypatch.setattr(F, "log_softmax", lambda *args, **kwargs: calls.append(1) or softmax(*args, **kwargs))
    p = Predictive(randn(4, 10, 3))
    assert not calls  # nothing is computed before it is asked for
    for quantity in CLASSIFICATION:
        assert getattr(p, quantity) is getattr(p, quantity)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["predictions", "task", "probs", "anything"])
def test_a_predictive_cannot_be_changed(name):
    p = Predictive(randn(4, 10, 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(p, name, p.predictions)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
@pytest.mark.parametrize("task", ["classification", "gaussian"])
def test_copies_and_pickles_give_the_same_numbers(duplicate, task):
    p = Predictive(randn(4, 10, 6), task)
    before = p.variance
    twin = duplicate(p)
    assert twin is not p and twin.task == task
    assert "variance" in vars(p) and "variance" not in vars(twin)  # what can be computed is not carried along
    assert torch.equal(twin.predictions, p.predictions) and torch.equal(twin.variance, before)
    assert duplicate is copy.copy or twin.predictions.data_ptr() != p.predictions.data_ptr()


# Wrong use --------------------------------------------------------------------------------------------------


def of(*shape, task="classification", dtype=torch.float32):
    return Predictive(torch.zeros(shape, dtype=dtype), task)


REFUSED = [
    (lambda: of(2, 3, 4, task="segmentation"),
     "task must be one of classification, tokens, binary, multilabel, regression, gaussian, quantiles, "
     "got 'segmentation'"),
    (lambda: Predictive([[1.0]]), "predictions must be a floating-point tensor, got list"),
    (lambda: Predictive(np.zeros((2, 3, 4))), "predictions must be a floating-point tensor, got float64"),
    (lambda: of(2, 3, 4, dtype=torch.int64), "predictions must be a floating-point tensor, got torch.int64"),
    (lambda: of(2, 3), "predictions of task classification must be [S, B, channels, ...], got shape [2, 3]"),
    (lambda: of(2, task="regression"),
     "predictions of task regression must be [S, B] or [S, B, D, ...], got shape [2]"),
    (lambda: of(0, 3, 4),
     "predictions of task classification must hold at least one member in dim 0, got shape [0, 3, 4]"),
    (lambda: of(2, 3, 5, 8, task="gaussian"),
     "predictions of task gaussian must hold as many raw variances as means in dim 2, an even number together, "
     "got shape [2, 3, 5, 8]"),
    (lambda: of(2, 3, 1),
     "predictions of task classification must hold 2 or more classes in dim 2 (use task='binary' for one logit, "
     "task='regression' for one value), got shape [2, 3, 1]"),
    (lambda: of(2, 3, 4).interval(0.9),
     "interval needs task regression, gaussian or quantiles, got predictions of classification"),
    (lambda: Predictive.concat([]), "parts must hold at least one Predictive, got none"),
    (lambda: Predictive.concat([of(2, 3, 4), of(3, 3, 4)]),
     "parts must have the same shape except in dim 1, got [2, 3, 4] and [3, 3, 4]"),
    (lambda: Predictive.concat([of(2, 3, 4), of(2, 3, 4, task="gaussian")]),
     "parts must have the same task, got classification and gaussian"),
]  # fmt: skip


@pytest.mark.parametrize(("use", "sentence"), REFUSED)
def test_wrong_use_is_an_error(use, sentence):
    with raises(sentence):
        use()


@pytest.mark.parametrize("quantity", sorted({*CLASSIFICATION, *MOMENTS} - {"variance"}))
@pytest.mark.parametrize("task", ["classification", "regression", "gaussian"])
def test_a_task_has_its_own_quantities_only(quantity, task):
    p = Predictive(randn(2, 3, 4), task)
    if (quantity in CLASSIFICATION) == (task == "classification"):
        assert getattr(p, quantity).isfinite().all()
        return
    classes = "classification, tokens, binary or multilabel"
    needed = classes if quantity in CLASSIFICATION else "regression, gaussian or quantiles"
    needed = "classification or tokens" if quantity == "max_logit" else needed
    with raises(f"{quantity} needs task {needed}, got predictions of {task}"):
        getattr(p, quantity)


@pytest.mark.parametrize("level", [0, 1, -0.1, 95, math.nan])
def test_levels_outside_0_and_1_are_refused(level):
    with raises(f"level must lie between 0 and 1, got {level}"):
        Predictive(randn(2, 3), "regression").interval(level)
