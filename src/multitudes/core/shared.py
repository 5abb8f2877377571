"""Members that share one network's weights, and how they run."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, InputError, input_errors, tensors_in, use_of
from multitudes.core.calling import rows as some_rows
from multitudes.core.clipping import clip_each
from multitudes.core.compiling import uncompiled
from multitudes.core.copying import copied, share_hooks
from multitudes.core.draws.functional import to_be_kept
from multitudes.core.member_layer import member_layers
from multitudes.core.multitude import Multitude
from multitudes.core.proof import FAILURES, Verdicts, difference, first_difference, running_statistics, silent_trial
from multitudes.core.runners.one_by_one import OneByOne, member_view
from multitudes.core.runners.selection import SHARED, Use, runner_for
from multitudes.core.runners.side_by_side import SideBySide
from multitudes.core.snapshot import Versions
from multitudes.core.tasks import Criterion
from multitudes.core.tiling import Boundary, Run, Unseen, find_boundary, observed
from multitudes.core.trace import unmoved
from multitudes.core.views import copies, run, write

__all__ = ["SharedMembers"]

_WARNING = "Cannot batch the members of this network ({reason}); running them one after the other."


class SharedMembers(Multitude):
    """Members that share one network's weights: a network some of whose layers differ between members.

    They run side by side in one batch `[M*B, ...]`, member-major, or one by one, as `runners/selection.py` says. Side
    by side, what comes before the first layer that differs runs once where that is the same computation: the batch is
    tiled at a `Boundary`, as late as possible, or else as a whole. Each way is verified on the first input of each
    kind; where none computes what the members compute alone, they run one by one. Batch norms in training take their
    statistics over the tiled batch, all members' together.
    """

    found_anew = (*Multitude.found_anew, "_versions", "_runners", "_one_by_one", "_whole")

    rows = "shared"
    """The rows that a member trains on: all rows of the batch, "shared", or its own part of them, "own"."""

    own_losses = False
    """Add the members' losses where nothing trained is shared, so that each member learns as it would alone."""

    def __init__(self, network: nn.Module, members: int) -> None:
        super().__init__(network, members)
        self.forget()

    def forget(self) -> None:
        super().forget()
        self._versions = Versions(self.network)
        self._one_by_one = OneByOne(self.network, self.members, self._versions)
        self._runners: dict[Any, OneByOne | SideBySide] = {}  # by version and kind of input; and by mode, the last one
        self._whole = Verdicts()  # whether members can lie side by side in one batch from the start

    def _predictions(self, x: Input) -> Tensor:
        runner = self._runner(x)
        try:
            return runner(x)
        except Unseen:
            return self._learned(runner, x)(x)

    @property
    def independent(self) -> bool:  # type: ignore[override]
        """With `own_losses`, whether nothing that is trained is shared, as where the trunk is frozen."""
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
        return clip_each(self.parameters(), self.members, max_norm)

    def loss(
        self,
        x: Input,
        y: Tensor,
        criterion: Criterion | None = None,
        *,
        task: str | None = None,
        dataset_size: int | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Return `Multitude.loss`; with `rows="own"` the mean over members of each one's loss on its part of the batch.

        Parts are equally large, one after the other. Where the batch cannot be divided evenly, some of its rows belong
        to two members.
        """
        if self.rows == "shared" or not self.training:
            return super().loss(x, y, criterion, task=task, dataset_size=dataset_size, weight=weight)
        parts = self._parts(len(y), y.device)
        with input_errors(x):
            self.settle(x)
            self._check_divides(x)
            divided = x if parts.numel() == len(y) else some_rows(x, parts.flatten())
            predictions = SideBySide(self.network, self.members).divided(divided)
        weights = [None] * self.members if weight is None else weight[parts].unbind()
        own_loss = self._criterion(criterion, task, predictions, y[parts[0]]).loss
        each = zip(predictions, y[parts], weights, strict=True)
        losses = [own_loss(part, target, weight=own) for part, target, own in each]
        return self._combine(losses, dataset_size)

    def _parts(self, rows: int, device: torch.device) -> Tensor:
        """The rows of each member's part of a batch, `[M, ceil(B / M)]`.

        >>> SharedMembers(nn.Linear(2, 2), 2)._parts(5, torch.device("cpu"))
        tensor([[0, 1, 2],
                [2, 3, 4]])
        """
        first = torch.arange(self.members, device=device) * rows // self.members
        return first[:, None] + torch.arange(-(-rows // self.members), device=device)

    def __getstate__(self) -> dict[str, Any]:
        """Copies keep the attributes that each member's code has written."""
        return {**super().__getstate__(), "_versions": self._versions, "_one_by_one": self._one_by_one}

    def train(self, mode: bool = True) -> SharedMembers:
        super().train(mode)
        for runner in (self._one_by_one, *self._runners.values()):  # a compiled graph cannot look for what has changed
            runner.refresh()
        return self

    # -- the protocol ------------------------------------------------------------------------------------

    def _of_first(self, x: Input) -> Tensor:
        return run(self._one_by_one.views.current()[0], x)

    def _prepare(self, x: Input) -> None:
        self._runner(x)

    def _member(self, index: int) -> nn.Module:
        layers = member_layers(self.network).values()
        folded = {id(layer): layer.fold(index) for layer in layers}
        for layer in layers:
            share_hooks(layer, folded[id(layer)])
        member = copied(self.network, folded)
        views = self._one_by_one.views
        if views.views:
            write(member, copies(views.written(index)))
        return member

    def _check_divides(self, x: Input) -> None:
        """Refuse `rows="own"` where members side by side do not compute what they compute alone."""
        whole = SideBySide(self.network, self.members)
        reason = self._whole.reason(self._versions.look(), self.network, x, lambda: self._difference(x, whole))
        if reason:
            raise InputError(f"rows='own' needs members that can lie side by side in one batch: {reason}")

    # -- runners -----------------------------------------------------------------------------------------

    def _runner(self, x: Input) -> OneByOne | SideBySide:
        """The runner for this kind of input, which is looked for once."""
        if torch.compiler.is_compiling():
            # Nothing can be tried while a graph is compiled: what was found in this mode counts.
            default = self._one_by_one if runner_for(SHARED, self._use(x)) == "one_by_one" else None
            known = self._runners.get(self.training, default)
            return self._chosen(x) if known is None else known
        key = self._key(x)
        return self._runners[key] if key in self._runners else self._chosen(x)

    def _key(self, x: Input) -> tuple[int, Hashable, int]:
        mode, kind = use_of(self.network, x)
        return (
            self._versions.look(),
            kind,
            0 if mode else _batch(x).bit_length(),
        )  # large and small batches may differ in what pays

    def _use(self, x: Input, **known: Any) -> Use:
        table = isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point()
        return Use(tensors_in(x)[0].device.type, self.training, _batch(x), table, **known)

    @uncompiled
    def _chosen(self, x: Input) -> OneByOne | SideBySide:
        key = self._key(x)
        runner = self._found(x)
        self._versions.accept(list(member_layers(self.network).values()))  # they may have noted where rows are
        known = {number for number, _ in self._versions.snapshots.values()}
        self._runners = {key: old for key, old in self._runners.items() if isinstance(key, bool) or key[0] in known}
        self._runners[key] = runner
        in_graphs: OneByOne | SideBySide = runner
        if isinstance(runner, SideBySide) and runner.boundary and runner.boundary.tiled:  # by hooks
            whole = SideBySide(self.network, self.members)
            in_graphs = self._one_by_one if self._difference(x, whole) else whole
        self._runners[self.training] = in_graphs
        return runner

    def _learned(self, before: OneByOne | SideBySide, x: Input) -> OneByOne | SideBySide:
        """The runner for an input that comes with a tensor which others of its kind did not have."""
        runner = self._chosen(x)
        old, new = (getattr(each, "boundary", None) for each in (before, runner))
        if old is not None and new is not None:
            joined = SideBySide(self.network, self.members, new.joined(old), self._versions)
            runner = self._runners[self._key(x)] = runner if self._difference(x, joined) else joined
        return runner

    def _found(self, x: Input) -> OneByOne | SideBySide:
        """The first runner that the table names and that computes what each member computes alone."""
        if not _batch(x):
            return SideBySide(self.network, self.members) if self._wanted(x) else self._one_by_one
        reason = ""
        for boundary in self._boundaries(x):
            runner = SideBySide(self.network, self.members, boundary, self._versions)
            if not (reason := self._difference(x, runner)):
                return runner
        if self._wanted(x):
            warnings.warn(_WARNING.format(reason=reason), stacklevel=2)
        return self._one_by_one

    def _wanted(self, x: Input, **known: float) -> bool:
        return runner_for(SHARED, self._use(x, **known)) == "side_by_side"

    def _boundaries(self, x: Input) -> Iterator[Boundary | None]:
        """Yield the boundaries at which the batch may be tiled, the latest first; None stands for the whole input.

        Not after something has drawn random numbers, since each member has numbers of its own.
        """
        twice = torch.zeros(2, dtype=torch.int64, device=tensors_in(x)[0].device)
        x = x if _batch(x) > 1 else some_rows(x, twice)  # of one row, all lengths are the same
        layers = member_layers(self.network)
        seen, more = self._seen(x)
        first = next((name for name in seen.order if name in layers), None)
        largest = max((seen.nbytes.get(name, 0) for name in layers), default=0)
        products = {"products": self.members * largest} if all(each.batched for each in layers.values()) else {}
        if first is not None and not to_be_kept(self.network):
            for layer in layers.values():
                layer.note_rows(seen, more)
            able = [name for name in seen.around(first) if seen.may_tile(name)]
            for name in able:
                if not self._wanted(x, shared=seen.before(name), **products):
                    continue
                slots = seen.row_slots(name, more)
                for own in ({}, slots) if name == first else (slots,):
                    if (boundary := self._boundary(x, own)) is not None:
                        yield boundary
        if self._wanted(x, **products):
            yield None

    def _boundary(self, x: Input, slots: Any) -> Boundary | None:
        """The boundary that tiles these arguments; None where the network cannot run so."""

        def look(network: nn.Module) -> None:
            with running_statistics(self.network), silent_trial(self.network, x):
                run(network, x)

        try:
            return find_boundary(self.network, member_layers(self.network), slots, _batch(x), self.members, look)
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return None

    def _seen(self, x: Input) -> tuple[Run, Run]:
        """A run of the first member, and one with a row more; nothing where these cannot be."""
        member = member_view(self.network, 0)
        inside = {id(m) for layer in member_layers(member).values() for m in layer.modules() if m is not layer}
        index = torch.arange(_batch(x) + 1, device=tensors_in(x)[0].device) % _batch(x)
        runs = []
        for rows in (x, some_rows(x, index)):
            try:
                with unmoved(self.network, x):
                    runs.append(observed(member, inside, partial(run, member, rows)))
            except torch.OutOfMemoryError:
                raise
            except FAILURES:
                return Run(), Run()
        return (runs[0], runs[1]) if runs[0].order == runs[1].order else (Run(), Run())

    # -- verification ------------------------------------------------------------------------------------

    def _difference(self, x: Input, runner: SideBySide) -> str:
        """Return how members side by side differ from the first and the last one alone; "" where they agree.

        A batch of one row is verified as two rows too: of one row, all lengths are the same.
        """
        if _batch(x) == 1:
            twice = some_rows(x, torch.zeros(2, dtype=torch.int64, device=tensors_in(x)[0].device))
            if reason := self._difference(twice, runner):
                return reason
        few = sorted({0, self.members - 1})
        with running_statistics(self.network):
            alone = [member_view(self.network, index) for index in few]
            fast = SideBySide(self.network, self.members, runner.boundary)  # keeps what its code writes to itself

            def layer() -> str:
                part = partial(_own_rows, few[-1], self.members)
                return first_difference(self.network, lambda: fast(x), lambda: run(alone[-1], x), part)

            def plain(x: Input) -> Tensor:
                return torch.stack([_unmoved(each, x) for each in alone])

            return difference(self.network, x, lambda x: fast(x)[few], plain, layer=layer)


def _unmoved(network: nn.Module, x: Input) -> Tensor:
    with unmoved(network, x):
        return run(network, x)


def _batch(x: Input) -> int:
    return len(x if isinstance(x, Tensor) else tensors_in(x)[0])


def _own_rows(index: int, members: int, tiled: Tensor) -> Tensor | None:
    """A member's rows of a tiled tensor; None where they cannot be told."""
    return tiled.unflatten(0, (members, -1))[index] if tiled.dim() and tiled.shape[0] % members == 0 else None
