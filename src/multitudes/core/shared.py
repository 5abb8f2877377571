"""Members that share one network's weights, and how they run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, InputError, call, input_errors, tensors_in, tile
from multitudes.core.calling import rows as some_rows
from multitudes.core.clipping import clip_each
from multitudes.core.compiling import uncompiled
from multitudes.core.copying import copied
from multitudes.core.draws.functional import to_be_kept
from multitudes.core.draws.stochastic import stochastic_layers
from multitudes.core.folded_members import FoldedMembers
from multitudes.core.lending import Attributes, checkpointed, each_from_the_same
from multitudes.core.member_layer import MemberLayer, rows_missing
from multitudes.core.multitude import Multitude
from multitudes.core.proof import alike, first_difference, kind_of, running_statistics, silent_trial, unmoved
from multitudes.core.settings import holding
from multitudes.core.tasks import Criterion
from multitudes.core.tiling import Boundary, Run, Unseen, observed, tiling

__all__ = ["MemberLayer", "SharedMembers", "Way", "rows_missing"]

MOST_ROWS = 4096
"""Of a table, the most rows that all members see side by side in evaluation on a CPU."""

LEAST_SHARED = 0.25
"""Of the multiply-adds, the share before the first member layer from which on a CPU evaluates members side by side."""

MOST_BYTES = 16e6
"""The most that all members' input of a layer takes where batched products run side by side in evaluation on a CPU."""

Way = str | Boundary
"""How members run: "late", "wide", a boundary, "tiled" or "alone" (see `SharedMembers`)."""


