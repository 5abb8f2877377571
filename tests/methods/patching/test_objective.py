"""What patched networks learn by: gradients and divergences, against enumeration and integration."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import multitudes as mt
from multitudes.methods.patching import Patched, family, patched, patching_kl
from tests.methods.patching.test_patching import close, mlp, patches

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
    """Also of learned probabilities, for which the entropy of the assignment is no constant."""
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


def test_an_ensemble_of_patched_networks_learns_as_its_members_do_alone() -> None:
    net = patched(mlp(), 3, seed=0)
    ensemble = mt.deep_ensemble(net, 2, seed=0)
    assert ensemble.state_dict()["1.1.weight"].shape == (3, 6)
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    with torch.no_grad():  # equal components, for the loss not to depend on the draw
        for member, name in product(ensemble.network, ("1.weight", "1.bias", "3.weight", "3.bias")):
            parameter = member.get_parameter(name)
            parameter.copy_(parameter[:1].expand_as(parameter))
    members = [ensemble.member(index) for index in range(2)]
    assert not torch.allclose(members[0].network[3].weight, members[1].network[3].weight)
    alone = sum(member.train().loss(x, y, dataset_size=40) for member in members)
    torch.testing.assert_close(ensemble.train().loss(x, y, dataset_size=40), alone)


def test_patching_twice_counts_every_layer_once() -> None:
    twice = patched(patched(mlp(), 3, "norm"), 2, "output", cross=True)
    assert twice.ensemble_size() == 3 * 2 ** (18 + 3)
    torch.testing.assert_close(twice.kl(weight_precision=2.0), patching_kl(twice.network, weight_precision=2.0))
    with pytest.raises(ValueError, match="layers: layer '3' is a Patch, which cannot be patched"):
        patched(twice, 2, "output")
