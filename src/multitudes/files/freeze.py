"""`freeze`: convert a network that draws to several deterministic networks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import nn

from multitudes.base.checks import check_count, check_seed
from multitudes.draws.frozen_noise import FrozenNoise
from multitudes.draws.functional_noise import freeze_noise_when_found, has_noise_to_keep
from multitudes.ensemble.members import Members
from multitudes.ensemble.multitude import Multitude, plain
from multitudes.evaluation.calibrate import Calibrated
from multitudes.networks.copies import copied
from multitudes.networks.seeds import mixed, seeded
from multitudes.networks.stochastic import Draw, attached_layers, detach_layers, drawing, stochastic_layers


@overload
def freeze(net: Multitude, draws: int = 8, seed: int | None = None) -> Multitude: ...
@overload
def freeze(net: Calibrated, draws: int = 8, seed: int | None = None) -> Calibrated: ...
def freeze(net: Multitude | Calibrated, draws: int = 8, seed: int | None = None) -> Multitude | Calibrated:
    """Draw every member `draws` times, and return the deterministic multitude of all `members * draws` networks.

    Drawn weights (`drop_connect`, `patched`, `subspace`, `swag`) are folded into plain layers. Drawn activations keep
    their layers with fixed noise, the same for all rows of a batch: dropout, for example, has one mask per network. For
    a single input, predictions are distributed like those of draws.

    Args:
        net: A multitude, calibrated or not; it does not change. Without layers that draw it is copied; a network that
            predicts without draws (`laplace`) still does.
        draws: Number of draws per member.
        seed: The same seed gives the same networks. If weights are drawn, and layers run in the order of their
            registration, these are the networks of `net(x, draws=draws, seed=seed)`.

    Returns:
        `Members`, or a `Calibrated` if `net` is one.

    Example:
        >>> from multitudes.methods.dropout import mc_dropout
        >>> net = mc_dropout(nn.Sequential(nn.Linear(3, 32), nn.Dropout(0.5), nn.Linear(32, 2))).eval()
        >>> frozen, x = freeze(net, draws=4), torch.ones(5, 3)
        >>> frozen(x).shape, torch.equal(frozen(x), frozen(x))
        (torch.Size([4, 5, 2]), True)
    """
    if isinstance(net, Calibrated):
        return Calibrated(freeze(net.net, draws, seed), net.calibration)
    if not isinstance(net, Multitude):
        raise ValueError(f"net must be a multitude, got {type(net).__name__}")
    check_count("draws", draws)
    check_seed(seed)
    if not stochastic_layers(net.network):
        return copied(net)
    if (by_formula := net.without_draws(draws)) is not None:
        return by_formula
    draw = Draw(int(torch.randint(2**62, ())) if seed is None else seed)
    networks = list(_networks(net, draw, range(draws), seed))
    frozen = Members(networks, len(networks)).like(net)
    frozen.divergences = ()
    frozen.notes = {"total": f"{draws} draws of {net.members} member{'s' if net.members > 1 else ''}, frozen"}
    return frozen


def _networks(net: Multitude, draw: Draw, draw_indices: Sequence[int], seed: int | None) -> Iterator[nn.Module]:
    """Yield the networks of these draws, member-major, with the random numbers of `Draws`."""
    for index in range(net.members):
        network = plain(net.member(index))
        own = [draw_index * net.members + index for draw_index in draw_indices]
        if isinstance(network, Multitude):
            yield from _networks(network, draw, own, seed)
            continue
        for draw_index in own:
            draw.index = torch.tensor(draw_index)
            with seeded(None if seed is None else mixed(seed, draw_index)):  # for layers that use torch's random state
                yield _freeze_draw(network, draw)


@torch.no_grad()
def _freeze_draw(network: nn.Module, draw: Draw) -> nn.Module:
    """Return a copy of a network with one draw.

    Layers that can `fold` are replaced with plain layers, including their children. A network that folds as a whole may
    contain more stochastic layers.
    """
    layers = stochastic_layers(network)
    memo: dict[int, Any] = {}
    folded_away: set[int] = set()
    with drawing(layers, draw), _attached_draws(network):
        for layer in layers:
            folded = layer.fold()
            if folded is not None and layer is network:
                return _freeze_draw(folded, draw)
            if folded is not None:
                memo[id(layer)] = folded
                folded_away |= set(map(id, layer.modules()))
    generator = draw.generator(int(draw.index), torch.device("cpu"))
    device = next(network.parameters(), torch.zeros(0)).device
    for layer in reversed(layers):  # inner layers first
        if id(layer) not in folded_away:
            seed = torch.randint(2**31, (), generator=generator).to(device)
            memo[id(layer)] = FrozenNoise(copied(layer, memo), seed)
    frozen = copied(network, memo)
    if has_noise_to_keep(frozen):
        freeze_noise_when_found(frozen, torch.randint(2**31, (), generator=generator).to(device))
    for module in frozen.modules():
        detach_layers(module)
    return frozen


@contextmanager
def _attached_draws(network: nn.Module) -> Iterator[None]:
    """Make the draws of layers attached to whole networks, inside the context."""
    pairs = [(layer, module) for module in network.modules() for layer in attached_layers(module)]
    for layer, module in pairs:
        layer.begin(module, ())
    try:
        yield
    finally:
        for layer, module in pairs:
            layer.end(module, (), None)
