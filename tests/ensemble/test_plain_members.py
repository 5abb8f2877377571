"""Members are plain networks: what trains, shards or changes one network right, does so with each member."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import multitudes as mt
from multitudes.ensemble.runners import template as runners_template

Parameters = Iterable[nn.Parameter]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(150, 8),
        nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3),
    )  # fmt: skip


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 2, 5, 5, generator=generator), torch.randint(3, (16,), generator=generator)


class Shampoo(Optimizer):
    """Gupta, Koren and Singer, 2018: each matrix's gradient between roots of its rows' and columns' second moments."""

    def __init__(self, params: Parameters, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad.reshape(len(p), -1)
                state = self.state[p]
                for side, product in (("left", gradient @ gradient.T), ("right", gradient.T @ gradient)):
                    state[side] = state.get(side, 1e-3 * torch.eye(len(product), dtype=product.dtype)) + product
                update = _root(state["left"]) @ gradient @ _root(state["right"])
                p.sub_(group["lr"] * update.view_as(p))


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T


class Lamb(Optimizer):
    """You et al., 2020: Adam's step, scaled to each tensor's norm."""

    def __init__(self, params: Parameters, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * p.grad
                state["v"] = 0.99 * state.get("v", torch.zeros_like(p)) + 0.01 * p.grad.square()
                mean, square = state["m"] / (1 - 0.9 ** state["step"]), state["v"] / (1 - 0.99 ** state["step"])
                update = mean / (square.sqrt() + 1e-6) + 0.01 * p
                p.sub_(group["lr"] * p.norm().clamp(1e-3, 10) / update.norm() * update)


def decayed(params: Parameters) -> Optimizer:
    """The usual rule: no weight decay for biases and norms."""
    params = list(params)
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer | list[Optimizer]]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, weight_decay=1e-2),
    "adamw": decayed,
    "muon": lambda params: _muon_and_adam(list(params)),
    "adafactor": lambda params: torch.optim.Adafactor(params, 1e-2),
    "shampoo": lambda params: Shampoo(params, 0.05),
    "lamb": lambda params: Lamb(params, 0.02),
}


def _muon_and_adam(params: list[nn.Parameter]) -> list[Optimizer]:
    """Matrices by Muon, the rest by Adam, as Muon's authors advise."""
    return [
        torch.optim.Muon([p for p in params if p.ndim == 2], 1e-2),
        torch.optim.Adam([p for p in params if p.ndim != 2], 1e-2),
    ]


def trained(parts: list[nn.Module], loss: Callable[[Tensor, Tensor], Tensor], make: Callable[..., Any]) -> None:
    made = make([p for part in parts for p in part.parameters()])
    optimizers = made if isinstance(made, list) else [made]
    for step in range(10):
        x, y = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(x.to(torch.float64), y).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("runner", ["auto", "packed", "vmapped"])
def test_each_member_is_trained_as_it_would_be_alone(name: str, runner: str) -> None:
    net = mt.deep_ensemble(network(), members=3, seed=0).double().train()
    alone = [copy.deepcopy(net.member(index)) for index in range(3)]
    before = copy.deepcopy(alone)
    net.runner = runner
    trained([net], net.loss, OPTIMIZERS[name])
    for index, member in enumerate(alone):
        trained([member], lambda x, y, member=member: F.cross_entropy(member(x), y), OPTIMIZERS[name])
        for key, want in member.state_dict().items():
            torch.testing.assert_close(net.member(index).state_dict()[key], want, rtol=1e-6, atol=1e-8)
    moved = [(net.member(0)[4].weight - before[0][4].weight).abs().max(), net.member(0)[4].weight.abs().max()]
    assert all(value > 1e-4 for value in moved)


