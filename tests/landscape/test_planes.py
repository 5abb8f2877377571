"""Planes through weight space, against networks that are loaded and run point by point."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape.weight_space import fused_weights as fused
from multitudes.landscape.weight_space import weight_scores as weights_module
from multitudes.landscape.weight_space.directions import Frame, filter_normalised, random_direction
from multitudes.landscape.weight_space.planes import Plane, plane
from multitudes.training.batch_norm import Batches, statistics
from multitudes.training.recorder import flat_weights, unflattened, weights_of


def cnn(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return mt.models.small_cnn(classes=4, channels=1, size=8).eval()


def normed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).train()
    network(torch.randn(50, 5) * 2 + 1)
    return network.eval()


class ByName(nn.Module):
    """A network with keyword arguments and a mapping as output."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 4)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"logits": self.fc(left + right)}


class Flattened(nn.Module):
    """A network that fails on channels-last images: `view` requires contiguous tensors."""

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


def moved(seed: int) -> nn.Module:
    """A network with other weights and the same batch-norm statistics."""
    network = normed(0)
    torch.manual_seed(seed)
    for parameter in network.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return network


def unnormed(seed: int) -> nn.Module:
    """Batch norm that uses batch statistics in evaluation."""
    layers = [nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, 4)]
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize(
    ("build", "data", "cached", "through"),
    [
        (cnn, lambda: images(700), None, True),
        (lambda seed: Flattened(), lambda: images(900), None, False),
        (unnormed, images, 1, True),  # else the data would be one part
        (lambda seed: nn.Linear(5, 4), rows, None, False),
        (moved, rows, None, True),
    ],
    ids=["several parts", "contiguous images", "batch norm of the batch", "linear", "batch norm"],
)
def test_a_plane_equals_the_loop_over_its_points(build, data, cached, through, monkeypatch):
    torch.manual_seed(7)
    networks, (x, y) = [build(seed) for seed in range(3)], data()
    if cached:
        monkeypatch.setattr(fused, "CACHED", cached)
    ways = [filter_normalised(random_direction(networks[0], seed), networks[0]) for seed in (0, 1)]
    solutions = networks if through else networks[:1]
    lies = {"through": networks} if through else {"along": ways, "span": 0.5}
    batches = [(x[:50], y[:50]), (x[50:], y[50:])] if build is cnn else (x, y)  # each counts by its size
    found = plane(networks[0], batches, points=5, **lies)
    loss, accuracy, *agreement = by_hand(networks[0], found, x, y, solutions)
    torch.testing.assert_close(found.loss.flatten(), loss, rtol=1e-5, atol=1e-5)
    # A label may flip where two classes are equal to the last bit.
    assert (found.accuracy.flatten() - accuracy).abs().max() <= 1 / len(x)
    assert (found.agreement.flatten(1) - torch.stack(agreement)).abs().max() <= 1 / len(x)
    if not through:
        assert found.axes[0].tolist() == found.axes[1].tolist() == [-0.5, -0.25, 0, 0.25, 0.5]
        assert found.loss[2, 2].item() == pytest.approx(found.scores.loss[0].item(), rel=1e-5)


def test_solutions_have_exactly_the_scores_of_their_networks():
    networks, (x, y) = [cnn(seed) for seed in range(3)], images()
    found = plane(networks[0], (x, y), through=networks, points=3)
    for index, network in enumerate(networks):
        answer = network(x)
        assert found.scores.loss[index].item() == F.cross_entropy(answer, y).item()
        assert found.scores.accuracy[index].item() == pytest.approx((answer.argmax(1) == y).float().mean().item())
        assert found.scores.agreement[index, index] == 1


def test_coordinates_of_solutions_have_their_distances():
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


def test_a_line_towards_another_network_reaches_it_at_1():
    a, b, data = cnn(0), cnn(1), images()
    found = plane(
        a, data, along=[(flat_weights(b) - flat_weights(a)).detach()], span=(0, 1), points=3, solutions={"b": b}
    )
    assert found.solutions == ("b",) and found.coordinates.item() == pytest.approx(1)
    assert found.loss[-1].item() == pytest.approx(F.cross_entropy(b(data[0]), data[1]).item(), rel=1e-5)


def test_a_radial_plane_contains_the_origin_and_both_optima():
    a, b, data = cnn(0), cnn(1), images()
    with torch.no_grad():  # on the same side of the origin, so that it is the corner of the grid
        for own, other in zip(b.parameters(), a.parameters(), strict=True):
            own.add_(other)
    found = plane(a, data, radial=(a, b), points=5, margin=0)
    assert found.solutions == ("a", "b")
    lengths = torch.stack([flat_weights(network).detach().double().norm() for network in (a, b)])
    torch.testing.assert_close(found.coordinates.norm(dim=1), lengths)
    assert found.axes[0][0] == found.axes[1][0] == 0
    assert found.loss[0, 0].item() == pytest.approx(math.log(4), rel=1e-6)  # equal logits


def test_checkpoints_are_projected_onto_the_plane():
    networks = [cnn(seed) for seed in range(3)]
    found = plane(networks[0], images(), through=networks, points=2)
    at = found.project([network.state_dict() for network in networks], networks[0])
    torch.testing.assert_close(at, found.coordinates, rtol=1e-6, atol=1e-6)


def test_a_network_with_keyword_arguments_is_scored():
    network, (x, y) = ByName(), rows()
    batches = [{"left": x[i : i + 20], "right": x[i : i + 20], "labels": y[i : i + 20]} for i in (0, 20, 40)]
    found = plane(network, batches, along=[random_direction(network)], span=(0, 1), points=2)
    want = F.cross_entropy(network.fc(2 * x), y).item()
    assert found.scores.loss.item() == pytest.approx(want, rel=1e-6)
    assert found.loss[0].item() == pytest.approx(want, rel=1e-6)


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


