"""Members that share weights: BatchEnsemble, Masksembles, MIMO."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import multitudes as mt
from multitudes.methods.batch_ensemble import RankOne
from multitudes.methods.masksembles import Masked, masks
from multitudes.tasks.gaussian import gaussian_nll
from tests.zoo.cases import CLASSES, NETWORKS
from tests.zoo.of_parts import Of
from tests.zoo.shared_cases import bert, rows_through, tokens

LAYERS = {
    "linear": (nn.Linear(6, 8), (6,)),
    "sequence": (nn.Linear(6, 8, bias=False), (5, 6)),
    "conv1d": (nn.Conv1d(6, 8, 3), (6, 9)),
    "conv2d": (nn.Conv2d(6, 8, 3, stride=2, bias=False), (6, 7, 7)),
    "grouped": (nn.Conv2d(6, 8, 3, groups=2), (6, 7, 7)),
    "depthwise": (nn.Conv2d(6, 6, 3, groups=6), (6, 7, 7)),
    "conv3d": (nn.Conv3d(6, 8, 2), (6, 3, 3, 3)),
    "transposed": (nn.ConvTranspose2d(6, 8, 2, stride=2), (6, 4, 4)),
    "transposed_grouped": (nn.ConvTranspose2d(6, 8, 2, groups=2), (6, 4, 4)),
}


def rank_one(layer: nn.Module, x: Tensor, axis: int) -> tuple[RankOne, list[Tensor]]:
    """A layer with random factors, and each member's output by the paper's equation."""
    ensemble = RankOne(layer, members=3)
    with torch.no_grad():
        for factors in (ensemble.r, ensemble.s):
            factors.normal_(1, 0.5)
        if ensemble.biases is not None:
            ensemble.biases.normal_()
    along = [-1 if d == axis % x.dim() else 1 for d in range(x.dim())]
    wants = []
    for i in range(3):
        scaled = x * ensemble.r[i].view(along)
        want = (F.linear(scaled, layer.weight) if axis == -1 else ensemble.layer(scaled)) * ensemble.s[i].view(along)
        wants.append(want if ensemble.biases is None else want + ensemble.biases[i].view(along))
    return ensemble, wants


def masked(layer: nn.Module, x: Tensor, axis: int) -> tuple[Masked, list[Tensor]]:
    """A layer with masks, and its output for each member's channels alone."""
    drawn = masks(6, 3, 2.0)
    wants = []
    for i in range(3):
        dropped = x.movedim(axis, -1).clone()
        dropped[..., drawn[i] == 0] = 0.0
        wants.append(layer(dropped.movedim(-1, axis)))
    return Masked(layer, drawn), wants


@pytest.mark.parametrize("method", [rank_one, masked])
@pytest.mark.parametrize("rows", [1, 70])  # smaller than the weight, and larger, which is then scaled instead
@pytest.mark.parametrize("kind", list(LAYERS))
def test_member_layers_are_the_paper_equation(kind: str, rows: int, method: Callable[..., Any]) -> None:
    layer, shape = LAYERS[kind]
    x = torch.randn(rows, *shape)
    ensemble, wants = method(layer, x, -1 if isinstance(layer, nn.Linear) else 1)
    together = ensemble(x.repeat(3, *[1] * len(shape))).unflatten(0, (3, rows))
    for i, want in enumerate(wants):
        torch.testing.assert_close(together[i], want)
        torch.testing.assert_close(ensemble.fold(i)(x), want, rtol=1e-4, atol=1e-5)
        assert type(ensemble.fold(i)) is type(layer)


