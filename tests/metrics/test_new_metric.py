"""A new metric: one declaration creates the function, the class, and its place in every result."""

from __future__ import annotations

import inspect
import pickle
import re
import textwrap

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.evaluation.evaluate import evaluate
from multitudes.lab.report.board import Head
from multitudes.lab.study.results.leaderboard import Row, Value, best, better, level_with_best
from multitudes.lab.study.results.score_columns import column_of
from multitudes.metrics.class_inputs import Rows
from multitudes.metrics.declare import HIGHER, METRICS, NEITHER, RANKS, ZERO, Count, discover, mean_of, metric, total_of
from tests.zoo.predictions import raises

P, Y = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.25, 0.75]]), torch.tensor([0, 1, 1])
DATA = torch.rand(40, 3), torch.randint(3, (40,))


@pytest.fixture(autouse=True)
def declared_for_this_test_alone():
    kept = [(table, dict(table)) for table in (METRICS, RANKS)]
    yield
    for table, before in kept:
        table.clear()
        table.update(before)


def _per_cent(sums: Tensor, digits: Count = 6) -> Tensor:
    return (100 * mean_of(sums)).round(decimals=digits)


def margin(rows: Rows, power: Count = 1) -> Tensor:
    """Difference between the two largest probabilities in per cent, mean over rows."""
    first, second = rows.probs.topk(2).values.T
    return total_of((first - second).double() ** power)


def declare(**arguments):
    return metric("Margin", _per_cent, **{"better": HIGHER, "group": "calibration", "shifted": True} | arguments)(
        margin
    )


def test_the_function_reads_and_checks_its_input():
    function = declare()
    assert float(function(P, Y)) == pytest.approx(100 * (0.8 + 0.2 + 0.5) / 3)
    assert float(function(P, Y, power=2)) == float(function(P, Y, 2)) == pytest.approx(100 * (0.64 + 0.04 + 0.25) / 3)
    assert float(function(P, Y, digits=1, ignore=0)) == pytest.approx(35.0)
    with raises("power must be a whole number, 1 or more, got 0"):
        function(P, Y, power=0)
    with raises("target must lie within 0 and 1, got 2 at index [0]"):
        function(P, Y + 2)
    shown = inspect.signature(function)
    assert list(shown.parameters) == ["prediction", "target", "power", "digits", "ignore"]
    assert shown.parameters["power"].default == 1 and shown.parameters["power"].annotation is int
    assert shown.return_annotation is Tensor and "Args:\n    prediction: `Predictive`" in function.__doc__


def test_the_class_streams_and_can_be_pickled():
    function = declare()
    streaming = Margin(2, ignore=0)  # noqa: F821
    assert list(inspect.signature(Margin).parameters) == ["power", "digits", "ignore", "kwargs"]  # noqa: F821
    streaming.update(P[:1], Y[:1])
    streaming = pickle.loads(pickle.dumps(streaming))
    streaming.update(prediction=P[1:], target=Y[1:])
    assert streaming.compute() == function(P, Y, 2, ignore=0) and streaming.power == 2
    assert streaming.higher_is_better is True and streaming.__doc__.startswith(
        "Streaming version of `margin`.\n\nArgs:"
    )
    with raises("digits must be a whole number, 1 or more, got 0"):
        Margin(digits=0)  # noqa: F821
    with pytest.raises(TypeError, match="too many positional arguments"):
        Margin(1, 2, None, 4)  # noqa: F821


def test_evaluate_includes_the_metric_under_its_score_name():
    function = declare(score="lead")
    net, images = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), torch.rand(40, 1, 8, 8)
    result = evaluate(net, (images, DATA[1]), shift="contrast", severities=[2], tasks="calibration")
    assert result["lead"] == pytest.approx(float(function(net(images).softmax(1), DATA[1])), rel=1e-5)
    assert "shift/contrast/2/lead" in result and "shift/mean/lead" in result
    assert "lead" not in evaluate(net, (images, DATA[1]), tasks="scores")
    assert result.counts["lead"] == 40


@pytest.mark.parametrize(
    ("direction", "arrow", "first"), [(HIGHER, "\u00a0↑", "c"), (ZERO, "\u00a0→0", "b"), (NEITHER, "", None)]
)
def test_leaderboards_and_reports_use_the_direction(direction, arrow, first):
    declare(better=direction)
    rows = [Row(name, name, (0,), {"margin": Value((value,))}) for name, value in (("a", -0.5), ("b", 0.1), ("c", 0.3))]
    assert better("margin") is better("shift/fog/3/margin") is direction
    found = best(rows, "margin")
    assert (found and found.name) == first
    assert [row.name for row in level_with_best(rows, "margin")][:1] == ([first] if first else [])
    assert Head.of(column_of("margin")).title == f"margin{arrow}"


def test_metrics_of_a_new_module_are_discovered(tmp_path, monkeypatch):
    source = '''
        """Which class is probable."""
        from __future__ import annotations
        from torch import Tensor
        from multitudes.metrics.declare import LOWER, metric, total_of
        from multitudes.metrics.class_inputs import Rows

        __all__ = ["HALF"]
        HALF = 0.5

        @metric("Unsure", better=LOWER, group="scores")
        def unsure(rows: Rows) -> Tensor:
            """The share of rows in which no class is more probable than all others together."""
            return total_of(rows.confidence <= HALF)
    '''
    folder = tmp_path / "more_metrics"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "unsure.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    names = discover("more_metrics", [str(folder)])
    assert sorted(names) == ["HALF", "Unsure", "unsure"]
    probs = torch.tensor([[0.4, 0.3, 0.3], [0.8, 0.1, 0.1]])
    assert float(names["unsure"](probs, torch.tensor([0, 0]))) == 0.5
    assert 0 <= evaluate(nn.Linear(3, 3), DATA)["unsure"] <= 1
    assert better("unsure").quality(0.1) > better("unsure").quality(0.2)


def test_duplicate_names_and_unknown_groups_are_refused():
    def nll(rows: Rows) -> Tensor:
        return total_of(rows.correct)

    with raises("metric 'nll' exists already in multitudes.metrics.scoring: choose another name"):
        metric("Other", better=HIGHER)(nll)
    with raises("group must be one of None, scores, calibration, selective, diversity, got 'score'"):
        declare(group="score")


def test_every_metric_is_public():
    for declaration in METRICS.values():
        function, streaming = (getattr(mt.metrics, name) for name in (declaration.name, declaration.class_name))
        assert function.declaration is declaration and streaming.declaration is declaration
        assert {declaration.name, declaration.class_name} <= set(mt.metrics.__all__)
        for each in (function, streaming):
            described = re.findall(r"^    (\w+):", each.__doc__, re.M)
            assert described == [name for name in inspect.signature(each).parameters if name != "kwargs"], each
    with pytest.raises(AttributeError, match="module 'multitudes.metrics' has no attribute 'nlll'"):
        mt.metrics.nlll  # noqa: B018
