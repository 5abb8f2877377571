"""Ensemble model patching, against Chang et al.'s tables, closed forms and brute force."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import multitudes as mt
from multitudes.methods.patching import Patched, family, patched, patching_kl
from multitudes.methods.patching.layers import Mixing, Patch
from tests.zoo.of_parts import Of


def mlp(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), norm(6), nn.Tanh(), nn.Linear(6, 3))


def large_mlp(norm: bool) -> nn.Module:
    """Table 3's: 100 linear layers of 100 units, the last without a bias."""
    hidden = [layer for _ in range(99) for layer in [nn.Linear(100, 100), *[nn.BatchNorm1d(100)] * norm]]
    return nn.Sequential(*(copy.deepcopy(layer) for layer in hidden), nn.Linear(100, 100, bias=False))


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def patches(net: mt.Multitude) -> dict[str, Patch]:
    return {name: module for name, module in net.network.named_modules() if isinstance(module, Patch)}


def assigned(monkeypatch: pytest.MonkeyPatch, *numbers: Any) -> None:
    """Set the next assignments."""
    following = iter(numbers)
    monkeypatch.setattr(Mixing, "assign", lambda self, shape, like: torch.as_tensor(next(following)).expand(shape))


@pytest.fixture
def without_values() -> Iterator[None]:
    """Count parameters without making any."""
    with torch.device("meta"):
        yield


# -- Tables 2 and 3: sizes ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_values")
def test_resnet18_has_the_papers_counts() -> None:
    model = mt.models.resnet18(classes=1000, stem="imagenet")
    norm = patched(model, 5, "norm")
    assert norm.overhead().before == count(model) == 11_689_512
    assert norm.overhead().added == count(norm) - count(model) == 38_400
    assert norm.overhead().ratio == pytest.approx(0.00328, abs=5e-6)
    net = patched(model, 5, "norm+output")
    assert net.overhead().total == count(net) == 13_779_912
    assert net.overhead().ratio == pytest.approx(0.179, abs=5e-4)
    assert list(patches(net))[-1] == "fc"
    explicit = family(model, 5, "network")
    assert count(explicit) == 58_447_560


@pytest.mark.slow
@pytest.mark.usefixtures("without_values")
def test_pyramidnet_has_the_papers_counts() -> None:
    model = mt.models.pyramidnet110(classes=100)
    net = patched(model, 5, "norm+output")
    assert (net.overhead().before, net.overhead().total, count(net)) == (28_511_307, 28_825_299, 28_825_299)


@pytest.mark.slow
@pytest.mark.usefixtures("without_values")
def test_a_large_mlp_has_the_papers_counts() -> None:
    net = patched(large_mlp(norm=True), 5, "norm+output", example=torch.zeros(2, 100))
    assert net.overhead().added == 119_200
    plain = large_mlp(norm=False)
    assert count(plain) == 1_009_900
    for assignment in ("row", "element"):  # dropout and DropConnect add nothing
        assert count(family(plain, 2, assignment, zero_component=True)) == 1_009_900
    assert count(family(plain, 5, "network")) == 5_049_500


@pytest.mark.slow
@pytest.mark.usefixtures("without_values")
def test_ensemble_sizes_are_table_3s() -> None:
    layers, units = 100, 100
    plain, normed, x = large_mlp(norm=False), large_mlp(norm=True), torch.zeros(2, 100)
    assert patched(normed, 5, example=x).ensemble_size() == 5**layers
    cross = patched(normed, 5, cross=True, example=x)
    assert cross.ensemble_size() == 5 ** (units**2 + 2 * (layers - 1) * units)
    assert family(plain, 2, "row", zero_component=True).ensemble_size() == 2 ** (layers * units)
    assert family(plain, 2, "element", zero_component=True).ensemble_size() == 2 ** (layers * units**2)
    assert family(plain, 7, "network").ensemble_size() == 7
    learned = patched(nn.Linear(3, 2), 4, "output", mixing="learned", example=torch.zeros(1, 3))
    assert learned.overhead().added == 3 * 8 + 4


# -- Table 2: the members of the family --------------------------------------------------------------------


