"""Deployed networks: the predictions of the network, faster."""

from __future__ import annotations

import copy
import threading
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

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

QUICK = {("packed", "resnet"), ("batch_ensemble", "mlp"), ("masksembles", "cnn"), ("mimo", "resnet"), ("lora", "mlp")}
QUICK |= {("heads", "mlp")}
MEMBERS = [
    case if tuple(case.values) in QUICK else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
    for case in cases.CASES
]


@pytest.fixture(autouse=True)
def fixed_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ONNX Runtime can run it runs, and else torch what was folded, however long they take."""
    times = {"onnx": 1.0, "torch": 2.0}
    monkeypatch.setattr(conversion, "_in_turns", lambda functions: {n: times.get(n, 3.0) for n in functions})


def trained_mlp(seed: int = 0, outputs: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, outputs)).train()
    for _ in range(5):
        model(torch.randn(32, 4) * 2 + 1)
    return model.eval()


@pytest.mark.parametrize(("method", "network"), MEMBERS)
def test_deployed_members_predict_as_each_does_alone(method: str, network: str) -> None:
    case = cases.NETWORKS[network]
    net = cases.build(method, case.model(), network).eval()
    deployed = deploy(net, case.batch(5)[0])
    for size in (1, 5, 12):
        x = case.batch(size, seed=size)[0]
        with torch.no_grad():
            want = torch.stack([call(net.member(index).eval(), x) for index in range(net.members)])
        torch.testing.assert_close(deployed(x), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "method", [m if m in ("mc_dropout", "laplace", "patched") else pytest.param(m, marks=pytest.mark.slow)
               for m in drawing_cases.DRAWING]
)  # fmt: skip
def test_deployed_draws_are_those_of_the_seed_and_without_one_they_differ(method: str) -> None:
    net = drawing_cases.build(method, "mlp").eval()
    x = cases.NETWORKS["mlp"].batch(6)[0]
    deployed = deploy(net, x)
    with torch.no_grad():
        torch.testing.assert_close(deployed(x, draws=4, seed=3), net(x, draws=4, seed=3), rtol=1e-3, atol=1e-4)
    assert len(deployed(x)) == net.draws
    assert not torch.equal(deployed(x), deployed(x))


def test_a_laplace_posterior_without_draws_stays_without_draws() -> None:
    x = torch.randn(20, 4)
    net = mt.laplace(trained_mlp(), (x, torch.arange(20) % 3), prior=1.0)
    net.approximation = "probit"
    torch.testing.assert_close(deploy(net, x).predict(x[:7]).probs, net.predict(x[:7]).probs, rtol=1e-4, atol=1e-5)


def test_frozen_draws_are_deployed() -> None:
    x = torch.randn(6, 4)
    net = mt.freeze(mt.mc_dropout(nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3))), draws=4)
    deployed = deploy(net, x)
    assert "ONNX Runtime" in deployed.summary()
    torch.testing.assert_close(deployed(x), net.eval()(x), rtol=1e-4, atol=1e-5)


def test_the_given_network_is_left_as_it_was() -> None:
    net = mt.deep_ensemble(trained_mlp(), 3).train()
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    deployed = deploy(net, torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
    assert net.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert float(deployed(torch.ones(2, 4)).abs().sum()) > 0  # its weights are copies
    assert not deployed(torch.ones(2, 4)).requires_grad


def test_calibration_and_conformal_sets_are_kept() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(300, 4), torch.randint(3, (300,))
    net = mt.calibrate(mt.deep_ensemble(trained_mlp(), 3), [(x, y)])
    got, want = deploy(net, x[:16]).predict(x), net.predict(x)
    torch.testing.assert_close(got.probs, want.probs, rtol=1e-4, atol=1e-5)
    assert float((got.set(0.9) != want.set(0.9)).float().mean()) < 0.01
    with pytest.raises(ValueError, match="task must be 'classification', for which the network was calibrated"):
        deploy(net, x[:16]).predict(x, task="regression")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("task", "outputs"), [("gaussian", 2), ("regression", 1), ("quantiles", 3)])
def test_values_are_predicted_as_by_the_network(task: str, outputs: int) -> None:
    net = mt.deep_ensemble(trained_mlp(outputs=outputs), 3, task=task)
    if task == "quantiles":
        net.quantiles = (0.1, 0.5, 0.9)
    x = torch.randn(9, 4)
    got, want = deploy(net, x[:4]).predict(x), net.predict(x)
    assert got.task == task
    torch.testing.assert_close(got.mean, want.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.std, want.std, rtol=1e-4, atol=1e-5)


def test_a_plain_network_is_deployed() -> None:
    model = trained_mlp()
    x = torch.randn(6, 4)
    torch.testing.assert_close(deploy(model, x)(x)[0], model(x), rtol=1e-4, atol=1e-5)


def test_texts_of_any_length_and_padding() -> None:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, num_labels=3
    )
    torch.manual_seed(0)
    net = mt.heads(transformers.BertForSequenceClassification(config), 3, example=_texts(2, 7)).eval()
    deployed = deploy(net, _texts(4, 7))
    for rows, length in ((4, 7), (2, 7), (3, 11), (1, 5)):
        x = _texts(rows, length)
        with torch.no_grad():
            want = torch.stack([call(net.member(index).eval(), x) for index in range(3)])
        torch.testing.assert_close(deployed(x), want, rtol=1e-3, atol=1e-4)


def _texts(rows: int, length: int) -> dict[str, Tensor]:
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


def test_images_of_other_sizes_than_the_examples() -> None:
    net = mt.deep_ensemble(OfAnySize(), 2).eval()
    deployed = deploy(net, torch.randn(4, 3, 8, 8))
    for shape in ((4, 3, 8, 8), (2, 3, 12, 10), (1, 3, 8, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(deployed(x), net(x).detach(), rtol=1e-4, atol=1e-5)


def test_several_threads_get_their_own_answers() -> None:
    model = trained_mlp()
    deployed = deploy(model, torch.randn(8, 4))
    wrong: list[int] = []

    def ask(number: int) -> None:
        x = torch.randn(number % 7 + 1, 4, generator=torch.Generator().manual_seed(number))
        for _ in range(20):
            if not torch.allclose(deployed(x)[0], model(x), atol=1e-5):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_onnx_runtime_torch_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, extra: str, what: str) -> Any:
        raise ImportError(f"{what} needs {name}: pip install 'multitudes[{extra}]'")

    monkeypatch.setattr(exporting, "needed", missing)
    model, x = trained_mlp(), torch.randn(6, 4)
    deployed = deploy(model, x)
    assert "multitudes[onnx]" in deployed.summary() and "1 of 1 folded" in deployed.summary()
    torch.testing.assert_close(deployed(x)[0], model(x), rtol=1e-4, atol=1e-5)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.sum() > 0 else self.two(x)


def test_code_that_looks_at_values_goes_on_looking() -> None:
    torch.manual_seed(0)
    model = Branching().eval()
    deployed = deploy(model, torch.ones(3, 4))
    assert "ONNX Runtime is not used" in deployed.summary()
    for x in (torch.ones(3, 4), -torch.ones(3, 4)):
        torch.testing.assert_close(deployed(x)[0], model(x))


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(4, 3), 0.0

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x) + self.hidden
        self.hidden = float(found.detach().mean())
        return found


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.randn_like(x))


@pytest.mark.parametrize("build", [Remembering, Noisy])
def test_networks_that_do_not_repeat_themselves_are_refused(build: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="net gives other predictions for the same example when it is called again"):
        deploy(build().eval(), torch.randn(4, 4))


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


def test_no_rows_are_answered_with_none() -> None:
    net = mt.deep_ensemble(trained_mlp(), 2)
    assert deploy(net, torch.randn(5, 4))(torch.empty(0, 4)).shape == (2, 0, 3)


def test_wrong_arguments_and_inputs_are_told() -> None:
    net, x = mt.deep_ensemble(trained_mlp(), 2), torch.randn(5, 4)
    with pytest.raises(ValueError, match="precision must be one of .*int8.*'int4'"):
        deploy(net, x, precision="int4")
    with pytest.raises(ValueError, match="batch_sizes must be .*0"):
        deploy(net, x, batch_sizes=[0])
    with pytest.raises(ValueError, match="example must be one batch of inputs"):
        deploy(net, torch.empty(0, 4))
    with pytest.raises(ValueError, match="net must be a multitude or a network, got int"):
        deploy(3, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="precision='int8' is for networks that draw nothing"):
        deploy(mt.mc_dropout(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))), x, precision="int8")
    deployed = deploy(net, x)
    with pytest.raises(ValueError, match="does not fit the network"):
        deployed(torch.randn(5, 9))
    with pytest.raises(ValueError, match="x holds 1 NaN value"):
        deployed.predict(torch.tensor([[0.0, 1.0, float("nan"), 2.0]]))
    with pytest.raises(ValueError, match="this network has no layer that draws"):
        deployed(x, draws=3)
    assert deployed(x).shape == (2, 5, 3)  # and goes on


def test_the_summary_says_what_was_done_and_how_long_it_takes() -> None:
    told = deploy(mt.batch_ensemble(trained_mlp(), 3), torch.randn(16, 4)).summary()
    for part in ("3, folded into networks of their own", "1 of 1 folded", "of how much predictions vary", "16 rows"):
        assert part in told
    assert "ms as it was" in told
