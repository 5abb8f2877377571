"""The draw engine: counts, seeds, fallbacks, memory and losses."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.deployment.engines import TorchEngine
from multitudes.deployment.graph_draws import draw_function, noise_of
from multitudes.networks.devices import Meter, free_bytes, in_bytes
from multitudes.networks.stochastic import Stochastic
from tests.zoo.cases import CLASSES, NETWORKS
from tests.zoo.drawing_cases import Jitter
from tests.zoo.of_parts import Of


class OfTorch(Stochastic):
    """Draws by itself from torch's own random state."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.expects else x + torch.randn(x.shape)


def residue() -> nn.Module:
    """Writes the noise into a tensor that all draws share, which vmap cannot do."""
    return Of(lambda net, x: (x * 2).add_(net.jitter(x)), jitter=Jitter())


def branch() -> nn.Module:
    """Branches on the values, which vmap cannot do."""
    return Of(lambda net, x: x if x.abs().max().item() < 1e6 else -x)


def remembering(net: nn.Module, x: Tensor) -> Tensor:
    net.last = x.detach()
    return x


def averaging(net: nn.Module, x: Tensor) -> Tensor:
    net.total = x.detach().mean(0)
    return x


def counting(net: nn.Module, x: Tensor) -> Tensor:
    net.total += 1
    return x


def with_buffer(forward: Callable[..., Tensor], buffer: Tensor) -> nn.Module:
    layer = Of(forward)
    layer.register_buffer("total", buffer)
    return layer


class Scaled(Stochastic):
    """Multiplies the whole batch by one factor."""

    noise = "weights"

    def forward(self, x: Tensor) -> Tensor:
        return x if self.expects else x * self.uniform((), like=x)


def small(*middle: nn.Module) -> mt.Multitude:
    torch.manual_seed(0)
    return mt.Multitude(nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 3))).eval()


def convolutional() -> mt.Multitude:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace=True), nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    return mt.mc_dropout(model).eval()


def by(runner: str, net: mt.Multitude) -> mt.Multitude:
    other = copy.deepcopy(net)
    other._draw_cache.runner = runner
    return other


# -- how many ----------------------------------------------------------------------------------------------


def test_evaluation_makes_draws_and_training_one() -> None:
    net, x = small(Jitter()), torch.randn(5, 4)
    assert net(x).shape == (20, 5, 3)
    assert net(x, draws=7).shape == (7, 5, 3)
    assert net.predict(x, draws=7).members == 7
    net.train()
    assert net(x).shape == (1, 5, 3)
    net.training_draws = 4
    assert net(x).shape == (4, 5, 3)


def test_members_come_first() -> None:
    net = mt.deep_ensemble(small(Jitter()), 3).eval()
    x = torch.randn(5, 4)
    drawn = net(x, draws=1000, seed=0).unflatten(0, (3, 1000))
    for index in range(3):
        member = net.member(index)
        expected = member(x, draws=0)[0]  # the last layer is linear, so the mean of the draws is the expectation
        error = drawn[index].std(0) / math.sqrt(1000)
        assert ((drawn[index].mean(0) - expected).abs() < 5 * error).all()


def test_members_draw_their_own_numbers() -> None:
    one = small(Jitter())
    net = mt.fuse([one.network, one.network]).eval()  # the same weights twice
    x = torch.randn(5, 4)
    for runner in ("loop", "packed", "vmapped"):
        net.runner = runner
        first, second = net(x, draws=6, seed=1).unflatten(0, (2, 6))
        assert not torch.isclose(first, second).any()


def test_zero_draws_are_expectations() -> None:
    net, x = small(Jitter()), torch.randn(5, 4)
    plain = net.network[2](net.network[0](x))
    for training in (True, False):
        torch.testing.assert_close(net.train(training)(x, draws=0)[0], plain)


@pytest.mark.parametrize("draws", [-1, 2.5, True, "many"])
def test_a_wrong_count_of_draws_is_an_error(draws: object) -> None:
    net, x = small(Jitter()), torch.randn(5, 4)
    with pytest.raises(ValueError, match="draws must be a whole number"):
        net.predict(x, draws=draws)
    net.draws = draws
    with pytest.raises(ValueError, match="draws must be a whole number"):
        net(x)
    with pytest.raises(ValueError, match="seed=3 is for evaluation"):
        net.train()(x, seed=3)


