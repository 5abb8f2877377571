"""Parts of deployment that keep the function: folded norms, fused convolutions, 8-bit networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import multitudes as mt
from multitudes.deployment import fusion as fusing
from multitudes.deployment import int8_check as quality
from multitudes.deployment.engines import distance
from multitudes.deployment.norm_folding import fold_norms, foldable
from multitudes.deployment.operation_graph import CannotTrace, trace
from tests.zoo.cases import NETWORKS
from tests.zoo.of_parts import Of

pytest.importorskip("onnxruntime")


def moved_norms(network: nn.Module) -> nn.Module:
    """Give norms a scale and a shift, as after training."""
    generator = torch.Generator().manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            for tensor in (module.running_mean, module.weight, module.bias):
                if tensor is not None:
                    tensor.data = torch.randn(tensor.shape, generator=generator)
            module.running_var.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
    return network.eval()


def folded(network: nn.Module, x: Tensor) -> int:
    """Fold a network's norms, check that predictions stay the same, and return the number of folded norms."""
    moved_norms(network)
    with torch.no_grad():
        want = network(x)
        pairs = foldable(network, lambda: network(x))
        fold_norms(network, pairs)
        torch.testing.assert_close(network(x), want, rtol=1e-4, atol=1e-4)
    return len(pairs)


FOLDABLE: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), (5, 4)),
    "no bias": (nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)), (5, 4)),
    "conv1d": (nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6)), (5, 4, 9)),
    "conv2d in groups": (nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), (5, 4, 7, 7)),
    "conv3d": (nn.Sequential(nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4)), (3, 2, 4, 4, 4)),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d(6)), (2, 4, 5, 5)),
    "transposed in groups": (nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), (2, 4, 5, 5)),
    "without affine": (nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False)), (2, 3, 5, 5)),
    "before linear": (nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 6)), (5, 4)),
    "before conv2d": (nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, bias=False)), (5, 4, 7, 7)),
    "before groups": (nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2)), (5, 4, 7, 7)),
}


@pytest.mark.parametrize("name", FOLDABLE)
def test_a_norm_is_folded_into_the_layer_beside_it(name: str) -> None:
    network, shape = FOLDABLE[name]
    assert folded(network, torch.randn(shape)) == 1 and isinstance(network[1], nn.Identity)


def conv_and_norm(forward: Callable[..., Tensor], **options: Any) -> nn.Module:
    return Of(forward, conv=nn.Conv2d(3, 3, 3, padding=1), norm=nn.BatchNorm2d(3, **options))


def in_place(net: Any, x: Tensor) -> Tensor:
    found = net.conv(x)
    found += 1
    return net.norm(found)


UNFOLDABLE: dict[str, Callable[[], nn.Module]] = {
    "another use of what the layer gives": lambda: conv_and_norm(lambda net, x: net.norm(found := net.conv(x)) + found),
    "a part of what the layer gives": lambda: conv_and_norm(lambda net, x: net.norm(f := net.conv(x)) + f[:, :1]),
    "a change in place": lambda: conv_and_norm(in_place),
    "the layer twice": lambda: conv_and_norm(lambda net, x: net.norm(net.conv(net.conv(x)))),
    "the norm twice": lambda: conv_and_norm(lambda net, x: net.norm(F.relu(net.norm(net.conv(x))))),
    "a weight that is used elsewhere": lambda: conv_and_norm(
        lambda net, x: net.norm(net.conv(x)) + net.conv.weight.mean()
    ),
    "a bias that is used elsewhere": lambda: conv_and_norm(lambda net, x: net.norm(net.conv(x)) + net.conv.bias.sum()),
    "statistics that are used elsewhere": lambda: conv_and_norm(
        lambda n, x: n.norm(n.conv(x)) + n.norm.running_mean.sum()
    ),
    "statistics of the batch": lambda: conv_and_norm(lambda net, x: net.norm(net.conv(x)), track_running_stats=False),
    "padding after the norm": lambda: conv_and_norm(lambda net, x: net.conv(net.norm(F.relu(x)))),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 3)), nn.BatchNorm2d(3)),
}


@pytest.mark.parametrize("name", list(UNFOLDABLE))
def test_other_norms_are_not_folded(name: str) -> None:
    torch.manual_seed(0)
    network = UNFOLDABLE[name]()
    assert folded(network, torch.randn(4, 3, 6, 6)) == 0
    assert any(isinstance(module, nn.BatchNorm2d) for module in network.modules())


