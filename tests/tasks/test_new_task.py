"""The recipe for a task: one class and one row give the loss, quantities, scores, intervals and export."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.evaluation.calibrate import calibrate
from multitudes.evaluation.evaluate import evaluate
from multitudes.files.onnx import to_onnx
from multitudes.tasks import TASKS, criterion_for, task_of
from multitudes.tasks.regression import ValueTask

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
Y = (2 * X[:, :1] + 1).exp().round().clamp(max=20)


class Counts(ValueTask):
    """Counts: the logarithm of a Poisson rate, `[S, B]` or `[S, B, D, ...]`."""

    name = "counts"
    criteria = (F.poisson_nll_loss, nn.PoissonNLLLoss)
    rank = 2
    form = "[S, B] or [S, B, D, ...]"
    metrics = ("regression", "intervals")
    scores = ("absolute", "scaled")

    def _averaged(self, values: Tensor, weights: Tensor) -> Tensor:
        return (values + weights.log()).logsumexp(0)

    def means_and_variances(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        return predictions.exp(), predictions.exp()


@pytest.fixture(autouse=True)
def one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "counts", Counts())


def networks() -> mt.Multitude:
    torch.manual_seed(0)
    net = mt.deep_ensemble(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), members=3)
    net.task = "counts"
    return net


def rates(net: mt.Multitude, x: Tensor = X) -> Tensor:
    return net(x).detach().exp()


def test_no_code_compares_the_name_of_a_task() -> None:
    """The registry alone knows names, so that another row is enough."""
    compared = re.compile(r"""\btask (?:==|!=|in|not in) [("'][^)]*["']""")
    source = Path(mt.__file__).parent
    assert not [path.name for path in source.rglob("*.py") if compared.search(path.read_text(encoding="utf-8"))]
    assert compared.search('if p.task == "binary":') and compared.search('task not in (None, "classification")')


def test_a_network_is_trained_by_the_default_criterion() -> None:
    net = networks()
    each = [(rate - Y * rate.log()).mean() for rate in rates(net)]
    torch.testing.assert_close(net.loss(X, Y), sum(each, torch.zeros(())))
    torch.testing.assert_close(net.loss(X, Y.long()), net.loss(X, Y))
    before = net.loss(X, Y).item()
    mt.fit(net, [(X, Y)], epochs=20, lr=0.05, validation=[(X, Y)], seed=0)
    assert net.loss(X, Y).item() < before - 1


def test_draws_are_averaged_as_rates_before_the_loss() -> None:
    net = mt.mc_dropout(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    net.task, net.training_draws = "counts", 4
    torch.manual_seed(1)
    rate = rates(net).mean(0)
    torch.manual_seed(1)
    torch.testing.assert_close(net.loss(X, Y), (rate - Y * rate.log()).mean())


def test_known_criteria_belong_to_the_task_and_to_no_other() -> None:
    assert criterion_for("counts", None) is F.poisson_nll_loss
    with pytest.raises(ValueError, match="criterion PoissonNLLLoss is for task 'counts', and the task is 'regression'"):
        criterion_for("regression", nn.PoissonNLLLoss())
    with pytest.raises(ValueError, match="criterion mse_loss is for task 'regression', and the task is 'counts'"):
        networks().loss(X, Y, F.mse_loss)


def test_quantities_are_those_of_the_mixture() -> None:
    net = networks()
    p, rate = net.predict(X), rates(net)
    torch.testing.assert_close(p.mean, rate.mean(0))
    torch.testing.assert_close(p.variance, rate.var(0, correction=0) + rate.mean(0))
    torch.testing.assert_close(p.together.exp(), rate.mean(0))
    assert repr(p) == "Predictive(task='counts', members=3, inputs=64, outputs=[1])"
    with pytest.raises(ValueError, match="entropy needs task classification, .* got predictions of counts"):
        _ = p.entropy
    with pytest.raises(ValueError, match=r"predictions of task counts must be \[S, B\] or .* got shape \[3\]"):
        mt.Predictive(torch.zeros(3), "counts")


def test_an_evaluation_has_the_scores_of_its_kinds() -> None:
    net = networks()
    found = evaluate(net, (X, Y))
    assert float(found["rmse"]) == pytest.approx(float((rates(net).mean(0) - Y).square().mean().sqrt()), rel=1e-5)
    assert {"crps", "coverage_95"} <= set(found) and not {"accuracy", "log_density"} & set(found)


def test_intervals_are_calibrated_by_the_default_score() -> None:
    net = networks()
    calibrated = calibrate(net, (X, Y))
    low, high = calibrated.predict(X).set(0.9)
    errors = (rates(net).mean(0) - Y).abs().flatten().sort().values
    threshold = float(errors[58])  # the ceil(65 * 0.9) = 59th smallest of 64
    torch.testing.assert_close((high - low) / 2, torch.full_like(low, threshold))
    with pytest.raises(ValueError, match="scaling must be one of None, 'auto' for counts, got 'variance'"):
        calibrate(net, (X, Y), scaling="variance")


def test_a_laplace_posterior_is_refused_without_a_likelihood() -> None:
    net = mt.Multitude(nn.Linear(3, 1)).like(networks())
    with pytest.raises(ValueError, match="task 'counts' has none"):
        mt.laplace(net, (X, Y))


def test_a_saved_network_keeps_the_task(tmp_path: Path) -> None:
    net = networks()
    mt.save(net, tmp_path / "net.safetensors")
    again = mt.load(tmp_path / "net.safetensors")
    assert again.task == "counts" and isinstance(task_of(again.task), Counts)
    torch.testing.assert_close(again.predict(X).mean, net.predict(X).mean)


def test_an_exported_file_returns_the_tasks_quantities(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    net = networks()
    to_onnx(net, tmp_path / "net.onnx", X[:4])
    session = runtime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    mean, std, members = map(torch.from_numpy, session.run(["mean", "std", "members"], {"x": X[:9].numpy()}))
    rate = rates(net, X[:9])
    torch.testing.assert_close(mean, rate.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(std.square(), rate.var(0, correction=0) + rate.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(members, rate, rtol=1e-4, atol=1e-4)
