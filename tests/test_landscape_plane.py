"""Planes through weight space, against networks that are loaded and run point by point."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape import fused
from multitudes.landscape import weights as weights_module
from multitudes.landscape.directions import between, filter_normalised, random_direction
from multitudes.landscape.planes import Plane, plane
from multitudes.training.batchnorm import Batches, statistics
from multitudes.training.recorder import flat_weights, unflattened


def cnn(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return mt.models.small_cnn(classes=4, channels=1, size=8).eval()


def normed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).train()
    network(torch.randn(50, 5) * 2 + 1)
    return network.eval()


class ByName(nn.Module):
    """A network that is called by keywords and answers with an object."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 4)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"logits": self.fc(left + right)}


class Flattened(nn.Module):
    """A network that channels-last images do not fit: `view` asks for contiguous ones."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(2 * 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.fc(x.view(len(x), -1))


def images(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.randint(4, (count,), generator=generator)


def rows(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 5, generator=generator), torch.randint(4, (count,), generator=generator)


@torch.no_grad()
def by_hand(network: nn.Module, found: Plane, x: Tensor, y: Tensor, solutions: list[nn.Module]) -> list[Tensor]:
    """Loss, accuracy and agreements of each point, its weights loaded into a copy of the network."""
    one = copy.deepcopy(network).eval()
    labels = [solution(x).argmax(1) for solution in solutions]
    table = []
    for at in torch.cartesian_prod(*found.axes).view(-1, len(found.axes)):
        one.load_state_dict(unflattened(found.frame.weights(at), one), strict=False)
        answer = one(x)
        own = answer.argmax(1)
        shares = [(own == other).double().mean() for other in (y, *labels)]
        table.append(torch.stack([F.cross_entropy(answer, y).double(), *shares]))
    return list(torch.stack(table, 1))


@pytest.mark.parametrize("count", [60, 700])
def test_a_plane_through_three_networks_equals_the_loop_over_its_points(count):
    networks, (x, y) = [cnn(seed) for seed in range(3)], images(count)
    found = plane(networks[0], (x, y), through=networks, points=5)
    loss, accuracy, *agreement = by_hand(networks[0], found, x, y, networks)
    torch.testing.assert_close(found.loss.flatten(), loss, rtol=1e-5, atol=1e-5)
    # A label may flip where two classes are equal to the last bit.
    assert (found.accuracy.flatten() - accuracy).abs().max() <= 1 / count
    assert (found.agreement.flatten(1) - torch.stack(agreement)).abs().max() <= 1 / count


def test_at_the_given_points_the_loss_is_that_of_the_given_networks_to_the_last_bit():
    networks, (x, y) = [cnn(seed) for seed in range(3)], images()
    found = plane(networks[0], (x, y), through=networks, points=3)
    for index, network in enumerate(networks):
        answer = network(x)
        assert found.scores.loss[index].item() == F.cross_entropy(answer, y).item()
        assert found.scores.accuracy[index].item() == pytest.approx((answer.argmax(1) == y).float().mean().item())
        assert found.scores.agreement[index, index] == 1


def test_given_points_lie_where_their_distances_say():
    networks = [cnn(seed) for seed in range(3)]
    found = plane(networks[0], images(), through=[n.state_dict() for n in networks], points=4, margin=0.1)
    vectors = torch.stack([flat_weights(network).detach().double() for network in networks])
    torch.testing.assert_close(torch.cdist(found.coordinates, found.coordinates), torch.cdist(vectors, vectors))
    extent = found.coordinates.amax(0) - found.coordinates.amin(0)
    for axis, (low, high) in enumerate(zip(found.coordinates.amin(0), found.coordinates.amax(0), strict=True)):
        assert found.axes[axis][0].item() == pytest.approx((low - 0.1 * extent[axis]).item())
        assert found.axes[axis][-1].item() == pytest.approx((high + 0.1 * extent[axis]).item())


def test_a_line_between_two_networks_has_their_losses_at_its_ends():
    a, b, data = cnn(0), cnn(1), images()
    found = plane(a, data, through=(a, b), points=5, margin=0)
    assert found.loss.shape == (5,) and found.agreement.shape == (2, 5)
    torch.testing.assert_close(found.loss[[0, -1]], found.scores.loss, rtol=1e-5, atol=1e-6)
    assert found.agreement[0, 0] == found.agreement[1, -1] == 1


def test_along_two_directions_the_network_is_in_the_middle():
    network, data = cnn(0), images()
    directions = [filter_normalised(random_direction(network, seed), network) for seed in (0, 1)]
    found = plane(network, data, along=directions, span=0.5, points=3)
    assert found.axes[0].tolist() == found.axes[1].tolist() == [-0.5, 0, 0.5]
    assert found.loss[1, 1].item() == pytest.approx(found.scores.loss[0].item(), rel=1e-6)
    loss, *_ = by_hand(network, found, *data, [network])
    torch.testing.assert_close(found.loss.flatten(), loss, rtol=1e-5, atol=1e-5)


def test_a_line_along_the_way_to_another_network_reaches_it_at_1():
    a, b, data = cnn(0), cnn(1), images()
    found = plane(a, data, along=[between(a, b)], span=(0, 1), points=3, solutions={"b": b})
    assert found.solutions == ("b",) and found.coordinates.item() == pytest.approx(1)
    assert found.loss[-1].item() == pytest.approx(F.cross_entropy(b(data[0]), data[1]).item(), rel=1e-5)


def test_the_radial_cut_holds_the_origin_and_both_optima():
    a, b, data = cnn(0), cnn(1), images()
    with torch.no_grad():  # on the same side of the origin, so that it is the corner of the grid
        for own, other in zip(b.parameters(), a.parameters(), strict=True):
            own.add_(other)
    found = plane(a, data, radial=(a, b), points=5, margin=0)
    assert found.solutions == ("a", "b")
    lengths = torch.stack([flat_weights(network).detach().double().norm() for network in (a, b)])
    torch.testing.assert_close(found.coordinates.norm(dim=1), lengths)
    assert found.axes[0][0] == found.axes[1][0] == 0
    assert found.loss[0, 0].item() == pytest.approx(math.log(4), rel=1e-6)  # all weights 0: all classes alike


def test_checkpoints_are_projected_onto_the_plane():
    networks = [cnn(seed) for seed in range(3)]
    found = plane(networks[0], images(), through=networks, points=2)
    at = found.project([network.state_dict() for network in networks], networks[0])
    torch.testing.assert_close(at, found.coordinates, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("build", [normed, lambda seed: nn.Linear(5, 4)], ids=["mlp with batch norm", "linear"])
def test_other_networks_equal_the_loop_too(build):
    torch.manual_seed(7)
    network, data = build(0), rows()
    found = plane(network, data, along=[random_direction(network, 0), random_direction(network, 1)], points=4)
    loss, *_ = by_hand(network, found, *data, [network])
    torch.testing.assert_close(found.loss.flatten(), loss, rtol=1e-5, atol=1e-5)


def test_a_network_that_needs_contiguous_images_runs():
    network, data = Flattened(), images(900)
    found = plane(network, data, along=[random_direction(network)], points=4)
    loss, *_ = by_hand(network, found, *data, [network])
    torch.testing.assert_close(found.loss.flatten(), loss, rtol=1e-5, atol=1e-5)


def test_batch_norm_without_statistics_sees_whole_batches(monkeypatch):
    monkeypatch.setattr(fused, "CACHED", 1)  # else the data would be one part
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, 4)).eval()
    data = images()
    found = plane(network, data, along=[random_direction(network)], points=3)
    loss, *_ = by_hand(network, found, *data, [network])
    torch.testing.assert_close(found.loss.flatten(), loss, rtol=1e-5, atol=1e-5)


def test_a_network_called_by_keywords_is_measured():
    network, (x, y) = ByName(), rows()
    batches = [{"left": x[i : i + 20], "right": x[i : i + 20], "labels": y[i : i + 20]} for i in (0, 20, 40)]
    found = plane(network, batches, along=[random_direction(network)], span=(0, 1), points=2)
    want = F.cross_entropy(network.fc(2 * x), y).item()
    assert found.scores.loss.item() == pytest.approx(want, rel=1e-6)
    assert found.loss[0].item() == pytest.approx(want, rel=1e-6)


def test_batches_of_different_sizes_count_by_their_size():
    network, (x, y) = nn.Linear(5, 4), rows()
    found = plane(network, [(x[:50], y[:50]), (x[50:], y[50:])], along=[random_direction(network)], points=3)
    assert found.loss[1].item() == pytest.approx(F.cross_entropy(network(x), y).item(), rel=1e-6)


def test_a_regression_has_a_loss_alone():
    network, x = nn.Linear(5, 1), rows()[0]
    found = plane(network, (x, x[:, :1]), along=[random_direction(network)], points=3, criterion=F.mse_loss)
    assert found.loss[1].item() == pytest.approx(F.mse_loss(network(x), x[:, :1]).item(), rel=1e-6)
    assert found.accuracy is None and found.agreement is None
    with pytest.raises(ValueError, match="what='accuracy' needs classes"):
        found.plot("accuracy")


# Batch norm -------------------------------------------------------------------------------------------------


def test_batch_norm_statistics_are_recomputed_at_each_point():
    a, b, (x, y) = normed(0), normed(1), rows()
    found = plane(a, (x, y), through=(a, b), points=4, batch_norm=x)
    one = copy.deepcopy(a)
    for at, loss in zip(found.axes[0], found.loss, strict=True):
        one.load_state_dict(unflattened(found.frame.weights(at[None]), one), strict=False)
        one.load_state_dict(statistics(one, {}, Batches(x)), strict=False)
        assert loss.item() == pytest.approx(F.cross_entropy(one(x), y).item(), rel=1e-5)
    for index, network in enumerate((a, b)):
        assert found.scores.loss[index].item() == F.cross_entropy(network(x), y).item()


def test_a_plane_through_networks_of_different_statistics_asks_for_data():
    a, b = normed(0), normed(1)
    with pytest.raises(ValueError, match="a and b differ in '1.running_mean'.*batch_norm=data"):
        plane(a, rows(), through=(a, b))


# Noise ------------------------------------------------------------------------------------------------------


def drawing() -> mt.Multitude:
    torch.manual_seed(0)
    return mt.mc_dropout(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4)), 0.5, ["2"])


def at_point(net: mt.Multitude, found: Plane, index: int) -> mt.Multitude:
    one = copy.deepcopy(net).eval()
    one.load_state_dict(unflattened(found.frame.weights(found.axes[0][index][None]), one), strict=False)
    return one


def test_with_fixed_noise_each_point_makes_the_draws_of_the_seed():
    net, (x, y) = drawing(), rows()
    found = plane(net, (x, y), along=[random_direction(net)], points=3, seeds=(0, 1), draws=2)
    assert found.loss.shape == (2, 3) and found.scores.loss.shape == (2, 1) and found.agreement.shape == (2, 1, 3)
    for number, seed in enumerate((0, 1)):
        for index in range(3):
            probabilities = at_point(net, found, index)(x, draws=2, seed=seed).softmax(2).mean(0)
            want = F.nll_loss(probabilities.log(), y).item()
            assert found.loss[number, index].item() == pytest.approx(want, rel=1e-5)
    assert (found.agreement[:, 0, 1] == 1).all()
    assert (found.loss[0] != found.loss[1]).all()


def test_with_fresh_noise_each_point_makes_draws_of_its_own():
    net, (x, y) = drawing(), rows()
    found = plane(net, (x, y), along=[random_direction(net)], points=3, seeds=(5,), noise="fresh")
    for index in range(3):
        own = at_point(net, found, index)(x, draws=4, seed=5)[index + 1]
        assert found.loss[0, index].item() == pytest.approx(F.cross_entropy(own, y).item(), rel=1e-5)


def test_without_seeds_a_network_that_draws_gives_expectations():
    net, (x, y) = drawing(), rows()
    found = plane(net, (x, y), along=[random_direction(net)], points=3)
    assert found.loss[1].item() == pytest.approx(F.cross_entropy(net.eval()(x, draws=0)[0], y).item(), rel=1e-5)


# Given things, folders, figures -----------------------------------------------------------------------------


def test_nothing_given_is_changed():
    networks = [normed(seed).train() for seed in range(2)]
    before = [copy.deepcopy(network.state_dict()) for network in networks]
    state = torch.get_rng_state()
    plane(networks[0], rows(), through=networks, points=2, batch_norm=rows()[0])
    for network, held in zip(networks, before, strict=True):
        assert all(torch.equal(tensor, held[name]) for name, tensor in network.state_dict().items())
        assert network.training and all(p.requires_grad for p in network.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def measured(monkeypatch):
    """Counts the points that are measured, and may interrupt after some."""
    counts = {"points": 0, "until": 10**9}
    measure = weights_module.Gauge.measure

    def counting(self, weights, noises=None):
        if counts["points"] >= counts["until"]:
            raise KeyboardInterrupt
        counts["points"] += len(weights)
        return measure(self, weights, noises)

    monkeypatch.setattr(weights_module.Gauge, "measure", counting)
    return counts


def test_an_interrupted_plane_goes_on_from_its_folder(tmp_path, measured):
    networks, data = [cnn(seed) for seed in range(3)], images()
    options = {"through": networks, "points": 5, "at_once": 4}
    want = plane(networks[0], data, **options)
    measured.update(points=0, until=12)
    with pytest.raises(KeyboardInterrupt):
        plane(networks[0], data, folder=tmp_path, **options)
    measured.update(points=0, until=10**9)
    found = plane(networks[0], data, folder=tmp_path, **options)
    assert measured["points"] == 13
    torch.testing.assert_close(found.loss, want.loss, rtol=1e-6, atol=1e-6)
    measured.update(points=0)
    again = plane(networks[0], data, folder=tmp_path, **options)
    assert measured["points"] == 0 and torch.equal(again.loss, found.loss)
    assert torch.equal(again.agreement, found.agreement)


@pytest.mark.parametrize("change", ["weights", "data", "grid", "buffers", "batch norm"])
def test_a_folder_never_mixes_what_was_asked(tmp_path, measured, change):
    network, (x, y) = normed(0), rows()
    direction = random_direction(network)
    options = {"along": [direction], "points": 3, "folder": tmp_path, "batch_norm": None}
    plane(network, (x, y), **options)
    if change == "weights":
        with torch.no_grad():
            network[0].weight[0, 0] += 1e-3
    elif change == "data":
        x = x.clone()
        x[7, 2] += 1e-3
    elif change == "grid":
        options["span"] = 0.9
    elif change == "buffers":
        network[1].running_mean[0] += 1e-3
    else:
        options["batch_norm"] = x
    measured.update(points=0)
    plane(network, (x, y), **options)
    assert measured["points"] == 3
    assert all(json.loads(path.read_text())["points"] for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2


def test_progress_is_shown_on_stderr(capsys):
    network = nn.Linear(5, 4)
    plane(network, rows(), along=[random_direction(network)], points=3, progress=True)
    assert "3 points" in capsys.readouterr().err


def test_figures_show_the_plane_and_its_solutions():
    pytest.importorskip("plotly")
    networks, data = [cnn(seed) for seed in range(3)], images()
    found = plane(networks[0], data, through=networks, points=3)
    fig = found.plot("agreement", solution=2, paths={"run": found.coordinates})
    assert [trace.name for trace in fig.data[1:]] == ["run", "a", "b", "c"]
    assert fig.data[0].z[1][0] == found.agreement[2, 0, 1].item()
    assert found.plot().data[0].z[2][1] == pytest.approx(found.loss[1, 2].log10().item())
    line = plane(networks[0], data, through=networks[:2], points=3).plot("accuracy")
    assert len(line.data[0].y) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "pass one of through, along and radial, got none"),
        ({"through": "ab", "along": ["d"]}, "pass one of through, along and radial, got through and along"),
        ({"through": ["net"]}, "through must hold 2 or 3 solutions, got 1"),
        ({"through": ["net", "net"]}, "b equals a"),
        ({"radial": ["net", "other", "other"]}, "radial must hold 2 solutions, got 3"),
        ({"through": ["net", "odd"]}, r"through\[1\] does not fit the model"),
        ({"along": ["short"]}, r"along\[0\] must be a vector of the network's 24 weights, got shape \[3\]"),
        ({"along": ["d"], "span": -1}, "span must be above 0, got -1"),
        ({"along": ["d"], "span": (1, 0)}, "span must be a number above 0, or two numbers in order"),
        ({"along": ["d"], "points": 0}, "points must be a whole number, 1 or more, got 0"),
        ({"along": ["d"], "seeds": (0,)}, "this network has no layer that draws"),
        ({"along": ["d"], "noise": "loud"}, "noise must be 'fixed' or 'fresh', got 'loud'"),
        ({"along": ["d"], "at_once": 0}, "at_once must be a whole number"),
    ],
)
def test_wrong_arguments_are_told(options, message):
    torch.manual_seed(0)
    names = {"net": nn.Linear(5, 4), "other": nn.Linear(5, 4), "odd": nn.Linear(5, 3), "short": torch.ones(3)}
    names |= {"d": torch.ones(24), "a": names["net"], "b": names["other"]}
    put = {k: [names[n] for n in v] if k in ("through", "along", "radial") else v for k, v in options.items()}
    with pytest.raises(ValueError, match=message):
        plane(names["net"], rows(), **put)


def test_wrong_data_are_told():
    network, (x, y) = nn.Linear(5, 4), rows()
    along = [random_direction(network)]
    with pytest.raises(ValueError, match="data must have classes 0 to 3, got 4"):
        plane(network, (x, y + 1), along=along)
    with pytest.raises(ValueError, match="data must have targets"):
        plane(network, x, along=along)
    with pytest.raises(ValueError, match="batch 0 holds NaN or infinite inputs"):
        plane(network, (x / 0, y), along=along)
    with pytest.raises(ValueError, match="cross entropy needs classes"):
        plane(network, (x, x[:, 0]), along=along)
    with pytest.raises(ValueError, match="network must be one network, got Members of 2"):
        plane(mt.deep_ensemble(network, 2), (x, y), along=along)
