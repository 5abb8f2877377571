"""Functions put in vmap's terms give what torch's own give."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.batching import vmap_friendly


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 4), (7, 5, 4, 3), (7, 5, 2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_batch_norm_in_evaluation(shape: tuple[int, ...], affine: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    statistics = torch.randn(5, dtype=torch.float64), torch.rand(5, dtype=torch.float64) + 0.5
    weights = (torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)) if affine else (None, None)
    want = F.batch_norm(x.double(), *statistics, *weights, eps=1e-3)
    with vmap_friendly(lambda: True):
        got = F.batch_norm(x, *statistics, *weights, False, 0.1, 1e-3)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype))


def test_batch_norm_in_training_is_torchs_own() -> None:
    one, other = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    x = torch.randn(5, 3, 4, 4)
    want = one(x)
    with vmap_friendly(lambda: True):
        torch.testing.assert_close(other(x), want, rtol=0, atol=0)
    assert torch.equal(one.running_var, other.running_var)
    untracked = nn.BatchNorm2d(3, track_running_stats=False).eval()
    want = untracked(x)
    with vmap_friendly(lambda: True):
        torch.testing.assert_close(untracked(x), want, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1, (1, 1), (2, 1), 3, (None, 1)])
@pytest.mark.parametrize("shape", [(4, 3, 6, 6), (3, 6, 7)])
def test_average_pooling(size: object, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    pool = nn.AdaptiveAvgPool2d(size)  # type: ignore[arg-type]
    with vmap_friendly(lambda: True):
        got = pool(x)
    torch.testing.assert_close(got, pool(x))


def test_a_convolution_with_a_bias_under_autocast() -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(3, 4, 3, stride=2, padding=1), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16), vmap_friendly(lambda: True):
        got = layer(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), layer(x), rtol=2**-7, atol=2**-7)  # weights, products and sums are rounded


def test_before_there_is_anything_batched_torchs_own_functions_run() -> None:
    norm, x = nn.BatchNorm2d(3).eval(), torch.randn(2, 3, 4, 4)
    with vmap_friendly(lambda: False):
        assert torch.equal(norm(x), nn.functional.batch_norm(x, norm.running_mean, norm.running_var))


class Noisy(mt.Stochastic):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.expects else x + self.normal(x.shape, like=x)


def test_attention_runs_for_all_draws_at_once() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = mt.Multitude(nn.Sequential(Noisy(), layer)).eval()
    x = torch.randn(3, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # vmap warns where it must loop
        drawn = net(x, draws=6, seed=0)
    net._habits.way = "loop"
    torch.testing.assert_close(drawn, net(x, draws=6, seed=0))