def test_batch_ensemble_factors_are_drawn_as_asked() -> None:
    model = nn.Linear(2000, 1000)
    normal = mt.batch_ensemble(model, 4, seed=0).network
    for factor in (normal.r, normal.s):
        torch.testing.assert_close(factor.mean().item(), 1.0, rtol=0.05, atol=0)
        torch.testing.assert_close(factor.std().item(), 0.5, rtol=0.05, atol=0)
    signs = mt.batch_ensemble(model, 4, factors="sign", seed=0).network
    assert set(signs.r.unique().tolist()) == {-1.0, 1.0}
    near = mt.batch_ensemble(model, 4, init="pretrained", seed=0).network
    assert torch.equal(near.r[0], torch.ones(2000))
    torch.testing.assert_close(near.r[1:].std().item(), 0.1, rtol=0.05, atol=0)
    assert torch.equal(near.layer.weight, model.weight)
    with pytest.raises(ValueError, match="factors must be one of normal, sign, got 'uniform'"):
        mt.batch_ensemble(model, 4, factors="uniform")
    with pytest.raises(ValueError, match="spread must be 0 or more, got -1"):
        mt.batch_ensemble(model, 4, spread=-1)


@pytest.mark.parametrize("method", [mt.batch_ensemble, mt.masksembles])
def test_running_members_one_by_one_is_running_them_as_one_batch(method: object) -> None:
    case = NETWORKS["resnet"]
    net = method(case.model(), 3, example=case.batch(2)[0]) if method is mt.masksembles else method(case.model(), 3)
    net.eval()
    x, _ = case.batch(5)  # a number that 3 does not divide
    tiled = net.network(x.repeat(3, 1, 1, 1)).unflatten(0, (3, 5))
    torch.testing.assert_close(net(x), tiled, rtol=1e-4, atol=1e-5)


def test_a_layer_has_its_settings_but_no_weight_to_compute_with() -> None:
    layer = RankOne(nn.Conv2d(3, 8, 3, stride=2), 4)
    assert (layer.stride, layer.in_channels, layer.weight.shape, layer.weight.dtype) == (
        (2, 2), 3, (8, 3, 3, 3), torch.float32,
    )  # fmt: skip
    assert (layer.weight.device.type, layer.weight.ndim, len(layer.weight), layer.bias.shape) == ("cpu", 4, 8, (8,))
    with pytest.raises(AttributeError, match="nothing"):
        _ = layer.nothing
    with pytest.raises(ValueError, match="computes with the weight of a Conv2d instead of calling the layer"):
        F.conv2d(torch.randn(2, 3, 8, 8), layer.weight)
    with pytest.raises(ValueError, match="computes with the bias of a Linear instead of calling the layer"):
        _ = torch.randn(2, 2) + Masked(nn.Linear(8, 2), masks(8, 2, 2.0)).bias
    assert Masked(nn.Linear(8, 2, bias=False), masks(8, 2, 2.0)).bias is None


@pytest.mark.parametrize("method", [mt.batch_ensemble, mt.masksembles])
def test_a_network_that_computes_with_a_layers_tensors_is_refused_by_name(method: Callable[..., Any]) -> None:
    def reads(net: Any, x: Tensor) -> Tensor:
        x = net.body(x).to(net.read.weight.dtype)  # reading a dtype is allowed
        return net.head(F.linear(x, net.read.weight, net.read.bias))

    model = Of(reads, body=nn.Linear(4, 6), read=nn.Linear(6, 6), head=nn.Linear(6, 2))
    x = torch.randn(3, 4)
    options = {"example": x} if method is mt.masksembles else {}
    net = method(model, 2, **options)
    for mode in (True, False):
        with pytest.raises(ValueError, match=r"computes with the weight of layer 'read' \(Linear\) instead of calling"):
            net.train(mode)(x)
    assert method(model, 2, layers="body|head", **options)(x).shape == (2, 3, 2)


def test_pretrained_masks_keep_the_scale_where_the_batch_is_not_the_first_axis() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0)
    model = Of(
        lambda net, x: net.head(net.encoder(net.body(x).transpose(0, 1)).mean(0)),
        body=nn.Linear(6, 8), encoder=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), head=nn.Linear(8, 4),
    ).eval()  # fmt: skip
    x = torch.randn(32, 5, 6)
    net = mt.masksembles(model, 2, init="pretrained", example=x, seed=0).eval()
    ratio = net(x).square().mean().sqrt() / model(x).square().mean().sqrt()
    assert 0.5 < ratio < 2


