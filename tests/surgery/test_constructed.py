"""Reinitialization follows the layers' own rules and keeps what constructors set besides."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

import multitudes as mt
from multitudes.surgery.initialize import compare_with_rules, reinitialize
from tests.zoo.cases import stacked_parameters

WIDTH, CLASSES = 32, 3


class Headed(nn.Module):
    """A layer or parameter, and a head that alone is called."""

    def __init__(self, part: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def changed(layer: nn.Module, change: Callable[[Any], object]) -> nn.Module:
    with torch.no_grad():
        change(layer)
    return layer


def members_of(model: nn.Module, **options: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = mt.deep_ensemble(model, 2, seed=0, **options)
    return net, [str(each.message) for each in caught]


def sinusoids(rows: int) -> Tensor:
    angles = torch.arange(rows)[:, None] * torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(1e4) / WIDTH))
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


# -- what stays --------------------------------------------------------------------------------------------


def _forget_gates(lstm: nn.LSTM) -> None:
    for name, parameter in lstm.named_parameters():
        if "bias" in name:
            parameter.zero_()
            parameter[WIDTH : 2 * WIDTH] = 1.0


KEPT: dict[str, tuple[Callable[[], nn.Module | nn.Parameter], str, str | None]] = {
    "zero gamma": (lambda: changed(nn.BatchNorm2d(8), lambda m: m.weight.zero_()), "weight", None),
    "zero bias": (lambda: changed(nn.Linear(8, 8), lambda m: m.bias.zero_()), "bias", None),
    "one bias": (lambda: changed(nn.Linear(8, 1), lambda m: m.bias.fill_(-4.0)), "bias", None),
    "zero layer": (lambda: changed(nn.Linear(8, 8), lambda m: m.weight.zero_()), "weight", None),
    "identity": (lambda: changed(nn.Linear(8, 8), lambda m: nn.init.eye_(m.weight)), "weight", "'part.weight'"),
    "dirac": (
        lambda: changed(nn.Conv2d(8, 8, 3), lambda m: nn.init.dirac_(m.weight)), "weight", "'part.weight'",
    ),
    "forget gates": (
        lambda: changed(nn.LSTM(8, WIDTH), _forget_gates), "bias_ih_l0", "'part.bias_ih_l0', 'part.bias_hh_l0'",
    ),
    "sinusoids alone": (lambda: nn.Parameter(sinusoids(50)), "", "'part'"),
    "eye alone": (lambda: nn.Parameter(torch.eye(8)), "", "'part'"),
    "token alone": (lambda: nn.Parameter(torch.randn(1, 1, 8)), "", "'part'"),
    "complex alone": (lambda: nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat)), "", "'part'"),
    "a rule with arguments": (lambda: Needy(), "weight", "'part.weight'"),
    "a rule that fails": (lambda: Failing(), "weight", "'part.weight'"),
}  # fmt: skip


class Needy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)


class Failing(Needy):
    def reset_parameters(self, std: float = 1.0) -> None:
        raise RuntimeError("no")


@pytest.mark.parametrize("case", KEPT)
def test_values_that_no_rule_gives_are_kept_with_one_warning(case: str) -> None:
    make, name, message = KEPT[case]
    model = Headed(make())
    name = f"part.{name}".rstrip(".")
    given = model.get_parameter(name).detach().clone()
    net, told = members_of(model)
    own = stacked_parameters(net)
    assert torch.equal(own[name], given.expand(2, *given.shape))
    assert not torch.equal(*own["head.weight"])
    if message is None:  # a constant stays what it is, whatever code made it so
        assert told == []
    else:
        assert len(told) == 1
        assert f"kept the values of {message}" in told[0]
        assert "pass a function that builds the network" in told[0]
    assert "kept" in net.summary()


def test_forget_gates_stay_where_the_other_gates_are_drawn() -> None:
    lstm = nn.LSTM(8, WIDTH)
    with torch.no_grad():
        lstm.bias_ih_l0[WIDTH : 2 * WIDTH] = 1.0
    net, told = members_of(Headed(lstm))
    bias = stacked_parameters(net)["part.bias_ih_l0"]
    assert torch.equal(bias[:, WIDTH : 2 * WIDTH], torch.ones(2, WIDTH))
    assert not torch.isclose(bias[0, :WIDTH], bias[1, :WIDTH]).any()
    assert bias[:, :WIDTH].abs().max() <= WIDTH**-0.5
    assert told == []
    assert "bias_ih_l0 drawn as in model: some constants, which stay" in net.summary()


# -- what is drawn as it was -------------------------------------------------------------------------------


DRAWN: dict[str, Callable[[nn.Conv2d], object]] = {
    "kaiming": lambda m: nn.init.kaiming_normal_(m.weight, mode="fan_in"),
    "small": lambda m: nn.init.normal_(m.weight, std=0.01),
    "shifted": lambda m: nn.init.normal_(m.weight, mean=0.3, std=0.1),
    "uniform": lambda m: nn.init.uniform_(m.weight, -0.5, 0.5),
    "sparse": lambda m: m.weight.normal_(std=0.5).mul_(torch.rand_like(m.weight) > 0.4),
}


@pytest.mark.parametrize("case", DRAWN)
def test_other_distributions_keep_their_mean_and_deviation(case: str) -> None:
    torch.manual_seed(1)
    conv = changed(nn.Conv2d(16, 64, 3), DRAWN[case])
    net, told = members_of(Headed(conv))
    got, want = stacked_parameters(net)["part.weight"], conv.weight
    assert not torch.allclose(got[0], got[1])
    torch.testing.assert_close(got.std((1, 2, 3, 4)), want.std().expand(2), rtol=0.03, atol=0)
    torch.testing.assert_close(got.mean((1, 2, 3, 4)), want.mean().expand(2), rtol=0.05, atol=0.05 * want.std().item())
    assert torch.equal(got[0] == 0, want == 0)
    assert len(told) == 1
    assert "drew 'part.weight' with the mean and deviation in model" in told[0]


@pytest.mark.parametrize("case", ["gates", "square", "table"])
def test_orthogonal_matrices_and_tables_are_named_since_draws_have_their_deviation_alone(case: str) -> None:
    part = {"gates": nn.LSTM(8, 16), "square": nn.Linear(24, 24), "table": nn.Embedding(50, WIDTH)}[case]
    weight = part.weight_hh_l0 if isinstance(part, nn.LSTM) else part.weight
    with torch.no_grad():
        for block in weight.split(weight.shape[1]):
            nn.init.orthogonal_(block, gain=2**0.5)
        if case == "table":
            weight.copy_(sinusoids(50))
    net, told = members_of(Headed(part))
    (name,) = [name for name, each in Headed(part).named_parameters() if each is weight]
    got = stacked_parameters(net)[name]
    torch.testing.assert_close(got.std((1, 2)), weight.std().expand(2), rtol=0.1, atol=0)
    assert len(told) == 1
    assert f"drew {name!r} with the mean and deviation in model" in told[0]
    assert "pass a function that builds the network" in told[0]


def test_padding_stays_zero_where_an_embedding_has_another_deviation() -> None:
    table = nn.Embedding(200, WIDTH, padding_idx=5)
    with torch.no_grad():
        table.weight.normal_(std=0.02)[5] = 0.0
    weight = stacked_parameters(members_of(Headed(table))[0])["part.weight"]
    assert not weight[:, 5].any()
    torch.testing.assert_close(weight.std().item(), 0.02, rtol=0.05, atol=0)


def test_narrowed_layers_keep_how_much_larger_they_are_than_their_rule() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            nn.init.kaiming_normal_(layer.weight)
            layer.bias.zero_()
    with pytest.warns(UserWarning, match="drew '0.weight', '2.weight' with the mean and deviation in model"):
        net = mt.packed(model, 4, 2, seed=0)
    weight = stacked_parameters(net)["2.weight"]
    assert weight.shape == (4, 128, 128)
    torch.testing.assert_close(weight.std((1, 2)), torch.full((4,), (2 / 128) ** 0.5), rtol=0.03, atol=0)
    assert not stacked_parameters(net)["0.bias"].any()


SOUND: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(200, 100),
    "small": lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(30))),
    "embedding": lambda: nn.Embedding(500, 40, padding_idx=0),
    "half": lambda: nn.Linear(200, 100).half(),
    "lstm": lambda: nn.LSTM(16, 16, 2),
    "transformer": lambda: nn.Transformer(16, 2, 1, 1, 32),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 2)),
    "one number": lambda: nn.PReLU(),
    "resnet": lambda: mt.models.resnet20(classes=10),
    "normed": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 16)), parametrizations.spectral_norm(nn.Linear(16, 8))
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", SOUND)
def test_values_from_rules_do_not_look_custom_or_trained(case: str, seed: int) -> None:
    torch.manual_seed(seed)
    assert compare_with_rules(SOUND[case]()) == ({}, None)


# -- every layer's own rule --------------------------------------------------------------------------------


COMPUTED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "old spectral norm": (lambda: old_spectral_norm(nn.Linear(WIDTH, WIDTH)), ["weight_orig"]),
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), ["parametrizations.weight.original"]
    ),
    "old weight norm": (lambda: old_weight_norm(nn.Linear(WIDTH, WIDTH)), ["weight_g", "weight_v"]),
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        ["parametrizations.weight.original0", "parametrizations.weight.original1"],
    ),
    "pruned": (lambda: prune.random_unstructured(nn.Linear(WIDTH, WIDTH), "weight", 0.5), ["weight_orig"]),
    "no inverse": (
        lambda: nn.utils.parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", Symmetric()),
        ["parametrizations.weight.original"],
    ),
}  # fmt: skip


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("init", ["fresh", "heads", "frozen"])
@pytest.mark.parametrize("case", COMPUTED)
def test_weights_that_are_computed_are_drawn_where_they_are_computed_from(case: str, init: str) -> None:
    make, names = COMPUTED[case]
    x = torch.randn(4, WIDTH)
    model = nn.Sequential(make(), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    model(x)  # a weight that autograd has made
    if init == "frozen":
        model[0].requires_grad_(False)
    options = {"init": "heads", "heads": ["0"]} if init == "heads" else {"init": "fresh"}
    net = mt.deep_ensemble(model, 2, seed=0, **options)
    bound = WIDTH**-0.5
    own = stacked_parameters(net)
    for name in names:
        given, got = model[0].get_parameter(name), own[f"0.{name}"]
        if init == "frozen":
            assert torch.equal(got, given.expand_as(got))
            continue
        assert not torch.isclose(got[0], got[1]).all()
        assert not torch.isclose(got[0], given).all()
        if name.endswith(("orig", "original", "_v", "1")):
            torch.testing.assert_close(got.std().item(), bound / 3**0.5, rtol=0.1, atol=0)
    for index in range(2):
        member = net.member(index).eval()
        torch.testing.assert_close(net.eval()(x)[index], member(x))
        if "spectral" in case and init != "frozen":
            torch.testing.assert_close(torch.linalg.matrix_norm(member[0].weight, 2).item(), 1.0, rtol=0.05, atol=0)
    if "weight norm" in case and init != "frozen":
        length, direction = (own[f"0.{name}"] for name in names)
        torch.testing.assert_close(length, direction.norm(dim=2, keepdim=True))


def test_complex_layers_are_drawn_by_their_rule() -> None:
    layer = nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat)
    weight = stacked_parameters(members_of(Headed(layer))[0])["part.weight"]
    assert weight.dtype == torch.cfloat
    assert not torch.isclose(weight[0], weight[1]).any()
    torch.testing.assert_close(weight.abs().square().mean(), layer.weight.abs().square().mean(), rtol=0.2, atol=0)
    moved = stacked_parameters(mt.deep_ensemble(Headed(layer), 2, init="pretrained", perturb=0.1, seed=0))[
        "part.weight"
    ]
    torch.testing.assert_close((moved - layer.weight).std() / layer.weight.std(), torch.tensor(0.1), rtol=0.1, atol=0)


class Initialised(nn.Module):
    """Code that names its initialiser as Hugging Face does, once with and once without the module to initialise."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        if each:
            self._init_weights = self._init_each  # type: ignore[method-assign]
            self.apply(self._init_each)
        else:
            self._init_weights()

    def _init_weights(self) -> None:
        nn.init.constant_(self.body.weight, 0.5)

    @staticmethod
    def _init_each(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5 if module.out_features == WIDTH else 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("each", [True, False], ids=["each", "all"])
def test_a_network_has_the_last_word_in_its_own_initialiser(each: bool) -> None:
    model = Initialised(each)
    with torch.no_grad():
        model.body.weight.normal_()
    reinitialize(model)
    assert torch.equal(model.body.weight, torch.full((WIDTH, WIDTH), 0.5))
    assert bool((model.head.weight == 0.25).all()) is each


# -- networks that look trained ----------------------------------------------------------------------------


def trained() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(32, 8, generator=generator)).square().mean().backward()
        optimizer.step()
    return model