def test_an_optimizer_that_looks_at_all_parameters_at_once_trains_one_member() -> None:
    net = mt.deep_ensemble(network(), members=2, seed=0).double().train()
    alone = copy.deepcopy(net.member(1))

    def fitted(member: nn.Module) -> nn.Module:
        optimizer = torch.optim.LBFGS(member.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        x, y = batch(0)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(member(x.double()), y)
            loss.backward()
            return loss

        for _ in range(10):
            optimizer.step(closure)
        return member

    for index in range(2):
        fitted(net.member(index))
    fitted(alone)
    for key, want in alone.state_dict().items():
        torch.testing.assert_close(net.member(1).state_dict()[key], want, rtol=1e-6, atol=1e-8)
    x = batch(1)[0].double()
    torch.testing.assert_close(net.eval()(x)[1], alone.eval()(x))


def test_members_share_a_frozen_backbone_and_save_it_once(tmp_path: Path) -> None:
    model = network()
    for layer in model[:4]:
        layer.requires_grad_(False)
    model[4].requires_grad_(False)
    net = mt.deep_ensemble(model, members=4, init="heads", heads=["7"], seed=0)
    sizes = {id(p): p.nbytes for p in net.parameters()}
    backbone = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    head = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert sum(sizes.values()) == backbone + 4 * head
    path = mt.save(net, tmp_path / "net.safetensors")
    loaded = mt.load(path)
    assert path.stat().st_size < backbone + 4 * head + 40_000
    assert loaded.member(3)[4].weight is loaded.member(0)[4].weight
    moved = copy.deepcopy(net).double()
    assert moved.member(3)[4].weight is moved.member(0)[4].weight
    x = batch(0)[0]
    torch.testing.assert_close(loaded.eval()(x), net.eval()(x))


def test_shared_parameters_are_not_trained_unless_each_member_has_its_own() -> None:
    model = network()
    model[0].requires_grad_(False)
    net = mt.deep_ensemble(model, members=2, init="heads", heads=["7"], seed=0).train()
    x, y = batch(0)
    net.loss(x, y).backward()
    net.member(0)[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"parameter '0\.weight' was frozen, so all members share it.*unshare"):
        net.loss(x, y)
    net.unshare()
    assert net.member(1)[0].weight is not net.member(0)[0].weight
    net.requires_grad_(True)
    net.loss(x, y).backward()
    assert net.member(1)[0].weight.grad is not None
    assert not torch.equal(net.member(1)[0].weight.grad, net.member(0)[0].weight.grad)


SHARDED = """
import sys
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import multitudes as mt
from multitudes.ensemble.runners import template as runners_template

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
net = mt.deep_ensemble(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)), members=3, seed=0)
alone = [mt.deep_ensemble(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)), members=3, seed=0).member(i)
         for i in range(3)]
mesh = init_device_mesh("cpu", (2,))
for layer in list(net.modules()):
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 8, generator=generator), torch.randint(3, (16,), generator=generator)
    half = slice(8 * rank, 8 * rank + 8)
    optimizer.zero_grad()
    net.loss(x[half], y[half]).backward()
    optimizer.step()
    for member in alone:  # the mean over both processes is that over the whole batch
        member.zero_grad()
        F.cross_entropy(member(x), y).backward()
        with torch.no_grad():
            for p in member.parameters():
                p -= 0.1 * p.grad
for index, member in enumerate(alone):
    for name, want in member.named_parameters():
        got = net.member(index).get_parameter(name).full_tensor()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
dist.destroy_process_group()
print("equal")
"""


@pytest.mark.slow
def test_members_are_sharded_layer_by_layer_in_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHARDED]
    both = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for process in both:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-2000:]
        assert output.strip() == "equal"


@pytest.mark.parametrize("runner", ["packed", "vmapped"])
def test_a_frozen_parameter_that_one_member_replaces_is_its_own(runner: str) -> None:
    model = network().eval()
    model[4].requires_grad_(False)
    net = mt.deep_ensemble(model, members=3, init="heads", heads=["7"], seed=0).eval()
    assert net.member(2)[4].weight is net.member(0)[4].weight
    net.runner = runner
    x, _ = batch(0)
    net(x)
    net.member(2)[4].weight = nn.Parameter(torch.rand(8, 150), requires_grad=False)
    torch.testing.assert_close(net(x), torch.stack([net.member(index)(x) for index in range(3)]))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("mixing", (torch.eye(4) * 2).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.sparse.mm(self.mixing, x.T).T)


@pytest.mark.parametrize("runner", ["packed", "vmapped"])
def test_a_sparse_buffer_is_the_same_in_all_members_or_they_run_one_after_the_other(runner: str) -> None:
    net = mt.fuse([Sparse() for _ in range(3)]).eval()
    net.runner = runner
    x = torch.randn(5, 4)

    def alone() -> Tensor:
        return torch.stack([net.member(index)(x) for index in range(3)])

    torch.testing.assert_close(net(x), alone())
    for member in net.network:
        member.mixing.mul_(3)  # type: ignore[operator]
    torch.testing.assert_close(net(x), alone())
    net.member(1).mixing.mul_(3)  # type: ignore[operator]
    with pytest.raises(ValueError, match="'mixing'.*differs between members"):
        net(x)
    net.runner = "auto"
    torch.testing.assert_close(net(x), alone())