# -- masks -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 300), st.integers(1, 12), st.floats(1.0, 8.0), st.integers(0, 99))
def test_masks_have_equal_size_and_cover_every_channel(channels: int, members: int, scale: float, seed: int) -> None:
    drawn = masks(channels, members, scale, torch.Generator().manual_seed(seed))
    assert drawn.shape == (members, channels)
    assert set(drawn.unique().tolist()) <= {0.0, 1.0}
    assert len(drawn.sum(1).unique()) == 1
    assert bool(drawn.any(0).all())
    assert torch.equal(drawn, masks(channels, members, scale, torch.Generator().manual_seed(seed)))


def test_masks_keep_the_share_of_channels_and_the_overlap_of_the_paper() -> None:
    channels, members = 4096, 4
    for scale in (1.0, 1.5, 2.0, 3.0):
        drawn = masks(channels, members, scale, torch.Generator().manual_seed(0))
        assert scale > 1 or bool(drawn.all())
        share = 1 / (scale * (1 - (1 - 1 / scale) ** members))
        torch.testing.assert_close(drawn.mean().item(), share, rtol=0.01, atol=0)
        # Two masks of K ones over K * scale positions share K / scale of them.
        overlaps = [(drawn[i] * drawn[j]).sum() / drawn[i].sum() for i in range(members) for j in range(i)]
        torch.testing.assert_close(torch.stack(overlaps).mean().item(), 1 / scale, rtol=0.05, atol=0)


def test_masks_are_applied_in_the_networks_dtype() -> None:
    net, x = mt.masksembles(NETWORKS["cnn"].model(), 3).eval(), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype == torch.bfloat16
    assert net.to(torch.bfloat16)(x.to(torch.bfloat16)).dtype == torch.bfloat16


def test_the_data_is_not_masked() -> None:
    net = mt.masksembles(NETWORKS["cnn"].model(), 3)
    masked = [name for name, module in net.network.named_modules() if isinstance(module, Masked)]
    assert masked == ["conv2", "fc1", "fc2"]
    for scale in (0.5, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="scale must be 1 or more"):
            mt.masksembles(NETWORKS["cnn"].model(), 3, scale)
    with pytest.raises(ValueError, match="only one layer"):
        mt.masksembles(nn.Linear(3, 2), 3)


# -- MIMO --------------------------------------------------------------------------------------------------


