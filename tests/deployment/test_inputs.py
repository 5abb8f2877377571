"""Deployed networks on inputs unlike the example: the network's own predictions, or its own errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.deployment.engines import has_special_values, signature
from multitudes.networks.calls import call
from tests.deployment.test_deploy import fixed_times  # noqa: F401
from tests.zoo.of_parts import Of

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def network(forward: Callable[..., Any]) -> nn.Module:
    """Linear layers and norms with statistics, and a forward that uses them."""
    torch.manual_seed(0)
    norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)])
    for number, norm in enumerate(norms):
        norm.running_mean += 3 + number
        norm.running_var *= 9
    layers = {"a": nn.Linear(4, 8), "b": nn.Linear(8, 3), "c": nn.Linear(8, 3), "d": nn.Linear(4, 3)}
    return Of(forward, norms=norms, **layers).eval()


class Pair(NamedTuple):
    one: Tensor
    two: Tensor


def branch_on_values(net: Any, x: Tensor) -> Tensor:
    return net.b(F.relu(net.norms[0](net.a(x)) if x.abs().max() < 10 else net.a(x)))


def norm_of_domain(net: Any, x: Tensor, domain: Tensor) -> Tensor:
    return net.b(F.relu(net.norms[int(domain[0])](net.a(x))))


def branch_on_rows(net: Any, x: Tensor) -> Tensor:
    h = F.relu(net.a(x))
    return net.b(h) if x.shape[0] > 10 else net.c(h)


def norm_by_rows(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.b(F.relu(net.norms[0](h) if len(x) > 10 else h))


def searched(net: Any, x: Tensor) -> Tensor:
    knots = torch.linspace(-1, 1, 5).expand(x.shape[1], -1).contiguous()
    return net.d(torch.searchsorted(knots, x.T.contiguous(), right=True).T.float())


ONE, TWO = torch.zeros(16, dtype=torch.long), torch.ones(16, dtype=torch.long)

CASES: dict[str, tuple[Callable[..., Tensor], Any, list[Any]]] = {
    "a flag": (
        lambda net, x, flag: net.d(x) if flag else -net.d(x), {"x": X, "flag": True}, [{"x": X, "flag": False}]
    ),
    "a list of numbers": (lambda net, x, by: net.d(x) * sum(by), (X, [1, 2]), [(X, [3, 4])]),
    "tensors in a namedtuple": (lambda net, x, p: net.d(x + p.one - p.two), (X, Pair(X, X + 1)), [(X, Pair(X, X * 2))]),
    "names in another order": (
        lambda net, x, y: net.d(x) - 3 * net.d(y), {"x": X, "y": X.flip(0)}, [{"y": X.flip(0), "x": X}]
    ),
    "a branch on values": (branch_on_values, X, [100 * X, X]),
    "the norm of a domain": (norm_of_domain, {"x": X, "domain": ONE}, [{"x": X, "domain": TWO}]),
    "a branch on the number of rows": (branch_on_rows, X, [X[:5], X[:12]]),
    "a norm for many rows": (norm_by_rows, X, [X[:5], X[:12]]),
    "an input without rows": (lambda net, x, t: net.d(x) @ t, (X, torch.randn(3, 5)), [(X[:3], torch.randn(3, 5))]),
    "lists of tensors": (lambda net, views: net.d(views[0] + views[1]), {"views": [X, X + 1]}, [{"views": [X, X]}]),
    "a search on the right side": (searched, X, [torch.full((3, 4), 0.5), X.round()]),
    "parts of the batch": (
        lambda net, x: torch.cat([net.d(part) for part in x.split(8)]), X, [X[:3], torch.cat([X, X])]
    ),
    "a graph": (
        lambda net, x, edges: net.d(torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])),
        (X, torch.randint(16, (2, 40))), [(X, torch.randint(16, (2, 30)))],
    ),
    "logarithms of large sums": (lambda net, x: net.d(torch.logaddexp(x, -x)), X, [1000 * X]),
    "the largest, with ties": (
        lambda net, x: net.d(F.one_hot(x.topk(2).indices[:, 0], 4).float()), X, [torch.ones(3, 4)]
    ),
    "double inputs of a float network": (
        lambda net, x: net.d(((x - 1.7e9) / 100).float()), 1.7e9 + 100 * X.double(), [1.7e9 + 50 * X.double()]
    ),
}  # fmt: skip


@pytest.mark.quick(10)
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.filterwarnings("ignore:x of shape")
def test_other_inputs_are_predicted_as_by_the_network(name: str) -> None:
    run, example, others = CASES[name]
    net = network(run)
    deployed = mt.deploy(net, example)
    for x in (example, *others):
        with torch.no_grad():
            torch.testing.assert_close(deployed(x)[0], call(net, x), rtol=1e-3, atol=1e-4)


def test_signatures_compare_shapes_and_plain_values() -> None:
    assert signature((X, 1)) == signature((X + 1, 1)) != signature((X, 2))
    assert signature((X, 1)) != signature((X, 1.0)) and signature((X, True)) != signature((X, 1))
    assert signature(Pair(X, X)) is None and signature({"x": X, "f": print}) is None
    assert signature({"x": X, "y": X[:1]}) != signature({"y": X[:1], "x": X})
    assert not has_special_values(X) and not has_special_values(torch.tensor([[1, 0], [0, 1]]))
    assert has_special_values(torch.tensor([[1, 0], [0, 0]])) and has_special_values(torch.tensor([3, -1]))


def test_a_precision_that_is_too_low_raises() -> None:
    table = nn.Embedding(1000, 3)
    net = network(lambda net, x: F.embedding(x[:, 0].round().long(), table.weight))
    x = torch.arange(600.0, 664.0)[:, None].expand(-1, 4).contiguous()
    with pytest.raises(ValueError, match="the deployed predictions differ from the network's on the example by"):
        mt.deploy(net, x, precision="bfloat16")


def test_buffers_of_another_dtype_keep_it() -> None:
    far = Of(lambda net, x: torch.stack([(x - net.far).sum(1), (x - net.far).prod(1)], 1))
    far.register_buffer("far", torch.tensor(1e9, dtype=torch.float64))
    x = 1e9 + X.double()
    torch.testing.assert_close(mt.deploy(far, x)(x)[0], far(x))


def test_the_network_the_random_state_and_the_example_do_not_change() -> None:
    def counted(net: Any, x: Tensor) -> Tensor:
        net.calls = getattr(net, "calls", 0) + 1
        return net.d(x.mul_(1.0).add_(0.0))  # in place

    net, x = network(counted), X.clone()
    mt.deploy(net, x)
    assert not hasattr(net, "calls") and torch.equal(x, X)
    drawing = mt.mc_dropout(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    state = torch.get_rng_state()
    mt.deploy(drawing, X)
    assert torch.equal(state, torch.get_rng_state())


def test_later_inputs_do_not_change_if_the_network_works_in_place() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)).eval()
    deployed = mt.deploy(model, X)
    assert "ONNX" in deployed.summary()
    for rows in (16, 7, 7):
        x = torch.randn(rows, 4)
        before = x.clone()
        deployed(x)
        assert torch.equal(x, before)


# -- indices, masks and dtypes -----------------------------------------------------------------------------


def embeds(ids: Callable[[Tensor], Tensor]) -> nn.Module:
    """Embeddings of ids that are computed from an input."""
    torch.manual_seed(0)
    parts = {"embedding": nn.Embedding(10, 8), "layer": nn.Linear(8, 3)}
    return Of(lambda net, x: net.layer(net.embedding(ids(x)).mean(1)), **parts).eval()


def last_embedding(net: Any, x: Tensor) -> Tensor:
    last = (x != 0).int().argmax(1)
    return net.layer(net.embedding(x)[torch.arange(x.shape[0]), last])


ONE_HOT = Of(lambda net, x: net.layer(F.one_hot(x[:, 0], 8).float()), layer=nn.Linear(8, 3))
IDS = torch.randint(1, 8, (16, 4), generator=torch.Generator().manual_seed(0))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("model", "x", "wrong"),
    [
        (embeds(lambda x: x - 1), IDS, 0),
        (embeds(lambda x: x), IDS, 10),
        (embeds(lambda x: x), IDS, -1),
        (embeds(lambda x: x.flip(1) * 1), IDS, -1),
        (embeds(lambda x: (x + 5).long()), X.clamp(-2, 2), -7.0),
        (ONE_HOT, IDS, 8),
    ],
    ids=["shifted", "too large", "below 0", "computed", "of numbers", "one-hot"],
)
def test_invalid_ids_raise_as_in_the_network(model: nn.Module, x: Tensor, wrong: float) -> None:
    deployed = mt.deploy(model, x)
    torch.testing.assert_close(deployed(x)[0], model(x).detach(), rtol=1e-4, atol=1e-5)
    x = x.clone()
    x[0, 0] = wrong
    with pytest.raises((IndexError, RuntimeError)):
        model(x)
    with pytest.raises(ValueError, match="does not fit the network"):
        deployed(x)


def test_onnx_runtime_runs_networks_whose_ids_are_inputs_or_always_in_range() -> None:
    in_range = Of(last_embedding, embedding=nn.Embedding(10, 8), layer=nn.Linear(8, 3))
    for model in (embeds(lambda x: x), in_range):
        assert "ONNX Runtime, threads" in mt.deploy(model, IDS).summary()


def encode(net: Any, x: Tensor, mask: Tensor) -> Tensor:
    return net.head((net.encoder(x, src_key_padding_mask=~mask) * mask[..., None]).sum(1))


def attend(net: Any, x: Tensor, mask: Tensor) -> Tensor:
    bias = (1.0 - mask.float())[:, None, :] * torch.finfo(torch.float32).min
    return net.head(((net.layer(x) @ x.transpose(1, 2) + bias).softmax(-1) @ x).mean(1))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("forward", "dtype"),
    [(encode, torch.bool), (attend, torch.float32), (attend, torch.int64), (attend, torch.bool)],
)
def test_masks_may_hide_a_whole_row(forward: Callable[..., Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = Of(forward, encoder=encoder, layer=nn.Linear(4, 4), head=nn.Linear(4, 3)).eval()
    x, mask = torch.randn(4, 5, 4), (torch.arange(5) < torch.tensor([5, 3, 2, 1])[:, None]).to(dtype)
    deployed = mt.deploy(model, (x, mask))
    mask = mask.clone()
    mask[1] = 0
    with torch.no_grad():
        want = mt.Multitude(model)((x, mask))
        torch.testing.assert_close(deployed((x, mask)), want, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_complex_predictions() -> None:
    model = network(lambda net, x: torch.complex(net.d(x), net.d(x).square()))
    torch.testing.assert_close(mt.deploy(model, X)(2 * X)[0], model(2 * X).detach())
