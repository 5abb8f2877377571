"""Members that share weights, folded in evaluation: the tests run on a CPU what is for a GPU (`folding`)."""

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.core import folded_members
from multitudes.core.shared import MemberLayer, SharedMembers

MEMBERS = 3

Runs = list[str]
"""How members ran, one word for each run: folded or plain."""


@pytest.fixture
def folding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Inside, a CPU is taken for a GPU on which folded members are faster."""
    runs: Runs = []
    run, unfolded = folded_members.FoldedMembers._run, SharedMembers.unfolded

    def milliseconds(function: partial[Tensor]) -> float:
        before = list(runs)
        function()
        runs[:] = before
        return 1.0 if function.func.__name__ == "_run" else 2.0

    def noted(word: str, way: Callable[..., Tensor], *args: Any) -> Tensor:
        runs.append(word)
        return way(*args)

    def _run(*args: Any) -> Tensor:
        return noted("folded", run, *args)

    monkeypatch.setattr(folded_members, "on_gpu", lambda x: True)
    monkeypatch.setattr(folded_members, "milliseconds", milliseconds)
    monkeypatch.setattr(folded_members.FoldedMembers, "_run", _run)
    monkeypatch.setattr(SharedMembers, "unfolded", lambda *args: noted("plain", unfolded, *args))
    yield runs


class Residual(nn.Module):
    """Convolutions, norms, an addition, a token of its own, and a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.third = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.activation: nn.Module = nn.ReLU()
        self.shift = nn.Parameter(torch.randn(8, 1, 1))
        self.fc = nn.Linear(8, 4)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.norm(self.first(x)))
        x = x + self.third(self.activation(self.second(x))) * self.gain + self.shift
        return self.fc(x.mean((2, 3)))


METHODS: dict[str, Callable[[Callable[[], nn.Module]], SharedMembers]] = {
    "batch_ensemble": partial(mt.batch_ensemble, members=MEMBERS, seed=0),
    "masksembles": partial(mt.masksembles, members=MEMBERS, seed=0),
}

IMAGES = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def made(method: str) -> SharedMembers:
    return METHODS[method](Residual).eval()


def alone(net: SharedMembers, x: Any) -> Tensor:
    with torch.no_grad():
        return torch.stack([net.member(index)(x) for index in range(net.members)])


def folded(net: SharedMembers, x: Any, runs: Runs) -> Tensor:
    """Predictions of a run that was folded."""
    with torch.no_grad():
        net(x)  # what is to be found out is found out
        runs.clear()
        predictions = net(x)
    assert runs == ["folded"]
    return predictions


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.fc(x.mean(1))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.again = self.fc
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.fc(x).relu()).relu())


def up() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, groups=2), nn.ReLU(), nn.Flatten())


NETWORKS: dict[str, tuple[Callable[[], SharedMembers], tuple[int, ...]]] = {
    "batch_ensemble": (lambda: made("batch_ensemble"), (3, 8, 8)),
    "masksembles": (lambda: made("masksembles"), (3, 8, 8)),
    "one layer": (lambda: mt.batch_ensemble(nn.Linear(6, 2), members=MEMBERS), (6,)),
    "transposed": (lambda: mt.batch_ensemble(up(), members=MEMBERS), (3, 8, 8)),
    "a layer called twice": (lambda: mt.batch_ensemble(Twice(), members=MEMBERS), (6,)),
    "attention": (lambda: mt.batch_ensemble(Attends(), members=MEMBERS), (5, 4)),
    "own output layers": (lambda: mt.batch_ensemble(Residual, members=MEMBERS, own=["fc"]), (3, 8, 8)),
    "inputs alone": (lambda: mt.batch_ensemble(Residual, members=MEMBERS, sides="inputs"), (3, 8, 8)),
    "ViT": (lambda: mt.batch_ensemble(mt.models.vit(width=12, depth=1, heads=3), members=MEMBERS), (3, 32, 32)),
}