def test_different_batch_norm_statistics_require_data():
    a, b = normed(0), normed(1)
    with pytest.raises(ValueError, match="a and b differ in the buffer '1.running_mean'.*batch_norm=data"):
        plane(a, rows(), through=(a, b))


# Noise ------------------------------------------------------------------------------------------------------


def drawing() -> mt.Multitude:
    torch.manual_seed(0)
    return mt.mc_dropout(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4)), 0.5, ["2"])


def at_point(net: mt.Multitude, found: Plane, index: int) -> mt.Multitude:
    one = copy.deepcopy(net).eval()
    one.load_state_dict(unflattened(found.frame.weights(found.axes[0][index][None]), one), strict=False)
    return one


def test_fixed_noise_uses_the_draws_of_the_seed_at_each_point():
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


def test_fresh_noise_uses_other_draws_at_each_point():
    net, (x, y) = drawing(), rows()
    found = plane(net, (x, y), along=[random_direction(net)], points=3, seeds=(5,), noise="fresh")
    for index in range(3):
        own = at_point(net, found, index)(x, draws=4, seed=5)[index + 1]
        assert found.loss[0, index].item() == pytest.approx(F.cross_entropy(own, y).item(), rel=1e-5)


def test_without_seeds_a_network_that_draws_gives_expectations():
    net, (x, y) = drawing(), rows()
    found = plane(net, (x, y), along=[random_direction(net)], points=3)
    assert found.loss[1].item() == pytest.approx(F.cross_entropy(net.eval()(x, draws=0)[0], y).item(), rel=1e-5)


# Folders and figures ----------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch):
    """Count the scored points, and interrupt after `until`."""
    counts = {"points": 0, "until": 10**9}
    measure = weights_module.WeightScorer.score

    def counting(self, weights, noises=None):
        if counts["points"] >= counts["until"]:
            raise KeyboardInterrupt
        counts["points"] += len(weights)
        return measure(self, weights, noises)

    monkeypatch.setattr(weights_module.WeightScorer, "score", counting)
    return counts


def test_an_interrupted_plane_resumes_from_its_folder(tmp_path, measured):
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
def test_a_folder_keeps_different_calls_separate(tmp_path, measured, change):
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
    assert all(load_file(path)["done"].all() for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_keeps_a_loss_that_is_not_a_number(tmp_path, measured):
    network = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 4))
    options = {"along": [random_direction(network)], "span": 1e38, "points": 3, "folder": tmp_path}
    first = plane(network, rows(), **options).loss
    assert first.isfinite().tolist() == [False, True, False]
    assert torch.equal(plane(network, rows(), **options).loss.isnan(), first.isnan())
    assert measured["points"] == 3


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


# Directions and frames --------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Layers whose filters lie in different places, and parameters that are none."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, groups=2)
        self.up = nn.ConvTranspose2d(6, 8, 2, groups=2)
        self.norm = nn.BatchNorm2d(8)
        self.layer_norm = nn.LayerNorm([4, 4])
        self.fc = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(5))


def filters(name: str, weight: np.ndarray) -> list[np.ndarray]:
    """The filters of each layer above, one by one: what makes one output channel."""
    if name == "up.weight":  # [6 inputs, 4 outputs of each of 2 groups, ...]: inputs 0 to 2 make outputs 0 to 3
        return [weight[3 * group : 3 * group + 3, out] for group in range(2) for out in range(4)]
    return list(weight)


def test_filter_normalised_directions_have_the_filter_norms_of_the_weights():
    torch.manual_seed(0)
    network = Everything()
    direction = random_direction(network, seed=1)
    assert torch.equal(direction, random_direction(network, seed=1)) and abs(direction.std().item() - 1) < 0.1
    scaled = unflattened(filter_normalised(direction, network), network)
    plain = unflattened(direction, network)
    for name in ("conv.weight", "up.weight", "fc.weight"):
        theta = weights_of(network)[name].detach().numpy()
        pairs = zip(*(filters(name, w) for w in (theta, scaled[name].numpy(), plain[name].numpy())), strict=True)
        for own, new, old in pairs:
            assert np.linalg.norm(new) == pytest.approx(np.linalg.norm(own), rel=1e-5)
            cosine = (new * old).sum() / np.linalg.norm(new) / np.linalg.norm(old)
            assert cosine == pytest.approx(1, abs=1e-5)


def test_biases_norms_and_other_vectors_are_zero():
    network = Everything()
    scaled = unflattened(filter_normalised(random_direction(network), network), network)
    still = {name for name, part in scaled.items() if not part.any()}
    assert still == set(scaled) - {"conv.weight", "up.weight", "fc.weight"}


def test_a_zero_filter_stays_zero():
    network = nn.Linear(2, 2, bias=False)
    scaled = filter_normalised(torch.tensor([0.0, 0, 1, 0]), network)
    assert scaled.isfinite().all() and not scaled[:2].any()


def test_coordinates_lead_to_weights_and_back():
    torch.manual_seed(0)
    a, b, c = torch.randn(3, 50, dtype=torch.float64)
    frame = Frame.through([a, b, c])
    assert torch.allclose(frame.directions @ frame.directions.T, torch.eye(2).double(), atol=1e-12)
    for point in (a, b, c):
        assert torch.allclose(frame.weights(frame.project(point)), point, atol=1e-12)
    at = frame.project(torch.stack([a, b, c]))
    assert torch.allclose(torch.cdist(at, at), torch.cdist(torch.stack([a, b, c]), torch.stack([a, b, c])))
    oblique = Frame.along(a, [b, b + c])
    assert torch.allclose(oblique.project(a + 2 * b - 3 * (b + c)), torch.tensor([2.0, -3.0]).double())
