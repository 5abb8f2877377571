"""Subspaces of real networks: saving, batch norm, composition."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import multitudes as mt
from multitudes.methods.subspace import subspace, swa, swag
from multitudes.networks.stochastic import expecting
from multitudes.training.recorder import Recorder
from tests.methods.test_subspace import (
    CONVERSIONS,
    DRAWS,
    WAY,
    assert_moments,
    by_hand,
    line,
    normed,
    states,
    trained_like,
)
from tests.zoo.cases import NETWORKS
from tests.zoo.of_parts import Of

# -- what holds for all of them ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", list(CONVERSIONS))
def test_its_networks_are_its_draws(method: str) -> None:
    case = NETWORKS["mlp"]
    x, _ = case.batch()
    checkpoints = [case.model(seed).state_dict() for seed in range(4)]
    net = CONVERSIONS[method](case.model(0), checkpoints)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    samples = net.networks(3, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(samples(x), net(x, draws=3, seed=5))
    assert set(samples.state_dict()) == {f"{i}.{name}" for i in range(3) for name in case.model(0).state_dict()}
    torch.testing.assert_close(samples.member(1)(x), net(x, draws=3, seed=5)[1])
    assert type(samples.member(1)) is type(case.model(0))
    assert not hasattr(samples.member(1), "trajectory_std")
    assert not torch.allclose(net.networks(3)(x), net.networks(3)(x))
    assert net.networks().members == net.draws


def test_weights_of_different_dtypes_are_drawn_in_the_finer_one() -> None:
    def mixed() -> nn.Module:
        parts = {"first": nn.Linear(3, 4).bfloat16(), "last": nn.Linear(4, 2)}
        return Of(lambda net, x: net.last(net.first(x.bfloat16()).float()), **parts)

    model, checkpoints = trained_like(mixed)
    net = swag(model, checkpoints)
    assert net.trajectory_std.dtype == torch.float32
    assert net(torch.ones(5, 3), draws=2).shape == (2, 5, 2)
    assert net.networks(2).member(1).first.weight.dtype == torch.bfloat16


def test_a_draw_is_the_same_under_autocast() -> None:
    model, checkpoints = trained_like(lambda: nn.Linear(3, 2))
    net = swag(model, checkpoints)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weight = net.networks(1, seed=0).weight
    assert torch.equal(weight, net.networks(1, seed=0).weight)


def test_names_of_the_network_never_clash_with_settings() -> None:
    def clashing() -> nn.Module:
        parts = {"data": nn.Linear(3, 4), "draw": nn.Linear(4, 4), "network": nn.Linear(4, 2)}
        forward = lambda net, x: net.network(net.draw(net.data(x))) + net.floor  # noqa: E731
        return Of(forward, **parts, floor=nn.Parameter(torch.ones(2)))

    model, checkpoints = trained_like(clashing)
    net = swag(model, checkpoints)
    x = torch.randn(5, 3)
    torch.testing.assert_close(net(x, draws=3, seed=0), net.networks(3, seed=0)(x))
    assert net(x, draws=3).std(0).min() > 0


def test_the_network_follows_the_training_mode() -> None:
    dropping = Of(lambda net, x: F.dropout(x * net.weight, 0.5, net.training), weight=nn.Parameter(torch.ones(1)))
    net = swag(dropping.train(), [{"weight": torch.ones(1)}] * 2)
    x = torch.ones(1, 1000)
    assert 300 < (net(x) == 0).sum() < 700
    assert (net.eval()(x) == 1).all()
    assert 300 < (net.train()(x) == 0).sum() < 700
    assert (net.predict(x).predictions == 1).all()


def test_recurrent_and_tied_weights_are_drawn_as_well() -> None:
    def tied() -> nn.Module:
        parts = {"embed": nn.Embedding(7, 4), "lstm": nn.LSTM(4, 4), "out": nn.Linear(4, 7, bias=False)}
        parts["out"].weight = parts["embed"].weight
        return Of(lambda net, x: net.out(net.lstm(net.embed(x))[0]), **parts)

    model, checkpoints = trained_like(tied)
    net = swag(model, checkpoints)
    x = torch.randint(7, (3, 5))
    samples = net.networks(2, seed=0)
    together = net(x, draws=2, seed=0)
    for i in range(2):
        alone = samples.member(i)
        assert alone.out.weight is alone.embed.weight
        torch.testing.assert_close(alone(x), together[i])


def test_fine_tuning_moves_the_centre() -> None:
    model, checkpoints = trained_like(lambda: nn.Linear(3, 2))
    net = swag(model, checkpoints).train()
    net.loss(torch.randn(8, 3), torch.randint(2, (8,))).backward()
    assert {name for name, p in net.named_parameters() if p.grad is not None} == {"weight", "bias"}
    apart = net.trajectory_factor.clone()
    with torch.no_grad():
        net.weight += 100
    assert net.networks(5).weight.mean() > 90
    assert torch.equal(apart, net.trajectory_factor)


# -- batch norm --------------------------------------------------------------------------------------------


def test_a_weight_average_is_torchs_own() -> None:
    x = torch.randn(30, 3) * 2 + 1
    model, checkpoints = trained_like(normed)
    averaged = AveragedModel(model, use_buffers=True)
    for state in checkpoints:
        model.load_state_dict(state)
        averaged.update_parameters(model)
    net = swa(model, checkpoints)
    assert net(x).shape == (1, 30, 4)
    torch.testing.assert_close(net(x)[0], averaged.module.eval()(x))
    torch.testing.assert_close(net.network[1].running_var, averaged.module[1].running_var)

    for form in (x, [x[:10], x[10:20], x[20:]]):
        update_bn([form] if isinstance(form, Tensor) else form, averaged.eval())
        net = swa(model, checkpoints, data=form)
        torch.testing.assert_close(net.network[1].running_mean, averaged.module[1].running_mean)
        torch.testing.assert_close(net(x)[0], averaged.module.eval()(x))
    alone = net.member(0)
    assert type(alone) is nn.Sequential
    torch.testing.assert_close(alone(x), net(x)[0])
    with pytest.raises(ValueError, match="this network has no layer that draws"):
        net(x, draws=3)


@pytest.mark.parametrize("method", list(CONVERSIONS))
def test_each_draw_recomputes_the_statistics(method: str) -> None:
    x, data = torch.randn(7, 3), torch.randn(30, 3) * 2 + 1
    model, checkpoints = trained_like(normed)
    net = CONVERSIONS[method](model, checkpoints, data=data)
    own = copy.deepcopy(net.state_dict())
    drawn = net(x, draws=3, seed=0)
    samples = net.networks(3, seed=0)
    torch.testing.assert_close(samples(x), drawn)
    unmeasured = CONVERSIONS[method](model, checkpoints).networks(3, seed=0)
    for i in range(3):
        alone = unmeasured.member(i)
        update_bn([data], alone.eval())
        torch.testing.assert_close(drawn[i], alone(x), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(own[name], tensor) for name, tensor in net.state_dict().items())
    torch.testing.assert_close(net.train().networks(3, seed=0).eval()(x), drawn)
    with expecting(net.eval().network):
        centre = net.network.fold()
    update_bn([data], centre.eval())
    torch.testing.assert_close(net(x, draws=0)[0], centre(x), rtol=1e-4, atol=1e-5)


def test_without_data_all_draws_have_the_statistics_of_the_trajectory() -> None:
    model, checkpoints = trained_like(normed)
    mean = torch.stack([state["1.running_mean"] for state in checkpoints]).mean(0)
    for name, method in CONVERSIONS.items():
        net = method(model, checkpoints)
        want = checkpoints[-1]["1.running_mean"] if name in ("random", "dropout") else mean
        torch.testing.assert_close(net.network.network[1].running_mean, want)
        for member in net.networks(2).network:
            torch.testing.assert_close(member[1].running_mean, want)


def test_a_shuffled_loader_gives_the_same_draws_for_the_same_seed() -> None:
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(20, 3), torch.zeros(20)), batch_size=8, shuffle=True)
    model, checkpoints = trained_like(normed)
    net = swag(model, checkpoints, data=loader)
    x = torch.randn(5, 3)
    assert torch.equal(net(x, draws=3, seed=0), net(x, draws=3, seed=0))
    torch.testing.assert_close(net.networks(3, seed=0)(x), net(x, draws=3, seed=0))


# -- composition -------------------------------------------------------------------------------------------


def test_an_ensemble_of_subspaces_draws_from_each_members_own() -> None:
    far = WAY * -2 + 30
    nets = [swag(line(), states(way), rank=3) for way in (WAY, far)]
    fused = mt.fuse(nets)
    eye = torch.eye(5, dtype=torch.float64)
    drawn = fused(eye, draws=DRAWS, seed=1).detach()[..., 0].unflatten(0, (2, DRAWS)).numpy()
    for weights, way in zip(drawn, (WAY, far), strict=True):
        assert_moments(weights, *by_hand(way, 3, 0.5))
    noise = [(weights - way.mean(0))[:, 0] for weights, way in zip(drawn, (WAY, far), strict=True)]
    assert abs(np.corrcoef(*noise)[0, 1]) < 5 / np.sqrt(DRAWS), "the members draw independently"

    few = fused(eye, draws=3, seed=1).detach()[..., 0].unflatten(0, (2, 3)).numpy()
    np.testing.assert_array_equal(few, drawn[:, :3])
    np.testing.assert_allclose(fused(eye, draws=0)[..., 0].detach(), [WAY.mean(0), far.mean(0)])
    fused.runner = "vmapped"
    np.testing.assert_allclose(fused(eye, draws=3, seed=1)[..., 0].detach().unflatten(0, (2, 3)), few)
    fused.runner = "packed"
    with pytest.raises(ValueError, match="runner 'packed' cannot run this network"):
        fused(eye, draws=3, seed=1)
    fused.runner = "auto"
    assert fused.predict(eye, "regression", draws=4).members == 8
    np.testing.assert_allclose(fused.member(1)(eye, draws=0)[0, :, 0].detach(), far.mean(0))
    mt.check(fused, eye)


def test_an_ensemble_of_subspaces_measures_each_members_statistics() -> None:
    data, x = torch.randn(30, 3) + 1, torch.randn(5, 3)
    nets = []
    for seed in range(2):
        model, checkpoints = trained_like(normed, seed=seed)
        nets.append(swag(model, checkpoints, data=data))
    for net in nets:
        net(x, draws=1)
    fused = mt.fuse(nets)
    assert fused(x, draws=3, seed=0).shape == (6, 5, 4)
    torch.testing.assert_close(fused(x, draws=0), torch.cat([net(x, draws=0) for net in nets]))
    mean = fused(x, draws=100, seed=0).unflatten(0, (2, 100))
    for i, net in enumerate(nets):
        own = net(x, draws=100, seed=1)
        error = (own.var(0) / 50).sqrt()
        assert ((mean[i].mean(0) - own.mean(0)).abs() < 5 * error).all()
    loaded = mt.fuse(nets[::-1])
    loaded.load_state_dict(fused.state_dict())
    assert torch.equal(loaded(x, draws=3, seed=0), fused(x, draws=3, seed=0))


def test_members_that_were_trained_together_get_a_subspace_each() -> None:
    torch.manual_seed(0)
    ensemble = mt.deep_ensemble(normed(), members=2).eval()
    recorder = Recorder(ensemble, keep=3)
    for _ in range(5):
        with torch.no_grad():
            for tensor in ensemble.state_dict().values():
                if tensor.is_floating_point():
                    tensor.add_(torch.rand_like(tensor))
        recorder.record()
    x = torch.randn(4, 3)
    for name, method in CONVERSIONS.items():
        net = method(ensemble, recorder)
        assert net(x, draws=3).shape == (6, 4, 4)
        if name == "swag":
            total = recorder.moments
            for index, member in enumerate(net.network):
                name = f"{index}.0.weight"
                torch.testing.assert_close(member.state_dict()["0.weight"], total.mean[name])
                std = member.trajectory_std[: 6 * 3].view(6, 3)
                torch.testing.assert_close(std, (total.variance[name] / 2).sqrt())
    once = swag(ensemble, recorder, data=iter([torch.randn(10, 3)]))
    assert once(x, draws=3).shape == (6, 4, 4), "data that can be read once serves all members"
    average = swa(ensemble, recorder)
    assert isinstance(average, mt.Members)
    for name in ("0.1.running_var", "1.1.running_var"):
        torch.testing.assert_close(average.state_dict()[name], recorder.mean[name])
    assert subspace(ensemble, "random")(x, draws=3).shape == (6, 4, 4)


def test_layers_that_draw_still_draw_inside_a_subspace() -> None:
    model = mt.mc_dropout(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))).eval()
    model.draws = 7
    checkpoints = [{k: v + i for k, v in model.state_dict().items()} for i in range(3)]
    net, x = swag(model, checkpoints), torch.zeros(1, 3).repeat(20, 1)
    drawn = net(x, seed=0)
    assert drawn.shape == (7, 20, 2)
    kept = drawn != 0
    assert not kept.all() and kept.any(1).all()  # each row has a mask of its own
    weights = drawn.amax(1) + drawn.amin(1)  # the bias of each draw, twice
    assert weights.std(0).min() > 0.02
    assert torch.equal(drawn, net(x, seed=0))
    torch.testing.assert_close(net(x, draws=0)[0], net.network.network[0](x))


def test_networks_that_differ_in_their_settings_are_not_fused() -> None:
    nets = []
    for gain in (1.0, 2.0):
        model, checkpoints = trained_like(
            lambda gain=gain: Of(lambda net, x: net.gain * net.fc(x), fc=nn.Linear(2, 2), gain=gain)
        )
        nets.append(swag(model, checkpoints))
    with pytest.raises(ValueError, match="networks.1. and networks.0. differ"):
        mt.fuse(nets)