def test_draws_of_a_network_that_does_not_draw_are_an_error() -> None:
    net = mt.deep_ensemble(nn.Linear(4, 3), 2)
    x = torch.randn(5, 4)
    assert net(x, draws=0).shape == net(x, draws=1).shape == (2, 5, 3)
    for draws in (5, "auto"):
        with pytest.raises(ValueError, match="no layer that draws"):
            net.predict(x, draws=draws)


# -- seeds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [convolutional, lambda: small(OfTorch()), lambda: small(Jitter(), OfTorch())])
def test_draws_with_a_seed_are_repeatable_and_keep_torchs_state(build: Callable[[], mt.Multitude]) -> None:
    net = build()
    x = torch.randn(5, 3, 6, 6) if isinstance(net.network[0], nn.Conv2d) else torch.randn(5, 4)
    before = torch.get_rng_state()
    first = net(x, draws=6, seed=3)
    torch.testing.assert_close(net.predict(x, draws=6, seed=3).predictions, first, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.isclose(net(x, draws=6, seed=4), first).all()
    assert not torch.isclose(first[0], first[1]).all()


@pytest.mark.parametrize("draws", [1, 6])
def test_torchs_state_is_unchanged_during_draws_with_a_seed(draws: int) -> None:
    states: list[Tensor] = []
    net = mt.mc_dropout(small(nn.Dropout(0.5)).network).eval()
    net.network[0].register_forward_hook(lambda *_: states.append(torch.get_rng_state()))
    before = torch.get_rng_state()
    net(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), draws=draws, seed=3)
    assert states and all(torch.equal(state, before) for state in states)


def test_draws_and_another_threads_random_numbers_are_independent() -> None:
    net, x = mt.mc_dropout(small(nn.Dropout(0.5)).network).eval(), torch.randn(5, 4)
    want = net(x, draws=6, seed=3)

    drawn: list[int] = []

    def draw_elsewhere(*_: object) -> None:
        drawn.append(3)
        thread = threading.Thread(target=torch.rand, args=(3,))
        thread.start()
        thread.join()

    net.network[0].register_forward_hook(draw_elsewhere)
    torch.manual_seed(5)
    assert torch.equal(net(x, draws=6, seed=3), want)
    assert not net._draw_cache.seeds_torch
    left = torch.rand(2)
    torch.manual_seed(5)
    for count in drawn:  # all that the thread has drawn, and nothing else
        torch.rand(count)
    assert drawn and torch.equal(torch.rand(2), left)


def test_without_a_seed_draws_follow_torchs_state() -> None:
    net, x = convolutional(), torch.randn(5, 3, 6, 6)
    torch.manual_seed(7)
    first, second = net(x), net(x)
    assert not torch.isclose(first, second).all()
    torch.manual_seed(7)
    assert torch.equal(net(x), first)


@pytest.mark.parametrize("memory", [1, "20kB", 1e9])
@pytest.mark.parametrize("build", [convolutional, lambda: small(OfTorch(), Jitter())])
def test_draws_depend_neither_on_the_runner_nor_on_the_chunks(
    build: Callable[[], mt.Multitude], memory: str | float
) -> None:
    net = build()
    x = torch.randn(5, 3, 6, 6) if isinstance(net.network[0], nn.Conv2d) else torch.randn(5, 4)
    want = by("one_by_one", net)(x, draws=9, seed=2)
    torch.testing.assert_close(net(x, draws=9, seed=2, memory=memory), want)
    torch.testing.assert_close(net(x, draws=3, seed=2), want[:3])


def test_every_runner_draws_the_same() -> None:
    net, x = mt.deep_ensemble(convolutional(), 3).eval(), torch.randn(5, 3, 6, 6)
    want = net(x, draws=4, seed=1)
    for runner in ("loop", "packed", "vmapped"):
        net.runner = runner
        torch.testing.assert_close(net(x, draws=4, seed=1), want, rtol=1e-4, atol=1e-5)


