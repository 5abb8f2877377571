"""Properties of every metric: batches, collections, processes, copies, settings, and invalid input."""

import copy
import inspect
import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from multitudes import metrics
from multitudes.metrics.declare import METRICS
from multitudes.metrics.uncertainties import UNCERTAINTIES
from multitudes.tasks.predictive import Predictive
from tests.metrics.cases import changed, classes, heads, logits, orders
from tests.metrics.declared_cases import (
    CASES,
    DATA,
    DECLARED,
    HALVES,
    OF_FORECASTS,
    OF_ROWS,
    C,
    N,
    P,
    S,
    Y,
    same,
    table,
)
from tests.zoo.predictions import raises


def test_every_metric_has_a_case_and_a_direction():
    public = {name: getattr(metrics, name) for name in metrics.__all__}
    found = {name for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, Metric)}
    assert found == {*CASES} | {each.class_name for each in METRICS.values() if each.kind.name not in DATA}
    assert all("higher_is_better" in vars(type(case.make())) for case in CASES.values())


# Batches, copies, processes -------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7])
@table(DECLARED)
def test_streaming_equals_the_function_for_any_batch_size(case, batch):
    metric, whole = case.make(), case.function(*case.data(slice(None)))
    for _ in range(2):
        for start in range(0, N, batch):
            case.feed(metric, slice(start, start + batch))
        same(metric.compute(), whole)
        metric.reset()


@table({name: case for name, case in DECLARED.items() if name not in ("Consistency", "CrossEntropyConsistency")})
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, N), st.integers(1, 4))
def test_the_order_of_samples_and_members_does_not_matter(case, seed, n, s):
    members, samples = orders(s, n, seed)
    if case.data is DATA["regression"]:
        p, *rest = heads(s, n, 1, seed)
    else:
        p, *rest = Predictive(logits(s, n, C, seed=seed).double()), classes(C, n, seed=seed)
    if case.data is DATA["attacks"]:
        p, rest = p.probs, [p.probs.flip(0), *rest]
        mixed = p[samples]
    else:
        mixed = Predictive(p.predictions[members][:, samples], p.task)
    before, after = case.function(p, *rest), case.function(mixed, *(part[samples] for part in rest))
    if "members" in case.declaration.shape and before.ndim == 2:
        before = before[members][:, members]
    same(before, after)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda metric: pickle.loads(pickle.dumps(metric)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@table(CASES)
def test_copies_continue_with_the_state(case, copied):
    twin = copied(case.fed(HALVES[0]))
    case.feed(twin, HALVES[1])
    same(twin.compute(), case.result())
    same(pickle.loads(pickle.dumps(twin.compute())), case.result())


@table(CASES)
def test_persistent_metrics_resume_from_a_state_dict(case):
    metric = case.fed(HALVES[0])
    assert not metric.state_dict()
    metric.persistent(True)
    other = case.make()
    other.load_state_dict(metric.state_dict())
    case.feed(other, HALVES[1])
    same(other.compute(), case.result())


def state(metric):
    return metric.sums if hasattr(metric, "sums") else dim_zero_cat(metric.values)


@table(CASES)
def test_two_processes_equal_one(case):
    other = case.fed(HALVES[1])
    here = case.make(dist_sync_fn=lambda own, group: [own, state(other)], distributed_available_fn=lambda: True)
    case.feed(here, HALVES[0])
    same(here.compute(), case.result())
    assert torch.equal(state(here), state(case.fed(HALVES[0])))  # afterwards each has its own state again


@table(CASES)
def test_forward_returns_the_batch_result_and_adds_to_the_total(case):
    metric = case.make()
    for half in HALVES:
        same(metric(*case.data(half)), case.fed(half).compute())
    same(metric.compute(), case.result())


@pytest.mark.parametrize("cases", [OF_ROWS, OF_FORECASTS], ids=["rows", "forecasts"])
def test_metrics_in_a_collection_equal_metrics_alone(cases):
    collection = MetricCollection({name: case.make() for name, case in cases.items()})
    data = next(iter(cases.values())).data
    for half in HALVES:
        collection.update(*data(half))
    together, twin = collection.compute(), collection.clone()
    collection.reset()
    batch = collection(*data(HALVES[0]))
    for name, case in cases.items():
        same(together[name], case.result())
        same(twin.compute()[name], together[name])
        same(batch[name], case.fed(HALVES[0]).compute())


def test_collections_do_not_merge_metrics_with_equal_first_results():
    p = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]])
    collection = MetricCollection(
        {
            "accuracy": metrics.Accuracy(),
            "error": metrics.EnsembleError(),
            "top 1": metrics.TopKAccuracy(1),
            "top 2": metrics.TopKAccuracy(2),
            "without 2": metrics.Accuracy(ignore=2),
        }
    )
    collection.update(p, torch.tensor([0, 2]))  # accuracy and error are both 1/2
    collection.update(p, torch.tensor([0, 1]))
    found = {name: float(value) for name, value in collection.compute().items()}
    assert found == {"accuracy": 3 / 4, "error": 1 / 4, "top 1": 3 / 4, "top 2": 3 / 4, "without 2": 1.0}


