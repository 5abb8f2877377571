"""Attention by the math kernel, in one thread only, compared with `sdpa_kernel`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from multitudes.networks.attention import math_attention
from multitudes.networks.random_functions import STILL, RandomFrom

MASKS = {
    "none": None,
    "causal": None,
    "boolean": torch.tensor([[True, False, True, True, True]]).expand(5, 5),
    "a row of nothing": torch.tensor([[False], [True], [True], [True], [True]]).expand(5, 5),
    "numbers": torch.linspace(-1, 1, 25).view(5, 5),
}


def attended(mask: str, grouped: bool, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 8, dtype=dtype) for heads in (4, *[2 if grouped else 4] * 2))
    own = MASKS[mask]
    own = own if own is None or own.dtype == torch.bool else own.to(dtype)
    return F.scaled_dot_product_attention(query, key, value, own, is_causal=mask == "causal", enable_gqa=grouped)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_results_are_those_of_the_math_kernel(mask: str, grouped: bool, dtype: torch.dtype, autocast: bool) -> None:
    with torch.autocast("cpu", enabled=autocast):
        with sdpa_kernel(SDPBackend.MATH):
            want = attended(mask, grouped, dtype)
        with math_attention():
            got = attended(mask, grouped, dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_kernels_stay_enabled() -> None:
    with math_attention():
        assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_runs_under_vmap_with_the_same_dropout(need_weights: bool) -> None:
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def run(x: Tensor) -> Any:
        with math_attention():
            return layer(x, x, x, need_weights=need_weights)[0]

    x = torch.randn(4, 3, 5, 8)
    torch.manual_seed(1)
    want = layer(x[0], x[0], x[0])[0]  # with weights, for which torch has no fused kernel
    torch.manual_seed(1)
    torch.testing.assert_close(run(x[0]), want)
    with RandomFrom(STILL):  # another mode draws the numbers of its dropout
        still = run(x[0])
    layer.eval()
    torch.testing.assert_close(still, run(x[0]))
    torch.testing.assert_close(torch.vmap(run)(x), torch.stack([layer(each, each, each)[0] for each in x]))


def test_second_derivatives_are_right() -> None:
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    with math_attention():
        assert torch.autograd.gradgradcheck(lambda x: F.scaled_dot_product_attention(x, x, x), x)
