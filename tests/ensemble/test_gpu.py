"""What only a GPU can show: channels-last, half precision, 1x1 convolutions as products, the selected runners."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.ensemble.packing import pointwise
from tests.zoo.cases import METHODS, NETWORKS
from tests.zoo.hard_networks import HARD

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RUNNERS = ("loop", "packed", "vmapped")


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Bottleneck(nn.Module):
    """1x1 convolutions with and without bias and stride, around a 3x3 one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 1, bias=False), nn.BatchNorm2d(16),
            nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 64, 1, stride=2), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


@pytest.mark.parametrize("dense_below", [0.0, 1e9])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_runners_agree_channels_last(
    dense_below: float, half: bool, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointwise, "DENSE_BELOW", dense_below)
    torch.manual_seed(0)
    net = mt.deep_ensemble(Bottleneck(), 3).cuda().to(memory_format=torch.channels_last).train(training)
    x = torch.randn(8, 3, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(5, (8,), device="cuda")
    outputs, gradients = {}, {}
    for runner in ("loop", "packed"):  # vmap cannot ask for a memory format
        one = copy.deepcopy(net)
        one.runner = runner
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            outputs[runner] = one(x).float()
            loss = sum(F.cross_entropy(p, y) for p in outputs[runner])
        loss.backward()
        gradients[runner] = torch.cat([p.grad.flatten() for p in one.parameters()])
    for results in (outputs, gradients):
        error = (results["packed"] - results["loop"]).norm() / results["loop"].norm()
        assert error < (3e-2 if half else 1e-4)


@pytest.mark.parametrize("name", [name for name in HARD if name != "reused"])  # which adds a constant on the CPU
def test_the_automatic_choice_is_right_for_hard_networks(name: str) -> None:
    build, shape = HARD[name]
    torch.manual_seed(0)
    models = [build().cuda().eval() for _ in range(3)]
    net = mt.fuse(models)
    x = torch.randn(5, *shape, device="cuda")
    together = net(x)
    for index, model in enumerate(models):
        torch.testing.assert_close(together[index], model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("init", ["fresh", "pretrained"])
def test_a_network_on_the_gpu_is_converted_there(method: str, init: str) -> None:
    case = NETWORKS["separable"]
    model, x = case.model().cuda(), case.batch()[0].cuda()
    options = {"example": x} if method in ("packed", "masksembles", "mimo", "tabm") else {}
    if method == "heads" and init == "pretrained":
        init = "heads"  # else all members are the same network
    if method == "deep_ensemble" and init == "pretrained":
        options["perturb"] = 0.1
    nets = [METHODS[method](model, 3, init=init, seed=0, **options) for _ in range(2)]
    assert {p.device.type for p in nets[0].parameters()} == {"cuda"}
    torch.testing.assert_close(nets[0].predict(x).probs, nets[1].predict(x).probs, rtol=1e-4, atol=1e-5)
    mt.check(nets[0], x, tolerance=1e-3)
    nets[0].train().loss(x, torch.zeros(len(x), dtype=torch.long, device="cuda")).backward()


def test_verifying_a_runner_changes_nothing() -> None:
    case = NETWORKS["resnet"]
    net = mt.fuse([case.model(seed).train() for seed in range(2)]).cuda()
    plain = copy.deepcopy(net)
    plain.runner = "loop"
    x = case.batch()[0].cuda()
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    net(x)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    plain(x)
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(buffer, plain.get_buffer(name), rtol=1e-4, atol=1e-5)


def test_inputs_that_do_not_fit_are_an_error_and_the_next_ones_run() -> None:
    net = mt.fuse([NETWORKS["cnn"].model(seed) for seed in range(2)]).cuda()
    with pytest.raises(ValueError, match="does not fit the network"):
        net(torch.randn(2, 9, 8, 8, device="cuda"))
    assert net(torch.randn(2, 3, 8, 8, device="cuda")).shape == (2, 2, 5)


def test_compiled_packed_members_agree() -> None:
    torch.compiler.reset()
    net = mt.deep_ensemble(Bottleneck(), 3).cuda().to(memory_format=torch.channels_last).eval()
    x = torch.randn(8, 3, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    net.runner = "packed"
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(net)(x), net(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "build",
    [
        lambda: mt.models.resnet18(),
        lambda: mt.models.resnet18(stem="imagenet"),
        lambda: mt.models.vgg16(),
        lambda: mt.models.unet(5, width=8),
        lambda: mt.models.wide_resnet(10, 2),
        lambda: mt.models.resnext50(),
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten()),
    ],
)
@pytest.mark.parametrize("half", [False, True])
def test_draws_run_under_vmap_channels_last(build: Callable[[], nn.Module], half: bool) -> None:
    torch.manual_seed(0)
    convolutions = [name for name, layer in build().named_modules() if isinstance(layer, nn.Conv2d)]
    net = mt.mc_dropout(build(), 0.2, convolutions[:1], example=torch.zeros(2, 3, 32, 32))
    net = net.cuda().to(memory_format=torch.channels_last).eval()
    x = torch.randn(4, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16, enabled=half), warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = net(x, draws=3, seed=0)
        net._draw_cache.runner = "one_by_one"
        want = net(x, draws=3, seed=0)
    error = (drawn - want).norm() / want.norm()
    assert error < (0.05 if half else 1e-3)


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("kernel", [(1, 1), (1, 4, 6, 4, 1)])
def test_blurs_have_the_same_gradients_channels_last(growing: bool, kernel: tuple[int, ...]) -> None:
    blur = mt.layers.Blur(kernel, growing=growing)
    x = torch.randn(4, 8, 9, 9, device="cuda")
    gradients = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        copied = x.clone(memory_format=memory_format).requires_grad_()
        y = blur(copied)
        y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y))
        gradients.append(copied.grad)
    torch.testing.assert_close(*gradients)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 2, 256, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.flatten(2).unflatten(2, (-1, 128)).flatten(1, 2)).mean(1))