class Echo(nn.Module):
    """Shows which inputs reach which output: a linear layer that a test sets to the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize(("repetition", "batch_repetition"), [(0.0, 1), (0.5, 1), (1.0, 1), (0.25, 4)])
def test_mimo_shuffles_inputs_apart_and_targets_with_them(repetition: float, batch_repetition: int) -> None:
    net = mt.mimo(Echo(), 3, repetition, batch_repetition)
    x = torch.arange(40.0).view(40, 1)
    orders = net._orders(40, torch.device("cpu"))
    for order in orders:
        assert torch.equal(order.bincount(minlength=40), torch.full((40,), batch_repetition))
    shared = (orders[0] == orders[1]) & (orders[1] == orders[2])
    assert shared.sum() >= round(repetition * 40 * batch_repetition)
    if repetition < 1:
        assert shared.float().mean() < repetition + 0.2

    seen = []

    def criterion(prediction: Tensor, target: Tensor) -> Tensor:
        seen.append((prediction, target))
        return prediction.mean()

    net._predict_each = lambda inputs: torch.stack(inputs)
    net.loss(x, x.clone(), criterion)
    assert len(seen) == 3
    for prediction, target in seen:  # every member learns the target of its own input
        assert torch.equal(prediction, target)
        assert len(prediction) == 40 * batch_repetition


def test_mimo_puts_inputs_and_outputs_side_by_side() -> None:
    model = NETWORKS["resnet"].model()
    net = mt.mimo(model, 4, example=NETWORKS["resnet"].batch(2)[0])
    assert net.conv1.weight.shape == (12, 4 * 3, 3, 3)
    assert net.fc.weight.shape == (4 * CLASSES, 96)
    inputs = [NETWORKS["resnet"].batch(5, seed=s)[0] for s in range(4)]
    net.eval()
    raw = net.network(torch.cat(inputs, 1))
    torch.testing.assert_close(net._predict_each(inputs), torch.stack(raw.chunk(4, dim=1)))


@pytest.mark.parametrize(
    ("layers", "inputs", "outputs"),
    [
        ([nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)], (5, 6), (5, 4)),  # sequences
        ([nn.Flatten(), nn.Linear(3 * 4 * 4, 8), nn.ReLU(), nn.Linear(8, 4)], (3, 4, 4), (4,)),
        ([nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)], (3, 8, 8), (4, 8, 8)),  # dense prediction
    ],
)
def test_mimo_works_for_any_shape(layers: list[nn.Module], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    net = mt.mimo(nn.Sequential(*layers), 3, example=torch.zeros(2, *inputs))
    assert net(torch.randn(7, *inputs)).shape == (3, 7, *outputs)


@pytest.mark.parametrize("model", [nn.Linear(6, 4), NETWORKS["resnet"].model()], ids=["one layer", "resnet"])
def test_mimo_keeps_a_pretrained_function(model: nn.Module) -> None:
    x = torch.randn(7, *((6,) if isinstance(model, nn.Linear) else NETWORKS["resnet"].shape))
    net = mt.mimo(model, 3, init="pretrained", example=x)
    torch.testing.assert_close(net(x), model(x).expand(3, -1, -1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.member(1)(x), model(x), rtol=1e-4, atol=1e-5)


def test_bad_arguments_of_mimo() -> None:
    with pytest.raises(ValueError, match="repetition must be 0 or more and at most 1, got 1.5"):
        mt.mimo(Echo(), 3, 1.5)
    with pytest.raises(ValueError, match="batch_repetition must be a whole number, 1 or more, got 0"):
        mt.mimo(Echo(), 3, 0.0, 0)
    grouped = nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(256, 2))
    with pytest.raises(ValueError, match="MIMO cannot widen layer '0'"):
        mt.mimo(grouped, 3)
    with pytest.raises(ValueError, match="its output be that of its last layer '0'"):
        mt.mimo(nn.Sequential(nn.Linear(6, 4), nn.Unflatten(1, (2, 2)), nn.Flatten(1, 2), nn.Softmax(-1)), 3)


# -- the loss of all members at once -----------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("task", ["classification", "regression", "gaussian", "binary"])
def test_the_loss_of_shared_members_is_the_mean_of_their_own(task: str, weighted: bool) -> None:
    torch.manual_seed(0)
    outputs = {"classification": 3, "gaussian": 2}.get(task, 1)
    net = mt.batch_ensemble(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)), 5, task=task, spread=0.5)
    x = torch.randn(7, 4)
    y = {"classification": torch.tensor([0, 1, 2, -100, 1, 0, 2]), "binary": torch.arange(7.0)[:, None] % 2}.get(
        task, torch.randn(7, 1)
    )
    weight = torch.rand(7) if weighted else None
    want = torch.stack([mt.Multitude(net.member(i)).loss(x, y, task=task, weight=weight) for i in range(5)]).mean()
    got = net.loss(x, y, weight=weight)
    torch.testing.assert_close(got, want)
    if not weighted:  # a criterion of the user's own is called for each member
        parameters = list(net.parameters())
        criterion = {
            "classification": F.cross_entropy, "regression": F.mse_loss, "binary": F.binary_cross_entropy_with_logits,
            "gaussian": gaussian_nll,
        }[task]  # fmt: skip
        own = torch.autograd.grad(net.loss(x, y, lambda prediction, y: criterion(prediction, y)), parameters)
        torch.testing.assert_close(torch.autograd.grad(got, parameters), own)


def test_a_known_criterion_is_called_once_and_one_of_the_users_own_for_each_member() -> None:
    net = mt.batch_ensemble(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), 5, task="regression")
    shapes: list[list[int]] = []

    def largest(prediction: Tensor, y: Tensor) -> Tensor:  # no mean over rows
        shapes.append(list(prediction.shape))
        return (prediction - y).abs().max()

    x, y = torch.randn(7, 4), torch.randn(7, 1)
    net.loss(x, y, largest)
    assert shapes == [[7, 1]] * 5
    summed = net.loss(x, y, nn.MSELoss(reduction="sum"))
    torch.testing.assert_close(summed, 7 * net.loss(x, y))


# -- what comes before the first member layer runs once ----------------------------------------------------


def head_of_factors(model: nn.Module) -> Any:
    return mt.batch_ensemble(model, 4, layers=["classifier"], init="pretrained", seed=0)


def last_block_of_factors(model: nn.Module) -> Any:
    """The first member layers lie in a block whose input is added to its output."""
    return mt.batch_ensemble(model, 4, layers=lambda name, _: "layer.1.attention.self" in name, seed=0)


def adapters_of_the_last_block(model: nn.Module) -> Any:
    return mt.lora(model, 4, rank=2, layers=lambda name, _: "layer.1." in name, seed=0)


def blocks_of_their_own(model: nn.Module) -> Any:
    return mt.heads(model, 4, from_layer="bert.encoder.layer.1", example=tokens(5), seed=0)


@pytest.mark.quick(5)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rows", [5, 1])
@pytest.mark.parametrize("method", [head_of_factors, last_block_of_factors, adapters_of_the_last_block, mt.heads])
def test_what_comes_before_the_first_member_layer_runs_once(
    method: Callable[..., Any], rows: int, training: bool
) -> None:
    net, x = method(bert()).train(training), {key: value[:rows] for key, value in tokens(5).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predictions = net(x)
    assert rows_through(net, "bert.encoder.layer.0", x) == rows
    for index in range(net.members):
        alone = net.member(index).train(training)(**x).logits
        torch.testing.assert_close(predictions[index], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("first", ["whole", "padded"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", [last_block_of_factors, adapters_of_the_last_block, blocks_of_their_own])
def test_a_mask_may_come_with_some_batches_alone(method: Callable[..., Any], training: bool, first: str) -> None:
    padded = tokens(5)  # without padding, the blocks of a Hugging Face model are given no mask
    whole = {"input_ids": padded["input_ids"].clamp(min=1), "attention_mask": torch.ones(5, 7, dtype=torch.int64)}
    net = method(bert()).train(training)
    for x in (whole, padded, whole) if first == "whole" else (padded, whole, padded):
        for rows in (5, 1, 4):
            some = {key: value[:rows] for key, value in x.items()}
            predictions = net(some)
            for index in range(net.members):
                alone = net.member(index).train(training)(**some).logits
                torch.testing.assert_close(predictions[index], alone, rtol=1e-4, atol=1e-5)
            assert rows_through(net, "bert.encoder.layer.0", some) == rows


def test_members_of_a_residual_network_share_what_comes_before_the_block() -> None:
    def block() -> nn.Module:
        return Of(lambda net, x, gate: x + torch.tanh(net.inner(x)) * gate, inner=nn.Linear(6, 6))

    def run(net: Any, x: Tensor) -> Tensor:
        gate = x[:, :1]
        for each in net.blocks:
            x = each(x, gate)
        return net.last(x)

    model = Of(run, blocks=nn.ModuleList(block() for _ in range(4)), last=nn.Linear(6, 3))
    net = mt.batch_ensemble(model, 3, layers=["blocks.2.inner"], seed=0)
    for training in (True, False):
        for rows in (7, 1, 3):
            x = torch.randn(rows, 6)
            predictions = net.train(training)(x)
            assert rows_through(net, "blocks.1", x) == rows
            for index in range(3):
                torch.testing.assert_close(predictions[index], net.member(index)(x))
    mt.check(net, x)


def test_where_little_comes_before_a_cpu_evaluates_members_one_after_the_other() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5)))
    x = torch.randn(2, 3, 8, 8)
    early = mt.batch_ensemble(model, 3, layers=["1", "5"], seed=0).eval()
    assert rows_through(early, "0", x) == 6
    late = mt.batch_ensemble(model, 3, layers=["4", "5"], seed=0).eval()
    assert rows_through(late, "0", x) == 2
    for net in (early, late):
        for index, prediction in enumerate(net(x)):
            torch.testing.assert_close(prediction, net.member(index)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("after", [lambda y: y, lambda y: y.softmax(-1)])
def test_a_network_that_counts_rows_by_its_input_gives_each_member_its_own(after: Callable[[Tensor], Tensor]) -> None:
    model = Of(
        lambda net, x: after(net.last(net.body(x))[torch.arange(len(x)), 0]),
        body=nn.Linear(6, 8), last=nn.Linear(8, 3),
    )  # fmt: skip
    net = mt.heads(model, 4, layers=["last"], seed=0)
    for training in (True, False):
        x = torch.randn(5, 2, 6)
        predictions = net.train(training)(x)
        for index in range(4):
            torch.testing.assert_close(predictions[index], net.member(index)(x))


def test_draws_before_the_boundary_are_each_members_own() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Linear(16, 3))
    net, x = mt.heads(mt.mc_dropout(model), 4, seed=0).eval(), torch.randn(5, 6)
    seen = []
    handle = net.network.get_submodule("2").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    net(x, draws=1, seed=0)
    handle.remove()
    rows = torch.cat(seen)[-20:].unflatten(0, (4, 5))
    assert all(not torch.equal(rows[i], rows[j]) for i in range(4) for j in range(i))


@pytest.mark.parametrize("training", [True, False])
def test_members_side_by_side_follow_whatever_axis_the_batch_is(training: bool) -> None:
    """Sequences first, and rows that see each other: one batch of all members' rows would be another computation."""

    def run(net: Any, x: Tensor) -> Tensor:
        h = net.body(x)
        h, _ = net.attention(h, h, h)
        return net.last(h.mean(0) - h.mean((0, 1)))

    model = Of(run, body=nn.Linear(6, 8), attention=nn.MultiheadAttention(8, 2), last=nn.Linear(8, 3))
    net = mt.batch_ensemble(model, 3, layers="attention|last", seed=0).train(training)
    x = torch.randn(5, 4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predictions = net(x)
    for index in range(3):
        torch.testing.assert_close(predictions[index], net.member(index)(x), rtol=1e-4, atol=1e-5)


def test_a_function_mode_around_a_member_layer_makes_no_difference() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        h = torch.relu(net.body(x))
        with torch.device("cpu"):
            h = net.middle(h)
            h = h + torch.ones(3)[0]
        return net.last(h)

    model = Of(run, body=nn.Linear(6, 32), middle=nn.Linear(32, 8), last=nn.Linear(8, 3))
    net = mt.heads(model, 3, layers=["middle", "last"], seed=0).train()
    before = torch._C._len_torch_function_stack()
    for rows in (5, 3):
        x = torch.randn(rows, 6)
        for index, prediction in enumerate(net(x)):
            torch.testing.assert_close(prediction, net.member(index)(x))
    assert torch._C._len_torch_function_stack() == before


def test_hooks_on_layers_that_differ_can_keep_what_they_see() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    net, x = mt.heads(model, 3, layers=["2"], seed=0).train(), torch.randn(5, 6)
    before, kept = net(x), []
    handle = net.network.get_submodule("3").register_forward_hook(lambda module, args, output: kept.append(output))
    torch.testing.assert_close(net(x), before)
    handle.remove()
    assert len(kept) and all(bool((each >= 0).all()) for each in kept[-1:])
    torch.testing.assert_close(net(x), before)


def test_batch_norms_behind_shared_layers_take_their_statistics_over_all_members() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 2)
    )
    net = mt.batch_ensemble(model, 3, layers=["2", "5"], seed=0).train()
    x = torch.randn(4, 3, 6, 6)
    net(x)
    norm = net.get_submodule("3")
    norm.reset_running_stats()
    shared = torch.relu(net.get_submodule("0")(x))
    each = torch.cat([member[2](shared) for member in (net.member(i) for i in range(3))])  # [M*B, C, H, W]
    net(x)
    torch.testing.assert_close(norm.running_mean, 0.1 * each.mean((0, 2, 3)))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * each.var((0, 2, 3)))