def test_layers_with_hooks_are_not_folded() -> None:
    network, seen = moved_norms(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))), []
    network[0].register_forward_hook(lambda module, args, output: seen.append(output))
    x = torch.randn(2, 3, 5, 5)
    assert not foldable(network, lambda: network(x))


# -- traced and fused ----------------------------------------------------------------------------------------


def residual_additions(net: Any, x: Tensor) -> Tensor:
    """Additions of the input, of a convolution, in both orders, and of a sum with two uses."""
    one, two, three, four, five, six = net.convs
    x = F.relu(one(x))
    x = F.relu(two(x) + x)
    x = F.relu(x + three(x))
    x = F.relu(four(x) + five(x))
    y = six(x)
    return (F.relu(y) + y + F.relu(x + 2 * y)).mean((2, 3))


def test_fused_convolutions_are_the_same_function() -> None:
    torch.manual_seed(0)
    convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, bias=number != 1) for number in range(6))
    network, x = Of(residual_additions, convs=convs).eval(), torch.randn(3, 4, 6, 6)
    graph = trace(network, [x])
    assert fusing.fuse_convolutions(graph) == 4
    assert sum(node.target is fusing.convolution for node in graph.graph.nodes) == 6
    for each in (x, torch.randn(3, 4, 6, 6)):
        torch.testing.assert_close(graph(each), network(each), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, case in NETWORKS.items() if len(case.shape) == 3])
def test_every_network_of_images_is_traced_or_refused(name: str) -> None:
    case = NETWORKS[name]
    net = mt.deep_ensemble(case.model(), 3).eval()
    x, other = case.batch(5)[0], case.batch(5, seed=2)[0]
    net.runner = "packed" if name in ("cnn", "resnet", "separable", "group_norm") else "loop"
    with torch.no_grad():
        net(x)
        graph = trace(net, [x])
        fusing.fuse_convolutions(graph)
        torch.testing.assert_close(graph(other), net(other), rtol=1e-3, atol=1e-4)


def test_tracing_refuses_code_that_inspects_values_or_draws() -> None:
    with pytest.raises(CannotTrace):
        trace(lambda x: x if x.sum() > 0 else -x, [torch.ones(3)])
    x = torch.ones(1, 1, 4, 8)
    for draws in (torch.rand_like, lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)):
        with pytest.raises(CannotTrace, match="draws random numbers"):
            trace(draws, [x])


@pytest.mark.parametrize(("groups", "fewer"), [(4, 1), (4, 2), (4, 4), (6, 3), (6, 2)])
def test_a_convolution_of_fewer_groups_with_zeros_is_the_same(groups: int, fewer: int) -> None:
    weight, x = torch.randn(groups * 3, 2, 3, 3), torch.randn(2, groups * 2, 5, 5)
    got = F.conv2d(x, fusing.merged(weight, groups, fewer), groups=fewer)
    torch.testing.assert_close(got, F.conv2d(x, weight, groups=groups), rtol=1e-4, atol=1e-5)


class ChannelsLast(torch.fx.Interpreter):
    """Collects whether the outputs of convolutions are channels-last."""

    def run_node(self, n: torch.fx.Node) -> Any:
        found = super().run_node(n)
        if n.target is fusing.convolution:
            self.seen = [*getattr(self, "seen", []), found.is_contiguous(memory_format=torch.channels_last)]
        return found


@pytest.mark.parametrize("wanted", [1, 2, 4])
def test_the_best_ways_compute_the_same_function_in_channels_last(wanted: int) -> None:
    case = NETWORKS["resnet"]
    net, x = mt.deep_ensemble(case.model(), 4).eval(), case.batch(5)[0]
    net.runner = "packed"
    with torch.no_grad():
        net(x)
        graph = trace(net, [x])
        fusing.fuse_convolutions(graph)
        watch = ChannelsLast(graph)
        watch.run(x)
        assert len(watch.seen) > 5 and all(watch.seen)
        ways = fusing.best_ways(graph, [x], lambda call: 3.0 - (call.args[8] == wanted))
        fusing.apply_ways(graph, ways)
        torch.testing.assert_close(graph(x), net(x), rtol=1e-3, atol=1e-4)
    assert {way.groups for way in ways} <= {wanted, 1}  # the first layer, whose input members share, has one group