def test_replacing_trained_weights_warns_unless_it_was_asked_for() -> None:
    for method in (mt.deep_ensemble, mt.packed, mt.batch_ensemble, mt.masksembles, mt.mimo, mt.variance):
        with pytest.warns(
            UserWarning, match=r"model looks trained \(layer '1' has running statistics of data\).*init='heads'"
        ) as told:
            method(trained())
        assert len(told) == 1
    for init in ("fresh", "heads"):
        assert members_of(trained(), init=init)[1] == []
    assert torch.equal(stacked_parameters(members_of(trained(), init="fresh")[0])["1.weight"], torch.ones(2, 16))


def test_a_few_batches_are_no_training_and_a_frozen_backbone_none_of_the_rest() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
    model(torch.randn(4, 8))
    assert members_of(model)[1] == []
    model = trained()
    model[:2].requires_grad_(False)
    assert members_of(model)[1] == []


def test_gains_that_vary_are_trained_and_drawn_by_their_rule() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, CLASSES))
    with torch.no_grad():
        model[1].weight.add_(0.1 * torch.randn(16))
    net, told = members_of(model)
    assert torch.equal(stacked_parameters(net)["1.weight"], torch.ones(2, 16))
    assert len(told) == 1
    assert "model looks trained ('1.weight' varies, and its layer starts it constant)" in told[0]
