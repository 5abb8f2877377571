"""Members that share no weight: stored stacked, run by three runners, each learning as it would alone."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import multitudes as mt
from tests.cases import CLASSES, NETWORKS, Cnn

RUNNERS = ("loop", "packed", "stacked")
EVERY_NETWORK = pytest.mark.parametrize("network", list(NETWORKS))


def trained(network: str, count: int = 3) -> list[nn.Module]:
    return [NETWORKS[network].model(seed=seed) for seed in range(count)]


@EVERY_NETWORK
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("training", [False, True])
def test_fused_networks_equal_the_networks_one_by_one(network: str, runner: str, training: bool) -> None:
    models = [model.train(training) for model in trained(network)]
    net = mt.fuse(models)
    net.runner = runner
    x, _ = NETWORKS[network].batch()
    together = net(x)
    for index, model in enumerate(models):
        torch.testing.assert_close(together[index], model(x), rtol=1e-5, atol=1e-5)
    for name, buffer in net.named_buffers():  # running statistics have moved alike
        want = torch.stack([dict(model.named_buffers())[name] for model in models])
        torch.testing.assert_close(buffer, want, rtol=1e-5, atol=1e-5)


@EVERY_NETWORK
def test_member_reverses_fuse(network: str) -> None:
    models = trained(network)
    net = mt.fuse(models)
    assert list(net.state_dict()) == list(models[0].state_dict())
    for index, model in enumerate(models):
        member = net.member(index)
        assert repr(member) == repr(model)
        for name, tensor in model.state_dict().items():
            assert torch.equal(member.state_dict()[name], tensor)


def test_a_fused_network_wears_its_networks_names() -> None:
    net = mt.fuse(trained("resnet18", 2))
    assert net.conv1.weight.shape == (2, 64, 3, 3, 3)
    assert dict(net.named_parameters()).keys() == dict(mt.models.resnet18().named_parameters()).keys()
    assert net.get_submodule("layer1.0") is net.layer1[0]


@pytest.mark.parametrize(("runner", "dtype"), [("auto", torch.float32), *((r, torch.float64) for r in RUNNERS)])
def test_training_side_by_side_is_training_alone(runner: str, dtype: torch.dtype) -> None:
    # Every runner in double precision, since training a deep network multiplies the last bit by thousands.
    models = [model.train().to(dtype) for model in trained("resnet18", 2)]
    net = mt.fuse(models)
    net.runner = runner
    optimizers = [torch.optim.SGD(m.parameters(), 0.01, momentum=0.9, weight_decay=1e-4) for m in (net, *models)]
    for step in range(20):
        x, y = NETWORKS["resnet18"].batch(8, seed=step)
        x = x.to(dtype)
        losses = [net.loss(x, y), *(F.cross_entropy(model(x), y) for model in models)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for index, model in enumerate(models):
        member = net.member(index).state_dict()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(member[name], tensor, rtol=1e-4, atol=1e-4)


@EVERY_NETWORK
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_members_gradient_is_the_one_it_would_get_alone(network: str, runner: str) -> None:
    models = [model.train().double() for model in trained(network)]
    net = mt.fuse(models)
    net.runner = runner
    x, y = NETWORKS[network].batch(8)
    x = x.double()
    net.loss(x, y).backward()
    for index, model in enumerate(models):
        F.cross_entropy(model(x), y).backward()
        for name, parameter in model.named_parameters():
            got = net.get_parameter(name).grad[index]
            torch.testing.assert_close(got, parameter.grad, rtol=1e-6, atol=1e-9)


@EVERY_NETWORK
@pytest.mark.parametrize("runner", RUNNERS)
def test_no_gradient_flows_from_one_members_loss_to_anothers_weights(network: str, runner: str) -> None:
    net = mt.fuse([model.train() for model in trained(network)])
    net.runner = runner
    x, y = NETWORKS[network].batch(8)
    F.cross_entropy(net(x)[1], y).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad[1].any(), name
        assert not parameter.grad[[0, 2]].any(), name


def test_the_choice_on_a_cpu_is_the_loop() -> None:
    net = mt.fuse(trained("cnn"))
    assert net.runners("cpu") == ["loop"]
    assert net.runners("cuda") == ["packed", "loop", "stacked"]


# -- networks that are hard to run packed ------------------------------------------------------------------


class ChannelShuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)
        return self.fc(F.relu(self.conv2(x)).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16 + 3, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        deep = F.relu(self.deep(F.max_pool2d(skip, 2)))
        return self.out(torch.cat([skip, self.up(deep), x], dim=1))


class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.grow = nn.ModuleList(nn.Conv2d(6 + 4 * i, 4, 3, padding=1) for i in range(3))
        self.fc = nn.Linear(18, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.first(x)]
        for conv in self.grow:
            features.append(F.relu(conv(torch.cat(features, 1))))
        return self.fc(torch.cat(features, 1).mean([-1, -2]))


class SqueezeExcite(nn.Module):
    """Gates of shape [B, C, 1, 1] and [B, 1, H, W], a channel softmax, and a learned scale [C, 1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.where, self.fc = nn.Conv2d(8, 1, 1), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))
        x = x * self.where(x).sigmoid() + x.softmax(1) * self.scale
        x += 0.5 * x
        return self.fc(x.amax((2, 3)))


