"""TabM: the same weights give the same predictions and gradients as in its authors' package."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.lab.data import Data, Loader, Part
from multitudes.methods.batch_ensemble import RankOne
from multitudes.models import tabular
from multitudes.models.table_network import Periodic, PiecewiseLinear
from multitudes.surgery.own_layers import Own
from tests.zoo.of_parts import Of
from tests.zoo.predictions import raises

MEMBERS, WIDTH, HIDDEN = 5, 4, (24, 24)
EDGES = [[-2.0, -0.5, 0.1, 1.5], [-1.0, 1.0], [-3.0, -1.0, 0.0, 0.5, 2.5]]
CATEGORIES = 3
ROWS = 6


def rows(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, numbers of categories, and both as our network takes them."""
    torch.manual_seed(seed)
    numbers, category = 2 * torch.randn(ROWS, len(EDGES)), torch.randint(0, CATEGORIES, (ROWS, 1))
    return numbers, category, torch.cat([numbers, torch.eye(CATEGORIES)[category[:, 0]]], 1)


def published(variant: str, embedding: str) -> Any:
    """The authors' network, all of whose tensors are random."""
    tabm, embeddings = pytest.importorskip("tabm"), pytest.importorskip("rtdl_num_embeddings")
    numbers = {
        "piecewise": lambda: embeddings.PiecewiseLinearEmbeddings(
            [torch.tensor(each) for each in EDGES], WIDTH, activation=False, version="B"
        ),
        "periodic": lambda: embeddings.PeriodicEmbeddings(len(EDGES), WIDTH, lite=False),
        "none": lambda: None,
    }[embedding]()
    net = tabm.TabM.make(
        n_num_features=len(EDGES), cat_cardinalities=[CATEGORIES], d_out=2, num_embeddings=numbers, k=MEMBERS,
        n_blocks=2, d_block=HIDDEN[0], dropout=0.0, arch_type={"tabm": "tabm"}.get(variant, f"tabm-{variant}"),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.5)
    return net


def ours(variant: str, embedding: str) -> mt.Multitude:
    chosen = None if embedding == "none" else embedding
    inputs = len(EDGES) + CATEGORIES
    model = tabular(inputs, 2, [*EDGES, CATEGORIES], chosen, WIDTH, hidden=HIDDEN, dropout=0.0)
    return mt.tabm(model, MEMBERS, variant=variant, seed=0)


@torch.no_grad()
def take_weights(net: Any, theirs: Any) -> None:
    """Give our network the tensors of theirs."""
    net, numbers = net.network, theirs.num_module
    if isinstance(net.embedding, PiecewiseLinear):
        net.embedding.weight[:, 0], net.embedding.bias[:] = numbers.linear0.weight, numbers.linear0.bias
        for at, edges in enumerate(EDGES):  # the last bin is their last, however few there are
            count, weight = len(edges) - 1, numbers.linear.weight[at]
            net.embedding.weight[at, 1 : count + 1] = torch.cat([weight[: count - 1], weight[-1:]])
    elif isinstance(net.embedding, Periodic):
        net.embedding.frequencies[:] = numbers.periodic.weight
        net.embedding.weight[:], net.embedding.bias[:] = numbers.linear.weight, numbers.linear.bias
    if hasattr(theirs.backbone, "affine"):
        net.mlp.layers[0].r[:] = theirs.backbone.affine.weight
    layers = [*(block[0] for block in theirs.backbone.blocks), theirs.output]
    for own, other in zip([net.mlp.layers[0], net.mlp.layers[2], net.mlp.fc], layers, strict=True):
        if isinstance(own, Own):
            own.weights[:], own.biases[:] = other.weight.mT, other.bias
        elif hasattr(other, "r"):
            own.layer.weight[:], own.r[:], own.s[:], own.biases[:] = other.weight, other.r, other.s, other.bias
        else:
            plain = own.layer if isinstance(own, RankOne) else own
            plain.weight[:], plain.bias[:] = other.weight, other.bias