# Settings ---------------------------------------------------------------------------------------------------

OF_UPDATES = {
    "ignore": (None, 0), "k": (1, 2), "bins": (5, 10), "classes": (3, 4), "members": (2, 3), "level": (0.5, 0.9),
    "noise_precision": (None, 2.0), "scale": (1.0, 2.0), "levels": (3, 9), "uncertainty": ("entropy", "energy"),
    "uncertainties": (["entropy"], ["energy"]),
}  # fmt: skip
OF_RESULTS = {"min_count", "coverage", "positive", "recall"}  # settings of `compute`


@pytest.mark.parametrize("name", CASES)
def test_collections_merge_only_metrics_with_equal_settings(name):
    kind = getattr(metrics, name)
    parameters = inspect.signature(kind).parameters.values()
    options = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD} - OF_RESULTS
    if name == "AdaptiveECE":
        options.remove("bins")
    required = {p.name: OF_UPDATES[p.name][0] for p in parameters if p.default is p.empty and p.name in options}
    for option in options & OF_UPDATES.keys():
        one, other = (kind(**required | {option: value}) for value in OF_UPDATES[option])
        assert not MetricCollection._equal_metric_states(one, other), option
    assert MetricCollection._equal_metric_states(kind(**required), kind(**required))


# Rows -----------------------------------------------------------------------------------------------------


@table(OF_ROWS)
def test_several_metrics_share_rows_with_their_own_ignore(case):
    rows = metrics.read_rows(P, Y)
    metric, without = case.make(), case.make(ignore=2)
    metric.update(rows)
    without.update(rows)
    same(case.function(rows), case.function(P, Y))
    same(metric.compute(), case.function(P, Y))
    same(without.compute(), case.function(P[Y != 2], Y[Y != 2]))
    with pytest.raises(ValueError, match="target must be None if prediction is Rows"):
        metric.update(rows, Y)


@pytest.mark.parametrize("ignore", [None, 255, 2])
@table(OF_ROWS)
def test_pixels_are_rows_without_ignored_ones(case, ignore):
    z, y = logits(S, 2, C, 3, 5).double(), classes(C, 2, 3, 5)
    if ignore is not None:
        y[0, 1], y[1, 2, 3] = ignore, ignore
    kept = torch.ones(30, dtype=torch.bool) if ignore is None else y.flatten() != ignore
    flat, labels = Predictive(z.movedim(2, -1).flatten(1, 3))[kept], y.flatten()[kept]
    expected = case.function(flat, labels)
    same(case.function(Predictive(z), y, ignore=ignore), expected)
    metric = case.make(ignore=ignore)
    metric.update(Predictive(z), y)
    same(metric.compute(), expected)


OF_MEMBERS = {
    *("AmbiguityNLL", "Disagreement", "EnsembleJS", "ErrorCorrelation", "JSDivergence", "KLDivergence", "MemberError"),
    *("NormalisedDisagreement", "PairwiseDisagreement", "PairwiseJS", "PairwiseKL", "QStatistic"),
}


