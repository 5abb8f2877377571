"""The initial weights of a converted network, for all methods.

| `init` | initial weights of each member |
|---|---|
| `"fresh"` | new random ones, by each layer's own rule; a factory's networks are used as they are |
| `"pretrained"` | those of the network |
| `"heads"` | those of the network, with new random ones in the output layers |

Frozen parameters always keep their values.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from multitudes.base.checks import check_choice, check_count, check_seed
from multitudes.networks.calls import Input, initializing
from multitudes.networks.seeds import State, seeded, torch_states
from multitudes.networks.stochastic import stochastic_layers
from multitudes.surgery.initialize import CustomInitialization, compare_with_rules, reinitialize
from multitudes.surgery.output_layers import output_layers
from multitudes.surgery.select import Factory, Selector, build_network, check_model

INITS = ("fresh", "pretrained", "heads")


class Start:
    """The network that a method converts, and the initial weights of the result.

    The constructor checks the arguments that all methods share. A multitude that only draws is replaced by its network;
    other multitudes need `nested`.
    """

    def __init__(
        self,
        model: nn.Module | Factory,
        members: int,
        init: str | None,
        heads: Selector = None,
        *,
        example: Input | None = None,
        seed: int | None = None,
        nested: bool = False,
    ) -> None:
        check_count("members", members)
        if init is not None:
            check_choice("init", init, INITS)
        if heads is not None and init != "heads":
            raise ValueError(f"heads={heads!r} needs init='heads', got init={init!r}")
        check_seed(seed)
        self._factory = None if isinstance(model, nn.Module) else model
        self._seed, self._states = seed, list[State]()
        self._own: dict[str, CustomInitialization] | None = None
        self._built = weakref.WeakSet[nn.Module]()
        self._typed = init is not None
        self._selected, self._example = heads, example
        self.mode = init or "fresh"
        self.fresh = self.mode == "fresh"
        """True if all weights are new random ones."""
        self.redraws = self.fresh and self._factory is None
        """True if the layers' own rules draw all weights, and not a factory."""
        with self.seeded():
            self.given = build_network(model)
            """The given network or multitude, or the factory's."""
        self.network = check_model(self.given, nested)
        """The network to convert; it does not change."""

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Seed torch's random numbers; continue where the last `with` of this method stopped."""
        with initializing(), seeded(self._seed):
            for generator, state in self._states:
                generator.set_state(state)
            yield
            if self._seed is not None:
                self._states = torch_states(tuple(self.given.parameters()))

    # -- networks ----------------------------------------------------------------------------------------

    def next_network(self) -> nn.Module:
        """Return the network for the next member; a factory builds a new one."""
        if self._factory is None:
            return self.network
        given = build_network(self._factory) if self._built else self.given
        if given in self._built:
            raise ValueError("model must build a new network in every call, got the same one twice")
        self._built.add(given)
        return check_model(given, nested=True)

    def initialize(self, network: nn.Module) -> nn.Module:
        """Set the initial weights of a copy of the network, of any width, in place."""
        if self.redraws:
            return reinitialize(network, self.own)
        return reinitialize(network, only=self.heads) if self.mode == "heads" else network

    def require_distinct(self, networks: Iterable[nn.Module], ways_out: str) -> Iterator[nn.Module]:
        """Yield the members' networks; raise an error if one equals the first, since they would learn the same.

        Equal networks with stochastic layers are allowed: they learn from different draws.
        """
        first: nn.Module | None = None
        for network in networks:
            if first is None:
                first = network
            elif _same(first, network) and not stochastic_layers(network):
                raise ValueError(self.same_network_error(ways_out))
            yield network

    def same_network_error(self, ways_out: str) -> str:
        """Return the error message for members that would all start with the same weights."""
        same = "so all members would be the same network before and after training on the same batches"
        if self._factory is not None and self.mode != "heads":
            return f"model builds the same network in every call, {same}: draw its weights at random, or {ways_out}"
        if self.fresh:
            return f"model has no parameter that its layers reinitialize, {same}: pass a function that builds it"
        return f"init={self.mode!r} keeps the weights, {same}: {ways_out}"

    # -- weights that rules do not reinitialize ----------------------------------------------------------

    @cached_property
    def heads(self) -> list[str]:
        """The names of the output layers, which get new random weights."""
        return output_layers(self.network, self._selected, self._example)

    @property
    def own(self) -> dict[str, CustomInitialization]:
        """The parameters that their layers' rules do not initialize, by name; the first access warns about them."""
        if self._own is None:
            self._own = self._compare_with_rules()
        return self._own

    def _compare_with_rules(self) -> dict[str, CustomInitialization]:
        with initializing():
            own, trained = compare_with_rules(self.network)
        messages = []
        if trained is not None and not self._typed:
            messages.append(
                f"model looks trained ({trained}), and its weights are replaced by new random ones: pass init='heads' "
                "to keep all but the output layers, or init='fresh' to confirm"
            )
        kept, drawn = ([n for n, how in own.items() if not how.exact and how.kept is kept] for kept in (True, False))
        parts = [f"kept the values of {_listed(kept)}, which no layer's own rule gives"] if kept else []
        if drawn:
            parts.append(f"drew {_listed(drawn)} with the mean and deviation in model, not by the layers' own rules")
        if parts:
            way_out = "pass a function that builds the network, lambda: Net(), to initialize all by its code"
            messages.append(f"{'; '.join(parts)}; {way_out}")
        if messages:
            warnings.warn("; ".join(messages), stacklevel=_outside())
        return own

    def summary_notes(self, notes: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return notes for `summary()`, by layer: the method's own, and those on initial weights."""
        texts = {name: [text] for name, text in (notes or {}).items()}
        if self.mode == "heads":
            for name in self.heads:
                texts.setdefault(name, []).append("new random weights")
        for name, how in (self.own if self.redraws else {}).items():
            layer, _, own = name.rpartition(".")
            texts.setdefault(layer, []).append(f"{own} {'kept' if how.kept else 'drawn as in model'}: {how.reason}")
        return {name: "; ".join(each) for name, each in texts.items()}


def _listed(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def _same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def _outside() -> int:
    """Return the stack level of the first frame outside of this library, for the caller's `warnings.warn`."""
    package = str(Path(__file__).parents[1])
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    return level
