"""What holds for every metric that streams: in collections, across processes, copied, moved and saved."""

import ast
import copy
import inspect
import math
import pickle
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from multitudes import metrics
from multitudes.core.predictive import Predictive
from tests.forecast_cases import heads
from tests.metric_cases import classes, logits

S, N, C = 3, 40, 4
P, Y = Predictive(logits(S, N, C)), classes(C, N)
FORECASTS = heads(S, N)
HALVES = (slice(0, 25), slice(25, N))


def rows(metric, half):
    metric.update(P[half], Y[half])


def outside(metric, half):
    metric.update(P[half], Y[half] == 0)


def forecasts(metric, half):
    metric.update(*(part[half] for part in FORECASTS))


def sequence(metric, half):
    metric.update(P[half])


def video(metric, half):
    metric.new_sequence()
    for frame in logits(5, S, 2, C, 3, seed=half.start):
        metric.update(Predictive(frame))


def attack(metric, half):
    metric.update(P.probs[half], P.probs[half].roll(1, 0), Y[half])


OF_ROWS = {
    "Accuracy": metrics.Accuracy,
    "TopKAccuracy": partial(metrics.TopKAccuracy, 2),
    "NLL": metrics.NLL,
    "Brier": metrics.Brier,
    "EnsembleError": metrics.EnsembleError,
    "MemberError": metrics.MemberError,
    "ECE": metrics.ECE,
    "MCE": metrics.MCE,
    "ReliabilityDiagram": metrics.ReliabilityDiagram,
    "Overconfidence": metrics.Overconfidence,
    "ClasswiseECE": partial(metrics.ClasswiseECE, C),
    "AdaptiveECE": metrics.AdaptiveECE,
    "RiskCoverageCurve": metrics.RiskCoverageCurve,
    "AURC": metrics.AURC,
    "AccuracyAtCoverage": metrics.AccuracyAtCoverage,
    "PairwiseDisagreement": partial(metrics.PairwiseDisagreement, S),
    "Disagreement": metrics.Disagreement,
    "NormalisedDisagreement": metrics.NormalisedDisagreement,
    "QStatistic": partial(metrics.QStatistic, S),
    "ErrorCorrelation": partial(metrics.ErrorCorrelation, S),
    "PairwiseKL": partial(metrics.PairwiseKL, S),
    "PairwiseJS": partial(metrics.PairwiseJS, S),
    "KLDivergence": metrics.KLDivergence,
    "JSDivergence": metrics.JSDivergence,
    "EnsembleJS": metrics.EnsembleJS,
    "AmbiguityNLL": metrics.AmbiguityNLL,
    "RelativeConfidence": metrics.RelativeConfidence,
    "Confusion": partial(metrics.Confusion, C),
    "ClassIoU": partial(metrics.ClassIoU, C),
    "MeanIoU": partial(metrics.MeanIoU, C),
    "MeanClassAccuracy": partial(metrics.MeanClassAccuracy, C),
}
OF_FORECASTS = {
    "RMSE": metrics.RMSE,
    "LogDensity": metrics.LogDensity,
    "CRPS": metrics.CRPS,
    "IntervalCoverage": metrics.IntervalCoverage,
    "IntervalWidth": metrics.IntervalWidth,
    "QuantileDiagram": metrics.QuantileDiagram,
    "GaussianECE": metrics.GaussianECE,
    "AmbiguityMSE": metrics.AmbiguityMSE,
}
METRICS = {
    **{name: (make, rows) for name, make in OF_ROWS.items()},
    **{name: (make, forecasts) for name, make in OF_FORECASTS.items()},
    "OODDetection": (metrics.OODDetection, outside),
    "Consistency": (metrics.Consistency, sequence),
    "CrossEntropyConsistency": (metrics.CrossEntropyConsistency, sequence),
    "TemporalConsistency": (metrics.TemporalConsistency, video),
    "AttackSuccessRate": (metrics.AttackSuccessRate, attack),
}


def fed(make, feed, *halves):
    metric = make()
    for half in halves or HALVES:
        feed(metric, half)
    return metric


def numbers(result):
    """All numbers of a result, whatever it is: a tensor, a tuple of them, a table, a curve."""
    if isinstance(result, torch.Tensor):
        return result.double().flatten().tolist()
    if isinstance(result, (int, float)):
        return [result]
    if isinstance(result, (str, type(None))):
        return []
    parts = result if isinstance(result, tuple) else (result if isinstance(result, dict) else vars(result)).values()
    return [number for part in parts for number in numbers(part)]


def same(one, other):
    assert numbers(one) == pytest.approx(numbers(other), rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.fixture(params=METRICS.values(), ids=METRICS)
def case(request):
    return request.param


def test_every_metric_is_in_the_table():
    public = {name: getattr(metrics, name) for name in metrics.__all__}
    assert {name for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, Metric)} == {*METRICS}