def test_draws_of_members_are_each_their_own_inside_blocks_too() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    net = mt.heads(mt.mc_dropout(nn.Sequential(nn.Linear(4, 8), block, nn.Linear(8, 3))), 3, layers=["1", "2"], seed=0)
    x = torch.randn(5, 4)
    drawn = net.eval()(x, draws=6, seed=1)
    torch.testing.assert_close(drawn, net(x, draws=6, seed=1))
    one_draw_each = net(x, draws=1, seed=1).unflatten(0, (3, 1))
    torch.testing.assert_close(drawn.unflatten(0, (3, 6))[:, :1], one_draw_each)


def test_rows_of_their_own_need_a_batch_that_comes_first() -> None:
    model = Of(
        lambda net, x: net.last(net.attention(x, x, x)[0].mean(0)),
        attention=nn.MultiheadAttention(6, 2), last=nn.Linear(6, 3),
    )  # fmt: skip
    net = mt.batch_ensemble(model, 2, rows="own", seed=0, task="classification").train()
    with pytest.raises(
        ValueError, match="rows='own' needs a network that runs the rows of all members in one batch: the first axis"
    ):
        net.loss(torch.randn(4, 4, 6), torch.zeros(4, dtype=torch.int64))
    model.attention.batch_first = True
    first = Of(
        lambda net, x: net.last(net.attention(x, x, x)[0].mean(1)), attention=model.attention, last=nn.Linear(6, 3)
    )
    net = mt.batch_ensemble(first, 2, rows="own", seed=0, task="classification").train()
    x, y = torch.randn(4, 5, 6), torch.tensor([0, 1, 2, 1])
    own = [F.cross_entropy(net.member(i)(x[2 * i : 2 * i + 2]), y[2 * i : 2 * i + 2]) for i in range(2)]
    torch.testing.assert_close(net.loss(x, y), torch.stack(own).mean())


@pytest.mark.slow
def test_compiled_members_do_not_tile_a_trunk_whose_rows_see_each_other() -> None:
    torch.compiler.reset()
    model = Of(
        lambda net, x: net.last((h := net.body(x)) - h.mean(0) * h[:1]), body=nn.Linear(6, 8), last=nn.Linear(8, 3)
    )
    net, x = mt.heads(model, 3, layers=["last"], seed=0).train(), torch.randn(5, 6)
    want = net(x)  # the trunk runs once
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), want)


def test_code_that_inspects_values_of_a_later_input_runs_members_one_by_one() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        h = net.body(x)
        if len(x) > 4 and bool((h > 0).all()):
            h = -h
        return net.last(h)

    model = Of(run, body=nn.Linear(6, 8), last=nn.Linear(8, 3))
    net = mt.batch_ensemble(model, 3, layers=["body", "last"], seed=0).train()
    net._runners._tiles = lambda: False  # as with layers that do not take all members' rows as one batch
    for rows in (3, 6):
        x = torch.randn(rows, 6)
        for index, prediction in enumerate(net(x)):
            torch.testing.assert_close(prediction, net.member(index)(x))
    with pytest.raises(ValueError, match="does not fit the network"):
        net(torch.randn(6, 5))