class ConvNext(nn.Module):
    """Layer norm over channels by permuting, a depthwise convolution, a residual in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 2, stride=2), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.wide, self.back = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.gamma, self.head = nn.Parameter(torch.full((8,), 0.5)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.gamma * self.back(F.gelu(self.wide(self.norm(y))))
        x = x + y.permute(0, 3, 1, 2)
        return self.head(x.mean([-2, -1]))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Linear(6, 8), nn.Linear(8, 24), nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x[:, 0])


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.PReLU(), nn.Conv2d(8, 8, 1, stride=2),
            nn.BatchNorm2d(8, momentum=0.3), nn.PReLU(8), nn.LayerNorm([8, 4, 4]), nn.Upsample(scale_factor=2),
            nn.Conv2d(8, 8, 3, padding="same", dilation=2), nn.BatchNorm2d(8, affine=False), nn.Flatten(),
            nn.Linear(8 * 64, 12), nn.LayerNorm(12), nn.Linear(12, 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Volume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.up = nn.Conv3d(2, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ConvTranspose3d(6, 4, 2)
        self.line, self.fc = nn.Conv1d(4, 4, 3, groups=2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(F.relu(self.norm(self.conv(x))))
        return self.fc(self.line(x.flatten(2)).mean(-1))


class Branches(nn.Module):
    """Control flow on values: no trace, no vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if self.one(x).sum().item() > 0 else self.two(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(6, 6), nn.Linear(6, 6)
        self.back.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(self.there(x)))


class Reused(nn.Module):
    """One layer in two places, a constant, arithmetic on sizes, and a view of a part written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(6, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.again(self.first(x)).relu()) + self.shift
        x[:, 1].mul_(2.0)
        x.sub_(x.mean())
        return x / x.shape[1] ** 0.5 + torch.arange(8.0)


class Aliased(nn.Module):
    """What a trace easily gets wrong: aliases written in place, optional arguments, questions about types."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, gain: float = 3.0) -> Tensor:
        y = self.conv(x)
        z = y
        y += 1.0
        y *= 0.5
        count = x.shape[0]
        count += 1
        if mask is None:
            y = F.relu(y)
        return self.fc((z + gain * y).mean((2, 3))) * count


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if isinstance(x, Tensor) else self.fc(x) * 2.0


