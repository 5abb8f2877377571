"""Small members on a CPU: packed where a rule of sizes says so, and else one after the other."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.ensemble.runners import independent as module
from multitudes.ensemble.runners.member_size import MANY, MOST_BYTES, MOST_KERNELS, MOST_MAPS, MOST_WEIGHTS
from tests.zoo.hard_networks import HARD
from tests.zoo.of_parts import Of


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def several(build: Callable[[], nn.Module] = perceptron, members: int = MANY) -> mt.Members:
    return mt.fuse([build() for _ in range(members)]).eval()


def chosen(net: mt.Members, x: Tensor) -> str:
    with torch.no_grad():
        return used(net, x)


def used(net: mt.Members, x: Tensor) -> str:
    runner = net._runners.choose(net._runner, x)
    return "loop" if runner is None else runner.name


def alone(net: mt.Members, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.stack([net.member(index)(x) for index in range(net.members)])


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("build", [perceptron, lambda: mt.models.small_cnn(channels=1, size=8)])
def test_small_members_run_packed_and_predict_what_each_does_alone(build: Callable[[], nn.Module], rows: int) -> None:
    net = several(build)
    x = torch.randn(rows, 16) if build is perceptron else torch.randn(rows, 1, 8, 8)
    assert chosen(net, x) == "packed"
    with torch.no_grad():
        torch.testing.assert_close(net(x), alone(net, x))
    torch.testing.assert_close(net.predict(x).predictions, alone(net, x))


def maps(last: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), last)


BOUNDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int, int]] = {
    "weights": (lambda: nn.Linear(128, 128, bias=False), (128,), 0, 4 * 128**2, MOST_WEIGHTS),
    "kernels": (lambda: nn.Conv2d(64, 64, 3, bias=False), (64, 4, 4), 0, 4 * 9 * 64**2, MOST_KERNELS),
    "activation": (lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU()), (16,), MANY, 4 * 64, MOST_BYTES),
    "map": (maps(nn.ReLU()), (1, 32, 32), 2, 4 * 8 * 32**2, MOST_BYTES),
    "pooled map": (maps(nn.MaxPool2d(2)), (1, 32, 32), 2, 4 * 8 * 32**2, MOST_MAPS),
}
"""A member, the shape of a row, the number of members (0: as many as fit), bytes per member (and row), the limit."""


@pytest.mark.parametrize("case", BOUNDS)
def test_members_are_packed_up_to_a_number_of_bytes(case: str) -> None:
    build, shape, few, each, limit = BOUNDS[case]
    for extra, runner in ((0, "packed"), (1, "loop")):
        members, rows = (few, limit // (each * few) + extra) if few else (limit // each + extra, 2)
        assert chosen(several(build, members), torch.zeros(rows, *shape)) == runner


def test_few_members_are_packed_where_they_convolve_several_rows() -> None:
    few, image = several(members=MANY - 1), several(lambda: mt.models.small_cnn(channels=1, size=8), MANY - 1)
    assert chosen(few, torch.randn(9, 16)) == "loop"
    assert chosen(image, torch.randn(1, 1, 8, 8)) == "loop"
    assert chosen(image, torch.randn(2, 1, 8, 8)) == "packed"


@pytest.mark.parametrize("slow", [nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 1)])
def test_members_with_convolutions_that_are_slow_when_packed_run_one_after_the_other(slow: nn.Module) -> None:
    x = torch.zeros(2, 4, 5, 5)
    assert chosen(several(lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), slow)), x) == "loop"
    few = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)]
    assert chosen(several(lambda: nn.Sequential(*few, nn.Conv2d(4, 4, 1))), x) == "packed"


def test_small_members_train_packed_and_in_half_precision_run_one_after_the_other() -> None:
    net = several()
    x = torch.randn(4, 16)
    assert used(net, x) == used(net.train(), x) == "packed"
    with torch.autocast("cpu", torch.bfloat16):
        assert chosen(net, x) == "loop"
    assert chosen(net.eval().bfloat16(), x.bfloat16()) == "loop"
    assert chosen(net.float(), x) == "packed"
    drawing = mt.mc_dropout(nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    assert chosen(mt.deep_ensemble(drawing, members=MANY).eval(), x) == "loop"


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x)


def branch(net: Of, x: Tensor) -> Tensor:
    y = net.fc(x)
    return y if y.sum() > 0 else -y


UNPACKED: list[Callable[[], nn.Module]] = [
    lambda: Of(branch, fc=nn.Linear(16, 3)),
    lambda: Of(accumulate, fc=nn.Linear(16, 3)),
    lambda: mt.Multitude(nn.LSTM(16, 3), output=0).network,
    Remembers,
]


def accumulate(net: Of, x: Tensor) -> Tensor:
    return net.fc(x).cumsum(1)


@pytest.mark.parametrize("build", UNPACKED)
def test_what_cannot_be_packed_or_has_no_rule_runs_one_after_the_other_without_a_warning(
    build: Callable[[], nn.Module],
) -> None:
    net = several(build)
    x = torch.randn(4, 16)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        got = net(x)
        assert used(net, x) == "loop"
        for index in range(net.members):
            want = net.member(index)(x)
            assert torch.equal(got[index], want[0] if isinstance(want, tuple) else want)


def test_what_code_writes_is_written_once_for_each_call() -> None:
    net = several(Remembers, 2)
    with torch.no_grad():
        net(torch.randn(4, 16))
    assert [net.member(index).calls for index in range(2)] == [1, 1]


@pytest.mark.filterwarnings("error")
def test_a_packed_network_that_is_wrong_is_not_used() -> None:
    build, shape = HARD["asks"]
    net = several(build)
    x = torch.randn(3, *shape)
    with torch.no_grad():
        torch.testing.assert_close(net(x), alone(net, x))
    assert chosen(net, x) == "loop"


def test_one_proof_serves_batches_of_all_sizes_above_one(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = []
    difference = module.difference
    monkeypatch.setattr(
        module, "difference", lambda *args, **own: proofs.append(args[2].name) or difference(*args, **own)
    )
    net = several()
    with torch.no_grad():
        for rows in (2, 5, 64):
            net(torch.randn(rows, 16))
        assert proofs == ["packed"]
        net(torch.randn(1, 16))  # code may squeeze a batch of one
        net(torch.randn(1, 16))
    assert proofs == ["packed", "packed"]


def test_a_hook_that_is_added_later_sees_each_member() -> None:
    net = several()
    x = torch.randn(4, 16)
    seen = []
    with torch.no_grad():
        net(x)
        for index in range(net.members):
            net.member(index)[0].register_forward_hook(lambda _, __, y, index=index: seen.append((index, y.shape)))
        got = net(x)
        assert seen == [(index, torch.Size([4, 64])) for index in range(net.members)]
        torch.testing.assert_close(got, alone(net, x))


def scale(net: Of, x: Tensor) -> Tensor:
    return net.fc(x) * net.gain


def test_a_setting_of_one_member_that_changes_counts_for_that_member_alone() -> None:
    net = several(lambda: nn.Sequential(Of(scale, fc=nn.Linear(16, 3), gain=1.0)))
    x = torch.randn(4, 16)
    with torch.no_grad():
        before = net(x)
        net.member(1)[0].gain = 3.0
        gains = torch.ones(MANY, 1, 1)
        gains[1] = 3.0
        torch.testing.assert_close(net(x), before * gains)
        assert chosen(net, x) == "loop"
        net.member(1)[0].gain = 1.0
        assert chosen(net, x) == "packed"
        torch.testing.assert_close(net(x), before)


def test_weights_are_read_at_every_call() -> None:
    net = several()
    x = torch.randn(4, 16)
    with torch.no_grad():
        net(x)
        for parameter in net.parameters():
            parameter.data.mul_(0.5)
        torch.testing.assert_close(net(x), alone(net, x))
    torch.testing.assert_close(net.double().predict(x.double()).predictions, alone(net, x.double()))


def test_transforms_traces_and_graphs_contain_the_loop() -> None:
    torch.compiler.reset()
    net = several()
    x = torch.randn(2, 4, 16)
    with torch.no_grad():
        got = torch.vmap(net)(x)
        traced = torch.jit.trace(net, x[0], check_trace=False)
        torch.testing.assert_close(got, torch.stack([alone(net, each) for each in x]))
        torch.testing.assert_close(traced(x[1]), alone(net, x[1]))
        assert torch.equal(torch.compile(net, backend="eager", fullgraph=True)(x[0]), alone(net, x[0]))
    assert not net._runners.fast
