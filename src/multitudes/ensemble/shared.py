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

from multitudes.draws.functional_noise import to_be_kept
from multitudes.ensemble.member_layer import member_layers
from multitudes.ensemble.multitude import Multitude
from multitudes.ensemble.runners.one_by_one import OneByOne, member_view
from multitudes.ensemble.runners.selection import SHARED, Workload, runners_for
from multitudes.ensemble.runners.side_by_side import SideBySide, Tiled
from multitudes.networks.calls import Input, InputError, input_errors, tensors_in, tile, use_of
from multitudes.networks.calls import rows as some_rows
from multitudes.networks.compiler import uncompiled
from multitudes.networks.copies import copied, share_hooks
from multitudes.networks.settings import computing_hooks
from multitudes.networks.stochastic import Stochastic
from multitudes.networks.trace import Shape, recording, unmoved
from multitudes.networks.verification import (
    FAILURES,
    Verdicts,
    difference,
    first_difference,
    rows_interact,
    running_statistics,
)
from multitudes.networks.versions import Versions
from multitudes.networks.views import copies, run, write
from multitudes.tasks import Criterion


class SharedMembers(Multitude):
    """Members that share one network's weights: a network some of whose layers differ between members.

    They run one by one; side by side under vmap, where what comes before the first layer that differs runs once; or
    tiled in one batch `[M*B, ...]`, member-major. The table in `runners/selection.py` says which are tried, in which
    order; each is verified on the first input of each kind, and one by one is always right. Batch norms in training
    take their statistics over all members' rows together.
    """

    cache_names = (*Multitude.cache_names, "_runners")

    rows = "shared"
    """The rows that a member trains on: all rows of the batch, "shared", or its own part of them, "own"."""

    own_losses = False
    """Add the members' losses where nothing trained is shared, so that each member learns as it would alone."""

    def forget(self) -> None:
        super().forget()
        self._runners = SharedRunners(self.network, self.members)

    def _predictions(self, x: Input) -> Tensor:
        return self._runners.run(x)

    @property
    def independent(self) -> bool:  # type: ignore[override]
        """True with `own_losses` if nothing trainable is shared, for example with a frozen trunk."""
        if not self.own_losses:
            return False
        own = self._own_names()
        trained = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        return bool(trained) and all(name in own for name in trained)

    def _own_names(self) -> set[str]:
        """The names of the parameters that are each member's own, `[M, ...]`."""
        layers = member_layers(self.network)
        return {f"{name}.{own}" if name else own for name, layer in layers.items() for own in layer.own_parameters()}

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradient to at most `max_norm`; each member's own where nothing that is trained is shared."""
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
        """With `rows="own"` return each member's loss on its part of the batch.

        Parts are equally large, one after the other. Where the batch cannot be divided evenly, some of its rows belong
        to two members.
        """
        if self.rows == "shared" or not self.training:
            return super()._losses(x, y, criterion, task, weight)
        parts = self._parts(len(y), y.device)
        with input_errors(x):
            self.prepare_run(x)
            divided = x if parts.numel() == len(y) else some_rows(x, parts.flatten())
            predictions = self._runners.dividing(x).divided(divided)
        weights = [None] * self.members if weight is None else weight[parts].unbind()
        own_loss = self._criterion(criterion, task, predictions, y[parts[0]]).loss
        each = zip(predictions, y[parts], weights, strict=True)
        return [own_loss(part, target, weight=own) for part, target, own in each]

    def _parts(self, rows: int, device: torch.device) -> Tensor:
        """Return the rows of each member's part of a batch, `[M, ceil(B / M)]`.

        >>> SharedMembers(nn.Linear(2, 2), 2)._parts(5, torch.device("cpu"))
        tensor([[0, 1, 2],
                [2, 3, 4]])
        """
        first = torch.arange(self.members, device=device) * rows // self.members
        return first[:, None] + torch.arange(-(-rows // self.members), device=device)

    def __getstate__(self) -> dict[str, Any]:
        """Copies keep the attributes that each member's code has written."""
        return {**super().__getstate__(), "_runners": self._runners}

    def train(self, mode: bool = True) -> SharedMembers:
        super().train(mode)
        if self._runners.one_by_one.views.views:  # a compiled graph cannot look for what has changed
            self._runners.one_by_one.current()
        return self

    # -- the protocol ------------------------------------------------------------------------------------

    def _of_first(self, x: Input) -> Tensor:
        return run(self._runners.one_by_one.current()[0], x)

    def _prepare(self, x: Input) -> None:
        if not self._runners.knows(x):
            self._runners.choose(x)

    def _member(self, index: int) -> nn.Module:
        layers = member_layers(self.network).values()
        folded = {id(layer): layer.fold(index) for layer in layers}
        for layer in layers:
            share_hooks(layer, folded[id(layer)])
        member = copied(self.network, folded)
        views = self._runners.one_by_one.views
        if views.views:
            write(member, copies(views.written(index)))
        return member


# -- how they run ------------------------------------------------------------------------------------------

Runner = OneByOne | SideBySide | Tiled

_WARNING = "Cannot batch the members of this network ({reason}); running them one after the other."


@dataclass(frozen=True)
class _Work:
    """Facts about a network, as one run shows them, on which the choice of a runner depends."""

    first: str = ""
    """The first layer that differs between members; empty where a layer draws, or nothing is known."""
    shared: float = 0.0
    """The share of the multiply-adds that comes before it."""
    products: float = inf
    """Bytes of all members' input of a layer, where all that differ are batched products."""
    hooked: bool = False
    """True where hooks see what differs between members."""
    draws: bool = False
    """True where layers draw random numbers."""
    branches: bool = False
    """True where code inspects values of the input."""


class SharedRunners:
    """The runners of a network whose members share weights, with cached findings about them.

    Copies keep the attributes that each member's code has written, and how compiled graphs run; nothing is saved.
    """

    def __init__(self, network: nn.Module, members: int) -> None:
        self.network, self.members = network, members
        self.versions = Versions(network)
        self.one_by_one = OneByOne(network, members, self.versions)
        self.tiles_in_graphs: dict[bool, bool] = {}  # by mode
        self.forget()

    def forget(self) -> None:
        """Clear the findings about inputs."""
        self.known: dict[tuple[int, Hashable], Runner] = {}  # by version and kind of input
        self.divides = Verdicts()  # whether each member can run on its own rows
        self.warned: set[str] = set()
        self.divider: tuple[int, SideBySide | Tiled] | None = None  # with the network's version

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("known", "divides", "divider", "warned")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.forget()

    def run(self, x: Input) -> Tensor:
        """Run all members, `-> [M, B, ...]`, by the runner for this kind of input, which is chosen once."""
        if torch.compiler.is_compiling():
            return self._in_graph(x)(x)
        key = self._key(x)
        if key not in self.known and _functorch.peek_interpreter_stack() is not None:
            return self.one_by_one(x)  # inside the user's own transform nothing can be compared
        runner = self.known[key] if key in self.known else self.choose(x)
        if runner is self.one_by_one:
            return runner(x)
        try:
            return runner(x)
        except torch.OutOfMemoryError:
            raise
        except FAILURES:  # on this input, as of code that inspects values, or writes what it did not write before
            predictions = self.one_by_one(x)  # an error where the input does not fit
            self.known[key] = self.one_by_one
            return predictions

    def knows(self, x: Input) -> bool:
        """Return whether the runner of inputs like `x` was looked for."""
        return self._key(x) in self.known

    def dividing(self, x: Input) -> SideBySide | Tiled:
        """Return a runner that gives each member rows of its own, verified on inputs like `x`."""
        version = self.versions.look()
        if self.divider is None or self.divider[0] != version:
            self.divider = version, Tiled(self.network, self.members) if self._tiles() else self._side_by_side()
        runner = self.divider[1]

        def find() -> str:
            member = member_view(self.network, 0)
            with running_statistics(self.network):
                trouble = self._difference(x, runner, divided=True)
                return trouble or rows_interact(self.network, lambda x: run(member, x).unsqueeze(0), x)

        if reason := self.divides.reason(version, self.network, x, find):
            raise InputError(f"rows='own' needs members that can lie side by side in one batch: {reason}")
        return runner

    def _tiles(self) -> bool:
        """Return whether all layers that differ between members take the rows of all as one batch."""
        return all(layer.tiles for layer in member_layers(self.network).values())

    def _side_by_side(self) -> SideBySide:
        return SideBySide(self.network, self.members, self.versions)

    def takes_tiled(self, x: Input) -> bool:
        """Return whether members compute in one batch `[M*B, ...]` what each computes alone."""
        return self._tiles() and not self._difference(x, Tiled(self.network, self.members))

    def _key(self, x: Input) -> tuple[int, Hashable]:
        _, kind = use_of(self.network, x)
        first = x if isinstance(x, Tensor) else tensors_in(x)[0]
        size = len(first).bit_length()  # large and small batches may differ in what pays
        return self.versions.look(), (kind, size, self.versions.hooks, torch.is_grad_enabled())

    def _in_graph(self, x: Input) -> Runner:
        """Return the runner while a graph is compiled, when nothing can be compared: the last one in this mode.

        A device that is fastest with one by one needs no look at an eager run.
        """
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
        """Look for the runner of inputs like `x`."""
        key = self._key(x)
        runner = self.known[key] = self._found(x)
        known = {number for number, _ in self.versions.snapshots.values()}
        self.known = {key: old for key, old in self.known.items() if key[0] in known}
        from_the_start = isinstance(runner, Tiled) and not runner.first
        self.tiles_in_graphs[self.network.training] = from_the_start or (
            runner is not self.one_by_one and self.takes_tiled(x)
        )
        return runner

    def _found(self, x: Input) -> Runner:
        """Return the first runner that the table names and that computes what each member computes alone."""
        if not _batch(x):
            return self.one_by_one
        work = self._work(x)
        names = self._names(x, shared=work.shared, products=work.products)
        if len(names) > 1 and work.draws and not self.network.training:  # members have random numbers of their own
            names = () if work.hooked else ("side_by_side",)
        elif len(names) > 1 and work.hooked:  # a hook cannot keep what it sees under vmap
            names = "tiled_late", "tiled", "side_by_side"
        elif len(names) > 1 and work.branches:  # another branch may let the rows of one batch affect each other
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
        """Run the first member once, to see when it calls the layers that differ."""
        member = member_view(self.network, 0)
        layers = member_layers(member)
        drawing = {name for name, module in member.named_modules() if isinstance(module, Stochastic)}
        hooked = {name for name, module in member.named_modules() if _has_hooks(module)}
        try:
            recorded = recording(member, tensors=False, work=True, looks=tensors_in(x))
            with unmoved(self.network, x), torch.no_grad(), recorded as trace:
                run(member, x)
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return _Work()
        place = next((place for place, call in enumerate(trace.calls) if call.name in layers.keys() | drawing), None)
        if place is None or to_be_kept(self.network):
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
            bool(trace.looks),
        )

    # -- verification ------------------------------------------------------------------------------------

    def _difference(self, x: Input, runner: SideBySide | Tiled, divided: bool = False) -> str:
        """Describe how members in one run differ from the first and the last one alone; "" if they agree.

        A batch of one row is verified as two rows too, since all lengths are the same for one row. With `divided`,
        members get their own rows, which are the same here.
        """
        if _batch(x) == 1:
            twice = some_rows(x, torch.zeros(2, dtype=torch.int64, device=tensors_in(x)[0].device))
            if reason := self._difference(twice, runner, divided):
                return reason
        few = sorted({0, self.members - 1})
        trial: SideBySide | Tiled = SideBySide(self.network, self.members)  # its own, to keep what code writes
        if isinstance(runner, Tiled):
            trial = Tiled(self.network, self.members, runner.first)
        with running_statistics(self.network):
            alone = [member_view(self.network, index) for index in few]

            def fast(x: Input) -> Tensor:
                if isinstance(trial, Tiled):
                    return trial(x)
                return trial.divided(tile(x, self.members)) if divided else trial(x)

            def layer() -> str:
                part = partial(_own_rows, few[-1], self.members)
                return first_difference(self.network, lambda: fast(x), lambda: run(alone[-1], x), part)

            def plain(x: Input) -> Tensor:
                return torch.stack([_unmoved(each, x) for each in alone])

            named = layer if isinstance(trial, Tiled) else None
            learns = torch.is_grad_enabled()
            reason = difference(self.network, x, lambda x: fast(x)[few], plain, gradients=learns, layer=named)
            if not reason and isinstance(trial, Tiled):  # members' rows are nearly equal, and hide what mixes them
                reason = rows_interact(self.network, lambda x: run(alone[0], x)[None], x)
        # Torch can take no such gradient through a reentrant checkpoint, where rows are tiled as they are outside.
        return "" if named is not None and "use_reentrant" in reason else reason


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks that may keep what they see: those of weight norms keep nothing."""
    return bool(module._forward_hooks) or len(module._forward_pre_hooks) > len(computing_hooks(module))


def _unmoved(network: nn.Module, x: Input) -> Tensor:
    with unmoved(network, x):
        return run(network, x)


def _batch(x: Input) -> int:
    return len(x if isinstance(x, Tensor) else tensors_in(x)[0])


def _own_rows(index: int, members: int, tiled: Tensor) -> Tensor | None:
    """Return a member's rows of a tiled tensor; None if they cannot be identified."""
    return tiled.unflatten(0, (members, -1))[index] if tiled.dim() and tiled.shape[0] % members == 0 else None
