"""Gradient checkpointing, which runs layers again after the multitude's forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multitudes as mt
from tests.zoo.of_parts import Of
from tests.zoo.shared_cases import bert, gpt2, tokens


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.inner(x))) * gate


class Blocks(nn.Module):
    """Residual blocks, checkpointed or not; where `mixes`, the rows of a batch see each other."""

    def __init__(self, reentrant: bool | None, mixes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.reentrant, self.mixes = reentrant, mixes

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h - h.mean(0) if self.mixes else h
        for block in self.blocks:
            gate = h[:, :1].detach()
            h = block(h, gate) if self.reentrant is None else checkpoint(block, h, gate, use_reentrant=self.reentrant)
        return self.last(h)


def within(reentrant: bool | None) -> nn.Module:
    """A layer, and blocks that checkpoint parts of themselves."""
    blocks = Blocks(reentrant)
    blocks.first = nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Sequential(blocks))


CASES: dict[str, tuple[Callable[[bool | None], nn.Module], Callable[..., Any]]] = {
    "from the first layer on": (Blocks, functools.partial(mt.batch_ensemble, members=3)),
    "from a block on": (Blocks, functools.partial(mt.batch_ensemble, members=3, layers=["blocks.1.inner"])),
    "adapters": (Blocks, functools.partial(mt.lora, members=3, rank=2, layers=["blocks.2.out"])),
    "a block of each member's own": (within, functools.partial(mt.heads, members=3, layers=["2"])),
    "one by one": (functools.partial(Blocks, mixes=True), functools.partial(mt.batch_ensemble, members=3)),
}


@pytest.mark.parametrize(
    ("case", "reentrant", "mode"),
    [
        pytest.param(case, reentrant, mode, marks=[pytest.mark.slow] * ((number + reentrant + other) % 2))
        for number, case in enumerate(CASES)
        for reentrant in (True, False)
        for other, mode in enumerate(("training", "evaluation"))
    ],
)
@pytest.mark.filterwarnings("ignore:Cannot batch the members")
def test_checkpointing_does_not_change_gradients(case: str, reentrant: bool, mode: str) -> None:
    model, method = CASES[case]
    sizes = (5, 1, 5)  # some of them are forgotten before their backward pass, unless each call keeps its own
    gradients = []
    for how in (None, reentrant):
        net = method(model(how), seed=0, task="classification").train(mode == "training")
        losses = []
        for size in sizes:
            x = torch.randn(size, 4, generator=torch.Generator().manual_seed(size), requires_grad=True)
            losses.append(net.loss(x, torch.arange(size) % 3))
            with torch.no_grad():
                net.predict(x.detach())
        torch.stack(losses).sum().backward()
        gradients.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


METHODS: dict[str, Callable[..., Any]] = {
    "batch_ensemble": mt.batch_ensemble,
    "masksembles": functools.partial(mt.masksembles, example=tokens(4)),
    "heads": mt.heads,
    "lora": functools.partial(mt.lora, rank=2),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("model", [bert, gpt2])
@pytest.mark.parametrize(
    ("method", "reentrant", "rows"),
    [
        ("batch_ensemble", True, "own"),
        ("masksembles", False, "shared"),
        ("heads", False, "own"),
        ("lora", True, "shared"),
        ("batch_ensemble", False, "shared"),
        ("lora", False, "own"),
    ],
)
def test_checkpointing_does_not_change_gradients_of_hugging_face_models(
    model: Callable[[], Any], method: str, reentrant: bool, rows: str
) -> None:
    x, y = tokens(4), torch.tensor([0, 1, 2, 1])
    gradients = []
    for again in (False, True):
        net = METHODS[method](model(), members=2, rows=rows, seed=0).train()
        net.loss(x, y)  # before it is enabled
        if again:
            net.network.gradient_checkpointing_enable({"use_reentrant": reentrant})
        net.loss(x, y).backward()
        gradients.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("members", [1, 3])
def test_a_layer_without_gradients_is_an_error(members: int) -> None:
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    net = mt.lora(Blocks(reentrant=True), members, 2, layers=["blocks.0.out"], seed=0, task="classification").train()
    with pytest.raises(ValueError, match=r"layer 'blocks.0.out' \(Linear\) would not learn: .*use_reentrant=False"):
        net.loss(x, y)
    net.loss(x.requires_grad_(), y).backward()
    assert net.get_submodule("blocks.0.out").A.grad is not None or net.get_submodule("blocks.0.out").B.grad is not None
    late = mt.lora(Blocks(reentrant=False), members, 2, layers=["blocks.0.out"], seed=0, task="classification").train()
    late.loss(x.detach(), y).backward()
    assert late.get_submodule("blocks.0.out").B.grad.abs().sum() > 0


def test_a_layer_called_through_another_object_is_an_error() -> None:
    class Holder:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

    body = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    hides = Of(lambda net, x: net.last(net.holder.module(x)), body=body, last=nn.Linear(6, 3), holder=Holder(body))
    net = mt.batch_ensemble(hides, 2, seed=0).eval()
    with pytest.raises(ValueError, match=r"layer 'body.0' \(Linear\) is called through an object that is not a module"):
        net(torch.randn(4, 4, 4))


def test_torch_is_not_patched_while_a_network_runs() -> None:
    module: Any = torch.utils.checkpoint
    before = dict(vars(module))
    seen = []
    net = mt.batch_ensemble(Blocks(reentrant=True), 3, seed=0, task="classification")
    net.get_submodule("last").register_forward_hook(lambda *_: seen.append(vars(module) == before))
    net.loss(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)).backward()
    assert seen and all(seen) and vars(module) == before
