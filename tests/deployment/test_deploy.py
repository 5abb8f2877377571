"""Deployed networks predict as the network does."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import multitudes as mt
from multitudes.deployment import deploy as conversion
from multitudes.deployment.deploy import deploy
from multitudes.files import onnx_exporter as exporting
from multitudes.networks.calls import call
from tests.zoo import cases, drawing_cases
from tests.zoo.of_parts import Of

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SOME = {("packed", "resnet"), ("batch_ensemble", "mlp"), ("masksembles", "cnn"), ("mimo", "mlp"), ("lora", "mlp")}
MEMBERS = [
    case if tuple(case.values) in SOME else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
    for case in cases.CASES
]


@pytest.fixture(autouse=True)
def fixed_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime is always the fastest engine, and torch with folded norms the second."""
    times = {"onnx": 1.0, "torch": 2.0}
    monkeypatch.setattr(conversion, "_median_times", lambda functions: {n: times.get(n, 3.0) for n in functions})


def trained_mlp(seed: int = 0, outputs: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, outputs)).train()
    for _ in range(5):
        model(torch.randn(32, 4) * 2 + 1)
    return model.eval()


def close(got: Tensor, want: Tensor, rtol: float = 1e-3, atol: float = 1e-4) -> None:
    torch.testing.assert_close(got, want.detach(), rtol=rtol, atol=atol)


@pytest.mark.parametrize(("method", "network"), MEMBERS)
def test_deployed_members_predict_as_each_does_alone(method: str, network: str) -> None:
    case = cases.NETWORKS[network]
    net = cases.build(method, case.model(), network).eval()
    deployed = deploy(net, case.batch(5)[0])
    for size in (1, 5, 12):
        x = case.batch(size, seed=size)[0]
        close(deployed(x), torch.stack([call(net.member(index).eval(), x) for index in range(net.members)]))


@pytest.mark.parametrize(
    "method", [m if m in ("mc_dropout", "laplace", "patched") else pytest.param(m, marks=pytest.mark.slow)
               for m in drawing_cases.DRAWING]
)  # fmt: skip
def test_deployed_draws_follow_the_seed_and_differ_without_one(method: str) -> None:
    net = drawing_cases.build(method, "mlp").eval()
    x = cases.NETWORKS["mlp"].batch(6)[0]
    deployed = deploy(net, x)
    close(deployed(x, draws=4, seed=3), net(x, draws=4, seed=3))
    assert len(deployed(x)) == net.draws
    assert not torch.equal(deployed(x), deployed(x))


def test_a_laplace_posterior_without_draws_is_deployed_without_draws() -> None:
    x = torch.randn(20, 4)
    net = mt.laplace(trained_mlp(), (x, torch.arange(20) % 3), prior=1.0)
    net.approximation = "probit"
    deployed = deploy(net, x)
    for options in ({}, {"draws": 0}):
        close(deployed.predict(x[:7], **options).probs, net.predict(x[:7], **options).probs)
    with pytest.raises(ValueError, match="needs approximation='draws', got 'probit'"):
        deployed.predict(x, draws=1)


def texts(rows: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * length)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[-1, length // 2 :] = 0
    return {"input_ids": torch.randint(50, (rows, length), generator=generator), "attention_mask": mask}


class OfAnySize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def text_heads() -> mt.Multitude:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, num_labels=3
    )
    return mt.heads(transformers.BertForSequenceClassification(config), 3, example=texts(2, 7))


def frozen_dropout() -> mt.Multitude:
    return mt.freeze(mt.mc_dropout(nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3))), draws=4)


