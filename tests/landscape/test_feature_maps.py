"""Feature maps by depth: the smoothing paper's findings in miniature, and covariances in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape.feature_maps import feature_maps, feature_uncertainty, neighbour_covariance
from multitudes.networks.seeds import mixed


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def images(count: int = 12) -> Tensor:
    return torch.randn(count, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def test_model_uncertainty_rises_across_dropout_and_falls_across_smoothing() -> None:
    """Fig. 5, left."""
    net = mt.mc_dropout(mt.smooth(convolutional(), example=images()))
    found = feature_uncertainty(net, images(), layers=["2", "3", "6", "smooth", "9", "smooth_2"], draws=20)
    model = dict(zip(found.names, found.model.tolist(), strict=True))
    assert model["2"] == 0 < model["3"]
    assert model["smooth"] < 0.7 * model["6"]
    assert model["smooth_2"] < 0.8 * model["9"]


def test_data_uncertainty_falls_across_smoothing_without_any_draw() -> None:
    """Fig. 5, right: deterministic networks have data uncertainty, but no model uncertainty."""
    network = mt.smooth(convolutional(), example=images())
    found = feature_uncertainty(network, images(), layers=["6", "smooth"])
    assert found.model.tolist() == [0, 0]
    assert found.data[1] < 0.7 * found.data[0]


def test_the_more_dropout_the_more_model_uncertainty() -> None:
    low, high = (
        feature_uncertainty(mt.mc_dropout(convolutional(), p), images(), layers=["6"], draws=20).model.item()
        for p in (0.1, 0.5)
    )
    assert low < 0.7 * high


def test_uncertainties_are_the_deviations_that_numpy_finds() -> None:
    net, x = mt.mc_dropout(convolutional()), images(5)
    found = feature_uncertainty(net, [x], layers=["3", "7", "12"], draws=6, seed=2)
    assert found.names == ("3", "7", "12")
    runs = list(feature_maps(net, x, ["3", "7", "12"], 6, mixed(2, 0)))
    for index, name in enumerate(found.names):
        maps = np.stack([run[name].numpy() for run in runs]).astype(np.float64)
        assert found.model[index].item() == pytest.approx(maps.std(0).mean(), rel=1e-4)
        if maps.ndim == 5:
            points = maps.reshape(*maps.shape[:3], -1).std(-1).mean()
            assert found.data[index].item() == pytest.approx(points, rel=1e-4)
        else:
            assert found.data[index].isnan()


def test_batches_of_different_size_weigh_by_their_rows() -> None:
    network, x = convolutional(), images(10)
    whole = feature_uncertainty(network, [x]).data[:10]
    torch.testing.assert_close(feature_uncertainty(network, list(x.split([2, 5, 3]))).data[:10], whole)


def test_maps_are_what_the_layers_give_under_the_names_they_have() -> None:
    network, x = convolutional().eval(), images()
    [seen] = feature_maps(network, x)
    want = x
    assert list(seen) == [str(number) for number in range(13)]
    for name, layer in network.named_children():
        want = layer(want)
        torch.testing.assert_close(seen[name], want)


def test_a_layer_that_runs_twice_is_seen_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.act(x) - 1)

    [seen] = feature_maps(Twice(), torch.ones(1, 1, 2, 2) * 3)
    assert {name: value[0, 0, 0, 0].item() for name, value in seen.items()} == {"act": 3, "act (2)": 2}
    assert neighbour_covariance(Twice(), [images(4), images(4)], layer="act").layer == "act (2)"


def test_executions_are_the_draws_of_every_member_and_repeat_with_a_seed() -> None:
    x = images(4)
    net = mt.deep_ensemble(mt.mc_dropout(convolutional()), members=2)
    runs = list(feature_maps(net, x, ["12"], draws=3, seed=1))
    assert len(runs) == 6
    again = list(feature_maps(net, x, ["12"], draws=3, seed=1))
    assert all(torch.equal(a["12"], b["12"]) for a, b in zip(runs, again, strict=True))
    assert len({round(run["12"].sum().item(), 6) for run in runs}) == 6


def test_weights_that_are_drawn_make_features_uncertain_from_the_first_layer_on() -> None:
    network, x = convolutional(), images(4)
    states = [
        {key: value + 0.1 * torch.randn(value.shape) if value.is_floating_point() else value for key, value in own}
        for own in [network.state_dict().items()] * 4
    ]
    states = [{key: value.abs() for key, value in state.items()} for state in states]  # variances above 0
    found = feature_uncertainty(mt.swag(network, states), x, draws=4)
    assert found.names == tuple(str(number) for number in range(13))
    assert (found.model > 0).all()


def test_converted_layers_are_layers() -> None:
    """A patched layer holds its mixing, but nothing inside it runs."""
    net = mt.patched(convolutional(), layers="norm+output", example=images())
    found = feature_uncertainty(net, images(), draws=4)
    assert found.names == tuple(str(number) for number in range(13))
    assert found.model[0] == 0 < found.model[1]


def test_tokens_become_maps() -> None:
    network = nn.Sequential(nn.Linear(5, 4))
    tokens = torch.randn(3, 9, 5)
    found = feature_uncertainty(network, tokens, ["0"], maps=lambda t: t.transpose(1, 2))
    want = network(tokens).std(1, correction=0).mean()
    torch.testing.assert_close(found.data[0], want.detach())


def test_the_covariance_of_neighbours_is_the_kernels_autocorrelation() -> None:
    """Eq. (12), in two dimensions."""
    conv = nn.Conv2d(1, 1, 3, bias=False)
    torch.manual_seed(0)
    nn.init.normal_(conv.weight)
    x = torch.randn(60_000, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    found = neighbour_covariance(conv, [x])
    w = conv.weight.detach().numpy()[0, 0].astype(np.float64)
    want = np.zeros((5, 5))
    for down in range(-2, 3):
        for across in range(-2, 3):
            for i in range(3):
                for j in range(3):
                    if 0 <= i + down < 3 and 0 <= j + across < 3:
                        want[2 + down, 2 + across] += w[i, j] * w[i + down, j + across]
    variance = (w**2).sum()
    assert found.centre == (2, 2)
    np.testing.assert_allclose(found.covariance[0].numpy(), want, atol=5 * variance / 60_000**0.5)
    assert found.correlation[0, 2, 2].item() == pytest.approx(1)
    np.testing.assert_allclose(found.correlation[0].numpy(), want / variance, atol=0.03)


def test_deep_networks_relate_points_that_one_convolution_does_not() -> None:
    """Fig. D.1: a convolution of 3 x 3 reaches two points far, five of them ten."""
    torch.manual_seed(0)
    x = torch.randn(4000, 1, 15, 15)
    one = nn.Conv2d(1, 16, 3, padding=1)
    layers: list[nn.Module] = [one]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    shallow, deep = (neighbour_covariance(net, x).correlation.abs().mean(0) for net in (one, nn.Sequential(*layers)))
    assert shallow[7, 10] < 0.03  # three points away: noise alone, about 1 / sqrt(4000)
    assert deep[7, 10] > 0.06


def test_networks_are_called_with_mappings() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(1, 2, 3)

        def forward(self, *, pixels: Tensor) -> Tensor:
            return self.inner(pixels).mean((2, 3))

    found = feature_uncertainty(Named(), [{"pixels": images(), "labels": torch.zeros(12)}])
    assert found.names == ("inner",) and found.data.item() > 0
