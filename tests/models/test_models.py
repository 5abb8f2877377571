"""Properties of every architecture: published sizes, shapes, initialisation, copies, and multitudes of it."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import multitudes as mt
from multitudes.models import (
    CNN,
    VGG,
    CifarResNet,
    PreactResNet,
    PyramidNet,
    ResNet,
    UNet,
    VGGLike,
    ViT,
    lenet5,
    medium_cnn,
    mlp,
    preact_resnet18,
    preact_resnet50,
    pyramidnet110,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnext50,
    small_cnn,
    unet,
    vgg16,
    vgg19,
    vgg_like,
    vit,
    vit_tiny,
    wide_resnet,
    wide_resnet28_10,
    wide_resnet50_2,
)
from multitudes.models.preact_resnet import PreactivationBlock, PreactivationBottleneck
from multitudes.models.resnet import BasicBlock, Bottleneck

Build = Callable[[], nn.Module]
IMAGE = (1, 21, 17)
SHORT = {"depths": (1, 2, 1, 1), "classes": 7, "channels": 1}
# A tiny network for each kind of block, stem and family, of 7 classes, and the shape of its inputs.
TINY: dict[str, tuple[Build, tuple[int, ...]]] = {
    "basic-small": (lambda: ResNet(BasicBlock, width=4, **SHORT), IMAGE),
    "basic-imagenet": (lambda: ResNet(BasicBlock, stem="imagenet", width=4, **SHORT), IMAGE),
    "bottleneck-small": (lambda: ResNet(Bottleneck, width=4, **SHORT), IMAGE),
    "bottleneck-imagenet": (lambda: ResNet(Bottleneck, stem="imagenet", width=4, **SHORT), IMAGE),
    "grouped": (lambda: ResNet(Bottleneck, width=8, groups=2, width_per_group=32, **SHORT), IMAGE),
    "wide": (lambda: wide_resnet(16, 2, classes=7, channels=1), IMAGE),
    "preact-small": (lambda: PreactResNet(PreactivationBlock, width=4, **SHORT), IMAGE),
    "preact-imagenet": (lambda: PreactResNet(PreactivationBlock, stem="imagenet", width=4, **SHORT), IMAGE),
    "preact-bottleneck": (lambda: PreactResNet(PreactivationBottleneck, (2, 1, 1), 7, channels=1, width=4), IMAGE),
    "cifar": (lambda: CifarResNet(14, classes=7, channels=1, width=4), IMAGE),
    "pyramid": (lambda: PyramidNet(14, widening=11, classes=7, channels=1), IMAGE),
    "vgg": (lambda: VGG((1, 2, 1, 1, 1), classes=7, channels=1, width=4), (1, 40, 33)),
    "vgg_like": (lambda: VGGLike(classes=7, channels=1, width=4), (1, 20, 28)),
    "lenet": (lambda: lenet5(classes=7, channels=1, size=17), (1, 17, 17)),
    "cnn": (lambda: CNN((4, 8, 8), classes=7, channels=2, size=21), (2, 21, 21)),
    "unet": (lambda: unet(classes=7, channels=1, width=2), (1, 19, 34)),
    "mlp": (lambda: mlp(12, 7, hidden=(9, 8), dropout=0.1), (3, 2, 2)),
    "mlp-batch": (lambda: mlp(12, 7, hidden=(9, 8), norm="batch", bias=False, output_bias=False), (12,)),
    "mlp-layer": (lambda: mlp(12, 7, hidden=(9, 8), norm="layer", activation="gelu"), (12,)),
    "linear": (lambda: mlp(12, 7, hidden=()), (12,)),
    "vit": (lambda: ViT(7, 1, 12, patch=3, width=12, depth=2, heads=3, expansion=2, dropout=0.1), (1, 12, 12)),
}
every_network = pytest.mark.parametrize(("build", "shape"), TINY.values(), ids=TINY)


def on_meta(build: Callable[..., nn.Module], **arguments: Any) -> nn.Module:
    """Build a network without memory, for tests of shapes."""
    with torch.device("meta"):
        return build(**arguments)


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


# -- the networks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "arguments", "parameters"),
    [
        (resnet18, {}, 11_173_962),
        (resnet50, {}, 23_520_842),
        (resnet18, {"classes": 1000, "stem": "imagenet"}, 11_689_512),
        (resnet34, {"classes": 1000, "stem": "imagenet"}, 21_797_672),
        (resnet50, {"classes": 1000, "stem": "imagenet"}, 25_557_032),
        (resnet101, {"classes": 1000, "stem": "imagenet"}, 44_549_160),
        (resnext50, {"classes": 1000, "stem": "imagenet"}, 25_028_904),
        (wide_resnet50_2, {"classes": 1000, "stem": "imagenet"}, 68_883_240),
        (wide_resnet28_10, {}, 36_479_194),
        (preact_resnet18, {}, 11_172_170),
        (preact_resnet50, {}, 23_513_162),
        (preact_resnet50, {"classes": 1000, "stem": "imagenet"}, 25_549_352),
        (pyramidnet110, {"classes": 100}, 28_511_307),
        (vgg16, {}, 14_728_266),
        (vgg19, {}, 20_040_522),
        (vgg_like, {}, 14_991_946),
        (lenet5, {}, 431_080),
        (small_cnn, {}, (3 * 9 + 1) * 16 + (16 * 9 + 1) * 32 + (32 * 9 + 1) * 32 + (32 * 4 * 4 + 1) * 10),
        (medium_cnn, {}, 971_146),
        (unet, {"classes": 1}, 31_037_633),
        (unet, {"classes": 2}, 31_037_698),
        (vit, {"classes": 1000, "size": 224, "patch": 16, "width": 768, "heads": 12}, 86_567_656),
        (vit, {"classes": 1000, "size": 224, "patch": 16}, 22_050_664),
        (vit_tiny, {"classes": 1000, "size": 224, "patch": 16}, 5_717_416),
        (mlp, {"inputs": 100, "outputs": 100, "hidden": (100,) * 99, "output_bias": False}, 1_009_900),
    ],
)
def test_parameter_counts_are_the_published_ones(
    build: Callable[..., nn.Module], arguments: dict[str, Any], parameters: int
) -> None:
    assert count(on_meta(build, **arguments)) == parameters


@every_network
def test_an_input_becomes_one_score_per_class(build: Build, shape: tuple[int, ...]) -> None:
    net = build()
    dense = shape[1:] if isinstance(net, UNet) else ()
    assert net(torch.randn(3, *shape)).shape == (3, 7, *dense)
    assert net.eval()(torch.randn(1, *shape)).shape == (1, 7, *dense)


@every_network
def test_networks_can_be_traced(build: Build, shape: tuple[int, ...]) -> None:
    net = build().eval()
    x = torch.randn(2, *shape)
    assert torch.equal(fx.symbolic_trace(net)(x), net(x))


@every_network
def test_gradients_reach_every_parameter(build: Build, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net = build()
    net(torch.randn(8, *shape)).pow(3).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


@every_network
def test_reset_parameters_draws_new_weights(build: Build, shape: tuple[int, ...]) -> None:
    net = build()
    net(torch.randn(8, *shape))  # moves the running statistics
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(7.0)
    net.reset_parameters()
    norms = {name for name, layer in net.named_modules() if "Norm" in type(layer).__name__}
    for (name, value), fresh in zip(net.state_dict().items(), build().state_dict().values(), strict=True):
        if name.rpartition(".")[0] in norms or not fresh.any():  # biases that start at zero
            assert torch.equal(value, fresh), name
        else:
            assert 0 < value.std() < 2, name
            assert not torch.equal(value, fresh), name


@every_network
def test_only_dropout_and_norms_depend_on_the_mode(build: Build, shape: tuple[int, ...]) -> None:
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
        (lambda: resnet18(stem="big"), r"^stem must be .* got 'big'"),
        (lambda: resnet18(classes=0), r"^classes must be .* got 0"),
        (lambda: ResNet(BasicBlock, ()), r"^depths must be .* got \(\)"),
        (lambda: ResNet(BasicBlock, (2, 2, 0, 2)), r"^depths must be .* got \(2, 2, 0, 2\)"),
        (lambda: wide_resnet(depth=27, width=10), r"^depth must be .* got 27"),
        (lambda: resnet18(classes=2.5), r"^classes must be a whole number.* got 2.5"),
        (lambda: ResNet(Bottleneck, (1, 1, 1, 1), width=4, width_per_group=4), r"^width_per_group must be .* got 4"),
        (lambda: ResNet(BasicBlock, (1, 1, 1, 1), groups=2), r"^groups .* need Bottleneck blocks, got 2 and 64"),
        (lambda: preact_resnet50(classes=0), r"^classes must be .* got 0"),
        (lambda: CifarResNet(18), r"^depth must be .* got 18"),
        (lambda: PyramidNet(112, 48), r"^depth must be .* got 112"),
        (lambda: pyramidnet110(widening=-1), r"^widening must be .* got -1"),
        (lambda: VGG((1, 1, 1, 1)), r"^depths must be five .* got \(1, 1, 1, 1\)"),
        (lambda: vgg_like(channels=0), r"^channels must be .* got 0"),
        (lambda: lenet5(size=15), r"^size must be 16 or more.* got 15"),
        (lambda: lenet5(classes=True), r"^classes must be .* got True"),
        (lambda: CNN(()), r"^widths must be .* got \(\)"),
        (lambda: small_cnn(dropout=1.0), r"^dropout must be .* got 1.0"),
        (lambda: unet(classes=0), r"^classes must be .* got 0"),
        (lambda: unet(classes=2, dropout=-0.1), r"^dropout must be .* got -0.1"),
        (lambda: vit(size=30), r"^size must be a multiple of patch, got size=30 and patch=4"),
        (lambda: vit(width=100, heads=3), r"^width must be a multiple of heads, got width=100 and heads=3"),
        (lambda: vit(depth=0), r"^depth must be .* got 0"),
        (lambda: vit_tiny(dropout=1.0), r"^dropout must be .* got 1.0"),
        (lambda: mlp(0, 1), r"^inputs must be .* got 0"),
        (lambda: mlp(1, 0), r"^outputs must be .* got 0"),
        (lambda: mlp(1, 1, hidden=(4, 0)), r"^hidden must be .* got \(4, 0\)"),
        (lambda: mlp(1, 1, norm="group"), r'^norm must be "batch", "layer" or None, got \'group\''),
        (lambda: mlp(1, 1, activation="step"), r"^activation must be one of relu, .*tanh.* got 'step'"),
        (lambda: mlp(1, 1, dropout=float("nan")), r"^dropout must be .* got nan"),
    ],
)
def test_invalid_arguments_raise_an_error(build: Build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# -- copies and multitudes ----------------------------------------------------------------------------------


def with_statistics(build: Build, shape: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    """Return a network with statistics of some data, and a batch."""
    torch.manual_seed(0)
    model = build()
    model(torch.randn(8, *shape) * 2 + 0.5)
    return model.eval(), torch.randn(3, *shape)


@every_network
def test_copies_and_stored_networks_are_equal(build: Build, shape: tuple[int, ...]) -> None:
    model, x = with_statistics(build, shape)
    loaded = build().eval()
    loaded.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert all(
            torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True)
        )
        torch.testing.assert_close(other(x), model(x))  # not bit by bit: products depend on how memory is aligned
    assert model.double()(x.double()).dtype == torch.float64


@pytest.mark.quick(2)
@every_network
@pytest.mark.parametrize("method", ["batch_ensemble", "packed", pytest.param("deep_ensemble", marks=pytest.mark.slow)])
def test_ensembles_of_every_architecture_work(method: str, build: Build, shape: tuple[int, ...]) -> None:
    model, x = with_statistics(build, shape)
    if method == "packed":
        if isinstance(model, PyramidNet):
            with pytest.raises(ValueError, match=r"PyramidNet\): its forward fixes a hidden"):
                mt.packed(model, members=2, alpha=1.5, example=x)
            return
        if not any(isinstance(layer, nn.ReLU | nn.GELU) for layer in model.modules()):
            return  # a linear model has no hidden width
        net = mt.packed(model, members=2, alpha=1.5, example=x, seed=0)
        assert count(net.member(0)) < count(model)
    else:
        net = getattr(mt, method)(model, 2, seed=0)
    assert net(x).shape == (2, *model(x).shape)
    mt.check(net, x)  # by every runner; deep ensembles of all architectures run packed
    if method == "deep_ensemble":
        net.runner = "packed"
        assert net.eval()(x).shape == (2, *model(x).shape)


OF_HUGGING_FACE = {
    "vit.embeddings.cls_token": "token", "vit.embeddings.position_embeddings": "position",
    "vit.embeddings.patch_embeddings.projection": "patch", "vit.layers": "blocks", "attention.o_proj": "attention.proj",
    "layernorm_before": "norm1", "layernorm_after": "norm2", "mlp.": "", "vit.layernorm": "norm", "classifier": "fc",
}  # fmt: skip


def test_a_vision_transformer_equals_that_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5, layer_norm_eps=1e-5)
    torch.manual_seed(0)
    theirs = transformers.ViTForImageClassification(config).eval()
    ours = vit(5, size=16, width=24, depth=2, heads=3).eval()
    state: dict[str, Tensor] = {}
    for name, value in theirs.state_dict().items():
        value = value + 0.1 * torch.randn_like(value)
        theirs.state_dict()[name].copy_(value)
        for old, new in OF_HUGGING_FACE.items():
            name = name.replace(old, new)
        together = re.sub(r"\.[qkv]_proj\.", ".qkv.", name)  # queries, keys and values come in this order
        state[together] = torch.cat([state[together], value]) if together in state else value
    ours.load_state_dict(state)
    x = torch.randn(3, 3, 16, 16)
    assert torch.allclose(ours(x), theirs(x).logits, atol=1e-5)
