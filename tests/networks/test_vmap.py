"""vmap over members: the network's own code for all members at once, and the rules for slow functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import multitudes as mt
from multitudes.ensemble.runners.member_size import convolves
from multitudes.ensemble.runners.selection import INDEPENDENT, Workload, runners_for
from multitudes.networks import vmap as module
from multitudes.networks.calls import tensors_in
from multitudes.networks.vmap import products, vmap_level
from tests.zoo.drawing_cases import Jitter
from tests.zoo.of_parts import Of
from tests.zoo.shared_cases import bert, distilbert, gpt2, llama, roberta, tokens, vit


@contextmanager
def no_warnings() -> Iterator[None]:
    """Fail if vmap warns that it runs a loop, or the library that it runs draws one by one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


# -- networks ----------------------------------------------------------------------------------------------


def texts() -> dict[str, Tensor]:
    return tokens(3, 9)


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 3, 16, 16)}


def swin() -> nn.Module:
    settings = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4}
    return transformers.SwinForImageClassification(transformers.SwinConfig(**settings))


class Encoder(nn.Module):
    """Torch's own encoder, of sequences of which the last tokens of the second are padding."""

    def __init__(self, norm_first: bool, batch_first: bool, padded: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.fc = nn.Linear(16, 5)
        self.batch_first, self.padded = batch_first, padded

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[1, 4:] = True
        x = x if self.batch_first else x.transpose(0, 1)
        y = self.encoder(x, src_key_padding_mask=padding if self.padded else None)
        return self.fc(y.mean(1 if self.batch_first else 0))


class Block(nn.Module):
    """Attention written by hand, with grouped queries."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.q, self.kv = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.fc, self.dropout = nn.Linear(16, 5), dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        query = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        key, value = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True, enable_gqa=True)
        return self.fc(y.transpose(1, 2).flatten(2).mean(1))


def sequences() -> Tensor:
    return torch.randn(3, 6, 16)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "bert": (bert, texts),
    "library": (lambda: mt.models.vit(width=32, depth=1, heads=2, size=16), lambda: torch.randn(3, 3, 16, 16)),
    "block": (Block, sequences),
    "encoder": (lambda: Encoder(norm_first=False, batch_first=True, padded=True), sequences),
    "encoder, norm first": (lambda: Encoder(norm_first=True, batch_first=True, padded=False), sequences),
    "encoder, batch second": (lambda: Encoder(norm_first=False, batch_first=False, padded=False), sequences),
    "encoder, both": (lambda: Encoder(norm_first=True, batch_first=False, padded=True), sequences),
    "vit": (vit, images),
    "gpt2": (gpt2, texts),
    "llama": (llama, texts),
    "swin": (swin, images),
    "roberta": (roberta, texts),
    "distilbert": (distilbert, texts),
}


def several(name: str, members: int = 2) -> tuple[mt.Members, Any]:
    build, batch = NETWORKS[name]
    networks = [build() for _ in range(members)]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in (p for network in networks for p in network.parameters()):
            parameter.add_(0.02 * torch.randn_like(parameter))  # some of the builders have a seed
    return mt.fuse(networks), batch()


# -- members at once are members alone -----------------------------------------------------------------------


@pytest.mark.quick(7)
@pytest.mark.parametrize("name", NETWORKS)
def test_members_at_once_are_members_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` compares predictions, gradients and buffers with those of `net.member(i)`, in both modes."""
    monkeypatch.setattr(module, "ONE_BY_ONE_ABOVE", 0)  # as for large batches
    compared = mt.check(*several(name)).compared
    assert any(line.startswith("vmapped: predictions and gradients of 2 members") for line in compared)
    assert "vmapped: no prediction depends on another member's weights" in compared


def test_a_second_text_with_other_padding_is_right() -> None:
    """A network is proven once for each kind of input; what follows is still its own code."""
    net, x = several("bert")
    net.eval()
    y = tokens(4, 11)
    y["attention_mask"][2, 3:] = 0
    net.runner = "vmapped"
    net(x)
    together = net(y)
    for index in range(2):
        torch.testing.assert_close(together[index], net.member(index).eval()(**y).logits, rtol=1e-4, atol=1e-5)


def test_frozen_parameters_get_no_gradient() -> None:
    net, x = several("bert")
    for member in net.network:
        member.base_model.embeddings.requires_grad_(False)
    net.runner = "vmapped"
    net.eval()(x).square().sum().backward()
    got = {name: parameter.grad for name, parameter in net.named_parameters()}
    net.zero_grad()
    net.runner = "loop"
    net(x).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert (got[name] is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(got[name], parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Block(dropout=0.5),
        lambda: Of(lambda net, x: net.attention(x, x, x)[0], attention=nn.MultiheadAttention(16, 2, dropout=0.5)),
        lambda: Encoder(norm_first=True, batch_first=True, padded=True),
    ],
    ids=["attention by hand", "attention", "encoder"],
)
def test_equal_members_draw_different_dropout_in_training(build: Callable[[], nn.Module]) -> None:
    model, x = build(), sequences()
    net = mt.fuse([model, model])
    net.runner = "vmapped"
    one, other = net.train()(x)
    assert not torch.allclose(one, other)
    one, other = net.eval()(x)
    assert torch.equal(one, other)


def test_second_derivatives_are_those_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_BY_ONE_ABOVE", 0)
    net = mt.fuse([nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2)) for _ in range(2)])
    x, found = torch.randn(5, 4), {}
    for runner in ("loop", "vmapped"):
        net.runner = runner
        weights = list(net.parameters())
        slope = torch.autograd.grad(net(x).square().sum(), weights, create_graph=True)
        found[runner] = torch.autograd.grad(sum(g.square().sum() for g in slope), weights)
    torch.testing.assert_close(found["vmapped"], found["loop"], rtol=1e-4, atol=1e-4)