@pytest.mark.parametrize("embedding", ["piecewise", "periodic", "none"])
@pytest.mark.parametrize("variant", ["tabm", "mini", "packed"])
def test_the_authors_network_predicts_and_learns_the_same(variant: str, embedding: str) -> None:
    theirs, net = published(variant, embedding), ours(variant, embedding)
    take_weights(net, theirs)
    numbers, category, x = rows()
    for mode in (True, False):
        net.train(mode), theirs.train(mode)
        torch.testing.assert_close(net(x), theirs(numbers, category).transpose(0, 1))
    y = torch.randint(0, 2, (ROWS,))
    net.train().loss(x, y).backward()
    predictions = theirs.train()(numbers, category)
    nn.functional.cross_entropy(predictions.flatten(0, 1), y.repeat_interleave(MEMBERS)).backward()
    gradients = ours(variant, embedding)
    for parameter, other in zip(theirs.parameters(), theirs.parameters(), strict=True):
        parameter.data = other.grad  # theirs, in our form
    take_weights(gradients, theirs)
    for (name, parameter), want in zip(net.named_parameters(), gradients.parameters(), strict=True):
        if name == "embedding.weight":  # of bins that a number has not
            own = [len(each) for each in EDGES] if embedding == "piecewise" else [want.shape[1]] * len(EDGES)
            for at, count in enumerate(own):
                torch.testing.assert_close(parameter.grad[at, :count], want[at, :count])
        else:
            torch.testing.assert_close(parameter.grad, want, msg=lambda text, name=name: f"{name}: {text}")


def test_only_the_first_factors_are_random_one_for_each_embedding() -> None:
    net = ours("tabm", "piecewise")
    first, second = net.mlp.layers[0], net.mlp.layers[2]
    widths = [WIDTH] * len(EDGES) + [CATEGORIES]
    for part in first.r.split(widths, 1):
        assert (part == part[:, :1]).all()
    assert len(first.r.unique()) == MEMBERS * len(widths)
    for factor in (first.s, second.r, second.s):
        assert (factor == 1).all()
    signs = ours("tabm", "none").mlp.layers[0].r
    assert set(signs.unique().tolist()) == {-1.0, 1.0}


def test_heads_are_drawn_for_each_member_by_the_layers_own_rule() -> None:
    heads = mt.tabm(tabular(4, 3, hidden=(64,)), 200, seed=0).mlp.fc.weights
    assert len(heads.flatten(1).unique(dim=0)) == 200
    assert heads.abs().max().item() <= 1 / 8 and heads.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.02)


def test_variants_have_the_expected_number_of_parameters() -> None:
    counts = {name: sum(p.numel() for p in ours(name, "piecewise").parameters()) for name in ("tabm", "mini", "packed")}
    inputs, hidden = WIDTH * len(EDGES) + CATEGORIES, HIDDEN[0]
    embedding = len(EDGES) * (1 + 4) * WIDTH + len(EDGES) * WIDTH
    layers, heads = inputs * hidden + hidden * hidden, MEMBERS * (hidden + 1) * 2
    assert counts["mini"] == embedding + layers + 2 * hidden + MEMBERS * inputs + heads
    assert counts["tabm"] == embedding + layers + MEMBERS * (inputs + hidden + hidden + 3 * hidden) + heads
    assert counts["packed"] == embedding + MEMBERS * (layers + 2 * hidden) + heads


@pytest.mark.parametrize("variant", ["mini", "packed"])
def test_members_alone_and_files_give_the_same(variant: str, tmp_path: Any) -> None:
    net = ours(variant, "piecewise").eval()
    _, _, x = rows()
    want = net(x)
    alone = torch.stack([net.member(index).eval()(x) for index in range(MEMBERS)])
    torch.testing.assert_close(alone, want)
    mt.save(net, tmp_path / "net.safetensors")
    torch.testing.assert_close(mt.load(tmp_path / "net.safetensors").eval()(x), want)


def test_any_network_may_be_given() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    x = torch.randn(3, 1, 8, 8)
    for variant, own in (("tabm", [Own]), ("mini", [Own]), ("packed", [Own, Own])):
        net = mt.tabm(model, 4, variant=variant, example=x)
        assert [type(layer) for layer in net.modules() if isinstance(layer, Own)] == own
        assert net(x).shape == (4, 3, 3)


