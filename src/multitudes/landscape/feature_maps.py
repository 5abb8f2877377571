"""Feature maps by depth: uncertainty of their points, and covariance of neighbouring points.

Park and Kim, *Blurs behave like ensembles*, 2022, section 2.2 and Fig. 5. *Model uncertainty* is the standard deviation
of a point of a feature map over several executions of a network that draws. *Data uncertainty* is the standard
deviation over the points of a feature map in one execution. Both are averaged over channels. Appendix D.1 and Fig. D.1:
in random networks, neighbouring points of feature maps covary even for noise inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_count, check_seed
from multitudes.ensemble.multitude import Multitude
from multitudes.landscape.figures import COLOURS, SCALE, add_line, figure
from multitudes.networks.calls import Input, call, evaluating, input_errors, plain_attention, tensors_in
from multitudes.networks.devices import device_in
from multitudes.networks.seeds import mixed
from multitudes.networks.stochastic import stochastic_layers
from multitudes.networks.trace import hooked
from multitudes.surgery.select import Selector, select
from multitudes.training.batches import Batches

Maps = dict[str, Tensor]
"""Outputs of layers by name, in execution order; a layer's second call is `name (2)`."""

AsMap = Callable[[Tensor], Tensor]
"""Converts a layer's output to a feature map `[B, C, ...]`, for layers with another layout."""


# -- one pass, with hooks ----------------------------------------------------------------------------------


def feature_maps(
    network: nn.Module,
    x: Input,
    layers: Selector = None,
    draws: int | None = None,
    seed: int = 0,
    maps: AsMap | None = None,
) -> Iterator[Maps]:
    """Yield the outputs `[B, C, ...]` of layers by name, once per execution of the network.

    A network that draws is executed `draws` times per member, by default as often as the multitude draws. `layers`
    are by default all that call no other layer. `maps` converts each output to `[B, C, ...]`, for example tokens by
    `lambda t: t[:, 1:].transpose(1, 2).unflatten(2, (14, 14))`. An output that is not a tensor is skipped, or raises
    if its layer was selected.

    >>> network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten())
    >>> [maps] = feature_maps(network, torch.randn(5, 1, 8, 8), layers="[01]")
    >>> {name: list(value.shape) for name, value in maps.items()}
    {'0': [5, 2, 6, 6], '1': [5, 2, 6, 6]}
    """
    for alone in members_of(network):
        kinds = tuple({type(module) for module in _inner(alone).modules()})
        chosen = None if layers is None else set(select(_inner(alone), layers, kinds))
        count = draws or (alone.draws if isinstance(alone, Multitude) else 1)
        for number in range(count if _draws(alone) else 1):
            with torch.no_grad():
                yield _execution(alone, x, chosen, mixed(seed, number), maps)


def members_of(network: nn.Module) -> list[nn.Module]:
    """Return each member alone, as a multitude if it draws."""
    if isinstance(network, Multitude) and (network.members > 1 or network.independent):
        return [network.member(index) for index in range(network.members)]
    if not isinstance(network, Multitude) and stochastic_layers(network):
        return [Multitude(network)]
    return [network]


def _inner(network: nn.Module) -> nn.Module:
    """Return the module that a multitude calls."""
    return network.network if isinstance(network, Multitude) else network


def _draws(network: nn.Module) -> bool:
    return bool(stochastic_layers(_inner(network)))


def _execution(network: nn.Module, x: Input, chosen: set[str] | None, seed: int, maps: AsMap | None) -> Maps:
    seen: list[tuple[str, Tensor]] = []
    called: dict[str, None] = {}

    def record(name: str, layer: nn.Module, args: Any, output: Any) -> None:
        called[name] = None
        if chosen is not None and name not in chosen:
            return
        value = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
            seen.append((name, value))
        elif chosen is not None:
            raise ValueError(f"layers: {name!r} ({type(layer).__name__}) gives no feature map [B, C, ...]")

    if isinstance(network, Multitude):
        network.prepare_run(x)  # its runs must not be recorded
    kinds = tuple({type(module) for module in _inner(network).modules()})
    with hooked(_inner(network), kinds, record), evaluating(network), plain_attention():
        if isinstance(network, Multitude):
            network(x, draws=1 if _draws(network) else None, seed=seed)
        else:
            with input_errors(x):
                call(network, x)
    if chosen is None:
        chosen = {name for name in called if not any(_inside(other, name) for other in called)}
    elif missing := sorted(chosen - set(called)):
        raise ValueError(f"layers: {missing[0]!r} is never called; called layers: {', '.join(called)}")
    found: Maps = {}
    count: Counter[str] = Counter()
    for name, value in seen:
        if name in chosen:
            count[name] += 1
            label = name if count[name] == 1 else f"{name} ({count[name]})"
            found[label] = value if maps is None else maps(value)
    return found


