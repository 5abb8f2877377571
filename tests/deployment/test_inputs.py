"""Deployed networks on inputs unlike the example: the network's own answers, or its own errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.deployment.engines import has_special_values, signature
from multitudes.networks.calls import call
from tests.deployment.test_deploy import fixed_race  # noqa: F401

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


class Of(nn.Module):
    """Linear layers, a norm that moves its input, and a forward of them."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(4, 3)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)])
        for number, norm in enumerate(self.norms):
            norm.running_mean += 3 + number
            norm.running_var *= 9
        self.run = run
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.run(self, *args, **kwargs)


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
    "a number": (lambda net, x, by: net.d(x) * by, (X, 0.5), [(X, 0.7), (X, 0.5)]),
    "a text": (
        lambda net, x, task: net.d(x) if task == "a" else net.b(net.a(x)), {"x": X, "task": "a"},
        [{"x": X, "task": "b"}],
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
def test_other_inputs_are_answered_as_by_the_network(name: str) -> None:
    run, example, others = CASES[name]
    net = Of(run)
    deployed = mt.deploy(net, example)
    for x in (example, *others):
        with torch.no_grad():
            torch.testing.assert_close(deployed(x)[0], call(net, x), rtol=1e-3, atol=1e-4)


def test_rows_that_are_masked_as_a_whole() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.f = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor, m: Tensor) -> Tensor:
            return self.f((self.e(x, src_key_padding_mask=~m) * m[..., None]).sum(1))

    torch.manual_seed(0)
    net, x, m = mt.Multitude(Masked().eval()), torch.randn(4, 5, 8), torch.ones(4, 5, dtype=torch.bool)
    deployed = mt.deploy(net, (x, m))
    m = m.clone()
    m[0] = False
    with torch.no_grad():
        torch.testing.assert_close(deployed((x, m)), net((x, m)), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_ids_that_the_network_refuses_are_refused() -> None:
    net = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3)).eval()
    deployed = mt.deploy(net, torch.randint(10, (6, 2)))
    for wrong in (-1, 10):
        with pytest.raises((ValueError, IndexError)):
            deployed(torch.full((6, 2), wrong))


def test_what_inputs_have_in_common() -> None:
    assert signature((X, 1)) == signature((X + 1, 1)) != signature((X, 2))
    assert signature((X, 1)) != signature((X, 1.0)) and signature((X, True)) != signature((X, 1))
    assert signature(Pair(X, X)) is None and signature({"x": X, "f": print}) is None
    assert signature({"x": X, "y": X[:1]}) != signature({"y": X[:1], "x": X})
    assert not has_special_values(X) and not has_special_values(torch.tensor([[1, 0], [0, 1]]))
    assert has_special_values(torch.tensor([[1, 0], [0, 0]])) and has_special_values(torch.tensor([3, -1]))


def test_predictions_that_a_precision_spoils_are_an_error() -> None:
    table = nn.Embedding(1000, 3)
    net = Of(lambda net, x: F.embedding(x[:, 0].round().long(), table.weight))
    x = torch.arange(600.0, 664.0)[:, None].expand(-1, 4).contiguous()
    with pytest.raises(ValueError, match="the deployed predictions differ from the network's on the example by"):
        mt.deploy(net, x, precision="bfloat16")


def test_buffers_of_another_dtype_stay_as_they_are() -> None:
    class Far(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("far", torch.tensor(1e9, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([(x - self.far).sum(1), (x - self.far).prod(1)], 1)

    x = 1e9 + X.double()
    torch.testing.assert_close(mt.deploy(Far(), x)(x)[0], Far()(x))


def test_nothing_of_the_world_is_moved() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x)

    net = Counting().eval()
    mt.deploy(net, X)
    assert net.calls == 0
    drawing = mt.mc_dropout(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    state = torch.get_rng_state()
    mt.deploy(drawing, X)
    assert torch.equal(state, torch.get_rng_state())

    def in_place(net: Any, x: Tensor) -> Tensor:
        return net.d(x.mul_(1.0).add_(0.0))

    x = X.clone()
    mt.deploy(Of(in_place), x)
    assert torch.equal(x, X)


def test_a_posterior_without_draws_answers_options_as_the_network() -> None:
    torch.manual_seed(0)
    net = mt.laplace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (X, torch.arange(16) % 3), prior=1.0)
    net.approximation = "probit"
    deployed = mt.deploy(net, X)
    torch.testing.assert_close(deployed.predict(X, draws=0).probs, net.predict(X, draws=0).probs)
    with pytest.raises(ValueError, match="are not made by approximation 'probit'"):
        deployed.predict(X, draws=1)


def test_what_cannot_be_asked_for_is_told() -> None:
    net = Of(lambda net, x: net.d(x))
    with pytest.raises(ValueError, match="batch_sizes must be a list of whole numbers, got 5"):
        mt.deploy(net, X, batch_sizes=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="precision='int8' is for networks of float32, got one of torch.float64"):
        mt.deploy(copy.deepcopy(net).double(), X.double(), precision="int8")
    deployed = mt.deploy(net, X)
    with pytest.raises(ValueError, match="takes draws, seed, memory beside x, got 'tolerance'"):
        deployed.predict(X, tolerance=0.1)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match="a deployed network cannot be copied or pickled"):
            copied(deployed)
    with pytest.raises(ValueError, match="targets are for precision='int8'"):
        mt.deploy(net, X, targets=torch.zeros(16))
    for targets, got in ((torch.zeros(5), r"\[5\]"), ("x", "'x'")):
        with pytest.raises(ValueError, match=f"targets must be a tensor with one for each of the 16 rows.*got {got}"):
            mt.deploy(net, X, precision="int8", targets=targets)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x of shape \[16, 4\].*does not fit the network: .*argument"):
        deployed.predict((X, X))
    with pytest.raises(ValueError, match="which torch.jit.freeze takes away"):
        mt.deploy(torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(4, 3)).eval())), X)


