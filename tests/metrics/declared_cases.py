"""Cases of all declared metrics with data, for tests of their common properties."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from multitudes import metrics
from multitudes.metrics.class_inputs import read_rows, read_without_target
from multitudes.metrics.declare import METRICS
from multitudes.tasks.predictive import Predictive
from tests.metrics.cases import classes, heads, logits

S, N, C = 3, 40, 4
P, Y = Predictive(logits(S, N, C)), classes(C, N)
SEQUENCES = logits(5, N, C).softmax(2)
HALVES = (slice(0, 25), slice(25, N))
OWN_SETTINGS = {"topk_accuracy": {"k": 2}}


@dataclass
class Case:
    """Metric with data that can be sliced."""

    make: Any
    data: Any
    function: Any = None
    declaration: Any = None

    def fed(self, *halves):
        """Return the metric after these halves of the data, by default both."""
        metric = self.make()
        for half in halves or HALVES:
            self.feed(metric, half)
        return metric

    def feed(self, metric, half):
        metric.update(*self.data(half))

    def result(self):
        """Return the result of both halves."""
        return self.fed().compute()


def of_data(*parts):
    return lambda half: tuple(part[half] for part in parts)


DATA = {
    "classification": of_data(P, Y),
    "segmentation": of_data(P, Y),
    "targetless": of_data(P, Y),
    "sequences": lambda half: (SEQUENCES[:, half],),
    "attacks": of_data(P.probs, P.probs.roll(1, 0), Y),
    **dict.fromkeys(("regression", "intervals", "density", "regression by members"), of_data(*heads(S, N))),
}


def case_of(declaration):
    fixed = OWN_SETTINGS.get(declaration.name, {})
    sizes = {
        name: {"classes": C, "members": S}[name] for name in declaration.class_settings.keys() - declaration.settings
    }
    function = getattr(metrics, declaration.name)
    make = partial(declaration.streaming, **sizes, **fixed)
    return Case(make, DATA[declaration.kind.name], partial(function, **fixed), declaration)


DECLARED = {each.class_name: case_of(each) for each in METRICS.values() if each.kind.name in DATA}
CASES = DECLARED | {"OODDetection": Case(metrics.OODDetection, of_data(P, Y == 0))}
OF_ROWS = {n: c for n, c in DECLARED.items() if c.declaration.kind.read in (read_rows, read_without_target)}
OF_FORECASTS = {n: c for n, c in DECLARED.items() if c.data is DATA["regression"]}


def table(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


def numbers(result):
    """Return all numbers of a tensor, tuple, table or curve."""
    if isinstance(result, torch.Tensor):
        return result.double().flatten().tolist()
    if isinstance(result, (int, float)):
        return [result]
    if isinstance(result, (str, type(None))):
        return []
    parts = result if isinstance(result, tuple) else (result if isinstance(result, dict) else vars(result)).values()
    return [number for part in parts for number in numbers(part)]


def same(one, other, rel=1e-9, abs=1e-12):
    assert numbers(one) == pytest.approx(numbers(other), rel=rel, abs=abs, nan_ok=True)
