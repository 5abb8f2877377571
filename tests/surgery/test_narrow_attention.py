"""Narrowing attention: whole heads, whatever way they are written in, and the widths that follow them."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.surgery.narrowing.attention_heads import HeadChoice, ObservedAttention
from multitudes.surgery.narrowing.cuts import Cut, cut_layer
from multitudes.surgery.narrowing.narrow import narrowed_copy
from tests.surgery.attention_networks import ATTENTION, INPUT, Grouped, Language, Net, Own, OwnNorm, Rearranged, Softmax
from tests.zoo.of_parts import Of

pytestmark = pytest.mark.filterwarnings("ignore:.*kept the values of")

QUICK = ("chunk", "heads_first", "grouped", "translator")


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return ATTENTION[name][0]().eval(), torch.randn(4, *INPUT)


def members_alone(net: mt.Members, x: Tensor) -> Tensor:
    return torch.stack([net.member(index)(x) for index in range(net.members)])


CASES = [
    pytest.param(name, init, marks=[] if (init == "fresh") != (name in QUICK) else pytest.mark.slow)
    for name in ATTENTION
    for init in ("fresh", "pretrained")
]


@pytest.mark.parametrize(("name", "init"), CASES)
def test_members_have_whole_heads_and_are_themselves_alone(name: str, init: str) -> None:
    model, x = build(name)
    net = mt.packed(model, 2, 1, example=x, init=init, seed=0).eval()
    net.runner = "loop"
    torch.testing.assert_close(net(x), members_alone(net, x))
    for path, value in ATTENTION[name][1].items():
        assert operator.attrgetter(path)(net.member(1)) == value, path


@pytest.mark.parametrize(
    "name", [name if name in QUICK[:1] else pytest.param(name, marks=pytest.mark.slow) for name in ATTENTION]
)
def test_every_runner_is_right(name: str) -> None:
    model, x = build(name)
    assert "gradients of 2 members" in str(mt.check(mt.packed(model, 2, 1, example=x, seed=0), x))


@pytest.mark.parametrize("name", QUICK)
def test_a_member_of_full_width_is_the_model(name: str) -> None:
    model, x = build(name)
    net = mt.packed(model, 1, 1, example=x, init="pretrained").eval()
    assert torch.equal(net(x)[0], model(x))
    assert repr(net.member(0)) == repr(model)


# -- which heads -------------------------------------------------------------------------------------------


def rows_of(small: Tensor, whole: Tensor) -> list[int]:
    """Which rows of a weight another one has, by its values."""
    return [int((whole == row).all(1).nonzero()) for row in small]


@pytest.mark.parametrize("attention", [Softmax, Own])
def test_narrow_attention_is_the_model_with_the_other_heads_and_channels_at_zero(
    attention: Callable[[], nn.Module],
) -> None:
    """Brute force, on a network without norms, which see all channels: what is dropped adds nothing when it is zero."""
    torch.manual_seed(0)
    model = Net(attention, norm=lambda dim: nn.Identity()).double().eval()
    x = torch.randn(4, *INPUT).double()
    small, _ = narrowed_copy(model, 0.5, 1, 64, None, x)
    kept = rows_of(small.embed.weight, model.embed.weight)
    dropped = [channel for channel in range(32) if channel not in kept]
    heads = {channel // 8 for channel in kept}
    assert len(kept) == 16 and kept == [head * 8 + each for head in sorted(heads) for each in range(8)]
    with torch.no_grad():
        model.position[..., dropped] = 0
        for layer in (model.embed, *[block.mlp[2] for block in model.blocks]):
            layer.weight[dropped], layer.bias[dropped] = 0, 0
        for block, cut in zip(model.blocks, small.blocks, strict=True):
            lost = [i for i in range(64) if i not in rows_of(cut.mlp[0].weight, block.mlp[0].weight[:, kept])]
            block.mlp[2].weight[:, lost] = 0
            inner = block.attention.attention.out_proj if attention is Own else block.attention.out
            inner.weight[:, dropped], inner.weight[dropped], inner.bias[dropped] = 0, 0, 0
    torch.testing.assert_close(small(x), model(x))


def test_query_heads_stay_with_their_keys() -> None:
    """Four groups of three query heads: a kept head of keys keeps query heads of its own group, as many as others."""
    torch.manual_seed(0)
    model = Net(lambda: Grouped(48, 12, 4), 48).eval()
    small, _ = narrowed_copy(model, 0.5, 1, 64, None, torch.randn(2, *INPUT))
    attention, cut = model.blocks[0].attention, small.blocks[0].attention
    inputs = rows_of(small.embed.weight, model.embed.weight)
    queries = [row // 4 for row in rows_of(cut.wq.weight, attention.wq.weight[:, inputs])[::4]]
    keys = [row // 4 for row in rows_of(cut.wk.weight, attention.wk.weight[:, inputs])[::4]]
    assert (len(queries), len(keys), cut.n_rep) == (6, 2, 3)
    assert [query // 3 for query in queries] == [key for key in keys for _ in range(3)]


def test_groups_of_query_heads_may_become_smaller() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, *INPUT)
    small = mt.narrow(Net(lambda: Grouped(32, 8, 1)).eval(), 0.25, example=x)
    assert (small.blocks[0].attention.n_head, small.blocks[0].attention.n_kv_head) == (2, 1)
    assert small.blocks[0].attention.n_rep == 2


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(("heads", "shared"), [(6, 6), (6, 2), (6, 1)])
def test_one_layer_for_queries_keys_and_values_keeps_the_same_heads_of_each(
    heads: int, shared: int, heads_first: bool
) -> None:
    """The kept channels are those of whole heads, by a table of which channel belongs to what."""
    group, size = heads // shared, 4
    if heads_first:
        table = [("q", k * group + g) if g < group else ("kv", k) for k in range(shared) for g in range(group + 2)]
    else:
        table = [("q", h) for h in range(heads)] + [("kv", k) for _ in range(2) for k in range(shared)]
    reads = torch.tensor(
        [[h == (which if kind == "q" else which * group + h % group) for kind, which in table] for h in range(heads)]
    ).repeat_interleave(size, 1)
    attention = ObservedAttention(size, {"qkv": reads})
    choice = HeadChoice([attention], 0.5, torch.Generator().manual_seed(0), {}, ())
    kept = choice.outputs("qkv", len(table) * size)
    assert kept is not None
    owners = [table[channel // size] for channel in kept.tolist()]
    queries, keys = (part.tolist() for part in choice.kept(attention))
    want = {("q", h): size for h in queries} | {("kv", k): 2 * size for k in keys}
    assert {owner: owners.count(owner) for owner in owners} == want
    assert len(queries) == 3
    assert {query // group for query in queries} == set(keys)


def test_heads_that_do_not_divide_are_rounded_up_and_told() -> None:
    model, x = build("three_heads")
    net = mt.packed(model, 4, 2, example=x)
    assert net.notes["blocks.0.attention.q"] == "32 -> 32, 3 heads -> 2, rounded up from 1.5, gamma 1"
    assert net.notes["embed"] == "6 -> 32, gamma 1, rounded up from 24"
    model, x = build("torch")
    notes = mt.packed(model, 8, 1, example=x).notes
    assert notes["blocks.1.attention.attention"] == "8 -> 8, 4 heads -> 1, rounded up from 0.5, gamma 1"


def test_rotary_positions_keep_their_meaning() -> None:
    """Each head's pairs of channels turn by the same angles as before, since its size stays."""
    angles = torch.outer(torch.arange(5.0), 100 ** -(torch.arange(4) / 4))

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        x = net.embed(x)
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (net.q, net.k, net.v))
        y = F.scaled_dot_product_attention(turned(q), turned(k), v)
        return net.head(net.out(y.transpose(1, 2).flatten(2)).mean(1))

    torch.manual_seed(0)
    parts = {name: nn.Linear(32, 32) for name in ("q", "k", "v", "out")}
    model = Of(forward, embed=nn.Linear(6, 32), head=nn.Linear(32, 3), **parts).double()
    x = torch.randn(4, *INPUT).double()
    small, _ = narrowed_copy(model, 0.5, 1, 64, None, x)
    kept = rows_of(small.embed.weight, model.embed.weight)
    with torch.no_grad():
        dropped = [channel for channel in range(32) if channel not in kept]
        model.embed.weight[dropped], model.embed.bias[dropped] = 0, 0
        model.out.weight[:, dropped], model.head.weight[:, dropped] = 0, 0
    torch.testing.assert_close(small(x), model(x))


