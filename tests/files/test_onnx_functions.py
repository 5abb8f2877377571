"""Functions in exported networks: ONNX Runtime computes what torch computes, for unusual numbers too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.deployment.engines import TorchEngine
from multitudes.deployment.onnx_engine import OnnxEngine
from multitudes.files.onnx import to_onnx
from multitudes.files.onnx_decompositions import DECOMPOSITIONS
from tests.files.onnx_functions import FUNCTIONS
from tests.zoo.of_parts import Of

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

aten: Any = torch.ops.aten
NUMBERS = torch.tensor(
    [-100.0, -7.0, -3.0, -2.5, -1.3, -1.0, -0.7, -0.0, 0.0, 1e-30, 0.1, 0.5, 0.7, 1.0, 1.3, 1.5, 2.0, 2.6, 10.0, 88.0]
)
"""Multiples that are rounded, zeros of both signs, equal numbers, and numbers whose exponentials overflow."""
EVERY, OTHER = NUMBERS.repeat(len(NUMBERS), 1), NUMBERS.repeat(len(NUMBERS), 1).T.contiguous()
WHOLE = torch.tensor([-7, -6, -1, 0, 1, 5, 6])
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def special(rows: int) -> Tensor:
    return NUMBERS[torch.randint(len(NUMBERS), (rows, 6), generator=torch.Generator().manual_seed(rows))]


REFUSED = (aten.special_log_ndtr.default, aten.special_erfcx.default, aten.scatter_reduce.two)
ARGUMENTS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.log_sigmoid.default: [((NUMBERS,), {})],
    aten.logaddexp.default: [((EVERY, OTHER), {}), ((torch.tensor([-torch.inf]), torch.tensor([-torch.inf])), {})],
    aten.logaddexp2.default: [((EVERY, OTHER), {})],
    aten.logcumsumexp.default: [((EVERY, 0), {}), ((OTHER, 0), {}), ((EVERY, -1), {})],
    aten.remainder.Tensor: [((EVERY, OTHER), {}), ((WHOLE, torch.tensor([3])), {}), ((WHOLE, torch.tensor([-4])), {})],
    aten.remainder.Scalar: [((NUMBERS, 0.7), {}), ((NUMBERS, -0.7), {}), ((WHOLE, -4), {}), ((WHOLE, 0.3), {})],
    aten.remainder.Scalar_Tensor: [((2.0, NUMBERS), {})],
    aten.floor_divide.default: [((EVERY, OTHER), {})],
    aten.floor_divide.Scalar: [((NUMBERS, 0.7), {}), ((WHOLE, 0.3), {})],
    aten.div.Tensor_mode: [((EVERY, OTHER), {"rounding_mode": "floor"})],
    aten.div.Scalar_mode: [((NUMBERS, -0.7), {"rounding_mode": "floor"})],
    aten.signbit.default: [((NUMBERS,), {}), ((WHOLE,), {})],
    aten.copysign.Tensor: [((EVERY, OTHER), {}), ((WHOLE, WHOLE.flip(0)), {})],
    aten.copysign.Scalar: [((NUMBERS, -2.0), {})],
    aten.atan2.default: [((EVERY, OTHER), {}), ((WHOLE, WHOLE.flip(0)), {})],
    aten.hypot.default: [((EVERY, OTHER), {}), ((1e30 * EVERY, 1e30 * OTHER), {})],
    aten.fmax.default: [((EVERY, OTHER), {}), ((EVERY.log(), OTHER), {}), ((EVERY, OTHER.log()), {})],
    aten.fmin.default: [((EVERY, OTHER), {}), ((EVERY.log(), OTHER), {}), ((EVERY, OTHER.log()), {})],
    aten.kthvalue.default: [((EVERY, 3), {}), ((OTHER + EVERY, 2, 0, True), {})],
    aten.median.dim: [((EVERY, 1), {}), ((EVERY[:, :7], -1, True), {})],
    aten.searchsorted.Tensor: [
        ((torch.tensor([-1.0, 0.0, 0.7, 0.7]), EVERY), {}),
        ((torch.tensor([-1.0, 0.0, 0.7, 0.7]), EVERY), {"right": True}),
        ((torch.tensor([[-1.0, 0.7], [0.1, 88.0]]), EVERY[:2]), {"side": "right", "out_int32": True}),
    ],
    aten.isin.Tensor_Tensor: [((EVERY, NUMBERS[3:5]), {}), ((EVERY, NUMBERS[3:5]), {"invert": True})],
    aten.rrelu.default: [((NUMBERS,), {}), ((NUMBERS, 0.2, 0.6), {})],
    aten.std_mean.correction: [((EVERY + OTHER, [1]), {"correction": 0, "keepdim": True}), ((EVERY, None), {})],
    aten.std_mean.dim: [((EVERY + OTHER, [1]), {"keepdim": True}), ((OTHER, [0, 1], False), {})],
    aten.std_mean.default: [((EVERY,), {}), ((OTHER, False), {})],
    aten.cdist.default: [((X, special(3)), {}), ((X.view(2, 2, 6), special(10).view(2, 5, 6), 1.0), {})],
    aten.sort.stable: [((EVERY.round(), ), {"stable": True, "dim": 1})],
    aten.scaled_dot_product_attention.default: [
        ((X.view(4, 2, 3), X.view(4, 2, 3), X.view(4, 2, 3)), {"is_causal": True}),
        ((X.view(4, 2, 3), X.view(4, 2, 3), X.view(4, 2, 3), X.view(4, 2, 3)[..., :2] > -9), {"scale": 2.0}),
    ],
}  # fmt: skip


def test_every_decomposition_is_compared_with_torch() -> None:
    assert ARGUMENTS.keys() | set(REFUSED) == DECOMPOSITIONS.keys()


@pytest.mark.parametrize("operator", ARGUMENTS, ids=str)
def test_a_decomposition_equals_torch(operator: Any) -> None:
    for args, kwargs in ARGUMENTS[operator]:
        want, got = operator(*args, **kwargs), DECOMPOSITIONS[operator](*args, **kwargs)
        values = isinstance(want, Tensor) or "std_mean" in str(operator)
        pairs = zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]
        for one, other in pairs if values else list(pairs)[:1]:  # the order of equal numbers is open
            torch.testing.assert_close(other, one, equal_nan=True, rtol=1e-5, atol=1e-6)


def predictions(path: Path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["mean"], {"x": x.numpy()})[0])


def regression(forward: Callable[[Tensor], Tensor]) -> mt.Multitude:
    net = mt.Multitude(Of(lambda net, x: forward(x))).eval()
    net.task = "regression"
    return net


def decomposed(x: Tensor) -> Tensor:
    """Functions that the exporter alone gets wrong for unusual numbers, and one that is a subgraph."""
    y = x.flip(1)
    found = [F.logsigmoid(x), torch.logaddexp(x, y), torch.logaddexp2(x, y), x.logcumsumexp(1)]
    found += [x % 0.7, torch.remainder(x, y.abs() + 0.1), x // 0.7, x.clone().remainder_(-1.3)]
    found += [torch.div(x, y.abs() + 0.1, rounding_mode="floor"), torch.atan2(x, y), torch.signbit(x).float()]
    found += [x.sort(dim=1, stable=True)[1].float()]
    found += [F.embedding_bag((x > 0).long(), torch.arange(12.0).view(2, 6))]
    return torch.cat(found, 1)


def test_functions_in_a_file_equal_torch_for_numbers_unlike_the_example(tmp_path: Path) -> None:
    path = to_onnx(regression(decomposed), tmp_path / "net.onnx", X)
    for x in (special(200), special(1)):
        torch.testing.assert_close(predictions(path, x), decomposed(x), rtol=1e-4, atol=1e-4)
    assert b".py" not in path.read_bytes()  # no source locations, not in subgraphs either


def test_bounds_of_one_tensor_are_not_confused(tmp_path: Path) -> None:
    def bounded(x: Tensor) -> Tensor:
        return torch.cat([x.clamp(-3, 3), x.clamp(-1, 2), x.clamp(-1, 2) * x.clamp(max=1)], 1)

    path = to_onnx(regression(bounded), tmp_path / "net.onnx", X / 10)
    torch.testing.assert_close(predictions(path, special(9)), bounded(special(9)))


def test_batch_sizes_in_inferred_shapes_are_dynamic() -> None:
    net = mt.deep_ensemble(nn.Sequential(nn.Linear(6, 8), nn.LogSigmoid(), nn.Linear(8, 3)), 2).eval()
    with torch.no_grad():
        torch.testing.assert_close(OnnxEngine(net, X, TorchEngine(net, None, X))(special(9)), net(special(9)))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (torch.lgamma, "ONNX has no operator for torch's prims.lgamma"),
        (torch.special.log_ndtr, "ONNX has no operator for torch.special.log_ndtr"),
        (torch.special.erfcx, "ONNX has no operator for torch.special.erfcx"),
        (
            lambda x: x.scatter_reduce(1, torch.arange(6).expand(x.shape[0], -1), x, "mean"),
            "ONNX has no operator for torch.scatter_reduce with reduce='mean'",
        ),
        (lambda x: x * len(x), "its code makes the batch size a constant: use x.shape[0] instead of len(x)"),
    ],
)
def test_unsupported_functions_are_refused_in_one_line(
    forward: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="the network cannot be exported to ONNX: ") as error:
        to_onnx(regression(forward), tmp_path / "net.onnx", X.abs())
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(FUNCTIONS), 12))
def test_functions_equal_torch_at_other_batch_sizes(start: int, tmp_path: Path) -> None:
    some = list(FUNCTIONS)[start : start + 12]
    path = to_onnx(regression(lambda x: torch.cat([FUNCTIONS[n](x) for n in some], 1)), tmp_path / "net.onnx", X)
    for x in (special(200), special(1), torch.zeros(2, 6), torch.tensor([[300.0, -300.0, 1e4, -1e4, 120.0, -120.0]])):
        want = [FUNCTIONS[name](x) for name in some]
        for name, one, other in zip(some, want, predictions(path, x).split([y.shape[1] for y in want], 1), strict=True):
            torch.testing.assert_close(
                other, one, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )
