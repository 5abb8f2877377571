"""Uncertainty, covariance and spectra of feature maps, against NumPy and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape.feature_maps import feature_maps, feature_uncertainty, neighbour_covariance
from multitudes.landscape.fourier import feature_spectrum
from multitudes.methods.smoothing import Smooth
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


def test_uncertainties_equal_the_deviations_of_numpy() -> None:
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


def test_batches_are_weighted_by_their_rows() -> None:
    network, x = convolutional(), images(10)
    whole = feature_uncertainty(network, [x]).data[:10]
    torch.testing.assert_close(feature_uncertainty(network, list(x.split([2, 5, 3]))).data[:10], whole)


def test_maps_are_the_outputs_of_layers_by_name() -> None:
    network, x = convolutional().eval(), images()
    [seen] = feature_maps(network, x)
    want = x
    assert list(seen) == [str(number) for number in range(13)]
    for name, layer in network.named_children():
        want = layer(want)
        torch.testing.assert_close(seen[name], want)


def test_a_layer_that_runs_twice_has_two_maps() -> None:
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


def test_drawn_weights_make_all_features_uncertain() -> None:
    network, x = convolutional(), images(4)
    states = [
        {key: value + 0.1 * torch.randn(value.shape) if value.is_floating_point() else value for key, value in own}
        for own in [network.state_dict().items()] * 4
    ]
    states = [{key: value.abs() for key, value in state.items()} for state in states]  # variances above 0
    found = feature_uncertainty(mt.swag(network, states), x, draws=4)
    assert found.names == tuple(str(number) for number in range(13))
    assert (found.model > 0).all()


def test_a_converted_layer_counts_as_one_layer() -> None:
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


def test_covariance_of_neighbours_is_the_autocorrelation_of_the_kernel() -> None:
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


def test_networks_are_called_with_mappings() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(1, 2, 3)

        def forward(self, *, pixels: Tensor) -> Tensor:
            return self.inner(pixels).mean((2, 3))

    found = feature_uncertainty(Named(), [{"pixels": images(), "labels": torch.zeros(12)}])
    assert found.names == ("inner",) and found.data.item() > 0


# -- spectra -----------------------------------------------------------------------------------------------


def noise(count: int = 32, height: int = 16, width: int = 16) -> Tensor:
    return torch.randn(count, 2, height, width, generator=torch.Generator().manual_seed(0))


def test_smoothing_removes_high_frequencies() -> None:
    """Fig. 6b."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 3))
    found = feature_spectrum(mt.smooth(network, example=noise()), noise(), layers=["1", "smooth"]).layers
    before, after = found["1"], found["smooth"]
    high = before.diagonal_frequencies > 0.3
    assert (after.diagonal[high] < before.diagonal[high] - 0.2).all()
    assert after.diagonal[-1] < before.diagonal[-1] - 2


def test_dropout_adds_high_frequencies_to_smooth_maps() -> None:
    """Fig. 6b: little at low frequencies, much at high ones."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), Smooth((1, 4, 6, 4, 1)), nn.Dropout(0.3), nn.Flatten())
    found = feature_spectrum(mt.mc_dropout(network), noise(), layers=["1", "2"], draws=5).layers
    change = found["2"].diagonal - found["1"].diagonal
    assert change[0] == 0 and change[1] < 0.5
    assert change[-1] > 2


def test_amplitudes_equal_the_mean_logarithms_of_numpy() -> None:
    x = noise()
    own = feature_spectrum(nn.Identity(), [x[:10], x[10:]]).layers[""]
    logs = np.log(np.abs(np.fft.fft2(x.numpy().astype(np.float64)))).mean((0, 1))
    np.testing.assert_allclose(own.diagonal.numpy(), np.diagonal(logs)[:9] - logs[0, 0], atol=1e-4)
    np.testing.assert_allclose(own.diagonal_frequencies.numpy(), np.arange(9) / 8, atol=1e-6)


def test_white_noise_has_the_same_amplitude_at_all_frequencies() -> None:
    own = feature_spectrum(nn.Identity(), noise(400)).layers[""]
    # Real at the ends, complex between, the mean logarithms of whose sizes are (-gamma - log 2) / 2 and -gamma / 2.
    assert own.diagonal[1:-1].numpy() == pytest.approx(math.log(2) / 2, abs=0.1)
    assert own.diagonal[-1].item() == pytest.approx(0, abs=0.15)


def test_a_blur_has_the_frequency_response_of_its_kernel() -> None:
    """|1 + e^{i pi f}| / 2 = cos(pi f / 2) down and across, on maps without a border."""
    ring = nn.Sequential(nn.Identity(), nn.Conv2d(1, 1, 2, padding="same", padding_mode="circular", bias=False))
    nn.init.constant_(ring[1].weight, 0.25)
    found = feature_spectrum(ring, noise()[:, :1]).layers
    response = (found["1"].diagonal - found["0"].diagonal)[:-1]
    torch.testing.assert_close(response, 2 * torch.cos(math.pi / 2 * torch.arange(8) / 8).log(), rtol=1e-3, atol=1e-3)


def test_rectangular_maps_have_a_diagonal() -> None:
    x = noise(4, 8, 24)
    own = feature_spectrum(nn.Identity(), x).layers[""]
    logs = np.log(np.abs(np.fft.fft2(x.numpy()))).mean((0, 1))
    want = [logs[k, 3 * k] - logs[0, 0] for k in range(5)]
    np.testing.assert_allclose(own.diagonal.numpy(), want, atol=1e-4)


def test_layers_without_maps_are_skipped_or_converted() -> None:
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten())
    assert list(feature_spectrum(network, noise()).layers) == ["0"]
    maps = feature_spectrum(network, noise(), layers=["1"], maps=lambda t: t.unflatten(1, (3, 14, 14))).layers["1"]
    torch.testing.assert_close(maps.diagonal, feature_spectrum(network, noise()).layers["0"].diagonal)