@pytest.mark.parametrize("runner", ["packed", "vmapped"])
def test_setting_the_same_runner_again_makes_nothing_anew(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    template = runners_template.Template.__init__
    monkeypatch.setattr(
        runners_template.Template, "__init__", lambda self, networks: made.append(1) or template(self, networks)
    )
    net = mt.deep_ensemble(network().eval(), members=2, seed=0).eval()
    x, _ = batch(0)
    for _ in range(3):
        net.runner = runner
        net(x)
    assert len(made) == 1


class Constants(nn.Module):
    """A network with numbers that are neither parameters nor buffers, and a method beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)
        self.last = nn.Linear(8, 3)
        self.scale = torch.tensor(1.5)
        self.scales = np.array([1.0, 2.0])

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale * float(self.scales[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scaled(self.first(x)).tanh())


def _with_biases(member: Any, index: int) -> None:
    member.first.bias = nn.Parameter(torch.full((8,), 1.0 + index))


def _without_bias(member: Any, index: int) -> None:
    member.last.bias = None


def _scaled_tensor(member: Any, index: int) -> None:
    member.scale.fill_(7.0)


def _other_numbers(member: Any, index: int) -> None:
    member.scale.data = torch.tensor(7.0)


def _scaled_array(member: Any, index: int) -> None:
    member.scales[1] = 7.0


@pytest.mark.parametrize("change", [_with_biases, _without_bias, _scaled_tensor, _other_numbers, _scaled_array])
@pytest.mark.parametrize("runner", ["packed", "vmapped"])
def test_runners_follow_what_changes_in_members_in_place(runner: str, change: Callable[[Any, int], None]) -> None:
    net = mt.deep_ensemble(Constants(), members=3, seed=0).eval()
    net.runner = runner
    x = torch.randn(5, 4)
    before = net(x)
    for index in range(3):
        change(net.member(index), index)
    alone = torch.stack([net.member(index)(x) for index in range(3)])
    assert not torch.allclose(before, alone)
    torch.testing.assert_close(net(x), alone)


@pytest.mark.parametrize("runner", ["packed", "vmapped"])
def test_runners_follow_a_method_of_the_class_that_is_replaced(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = mt.deep_ensemble(Constants(), members=3, seed=0).eval()
    net.runner = runner
    x = torch.randn(5, 4)
    net(x)
    monkeypatch.setattr(Constants, "scaled", lambda self, x: x / 10)
    torch.testing.assert_close(net(x), torch.stack([net.member(index)(x) for index in range(3)]))


def frozen_trunk() -> mt.Members:
    model = network()
    model[4].requires_grad_(False)
    return mt.deep_ensemble(model, members=3, init="heads", heads=["7"], seed=0).eval()


@pytest.mark.parametrize("assign", [False, True])
def test_loading_gives_members_their_own_parameters_where_these_differ(assign: bool) -> None:
    trained = frozen_trunk().unshare().requires_grad_()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter))
    net = frozen_trunk()
    net.load_state_dict(trained.state_dict(), assign=assign)
    x, _ = batch(0)
    torch.testing.assert_close(net(x), trained(x))
    assert net.member(2)[4].weight is not net.member(0)[4].weight
    again = frozen_trunk()
    again.load_state_dict(frozen_trunk().state_dict(), assign=assign)
    assert again.member(2)[4].weight is again.member(0)[4].weight


def test_parameters_that_members_share_are_not_trained_in_evaluation_mode_either() -> None:
    net = frozen_trunk()
    net.member(1)[4].requires_grad_(True)
    x, y = batch(0)
    with pytest.raises(ValueError, match=r"'4\.weight' was frozen.*unshare"):
        net.loss(x, y)
    with torch.no_grad():
        assert net(x).shape == (3, 16, 3)


def test_weights_that_a_network_ties_stay_tied_when_members_get_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    model[0].requires_grad_(False)
    net = mt.deep_ensemble(model, members=2, seed=0).unshare()
    assert net.member(0)[0].weight is not net.member(1)[0].weight
    assert all(net.member(index)[0].weight is net.member(index)[2].weight for index in range(2))
