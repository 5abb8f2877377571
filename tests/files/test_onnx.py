"""Export to ONNX: ONNX Runtime predicts what torch predicts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.evaluation.calibrate import calibrate
from multitudes.files.onnx import to_onnx
from tests.files.test_freeze import Jitter
from tests.zoo import cases, drawing_cases
from tests.zoo.of_parts import Of

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def some(names: Mapping[str, Any] | list[str], *fast: str) -> list[Any]:
    """Return cases, of which all but `fast` are slow, because each export takes a second or two."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))


def mlp(dropout: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 5)).eval()


def outputs_of(path: Path, x: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run a file with ONNX Runtime."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {name: tensor.numpy() for name, tensor in (x if isinstance(x, Mapping) else {"x": x}).items()}
    names = [output.name for output in session.get_outputs()]
    return {name: torch.from_numpy(value) for name, value in zip(names, session.run(None, feed), strict=True)}


def same(path: Path, predictive: mt.Predictive, x: Any) -> None:
    got = outputs_of(path, x)
    if predictive.task == "classification":
        want = {
            "probs": predictive.probs,
            "entropy": predictive.entropy,
            "mutual_information": predictive.mutual_information,
            "members": predictive.member_probs,
        }
    else:
        want = {"mean": predictive.mean, "std": predictive.std, "members": predictive.member_values}
    assert list(got) == list(want)
    for name, values in want.items():
        torch.testing.assert_close(got[name], values, rtol=1e-4, atol=1e-4)


NETS: dict[str, Callable[[], mt.Multitude]] = {
    "single": lambda: mt.Multitude(mlp()),
    "deep_ensemble": lambda: mt.deep_ensemble(mlp(), 3),
    "batch_ensemble": lambda: mt.batch_ensemble(mlp(), 3),
    "mimo": lambda: mt.mimo(mlp(), 3),
    "deep batch_ensemble": lambda: mt.deep_ensemble(mt.batch_ensemble(mlp(), 2), 2),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", some(NETS, "deep_ensemble", "batch_ensemble", "mimo"))
def test_a_file_predicts_batches_of_any_size_as_the_network_does(name: str, tmp_path: Path) -> None:
    net = NETS[name]().eval()
    path = to_onnx(net, tmp_path / "net.onnx", X)
    for x in (X, OTHER, OTHER[:1]):
        same(path, net.predict(x), x)
    assert os.listdir(tmp_path) == ["net.onnx"]
    assert os.getcwd().encode() not in path.read_bytes() and b".py" not in path.read_bytes()
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    for value, dim in ((model.graph.input[0], 0), (model.graph.output[0], 0), (model.graph.output[3], 1)):
        assert value.type.tensor_type.shape.dim[dim].dim_param == "batch"


DRAWING: dict[str, Callable[[], mt.Multitude]] = {
    "mc_dropout": lambda: mt.mc_dropout(mlp()),
    "deep mc_dropout": lambda: mt.deep_ensemble(mt.mc_dropout(mlp()), 2),
    "own layer": lambda: mt.Multitude(nn.Sequential(Jitter(), mlp())),
}


@pytest.mark.parametrize("name", some(DRAWING, "mc_dropout", "own layer"))
def test_a_network_that_draws_is_frozen_first(name: str, tmp_path: Path) -> None:
    net, state = DRAWING[name]().train(), torch.get_rng_state()
    path = to_onnx(net, tmp_path / "net.onnx", X, draws=3, seed=4)
    assert all(module.training for module in net.modules()) and torch.equal(torch.get_rng_state(), state)
    net.eval()
    same(path, mt.freeze(net, 3, seed=4).predict(OTHER), OTHER)
    assert outputs_of(path, OTHER)["members"].shape == (3 * net.members, 9, 5)


@pytest.mark.slow
def test_maps_are_exported_with_smoothing_and_dropout(tmp_path: Path) -> None:
    x = torch.randn(4, 3, 16, 16)
    model = mt.models.ResNet(mt.models.resnet.BasicBlock, (1, 1, 1, 1), 5, width=8)
    smooth = mt.mc_dropout(mt.smooth(model, example=x), 0.2, "block", example=x)
    net = mt.packed(smooth, 2, example=x).eval()
    path = to_onnx(net, tmp_path / "net.onnx", x, draws=2, seed=0)
    same(path, mt.freeze(net, 2, seed=0).predict(x[:3]), x[:3])


@pytest.mark.parametrize("scaling", some(["temperature", "member_temperature", "vector", "isotonic"], "temperature"))
def test_a_calibrated_networks_probabilities_are_calibrated(scaling: str, tmp_path: Path) -> None:
    net = mt.deep_ensemble(mlp(), 3).eval()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(300, 6, generator=generator), torch.randint(5, (300,), generator=generator)
    calibrated = calibrate(net, (x, y), scaling=scaling, conformal=None)
    path = to_onnx(calibrated, tmp_path / "net.onnx", X)
    same(path, calibrated.predict(OTHER), OTHER)
    assert (outputs_of(path, OTHER)["probs"] - net.predict(OTHER).probs).abs().max() > 1e-3


@pytest.mark.parametrize("task", some(["regression", "gaussian"], "gaussian"))
@pytest.mark.parametrize("calibrating", [False, True])
def test_regression_gives_mean_and_std(task: str, calibrating: bool, tmp_path: Path) -> None:
    scalar = Of(lambda net, x: net.linear(x)[:, 0], linear=nn.Linear(6, 1))  # without a dimension of outputs
    net: Any = mt.deep_ensemble(scalar if task == "regression" else nn.Linear(6, 4), 3).eval()
    net.task = task
    if calibrating:
        shape = (60,) if task == "regression" else (60, 2)
        net = calibrate(net, (torch.randn(60, 6), torch.randn(shape)), scaling="variance")
    path = to_onnx(net, tmp_path / "net.onnx", X)
    same(path, net.predict(OTHER), OTHER)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(3, 5)

    def forward(self, one: Tensor, two: Tensor | None = None, double: bool = False) -> Tensor:
        y = self.one(one) if two is None else self.one(one) + self.two(two)
        return 2 * y if double else y


@pytest.mark.slow
def test_networks_of_several_inputs_are_called_by_name_or_number(tmp_path: Path) -> None:
    net = mt.deep_ensemble(Pair(), 2).eval()
    named = {"one": X, "two": torch.randn(4, 3), "double": True}
    path = to_onnx(net, tmp_path / "named.onnx", named)
    same(path, net.predict(named), {"one": X, "two": named["two"]})
    path = to_onnx(net, tmp_path / "numbered.onnx", (X[:1], torch.randn(1, 3)))
    two = torch.randn(9, 3)
    same(path, net.predict((OTHER, two)), {"x0": OTHER, "x1": two})


# -- what is wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forward",
    [lambda net, x: x if x.sum() > 0 else -x, lambda net, x: torch.linalg.svdvals(x.unflatten(1, (3, 2)))],
    ids=["branching", "singular"],
)
def test_a_network_that_cannot_be_exported_is_refused(forward: Callable[..., Tensor], tmp_path: Path) -> None:
    net = mt.Multitude(Of(forward))
    net.task = "regression"
    with pytest.raises(ValueError, match="the network cannot be exported to ONNX: ") as error:
        to_onnx(net, tmp_path / "net.onnx", X)
    assert "\n" not in str(error.value) and os.listdir(tmp_path) == []


def test_a_file_with_other_predictions_is_not_kept(tmp_path: Path) -> None:
    old = to_onnx(mt.Multitude(mlp()), tmp_path / "net.onnx", X).read_bytes()
    with pytest.raises(ValueError, match="the exported network is wrong: probs for a batch of 4 differs from torch"):
        to_onnx(mt.deep_ensemble(mlp(), 3), tmp_path / "net.onnx", X, tolerance=1e-12)
    assert os.listdir(tmp_path) == ["net.onnx"] and (tmp_path / "net.onnx").read_bytes() == old


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"example": torch.ones(3, 4)}, "does not fit the network"),
        ({"example": torch.ones(0, 6)}, "example must be one batch with at least one input"),
        ({"path": Path("nowhere", "net.onnx")}, "path must be a file in a folder that exists"),
        ({"tolerance": 0}, "tolerance must be above 0"),
        ({"net": mt.mc_dropout(mlp()), "draws": 0}, "draws must be a whole number"),
        ({"net": "net"}, "net must be a multitude or a network, got str"),
        ({"net": mt.temporal(mlp())}, r"got Stream.*pass its network, stream.net"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    arguments = {"net": mt.Multitude(mlp()), "path": "net.onnx", "example": X} | arguments
    with pytest.raises(ValueError, match=message):
        to_onnx(arguments.pop("net"), tmp_path / arguments.pop("path"), arguments.pop("example"), **arguments)
    assert os.listdir(tmp_path) == []


# -- every method on every network -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method, network", cases.CASES)
def test_members_of_every_network_are_exported(method: str, network: str, tmp_path: Path) -> None:
    case = cases.NETWORKS[network]
    net = cases.build(method, case.model(), network).eval()
    x = case.batch(3)[0]
    same(to_onnx(net, tmp_path / "net.onnx", case.batch()[0]), net.predict(x), x)


@pytest.mark.slow
@pytest.mark.parametrize("method, network", drawing_cases.CASES)
def test_draws_of_every_network_are_exported(method: str, network: str, tmp_path: Path) -> None:
    case = drawing_cases.NETWORKS[network]
    net = drawing_cases.build(method, network).eval()
    x = case.batch(3)[0]
    path = to_onnx(net, tmp_path / "net.onnx", case.batch()[0], draws=2, seed=0)
    same(path, mt.freeze(net, 2, seed=0).predict(x), x)