def _inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


# -- uncertainty by depth ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FeatureUncertainty:
    """Standard deviations of feature maps by layer, in execution order."""

    names: tuple[str, ...]
    model: Tensor
    """Deviation over executions, `[L]`; mean over points, channels and inputs; 0 for a network that does not draw."""
    data: Tensor
    """Deviation over the points of a map, `[L]`; mean over channels, inputs and executions; NaN without points."""

    def plot(self) -> Any:
        """Plot both uncertainties by depth (Fig. 5)."""
        fig = figure("Uncertainty of feature maps", "layer", "standard deviation")
        add_line(fig, self.names, self.model, "model", 0, mode="lines+markers")
        add_line(fig, self.names, self.data, "data", 1, mode="lines+markers")
        return fig


def feature_uncertainty(
    network: nn.Module,
    data: Any,
    layers: Selector = None,
    draws: int | None = None,
    *,
    seed: int = 0,
    maps: AsMap | None = None,
) -> FeatureUncertainty:
    """Compute model and data uncertainty of feature maps by depth (Fig. 5).

    Args:
        network: Any network. Executions are its draws and members. Features of independent members are not comparable.
        data: Inputs `[N, ...]`, a batch, or an iterable of batches; targets are ignored.
        layers: Layers to record, see `select`. Default: all that call no other layer.
        draws: Number of executions per member. Default: the number of draws of the multitude.
        seed: Seed of the draws.
        maps: Function that converts the output of a layer to `[B, C, ...]`, for example
            `lambda t: t[:, 1:].transpose(1, 2).unflatten(2, (14, 14))` for tokens.

    Returns:
        Standard deviations by layer, with `plot()`.

    Example:
        Dropout with rate 1/2 turns 1 into 0 or 2 (standard deviation 1). A blur over independent points halves it.

        >>> from multitudes.methods.dropout import Dropout
        >>> from multitudes.methods.smoothing import Blur
        >>> network = nn.Sequential(Dropout(0.5), Blur())
        >>> found = feature_uncertainty(network, torch.ones(1, 4, 64, 64), layers=["0", "1"], draws=50)
        >>> found.names, found.model.round(decimals=1), found.data.round(decimals=1)
        (('0', '1'), tensor([1.0000, 0.5000]), tensor([1.0000, 0.5000]))
    """
    found = mean_over_inputs(_deviations, network, data, draws, seed, layers=layers, maps=maps)
    if not found:
        raise ValueError(f"network ({type(network).__name__}) has no layer that gives a feature map [B, C, ...]")
    model, points = torch.stack(list(found.values()), 1)
    return FeatureUncertainty(tuple(found), model, points)


def mean_over_inputs(
    measure: Callable[[Iterator[Maps]], Maps], network: nn.Module, data: Any, draws: int | None, seed: int, **maps: Any
) -> Maps:
    """Apply `measure` to the feature maps of each batch, and return the mean over inputs by layer."""
    check_network(network, draws, seed)
    sums: Maps = {}
    count = 0
    for number, (x, _) in enumerate(Batches(data).on(device_in(network))):
        rows = len(tensors_in(x)[0])
        count += rows
        for name, value in measure(feature_maps(network, x, draws=draws, seed=mixed(seed, number), **maps)).items():
            sums[name] = sums.get(name, 0) + rows * value.cpu()
    return {name: total / count for name, total in sums.items()}


def _deviations(executions: Iterator[Maps]) -> Maps:
    """Return two deviations by layer, `[2]`: over executions, and over points (mean over executions)."""
    means: Maps = {}
    squares: Maps = {}
    points: dict[str, float] = {}
    count = 0
    for maps in executions:
        count += 1
        for name, value in maps.items():
            value = value.to(torch.promote_types(value.dtype, torch.float32))
            if name not in means:
                means[name], squares[name], points[name] = torch.zeros_like(value), torch.zeros_like(value), 0.0
            delta = value - means[name]  # Welford's update
            means[name] += delta / count
            squares[name] += delta * (value - means[name])
            spread = value.flatten(2).std(2, correction=0).mean().item() if value.dim() > 2 else float("nan")
            points[name] += (spread - points[name]) / count
    return {name: torch.tensor([(squares[name] / count).sqrt().mean(), points[name]]) for name in means}