class SharedMembers(Multitude):
    """Members that share one network's weights, and run as one batch, tiled `[M*B, ...]`, member-major.

    Layers that tell the members apart have a `member` attribute: None when they see the tiled batch, `i` when
    they see member `i`'s rows alone. What comes before the first of them runs once for all members: that layer is the
    one that tiles (the way "late"), or a module that it lies in, with all that are called after it (a `Boundary`),
    since what is tiled must not meet what is not, as in a residual addition. Output layers may have all members'
    channels side by side instead ("wide"), for code after them that counts rows. Where none of these is the same
    computation, the input is tiled ("tiled"). In evaluation on a CPU the members run one after the other ("alone"),
    which is faster there than one large batch, but for rows of a table, and where enough comes before the first member
    layer; and wherever a tiled batch is not the same computation, because a network has its batch elsewhere, or lets
    its rows see each other. That is tried with the first input of each kind. In evaluation on a GPU members may run
    folded instead (`FoldedMembers`). Batch norms in training take their statistics over the tiled batch, all members'
    together.
    """

    found_anew = ("_draw_cache", "_folded", "_written", "_tiles")

    rows = "shared"
    """Whether the members learn from the same rows of a step, or each from its own part of them, "own"."""

    own_losses = False
    """Whether losses add up where nothing that is trained is shared, so that each member learns as it would alone."""

    def __init__(self, network: nn.Module, members: int) -> None:
        super().__init__(network, members)
        self.forget()

    def forget(self) -> None:
        super().forget()
        self._written: list[Attributes] = [{} for _ in range(self.members)]
        self._tiles: dict[Any, Way] = {}  # the ways, by mode and kind of input, and the last by mode alone
        self._folded = FoldedMembers()

    def _predictions(self, x: Input) -> Tensor:
        predictions = self._folded.predictions(self, x)
        return self.unfolded(x) if predictions is None else predictions

    def unfolded(self, x: Input) -> Tensor:
        """Predictions `[M, B, ...]` by member layers, which is how members run but in evaluation on a GPU."""
        way = self._way(x)
        if isinstance(way, Boundary):
            try:
                return self._side_by_side(way, x)
            except Unseen:
                way = self._learned(way, x)
        if way != "alone":
            return self._side_by_side(way, x)
        if torch.compiler.is_compiling():
            return torch.stack([self._alone(index, x) for index in range(self.members)])
        with each_from_the_same(self.network, self._written, self._own_buffers()) as turn:
            return torch.stack([turn(index, partial(self._alone, index, x)) for index in range(self.members)])

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
        layers = [(name, m) for name, m in self.network.named_modules() if isinstance(m, MemberLayer)]
        return {f"{name}.{own}" if name else own for name, layer in layers for own in layer.own_parameters()}

    def _own_buffers(self) -> set[str]:
        layers = [(name, m) for name, m in self.network.named_modules() if isinstance(m, MemberLayer)]
        return {f"{name}.{own}" if name else own for name, layer in layers for own in layer._buffers}

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
        """As `Multitude.loss`; with `rows="own"` the batch is divided among the members, the rest of it left out."""
        if self.rows == "shared" or not self.training:
            return super().loss(x, y, criterion, task=task, dataset_size=dataset_size, weight=weight)
        given = len(y)
        used = given - given % self.members
        if not used:
            raise InputError(f"x must have a row for each of {self.members} members, which have their own, got {given}")
        if self._way(x) == "alone":
            raise InputError("rows='own' needs members that can lie side by side in one batch")
        with input_errors(x):
            self.settle(x)
            predictions = call(self.network, some_rows(x, torch.arange(used, device=y.device)))
        parts = predictions.unflatten(0, (self.members, -1))
        targets = y[:used].unflatten(0, (self.members, -1))
        weights = [None] * self.members if weight is None else weight[:used].unflatten(0, (self.members, -1)).unbind()
        criterion = self._criterion(criterion, task, parts, targets[0])
        each = zip(parts, targets, weights, strict=True)
        losses = [criterion(part, target, weight=own) for part, target, own in each]
        return self._combine(losses) + self._divergence_of_one(dataset_size)

    def _of_first(self, x: Input) -> Tensor:
        return self._alone(0, x)

    def _prepare(self, x: Input) -> None:
        self._way(x)

    # -- ways to run -------------------------------------------------------------------------------------

    def _together(self, x: Input) -> bool:
        """Whether members run side by side whatever they share: not in evaluation on a CPU, but for rows of a table."""
        if self.training or any(t.is_cuda for t in tensors_in(x)):
            return True
        return isinstance(x, Tensor) and x.dim() == 2 and len(x) <= MOST_ROWS and x.is_floating_point()

    def _side_by_side(self, way: Way, x: Input) -> Tensor:
        if torch.compiler.is_compiling():
            with self._running(way, x):
                answer = call(self.network, tile(x, self.members) if way == "tiled" else x)
        else:
            with self._running(way, x), checkpointed(lambda: self._running(way, x), learns=True):
                answer = call(self.network, tile(x, self.members) if way == "tiled" else x)
        if way != "wide":
            return answer.unflatten(0, (self.members, -1))
        axis = self._layers()[0].axis % answer.dim()
        return answer.unflatten(axis, (self.members, -1)).movedim(axis, 0)

    def _running(self, way: Way, x: Input) -> AbstractContextManager[None]:
        """Inside, the batch is tiled where this way does it."""
        if isinstance(way, Boundary):
            return tiling(self.network, way, _batch(x), self.members)
        if way == "wide":
            return holding(self._layers(), "wide", True)
        return holding(self._layers() if way == "late" else (), "batch", _batch(x))

    def shares_much(self, x: Input) -> bool:
        """Whether so much of the network comes before the batch is tiled that running it once is what pays."""
        way, (seen, _) = self._way(x), self._seen(x)
        if way in ("tiled", "alone"):
            return False
        first = next((name for name in seen.order if isinstance(self.network.get_submodule(name), MemberLayer)), None)
        name = str(way) if isinstance(way, Boundary) else first
        return name in seen.work and seen.before(name) >= LEAST_SHARED

    def _layers(self) -> list[MemberLayer]:
        return [module for module in self.network.modules() if isinstance(module, MemberLayer)]

    def _alone(self, index: int, x: Input) -> Tensor:
        with self._as(index):
            if torch.compiler.is_compiling():
                return call(self.network, x)
            with checkpointed(lambda: self._as(index), learns=True):
                return call(self.network, x)

    def _as(self, index: int) -> AbstractContextManager[None]:
        """Inside, the network is member `index`."""
        return holding(self._layers(), "member", index)

    def _way(self, x: Input) -> Way:
        """How to run: the first way, of those that compute the least, that gives what each member gives alone.

        It is tried once for each kind of input.
        """
        if torch.compiler.is_compiling() and (self.training in self._tiles or not self._together(x)):
            return self._tiles.get(self.training, "alone")
        key = self._key(x)
        return self._tiles[key] if key in self._tiles else self._tried(x, key, key[-1])

    def _key(self, x: Input) -> tuple[bool, Any, int, bool]:
        together = self._together(x)
        rows = min(_batch(x), 2) if together else _batch(x).bit_length()  # to run together pays for small batches
        return self.training, kind_of(x), rows, together

    def _learned(self, before: Boundary, x: Input) -> Way:
        """The way for an input that comes with a tensor which others of its kind did not have."""
        key = self._key(x)
        way = self._tried(x, key, key[-1])
        if isinstance(way, Boundary):
            way = self._tiles[key] = way.joined(before)
        return way

    @uncompiled
    def _tried(self, x: Input, key: Any, together: bool) -> Way:
        if not _batch(x):
            return "tiled" if together else "alone"
        twice = torch.zeros(2, dtype=torch.int64, device=tensors_in(x)[0].device)
        way = self._found(x if _batch(x) > 1 else some_rows(x, twice), together)  # of one row, all lengths are alike
        if _batch(x) == 1 and way != "alone" and self._prove(x, way):
            way = "alone" if way == "tiled" or not together else self._found(x, together, late=False)
        self._tiles[key] = way
        # A compiler can follow no boundary, which is set by hooks.
        in_graphs = way if not isinstance(way, Boundary) else "tiled" if not self._prove(x, "tiled") else "alone"
        self._tiles[self.training] = in_graphs
        return way

    def _found(self, x: Input, together: bool, late: bool = True) -> Way:
        """The first way that is the same computation; a warning where members should run side by side and cannot."""
        trouble = ""
        with self._trial(x) as (want, doubt):
            for way in self._ways(x, together, late):
                trouble = self._trouble(x, way, want) or doubt()
                if not trouble:
                    return way
        if together:
            warnings.warn(
                f"the members' rows cannot lie side by side in one batch: {trouble}; so the members run one after "
                "the other, which is slower",
                stacklevel=2,
            )
        return "alone"

    def _ways(self, x: Input, together: bool, late: bool) -> Iterator[Way]:
        """What may be tried, those that compute the least first; with `together`, the whole batch tiled as the last."""
        if late and not to_be_kept(self.network):
            yield from self._late_ways(x, together)
        if together:
            yield "tiled"

    def _late_ways(self, x: Input, together: bool) -> Iterator[Way]:
        """The ways that run what comes before the first member layer once.

        Not where something draws before: each member has numbers of its own. Where members would else run one after the
        other, enough must come before.
        """
        layers = self._layers()
        unseen = together and not stochastic_layers(self.network) and not any(layer.many_inputs for layer in layers)
        if unseen:
            yield "late"
        seen, more = self._seen(x)
        first = next((name for name in seen.order if isinstance(self.network.get_submodule(name), MemberLayer)), None)
        if first is None:
            return
        for layer in layers:
            layer.note_rows(seen, more)
        able = [name for name in seen.around(first) if seen.may_tile(name)]
        pays = together or self._is_small(seen, layers)
        able = [name for name in able if pays or seen.before(name) >= LEAST_SHARED]
        if able[:1] == [first] and not unseen:
            yield "late"
        if able[:1] == [first] and all(layer.widens for layer in layers) and not stochastic_layers(self.network):
            yield "wide"
        yield from (seen.boundary(name, more) for name in able)
        if pays and not together:
            yield "tiled"

    def _is_small(self, seen: Run, layers: list[MemberLayer]) -> bool:
        """Whether all members' layers are batched products of little."""
        largest = max((seen.nbytes.get(layer.place, 0) for layer in layers), default=0)
        return all(layer.batched for layer in layers) and largest * self.members <= MOST_BYTES

    def _seen(self, x: Input) -> tuple[Run, Run]:
        """A run of the first member, and one with a row more; nothing where these cannot be."""
        inside = {id(module) for layer in self._layers() for module in layer.modules() if module is not layer}
        index = torch.arange(_batch(x) + 1, device=tensors_in(x)[0].device) % _batch(x)
        runs = []
        for rows in (x, some_rows(x, index)):
            try:
                with unmoved(self.network, x):
                    runs.append(observed(self.network, inside, partial(self._alone, 0, rows)))
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, IndexError, TypeError):
                return Run(), Run()
        return (runs[0], runs[1]) if runs[0].order == runs[1].order else (Run(), Run())

    # -- proofs ------------------------------------------------------------------------------------------

    @contextmanager
    def _trial(self, x: Input) -> Iterator[tuple[Callable[[], Tensor], Callable[[], str]]]:
        """Inside, nothing is left of what runs; gives what the first and the last member give alone, and the doubts."""
        found: list[Tensor] = []

        def want() -> Tensor:
            if not found:
                with_each = []
                for index in self._few():
                    with unmoved(self.network, x):
                        with_each.append(self._alone(index, x))
                found.append(torch.stack(with_each))
            return found[0]

        with running_statistics(self.network), silent_trial(self.network, x) as doubt:
            yield want, doubt

    def _few(self) -> list[int]:
        return sorted({0, self.members - 1})

    def _prove(self, x: Input, way: Way) -> str:
        with self._trial(x) as (want, doubt):
            return self._trouble(x, way, want) or doubt()

    def _trouble(self, x: Input, way: Way, want: Callable[[], Tensor]) -> str:
        """How members side by side differ from the first and the last one alone; nothing where they do not."""
        few, alone = self._few(), want()
        try:
            with unmoved(self.network, x):
                got = self._side_by_side(way, x)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, Unseen) as error:
            return f"tiled, the network fails ({str(error).splitlines()[0]})"
        if got.shape[1:] == alone.shape[1:] and alike(got[few], alone):
            return ""
        if way != "tiled":
            return "another way is tried"
        layer = first_difference(
            self.network,
            lambda: self._side_by_side(way, x),
            lambda: self._alone(few[-1], x),
            partial(_own_rows, few[-1], self.members),
        )
        return f"{layer} gives something else then" if layer else "tiled, the predictions are different ones"

    def _member(self, index: int) -> nn.Module:
        folded = {id(layer): layer.fold(index) for layer in self._layers()}
        return copied(self.network, folded)


def _batch(x: Input) -> int:
    return len(tensors_in(x)[0])


def _own_rows(index: int, members: int, tiled: Tensor) -> Tensor | None:
    """A member's rows of a tiled tensor; None where they cannot be told."""
    return tiled.unflatten(0, (members, -1))[index] if tiled.dim() and tiled.shape[0] % members == 0 else None
