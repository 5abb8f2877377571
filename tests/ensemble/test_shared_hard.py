"""Members that share weights, of networks whose code takes another way later: in a branch, in training, in a hook."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multitudes as mt
from tests.zoo.of_parts import Of

Code = Callable[[Any, Tensor], Tensor]


def coded(code: Code) -> nn.Module:
    """A network of linear layers `a`, `b`, `c`, a `trunk` and an `out`."""
    return Of(code, **{name: nn.Linear(8, 8) for name in ("trunk", "a", "b", "c")}, out=nn.Linear(8, 3))


def shared(code: Code, layers: Any = ("b",), **attributes: Any) -> Any:
    torch.manual_seed(0)
    model = coded(code)
    vars(model).update(attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mt.batch_ensemble(model, 4, layers=list(layers), seed=0)


def residual(net: Any, x: Tensor) -> Tensor:
    """Members cannot lie in one batch from `b` on, since the trunk's rows are added."""
    h = net.trunk(x).relu()
    return h + net.b(h)


def assert_members(net: Any, x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        predictions = net(x)
    for index, prediction in enumerate(predictions):
        torch.testing.assert_close(prediction, net.member(index)(x), rtol=1e-4, atol=1e-5)


def x_of(rows: int, low: float = -4.0, high: float = 4.0) -> Tensor:
    return torch.rand(rows, 8, generator=torch.Generator().manual_seed(rows)) * (high - low) + low


def another_layer_first(net: Any, x: Tensor) -> Tensor:
    h = net.trunk(x).relu()
    return net.out(net.b(net.a(h).relu() if bool((x > 5).any()) else h))


def rows_meet_in_a_branch(net: Any, x: Tensor) -> Tensor:
    h = net.b(net.trunk(x).relu())
    return net.out((h - h.mean(0)) / h.std(0) if bool(x.max() > 5) else h)


def rows_meet_in_large_batches(net: Any, x: Tensor) -> Tensor:
    h = net.b(net.trunk(x).relu())
    return net.out(h - h.mean(0) if len(h) > 16 else h)


def rows_meet_where_gradients_are_recorded(net: Any, x: Tensor) -> Tensor:
    h = net.b(net.trunk(x).relu())
    return net.out(h - h.mean(0) if torch.is_grad_enabled() else h)


def own_rows_in_place(net: Any, x: Tensor) -> Tensor:
    h = residual(net, x)
    if bool(x.max() > 5):
        kept, large = torch.zeros_like(x), x[:, 0] > 0
        kept[large] += h[large]
        h = kept
    return net.out(h)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "code",
    [another_layer_first, rows_meet_in_a_branch, rows_meet_in_large_batches, own_rows_in_place,
     rows_meet_where_gradients_are_recorded],
)  # fmt: skip
def test_code_that_takes_another_way_later_is_right(code: Code, training: bool) -> None:
    net = shared(code, ("a", "b")).train(training)
    with torch.no_grad():
        assert_members(net, x_of(8))
    for rows in (8, 3, 12):
        assert_members(net, x_of(rows))
        assert_members(net, x_of(rows, 3.0, 9.0))


def test_layers_that_are_left_out_at_random_are_right() -> None:
    def code(net: Any, x: Tensor) -> Tensor:
        h = net.trunk(x).relu()
        return net.out(net.b(h if net.skips[0] else net.a(h).relu()))

    net = shared(code, ("a", "b"), skips=[False]).train()
    for skips in (False, True, False):
        net.network.skips[0] = skips
        assert_members(net, x_of(8))


def test_a_hook_in_the_place_of_another_is_followed() -> None:
    net, x = shared(lambda net, x: net.out(net.b(net.trunk(x).relu()))).train(), x_of(8)
    layer = net.network.get_submodule("b")
    for hook in (lambda _, args: (args[0] * 2,), lambda _, args: (args[0] - args[0].mean(0),)):
        handle = layer.register_forward_pre_hook(hook)
        assert_members(net, x)
        handle.remove()