# -- neighbours --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NeighbourCovariance:
    """Covariance of the points of a feature map with its centre, over inputs."""

    layer: str
    centre: tuple[int, ...]
    covariance: Tensor
    """Covariance with the centre of the same channel, `[C, ...]`."""
    correlation: Tensor
    """Correlation from -1 to 1, `[C, ...]`; 0 for a constant point."""

    def plot(self) -> Any:
        """Plot the absolute correlation, mean over channels (Fig. D.1)."""
        fig = figure(f"Correlation with the centre of {self.layer}", "column", "row")
        size = self.correlation.abs().mean(0)
        image = size[None] if size.dim() == 1 else size.flatten(0, -2)
        fig.add_heatmap(z=image.tolist(), colorscale=SCALE, zmin=0, zmax=1)
        across = self.centre[-1]
        down = 0 if len(self.centre) == 1 else self.centre[-2]
        marker = {"symbol": "square-open", "size": 18, "color": COLOURS[1]}
        fig.add_scatter(x=[across], y=[down], mode="markers", marker=marker, name="centre")
        return fig.update_yaxes(autorange="reversed")


def neighbour_covariance(
    network: nn.Module,
    data: Any,
    layer: str | None = None,
    centre: tuple[int, ...] | None = None,
    *,
    seed: int = 0,
    maps: AsMap | None = None,
) -> NeighbourCovariance:
    """Compute the covariance of each point of a feature map with its centre, over inputs (Fig. D.1).

    The paper uses untrained networks and noise inputs, such as `torch.randn(10_000, 3, 15, 15)`.

    Args:
        network: Any network.
        data: Inputs `[N, ...]`, a batch, or an iterable of batches; targets are ignored.
        layer: Name of the layer. Default: the last one whose map has points.
        centre: Index of a point. Default: the middle of the map.
        seed: Seed of the draws.
        maps: Function that converts the output of a layer to `[B, C, ...]`, see `feature_uncertainty`.

    Returns:
        Covariance and correlation `[C, ...]`, with `plot()`.

    Example:
        In a convolution with kernel (1, 2), neighbours share one input (eq. 12): covariance 1 * 2, variance 1 + 4.

        >>> network = nn.Conv1d(1, 1, 2, bias=False)
        >>> network.weight.data = torch.tensor([[[1.0, 2.0]]])
        >>> found = neighbour_covariance(network, torch.randn(200_000, 1, 6, generator=torch.manual_seed(0)))
        >>> found.centre, found.covariance.round(decimals=1) + 0.0
        ((2,), tensor([[0., 2., 5., 2., 0.]], dtype=torch.float64))
    """
    check_network(network, None, seed)
    count, first, squares, products, name = 0, torch.zeros(()), torch.zeros(()), torch.zeros(()), ""
    for number, (x, _) in enumerate(Batches(data).on(device_in(network))):
        seen = next(feature_maps(network, x, None if layer is None else [layer], 1, mixed(seed, number), maps))
        with_points = [(name, value) for name, value in seen.items() if value.dim() > 2]
        if not with_points:
            raise ValueError(
                f"layer={layer!r}: no feature map [B, C, ...] with points; layers that ran: {', '.join(seen)}"
            )
        name, value = with_points[-1]
        centre = tuple((side - 1) // 2 for side in value.shape[2:]) if centre is None else centre
        if len(centre) != value.dim() - 2 or any(not 0 <= c < n for c, n in zip(centre, value.shape[2:], strict=True)):
            raise ValueError(f"centre must be a point of the map {list(value.shape[2:])} of {name!r}, got {centre!r}")
        value = value.double().cpu()
        count += len(value)
        first, squares = first + value.sum(0), squares + value.square().sum(0)
        products = products + (value * _at(value, centre)).sum(0)
    if centre is None or count < 2:
        raise ValueError(f"data must hold two or more inputs, got {count}")
    mean = first / count
    covariance = products / count - mean * _at(mean, centre)
    variance = squares / count - mean.square()
    variance = torch.where(variance > 1e-12 * squares / count, variance, 0.0)  # smaller values are rounding errors
    size = (variance * _at(variance, centre)).sqrt()
    return NeighbourCovariance(name, centre, covariance, torch.where(size > 0, covariance / size, 0.0))


def _at(values: Tensor, centre: tuple[int, ...]) -> Tensor:
    """Return the value at a point, `[..., H, W] -> [..., 1, 1]`."""
    index: Any = (..., *(slice(place, place + 1) for place in centre))
    return values[index]


def check_network(network: nn.Module, draws: int | None, seed: int) -> None:
    """Check the common arguments of feature-map analyses."""
    if not isinstance(network, nn.Module):
        raise ValueError(f"network must be an nn.Module, got {type(network).__name__}")
    check_seed(seed)
    if draws is not None:
        check_count("draws", draws)