def test_code_that_inspects_values_is_refused() -> None:
    class Looks(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if y.sum() > 0 else 2 * y

    net = mt.fuse([Looks(), Looks()])
    net.runner = "vmapped"
    with pytest.raises(ValueError, match="runner 'vmapped' cannot run this network"):
        net(sequences())
    net.runner = "auto"
    assert net(sequences()).shape == (2, 3, 5)


def usual(network: nn.Module, device: str, training: bool = False) -> str:
    return runners_for(INDEPENDENT, Workload(device, training, 8, False, convolves=convolves(network)))[0]


def test_auto_takes_vmap_for_transformers_and_packs_convolutions_on_a_gpu() -> None:
    assert usual(several("library")[0].template, "cuda") == "vmapped"
    assert usual(several("bert")[0].template, "cuda") == "vmapped"
    assert usual(mt.models.resnet18(), "cuda") == "packed"
    assert usual(mt.models.resnet18(), "cpu", training=True) == "loop"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "swin", "library", "encoder"])
@pytest.mark.parametrize("training", [False, True])
def test_one_compiled_graph_agrees_with_the_loop(name: str, training: bool) -> None:
    net, x = several(name)
    for part in net.modules():  # each runner draws other dropout
        names = {"p": nn.Dropout, "dropout": nn.MultiheadAttention, "drop_prob": nn.Module}
        vars(part).update({key: 0.0 for key, kind in names.items() if isinstance(part, kind) and key in vars(part)})
    net.train(training)
    net.runner = "loop"
    weights = [p for p in net.parameters() if p.requires_grad]
    want = net(x)
    slopes = torch.autograd.grad(want.square().sum(), weights, allow_unused=True)
    net.runner = "vmapped"
    net(x)
    torch.compiler.reset()  # it makes eight versions of a function and no more
    got = torch.compile(net, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(got.square().sum(), weights, allow_unused=True)
    for one, other in zip(found, slopes, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


# -- rules -------------------------------------------------------------------------------------------------


def at_once(function: Callable[..., Any], *args: Any, shared: tuple[int, ...] = ()) -> Tensor:
    """Compute a function of stacked tensors for all members at once; arguments may be shared."""
    with vmap_level(len(args[0])) as members:
        own = [members.own(arg) if isinstance(arg, Tensor) and i not in shared else arg for i, arg in enumerate(args)]
        return members.whole(function(*own))


def compare(function: Callable[..., Any], *args: Any, shared: tuple[int, ...] = ()) -> None:
    """Values and gradients."""
    leaves = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    together = at_once(function, *args, shared=shared)
    alone = torch.stack(
        [
            function(*(arg[m] if isinstance(arg, Tensor) and i not in shared else arg for i, arg in enumerate(args)))
            for m in range(len(args[0]))
        ]
    )
    torch.testing.assert_close(together, alone)
    mixture = torch.randn_like(alone)
    slopes = [torch.autograd.grad((y * mixture).sum(), leaves, allow_unused=True) for y in (together, alone)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("above", [0, 2**22])
def test_a_linear_layer(above: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_BY_ONE_ABOVE", above)
    x, weight, bias = torch.randn(3, 2, 5, 4), torch.randn(3, 6, 4), torch.randn(3, 6)
    for rest, shared in product(((bias,), ()), (False, True)):
        compare(lambda w, x, *b: F.linear(x, w, *b), weight, x[0] if shared else x, *rest, shared=(1,) * shared)


def test_products_are_right_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_BY_ONE_ABOVE", 0)
    rows, weight, bias = torch.randn(3, 5, 4), torch.randn(3, 6, 4), torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        got = products(rows, weight, bias)
        want = torch.stack([F.linear(*own) for own in zip(rows, weight, bias, strict=True)])
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embeddings(padding_idx: int | None) -> None:
    index = torch.tensor([[0, 2, 6], [6, 6, 1]])
    compare(lambda w, i: F.embedding(i, w, padding_idx), torch.randn(3, 7, 4), index, shared=(1,))
    compare(lambda w, i: F.embedding(i, w, padding_idx), torch.randn(3, 7, 4), torch.randint(7, (3, 2, 5)))


@pytest.mark.parametrize("wrong", [7, -1])
def test_an_index_out_of_range_is_an_error(wrong: int) -> None:
    with pytest.raises((IndexError, RuntimeError)), vmap_level(3) as members:
        F.embedding(torch.tensor([0, wrong]), members.own(torch.randn(3, 7, 4)))


MASKS: dict[str, Callable[[], Tensor]] = {
    "tokens": lambda: torch.randn(5, 5),
    "of the batch": lambda: torch.rand(2, 1, 1, 5) > 0.3,
    "of every row": lambda: torch.randn(2, 4, 5, 5),
    "of one row": lambda: torch.randn(1, 1, 5, 5),
    "of heads": lambda: torch.randn(4, 5, 5),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("own", [True, False])
def test_attention_with_masks(mask: str, own: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 3, 2, 4, 5, 8)
    hidden = torch.stack([MASKS[mask]() for _ in range(3)]) if own else MASKS[mask]()
    with no_warnings():
        compare(F.scaled_dot_product_attention, query, key, value, hidden, shared=() if own else (3,))


def test_attention_of_any_rank_with_shared_keys_grouped_queries_and_settings() -> None:
    for shape in ((5, 8), (2, 5, 8), (2, 2, 2, 5, 8)):
        compare(F.scaled_dot_product_attention, *torch.randn(3, 3, *shape))
    query, key, value = torch.randn(3, 2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(1, 4, 7, 8)
    compare(F.scaled_dot_product_attention, query, key, value, shared=(1, 2))
    grouped = torch.randn(2, 3, 2, 2, 5, 8)
    options = {"enable_gqa": True, "is_causal": True, "scale": 0.3}
    with no_warnings():
        compare(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), query, *grouped)


FUTURE = nn.Transformer.generate_square_subsequent_mask(5)
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "of itself": ({}, {"need_weights": False}),
    "with weights": ({}, {}),
    "batch second": ({"batch_first": False}, {"need_weights": False}),
    "without bias": ({"bias": False}, {"need_weights": False}),
    "causal": ({}, {"need_weights": False, "attn_mask": FUTURE, "is_causal": True}),
    "masked": ({}, {"need_weights": False, "attn_mask": torch.randn(5, 5)}),
    "each head masked": ({}, {"need_weights": False, "attn_mask": torch.randn(4, 5, 5)}),
    "hidden": ({}, {"need_weights": False, "attn_mask": FUTURE < 0, "key_padding_mask": torch.eye(5)[3:] > 0}),
    "with extra keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"need_weights": False}),
    "of other widths": ({"kdim": 8, "vdim": 8}, {"need_weights": False}),
}


@pytest.mark.quick(6)
@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("crossed", [False, True])
def test_torchs_attention_layer(call: str, crossed: bool) -> None:
    torch.manual_seed(0)
    settings, options = CALLS[call]

    def attend(net: Any, x: Tensor) -> Tensor:
        other = x.flip(-1) if crossed else x
        swap = (lambda t: t) if net.attention.batch_first else (lambda t: t.transpose(0, 1))
        return swap(net.attention(swap(x), swap(other), swap(other), **options)[0])

    nets = [Of(attend, attention=nn.MultiheadAttention(8, 2, **{"batch_first": True} | settings)) for _ in range(2)]
    compared = mt.check(mt.fuse(nets), torch.randn(2, 5, 8)).compared
    assert any(line.startswith("vmapped") for line in compared)
    assert any(line.startswith("packed") for line in compared)


# -- rules of norms, convolutions, pooling and recurrence --------------------------------------------------


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 4), (7, 5, 4, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_batch_norm_in_evaluation(shape: tuple[int, ...], affine: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    mean, scale = torch.randn(5, dtype=torch.float64), torch.rand(5, dtype=torch.float64) + 0.5
    weights = (scale.flip(0), mean.flip(0)) if affine else (None, None)
    want = F.batch_norm(x.double(), mean, scale, *weights, eps=1e-3)
    got = at_once(lambda x: F.batch_norm(x, mean, scale, *weights, False, 0.1, 1e-3), x[None])[0]
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype))


def test_batch_norm_in_training_and_of_shared_tensors_is_torchs() -> None:
    one, other = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    x = torch.randn(5, 3, 4, 4)
    want = one(x)
    with vmap_level(2):
        torch.testing.assert_close(other(x), want, rtol=0, atol=0)
    assert torch.equal(one.running_var, other.running_var)
    of_the_batch = nn.BatchNorm2d(3, track_running_stats=False).eval()
    torch.testing.assert_close(at_once(of_the_batch, x[None])[0], of_the_batch(x))


@pytest.mark.parametrize("size", [1, (1, 1), (2, 1), (None, 1)])
@pytest.mark.parametrize("shape", [(4, 3, 6, 6), (3, 6, 7)])
def test_average_pooling(size: object, shape: tuple[int, ...]) -> None:
    compare(nn.AdaptiveAvgPool2d(size), torch.randn(1, *shape))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_convolution_under_autocast(kind: type[nn.Module], bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = kind(3, 4, 3, stride=2, padding=1, bias=bias), torch.randn(6, 2, 3, 8, 8)
    want = torch.stack([layer(one) for one in x])
    with torch.autocast("cpu", torch.bfloat16):
        for got in (at_once(layer, x), at_once(layer, x.bfloat16())):
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.float(), want, rtol=2**-6, atol=2**-6)  # everything is rounded
        assert layer.double()(x[0].double()).dtype == torch.float64


def test_a_convolution_with_settings_by_name() -> None:
    x, weight, bias = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    got = at_once(lambda x: F.conv2d(x, weight=weight, bias=bias, stride=2, padding=1), x[None])[0]
    torch.testing.assert_close(got, F.conv2d(x, weight, bias, 2, 1))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer(kind: type[nn.RNNBase], batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = kind(4, 6, 2, bidirectional=True, batch_first=batch_first)
    x = torch.randn(3, 5, 7, 4)
    with no_warnings():
        for part in (lambda x: layer(x)[0], lambda x: tensors_in(layer(x)[1])[-1]):
            torch.testing.assert_close(at_once(part, x), torch.stack([part(one) for one in x]))


# -- draws -------------------------------------------------------------------------------------------------


def own_vmap(net: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(lambda x: F.scaled_dot_product_attention(x, x, x) + F.linear(x, x[:8, :8]))(x)


@pytest.mark.parametrize(
    "layer",
    [
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        Of(lambda net, x: net.lstm(x)[0], lstm=nn.LSTM(8, 6, 2, bidirectional=True)),
        Of(own_vmap),
    ],
    ids=["attention", "recurrent", "a vmap of its own"],
)
def test_draws_run_at_once(layer: nn.Module) -> None:
    net, x = mt.Multitude(nn.Sequential(Jitter(), layer)).eval(), torch.randn(3, 9, 8)
    with no_warnings():
        drawn = net(x, draws=6, seed=0)
    net._draw_cache.runner = "one_by_one"
    torch.testing.assert_close(drawn, net(x, draws=6, seed=0))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_draws_of_a_unet_run_at_once_under_autocast(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    net = mt.mc_dropout(mt.models.unet(3, width=4)).eval().to(memory_format=memory_format)
    x = torch.randn(1, 3, 16, 24)
    with torch.autocast("cpu", torch.bfloat16), no_warnings():
        drawn = net(x, draws=3, seed=0)
        net._draw_cache.runner = "one_by_one"
        want = net(x, draws=3, seed=0)
    assert drawn.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(drawn, want, rtol=0.05, atol=0.02)


def test_draws_of_members_run_under_two_vmaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_BY_ONE_ABOVE", 0)  # as for products that are large
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3))
    net, x = mt.deep_ensemble(mt.mc_dropout(network), 2).eval(), torch.randn(5, 6)
    drawn = {}
    for runner in ("loop", "vmapped"):
        net.runner = runner
        with no_warnings():
            drawn[runner] = net(x, draws=4, seed=0)
    torch.testing.assert_close(drawn["vmapped"], drawn["loop"])
