"""Members that share weights and train on rows of their own: `rows="own"`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.models import tabular
from tests.zoo.of_parts import Of

MEMBERS = 3


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def cnn() -> nn.Module:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def with_frozen_norms(net: mt.Multitude) -> mt.Multitude:
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return net


METHODS: dict[str, Callable[..., Any]] = {
    "batch_ensemble": lambda model, **options: mt.batch_ensemble(model, MEMBERS, **options),
    "masksembles": lambda model, **options: mt.masksembles(model, MEMBERS, **options),
    "heads": lambda model, **options: mt.heads(model, MEMBERS, layers=["4" if len(model) == 5 else "7"], **options),
    "lora": lambda model, **options: mt.lora(model, MEMBERS, 2, **options),
    "tabm": lambda model, **options: mt.tabm(model, MEMBERS, **options),
}


def parts(rows: int) -> list[slice]:
    """Each member's rows: as many for each, in order, and none left out."""
    size = -(-rows // MEMBERS)
    return [slice(i * rows // MEMBERS, i * rows // MEMBERS + size) for i in range(MEMBERS)]


@pytest.mark.parametrize(
    ("model", "rows", "weighted"), [(mlp, 12, False), (mlp, 11, True), (cnn, 11, False), (cnn, 2, True)]
)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "tabm"])
def test_loss_and_gradients_are_those_of_each_member_on_its_part(
    method: str, model: Callable[[], nn.Module], rows: int, weighted: bool
) -> None:
    net = METHODS[method](model(), rows="own", seed=0, task="classification").train()
    x = torch.randn(rows, 4) if model is mlp else torch.randn(rows, 3, 8, 8)
    y, weight = torch.randint(3, (rows,)), torch.rand(rows) if weighted else None
    with_frozen_norms(net)
    plain = METHODS[method](model(), seed=0, task="classification").train()
    with_frozen_norms(plain).load_state_dict(net.state_dict())
    covered = set()
    losses = []
    for index, part in enumerate(parts(rows)):  # by the members of a network that runs all of them on all rows
        losses.append(_mean(plain(x)[index, part], y[part], None if weight is None else weight[part]))
        covered |= set(range(rows)[part])
    assert covered == set(range(rows))
    want = torch.stack(losses).sum() if net.independent else torch.stack(losses).mean()
    want.backward()
    got = net.loss(x, y, weight=weight)
    got.backward()
    torch.testing.assert_close(got, want)
    for (name, own), (_, other) in zip(net.named_parameters(), plain.named_parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


def _mean(prediction: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    losses = F.cross_entropy(prediction, y, reduction="none")
    return (losses if weight is None else losses * weight).mean()


def test_tabm_on_rows_of_their_own() -> None:
    net = METHODS["tabm"](tabular(4, 1, hidden=(8,), dropout=0.0), rows="own", task="regression", seed=0)
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    want = torch.stack([F.mse_loss(net.member(i)(x[part]), y[part]) for i, part in enumerate(parts(12))]).mean()
    torch.testing.assert_close(net.loss(x, y), want)


@pytest.mark.parametrize("method", ["batch_ensemble", "masksembles", "heads"])
def test_batch_norm_takes_its_statistics_over_the_whole_batch(method: str) -> None:
    net = METHODS[method](cnn(), rows="own", seed=0, task="classification").train()
    x, y = torch.randn(12, 3, 8, 8), torch.randint(3, (12,))
    first, norm = copy.deepcopy(net.get_submodule("0")), net.get_submodule("1")
    net.loss(x, y)
    if method == "batch_ensemble":
        h = torch.cat([first.fold(index)(x[part]) for index, part in enumerate(parts(12))])
    else:
        h = first(x)
    torch.testing.assert_close(norm.running_mean, 0.1 * h.mean((0, 2, 3)), rtol=1e-4, atol=1e-6)
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize("method", list(METHODS))
def test_a_row_runs_through_the_network_once(method: str) -> None:
    model = tabular(4, 3, hidden=(8,), dropout=0.0) if method == "tabm" else mlp()
    net = METHODS[method](model, rows="own", seed=0, task="classification").train()
    x, y, seen = torch.randn(12, 4), torch.randint(3, (12,)), []
    net.loss(x, y)
    last = [m for m in net.network.modules() if isinstance(m, (nn.Tanh, nn.ReLU))][-1]
    last.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    net.loss(x, y)
    assert seen == [12]


def test_wrong_rows_are_refused() -> None:
    for method in METHODS.values():
        with pytest.raises(ValueError, match="rows must be one of shared, own, got 'mine'"):
            method(mlp(), rows="mine")
    model = Of(lambda net, x: net.last((h := net.first(x)) - h.mean(0)), first=nn.Linear(4, 8), last=nn.Linear(8, 3))
    net = mt.batch_ensemble(model, MEMBERS, rows="own", task="classification", seed=0)
    with pytest.raises(
        ValueError, match=r"rows='own' needs a network that runs the rows of all members in one batch: layer"
    ):
        net.loss(torch.randn(6, 4), torch.randint(3, (6,)))
