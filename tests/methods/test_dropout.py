"""MC dropout and DropConnect: what is drawn, where it is put."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.methods.dropout import Dropout


def dropouts(net: nn.Module) -> list[str]:
    return [name for name, layer in net.named_modules() if type(layer) is Dropout]


def has_probability(events: Tensor, p: float) -> bool:
    """Return whether events `[N, ...]` have probability p, within five standard errors and one rare event."""
    error = 5 * math.sqrt(p * (1 - p) / len(events)) + 1 / len(events)
    return bool(((events.float().mean(0) - p).abs() <= error).all())


# -- what is drawn -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_zeroes_and_scales(p: float) -> None:
    x = torch.rand(6, 5) + 0.5
    drawn = mt.mc_dropout(nn.Dropout(p)).eval()(x, draws=4000, seed=0)
    kept = drawn != 0
    torch.testing.assert_close(drawn[kept], (x / (1 - p)).expand_as(drawn)[kept])
    assert has_probability(kept, 1 - p)
    assert has_probability(kept[:, :, 1:] & kept[:, :, :-1], (1 - p) ** 2)  # neighbours and rows are independent
    assert has_probability(kept[:, 1:] & kept[:, :-1], (1 - p) ** 2)


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_whole_channels_are_dropped(kind: type[nn.Module]) -> None:
    dims = {nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}[kind]
    drawn = mt.mc_dropout(kind(0.4)).eval()(torch.ones(3, 8, *[2] * dims), draws=2000, seed=0)
    channels = drawn.flatten(3)
    assert (channels == channels[..., :1]).all()
    assert has_probability(channels[..., 0] > 0, 0.6)


def test_half_precision_keeps_the_rate() -> None:
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    drawn = mt.mc_dropout(nn.Dropout(0.3)).eval()(x, draws=200, seed=0)
    assert drawn.dtype == torch.bfloat16
    assert abs((drawn > 0).float().mean().item() - 0.7) < 5 * math.sqrt(0.21 / drawn.numel())


def test_zero_draws_are_the_network_in_evaluation() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 3)).eval()
    x = torch.randn(5, 4)
    torch.testing.assert_close(mt.mc_dropout(model)(x, draws=0)[0], model(x))
    torch.testing.assert_close(mt.drop_connect(model, 0.4)(x, draws=0)[0], model(x))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(2, 2), (3, 2)),
        (nn.Conv1d(1, 2, 2, stride=2), (3, 1, 5)),
        (nn.Conv2d(2, 2, (1, 2), groups=2, padding=1, padding_mode="circular"), (3, 2, 4, 4)),
        (nn.Conv3d(1, 1, (2, 1, 2), bias=False), (3, 1, 2, 2, 2)),
    ],
)
def test_drop_connect_is_every_mask_with_its_probability(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    net = mt.drop_connect(layer, 0.3).eval()
    drawn = net(x, draws=3000, seed=0).detach()
    found = torch.zeros(len(drawn))
    for mask in itertools.product([0.0, 1.0], repeat=layer.weight.numel()):
        weight = layer.weight.detach() * torch.tensor(mask).view_as(layer.weight) / 0.7
        want = torch.func.functional_call(layer, {"weight": weight}, (x,)).detach()
        same = torch.isclose(drawn, want, atol=1e-5).flatten(1).all(1)
        kept = int(sum(mask))
        assert has_probability(same, 0.7**kept * 0.3 ** (len(mask) - kept))
        found += same
    assert (found == 1).all()  # one mask serves the whole batch


def test_drop_connect_keeps_names_settings_and_weights() -> None:
    model = mt.models.lenet5()
    net = mt.drop_connect(model, 0.2, layers="fc.*|conv2|.*")
    assert list(net.state_dict()) == list(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), model.state_dict().values(), strict=True))


# -- where it is put ---------------------------------------------------------------------------------------


def test_existing_dropout_stays_on_with_its_own_or_another_rate() -> None:
    model = mt.models.vgg_like()
    own = [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)]
    net = mt.mc_dropout(model)
    assert [net.get_submodule(name).p for name in dropouts(net)] == own
    net = mt.mc_dropout(model, 0.05)
    assert {net.get_submodule(name).p for name in dropouts(net)} == {0.05}
    assert list(net.state_dict()) == list(model.state_dict())
    assert len(dropouts(mt.mc_dropout(model, layers=["classifier.0"]))) == 1


@pytest.mark.parametrize(
    ("build", "places"),
    [
        (lambda: mt.models.wide_resnet(10, 1), [f"layer{s}.0.conv2" for s in range(1, 4)]),
        (mt.models.preact_resnet18, [f"layer{s}.{b}.conv2" for s in range(1, 5) for b in range(2)]),
        (mt.models.resnet50, [f"layer{s}.{b}.conv3" for s, n in ((1, 3), (2, 4), (3, 6), (4, 3)) for b in range(n)]),
        (mt.models.resnet20, [f"layer{s}.{b}.conv2" for s in range(1, 4) for b in range(3)]),
    ],
)
def test_the_last_convolution_of_each_residual_block(build: object, places: list[str]) -> None:
    net = mt.mc_dropout(build(), 0.3, "block", example=torch.randn(2, 3, 16, 16))  # type: ignore[operator]
    assert dropouts(net) == [f"{place}.dropout" for place in places]


def test_networks_without_residual_blocks_are_errors() -> None:
    with pytest.raises(ValueError, match="no residual block"):
        mt.mc_dropout(mt.models.unet(3, width=4), 0.3, "block", example=torch.randn(2, 3, 16, 16))


def test_after_every_activation_and_before_every_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(3, 4)
    net = mt.mc_dropout(model, 0.3, "activation")
    assert [name for name, _ in net.named_children()] == ["0", "1", "2", "dropout", "3", "4", "dropout_2", "5"]
    net = mt.mc_dropout(model, 0.3, "norm")
    assert [name for name, _ in net.named_children()] == ["0", "dropout", "1", "2", "3", "4", "5"]
    assert list(net.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(net.eval()(x, draws=0)[0], model.eval()(x))


def test_a_shared_activation_drops_in_each_of_its_places() -> None:
    net = mt.mc_dropout(mt.models.resnet18(), 0.5, "layer1.0.relu").eval()
    seen: list[Tensor] = []
    net.get_submodule("layer1.0.relu.dropout").register_forward_hook(lambda m, args, y: seen.append(y))
    net(torch.randn(2, 3, 8, 8), draws=1)
    assert len(seen) == 2


def test_dropout_inside_attention_stays_on_too() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    net = mt.mc_dropout(model, example=torch.randn(2, 5, 8))
    assert dropouts(net) == ["dropout", "dropout1", "dropout2"]
    assert net.notes["self_attn"] == "multi_head_attention_forward in its own code stays on"


def test_existing_dropout_stays_on_when_more_is_inserted() -> None:
    net = mt.mc_dropout(mt.models.small_cnn(dropout=0.1), 0.4, ["fc"], example=torch.zeros(2, 3, 32, 32))
    rates = [layer.p for layer in net.modules() if type(layer) is Dropout]
    assert rates.count(0.4) == 1
    assert set(rates) == {0.1, 0.4}


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan"), "half", True])
def test_invalid_rates_are_errors(p: object) -> None:
    for method in (mt.mc_dropout, mt.drop_connect):
        with pytest.raises(ValueError, match="p must be 0 or more and below 1"):
            method(nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 2)), p)


PLAIN = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
DROPPING = nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("model", "arguments", "sentence"),
    [
        (
            PLAIN,
            (0.1,),
            "no dropout layer to keep on; layers= selects where to insert some: 'block', 'activation', 'norm'",
        ),
        (PLAIN, (0.1, "everywhere"), "layers='everywhere' selects nothing; it could select: 0, 1, 2"),
        (PLAIN, (None, "activation"), "p must be given for the dropout that layers='activation' inserts"),
        (
            nn.Sequential(nn.Dropout(0.0), nn.Linear(3, 2)),
            (),
            "p must be given, since the model's dropout layers have rate 0",
        ),
        (mt.deep_ensemble(DROPPING, 2), (), "model is a multitude"),
    ],
)
def test_bad_arguments_are_errors(model: nn.Module, arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        mt.mc_dropout(model, *arguments)


def test_layers_selects_existing_dropout_or_places_to_insert_it() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 2))
    kinds = {mt.mc_dropout(model, layers=selector).network[3].__class__ for selector in ("[0-3]", ["1", "3"])}
    assert kinds == {Dropout}  # all that match the pattern are dropout layers, so nothing is inserted
    names = {selector: [n for n, _ in mt.mc_dropout(model, 0.5, selector).named_children()] for selector in "024"}
    assert names["0"] == ["dropout", "0", "1", "2", "3", "4"]
    assert names["2"] == ["0", "1", "2", "dropout", "3", "4"]  # after an activation
    assert names["4"] == ["0", "1", "2", "3", "dropout", "4"]
    with pytest.raises(ValueError, match="model must be an nn.Module"):
        mt.drop_connect(None, 0.1)  # type: ignore[arg-type]
