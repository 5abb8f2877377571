"""New layers on the inputs and outputs of a network's layers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, fx, nn

import multitudes as mt
from multitudes.surgery.insert import Inserted, after, before
from tests.zoo.of_parts import Of

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Times(nn.Module):
    """Multiplies by a number, so that it shows where it has been."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Net(nn.Module):
    """A convolution that the network holds itself, a nested Sequential, and one ReLU for both."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.relu = nn.ReLU()
        self.body = nn.Sequential(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)), nn.Conv2d(8, 4, 3, stride=2))

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(self.relu(self.conv(x)))).mean((2, 3))


def indexed() -> nn.Module:
    """Reaches into a Sequential by position, and never calls it."""
    layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    return Of(lambda net, x: net.layers[2](net.layers[1](net.layers[0](x))), layers=layers)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6)


# -- what is computed --------------------------------------------------------------------------------------


def test_before_runs_on_the_input_and_after_on_the_output(net: Net) -> None:
    hidden = net.relu(net.conv(IMAGES))
    inner, last = net.body
    doubled = before(net, {"body.1": Times()}, example=IMAGES)
    assert close(doubled(IMAGES), net.relu(last(2 * inner(hidden))).mean((2, 3)))
    doubled = after(net, {"body.1": Times()}, example=IMAGES)
    assert close(doubled(IMAGES), net.relu(2 * last(inner(hidden))).mean((2, 3)))


def test_a_layer_that_the_network_holds_itself_gets_it_as_well(net: Net) -> None:
    assert close(before(net, {"conv": Times()})(IMAGES), before(net, {"conv": Times()}, example=IMAGES)(IMAGES))
    rest = net.body(net.relu(net.conv(2 * IMAGES)))
    assert close(before(net, {"conv": Times()})(IMAGES), net.relu(rest).mean((2, 3)))


def test_a_layer_of_several_places_gets_it_in_all_of_them(net: Net) -> None:
    hidden = 2 * net.relu(net.conv(IMAGES))
    want = 2 * net.relu(net.body(hidden)).mean((2, 3))
    assert close(after(net, {"relu": Times()}, example=IMAGES)(IMAGES), want)
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 3), relu, nn.Linear(3, 3), relu)
    x = torch.randn(5, 3)
    doubled = after(model, {"1": Times()}, example=x)
    assert close(doubled(x), 2 * relu(model[2](2 * relu(model[0](x)))))
    assert doubled[1] is doubled[3]


def test_a_sequential_that_is_reached_into_by_position_keeps_its_positions() -> None:
    model = indexed()
    want = model.layers[2](2 * model.layers[1](model.layers[0](IMAGES)))
    for doubled in (before(model, {"layers.2": Times()}, example=IMAGES), before(model, {"layers.2": Times()})):
        assert len(doubled.layers) == 3
        assert close(doubled(IMAGES), want)


def test_a_layer_that_is_also_kept_in_a_plain_list_gets_it() -> None:
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    model = Of(lambda net, x: net.order[1](net.order[0](x)), one=one, two=two, order=[one, two])
    x = torch.randn(5, 3)
    assert close(before(model, {"two": Times()})(x), model.two(2 * model.one(x)))


def test_further_arguments_are_the_layers_own() -> None:
    gate = Of(lambda net, x, gate, power=1: x * gate**power)
    gated = Of(lambda net, x: net.gate(x, x + 1, power=2), gate=gate)
    x = torch.randn(5, 3)
    assert close(after(before(gated, {"gate": Times(3.0)}), {"gate": Times()})(x), 2 * 3 * x * (x + 1) ** 2)


def test_insertions_inside_of_and_around_a_block_at_once(net: Net) -> None:
    new = {"body": Times(2.0), "body.0": Times(3.0), "body.0.0": Times(5.0), "conv": Times(7.0)}
    conv, norm = net.body[0]
    hidden = net.relu(net.conv(7 * IMAGES))
    want = net.relu(net.body[1](norm(conv(2 * 3 * 5 * hidden)))).mean((2, 3))
    assert close(before(net, new, example=IMAGES)(IMAGES), want)
    assert close(before(net, new)(IMAGES), want)
    wrapped = before(net, {"body": Times(2.0)})
    again = before(
        wrapped, {"body.layer": Times(3.0), "body.layer.0.0": Times(5.0), "conv": Times(7.0)}, example=IMAGES
    )
    assert close(again(IMAGES), want)
    assert [name for name, _ in again.body.named_children()] == ["times", "times_2", "layer"]


def test_a_layer_inside_a_block_may_have_a_name_outside_of_it(net: Net) -> None:
    net.inner = net.body[0][0]
    conv, norm = net.body[0]
    hidden = net.relu(net.conv(IMAGES))
    want = net.relu(net.body[1](norm(conv(2 * 3 * hidden)))).mean((2, 3))
    assert close(before(net, {"body": Times(2.0), "inner": Times(3.0)})(IMAGES), want)


def test_the_network_itself_may_be_the_layer(net: Net) -> None:
    assert close(before(net, {"": Times()})(IMAGES), net(2 * IMAGES))


def test_torchs_encoder_layer_does_not_compute_past_it() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    doubled = before(layer, {"linear1": Times(3.0)})
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        assert close(doubled.eval()(x), doubled.train()(x))
        assert not close(doubled.eval()(x), layer.eval()(x))


# -- names, modes, tensors ---------------------------------------------------------------------------------


def test_names_stay_in_a_sequential_that_is_called(net: Net) -> None:
    for insert, order in ((before, ["times", "0", "1"]), (after, ["0", "times", "1"])):
        new = insert(net, {"body.0": Times(), "body.0.1": Times()}, example=IMAGES)
        assert list(new.state_dict()) == list(net.state_dict())
        assert [name for name, _ in new.body.named_children()] == order
    root = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    new = before(root, {"0": Times(), "1": Times()}, example=torch.ones(1, 3))
    assert [name for name, _ in new.named_children()] == ["times", "0", "times_2", "1"]
    assert list(new.state_dict()) == list(root.state_dict())


def test_a_layer_without_parameters_leaves_the_names_of_tensors_alone(net: Net) -> None:
    assert list(before(net, {"relu": Times()}).state_dict()) == list(net.state_dict())


def test_fresh_names_do_not_clash() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    for name, want in (("0", "0_2"), ("append", "append_2"), ("noise", "noise")):
        new = before(model, {"1": Times()}, name=name, example=x)
        assert [child for child, _ in new.named_children()] == ["0", want, "1"]


def test_what_the_network_asks_of_a_wrapped_layer_is_the_layers(net: Net) -> None:
    wrapped = after(net, {"conv": Times()}).conv
    assert isinstance(wrapped, Inserted)
    assert wrapped.stride == (1, 1)
    assert wrapped.weight is wrapped.layer.weight
    assert wrapped.times.factor == 2.0
    with pytest.raises(AttributeError):
        _ = wrapped.nothing


def test_a_networks_own_initialiser_still_finds_wrapped_layers() -> None:
    model = mt.models.ResNet(mt.models.resnet.BasicBlock, (1, 1, 1, 1), width=32)
    new = before(model, {"layer4.0.conv2": Times()})
    nn.init.zeros_(new.layer4[0].conv2.weight)
    torch.manual_seed(0)
    new.reset_parameters()
    assert new.layer4[0].conv2.weight.std().item() == pytest.approx((2 / (9 * 256)) ** 0.5, rel=0.02)  # He et al.


def test_checkpoints_with_the_former_names_load() -> None:
    def block() -> nn.Module:
        """Has a child with the name that `Inserted` gives as well."""
        return Of(lambda net, x: net.norm(net.layer(x)), layer=nn.Linear(3, 3), norm=nn.BatchNorm1d(3))

    model, other = (Of(lambda net, x: net.two(net.one(x)), one=block(), two=block()).eval() for _ in range(2))
    x = torch.randn(5, 3)
    new = before(model, {"two": Times()})
    new.load_state_dict(other.state_dict())
    assert close(new(x), other.two(2 * other.one(x)))
    again = before(model, {"two": Times()})
    again.load_state_dict(new.state_dict())
    assert torch.equal(again(x), new(x))
    state = other.state_dict()
    del state["two.norm.weight"]
    with pytest.raises(RuntimeError, match=r"two\.layer\.norm\.weight"):
        new.load_state_dict(state)


def test_shared_weights_stay_shared() -> None:
    tied = Of(lambda net, x: net.back(net.there(x)), there=nn.Linear(3, 3), back=nn.Linear(3, 3))
    tied.back.weight = tied.there.weight
    new = before(tied, {"back": Times()})
    assert new.back.layer.weight is new.there.weight


def test_modes_are_kept_and_the_given_model_is_left_alone(net: Net) -> None:
    net.train()
    net.body[0][1].eval()
    text, state = repr(net), copy.deepcopy(net.state_dict())
    new = before(net, {"body": Times(), "body.0.1": Times(), "conv": Times()})
    assert new.training and new.body.training and new.body.times.training and new.conv.layer.training
    assert not new.body.layer[0][1].training and not new.body.layer[0][1].layer.training
    assert repr(net) == text
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    for parameter in new.parameters():
        parameter.data.zero_()
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())


def test_copies_pickles_and_doubles(net: Net) -> None:
    new = before(net, {"conv": Times(), "body.1": Times()}, example=IMAGES)
    assert torch.equal(copy.deepcopy(new)(IMAGES), new(IMAGES))
    assert torch.equal(pickle.loads(pickle.dumps(new))(IMAGES), new(IMAGES))
    assert close(new.double()(IMAGES.double()).float(), before(net, {"conv": Times(), "body.1": Times()})(IMAGES))


def test_an_unknown_layer_is_an_error(net: Net) -> None:
    with pytest.raises(ValueError, match=r"no layer 'convolution'; there are: conv, relu, body"):
        before(net, {"convolution": Times()})


# -- what else must be able to run it ----------------------------------------------------------------------


@pytest.fixture(params=["children", "wrapped"])
def inserted(net: Net, request: pytest.FixtureRequest) -> nn.Module:
    new = {"conv": nn.Hardtanh(), "body.0.0": nn.Hardtanh(), "body.1": nn.Hardtanh()}
    return before(net, new, example=IMAGES if request.param == "children" else None)


def test_it_is_traced_compiled_and_run_by_every_runner(inserted: nn.Module) -> None:
    with torch.no_grad():
        want = inserted(IMAGES)
        assert close(fx.symbolic_trace(inserted)(IMAGES), want)
        assert close(torch.compile(inserted, backend="aot_eager", fullgraph=True)(IMAGES), want)
    members = mt.deep_ensemble(inserted, 3)
    mt.check(members, IMAGES)
    members.runner = "packed"  # an error, had it been refused
    assert members(IMAGES).shape == (3, 4, 4)


def test_it_is_narrowed(inserted: nn.Module) -> None:
    members = mt.packed(inserted, 2, alpha=1, example=IMAGES)
    mt.check(members, IMAGES)
    widths = {m.out_channels for m in members.member(0).modules() if isinstance(m, nn.Conv2d)}
    assert widths == {4}  # half of 8, and the 4 outputs
    members.runner = "packed"