def test_heads_that_lie_in_the_batch_one_after_the_other_are_told_apart() -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (torch.cat(layer(x).split(8, -1), 0) for layer in (net.q, net.k, net.v))
        y = (q @ k.mT * 8**-0.5).softmax(-1) @ v
        return net.head(torch.cat(y.split(len(x), 0), -1).mean(1))

    torch.manual_seed(0)
    model = Of(forward, **{name: nn.Linear(6, 32) for name in "qkv"}, head=nn.Linear(32, 3)).eval()
    x = torch.randn(3, *INPUT)
    small, cuts = narrowed_copy(model, 0.5, 1, 64, None, x)
    kept = [head * 8 + each for head in sorted({i // 8 for i in cuts["q"].outputs.tolist()}) for each in range(8)]
    assert [cuts[name].outputs.tolist() for name in "qkv"] == [kept] * 3 and len(kept) == 16
    with torch.no_grad():
        model.head.weight[:, [channel for channel in range(32) if channel not in kept]] = 0
    torch.testing.assert_close(small(x), model(x))


# -- torch's attention --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "extra", [{}, {"bias": False}, {"kdim": 6, "vdim": 10}, {"add_bias_kv": True, "add_zero_attn": True}]
)
def test_torchs_attention_with_fewer_heads_is_the_whole_one_without_the_others(
    batch_first: bool, extra: dict[str, object]
) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(12, 3, batch_first=batch_first, **extra).double().eval()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    heads = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])
    inputs, others = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), (torch.arange(attention.kdim), torch.tensor([0, 2, 3]))
    small = cut_layer(attention, Cut(inputs, heads, others=others), "attention")
    shape = (2, 5) if batch_first else (5, 2)
    q, k, v = (torch.zeros(*shape, width).double() for width in (12, attention.kdim, attention.vdim))
    for x, kept in zip((q, k, v), (inputs, *others), strict=True):
        x[..., kept] = torch.randn(*shape, len(kept)).double()
    padding = torch.tensor([[False] * 4 + [True], [False] * 5])
    triangle = torch.ones(5, 5, dtype=torch.bool).triu(1)
    with torch.no_grad():
        attention.out_proj.weight[:, 4:8] = 0
    for mask in (None, triangle, triangle.double() * -2):
        same = padding if mask is None or mask.dtype is torch.bool else padding.double() * -9
        given = {"key_padding_mask": same, "attn_mask": mask, "average_attn_weights": False}
        got, want = small(q[..., inputs], k, v[..., others[1]], **given), attention(q, k, v, **given)
        torch.testing.assert_close(got[0], want[0][..., heads])
        torch.testing.assert_close(got[1], want[1][:, [0, 2]])