def test_bad_arguments_are_errors() -> None:
    with raises("variant must be one of tabm, mini, packed, got 'maxi'"):
        mt.tabm(tabular(3, 1), variant="maxi")
    with raises("model (Sequential) must have a hidden layer, in which its members differ"):
        mt.tabm(nn.Sequential(nn.Linear(3, 1)))
    with raises("layout must have 3 features like inputs, got 2"):
        tabular(3, 1, layout=[[0.0, 1.0], 1])
    with raises("layout must hold two or more increasing edges for number 0, got [1.0, 1.0]"):
        tabular(1, 1, layout=[[1.0, 1.0]])
    with raises("chunks must add up to 3, the first layer's inputs, got 4"):
        mt.batch_ensemble(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), random="first", chunks=[2, 2])
    with raises("own: no layer is named 'fc'; there are: 0, 1"):
        mt.batch_ensemble(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), own=["fc"])
    with raises("random must be one of all, first, got 'some'"):
        mt.batch_ensemble(nn.Linear(3, 4), random="some")
    with raises("sides must be one of both, inputs, got 'outputs'"):
        mt.batch_ensemble(nn.Linear(3, 4), sides="outputs")


# -- rows --------------------------------------------------------------------------------------------------


def test_members_with_rows_of_their_own_learn_from_their_part_of_a_batch(tmp_path: Any) -> None:
    net = mt.tabm(tabular(3, 1, hidden=(8,), dropout=0.0), 4, rows="own", task="regression", seed=0)
    x, y = torch.randn(22, 3), torch.randn(22, 1)
    weight = torch.rand(22)
    parts = [slice(first, first + 6) for first in (0, 5, 11, 16)]  # rows 5 and 16 belong to two members
    alone = [net.member(index) for index in range(4)]
    want = torch.stack([(one(x[p]) - y[p]).square().mean() for one, p in zip(alone, parts, strict=True)]).mean()
    torch.testing.assert_close(net.loss(x, y), want)
    weighted = [(weight[p, None] * (one(x[p]) - y[p]).square()).mean() for one, p in zip(alone, parts, strict=True)]
    torch.testing.assert_close(net.loss(x, y, weight=weight), torch.stack(weighted).mean())
    shared = torch.stack([(one(x) - y).square().mean() for one in alone]).mean()
    torch.testing.assert_close(net.eval().loss(x, y), shared)
    mt.save(net, tmp_path / "net.safetensors")
    assert mt.load(tmp_path / "net.safetensors").rows == "own"
    few = [(one(x[i : i + 1]) - y[i]).square().mean() for one, i in zip(alone, (0, 0, 1, 2), strict=True)]
    torch.testing.assert_close(net.train().loss(x[:3], y[:3]), torch.stack(few).mean())
    with raises("rows must be one of shared, own, got 'mine'"):
        mt.tabm(tabular(3, 1), rows="mine")


def test_streams_of_a_loader_are_orders_of_their_own() -> None:
    part = Part(torch.arange(10.0)[:, None], torch.arange(10.0))
    data = Data("ten", part, part, part, columns=("a",), numbers="standard")
    batches = [y for _, y in Loader(part, data, 4, streams=3, seed=1)]
    assert [len(y) for y in batches] == [12, 12, 6]
    orders = torch.cat([y.unflatten(0, (3, -1)) for y in batches], 1)
    for order in orders:
        torch.testing.assert_close(order.sort().values, data.standardised(part.y))
    assert len(orders.unique(dim=0)) == 3


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_networks_that_cannot_be_tiled_late_are_tiled_at_once(rows: int) -> None:
    model = Of(lambda net, x: x + net.second(net.first(x)), first=nn.Linear(3, 3), second=nn.Linear(3, 3))
    net = mt.batch_ensemble(model, 4, layers=["second"], seed=0)
    for count in (rows, 1, 7):  # a batch of one is no proof for others
        x = torch.randn(count, 3)
        torch.testing.assert_close(net(x), torch.stack([net.member(i)(x) for i in range(4)]))


def test_check_compares_buffers_with_infinities() -> None:
    model = Of(lambda net, x: net.linear(x) + net.mask.clamp(-1, 1), linear=nn.Linear(3, 3))
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.inf]))
    x, net = torch.randn(5, 3), mt.deep_ensemble(model, 3, seed=0)
    assert "predictions" in str(mt.check(net, x))
    member = net.member

    def other(index: int) -> nn.Module:
        changed = copy.deepcopy(member(index))
        changed.mask = changed.mask.nan_to_num(posinf=3.0)
        return changed

    net.member = other  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="differs from net.member"):
        mt.check(net, x)