def close(samples: Tensor, expected: Tensor) -> bool:
    """Return whether the mean over draws `[D, ...]` is within five standard errors."""
    error = samples.std(0) / len(samples) ** 0.5
    return bool(((samples.mean(0) - expected).abs() <= 5 * error + 1e-6).all())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 3), (5, 4)),
        (nn.Conv1d(4, 6, 3, groups=2), (5, 4, 7)),
        (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", stride=2), (5, 4, 8, 8)),
    ],
    ids=["linear", "conv1d", "conv2d"],
)
def test_rows_and_a_zero_component_are_dropout_given_the_mask(
    monkeypatch: pytest.MonkeyPatch, layer: nn.Module, shape: Sequence[int]
) -> None:
    torch.manual_seed(0)
    mask, x = 0.5 * F.dropout(torch.ones(4), 0.5), torch.randn(*shape)  # the family does not scale what it keeps
    assert 0 < mask.sum() < 4
    net = family(layer, 2, "row", zero_component=True, init="pretrained").train()
    assigned(monkeypatch, 1 - mask.long())
    torch.testing.assert_close(net(x)[0], layer(x * mask.view(4, *[1] * (x.dim() - 2))))


def test_elements_and_a_zero_component_are_dropconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x, mask = nn.Linear(5, 3), torch.randn(1, 5), torch.randint(2, (3, 5))
    net = family(layer, 2, "element", zero_component=True, mixing=[0.8, 0.2], init="pretrained").eval()
    assigned(monkeypatch, 1 - mask)
    torch.testing.assert_close(net(x, draws=1)[0], F.linear(x, layer.weight * mask, layer.bias))


def components_of(net: Patched, numbers: Sequence[int]) -> dict[str, Tensor]:
    """The state of a plain network that takes component `numbers[i]` of the i-th patched layer."""
    state = dict(net.state_dict())
    for (name, patch), number in zip(patches(net).items(), numbers, strict=True):
        state |= {f"{name}.{own}": tensor[number] for own, tensor in patch.named_parameters(recurse=False)}
    return state


@pytest.mark.parametrize("assignment", ["network", "layer"])
def test_draws_are_the_enumerated_networks_with_their_probabilities(assignment: str) -> None:
    model, p = mlp(nn.LayerNorm), [0.2, 0.3, 0.5]
    net = family(model, 3, assignment, mixing=p, init="fresh", seed=0).eval()
    x, draws = torch.randn(2, 4), 4000
    with torch.no_grad():
        drawn = net(x, draws=draws, seed=0)
        every = list(itertools.product(range(3), repeat=3))
        chosen = [(k, k, k) for k in range(3)] if assignment == "network" else every
        assert net.ensemble_size() == len(chosen)
        total = 0
        for numbers in chosen:
            want = functional_call(model, components_of(net, numbers), (x,))
            share = p[numbers[0]] if assignment == "network" else numpy.prod([p[k] for k in numbers])
            hits = int((drawn - want).abs().amax((1, 2)).lt(1e-5).sum())
            assert abs(hits - draws * share) < 5 * (draws * share * (1 - share)) ** 0.5
            total += hits
    assert total == draws