# -- the rest of the contract ------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_language_models_narrow_with_their_embeddings(tied: bool) -> None:
    torch.manual_seed(0)
    model, ids = Language(tied).eval(), torch.randint(50, (3, 5))
    for init in ("fresh", "pretrained"):
        net = mt.packed(model, 2, 1, example=ids, init=init).eval()
        net.runner = "loop"
        torch.testing.assert_close(net(ids), torch.stack([net.member(i)(ids) for i in range(2)]))
        member = net.member(1)
        assert member.tokens.embedding_dim == 16
        assert torch.equal(member.head.weight, member.tokens.weight) == tied


def test_gamma_splits_projections_but_not_torchs_attention() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, *INPUT)
    net = mt.packed(Net(Softmax), 2, 1, 2, min_channels=4, example=x)
    assert net.member(0).blocks[0].attention.q.groups == 2
    net = mt.packed(Net(Own), 2, 1, 2, min_channels=4, example=x)
    assert net.member(0).blocks[0].mlp[0].groups == 2
    assert type(net.member(0).blocks[0].attention.attention) is nn.MultiheadAttention
    mt.narrow(Net(Own), 0.5, 2, min_channels=4, example=x)(x)


def test_a_network_that_is_all_residual_narrows_inside_its_branches() -> None:
    model, x = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), torch.randn(2, 5, 16)
    net = mt.packed(model, 2, 1, example=x).eval()
    assert (net.member(0).self_attn.num_heads, net.member(0).linear1.out_features) == (4, 16)
    mt.check(net, x)