# -- sharing, falling back ---------------------------------------------------------------------------------


def test_layers_before_the_first_stochastic_layer_run_once() -> None:
    net = mt.mc_dropout(NETWORKS["resnet"].model(), 0.2, ["fc"], example=torch.zeros(2, 3, 8, 8)).eval()
    calls = {"conv1": 0, "fc.layer": 0}
    for name in calls:
        net.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.__setitem__(name, calls[name] + 1))
    x = torch.randn(4, 3, 8, 8)
    assert net(x, draws=16).shape == (16, 4, CLASSES)
    assert calls == {"conv1": 4, "fc.layer": 4}  # the first time, two draws are measured, and compared with one alone
    net(x, draws=16)
    assert calls == {"conv1": 5, "fc.layer": 5}


def test_out_of_memory_during_verification_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, asked, randn = convolutional(), torch.randn(5, 3, 6, 6), [], torch.randn

    def too_much(*args: Any, **kwargs: Any) -> Tensor:
        asked.append(args)
        if len(asked) == 2:  # one weight is moved by then
            raise torch.OutOfMemoryError("out of memory")
        return randn(*args, **kwargs)

    before = copy.deepcopy(net.state_dict())
    with monkeypatch.context() as patched:
        patched.setattr(torch, "randn", too_much)
        drawn = net(x, draws=3, seed=0)
    assert len(asked) == 2
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(drawn, net(x, draws=3, seed=0))