FORMS: dict[str, tuple[Callable[[], mt.Multitude], Callable[..., Any], list[tuple[int, ...]]]] = {
    "a plain network, no rows": (lambda: mt.Multitude(trained_mlp()), torch.randn, [(6, 4), (0, 4)]),
    "frozen draws": (frozen_dropout, torch.randn, [(6, 4)]),
    "images of any size": (
        lambda: mt.deep_ensemble(OfAnySize(), 2), torch.randn, [(4, 3, 8, 8), (2, 3, 12, 10), (1, 3, 8, 8)]
    ),
    "texts of any length": (text_heads, texts, [(4, 7), (2, 7), (3, 11), (1, 5)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_inputs_of_any_form_are_predicted_as_by_the_network(name: str) -> None:
    build, make, shapes = FORMS[name]
    torch.manual_seed(0)
    net = build().eval()
    deployed = deploy(net, make(*shapes[0]))
    assert ("ONNX Runtime, threads" in deployed.summary()) == (make is not texts)  # BERT computes indices
    for shape in shapes:
        x = make(*shape)
        close(deployed(x), net(x))


def test_the_given_network_does_not_change() -> None:
    net = mt.deep_ensemble(trained_mlp(), 3).train()
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    deployed = deploy(net, torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
    assert net.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    found = deployed(torch.ones(2, 4))
    assert float(found.abs().sum()) > 0 and not found.requires_grad  # its weights are copies


def test_calibration_and_conformal_sets_are_kept() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(300, 4), torch.randint(3, (300,))
    net = mt.calibrate(mt.deep_ensemble(trained_mlp(), 3), [(x, y)])
    deployed = deploy(net, x[:16])
    got, want = deployed.predict(x), net.predict(x)
    close(got.probs, want.probs)
    assert float((got.set(0.9) != want.set(0.9)).float().mean()) < 0.01
    with pytest.raises(ValueError, match="task must be 'classification', for which the network was calibrated"):
        deployed.predict(x, task="regression")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("task", "outputs"), [("gaussian", 2), ("regression", 1), ("quantiles", 3)])
def test_values_are_predicted_as_by_the_network(task: str, outputs: int) -> None:
    net = mt.deep_ensemble(trained_mlp(outputs=outputs), 3, task=task)
    if task == "quantiles":
        net.quantiles = (0.1, 0.5, 0.9)
    x = torch.randn(9, 4)
    got, want = deploy(net, x[:4]).predict(x), net.predict(x)
    assert got.task == task
    close(got.mean, want.mean)
    close(got.std, want.std)


def test_several_threads_get_their_own_predictions() -> None:
    model = trained_mlp()
    deployed = deploy(model, torch.randn(8, 4))
    wrong: list[int] = []

    def predict(number: int) -> None:
        x = torch.randn(number % 7 + 1, 4, generator=torch.Generator().manual_seed(number))
        for _ in range(20):
            if not torch.allclose(deployed(x)[0], model(x), atol=1e-5):
                wrong.append(number)

    threads = [threading.Thread(target=predict, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_torch_runs_the_network_without_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, extra: str, what: str) -> Any:
        raise ImportError(f"{what} needs {name}: pip install 'multitudes[{extra}]'")

    monkeypatch.setattr(exporting, "needed", missing)
    model, x = trained_mlp(), torch.randn(6, 4)
    deployed = deploy(model, x)
    assert "multitudes[onnx]" in deployed.summary() and "1 of 1 folded" in deployed.summary()
    close(deployed(x)[0], model(x))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.sum() > 0 else self.two(x)


def test_code_that_inspects_values_still_does() -> None:
    torch.manual_seed(0)
    model = Branching().eval()
    deployed = deploy(model, torch.ones(3, 4))
    assert "ONNX Runtime is not used" in deployed.summary()
    for x in (torch.ones(3, 4), -torch.ones(3, 4)):
        torch.testing.assert_close(deployed(x)[0], model(x))


def with_memory(net: Any, x: Tensor) -> Tensor:
    found = net.layer(x) + getattr(net, "hidden", 0.0)
    net.hidden = float(found.detach().mean())
    return found


@pytest.mark.parametrize("forward", [with_memory, lambda net, x: net.layer(x + torch.randn_like(x))])
def test_networks_that_do_not_repeat_their_predictions_are_refused(forward: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match=r"net must repeat its predictions .* mt.mc_dropout"):
        deploy(Of(forward, layer=nn.Linear(4, 3)).eval(), torch.randn(4, 4))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_precisions_of_the_cpu(precision: str) -> None:
    model, x = trained_mlp(), torch.randn(64, 4)
    deployed = deploy(model, x, precision=precision)
    assert deployed.precision == precision and deployed(x).dtype == torch.float32
    error = float((deployed(x)[0] - model(x)).norm().detach() / model(x).norm().detach())
    assert 0 < error < 0.03


def test_doubles_stay_doubles() -> None:
    model, x = trained_mlp().double(), torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(deploy(model, x)(x)[0], model(x), rtol=1e-9, atol=1e-9)


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
DROPOUT = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "int4"}, "precision must be one of .*int8.*'int4'"),
        ({"batch_sizes": [0]}, "batch_sizes must be .*0"),
        ({"batch_sizes": 5}, "batch_sizes must be a list of whole numbers, got 5"),
        ({"example": X[:0]}, "example must be one batch with at least one input"),
        ({"net": 3}, "net must be a multitude or a network, got int"),
        ({"net": mt.mc_dropout(DROPOUT), "precision": "int8"}, r"without random draws: pass mt.freeze\(net\)"),
        (
            {"net": nn.Linear(4, 3).double(), "example": X.double(), "precision": "int8"},
            "got torch.float64: pass net.f",
        ),
        ({"targets": torch.zeros(5)}, "targets need precision='int8'"),
        ({"targets": torch.zeros(3), "precision": "int8"}, r"targets must be .* of the 5 rows of example, got \[3\]"),
        ({"targets": "x", "precision": "int8"}, "targets must be .* of the 5 rows of example, got 'x'"),
        ({"net": torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(4, 3)).eval()))}, "torch.jit.freeze"),
        (
            {"net": Of(lambda net, x: x.argmax(1))},
            "net must predict floating-point or complex numbers, got torch.int64",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    arguments = {"net": mt.deep_ensemble(nn.Linear(4, 3), 2), "example": X} | arguments
    with pytest.raises(ValueError, match=message):
        deploy(arguments.pop("net"), arguments.pop("example"), **arguments)


def test_wrong_calls_are_refused() -> None:
    deployed = deploy(mt.deep_ensemble(trained_mlp(), 2), X)
    for x, options, message in (
        (torch.randn(5, 9), {}, "does not fit the network"),
        ((X, X), {}, r"x of shape \[5, 4\].*does not fit the network: .*argument"),
        (X / 0 * 0, {}, "x holds 20 NaN values"),
        (X, {"draws": 3}, "this network has no layer that draws"),
        (X, {"tolerance": 0.1}, "takes x and the options draws, seed, memory, got 'tolerance'"),
    ):
        with pytest.raises(ValueError, match=message):
            deployed.predict(x, **options)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match="save the original with mt.save, and deploy it again"):
            copied(deployed)
    assert deployed(X).shape == (2, 5, 3)


def test_the_summary_lists_the_changes_and_times() -> None:
    summary = deploy(mt.batch_ensemble(trained_mlp(), 3), torch.randn(16, 4)).summary()
    for part in ("3, folded into separate networks", "1 of 1 folded", "of the predictions' variation", "16 rows"):
        assert part in summary
