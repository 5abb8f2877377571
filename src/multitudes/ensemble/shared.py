"""Members that share one network's weights, and how they run."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch

from multitudes.draws.functional_noise import has_noise_to_keep
from multitudes.ensemble.member_layer import member_layers
from multitudes.ensemble.multitude import Multitude
from multitudes.ensemble.runners.one_by_one import OneByOne, member_view
from multitudes.ensemble.runners.selection import SHARED, Workload, runners_for
from multitudes.ensemble.runners.side_by_side import SideBySide, Tiled
from multitudes.networks.calls import Input, InputError, input_errors, select_rows, tensors_in, tile, verdict_key
from multitudes.networks.copies import copied, share_hooks
from multitudes.networks.dispatch import uncompiled
from multitudes.networks.settings import computing_hooks
from multitudes.networks.stochastic import Stochastic
from multitudes.networks.trace import Shape, preserve_state, recording
from multitudes.networks.verification import (
    FAILURES,
    Verdicts,
    difference,
    first_difference,
    rows_interact,
    running_statistics,
)
from multitudes.networks.versions import Versions
from multitudes.networks.views import copy_attributes, run, write_attributes
from multitudes.tasks import Criterion


class SharedMembers(Multitude):
    """Members that share the weights of one network, in which some layers differ between members.

    They run one by one; side by side under vmap, from the first layer that differs on; or tiled in one batch
    `[M*B, ...]`, member-major. The table in `runners/selection.py` lists the runners to try. Each is verified on the
    first input of each kind; one by one is always right. In training, batch norms compute their statistics over the
    rows of all members.
    """

    cache_attributes = (*Multitude.cache_attributes, "_runners")

    rows = "shared"
    """Rows that a member trains on: all rows of the batch ("shared"), or a part of its own ("own")."""

    own_losses = False
    """True to add the members' losses if nothing trained is shared, so that each member learns as it would alone."""

    def forget(self) -> None:
        super().forget()
        self._runners = SharedRunners(self.network, self.members)

    def _predictions(self, x: Input) -> Tensor:
        return self._runners.run(x)

    @property
    def independent(self) -> bool:  # type: ignore[override]
        """True if `own_losses` is set and nothing trained is shared, for example with a frozen trunk."""
        if not self.own_losses:
            return False
        own = self._own_names()
        trained = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        return bool(trained) and all(name in own for name in trained)

    def _own_names(self) -> set[str]:
        """Return the names of the parameters that hold one tensor per member, `[M, ...]`."""
        layers = member_layers(self.network)
        return {f"{name}.{own}" if name else own for name, layer in layers.items() for own in layer.own_parameters()}

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradient to at most `max_norm`, per member if nothing trained is shared; return the norm(s)."""
        if not self.independent:
            return super().clip_grad_norm_(max_norm)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]  # each `[M, ...]`
        if not gradients:
            return torch.zeros(self.members)
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        scale = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))
        return norms

    def _losses(
        self, x: Input, y: Tensor, criterion: Criterion | None, task: str | None, weight: Tensor | None
    ) -> list[Tensor]:
        """With `rows="own"`, return each member's loss on its part of the batch."""
        if self.rows == "shared" or not self.training:
            return super()._losses(x, y, criterion, task, weight)
        parts = self._parts(len(y), y.device)
        with input_errors(x):
            self.prepare_run(x)
            divided = x if parts.numel() == len(y) else select_rows(x, parts.flatten())
            predictions = self._runners.runner_for_own_rows(x).run_own_rows(divided)
        weights = [None] * self.members if weight is None else weight[parts].unbind()
        own_loss = self._criterion(criterion, task, predictions, y[parts[0]]).loss
        each = zip(predictions, y[parts], weights, strict=True)
        return [own_loss(part, target, weight=own) for part, target, own in each]

    def _parts(self, rows: int, device: torch.device) -> Tensor:
        """Return the rows of each member's part of a batch, `[M, ceil(B / M)]`; parts overlap if M does not divide B.

        >>> SharedMembers(nn.Linear(2, 2), 2)._parts(5, torch.device("cpu"))
        tensor([[0, 1, 2],
                [2, 3, 4]])
        """
        first = torch.arange(self.members, device=device) * rows // self.members
        return first[:, None] + torch.arange(-(-rows // self.members), device=device)

    def __getstate__(self) -> dict[str, Any]:
        """Keep the attributes that each member's code has written."""
        return {**super().__getstate__(), "_runners": self._runners}

    def train(self, mode: bool = True) -> SharedMembers:
        super().train(mode)
        if self._runners.one_by_one.views.views:  # compiled graphs cannot check for changes
            self._runners.one_by_one.current()
        return self

    # -- what Multitude asks for -------------------------------------------------------------------------

    def _of_first(self, x: Input) -> Tensor:
        return run(self._runners.one_by_one.current()[0], x)

    def _prepare(self, x: Input) -> None:
        if self._runners.key(x) not in self._runners.known:
            self._runners.choose(x)

    def _member(self, index: int) -> nn.Module:
        layers = member_layers(self.network).values()
        folded = {id(layer): layer.fold(index) for layer in layers}
        for layer in layers:
            share_hooks(layer, folded[id(layer)])
        member = copied(self.network, folded)
        views = self._runners.one_by_one.views
        if views.views:
            write_attributes(member, copy_attributes(views.written(index)))
        return member


# -- runners -----------------------------------------------------------------------------------------------

Runner = OneByOne | SideBySide | Tiled

_WARNING = "Cannot batch the members of this network ({reason}); running them one after the other."


@dataclass(frozen=True)
class _Work:
    """Facts from one run of a network, on which the choice of a runner depends."""

    first: str = ""
    """The first layer that differs between members; "" if a layer draws, or if unknown."""
    shared: float = 0.0
    """The share of the multiply-adds before that layer."""
    products: float = inf
    """Bytes of all members' largest layer input, if all layers that differ are batched products."""
    hooked: bool = False
    """True if hooks receive tensors that differ between members."""
    draws: bool = False
    """True if layers draw random numbers."""
    branches: bool = False
    """True if code inspects values of the input."""


class SharedRunners:
    """The runners of a network whose members share weights, with a cache of choices and verdicts; not saved.

    Copies keep the attributes that each member's code has written, and how compiled graphs run.
    """

    def __init__(self, network: nn.Module, members: int) -> None:
        self.network, self.members = network, members
        self.versions = Versions(network)
        self.one_by_one = OneByOne(network, members, self.versions)
        self.tiles_in_graphs: dict[bool, bool] = {}  # by mode
        self.forget()

    def forget(self) -> None:
        """Clear the cache."""
        self.known: dict[tuple[int, Hashable], Runner] = {}  # by version and kind of input
        self.own_rows_verdicts = Verdicts()
        self.warned: set[str] = set()
        self.own_rows_runner: tuple[int, SideBySide | Tiled] | None = None  # with the network's version

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("network", "members", "versions", "one_by_one", "tiles_in_graphs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.forget()

    def run(self, x: Input) -> Tensor:
        """Run all members, `-> [M, B, ...]`, by the runner chosen for this kind of input."""
        if torch.compiler.is_compiling():
            return self._in_graph(x)(x)
        key = self.key(x)
        if key not in self.known and _functorch.peek_interpreter_stack() is not None:
            return self.one_by_one(x)  # nothing can be compared inside a user's transform
        runner = self.known[key] if key in self.known else self.choose(x)
        if runner is self.one_by_one:
            return runner(x)
        try:
            return runner(x)
        except torch.OutOfMemoryError:
            raise
        except FAILURES:  # such as code that branches on values or writes attributes for this input only
            predictions = self.one_by_one(x)  # raises if the input does not fit
            self.known[key] = self.one_by_one
            return predictions

    def runner_for_own_rows(self, x: Input) -> SideBySide | Tiled:
        """Return a runner that runs each member on its own rows, verified on inputs like `x`."""
        version = self.versions.look()
        if self.own_rows_runner is None or self.own_rows_runner[0] != version:
            runner = Tiled(self.network, self.members) if self._tiles() else self._side_by_side()
            self.own_rows_runner = version, runner
        runner = self.own_rows_runner[1]

        def find() -> str:
            member = member_view(self.network, 0)
            with running_statistics(self.network):
                reason = self._difference(x, runner, own_rows=True)
                if isinstance(runner, Tiled):
                    return reason
                return reason or rows_interact(self.network, lambda x: run(member, x).unsqueeze(0), x)

        if reason := self.own_rows_verdicts.reason(version, self.network, x, find):
            raise InputError(f"rows='own' needs a network that runs the rows of all members in one batch: {reason}")
        return runner

    def _tiles(self) -> bool:
        """Return whether all layers that differ between members support a tiled batch."""
        return all(layer.tiles for layer in member_layers(self.network).values())

    def _side_by_side(self) -> SideBySide:
        return SideBySide(self.network, self.members, self.versions)

    def takes_tiled(self, x: Input) -> bool:
        """Return whether a tiled batch gives the predictions of each member alone."""
        return self._tiles() and not self._difference(x, Tiled(self.network, self.members))

    def key(self, x: Input) -> tuple[int, Hashable]:
        """Return the network's version and the kind of input, by which runners are cached."""
        _, kind = verdict_key(self.network, x)
        first = x if isinstance(x, Tensor) else tensors_in(x)[0]
        size = len(first).bit_length()  # the fastest runner depends on the batch size
        return self.versions.look(), (kind, size, self.versions.hooks, torch.is_grad_enabled())

    def _in_graph(self, x: Input) -> Runner:
        """Return the runner during compilation, when nothing can be compared: the last one chosen in this mode."""
        if self.network.training not in self.tiles_in_graphs and self._names(x)[0] != "one_by_one":
            self.choose(x)
        return Tiled(self.network, self.members) if self.tiles_in_graphs.get(self.network.training) else self.one_by_one

    def _names(self, x: Input, **known: Any) -> tuple[str, ...]:
        """Return the names of the runners to try, in order."""
        table = isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point()
        return runners_for(
            SHARED, Workload(tensors_in(x)[0].device.type, self.network.training, _batch(x), table, **known)
        )

    @uncompiled
    def choose(self, x: Input) -> Runner:
        """Choose the runner of inputs like `x`, and cache it."""
        key = self.key(x)
        runner = self.known[key] = self._first_correct(x)
        known = {number for number, _ in self.versions.snapshots.values()}
        self.known = {key: old for key, old in self.known.items() if key[0] in known}
        from_the_start = isinstance(runner, Tiled) and not runner.first
        self.tiles_in_graphs[self.network.training] = from_the_start or (
            runner is not self.one_by_one and self.takes_tiled(x)
        )
        if not self.tiles_in_graphs[self.network.training]:
            self.one_by_one.current()  # a compiled graph cannot make its views
        return runner

    def _first_correct(self, x: Input) -> Runner:
        """Return the first runner of the table that gives the predictions of each member alone."""
        if not _batch(x):
            return self.one_by_one
        work = self._work(x)
        names = self._names(x, shared=work.shared, products=work.products)
        if len(names) > 1 and work.draws and not self.network.training:  # each member draws its own numbers
            names = () if work.hooked else ("side_by_side",)
        elif len(names) > 1 and work.hooked:  # a hook may store tensors, which vmap invalidates
            names = "tiled_late", "tiled", "side_by_side"
        elif len(names) > 1 and work.branches:  # rows of one batch may affect each other in another branch
            names = "side_by_side", "tiled_late", "tiled"
        reasons = []
        for name in names:
            if name == "one_by_one" or (name != "side_by_side" and not self._tiles()):
                continue
            if name == "tiled_late" and not work.first:
                continue
            runner: SideBySide | Tiled = self._side_by_side()
            if name != "side_by_side":
                first = work.first if name == "tiled_late" else ""
                runner = Tiled(self.network, self.members, first, self.versions)
            if not (reason := self._difference(x, runner)):
                return runner
            reasons.append(f"{name.replace('_', ' ')}, {reason}")
        if reasons and (reason := "; ".join(reasons)) not in self.warned:
            self.warned.add(reason)
            warnings.warn(_WARNING.format(reason=reason), stacklevel=2)
        return self.one_by_one

    def _work(self, x: Input) -> _Work:
        """Run the first member once and record when it calls the layers that differ."""
        member = member_view(self.network, 0)
        layers = member_layers(member)
        drawing = {name for name, module in member.named_modules() if isinstance(module, Stochastic)}
        hooked = {name for name, module in member.named_modules() if _has_hooks(module)}
        try:
            recorded = recording(member, tensors=False, work=True, inspected=tensors_in(x))
            with preserve_state(self.network, x), torch.no_grad(), recorded as trace:
                run(member, x)
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return _Work()
        place = next((place for place, call in enumerate(trace.calls) if call.name in layers.keys() | drawing), None)
        if place is None or has_noise_to_keep(self.network):
            return _Work()
        first, after = trace.calls[place], trace.calls[place:]
        given = [value for call in after if call.name in layers for value in call.args if isinstance(value, Shape)]
        largest = max((value.nbytes for value in given), default=0)
        return _Work(
            "" if drawing else first.name,
            first.before / max(1, trace.multiply_adds),
            self.members * largest if all(layer.batched for layer in layers.values()) else inf,
            not hooked.isdisjoint(call.name for call in (*first.inside, *after)),
            bool(drawing),
            bool(trace.inspections),
        )

    # -- verification ------------------------------------------------------------------------------------

    def _difference(self, x: Input, runner: SideBySide | Tiled, own_rows: bool = False) -> str:
        """Describe how the first or the last member differs from itself alone; "" if they agree.

        A batch of one row is also verified as two rows, since one row hides errors of broadcasting.
        """
        if _batch(x) == 1:
            twice = select_rows(x, torch.zeros(2, dtype=torch.int64, device=tensors_in(x)[0].device))
            if reason := self._difference(twice, runner, own_rows):
                return reason
        few = sorted({0, self.members - 1})
        trial: SideBySide | Tiled = SideBySide(self.network, self.members)  # a new one: code may write attributes
        if isinstance(runner, Tiled):
            trial = Tiled(self.network, self.members, runner.first)
        with running_statistics(self.network):
            alone = [member_view(self.network, index) for index in few]

            def fast(x: Input) -> Tensor:
                if isinstance(trial, Tiled):
                    return trial(x)
                return trial.run_own_rows(tile(x, self.members)) if own_rows else trial(x)

            def layer() -> str:
                part = partial(_own_rows, few[-1], self.members)
                return first_difference(self.network, lambda: fast(x), lambda: run(alone[-1], x), part)

            def plain(x: Input) -> Tensor:
                return torch.stack([_unmoved(each, x) for each in alone])

            named = layer if isinstance(trial, Tiled) else None
            learns = torch.is_grad_enabled()
            reason = difference(self.network, x, lambda x: fast(x)[few], plain, gradients=learns, layer=named)
            if isinstance(trial, Tiled):
                if "use_reentrant" in reason:  # a reentrant checkpoint does not support the comparison of gradients
                    reason = ""
                # Members' rows are nearly equal in the comparison, which hides what mixes them.
                reason = reason or rows_interact(self.network, lambda x: run(alone[0], x)[None], x)
        return reason


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, except those that compute weights."""
    return bool(module._forward_hooks) or len(module._forward_pre_hooks) > len(computing_hooks(module))


def _unmoved(network: nn.Module, x: Input) -> Tensor:
    with preserve_state(network, x):
        return run(network, x)


def _batch(x: Input) -> int:
    return len(x if isinstance(x, Tensor) else tensors_in(x)[0])


def _own_rows(index: int, members: int, tiled: Tensor) -> Tensor | None:
    """Return a member's rows of a tiled tensor; None if they cannot be identified."""
    return tiled.unflatten(0, (members, -1))[index] if tiled.dim() and tiled.shape[0] % members == 0 else None
