"""Members that share no weight: a list of networks of one architecture, each an ordinary module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.draws.functional_noise import find_noise
from multitudes.ensemble.multitude import Multitude, plain
from multitudes.ensemble.runners.independent import RUNNERS, IndependentRunners
from multitudes.networks.architecture import equal, of_one_architecture, own_parameters, share_frozen, shared_parameters
from multitudes.networks.calls import Input, InputError, plain_attention
from multitudes.networks.copies import copied
from multitudes.networks.dispatch import uncompiled
from multitudes.networks.stochastic import stochastic_layers
from multitudes.tasks import Criterion


class Members(Multitude):
    """M networks of one architecture that share no weight.

    `net.member(i)` is a module of the user's own class with its own parameters, buffers and attributes. `state_dict()`
    and `named_parameters()` prefix names with the number of the member. Members share the parameters that were frozen
    and equal when the networks were combined.

    `net.runner` selects how members run: `"loop"`, one after the other; `"packed"`, channels side by side in grouped
    layers; `"vmapped"`, under `torch.vmap`; or `"auto"`, the default, the runner that is usually the fastest
    (`ensemble/runners/selection.py`).

    Args:
        networks: The members, of one architecture.
        members: Their number.
    """

    independent = True
    cache_attributes = (*Multitude.cache_attributes, "_runners", "_shared")

    def __init__(self, networks: Iterable[nn.Module], members: int) -> None:
        super().__init__(nn.ModuleList(of_one_architecture(networks)), members)
        self.training = self.network.training = self.network[0].training
        self._runner = "auto"

    network: nn.ModuleList

    def forget(self) -> None:
        super().forget()
        self._runners = IndependentRunners(self.network, isinstance(self.network[0], Multitude))
        self._shared: list[tuple[str, nn.Parameter]] = list(shared_parameters(list(self.network)).items())

    @property
    def template(self) -> nn.Module:
        """The first member; all have its class and configuration."""
        return next(iter(self.network))

    # -- runners -----------------------------------------------------------------------------------------

    @property
    def runner(self) -> str:
        return self._runner

    @runner.setter
    def runner(self, name: str) -> None:
        if name not in RUNNERS:
            raise ValueError(f"runner must be one of {', '.join(RUNNERS)}, got {name!r}")
        if name not in ("auto", "loop"):
            try:
                self._runners.prepared(name)
            except InputError as refusal:
                raise ValueError(f"runner {name!r} cannot run this network: {refusal}") from refusal
        self._runner = name

    def _predictions(self, x: Input) -> Tensor:
        if self._shared and torch.is_grad_enabled():
            self._check_frozen()
        predictions = self._runners.run(self._runner, x)
        # Members that are multitudes themselves return [S, B, ...] each.
        return predictions.flatten(0, 1) if self._runners.nested else predictions

    def refusal(self, name: str, x: Input) -> str:
        """Return why a runner cannot run inputs like `x` in the current mode; "" if it can."""
        return self._runners.refusal(name, x)

    def _prepare(self, x: Input) -> None:
        if self._runners.nested:
            for member in self.network:
                member._prepare(x)  # type: ignore[operator]
        self._runners.choose(self._runner, x)

    def _attention(self) -> AbstractContextManager[Any]:
        return plain_attention(self.template) if stochastic_layers(self.template) else nullcontext()

    def _of_first(self, x: Input) -> Tensor:
        return self._runners.loop.one(0, self.template, x)

    @uncompiled
    def find_noise(self, x: Input) -> None:
        with plain_attention():
            for index, member in enumerate(self.network):
                self.notes |= find_noise(member, x, partial(self._runners.loop.one, index, member))

    # -- shared frozen parameters ------------------------------------------------------------------------

    def unshare(self) -> Members:
        """Give each member its own copy of the shared frozen parameters; return the multitude."""
        own_parameters(list(self.network[1:]), {id(parameter) for _, parameter in self._shared})
        self.forget()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Members:
        """Call `nn.Module.requires_grad_`; before training shared parameters, give each member its own copy."""
        if requires_grad:
            self.unshare()
        super().requires_grad_(requires_grad)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Give each member its own copy of shared parameters whose values differ in the state."""
        different = {
            id(parameter)
            for name, parameter in self._shared
            if not _all_equal([state_dict.get(f"{prefix}{index}.{name}") for index in range(self.members)])
        }
        if different:
            own_parameters(list(self.network[1:]), different)
            self.forget()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Call `nn.Module.load_state_dict`; members get their own copies of shared parameters whose values differ."""
        keys = super().load_state_dict(state_dict, strict, assign)
        if assign and self._shared:  # each member got its own parameter, in the same memory
            for member in self.network[1:]:
                share_frozen(self.template, member)
            self.forget()
        return keys

    def _check_frozen(self) -> None:
        for name, parameter in self._shared:
            if parameter.requires_grad:
                raise InputError(
                    f"parameter {name!r} was frozen, so all members share it, and now requires a gradient: call "
                    "net.unshare() before making the optimizer to give each member its own"
                )

    # -- what Multitude asks for -------------------------------------------------------------------------

    def _losses(
        self, x: Input, y: Tensor, criterion: Criterion | None, task: str | None, weight: Tensor | None
    ) -> list[Tensor]:
        if not self._runners.nested:
            return super()._losses(x, y, criterion, task, weight)
        task = task or self.chosen_task
        return [member.loss(x, y, criterion, task=task, weight=weight) for member in self.network]  # type: ignore[operator]

    def kl(self, **prior: Any) -> Tensor:
        """Return the sum of the members' divergences."""
        if not self.divergences:
            return torch.zeros(())
        return torch.stack([term(member, **prior) for member in self.network for term in self.divergences]).sum()

    def _member(self, index: int) -> nn.Module:
        return self.network[index]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale each member's gradient to at most `max_norm`; return the norms, `[M]`."""
        return torch.stack([nn.utils.clip_grad_norm_(member.parameters(), max_norm) for member in self.network])

    def _rows(self) -> Iterator[tuple[str, nn.Module, int]]:
        modules = [dict(member.named_modules()) for member in self.network]
        for name, layer in modules[0].items():
            own = {id(p): p.numel() for each in modules for p in each[name].parameters(recurse=False)}
            yield name, layer, sum(own.values())


def _all_equal(values: Sequence[Tensor | None]) -> bool:
    """Return whether the values of a parameter are all missing, or all present and equal."""
    there = [value for value in values if value is not None]
    return all(value is there[0] or equal(there[0], value) for value in there[1:]) and len(there) in (0, len(values))


def fuse(networks: Sequence[nn.Module], *, task: str | None = None) -> Members:
    """Combine separately built or trained networks into one multitude with exactly their predictions.

    Args:
        networks: Networks of one architecture: the same names, shapes, dtypes and settings. They are copied.
        task: The task of their predictions.

    Example:
        >>> nets = [nn.Linear(3, 2) for _ in range(4)]
        >>> net = fuse(nets)
        >>> net(torch.ones(5, 3)).shape
        torch.Size([4, 5, 2])
        >>> torch.equal(net.member(2).weight, nets[2].weight)
        True
    """
    networks = list(networks)
    if not networks:
        raise ValueError("networks must hold at least one network, got an empty list")
    for network in networks:
        if not isinstance(network, nn.Module):
            raise ValueError(f"networks must hold nn.Module objects, got {type(network).__name__}")
    return Members((copied(plain(network)) for network in networks), len(networks)).like(networks[0], task)