def test_there_are_numbers_to_compare(case):
    assert any(map(math.isfinite, numbers(fed(*case).compute())))


def test_a_metric_says_whether_higher_is_better(case):
    kinds = type(case[0]()).__mro__
    assert any("higher_is_better" in vars(kind) for kind in kinds[: kinds.index(Metric)])


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda metric: pickle.loads(pickle.dumps(metric)),
    "clone": lambda metric: metric.clone(),
    "to": lambda metric: metric.to("cpu"),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_have_seen_what_the_metric_saw_and_go_on(case, copied):
    twin = copied(fed(*case, HALVES[0]))
    case[1](twin, HALVES[1])
    same(twin.compute(), fed(*case).compute())


def test_a_metric_is_saved_only_where_it_is_asked_to_and_goes_on_where_it_stopped(case):
    metric = fed(*case, HALVES[0])
    assert not metric.state_dict()
    metric.persistent(True)
    other = case[0]()
    other.load_state_dict(metric.state_dict())
    case[1](other, HALVES[1])
    same(other.compute(), fed(*case).compute())


def state(metric):
    return metric.sums if hasattr(metric, "sums") else dim_zero_cat(metric.values)


def test_two_processes_together_say_what_one_says_that_saw_all(case):
    make, feed = case
    other = fed(make, feed, HALVES[1])
    here = make(dist_sync_fn=lambda own, group: [own, state(other)], distributed_available_fn=lambda: True)
    feed(here, HALVES[0])
    same(here.compute(), fed(make, feed).compute())
    assert torch.equal(state(here), state(fed(make, feed, HALVES[0])))  # and afterwards each has its own again


class Called:
    """A metric that is called where it should be updated."""

    def __init__(self, metric):
        self.metric, self.results = metric, []

    def update(self, *data):
        self.results.append(self.metric(*data))


@pytest.mark.parametrize("name", [name for name in METRICS if name != "TemporalConsistency"])  # whose halves are videos
def test_calling_a_metric_gives_the_batchs_result_and_keeps_the_total(name):
    make, feed = METRICS[name]
    called = Called(make())
    for half in HALVES:
        feed(called, half)
        same(called.results[-1], fed(make, feed, half).compute())
    same(called.metric.compute(), fed(make, feed).compute())


# Collections -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table, data", [(OF_ROWS, (P, Y)), (OF_FORECASTS, FORECASTS)], ids=["rows", "forecasts"])
def test_metrics_in_a_collection_say_what_each_says_alone(table, data):
    collection = MetricCollection({name: make() for name, make in table.items()})
    for half in HALVES:
        collection.update(*(part[half] for part in data))
    together, twin = collection.compute(), collection.clone()
    collection.reset()
    batch = collection(*(part[HALVES[0]] for part in data))
    for name in table:
        same(together[name], fed(*METRICS[name]).compute())
        same(twin.compute()[name], together[name])
        same(batch[name], fed(*METRICS[name], HALVES[0]).compute())


def test_a_collection_may_be_given_rows_that_were_read_once():
    collection = MetricCollection({name: make() for name, make in OF_ROWS.items()})
    for half in HALVES:
        collection.update(metrics.read_rows(P[half], Y[half]))
    for name, result in collection.compute().items():
        same(result, fed(*METRICS[name]).compute())


def test_metrics_that_are_equal_after_one_batch_stay_two():
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


COMPUTED = {"min_count", "coverage", "positive", "recall"}  # what a result is made with, when all was seen
SETTINGS = {
    "ignore": (None, 0),
    "k": (1, 2),
    "bins": (5, 10),
    "classes": (3, 4),
    "members": (2, 3),
    "noise_precision": (None, 2.0),
    "scale": (1.0, 2.0),
    "level": (0.5, 0.9),
    "levels": (3, 9),
    "uncertainty": ("entropy", "energy"),
    "uncertainties": (["entropy"], ["energy"]),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_that_look_at_other_things_can_be_told_apart(name):
    kind = getattr(metrics, name)
    parameters = inspect.signature(kind).parameters.values()
    options = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD} - COMPUTED
    if name == "AdaptiveECE":
        options.remove("bins")
    required = {p.name: SETTINGS[p.name][0] for p in parameters if p.default is p.empty and p.name in options}
    for option in options:
        one, other = (kind(**required | {option: value}) for value in SETTINGS[option])
        assert not MetricCollection._equal_metric_states(one, other), option
    assert MetricCollection._equal_metric_states(kind(**required), kind(**required))


def test_metrics_import_torch_and_torchmetrics_alone():
    for path in Path(metrics.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for package in (name.partition(".")[0] for name in names):
                assert package in sys.stdlib_module_names or package in ("torch", "torchmetrics", "multitudes"), path