@table(OF_ROWS)
def test_metrics_of_the_mean_accept_probabilities(case):
    metric, p = case.make(), Predictive(P.predictions.double())
    try:
        plain = case.function(p.probs, Y)
    except ValueError as error:
        sentence = f"{case.declaration.name} needs the members' predictions"
        assert str(error).startswith(sentence)
        with pytest.raises(ValueError, match=sentence):
            metric.update(P.probs, Y)
        assert (metric.sums == 0).all()
    else:
        assert case.declaration.class_name not in OF_MEMBERS
        same(plain, case.function(p, Y))


@table(OF_ROWS)
def test_only_targetless_metrics_accept_no_target(case):
    if case.declaration.kind.name != "targetless":
        for ask in (case.function, case.make().update):
            with pytest.raises(ValueError, match="target must be an integer tensor"):
                ask(P)
        return
    metric = case.make()
    metric.update(P)
    same(metric.compute(), case.function(P))
    same(case.function(P), case.function(P, Y))
    for ask in (partial(case.function, ignore=255), case.make(ignore=255).update):
        with raises("target is needed to find the rows that ignore=255 leaves out, got None"):
            ask(P)


@table({name: case for name, case in DECLARED.items() if case.declaration.kept})
def test_ranking_metrics_store_few_numbers_per_row(case):
    metric = case.make()
    metric.update(Predictive(torch.randn(3, 7, 100, requires_grad=True)), classes(100, 7))
    expected = ((7, case.declaration.kept), torch.float32, False)
    assert [(part.shape, part.dtype, part.requires_grad) for part in metric.values] == [expected]


# All ------------------------------------------------------------------------------------------------------


def nothing(result):
    """Return True for NaN and for counts of 0."""
    result = torch.stack(list(result)) if isinstance(result, tuple) else result
    return bool(result.isnan().all() if result.is_floating_point() else (result == 0).all())


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@table({n: c for n, c in DECLARED.items() if not isinstance(c.result(), (metrics.Reliability, metrics.RiskCoverage,
                                                                        metrics.QuantileCalibration))})  # fmt: skip
def test_results_without_rows_are_nan_or_zero(case):
    assert nothing(case.make().compute())
    assert nothing(case.function(*case.data(slice(0, 0))))
    if case.declaration.class_name in OF_ROWS:
        assert nothing(case.function(P, torch.full_like(Y, 9), ignore=9))


@table(OF_ROWS | OF_FORECASTS)
def test_metrics_have_no_gradient_and_keep_that_of_predictions(case):
    p, y = case.data(slice(None))
    z = p.predictions.clone().requires_grad_()
    own = Predictive(z, p.task)
    metric = case.make()
    metric.update(own, y)
    for result in (metric.compute(), case.function(own, y)):
        parts = [result] if isinstance(result, torch.Tensor) else [*result] if isinstance(result, tuple) else []
        assert not any(part.requires_grad for part in parts)
    (own.log_probs if p.task == "classification" else own.mean).sum().backward()
    assert z.grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@table(OF_ROWS | OF_FORECASTS)
def test_half_precision_is_computed_in_full_precision(case, dtype):
    p, y = case.data(slice(None))
    y = y.to(dtype) if y.is_floating_point() else y
    coarse = p.to(dtype)
    tolerance = {"rel": 1e-5, "abs": 1e-7} if p.task == "classification" else {"rel": 0, "abs": 0}
    same(case.function(coarse, y), case.function(coarse.to(torch.float64), y), **tolerance)


# Bad settings and input -----------------------------------------------------------------------------------


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
def test_function_and_class_refuse_invalid_settings(case):
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
    with raises(f"{name}={found + 1} does not fit prediction, which has {found} {name}"):
        case.make(**{name: found + 1}).update(P, Y)


# Bad input ------------------------------------------------------------------------------------------------

