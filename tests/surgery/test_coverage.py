"""The share of a network that a method converts: in the summary, and with a warning below one half."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from tests.zoo.cases import NETWORKS
from tests.zoo.of_parts import Of


def experts() -> nn.Module:
    """Most parameters are in no layer."""
    alone = Of(
        lambda net, x: torch.einsum("bi,eij,ejk->bk", x, net.up, net.down),
        up=nn.Parameter(torch.randn(4, 6, 32) / 6), down=nn.Parameter(torch.randn(4, 32, 6) / 6),
    )  # fmt: skip
    return nn.Sequential(nn.Linear(6, 6), alone, nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def share(of: int, whole: int) -> str:
    return f"{of / whole:.0%}".replace("%", " %")


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


METHODS: dict[str, Callable[..., Any]] = {
    "batch_ensemble": mt.batch_ensemble,
    "masksembles": mt.masksembles,
    "drop_connect": lambda model, **options: mt.drop_connect(model, 0.1, **options),
    "variance": mt.variance,
}


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_that_reaches_little_says_so_once_and_names_what_is_left(name: str) -> None:
    model = experts()
    with pytest.warns(
        UserWarning, match=r"the method reaches .* of model \(Sequential\); left out are Of \(1\)"
    ) as told:
        net = METHODS[name](model)
    assert sum("reaches" in str(each.message) for each in told) == 1
    reached = {"masksembles": [2, 4], "variance": [0, 2]}.get(name, [0, 2, 4])
    want = share(sum(size(model[i]) for i in reached), size(model))
    assert net.summary().splitlines()[-1].startswith(f"reaches {want} of the parameters and ")
    assert "%" in net.summary().splitlines()[-1].partition("and ")[2]


def test_multiply_adds_are_those_of_the_formula() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))
    conv, linear = 3 * 8 * 9 * 16, 8 * 16 * 5
    net = mt.masksembles(model, 2, example=torch.randn(2, 3, 4, 4))
    assert net.summary().endswith(
        f"reaches {share(size(model[3]), size(model))} of the parameters and {share(linear, conv + linear)} of the "
        "multiply-adds"
    )


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_multiply_adds_of_recurrent_layers_count(kind: Any) -> None:
    parts = {"body": kind(4, 6, batch_first=True), "hidden": nn.Linear(6, 8), "head": nn.Linear(8, 2)}
    model = Of(lambda net, x: net.head(net.hidden(net.body(x)[0])).mean(1), **parts)
    net = mt.masksembles(model, 2, layers=["hidden", "head"], example=torch.randn(3, 5, 4))
    recurrent, linear = model.body.weight_ih_l0.numel() + model.body.weight_hh_l0.numel(), 6 * 8 + 8 * 2
    assert f"and {share(linear, recurrent + linear)} of the multiply-adds" in net.summary()


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("network", ["mlp", "cnn", "resnet", "group_norm", "separable"])
def test_usual_networks_are_reached(network: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*reaches.*")
        METHODS[name](NETWORKS[network].model())


def test_what_is_left_on_purpose_is_no_reason_to_warn() -> None:
    """The first layer is most of the network, and Masksembles leaves it on purpose; so does variance the last one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*reaches.*")
        mt.masksembles(nn.Sequential(nn.Linear(1000, 16), nn.ReLU(), nn.Linear(16, 2)), 2)
        mt.variance(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1000)))
        mt.batch_ensemble(experts(), 2, layers=["0"])  # asked for


def test_without_an_example_parameters_alone_are_told() -> None:
    model = Of(lambda net, x, y: net.head(net.body(x) + y), body=nn.Linear(4, 8), head=nn.Linear(8, 2))
    net = mt.batch_ensemble(model, 2)
    assert net.summary().endswith("reaches 100 % of the parameters (multiply-adds are unknown without an example)")
    assert mt.deep_ensemble(model, 2).summary().endswith("reaches 100 % of the parameters")


def test_counting_leaves_the_model_as_it_was() -> None:
    def count(net: Any, x: Tensor) -> Tensor:
        net.calls += 1
        return net.head(net.body(x))

    model = Of(count, body=nn.Linear(4, 8), head=nn.Linear(8, 2), calls=0)
    state = torch.get_rng_state()
    net = mt.batch_ensemble(model, 2, init="pretrained", seed=0)
    assert model.calls == 0
    assert net.calls == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in [*model.modules(), *net.network.modules()])


def test_only_one_layer_that_can_be_converted_is_told_with_the_others() -> None:
    parts = {"embed": nn.Linear(4, 6), "bag": nn.RNNCell(6, 6)}
    model = Of(lambda net, x: net.bag(net.embed(x)), **parts)
    with pytest.raises(ValueError, match=r"only one layer that can be masked, 'embed' \(Linear\), .*: RNNCell \(1\)"):
        mt.masksembles(model, 2, example=torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"only one layer: layers=\['embed'\] converts it; .*: RNNCell \(1\)"):
        mt.variance(model)
