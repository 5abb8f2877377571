"""The architectures without residual blocks are those of the papers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from multitudes.models import (
    CNN,
    MLP,
    VGG,
    UNet,
    VGGLike,
    lenet5,
    medium_cnn,
    mlp,
    small_cnn,
    unet,
    vgg16,
    vgg19,
    vgg_like,
)
from tests.test_models import on_meta

# One tiny network of each family, and the shape of its inputs.
TINY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vgg": (lambda: VGG((1, 2, 1, 1, 1), classes=7, channels=1, width=4), (1, 40, 33)),
    "vgg_like": (lambda: VGGLike(classes=7, channels=1, width=4), (1, 20, 28)),
    "lenet": (lambda: lenet5(classes=7, channels=1, size=17), (1, 17, 17)),
    "cnn": (lambda: CNN((4, 8, 8), classes=7, channels=2, size=21), (2, 21, 21)),
    "unet": (lambda: unet(classes=7, channels=1, width=2), (1, 19, 34)),
    "mlp": (lambda: mlp(12, 7, hidden=(9, 8), dropout=0.1), (3, 2, 2)),
    "mlp-batch": (lambda: mlp(12, 7, hidden=(9, 8), norm="batch", bias=False, output_bias=False), (12,)),
    "mlp-layer": (lambda: mlp(12, 7, hidden=(9, 8), norm="layer", activation="gelu"), (12,)),
    "linear": (lambda: mlp(12, 7, hidden=()), (12,)),
}
tiny = pytest.mark.parametrize(("build", "shape"), TINY.values(), ids=TINY.keys())
Build = Callable[[], nn.Module]


def layers(net: nn.Module, kind: type[nn.Module]) -> list[Any]:
    return [layer for layer in net.modules() if isinstance(layer, kind)]


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


# -- what holds for all ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "arguments", "parameters"),
    [
        (vgg16, {}, 14_728_266),
        (vgg19, {}, 20_040_522),
        (vgg_like, {}, 14_991_946),
        (lenet5, {}, 431_080),
        (medium_cnn, {}, 971_146),
        (unet, {"classes": 1}, 31_037_633),
        (unet, {"classes": 2}, 31_037_698),
        (mlp, {"inputs": 100, "outputs": 100, "hidden": (100,) * 99, "output_bias": False}, 1_009_900),
    ],
)
def test_parameter_counts_are_the_published_ones(
    build: Callable[..., nn.Module], arguments: dict[str, Any], parameters: int
) -> None:
    assert count(on_meta(build, **arguments)) == parameters


@tiny
def test_an_input_becomes_one_score_per_class(build: Build, shape: tuple[int, ...]) -> None:
    net = build()
    dense = shape[1:] if isinstance(net, UNet) else ()
    assert net(torch.randn(3, *shape)).shape == (3, 7, *dense)
    assert net.eval()(torch.randn(1, *shape)).shape == (1, 7, *dense)


@tiny
def test_networks_can_be_traced(build: Build, shape: tuple[int, ...]) -> None:
    net = build().eval()
    x = torch.randn(2, *shape)
    assert torch.equal(fx.symbolic_trace(net)(x), net(x))


@tiny
def test_gradients_reach_every_parameter(build: Build, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net = build()
    net(torch.randn(8, *shape)).pow(3).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


@tiny
def test_reset_parameters_builds_the_network_anew(build: Build, shape: tuple[int, ...]) -> None:
    net = build()
    net(torch.randn(8, *shape))  # moves the running statistics
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(7.0)
    net.reset_parameters()
    norms = {name for name, layer in net.named_modules() if "Norm" in type(layer).__name__}
    for (name, value), fresh in zip(net.state_dict().items(), build().state_dict().values(), strict=True):
        if name.rpartition(".")[0] in norms:
            assert torch.equal(value, fresh), name
        else:
            assert 0 < value.std() < 2, name
            assert not torch.equal(value, fresh), name


@tiny
def test_nothing_but_dropout_and_norms_depends_on_the_mode(build: Build, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net = build()
    for layer in net.modules():
        if isinstance(layer, nn.Dropout | nn.BatchNorm1d | nn.BatchNorm2d):
            layer.register_forward_hook(lambda _, x, y: x[0])
    x = torch.randn(2, *shape)
    assert torch.equal(net.train()(x), net.eval()(x))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: VGG((1, 1, 1, 1)), r"^depths must be five .* got \(1, 1, 1, 1\)"),
        (lambda: VGG((1, 1, 0, 1, 1)), r"^depths must be five .* got \(1, 1, 0, 1, 1\)"),
        (lambda: vgg16(classes=0), r"^classes must be .* got 0"),
        (lambda: vgg_like(channels=0), r"^channels must be .* got 0"),
        (lambda: lenet5(size=15), r"^size must be 16 or more.* got 15"),
        (lambda: lenet5(classes=True), r"^classes must be .* got True"),
        (lambda: CNN(()), r"^widths must be .* got \(\)"),
        (lambda: small_cnn(dropout=1.0), r"^dropout must be .* got 1.0"),
        (lambda: medium_cnn(size=0), r"^size must be .* got 0"),
        (lambda: unet(classes=0), r"^classes must be .* got 0"),
        (lambda: unet(classes=2, width=0), r"^width must be .* got 0"),
        (lambda: unet(classes=2, dropout=-0.1), r"^dropout must be .* got -0.1"),
        (lambda: mlp(0, 1), r"^inputs must be .* got 0"),
        (lambda: mlp(1, 0), r"^outputs must be .* got 0"),
        (lambda: mlp(1, 1, hidden=(4, 0)), r"^hidden must be .* got \(4, 0\)"),
        (lambda: mlp(1, 1, norm="group"), r'^norm must be "batch", "layer" or None, got \'group\''),
        (lambda: mlp(1, 1, activation="step"), r"^activation must be one of relu, .*tanh.* got 'step'"),
        (lambda: mlp(1, 1, dropout=float("nan")), r"^dropout must be .* got nan"),
    ],
)
def test_bad_arguments_are_refused_by_name(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# -- VGG and VGG-like --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "depth"), [(vgg16, 16), (vgg19, 19)])
def test_a_vgg_has_all_its_convolutions_and_five_pools(build: Callable[..., nn.Module], depth: int) -> None:
    net = on_meta(build)
    assert len(layers(net, nn.Conv2d)) == depth - 3  # the paper counts three linear layers, CIFAR has one
    assert len(layers(net, nn.MaxPool2d)) == 5
    assert net.features(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 512, 1, 1)
    assert net.features(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 512, 7, 7)


def test_features_have_torchvisions_names() -> None:
    features = on_meta(vgg16).features
    convolutions = [i for i, layer in enumerate(features) if isinstance(layer, nn.Conv2d)]
    assert convolutions == [0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40]  # as in vgg16_bn
    assert all(isinstance(features[i + 1], nn.BatchNorm2d) for i in convolutions)
    assert len(features) == 44


def test_a_vgg_averages_what_is_left_of_a_larger_image() -> None:
    net = VGG((1, 1, 1, 1, 1), classes=3, width=2).eval()
    x = torch.randn(2, 3, 64, 96)
    torch.testing.assert_close(net(x), net.fc(net.features(x).mean((2, 3))))


def test_the_vgg_like_network_is_vgg16_with_dropout_and_a_hidden_layer() -> None:
    net, vgg = on_meta(vgg_like), on_meta(vgg16)
    kept = [layer for layer in net.features if not isinstance(layer, nn.Dropout)]
    assert [type(layer) for layer in kept] == [type(layer) for layer in vgg.features]
    shapes = [p.shape for p in net.features.parameters()]
    assert shapes == [p.shape for p in vgg.features.parameters()]
    assert [layer.p for layer in layers(net, nn.Dropout)] == [0.3, *[0.4] * 7, 0.5, 0.5]
    # Dropout follows each activation but those before a pool.
    after = [type(b).__name__ for a, b in zip(net.features, net.features[1:], strict=False) if isinstance(a, nn.ReLU)]
    assert after == ["Dropout", "MaxPool2d"] * 2 + ["Dropout", "Dropout", "MaxPool2d"] * 3


# -- LeNet, SmallCNN, MediumCNN ----------------------------------------------------------------------------


def test_lenet_step_by_step() -> None:
    net = lenet5()
    x = torch.randn(2, 1, 28, 28)
    y = F.max_pool2d(F.conv2d(x, net.conv1.weight, net.conv1.bias).relu(), 2)
    assert y.shape == (2, 20, 12, 12)
    y = F.max_pool2d(F.conv2d(y, net.conv2.weight, net.conv2.bias).relu(), 2)
    assert y.shape == (2, 50, 4, 4)
    y = (y.flatten(1) @ net.fc1.weight.T + net.fc1.bias).relu()
    torch.testing.assert_close(net(x), y @ net.fc2.weight.T + net.fc2.bias)


@pytest.mark.parametrize(
    ("build", "widths", "features"),
    [(small_cnn, [16, 32, 32], (32, 4, 4)), (medium_cnn, [64, 128, 256, 256], (256, 2, 2))],
)
def test_the_cnns_have_the_papers_channels(
    build: Callable[..., nn.Module], widths: list[int], features: tuple[int, ...]
) -> None:
    net = on_meta(build)
    assert [conv.out_channels for conv in layers(net, nn.Conv2d)] == widths
    assert net.features(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, *features)
    assert [layer.p for layer in layers(net, nn.Dropout)] == [0.1] * len(widths)
    assert [layer.p for layer in layers(on_meta(build, dropout=0.3), nn.Dropout)] == [0.3] * len(widths)


def test_small_cnn_has_as_many_parameters_as_its_layers_by_hand() -> None:
    convolutions = (3 * 9 + 1) * 16 + (16 * 9 + 1) * 32 + (32 * 9 + 1) * 32
    assert count(on_meta(small_cnn)) == convolutions + (32 * 4 * 4 + 1) * 10


def test_a_cnn_drops_pools_and_then_activates_all_but_its_last_features() -> None:
    names = [type(layer).__name__ for layer in small_cnn().features]
    assert names == ["Conv2d", "Dropout", "MaxPool2d", "ReLU"] * 2 + ["Conv2d", "Dropout", "MaxPool2d"]


# -- U-Net -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(64, 48), (33, 47), (90, 121), (16, 1), (1, 1)])
def test_a_unet_labels_each_pixel_of_an_image_of_any_size(size: tuple[int, int]) -> None:
    net = unet(classes=3, width=2).eval()
    assert net(torch.randn(2, 3, *size)).shape == (2, 3, *size)


def test_the_dropouts_of_a_unet_are_in_its_deepest_six_parts() -> None:
    net, seen = unet(classes=3, width=2), []
    for layer in layers(net, nn.Dropout):
        layer.register_forward_hook(lambda _, x, y: seen.append(tuple(y.shape[1:])))
    net(torch.randn(2, 3, 64, 64))
    encoder = [(8, 16, 16), (16, 8, 8), (32, 4, 4)]
    decoder = [(16, 8, 8), (8, 16, 16), (4, 32, 32)]
    assert seen == encoder + decoder
    assert len(layers(net, nn.MaxPool2d)) == 4


def test_the_decoder_reads_what_the_encoder_had_without_dropout() -> None:
    net, made, read = unet(classes=3, width=2), {}, {}

    def keep(store: dict[str, Tensor], name: str) -> Callable[..., None]:
        return lambda _, x, y: store.update({name: (y if store is made else x[1]).clone()})

    for level in "1234":
        net.get_submodule(f"down{level}").register_forward_hook(keep(made, level))
        net.get_submodule(f"up{level}").register_forward_hook(keep(read, level))
    net(torch.randn(2, 3, 40, 24))
    assert all(torch.equal(made[level], read[level]) for level in "1234")


def test_a_pixel_of_a_unet_sees_its_surroundings_through_the_bottom() -> None:
    torch.manual_seed(0)
    net = unet(classes=1, width=4).eval()
    x = torch.randn(1, 3, 64, 64, requires_grad=True)
    net(x)[0, 0, 20, 20].backward()
    assert x.grad is not None
    rows = x.grad.abs().sum((0, 1, 3)).nonzero().flatten()
    # Two convolutions at each of the levels 1, 2, 4, 8, on both ways, and at 16 reach further than 40 pixels.
    assert rows.min() == 0
    assert rows.max() > 60


def test_the_last_convolution_of_a_unet_starts_like_a_linear_layer() -> None:
    net = unet(classes=50, width=16)
    assert 0.9 / 4 < net.fc.weight.abs().max() <= 1 / 4  # uniform within 1 / sqrt(inputs)


# -- MLP ---------------------------------------------------------------------------------------------------


def test_an_mlp_without_hidden_layers_is_linear() -> None:
    net = mlp(6, 3, hidden=())
    x = torch.randn(4, 6)
    torch.testing.assert_close(net(x), x @ net.fc.weight.T + net.fc.bias)


def test_a_hidden_layer_is_linear_then_norm_then_activation_then_dropout() -> None:
    net = MLP(6, 3, hidden=(5, 4), norm="layer", activation="tanh", dropout=0.2)
    assert [type(layer).__name__ for layer in net.layers] == ["Linear", "LayerNorm", "Tanh", "Dropout"] * 2
    assert [type(layer).__name__ for layer in mlp(6, 3, hidden=(5,)).layers] == ["Linear", "ReLU"]


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("relu", F.relu),
        ("gelu", F.gelu),
        ("silu", F.silu),
        ("softplus", F.softplus),
        ("tanh", torch.tanh),
        ("sigmoid", torch.sigmoid),
    ],
)
def test_activations_are_what_they_are_called(activation: str, function: Callable[[Tensor], Tensor]) -> None:
    net = mlp(6, 3, hidden=(5,), activation=activation)
    x = torch.randn(4, 6)
    torch.testing.assert_close(net(x), net.fc(function(net.layers[0](x))))


def test_biases_can_be_left_out() -> None:
    hidden, output = mlp(6, 3, hidden=(5,), bias=False), mlp(6, 3, hidden=(5,), output_bias=False)
    assert (hidden.layers[0].bias, output.fc.bias) == (None, None)
    assert hidden.fc.bias is not None
    assert output.layers[0].bias is not None


def test_the_deep_mlp_of_model_patching() -> None:
    net = on_meta(mlp, inputs=100, outputs=100, hidden=(100,) * 99, norm="batch", output_bias=False)
    norms = layers(net, nn.BatchNorm1d)
    assert (len(layers(net, nn.Linear)), len(norms)) == (100, 99)
    # Four more components of the norms and the output, as published.
    assert 4 * sum(p.numel() for layer in [*norms, net.fc] for p in layer.parameters()) == 119_200