def test_ecmp_draws_the_component_of_each_element_separately() -> None:
    net, p = patched(nn.Linear(2, 2), 3, "output", cross=True, mixing=[0.5, 0.3, 0.2]).eval(), [0.5, 0.3, 0.2]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.arange(3.0).view(3, *[1] * (parameter.dim() - 1)).expand_as(parameter))
        # Read as decimals, the answers are the numbers of the components of each output's bias and two weights.
        drawn = net(torch.tensor([[10.0, 100.0]]), draws=5000, seed=0)[:, 0]
    digits = torch.stack([(drawn // 10**i) % 10 for i in range(3)], -1).flatten(1)  # [D, 6]
    for k, other in itertools.product(range(3), repeat=2):
        both = (digits == k).float().unsqueeze(2) * (digits == other).float().unsqueeze(1)
        expected = torch.full((6, 6), p[k] * p[other])
        assert close(both, expected.fill_diagonal_(p[k] if k == other else 0.0))


@pytest.mark.quick(4)
@pytest.mark.parametrize("assignment", ["network", "layer", "row", "element"])
@pytest.mark.parametrize("zero", [False, True])
def test_weights_have_the_mixtures_mean_and_variance(assignment: str, zero: bool) -> None:
    sigma, p = 0.3, torch.tensor([0.2, 0.5, 0.3])
    net = family(nn.Linear(3, 2), 3, assignment, sigma, zero_component=zero, mixing=p.tolist(), seed=0).eval()
    m, b = (parameter.detach() for parameter in net.parameters())
    assert len(b) == (1 if zero or assignment == "row" else 3)  # K_j
    m, b = torch.cat([m, torch.zeros_like(m[:1])]) if zero else m, b.expand(3, -1)
    x = torch.cat([torch.zeros(1, 3), torch.eye(3)])  # the bias, and the bias plus each column of the weight
    with torch.no_grad():
        drawn = net(x, draws=5000, seed=0)
        for values, means in ((drawn[:, 0], b), ((drawn[:, 1:] - drawn[:, :1]).mT, m)):
            mean = torch.einsum("k,k...->...", p, means)
            assert close(values, mean)
            variance = torch.einsum("k,k...->...", p, (means - mean).square()) + sigma**2
            assert close((values - mean).square(), variance)
        torch.testing.assert_close(net(x, draws=0)[0], F.linear(x, torch.einsum("k,koi->oi", p, m), p @ b))


# -- the conversion ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ("norm", ["1"]),
        ("input", ["0"]),
        ("norm+output", ["1", "3"]),
        ("output+input+output", ["0", "3"]),
        ("[01]", ["0", "1"]),
        (["3"], ["3"]),
        (None, ["0", "1", "3"]),
        (lambda name, layer: isinstance(layer, nn.Linear), ["0", "3"]),
    ],
)
def test_layers_selects_the_patched_layers(layers: Any, names: list[str]) -> None:
    assert list(patches(patched(mlp(), 2, layers))) == names


def test_the_output_is_the_last_layer_that_runs() -> None:
    net = Of(lambda net, x: net.head(net.body(x)), head=nn.Linear(6, 3), body=nn.Linear(4, 6))
    assert list(patches(patched(net, 2, "output", example=torch.zeros(1, 4)))) == ["head"]
    assert list(patches(patched(net, 2, "input", example=torch.zeros(1, 4)))) == ["body"]


def test_components_of_a_fresh_network_start_different() -> None:
    model = mlp()
    net = patched(model, 4, None, seed=0)
    for patch in patches(net).values():
        for i, j in itertools.combinations(range(4), 2):
            assert not torch.isclose(patch.weight[i], patch.weight[j]).any()
    resnet = mt.models.resnet18()
    first = patched(resnet, 3, "input", seed=0).network.conv1.weight.detach()
    assert first.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)  # as the network itself starts
    correlations = torch.cat([first, resnet.conv1.weight.detach().unsqueeze(0)]).flatten(1).corrcoef()
    assert (correlations - torch.eye(4)).abs().max() < 0.1


def test_components_of_zero_weights_start_different() -> None:
    model = mlp()
    for parameter in [*model[1].parameters(), *model[3].parameters()]:
        nn.init.zeros_(parameter)
    for patch in patches(patched(model, 3, init="pretrained", spread=0.2)).values():
        fan_in = patch.weight[0, 0].numel()
        assert 0.1 < patch.weight.std() * fan_in**0.5 < 0.3