@pytest.mark.parametrize(
    ("layers", "culprit"),
    [
        ([residue()], "'1' .Of."),
        ([Jitter(), branch()], "'2' .Of."),
        ([Scaled(), branch()], "'2' .Of."),
    ],
)
def test_layers_that_vmap_cannot_run_are_named_once_and_run_one_by_one(layers: list[nn.Module], culprit: str) -> None:
    net, x = small(*layers), torch.randn(5, 4)
    with pytest.warns(UserWarning, match=f"vmap cannot run layer {culprit}.*one after the other"):
        got = net(x, draws=6, seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(net(x, draws=6, seed=2), got)
        want = by("one_by_one", net)(x, draws=6, seed=2)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(net(x, draws=6, seed=2, memory=1), want)


@pytest.mark.parametrize(
    ("layer", "written"),
    [
        (Of(remembering, last=None), "2.last"),
        (with_buffer(averaging, torch.zeros(8)), "2.total"),
        (with_buffer(counting, torch.zeros(())), "2.total"),
    ],
)
def test_a_network_that_writes_attributes_makes_draws_one_by_one(layer: nn.Module, written: str) -> None:
    net, x = small(Jitter(), layer), torch.randn(5, 4)
    alone = small(Jitter(), copy.deepcopy(layer))
    with pytest.warns(UserWarning, match=f"writes '{written}' as it runs, .* one after the other"):
        drawn = net(x, draws=6, seed=2)
    torch.testing.assert_close(drawn, by("one_by_one", alone)(x, draws=6, seed=2))
    for tensor in (getattr(net.network[2], "last", None), *net.buffers()):
        assert tensor is None or not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if "total" in written and layer.total.dim() == 0:
        assert float(net.network[2].total) == 6


def test_an_input_that_does_not_fit_is_an_error_without_a_warning() -> None:
    net = small(Jitter())
    with warnings.catch_warnings(), pytest.raises(ValueError, match="does not fit"):
        warnings.simplefilter("error")
        net(torch.randn(5, 7))
    assert net._draw_cache.runner == "vmapped"


def test_gradients_reach_the_input_through_draws() -> None:
    net, x = convolutional(), torch.randn(5, 3, 6, 6)
    gradients = []
    for runner in ("vmapped", "one_by_one"):
        x = x.detach().requires_grad_()
        by(runner, net)(x, draws=6, seed=2).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("members", [1, 2])
def test_draws_with_given_random_numbers_are_those_of_the_seed(members: int) -> None:
    """As CUDA graphs make them."""
    net, x = convolutional(), torch.randn(5, 3, 6, 6)
    net = mt.deep_ensemble(net, members).eval() if members > 1 else net
    plain = TorchEngine(net, None, x)
    noise = noise_of(plain, x, 6)
    noise.seed(7)
    noise.fill()
    with torch.no_grad():
        torch.testing.assert_close(draw_function(plain, x)(x, *noise.numbers), net(x, draws=6, seed=7))


# -- memory ------------------------------------------------------------------------------------------------


def test_the_meter_counts_simultaneous_tensors() -> None:
    given = torch.zeros(1000)
    with Meter() as meter:
        a = given + 1
        b = a * 2
        given.mul_(2)  # no memory of its own
        c = b.view(10, 100)
        assert meter.live == 8000
        del a
        assert meter.live == 4000
        del b, c
        assert meter.live == 0
    assert meter.peak == 8000


@pytest.mark.parametrize("budget", [6e5, 2e6])
@pytest.mark.parametrize("known", [False, True])
def test_draws_stay_within_the_memory_budget(budget: float, known: bool) -> None:
    net, x = convolutional(), torch.randn(16, 3, 16, 16)
    if known:  # the kind of input, and not the size
        with torch.no_grad():
            net(x[:3], draws=4)
    with torch.no_grad(), Meter() as one:
        net(x, draws=1)
    assert one.peak < budget
    for _ in range(2):  # while it is measured, and after
        with torch.no_grad(), Meter() as meter:
            drawn = net(x, draws=60, memory=budget)
        assert meter.peak < budget + 2 * drawn.nbytes  # the answers themselves


def test_sizes_are_parsed() -> None:
    assert (in_bytes("2GB"), in_bytes("1.5 gib"), in_bytes(4096)) == (2e9, 1.5 * 2**30, 4096)
    for wrong in ("2 apples", "GB", "-1GB", 0, "1.2.3MB", "IB"):
        with pytest.raises(ValueError, match="memory must be a size"):
            in_bytes(wrong)
    with pytest.raises(ValueError, match="^memory must be a size"):
        small(Jitter()).predict(torch.randn(2, 4), memory="much")
    with pytest.raises(ValueError, match="^seed must be a whole number"):
        small(Jitter()).predict(torch.randn(2, 4), seed="a")
    assert 1e6 < free_bytes(torch.device("cpu")) < 1e14


# -- the loss ----------------------------------------------------------------------------------------------


def squared_weights(network: nn.Module, scale: float = 1.0) -> Tensor:
    return scale * sum(p.square().sum() for p in network.parameters())


def test_the_divergence_is_divided_by_the_dataset_size() -> None:
    net, x, y = small(Scaled()).train(), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    net.divergences += (squared_weights,)
    total = sum(p.square().sum() for p in net.parameters())
    torch.testing.assert_close(net.kl(scale=3.0), 3 * total)
    torch.manual_seed(3)
    plain = net.loss(x, y)
    torch.manual_seed(3)
    torch.testing.assert_close(net.loss(x, y, dataset_size=50), plain + total / 50)
    for wrong in (0, -3, 1.5, True):
        with pytest.raises(ValueError, match="dataset_size"):
            net.loss(x, y, dataset_size=wrong)
    ensemble = mt.deep_ensemble(net, 3, init="pretrained", perturb=0.1)
    own = sum(squared_weights(ensemble.member(i)) for i in range(3))
    torch.testing.assert_close(ensemble.kl(), own)


def test_parameters_can_have_learning_rates_by_name() -> None:
    net = small(Jitter())
    groups = net.parameter_groups(lr=0.1, bias=0.5)
    assert [(len(group["params"]), group["lr"]) for group in groups] == [(2, 0.1), (2, 0.5)]
    groups = net.parameter_groups(lr=0.1, bias={"betas": (0.9, 0.99)}, weight={"lr": 0.5})
    assert [(group["lr"], group.get("betas")) for group in groups] == [(0.1, (0.9, 0.99)), (0.5, None)]
    with pytest.raises(ValueError, match="log_alpha"):
        net.parameter_groups(lr=0.1, log_alpha=0.5)