class Written(nn.Module):
    """Takes the length of its input and assigns to a part of a tensor, which no trace can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) / len(x)
        x[:, 0] = 0.0
        return self.last(x)


HARD = {
    "shuffle": (ChannelShuffle, (3, 8, 8)),
    "unet": (UNet, (3, 8, 8)),
    "dense": (DenseBlock, (3, 8, 8)),
    "squeeze_excite": (SqueezeExcite, (3, 8, 8)),
    "convnext": (ConvNext, (3, 8, 8)),
    "attention": (Attention, (5, 6)),
    "norms": (Norms, (3, 8, 8)),
    "volume": (Volume, (2, 4, 4, 4)),
    "branches": (Branches, (6,)),
    "lstm": (Recurrent, (5, 6)),
    "tied": (Tied, (6,)),
    "reused": (Reused, (6,)),
    "aliased": (Aliased, (3, 8, 8)),
    "asks": (Asks, (6,)),
    "written": (Written, (6,)),
    "cumulative": (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4)), (6,)),
    "weight_norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 4)), (6,)),
    "sequence": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), (5, 6)),
    "one_layer": (lambda: nn.Conv2d(3, 4, 1), (3, 8, 8)),
}
MAY_REFUSE = {
    ("branches", "packed"), ("branches", "stacked"), ("written", "packed"), ("cumulative", "stacked"),
    ("lstm", "packed"), ("lstm", "stacked"), ("asks", "packed"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(HARD))
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("training", [False, True])
def test_networks_that_mix_channels_are_right_or_refused(name: str, runner: str, training: bool) -> None:
    build, shape = HARD[name]
    torch.manual_seed(0)
    models = [build().train() for _ in range(3)]
    for model in models:
        model(torch.randn(4, *shape))
        model.train(training)
    net = mt.fuse(models)
    x = torch.randn(5, *shape)
    try:
        net.runner = runner
        together = net(x)
    except ValueError:
        assert (name, runner) in MAY_REFUSE
        return
    for index, model in enumerate(models):
        torch.testing.assert_close(together[index], model(x), rtol=1e-4, atol=1e-5)
    together.square().sum().backward()
    for index, model in enumerate(models):
        model(x).square().sum().backward()
        for parameter_name, parameter in model.named_parameters():
            got = net.get_parameter(parameter_name).grad[index]
            want = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", list(HARD))
def test_check_proves_hard_networks_right(name: str) -> None:
    build, shape = HARD[name]
    mt.check(mt.deep_ensemble(build(), members=2), torch.randn(3, *shape))


def test_check_finds_members_that_mix() -> None:
    net = mt.fuse([Cnn() for _ in range(2)])
    net._predictions = lambda x, run=net._run: run("loop", x).flip(0)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="member 0 differs from itself alone"):
        mt.check(net, torch.randn(2, 3, 8, 8))


# -- what a trace would freeze -----------------------------------------------------------------------------


class Freezes(Cnn):
    kind = "nothing"
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.kind == "counter":
            self.calls = self.calls + 1
        elif self.kind == "python":
            x = x * random.random()
        elif self.kind == "torch":
            x = x + torch.randn(CLASSES)
        return x


@pytest.mark.parametrize("kind", ["counter", "python", "torch"])
def test_what_a_trace_would_freeze_is_refused(kind: str) -> None:
    model = Freezes()
    model.kind = kind
    net = mt.fuse([model, model])
    with pytest.raises(ValueError, match="random numbers" if kind != "counter" else "writes its own attributes"):
        net.runner = "packed"
    assert net(torch.randn(2, 3, 8, 8)).shape == (2, 2, CLASSES)


def test_settings_that_change_are_traced_again() -> None:
    class Gain(Cnn):
        gain = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain

    model = Gain()
    model.gain = 2.0
    net = mt.fuse([model, model])
    net.runner = "packed"
    x = torch.randn(2, 3, 8, 8)
    before = net(x)
    net.network.gain = 6.0
    torch.testing.assert_close(net(x), 3 * before)


def test_arguments_that_a_network_does_not_take_are_refused() -> None:
    x = torch.randn(2, 3, 8, 8)
    for runner in RUNNERS:
        net = mt.fuse([Aliased(), Aliased()])
        net.runner = runner
        assert net({"x": x}).shape == net((x,)).shape == (2, 2, 4)
        for wrong in ((x, None, 1.0, 2.0), {"x": x, "other": x}, {"y": x}):
            with pytest.raises((ValueError, TypeError)):
                net(wrong)
    net = mt.fuse([Aliased(), Aliased()])
    assert not torch.equal(net((x, torch.ones(1))), net(x))


def test_hooks_keep_seeing_each_members_tensors() -> None:
    model = Cnn()
    seen: list[torch.Size] = []
    model.conv1.register_forward_hook(lambda _, __, y: seen.append(y.shape))
    net = mt.fuse([model, model, model])
    with pytest.raises(ValueError, match="'conv1' has forward hooks"):
        net.runner = "packed"
    net(torch.randn(2, 3, 8, 8))
    assert seen == [torch.Size([2, 12, 8, 8])] * 3


def test_a_half_frozen_network_is_not_run_packed() -> None:
    net = mt.fuse([NETWORKS["resnet18"].model().train() for _ in range(2)])
    net.runner = "packed"
    net.layer1.eval()
    with pytest.raises(ValueError, match="training mode"):
        net(torch.randn(2, 3, 8, 8))


def test_frozen_batch_norms_stay_frozen_in_every_runner() -> None:
    net = mt.fuse([model.train() for model in trained("resnet18", 2)])
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    x, _ = NETWORKS["resnet18"].batch()
    outputs = []
    for runner in RUNNERS:
        net.runner = runner
        outputs.append(net(x))
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=1e-4, atol=1e-5)
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, before[name])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5)])
@pytest.mark.parametrize("first", [True, False])
def test_members_draw_their_own_dropout(runner: str, layer: nn.Module, first: bool) -> None:
    conv = nn.Conv2d(4, 4, 1)
    model = nn.Sequential(layer, conv) if first else nn.Sequential(conv, layer)
    net = mt.fuse([model.train()] * 3)
    net.runner = runner
    torch.manual_seed(0)
    one, two, three = net(torch.ones(8, 4, 5, 5))
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)


# -- the rest ----------------------------------------------------------------------------------------------


def test_clipping_treats_members_one_by_one() -> None:
    models = [model.train() for model in trained("cnn")]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(3.0)
    net = mt.fuse(models)
    x, y = NETWORKS["cnn"].batch()
    net.loss(x, y).backward()
    norms = net.clip_grad_norm_(0.1)
    for index, model in enumerate(models):
        F.cross_entropy(model(x), y).backward()
        want = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(norms[index], want, rtol=1e-4, atol=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(net.get_parameter(name).grad[index], parameter.grad, rtol=1e-3, atol=1e-6)


def test_a_memory_format_is_the_members_own() -> None:
    models = trained("resnet18", 2)
    net = mt.fuse(models).to(memory_format=torch.channels_last)
    assert net.conv1.weight[0].is_contiguous(memory_format=torch.channels_last)
    assert net.member(1).conv1.weight.is_contiguous(memory_format=torch.channels_last)
    x, _ = NETWORKS["resnet18"].batch()
    torch.testing.assert_close(net(x)[1], models[1](x), rtol=1e-4, atol=1e-5)


def test_frozen_parameters_stay_frozen() -> None:
    model = Cnn()
    model.conv1.requires_grad_(False)
    net = mt.fuse([model, model])
    assert not net.conv1.weight.requires_grad
    assert net.conv2.weight.requires_grad
    assert not net.member(0).conv1.weight.requires_grad


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_ensemble_of_multitudes_is_a_multitude(runner: str) -> None:
    case = NETWORKS["cnn"]
    inner = [mt.batch_ensemble(case.model(seed), members=2, seed=seed) for seed in range(3)]
    net = mt.fuse(inner)
    x, y = case.batch()
    if runner == "packed":
        with pytest.raises(ValueError, match="packed"):
            net.runner = runner
        return
    net.runner = runner
    want = torch.cat([one(x) for one in inner])
    assert want.shape == (6, 7, CLASSES)
    torch.testing.assert_close(net(x), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.loss(x, y), sum(one.loss(x, y) for one in inner), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.member(1)(x), inner[1](x), rtol=1e-4, atol=1e-5)


def test_networks_that_differ_cannot_be_fused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        mt.fuse([])
    with pytest.raises(ValueError, match=r"networks\[1\].*'weight'.*\[3, 2\].*\[2, 2\]"):
        mt.fuse([nn.Linear(2, 2), nn.Linear(2, 3)])
    with pytest.raises(ValueError, match="only one of them has 'bias'"):
        mt.fuse([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)])
    with pytest.raises(ValueError, match="float64"):
        mt.fuse([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    with pytest.raises(ValueError, match="nn.Module"):
        mt.fuse([nn.Linear(2, 2), "net"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="has no shape yet"):
        mt.fuse([nn.LazyLinear(2), nn.LazyLinear(2)])
    with pytest.raises(ValueError, match=r"networks\[1\] and networks\[0\] differ at '1': Tanh.*ReLU"):
        mt.fuse([nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.Tanh())])
    with pytest.raises(ValueError, match="'stride': \\(2, 2\\).*'stride': \\(1, 1\\)"):
        mt.fuse([nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 1, stride=2)])
    with pytest.raises(ValueError, match="runner must be one of auto, loop, packed, stacked, got 'fast'"):
        mt.fuse([nn.Linear(2, 2)]).runner = "fast"


def test_the_fused_networks_are_left_as_they_were() -> None:
    models = trained("cnn")
    before = [copy.deepcopy(model.state_dict()) for model in models]
    net = mt.fuse(models).train()
    net.loss(*NETWORKS["cnn"].batch()).backward()
    torch.optim.SGD(net.parameters(), 1.0).step()
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())


def test_a_networks_own_names_never_clash_with_a_multitudes() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = ("members", "network", "task", "notes", "loss", "runner", "member", "predict")
            for name in names:
                self.add_module(name, nn.Linear(4, 4))
            self.names = names

        def forward(self, x: Tensor) -> Tensor:
            for name in self.names:
                x = self._modules[name](x)
            return x

    x = torch.randn(3, 4)
    for method in (mt.deep_ensemble, mt.packed, mt.batch_ensemble, mt.masksembles, mt.mimo):
        net = method(Clash(), 2)
        assert net.members == 2
        assert net(x).shape == (2, 3, 4)
        net.loss(x, torch.tensor([0, 1, 2])).backward()
        mt.check(net, x)
        assert net.predict(x).probs.shape == (3, 4)