@pytest.mark.parametrize("runner", ["auto", "loop", "packed", "vmapped"])
@pytest.mark.parametrize("name", NETWORKS)
def test_folded_members_predict_what_each_does_alone(name: str, runner: str, folding: Runs) -> None:
    build, shape = NETWORKS[name]
    net = build().eval()
    x = torch.randn(5, *shape)
    folded(net, x, folding)
    assert net._folded.members is not None
    net._folded.members.runner = runner
    torch.testing.assert_close(folded(net, x, folding), alone(net, x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(folded(net, x[:1], folding), alone(net, x[:1]), rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(net(x), alone(net, x), rtol=1e-4, atol=1e-5)


# -- nothing is out of date --------------------------------------------------------------------------------


def step(optimizer: Callable[..., torch.optim.Optimizer], net: SharedMembers) -> None:
    net.train()
    made = optimizer(net.parameters(), lr=0.1)
    net.loss(IMAGES, torch.arange(5) % 4).backward()
    made.step()
    net.eval()


def load(net: SharedMembers, assign: bool) -> None:
    net.load_state_dict({key: value * 1.5 for key, value in net.state_dict().items()}, assign=assign)


def in_place(net: SharedMembers) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)


def through_data(net: SharedMembers) -> None:
    for parameter in net.parameters():
        parameter.data.mul_(1.5)


def through_numpy(net: SharedMembers) -> None:
    for parameter in net.parameters():
        numbers = parameter.detach().numpy()
        numbers *= 1.5


def data_assigned(net: SharedMembers) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data * 1.5


def statistics(net: SharedMembers) -> None:
    net.train()
    with torch.no_grad():
        net(IMAGES * 3)
    net.eval()


def buffer_assigned(net: SharedMembers) -> None:
    net.network.norm.running_mean = torch.ones(8)


def replaced(net: SharedMembers) -> None:
    net.network.activation = nn.Tanh().eval()


def member_layer_replaced(net: SharedMembers) -> None:
    net.network.second = nn.Conv2d(8, 8, 3, padding=1, groups=2).eval()


def setting(net: SharedMembers) -> None:
    net.network.gain = 2.5


def setting_of_a_layer(net: SharedMembers) -> None:
    net.network.third.layer.padding_mode = "circular"
    net.network.third.layer._reversed_padding_repeated_twice = [1, 1, 1, 1]


def factors(net: SharedMembers) -> None:
    second = net.network.second
    own = second.r if hasattr(second, "r") else second.masks
    own.data[1].mul_(-2.0)


def setting_of_a_norm(net: SharedMembers) -> None:
    net.network.norm.eps = 0.5


CHANGES: dict[str, Callable[[SharedMembers], None]] = {
    "SGD": partial(step, torch.optim.SGD),
    "fused Adam": partial(step, partial(torch.optim.Adam, fused=True)),
    "load_state_dict": partial(load, assign=False),
    "load_state_dict, assigned": partial(load, assign=True),
    "in place": in_place,
    "through .data": through_data,
    "through NumPy": through_numpy,
    ".data assigned": data_assigned,
    "statistics of a norm": statistics,
    "a buffer assigned": buffer_assigned,
    "a module replaced": replaced,
    "a layer of members replaced": member_layer_replaced,
    "a setting": setting,
    "a setting of a layer": setting_of_a_layer,
    "a setting of a norm": setting_of_a_norm,
    "factors of one member": factors,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", METHODS)
def test_what_changes_is_seen_by_the_next_prediction(method: str, change: str, folding: Runs) -> None:
    net = made(method)
    before = folded(net, IMAGES, folding)
    CHANGES[change](net)
    folding.clear()
    with torch.no_grad():
        after = net(IMAGES)
    assert folding[-1] == "folded"
    torch.testing.assert_close(after, alone(net, IMAGES), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(after, before, rtol=1e-2)


@pytest.mark.parametrize("method", METHODS)
def test_another_dtype_and_back(method: str, folding: Runs) -> None:
    net = made(method)
    folded(net, IMAGES, folding)
    double = folded(net.double(), IMAGES.double(), folding)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double, alone(net, IMAGES.double()))
    torch.testing.assert_close(folded(net.float(), IMAGES, folding), alone(net, IMAGES), rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_computed_since_is_not_folded(folding: Runs) -> None:
    net = made("batch_ensemble")
    folded(net, IMAGES, folding)
    nn.utils.parametrizations.weight_norm(net.network.third.layer)
    net.network.third.layer.parametrizations.weight.original0.data.mul_(2.0)
    folding.clear()
    with torch.no_grad():
        torch.testing.assert_close(net(IMAGES), alone(net, IMAGES), rtol=1e-4, atol=1e-5)
    assert folding == ["plain"]


# -- nothing is left ---------------------------------------------------------------------------------------


def test_copies_files_and_registries_know_nothing_of_it(folding: Runs, tmp_path: Path) -> None:
    net = made("batch_ensemble")
    keys, parameters = list(net.state_dict()), list(map(id, net.parameters()))
    modules = list(map(id, net.modules()))
    want = folded(net, IMAGES, folding)
    assert list(net.state_dict()) == keys
    assert list(map(id, net.parameters())) == parameters
    assert list(map(id, net.modules())) == modules
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert twin._folded.members is None and not twin._folded.right
        torch.testing.assert_close(folded(twin, IMAGES, folding), want)
    forgetful = copy.deepcopy(net)
    forgetful.forget()
    net._tiles.clear()  # the ways to run, which are not of this
    assert len(pickle.dumps(net)) == len(pickle.dumps(forgetful))
    mt.save(net, tmp_path / "net")
    torch.testing.assert_close(folded(mt.load(tmp_path / "net", Residual()).eval(), IMAGES, folding), want)


def test_the_network_is_as_it_was_where_an_input_fails(folding: Runs) -> None:
    net = made("batch_ensemble")
    want = folded(net, IMAGES, folding)
    with torch.no_grad(), pytest.raises(ValueError, match="does not fit"):
        net(torch.randn(5, 4, 8, 8))
    assert sum(isinstance(module, MemberLayer) for module in net.modules()) == 4
    assert torch.equal(folded(net, IMAGES, folding), want)


# -- where they run as they do else ------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_each_member(method: str, folding: Runs) -> None:
    net = made(method)
    folded(net, IMAGES, folding)
    folding.clear()
    x, own = IMAGES.clone().requires_grad_(), IMAGES.clone().requires_grad_()
    net(x).square().sum().backward()
    assert folding == ["plain"]
    sum(net.member(index)(own).square().sum() for index in range(MEMBERS)).backward()
    torch.testing.assert_close(x.grad, own.grad, rtol=1e-4, atol=1e-5)
    weight = net.network.third.layer.weight
    assert weight.grad is not None and bool(weight.grad.any())


def test_training_runs_by_the_layers_of_members(folding: Runs) -> None:
    net = made("batch_ensemble").train()
    with torch.no_grad():
        net(IMAGES)
        net.eval()
        net.network.norm.train()
        net(IMAGES)
    assert folding == ["plain", "plain"]


def test_hooks_see_what_they_saw(folding: Runs) -> None:
    net = made("batch_ensemble")
    folded(net, IMAGES, folding)
    seen = []
    handle = net.network.second.register_forward_hook(lambda _, __, y: seen.append(y.shape))
    folding.clear()
    with torch.no_grad():
        net(IMAGES)
    assert folding == ["plain"] and seen
    handle.remove()
    folded(net, IMAGES, folding)


def test_what_runs_once_for_all_members_still_does(folding: Runs) -> None:
    net = mt.heads(Residual(), members=MEMBERS).eval()
    with torch.no_grad():
        torch.testing.assert_close(net(IMAGES), alone(net, IMAGES), rtol=1e-4, atol=1e-5)
    last = mt.batch_ensemble(Residual, members=MEMBERS, layers=["fc"]).eval()
    with torch.no_grad():
        torch.testing.assert_close(last(IMAGES), alone(last, IMAGES), rtol=1e-4, atol=1e-5)
    assert set(folding) == {"plain"}


class Counts(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(6, 6), nn.Linear(6, 2), how
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "attribute":
            self.calls += 1
        elif self.how == "buffer in place":
            self.seen.add_(1.0)
        else:
            self.seen = self.seen + 1.0
        return self.last(self.first(x).relu())


@pytest.mark.parametrize("how", ["attribute", "buffer in place", "buffer assigned"])
def test_a_network_that_writes_is_not_folded(how: str, folding: Runs) -> None:
    net, plain = (mt.batch_ensemble(Counts(how), members=MEMBERS, seed=0).eval() for _ in range(2))
    x = torch.randn(5, 6)
    with torch.no_grad():
        for _ in range(2):
            net(x)
            SharedMembers.unfolded(plain, x)
        folding.clear()
        net(x)
        assert folding == ["plain"]
        SharedMembers.unfolded(plain, x)
    assert net.network.calls == plain.network.calls
    assert torch.equal(net.network.seen, plain.network.seen)


def test_the_way_that_is_slower_is_left(folding: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    net = made("batch_ensemble")
    monkeypatch.setattr(folded_members, "milliseconds", lambda way: 2.0 if way.func.__name__ == "_run" else 1.0)
    with torch.no_grad():
        net(IMAGES)
        folding.clear()
        net(IMAGES)
    assert folding == ["plain"]


def test_too_little_memory_leaves_the_plain_way(folding: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    net = made("batch_ensemble")
    folded(net, IMAGES, folding)

    def full(*args: Any) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(folded_members.FoldedMembers, "_run", full)
    with torch.no_grad():
        torch.testing.assert_close(net(IMAGES), alone(net, IMAGES), rtol=1e-4, atol=1e-5)
    assert not any(net._folded.faster.values())


def test_one_proof_serves_batches_of_all_sizes(folding: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = []
    proven = folded_members.FoldedMembers._is_right
    monkeypatch.setattr(
        folded_members.FoldedMembers, "_is_right", lambda *args: proofs.append(len(args[2])) or proven(*args)
    )
    net = made("batch_ensemble")
    with torch.no_grad():
        for rows in (4, 2, 5, 3):
            net(IMAGES[:rows])
    assert proofs == [4]


class Mixes(nn.Module):
    """Its rows see each other, by a number that Python looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x if x.sum() > 0 else -x)


@pytest.mark.filterwarnings("ignore:the members' rows cannot lie side by side")
def test_control_flow_on_values_is_not_folded(folding: Runs) -> None:
    net = mt.batch_ensemble(Mixes(), members=MEMBERS).eval()
    x = torch.randn(5, 6)
    with torch.no_grad():
        torch.testing.assert_close(net(x), alone(net, x))
        folding.clear()
        net(x)
    assert folding == ["plain"]


def test_on_a_cpu_nothing_is_folded() -> None:
    net = made("batch_ensemble")
    with torch.no_grad():
        net(IMAGES)
    assert net._folded.members is None
