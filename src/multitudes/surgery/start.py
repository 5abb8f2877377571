"""What a converted network starts from: its own weights, new ones, or new output layers; for all methods alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from multitudes.core.checks import check_choice, check_count, check_seed
from multitudes.core.multitude import plain
from multitudes.core.seeding import seeded
from multitudes.surgery.initialise import redraw
from multitudes.surgery.layers import Factory, Selector, built, check_model

__all__ = ["INITS", "Start", "starting"]

INITS = ("fresh", "pretrained", "heads")


class Start:
    """The network that a method converts, and the weights that what it makes of it starts from."""

    def __init__(self, model: nn.Module | Factory, init: str | None, heads: Selector, seed: int | None) -> None:
        self._factory = None if isinstance(model, nn.Module) else model
        self._seed, self._states = seed, None
        with self.seeded():
            self.given = built(model)
            """The network or the multitude that was given, or that the factory has built."""
        self.network = plain(self.given)
        """What is converted; it is left as it was."""
        self.mode = init or "fresh"
        self.heads = heads
        self.notes: dict[str, str] = {}
        """What the summary tells of parameters that do not start as their layers would."""

    @property
    def fresh(self) -> bool:
        """Whether all weights are new."""
        return self.mode == "fresh"

    @property
    def redraws(self) -> bool:
        """Whether the layers' own rules draw all weights anew; a factory has drawn them already."""
        return self.fresh and self._factory is None

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Random numbers from the seed, behind those that building the network has used."""
        with seeded(self._seed):
            if self._seed is not None and self._states is not None:
                _set_states(self._states)
            yield
            if self._seed is not None:
                self._states = _get_states()

    def another(self) -> nn.Module:
        """The network to make one more member of: a factory builds a new one."""
        return self.network

    def begin(self, network: nn.Module) -> nn.Module:
        """Give a copy of the network, of whatever widths, the weights that it starts from, in place."""
        return redraw(network) if self.redraws else network


def starting(
    model: nn.Module | Factory,
    members: int,
    init: str | None,
    heads: Selector = None,
    *,
    seed: int | None = None,
    nested: bool = False,
) -> Start:
    """Check what every method asks of its first arguments, and say what to start from.

    Multitudes that only draw are converted as their network. Other multitudes are converted by few (`nested`).
    """
    if isinstance(model, nn.Module):
        check_model(model, nested)
    check_count("members", members)
    if init is not None:
        check_choice("init", init, INITS)
    if heads is not None and init != "heads":
        raise ValueError(f"heads={heads!r} needs init='heads', got init={init!r}")
    check_seed(seed)
    start = Start(model, init, heads, seed)
    check_model(start.given, nested)
    return start


def _get_states() -> list[torch.Tensor]:
    return (
        [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
        if torch.cuda.is_initialized()
        else [torch.get_rng_state()]
    )


def _set_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])