def test_the_distance_of_predictions_finds_errors() -> None:
    want = torch.randn(3, 50, 4)
    assert distance(want, want) == 0
    assert distance(want + 100, want) > 1
    spoiled = want.clone()
    spoiled[1] += 0.5 * want[1].std() * torch.randn(50, 4)  # one member of three
    assert 0.2 < distance(spoiled, want) < 0.6
    spoiled[0, 0, 0] = float("nan")
    assert distance(spoiled, want) == float("inf")
    assert distance(want[:2], want) == float("inf")
    masked = want.clone()
    masked[..., 0] = -1e9
    spoiled = masked.clone()
    spoiled[..., 1] += want.std()
    assert distance(spoiled, masked) > 0.1  # the huge numbers do not hide it


# -- 8 bits ---------------------------------------------------------------------------------------------------


def trained(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a classifier of three clusters, and test data."""
    torch.manual_seed(seed)
    centres = 2.5 * torch.eye(3, 6)
    y = torch.randint(3, (600,))
    x = centres[y] + torch.randn(600, 6)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x[:300]), y[:300]).backward()
        optimizer.step()
    return model.eval(), x[300:], y[300:]


def test_8_bits_keep_the_quality() -> None:
    model, x, y = trained()
    net = mt.fuse([model, trained(1)[0]])
    deployed = mt.deploy(net, x, precision="int8", targets=y)
    got, want = deployed.predict(x), net.predict(x)
    assert not torch.equal(got.predictions, want.predictions)  # it is in 8 bits
    assert (got.label == y).float().mean() >= (want.label == y).float().mean() - 0.01
    nll = [F.nll_loss(p.log_probs, y) for p in (got, want)]
    assert nll[0] - nll[1] <= 0.02
    assert "compared with the targets: errors" in deployed.summary() and "8 bits" in deployed.summary()
    assert "compared with its own predictions" in mt.deploy(net, x, precision="int8").summary()


def test_too_much_loss_of_quality_raises() -> None:
    model, x, y = trained()
    with torch.no_grad():  # one unit whose huge values hide all others from a scale of 256 steps, and cancel after
        model[0].weight[0] = 30.0
        model[2].weight[:, 0] = 0.0
        want = mt.Multitude(model).predict(x)
    assert float((want.label == y).float().mean()) > 0.7
    with pytest.raises(ValueError, match="precision='int8' loses too much quality, compared with the targets: errors"):
        mt.deploy(model, x, precision="int8", targets=y)
    with torch.no_grad():
        model[0].weight[0] = 1e4
    with pytest.raises(ValueError, match="precision='int8' is not possible for this network: its predictions differ"):
        mt.deploy(model, x, precision="int8")


def test_divergences_of_classes_and_gaussians_are_those_of_torch() -> None:
    torch.manual_seed(0)
    got, want = (mt.Predictive(torch.randn(2, 7, 3)) for _ in range(2))
    p, q = want.probs.double(), got.probs.double()
    ((_, labels, _), (_, lost, _)) = quality._of_classes(got, want, None)
    assert lost == pytest.approx(float(F.kl_div(q.log(), p, reduction="batchmean")), rel=1e-4)
    assert labels == pytest.approx(float((p.argmax(1) != q.argmax(1)).double().mean()))
    got, want = (mt.Predictive(torch.randn(3, 7, 4), task="gaussian") for _ in range(2))
    moments = [[m.double() for m in p.member_means_and_variances] for p in (want, got)]
    one, two = (Normal(mean, variance.sqrt()) for mean, variance in moments)
    torch.testing.assert_close(quality._divergence(got, want), kl_divergence(one, two).mean((0, 1)))


@pytest.mark.quick(2)
@pytest.mark.parametrize("task", ["gaussian", "regression", "quantiles"])
@pytest.mark.parametrize("with_targets", [False, True])
def test_a_large_output_does_not_hide_a_bad_one(task: str, with_targets: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3 if task == "quantiles" else 2)).eval()
    net = mt.Multitude(model)
    net.task = task
    x = torch.randn(300, 8)
    with torch.no_grad():
        model[-1].bias += torch.tensor([0.0, 1.0, 2.0][: len(model[-1].bias)])  # quantiles are in order
        mean = net.predict(x).mean
    targets = mean + 0.1 * torch.randn(mean.shape) if with_targets else None
    deployed = mt.deploy(net, x, precision="int8", targets=targets)
    assert not torch.equal(deployed(x)[0], net(x)[0])
    with torch.no_grad():
        model[-1].weight[0] *= 3000
    with pytest.raises(ValueError, match="precision='int8' (loses too much quality|is not possible)"):
        mt.deploy(net, x, precision="int8", targets=targets)