def test_torchs_attention_must_be_as_wide_as_its_heads() -> None:
    model = Of(
        lambda net, x: net.head(net.attention(x, x, x)[0].mean(1)),
        attention=nn.MultiheadAttention(16, 4, batch_first=True), head=nn.Linear(16, 3),
    )  # fmt: skip
    with pytest.raises(ValueError, match="of width 2 x 4, heads x head size, and would read 16 channels"):
        mt.packed(model, 2, 1, example=torch.randn(2, 5, 16))


def test_einops_is_followed() -> None:
    pytest.importorskip("einops")
    torch.manual_seed(0)
    model, x = Net(Rearranged).eval(), torch.randn(4, *INPUT)
    member = mt.packed(model, 2, 1, example=x, init="pretrained", seed=0).member(0)
    attention = member.blocks[0].attention
    assert (attention.heads, attention.to_qkv.out_features, attention.scale) == (2, 48, 8**-0.5)
    assert model.blocks[0].attention.heads == 4 and type(model.blocks[0].attention.heads) is int


def over_channels(net: nn.Module, x: Tensor) -> Tensor:
    x = net.embed(x)
    q, k, v = net.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 4, 1)
    return net.head((x + net.out(((q @ k.mT).softmax(-1) @ v).flatten(1, 2).mT)).mean(1))


def four_heads(net: nn.Module, x: Tensor) -> Tensor:
    x = net.embed(x)
    q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in net.qkv(x).chunk(3, -1))
    return net.head((x + net.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))).mean(1))


def by_weights(net: nn.Module, x: Tensor) -> Tensor:
    x = net.embed(x)
    y, weights = net.attention(x, x, x)
    return net.head((y * weights.mean(1).unsqueeze(-1)).sum(1))


@pytest.mark.parametrize(
    ("forward", "sentence"),
    [
        (over_channels, r"its code before layer 'out' gives that layer other values"),
        (four_heads, r"its code before layer 'out' gives that layer other values"),
        (by_weights, r"channels are mixed before layer 'head'"),
    ],
)
def test_what_cannot_be_narrowed_is_refused_with_its_reason(
    forward: Callable[[nn.Module, Tensor], Tensor], sentence: str
) -> None:
    """Attention over channels, a number of heads in the code, and the mean of all heads' weights."""
    torch.manual_seed(0)
    parts = {"embed": nn.Linear(6, 32), "head": nn.Linear(32, 3)}
    if forward is by_weights:
        parts["attention"] = nn.MultiheadAttention(32, 4, batch_first=True)
    else:
        parts |= {"qkv": nn.Linear(32, 96), "out": nn.Linear(32, 32)}
    with pytest.raises(ValueError, match=sentence):
        mt.packed(Of(forward, **parts), 2, 1, example=torch.randn(2, *INPUT))


def test_a_decoder_narrows_behind_a_frozen_encoder() -> None:
    model, x = build("translator")
    model.read.requires_grad_(False)
    model.encoder.requires_grad_(False)
    member = mt.packed(model, 2, 1, example=x, init="pretrained").member(0)
    assert torch.equal(member.encoder.layers[0].linear1.weight, model.encoder.layers[0].linear1.weight)
    assert member.decoder.layers[0].linear1.out_features == 32


def test_frozen_attention_keeps_the_memory_that_it_reads() -> None:
    model, x = build("cross")
    model.attention.requires_grad_(False)
    small = mt.narrow(model, 0.5, example=x, init="pretrained")
    assert (small.read.out_features, small.memory.out_features) == (32, 20)
    assert torch.equal(small.attention.k_proj_weight, model.attention.k_proj_weight)


def test_a_norm_that_computes_with_its_width_is_refused_by_name() -> None:
    class Counting(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(dim))

        def forward(self, x: Tensor) -> Tensor:
            return x / x.norm(dim=-1, keepdim=True) * self.gain

    with pytest.raises(ValueError, match=r"layer '.*' \(Counting\) computes with its width, 32"):
        mt.packed(Net(Softmax, norm=Counting), 2, 1, example=torch.randn(2, *INPUT))


def test_own_norms_follow_their_width() -> None:
    x = torch.randn(2, *INPUT)
    small = mt.narrow(nn.Sequential(nn.Linear(6, 32), OwnNorm(32), nn.Linear(32, 3)), 0.5, example=x)
    assert small[1].scale == 4.0 and small[1].gain.shape == (16,)
