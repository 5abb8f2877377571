"""Feature maps in the frequency domain.

Park and Kim, *Blurs behave like ensembles*, 2022, section 2.2 and Fig. 6: the log amplitude of the Fourier transform of
feature maps, relative to frequency 0. Dropout adds high frequencies, smoothing removes them. Frequencies are in units
of pi radians per pixel; the maximum is 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.landscape.feature_maps import AsMap, Maps, mean_over_inputs
from multitudes.landscape.figures import COLOURS, add_line, figure
from multitudes.surgery.select import Selector

FLOOR = 1e-6
"""Lower bound of amplitudes, to avoid the logarithm of 0."""


@dataclass(frozen=True, eq=False)
class LayerSpectrum:
    """Log amplitudes of the maps of a layer, relative to frequency 0: mean over channels, inputs and executions."""

    diagonal_frequencies: Tensor
    """Frequencies of diagonal waves from 0 to 1, `[F]`."""
    diagonal: Tensor
    """Log amplitudes at these frequencies, `[F]`; the first is 0."""


@dataclass(frozen=True, eq=False)
class FeatureSpectrum:
    """Spectra of layers by name, in execution order."""

    layers: dict[str, LayerSpectrum]

    def plot(self) -> Any:
        """Plot the log amplitudes along the diagonal against the frequency (Fig. 6b)."""
        fig = figure("Feature maps by frequency", "frequency / π", "Δ log amplitude")
        for number, (name, own) in enumerate(self.layers.items()):
            x, y = own.diagonal_frequencies, own.diagonal
            add_line(fig, x, y, name, number, number // len(COLOURS), "lines")
        return fig


def feature_spectrum(
    network: nn.Module,
    data: Any,
    layers: Selector = None,
    draws: int | None = None,
    *,
    seed: int = 0,
    maps: AsMap | None = None,
) -> FeatureSpectrum:
    """Compute log amplitudes of feature maps `[B, C, H, W]` by frequency, relative to frequency 0 (Fig. 6b).

    Args:
        network: Any network. For one that draws, the result is the mean over executions.
        data: Inputs `[N, ...]`, a batch, or an iterable of batches; targets are ignored.
        layers: Layers to record, see `select`. Default: all that call no other layer and give maps `[B, C, H, W]`.
        draws: Number of executions per member. Default: the number of draws of the multitude.
        seed: Seed of the draws.
        maps: Function that converts the output of a layer to `[B, C, H, W]`, see `feature_uncertainty`.

    Returns:
        Spectra by layer, with `plot()`.

    Example:
        A wave with a period of two pixels and half the amplitude of the mean, and a blur that removes it:

        >>> from multitudes.methods.smoothing import Blur
        >>> board = 2.0 + (torch.arange(8)[:, None] + torch.arange(8)) % 2 * 2 - 1  # 1 and 3
        >>> spectrum = feature_spectrum(nn.Sequential(nn.Identity(), Blur()), board.view(1, 1, 8, 8))
        >>> spectrum.layers["0"].diagonal_frequencies[-1], spectrum.layers["0"].diagonal[-1].exp()
        (tensor(1.), tensor(0.5000))
        >>> spectrum.layers["1.box"].diagonal[-1].exp() < 0.1
        tensor(True)
    """

    def measure(executions: Iterator[Maps]) -> Maps:
        found: dict[str, list[Tensor]] = {}
        for name, value in itertools.chain.from_iterable(seen.items() for seen in executions):
            if value.dim() == 4:
                found.setdefault(name, []).append(_log_amplitudes(value))
            elif layers is not None:
                raise ValueError(
                    f"layers: {name!r} must give maps [B, C, H, W], got {list(value.shape)}; convert them with maps="
                )
        return {name: torch.stack(each).mean(0) for name, each in found.items()}

    found = mean_over_inputs(measure, network, data, draws, seed, layers=layers, maps=maps)
    if not found:
        raise ValueError(
            f"network ({type(network).__name__}) has no layer that gives maps [B, C, H, W]; convert with maps="
        )
    return FeatureSpectrum({name: _spectrum(amplitudes) for name, amplitudes in found.items()})


def _log_amplitudes(maps: Tensor) -> Tensor:
    """Return log amplitudes in FFT order, mean over inputs and channels: `[B, C, H, W] -> [H, W]`."""
    values = maps.to(torch.promote_types(maps.dtype, torch.float32))
    return torch.fft.fft2(values).abs().clamp(min=FLOOR).log().mean((0, 1))


def _spectrum(amplitudes: Tensor) -> LayerSpectrum:
    height, width = amplitudes.shape
    relative = amplitudes - amplitudes[0, 0]
    side = min(height, width)
    steps = torch.arange(side // 2 + 1)
    diagonal = relative[(steps * height / side).round().long(), (steps * width / side).round().long()]
    return LayerSpectrum(steps * 2 / side, diagonal)
