"""Functions of torch, of rows of six numbers, whose translation to ONNX could differ for unusual numbers or sizes.

Functions with a decomposition of their own have their own tests. Attention and products of rows
clamp their numbers, because rounding dominates for large ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ELEMENTWISE: tuple[Callable[[Tensor], Tensor], ...] = (
    F.relu, F.leaky_relu, F.elu, F.selu, F.silu, F.gelu, F.softsign, F.tanhshrink, F.hardtanh, F.hardsigmoid,
    F.hardswish, F.softplus, torch.sigmoid, torch.tanh, torch.abs, torch.sign, torch.neg, torch.square, torch.exp,
    torch.erf, torch.floor, torch.ceil, torch.trunc, torch.sin, torch.cos, torch.atan, torch.sinh, torch.cosh,
    torch.deg2rad, torch.rad2deg, torch.sgn, torch.exp2, torch.expm1, torch.erfc, torch.sinc, torch.frac, torch.tan,
    torch.asinh, torch.special.ndtr, F.softshrink, torch.isfinite, torch.logical_not,
)  # fmt: skip

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise": lambda x: torch.cat([function(x).float() for function in ELEMENTWISE], 1),
    "relu6": F.relu6,
    "celu": lambda x: F.celu(x, 0.7),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "softplus": lambda x: F.softplus(x, 2.0, 1.0),
    "hardshrink": F.hardshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "glu": lambda x: F.glu(x, 1),
    "fmod_t": lambda x: torch.fmod(x, x.flip(1)),
    "div_trunc": lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
    "clamp_t": lambda x: torch.clamp(x, min=-x.abs() * 0.5),
    "logit": lambda x: torch.logit(x.sigmoid()),
    "logit_eps": lambda x: torch.logit(x.sigmoid(), eps=0.3),
    "nan_to_num": lambda x: torch.nan_to_num(x / x.relu()),
    "heaviside": lambda x: torch.heaviside(x, torch.tensor(0.5)),
    "round_half": lambda x: torch.round(torch.floor(x * 4) / 2),
    "round_dec": lambda x: torch.round(x, decimals=1),
    "atanh": lambda x: torch.atanh(x.tanh() * 0.9),
    "var": lambda x: x * x.var(1, keepdim=True, correction=0),
    "vnorm_inf": lambda x: x / torch.linalg.vector_norm(x, float("inf"), 1, True),
    "quantile": lambda x: x - x.quantile(0.3, 1, True),
    "argmax": lambda x: x + x.argmax(1, True),
    "argmax_ties": lambda x: x + x.relu().argmin(1, True),
    "batch_max": lambda x: x - x.max(),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "shift_left": lambda x: ((x * 10).int() << 2).float(),
    "shift_right64": lambda x: ((x * 10).long() >> 1).float(),
    "index_tensor": lambda x: x[:, torch.tensor([0, 0, 1, -1, 2, 3])],
    "gather_neg": lambda x: x.gather(1, (x > 0).long()),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, (x > 0).long(), x),
    "scatter_reduce": lambda x: torch.zeros_like(x).scatter_reduce(1, (x > 0).long(), x, "amax"),
    "scatter_reduce_nofself": lambda x: torch.zeros_like(x).scatter_reduce(
        1, (x > 0).long(), x, "amax", include_self=False
    ),
    "index_add": lambda x: x.index_add(1, torch.tensor([0, 0, 1]), x[:, :3]),
    "index_put": lambda x: x.index_put((torch.tensor([0]), torch.tensor([1])), torch.tensor(9.0)),
    "masked_select_batch": lambda x: x * x[x > 0].sum(),
    "bucketize_right": lambda x: torch.bucketize(x.round(), torch.tensor([-1.0, 0.0, 1.0]), right=True).float(),
    "diagonal": lambda x: x.view(-1, 2, 3).diagonal(dim1=1, dim2=2).repeat(1, 3),
    "take": lambda x: x + torch.take(x, torch.tensor([0, 3])).sum(),
    "sort_stable": lambda x: x.floor().sort(dim=1, stable=True)[1].float(),
    "sort_stable_desc": lambda x: x.relu().sort(dim=1, stable=True, descending=True)[1].float(),
    "roll_batch": lambda x: x.roll(1, 0),
    "ri_tensor": lambda x: x.repeat_interleave(torch.tensor([1, 2, 1, 2, 1, 1]), 1)[:, :6],
    "pad": lambda x: F.pad(x, (1, -1)),
    "pad_reflect": lambda x: F.pad(x[:, None], (2, 1), mode="reflect")[:, 0, 1:7],
    "pad_repl": lambda x: F.pad(x[:, None], (2, 1), mode="replicate")[:, 0, 1:7],
    "pad_circ": lambda x: F.pad(x[:, None], (2, 1), mode="circular")[:, 0, 1:7],
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.repeat(1, 2).view(-1, 4, 1, 3), 2).flatten(1)[:, :6],
    "avg_ceil": lambda x: F.avg_pool1d(x[:, None], 4, 3, 1, ceil_mode=True)[:, 0].repeat(1, 3)[:, :6],
    "max_pool_ceil": lambda x: F.max_pool1d(x[:, None], 4, 3, 1, ceil_mode=True)[:, 0].repeat(1, 3)[:, :6],
    "adaptive_avg": lambda x: F.adaptive_avg_pool1d(x[:, None], 4)[:, 0].repeat(1, 2)[:, :6],
    "interp_linear": lambda x: F.interpolate(x[:, None], size=9, mode="linear")[:, 0, 1:7],
    "interp_corners": lambda x: F.interpolate(x[:, None], size=9, mode="linear", align_corners=True)[:, 0, 1:7],
    "interp_bicubic": lambda x: F.interpolate(x.view(-1, 1, 2, 3), size=(4, 5), mode="bicubic").flatten(1)[:, :6],
    "interp_nearest_exact": lambda x: F.interpolate(x[:, None], size=9, mode="nearest-exact")[:, 0, 1:7],
    "grid_sample": lambda x: (
        F.grid_sample(x.view(-1, 1, 2, 3), torch.tanh(x).view(-1, 3, 1, 2), align_corners=False).flatten(1).repeat(1, 2)
    ),
    "det": lambda x: x * torch.linalg.det(torch.einsum("bi,bj->bij", x[:, :2], x[:, :2]) + torch.eye(2))[:, None],
    "sdpa4_causal": lambda x: F.scaled_dot_product_attention(*[x.view(-1, 1, 2, 3)] * 3, is_causal=True).flatten(1),
    "sdpa3_mask": lambda x: F.scaled_dot_product_attention(
        *[x.clamp(-3, 3).view(-1, 2, 3)] * 3, attn_mask=torch.tensor([[True, False], [True, True]])
    ).flatten(1),
    "sdpa3_mask3": lambda x: F.scaled_dot_product_attention(
        *[x.clamp(-3, 3).view(-1, 2, 3)] * 3,
        attn_mask=(x.view(-1, 2, 3)[:, :, :2] > 0) | torch.eye(2, dtype=torch.bool),
    ).flatten(1),
    "xlog1py": lambda x: torch.special.xlog1py(x, x.abs()),
    "normal_cdf": lambda x: torch.distributions.Normal(0.0, 1.0, validate_args=False).cdf(x),
    "pow_t": lambda x: torch.pow(x.abs() + 0.1, x.clamp(-3, 3)),
    "clamp_cross": lambda x: x.clamp(1, -1),
    "round_dec_neg": lambda x: torch.round(x, decimals=-1),
    "int_floordiv_neg": lambda x: ((x * 10).long() // -3).float(),
    "int_mod_neg": lambda x: ((x * 10).long() % -3).float(),
    "int_rem32": lambda x: ((x * 10).int() % -3).float(),
    "int_by_float": lambda x: (x * 10).long() // 0.3,
    "softmax_sum_where": lambda x: torch.where(x > 0, x, -torch.inf).softmax(1).nan_to_num(0.0),
    "conv_same": lambda x: F.conv1d(x[:, None], torch.ones(1, 1, 4), padding="same")[:, 0],
    "interp_scale": lambda x: F.interpolate(x[:, None], scale_factor=1.7)[:, 0, :6],
    "interp_bilin_aa": lambda x: (
        F.interpolate(x.view(-1, 1, 2, 3), size=(1, 2), mode="bilinear", antialias=True).flatten(1).repeat(1, 3)
    ),
    "fold2d": lambda x: F.fold(F.unfold(x.view(-1, 1, 2, 3), (2, 2)), (2, 3), (2, 2)).flatten(1),
    "scatter_sum_noself": lambda x: x.scatter_reduce(1, (x > 0).long(), x, "sum", include_self=False),
    "put_accumulate": lambda x: x.index_put(
        (torch.tensor([0, 0]), torch.tensor([1, 1])), torch.tensor(9.0), accumulate=True
    ),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, -x.abs()),
    "argwhere": lambda x: x * torch.argwhere(x > 0).shape[0],
    "logsumexp2": lambda x: torch.logsumexp(x.view(-1, 2, 3), (1, 2), keepdim=True).flatten(1) + x,
    "nan_quantile": lambda x: x - x.nanquantile(0.4, 1, True),
    "argmax_last_ties": lambda x: x.round().argmax(1, True) + x,
    "max_idx_ties": lambda x: x.round().max(1, keepdim=True)[1] + x,
    "ldexp": lambda x: torch.ldexp(x, torch.tensor(2)),
    "bincount": lambda x: x * torch.bincount((x > 0).long().flatten())[0],
}