@pytest.mark.parametrize("build", [lambda: mt.models.vit(width=128, heads=2, depth=2), Encoder])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("runner", ["packed", "vmapped"])
def test_gradients_through_attention_are_those_of_the_loop(
    build: Callable[[], nn.Module], half: bool, runner: str
) -> None:
    """vmap hides from torch's attention that gradients will be asked for, and so it would leave out what they need."""
    torch.manual_seed(0)
    net = mt.fuse([build() for _ in range(3)]).cuda().train()
    x, y = torch.randn(64, 3, 32, 32, device="cuda"), torch.randint(10, (64,), device="cuda")
    gradients = {}
    for name in ("loop", runner):
        net.runner = name
        net.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = F.cross_entropy(net(x).flatten(0, 1).float(), y.repeat(3))
        loss.backward()
        gradients[name] = torch.cat([p.grad.flatten() for p in net.parameters()])
    error = (gradients[runner] - gradients["loop"]).norm() / gradients["loop"].norm()
    assert error < (5e-2 if half else 1e-3)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_a_laplace_posterior_on_a_gpu_is_that_on_a_cpu(structure: str) -> None:
    case = NETWORKS["mlp"]
    model, (x, y) = case.model(), case.batch(40)
    want = mt.laplace(model, (x, y), structure=structure)
    net = mt.laplace(copy.deepcopy(model).cuda(), (x, y), structure=structure)  # batches go to the network
    torch.testing.assert_close(net.prior.cpu(), want.prior, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.log_marginal_likelihood.cpu(), want.log_marginal_likelihood, rtol=1e-4, atol=1e-3)
    x = x.cuda()
    assert net(x, draws=5, seed=0).shape == (5, 40, 5) and torch.equal(net(x, draws=5, seed=0), net(x, draws=5, seed=0))
    members = mt.laplace(mt.fuse([model, NETWORKS["mlp"].model(1)]).cuda(), (x, y.cuda()), structure=structure)
    for both in (net, members):
        both.approximation = "probit"
    want.approximation = "probit"
    torch.testing.assert_close(net(x).cpu(), want(x.cpu()), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(members(x)[:1], net(x), rtol=1e-3, atol=1e-4)
    values = mt.laplace(copy.deepcopy(model).cuda(), (x, torch.randn(40, 5)), task="regression", structure=structure)
    assert values.predict(x).epistemic_variance.is_cuda


@pytest.mark.parametrize("model", [mt.models.resnet18, mt.models.resnet50])
def test_deep_networks_with_batch_norm_train_packed_in_half_precision(model) -> None:
    """Gradients through the batch statistics of a few rows would differ by rounding alone, and be refused."""
    net = mt.packed(model(classes=10), members=4, alpha=2, seed=0).cuda().to(memory_format=torch.channels_last)
    net.runner = "packed"  # raises an error where the comparison fails
    x = torch.randn(64, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        net.loss(x, torch.randint(10, (64,), device="cuda")).backward()