def test_fresh_members_are_reset_completely() -> None:
    net = patched(mlp(), 3, None, mixing="learned", seed=0).train()
    for _ in range(20):  # after which it looks trained
        net(torch.randn(8, 4) + 3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(5)
    for first, norm, _, _ in mt.deep_ensemble(net, 2, seed=0).network:
        assert first.weight.abs().max() <= 4**-0.5  # torch's own bound for a linear layer
        torch.testing.assert_close(norm.weight.mean(0), torch.ones(6))
        torch.testing.assert_close(norm.bias.mean(0), torch.zeros(6))
        for components in (first.weight, norm.weight):
            assert not torch.isclose(components[0], components[1]).any()
        assert not (norm.mixing.logits.any() or norm.running_mean.any() or norm.num_batches_tracked.any())


class Initialised(nn.Sequential):
    """It initialises its own layers, by their classes."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.weight.data.normal_()


@pytest.mark.parametrize("layers", ["norm+output", None])
def test_no_torch_layer_without_a_weight_remains(layers: str | None) -> None:
    net = patched(Initialised(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), 3, layers, seed=0)
    assert all(m.weight is not None for m in net.modules() if isinstance(m, (nn.Linear, nn.LayerNorm)))
    assert mt.deep_ensemble(net, 2, seed=0)(torch.randn(5, 4), draws=2).shape == (4, 5, 3)


@pytest.mark.parametrize("mixing", ["uniform", [0.2, 0.3, 0.5]])
def test_components_of_a_pretrained_network_start_around_it(mixing: Any) -> None:
    model, x = mlp(nn.LayerNorm), torch.randn(5, 4)
    net = patched(model, 3, None, mixing=mixing, init="pretrained", spread=0.2).eval()
    torch.testing.assert_close(net(x, draws=0)[0], model(x))
    deviation = (net.network[0].weight - model[0].weight).std() / model[0].weight.square().mean().sqrt()
    assert 0.1 < deviation < 0.3
    assert (net(x, draws=10).std(0) > 0).all()


def test_conversion_keeps_mode_names_and_frozen_weights() -> None:
    model = mlp().eval()
    model[3].requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    net = patched(model, 3, seed=0)
    assert not net.training
    assert {name for name, p in net.named_parameters() if not p.requires_grad} == {"3.weight", "3.bias"}
    assert (net.network[3].in_features, net.network[1].eps) == (6, 1e-5)
    assert torch.equal(net.network[3].weight, before["3.weight"])  # frozen, and so not patched
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert re.search(r"1 +PatchedBatchNorm +36 +3 components, one for the layer", net.summary())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"components": 1}, "components must be a whole number, 2 or more, got 1"),
        ({"components": 2.5}, "components must be a whole number, 2 or more, got 2.5"),
        ({"assignment": "column"}, "assignment must be one of network, layer, row, element, got 'column'"),
        ({"sigma": -0.1}, "sigma must be 0 or more, got -0.1"),
        ({"weight_precision": -1}, "weight_precision must be 0 or more, got -1"),
        ({"spread": -1}, "spread must be 0 or more, got -1"),
        ({"mixing": "softmax"}, "mixing must be 'uniform', 'learned', or 2 numbers above 0 .* got 'softmax'"),
        ({"mixing": [0.5, 0.6]}, r"mixing must be .* got \[0.5, 0.6\]"),
        ({"mixing": [0.5, 0.3, 0.2]}, "mixing must be .* 2 numbers"),
        ({"mixing": [0.0, 1.0]}, "mixing must be .* above 0"),
        ({"mixing": 3}, "mixing must be .* got 3"),
        ({"relaxation": "soft"}, "relaxation must be one of straight-through, weighted, got 'soft'"),
        ({"temperature": 0}, "temperature must be above 0, got 0"),
        ({"init": "old"}, "init must be one of fresh, pretrained, heads, got 'old'"),
        ({"layers": "norms"}, "layers='norms' selects nothing; .* or layers is a sum of norm, input, output"),
        ({"layers": ["2"]}, "layers: layer '2' is a Tanh, which this method cannot convert"),
    ],
)
def test_bad_arguments_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family(mlp(), **{"components": 2} | options)


def test_networks_that_cannot_be_patched_are_errors() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="layers: 'norm' selects nothing, since .* sum of norm, input, out"):
        patched(plain)
    with pytest.raises(ValueError, match="layers: 'norm' selects nothing"):
        patched(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)), 2, "norm")
    with pytest.raises(ValueError, match="has no weight to patch"):
        patched(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)), 2, ["1"])
    with pytest.raises(ValueError, match="'output' selects nothing"):
        patched(nn.Sequential(nn.LayerNorm(4)), 2, "output", example=torch.zeros(1, 4))
    with pytest.raises(ValueError, match="layer '0' is a GRU, which this method cannot convert"):
        patched(nn.Sequential(nn.GRU(3, 2), nn.Linear(2, 2)), 2, ["0"])
    plain[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="layer '0' has forward hooks"):
        patched(plain, 2, "input")
    with pytest.raises(ValueError, match="weight_precision must be 0 or more, got -1"):
        patched(mlp(), 2).kl(weight_precision=-1)
    with pytest.raises(ValueError, match="multitude of members already"):
        patched(mt.deep_ensemble(mlp(), 2), 2)


# -- gradients ---------------------------------------------------------------------------------------------


def enumerated(net: Patched, cross: bool) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """Every assignment's probability and the plain network's state, differentiable."""
    stacks = {f"{name}.{own}": t for name, patch in patches(net).items() for own, t in patch.named_parameters()}
    shared = {name: t for name, t in net.named_parameters() if name not in stacks}
    layers = {name: name.rpartition(".")[0] for name in stacks}
    places = [t[0].numel() for t in stacks.values()] if cross else [len(set(layers.values()))]
    for numbers in itertools.product(range(2), repeat=sum(places)):
        if cross:
            parts = torch.tensor(numbers).split(places)
            state = {
                name: t.gather(0, z.view(1, *t.shape[1:]))[0]
                for (name, t), z in zip(stacks.items(), parts, strict=True)
            }
        else:
            of = dict(zip(dict.fromkeys(layers.values()), numbers, strict=True))
            state = {name: t[of[layers[name]]] for name, t in stacks.items()}
        yield 0.5 ** len(numbers), shared | state


@pytest.mark.parametrize("cross", [False, True])
def test_the_gradient_of_one_draw_is_unbiased(cross: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Tanh(), nn.Linear(2, 2, bias=False)).double()
    net = patched(model, 2, cross=cross, spread=0.8, example=torch.zeros(1, 2).double()).train()
    x, y = torch.randn(6, 2).double(), torch.randint(2, (6,))
    losses = [p * F.cross_entropy(functional_call(model, s, (x,)), y) for p, s in enumerated(net, cross)]
    assert len(losses) == net.ensemble_size() == (2**8 if cross else 2**2)
    parameters = list(net.parameters())
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(sum(losses), parameters)])

    def one() -> Tensor:
        gradients = torch.autograd.grad(net.loss(x, y), parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in gradients])

    drawn = torch.stack([one() for _ in range(1500)])
    assert close(drawn, exact)
    assert (drawn.mean(0) - exact).norm() < 0.1 * exact.norm()


# -- the objective -----------------------------------------------------------------------------------------


def squares(*tensors: Tensor) -> float:
    return sum(float((t.detach().double() ** 2).sum()) for t in tensors)


def test_the_divergence_is_equation_6() -> None:
    model = mlp()
    net = patched(model, 3, mixing=[0.2, 0.3, 0.5], weight_precision=2.0, bias_precision=0.7)
    shared, norm, _, output = net.network
    want = 2.0 / 2 * squares(shared.weight) + 0.7 / 2 * squares(shared.bias)
    for k, p in enumerate([0.2, 0.3, 0.5]):
        want += p * 2.0 / 2 * squares(norm.weight[k], output.weight[k])
        want += p * 0.7 / 2 * squares(norm.bias[k], output.bias[k])
    assert net.kl().item() == pytest.approx(want, rel=1e-5)
    assert net.kl(bias_precision=0.0, weight_precision=1.0).item() < net.kl(weight_precision=1.0).item() < want
    assert net.kl(weight_precision=4.0, bias_precision=1.4).item() == pytest.approx(2 * want, rel=1e-5)


def test_the_divergence_of_dropout_is_equation_2() -> None:
    precisions = {"weight_precision": 3.0, "bias_precision": 2.0}
    net = family(mlp(), 2, "row", zero_component=True, mixing=[0.9, 0.1], init="pretrained", **precisions)
    first, norm, _, last = net.network
    want = 0.9 * 3.0 / 2 * squares(first.weight, last.weight) + 2.0 / 2 * squares(first.bias, last.bias)
    want += 3.0 / 2 * squares(norm.weight) + 2.0 / 2 * squares(norm.bias)
    assert net.kl().item() == pytest.approx(want, rel=1e-5)


def test_the_divergence_of_well_separated_components_is_the_true_one_up_to_a_constant() -> None:
    """This includes learned probabilities, for which the entropy of the assignment is not constant."""
    sigma, tau, grid = 0.05, 0.8, numpy.linspace(-8, 8, 400_001)

    def normal(mean: float, deviation: float) -> Any:
        return numpy.exp(-0.5 * ((grid - mean) / deviation) ** 2) / (deviation * (2 * numpy.pi) ** 0.5)

    def both(means: Sequence[float], p: Sequence[float]) -> tuple[float, float]:
        net = family(nn.Linear(1, 1, bias=False), 2, "layer", sigma, mixing="learned", weight_precision=tau)
        with torch.no_grad():
            net.network.weight.copy_(torch.tensor(means).view(2, 1, 1))
            net.network.mixing.logits.copy_(torch.tensor(p).log())
        q = sum(share * normal(mean, sigma) for mean, share in zip(means, p, strict=True))
        ratio = numpy.log(numpy.maximum(q, 1e-300) / normal(0.0, tau**-0.5))
        return net.kl().item(), float((q * ratio).sum() * (grid[1] - grid[0]))

    ours, true = zip(both([0.5, -1.0], [0.5, 0.5]), both([2.0, 1.0], [0.9, 0.1]), strict=True)
    assert ours[1] - ours[0] == pytest.approx(true[1] - true[0], abs=1e-4)


def test_the_loss_is_the_negative_elbo_of_one_example() -> None:
    net, x, y = patched(mlp(), 3, seed=0).train(), torch.randn(8, 4), torch.randint(3, (8,))
    torch.manual_seed(1)
    likelihood = net.loss(x, y)
    torch.manual_seed(1)
    torch.testing.assert_close(net.loss(x, y, dataset_size=50), likelihood + net.kl() / 50)


def test_patching_twice_counts_every_layer_once() -> None:
    twice = patched(patched(mlp(), 3, "norm"), 2, "output", cross=True)
    assert twice.ensemble_size() == 3 * 2 ** (18 + 3)
    torch.testing.assert_close(twice.kl(weight_precision=2.0), patching_kl(twice.network, weight_precision=2.0))
    with pytest.raises(ValueError, match="layers: layer '3' is a Patch, which cannot be patched"):
        patched(twice, 2, "output")