Z, PROBS = P.predictions, P.probs
MUST = "prediction must hold probabilities within 0 and 1, got"
SHAPE = "target must have the prediction's shape without classes, [40], got"
KIND = "target must be an integer tensor of classes [40], got"
A_TENSOR = "prediction must be a Predictive or a floating-point tensor of probabilities, got"
BAD_ROWS = {
    "nan": (changed(PROBS, math.nan, 3, 1), Y, f"{MUST} nan at index [3, 1]"),
    "above 1": (changed(PROBS, 1.25, 5, 0), Y, f"{MUST} 1.25 at index [5, 0]; a softmax over dim 1"),
    "below 0": (changed(PROBS, -0.5, 5, 0), Y, f"{MUST} -0.5 at index [5, 0]; a softmax"),
    "sum": (changed(PROBS, torch.tensor([0.1, 0.2, 0.3, 0.1]), 7), Y,
            "prediction must add up to 1 over the classes in dim 1, got a sum of 0.7 at index [7] of [40]"),
    "too few": (P, Y[1:], f"{SHAPE} [39]"),
    "class 4": (P, Y.index_fill(0, torch.tensor([9, 11]), 4), "target must lie within 0 and 3, got 4 at index [9]"),
    "soft": (P, PROBS, f"{KIND} torch.float32"),
    "list": (P, Y.tolist(), f"{KIND} list"),
    "labels": (Y, Y, f"{A_TENSOR} torch.int64"),
    "array": (PROBS.numpy(), Y, f"{A_TENSOR} float32"),
    "regression": (Predictive(Z[..., 0], "regression"), Y,
                   "prediction must be of task classification, tokens, binary or multilabel, got task regression"),
    "nan logit": (Predictive(changed(Z, math.nan, 1, 3, 1)), Y, f"{MUST} nan at index [3, 0]"),
    "nan pixel": (Predictive(changed(logits(S, 2, C, 3, 5), math.nan, 0, 1, 0, 2, 3)), classes(C, 2, 3, 5),
                  f"{MUST} nan at index [1, 0, 2, 3]"),
}  # fmt: skip
V, T = heads(S, N, 2)
ONE = "target must have the shape of one member's means, "
BAD_FORECASTS = {
    "nan mean": (Predictive(changed(V.predictions, math.nan, 2, 3, 1), "gaussian"), T,
                 "prediction must hold finite values, got nan at index [2, 3, 1]"),
    "nan target": (V, changed(T, math.nan, 4, 1), "target must hold finite values, got nan at index [4, 1]"),
    "too few": (V, T[1:], f"{ONE}[40, 2], got [39, 2]"),
    "no column": (Predictive(V.predictions[..., :1], "regression"), T[:, 0], f"{ONE}[40, 1], got [40]"),
    "bool": (V, T > 0, "target must be a tensor of real values [40, 2], got torch.bool"),
    "means": (changed(T, math.nan, 4, 1), T, "prediction must hold finite values, got nan at index [4, 1]"),
    "no target": (T, None, "target must be a tensor of real values [40, 2], got NoneType"),
    "whole": (T.long(), T, "prediction must be a Predictive or a floating-point tensor of means, got torch.int64"),
    "number": (T[0, 0], T[0, 0], "prediction must be means [B] or [B, D, ...], got a single number"),
    "classes": (P, T, "prediction must be of task regression or gaussian, got task classification"),
}  # fmt: skip


def refused(case, p, y, sentence):
    metric = case.make()
    for ask in (case.function, metric.update):
        with pytest.raises(ValueError) as caught:
            ask(p, y)
        assert str(caught.value).startswith(sentence)
    assert not len(metric.values) if case.declaration.kept else bool((metric.sums == 0).all())


def test_bad_predictions_and_targets_are_named_with_their_first_index():
    for cases, name in ((BAD_ROWS, "Accuracy"), (BAD_FORECASTS, "CRPS")):
        for bad in cases.values():
            refused(DECLARED[name], *bad)


@table(OF_ROWS | OF_FORECASTS)
def test_every_metric_refuses_nan_and_keeps_its_state(case):
    refused(case, *(BAD_FORECASTS["nan mean"] if case.data is DATA["regression"] else BAD_ROWS["nan logit"]))
