"""The functions that replace torch's own under vmap give the same results."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.networks.calls import tensors_in
from multitudes.networks.vmap import vmap_level
from tests.zoo.drawing_cases import Jitter
from tests.zoo.of_parts import Of


def each(function: Callable[..., Tensor], *stacked: Tensor) -> Tensor:
    """What a function gives for each of the stacked tensors, all at once."""
    with vmap_level(len(stacked[0])) as members:
        return members.whole(function(*map(members.own, stacked)))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 4), (7, 5, 4, 3), (7, 5, 2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_batch_norm_in_evaluation(shape: tuple[int, ...], affine: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    statistics = torch.randn(5, dtype=torch.float64), torch.rand(5, dtype=torch.float64) + 0.5
    weights = (torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)) if affine else (None, None)
    want = F.batch_norm(x.double(), *statistics, *weights, eps=1e-3)
    got = each(lambda x: F.batch_norm(x, *statistics, *weights, False, 0.1, 1e-3), x[None])[0]
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype))


def test_batch_norm_is_torchs_own_in_training_and_before_anything_is_batched() -> None:
    one, other = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    x = torch.randn(5, 3, 4, 4)
    want = one(x)
    with vmap_level(2):
        torch.testing.assert_close(other(x), want, rtol=0, atol=0)
    assert torch.equal(one.running_var, other.running_var)
    of_the_batch = nn.BatchNorm2d(3, track_running_stats=False).eval()
    torch.testing.assert_close(each(of_the_batch, x[None])[0], of_the_batch(x))
    with vmap_level(2):
        got = nn.BatchNorm2d(3).eval()(x)
    torch.testing.assert_close(got, nn.BatchNorm2d(3).eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize("size", [1, (1, 1), (2, 1), 3, (None, 1)])
@pytest.mark.parametrize("shape", [(4, 3, 6, 6), (3, 6, 7)])
def test_average_pooling(size: object, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    pool = nn.AdaptiveAvgPool2d(size)
    torch.testing.assert_close(each(pool, x[None])[0], pool(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_convolution_under_autocast(kind: type[nn.Module], bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = kind(3, 4, 3, stride=2, padding=1, bias=bias), torch.randn(6, 2, 3, 8, 8)
    want = torch.stack([layer(one) for one in x])
    with torch.autocast("cpu", torch.bfloat16):
        for got in (each(layer, x), each(layer, x.bfloat16()), torch.stack([layer(one) for one in x])):
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.float(), want, rtol=2**-6, atol=2**-6)  # everything is rounded
        double = layer.double()(x[0].double())
    assert double.dtype == torch.float64


def test_a_convolution_with_settings_by_name() -> None:
    x, weight, bias = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    got = each(lambda x: F.conv2d(x, weight=weight, bias=bias, stride=2, padding=1), x[None])[0]
    torch.testing.assert_close(got, F.conv2d(x, weight, bias, 2, 1))


@pytest.mark.parametrize("mask", [None, "boolean", "added", "causal"])
@pytest.mark.parametrize("several", [False, True])
def test_attention_by_its_function(mask: str | None, several: bool) -> None:
    """With `several` queries for each key."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 5, 8), *torch.randn(2, 3, 2, 2 if several else 4, 6, 8)
    seen = torch.rand(5, 6) > 0.4
    seen[:, 0] = True
    masks = {"boolean": seen, "added": torch.randn(5, 6)}
    options = {"attn_mask": masks.get(mask), "is_causal": mask == "causal", "enable_gqa": several, "scale": 0.3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # vmap warns where it must loop
        got = each(lambda *of: F.scaled_dot_product_attention(*of, **options), query, key, value)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(query, key, value, **options))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_attention_by_its_layer(causal: bool, weights: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(3, 4, 5, 8)
    options: dict[str, object] = {"need_weights": weights, "is_causal": causal}
    options["attn_mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1) if causal else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = each(lambda x: layer(x, x, x, **options)[0], x)
    torch.testing.assert_close(got, torch.stack([layer(one, one, one, **options)[0] for one in x]))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_draws_of_a_unet_run_at_once_under_autocast(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    net = mt.mc_dropout(mt.models.unet(3, width=4)).eval().to(memory_format=memory_format)
    x = torch.randn(1, 3, 16, 24)
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")  # of another way than vmap
        drawn = net(x, draws=3, seed=0)
        net._draw_cache.runner = "one_by_one"
        want = net(x, draws=3, seed=0)
    assert drawn.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(drawn, want, rtol=0.05, atol=0.02)


def test_attention_runs_for_all_draws_at_once() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = mt.Multitude(nn.Sequential(Jitter(), layer)).eval()
    x = torch.randn(3, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # vmap warns where it must loop
        drawn = net(x, draws=6, seed=0)
    net._draw_cache.runner = "one_by_one"
    torch.testing.assert_close(drawn, net(x, draws=6, seed=0))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_runs_for_all_draws_at_once(kind: type[nn.RNNBase], batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = kind(4, 6, 2, bidirectional=True, batch_first=batch_first)
    x = torch.randn(3, 5, 7, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in (lambda x: layer(x)[0], lambda x: tensors_in(layer(x)[1])[-1]):
            torch.testing.assert_close(each(part, x), torch.stack([part(one) for one in x]))
        net = mt.Multitude(Of(lambda net, x: net.layer(net.jitter(x))[0], jitter=Jitter(), layer=layer)).eval()
        drawn = net(x[0], draws=6, seed=0)
    net._draw_cache.runner = "one_by_one"
    torch.testing.assert_close(drawn, net(x[0], draws=6, seed=0))


def test_a_network_that_uses_vmap_itself_draws_at_once() -> None:
    torch.manual_seed(0)
    attend = torch.vmap(lambda x: F.scaled_dot_product_attention(x, x, x) + F.linear(x, x[:8, :8]))
    net = mt.Multitude(nn.Sequential(Jitter(), Of(lambda net, x: attend(x)))).eval()
    x = torch.randn(3, 9, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        drawn = net(x, draws=6, seed=0)
    net._draw_cache.runner = "one_by_one"
    torch.testing.assert_close(drawn, net(x, draws=6, seed=0))