class Shortened(torch.autograd.Function):
    """The identity, whose gradient has length one over all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / (gradients[0].norm() + 1e-3)


def weakened(net: Any, x: Tensor) -> Tensor:
    h = residual(net, x)
    if h.requires_grad:
        h.register_hook(lambda gradient: 0.1 * gradient)
    return net.out(h)


def recomputed(net: Any, x: Tensor) -> Tensor:
    return net.out(checkpoint(lambda h: net.c(h).exp(), residual(net, x), use_reentrant=False))


def writing(code: Code, net: Any, x: Tensor) -> Tensor:
    net.seen = x + 0
    return code(net, x)


@pytest.mark.parametrize(
    "code", [weakened, recomputed, lambda net, x: net.out(Shortened.apply(net.b(net.trunk(x).relu())))]
)
@pytest.mark.filterwarnings("ignore:Cannot batch the members")
def test_gradients_are_those_of_members_one_by_one(code: Code) -> None:
    gradients = []
    for alone in (False, True):
        net = shared(code).train()
        if alone:  # a network that writes for each member runs one by one
            net.network.function = partial(writing, net.network.function)
        net(x_of(8))[1].square().sum().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def cached(net: Any, x: Tensor) -> Tensor:
    held = net.held["inside"]
    if "weight" not in held:
        held["weight"] = net.c.weight.detach().sum(0)
    return net.out(residual(net, x) * held["weight"])


def kept(net: Any, x: Tensor) -> Tensor:
    h = residual(net, x)
    net.last.append(h.detach())
    net.state.value = h.detach()
    return net.out(h)


def test_trials_leave_nothing_in_what_attributes_hold() -> None:
    assert_members(shared(cached, held={"inside": {}}).train(), x_of(8))
    assert_members(
        mt.deep_ensemble(shared(cached, held={"inside": {}}).member(0), 2, init="heads", heads="out"), x_of(8)
    )
    net = shared(kept, last=deque(maxlen=2), state=SimpleNamespace(value=None)).train()
    for _ in range(3):
        assert net(x_of(8)).shape == (4, 8, 3)
    held = [*net.network.last, net.network.state.value]
    assert held and not any(torch._C._functorch.is_batchedtensor(tensor) for tensor in held)
    copy.deepcopy(net)


@pytest.mark.filterwarnings("ignore:Cannot batch the members")
def test_transforms_of_the_networks_own_are_right_and_leave_torch_usable() -> None:
    def derived(net: Any, x: Tensor) -> Tensor:
        h = net.trunk(x).relu()
        return net.out(h + torch.func.jvp(net.b, (h,), (torch.ones_like(h),))[1])

    def mapped(net: Any, x: Tensor) -> Tensor:
        h = net.b(torch.vmap(net.a)(net.trunk(x))).relu()
        return net.out(h - h.mean(0))

    for code in (derived, mapped):
        assert_members(shared(code, ("a", "b")).train(), x_of(8))
    one = torch.ones(2)
    torch.testing.assert_close(torch.func.jvp(torch.sin, (one,), (one,))[1], one.cos())
    net, x = shared(lambda net, x: net.out(net.b(net.trunk(x).relu()))).eval(), x_of(8)
    torch.testing.assert_close(torch.vmap(lambda row: net(row[None])[:, 0])(x).movedim(0, 1), net(x))


def test_a_seed_gives_the_same_draws_however_members_run() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Linear(16, 3))
    net, x = mt.batch_ensemble(mt.mc_dropout(model), 4, layers=["2"], seed=0).eval(), x_of(8)
    drawn = net(x, seed=1, draws=3)
    handle = net.network.get_submodule("3").register_forward_hook(lambda *_: None)
    torch.testing.assert_close(net(x, seed=1, draws=3), drawn)
    handle.remove()


def test_mixed_rows_are_noticed_behind_outputs_that_hardly_depend_on_them() -> None:
    """Members' errors are small beside the distance between the classes, not beside that between rows."""
    far = torch.tensor([150.0, -150.0, 0.0])

    def centred(net: Any, x: Tensor) -> Tensor:
        h = net.b(net.trunk(x).relu())
        return far + net.out(h - h.mean(0))

    def rows_only(net: Any, x: Tensor) -> Tensor:
        return far + net.out(net.b(net.trunk(x).relu()))

    for code in (centred, rows_only):
        net, x = shared(code).train(), x_of(8)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            for index, prediction in enumerate(net(x)):
                torch.testing.assert_close(prediction, net.member(index)(x), rtol=0, atol=1e-3)


def test_small_batches_keywords_and_recurrent_blocks() -> None:
    net = mt.heads(coded(lambda net, x: net.out(residual(net, x))), 3, layers=["out"], seed=0).train()
    assert [net(x_of(rows)).shape[1] for rows in (1, 0, 5)] == [1, 0, 5]
    assert_members(shared(lambda net, x: net.out(net.b(input=net.trunk(x).relu()))).train(), x_of(8))

    parts = {"b": nn.Linear(8, 8), "g": nn.GRU(8, 8, batch_first=True), "out": nn.Linear(8, 3)}
    recurrent = Of(lambda net, x: net.out(net.g(net.b(x)[:, None])[0][:, -1]), **parts)
    net = mt.heads(recurrent, 3, from_layer="g", example=x_of(8), seed=0).train()
    net(x_of(8))
    torch.testing.assert_close(copy.deepcopy(net)(x_of(8)), net(x_of(8)))