# -- indices, masks and kinds of numbers -------------------------------------------------------------------


class Embeds(nn.Module):
    """Embeddings of what is computed from an input."""

    def __init__(self, ids: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ids, self.embedding, self.layer = ids, nn.Embedding(10, 8), nn.Linear(8, 3)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embedding(self.ids(x)).mean(1))


class OneHot(Embeds):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.one_hot(x[:, 0], 8).float())


IDS = torch.randint(1, 8, (16, 4), generator=torch.Generator().manual_seed(0))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("model", "x", "wrong"),
    [
        (Embeds(lambda x: x - 1), IDS, 0),
        (Embeds(lambda x: x.flip(1) * 1), IDS, -1),
        (Embeds(lambda x: (x + 5).long()), X.clamp(-2, 2), -7.0),
        (Embeds(lambda x: x), IDS, 10),
        (Embeds(lambda x: x), IDS, -1),
        (OneHot(lambda x: x), IDS, 8),
    ],
    ids=["shifted", "computed", "of numbers", "too large", "below 0", "one-hot"],
)
def test_ids_that_are_wrong_inside_are_refused_as_by_the_network(model: nn.Module, x: Tensor, wrong: float) -> None:
    deployed = mt.deploy(model, x)
    torch.testing.assert_close(deployed(x)[0], model(x).detach(), rtol=1e-4, atol=1e-5)
    x = x.clone()
    x[0, 0] = wrong
    with pytest.raises((IndexError, RuntimeError)):
        model(x)
    with pytest.raises(ValueError, match="does not fit the network"):
        deployed(x)


def test_ids_that_are_given_or_in_range_by_themselves_are_no_reason_against_onnx_runtime() -> None:
    class Last(Embeds):
        def forward(self, x: Tensor) -> Tensor:
            last = (x != 0).int().argmax(1)
            return self.layer(self.embedding(x)[torch.arange(x.shape[0]), last])

    for model in (Embeds(lambda x: x), Last(lambda x: x)):
        assert "run by  ONNX Runtime" in mt.deploy(model, IDS).summary()


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_masks_of_any_kind_that_leave_nothing_of_a_row(dtype: torch.dtype) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            away = (1.0 - mask.float())[:, None, :] * torch.finfo(torch.float32).min
            weights = (self.layer(x) @ x.transpose(1, 2) + away).softmax(-1)
            return self.head((weights @ x).mean(1))

    model, x = Attends().eval(), torch.randn(4, 5, 4)
    mask = (torch.arange(5) < torch.tensor([5, 3, 2, 1])[:, None]).to(dtype)
    deployed = mt.deploy(model, (x, mask))
    mask = mask.clone()
    mask[1] = 0
    torch.testing.assert_close(deployed((x, mask))[0], model(x, mask).detach(), rtol=1e-4, atol=1e-5)


def test_predictions_that_are_no_real_numbers() -> None:
    for whole in (lambda net, x: net.d(x).argmax(1), lambda net, x: net.d(x) > 0):
        with pytest.raises(ValueError, match="net must predict logits or values"):
            mt.deploy(Of(whole), X)
    model = Of(lambda net, x: torch.complex(net.d(x), net.d(x).square()))
    torch.testing.assert_close(mt.deploy(model, X)(2 * X)[0], model(2 * X).detach())


def test_an_input_that_the_network_writes_to_stays_as_it_was_however_often_its_shape_came() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)).eval()
    deployed = mt.deploy(model, X)
    assert "ONNX" in deployed.summary()
    for rows in (16, 7, 7):
        x = torch.randn(rows, 4)
        before = x.clone()
        deployed(x)
        assert torch.equal(x, before)
